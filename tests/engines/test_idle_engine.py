"""An engine that had nothing to do for a while restores the next request as any other."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import tiny_models
from support.engines import needs_vllm

import perdure
from perdure.testing.transport import ServiceProcess, until
from perdure.testing.vllm_offline import OfflineEngine
from perdure.testing.vllm_process import connector

PROMPT_TOKENS = 1000
IDLE_S = 2.5  # longer than a request waits for room


@needs_vllm
def test_a_request_after_a_pause_is_restored(
    service: ServiceProcess, models: Path, offline: Callable[..., OfflineEngine]
) -> None:
    transfer = connector(service.address("unix"), lookup_wait_ms_max=5000.0)
    prompts = [tiny_models.prompt(PROMPT_TOKENS, seed) for seed in (1, 2, 3)]
    first = offline(tiny_models.llm("llama", models), transfer=transfer)
    cold = [first.generate([one])[0] for one in prompts]
    full = (PROMPT_TOKENS - 1) // 128
    with perdure.connect(service.address("unix")) as client:
        until(lambda: client.status()["blocks"] >= full * len(prompts))
    first.kill()
    second = offline(tiny_models.llm("llama", models), transfer=transfer)
    for one, before in zip(prompts, cold, strict=True):
        time.sleep(IDLE_S)
        [restored] = second.generate([one])
        assert restored.cached_tokens == full * 128
        assert restored.tokens == before.tokens
        assert restored.logprobs == pytest.approx(before.logprobs, abs=1e-3)
