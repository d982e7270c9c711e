"""Who else uses this store: nobody (`Alone`), or processes on many hosts, each writing segments of its own (`Among`).

Contract
- Every open segment belongs to one process, by the name (`owner`) it was made under. A process among others holds a
  lease on its name, which it renews. Once that has ended, anybody may take the name's open segments over: the lease is
  taken first, then the segment closed for publishes in the whole block index, then it is indexed. So a process that was
  silent for longer than its lease and wakes up publishes nothing any more in what was its own; it goes on under another
  name.
- What one process alone may do at a time (making room, rebuilding the index) is done under a lease of that task's name.
  If it ends early, two may do it at once: that is waste, not harm, for every step is a compare-and-set or can be
  repeated.
- News of segments are read every `limits.cluster_beat_s`: what others drained or deleted is forgotten here. A
  segment that is not in it is asked for before a record in it counts.
- No process ever sends another one anything; which others there are is not known, nor needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.catalog.api import ControlStore, Lease, RecordArray, SegmentRecord, SegmentState
from perdure.clock import Clock
from perdure.epochs import Epochs
from perdure.errors import CatalogError, CatalogUnavailable, OwnershipLost
from perdure.segments.table import SegmentTable

if TYPE_CHECKING:
    from perdure.core import Core

HOSTS = "host"  # namespace of who registered, for people who look
_POLL_S = 0.05


class Sharing(Protocol):
    owner: bytes
    shared: bool
    epochs: Epochs | None  # where others may erase tenants

    def join(self, core: Core) -> None:
        """The store is put together."""
        ...

    def leave(self) -> None:
        """Everything is sealed."""
        ...

    def check(self) -> None:
        """Raises OwnershipLost if nothing may be published in this process's segments now."""
        ...

    def live(self, present: NDArray[np.bool_], records: RecordArray) -> NDArray[np.bool_]:
        """`present` without the records of segments that do not exist (any more). Raises CatalogError."""
        ...

    def orphans(self) -> list[bytes]:
        """Segments that somebody should index or delete."""
        ...

    def taken(self, record: SegmentRecord) -> contextlib.AbstractContextManager[bool]:
        """For an open segment that nobody is writing: whether this process may index it now. Raises CatalogError."""
        ...

    def sole(self, task: bytes, wait_s: float = 0.0) -> contextlib.AbstractContextManager[bool]:
        """Whether this process is the one to do it now; waits for its turn. Raises CatalogError."""
        ...

    def refresh(self) -> None:
        """See what others have done. Raises CatalogError."""
        ...

    def tell_uses(self) -> None:
        """Let others know which segments were used here since the last time. Raises CatalogError."""
        ...

    def used_elsewhere(self, segments: Sequence[SegmentRecord]) -> NDArray[np.uint32]:
        """Tick of the last use of each segment by others, as far as they told, and of its making if that was by
        another; 0: none. Raises CatalogError."""
        ...


class Alone:
    """The one process that has the directory's lock."""

    shared = False
    epochs: Epochs | None = None

    def __init__(self, owner: bytes, table: SegmentTable):
        self.owner, self._table = owner, table

    def join(self, core: Core) -> None: ...

    def leave(self) -> None: ...

    def check(self) -> None: ...

    def live(self, present: NDArray[np.bool_], records: RecordArray) -> NDArray[np.bool_]:
        return present

    def orphans(self) -> list[bytes]:
        return [
            record.segment
            for record in self._table.all()
            if record.state is SegmentState.DRAINING
            or (record.state is SegmentState.OPEN and record.owner != self.owner)
        ]

    @contextlib.contextmanager
    def taken(self, record: SegmentRecord) -> Iterator[bool]:
        yield True

    @contextlib.contextmanager
    def sole(self, task: bytes, wait_s: float = 0.0) -> Iterator[bool]:
        yield True

    def refresh(self) -> None: ...

    def tell_uses(self) -> None: ...

    def used_elsewhere(self, segments: Sequence[SegmentRecord]) -> NDArray[np.uint32]:
        return np.zeros(len(segments), np.uint32)


class Onlooker(Alone):
    """One that only reads, beside others that write: what it does not know it asks for; nothing is renewed."""

    shared = True

    def __init__(self, control: ControlStore, table: SegmentTable, boottime_s: Callable[[], float]):
        super().__init__(b"", table)
        self._control, self._boottime_s = control, boottime_s

    def join(self, core: Core) -> None:
        self.epochs = Epochs(self._control, core, self._boottime_s, set)
        self.epochs.start()

    def leave(self) -> None:
        if self.epochs is not None:
            self.epochs.stop()

    def live(self, present: NDArray[np.bool_], records: RecordArray) -> NDArray[np.bool_]:
        return _live(self._table, present, records)


class Among:
    """One of many. The lease on its name is there when this is made; a thread renews it from `join` on."""

    shared = True

    def __init__(
        self,
        control: ControlStore,
        clock: Clock,
        table: SegmentTable,
        lease_s: float,
        close_segment: Callable[[bytes, float], None],
        index_is_complete: Callable[[], bool],
        each_beat: Callable[[], None],
        boottime_s: Callable[[], float],
    ):
        """close_segment: let nothing more be published in a segment, as of now (seconds since 1970).
        index_is_complete: what a dead writer published is known from the block index alone.
        boottime_s: see `Epochs`."""
        self._control, self._clock, self._table, self._lease_s = control, clock, table, lease_s
        self._close_segment, self._index_is_complete, self._each_beat = close_segment, index_is_complete, each_beat
        self._core: Core | None = None
        self.epochs: Epochs | None = None
        self._boottime_s = boottime_s
        self._registered = b""
        self._names: set[bytes] = set()  # of this process, so far
        self._tasks: dict[bytes, Lease] = {}
        self._told: dict[bytes, int] = {}  # segment -> minute of its last use that others know from here
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="perdure-sharing", daemon=True)
        self.owner, self._lease = self._take_name()

    # --- a name of one's own

    def _take_name(self) -> tuple[bytes, Lease]:
        name = secrets.token_bytes(limits.id_bytes)
        lease = self._control.acquire(scope_of(name), name, self._clock.boottime(), self._lease_s)
        assert lease is not None  # nobody else has this name
        self._names.add(name)
        return name, lease

    def join(self, core: Core) -> None:
        self._core = core
        core.space.look = self.refresh
        core.recovery.unseen = lambda record: self._clock.wall() - record.created_s < limits.cluster_unseen_s
        self._register()
        self.epochs = Epochs(self._control, core, self._boottime_s, self._hosts)
        self.epochs.start()
        self._thread.start()

    def _hosts(self) -> set[bytes]:
        return {name for name, _ in self._control.items(HOSTS)}

    def _register(self) -> None:
        if self._registered == self.owner:
            return
        assert self._core is not None
        if self._registered:
            self._control.compare_and_set(HOSTS, self._registered, self._control.get(HOSTS, self._registered), None)
        who = {
            "host": socket.gethostname(), "pid": os.getpid(), "boot_id": self._clock.boot_id().hex(),
            "since_s": int(self._core.steady.now()),
        }  # fmt: skip
        self._control.compare_and_set(HOSTS, self.owner, None, json.dumps(who, sort_keys=True).encode())
        self._registered = self.owner

    def leave(self) -> None:
        self._stop.set()
        if self.epochs is not None:
            self.epochs.stop()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(CatalogError):  # else it ends by itself
            self._control.compare_and_set(HOSTS, self.owner, self._control.get(HOSTS, self.owner), None)
            self._control.release(self._lease)

    def check(self) -> None:
        if self._clock.boottime() >= self._lease.deadline_s:
            raise OwnershipLost(
                "this process's lease in the cluster has ended; nothing is published until it is renewed"
            )

    def _run(self) -> None:
        while not self._stop.wait(limits.cluster_beat_s):
            try:
                self.beat()
            except (CatalogError, OSError):  # whatever it is: a lease that nobody renews is the end of all writes
                assert self._core is not None
                self._core.counters.add(catalog_errors=1)

    def beat(self) -> None:
        """Renew what is held, see what others did."""
        now = self._clock.boottime()
        self._renew(now)
        for lease in list(self._tasks.values()):
            self._control.renew(lease, now, self._lease_s)
        self._register()
        self.refresh()
        self._each_beat()

    def _renew(self, now: float) -> None:
        try:
            renewed = self._control.renew(self._lease, now, self._lease_s)
        except CatalogUnavailable:
            if now < self._lease.deadline_s:
                raise
            renewed = None  # where that name lies nothing can be acknowledged: take one that lies elsewhere
        if renewed is None:
            self._start_again()
        else:
            self._lease = renewed

    def _start_again(self) -> None:
        assert self._core is not None
        self.owner, self._lease = self._take_name()
        self._core.writer.start_again(self.owner)
        self._core.counters.add(ownership_lost=1)

    # --- segments

    def live(self, present: NDArray[np.bool_], records: RecordArray) -> NDArray[np.bool_]:
        return _live(self._table, present, records)

    def orphans(self) -> list[bytes]:
        return [record.segment for record in self._table.unsealed() if record.owner != self.owner]

    @contextlib.contextmanager
    def taken(self, record: SegmentRecord) -> Iterator[bool]:
        if not self._index_is_complete():
            yield False
            return
        if record.owner == self.owner:
            yield True
            return
        lease = self._control.acquire(scope_of(record.owner), self.owner, self._clock.boottime(), self._lease_s)
        if lease is None:
            yield False
            return
        try:
            self._close_segment(record.segment, self._clock.boottime())
            self._table.find(record.segment, fresh=True)
            yield True
        finally:
            self._control.release(lease)

    @contextlib.contextmanager
    def sole(self, task: bytes, wait_s: float = 0.0) -> Iterator[bool]:
        give_up = time.monotonic() + wait_s
        while True:
            try:
                lease = self._control.acquire(b"task" + task, self.owner, self._clock.boottime(), self._lease_s)
            except CatalogUnavailable:  # nobody can be given the turn: better two at once than nobody
                yield True
                return
            if lease is not None or time.monotonic() >= give_up:
                break
            time.sleep(_POLL_S)
        if lease is None:
            yield False
            return
        self._tasks[task] = lease
        try:
            yield True
        finally:
            self._tasks.pop(task, None)
            with contextlib.suppress(CatalogUnavailable):  # else it ends by itself
                self._control.release(lease)

    def refresh(self) -> None:
        core = self._core
        other, gone = self._table.refresh()
        if core is None:
            return
        for record in other:
            if record.state is SegmentState.DRAINING:
                core.presence.remove_segment(self._table.ordinal(record.segment))
            elif record.cold:
                core.segments.forget(record.segment)
        growing = [record for record in self._table.unsealed() if record.owner != self.owner]
        for record in growing + other:
            core.space.settle(record.segment, core.space_of(record))
        for segment in gone:
            core.presence.remove_segment(self._table.ordinal(segment))
            core.segments.forget(segment)
            core.space.settle(segment, 0)
            self._told.pop(segment, None)
        if gone:
            core.index.forget_recency(prints_of(gone))

    # --- recency, by segment

    def tell_uses(self) -> None:
        core = self._core
        assert core is not None
        every = core.presence.columns()
        latest = np.zeros(int(every.segment.max(initial=0)) + 1, np.uint32)
        np.maximum.at(latest, every.segment, every.recency)
        names: list[bytes] = []
        minutes: list[int] = []
        for record in self._table.all():
            ordinal = self._table.ordinal(record.segment)
            tick = int(latest[ordinal]) if ordinal < len(latest) else 0
            minute = int(core.minutes(np.array([tick], np.uint32))[0]) if tick > 1 else 0
            if minute > self._told.get(record.segment, 0):
                names.append(record.segment)
                minutes.append(minute)
        if names:
            core.index.touch(prints_of(names), np.array(minutes, np.uint32))
            self._told.update(zip(names, minutes, strict=True))

    def used_elsewhere(self, segments: Sequence[SegmentRecord]) -> NDArray[np.uint32]:
        core = self._core
        assert core is not None
        prints, minutes = core.index.recency()
        known = dict(zip(prints.tolist(), minutes.tolist(), strict=True))
        names = [record.segment for record in segments]
        told = [known.get(one, 0) for one in prints_of(names).tolist()]
        theirs = [minute if minute > self._told.get(name, 0) else 0 for name, minute in zip(names, told, strict=True)]
        since_s = [record.created_s - core.identity.created_s for record in segments]
        made = np.maximum(np.array(since_s, np.int64), 0) / limits.recency_tick_s
        made[[record.owner in self._names for record in segments]] = 0
        return np.maximum(core.ticks(np.array(theirs, np.uint32)), made.astype(np.uint32))


def _live(table: SegmentTable, present: NDArray[np.bool_], records: RecordArray) -> NDArray[np.bool_]:
    names = records["segment"][present].tolist()
    exists = {name: table.find(name) is not None for name in set(names)}
    if all(exists.values()):
        return present
    alive = present.copy()
    alive[present] = [exists[name] for name in names]
    return alive


def scope_of(owner: bytes) -> bytes:
    """Of the lease on an owner's name."""
    return b"owner" + owner


def prints_of(segments: Sequence[bytes]) -> NDArray[np.uint64]:
    """Fingerprints under which the block index keeps the recency of segments: the random half of their names."""
    return np.frombuffer(b"".join(segment[-8:] for segment in segments), "<u8").astype(np.uint64)
