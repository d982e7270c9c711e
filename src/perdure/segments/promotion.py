"""Blocks that were used from the cold tier go back to the disk, with the bytes that were read anyway.

Contract
- In the background, bounded (`limits.promotion_bytes_max`): what does not fit is not promoted, and read from the object
  store again the next time. A read never waits for it.
- A block moves as copy-forward moves blocks (`segments.moving`); what it leaves behind goes with its cold segment.
- Room on the disk is made by demoting what is colder. Nothing is evicted for it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from perdure import limits
from perdure.buffers import Parts, copy_parts
from perdure.catalog.api import RECORD, as_keys
from perdure.errors import PerdureError
from perdure.io.memory import Scratch, ScratchLease
from perdure.segments.landing import BLOCK_BYTES, DURABILITY, EPOCH, RETENTION, STORED, TENANT, Row
from perdure.segments.moving import Mover
from perdure.segments.space import NoSpace

_BATCH_BYTES = 16 * limits.MIB


@dataclasses.dataclass(slots=True)
class PromotionCounters:
    blocks_promoted: int = 0
    bytes_promoted: int = 0
    blocks_left: int = 0  # not promoted: too many at once, no room, moved or removed meanwhile


@dataclasses.dataclass(slots=True, eq=False)
class _Used:
    key: bytes
    keyspace: bytes
    row: Row
    bytes: ScratchLease

    @property
    def kind(self) -> tuple[object, ...]:
        """What blocks of one batch have in common."""
        row = self.row
        return (self.keyspace, row[TENANT], row[BLOCK_BYTES], row[DURABILITY], row[RETENTION], row[EPOCH])


class Promoter:
    """`offer` is thread-safe; a thread of its own from the first offer on, until `close`."""

    def __init__(self, mover: Mover, scratch: Scratch, make_room: Callable[[int], bool]):
        """make_room: for so many bytes on the disk, without losing anything."""
        self.counters = PromotionCounters()
        self._mover, self._scratch, self._make_room = mover, scratch, make_room
        self._waiting: deque[_Used] = deque()
        self._known: set[bytes] = set()
        self._bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = self._busy = False

    def offer(self, key: bytes, keyspace: bytes, row: Row, stored: Parts) -> None:
        """A block was used from the cold tier; `stored`: its bytes as they are stored, not encrypted. Copied."""
        nbytes = row[STORED]
        with self._changed:
            if self._closed or key in self._known:
                return
            if self._bytes + nbytes > limits.promotion_bytes_max:
                self.counters.blocks_left += 1
                return
            self._known.add(key)
            self._bytes += nbytes
        lease = self._scratch.take(nbytes)
        copy_parts(stored, [lease.view])
        with self._changed:
            self._waiting.append(_Used(key, keyspace, row, lease))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="perdure-promote", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Until everything offered so far was promoted or given up."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._known and not self._busy, timeout_s)

    def forget(self, tenant: bytes, timeout_s: float) -> bool:
        """What was offered of a tenant's blocks is not promoted. False: some may still be written by then."""
        with self._changed:
            gone = [one for one in self._waiting if one.row[TENANT] == tenant]
            self._waiting = deque(one for one in self._waiting if one.row[TENANT] != tenant)
            self._release(gone)
            self.counters.blocks_left += len(gone)
            return self._changed.wait_for(lambda: not self._busy, timeout_s)

    def close(self) -> None:
        """Ends after the batch that is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
                if self._closed:
                    return
                batch = self._take()
                self._busy = True
            moved = 0
            try:
                moved = self._promote(batch)
            except (PerdureError, OSError):
                pass  # they stay where they are
            finally:
                self._end(batch, moved)

    def _take(self) -> list[_Used]:
        """The first waiting ones of one kind (the lock is held)."""
        kind, batch, nbytes = self._waiting[0].kind, [], 0
        rest: deque[_Used] = deque()
        for one in self._waiting:
            if one.kind == kind and nbytes < _BATCH_BYTES:
                batch.append(one)
                nbytes += one.row[STORED]
            else:
                rest.append(one)
        self._waiting = rest
        return batch

    def _promote(self, batch: list[_Used]) -> int:
        keys, payloads = as_keys(one.key for one in batch), [[one.bytes.view] for one in batch]
        old = np.array([one.row for one in batch], RECORD)
        for attempt in (1, 2):
            stands = self._mover.stands(keys, old)  # what was erased meanwhile is not written to the disk again
            if not stands.any():
                return 0
            here = np.flatnonzero(stands)
            try:
                moved = self._mover.move(
                    batch[0].keyspace, keys[here], old[here], [payloads[place] for place in here], reserve=False
                )
            except NoSpace as error:
                if attempt == 2 or not self._make_room(error.need):
                    return 0
            else:
                self.counters.bytes_promoted += int(old["stored_bytes"][here][moved].sum())
                return int(moved.sum())
        return 0

    def _end(self, batch: list[_Used], moved: int) -> None:
        self.counters.blocks_promoted += moved
        self.counters.blocks_left += len(batch) - moved
        with self._changed:
            self._release(batch)
            self._busy = False
            self._changed.notify_all()

    def _release(self, those: list[_Used]) -> None:
        """The lock is held."""
        for one in those:
            one.bytes.give_back()
            self._known.discard(one.key)
            self._bytes -= one.row[STORED]
