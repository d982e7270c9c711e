"""The connector's settings, what it refuses, and what it does with vLLM's interface. Most of it runs without vLLM."""

from __future__ import annotations

import inspect
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import needs_vllm

from perdure.engines.vllm import identity
from perdure.engines.vllm.affinity import unbind
from perdure.engines.vllm.generated import JUDGED_BLOCKS_MIN, Generated
from perdure.engines.vllm.settings import settings_of
from perdure.errors import InvalidArgument, UnknownOption


def config(**changes: Any) -> Any:
    """What `identity.refusals` reads of a VllmConfig."""
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "nnodes": 1,
                "nnodes_within_dp": 1}  # fmt: skip
    cache = {"prefix_caching_hash_algo": "sha256", "cache_dtype": "auto"}
    speculative = changes.pop("speculative", None)
    for fields in (parallel, cache):
        fields.update({name: value for name, value in changes.items() if name in fields})
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel), cache_config=SimpleNamespace(**cache),
        speculative_config=None if speculative is None else SimpleNamespace(method=speculative),
    )  # fmt: skip


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(UnknownOption, match="lookup_wait_ms_max"):
        settings_of({"url": "unix:///s", "lookup_wait_max": 5})


@pytest.mark.parametrize(
    "extra",
    [
        {}, {"url": ""}, {"url": 3}, {"mode": "fast"}, {"generated": "maybe"}, {"durability": "forever"},
        {"lookup_wait_ms_max": -1}, {"lookup_wait_ms_max": True}, {"lookup_wait_ms_max": "50"},
        {"load_deadline_ms": 0}, {"canary_percent": 101}, {"staging_bytes": 5}, {"staging_bytes": 1e9},
        {"retry_s_min": 5, "retry_s_max": 1}, {"ttl_s": 0},
    ],
)  # fmt: skip
def test_bad_settings_are_typed_errors(extra: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="kv_connector_extra_config"):
        settings_of(extra if "url" in extra or not extra else {"url": "unix:///s"} | extra)


def test_a_plain_engine_is_supported() -> None:
    assert identity.refusals(config()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"decode_context_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
        {"nnodes": 2, "nnodes_within_dp": 2},
        {"cache_dtype": "fp8_per_token_head"},
        {"cache_dtype": "nvfp4"},
        {"prefix_caching_hash_algo": "xxhash"},
        {"speculative": "mtp"},
        {"speculative": "eagle3"},
        {"speculative": "draft_model"},
    ],
)
def test_what_is_refused_says_which_setting_and_what_instead(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    [refusal] = identity.refusals(config(**changes))
    assert str(next(iter(changes.values()))) in refusal.setting
    assert refusal.instead
    with pytest.raises(InvalidArgument, match="use "):
        identity.check_supported(config(**changes))


def test_a_seed_makes_xxhash_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert identity.refusals(config(prefix_caching_hash_algo="xxhash")) == []


def test_ngram_speculation_is_supported() -> None:
    assert identity.refusals(config(speculative="ngram")) == []


def test_linear_attention_is_refused_for_the_tier() -> None:
    mamba = type("MambaSpec", (), {"page_size_bytes": 100, "block_size": 16})()
    group = SimpleNamespace(
        kv_cache_spec=mamba, layer_names=["layers.0"], host_resident=False, enable_kv_transfer=True,
        is_eagle_group=False,
    )  # fmt: skip
    cache = SimpleNamespace(kv_cache_groups=[group], kv_cache_layout=None)
    [refusal] = identity.refusals(config(), cache)
    assert "tier" in refusal.instead


@needs_vllm
def test_attention_that_is_wrong_behind_a_prefix_is_refused() -> None:
    """What vLLM has turned off for it tells: its own cache, and prompts in pieces."""
    for latent, caching, pieces in itertools.product((True, False), repeat=3):
        one = config()
        one.model_config = SimpleNamespace(use_mla=latent)
        one.cache_config.enable_prefix_caching = caching
        one.scheduler_config = SimpleNamespace(enable_chunked_prefill=pieces)
        assert [refusal.what for refusal in identity.refusals(one)] == (
            ["latent attention on a CPU without AMX"] if latent and not caching and not pieces else []
        )


def test_the_table_says_what_is_supported_and_refused() -> None:
    rows = identity.support_table(config(speculative="mtp"))
    assert rows[0][1].startswith("refused")
    assert any(answer.startswith("supported") for _, answer in rows)


def test_weights_of_several_ranks_are_one_digest_in_rank_order() -> None:
    two = identity.combined_weights({(0, 0): "sha256:a", (0, 1): "sha256:b"})
    assert two == identity.combined_weights({(0, 1): "sha256:b", (0, 0): "sha256:a"})
    assert two != identity.combined_weights({(0, 0): "sha256:b", (0, 1): "sha256:a"})
    assert identity.combined_weights({(0, 0): "sha256:a"}) == "sha256:a"


def test_generated_blocks_are_stored_until_nobody_reads_them() -> None:
    learnt = Generated("auto")
    names = [at.to_bytes(32, "little") for at in range(4 * JUDGED_BLOCKS_MIN)]
    first, later = names[: 2 * JUDGED_BLOCKS_MIN], names[2 * JUDGED_BLOCKS_MIN :]
    stored = [name for name in first if learnt.wanted(name)]
    assert JUDGED_BLOCKS_MIN <= len(stored) < len(first)
    learnt.asked(stored)
    assert all(learnt.wanted(name) for name in later)


@pytest.mark.parametrize(("mode", "answer"), [("always", True), ("never", False)])
def test_generated_blocks_as_told(mode: str, answer: bool) -> None:
    assert Generated(mode).wanted(bytes(32)) is answer


@needs_vllm
def test_the_installed_interface_is_the_one_this_was_made_for() -> None:
    """Every method that overrides one of vLLM's takes the same arguments."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from perdure.engines.vllm import PerdureConnector

    identity.check_version()
    checked = 0
    for name, method in vars(PerdureConnector).items():
        base = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
        if name.startswith("_") or not callable(getattr(PerdureConnector, name)):
            continue
        assert base is not None, f"{name} is no method of vLLM's"
        ours = inspect.signature(getattr(PerdureConnector, name)).parameters
        assert list(ours) == list(inspect.signature(base).parameters), name
        checked += callable(method) or isinstance(method, classmethod)
    assert checked > 20
    assert not PerdureConnector.__abstractmethods__


def test_threads_run_where_some_thread_of_the_process_may() -> None:
    """vLLM for CPUs binds the thread that makes ours to one CPU, which they inherit."""
    everywhere = os.sched_getaffinity(0)
    if len(everywhere) < 2:
        pytest.skip("one CPU")
    found = list[set[int]]()

    def bound() -> None:
        os.sched_setaffinity(0, {min(everywhere)})
        for initializer in (None, unbind):
            with ThreadPoolExecutor(1, initializer=initializer) as threads:
                found.append(threads.submit(os.sched_getaffinity, 0).result())

    worker = threading.Thread(target=bound)
    worker.start()
    worker.join()
    assert found == [{min(everywhere)}, everywhere]
