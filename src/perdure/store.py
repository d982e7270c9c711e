"""Opening and closing a store: the parts are put together here, and nowhere else.

    with perdure.open("DIR", capacity="20GiB") as store:
        space = store.keyspace(model=..., weights=..., layout=..., tenant=...)

Contract
- One writer per directory (flock), or with `catalog` many, each with a state directory; read-only opens beside them.
  Opening scans nothing: what needs a scan is done in the background by `keeper`, while serving.
- Thread-safe. After fork() the child's copy is unusable and says so; the parent's goes on.
- `close` commits, seals and syncs; a process that dies without it loses nothing that was acknowledged.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from perdure import cold as cold_tier
from perdure import directory, inspect, limits, session_admin
from perdure.admission import Admission, Admissions, check
from perdure.catalog.api import BlockIndex, ControlStore
from perdure.catalogs import kind_of, open_catalogs
from perdure.clock import Clock, SteadyWall, SystemClock
from perdure.core import STORE_NAMESPACE, Core, Incidents, Pins
from perdure.errors import CatalogError, StoreClosed, StorePathError
from perdure.governance.audit import Event, open_log
from perdure.governance.keystore import open_keystore
from perdure.governing import Governing, pending, serve
from perdure.io.aio import default_engine
from perdure.io.api import Engine, Files
from perdure.io.files import PosixFiles
from perdure.io.memory import Scratch
from perdure.io.objects import Objects, ObstoreObjects
from perdure.io.root_files import NotingEngine
from perdure.io.roots import Roots
from perdure.keeper import CLOCK_KEY, Keeper
from perdure.keys import KeyspaceIdentity, KVLayout
from perdure.keyspace import Keyspace
from perdure.opening import (
    capacity_bytes_of,
    check_sharing,
    index_lost_of,
    record_settings,
    segment_bytes_of,
    take_over,
    tend_copies,
)
from perdure.options import parse_size, refuse_unknown
from perdure.pool.dram import DramPool
from perdure.prefetch import Prefetcher
from perdure.presence import PresenceIndex
from perdure.publications import Publications, Publishing
from perdure.publishing import flush_pending
from perdure.rates import Rates
from perdure.roots import namespaces, total_bytes
from perdure.segments.health import Health
from perdure.segments.moving import Mover
from perdure.segments.reader import SegmentReader
from perdure.segments.reclaim import Reclaimer
from perdure.segments.recovery import Recovery
from perdure.segments.space import SpaceBudget, kept_back_bytes
from perdure.segments.store import SegmentStore
from perdure.segments.table import SegmentTable
from perdure.segments.writer import SegmentWriter
from perdure.session_heads import Sessions
from perdure.tenants import Tenants

_CALL_THREADS = 4
_INDEX_BYTES_PER_PAGE = 0.1  # address space for the index: capacity in pages times this, generously
_FILL_WAIT_S = 30.0
_OPTIONS = (
    "capacity", "memory", "read_only", "mirror", "roots", "admission", "codec", "catalog", "state",
    "audit", "encryption", "kek", "cold", "cold_capacity", "seams",
)  # fmt: skip


@dataclass(slots=True)
class Seams:
    """Sources of nondeterminism, replaceable as a whole by tests and benchmarks."""

    clock: Clock = field(default_factory=SystemClock)
    files: Callable[[str], Files] = PosixFiles
    engine: Callable[[], Engine] = default_engine
    index: Callable[[BlockIndex], BlockIndex] = lambda index: index
    control: Callable[[ControlStore], ControlStore] = lambda control: control
    pool: Callable[[int], DramPool] = DramPool
    objects: Callable[[str], Objects] = ObstoreObjects


class Store(Governing, Publishing):
    """One open directory. Made by `perdure.open`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity: int | str | None,
        memory: int | str,
        read_only: bool,
        mirror: str | os.PathLike[str] | None,
        admission: Admission,
        codec: str,
        catalog: str | None,
        state: str | os.PathLike[str] | None,
        seams: Seams,
        audit: str | bool = "auto",
        encryption: str = "auto",
        kek: str = "",
        roots: Sequence[str | os.PathLike[str]] | None = None,
        cold: str | None = None,
        cold_capacity: int | str | None = None,
        drop_index: bool = False,
    ):
        self.path = Path(path)
        self._cold = cold, cold_capacity
        self._codec = codec
        self._open_keys = partial(open_keystore, encryption=encryption, kek=kek)
        self._closed: str | None = None
        self._spaces: dict[bytes, Keyspace] = {}
        memory_bytes = parse_size(memory, "memory")
        check_sharing(catalog, state, roots)
        identity = directory.prepare(self.path, create=not read_only, clock=seams.clock, catalog=kind_of(catalog))
        with contextlib.ExitStack() as undo:
            self._lock, place = None, self.path
            if not read_only:
                try:
                    if catalog is not None:
                        place = directory.state_directory(self.path if state is None else Path(state))
                    self._lock = directory.WriterLock(place, seams.clock)
                except StorePathError:
                    raise
                except OSError as error:
                    why = f"{self.path}: cannot be written ({error}); check owner, mode, mount"
                    raise StorePathError(why) from error
                undo.callback(self._lock.close)
            self._catalogs = open_catalogs(catalog, self.path, identity, read_only=read_only)
            undo.callback(self._catalogs.close)
            places = partial(namespaces, self.path, identity, mirror=mirror, given=roots, read_only=read_only,
                            files=seams.files, clock=seams.clock.boottime)  # fmt: skip
            self._core = self._assemble(identity, capacity, memory_bytes, read_only, places, seams, drop_index, undo)
            self._catalogs.watch(self._core.waiters)
            if not read_only:
                self._core.audit = open_log(place, identity.store, self._core.root_secret, seams.clock.wall, audit,
                                            one_of_many=self._catalogs.shared)  # fmt: skip
            if self._core.audit is not None:
                undo.callback(self._core.audit.close)
                record_settings(self._core, {"mirror": mirror and str(mirror), "kek": kek, "catalog": kind_of(catalog)})
            self._prefetcher = Prefetcher(self._core)
            self._core.sessions = Sessions(self._core, self._check, self._prefetcher)
            self._core.publications = Publications(self._core, self._check)
            self._admissions = Admissions(admission, self._core.clock.boottime, self._core.kept_s)
            self._core.erasures = serve(self._core)
            undo.callback(self._core.erasures.stop)
            self._core.erasures.load()
            self._keeper = Keeper(self._core)
            undo.callback(self._keeper.stop)
            self._keeper.start()
            undo.pop_all()
        _open_stores.add(self)

    def _assemble(
        self,
        identity: directory.Identity,
        capacity: int | str | None,
        memory_bytes: int,
        read_only: bool,
        place: Callable[[], tuple[Sequence[Files], Roots | None]],
        seams: Seams,
        drop_index: bool,
        undo: contextlib.ExitStack,
    ) -> Core:
        path, clock, secret = self.path, self._catalogs.clock(seams.clock), directory.root_secret(self.path)
        control = seams.control(self._catalogs.control())
        undo.callback(control.close)
        capacity_bytes = capacity_bytes_of(control, capacity, read_only)
        index_lost = index_lost_of(control, self._catalogs, drop_index, read_only)
        map_bytes = int(capacity_bytes * _INDEX_BYTES_PER_PAGE) + 64 * limits.MIB
        index = seams.index(self._catalogs.index(map_bytes))
        undo.callback(index.close)
        shared = self._catalogs.shared
        table = SegmentTable(control, self._catalogs.news())
        sharing = self._catalogs.sharing(control, clock, table)
        undo.callback(sharing.leave)
        if not read_only and not shared:
            take_over(control, sharing.owner)
        places, roots = place()
        cold = cold_tier.choice_of(control, table, *self._cold, read_only, partial(pending, places[0]))
        keys = self._open_keys(path, secret, read_only, shared)
        segments = SegmentStore(places, secret, keys)
        if not read_only and not shared:
            # a file without a record, too: of a control store that is older than it, nothing may be made unreadable
            keys.tidy(lambda segment: table.get(segment) is not None or segments.exists(segment))
        undo.callback(segments.close)
        tenants = Tenants(places[0], keys, control, secret, read_only=read_only)
        engine = cold_tier.engine_for(cold, seams.engine() if roots is None else NotingEngine(seams.engine()))
        undo.callback(engine.close)
        scratch, pool = Scratch(), seams.pool(memory_bytes)
        undo.callback(pool.close)
        cores = len(os.sched_getaffinity(0))
        # On a disk smaller than the capacity, too, reclaim needs a choice of segments.
        segment_bytes = segment_bytes_of(min(capacity_bytes, total_bytes(path, roots)))
        space = SpaceBudget(capacity_bytes, kept_back_bytes(capacity_bytes, segment_bytes))
        presence, pins = PresenceIndex(), Pins(control, clock, sharing.owner, shared=shared)
        seen = control.get(STORE_NAMESPACE, CLOCK_KEY)
        steady = SteadyWall(clock, struct.unpack("<d", seen)[0] if seen else None)
        reader = SegmentReader(segments, engine, scratch, pool, decode_threads=cores)
        undo.callback(reader.close)
        writer = SegmentWriter(segments, table, engine, scratch, space, clock, sharing.owner, segment_bytes)
        recovery, mover = Recovery(segments, table, engine, scratch, reader), Mover(table, index, presence, writer)
        reclaimer = Reclaimer(
            segments, table, space, index, presence, pool, reader, writer, mover, scratch, recovery.entries, pins.alive,
            lambda: 0 if steady.paused else int(steady.now()), lambda: _recency_ready(core),
            lambda: sharing.sole(b"room", limits.cluster_turn_s), sharing.used_elsewhere,
        )  # fmt: skip
        core = Core(
            path=path, identity=identity, read_only=read_only, owner=sharing.owner, root_secret=secret, clock=clock,
            steady=steady, files=places[0], engine=engine, scratch=scratch, index=index, control=control, table=table,
            segments=segments, space=space, presence=presence, pool=pool, reader=reader, writer=writer,
            reclaimer=reclaimer, recovery=recovery, health=Health(clock),
            sharing=sharing, tenants=tenants, pins=pins, incidents=Incidents(control, steady.now), rates=Rates(),
            workers=ThreadPoolExecutor(cores, thread_name_prefix="perdure-codec"),
            calls=ThreadPoolExecutor(_CALL_THREADS, thread_name_prefix="perdure-call"), index_lost=index_lost,
        )  # fmt: skip
        tend_copies(core, roots)
        core.count_space()
        cold_tier.attach(core, cold, mover, seams.objects)
        if not read_only:
            core.reserve_catalog_space()
        sharing.join(core)
        return core

    # --- use
    def keyspace(
        self,
        *,
        model: str,
        weights: str,
        layout: KVLayout,
        tenant: str,
        lora: str = "",
        draft: str = "",
        salt: str = "",
        codec: str | None = None,
    ) -> Keyspace:
        """A tenant's view of one model's blocks. Everything here is part of every block's name.

        weights: digest of the *loaded* weights, "sha256:...". lora: content digest of the adapter. draft: digest of a
        draft model whose state is in the blocks. salt: keeps apart what would be equal otherwise. codec: "auto", "on"
        or "off" (lossless compression).
        """
        self._check()
        identity = KeyspaceIdentity(model, weights, layout, lora, draft, salt)
        space = Keyspace(self._core, self._check, tenant, identity, codec or self._codec, self._admissions)
        inspect.register(self._core, space)
        self._spaces[space.digest] = space
        self._prefetcher.know(space)
        self._core.publications.prepare(space)
        return space

    def sessions(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """All sessions that are not over, of one tenant if named. JSON-able; times in seconds since 1970."""
        self._check()
        return session_admin.every(self._core, tenant)

    def status(self) -> dict[str, Any]:
        """What is stored, what it takes, how the store and its host are. JSON-able; sizes in bytes."""
        self._check()
        answer = inspect.status(self._core)
        answer["codecs"] = {digest.hex(): space.codec.reason for digest, space in self._spaces.items()}
        answer["admission"] = self._admissions.status()
        answer["audit"] = None if self._core.audit is None else self._core.audit.status()
        answer["background"] = {"ready": self._keeper.ready.is_set(), "last_error": self._keeper.last_error}
        return answer

    def verify(self, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """Read and check every published record; see `inspect.verify`."""
        self._check()
        return inspect.verify(self._core, progress)

    def explain(self, key: bytes) -> dict[str, Any]:
        """Everything known about one block, by its 32-byte key."""
        self._check()
        if self._core.audit is not None:
            self._core.audit.note(Event("admin", detail="explain", first=self._core.audit.id_of("block", key)))
        return inspect.explain(self._core, key)

    def explain_prefix(self, space: Keyspace, token_ids: ArrayLike) -> dict[str, Any]:
        """Why a prefix hits as far as it does, and which identity fields differ where another keyspace holds it."""
        self._check()
        return inspect.explain_prefix(self._core, space, token_ids)

    def sync(self) -> None:
        """Commit ephemeral publishes now instead of within `limits.ephemeral_publish_delay_s`."""
        self._check()
        flush_pending(self._core)

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Until the background work after opening is done. Serving does not need it."""
        self._check()
        return self._core.read_only or self._keeper.ready.wait(timeout_s)

    # --- end
    def close(self) -> None:
        """Commit, seal, sync. Idempotent. Calls in other threads end with StoreClosed.

        Raises CatalogError if ephemeral blocks could not be committed; the store is closed all the same."""
        if self._closed is not None:
            return
        self._closed = f"{self.path} was closed; open it again"
        core = self._core
        self._prefetcher.close()
        core.waiters.wake_all()  # they see that it is closed
        core.calls.shutdown(wait=True)
        with contextlib.ExitStack() as steps:  # run in reverse order, each even if another fails
            if self._lock is not None:
                steps.callback(self._lock.close)
            if core.audit is not None:
                steps.callback(core.audit.close)
                steps.callback(core.audit.note, Event("close"))
            for part in (core.pool, core.control, core.index, self._catalogs, core.engine, core.segments, core.reader):
                steps.callback(part.close)
            steps.callback(core.workers.shutdown)
            steps.callback(core.sharing.leave)
            if not core.read_only:
                steps.callback(self._keeper.attempt, self._keeper.save_recency)  # advisory: no reason to fail
                steps.callback(core.writer.close)
                steps.callback(flush_pending, core, last=True)
                if core.cold is not None:
                    steps.callback(core.cold.close)
                steps.callback(core.erasures.stop)
            steps.callback(self._keeper.stop)

    @property
    def core(self) -> Core:
        """The parts, for what is built on top of a store (the service)."""
        return self._core

    def _check(self) -> None:
        if self._closed is not None:
            raise StoreClosed(self._closed)

    def _forked(self) -> None:
        """In the child of a fork: nothing of the parent's store may be touched."""
        if self._closed is not None:
            return
        self._closed = f"{self.path} was opened by the parent process; open it again in this one"
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open(path: str | os.PathLike[str], **options: Any) -> Store:  # noqa: A001 (perdure.open is its public name)
    """Open (and create, unless `read_only`) the store in a directory.

    capacity: bytes or text ("20GiB"): what the segments may occupy; kept from the last time if not given.
    memory: bytes or text: DRAM tier of this process ("256MiB"); 0 switches it off.
    read_only: look and read beside a writer; nothing is changed.
    mirror: second directory, for `retained` durability.
    roots: more directories for segments, one per device; those from the last time are kept. A new block goes where most
    space is free, a `retained` one into two of them.
    admission: which blocks are worth storing: "always", "never", "value" (by expected value, learned; `ValueAdmission`
    with other prices), or a function (`AdmissionRequest` -> mask). codec: default of keyspaces ("auto", "on", "off").
    catalog: "valkey://h1,h2,h3" for a Valkey Cluster in place of LMDB in the directory; see `perdure.catalogs`.
    audit: "on": keep an audit log in DIR/audit (with `state`: there); "reads": and let no engine read memory unseen;
    "off"; "auto": as last time, at first off.
    encryption: of new segments: "on", "off", "tenants:NAME,NAME"; "auto": as last time, at first off. kek: what wraps
    their keys: "" (a file in DIR/keystore), "file:PATH", "vault:URL#KEY", "pkcs11:URI".
    cold: "s3://BUCKET/PREFIX": cold segments go there instead of being evicted (`docs/cold-tier.md`); "off", "drop";
    as last time if not given. cold_capacity: what they may take there (1 TiB).
    state: with `catalog`: local directory for what only this process may use (a lock); DIR if not given. Processes that
    share DIR, on one host or many, need one each.
    seams: clock, files, engine and catalog wrappers, for tests and benchmarks.

    Raises StorePathError, FormatError, StoreLocked, CatalogError, InvalidArgument, UnknownOption.
    """
    refuse_unknown(options, _OPTIONS, "perdure.open")
    check(options.get("admission"))
    chosen: Mapping[str, Any] = {
        "capacity": None, "memory": "256MiB", "read_only": False, "mirror": None, "admission": "always",
        "codec": "auto", "catalog": None, "state": None,
    } | options  # fmt: skip
    return Store(path, **{"seams": Seams(), **chosen})


def rebuild(
    path: str | os.PathLike[str],
    progress: Callable[[int, int], None] | None = None,
    *,
    catalog: str | None = None,
    state: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Recreate the block index from the segments. The store must not be open (in a cluster others may have it
    open: give `state`). Returns its status afterwards."""
    store = Store(
        path, capacity=None, memory=0, read_only=False, mirror=None, admission="always", codec="auto", catalog=catalog,
        state=state, seams=Seams(), drop_index=True,
    )  # fmt: skip
    with store:
        while not store.wait_ready(0.1):
            if progress is not None:
                progress(*store._keeper.progress)  # noqa: SLF001 (same module)
            if store._keeper.rebuild_error is not None:  # noqa: SLF001
                raise CatalogError(
                    f"{path}: not everything could be loaded ({store._keeper.rebuild_error}); "  # noqa: SLF001
                    "mend that and run it again, or open the store: it goes on trying, and serves what it has"
                )
        return store.status()


def _recency_ready(core: Core) -> None:
    """Before choosing what to evict: let the fill end (1 s per million blocks), apply uses that were only noted."""
    core.filled.wait(_FILL_WAIT_S)
    core.touches.apply()
    core.sharing.refresh()


_open_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_open_stores):
        store._forked()  # noqa: SLF001 (same module)


def _at_exit() -> None:
    """A process that ends without closing its stores loses nothing it was told is stored."""
    for store in list(_open_stores):
        store.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)

__all__ = ["Seams", "Store", "open", "rebuild"]
