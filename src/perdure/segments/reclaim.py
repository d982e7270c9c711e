"""Making room: whole segments go, coldest first; what is still hot or pinned in them is copied forward.

Contract
- Recency is tail-first LRU over blocks, kept in the presence index. The cut is the recency below which enough bytes
  lie; the victim is the sealed segment with the fewest bytes above it. So write amplification stays low and one hot
  block does not keep a cold segment.
- With shares (`governance.shares`), who asks for room decides whose segments may go.
- Pinned blocks, and those on hold, are never dropped. A segment is drained first (no "exists" relies on it), its kept
  blocks are copied and moved by compare-and-swap, the other records removed if unchanged, then the file is deleted.
- If anything fails on the way nothing is lost: the segment stays, drained or not, and is tried again later. A disk that
  does not delete costs the blocks of one segment, not of all.
- In a store that others use too, one process at a time makes room. What others used, as far as they told, counts by
  segment: above the cut all of it is hot.
- Never: recycling a file or a name; deleting by age while the clock is in doubt (the caller decides that).
"""

from __future__ import annotations

import contextlib
import errno
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from perdure.catalog.api import (
    BlockIndex,
    KeyArray,
    RecordArray,
    SegmentRecord,
    SegmentState,
    fingerprints,
)
from perdure.errors import CatalogError, CatalogUnavailable
from perdure.governance.shares import Shares
from perdure.io.memory import Scratch
from perdure.pool.dram import DramPool
from perdure.presence import PresenceIndex
from perdure.segments.format import NO_CIPHER, record_bytes_array
from perdure.segments.landing import BlockStatus, Plan
from perdure.segments.moving import Mover
from perdure.segments.reader import SegmentReader
from perdure.segments.recovery import entry_keys
from perdure.segments.space import SpaceBudget
from perdure.segments.store import SegmentStore
from perdure.segments.table import SegmentTable
from perdure.segments.writer import SegmentWriter

_COLD_SHARE_MIN = 0.5  # copy at most as much as is freed, unless pins leave no choice
_COPY_BLOCKS = 64


@dataclass(slots=True)
class ReclaimCounters:
    segments_dropped: int = 0
    blocks_evicted: int = 0
    blocks_copied: int = 0
    bytes_copied: int = 0


@dataclass(slots=True)
class Shredded:
    """What was erased: records with their bytes, segments given up, of those how many whose key was destroyed."""

    blocks: int = 0
    bytes: int = 0
    segments: int = 0
    keys: int = 0
    copied: int = 0  # blocks that stay, moved to other segments

    def add(self, other: Shredded) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Outcome(Enum):
    """Of an attempt to drop a segment."""

    GONE = 0
    STAYS = 1  # with its blocks
    STUCK = 2  # its blocks are gone, its file is not


class Reclaimer:
    """Drops segments of one store. One at a time; thread-safe."""

    def __init__(
        self,
        segments: SegmentStore,
        table: SegmentTable,
        space: SpaceBudget,
        index: BlockIndex,
        presence: PresenceIndex,
        pool: DramPool,
        reader: SegmentReader,
        writer: SegmentWriter,
        mover: Mover,
        scratch: Scratch,
        entries: Callable[[bytes], NDArray[np.void]],
        pinned: Callable[[], NDArray[np.uint64]],
        now_s: Callable[[], int],
        before: Callable[[], None],
        sole: Callable[[], AbstractContextManager[bool]],
        used_elsewhere: Callable[[Sequence[SegmentRecord]], NDArray[np.uint32]],
    ):
        """`entries`: what a segment holds. `before` is called before recency is looked at (it applies uses that were
        only noted). `sole`: whether it is this process's turn. `used_elsewhere`: tick of the last use by others."""
        self._segments, self._table, self._space, self._index = segments, table, space, index
        self._presence, self._pool, self._reader, self._writer, self._mover = presence, pool, reader, writer, mover
        self._scratch, self._entries, self._pinned, self._now_s = scratch, entries, pinned, now_s
        self.before, self._sole, self._used_elsewhere = before, sole, used_elsewhere
        self._lock = threading.Lock()
        self.counters = ReclaimCounters()
        self.shares: Shares | None = None
        # of a segment that goes: its object, if there may be one; raises OSError
        self.erase_far: Callable[[bytes], None] = lambda segment: None
        self.spared: Callable[[SegmentRecord], bool] = lambda record: False  # drained by an erasure, which goes on
        self.frozen: Callable[[], set[bytes]] = set  # tenants (ids) whose segments stay as they are
        self.held: Callable[[], NDArray[np.uint64]] = lambda: np.zeros(0, np.uint64)  # fingerprints, as if pinned
        # which records were erased: they are copied nowhere, pinned or not
        self.erased: Callable[[KeyArray, RecordArray], NDArray[np.bool_]] = lambda _, records: np.zeros(
            len(records), bool
        )
        self.cut_tick = 0  # recency below which blocks were given up last; 0: none yet, or only released ones

    def make_room(self, need: int, *, tenant: bytes = b"", force: bool = False) -> bool:
        """Let `need` bytes fit below the capacity, or (`force`: the file system is full) give `need` bytes back.

        tenant: id of who asks. False if what is left is pinned, open or unreadable, another tenant's that may keep it,
        or if the disk does not delete."""
        goal = self._space.used if force else self._space.capacity - self._space.kept_back
        return self._drop_until(lambda: self._space.used + need <= goal, need, tenant, None)

    def make_room_of(self, tenant: bytes, need: int, enough: Callable[[], bool]) -> bool:
        """Give up the tenant's own segments until `enough`, in steps of about `need` bytes. False as `make_room`."""
        return self._drop_until(enough, need, tenant, {tenant})

    def _drop_until(self, enough: Callable[[], bool], need: int, tenant: bytes, whose: set[bytes] | None) -> bool:
        """whose: tenants whose segments may go; None: as the shares say."""
        try:
            with self.turn() as mine:
                return mine and self._drop_in_turn(enough, need, tenant, whose)
        except CatalogUnavailable:
            return False

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Nothing is given up by others meanwhile, if it is True. Raises CatalogError."""
        with self._lock, self._sole() as mine:
            yield mine

    def _drop_in_turn(self, enough: Callable[[], bool], need: int, tenant: bytes, whose: set[bytes] | None) -> bool:
        self.before()
        given_up: set[bytes] = set()
        sealed = False
        while not enough():
            victims = self._victims(tenant) if whose is None else whose
            chosen = self.choose(need, given_up, victims)
            if chosen is None:
                if sealed or not self._seal_open(victims):
                    return False
                sealed = True
                given_up.clear()  # there may be room for their copies now
                continue
            victim, hotter_than = chosen
            outcome = self.drop(victim, hotter_than)
            if outcome is Outcome.STUCK:  # the next victim would only lose its blocks as well
                return False
            if outcome is Outcome.STAYS:
                given_up.add(victim.segment)
        return True

    def sweep(self) -> int:
        """Drop segments all of whose records have expired, and finish drains that were cut off; returns how many."""
        with self.turn() as mine:
            if not mine:
                return 0
            now, dropped, frozen = self._now_s(), 0, self.frozen()
            for record in [one for one in self._table.all() if one.tenant not in frozen]:
                expired = record.state is SegmentState.SEALED and 0 < record.expires_s <= now
                cut_off = record.state is SegmentState.DRAINING and not self.spared(record)
                due = cut_off or (expired and not self._all_held(record))
                if due and self.drop(record, None) is Outcome.GONE:
                    dropped += 1
            return dropped

    def _all_held(self, record: SegmentRecord) -> bool:
        """Then it is left as it is: its blocks would only be copied."""
        held = self.held()
        try:
            return bool(len(held)) and bool(
                np.isin(fingerprints(entry_keys(self._entries(record.segment))), held).all()
            )
        except OSError:
            return True

    def staying(self) -> NDArray[np.uint64]:
        """Fingerprints of the blocks that must not go: pinned, or under a hold."""
        return np.union1d(self._pinned(), self.held())

    def _victims(self, tenant: bytes) -> set[bytes] | None:
        """Tenants whose segments may go; None: all."""
        if self.shares is None:
            return None
        used: Counter[bytes] = Counter()
        for record in self._table.all():
            used[record.tenant] += record.allocated_bytes
        return self.shares.victims(tenant, used, self._space.capacity - self._space.kept_back)

    def _seal_open(self, whose: set[bytes] | None) -> bool:
        """Nothing sealed is left to drop: seal open segments that nobody is writing, so that they can be. One with
        nothing in it but copies that could not be published goes at once."""
        idle = [one for one in self._writer.open_segments() if not one.users and one.tail]
        if whose is not None:
            idle = [one for one in idle if one.kind[0] in whose]
        for one in idle:
            self._writer.retire(one)
        return bool(idle)

    def choose(
        self, need: int, given_up: set[bytes], whose: set[bytes] | None, *, note: bool = True
    ) -> tuple[SegmentRecord, int] | None:
        """The cheapest victim on the disk and the recency above which its blocks are kept. note: it will be dropped."""
        frozen = self.frozen()
        candidates = [
            record
            for record in self._table.all()
            if record.tenant not in frozen
            and record.state is not SegmentState.OPEN
            and not (record.state is SegmentState.DRAINING and self.spared(record))
            and record.allocated_bytes  # else it is in the cold tier
            and record.segment not in given_up
            and (whose is None or record.tenant in whose)
        ]
        if not candidates:
            return None
        every = self._presence.columns()
        if whose is not None:  # what is cold is so among the blocks that may go
            names = [one for one in np.unique(every.segment).tolist() if self._table.tenant(one) in whose]
            every = every.at(np.isin(every.segment, names))
        fingerprint, ordinal, recency, expires = every
        now = self._now_s()
        recency[(expires != 0) & (expires <= now)] = 0
        pins = self.staying()
        if len(pins):
            recency[np.isin(fingerprint, pins)] = np.iinfo(np.uint32).max
        numbers = np.array([self._table.ordinal(record.segment) for record in candidates])
        sizes = np.array([record.allocated_bytes for record in candidates], np.int64)
        per_block = np.zeros(max(int(ordinal.max(initial=0)), int(numbers.max())) + 1)
        per_block[numbers] = sizes / np.maximum([record.records for record in candidates], 1)
        elsewhere = self._used_elsewhere(candidates)
        begun = np.array([record.state is SegmentState.DRAINING for record in candidates])
        ranked = np.sort(recency)
        mean_bytes = max(float(per_block[numbers].mean()), 1.0)
        wanted = max(need, int(sizes.mean()))
        while True:
            blocks = min(math.ceil(wanted / mean_bytes), len(ranked))
            cut = int(ranked[blocks - 1]) if blocks else 0
            cut = min(cut, np.iinfo(np.uint32).max - 1)  # pinned blocks are above every cut
            hot = np.bincount(ordinal, weights=recency > cut, minlength=len(per_block)) * per_block
            free = sizes - np.where(elsewhere > cut, sizes, hot[numbers])
            warmth = np.bincount(ordinal, weights=np.minimum(recency, cut), minlength=len(per_block))[numbers]
            cold = free >= _COLD_SHARE_MIN * sizes
            best = int(np.lexsort((warmth, -free, ~begun, ~cold))[0])
            if cold[best]:
                if note:
                    self.cut_tick = cut
                return candidates[best], cut
            if wanted / mean_bytes >= len(ranked):
                if free[best] > 0:
                    return candidates[best], cut
                if not elsewhere.any():
                    return None
                return candidates[int(elsewhere.argmin())], cut  # all of it is in use somewhere
            wanted *= 2

    def drop(self, victim: SegmentRecord, hotter_than: int | None) -> Outcome:
        """Copy what is kept, remove the rest, delete the file. `hotter_than` None: keep only what is pinned."""
        emptied = False
        try:
            entries = self._entries(victim.segment)  # none if a process died after it had deleted the file
            self._segments.check_deletable(victim.segment)
            if victim.state is not SegmentState.DRAINING:
                self._table.drain(victim)
            if not self.keep(victim, entries, hotter_than):
                return Outcome.STAYS
            removed = self._empty(entries)
            emptied = True
            self.counters.blocks_evicted += removed
            self._delete(victim.segment)
        except (OSError, CatalogError):
            return Outcome.STUCK if emptied else Outcome.STAYS
        self.counters.segments_dropped += 1
        return Outcome.GONE

    def _empty(self, entries: NDArray[np.void]) -> int:
        """Remove the records that are still the ones of these entries; how many were."""
        keys = entry_keys(entries)
        removed = self._index.remove(keys, np.ascontiguousarray(entries["record"]))
        gone = fingerprints(keys[removed])
        self._presence.remove(gone)
        self._pool.drop(keys[removed])
        self._index.forget_recency(gone)
        return int(removed.sum())

    def _delete(self, segment: bytes) -> None:
        self._segments.delete(segment)
        self._table.delete(segment)
        self._space.settle(segment, 0)

    # --- erasure
    def _erase(self, segment: bytes, told: Shredded) -> None:
        if not told.keys:  # else its object is unreadable from now on, and is deleted in time
            self.erase_far(segment)
        self._delete(segment)

    def shred(self, record: SegmentRecord) -> Shredded:
        """Give up a segment with all that is in it, and destroy its key. Raises OSError, CatalogError."""
        with self.turn() as mine:
            if not mine:
                raise OSError(errno.EAGAIN, "another host is making room; tried again")
            entries = self._entries(record.segment)
            told = _shredded(entries, np.ones(len(entries), bool))
            self._empty(entries)
            self._erase(record.segment, told)
        return told

    def rewrite(self, record: SegmentRecord, doomed: Callable[[KeyArray], NDArray[np.bool_]]) -> Shredded:
        """As `shred`, with the blocks that are not doomed copied to other segments before.

        Raises OSError, CatalogError: then the segment is as it was, or has lost some of the doomed records."""
        with self._lock:
            entries = self._entries(record.segment)
            gone = doomed(entry_keys(entries))
            told = _shredded(entries, gone)
            record = self._table.get(record.segment) or record  # it may have gone to the cold tier meanwhile
            if record.state is not SegmentState.DRAINING:
                self._table.drain(record)
            present, records = self._index.lookup(entry_keys(entries))
            stays = np.flatnonzero(present & (records == entries["record"]) & ~gone)
            for keyspace, one in self._by_keyspace(entries, stays):
                moved, statuses = self._copy(keyspace, entries[one])
                present, records = self._index.lookup(entry_keys(entries[one]))
                damaged = (statuses == BlockStatus.CORRUPT) | (statuses == BlockStatus.MISSING)
                left = ~damaged & ~moved & present & (records == entries["record"][one])
                if left.any():
                    raise OSError(errno.EAGAIN, f"{int(left.sum())} blocks could not be moved; nothing of them is lost")
                told.copied += int(moved.sum())
            self._empty(entries)
            self._erase(record.segment, told)
        return told

    def keep(self, victim: SegmentRecord, entries: NDArray[np.void], hotter_than: int | None) -> bool:
        """Copy forward the blocks that stay; False if one that is pinned could not be moved."""
        keys = entry_keys(entries)
        present, records = self._index.lookup(keys)
        live = present & (records == entries["record"]) & ~self.erased(keys, records)
        prints = fingerprints(keys)
        pinned = np.isin(prints, self.staying())
        if hotter_than is None:
            keep = live & pinned
        else:
            recency = self._presence.recency_of(prints)
            expires = entries["record"]["expires_s"]
            fresh = (expires == 0) | (expires > self._now_s())
            keep = live & (pinned | ((recency > hotter_than) & fresh))
        for keyspace, part in self._by_keyspace(entries, np.flatnonzero(keep)):
            moved, _ = self._copy(keyspace, entries[part])
            if (pinned[part] & ~moved).any():
                return False
        return True

    @staticmethod
    def _by_keyspace(entries: NDArray[np.void], chosen: NDArray[np.intp]) -> Iterator[tuple[bytes, NDArray[np.intp]]]:
        """Keyspaces, and positions of at most `_COPY_BLOCKS` of the chosen entries in each."""
        for keyspace in {entry.tobytes() for entry in entries["keyspace"][chosen]}:
            inside = chosen[entries["keyspace"][chosen] == np.void(keyspace)]
            for at in range(0, len(inside), _COPY_BLOCKS):
                yield keyspace, inside[at : at + _COPY_BLOCKS]

    def _copy(self, keyspace: bytes, entries: NDArray[np.void]) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
        """Copy some blocks of one keyspace to the open segment of their class; which of them have moved, and what
        reading each came to."""
        old = np.ascontiguousarray(entries["record"])
        leases = [self._scratch.take(size) for size in old["stored_bytes"].tolist()]
        try:
            keys = entry_keys(entries)
            views = [[lease.view] for lease in leases]
            plan = Plan(entries["key"].tolist(), [keyspace] * len(entries), old.tolist(), views, 1, None, raw=True)
            self._reader.read(plan)
            plan.statuses[list(plan.unread)] = BlockStatus.LATE  # an I/O error says nothing about the bytes
            good = plan.statuses == BlockStatus.FOUND
            moved = np.zeros(len(entries), bool)
            # blocks of one keyspace share block_bytes; epochs may differ, so each epoch is a batch
            for epoch in np.unique(old["tenant_epoch"][good]):
                chosen = np.flatnonzero(good & (old["tenant_epoch"] == epoch))
                moved[chosen] = self._mover.move(
                    keyspace, keys[chosen], old[chosen], [views[i] for i in chosen], reserve=True
                )
            self.counters.blocks_copied += int(moved.sum())
            self.counters.bytes_copied += int(record_bytes_array(old["stored_bytes"][moved]).sum())
            return moved, plan.statuses
        finally:
            for lease in leases:
                lease.give_back()


def _shredded(entries: NDArray[np.void], gone: NDArray[np.bool_]) -> Shredded:
    records = entries["record"][gone]
    some = bool(len(entries))  # else its file is gone already, or nothing was ever published in it
    keyed = some and bool((entries["record"]["cipher"] != NO_CIPHER).all())
    return Shredded(len(records), int(records["block_bytes"].sum()), int(some), int(keyed))
