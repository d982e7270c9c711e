"""The open-addressed table behind the presence index, and how it is read, here and in processes that map it.

Layout: buckets of 8 fingerprints (one cache line), home bucket = low bits of the fingerprint, linear probing over
buckets. A bucket fills from slot 0 to slot 7 and slots never become empty again, so a probe that finds no match stops
when slot 7 is empty. Removal leaves a tombstone, which a later insertion may take; a rehash drops them. Keys are
uniform hashes under the keyspace's secret, so a caller cannot aim them at one bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from perdure import limits

EMPTY: Final = 0
TOMBSTONE: Final = 1
NO_SEGMENT: Final = 0xFFFF_FFFF
BUCKET_SLOTS: Final = 8

Fingerprints = NDArray[np.uint64]
Slots = NDArray[np.int64]
Column = NDArray[np.uint32]

_SMALLEST: Final = np.array(2, np.uint64)  # 0-d arrays: half the ufunc overhead of numpy or Python scalars
BATCH_KEYS: Final = 65_536  # bounds the scratch memory of a bulk insert (64 bytes per key)


class Columns(NamedTuple):
    """Entries by column: arrays of equal length."""

    fp: Fingerprints
    segment: Column
    recency: Column
    expires_s: Column

    def at(self, which: slice | NDArray[Any]) -> Columns:
        return Columns(self.fp[which], self.segment[which], self.recency[which], self.expires_s[which])


class Table(NamedTuple):
    """One generation of the index. Replaced as a whole by a rehash; readers keep the one they started with."""

    fp: Fingerprints  # (buckets, 8)
    segment: Column  # (slots,), as the next two
    recency: Column
    expires_s: Column
    mask: Slots  # 0-d: buckets - 1
    soonest: Column  # (1,): no key here expires before this second; 0xFFFFFFFF if none ever does


class Mirror(Protocol):
    """Who repeats what the index learns, for readers in other processes. Called with the index's lock held."""

    def inserted(self, new: Columns, only_absent: bool) -> None: ...

    def removed(self, fp: Fingerprints, segment: Column) -> None: ...

    def cleared(self) -> None: ...


Allocate = Callable[[int], NDArray[np.uint8]]
"""Zeroed memory of that many bytes, uint8."""

_SLOT_BYTES: Final = 8 + 3 * 4
_LINE_BYTES: Final = 64  # a bucket must not straddle two cache lines


def table_bytes(buckets: int) -> int:
    """Memory of a table: fingerprints, segment, recency, expiry, then `soonest` in a cache line of its own."""
    return buckets * BUCKET_SLOTS * _SLOT_BYTES + _LINE_BYTES


def table_over(memory: NDArray[np.uint8], buckets: int) -> Table:
    """The table that lies in `memory` (64-byte aligned, `table_bytes` long), for its maker or a reader elsewhere."""
    slots = buckets * BUCKET_SLOTS
    fp = memory[: 8 * slots].view(np.uint64).reshape(buckets, BUCKET_SLOTS)
    columns = memory[8 * slots : _SLOT_BYTES * slots].view(np.uint32).reshape(3, slots)
    soonest = memory[_SLOT_BYTES * slots :][:4].view(np.uint32)
    return Table(fp, columns[0], columns[1], columns[2], np.array(buckets - 1, np.int64), soonest)


def new_table(keys: int, allocate: Allocate) -> Table:
    """An empty table that holds `keys` keys below the load limit. Fresh zero pages cost no memory until used."""
    buckets = 1
    while buckets * BUCKET_SLOTS * limits.presence_load_max < keys:
        buckets *= 2
    table = table_over(allocate(table_bytes(buckets)), buckets)
    table.soonest[0] = 0xFFFF_FFFF
    return table


def private(nbytes: int) -> NDArray[np.uint8]:
    raw = np.zeros(nbytes + _LINE_BYTES, np.uint8)
    skip = -raw.__array_interface__["data"][0] % _LINE_BYTES
    return raw[skip : skip + nbytes]


def locate_one(table: Table, fp: int) -> int:
    """Slot of one fingerprint, -1 where absent: for a few keys a fifth of what the vectors cost."""
    fp, mask = max(fp, int(_SMALLEST)), int(table.mask)
    bucket = fp & mask
    for _ in range(len(table.fp)):
        row: list[int] = table.fp[bucket].tolist()
        if fp in row:
            return bucket * BUCKET_SLOTS + row.index(fp)
        if row[-1] == EMPTY:
            break
        bucket = (bucket + 1) & mask
    return -1


def mapped(fp: Fingerprints) -> Fingerprints:
    """The reserved values become 2: such keys are 2^-63 of all and share an entry, as any two equal fingerprints do."""
    return np.maximum(fp, _SMALLEST, dtype=np.uint64)  # a TypeError for signed integers, which would be other keys


def locate_mapped(table: Table, fp: Fingerprints) -> Slots:
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


def _leading(table: Table, fp: Fingerprints, now_s: int) -> int:
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
    slots = locate_mapped(table, fp[missing])
    absent = slots < 0
    if expiring:
        absent |= table.expires_s.take(slots, mode="clip") - 1 < now_s
    holes = missing[absent]
    return int(holes[0]) if holes.size else end


def lower_soonest(table: Table, expires_s: Column) -> None:
    soonest = int((expires_s - 1).min(initial=0xFFFF_FFFE)) + 1  # never (0) wraps to the largest value
    if soonest < int(table.soonest[0]):
        table.soonest[0] = soonest


def place(table: Table, new: Columns) -> int:
    """Put distinct fingerprints that the table does not hold into the first free slot of their chain.

    Returns how many slots that were never used before it took; the others were tombstones.
    """
    fp = new.fp
    if not fp.size:
        return 0
    lower_soonest(table, new.expires_s)
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


def last_of_each(fp: Fingerprints) -> Slots | None:
    """Positions of the last occurrence of every fingerprint; None if all are distinct."""
    ordered = np.sort(fp)
    if not (ordered[1:] == ordered[:-1]).any():
        return None
    order = fp.argsort(kind="stable")
    ordered = fp[order]
    last = np.ones(len(fp), np.bool_)
    last[:-1] = ordered[1:] != ordered[:-1]
    return order[last]


def locate(table: Table, fp: Fingerprints) -> Slots:
    """int64 (n,): slot of each key, -1 where absent. Expiry is not considered."""
    return locate_mapped(table, mapped(fp))


def leading(table: Table, fp: Fingerprints, now_s: int) -> int:
    """Number of leading keys that are present and not expired at `now_s`.

    Asks in growing batches, so an early hole costs microseconds whatever the length.
    """
    length, start, step = len(fp), 0, limits.presence_gallop_first_keys
    while start < length:
        part = mapped(fp[start : start + step])
        found = _leading(table, part, now_s)
        start += found
        if found < len(part):
            break
        step = min(step * 8, limits.presence_gallop_keys_max)
    return start
