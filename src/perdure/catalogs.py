"""Which catalog a store has: LMDB in its directory, or a Valkey Cluster that is named when it is opened.

    perdure.open("DIR", catalog="valkey://h1,h2:7000,h3")
    catalog="valkey://user:password@h1,h2?read_s=0.05&write_s=0.5&replicas=2&lease_s=10"

`read_s`: by then what could not be looked up is a miss; `write_s`: by then a change is acknowledged or refused;
`replicas`: how many must have a change of the control store before it is acknowledged; `lease_s`: who was silent for
longer has lost its open segments to the others.

Contract
- The kind is written down when the store is made; opening it with another kind is refused, for it would look empty.
- A cluster that has lost the store's control records is refused too, while the directory still holds segments.
- Hosts that share a cluster measure leases by its clock, not by their own (`SharedClock`).
- Not built yet, and refused by name: TLS to the cluster.
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote

from perdure import limits
from perdure.catalog.api import BlockIndex, ControlStore, Lease
from perdure.catalog.lmdb import LmdbIndex
from perdure.catalog.lmdb_control import LmdbControl
from perdure.clock import Clock
from perdure.core import INDEX_LOST_KEY, STORE_NAMESPACE
from perdure.directory import Identity
from perdure.errors import CatalogError, FormatError, InvalidArgument
from perdure.options import refuse_unknown
from perdure.segments.table import News, SegmentTable
from perdure.sharing import Alone, Among, Onlooker, Sharing
from perdure.waiting import Waiters

_SCHEME = "valkey://"
_PORT = 6379
_STORE_BYTES = 12  # of the store's id, as the name of its keys in a cluster


class Catalogs(Protocol):
    """The catalogs of one store. The two stores are closed by who got them."""

    shared: bool
    """Whether other processes may write to the store too."""

    def control(self) -> ControlStore: ...

    def news(self) -> News | None:
        """Of segments, where others change them too."""
        ...

    def index(self, map_bytes: int) -> BlockIndex: ...

    def index_is_whole(self) -> bool:
        """Whether the block index is there with all that was ever put into it."""
        ...

    def drop_index(self) -> None: ...

    def clock(self, clock: Clock) -> Clock:
        """The store's clock, by which whoever shares this catalog measures leases."""
        ...

    def sharing(self, control: ControlStore, clock: Clock, table: SegmentTable) -> Sharing:
        """Whose segments are whose."""
        ...

    def watch(self, waiters: Waiters) -> None:
        """Wake waiters for what other processes publish and release, until `close`."""
        ...

    def close(self) -> None: ...


def masked(catalog: str) -> str:
    """Without user and password, for people to see."""
    return re.sub("://.*@", "://", catalog)


def kind_of(catalog: str | None) -> str:
    """ "lmdb" or "valkey"; InvalidArgument if it is neither."""
    if catalog is None:
        return "lmdb"
    parse(catalog)
    return "valkey"


def open_catalogs(catalog: str | None, path: Path, identity: Identity, *, read_only: bool) -> Catalogs:
    """Raises InvalidArgument, FormatError (the store was made with another kind), CatalogError."""
    kind = kind_of(catalog)
    if kind != identity.catalog:
        wanted = "leave `catalog` out" if identity.catalog == "lmdb" else f"open it with catalog='{_SCHEME}HOST,...'"
        raise FormatError(f"{path}: this store was made with a catalog of the kind {identity.catalog!r}; {wanted}")
    if catalog is None:
        return Embedded(path, read_only)
    return InCluster(catalog, path, identity, read_only)


class Embedded:
    shared = False

    def __init__(self, path: Path, read_only: bool):
        self._path, self._read_only = path, read_only

    def control(self) -> ControlStore:
        return LmdbControl(self._path / "control", read_only=self._read_only)

    def news(self) -> News | None:
        return None

    def index(self, map_bytes: int) -> BlockIndex:
        return LmdbIndex(self._path / "index", map_bytes=map_bytes, read_only=self._read_only)

    def index_is_whole(self) -> bool:
        return (self._path / "index" / "data.mdb").exists()

    def drop_index(self) -> None:
        shutil.rmtree(self._path / "index", ignore_errors=True)

    def clock(self, clock: Clock) -> Clock:
        return clock

    def sharing(self, control: ControlStore, clock: Clock, table: SegmentTable) -> Sharing:
        return Alone(secrets.token_bytes(limits.id_bytes), table)

    def watch(self, waiters: Waiters) -> None:
        """Nobody else writes."""

    def close(self) -> None:
        pass


class InCluster:
    shared = True

    def __init__(self, catalog: str, path: Path, identity: Identity, read_only: bool):
        try:
            from perdure.catalog.valkey import ValkeyIndex
            from perdure.catalog.valkey_cluster import Cluster
            from perdure.catalog.valkey_control import ValkeyControl
            from perdure.catalog.valkey_wake import Watcher
        except ImportError as error:
            raise InvalidArgument(f"catalog={_SCHEME}...: {error}; install perdure[cluster]") from error
        at = parse(catalog)

        def cluster() -> Cluster:
            return Cluster(at.seeds, user=at.user, password=at.password)

        store = identity.store[:_STORE_BYTES].encode()
        self._path, self._read_only, self._lease_s = path, read_only, at.lease_s
        self._cluster = cluster()
        self._index = ValkeyIndex(cluster(), store, read_s=at.read_s, write_s=at.write_s, read_only=read_only)
        self._control = ValkeyControl(cluster(), store, replicas=at.replicas, wait_s=at.write_s, read_only=read_only)
        self._watcher_type = Watcher
        self._watcher: Watcher | None = None

    def control(self) -> ControlStore:
        known = self._control.get(STORE_NAMESPACE, b"capacity") is not None
        if not known and any((self._path / "segments").glob("*/*.seg")):
            self.close()
            raise CatalogError(
                f"{self._path}: holds segments, but the cluster does not know this store: it is another cluster, or "
                "has lost its data; restore it from a backup"
            )
        return self._control

    def news(self) -> News | None:
        return self._control.news().look

    def index(self, map_bytes: int) -> BlockIndex:
        if not self._read_only:
            self._index.mark_whole()  # what is missing from it is remembered in the control store
        return self._index

    def index_is_whole(self) -> bool:
        return self._index.is_whole()

    def drop_index(self) -> None:
        self._index.clear()

    def clock(self, clock: Clock) -> Clock:
        self._clock = SharedClock(clock, self._control.clock_s)
        return self._clock

    def sharing(self, control: ControlStore, clock: Clock, table: SegmentTable) -> Sharing:
        def index_is_complete() -> bool:
            return control.get(STORE_NAMESPACE, INDEX_LOST_KEY) is None and self._index.is_whole()

        if self._read_only:
            return Onlooker(control, table, self._clock.own_boottime)
        return Among(
            control, clock, table, self._lease_s, self._index.close_segment, index_is_complete,
            self._clock.keep_time, self._clock.own_boottime,
        )  # fmt: skip

    def watch(self, waiters: Waiters) -> None:
        channels = self._index.channels() | self._control.channels()
        self._watcher = self._watcher_type(self._cluster, channels, waiters.notify, waiters.wake_all)

    def servers(self) -> list[dict[str, Any]]:
        """See `valkey_servers.servers`."""
        from perdure.catalog.valkey_servers import servers

        return servers(self._cluster, time.monotonic() + limits.cluster_write_s_default)

    def server_time_s(self) -> float:
        return self._control.clock_s()

    def lease_of(self, scope: bytes) -> Lease | None:
        return self._control.lease_of(scope)

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        for part in (self._index, self._control, self._cluster):
            part.close()


class SharedClock:
    """A host's clocks, with leases and pins on the time of the cluster, carried on by CLOCK_BOOTTIME between two
    readings. Hosts differ by what their nodes' clocks differ, and by a round trip."""

    def __init__(self, clock: Clock, read_s: Callable[[], float]):
        self._clock, self._read_s = clock, read_s
        self._read()

    def _read(self) -> None:
        self._offset_s = self._read_s() - self._clock.boottime()
        self._read_at_s = self._clock.monotonic()

    def keep_time(self) -> None:
        """Read the cluster's clock again, if that was long ago. Raises CatalogUnavailable."""
        if self._clock.monotonic() - self._read_at_s > limits.cluster_clock_s:
            self._read()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def boottime(self) -> float:
        return self._clock.boottime() + self._offset_s

    def own_boottime(self) -> float:
        """This host's alone: it never jumps."""
        return self._clock.boottime()

    def wall(self) -> float:
        return self._clock.wall()

    def boot_id(self) -> bytes:
        return self._clock.boot_id()


@dataclass(frozen=True, slots=True)
class Address:
    """What a catalog's URL says."""

    seeds: list[tuple[str, int]]
    user: str = ""
    password: str = ""
    read_s: float = limits.cluster_read_s_default
    write_s: float = limits.cluster_write_s_default
    replicas: int = 1
    lease_s: float = limits.cluster_lease_s_default


def parse(catalog: str) -> Address:
    """The parts of a URL. Raises InvalidArgument, UnknownOption."""
    if not isinstance(catalog, str) or not catalog.startswith(_SCHEME):
        hint = "; TLS to the cluster is not built yet" if str(catalog).startswith(("valkeys://", "rediss://")) else ""
        raise InvalidArgument(f"catalog={masked(str(catalog))!r}: '{_SCHEME}HOST[:PORT],...' is possible{hint}")
    login, _, rest = catalog.removeprefix(_SCHEME).rpartition("@")  # a password may have any character
    hosts, _, query = rest.partition("?")
    user, _, password = login.partition(":")
    options = _options(query)
    seeds = [_seed(one) for one in hosts.rstrip("/").split(",")]
    return Address(seeds, unquote(user), unquote(password), **options)


def _options(query: str) -> dict[str, Any]:
    given = dict(parse_qsl(query, keep_blank_values=True))
    least = {
        "read_s": limits.cluster_judge_s_min, "write_s": limits.cluster_judge_s_min, "replicas": 0,
        "lease_s": limits.cluster_lease_s_min,
    }  # fmt: skip
    refuse_unknown(given, tuple(least), "catalog")
    out: dict[str, Any] = {}
    for name, text in given.items():
        try:
            out[name] = int(text) if name == "replicas" else float(text)
        except ValueError:
            out[name] = -1
        if not least[name] <= out[name] <= limits.cluster_call_s_max:
            raise InvalidArgument(
                f"catalog: {name}={text!r}: from {least[name]} to {limits.cluster_call_s_max:.0f} is possible"
            )
    return out


def _seed(text: str) -> tuple[str, int]:
    host, colon, port = (text, "", "") if text.endswith("]") else text.rpartition(":")
    if not colon:
        host, port = text, str(_PORT)
    if not host.strip("[]") or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidArgument(f"catalog: {text!r} is not HOST or HOST:PORT; write '{_SCHEME}h1,h2:7000,h3'")
    return host.strip("[]"), int(port)
