"""Prefill by one of many: tiny Llama, threads in the place of processes, a holder that is lost, a service that dies."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.served import serving

import perdure
from perdure.errors import InvalidArgument

torch = pytest.importorskip("torch", reason="torch is not installed: pip install perdure[transformers]")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from perdure.engines.model_identity import cache_argument  # noqa: E402
from perdure.engines.prefill import Prefilled, prefill_once  # noqa: E402
from perdure.engines.transformers import PrefixCache, keyspace_for  # noqa: E402

BLOCK = 8
PROMPT = np.random.default_rng(3).integers(0, 256, 12 * BLOCK + 3)
FULL = 12 * BLOCK


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def prefixes_of(store: Any, model: Any) -> PrefixCache:
    return PrefixCache(keyspace_for(store, model, tenant="acme", weights="test:1", block_tokens=BLOCK), model)


def next_logits(model: Any, cache: Any, tokens: np.ndarray) -> Any:
    ids = torch.from_numpy(np.array(tokens, np.int64))[None]
    with torch.inference_mode():
        return model(input_ids=ids, logits_to_keep=1, **{cache_argument(model): cache}).logits[0, -1]


def right(model: Any, made: Prefilled, prompt: np.ndarray = PROMPT) -> bool:
    """Whether the model says with this cache what it says without one."""
    end = made.restored.tokens
    ours = next_logits(model, made.restored.cache, prompt[end:])
    cold = next_logits(model, transformers.DynamicCache(config=model.config), prompt)
    return end == (len(prompt) - 1) // BLOCK * BLOCK and bool(torch.allclose(ours, cold, atol=1e-4))


def test_one_of_many_computes(tmp_path: Path, model: Any) -> None:
    with perdure.open(tmp_path / "s", capacity="64MiB", memory=0) as store, ThreadPoolExecutor(6) as pool:
        made = list(pool.map(lambda _: prefill_once(prefixes_of(store, model), PROMPT, wait_s=60.0), range(6)))
        assert sorted(one.computed_tokens for one in made) == [0] * 5 + [FULL]
        assert all(right(model, one) for one in made)
        longer = np.concatenate([PROMPT, PROMPT])
        assert prefill_once(prefixes_of(store, model), longer, wait_s=60.0).computed_tokens == FULL


def test_what_a_dead_holder_had_stored_is_not_computed_again(tmp_path: Path, model: Any) -> None:
    class Gone(Exception):
        pass

    def give_up(tokens: int) -> None:
        raise Gone

    with perdure.open(tmp_path / "s", capacity="64MiB", memory=0) as store:
        prefixes = prefixes_of(store, model)
        with pytest.raises(Gone):
            prefill_once(prefixes, PROMPT, wait_s=60.0, step_tokens=4 * BLOCK, note=give_up)
        pieces: list[int] = []
        made = prefill_once(prefixes, PROMPT, wait_s=60.0, step_tokens=3 * BLOCK, note=pieces.append)
        assert made.computed_tokens == 8 * BLOCK
        assert pieces == [7 * BLOCK, 10 * BLOCK, 12 * BLOCK]
        assert right(model, made)


def test_who_waits_too_long_computes_by_itself(tmp_path: Path, model: Any) -> None:
    with perdure.open(tmp_path / "s", capacity="64MiB", memory=0) as store:
        prefixes = prefixes_of(store, model)
        lease = prefixes.space.reserve(prefixes.space.chain(PROMPT[:-1]))
        assert lease is not None
        made = prefill_once(prefixes, PROMPT, wait_s=0.05)
        assert made.computed_tokens == FULL
        assert right(model, made)
        assert prefixes.space.end_lease(lease)


def test_a_lease_that_is_lost_midway_does_not_fail_the_request(tmp_path: Path, model: Any) -> None:
    with perdure.open(tmp_path / "s", capacity="64MiB", memory=0) as store:
        prefixes = prefixes_of(store, model)
        keys = prefixes.space.chain(PROMPT[:-1])

        def lose(tokens: int) -> None:
            if tokens == BLOCK:
                prefixes.space.end_lease(store._core.leases._held[keys[-1].tobytes()])
                assert prefixes.space.reserve(keys) is not None  # somebody else has it now

        made = prefill_once(prefixes, PROMPT, wait_s=60.0, step_tokens=BLOCK, note=lose)
        assert made.computed_tokens == FULL
        assert right(model, made)
        assert prefixes.space.lookup(keys) == 1  # what was refused and what came after it


def test_without_a_service_it_computes(tmp_path: Path, model: Any) -> None:
    with serving(tmp_path / "s") as (_, server), perdure.connect(tmp_path / "s") as client:
        prefixes = prefixes_of(client, model)
        assert prefill_once(prefixes, PROMPT, wait_s=60.0).computed_tokens == FULL
        assert prefill_once(prefixes, PROMPT, wait_s=60.0).computed_tokens == 0
        stop = threading.Event()

        def end(tokens: int) -> None:
            if not stop.is_set():
                stop.set()
                server.stop()

        other = PROMPT[::-1].copy()
        made = prefill_once(prefixes, other, wait_s=1.0, step_tokens=4 * BLOCK, note=end)
        assert made.computed_tokens == FULL
        assert right(model, made, other)
        made = prefill_once(prefixes, other, wait_s=1.0)
        assert made.computed_tokens == FULL
        assert right(model, made, other)


@pytest.mark.parametrize("tokens", [[], [[1], [2]], [1.5]])
def test_bad_input(tmp_path: Path, model: Any, tokens: Any) -> None:
    with perdure.open(tmp_path / "s", capacity="64MiB", memory=0) as store, pytest.raises(InvalidArgument):
        prefill_once(prefixes_of(store, model), tokens, wait_s=1.0)


def test_less_than_a_block_is_nothing(tmp_path: Path, model: Any) -> None:
    with perdure.open(tmp_path / "s", capacity="64MiB", memory=0) as store:
        made = prefill_once(prefixes_of(store, model), PROMPT[:BLOCK], wait_s=1.0)
        assert (made.restored.tokens, made.computed_tokens) == (0, 0)
