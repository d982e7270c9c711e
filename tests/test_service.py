"""The service: the verbs through a client, reads without messages, lifetimes of clients and of the service."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.served import ServedStore, serving

import perdure
from perdure import RemoteStore
from perdure.errors import InvalidArgument, ServiceUnavailable, StorePathError
from perdure.io.shared import SharedMemory, map_fd
from perdure.limits import MIB
from perdure.pool.memory import SharedChunk
from perdure.service import maps, messages, shared, sockets
from perdure.service.fields import pack_extents
from perdure.service.maps import ChunkMap, copy_block
from perdure.service.server import Server, shared_pool
from perdure.testing.flight import FlightConformance
from perdure.testing.store import (
    FOUND,
    STORED,
    StoreConformance,
    block_of,
    blocks_of,
    chain,
    keyspace,
    read,
    write,
)
from perdure.testing.transport import ServiceProcess, TransportConformance, until


class TestServed(StoreConformance, FlightConformance):
    def make_store(self, directory: Path, **options: Any) -> Any:
        return ServedStore(directory, **options)


class TestUnix(TransportConformance):
    def connect(self, service: ServiceProcess) -> RemoteStore:
        return perdure.connect(service.address("unix"))

    def test_a_stopped_service_does_not_keep_its_memory_from_being_read(
        self, service: ServiceProcess, client: RemoteStore
    ) -> None:
        space = keyspace(client)
        keys = chain(space, 1, 6)
        write(space, keys)
        assert read(space, keys) == [FOUND] * 6
        service.stop()
        assert space.lookup(keys) == 6
        assert read(space, keys, deadline_s=1.0) == [FOUND] * 6


# --- without messages
def test_blocks_in_memory_are_found_and_read_without_a_message(tmp_path: Path) -> None:
    with serving(tmp_path / "s"), perdure.connect(tmp_path / "s") as writer, perdure.connect(tmp_path / "s") as reader:
        mine, theirs = keyspace(writer), keyspace(reader)
        keys = chain(mine, 1, 20)
        assert mine.digest == theirs.digest
        assert write(mine, keys) == [STORED] * 20
        assert read(theirs, keys) == [FOUND] * 20  # maps are brought up to date
        before = reader.transport.messages
        assert theirs.lookup(keys) == 20
        assert theirs.lookup(chain(theirs, 2, 5)) == 0
        assert read(theirs, keys) == [FOUND] * 20
        assert reader.transport.messages == before
        until(lambda: writer.status()["counters"].get("blocks_read_unasked", 0) >= 20)


def test_a_long_copy_is_shared_among_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "_COPIERS", 3)
    with serving(tmp_path / "s"), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client, block_bytes=MIB)
        keys = chain(space, 1, 13)
        assert write(space, keys) == [STORED] * 13
        assert read(space, keys) == [FOUND] * 13  # maps are brought up to date
        before, copies, copied = client.transport.messages, [], maps.copy_block

        def counting(*args: Any) -> int:
            copies.append(threading.current_thread())
            time.sleep(0.01)  # long enough for each of them to begin
            return copied(*args)

        monkeypatch.setattr(maps, "copy_block", counting)
        assert read(space, keys) == [FOUND] * 13  # which compares the bytes
        assert client.transport.messages == before
        assert len(copies) == 13
        assert len(set(copies)) == 3


def test_a_view_shows_blocks_where_they_lie_and_keeps_them(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as (store, _), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys = chain(space, 1, 8)
        write(space, keys)
        store.core.pool.drop_all()  # so that the view has to bring them
        with space.view(keys) as view:
            assert view.statuses.tolist() == [FOUND] * 8
            for key, block in zip(keys, view.blocks, strict=True):
                assert block is not None
                assert block.readonly
                assert block.tobytes() == block_of(key.tobytes(), block.nbytes)
            assert store.core.pool.stats().pinned == 8
            store.core.pool.drop_all()
            assert all(
                block is not None and block.tobytes() == block_of(key.tobytes(), block.nbytes)
                for key, block in zip(keys, view.blocks, strict=True)
            )
            assert view.release()
        assert store.core.pool.stats().pinned == 0


def test_clients_cannot_write_to_the_pool(tmp_path: Path) -> None:
    chunk = SharedChunk(64 * 4096)
    with pytest.raises(PermissionError):
        map_fd(chunk.memory.fd, 4096, writable=True)
    with pytest.raises(PermissionError):
        os.pwrite(chunk.memory.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(chunk.memory.fd, 0)
    chunk.close()


def chunk_with(key: bytes, space: bytes, fill: int) -> tuple[SharedChunk, ChunkMap]:
    chunk = SharedChunk(4 * 4096)
    chunk.view[:4096] = bytes([fill]) * 4096
    chunk.announce(0, 2, key, space, 0, 4096, 0)
    return chunk, ChunkMap(map_fd(chunk.memory.fd, chunk.memory.nbytes, writable=False), chunk.nbytes)


KEY, OTHER, SPACE = b"k" * 32, b"o" * 32, b"s" * 32


@pytest.mark.parametrize("wrong", ["key", "keyspace", "generation", "expired", "size"])
def test_a_slot_that_holds_something_else_is_not_copied(wrong: str) -> None:
    chunk, maps = chunk_with(KEY, SPACE, 7)
    target = bytearray(4096)
    assert copy_block(maps, 0, KEY, SPACE, 4096, 0, [memoryview(target)]) == 2
    assert target == bytes([7]) * 4096
    if wrong == "key":  # the entry was replaced: its generation is even and stays
        chunk.announce(0, 4, OTHER, SPACE, 0, 4096, 0)
    elif wrong == "keyspace":
        chunk.announce(0, 4, KEY, b"x" * 32, 0, 4096, 0)
    elif wrong == "generation":
        chunk.withdraw(0, 5)
    elif wrong == "expired":
        chunk.announce(0, 4, KEY, SPACE, 0, 4096, 100)
    else:
        chunk.announce(0, 4, KEY, SPACE, 0, 8192, 0)
    assert copy_block(maps, 0, KEY, SPACE, 4096, 100, [memoryview(target)]) == 0
    chunk.close()


def test_a_slot_that_changes_during_the_copy_is_refused() -> None:
    """The slot is given to another block between the first look and the last: only the second look can see it."""
    chunk, maps = chunk_with(KEY, SPACE, 7)

    class Data:
        """The slot's bytes, changing hands at the moment they are taken."""

        def __len__(self) -> int:
            return 4 * 4096

        def __getitem__(self, at: slice) -> memoryview:
            chunk.withdraw(0, 3)
            chunk.view[:4096] = bytes([9]) * 4096
            chunk.announce(0, 4, KEY, SPACE, 0, 4096, 0)
            return chunk.view[at]

    maps.data = Data()  # type: ignore[assignment]
    assert copy_block(maps, 0, KEY, SPACE, 4096, 0, [memoryview(bytearray(4096))]) == 0
    chunk.close()


def test_an_absent_key_is_sure_only_by_the_table_that_was_asked(tmp_path: Path) -> None:
    """Another thread maps the next table between probe and look at the version: the answer is the old table's."""
    with serving(tmp_path / "s"), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        write(space, chain(space, 1, 2))
        call = space.begin()
        maps = client.maps(call.run, space.tenant_id, call.space, call.until)
        table, version = maps._presence

        class Words:
            """The directory, in which the next version appears while it is being read."""

            def __getitem__(self, word: int) -> int:
                if word == shared.EXPIRY_S:
                    maps._presence = (table, version + 1)
                return {shared.COMPLETE: 1, shared.EXPIRY_S: 0, shared.PRESENCE: version + 1}[word]

        maps._directory = Words()  # type: ignore[assignment]
        assert maps.prefix(chain(space, 2, 3)) == (0, False)
        assert maps.prefix(chain(space, 2, 3)) == (0, True)


def test_maps_deliver_nothing_after_the_time_until_which_the_service_may(tmp_path: Path) -> None:
    """A stopped service of many that share a store cannot tell its engines that a tenant was erased."""
    with serving(tmp_path / "s", memory="16MiB"), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys, size = chain(space, 1, 3), space.layout.block_bytes
        write(space, keys)
        call = space.begin()
        maps = client.maps(call.run, space.tenant_id, call.space, call.until)
        words = maps._directory
        assert words is not None
        known, into = list(words), [[memoryview(bytearray(size))] for _ in keys]
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        for until_ns, delivered in ((0, True), (now_ns + 600 * 10**9, True), (now_ns, False), (1, False)):
            known[shared.UNTIL_NS] = until_ns
            maps._directory = known  # type: ignore[assignment]
            assert maps.copy(space.digest, keys, size, into).tolist() == [delivered] * 3


# --- registered memory
@pytest.mark.parametrize("kind", ["landing", "sealed", "unsealed"])
def test_registered_memory_is_read_into_and_written_from(tmp_path: Path, kind: str) -> None:
    with serving(tmp_path / "s", memory=0), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys = chain(space, 1, 4)
        size = 4 * space.layout.block_bytes
        if kind == "landing":
            region = client.landing(size)
        else:
            own = SharedMemory("own", size)
            if kind == "sealed":
                own.seal_size()
            region = client.register(own.fd)
        region.view[:] = blocks_of(keys).tobytes()
        assert space.write(keys, region.view).statuses.tolist() == [STORED] * 4
        region.view[:] = bytes(size)
        report = space.read(keys, into=region.view)
        assert report.statuses.tolist() == [FOUND] * 4
        assert region.view.tobytes() == blocks_of(keys).tobytes()
        client.unregister(region)
        if kind != "landing":
            own.close()


def test_memory_cut_short_by_its_owner_harms_nobody(tmp_path: Path) -> None:
    with serving(tmp_path / "s", memory=0), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys = chain(space, 1, 4)
        own = SharedMemory("own", 4 * space.layout.block_bytes)
        region = client.register(own.fd)
        os.ftruncate(own.fd, 4096)
        extents = [[(at * space.layout.block_bytes, space.layout.block_bytes)] for at in range(4)]
        table, parts = pack_extents(extents)
        run, deadline = client.current()
        number = region.numbers[run.welcome.client]
        with pytest.raises(InvalidArgument, match="cut it short"):
            client.ask(
                run,
                lambda i: messages.Write(i, 0, keys.tobytes(), number, table, parts, "session", None, None, deadline),
                deadline,
            )
        assert write(space, keys) == [STORED] * 4
        own.close()


def test_only_memory_can_be_registered(tmp_path: Path) -> None:
    with serving(tmp_path / "s"), perdure.connect(tmp_path / "s") as client:
        (tmp_path / "file").write_bytes(bytes(4096))
        with (tmp_path / "file").open("r+b") as file, pytest.raises(InvalidArgument, match="only memory"):
            client.register(file.fileno())
        small = SharedMemory("small", 4096)
        with pytest.raises(InvalidArgument, match="the memory has 4096"):
            client.register(small.fd, 8192)
        small.close()


# --- lifetimes
VICTIM = """
import sys, time, perdure
sys.path.insert(0, {tests!r})
from perdure.testing.store import keyspace, chain
store = perdure.connect({path!r})
space = keyspace(store)
keys = chain(space, 1, 4)
view = space.view(keys)
assert (view.statuses == 0).all()
pin = space.pin(keys, ttl_s=600)
lease = space.reserve(chain(space, 9, 1))
assert lease is not None
if {fork}:  # as a library would: without Python's hooks, so that the child keeps the sockets
    import ctypes
    libc = ctypes.CDLL(None)
    if libc.fork() == 0:
        libc.sleep(600)
        libc._exit(0)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("fork", [False, True])
def test_what_a_client_holds_ends_with_its_process(tmp_path: Path, fork: bool) -> None:
    """Also where a child that it forked keeps its sockets open."""
    with serving(tmp_path / "s") as (store, server):
        local = keyspace(store)
        keys = chain(local, 1, 4)
        write(local, keys)
        code = VICTIM.format(tests=str(Path(__file__).parent), path=str(tmp_path / "s"), fork=fork)
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as victim:
            try:
                assert victim.stdout is not None
                assert victim.stdout.readline() == b"ready\n"
                assert store.core.pool.stats().pinned == 4
                assert store.status()["pins"] == 1
                assert local.reserve(chain(local, 9, 1)) is None
                victim.kill()
                until(lambda: store.core.pool.stats().pinned == 0)
                until(lambda: store.status()["pins"] == 0)
                until(lambda: not server.status()["clients"])
                until(lambda: local.reserve(chain(local, 9, 1)) is not None)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(victim.pid, signal.SIGKILL)


def test_a_service_that_was_replaced_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with perdure.open(path, memory=64 * MIB, capacity="256MiB", seams=perdure.Seams(pool=shared_pool)) as store:
        first = Server(store, socket=path / "perdure.sock")
        first.start()
        with perdure.connect(path) as client:
            space = keyspace(client)
            keys = chain(space, 1, 6)
            assert write(space, keys) == [STORED] * 6
            view = space.view(keys)
            held = view.blocks[0]
            lease = space.reserve(chain(space, 7, 1))
            assert lease is not None
            first.stop()
            until(lambda: client.transport._run is None or client.transport._run.ended.is_set())
            assert held is not None  # what was mapped stays readable
            assert held.tobytes() == block_of(keys[0].tobytes(), held.nbytes)
            assert space.read(keys, into=bytearray(6 * 8192), deadline_s=0.1).count(perdure.BlockStatus.MISSING) == 6
            assert space.write(keys, blocks_of(keys), deadline_s=0.1).reasons
            with pytest.raises(ServiceUnavailable):
                client.ask(client.current(time.monotonic() + 0.1)[0], messages.Status, time.monotonic() + 0.1)
            second = Server(store, socket=path / "perdure.sock")
            second.start()
            try:
                assert read(space, keys) == [FOUND] * 6
                assert not view.release()
                assert not space.end_lease(lease)
            finally:
                second.stop()


# --- sockets and hostile clients
def test_socket_paths(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="at most 107"):
        perdure.connect(tmp_path / ("x" * 120))
    with pytest.raises(ServiceUnavailable, match="perdure serve"):
        perdure.connect(tmp_path / "nothing.sock")
    path = tmp_path / "perdure.sock"
    path.write_text("a file")
    with pytest.raises(StorePathError, match="something else"):
        sockets.listen_unix(path)
    path.unlink()
    listener = sockets.listen_unix(path)
    with pytest.raises(StorePathError, match="another service"):
        sockets.listen_unix(path)
    listener.close()
    sockets.listen_unix(path).close()  # stale: replaced


@pytest.mark.parametrize("seed", range(8))
def test_nothing_a_client_sends_ends_the_service(tmp_path: Path, seed: int) -> None:
    rng, soon = np.random.default_rng(seed), time.monotonic() + 600
    with serving(tmp_path / "s") as (_, server), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys = chain(space, 1, 4)
        write(space, keys)
        good = [
            messages.encode(one)
            for one in (
                messages.Fetch(5, 0, keys.tobytes(), soon, 2**40, 0.0),
                messages.Attach(6, 0, [0, 0], []),
                messages.Read(7, 0, keys.tobytes(), 1, b"\xff" * 64, b"", soon, False),
                messages.Write(8, 0, keys.tobytes(), 1, b"", b"", "session", None, None, soon),
                messages.Region(9, "client", 2**60),
                messages.Lookup(10, 99, b"x" * 31),
                messages.Release(11, [1, 2, 3], True),
                messages.Fetch(12, 0, keys.tobytes(), float("nan"), 1, 0.0),
                messages.Reserve(13, 0, keys.tobytes(), 30.0, soon - 599.9, 0.0),
                messages.Follow(14, 0, keys.tobytes(), 3, soon - 599.9, 0.0),
            )
        ]
        for round_number in range(60):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(5.0)
                sock.connect(str(server.path))
                with contextlib.suppress(OSError):
                    if round_number % 3:
                        sock.send(messages.encode(messages.Hello(1, perdure.limits.wire_version, "fuzz")))
                        sock.recv(1 << 17)
                    data = bytearray(good[int(rng.integers(len(good)))])
                    for _ in range(int(rng.integers(0, 6))):
                        data[int(rng.integers(len(data)))] = int(rng.integers(256))
                    data = data[: int(rng.integers(1, len(data) + 1))]
                    if round_number % 7 == 0:
                        data = bytearray(rng.bytes(int(rng.integers(1, 100_000))))
                    if round_number % 5 == 0:
                        sockets.send(sock, bytes(data), [sock.fileno()])
                    else:
                        sock.send(data)
                    sock.recv(1 << 17)
        assert read(space, keys) == [FOUND] * 4
        until(lambda: len(server.status()["clients"]) == 1)


# --- what must never happen
def test_a_block_whose_pin_was_lost_is_not_taken_for_another(tmp_path: Path) -> None:
    """A client that slept too long between the service's answer and its copy finds the slot in other use."""
    with serving(tmp_path / "s") as (store, _), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys, others = chain(space, 1, 3), chain(space, 2, 3)
        write(space, keys)
        write(space, others)
        store.core.pool.drop_all()
        call = space.begin()
        grant, answer = space._ask_fetch(call, keys, 0.0)
        maps = client.maps(call.run, space.tenant_id, call.space, call.until)
        targets = [[memoryview(bytearray(8192))] for _ in range(3)]
        assert space._copy_granted(maps, keys, answer, targets) == [True] * 3
        client.ask(call.run, lambda i: messages.Release(i, [grant], True), call.until)
        store.core.pool.drop_all()
        held = space._ask_fetch(call, others, 0.0)  # takes the slots that have become free
        assert np.intersect1d(np.frombuffer(answer.slots, "u8"), np.frombuffer(held[1].slots, "u8")).size == 3
        assert space._copy_granted(maps, keys, answer, targets) == [False] * 3
        slots = np.frombuffer(answer.slots, "u8").tolist()
        assert maps.granted(slots, [key.tobytes() for key in keys], space.digest) == [None] * 3


def test_a_write_that_is_read_after_its_deadline_stores_nothing(tmp_path: Path) -> None:
    """Its caller has gone on and may have put something else into that memory."""
    with serving(tmp_path / "s"), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys = chain(space, 1, 2)
        region = client.landing(2 * 8192)
        region.view[:] = blocks_of(keys).tobytes()
        call, past = space.begin(), time.monotonic() - 0.001
        number = region.numbers[call.run.welcome.client]
        table, parts = pack_extents([[(0, 8192)], [(8192, 8192)]])
        names = keys.tobytes()
        written = client.ask(
            call.run,
            lambda i: messages.Write(i, call.space, names, number, table, parts, "session", None, None, past),
            call.until,
        )
        assert set(written.statuses) == {perdure.WriteStatus.LATE}
        assert not space.present(keys).any()
        write(space, keys)
        region.view[:] = bytes(2 * 8192)
        got = client.ask(
            call.run, lambda i: messages.Read(i, call.space, names, number, table, parts, past, True), call.until
        )
        assert set(got.statuses) == {perdure.BlockStatus.LATE}
        assert region.view.tobytes() == bytes(2 * 8192)


def test_a_grant_number_is_used_once(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as (store, _), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys = chain(space, 1, 2)
        write(space, keys)
        call = space.begin()
        question = lambda i: messages.Fetch(i, call.space, keys.tobytes(), call.until, 77, 60.0)  # noqa: E731
        client.ask(call.run, question, call.until)
        with pytest.raises(perdure.ProtocolError, match="in use"):
            client.ask(call.run, question, call.until)
        assert store.core.pool.stats().pinned == 2


def test_a_client_that_was_cut_off_starts_anew(tmp_path: Path) -> None:
    """The same service, but another client to it: numbers of keyspaces and regions of before mean nothing now."""
    with serving(tmp_path / "s") as (_, server), perdure.connect(tmp_path / "s") as client:
        first, second = keyspace(client), keyspace(client, model="another")
        region = client.landing(8192)
        for connection in list(server._connections.values()):
            if connection.main:
                server._close(connection)
        until(lambda: client.transport._run is None or client.transport._run.ended.is_set())
        for space in (second, first):  # the other way round: each number is now the other's
            keys = chain(space, 1, 1)
            region.view[:] = blocks_of(keys).tobytes()
            assert space.write(keys, region.view).durable
            region.view[:] = bytes(8192)
            assert space.read(keys, into=region.view).usable == 1
            assert region.view.tobytes() == blocks_of(keys).tobytes()


def test_a_full_pool_makes_room_for_a_new_client(tmp_path: Path) -> None:
    """The memory of its ring comes from a chunk that is given up, whose domain is the one being attached to."""
    with serving(tmp_path / "s", memory=512 * MIB, capacity="1GiB") as (store, _):
        until(lambda: not store.core.pool.prefault(), 60)  # all of it is made
        local = keyspace(store, block_bytes=4 * MIB)
        with perdure.connect(tmp_path / "s") as first:
            space = keyspace(first, block_bytes=4 * MIB)
            keys = chain(space, 1, 1)
            write(space, keys)
            slots = []
            while (slot := store.core.pool.reserve(4 * MIB, local.tenant_id)) is not None and len(slots) < 1000:
                slots.append(slot)
                if not store.core.pool._spares and len(slots) > 120:
                    break
            for number, slot in enumerate(slots):
                store.core.pool.publish(slot, number.to_bytes(32, "big"))
            assert not store.core.pool._spares
            now = store.core.pool.stats()
            rest = now.budget_bytes - now.mapped_bytes - now.lent_bytes - now.stranded_bytes
            assert store.core.pool.lend(rest)  # to the last byte
            with perdure.connect(tmp_path / "s") as another:
                assert read(keyspace(another, block_bytes=4 * MIB), keys) == [FOUND]
            stats = store.core.pool.stats()
            assert stats.mapped_bytes + stats.lent_bytes + stats.stranded_bytes <= stats.budget_bytes


def test_chunks_that_were_given_up_are_unmapped_by_idle_clients(tmp_path: Path) -> None:
    """Memory moves to another tenant; the first tenant's client does nothing meanwhile."""
    with serving(tmp_path / "s", memory=64 * MIB) as (store, _), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        keys = chain(space, 1, 4)
        write(space, keys)
        assert read(space, keys) == [FOUND] * 4
        other = keyspace(client, tenant="another")
        theirs = chain(other, 1, 4)
        assert write(other, theirs) == [STORED] * 4
        until(lambda: read(other, theirs) == [FOUND] * 4 and store.core.pool.stats().stranded_bytes == 0)
        assert store.core.pool.stats().mapped_bytes <= 64 * MIB
        assert read(space, keys) == [FOUND] * 4
