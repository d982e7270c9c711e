"""Where the bytes of a read land, and what is held until nothing can touch them any more.

A request of the disk is a *piece*: a run of small adjacent records, or a part of one large record. A landing holds what
its pieces need (file, scratch, slots of the DRAM tier) until each has settled and no decoder needs it. The checksum of
a large record is computed piece by piece while the others are still on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from perdure import codecs, limits
from perdure.buffers import Parts
from perdure.catalog.api import RECORD
from perdure.pool.dram import Slot

Row = tuple[Any, ...]
"""A catalog record as a tuple in RECORD order: ten times cheaper to look at than an element of the array."""

SEGMENT, TENANT, OFFSET, STORED, CODEC, BLOCK_BYTES, EXPIRES, EPOCH, DURABILITY, RETENTION, CIPHER = map(
    (RECORD.names or ()).index,
    ("segment", "tenant", "offset", "stored_bytes", "codec", "block_bytes", "expires_s", "tenant_epoch", "durability",
     "retention", "cipher"),
)  # fmt: skip


class BlockStatus(IntEnum):
    """What became of one block of a read."""

    FOUND = 0
    MISSING = 1  # not stored, expired, or its file is gone or cut short
    CORRUPT = 2  # stored, but what is on the disk does not verify; never delivered
    DENIED = 3  # policy does not let this caller have it
    LATE = 4  # not there by the deadline


# An attribute of an enum costs as much as a checksum of 4 KiB.
FOUND, LATE = int(BlockStatus.FOUND), int(BlockStatus.LATE)


@dataclass(slots=True, eq=False)
class Plan:
    """One read and its outcome. All sequences have one entry per block; rows are catalog records as tuples (`Row`)."""

    keys: Sequence[bytes]
    keyspaces: Sequence[bytes]
    rows: Sequence[Row]
    destinations: Sequence[Parts]
    element_bytes: int
    deadline: float | None
    direct: bool = False
    domain: bytes = b""  # whose memory of the DRAM tier may be used (tenant id)
    raw: bool = (
        False  # deliver stored bytes, decrypted but not decoded (copy-forward, verify); so long are destinations
    )
    statuses: NDArray[np.uint8] = field(init=False)
    problems: dict[int, str] = field(init=False)
    far: set[int] = field(init=False)  # asked of the cold tier
    unread: dict[int, OSError] = field(init=False)  # those of the problems where the disk gave no bytes to judge
    _outstanding: int = field(init=False, default=0)
    _settled: threading.Event | None = field(init=False, default=None)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.statuses = np.full(len(self.keys), LATE, np.uint8)
        self.problems, self.unread, self.far = {}, {}, set()

    def encoded(self, position: int) -> bool:
        """Whether the stored bytes must be decoded on delivery."""
        return not self.raw and self.rows[position][CODEC] != codecs.NONE

    def begin(self) -> None:
        with self._lock:
            self._outstanding += 1

    def end(self) -> None:
        with self._lock:
            self._outstanding -= 1
            if self._outstanding == 0 and self._settled is not None:
                self._settled.set()

    def unsettled(self) -> threading.Event | None:
        """None when nothing can touch memory on behalf of this plan any more, else an event that says when."""
        with self._lock:
            if self._outstanding == 0:
                return None
            self._settled = self._settled or threading.Event()
            return self._settled


@dataclass(slots=True, eq=False)
class Block:
    """Where one block's record lands. `slot`: memory of the DRAM tier, until it is published or given back."""

    position: int
    header: memoryview
    payload: Parts
    slot: Slot | None
    in_place: bool  # the payload is the caller's memory
    sealed: memoryview | None = None  # ciphertext, and behind it room for its tag; `payload` is where it is
    far: bool = False  # from the cold tier


@dataclass(slots=True)
class Area:
    """A stretch of memory that takes the next bytes of a record; `payload_bytes` of it (from its start) are payload."""

    view: memoryview
    payload_bytes: int


@dataclass(slots=True)
class Piece:
    """One request: `offset` from the start of the run, where its bytes go, and which of them are payload."""

    offset: int
    buffers: list[memoryview]
    payload: list[memoryview]


def cut(areas: Sequence[Area], io_bytes: int) -> list[Piece]:
    """Pieces of about equal size, whole pages, that carry at most `io_bytes` of payload each."""
    page, total = limits.page_bytes, sum(area.view.nbytes for area in areas)
    count = max(1, -(-(total - page) // io_bytes))
    limit = -(-total // count // page) * page
    pieces: list[Piece] = []
    at, room = 0, 0
    for area in areas:
        start, size = 0, area.view.nbytes
        while start < size:
            if room == 0:
                pieces.append(Piece(at, [], []))
                room = limit
            end = min(size, start + room)
            pieces[-1].buffers.append(area.view[start:end])
            if start < area.payload_bytes:
                pieces[-1].payload.append(area.view[start : min(end, area.payload_bytes)])
            at, room, start = at + end - start, room - (end - start), end
    return pieces


class Landing:
    """The pieces of one run of records. `blocks` are complete when `arrived` has returned True."""

    def __init__(self, plan: Plan, blocks: list[Block], pieces: Sequence[Piece], release: Callable[[], None]):
        self.blocks, self.error = blocks, None
        self._plan, self._release, self._pieces = plan, release, pieces
        self._holds = len(pieces)
        self._here = [False] * len(pieces)
        self._next, self._hashing = 0, False
        self._hash = xxhash.xxh3_128() if len(pieces) > 1 else None
        self._lock = threading.Lock()
        plan.begin()

    error: OSError | None

    def arrived(self, number: int, error: OSError | None) -> bool:
        """Piece `number` has ended; True for the call that completes the landing (exactly one, if all end)."""
        if self._hash is None:
            self.error = error
            return True
        with self._lock:
            self._here[number] = True
            self.error = self.error or error
            if self._hashing:
                return False
            self._hashing = True
        while True:
            with self._lock:
                if self._next == len(self._here) or not self._here[self._next]:
                    self._hashing = False
                    return self._next == len(self._here)
                piece = self._pieces[self._next]
                self._next += 1
            if self.error is None:
                for view in piece.payload:
                    self._hash.update(view)

    def tag(self) -> bytes | None:
        """Checksum of the payload where it was computed on the way, else None."""
        return None if self._hash is None else self._hash.digest()

    def hold(self) -> None:
        with self._lock:
            self._holds += 1

    def drop(self) -> None:
        with self._lock:
            self._holds -= 1
            last = self._holds == 0
        if last:
            self._release()
            self._plan.end()
