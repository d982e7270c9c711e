"""Many clients at once, and clients that take without giving back: the others go on, and all is freed at the end."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.served import serving

import perdure
from perdure import limits
from perdure.errors import (
    InvalidArgument,
    PerdureError,
    ProtocolError,
    ServiceBusy,
    ServiceUnavailable,
    StoreLocked,
    StorePathError,
)
from perdure.io.faulty import FaultWhile, FaultyFiles
from perdure.io.files import PosixFiles
from perdure.io.shared import SharedMemory
from perdure.limits import MIB
from perdure.pool.dram import DramPool
from perdure.service import messages as m
from perdure.service import process, regions, sockets
from perdure.service.fields import pack_extents
from perdure.service.server import Server, shared_pool
from perdure.service.settings import load
from perdure.service.verbs import Verbs
from perdure.testing.store import FOUND, STORED, blocks_of, chain, keyspace, read, write

PATIENCE_S = 60.0
DESCRIPTORS_BESIDE = 400  # of everything else in this process


def until(condition: Callable[[], bool], what: str = "it did not happen") -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.01)


@contextlib.contextmanager
def open_files(count: int) -> Iterator[None]:
    """The soft limit raised to `count` if need be; skipped if that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"{count} open files are needed, {hard} are allowed")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connected(server: Server) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    sock.settimeout(PATIENCE_S)
    sock.connect(str(server.path))
    return sock


def ask(sock: socket.socket, question: m.Message, fds: list[int] | None = None) -> Any:
    sockets.send(sock, m.encode(question), fds or [])
    data, received = sockets.receive(sock)
    for fd in received:
        os.close(fd)
    return m.decode_answer(data)


def greeted(server: Server) -> socket.socket:
    """A client that says hello, and then nothing."""
    sock = connected(server)
    assert isinstance(ask(sock, m.Hello(1, limits.wire_version, "idle")), m.Welcome)
    return sock


# --- crowds
@pytest.mark.parametrize("count", [3, 2000])
def test_one_client_too_many_is_told_and_the_others_go_on(tmp_path: Path, count: int) -> None:
    with (
        open_files(3 * count + DESCRIPTORS_BESIDE),  # a socket at both ends, and a pidfd
        serving(tmp_path / "s", memory=64 * MIB, clients_max=count) as (store, server),
        contextlib.ExitStack() as stack,
    ):
        store.core.pool.prefault()
        client = stack.enter_context(perdure.connect(tmp_path / "s"))
        space = keyspace(client)
        keys = chain(space, 1, 4)
        assert write(space, keys) == [STORED] * 4
        mine = len(server._connections)
        crowd = [stack.enter_context(greeted(server)) for _ in range(count - mine)]
        assert server.status()["connections"] == count
        for _ in range(5):
            with pytest.raises(ServiceBusy, match="clients-max"):
                perdure.connect(tmp_path / "s")
            assert read(space, keys) == [FOUND] * 4
            assert client.service_status()["connections"] == count
        until(lambda: len(server._connections) == count)
        crowd.pop().close()
        until(lambda: len(server._connections) < count)
        stack.enter_context(greeted(server))


def test_a_service_that_has_become_full_is_missing_for_calls(tmp_path: Path) -> None:
    """A client that was cut off and finds its place taken: its calls miss, they do not raise."""
    with serving(tmp_path / "s", clients_max=2) as (_, server), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys = chain(space, 1, 2)
        write(space, keys)
        for connection in list(server._connections.values()):
            server._close(connection)
        until(lambda: client.transport._run is None or client.transport._run.ended.is_set())
        with greeted(server), greeted(server):
            assert space.lookup(keys) == 0
            report = space.read(keys, into=bytearray(2 * space.layout.block_bytes))
            assert report.count(perdure.BlockStatus.MISSING) == 2
            assert "clients-max" in report.problems[0]
            assert space.write(keys, blocks_of(keys)).reasons
            with pytest.raises(ServiceUnavailable, match="clients-max"):
                client.status()
        until(lambda: not server._connections)
        assert read(space, keys) == [FOUND] * 2


def test_a_thousand_idle_clients_beside_eight_at_work(tmp_path: Path) -> None:
    idle, busy, rounds = 1000, 8, 12
    done: Counter[str] = Counter()
    with (
        open_files(3 * idle + 64 * busy + DESCRIPTORS_BESIDE),
        serving(tmp_path / "s") as (_, server),
        contextlib.ExitStack() as stack,
    ):
        crowd = [stack.enter_context(greeted(server)) for _ in range(idle)]
        problems: list[str] = []

        def work(number: int) -> None:
            try:
                with perdure.connect(tmp_path / "s", wait_s=PATIENCE_S) as client:
                    space = keyspace(client, tenant=f"tenant {number % 2}")
                    for at in range(rounds):
                        keys = chain(space, 100 * number + at, 6)
                        assert write(space, keys) == [STORED] * 6
                        assert space.lookup(keys) == 6
                        assert read(space, keys) == [FOUND] * 6
                        done["calls"] += 3
            except BaseException as error:
                problems.append(repr(error))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(busy)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not problems
        assert done["calls"] == 3 * busy * rounds
        until(lambda: len(server.status()["clients"]) == idle)
        for sock in crowd[::100]:
            assert isinstance(ask(sock, m.Status(2)), m.Document)


CROWD = """
import socket, sys
from perdure import limits
from perdure.service import messages as m
socks = []
for number in range(int(sys.argv[2])):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(120.0)
    sock.connect(sys.argv[1])
    sock.send(m.encode(m.Hello(1, limits.wire_version, "crowd")))
    socks.append(sock)
print("connected", flush=True)
print(sum(bool(sock.recv(1 << 17)) for sock in socks), flush=True)
"""


def no_descriptor_left() -> bool:
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return True
    return False


def test_descriptors_run_out_and_come_back(tmp_path: Path) -> None:
    """Who is connected is served meanwhile; who waits is served when there are some again."""
    count = 300
    with serving(tmp_path / "s") as (_, server), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys = chain(space, 1, 4)
        write(space, keys)
        assert read(space, keys) == [FOUND] * 4
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        command = [sys.executable, "-c", CROWD, str(server.path), str(count)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as crowd:
            assert crowd.stdout is not None
            try:
                room = max(map(int, os.listdir("/proc/self/fd"))) + 40
                resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
                assert crowd.stdout.readline() == b"connected\n"
                until(no_descriptor_left)
                for _ in range(20):
                    assert space.lookup(keys) == 4
                    assert client.service_status()["connections"] < count
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert int(crowd.stdout.readline()) == count
        until(lambda: len(server.status()["clients"]) == 1)
        assert read(space, keys) == [FOUND] * 4


# --- clients that take and do not give
def test_a_client_that_never_reads_is_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as (_, server), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys = chain(space, 1, 4)
        write(space, keys)
        sent = 0
        with connected(server) as sock:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.send(m.encode(m.Hello(1, limits.wire_version, "mute")))
                while sent < 100_000:
                    sock.send(m.encode(m.Status(sent)))
                    sent += 1
                    if not sent % 50:
                        assert read(space, keys) == [FOUND] * 4
            assert sent < 100_000, "it was never cut off"
            until(lambda: len(server.status()["clients"]) == 1)
        assert read(space, keys) == [FOUND] * 4


def fetching(space: Any, key: Any, view_s: float) -> m.Fetched:
    """One block granted, and never given back."""
    call = space.begin()
    grant = space._store.grant_number()
    answer = space._store.ask(
        call.run, lambda number: m.Fetch(number, call.space, key.tobytes(), call.until, grant, view_s), call.until
    )
    assert isinstance(answer, m.Fetched)
    return answer


@pytest.mark.parametrize("threads", [1, 12])
def test_views_never_given_back_stop_at_half_the_pool(tmp_path: Path, threads: int) -> None:
    """Also when they are asked for side by side; another client's blocks find room; the end frees all."""
    block, pool = MIB, 64 * MIB
    path = tmp_path / "s"
    with serving(path, memory=pool) as (store, _), perdure.connect(path) as other, perdure.connect(path) as client:
        space = keyspace(client, block_bytes=block)
        keys = chain(space, 1, 48)
        assert write(space, keys) == [STORED] * 48
        granted: Counter[str] = Counter()
        wrong: list[str] = []

        def hold(part: Any) -> None:
            for at in range(len(part)):
                try:
                    fetching(space, part[at : at + 1], 0.001 if at % 2 else 600.0)
                    granted["views"] += 1
                except ServiceBusy:
                    granted["refused"] += 1
                except BaseException as error:
                    wrong.append(repr(error))

        workers = [threading.Thread(target=hold, args=(keys[number::threads],)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(PATIENCE_S)
        assert not wrong
        assert granted == {"views": pool // 2 // block, "refused": 48 - pool // 2 // block}
        assert store.core.pool.stats().pinned == pool // 2 // block
        until(lambda: sum(one["views_overdue"] for one in store_clients(other)) > 0)
        assert store.core.pool.stats().pinned == pool // 2 // block, "what is looked at is not reused, overdue or not"
        theirs = keyspace(other, block_bytes=block)
        more = chain(theirs, 2, 20)
        assert write(theirs, more) == [STORED] * 20
        assert read(theirs, more) == [FOUND] * 20
        client.close()
        until(lambda: store.core.pool.stats().pinned == 0)


def store_clients(client: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.service_status()["clients"]
    return found


def test_a_grant_for_copying_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "fetch_grant_s", 0.01)
    with serving(tmp_path / "s", memory=64 * MIB) as (store, _), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client, block_bytes=MIB)
        keys = chain(space, 1, 8)
        write(space, keys)
        for _ in range(12):  # 96 MiB in all: more than half the pool
            for at in range(len(keys)):
                fetching(space, keys[at : at + 1], 0.0)
            until(lambda: store.core.pool.stats().pinned == 0)
        assert [one["granted_bytes"] for one in store_clients(client)] == [0]


@pytest.mark.parametrize("kind", ["staging", "sealed", "unsealed"])
def test_a_client_that_dies_in_the_middle_of_a_write(tmp_path: Path, kind: str) -> None:
    """Its blocks are there as they were or not at all, its memory is free, and the next writer wins at once."""
    plan = FaultWhile("hang", ops=["pwritev"])
    plan.armed = False
    seams = perdure.Seams(pool=shared_pool, files=lambda root: FaultyFiles(PosixFiles(root), plan))
    path = tmp_path / "s"
    with serving(path, seams=seams) as (store, server), perdure.connect(path) as other:
        theirs = keyspace(other)
        first = chain(theirs, 1, 2)
        assert write(theirs, first) == [STORED] * 2
        keys = chain(theirs, 2, 4)
        one = theirs.layout.block_bytes
        size = 4 * one
        client = perdure.connect(path)
        mine = keyspace(client)
        if kind == "staging":
            region = client.landing(size)
        else:
            own = SharedMemory("own", size)
            if kind == "sealed":
                own.seal_size()
            region = client.register(own.fd)
            own.close()
        region.view[:] = blocks_of(keys).tobytes()
        call = mine.begin()
        table, parts = pack_extents([[(at * one, one)] for at in range(4)])
        number = region.numbers[call.run.welcome.client]
        plan.armed = True
        with connected(server) as sock:
            ask(sock, m.Join(1, call.run.welcome.client))
            question = m.Write(
                2, call.space, keys.tobytes(), number, table, parts, "session", None, None, call.until + 3600.0
            )
            sock.send(m.encode(question))
            plan.wait_until_hanging(PATIENCE_S)
        client.close()
        until(lambda: len(server.status()["clients"]) == 1)
        assert theirs.lookup(keys) == 0
        plan.resume()
        plan.armed = False
        assert set(write(theirs, keys, deadline_s=PATIENCE_S)) <= {STORED, perdure.WriteStatus.EXISTS}
        assert read(theirs, np.concatenate([first, keys]), deadline_s=PATIENCE_S) == [FOUND] * 6
        until(lambda: server._busy == 0)
        other.close()
        until(lambda: store.core.pool.stats().lent_bytes == 0)
        assert store.verify()["ok"]


# --- one directory, one service
def test_a_second_service_on_the_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    before = sys.getswitchinterval()
    with serving(path) as (_, server), perdure.connect(path) as client:
        space = keyspace(client)
        keys = chain(space, 1, 2)
        write(space, keys)
        flags = {"memory": "64MiB", "metrics": ""}
        try:
            with pytest.raises(StoreLocked, match=str(os.getpid())):
                process.run(load({"data": str(path), **flags}, None, {}).settings)
            elsewhere = {"data": str(tmp_path / "other"), "socket": str(server.path), "capacity": "64MiB"}
            with pytest.raises(StorePathError, match="another service"):
                process.run(load(elsewhere | flags, None, {}).settings)
        finally:
            sys.setswitchinterval(before)
        assert server.path.is_socket()
        assert read(space, keys) == [FOUND] * 2
        with perdure.connect(path) as another:
            assert read(keyspace(another), keys) == [FOUND] * 2
        with perdure.open(tmp_path / "other", memory=0):
            pass  # nobody holds it


# --- a client that ends while its questions are under way
def test_memory_is_given_back_once_whoever_ends_it() -> None:
    pool = DramPool(256 * MIB)
    region = regions.LentRegion(pool, "landing", MIB)
    fd = region.memory.fd
    start = threading.Barrier(8)

    def end() -> None:
        start.wait()
        region.close()

    threads = [threading.Thread(target=end) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.stats().lent_bytes == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_descriptor_is_not_closed_under_a_transfer(tmp_path: Path) -> None:
    """Its number could be a segment's file by the time the transfer writes."""
    own = SharedMemory("own", 8192)
    with perdure.open(tmp_path / "s", capacity="64MiB", memory=0) as store:
        region = regions.register(own.fd, 8192, store.core.scratch)
        assert isinstance(region, regions.FileRegion)
        using = region._opened()
        region.close()
        os.pwritev(using.fd, [b"x"], 4096)
        with pytest.raises(InvalidArgument, match="unregistered"):
            region.take([[(0, 4096)]], filled=False)
        fd = using.fd
        del using
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert own.array[4096] == ord("x")
    own.close()


def test_what_a_client_asks_for_after_its_end_is_not_kept(tmp_path: Path) -> None:
    """The question was read before, and is answered after: it leaves neither maps nor memory behind."""
    with serving(tmp_path / "s", memory=256 * MIB) as (store, server), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        write(space, chain(space, 1, 2))
        assert read(space, chain(space, 1, 2)) == [FOUND] * 2
        names = chain(space, 1, 2).tobytes()
        (peer,) = server._peers.values()
        client.close()
        until(lambda: peer.ended and not server._peers)
        until(lambda: store.core.pool.stats().lent_bytes == 0)
        verbs = Verbs(store, server.domains, server.status)
        for question in (m.Attach(1, 0, [0, 0], []), m.Attach(1, 0, [1, 1], []), m.Region(2, "landing", 8192)):
            with contextlib.suppress(PerdureError):
                _, fds = verbs.answer(peer, question, [])
                for fd in fds:
                    os.close(fd)
                assert not isinstance(question, m.Attach)
        with pytest.raises(ProtocolError):
            verbs.answer(peer, m.Fetch(3, 0, names, time.monotonic() + 60, 9, 60.0), [])
        assert store.core.pool.stats().lent_bytes == 0
        assert store.core.pool.stats().pinned == 0
        assert all(peer not in domain.peers for domain in server.domains.all())
        assert peer.granted_bytes == 0
