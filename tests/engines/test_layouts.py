"""Layouts of the KV cache and ways to spread an engine: what one real engine stored the next one restores exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tiny_models
from support.engines import PATIENT, needs_vllm, same, stored_blocks, transfer, wait_stored
from support.tiny_models import llm, prompt

from perdure.testing.transport import ServiceProcess, until
from perdure.testing.vllm_offline import OfflineEngine
from perdure.testing.vllm_process import EngineFailed

pytestmark = [needs_vllm, pytest.mark.slow]

TOKENS = 16
BLOCK_TOKENS = 32
BLOCKS = 21
CACHED = BLOCKS * BLOCK_TOKENS
PROMPT = prompt(700, 5)
SAVED = "vllm:perdure_saved_blocks"  # of all ranks
# On one NUMA node vLLM does not choose cores by itself.
TWO_CORES: dict[str, str | None] = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
ONE_CORE: dict[str, str | None] = {"VLLM_CPU_OMP_THREADS_BIND": "1|1"}  # stages that wait spin: one is for the service

AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()

Offline = Callable[..., OfflineEngine]


def saved_blocks(engine: OfflineEngine) -> float:
    """Of all ranks; a step of the engine brings the counts."""
    engine.generate([[3, 4, 5]], max_tokens=1)
    return sum(engine.metrics(SAVED).values())


def test_two_pipeline_stages_restore_exactly(offline: Offline, service: ServiceProcess, models: Path) -> None:
    """Each stage stores the layers it has; a prefix ends where one of them has no block."""
    # In its eager mode on CPUs vLLM runs no warm-up, and a stage has no buffers then for what the one before sends.
    more: dict[str, Any] = {
        "block_size": BLOCK_TOKENS, "pipeline_parallel_size": 2, "enforce_eager": False,
        "compilation_config": {"mode": 2, "backend": "eager"},
    }  # fmt: skip
    with offline(llm("llama", models, **more), transfer=transfer(service), environment=ONE_CORE) as first:
        [cold] = first.generate([PROMPT], max_tokens=TOKENS)
        [local] = first.generate([PROMPT], max_tokens=TOKENS)
        wait_stored(service, 2 * BLOCKS)
        first.end()
    assert same(cold, local)
    patient = transfer(service, **PATIENT)
    with offline(llm("llama", models, **more), transfer=patient, environment=ONE_CORE) as second:
        [restored] = second.generate([PROMPT], max_tokens=TOKENS)
    assert restored.cached_tokens == CACHED
    assert same(cold, restored)


@pytest.mark.skipif(AMX, reason="with AMX vLLM's latent attention is supported")
def test_latent_attention_without_amx_is_refused(
    offline: Offline, service: ServiceProcess, models: Path, tmp_path: Path
) -> None:
    """vLLM's CPU_MLA computes something else behind a prefix, so it does not even use its own cache."""
    with pytest.raises(EngineFailed):
        offline(llm("deepseek", models), transfer=transfer(service))
    assert "latent attention on a CPU without AMX is not supported" in (tmp_path / "vllm-0.log").read_text()


@pytest.mark.skipif(not AMX, reason="without AMX vLLM's latent attention is refused")
def test_latent_attention_is_stored_once_for_two_ranks(offline: Offline, service: ServiceProcess, models: Path) -> None:
    more: dict[str, Any] = {"block_size": BLOCK_TOKENS, "tensor_parallel_size": 2}
    with offline(llm("deepseek", models, **more), transfer=transfer(service), environment=TWO_CORES) as first:
        first.generate([PROMPT], max_tokens=TOKENS)
        [local] = first.generate([PROMPT], max_tokens=TOKENS)
        wait_stored(service, BLOCKS)
        until(lambda: saved_blocks(first) == stored_blocks(service))
    with offline(
        llm("deepseek", models, **more), transfer=transfer(service, **PATIENT), environment=TWO_CORES
    ) as second:
        [restored] = second.generate([PROMPT], max_tokens=TOKENS)
    assert (local.cached_tokens, restored.cached_tokens) == (CACHED, CACHED)
    assert same(local, restored)


def test_an_fp8_cache_is_restored_under_its_own_scales_only(
    offline: Offline, service: ServiceProcess, models: Path
) -> None:
    def arguments(scale: float) -> dict[str, Any]:
        path = str(tiny_models.fp8_scales(models, scale))
        return llm("llama", models, block_size=BLOCK_TOKENS, kv_cache_dtype="fp8") | {"model": path}

    with offline(arguments(0.02), transfer=transfer(service)) as first:
        first.generate([PROMPT], max_tokens=TOKENS)
        [local] = first.generate([PROMPT], max_tokens=TOKENS)
        wait_stored(service, BLOCKS)
    patient = transfer(service, model="llama", **PATIENT)
    with offline(arguments(0.02), transfer=transfer(service, **PATIENT)) as second:
        [restored] = second.generate([PROMPT], max_tokens=TOKENS)
    assert restored.cached_tokens == CACHED
    assert same(local, restored)
    with offline(arguments(0.05), transfer=patient) as third:
        [other] = third.generate([PROMPT], max_tokens=TOKENS)
    assert other.cached_tokens == 0


def test_a_prompt_with_an_image_is_restored_under_that_image_only(
    offline: Offline, service: ServiceProcess, models: Path
) -> None:
    """FAULTS 35: the image's tokens come first and are the same for every image."""
    text = PROMPT[: len(PROMPT) - tiny_models.IMAGE_TOKENS]
    with_image, with_another = (
        {"prompt_token_ids": text, "multi_modal_data": {"image": tiny_models.image(seed)}} for seed in (1, 2)
    )
    more: dict[str, Any] = {"block_size": BLOCK_TOKENS, "limit_mm_per_prompt": {"image": 1}}
    with offline(llm("blip2", models, **more), transfer=transfer(service)) as first:
        [cold] = first.generate([with_image], max_tokens=TOKENS)
        wait_stored(service, BLOCKS)
    with offline(llm("blip2", models, **more), transfer=transfer(service, **PATIENT)) as second:
        [restored] = second.generate([with_image], max_tokens=TOKENS)
        [other] = second.generate([with_another], max_tokens=TOKENS)
    assert len(cold.prompt_tokens) == len(PROMPT)
    assert (restored.cached_tokens, other.cached_tokens) == (CACHED, 0)
    assert same(cold, restored)
    assert other.prompt_tokens == cold.prompt_tokens
    assert not same(cold, other)
