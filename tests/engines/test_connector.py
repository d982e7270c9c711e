"""The vLLM connector in vLLM's own scheduler (`support.engine_sim`), beside a service in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engines import Served, needs_vllm, prompt_of

pytestmark = needs_vllm


def test_what_one_engine_stored_another_one_restores(engine: Callable[..., Any]) -> None:
    from support.engine_sim import answer

    prompt = prompt_of(300)
    first = engine()
    assert first.ask("a", prompt, tokens=20) == answer(prompt, 20)
    assert first.external["a"] == 0
    first.settle()
    second = engine()
    assert second.ask("a", prompt, tokens=20) == answer(prompt, 20)
    assert second.external["a"] == 288


def test_local_and_stored_prefixes_combine(engine: Callable[..., Any]) -> None:
    from support.engine_sim import answer

    prompt = prompt_of(400)
    first = engine()
    first.ask("a", prompt)
    first.settle()
    second = engine()
    second.ask("short", prompt[:100])
    assert second.external["short"] == 96
    assert second.ask("long", prompt) == answer(prompt, 4)
    assert second.cached["long"] == 384
    assert second.external["long"] == 384 - 96


def test_a_token_is_left_to_compute(engine: Callable[..., Any]) -> None:
    from support.engine_sim import answer

    prompt = prompt_of(160)
    first = engine()
    first.ask("a", prompt)
    first.settle()
    second = engine()
    assert second.ask("a", prompt) == answer(prompt, 4)
    assert second.external["a"] == 144


def test_salts_separate(engine: Callable[..., Any]) -> None:
    prompt = prompt_of(200)
    first = engine()
    first.ask("a", prompt, salt="one")
    first.settle()
    second = engine()
    second.ask("a", prompt, salt="two")
    second.ask("b", prompt)
    assert second.external == {"a": 0, "b": 0}
    second.ask("c", prompt, salt="one")
    assert second.external["c"] == 192


def test_without_prefix_caching(engine: Callable[..., Any]) -> None:
    from support.engine_sim import answer

    prompt = prompt_of(200)
    first = engine(enable_prefix_caching=False)
    first.ask("a", prompt)
    first.settle()
    assert first.ask("b", prompt) == answer(prompt, 4)
    assert first.external["b"] == 192


@pytest.mark.parametrize("window", [None, 64])
def test_pressure_preempts_and_overwrites_and_nothing_is_stored_wrong(
    engine: Callable[..., Any], window: int | None
) -> None:
    """FAULTS 28, 29, 33: a cache much smaller than its requests; every engine checks every position it attends to."""
    from support.engine_sim import answer

    prompts = [prompt_of(40 + 37 * seed % 200, seed % 5) for seed in range(24)]
    for extra in ({"flush_ms_max": 0}, {}, {"staging_bytes": 1 << 20}):
        one = engine(blocks=48 if window is None else 80, window_tokens=window, extra=extra)
        for at, prompt in enumerate(prompts):
            one.add(f"r{at}", prompt, tokens=60)
        one.run()
        one.settle()
        for at, prompt in enumerate(prompts):
            assert one.outputs[f"r{at}"] == answer(prompt, 60), at
    preemptions = sum(request.num_preemptions for request in one.requests)
    assert preemptions, "this is to be a test of preemption"
    last = engine(blocks=512, window_tokens=window)
    for at, prompt in enumerate(prompts):
        assert last.ask(f"r{at}", prompt, tokens=60) == answer(prompt, 60)
    assert sum(last.external.values()) > 0


# --- the service is away, dies, or has something else
def test_an_engine_without_a_service_computes(engine: Callable[..., Any], served: Served) -> None:
    from support.engine_sim import answer

    served.stop()
    one = engine()
    prompt = prompt_of(200)
    assert one.ask("a", prompt) == answer(prompt, 4)
    assert one.ask("b", prompt_of(100, 2)) == answer(prompt_of(100, 2), 4)


@pytest.mark.parametrize("window", [None, 64])
def test_the_service_dies_before_a_load(engine: Callable[..., Any], served: Served, window: int | None) -> None:
    """FAULTS 30, 31: reported once, by block or for the request; computed; not offered again."""
    from support.engine_sim import answer

    prompt = prompt_of(300)
    first = engine(window_tokens=window)
    first.ask("a", prompt)
    first.settle()
    second = engine(window_tokens=window)
    second.before_loads = served.stop
    assert second.ask("a", prompt, tokens=30) == answer(prompt, 30)
    assert second.counters["hits"] == 1
    assert second.counters["failed_loads"] == 1
    assert second.finished["a"] == "length"


def test_the_service_dies_and_comes_back(engine: Callable[..., Any], served: Served) -> None:
    from support.engine_sim import answer

    one = engine(extra={"retry_s_min": 0.01, "retry_s_max": 0.02}, enable_prefix_caching=False)
    prompts = [prompt_of(200, seed) for seed in range(4)]
    one.ask("a", prompts[0])
    served.stop()
    for at, prompt in enumerate(prompts):
        assert one.ask(f"away{at}", prompt) == answer(prompt, 4)
    served.start()
    give_up = time.monotonic() + 30
    while not one.counters["hits"]:
        assert one.ask(f"back{one.steps}", prompts[1]) == answer(prompts[1], 4)
        assert time.monotonic() < give_up


@pytest.mark.parametrize("window", [None, 64])
def test_a_damaged_block_is_a_miss(engine: Callable[..., Any], served: Served, window: int | None) -> None:
    from support.engine_sim import answer

    prompt = prompt_of(300)
    first = engine(window_tokens=window)
    first.ask("a", prompt)
    first.settle()
    served.stop()
    for segment in (served.folder / "store" / "segments").glob("*/*.seg"):
        raw = bytearray(segment.read_bytes())
        for at in range(4096 + 100, len(raw), 64 * 1024):  # inside a payload here and there
            raw[at] ^= 1
        segment.write_bytes(raw)
    served.start()
    second = engine(window_tokens=window)
    assert second.ask("a", prompt) == answer(prompt, 4)
    assert second.external["a"] < 288
    assert second.counters["failed_loads"] == 0


# --- requests that end early, or find no room
def test_aborts_while_queued_while_loading_and_while_saving(engine: Callable[..., Any]) -> None:
    """FAULTS 31: whatever ends when, the engine comes to an end and its blocks are free."""
    from support.engine_sim import answer

    prompt = prompt_of(400)
    first = engine()
    first.ask("a", prompt)
    first.settle()
    second = engine()
    second.add("queued", prompt)
    second.abort("queued")
    second.add("loading", prompt)
    second.before_loads = lambda: second.abort("loading")
    second.run()
    second.before_loads = None
    second.add("saving", prompt_of(300, 7), tokens=50)
    for _ in range(3):
        second.step()
    second.abort("saving")
    second.run()
    assert not second.scheduler.requests
    assert not second.connector._scheduler._loading
    assert not second.connector._scheduler._requests
    pool = second.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == second.cache_config.num_blocks - 1
    assert second.ask("a", prompt) == answer(prompt, 4)


def test_hits_that_need_all_blocks_do_not_park_the_engine(engine: Callable[..., Any]) -> None:
    """FAULTS 32."""
    from support.engine_sim import answer

    prompts = [prompt_of(321, seed) for seed in range(3)]
    first = engine(blocks=512)
    for at, prompt in enumerate(prompts):
        first.ask(f"r{at}", prompt)
    first.settle()
    for blocks in (41, 42, 43, 44, 62, 64):
        second = engine(blocks=blocks)
        for at, prompt in enumerate(prompts):
            second.add(f"r{at}", prompt, tokens=40)
        second.run()
        for at, prompt in enumerate(prompts):
            assert second.outputs[f"r{at}"] == answer(prompt, 40)


# --- weights, modes, what it counts
def test_weights_that_change_are_another_keyspace(engine: Callable[..., Any]) -> None:
    """FAULTS 27: 0 old blocks used; they hit again when the old weights return."""
    prompt = prompt_of(200)
    one = engine(extra={"weights": ""}, enable_prefix_caching=False)

    def reset(value: float) -> None:
        assert one.connector.reset_cache() is True
        one.model.get_parameter("0.weight").data.fill_(value)

    one.ask("a", prompt)
    one.settle()
    reset(2.0)
    one.ask("b", prompt)
    one.settle()
    one.ask("c", prompt)
    reset(1.0)
    one.ask("d", prompt)
    assert [one.external[name] for name in "abcd"] == [0, 0, 192, 192]


def test_shadow_counts_and_loads_nothing(engine: Callable[..., Any]) -> None:
    prompt = prompt_of(200)
    first = engine(extra={"mode": "shadow"})
    first.ask("a", prompt)
    first.settle()
    second = engine(extra={"mode": "shadow"})
    second.ask("a", prompt)
    second.run()
    assert second.external["a"] == 0
    assert second.counters["shadow_hit_tokens"] == 192
    assert second.counters["hits"] == 0


def test_a_canary_that_agrees_changes_nothing(engine: Callable[..., Any]) -> None:
    prompt = prompt_of(200)
    first = engine()
    first.ask("a", prompt)
    first.settle()
    second = engine(extra={"canary_percent": 100})
    second.ask("a", prompt, tokens=20)
    assert second.external["a"] == 192 - 16
    for number in range(200):  # a thread compares; what it found is told in a later step
        if second.counters["canaries"]:
            break
        second.ask(f"later {number}", prompt_of(3))
    assert second.counters["canaries"] == 1
    assert second.counters["canaries_tripped"] == 0


def test_an_operator_turns_it_off_and_on(engine: Callable[..., Any], served: Served) -> None:
    from perdure.engines import control

    path = control.file_of(served.url)
    prompt = prompt_of(200)
    one = engine(enable_prefix_caching=False)
    one.ask("a", prompt)
    one.settle()
    for name, off, external in (("b", True, 0), ("c", False, 192)):
        control.tell(path, off=off)
        one.connector._scheduler._watch.look()
        one.ask(name, prompt)
        assert one.external[name] == external
    control.tell(path, weights=True)
    one.connector._scheduler._watch.look()
    one.ask("d", prompt)
    assert one.connector._scheduler._epochs.number == 1
    assert one.external["d"] == 192


def test_hints_pin_release_and_name_a_session(engine: Callable[..., Any], served: Served) -> None:
    one = engine(enable_prefix_caching=False)
    prompt = prompt_of(200)
    for name, params in (
        ("a", {"pin_s": 60, "max_store_tokens": 64}),
        ("b", {"pin_s": "x", "release": "yes", "max_store_tokens": -1}),
    ):
        one.add(name, prompt, session="agent", params=params)
        one.run()
        one.settle()
    give_up = time.monotonic() + 30
    while not (sessions := served.store.sessions()) or not served.store.status()["pins"]:
        assert time.monotonic() < give_up
        time.sleep(0.02)
    assert [one["name"] for one in sessions] == ["agent"]
    one.ask("c", prompt_of(100, 2), params={"max_store_tokens": 0})
    one.settle()
    one.ask("d", prompt_of(100, 2))
    assert one.external["d"] == 0


def test_prompt_logprobs_are_computed_in_full(engine: Callable[..., Any]) -> None:
    one = engine(enable_prefix_caching=False)
    prompt = prompt_of(200)
    one.ask("a", prompt)
    one.settle()
    one.ask("b", prompt, prompt_logprobs=1)
    assert one.external["b"] == 0
    assert one.counters["prompt_logprobs"] == 1


def test_metrics_have_every_counter(engine: Callable[..., Any]) -> None:
    import prometheus_client

    one = engine(enable_prefix_caching=False)
    prompt = prompt_of(200)
    one.ask("a", prompt)
    one.settle()
    one.ask("b", prompt)
    registry = prometheus_client.CollectorRegistry()

    def metric(kind: Any) -> Any:
        return lambda **named: kind(**named, registry=registry)

    kinds = {kind: metric(kind) for kind in (prometheus_client.Counter, prometheus_client.Gauge,
                                             prometheus_client.Histogram)}  # fmt: skip
    shown = type(one.connector).build_prom_metrics(one.config, kinds, ["engine"], {0: ["0"]})
    stats = type(one.connector).build_kv_connector_stats({"hits": 1, "saved_seconds_per_request": [0.5]})
    more = type(one.connector).build_kv_connector_stats({"hits": 2, "saved_seconds_per_request": [1.5]})
    shown.observe(stats.aggregate(more).to_dict(), 0)
    text = prometheus_client.generate_latest(registry).decode()
    assert 'vllm:perdure_hits_total{engine="0"} 3.0' in text
    assert 'vllm:perdure_request_ttft_saved_seconds_sum{engine="0"} 2.0' in text
    assert one.counters["hits"] == 1
    assert one.counters["loaded_bytes"] == 12 * 2 * 2 * 16 * 32 * 4


def test_adapters_are_told_apart_by_their_content(engine: Callable[..., Any], tmp_path: Path) -> None:
    """FAULTS 34."""
    from vllm.lora.request import LoRARequest

    def adapter(name: str, number: int, folder: str, weights: bytes) -> LoRARequest:
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_bytes(weights)
        return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(path))

    prompt = prompt_of(200)
    one = engine(enable_prefix_caching=False)
    asked = (
        ("base", None, 0),
        ("first", adapter("helper", 1, "v1", b"one"), 0),
        ("again", adapter("helper", 1, "v1", b"one"), 192),
        ("other name and path", adapter("copy", 2, "v1-copy", b"one"), 192),
        ("reloaded with others", adapter("helper", 3, "v2", b"two"), 0),
        ("changed under its number", adapter("helper", 3, "v2", b"three"), 0),
        ("base again", None, 192),
    )
    for name, lora, external in asked:
        if name.startswith("changed"):
            (tmp_path / "v2" / "adapter_model.safetensors").write_bytes(b"four!!")
        one.ask(name, prompt, tokens=40, adapter=lora)
        one.settle()
        assert one.external[name] == external, name


def test_as_a_child_of_multiconnector(engine: Callable[..., Any]) -> None:
    """Two connectors of two tenants in one engine: each stores, the first that has a prefix loads it."""
    from support.engine_sim import answer

    prompt, other = prompt_of(300), prompt_of(300, 2)
    for tenant, text in (("one", prompt), ("two", other)):
        first = engine(extra={"tenant": tenant})
        first.ask("a", text)
        first.settle()
    both = engine(children=[{"tenant": "one"}, {"tenant": "two"}])
    for name, text in (("a", prompt), ("b", other)):
        assert both.ask(name, text, tokens=30) == answer(text, 30)
        assert both.external[name] == 288
    assert both.ask("c", prompt_of(300, 3), tokens=30) == answer(prompt_of(300, 3), 30)
    assert not both.scheduler.requests


@pytest.mark.parametrize("window", [None, 64])
def test_two_ranks_have_what_both_have(engine: Callable[..., Any], served: Served, window: int | None) -> None:
    """FAULTS 36: each rank stores its own; a load that fails on one of them fails for both."""
    from support.engine_sim import answer

    prompt = prompt_of(300)
    first = engine(ranks=2, window_tokens=window)
    assert first.ask("a", prompt, tokens=30) == answer(prompt, 30)
    first.settle()
    second = engine(ranks=2, window_tokens=window)
    assert second.ask("a", prompt, tokens=30) == answer(prompt, 30)
    assert second.external["a"] == 288
    assert second.counters["failed_loads"] == 0
    alone = engine(window_tokens=window)
    assert alone.ask("a", prompt) == answer(prompt, 4)
    assert alone.external["a"] == 0
    third = engine(ranks=2, window_tokens=window)
    third.before_loads = served.stop
    assert third.ask("a", prompt, tokens=30) == answer(prompt, 30)
    assert third.counters["failed_loads"] == 2


def test_what_all_ranks_hold_is_stored_once(engine: Callable[..., Any]) -> None:
    """Latent attention: the first rank stores, every rank loads."""
    from support.engine_sim import answer

    prompt = prompt_of(300)
    first = engine(ranks=2, latent=True)
    first.ask("a", prompt, tokens=1)
    first.settle()
    first.ask("b", prompt_of(5), tokens=1)  # a step brings the counts
    assert first.counters["saved_blocks"] == 18
    second = engine(ranks=2, latent=True)
    assert second.ask("a", prompt, tokens=30) == answer(prompt, 30)
    assert second.external["a"] == 288
    assert second.counters["loads"] == 2
    alone = engine(latent=True)
    alone.ask("a", prompt)
    assert alone.external["a"] == 0


def test_a_canary_that_differs_turns_the_connector_off_until_told(engine: Callable[..., Any], served: Served) -> None:
    from perdure.engines import control

    prompt = prompt_of(200)
    wrong = engine(scale=3.0)
    wrong.ask("a", prompt)
    wrong.settle()
    one = engine(extra={"canary_percent": 100}, enable_prefix_caching=False)
    one.checked = False
    one.ask("a", prompt, tokens=20)
    give_up = time.monotonic() + 30
    while not one.connector._scheduler.tripped:
        one.ask(f"more{one.steps}", prompt_of(20, one.steps))
        assert time.monotonic() < give_up
    assert one.counters["canaries_tripped"] == 1
    assert "differs" in one.connector._scheduler.tripped
    one.ask("b", prompt)
    assert one.external["b"] == 0
    control.tell(control.file_of(served.url), off=False)
    one.connector._scheduler._watch.look()
    one.ask("c", prompt)
    assert one.external["c"] > 0
