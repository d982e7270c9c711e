"""Single flight beyond its conformance suite: who waits costs no thread, dies, is stopped, and is never forgotten."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.served import serving, tcp_address

import perdure
from perdure import RemoteStore, Seams, Store, flight, limits
from perdure.catalog.faulty import FailCalls, FaultyControl
from perdure.clock import FakeClock
from perdure.errors import CatalogError
from perdure.service import messages as m
from perdure.service.fields import pack_lease
from perdure.service.parking import Parking, Ticket
from perdure.service.server import Server
from perdure.service.verbs import Waiting
from perdure.testing.flight import started, waiters
from perdure.testing.store import FOUND, STORED, chain, keyspace, read, write
from perdure.testing.transport import ServiceProcess, until
from perdure.waiting import Waiter, Waiters

WAIT_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with perdure.open(tmp_path / "store", capacity="64MiB", memory=0) as store:
        yield store


# --- the registry
def test_ten_thousand_waiters_are_handed_over_in_one_call() -> None:
    registry, calls, before = Waiters(), [], threading.active_count()
    mine = [Waiter(calls.append) for _ in range(10_000)]
    keys = np.arange(64, dtype=np.uint8).reshape(2, 32)
    names = tuple(perdure.catalog.api.fingerprints(keys).tolist())
    for number, waiter in enumerate(mine):
        registry.add(waiter, (names[0], number.to_bytes(4, "big")))
    assert threading.active_count() == before
    registry.published(keys[1:])
    assert not calls
    registry.published(keys)
    assert [len(call) for call in calls] == [10_000]
    assert set(calls[0]) == set(mine)
    registry.published(keys)
    assert len(calls) == 1
    for waiter in mine:
        registry.remove(waiter)
    assert len(registry) == 0


def test_who_is_added_again_is_not_woken_for_what_it_waited_for_before() -> None:
    registry, woken = Waiters(), []
    waiter = Waiter(woken.append)
    registry.add(waiter, (1, b"scope"))
    registry.add(waiter, (2, b"scope"))
    registry.notify([1])
    assert not woken
    registry.notify([b"scope"])
    assert woken == [[waiter]]
    registry.add(waiter, (3,))
    registry.wake_all()
    assert len(woken) == 2
    assert len(registry) == 0


def test_nothing_is_missed_between_looking_and_waiting(store: Store) -> None:
    """The block is published at the moment at which a waiter has looked for the last time before it registers."""
    space = keyspace(store)
    keys = chain(space, 1, 2)

    class Late(flight.Following):
        looks = 0

        def look(self) -> flight.Look:
            seen = super().look()
            self.looks += 1
            if self.looks == 1:
                write(space, keys)
            return seen

    wish = Late(store.core, keys, 0)
    assert flight.wait(store.core, wish, time.monotonic() + WAIT_S, lambda: None) == 2
    assert wish.looks == 2
    assert len(store.core.waiters) == 0


def test_many_chains_and_many_waiters_leave_nothing_behind(store: Store) -> None:
    space = keyspace(store)
    chains = [chain(space, number, 12) for number in range(8)]

    def follow(number: int) -> int:
        keys, known = chains[number % 8], 0
        while known < 12:
            known = space.follow(keys, known=known, wait_s=WAIT_S)
        return known

    def publish(number: int) -> None:
        order = np.random.default_rng(number).permutation(12)
        for at in order.tolist():
            write(space, chains[number][at : at + 1], durability="ephemeral")

    with waiters(40) as pool:
        following = [pool.submit(follow, number) for number in range(32)]
        list(pool.map(publish, range(8)))
        assert [one.result(WAIT_S) for one in following] == [12] * 32
    assert len(store.core.waiters) == 0


# --- leases
def test_leases_expire_by_the_clock_that_goes_on_while_the_machine_sleeps(tmp_path: Path) -> None:
    clock = FakeClock()
    with perdure.open(tmp_path / "store", capacity="64MiB", memory=0, seams=Seams(clock=clock)) as store:
        space = keyspace(store)
        keys = chain(space, 1, 2)
        assert space.reserve(keys, ttl_s=30.0) is not None
        with waiters() as pool:
            second = started(pool, space.reserve, keys, ttl_s=30.0, wait_s=WAIT_S)
            clock.step(86_400.0)
            store.core.leases.expire()
            assert space.reserve(keys) is None
            clock.advance(31.0)
            store.core.leases.expire()
            assert second.result(WAIT_S) is not None
        assert space.reserve(keys) is None


def test_an_ended_lease_does_not_end_its_successor(store: Store) -> None:
    space = keyspace(store)
    keys = chain(space, 1, 2)
    first = space.reserve(keys)
    assert first is not None
    assert space.end_lease(first)
    second = space.reserve(keys)
    assert second is not None
    assert not space.end_lease(first)
    assert space.reserve(keys) is None
    assert space.end_lease(second)


def test_a_failing_catalog_fails_the_call_and_leaves_no_waiter(tmp_path: Path) -> None:
    plan = FailCalls(op="acquire", first=2)
    seams = Seams(control=lambda control: FaultyControl(control, plan))
    with perdure.open(tmp_path / "store", capacity="64MiB", memory=0, seams=seams) as store:
        space = keyspace(store)
        keys = chain(space, 1, 2)
        first = space.reserve(keys)
        assert first is not None
        with waiters() as pool:
            second = started(pool, space.reserve, keys, wait_s=WAIT_S)
            assert space.end_lease(first)
            with pytest.raises(CatalogError):
                second.result(WAIT_S)
        assert len(store.core.waiters) == 0
        assert space.reserve(keys, wait_s=WAIT_S) is not None


def test_beside_a_writer_one_follows_without_being_woken(store: Store) -> None:
    space = keyspace(store)
    keys = chain(space, 1, 3)
    write(space, keys[:1])
    with perdure.open(store.path, read_only=True, memory=0) as beside, waiters() as pool:
        third = started(pool, keyspace(beside).follow, keys, known=2, wait_s=WAIT_S)
        write(space, keys[1:])
        assert third.result(WAIT_S) == 3


@pytest.mark.parametrize("verb", ["acquire", "release"])
def test_a_lease_nobody_is_sure_of_costs_one_lease_time(tmp_path: Path, verb: str) -> None:
    """The call failed but was carried out: who waits is woken when that lease is over, as by any other."""
    plan, clock = FailCalls(1, "unknown", op=verb), FakeClock()
    seams = Seams(control=lambda control: FaultyControl(control, plan), clock=clock)
    with perdure.open(tmp_path / "store", capacity="64MiB", memory=0, seams=seams) as store:
        space, leases = keyspace(store), store.core.leases
        keys = chain(space, 1, 2)
        woken: list[list[Waiter]] = []
        store.core.waiters.add(Waiter(woken.append), (keys[-1].tobytes(),))

        def lifetime() -> None:
            lease = space.reserve(keys, ttl_s=30.0)
            assert lease is not None
            space.end_lease(lease)

        with pytest.raises(CatalogError):
            lifetime()
        assert (space.reserve(keys) is None) == (verb == "acquire")
        clock.advance(31.0)
        leases.expire()
        assert woken
        assert space.reserve(keys) is not None


# --- parked questions
def test_ten_thousand_parked_questions_need_no_thread(store: Store) -> None:
    space, answers = keyspace(store), []
    keys = chain(space, 1, 3)
    write(space, chain(space, 2, 3))  # starts the threads of the disk
    parking = Parking(store.core)
    parking.start()
    try:
        before, late = threading.active_count(), time.monotonic() + 600.0
        for number in range(10_000):
            waiting = Waiting(space.following(keys, 2), late, lambda found, n=number: m.Count(n, found))
            parking.park(Ticket(parking, number, waiting, answers.append))
        write(space, keys[:2])
        assert len(parking) == 10_000
        assert threading.active_count() == before
        write(space, keys[2:])
        until(lambda: len(answers) == 10_000)
        assert {answer.count for answer in answers} == {3}
        assert {answer.id for answer in answers} == set(range(10_000))
        assert len(parking) == len(store.core.waiters) == 0
    finally:
        parking.stop()


def parked(server: Server, count: int) -> None:
    until(lambda: len(server.parking) == count)


def test_hundreds_of_waiting_connections_need_no_thread(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as (store, server), perdure.connect(tmp_path / "s") as client:
        space, count = keyspace(client), 400
        keys = chain(space, 1, 4)
        lease = space.reserve(keys)
        assert lease is not None
        call, transport = space.begin(), client.transport
        late = time.monotonic() + WAIT_S
        channels = [transport.take(call.run, call.until) for _ in range(count)]
        before = threading.active_count()
        for number, channel in enumerate(channels):
            question = (
                m.Follow(number, call.space, keys.tobytes(), 1, late, 0.0)
                if number % 2
                else m.Reserve(number, call.space, keys.tobytes(), 30.0, late, 0.0)
            )
            channel.send(m.encode(question), until=late)
        parked(server, count)
        assert threading.active_count() == before
        assert client.service_status()["waiting"] == count
        assert write(space, keys, lease=lease) == [STORED] * 4
        answers = [m.decode_answer(channel.receive(late)[0]) for channel in channels]
        assert [answer.id for answer in answers] == list(range(count))
        assert {answer.count for answer in answers[1::2]} == {4}
        assert {answer.lease for answer in answers[::2]} == {None}
        assert len(server.parking) == 0
        assert len(store.core.waiters) == 0
        for channel in channels:
            transport.give(call.run, channel)
        assert len(call.run.idle[0]) == limits.connections_idle_max


def test_each_parked_question_is_answered_at_its_own_deadline(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as (store, server), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys = chain(space, 1, 3)
        write(space, keys[:1])
        with waiters(8) as pool:
            long = started(pool, space.follow, keys, known=2, wait_s=WAIT_S)
            short = [pool.submit(space.follow, keys, known=1, wait_s=0.02 * n) for n in (5, 1, 3, 2, 4)]
            assert [one.result(WAIT_S) for one in short] == [1] * 5
            parked(server, 1)
            write(space, keys[1:])
            assert long.result(WAIT_S) == 3
        assert len(store.core.waiters) == 0


def test_a_connection_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as (store, server), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys = chain(space, 1, 2)
        lease = space.reserve(keys)
        assert lease is not None
        call, late = space.begin(), time.monotonic() + 600.0
        channels = [client.transport.take(call.run, call.until) for _ in range(2)]
        for channel in channels:
            channel.send(m.encode(m.Reserve(1, call.space, keys.tobytes(), 600.0, late, 0.0)), until=late)
        parked(server, 2)
        for channel in channels:
            channel.close()
        parked(server, 0)
        assert len(store.core.waiters) == 0
        assert space.end_lease(lease)
        assert space.reserve(keys, wait_s=WAIT_S) is not None, "a lease for nobody would last for ten minutes"


def test_a_lease_that_does_not_reach_its_client_is_ended(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as (store, server), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys = chain(space, 1, 2)
        space.begin()
        (peer,) = server._peers.values()
        lease = store.core.leases.acquire(keys[-1].tobytes(), 600.0)
        assert lease is not None
        peer.hold(lease)
        server.verbs.undo(peer, m.Leased(1, pack_lease(lease)))
        assert space.reserve(keys) is not None


def test_an_answer_that_comes_too_late_gives_its_lease_back(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "s") as service, perdure.connect(service.address("unix")) as client:
        space = keyspace(client)
        keys = chain(space, 1, 2)
        lookup = space.lookup(keys)
        service.stop()
        with contextlib.suppress(perdure.ServiceUnavailable):
            assert space.reserve(keys, wait_s=0.05) is None
        service.go_on()
        assert lookup == space.lookup(keys) == 0
        until(lambda: client.status() is not None and space.reserve(keys, ttl_s=600.0) is not None)


def test_stopping_the_service_does_not_wait_for_waiters(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "s", memory=0, capacity="64MiB") as store:
        server = Server(store, socket=tmp_path / "s" / "perdure.sock", listen=("127.0.0.1", 0))
        server.start()
        with perdure.connect(tmp_path / "s") as one, perdure.connect(tcp_address(server)) as two, waiters(2) as pool:
            spaces = [keyspace(one), keyspace(two)]
            calls = [started(pool, space.follow, chain(space, 1, 2), wait_s=2.0) for space in spaces]
            server.stop(drain_s=600.0)
            assert [call.result(WAIT_S) for call in calls] == [0, 0]


# --- prefixes longer than a message
@pytest.mark.parametrize("tcp", [False, True])
def test_a_prefix_longer_than_a_message(tmp_path: Path, tcp: bool) -> None:
    with contextlib.ExitStack() as stack:
        _, server = stack.enter_context(serving(tmp_path / "s", listen=("127.0.0.1", 0) if tcp else None))
        client = stack.enter_context(perdure.connect(tcp_address(server) if tcp else tmp_path / "s"))
        pool = stack.enter_context(waiters(2))
        count = 2 * limits.message_keys_max + 100
        space = keyspace(client, block_bytes=64)
        keys = chain(space, 1, count)
        lease = space.reserve(keys)
        assert lease is not None
        second = started(pool, space.reserve, keys, wait_s=WAIT_S)
        far = started(pool, space.follow, keys, known=count - 2, wait_s=WAIT_S)
        for first in range(0, count, 1500):
            assert not far.done()
            write(space, keys[first : first + 1500], lease=lease, durability="ephemeral")
        assert far.result(WAIT_S) == count
        assert second.result(WAIT_S) is None
        assert space.follow(keys, known=3000, wait_s=WAIT_S) > 3000


# --- processes that die or stop
HOLDER = """
import sys, perdure
from perdure.testing.store import keyspace, chain, write
with perdure.connect(sys.argv[1]) as store:
    space = keyspace(store)
    keys = chain(space, 1, 4)
    for line in sys.stdin:
        verb, ttl_s = line.split()
        if verb == "reserve":
            lease = space.reserve(keys, ttl_s=float(ttl_s))
            print(lease is not None, flush=True)
        elif verb == "wait":
            print("waiting", flush=True)
            print(space.reserve(keys, ttl_s=float(ttl_s), wait_s=600.0) is not None, flush=True)
        else:
            try:
                print(write(space, keys, lease=lease), flush=True)
            except perdure.StaleFence:
                print("stale", flush=True)
"""


class Holder:
    """A client in a process of its own."""

    def __init__(self, address: str):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@pytest.fixture(params=["unix", "tcp"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Server, str]]:
    with serving(tmp_path / "s", listen=("127.0.0.1", 0)) as (store, server):
        yield store, server, tcp_address(server) if request.param == "tcp" else f"unix://{server.path}"


def test_a_holder_that_is_killed_lets_the_next_one_compute(served: tuple[Store, Server, str]) -> None:
    """FAULTS 14. At once, and not after the ten minutes of its lease."""
    _, _, address = served
    with Holder(address) as holder, perdure.connect(address) as client, waiters() as pool:
        space = keyspace(client)
        keys = chain(space, 1, 4)
        holder.tell("reserve 600")
        assert holder.heard() == "True"
        second = started(pool, space.reserve, keys, wait_s=WAIT_S)
        holder.process.kill()
        lease = second.result(WAIT_S)
        assert lease is not None
        assert write(space, keys, lease=lease) == [STORED] * 4


def test_a_holder_that_slept_through_its_lease_is_refused(served: tuple[Store, Server, str]) -> None:
    """FAULTS 19."""
    _, _, address = served
    with Holder(address) as holder, perdure.connect(address) as client:
        space = keyspace(client)
        keys = chain(space, 1, 4)
        holder.tell("reserve 0.3")
        assert holder.heard() == "True"
        holder.process.send_signal(signal.SIGSTOP)
        lease = space.reserve(keys, wait_s=WAIT_S)
        assert lease is not None
        assert write(space, keys[:2], lease=lease) == [STORED] * 2
        holder.tell("write 0")
        holder.process.send_signal(signal.SIGCONT)
        assert holder.heard() == "stale"
        assert space.lookup(keys) == 2
        assert write(space, keys[2:], lease=lease) == [STORED] * 2
        assert read(space, keys) == [FOUND] * 4


def test_a_waiter_that_is_killed_is_forgotten(served: tuple[Store, Server, str]) -> None:
    store, server, address = served
    with perdure.connect(address) as client:
        space = keyspace(client)
        keys = chain(space, 1, 4)
        lease = space.reserve(keys, ttl_s=600.0)
        assert lease is not None
        with Holder(address) as waiter:
            waiter.tell("wait 600")
            assert waiter.heard() == "waiting"
            until(lambda: server.status()["waiting"] == 1)
            waiter.process.kill()
            until(lambda: len(store.core.waiters) == 0)
            until(lambda: server.status()["waiting"] == 0)
            assert space.end_lease(lease)
            assert space.reserve(keys, wait_s=WAIT_S) is not None


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_waiters_go_on_when_the_service_is_replaced(tmp_path: Path, kind: str) -> None:
    """The lease has ended with the service that gave it; who waits gets it from the next one."""

    def connect(service: ServiceProcess) -> RemoteStore:
        return perdure.connect(service.address(kind))

    with contextlib.ExitStack() as stack:
        first = stack.enter_context(ServiceProcess(tmp_path / "s", listen="127.0.0.1:0"))
        one, two = stack.enter_context(connect(first)), stack.enter_context(connect(first))
        mine, theirs = keyspace(one), keyspace(two)
        keys = chain(mine, 1, 4)
        lost = mine.reserve(keys, ttl_s=600.0)
        assert lost is not None
        write(mine, keys[:2], lease=lost)
        pool = stack.enter_context(ThreadPoolExecutor(2))
        second = started(pool, theirs.reserve, keys, ttl_s=600.0, wait_s=WAIT_S)
        last = started(pool, theirs.follow, keys, known=3, wait_s=WAIT_S)
        first.kill()
        again = ServiceProcess(first.data, listen=first.ready["listen"])
        stack.enter_context(again)
        lease = second.result(WAIT_S)
        assert lease is not None
        assert theirs.lookup(keys) == 2
        with pytest.raises(perdure.StaleFence):
            write(mine, keys[2:], lease=lost)
        assert write(theirs, keys[2:], lease=lease) == [STORED] * 2
        assert last.result(WAIT_S) == 4


def test_what_is_nobodys_wait_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "s"), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys, call = chain(space, 1, 2).tobytes(), space.begin()
        for until_s in (float("nan"), float("inf"), time.monotonic() + 1e12):
            for question in (
                lambda i, at=until_s: m.Reserve(i, call.space, keys, 30.0, at, 0.0),
                lambda i, at=until_s: m.Follow(i, call.space, keys, 0, at, 0.0),
            ):
                with pytest.raises(perdure.ProtocolError):
                    client.ask(call.run, question, call.until)
        with pytest.raises(perdure.InvalidArgument, match="known"):
            client.ask(call.run, lambda i: m.Follow(i, call.space, keys, -1, 0.0, 0.0), call.until)
