"""The vLLM connector in vLLM's own scheduler (`support.engine_sim`), beside a service in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import needs_vllm
from support.served import serving

pytestmark = needs_vllm


def prompt_of(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 999) for _ in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with serving(tmp_path / "store"):
        yield tmp_path


@pytest.fixture
def engine(folder: Path) -> Iterator[Callable[..., Any]]:
    """engine(**arguments of SimEngine): an engine on the test's service."""
    from support.engine_sim import SimEngine

    made: list[SimEngine] = []

    def start(**arguments: Any) -> SimEngine:
        made.append(SimEngine(folder, f"unix://{folder}/store/perdure.sock", **arguments))
        return made[-1]

    yield start
    for one in made:
        one.close()


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
