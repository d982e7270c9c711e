"""What the verbs answer: per-block statuses, the usable prefix, bytes and time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from perdure.segments.landing import BlockStatus


class WriteStatus(IntEnum):
    """What became of one block of a write."""

    STORED = 0
    EXISTS = 1  # a copy at least as durable is there; nothing was written
    REJECTED = 2  # not admitted, or no room; see `reasons`
    LATE = 3  # not stored by the deadline; the block is not visible
    FAILED = 4  # disk or catalog error; the block is not visible, see `reasons`


@dataclass(slots=True)
class ReadReport:
    """Outcome of a read.

    statuses: BlockStatus per block, uint8 (n,). usable: leading FOUND blocks, what may be attended to. bytes: KV bytes
    delivered (all FOUND blocks); from_memory: how many blocks came from the DRAM tier; from_cold: from the object
    store (0 where a service has it open). problems: position -> what did not verify. A block that is not FOUND: its
    memory holds nothing of meaning.

    With `direct=True` a LATE block's memory may still be written by the device: it must not be reused before
    `wait_settled()` returns True. Without `direct` that cannot happen.
    """

    statuses: NDArray[np.uint8]
    usable: int
    bytes: int
    seconds: float
    from_memory: int = 0
    from_cold: int = 0
    problems: dict[int, str] = field(default_factory=dict)
    _settled: threading.Event | None = None
    _settlers: list[Callable[[float | None], bool]] = field(default_factory=list)

    def count(self, status: BlockStatus) -> int:
        return int(np.count_nonzero(self.statuses == status))

    def wait_settled(self, timeout_s: float | None = None) -> bool:
        """True when nothing can touch the caller's memory any more on behalf of this read."""
        return all(wait(timeout_s) for wait in self._settlers) and (
            self._settled is None or self._settled.wait(timeout_s)
        )

    def settle_by(self, wait: Callable[[float | None], bool]) -> None:
        """There is someone else to wait for: `wait` gets the timeout and says whether it has settled."""
        self._settlers.append(wait)


@dataclass(slots=True)
class WriteReport:
    """Outcome of a write. statuses: WriteStatus per block, uint8 (n,). stored: blocks now stored by this call.

    bytes: their KV bytes; stored_bytes: what they take on the disk. reasons: position -> why it was not stored.

    Memory that was registered with a service may still be read for it after a call that was not answered in time: it
    must not be changed before `wait_settled()` returns True. Other memory never is.
    """

    statuses: NDArray[np.uint8]
    stored: int
    bytes: int
    stored_bytes: int
    seconds: float
    reasons: dict[int, str] = field(default_factory=dict)
    _settlers: list[Callable[[float | None], bool]] = field(default_factory=list)

    def wait_settled(self, timeout_s: float | None = None) -> bool:
        """True when nothing can read the caller's memory any more on behalf of this write."""
        return all(wait(timeout_s) for wait in self._settlers)

    def settle_by(self, wait: Callable[[float | None], bool]) -> None:
        """There is someone else to wait for, as of a read."""
        self._settlers.append(wait)

    def count(self, status: WriteStatus) -> int:
        return int(np.count_nonzero(self.statuses == status))

    @property
    def durable(self) -> bool:
        """Every block of the call is there with the durability asked for."""
        return bool((self.statuses <= WriteStatus.EXISTS).all())
