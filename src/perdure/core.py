"""The parts of one open store, put together once and handed to the verbs.

`Core` holds no logic of its own beyond a few questions every verb asks (is it visible, what time is it for expiry, what
went wrong lately). Built by `store.Store`, used by `reading`, `writing`, `keeper` and `inspect`.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.catalog.api import (
    RECORD,
    BlockIndex,
    ControlStore,
    KeyArray,
    RecordArray,
    SegmentRecord,
    SegmentState,
    as_keys,
    fingerprints,
)
from perdure.catalog.codec import satisfies
from perdure.clock import Clock, SteadyWall
from perdure.directory import Identity
from perdure.errors import CatalogError
from perdure.governance.audit import AuditLog
from perdure.io.api import Engine, Files
from perdure.io.files import reserve_beyond_end
from perdure.io.memory import Scratch
from perdure.keys import key_list
from perdure.pool.dram import DramPool, Slot
from perdure.presence import PresenceIndex
from perdure.rates import Rates
from perdure.segments.copies import Copies
from perdure.segments.health import Health
from perdure.segments.reader import SegmentReader
from perdure.segments.reclaim import Reclaimer
from perdure.segments.recovery import Recovery
from perdure.segments.space import SpaceBudget
from perdure.segments.store import SegmentStore
from perdure.segments.table import SegmentTable
from perdure.segments.writer import SegmentWriter
from perdure.sharing import Sharing
from perdure.tenants import Tenants
from perdure.waiting import Leases, Waiters

_INCIDENTS_MAX = 1024
_INCIDENT = "incident"
_BLOCKS_PER_TICK = 64
STORE_NAMESPACE = "store"
INDEX_LOST_KEY = b"index lost"


class Counters:
    """Totals since the store was opened; one lock acquisition per call of a verb."""

    def __init__(self) -> None:
        self._values: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        with self._lock:
            self._values.update(amounts)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return {name: value for name, value in sorted(self._values.items()) if value}


class Touches:
    """Uses of blocks on their way to the presence index: collected per call, applied together before anyone asks."""

    _CALLS_MAX = 1024

    def __init__(self, presence: PresenceIndex):
        self._presence = presence
        self._calls: deque[tuple[KeyArray, int]] = deque()

    def add(self, keys: KeyArray, tick: int) -> None:
        """`keys` in chain order: the deeper a block, the older it counts, so a chain is evicted from its tail."""
        self._calls.append((keys, tick))
        if len(self._calls) > self._CALLS_MAX:
            self.apply()

    def apply(self) -> None:
        taken: list[tuple[KeyArray, int]] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._calls.popleft())
        if taken:
            prints = fingerprints(np.concatenate([keys for keys, _ in taken]))
            self._presence.touch(prints, np.concatenate([ticks_of(tick, len(keys)) for keys, tick in taken]))


def ticks_of(tick: int, count: int) -> NDArray[np.uint32]:
    """Recency of `count` blocks of one chain used at `tick`, never 0 (which means released)."""
    return np.maximum(tick - np.arange(count) // _BLOCKS_PER_TICK, 1).astype(np.uint32)


class Incidents:
    """What went wrong with single blocks, kept in the control store for `status` and `explain` (bounded)."""

    def __init__(self, control: ControlStore, now_s: Callable[[], float]):
        self._control, self._now_s = control, now_s
        self._lock = threading.Lock()
        names = [int.from_bytes(key, "big") for key, _ in control.items(_INCIDENT)]
        self._next = max(names, default=0) + 1
        self._kept = len(names)

    def add(self, key: bytes, **details: Any) -> None:
        """Best effort: a full or failing control store must not turn a miss into an error."""
        with self._lock:
            entry = json.dumps({"at_s": int(self._now_s()), "key": key.hex(), **details}, sort_keys=True).encode()
            try:
                while True:  # another process may have taken the number
                    number, self._next = self._next, self._next + 1
                    if self._control.compare_and_set(_INCIDENT, number.to_bytes(8, "big"), None, entry):
                        break
                self._kept += 1
                if self._kept > _INCIDENTS_MAX:
                    name, value = self._control.items(_INCIDENT)[0]
                    self._control.compare_and_set(_INCIDENT, name, value, None)
                    self._kept -= 1
            except CatalogError:
                return

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(value) for _, value in self._control.items(_INCIDENT)]


class Pins:
    """Who keeps which blocks from being evicted, until when. The control store's records, mirrored for reclaim; in a
    store that others use too, theirs are asked for."""

    def __init__(self, control: ControlStore, clock: Clock, owner: bytes, *, shared: bool = False):
        self._control, self._clock, self._owner, self._shared = control, clock, owner, shared
        self._pins: dict[int, tuple[float, NDArray[np.uint64]]] = {}
        self._held: list[NDArray[np.uint64]] = []
        self._lock = threading.Lock()

    def add(self, keys: KeyArray, ttl_s: float) -> int:
        deadline = self._clock.boottime() + ttl_s
        pin_id = self._control.pin(self._owner, keys, deadline)
        with self._lock:
            self._pins[pin_id] = (deadline, fingerprints(keys))
        return pin_id

    def drop(self, pin_id: int) -> bool:
        with self._lock:
            self._pins.pop(pin_id, None)
        return self._control.unpin(pin_id)

    @contextlib.contextmanager
    def held(self, keys: KeyArray) -> Iterator[None]:
        """Pinned for the length of a block of code, in this process only: a write does not evict its own blocks."""
        prints = fingerprints(keys)
        with self._lock:
            self._held.append(prints)
        try:
            yield
        finally:
            with self._lock:
                self._held = [one for one in self._held if one is not prints]

    def alive(self) -> NDArray[np.uint64]:
        """Fingerprints of all blocks pinned right now. Raises CatalogError if others' cannot be asked for."""
        now = self._clock.boottime()
        others = [pin for pin in self._control.pins() if pin.deadline_s > now] if self._shared else []
        with self._lock:
            prints = [prints for deadline, prints in self._pins.values() if deadline > now] + self._held
        prints += [fingerprints(as_keys(pin.keys)) for pin in others]
        return np.unique(np.concatenate(prints)) if prints else np.zeros(0, np.uint64)

    def expire(self) -> None:
        now = self._clock.boottime()
        with self._lock:
            self._pins = {pin: value for pin, value in self._pins.items() if value[0] > now}
        self._control.expire(now)

    def __len__(self) -> int:
        return len(self._pins)


class Unreadable:
    """Blocks that the disk would not give (an I/O error, twice): nothing is known about their bytes, so their records
    stay, and are found again by whoever opens the store on a mended disk. Meanwhile they count as missing, and give way
    to a new copy. Thread-safe."""

    def __init__(self) -> None:
        self._records: dict[bytes, bytes] = {}
        self._lock = threading.Lock()

    def add(self, key: bytes, record: bytes) -> None:
        with self._lock:
            self._records[key] = record

    def among(self, keys: KeyArray) -> NDArray[np.bool_]:
        if not self._records:
            return np.zeros(len(keys), bool)
        with self._lock:
            return np.fromiter((key.tobytes() in self._records for key in keys), bool, len(keys))

    def give_way(self, keys: KeyArray, index: BlockIndex) -> None:
        """Remove the unreadable records of `keys`, where they are unchanged, just before new copies are published."""
        chosen = np.flatnonzero(self.among(keys))
        if not len(chosen):
            return
        names = [keys[place].tobytes() for place in chosen]
        with self._lock:
            raw = b"".join(self._records[name] for name in names)
        index.remove(keys[chosen], np.frombuffer(raw, RECORD))
        with self._lock:
            for name in names:
                self._records.pop(name, None)

    def all(self) -> tuple[KeyArray, RecordArray]:
        with self._lock:
            records = dict(self._records)
        return as_keys(records), np.frombuffer(b"".join(records.values()), RECORD)

    def forget(self, keys: KeyArray) -> None:
        """They are given another try."""
        with self._lock:
            for key in keys:
                self._records.pop(key.tobytes(), None)

    def __bool__(self) -> bool:
        return bool(self._records)


@dataclass(slots=True, eq=False)
class Core:
    path: Path
    identity: Identity
    read_only: bool
    owner: bytes
    root_secret: bytes
    clock: Clock
    steady: SteadyWall
    files: Files
    engine: Engine
    scratch: Scratch
    index: BlockIndex
    control: ControlStore
    table: SegmentTable
    segments: SegmentStore
    space: SpaceBudget
    presence: PresenceIndex
    pool: DramPool
    reader: SegmentReader
    writer: SegmentWriter
    reclaimer: Reclaimer
    recovery: Recovery
    health: Health
    pins: Pins
    incidents: Incidents
    rates: Rates
    sharing: Sharing
    tenants: Tenants
    workers: ThreadPoolExecutor  # CPU work (codecs)
    calls: ThreadPoolExecutor  # submit_read, submit_write
    counters: Counters = field(default_factory=Counters)
    unreadable: Unreadable = field(default_factory=Unreadable)
    pending: Pending = field(init=False)
    touches: Touches = field(init=False)
    waiters: Waiters = field(default_factory=Waiters)
    leases: Leases = field(init=False)
    filled: threading.Event = field(default_factory=threading.Event)  # the presence index knows what the catalog knows
    limbo: deque[tuple[threading.Event, list[Slot]]] = field(default_factory=deque)  # slots the disk may still write to
    index_lost: bool = False  # the block index is being rebuilt in the background
    audit: AuditLog | None = None
    sessions: Any = None  # session_heads.Sessions, which is built of this
    cold: Any = None  # cold.Cold, likewise
    erasures: Any = None  # erasure.Erasures, likewise
    holds: Any = None  # holds.Holds, likewise
    publications: Any = None  # publications.Publications, likewise
    copies: Copies | None = None  # of a store with several roots

    def __post_init__(self) -> None:
        self.pending = Pending()
        self.touches = Touches(self.presence)
        self.leases = Leases(self.control, self.clock, self.owner, self.waiters)

    def expiry_now(self) -> int:
        """Seconds since 1970 for expiry decisions; 0 (nothing expires) while the wall clock is in doubt."""
        return 0 if self.steady.paused else int(self.steady.now())

    def kept_s(self) -> float:
        """How long a block nobody uses is kept, by what was evicted last; infinite before anything was."""
        cut = self.reclaimer.cut_tick
        return max(0, self.tick() - cut) * limits.recency_tick_s if cut else math.inf

    def tick(self) -> int:
        """Recency now, in `limits.recency_tick_s` since the store was created."""
        return max(1, int((self.steady.now() - self.identity.created_s) / limits.recency_tick_s))

    def minutes(self, ticks: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Recency ticks -> minutes since 1970, as kept on disk."""
        seconds = self.identity.created_s + ticks * limits.recency_tick_s
        return (seconds / 60).astype(np.uint32)

    def ticks(self, minutes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        seconds = np.maximum(minutes.astype(np.int64) * 60 - self.identity.created_s, 0)
        return (seconds / limits.recency_tick_s).astype(np.uint32)

    def space_of(self, record: SegmentRecord) -> int:
        """What a segment file occupies: its record, or its size where its writer died (its record, if that fails)."""
        if record.state is not SegmentState.OPEN:
            return record.allocated_bytes
        try:
            file = self.segments.reopen(record.segment)
        except FileNotFoundError:
            return 0
        except OSError:
            return record.allocated_bytes
        try:
            return file.size()
        except OSError:
            return record.allocated_bytes
        finally:
            file.close()

    def set_aside(self, key: KeyArray, row: tuple[Any, ...]) -> None:
        """A block in a root that is away: missing, and gives way to a new copy, until the root is back."""
        self.unreadable.add(key.tobytes(), np.array([row], RECORD).tobytes())
        self.presence.remove(fingerprints(key))
        self.pool.drop(key)
        self.counters.add(blocks_away=1)

    def count_space(self) -> None:
        for record in self.table.all():
            self.space.settle(record.segment, self.space_of(record))

    def reserve_catalog_space(self) -> None:
        """Keep disk space for the catalogs that segments cannot take: making room on a full disk needs commits."""
        if self.sharing.shared:  # they are not on this disk
            return
        least, most = limits.catalog_reserve_bytes_min, limits.catalog_reserve_bytes_max
        for name, nbytes in (("control", least), ("index", min(max(self.space.capacity // 64, least), most))):
            reserve_beyond_end(self.path / name / "data.mdb", nbytes)

    def index_found(self) -> None:
        """The block index has been rebuilt completely."""
        mark = self.control.get(STORE_NAMESPACE, INDEX_LOST_KEY)
        self.control.compare_and_set(STORE_NAMESPACE, INDEX_LOST_KEY, mark, None)
        self.index_lost = False

    def locate(self, keys: KeyArray) -> tuple[NDArray[np.bool_], RecordArray]:
        """Present mask and records, publishes that are still on their way to the catalog included."""
        pending = self.pending.among(keys)  # first: what is committed in between is found in the index
        present, records = self.index.lookup(keys)
        if self.sharing.shared:
            present = self.sharing.live(present, records)
            self._remember(keys, present, records)
        for place, record in pending.items():
            at = slice(place, place + 1)
            if not (present[place] and satisfies(records[at], np.array([record], RECORD), self.expiry_now())[0]):
                present[place], records[place] = True, record
        return self.tenants.live(keys, present, records), records

    def _remember(self, keys: KeyArray, present: NDArray[np.bool_], records: RecordArray) -> None:
        """Let the presence index know what others have published or removed: asking for it again costs no message."""
        prints, there = fingerprints(keys), records[present]
        ordinals = np.fromiter(map(self.table.ordinal, there["segment"].tolist()), np.uint32, len(there))
        self.presence.insert(
            prints[present], segment=ordinals, recency=1, expires_s=np.ascontiguousarray(there["expires_s"])
        )
        if len(there) < len(keys):
            self.presence.remove(prints[~present])

    @property
    def knows_expiry(self) -> bool:
        """Whether what is in the presence index is all that may be shown from memory."""
        return self.sharing.shared or self.presence.complete

    def alive(self, present: NDArray[np.bool_], records: RecordArray) -> NDArray[np.bool_]:
        """`present` without what has expired."""
        expires: NDArray[np.uint32] = records["expires_s"]
        alive: NDArray[np.bool_] = present & ((expires == 0) | (expires > self.expiry_now()))
        return alive


class Pending:
    """Ephemeral publishes collected for one commit: visible in this process at once, in the catalog a little later."""

    def __init__(self) -> None:
        self._records: dict[bytes, np.void] = {}
        self._publications: list[object] = []
        self._lock = threading.Lock()
        self._something = threading.Event()
        self.committing = threading.Lock()

    def add(self, publication: object, keys: list[bytes], records: RecordArray) -> None:
        with self._lock:
            self._publications.append(publication)
            self._records.update(zip(keys, records.copy(), strict=True))
        self._something.set()

    def wait(self, timeout_s: float) -> bool:
        """Until there is something to commit (or `wake`)."""
        return self._something.wait(timeout_s)

    def wake(self) -> None:
        self._something.set()

    def take(self) -> list[object]:
        """The publications to commit now; their records stay visible until `remove`."""
        with self._lock:
            self._something.clear()
            taken, self._publications = self._publications, []
            return taken

    def put_back(self, publication: object) -> None:
        """A commit failed: one more try the next time."""
        with self._lock:
            self._publications.insert(0, publication)
        self._something.set()

    def remove(self, keys: list[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._records.pop(key, None)

    def records(self) -> list[np.void]:
        with self._lock:
            return list(self._records.values())

    def among(self, keys: KeyArray) -> dict[int, np.void]:
        """Position -> record of those of `keys` that wait for their commit."""
        if not self._records:
            return {}
        with self._lock:
            known = self._records
            return {place: known[key] for place, key in enumerate(key_list(keys)) if key in known}

    def __bool__(self) -> bool:
        return bool(self._records)
