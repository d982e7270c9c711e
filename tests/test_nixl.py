"""Payload by NIXL: what is special about it. Runs without special hardware, as UCX carries it there (`.ci/nixl`)."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from support.served import serving, tcp_address

pytest.importorskip("nixl_cu12", reason="the extra `nixl` is not installed")

import perdure
from perdure import RemoteStore, limits
from perdure.io.memory import address
from perdure.limits import MIB
from perdure.service import messages as m
from perdure.service.fields import layout_fields
from perdure.service.nixl_agent import Agent
from perdure.service.server import Server
from perdure.service.streams import Stream, connect_tcp
from perdure.testing.store import (
    FOUND,
    LATE,
    STORED,
    UNTOUCHED,
    WEIGHTS,
    WRITE_LATE,
    block_of,
    blocks_of,
    chain,
    keyspace,
    layout_of,
    read,
    write,
)  # fmt: skip
from perdure.testing.transport import ServiceProcess, TransportConformance, until

FOREVER = float("inf")
BLOCK = 8192


@pytest.fixture(autouse=True)
def _transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "cma,self,tcp")


def nixl_address(tcp: str) -> str:
    return tcp.replace("tcp://", "nixl://")


class TestNixl(TransportConformance):
    flags: ClassVar[dict[str, str]] = {"listen": "127.0.0.1:0", "capacity": "512MiB"}
    reads_in_messages = 1

    def connect(self, service: ServiceProcess) -> RemoteStore:
        return perdure.connect(nixl_address(service.address("tcp")))

    def test_payload_goes_by_nixl(self, client: RemoteStore) -> None:
        space = keyspace(client)
        keys = chain(space, 1, 3)
        write(space, keys)
        (landing,) = client.landings._idle
        landing.view[: 3 * BLOCK] = bytes(3 * BLOCK)
        assert read(space, keys) == [FOUND] * 3
        assert landing.view[: 3 * BLOCK].tobytes() == b"".join(block_of(key.tobytes(), BLOCK) for key in keys)

    def test_a_forked_child_leaves_the_parents_agent_alone(self, client: RemoteStore) -> None:
        space = keyspace(client)
        keys = chain(space, 1, 2)
        write(space, keys)
        child = os.fork()
        if child == 0:
            client.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert read(space, keys) == [FOUND] * 2

    def test_a_batch_longer_than_a_landing_comes_back(self, client: RemoteStore) -> None:
        space = keyspace(client, block_bytes=3 * MIB)
        keys = chain(space, 1, 12)
        assert write(space, keys) == [STORED] * 12
        assert read(space, keys) == [FOUND] * 12

    def test_blocks_larger_than_a_landing_go_by_tcp(self, tmp_path: Path) -> None:
        with self.serve(tmp_path / "s") as service, self.connect(service) as client:
            space = keyspace(client, block_bytes=limits.frame_blocks_bytes_max + 1)
            keys = chain(space, 1, 2)
            assert write(space, keys) == [STORED] * 2
            assert read(space, keys) == [FOUND] * 2

    def test_everything_goes_by_tcp_while_too_many_landings_are_lost(
        self, client: RemoteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "nixl_landing_regions_max", 0)
        client.landings._idle.clear()
        space = keyspace(client)
        keys = chain(space, 1, 3)
        assert write(space, keys) == [STORED] * 3
        assert read(space, keys) == [FOUND] * 3
        assert not client.landings._idle

    def test_landings_of_late_calls_are_used_again_when_the_node_says_so(
        self, service: ServiceProcess, client: RemoteStore
    ) -> None:
        space = keyspace(client)
        keys = chain(space, 1, 3)
        assert write(space, keys) == [STORED] * 3
        service.stop()
        for _ in range(3):
            target = np.full((3, BLOCK), UNTOUCHED, np.uint8)
            assert space.read(keys, into=target, deadline_s=0.1).statuses.tolist() == [LATE] * 3
            assert space.write(keys, blocks_of(keys), deadline_s=0.1).statuses.tolist() == [WRITE_LATE] * 3
            assert (target == UNTOUCHED).all()
        assert client.landings._lost
        service.go_on()
        until(lambda: read(space, keys) == [FOUND] * 3 and not client.landings._lost)
        assert client.landings._out == 0


# --- by hand
@contextlib.contextmanager
def node(directory: Path) -> Iterator[tuple[perdure.Store, Server, RemoteStore]]:
    """A node in this process, and a client of it by TCP."""
    with (
        serving(directory, listen=("127.0.0.1", 0)) as (store, server),
        perdure.connect(tcp_address(server)) as client,
    ):
        yield store, server, client
        until(lambda: len(server.status()["clients"]) == 1)
        mover = server.verbs.mover
        with mover._changed:
            mover._sweep()
            assert not mover._unsettled
            assert not mover._known
            assert len(mover._bounces) == mover._made
        assert store.core.pool.stats().pinned == 0
        assert store.core.scratch.taken == 0


class ByHand:
    """A client that says what it likes. Its keyspace is that of `keyspace(client)`."""

    def __init__(self, server: Server):
        assert server.node is not None
        self.stream: Stream = connect_tcp(*server.node.address, None, time.monotonic() + 60)
        assert isinstance(self.ask(m.Hello(1, limits.wire_version, "by hand")), m.Welcome)
        fields = layout_fields(layout_of(BLOCK))
        self.space = self.ask(m.OpenSpace(2, "acme", "model", WEIGHTS, "", "", fields, "off")).space

    def __enter__(self) -> ByHand:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def ask(self, question: Any, payload: bytes = b"") -> Any:
        self.stream.send(m.encode(question), payload=[memoryview(payload)])
        return m.decode_answer(self.stream.receive(FOREVER)[0])

    def offer(self, about: bytes, start: int, nbytes: int) -> Any:
        return self.ask(m.Region(3, "nixl", nbytes, about, start))

    def get(self, keys: Any, region: int, left_s: float = 60.0) -> Any:
        return self.ask(m.Get(4, self.space, keys.tobytes(), left_s, region))

    def put(self, keys: Any, region: int, payload: bytes = b"", left_s: float = 60.0) -> Any:
        question = m.Put(5, self.space, keys.tobytes(), "session", None, None, left_s, region)
        return self.ask(question, payload)


@pytest.fixture
def memory() -> Iterator[tuple[memoryview, bytes]]:
    """4 blocks' memory of this process, and what an agent says of it."""
    agent = Agent()
    view = memoryview(mmap.mmap(-1, 4 * BLOCK))
    yield view, agent.register(view)
    agent.close()


def failed(answer: Any, kind: str, words: str) -> bool:
    return isinstance(answer, m.Failed) and answer.kind == kind and words in answer.message


def test_memory_that_the_client_does_not_have_fails_and_the_node_goes_on(
    tmp_path: Path, memory: tuple[memoryview, bytes]
) -> None:
    view, about = memory
    with node(tmp_path / "s") as (_, server, client), ByHand(server) as hand:
        space = keyspace(client)
        keys = chain(space, 1, 2)
        write(space, keys)
        for start in (address(view) + (1 << 30), address(view) + 3 * BLOCK, 1):
            for verb in (hand.get, hand.put):
                region = hand.offer(about, start, 2 * BLOCK).number
                assert failed(verb(keys, region), "ServiceUnavailable", "by NIXL failed")
                assert failed(verb(keys, region), "ServiceUnavailable", "is over")
        assert read(space, keys) == [FOUND] * 2
        region = hand.offer(about, address(view), 4 * BLOCK).number
        assert hand.get(keys, region).statuses == bytes([FOUND]) * 2
        assert view[:BLOCK].tobytes() == block_of(keys[0].tobytes(), BLOCK)


def test_lengths_that_do_not_fit_are_refused(tmp_path: Path, memory: tuple[memoryview, bytes]) -> None:
    view, about = memory
    start = address(view)
    with node(tmp_path / "s") as (_, server, client), ByHand(server) as hand:
        space = keyspace(client)
        keys = chain(space, 1, 4)
        write(space, keys)
        most = limits.frame_blocks_bytes_max
        for bad in ((start, 0), (start, -1), (start, most + 1), (0, BLOCK), (2**64 - 1, BLOCK)):
            assert failed(hand.offer(about, *bad), "InvalidArgument", "bytes")
        region = hand.offer(about, start, 3 * BLOCK).number
        assert failed(hand.get(keys, region), "ProtocolError", "into a region")
        assert failed(hand.put(keys, region), "ProtocolError", "from a region")
        assert failed(hand.put(keys[:2], region, bytes(2 * BLOCK)), "ProtocolError", "bytes of payload")
        for nobody in (region + 1, -1, 2**40):
            assert failed(hand.get(keys, nobody), "ServiceUnavailable", "is over")
            assert failed(hand.put(keys, nobody), "ServiceUnavailable", "is over")
        more = chain(space, 2, 3)
        view[: 3 * BLOCK] = blocks_of(more).tobytes()
        assert hand.put(more, region).statuses == bytes([STORED]) * 3
        assert hand.get(keys[:0], region).statuses == b""
        assert read(space, more) == [FOUND] * 3


def test_what_no_agent_says_of_itself_is_refused(tmp_path: Path, memory: tuple[memoryview, bytes]) -> None:
    """Only what NIXL itself checks: it does not survive every forgery, see `nixl_agent`."""
    view, about = memory
    rng = np.random.default_rng(7)
    with node(tmp_path / "s") as (_, server, _), ByHand(server) as hand:
        for bad in (b"", *(rng.bytes(int(rng.integers(1, 3000))) for _ in range(50)), about[:60], b"x" + about):
            assert failed(hand.offer(bad, address(view), BLOCK), "InvalidArgument", "about")


_OFFER = """
import mmap, sys
from perdure.io.memory import address
from perdure.service.nixl_agent import Agent
agent, view = Agent(), memoryview(mmap.mmap(-1, int(sys.argv[1])))
print("offer", agent.register(view).hex(), address(view), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def offering(nbytes: int) -> Iterator[tuple[subprocess.Popen[str], bytes, int]]:
    """Another process with memory to offer, what its agent says of it, and where it is."""
    with subprocess.Popen(
        [sys.executable, "-c", _OFFER, str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            _, about, start = next(line for line in process.stdout if line.startswith("offer ")).split()
            yield process, bytes.fromhex(about), int(start)
        finally:
            process.kill()


@pytest.fixture
def halted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, ...]]:
    """A client whose agent stands still, the region that it has offered, and how it offers that again."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # where both sides have to move
    with node(tmp_path / "s") as (_, server, client), offering(4 * BLOCK) as (process, about, start):
        space = keyspace(client)
        keys = chain(space, 1, 4)
        write(space, keys)
        with ByHand(server) as hand, ByHand(server) as successor:
            region = hand.offer(about, start, 4 * BLOCK).number
            assert hand.get(keys, region).statuses == bytes([FOUND]) * 4
            process.send_signal(signal.SIGSTOP)
            tasks = Path(f"/proc/{process.pid}/task")
            until(lambda: {one.read_text().rpartition(")")[2].split()[0] for one in tasks.glob("*/stat")} == {"T"})
            offers = [lambda by=by: by.offer(about, start, 4 * BLOCK) for by in (hand, successor)]
            yield hand, space, process, region, offers


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("verb", ["get", "put"])
def test_a_client_that_stands_still_or_dies_in_the_middle_is_late(halted: Any, verb: str, ends: bool) -> None:
    hand, space, process, region, offers = halted
    keys, more = chain(space, 1, 4), chain(space, 2, 4)
    if verb == "get":
        assert hand.get(keys, region, 0.2).statuses == bytes([LATE]) * 4
    else:
        assert hand.put(more, region, left_s=0.2).statuses == bytes([WRITE_LATE]) * 4
        assert space.lookup(more) == 0
    assert failed(hand.get(keys, region), "ServiceUnavailable", "is over")
    for offer in offers:
        assert failed(offer(), "ServiceBusy", "later")
    assert read(space, keys) == [FOUND] * 4
    process.send_signal(signal.SIGKILL if ends else signal.SIGCONT)
    until(lambda: isinstance(offers[1](), m.Made))


def test_who_stands_still_for_long_is_cut_off(halted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hand, space, _, region, offers = halted
    monkeypatch.setattr(limits, "stall_s", 0.5)
    assert hand.get(chain(space, 1, 4), region, 0.2).statuses == bytes([LATE]) * 4
    until(lambda: isinstance(offers[0](), m.Made))


def test_memory_that_is_offered_again_ends_the_region_it_was(tmp_path: Path, memory: tuple[memoryview, bytes]) -> None:
    view, about = memory
    with node(tmp_path / "s") as (_, server, client), ByHand(server) as hand, ByHand(server) as successor:
        space = keyspace(client)
        keys = chain(space, 1, 2)
        write(space, keys)
        for _ in range(limits.regions_per_client_max + 1):
            first = hand.offer(about, address(view), 4 * BLOCK).number
            second = successor.offer(about, address(view), 4 * BLOCK).number
            assert failed(hand.get(keys, first), "ServiceUnavailable", "is over")
        assert successor.get(keys, second).statuses == bytes([FOUND]) * 2


_WORK = """
import sys, perdure
from perdure.testing.store import chain, keyspace, read, write
with perdure.connect(sys.argv[1]) as client:
    space = keyspace(client, block_bytes=1 << 20)
    print("at work", flush=True)
    while True:
        write(space, chain(space, 5, 14))
        read(space, chain(space, 5, 14))
"""


def test_clients_that_are_killed_at_work_leave_nothing_behind(tmp_path: Path) -> None:
    with node(tmp_path / "s") as (_, server, client):
        space = keyspace(client)
        keys = chain(space, 1, 4)
        write(space, keys)
        for turn in range(3):
            with subprocess.Popen(
                [sys.executable, "-c", _WORK, nixl_address(tcp_address(server))], stdout=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            ) as process:  # fmt: skip
                assert process.stdout is not None
                next(line for line in process.stdout if line.startswith("at work"))
                time.sleep(0.1 * (turn + 1))
                process.kill()
            until(lambda: len(server.status()["clients"]) == 1)
        assert read(space, keys) == [FOUND] * 4
