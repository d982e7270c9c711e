"""KV events: what is told, in vLLM's format, and what never is."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
from support.engines import needs_vllm

from perdure.engines.events import (
    END_OF_REPLAY,
    SALTED,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
    EventsUnavailable,
    StorageEvents,
    as_vllm,
)
from perdure.errors import InvalidArgument

needs_zmq = pytest.mark.skipif(find_spec("zmq") is None, reason="pyzmq is not installed: pip install perdure[events]")
needs_dynamo = pytest.mark.skipif(
    find_spec("dynamo") is None, reason="Dynamo is not installed: make test-engines has it"
)
BLOCK_TOKENS = 4
WAIT_MS = 30_000


def hashes(count: int, start: int = 0) -> list[bytes]:
    return [(number + 1).to_bytes(32, "big") for number in range(start, start + count)]


def tokens(blocks: int) -> list[int]:
    return list(range(100, 100 + blocks * BLOCK_TOKENS))


# --- what is told
def test_blocks_are_told_once_with_their_parent() -> None:
    events = StorageEvents(BLOCK_TOKENS)
    events.stored(hashes(2), tokens(2))
    events.stored(hashes(3), tokens(3))
    first, second = events.take()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == ([1, 2], None, tokens(2))
    assert (second.block_hashes, second.parent_block_hash, second.token_ids) == ([3], 2, tokens(3)[8:])
    assert first.medium == "STORAGE"
    assert events.take() == []


def test_a_gap_between_known_blocks_is_filled() -> None:
    events = StorageEvents(BLOCK_TOKENS)
    events.stored(hashes(5), tokens(5))
    events.missing(hashes(2, start=1))
    events.stored(hashes(5), tokens(5), lora="adapter")
    _, removed, again = events.take()
    assert removed == BlockRemoved([2, 3], "STORAGE")
    assert isinstance(again, BlockStored)
    assert (again.block_hashes, again.parent_block_hash, again.lora_name) == ([2, 3], 1, "adapter")


def test_what_was_never_told_is_not_removed() -> None:
    events = StorageEvents(BLOCK_TOKENS)
    events.missing(hashes(3))
    events.cleared()
    assert events.take() == []


def test_a_sealed_epoch_removes_everything_by_group() -> None:
    events = StorageEvents(BLOCK_TOKENS)
    events.stored(hashes(2), tokens(2), group=0)
    events.stored(hashes(2), tokens(2), group=1)
    events.take()
    events.cleared()
    assert events.take() == [BlockRemoved([1, 2], "STORAGE", 0), BlockRemoved([1, 2], "STORAGE", 1)]
    events.stored(hashes(1), tokens(1), group=0)
    assert len(events.take()) == 1


def test_what_is_forgotten_is_removed() -> None:
    events = StorageEvents(BLOCK_TOKENS, known_max=2)
    events.stored(hashes(2), tokens(2))
    events.stored(hashes(1), tokens(1))  # the first is warm again
    events.stored(hashes(1, start=9), tokens(1))
    assert events.take()[-1] == BlockRemoved([2], "STORAGE")


@pytest.mark.parametrize("int_hashes", [True, False])
def test_the_salt_stays_here(int_hashes: bool) -> None:
    salt = "tenant-secret"
    events = StorageEvents(BLOCK_TOKENS, int_hashes=int_hashes)
    keys: list[tuple[Any, ...] | None] = [("adapter", salt), (("salt", salt), ("mm", "image", 3))]
    events.stored(hashes(2), tokens(2), extra_keys=keys, salt=salt)
    events.stored(hashes(1, start=2), tokens(1), parent=hashes(2)[-1], salt=salt)
    events.stored(hashes(1, start=5), tokens(1))
    first, second, plain = events.take()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert isinstance(plain, BlockStored)
    assert first.extra_keys == [("adapter", SALTED), (("salt", SALTED), ("mm", "image", 3))]
    assert second.extra_keys == [(SALTED,)]
    assert second.parent_block_hash == first.block_hashes[-1]
    assert plain.block_hashes == ([6] if int_hashes else hashes(1, start=5))
    sent = msgspec.msgpack.encode(EventBatch(0.0, [first, second]))
    assert salt.encode() not in sent
    for one in (*hashes(3), *(int.from_bytes(one, "big") for one in hashes(3))):
        assert one not in first.block_hashes + second.block_hashes
    events.missing(hashes(1))
    assert events.take() == [BlockRemoved(first.block_hashes[:1], "STORAGE")]


def test_bad_input_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="block_tokens=0"):
        StorageEvents(0)
    with pytest.raises(InvalidArgument, match="need as many tokens"):
        StorageEvents(BLOCK_TOKENS).stored(hashes(2), tokens(1))


# --- the wire
@contextlib.contextmanager
def subscriber(endpoint: str, kind: str = "SUB") -> Iterator[Any]:
    import zmq

    with zmq.Context() as context, context.socket(getattr(zmq, kind)) as socket:
        socket.linger = 0
        if kind == "SUB":
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        yield socket


def received(socket: Any) -> list[bytes]:
    assert socket.poll(WAIT_MS), "nothing came"
    return list(socket.recv_multipart())


def settled(publisher: EventPublisher, socket: Any) -> int:
    """Publish until the subscription has reached the publisher; the number of the next batch."""
    while True:
        publisher.publish([AllBlocksCleared()])
        if socket.poll(50):
            number = int.from_bytes(received(socket)[1], "big")
            while socket.poll(200):
                number = int.from_bytes(received(socket)[1], "big")
            return number + 1


@needs_zmq
def test_batches_are_numbered_and_can_be_had_again() -> None:
    with EventPublisher("tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", topic="kv", rank=3) as publisher:
        with subscriber(publisher.endpoint) as socket:
            number = settled(publisher, socket)
            for at in range(3):
                publisher.publish([BlockRemoved([at], "STORAGE")])
                topic, sequence, payload = received(socket)
                batch = msgspec.msgpack.decode(payload, type=EventBatch)
                assert (topic, int.from_bytes(sequence, "big")) == (b"kv", number + at)
                assert batch.events == [BlockRemoved([at], "STORAGE")]
                assert batch.data_parallel_rank == 3
        assert publisher.replay_endpoint is not None
        with subscriber(publisher.replay_endpoint, "REQ") as socket:
            socket.send((number + 1).to_bytes(8, "big"))
            frames = received(socket)
            assert frames[1] == (number + 1).to_bytes(8, "big")
        with subscriber(publisher.replay_endpoint, "DEALER") as socket:
            socket.send_multipart([b"", b"not a number"])  # is not answered
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            told = [received(socket) for _ in range(number + 3)]
            assert [int.from_bytes(frames[2], "big") for frames in told] == list(range(number + 3))
            assert received(socket)[2] == END_OF_REPLAY
            first = msgspec.msgpack.decode(told[0][3], type=EventBatch)
            assert first.events == [AllBlocksCleared()]


@needs_zmq
def test_dropped_batches_are_followed_by_a_clearance() -> None:
    with EventPublisher("tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", waiting_max=1) as publisher:
        assert publisher.replay_endpoint is not None
        for at in range(2000):
            publisher.publish([BlockRemoved([at], "STORAGE")])
        publisher.publish([BlockRemoved([-1], "STORAGE")])
        with subscriber(publisher.replay_endpoint, "DEALER") as socket:
            batches: list[list[Any]] = []
            while sum(batch == [AllBlocksCleared()] for batch in batches) < 2:  # one at the start, one for what is lost
                socket.send_multipart([b"", (0).to_bytes(8, "big")])
                batches = []
                while (frames := received(socket))[2] != END_OF_REPLAY:
                    batches.append(msgspec.msgpack.decode(frames[3], type=EventBatch).events)


@needs_zmq
def test_an_address_that_cannot_be_bound_says_so() -> None:
    with EventPublisher("tcp://127.0.0.1:0") as publisher, pytest.raises(EventsUnavailable, match="in use"):
        EventPublisher(publisher.endpoint)


@needs_vllm
def test_vllm_reads_every_event() -> None:
    from vllm.distributed import kv_events

    events = StorageEvents(BLOCK_TOKENS)
    events.stored(hashes(2), tokens(2), lora="adapter", extra_keys=[("a",), None], group=1)
    events.missing(hashes(1), group=1)
    told = [*events.take(), AllBlocksCleared()]
    batch = msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(1.5, told, 2)), type=kv_events.KVEventBatch)
    stored, removed, cleared = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 2)
    assert isinstance(stored, kv_events.BlockStored)
    assert (stored.block_hashes, stored.token_ids, stored.group_idx) == ([1, 2], tokens(2), 1)
    assert (stored.medium, stored.lora_name) == (kv_events.MEDIUM_STORAGE, "adapter")
    assert isinstance(removed, kv_events.BlockRemoved)
    assert isinstance(cleared, kv_events.AllBlocksCleared)
    assert [msgspec.msgpack.encode(one) for one in as_vllm(told)] == [msgspec.msgpack.encode(one) for one in told]


@needs_vllm
def test_hashes_are_told_as_vllm_tells_its_own() -> None:
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    events = StorageEvents(BLOCK_TOKENS)
    long = [bytes(range(1, 33))]
    events.stored(long, tokens(1))
    [told] = events.take()
    assert isinstance(told, BlockStored)
    assert told.block_hashes == [maybe_convert_block_hash(long[0])]


# --- a router
@needs_dynamo
def test_dynamos_radix_tree_finds_what_is_stored() -> None:
    from dynamo import _core as dynamo

    events, tree = StorageEvents(BLOCK_TOKENS), dynamo.RadixTree()
    wanted = dynamo.compute_block_hash_for_seq(tokens(4), BLOCK_TOKENS)

    def found() -> list[int]:
        for number, event in enumerate(events.take()):
            tree.apply_event(
                7, json.dumps({"event_id": number, "dp_rank": 0, "data": _dynamos(dynamo, event)}).encode()
            )
        return list(tree.find_matches(wanted).scores.values())

    events.stored(hashes(2), tokens(2))
    assert found() == [2]
    events.stored(hashes(4), tokens(4))
    assert found() == [4]
    events.missing(hashes(2, start=2))
    assert found() == [2]
    events.cleared()
    assert found() == []


def _dynamos(dynamo: Any, event: Any) -> Any:
    if isinstance(event, BlockRemoved):
        return {"removed": {"block_hashes": event.block_hashes}}
    theirs = dynamo.compute_block_hash_for_seq(event.token_ids, event.block_size)
    blocks = [{"block_hash": a, "tokens_hash": b} for a, b in zip(event.block_hashes, theirs, strict=True)]
    return {"stored": {"parent_hash": event.parent_block_hash, "blocks": blocks}}


@needs_dynamo
@needs_zmq
def test_dynamos_indexer_follows_the_stream() -> None:
    """Its standalone indexer reads what we send over ZeroMQ, with no help of ours."""
    from perdure.testing.vllm_server import HOST, free_port

    port = free_port()
    events = StorageEvents(BLOCK_TOKENS)
    with EventPublisher(f"tcp://{HOST}:0") as publisher:
        code = "import sys; from dynamo import _core; _core.run_kv_indexer(sys.argv[1:])"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "--port", str(port), "--block-size", str(BLOCK_TOKENS),
             "--workers", f"7={publisher.endpoint}"]
        )  # fmt: skip
        try:
            for blocks in (2, 4):
                events.stored(hashes(blocks), tokens(blocks))
                _until_indexed(process, port, blocks, publisher, events.take())
            events.missing(hashes(3, start=1))
            _until_indexed(process, port, 1, publisher, events.take())
        finally:
            process.kill()
            process.wait()


def _until_indexed(process: Any, port: int, blocks: int, publisher: EventPublisher, told: Any) -> None:
    """Tells it again and again: a subscriber that comes late has missed the first times."""
    give_up = time.monotonic() + WAIT_MS / 1000
    answer: Any = None
    while time.monotonic() < give_up and process.poll() is None:
        publisher.publish(told)
        with contextlib.suppress(OSError, http.client.HTTPException, KeyError, ValueError):
            answer = _query(port)
            if answer["instances"]["7"]["disk"] == blocks * BLOCK_TOKENS:  # so it reads the medium, too
                return
        time.sleep(0.1)
    pytest.fail(f"the indexer finds {answer}, not {blocks} blocks")


def _query(port: int) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        body = json.dumps({"token_ids": tokens(4), "model_name": "default"})
        connection.request("POST", "/query", body, {"Content-Type": "application/json"})
        return json.load(connection.getresponse())
    finally:
        connection.close()
