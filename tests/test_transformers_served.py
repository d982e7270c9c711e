"""The transformers adapter through `perdure serve` in a process of its own: exact, and with the service gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from perdure import BlockStatus, WriteStatus, limits
from perdure.testing.transport import ServiceProcess, until

torch = pytest.importorskip("torch", reason="torch is not installed: pip install perdure[transformers]")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

from perdure.engines.model_identity import cache_argument  # noqa: E402
from perdure.engines.transformers import PrefixCache, keyspace_for  # noqa: E402

BLOCK = 8
PROMPT = np.random.default_rng(5).integers(0, 256, 24 * BLOCK + 5)
STORED = len(PROMPT) // BLOCK
ANSWER = 8


@pytest.fixture(scope="module")
def model() -> Any:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, attn_implementation="sdpa",
    )  # fmt: skip
    made, generator = LlamaForCausalLM(config), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
    return made.eval()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path / "store", listen="127.0.0.1:0") as service:
        yield service


def forward(model: Any, tokens: np.ndarray, cache: Any) -> Any:
    ids = torch.from_numpy(np.array(tokens, np.int64))[None]
    with torch.inference_mode():
        return model(input_ids=ids, logits_to_keep=1, **{cache_argument(model): cache}).logits[0, -1]


def answer(model: Any, cache: Any, start: int) -> tuple[list[int], Any]:
    """Greedy tokens and their logits, the prompt split behind its stored blocks."""
    split = STORED * BLOCK
    if start < split:
        forward(model, PROMPT[start:split], cache)
    logits, tokens, seen = forward(model, PROMPT[max(start, split) :], cache), [], []
    for _ in range(ANSWER):
        seen.append(logits)
        tokens.append(int(logits.argmax()))
        logits = forward(model, np.array(tokens[-1:]), cache)
    return tokens, torch.stack(seen)


@pytest.fixture(scope="module")
def cold(model: Any) -> tuple[list[int], Any, Any]:
    cache = DynamicCache(config=model.config)
    tokens, logits = answer(model, cache, 0)
    return tokens, logits, cache


def prefixes_of(client: perdure.RemoteStore, model: Any) -> PrefixCache:
    return PrefixCache(keyspace_for(client, model, tenant="acme", block_tokens=BLOCK), model)


def check(model: Any, prefixes: PrefixCache, cold: tuple[list[int], Any, Any]) -> None:
    """All of it comes back, and the model says the same to the last bit."""
    restored = prefixes.restore(PROMPT)
    assert restored.tokens == STORED * BLOCK
    assert restored.recomputed == ()
    tokens, logits = answer(model, restored.cache, restored.tokens)
    assert tokens == cold[0]
    assert torch.equal(logits, cold[1])


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_what_one_process_stored_another_restores(
    service: ServiceProcess, model: Any, cold: tuple[list[int], Any, Any], way: str
) -> None:
    with perdure.connect(service.address(way)) as one:
        assert prefixes_of(one, model).store(PROMPT, cold[2]).stored == STORED
    with perdure.connect(service.address(way)) as other:
        check(model, prefixes_of(other, model), cold)


def test_a_service_that_was_started_anew_serves_what_was_stored(
    tmp_path: Path, model: Any, cold: tuple[list[int], Any, Any]
) -> None:
    with ServiceProcess(tmp_path / "store") as first, perdure.connect(first.address("unix")) as client:
        prefixes = prefixes_of(client, model)
        assert prefixes.store(PROMPT, cold[2]).durable
        first.kill()
        with ServiceProcess(tmp_path / "store"):
            until(lambda: prefixes.space.lookup(prefixes.space.chain(PROMPT)) == STORED)
            check(model, prefixes, cold)  # the client goes on without being made anew


def test_without_its_service_it_computes(tmp_path: Path, model: Any, cold: tuple[list[int], Any, Any]) -> None:
    with ServiceProcess(tmp_path / "store") as service, perdure.connect(service.address("unix")) as client:
        prefixes = prefixes_of(client, model)
        assert prefixes.store(PROMPT, cold[2]).durable
        service.kill()
        restored = prefixes.restore(PROMPT, deadline_s=0.3)
        tokens, _ = answer(model, restored.cache, restored.tokens)
        assert tokens == cold[0]
        report = prefixes.store(PROMPT[::-1].copy(), cold[2], deadline_s=0.3)
        assert report.stored == 0
        assert set(report.statuses.tolist()) <= {WriteStatus.FAILED, WriteStatus.LATE}


def test_a_stopped_service_makes_a_restore_late_and_no_longer(
    service: ServiceProcess, model: Any, cold: tuple[list[int], Any, Any]
) -> None:
    with perdure.connect(service.address("tcp")) as client:  # nothing of it is mapped: every block is asked for
        prefixes = prefixes_of(client, model)
        prefixes.store(PROMPT, cold[2])
        keys = prefixes.space.chain(PROMPT)
        assert prefixes.space.lookup(keys) == STORED
        service.stop()
        into = np.zeros(STORED * prefixes.space.layout.block_bytes, np.uint8)
        report = prefixes.space.read(keys, into, deadline_s=0.2)
        assert set(report.statuses.tolist()) <= {BlockStatus.LATE, BlockStatus.MISSING}
        service.go_on()
        until(lambda: prefixes.restore(PROMPT).tokens == STORED * BLOCK)
        check(model, prefixes, cold)


def test_a_service_killed_in_the_middle_costs_blocks_only(
    tmp_path: Path, model: Any, cold: tuple[list[int], Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies while a restore is under way: what came is right, what did not is computed."""
    with (
        ServiceProcess(tmp_path / "store", listen="127.0.0.1:0") as service,
        perdure.connect(service.address("tcp")) as client,
    ):
        prefixes = prefixes_of(client, model)
        assert prefixes.store(PROMPT, cold[2]).durable
        block = prefixes.space.layout.block_bytes
        monkeypatch.setattr(limits, "adapter_staging_bytes_max", 2 * block)  # twelve reads
        killers: list[threading.Thread] = []
        submitted = 0
        submit = prefixes.space.submit_read

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal submitted
            submitted += 1
            if submitted == 5:
                killers.append(threading.Thread(target=service.kill))
                killers[0].start()
                killers[0].join()
            return submit(*arguments, **options)

        prefixes.space.submit_read = counted
        restored = prefixes.restore(PROMPT, deadline_s=3.0)
        assert killers
        assert 0 < restored.tokens < STORED * BLOCK
        for mine, theirs in zip(restored.cache.layers, cold[2].layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys[:, :, : restored.tokens])
            assert torch.equal(mine.values, theirs.values[:, :, : restored.tokens])
        assert answer(model, restored.cache, restored.tokens)[0] == cold[0]
