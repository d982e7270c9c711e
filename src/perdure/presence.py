"""Presence index: key fingerprints in flat arrays, so that thousands of keys are asked for in microseconds.

Contract
- A hint in front of the catalog. An entry says that a key with this fingerprint was published and not seen to go;
  whoever uses it verifies the record after the read. An absent fingerprint is never reported present.
- Insertion is lossless: a full bucket overflows into the next one, the table grows by doubling. Only `max_keys` drops
  keys (the coldest), and then `complete` is False: a negative answer must fall through to the catalog.
- Readers (`probe`, `prefix`, `segments_of`, `columns`, `changed_since`) take no lock. Beside a writer their answer may
  be as old as the start of the call, a key inserted or removed during the call counts either way, and a key that stays
  is found throughout. `segment`, `recency` and `expires_s` read beside a writer may be those of a slot's previous key.
- Writers serialise on one lock. While they hold it they call nobody but a `Mirror`, which must not wait for anything.
- Never: I/O, Python objects per key, anything that a process mapping the arrays read-only could not do as a reader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perdure import limits
from perdure.presence_table import (
    BATCH_KEYS,
    NO_SEGMENT,
    TOMBSTONE,
    Allocate,
    Column,
    Columns,
    Fingerprints,
    Mirror,
    Slots,
    Table,
    last_of_each,
    leading,
    locate,
    locate_mapped,
    lower_soonest,
    mapped,
    new_table,
    place,
    private,
)


class PresenceIndex:
    """Fingerprints (uint64, shape (n,): `catalog.api.fingerprints`) -> segment ordinal, recency tick, expiry.

    `capacity_keys`: room made at once. `max_keys`: bound on the entries; beyond it the coldest eighth is dropped.
    """

    def __init__(self, capacity_keys: int = 1 << 16, max_keys: int | None = None, allocate: Allocate = private) -> None:
        self._lock = threading.Lock()
        self._max_keys = max_keys
        self._allocate = allocate
        self._mirror: Mirror | None = None
        self._table = new_table(capacity_keys, allocate)
        self._count = 0
        self._tombstones = 0
        self._dropped = False
        self._complete = False

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Address space of the arrays; pages never written occupy no memory."""
        table = self._table
        return table.fp.nbytes + table.segment.nbytes + table.recency.nbytes + table.expires_s.nbytes

    @property
    def complete(self) -> bool:
        """Whether an absent key is absent from the catalog too. Read it after the probe, not before."""
        return self._complete

    def mark_complete(self) -> bool:
        """The background fill has inserted everything. False, and nothing changes, if `max_keys` dropped keys."""
        with self._lock:
            self._complete = not self._dropped
            return self._complete

    # --- readers ---------------------------------------------------------------------------------------------
    def probe(self, fp: Fingerprints) -> Slots:
        """int64 (n,): slot of each key, -1 if absent. Expiry is not considered; a rehash renumbers the slots."""
        return locate(self._table, fp)

    def prefix(self, fp: Fingerprints, now_s: int) -> int:
        """Number of leading keys that are present and not expired at `now_s` (seconds, as `expires_s`)."""
        return leading(self._table, fp, now_s)

    def segments_of(self, fp: Fingerprints) -> Column:
        """uint32 (n,): ordinal of the segment each key lies in, NO_SEGMENT where absent."""
        table = self._table
        slots = locate(table, fp)
        segment: Column = table.segment.take(slots, mode="clip")
        segment[slots < 0] = NO_SEGMENT
        return segment

    def visible(self, fp: Fingerprints, now_s: int) -> NDArray[np.bool_]:
        """bool (n,): which keys are present and not expired at `now_s`."""
        table = self._table
        slots = locate(table, fp)
        expires_s: Column = table.expires_s.take(slots, mode="clip")
        visible: NDArray[np.bool_] = (slots >= 0) & ((expires_s == 0) | (expires_s > now_s))
        return visible

    def recency_of(self, fp: Fingerprints) -> Column:
        """uint32 (n,): tick of the last use of each key, 0 where absent."""
        table = self._table
        slots = locate(table, fp)
        recency: Column = table.recency.take(slots, mode="clip")
        recency[slots < 0] = 0
        return recency

    def columns(self) -> Columns:
        """Copies of all entries in slot order, for statistics over segments (5 ms per million)."""
        table = self._table
        every = Columns(table.fp.reshape(-1), table.segment, table.recency, table.expires_s)
        return every.at((every.fp > TOMBSTONE).nonzero()[0])

    def changed_since(self, tick: int) -> tuple[Fingerprints, Column]:
        """Fingerprint and recency of the keys used after `tick`."""
        table = self._table
        slots = (table.recency > tick).nonzero()[0]
        fp, recency = table.fp.reshape(-1)[slots], table.recency[slots]
        live = fp > TOMBSTONE
        return fp[live], recency[live]

    # --- writers ---------------------------------------------------------------------------------------------
    def insert(
        self,
        fp: Fingerprints,
        *,
        segment: ArrayLike,
        recency: ArrayLike,
        expires_s: ArrayLike = 0,
        only_absent: bool = False,
    ) -> int:
        """Add or update keys; returns how many were new. Columns are scalars or (n,), each value below 2^32.

        A key that occurs twice: the last one counts. A key that is present takes the new segment and expiry and the
        later recency; with `only_absent` it stays as it is (the background fill, which may be older than the entry).
        """
        fp = mapped(fp)
        segment, recency, expires_s = (
            np.broadcast_to(np.asarray(column, np.uint32), fp.shape) for column in (segment, recency, expires_s)
        )
        new = Columns(fp, segment, recency, expires_s)
        step = BATCH_KEYS if self._max_keys is None else max(1, min(BATCH_KEYS, self._max_keys // 8))
        added = 0
        for start in range(0, len(fp), step):
            part = new.at(slice(start, start + step))
            last = last_of_each(part.fp)
            with self._lock:
                part = part if last is None else part.at(last)
                added += self._insert(part, only_absent)
                if self._mirror is not None:
                    self._mirror.inserted(part, only_absent)
        return added

    def _insert(self, new: Columns, only_absent: bool) -> int:
        table = self._table
        slots = locate_mapped(table, new.fp)
        absent = slots < 0
        if not only_absent:
            update, slots = new.at(~absent), slots[~absent]
            lower_soonest(table, update.expires_s)
            table.segment[slots] = update.segment
            table.expires_s[slots] = update.expires_s
            table.recency[slots] = np.maximum(table.recency[slots], update.recency)
        new = new.at(absent)
        added = len(new.fp)
        if added > int(table.fp.size * limits.presence_load_max) - self._count - self._tombstones:
            table = self._rehashed(self.columns(), added)
        self._tombstones -= added - place(table, new)
        self._table = table
        self._count += added
        if self._max_keys is not None and self._count > self._max_keys:
            self._evict(self._count - (self._max_keys - self._max_keys // 8))
        return added

    def _rehashed(self, entries: Columns, extra: int) -> Table:
        """A table without tombstones with room for `extra` more keys; the caller publishes it."""
        keys = len(entries.fp) + extra
        # doubled early, lest a nearly full table is rehashed again for each few tombstones
        table = new_table(max(int(self._table.fp.size * limits.presence_load_max), keys + keys // 4), self._allocate)
        for start in range(0, len(entries.fp), BATCH_KEYS):
            place(table, entries.at(slice(start, start + BATCH_KEYS)))
        self._tombstones = 0
        return table

    def _evict(self, keys: int) -> None:
        entries = self.columns()
        kept = np.argpartition(entries.recency, keys - 1)[keys:]
        kept.sort()  # slot order: neighbours stay neighbours in the new table
        table = self._rehashed(entries.at(kept), 0)
        self._dropped = True
        self._complete = False  # before the table: who misses a key then also sees that misses are not final
        self._table = table
        self._count = kept.size

    def remove(self, fp: Fingerprints, *, segment: int | None = None) -> int:
        """Forget keys (only those that lie in `segment`, if given); returns how many were there."""
        fp = mapped(fp)
        with self._lock:
            slots = locate_mapped(self._table, fp)
            slots = np.unique(slots[slots >= 0])
            if segment is not None:
                slots = slots[self._table.segment[slots] == segment]
            return self._bury(slots)

    def remove_segment(self, segment: int) -> int:
        """Forget every key that lies in a segment; returns how many."""
        return self.remove_segments([segment])

    def remove_segments(self, segments: Sequence[int]) -> int:
        """As `remove_segment`, of several in one look."""
        with self._lock:
            table = self._table
            slots = (table.fp.reshape(-1) > TOMBSTONE).nonzero()[0]
            return self._bury(slots[np.isin(table.segment[slots], np.asarray(segments, np.uint32))])

    def _bury(self, slots: Slots) -> int:
        fp = self._table.fp.reshape(-1)
        if self._mirror is not None:
            self._mirror.removed(fp[slots], self._table.segment[slots])
        fp[slots] = TOMBSTONE
        self._count -= slots.size
        self._tombstones += slots.size
        return int(slots.size)

    def touch(self, fp: Fingerprints, recency: ArrayLike) -> None:
        """The keys were used at tick `recency` (scalar or (n,)); a stored tick never decreases. Absent: ignored."""
        fp = mapped(fp)
        ticks = np.broadcast_to(np.asarray(recency, np.uint32), fp.shape)
        with self._lock:
            table = self._table
            slots = locate_mapped(table, fp)
            if len(slots) and slots.min() < 0:
                present = slots >= 0
                slots, ticks = slots[present], ticks[present]
            np.maximum.at(table.recency, slots, ticks)

    def release(self, fp: Fingerprints) -> None:
        """Hint that the keys will not be asked for again: the first to be evicted, unless they are used after all."""
        fp = mapped(fp)
        with self._lock:
            slots = locate_mapped(self._table, fp)
            self._table.recency[slots[slots >= 0]] = 0

    def clear(self) -> None:
        """Forget everything; `complete` is False until the next fill."""
        with self._lock:
            self._complete = False
            self._dropped = False
            self._table = new_table(0, self._allocate)
            self._count = self._tombstones = 0
            if self._mirror is not None:
                self._mirror.cleared()

    def mirror_to(self, mirror: Mirror) -> None:
        """From now on `mirror` is told of every change. What is there already: `copy_into`."""
        with self._lock:
            self._mirror = mirror

    def copy_into(self, take: Callable[[Columns], None]) -> None:
        """Hand all entries to `take` in one step: no change falls between them and what the mirror is told next."""
        with self._lock:
            take(self.columns())

    @property
    def table(self) -> Table:
        """As it is now: what a reader elsewhere maps."""
        return self._table
