"""Which tests of engines can run here, and what those with real engines share."""

from __future__ import annotations

import contextlib
import random
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from perdure.testing.transport import ServiceProcess
from perdure.testing.vllm_offline import Generated
from perdure.testing.vllm_process import connector
from support.served import serving

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: make test-engines has it")
PATIENT = {"lookup_wait_ms_max": 20_000, "promote_wait_ms_max": 20_000}  # no test is to depend on the machine's speed
STORED_S = 60.0


class Served:
    """A service in this process that can be ended and started in the middle of a test."""

    def __init__(self, folder: Path, **options: Any):
        self.folder, self._options, self._stack = folder, options, contextlib.ExitStack()

    @property
    def url(self) -> str:
        return f"unix://{self.folder}/store/perdure.sock"

    def start(self) -> None:
        self.store, _ = self._stack.enter_context(serving(self.folder / "store", **self._options))

    def stop(self) -> None:
        self._stack.close()


def prompt_of(count: int, seed: int = 1) -> list[int]:
    """Token ids for `support.engine_sim`."""
    rng = random.Random(seed)
    return [rng.randrange(1, 999) for _ in range(count)]


def transfer(service: ServiceProcess, **extra: Any) -> dict[str, Any]:
    return connector(f"unix://{service.data}/perdure.sock", **extra)


def same(one: Generated, other: Generated) -> bool:
    return one.tokens == other.tokens and one.logprobs == other.logprobs


def alike(one: Generated, other: Generated) -> bool:
    """The same answer, log-probabilities within what two ways to sum in fp32 make of them: vLLM computes a prompt as a
    whole otherwise than behind a prefix, on some CPUs to other last digits."""
    return one.tokens == other.tokens and bool(np.allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-3))


def stored_blocks(service: ServiceProcess) -> int:
    with perdure.connect(service.data) as client:
        return int(client.status()["tenants"].get("default", {"blocks": 0})["blocks"])


def wait_stored(service: ServiceProcess, blocks: int) -> None:
    give_up = time.monotonic() + STORED_S
    while stored_blocks(service) < blocks:
        assert time.monotonic() < give_up, f"{stored_blocks(service)} blocks are stored, {blocks} were expected"
        time.sleep(0.05)
