"""Presence index: key fingerprints in flat arrays, so that thousands of keys are asked for in microseconds.

Contract
- A hint in front of the catalog. An entry says that a key with this fingerprint was published and not seen to go;
  whoever uses it verifies the record after the read. An absent fingerprint is never reported present.
- Insertion is lossless: a full bucket overflows into the next one, the table grows by doubling. Only `max_keys` drops
  keys (the coldest), and then `complete` is False: a negative answer must fall through to the catalog.
- Readers (`probe`, `prefix`, `segments_of`, `columns`, `changed_since`) take no lock. Beside a writer their answer may
  be as old as the start of the call, a key inserted or removed during the call counts either way, and a key that stays
  is found throughout. `segment`, `recency` and `expires_s` read beside a writer may be those of a slot's previous key.
- Writers serialise on one lock and never call out while they hold it.
- Never: I/O, Python objects per key, anything that a process mapping the arrays read-only could not do as a reader.

Layout: buckets of 8 fingerprints (one cache line), home bucket = low bits of the fingerprint, linear probing over
buckets. A bucket fills from slot 0 to slot 7 and slots never become empty again, so a probe that finds no match stops
when slot 7 is empty. Removal leaves a tombstone, which a later insertion may take; a rehash drops them. Keys are
uniform hashes under the keyspace's secret, so a caller cannot aim them at one bucket.
"""

from __future__ import annotations

import threading
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perdure import limits

EMPTY: Final = 0
TOMBSTONE: Final = 1
NO_SEGMENT: Final = 0xFFFF_FFFF
BUCKET_SLOTS: Final = 8

Fingerprints = NDArray[np.uint64]
Slots = NDArray[np.int64]
Column = NDArray[np.uint32]

_SMALLEST: Final = np.array(2, np.uint64)  # 0-d arrays: half the ufunc overhead of numpy or Python scalars
_BATCH_KEYS: Final = 65_536  # bounds the scratch memory of a bulk insert (64 bytes per key)


class Columns(NamedTuple):
    """Entries by column: arrays of equal length."""

    fp: Fingerprints
    segment: Column
    recency: Column
    expires_s: Column

    def at(self, which: slice | NDArray[Any]) -> Columns:
        return Columns(self.fp[which], self.segment[which], self.recency[which], self.expires_s[which])


class _Table(NamedTuple):
    """One generation of the index. Replaced as a whole by a rehash; readers keep the one they started with."""

    fp: Fingerprints  # (buckets, 8)
    segment: Column  # (slots,), as the next two
    recency: Column
    expires_s: Column
    mask: Slots  # 0-d: buckets - 1
    soonest: Column  # (1,): no key here expires before this second; 0xFFFFFFFF if none ever does


def _new_table(keys: int) -> _Table:
    """An empty table that holds `keys` keys below the load limit. Fresh zero pages cost no memory until used."""
    buckets = 1
    while buckets * BUCKET_SLOTS * limits.presence_load_max < keys:
        buckets *= 2
    slots = buckets * BUCKET_SLOTS
    raw = np.zeros(slots + BUCKET_SLOTS, np.uint64)
    skip = -(raw.__array_interface__["data"][0] // 8) % BUCKET_SLOTS  # a bucket must not straddle two cache lines
    fp = raw[skip : skip + slots].reshape(buckets, BUCKET_SLOTS)
    segment, recency, expires_s = (np.zeros(slots, np.uint32) for _ in range(3))
    return _Table(fp, segment, recency, expires_s, np.array(buckets - 1, np.int64), np.full(1, 0xFFFF_FFFF, np.uint32))


def _mapped(fp: Fingerprints) -> Fingerprints:
    """The reserved values become 2: such keys are 2^-63 of all and share an entry, as any two equal fingerprints do."""
    return np.maximum(fp, _SMALLEST, dtype=np.uint64)  # a TypeError for signed integers, which would be other keys


def _locate(table: _Table, fp: Fingerprints) -> Slots:
    """Slot of each (mapped) fingerprint, -1 where absent. Every round looks at one bucket of each open chain."""
    slots = np.full(len(fp), -1, np.int64)
    todo = np.arange(len(fp))
    bucket = fp.view(np.int64) & table.mask
    for _ in range(len(table.fp)):
        rows = table.fp.take(bucket, axis=0)
        hit = (rows == fp[:, None]).ravel().nonzero()[0]
        row = hit >> 3
        slots[todo[row]] = (bucket[row] << 3) | (hit & 7)
        overflowed = rows[:, -1] != EMPTY
        overflowed[row] = False
        left = overflowed.nonzero()[0]
        if not left.size:
            break
        todo, fp, bucket = todo[left], fp[left], (bucket[left] + 1) & table.mask
    return slots


def _leading(table: _Table, fp: Fingerprints, now_s: int) -> int:
    """Number of leading (mapped) fingerprints that are present and not expired: one round if none has overflowed."""
    bucket = fp.view(np.int64) & table.mask
    rows = table.fp.take(bucket, axis=0)
    equal = rows == fp[:, None]
    expiring = now_s >= int(table.soonest[0])
    if expiring:  # never (0) wraps to the largest value
        equal &= table.expires_s.reshape(-1, BUCKET_SLOTS).take(bucket, axis=0) - 1 >= now_s
    found = equal.view(np.uint64)  # 8 flags of a row at once: not 0 if any is set
    if np.count_nonzero(found) == len(fp):
        return len(fp)
    missing = (found.ravel() == 0).nonzero()[0]
    ended = (rows[missing, -1] == EMPTY).nonzero()[0]
    end = len(fp)
    if ended.size:
        end = int(missing[ended[0]])
        missing = missing[: ended[0]]
    if not missing.size:
        return end
    slots = _locate(table, fp[missing])
    absent = slots < 0
    if expiring:
        absent |= table.expires_s.take(slots, mode="clip") - 1 < now_s
    holes = missing[absent]
    return int(holes[0]) if holes.size else end


def _lower_soonest(table: _Table, expires_s: Column) -> None:
    soonest = int((expires_s - 1).min(initial=0xFFFF_FFFE)) + 1  # never (0) wraps to the largest value
    if soonest < int(table.soonest[0]):
        table.soonest[0] = soonest


def _place(table: _Table, new: Columns) -> int:
    """Put distinct fingerprints that the table does not hold into the first free slot of their chain.

    Returns how many slots that were never used before it took; the others were tombstones.
    """
    fp = new.fp
    if not fp.size:
        return 0
    _lower_soonest(table, new.expires_s)
    flat = table.fp.reshape(-1)
    used = 0
    todo = np.arange(len(fp))
    bucket = fp.view(np.int64) & table.mask
    while todo.size:
        order = bucket.argsort()
        todo, bucket = todo[order], bucket[order]
        position = np.arange(len(todo))
        first = np.ones(len(todo), np.bool_)
        first[1:] = bucket[1:] != bucket[:-1]
        rank = position - np.maximum.accumulate(np.where(first, position, 0))  # among the new keys of one bucket
        rows = table.fp.take(bucket, axis=0)
        free = rows <= TOMBSTONE
        nth = free.cumsum(axis=1, dtype=np.int8) - free  # free slots to the left
        row, column = (free & (nth == rank[:, None])).nonzero()
        slot, key = (bucket[row] << 3) | column, todo[row]
        used += int(np.count_nonzero(rows[row, column] == EMPTY))
        table.segment[slot] = new.segment[key]
        table.recency[slot] = new.recency[key]
        table.expires_s[slot] = new.expires_s[key]
        flat[slot] = fp[key]  # last: a reader that sees the fingerprint finds its columns
        waiting = np.ones(len(todo), np.bool_)
        waiting[row] = False
        todo, bucket = todo[waiting], (bucket[waiting] + 1) & table.mask
    return used


def _last_of_each(fp: Fingerprints) -> Slots | None:
    """Positions of the last occurrence of every fingerprint; None if all are distinct."""
    ordered = np.sort(fp)
    if not (ordered[1:] == ordered[:-1]).any():
        return None
    order = fp.argsort(kind="stable")
    ordered = fp[order]
    last = np.ones(len(fp), np.bool_)
    last[:-1] = ordered[1:] != ordered[:-1]
    return order[last]


class PresenceIndex:
    """Fingerprints (uint64, shape (n,): `catalog.api.fingerprints`) -> segment ordinal, recency tick, expiry.

    `capacity_keys`: room made at once. `max_keys`: bound on the entries; beyond it the coldest eighth is dropped.
    """

    def __init__(self, capacity_keys: int = 1 << 16, max_keys: int | None = None) -> None:
        self._lock = threading.Lock()
        self._max_keys = max_keys
        self._table = _new_table(capacity_keys)
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
        return _locate(self._table, _mapped(fp))

    def prefix(self, fp: Fingerprints, now_s: int) -> int:
        """Number of leading keys that are present and not expired at `now_s` (seconds, as `expires_s`).

        Asks in growing batches, so an early hole costs microseconds whatever the length.
        """
        table = self._table
        length, start, step = len(fp), 0, limits.presence_gallop_first_keys
        while start < length:
            part = _mapped(fp[start : start + step])
            found = _leading(table, part, now_s)
            start += found
            if found < len(part):
                break
            step = min(step * 8, limits.presence_gallop_keys_max)
        return start

    def segments_of(self, fp: Fingerprints) -> Column:
        """uint32 (n,): ordinal of the segment each key lies in, NO_SEGMENT where absent."""
        table = self._table
        slots = _locate(table, _mapped(fp))
        segment: Column = table.segment.take(slots, mode="clip")
        segment[slots < 0] = NO_SEGMENT
        return segment

    def visible(self, fp: Fingerprints, now_s: int) -> NDArray[np.bool_]:
        """bool (n,): which keys are present and not expired at `now_s`."""
        table = self._table
        slots = _locate(table, _mapped(fp))
        expires_s: Column = table.expires_s.take(slots, mode="clip")
        visible: NDArray[np.bool_] = (slots >= 0) & ((expires_s == 0) | (expires_s > now_s))
        return visible

    def recency_of(self, fp: Fingerprints) -> Column:
        """uint32 (n,): tick of the last use of each key, 0 where absent."""
        table = self._table
        slots = _locate(table, _mapped(fp))
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
        fp = _mapped(fp)
        segment, recency, expires_s = (
            np.broadcast_to(np.asarray(column, np.uint32), fp.shape) for column in (segment, recency, expires_s)
        )
        new = Columns(fp, segment, recency, expires_s)
        step = _BATCH_KEYS if self._max_keys is None else max(1, min(_BATCH_KEYS, self._max_keys // 8))
        added = 0
        for start in range(0, len(fp), step):
            part = new.at(slice(start, start + step))
            last = _last_of_each(part.fp)
            with self._lock:
                added += self._insert(part if last is None else part.at(last), only_absent)
        return added

    def _insert(self, new: Columns, only_absent: bool) -> int:
        table = self._table
        slots = _locate(table, new.fp)
        absent = slots < 0
        if not only_absent:
            update, slots = new.at(~absent), slots[~absent]
            _lower_soonest(table, update.expires_s)
            table.segment[slots] = update.segment
            table.expires_s[slots] = update.expires_s
            table.recency[slots] = np.maximum(table.recency[slots], update.recency)
        new = new.at(absent)
        added = len(new.fp)
        if added > int(table.fp.size * limits.presence_load_max) - self._count - self._tombstones:
            table = self._rehashed(self.columns(), added)
        self._tombstones -= added - _place(table, new)
        self._table = table
        self._count += added
        if self._max_keys is not None and self._count > self._max_keys:
            self._evict(self._count - (self._max_keys - self._max_keys // 8))
        return added

    def _rehashed(self, entries: Columns, extra: int) -> _Table:
        """A table without tombstones with room for `extra` more keys; the caller publishes it."""
        keys = len(entries.fp) + extra
        # doubled early, lest a nearly full table is rehashed again for each few tombstones
        table = _new_table(max(int(self._table.fp.size * limits.presence_load_max), keys + keys // 4))
        for start in range(0, len(entries.fp), _BATCH_KEYS):
            _place(table, entries.at(slice(start, start + _BATCH_KEYS)))
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
        fp = _mapped(fp)
        with self._lock:
            slots = _locate(self._table, fp)
            slots = np.unique(slots[slots >= 0])
            if segment is not None:
                slots = slots[self._table.segment[slots] == segment]
            return self._bury(slots)

    def remove_segment(self, segment: int) -> int:
        """Forget every key that lies in a segment; returns how many."""
        with self._lock:
            table = self._table
            inside = (table.segment == segment) & (table.fp.reshape(-1) > TOMBSTONE)
            return self._bury(inside.nonzero()[0])

    def _bury(self, slots: Slots) -> int:
        self._table.fp.reshape(-1)[slots] = TOMBSTONE
        self._count -= slots.size
        self._tombstones += slots.size
        return int(slots.size)

    def touch(self, fp: Fingerprints, recency: ArrayLike) -> None:
        """The keys were used at tick `recency` (scalar or (n,)); a stored tick never decreases. Absent: ignored."""
        fp = _mapped(fp)
        ticks = np.broadcast_to(np.asarray(recency, np.uint32), fp.shape)
        with self._lock:
            table = self._table
            slots = _locate(table, fp)
            if len(slots) and slots.min() < 0:
                present = slots >= 0
                slots, ticks = slots[present], ticks[present]
            np.maximum.at(table.recency, slots, ticks)

    def release(self, fp: Fingerprints) -> None:
        """Hint that the keys will not be asked for again: the first to be evicted, unless they are used after all."""
        fp = _mapped(fp)
        with self._lock:
            slots = _locate(self._table, fp)
            self._table.recency[slots[slots >= 0]] = 0

    def clear(self) -> None:
        """Forget everything; `complete` is False until the next fill."""
        with self._lock:
            self._complete = False
            self._dropped = False
            self._table = _new_table(0)
            self._count = self._tombstones = 0
