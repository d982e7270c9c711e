"""The data node: what is special about reaching a store by TCP."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import trustme
from support.served import ServedStore, serving, tcp_address

import perdure
from perdure import RemoteStore, limits
from perdure.errors import ConfigError, InvalidArgument, ProtocolError, ServiceUnavailable, StorePathError
from perdure.limits import MIB
from perdure.service import messages as m
from perdure.service import nixl_agent
from perdure.service.fields import layout_fields
from perdure.service.outgoing import gather
from perdure.service.server import Server
from perdure.service.streams import Stream, TlsFiles
from perdure.testing.flight import FlightConformance
from perdure.testing.store import FOUND, LATE, STORED, StoreConformance, blocks_of, chain, keyspace, read, write
from perdure.testing.transport import ServiceProcess, TransportConformance, until

LOOPBACK = ("127.0.0.1", 0)
FOREVER = float("inf")


class TestServedByTcp(StoreConformance, FlightConformance):
    def make_store(self, directory: Path, **options: Any) -> Any:
        return ServedStore(directory, tcp=True, **options)


class TestServedWithoutMemory(StoreConformance, FlightConformance):
    """A node without a DRAM tier: blocks pass through."""

    def make_store(self, directory: Path, **options: Any) -> Any:
        return ServedStore(directory, tcp=True, **(options | {"memory": 0}))


class TestTcp(TransportConformance):
    flags: ClassVar[dict[str, str]] = {"listen": "127.0.0.1:0"}
    reads_in_messages = 1

    def connect(self, service: ServiceProcess) -> RemoteStore:
        return perdure.connect(service.address("tcp"))


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[trustme.CA, Path]:
    ca, folder = trustme.CA(), tmp_path_factory.mktemp("tls")
    ca.cert_pem.write_to_path(folder / "ca.pem")
    return ca, folder


def issued(authority: tuple[trustme.CA, Path], name: str, *hosts: str, by: trustme.CA | None = None) -> TlsFiles:
    """Certificate, key and authority, as files."""
    ca, folder = authority
    made = (by or ca).issue_cert(*hosts)
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    made.cert_chain_pems[0].write_to_path(cert)
    made.private_key_pem.write_to_path(key)
    return TlsFiles(cert, key, folder / "ca.pem")


def options(files: TlsFiles) -> dict[str, str]:
    return {f"tls_{field}": str(getattr(files, field)) for field in TlsFiles._fields}


class TestTls(TransportConformance):
    flags: ClassVar[dict[str, str]] = {}
    reads_in_messages = 1

    @pytest.fixture(autouse=True)
    def _certificates(self, authority: tuple[trustme.CA, Path]) -> None:
        self.files = issued(authority, "suite", "127.0.0.1")
        self.flags = {"listen": "127.0.0.1:0"} | options(self.files)  # type: ignore[misc]

    def connect(self, service: ServiceProcess) -> RemoteStore:
        return perdure.connect(service.address("tcp"), **options(self.files))


@contextlib.contextmanager
def node(directory: Path, **chosen: Any) -> Iterator[tuple[perdure.Store, Server, RemoteStore]]:
    with serving(directory, listen=LOOPBACK, **chosen) as (store, server), perdure.connect(tcp_address(server)) as one:
        yield store, server, one


def dial(server: Server) -> socket.socket:
    assert server.node is not None
    sock = socket.create_connection(server.node.address, timeout=60)
    sock.settimeout(None)
    return sock


def greeted(server: Server) -> Stream:
    stream = Stream(dial(server))
    stream.send(m.encode(m.Hello(1, limits.wire_version, "by hand")))
    assert isinstance(m.decode_answer(stream.receive(FOREVER)[0]), m.Welcome)
    return stream


def opened(stream: Stream, block_bytes: int = 8192) -> int:
    """The keyspace that `keyspace(client)` opens, by hand."""
    layout = perdure.testing.store.layout_of(block_bytes)
    question = m.OpenSpace(2, "acme", "model", perdure.testing.store.WEIGHTS, "", "", layout_fields(layout), "off")
    stream.send(m.encode(question))
    return int(m.decode_answer(stream.receive(FOREVER)[0]).space)


# --- as stored
def test_compressed_blocks_cross_as_they_are_stored_and_are_kept_decoded(tmp_path: Path) -> None:
    with node(tmp_path / "s") as (store, _, client):
        space = keyspace(client, block_bytes=65_536, codec="on")
        keys = chain(space, 1, 4)
        blocks = np.repeat(np.arange(4 * 1024, dtype=np.uint8), 64).reshape(4, 65_536)
        assert space.write(keys, blocks).durable
        store.core.pool.drop_all()
        local = keyspace(store, block_bytes=65_536, codec="on")
        lot = gather(store.core, local, keys, deadline_s=60.0)
        assert lot.codecs.all()
        assert [part.nbytes for part in lot.payload()] == lot.stored.tolist()
        assert lot.stored.max() < 65_536 / 2
        lot.keep()
        lot.release()
        again = gather(store.core, local, keys, deadline_s=60.0)
        assert again.report.from_memory == 4
        assert b"".join(again.payload()) == blocks.tobytes()
        again.release()
        assert store.core.pool.stats().pinned == 0
        assert store.core.scratch.taken == 0


def test_nothing_is_mapped_or_registered_over_tcp(tmp_path: Path) -> None:
    with node(tmp_path / "s") as (_, server, client):
        space = keyspace(client)
        keys = chain(space, 1, 1)
        for call in (lambda: space.view(keys), lambda: client.landing(4096), lambda: client.register(0)):
            with pytest.raises(InvalidArgument, match="shares no memory"):
                call()
        stream = greeted(server)
        for question in (m.Fetch(3, 0, b"", 1e9, 1, 0.0), m.Attach(3, 0, [0, 0], []), m.Region(3, "staging", 4096)):
            stream.send(m.encode(question))
            answer = m.decode_answer(stream.receive(FOREVER)[0])
            assert isinstance(answer, m.Failed)
            assert "no question for another host" in answer.message
        stream.close()


# --- NIXL where it is not (with it: test_nixl.py)
def test_who_asks_for_nixl_without_having_it_is_told_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_agent, "_MODULES", ())
    with node(tmp_path / "s") as (_, server, _):
        with pytest.raises(ConfigError, match=r"pip install 'perdure\[nixl\]'"):
            perdure.connect(tcp_address(server).replace("tcp://", "nixl://"))
        until(lambda: len(server.status()["clients"]) == 1)


@pytest.mark.parametrize(("transports", "why"), [("tcp", "is not installed"), ("", "UCX_TLS")])
def test_a_node_that_does_not_offer_nixl_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transports: str, why: str
) -> None:
    monkeypatch.setattr(nixl_agent, "_MODULES", ())
    monkeypatch.setenv("UCX_TLS", transports)
    with node(tmp_path / "s") as (_, server, client):
        stream = greeted(server)
        stream.send(m.encode(m.Region(3, "nixl", 4096, b"about", 4096)))
        answer = m.decode_answer(stream.receive(FOREVER)[0])
        assert isinstance(answer, m.Failed)
        assert answer.kind == "ServiceUnavailable"
        assert why in answer.message
        stream.close()
        space = keyspace(client)
        assert write(space, chain(space, 1, 2)) == [STORED] * 2


# --- connections that fail (FAULTS 20)
class Cutter:
    """A proxy in front of a node. `budget`: bytes that still go from the node to the client, then all is cut; None:
    no end. `freeze`: nothing moves."""

    def __init__(self, target: tuple[str, int]):
        self._target, self._listener = target, socket.create_server(LOOPBACK)
        self.address = "tcp://{}:{}".format(*self._listener.getsockname())
        self.budget: int | None = None
        self.accepted = 0
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            far = socket.create_connection(self._target)
            self._socks += [near, far]
            for pair in ((near, far, False), (far, near, True)):
                self._threads.append(threading.Thread(target=self._pump, args=pair))
                self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if counted and self.budget is not None:
                    data, self.budget = data[: self.budget], self.budget - len(data)
                    sink.sendall(data)
                    if self.budget <= 0:
                        self.budget = None
                        break
                else:
                    sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """All connections there are."""
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()
        for sock in self._socks:
            sock.close()


@pytest.fixture
def cutter(tmp_path: Path) -> Iterator[tuple[Cutter, perdure.Store]]:
    with serving(tmp_path / "s", listen=LOOPBACK) as (store, server):
        assert server.node is not None
        made = Cutter(server.node.address)
        yield made, store
        made.close()


@pytest.mark.parametrize("after", [1, 20, 5000, 3 * MIB])
def test_a_read_that_is_cut_in_the_middle_goes_on_over_a_new_connection(
    cutter: tuple[Cutter, perdure.Store], after: int
) -> None:
    proxy, _ = cutter
    with perdure.connect(proxy.address) as client:
        space = keyspace(client, block_bytes=MIB)
        keys = chain(space, 1, 24)
        assert write(space, keys) == [STORED] * 24
        assert read(space, keys) == [FOUND] * 24
        before = proxy.accepted
        proxy.budget = after
        assert read(space, keys, deadline_s=60.0) == [FOUND] * 24
        assert proxy.accepted > before


@pytest.mark.parametrize("verb", ["read", "write", "lookup"])
def test_connections_that_were_cut_while_idle_are_made_anew(cutter: tuple[Cutter, perdure.Store], verb: str) -> None:
    proxy, _ = cutter
    with perdure.connect(proxy.address) as client:
        space = keyspace(client)
        keys, more = chain(space, 1, 6), chain(space, 2, 6)
        write(space, keys)
        assert read(space, keys) == [FOUND] * 6
        assert space.lookup(keys) == 6
        proxy.cut()
        if verb == "read":
            assert read(space, keys, deadline_s=60.0) == [FOUND] * 6
        elif verb == "write":
            assert write(space, more, deadline_s=60.0) == [STORED] * 6
        else:
            assert space.lookup(keys) == 6


def test_a_node_that_cannot_be_reached_is_a_miss_within_the_deadline(cutter: tuple[Cutter, perdure.Store]) -> None:
    proxy, _ = cutter
    with perdure.connect(proxy.address) as client:
        space = keyspace(client)
        keys = chain(space, 1, 2)
        write(space, keys)
        proxy.close()
        assert space.read(keys, into=bytearray(2 * 8192), deadline_s=0.3).usable == 0
        assert space.write(keys, blocks_of(keys), deadline_s=0.3).stored == 0
        assert space.lookup(keys) == 0
    with pytest.raises(ServiceUnavailable, match="perdure serve --data DIR --listen"):
        perdure.connect(proxy.address)


# --- hostile and slow hosts
def test_nothing_that_arrives_ends_the_node(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    with node(tmp_path / "s") as (store, server, client):
        space = keyspace(client)
        keys = chain(space, 1, 4)
        write(space, keys)
        head = struct.Struct("<4sIQ")
        get = m.encode(m.Get(5, 0, keys.tobytes(), 30.0))
        put = m.encode(m.Put(5, 0, keys.tobytes(), "session", None, None, 30.0))
        bad = [
            b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
            head.pack(b"PDF1", 2**32 - 1, 0),
            head.pack(b"PDF1", 0, 0),
            head.pack(b"PDF1", 10, 2**63),
            head.pack(b"PDF1", len(get), 0) + get[:-1],
            head.pack(b"PDF1", len(get), 100) + get + bytes(100),
            head.pack(b"PDF1", len(put), 100) + put + bytes(100),
            head.pack(b"PDF1", len(put), 4 * 8192) + put + bytes(5000),
            *(rng.bytes(int(rng.integers(1, 3000))) for _ in range(20)),
        ]
        for _ in range(100):
            data = bytearray(head.pack(b"PDF1", len(get), 0) + get)
            for _ in range(int(rng.integers(1, 5))):
                data[int(rng.integers(len(data)))] = int(rng.integers(256))
            bad.append(bytes(data))
        for number, data in enumerate(bad):
            if number % 2:
                stream = greeted(server)
                opened(stream)
                sock = stream._sock
            else:
                sock = dial(server)
            with contextlib.suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(60)
                while sock.recv(1 << 20):
                    pass
            sock.close()
        assert read(space, keys) == [FOUND] * 4
        until(lambda: server.node is not None and server.node.connections == 3)
        until(lambda: len(server.status()["clients"]) == 1)
        until(lambda: store.core.pool.stats().pinned == 0)
        until(lambda: store.core.scratch.taken == 0)


def test_a_payload_of_the_wrong_size_stores_nothing_and_the_connection_goes_on(tmp_path: Path) -> None:
    with node(tmp_path / "s") as (_, server, client):
        space = keyspace(client)
        keys = chain(space, 1, 2)
        stream = greeted(server)
        number = opened(stream)
        question = m.encode(m.Put(5, number, keys.tobytes(), "session", None, None, 30.0))
        for nbytes in (8192, 3 * 8192):
            stream.send(question, payload=[memoryview(bytes(nbytes))])
            answer = m.decode_answer(stream.receive(FOREVER)[0])
            assert isinstance(answer, m.Failed)
            assert "2 blocks of 8192 bytes" in answer.message
        assert space.lookup(keys) == 0
        stream.send(question, payload=[memoryview(blocks_of(keys).tobytes())])
        assert isinstance(m.decode_answer(stream.receive(FOREVER)[0]), m.Written)
        assert read(space, keys) == [FOUND] * 2
        stream.close()


def test_who_takes_nothing_is_cut_off_and_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with node(tmp_path / "s") as (store, server, client):
        space = keyspace(client, block_bytes=MIB)
        keys = chain(space, 1, 40)
        write(space, keys)
        stream = greeted(server)
        number = opened(stream, MIB)
        monkeypatch.setattr(limits, "stall_s", 1.0)
        stream.send(m.encode(m.Get(5, number, keys.tobytes(), 60.0)))
        until(lambda: store.core.pool.stats().pinned > 0)
        assert read(space, keys) == [FOUND] * 40
        assert space.lookup(keys) == 40
        until(lambda: store.core.pool.stats().pinned == 0)
        until(lambda: len(server.status()["clients"]) == 1)
        stream.close()


def test_who_sends_half_a_block_is_cut_off_and_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with node(tmp_path / "s") as (store, server, client):
        space = keyspace(client)
        keys = chain(space, 1, 2)
        stream = greeted(server)
        number = opened(stream)
        monkeypatch.setattr(limits, "stall_s", 0.5)
        put = m.encode(m.Put(5, number, keys.tobytes(), "session", None, None, 30.0))
        stream._sock.sendall(struct.pack("<4sIQ", b"PDF1", len(put), 2 * 8192) + put + bytes(9000))
        until(lambda: len(server.status()["clients"]) == 1)
        assert space.lookup(keys) == 0
        until(lambda: store.core.scratch.taken == 0)
        stream.close()


def test_too_many_transfers_are_late_not_queued_for_ever(tmp_path: Path) -> None:
    with node(tmp_path / "s") as (_, server, client):
        space = keyspace(client)
        keys, more = chain(space, 1, 2), chain(space, 2, 2)
        write(space, keys)
        assert server.node is not None
        for _ in range(limits.transfers_inflight_max):
            assert server.node._turns.acquire(b"", writing=False, timeout_s=0.0)
        assert read(space, keys, deadline_s=0.2) == [LATE] * 2
        assert space.write(more, blocks_of(more), deadline_s=0.2).stored == 0
        assert space.lookup(keys) == 2, "questions go on"
        for _ in range(limits.transfers_inflight_max):
            server.node._turns.release()
        assert read(space, keys) == [FOUND] * 2


def test_a_node_without_room_says_no(tmp_path: Path) -> None:
    with serving(tmp_path / "s", listen=LOOPBACK) as (_, server):
        server._clients_max = 1
        with perdure.connect(tmp_path / "s"), pytest.raises(ServiceUnavailable):
            perdure.connect(tcp_address(server))


# --- who may
def test_only_loopback_without_tls(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "s", memory=0, capacity="64MiB") as store:  # noqa: SIM117
        with pytest.raises(ConfigError, match="without TLS"):
            Server(store, socket=tmp_path / "sock", listen=("0.0.0.0", 0))
    with pytest.raises(InvalidArgument, match="TLS"):
        perdure.connect("tcp://192.0.2.1:9463")
    for address in ("tcp://127.0.0.1", "tcp://:1", "tcp://127.0.0.1:x"):
        with pytest.raises(InvalidArgument, match="tcp://HOST:PORT"):
            perdure.connect(address)


def test_a_taken_port_is_a_clear_error(tmp_path: Path) -> None:
    with socket.create_server(LOOPBACK) as taken, perdure.open(tmp_path / "s", memory=0, capacity="64MiB") as store:  # noqa: SIM117
        with pytest.raises(StorePathError, match="choose a free address"):
            Server(store, socket=tmp_path / "sock", listen=taken.getsockname())
    assert not (tmp_path / "sock").exists()


def test_certificates_decide(tmp_path: Path, authority: tuple[trustme.CA, Path]) -> None:
    good = issued(authority, "good", "127.0.0.1")
    stranger = issued(authority, "stranger", "127.0.0.1", by=trustme.CA())
    elsewhere = issued(authority, "elsewhere", "192.0.2.1")
    with serving(tmp_path / "s", listen=LOOPBACK, tls=good) as (_, server):
        address = tcp_address(server)
        with perdure.connect(address, **options(elsewhere)) as client:  # of a client only the authority counts
            space = keyspace(client)
            assert write(space, chain(space, 1, 3)) == [STORED] * 3
        with pytest.raises(ServiceUnavailable):
            perdure.connect(address, **options(stranger))
        with pytest.raises(ServiceUnavailable):
            perdure.connect(address)  # no TLS at all
        until(lambda: server.node is not None and server.node.connections == 0)
    with serving(tmp_path / "t", listen=LOOPBACK, tls=elsewhere) as (_, server):  # noqa: SIM117
        with pytest.raises(ServiceUnavailable, match="certificate names its host"):
            perdure.connect(tcp_address(server), **options(good))
    with pytest.raises(InvalidArgument, match="all of"):
        perdure.connect(address, tls_ca=str(good.ca))
    with pytest.raises(ConfigError, match="tls_cert"):
        perdure.connect(address, **(options(good) | {"tls_cert": str(good.ca)}))
    with pytest.raises(ConfigError, match="tls_ca"):
        perdure.connect(address, **(options(good) | {"tls_ca": os.devnull}))


def test_a_stream_given_up_inside_a_frame_yields_no_other(tmp_path: Path) -> None:
    near, far = socket.socketpair()
    with contextlib.closing(Stream(near)) as one, contextlib.closing(Stream(far)) as other:
        one.send(b"message", payload=[memoryview(b"payload")])
        data, payload = other.receive_frame(FOREVER)
        assert (data, payload) == (b"message", 7)
        with pytest.raises(ProtocolError, match="8 bytes"):
            other.fill([memoryview(bytearray(8))], FOREVER)
        other.fill([memoryview(bytearray(4))], FOREVER)
        with pytest.raises(ConnectionError):
            other.receive_frame(FOREVER)
        other.skip(3, FOREVER)
        with pytest.raises(TimeoutError):
            other.receive_frame(time.monotonic() + 0.05)
        one.send(b"next")
        assert other.receive_frame(FOREVER) == (b"next", 0)
        near.sendall(b"PDF1")
        with pytest.raises(TimeoutError):
            other.receive_frame(time.monotonic() + 0.05)
        assert other.ready()
        with pytest.raises(ConnectionError):
            other.receive_frame(FOREVER)
