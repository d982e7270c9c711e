"""Engines that die or start badly: what they held ends, and the service and the next engine go on as before."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engines import PATIENT, needs_vllm, same, transfer, wait_stored
from support.tiny_models import llm, prompt

import perdure
from perdure.testing.transport import ServiceProcess, until
from perdure.testing.vllm_client import ask
from perdure.testing.vllm_offline import OfflineEngine
from perdure.testing.vllm_server import VllmServer

pytestmark = [needs_vllm, pytest.mark.slow]

PIN_S = 6.0
LATE_S = 10.0
GONE_S = 60.0
BLOCK_TOKENS = 32
PROMPT = prompt(700, 5)
BLOCKS = 21
LLM: dict[str, Any] = {"block_size": BLOCK_TOKENS}
# In a mount namespace of its own, where only what vLLM itself asks for (240 MiB) fits into /dev/shm.
SMALL_SHM = [
    shutil.which("unshare") or "unshare", "--mount", "sh", "-c",
    'mount -t tmpfs -o size=248m none /dev/shm && exec "$0" "$@"',
]  # fmt: skip

Offline = Callable[..., OfflineEngine]


def held(client: Any) -> dict[str, int]:
    """What engines hold of the service."""
    mine = [one for one in client.service_status()["clients"] if one["name"].startswith("vllm")]
    return {"clients": len(mine)} | {
        what: sum(one[what] for one in mine) for what in ("pins", "views", "leases", "granted_bytes", "regions_bytes")
    }


def nothing_held(client: Any) -> bool:
    return not any(held(client).values())


def open_files(service: ServiceProcess) -> int:
    return len(list(Path(f"/proc/{service.process.pid}/fd").iterdir()))


def test_what_an_engine_without_its_api_server_holds_ends(
    server: Callable[..., VllmServer], service: ServiceProcess, smollm: Path
) -> None:
    """vLLM's engine core lives on, for over a minute here, and keeps its connections: pins end by their time."""
    one = server(smollm, max_model_len=2048, transfer=transfer(service, **PATIENT))
    one.wait_ready()
    tokens = [7 + number % 900 for number in range(700)]
    ask(one.address, tokens, max_tokens=4, kv_transfer_params={"pin_s": PIN_S})
    with perdure.connect(service.data, name="test") as client:
        until(lambda: held(client)["pins"] > 0)
        one.kill_leader()
        assert one.members()
        until(lambda: held(client)["pins"] == 0, PIN_S + LATE_S)
        assert held(client)["views"] == held(client)["leases"] == 0
        assert one.members()
        one.kill()
        until(lambda: nothing_held(client), GONE_S)
        assert client.status()["blocks"] >= len(tokens) // 128


def test_a_storm_of_engines_leaves_nothing_behind(offline: Offline, service: ServiceProcess, models: Path) -> None:
    """Started and killed in a row: before they are ready, while they save, while they load; then one is left alone."""
    with perdure.connect(service.data, name="test") as client:
        with offline(llm("llama", models, **LLM), transfer=transfer(service)) as first:
            [cold] = first.generate([PROMPT], max_tokens=16)
            wait_stored(service, BLOCKS)
        until(lambda: nothing_held(client), GONE_S)
        files = open_files(service)
        for moment in ("connecting", "saving", "loading"):
            one = offline(llm("llama", models, **LLM), transfer=transfer(service, **PATIENT), wait=False)
            if moment == "connecting":
                until(lambda one=one: held(client)["clients"] > 0 or one.process.poll() is not None, 200)  # type: ignore[misc]
            else:
                one.wait_ready()
                prompts = [PROMPT] if moment == "loading" else [prompt(700, seed) for seed in range(20, 28)]
                one.begin(prompts, max_tokens=64, params={"pin_s": 600})
                until(lambda: held(client)["views"] > 0 or held(client)["pins"] > 0, 200)
            assert one.kill() >= 2
            until(lambda: nothing_held(client), GONE_S)
        assert open_files(service) <= files
        with offline(llm("llama", models, **LLM), transfer=transfer(service, **PATIENT)) as last:
            [restored] = last.generate([PROMPT], max_tokens=16)
        assert restored.cached_tokens == BLOCKS * BLOCK_TOKENS
        assert same(cold, restored)


def test_an_engine_with_shared_memory_for_vllm_alone_stores_and_restores(
    offline: Offline, service: ServiceProcess, models: Path
) -> None:
    """With less vLLM itself does not start, and says so; Perdure needs none of it."""
    if shutil.which("unshare") is None or subprocess.run([*SMALL_SHM, "true"], check=False).returncode:
        pytest.skip("mounting needs root")
    answers = []
    for _ in range(2):
        with offline(llm("llama", models, **LLM), transfer=transfer(service, **PATIENT), within=SMALL_SHM) as one:
            answers += one.generate([PROMPT], max_tokens=16)
            wait_stored(service, BLOCKS)
    cold, restored = answers
    assert restored.cached_tokens == BLOCKS * BLOCK_TOKENS
    assert same(cold, restored)
