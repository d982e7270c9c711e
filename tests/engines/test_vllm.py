"""The connector in real engines: a new process restores what a cold one computes, ids and log-probabilities alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.engines import PATIENT, needs_vllm, same, transfer, wait_stored
from support.tiny_models import llm, prompt

from perdure.testing.transport import ServiceProcess
from perdure.testing.vllm_offline import OfflineEngine

pytestmark = [needs_vllm, pytest.mark.slow]

TOKENS = 24


def test_smollm_cold_equals_local_hit_equals_restored(
    offline: Callable[..., OfflineEngine], service: ServiceProcess, smollm: Path
) -> None:
    rng = random.Random(11)
    tokens = [rng.randrange(1000, 40_000) for _ in range(1500)]
    arguments = {"model": smollm, "dtype": "float32"}
    with offline(arguments, transfer=transfer(service)) as first:
        [cold] = first.generate([tokens], max_tokens=TOKENS)
        [local] = first.generate([tokens], max_tokens=TOKENS)
        wait_stored(service, 11)
    assert cold.cached_tokens == 0
    assert local.cached_tokens == 1408
    assert same(cold, local)
    with offline(arguments, transfer=transfer(service, **PATIENT)) as second:
        [restored] = second.generate([tokens], max_tokens=TOKENS)
    assert restored.cached_tokens == 1408
    assert same(cold, restored)


@pytest.mark.parametrize("kind", ["gemma3", "gpt-oss", "llama"])
def test_tiny_models_restore_exactly(
    offline: Callable[..., OfflineEngine], service: ServiceProcess, models: Path, kind: str
) -> None:
    """Gemma 3 and gpt-oss have several KV-cache groups."""
    tokens = prompt(700, 5)
    more = {"block_size": 32}
    with offline(llm(kind, models, **more), transfer=transfer(service)) as first:
        [cold] = first.generate([tokens], max_tokens=TOKENS)
        wait_stored(service, 21)
        time.sleep(1)
    with offline(llm(kind, models, **more), transfer=transfer(service, **PATIENT)) as second:
        [other] = second.generate([tokens[:100] + prompt(500, 6)], max_tokens=TOKENS)
        [restored] = second.generate([tokens], max_tokens=TOKENS)
    assert other.cached_tokens == 96
    assert restored.cached_tokens == 672
    assert same(cold, restored)


def test_two_tensor_ranks_restore_exactly(
    offline: Callable[..., OfflineEngine], service: ServiceProcess, models: Path
) -> None:
    """Each rank has a keyspace of its own; a prefix ends where one of them has no block."""
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # one NUMA node: vLLM does not choose by itself
    tokens = prompt(700, 5)
    more = {"block_size": 32, "tensor_parallel_size": 2}
    with offline(llm("llama", models, **more), transfer=transfer(service), environment=bound) as first:
        [cold] = first.generate([tokens], max_tokens=TOKENS)
        wait_stored(service, 2 * 21)
        time.sleep(1)
    patient = transfer(service, **PATIENT)
    with offline(llm("llama", models, **more), transfer=patient, environment=bound) as second:
        [restored] = second.generate([tokens], max_tokens=TOKENS)
    assert restored.cached_tokens == 672
    assert same(cold, restored)
    with offline(llm("llama", models, block_size=32), transfer=patient) as third:
        [other] = third.generate([tokens], max_tokens=TOKENS)
    assert other.cached_tokens == 0
