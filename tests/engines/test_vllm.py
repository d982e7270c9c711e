"""The connector in real engines: a new process restores what a cold one computes, ids and log-probabilities alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.engines import PATIENT, alike, needs_vllm, same, transfer, wait_stored
from support.tiny_models import llm, prompt

from perdure.testing.transport import ServiceProcess
from perdure.testing.vllm_offline import OfflineEngine
from perdure.testing.vllm_process import tiering

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
    assert alike(cold, local)
    with offline(arguments, transfer=transfer(service, **PATIENT)) as second:
        [restored] = second.generate([tokens], max_tokens=TOKENS)
    assert restored.cached_tokens == 1408
    assert same(local, restored)  # to the last bit: what was computed behind the same prefix


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


def test_beside_another_connector(offline: Callable[..., OfflineEngine], service: ServiceProcess, models: Path) -> None:
    """In vLLM's MultiConnector with its own offloading, whose memory ends with the engine."""
    own = transfer(service, **PATIENT)
    both = own | {
        "kv_connector": "MultiConnector", "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": [own, tiering()]},
    }  # fmt: skip
    arguments, tokens = llm("llama", models, block_size=32), prompt(700, 5)
    with offline(arguments, transfer=both) as first:
        [cold] = first.generate([tokens], max_tokens=TOKENS)
        wait_stored(service, 21)
    with offline(arguments, transfer=both) as second:
        [restored] = second.generate([tokens], max_tokens=TOKENS)
    assert restored.cached_tokens == 672
    assert same(cold, restored)


def test_prompts_of_embeddings(offline: Callable[..., OfflineEngine], service: ServiceProcess, models: Path) -> None:
    """Restored by their bytes, and never taken for others of the same length."""
    rng = random.Random(3)
    one, other = ({"prompt_embeds": [[rng.gauss(0, 1) for _ in range(128)] for _ in range(300)]} for _ in range(2))
    arguments = llm("llama", models, block_size=32, enable_prompt_embeds=True)
    with offline(arguments, transfer=transfer(service)) as first:
        [cold] = first.generate([one], max_tokens=TOKENS)
        wait_stored(service, 9)
    with offline(arguments, transfer=transfer(service, **PATIENT)) as second:
        [stranger] = second.generate([other], max_tokens=TOKENS)
        [restored] = second.generate([one], max_tokens=TOKENS)
    assert (stranger.cached_tokens, restored.cached_tokens) == (0, 288)
    assert same(cold, restored)
    assert not same(cold, stranger)
