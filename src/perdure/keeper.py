"""The store's background threads: one opens up (rebuilds a lost index, indexes what a dead writer left, fills the
presence index), one keeps house, and over several roots one tends them and the second copies. Of a store that is opened
read-only it only sees when a root is there again.

Contract
- Serving never waits for them: until the store is opened up, negative answers fall through to the catalog.
- Every task may fail and is tried again later; a failure is counted and shown by `status`, never raised at a caller.
- Ephemeral publishes are committed at most `limits.ephemeral_publish_delay_s` after they were made, also while the
  store is being opened up.
- Which records of a dead writer's segment count is asked of a complete index only: while a lost one is being rebuilt,
  or could not be, those segments are left alone.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable

import numpy as np

from perdure import limits
from perdure.catalog.api import SegmentRecord, SegmentState, fingerprints
from perdure.core import INDEX_LOST_KEY, STORE_NAMESPACE, Core
from perdure.errors import CatalogUnavailable, PerdureError
from perdure.inspect import keyspaces
from perdure.publishing import flush_pending
from perdure.session import Scope

_SCAN_KEYS = 8192
CLOCK_KEY = b"clock"


class Keeper:
    def __init__(self, core: Core):
        self._core = core
        self._stop = threading.Event()
        self.ready = threading.Event()  # presence filled, dead writers' segments indexed, index rebuilt
        self.last_error: str | None = None
        self.rebuild_error: str | None = None  # why the last attempt to rebuild a lost index is incomplete
        self.progress: tuple[int, int] = (0, 0)  # segments of a rebuild: done, all
        self._recency_tick = core.tick()
        tasks: list[tuple[Callable[[], None], str]] = []
        if not core.read_only:
            tasks = [(self._open_up, "open"), (self._run, "keeper")]
            tasks += [(self._run_cold, "cold")] * (core.cold is not None)
        tasks += [(self._tend, "roots")] * (core.copies is not None)
        self._threads = [threading.Thread(target=one, name=f"perdure-{name}", daemon=True) for one, name in tasks]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads after the step they are in; what is pending is the caller's to flush."""
        self._stop.set()
        self._core.pending.wake()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _open_up(self) -> None:
        wait_s = limits.background_retry_s
        while not self._stop.is_set():
            complete = self.attempt(self.rebuild_index)
            self.rebuild_error = None if complete else self.last_error
            complete = complete and self.attempt(self.recover)
            complete = self.attempt(self.fill_presence) and complete
            complete = self.attempt(self.pin_sessions) and complete
            if complete:
                if not self._stop.is_set():
                    self._core.erasures.go_on()
                    self.ready.set()
                return
            self._stop.wait(wait_s)
            wait_s = min(2 * wait_s, limits.recency_flush_s)

    def _run(self) -> None:
        chores_at = time.monotonic() + limits.recency_flush_s
        orphans_at = time.monotonic() + limits.cluster_orphans_s
        while not self._stop.is_set():
            if self._core.pending.wait(1.0):
                self._stop.wait(limits.ephemeral_publish_delay_s)
                self.attempt(lambda: flush_pending(self._core))
            if self._core.sharing.shared and time.monotonic() >= orphans_at:
                self.attempt(self.recover)
                self.attempt(self._core.erasures.look)
                orphans_at = time.monotonic() + limits.cluster_orphans_s
            if time.monotonic() >= chores_at:
                chores_at = time.monotonic() + limits.recency_flush_s
                self.chores()

    def _tend(self) -> None:
        """A thread of its own: copying segments takes longer than a publish may wait."""
        while not self._stop.wait(limits.root_look_s):
            self.attempt(self.tend_roots)

    def tend_roots(self) -> None:
        """Look at roots that were out of service, and complete and repair second copies."""
        if self._core.copies is None:
            return
        back = self._core.copies.roots.look(probe=not self._core.read_only)
        if self._core.read_only:
            return
        if back:
            self.readmit()
        self._core.copies.tend(self._stop.is_set)

    def readmit(self) -> None:
        """A root is back in service: what could not be read is worth another try."""
        core = self._core
        keys, records = core.unreadable.all()
        present, current = core.index.lookup(keys)
        core.unreadable.forget(keys)
        same = present & (current == records)
        there = records[same]
        core.presence.insert(
            fingerprints(keys[same]),
            segment=np.fromiter(map(core.table.ordinal, there["segment"].tolist()), np.uint32, len(there)),
            recency=core.tick(),
            expires_s=np.ascontiguousarray(there["expires_s"]),
            only_absent=True,
        )
        if core.cold is not None:
            core.cold.tier.find_left_over()

    def _run_cold(self) -> None:
        while not self._stop.wait(limits.cold_check_s):
            self.attempt(self.demote)

    def attempt(self, task: Callable[[], None]) -> bool:
        """Do something that may be tried again later; False, counted and shown, if it failed."""
        try:
            task()
        except (PerdureError, OSError) as error:
            self.last_error = f"{getattr(task, '__name__', 'task')}: {error}"
            self._core.counters.add(keeper_errors=1)
            return False
        return True

    # --- after opening
    def rebuild_index(self) -> None:
        """Load a lost block index from segment indexes and headers, while serving."""
        core = self._core
        if not core.index_lost:
            return
        with core.sharing.sole(b"rebuild") as mine:
            if not core.control.get(STORE_NAMESPACE, INDEX_LOST_KEY):  # another process has done it meanwhile
                core.index_lost = False
            elif mine:
                self._rebuild()
            else:
                raise CatalogUnavailable("another process is rebuilding the block index")

    def _rebuild(self) -> None:
        core = self._core
        core.sharing.refresh()

        def note(done: int, total: int) -> None:
            self.progress = (done, total)

        def left_out(record: SegmentRecord) -> bool:
            """What this process is writing is published by itself."""
            return record.state is SegmentState.OPEN and record.owner == core.sharing.owner

        for segment, keys, records in core.recovery.entries_of_all(left_out, note):
            stays = ~(core.tenants.passed(records) | core.tenants.buried(keys))
            keys, records = keys[stays], records[stays]
            order = np.argsort(keys.view("S32").ravel(), kind="stable")
            core.index.load(iter([(keys[order], records[order])]))
            core.waiters.published(keys)
            # Dropped meanwhile, with what the index knew of it then?
            if core.table.find(segment.segment, fresh=True) is None:
                core.index.remove(keys, records)
            if self._stop.is_set():
                return
        core.index_found()

    def recover(self) -> None:
        """Index the open segments of writers that died, and remove what they left half-made or half-deleted."""
        core = self._core
        core.sharing.refresh()
        if not core.sharing.shared:  # others may be writing theirs right now
            core.recovery.remove_temporaries(core.owner)
        for segment in core.sharing.orphans():
            core.space.note_unsealed(segment)
        self.settle_unsealed()

    def settle_unsealed(self) -> None:
        settle_unsealed(self._core, self._stop.is_set)

    def pin_sessions(self) -> None:
        core = self._core
        if core.sharing.shared:  # pins outlive the process that made them
            return
        known = keyspaces(core).items()
        core.sessions.pin_again(Scope(one["tenant"], bytes.fromhex(one["tenant_id"]), digest) for digest, one in known)

    def fill_presence(self) -> None:
        """Read the whole catalog once, in key order, with the recency that was kept."""
        core = self._core
        if core.sharing.shared:  # a negative answer is never final: others publish too
            core.filled.set()
            return
        known, minutes = core.index.recency()
        start = bytes(limits.key_bytes)
        while not self._stop.is_set():
            keys, records = core.index.scan(start, _SCAN_KEYS)
            if not len(keys):
                break
            prints = fingerprints(keys)
            place = np.minimum(np.searchsorted(known, prints), max(len(known) - 1, 0))
            kept = known[place] == prints if len(known) else np.zeros(len(keys), bool)
            minute = np.where(kept, minutes[place] if len(minutes) else 0, records["created_s"] // 60)
            names, inverse = np.unique(records["segment"].view("S16"), return_inverse=True)
            ordinals = np.array([core.table.ordinal(name.ljust(16, b"\0")) for name in names.tolist()], np.uint32)
            core.presence.insert(
                prints,
                segment=ordinals[inverse],
                recency=np.maximum(core.ticks(minute.astype(np.uint32)), 1),
                expires_s=np.ascontiguousarray(records["expires_s"]),
                only_absent=True,
            )
            start = (int.from_bytes(keys[-1].tobytes(), "big") + 1).to_bytes(limits.key_bytes + 1, "big")[1:]
            if start == bytes(limits.key_bytes):
                break
        else:
            return
        if not core.index_lost:
            core.presence.mark_complete()
        core.filled.set()

    # --- from time to time
    def chores(self) -> None:
        core = self._core
        for task in (
            core.reserve_catalog_space, self.save_recency, core.pins.expire, core.leases.expire, self.seal_idle,
            self.settle_unsealed, self.sweep, core.sessions.sweep, self.renew_keys, self.collect_cold,
        ):  # fmt: skip
            self.attempt(task)

    def seal_idle(self) -> None:
        self._core.writer.seal_idle(self._core.clock.monotonic() - limits.segment_idle_seal_s)

    def demote(self) -> None:
        """Move what is coldest to the cold tier, where the disk is nearly full."""
        core = self._core
        if core.filled.is_set() and not core.steady.paused:
            core.cold.demote(self._stop.is_set)

    def collect_cold(self) -> None:
        if self._core.cold is not None and self._core.filled.is_set():
            self._core.cold.collect()

    def renew_keys(self) -> None:
        if self._core.segments.keys is not None:
            self._core.segments.keys.renew()

    def sweep(self) -> None:
        """Not before the presence index is filled: the fill would bring back what is dropped here."""
        if self._core.filled.is_set() and not self._core.steady.paused:
            self._core.reclaimer.sweep()

    def save_recency(self) -> None:
        """Recency of blocks used since the last time, and the clock's last reading."""
        core = self._core
        if core.steady.paused:
            return
        core.touches.apply()
        tick = core.tick()
        if core.sharing.shared:
            core.sharing.tell_uses()
        else:
            prints, ticks = core.presence.changed_since(self._recency_tick)
            if len(prints):
                core.index.touch(prints, core.minutes(ticks))
        self._recency_tick = tick - 1
        present = core.control.get(STORE_NAMESPACE, CLOCK_KEY)
        core.control.compare_and_set(STORE_NAMESPACE, CLOCK_KEY, present, struct.pack("<d", core.steady.now()))


def settle_unsealed(core: Core, stopping: Callable[[], bool] = lambda: False) -> None:
    """Index or remove segments that are neither sealed nor gone: who was at it died, or disk or catalog failed.

    Raises OSError, CatalogError: what could not be settled is tried again the next time."""
    if core.index_lost:
        return
    problem: Exception | None = None
    for segment in core.space.take_unsealed():
        try:
            if not stopping():
                _settle(core, segment)
                continue
        except (PerdureError, OSError) as error:
            problem = error
        core.space.note_unsealed(segment)
    if problem is not None:
        raise problem


def _settle(core: Core, segment: bytes) -> None:
    record = core.table.find(segment)
    if record is None or (record.state is SegmentState.DRAINING and core.recovery.is_gone(segment)):
        core.segments.delete(segment)
        core.table.delete(segment)
        core.space.settle(segment, 0)
    elif record.state is SegmentState.OPEN:
        with core.sharing.taken(record) as mine:
            record = core.table.get(segment)
            if mine and record is not None and record.state is SegmentState.OPEN:
                new = core.recovery.index_open_segment(record, core.index)
                core.space.settle(segment, new.allocated_bytes if new is not None else 0)
                core.counters.add(segments_recovered=1)
