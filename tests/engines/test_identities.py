"""What must never be taken for something else: engines and requests that differ, on one store.

Every engine compares each position it attends to with what it would have computed, so a wrong hit fails at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engines import Served, needs_vllm, prompt_of

pytestmark = needs_vllm

PROMPT = prompt_of(200)
CACHED = 192


def kinds(folder: Path) -> dict[str, dict[str, Any]]:
    """Arguments of engines of which no two may share a block; "adapter" is the request's."""
    import torch
    from vllm.lora.request import LoRARequest

    path = folder / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(b"weights")
    adapter = LoRARequest(lora_name="helper", lora_int_id=1, lora_path=str(path))
    return {
        "as it is": {},
        "other weights": {"extra": {"weights": "sha256:other"}},
        "another model": {"extra": {"model": "another"}},
        "another tenant": {"extra": {"tenant": "another"}},
        "bf16": {"dtype": torch.bfloat16},
        "fp16": {"dtype": torch.float16},
        "larger blocks": {"block_tokens": 32},
        "a sliding window": {"window_tokens": 64, "extra": {"weights": "sha256:windowed"}},
        "two ranks": {"ranks": 2},
        "another hash": {"prefix_caching_hash_algo": "sha256"},
        "an adapter": {"adapter": adapter},
    }


def test_models_dtypes_block_sizes_and_adapters_share_a_store_and_no_block(served: Served, tmp_path: Path) -> None:
    """FAULTS 5: each computes first, with all the others' blocks of this prompt in the store; then it finds its own."""
    from support.engine_sim import SimEngine, answer

    made = kinds(tmp_path)
    for repetition in range(2):
        for name, arguments in made.items():
            given = {key: value for key, value in arguments.items() if key != "adapter"}
            scale = 1.0 + zlib.crc32(name.encode()) % 100 / 128
            with SimEngine(served.folder, served.url, scale=scale, **given) as one:
                assert one.ask("a", PROMPT, tokens=20, adapter=arguments.get("adapter")) == answer(PROMPT, 20)
                assert one.external["a"] == (CACHED if repetition else 0), name
                one.settle()


def test_a_request_cannot_choose_its_tenant(engine: Callable[..., Any]) -> None:
    """FAULTS 7: it is the engine's, whatever the request says."""
    first = engine(extra={"tenant": "first"})
    first.ask("a", PROMPT)
    first.settle()
    second = engine(extra={"tenant": "second"})
    second.ask("a", PROMPT, params={"tenant": "first"}, salt="first")
    second.ask("b", PROMPT, params={"tenant": "first"})
    assert second.external == {"a": 0, "b": 0}


def test_the_hash_seed_is_part_of_the_names(engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS 6: without one, processes agree; with different ones nothing is shared, and nothing is wrong."""
    for seed, external in ((None, 0), ("1", 0), ("2", 0), ("1", CACHED), (None, CACHED)):
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        one = engine()
        one.ask("a", PROMPT)
        one.settle()
        assert one.external["a"] == external, seed


def test_media_are_told_apart_by_what_they_are_and_where(engine: Callable[..., Any]) -> None:
    """FAULTS 35: the same text and placeholders, other images."""
    asked: tuple[tuple[str, list[tuple[str, int, int]], int], ...] = (
        ("cat", [("cat", 40, 60)], 0),
        ("dog", [("dog", 40, 60)], 32),  # as far as the text before the image
        ("later", [("cat", 41, 60)], 32),
        ("two", [("cat", 40, 60), ("dog", 120, 60)], 112),
        ("cat again", [("cat", 40, 60)], CACHED),
        ("two again", [("cat", 40, 60), ("dog", 120, 60)], CACHED),
        ("text", [], 32),
    )
    prompt = PROMPT[:40] + [7] * 61 + PROMPT[101:120] + [7] * 60 + PROMPT[180:]
    one = engine(enable_prefix_caching=False)
    for name, media, external in asked:
        one.ask(name, prompt, tokens=20, media=media)
        one.settle()
        assert one.external[name] == external, name
    other = engine()
    other.ask("cat", prompt, tokens=20, media=[("cat", 40, 60)], salt="of another one")
    assert other.external["cat"] == 0


def test_prompt_embeds_are_told_apart_by_their_bytes(engine: Callable[..., Any]) -> None:
    import torch

    def embeds(seed: int) -> Any:
        return torch.randn((200, 64), generator=torch.Generator().manual_seed(seed))

    mixed = torch.cat([embeds(1)[:100], embeds(2)[100:]])
    one = engine(enable_prefix_caching=False, enable_prompt_embeds=True)
    asked = (
        ("first", embeds(1), 0),
        ("second", embeds(2), 0),
        ("first again", embeds(1), CACHED),
        ("mixed", mixed, 96),
    )
    for name, given, external in asked:
        one.ask(name, given, tokens=20)
        one.settle()
        assert one.external[name] == external, name
    one.ask("tokens", [0] * 200, tokens=20)  # by which vLLM counts embeddings
    assert one.external["tokens"] == 0
    restored = engine(enable_prompt_embeds=True)
    restored.ask("first", embeds(1), tokens=20)
    assert restored.external["first"] == CACHED
    assert restored.outputs["first"] == one.outputs["first"]
