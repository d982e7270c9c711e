"""The store's background thread: fills the presence index, indexes what a dead writer left, and keeps house.

Contract
- Serving never waits for it: until it is through, negative answers fall through to the catalog.
- Every task may fail and is tried again later; a failure is counted and shown by `status`, never raised at a caller.
- Ephemeral publishes are committed at most `limits.ephemeral_publish_delay_s` after they were made.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable

import numpy as np

from perdure import limits
from perdure.catalog.api import SegmentRecord, SegmentState, fingerprints
from perdure.core import Core
from perdure.errors import PerdureError
from perdure.writing import flush_pending

_SCAN_KEYS = 8192
STORE_NAMESPACE = "store"
CLOCK_KEY = b"clock"


class Keeper:
    def __init__(self, core: Core):
        self._core = core
        self._stop = threading.Event()
        self.ready = threading.Event()  # presence filled, dead writers' segments indexed, index rebuilt
        self.last_error: str | None = None
        self.progress: tuple[int, int] = (0, 0)  # segments of a rebuild: done, all
        self._recency_tick = core.tick()
        self._thread = threading.Thread(target=self._run, name="perdure-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step it is in; what is pending is the caller's to flush."""
        self._stop.set()
        self._core.pending.wake()
        self._thread.join()

    def _run(self) -> None:
        for task in (self.rebuild_index, self.recover, self.fill_presence):
            self._guarded(task)
            if self._stop.is_set():
                return
        self.ready.set()
        chores_at = time.monotonic() + limits.recency_flush_s
        while not self._stop.is_set():
            if self._core.pending.wait(1.0):
                self._stop.wait(limits.ephemeral_publish_delay_s)
                self._guarded(lambda: flush_pending(self._core))
            if time.monotonic() >= chores_at:
                chores_at = time.monotonic() + limits.recency_flush_s
                self._guarded(self.chores)

    def _guarded(self, task: Callable[[], None]) -> None:
        try:
            task()
        except (PerdureError, OSError) as error:
            self.last_error = f"{getattr(task, '__name__', 'task')}: {error}"
            self._core.counters.add(keeper_errors=1)

    # --- after opening
    def rebuild_index(self) -> None:
        """Load a lost block index from segment indexes and headers, while serving."""
        core = self._core
        if not core.index_lost:
            return

        def note(done: int, total: int) -> None:
            self.progress = (done, total)

        def left_out(record: SegmentRecord) -> bool:
            """Draining segments must not come back, and what this process is writing is published by itself."""
            mine = record.state is SegmentState.OPEN and record.owner == core.owner
            return mine or record.state is SegmentState.DRAINING

        for keys, records in core.recovery.entries_of_all(left_out, note):
            order = np.argsort(keys.view("S32").ravel(), kind="stable")
            core.index.load(iter([(keys[order], records[order])]))
            if self._stop.is_set():
                return
        core.index_lost = False

    def recover(self) -> None:
        """Index the open segments of writers that died."""
        core = self._core
        for record in core.table.all():
            if record.state is SegmentState.OPEN and record.owner != core.owner:
                self._index_segment(record)
            if self._stop.is_set():
                return

    def _index_segment(self, record: SegmentRecord) -> None:
        core = self._core
        before = core.space_of(record)
        new = core.recovery.index_open_segment(record, core.index, adopt_all=False)
        core.space.give(before - (new.allocated_bytes if new is not None else 0))
        core.counters.add(segments_recovered=1)

    def fill_presence(self) -> None:
        """Read the whole catalog once, in key order, with the recency that was kept."""
        core = self._core
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
        self.save_recency()
        core.pins.expire()
        core.writer.seal_idle(core.clock.monotonic() - limits.segment_idle_seal_s)
        for segment in core.space.take_unsealed():
            record = core.table.get(segment)
            if record is not None and record.state is SegmentState.OPEN:
                self._index_segment(record)
        if not core.steady.paused:
            core.reclaimer.sweep()

    def save_recency(self) -> None:
        """Recency of blocks used since the last time, and the clock's last reading."""
        core = self._core
        if core.steady.paused:
            return
        core.touches.apply()
        tick = core.tick()
        prints, ticks = core.presence.changed_since(self._recency_tick)
        if len(prints):
            core.index.touch(prints, core.minutes(ticks))
        self._recency_tick = tick - 1
        present = core.control.get(STORE_NAMESPACE, CLOCK_KEY)
        core.control.compare_and_set(STORE_NAMESPACE, CLOCK_KEY, present, struct.pack("<d", core.steady.now()))
