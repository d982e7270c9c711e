"""KV events of the connector: what it tells after a look into the store, and how it arrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from support import tiny_models
from support.engines import needs_vllm

from perdure.engines.events import SALTED, BlockRemoved
from perdure.keys import adopt_hashes
from perdure.testing.transport import ServiceProcess, until
from perdure.testing.vllm_offline import OfflineEngine
from perdure.testing.vllm_process import connector

pytestmark = needs_vllm
BLOCK_TOKENS = 4
HASHES = [bytes([number + 1]) * 32 for number in range(5)]
TOKENS = list(range(100, 100 + len(HASHES) * BLOCK_TOKENS))


class Space:
    """Has the blocks of these hashes."""

    def __init__(self, *hashes: bytes):
        self.digest = b"d" * 32
        self.there = {key.tobytes() for key in adopt_hashes(self.digest, hashes)}

    def present(self, keys: Any) -> Any:
        return np.array([key.tobytes() in self.there for key in keys], bool)


class Listener:
    """In the place of a publisher."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def publish(self, events: list[Any]) -> None:
        self.told += events

    def close(self) -> None:
        pass


def request(**more: Any) -> Any:
    values = {
        "block_hashes": HASHES,
        "all_token_ids": TOKENS,
        "mm_features": [],
        "lora_request": None,
        "cache_salt": None,
        "prompt_embeds": None,
    }
    return SimpleNamespace(**(values | more))


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def teller(listener: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from perdure.engines.vllm import telling
    from perdure.engines.vllm.promote import Shape

    monkeypatch.setattr(telling, "LOOKS_S", (0.0, 0.0))

    def hashes_of(hashes: Any, group: int, first: int, end: int) -> list[bytes]:
        return list(hashes[first // BLOCK_TOKENS : end // BLOCK_TOKENS])

    made = telling.Teller([Shape(BLOCK_TOKENS, None)], hashes_of, listener, ints=False)
    yield made
    made.close()


def test_what_every_rank_has_is_told(teller: Any, listener: Listener) -> None:
    ranks = [Space(*HASHES[:2], HASHES[3]), Space(*HASHES)]
    teller.ended(request(), len(TOKENS), lambda: [ranks])
    until(lambda: len(listener.told) == 2)
    first, second = listener.told
    assert (first.block_hashes, first.token_ids, first.parent_block_hash) == (HASHES[:2], TOKENS[:8], None)
    assert (second.block_hashes, second.token_ids, second.parent_block_hash) == ([HASHES[3]], TOKENS[12:16], HASHES[2])
    ranks[0] = Space(*HASHES[1:])
    teller.ended(request(), len(TOKENS), lambda: [ranks])
    until(lambda: len(listener.told) == 5)
    assert listener.told[2] == BlockRemoved([HASHES[0]], "STORAGE")
    assert [one.block_hashes for one in listener.told[3:]] == [[HASHES[2]], [HASHES[4]]]


def test_a_new_epoch_removes_what_was_told(teller: Any, listener: Listener) -> None:
    teller.ended(request(), len(TOKENS), lambda: [[Space(*HASHES)]])
    until(lambda: len(listener.told) == 1)
    teller.new_epoch()
    assert listener.told[1:] == [BlockRemoved(HASHES, "STORAGE")]


def test_an_error_is_no_end(teller: Any, listener: Listener) -> None:
    def fails() -> Any:
        raise RuntimeError("the service is away")

    teller.ended(request(), len(TOKENS), fails)
    teller.ended(request(cache_salt="secret"), len(TOKENS), lambda: [[Space(*HASHES)]])
    until(lambda: len(listener.told) == 1)
    [stored] = listener.told
    assert stored.extra_keys == [(SALTED,)] * len(HASHES)
    assert not set(stored.block_hashes) & set(HASHES)


def test_an_adapter_is_looked_up_by_its_content_and_told_by_its_name(teller: Any, listener: Listener) -> None:
    adapter = SimpleNamespace(lora_name="helper")
    names = [bytes([200 + number]) * 32 for number in range(len(HASHES))]
    teller.ended(request(lora_request=adapter), len(TOKENS), lambda: [[Space(*names[:3])]], lambda: names)
    until(lambda: len(listener.told) == 1)
    [stored] = listener.told
    assert (stored.block_hashes, stored.lora_name, stored.token_ids) == (HASHES[:3], "helper", TOKENS[:12])


def test_what_tokens_do_not_name_is_not_told(teller: Any) -> None:
    for named in ({"mm_features": ["image"]}, {"prompt_embeds": "tensor"}):
        teller.ended(request(**named), len(TOKENS), lambda: [[Space(*HASHES)]])
    teller.ended(request(), 0, lambda: [[Space(*HASHES)]])
    assert not teller._waiting


def received(address: str, wanted: Callable[[Any], bool], ask: Callable[[], Any]) -> Any:
    """Ask again and again until an event of that kind comes."""
    import zmq
    from vllm.distributed.kv_events import KVEventBatch

    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(address)
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            ask()
            while socket.poll(2000):
                batch = msgspec.msgpack.decode(socket.recv_multipart()[2], type=KVEventBatch)
                for event in batch.events:
                    if wanted(event):
                        return event
    pytest.fail("no such event came")


@pytest.mark.parametrize("own", [True, False], ids=["own address", "vLLM's stream"])
def test_an_engine_tells_what_it_has_stored(
    own: bool, tmp_path: Path, service: ServiceProcess, models: Path, offline: Callable[..., OfflineEngine]
) -> None:
    address = f"ipc://{tmp_path}/events"
    stream = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": address}
    transfer = connector(service.address("unix"), **({"events": address} if own else {}))
    llm = tiny_models.llm("llama", models, **({} if own else {"kv_events_config": stream}))
    engine = offline(llm, transfer=transfer)
    seeds = iter(range(100))
    asked: list[list[int]] = []

    def ask() -> None:
        asked.append(tiny_models.prompt(300, next(seeds)))
        engine.generate([asked[-1]], max_tokens=2)

    event = received(address, lambda one: getattr(one, "medium", None) == "STORAGE", ask)
    assert event.block_size == 128
    assert event.token_ids in [one[:256] for one in asked]
    assert len(event.block_hashes) == 2
    assert event.parent_block_hash is None
