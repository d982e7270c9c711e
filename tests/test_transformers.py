"""The transformers adapter on a tiny random Llama: exact against cold, in a store that was closed and opened again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.served import serving

import perdure
from perdure import limits
from perdure.errors import InvalidArgument

torch = pytest.importorskip("torch", reason="torch is not installed: pip install perdure[transformers]")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache  # noqa: E402

from perdure.engines.model_identity import cache_argument, geometry_of, weights_digest  # noqa: E402
from perdure.engines.transformers import PrefixCache, Restored, keyspace_for  # noqa: E402

BLOCK = 8
PROMPT = np.random.default_rng(7).integers(0, 256, 16 * BLOCK + 3)
STORED = len(PROMPT) // BLOCK  # 16 full blocks
ANSWER = 12
DTYPES = [torch.float32, torch.bfloat16]


def tiny(dtype: Any = torch.float32, seed: int = 1, **settings: Any) -> Any:
    """Two layers, two KV heads. Weights wide enough that attention matters and logits are far apart."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, attn_implementation="sdpa", **settings,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
    return model.to(dtype).eval()


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


def opened(path: Path, **options: Any) -> perdure.Store:
    return perdure.open(path, capacity="256MiB", **{"memory": 0, **options})


def prefixes_of(store: perdure.Store | perdure.RemoteStore, model: Any, **options: Any) -> PrefixCache:
    return PrefixCache(keyspace_for(store, model, tenant="acme", block_tokens=BLOCK, **options), model)


def forward(model: Any, tokens: np.ndarray, cache: Any) -> Any:
    """Logits of the last token."""
    ids = torch.from_numpy(np.array(tokens, np.int64))[None]
    with torch.inference_mode():
        return model(input_ids=ids, logits_to_keep=1, **{cache_argument(model): cache}).logits[0, -1]


def answer(model: Any, prompt: np.ndarray, cache: Any, start: int, split: int | None = None) -> tuple[list[int], Any]:
    """Greedy tokens, and the logits of each: the prompt from `start` on, in two forwards if it is split."""
    if split is not None and split > start:
        forward(model, prompt[start:split], cache)
        start = split
    logits = forward(model, prompt[start:], cache)
    tokens, seen = [], []
    for _ in range(ANSWER):
        seen.append(logits)
        tokens.append(int(logits.argmax()))
        logits = forward(model, np.array(tokens[-1:]), cache)
    return tokens, torch.stack(seen)


def filled(path: Path, model: Any, prompt: np.ndarray = PROMPT, **options: Any) -> DynamicCache:
    """Store a prompt's blocks in a store of its own life; returns the cache it came from."""
    cache = DynamicCache(config=model.config)
    forward(model, prompt, cache)
    with opened(path) as store:
        report = prefixes_of(store, model, **options).store(prompt, cache)
        assert report.durable
        assert report.stored == len(prompt) // BLOCK
    return cache


def flip(path: Path, store: perdure.Store, key: np.ndarray, at: int = 100) -> None:
    """Flip one byte of a stored block's payload on the disk."""
    where = store.explain(key.tobytes())
    with (path / where["file"]).open("r+b") as file:
        offset = where["record"]["offset"] + limits.page_bytes + at
        byte = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 0x40]), offset)
        os.fsync(file.fileno())


# --- exactness ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", ["off", "on"])
@pytest.mark.parametrize("memory", [0, "64MiB"])
def test_restored_equals_cold(tmp_path: Path, dtype: Any, codec: str, memory: str | int) -> None:
    model = tiny(dtype)
    split = STORED * BLOCK
    cold_tokens, cold_logits = answer(model, PROMPT, DynamicCache(config=model.config), 0, split)
    kept = filled(tmp_path / "store", model, codec=codec)
    with opened(tmp_path / "store", memory=memory) as store:
        prefixes = prefixes_of(store, model, codec=codec)
        for _ in range(2):  # the second time from the DRAM tier, where there is one
            restored = prefixes.restore(PROMPT)
            assert restored.tokens == split
            assert restored.recomputed == ()
            assert restored.report.usable == STORED
            assert restored.report.bytes == STORED * prefixes.space.layout.block_bytes
            for mine, theirs in zip(restored.cache.layers, kept.layers, strict=True):
                assert torch.equal(mine.keys, theirs.keys[:, :, :split])
                assert torch.equal(mine.values, theirs.values[:, :, :split])
                assert not torch.equal(mine.keys, mine.values)
            tokens, logits = answer(model, PROMPT, restored.cache, restored.tokens)
            assert tokens == cold_tokens
            # The stored KV was computed in one forward, the cold run's in two: the last bits may differ, no more.
            assert (logits.float() - cold_logits.float()).abs().max() <= (1e-4 if dtype is torch.float32 else 0.5)


def test_through_a_service_the_same_comes_back(tmp_path: Path, model: Any) -> None:
    cold_tokens, cold_logits = answer(model, PROMPT, DynamicCache(config=model.config), 0, STORED * BLOCK)
    with serving(tmp_path / "store") as (store, _), perdure.connect(tmp_path / "store") as client:
        prefixes = prefixes_of(client, model, codec="off")
        cache = DynamicCache(config=model.config)
        forward(model, PROMPT[: STORED * BLOCK], cache)
        forward(model, PROMPT[STORED * BLOCK :], cache)
        assert prefixes.store(PROMPT, cache).stored == STORED
        for from_memory in (STORED, 0):
            restored = prefixes.restore(PROMPT)
            assert restored.tokens == STORED * BLOCK
            assert restored.report.from_memory == from_memory
            tokens, logits = answer(model, PROMPT, restored.cache, restored.tokens)
            assert tokens == cold_tokens
            assert torch.equal(logits, cold_logits)
            assert prefixes.store(PROMPT, restored.cache, restored).stored == 0
            store.core.pool.drop_all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_bit_equal_when_the_prefill_is_split_alike(tmp_path: Path, dtype: Any) -> None:
    model = tiny(dtype)
    split = STORED * BLOCK
    cache = DynamicCache(config=model.config)
    cold_tokens, cold_logits = answer(model, PROMPT, cache, 0, split)
    with opened(tmp_path) as store:
        prefixes = prefixes_of(store, model)
        prefixes.store(PROMPT, cache)
        restored = prefixes.restore(PROMPT)
        tokens, logits = answer(model, PROMPT, restored.cache, restored.tokens)
    assert tokens == cold_tokens
    assert torch.equal(logits, cold_logits)


def test_generate_continues_from_a_restored_cache(tmp_path: Path, model: Any) -> None:
    ids = torch.from_numpy(PROMPT)[None]
    settings: dict[str, Any] = {
        "max_new_tokens": ANSWER, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }  # fmt: skip
    cold = model.generate(ids, **settings)
    filled(tmp_path, model)
    with opened(tmp_path) as store:
        prefixes = prefixes_of(store, model)
        restored = prefixes.restore(ids)
        out = model.generate(ids, **{cache_argument(model): restored.cache}, **settings)
        report = prefixes.store(out, restored.cache, restored)
        assert prefixes.restore(out).tokens == (out.shape[1] - 1) // BLOCK * BLOCK
    assert torch.equal(out, cold)
    assert report.stored == (out.shape[1] - 1) // BLOCK - STORED  # the last sampled token has no KV yet


# --- what is stored -------------------------------------------------------------------------------------------
def test_only_confirmed_full_blocks_are_stored_and_none_twice(tmp_path: Path, model: Any) -> None:
    cache = DynamicCache(config=model.config)
    forward(model, PROMPT, cache)
    with opened(tmp_path) as store:
        prefixes = prefixes_of(store, model)
        assert prefixes.store(PROMPT[: 2 * BLOCK + 5], cache).stored == 2  # the cache is longer: speculation
        restored = prefixes.restore(PROMPT)
        assert restored.tokens == 2 * BLOCK
        forward(model, PROMPT[restored.tokens :], restored.cache)
        report = prefixes.store(np.append(PROMPT, [1] * BLOCK), restored.cache, restored)  # the cache is shorter
        assert (report.stored, len(report.statuses)) == (STORED - 2, STORED - 2)
        assert len(prefixes.store(PROMPT, restored.cache, prefixes.restore(PROMPT)).statuses) == 0
        other = PROMPT.copy()
        other[0] ^= 1
        forward(model, other, fresh := DynamicCache(config=model.config))
        assert prefixes.store(other, fresh, restored).stored == STORED  # `restored` is of another sequence
        assert store.status()["blocks"] == 2 * STORED


def test_one_token_is_left_to_compute(tmp_path: Path, model: Any) -> None:
    filled(tmp_path, model)
    with opened(tmp_path) as store:
        prefixes = prefixes_of(store, model)
        assert prefixes.restore(PROMPT[: 4 * BLOCK]).tokens == 3 * BLOCK
        assert prefixes.restore(PROMPT[: 4 * BLOCK + 1]).tokens == 4 * BLOCK
        for tokens in (PROMPT[:1], PROMPT[:BLOCK], PROMPT[::-1]):
            nothing = prefixes.restore(tokens)
            assert nothing.tokens == 0
            assert nothing.cache.get_seq_length() == 0
            assert nothing.fork().get_seq_length() == 0
            forward(model, tokens, nothing.cache)


def test_batches_of_staging_give_the_same(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = geometry_of(model).layout(BLOCK)
    monkeypatch.setattr(limits, "adapter_staging_bytes_max", 3 * layout.block_bytes)
    kept = filled(tmp_path, model)
    with opened(tmp_path) as store:
        prefixes = prefixes_of(store, model)
        flip(tmp_path, store, prefixes.space.chain(PROMPT)[7])
        restored = prefixes.restore(PROMPT)
    assert restored.recomputed == (7,)
    assert restored.report.usable == 7
    assert list(restored.report.problems) == [7]
    assert restored.report.bytes == (STORED - 1) * layout.block_bytes
    for mine, theirs in zip(restored.cache.layers, kept.layers, strict=True):
        assert torch.allclose(mine.keys, theirs.keys[:, :, : restored.tokens], atol=1e-4)
        assert torch.equal(mine.keys[:, :, 8 * BLOCK :], theirs.keys[:, :, 8 * BLOCK : restored.tokens])


def test_a_block_lies_as_its_layout_says(tmp_path: Path, model: Any) -> None:
    kept = filled(tmp_path, model)
    with opened(tmp_path) as store:
        space = prefixes_of(store, model).space
        block = np.zeros(space.layout.block_bytes, np.uint8)
        assert space.read(space.chain(PROMPT)[2:3], block).usable == 1
    assert space.layout.order == "layer,kv,head,token,dim"
    elements = block.view(np.float32).reshape(2, 2, 2, BLOCK, 16)
    for number, layer in enumerate(kept.layers):
        for side, tensor in enumerate((layer.keys, layer.values)):
            assert np.array_equal(elements[number, side], tensor[0, :, 2 * BLOCK : 3 * BLOCK].numpy())


# --- forks ----------------------------------------------------------------------------------------------------
def test_forks_do_not_see_each_other(tmp_path: Path, model: Any) -> None:
    filled(tmp_path, model)
    questions = [np.random.default_rng(seed).integers(0, 256, 9) for seed in (1, 2, 3)]
    with opened(tmp_path) as store:
        restored = prefixes_of(store, model).restore(PROMPT)
        before = [layer.keys.clone() for layer in restored.cache.layers]
        answers = []
        for question in questions:
            branch = np.concatenate([PROMPT, question])
            answers.append(answer(model, branch, restored.fork(), restored.tokens)[0])
        forward(model, PROMPT[restored.tokens :], restored.cache)  # the trunk goes on, and a fork starts at its base
        again = answer(model, np.concatenate([PROMPT, questions[0]]), restored.fork(), restored.tokens)[0]
    cold = [
        answer(model, np.concatenate([PROMPT, question]), DynamicCache(config=model.config), 0, STORED * BLOCK)[0]
        for question in questions
    ]
    assert answers == cold
    assert again == cold[0]
    assert len({tuple(tokens) for tokens in cold}) == 3
    base = restored.fork()
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(base.layers, before, strict=True))


# --- holes ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("position", [0, 5, STORED - 1])
def test_a_flipped_byte_costs_one_block(tmp_path: Path, model: Any, position: int) -> None:
    cold_tokens, _ = answer(model, PROMPT, DynamicCache(config=model.config), 0, STORED * BLOCK)
    kept = filled(tmp_path, model)
    with opened(tmp_path) as store:
        prefixes = prefixes_of(store, model)
        key = prefixes.space.chain(PROMPT)[position]
        flip(tmp_path, store, key)
        restored = prefixes.restore(PROMPT)
        last = position == STORED - 1
        assert restored.report.statuses[position] == perdure.BlockStatus.CORRUPT
        assert restored.report.usable == position
        assert restored.recomputed == (() if last else (position,))  # nothing behind it: the prefix just ends
        assert restored.tokens == (STORED - last) * BLOCK
        for mine, theirs in zip(restored.cache.layers, kept.layers, strict=True):
            assert torch.allclose(mine.values, theirs.values[:, :, : restored.tokens], atol=1e-4)
        assert answer(model, PROMPT, restored.cache, restored.tokens)[0] == cold_tokens
        assert not store.explain(key.tobytes())["present"]
        assert prefixes.store(PROMPT, restored.cache, restored).stored == 1
        assert store.explain(key.tobytes())["verdict"].startswith("hit")
        assert prefixes.restore(PROMPT).report.usable == STORED


def test_removed_holes_are_skipped_over_as_far_as_allowed(tmp_path: Path, model: Any) -> None:
    cold_tokens, _ = answer(model, PROMPT, DynamicCache(config=model.config), 0, STORED * BLOCK)
    filled(tmp_path, model)
    with opened(tmp_path) as store:
        prefixes = prefixes_of(store, model)
        keys = prefixes.space.chain(PROMPT)
        for position in (3, 4, 9):
            flip(tmp_path, store, keys[position])
        assert prefixes.restore(PROMPT, holes_max=0).tokens == 3 * BLOCK  # now they are out of the catalog
        expected = {0: (3, ()), 1: (3, ()), 2: (9, (3, 4)), 3: (STORED, (3, 4, 9))}
        for holes_max, (blocks, recomputed) in expected.items():
            restored = prefixes.restore(PROMPT, holes_max=holes_max)
            assert (restored.tokens, restored.recomputed) == (blocks * BLOCK, recomputed)
            assert answer(model, PROMPT, restored.cache, restored.tokens)[0] == cold_tokens
            assert restored.held.tolist() == [position not in recomputed for position in range(blocks)]


def test_late_blocks_are_computed_by_the_model(tmp_path: Path, model: Any) -> None:
    cold_tokens, _ = answer(model, PROMPT, DynamicCache(config=model.config), 0)
    filled(tmp_path, model)
    with opened(tmp_path) as store:
        prefixes = prefixes_of(store, model)
        late = prefixes.restore(PROMPT, deadline_s=0.0)
        assert late.tokens == 0
        assert (late.report.statuses == perdure.BlockStatus.LATE).all()
        assert answer(model, PROMPT, late.cache, 0)[0] == cold_tokens
        assert prefixes.restore(PROMPT, deadline_s=60.0).tokens == STORED * BLOCK


# --- identity -------------------------------------------------------------------------------------------------
def restored_with(path: Path, model: Any, **options: Any) -> Restored:
    with opened(path) as store:
        return prefixes_of(store, model, **options).restore(PROMPT)


def test_what_is_not_the_same_model_misses(tmp_path: Path, model: Any) -> None:
    filled(tmp_path, model)
    assert restored_with(tmp_path, tiny()).tokens == STORED * BLOCK
    assert restored_with(tmp_path, tiny(seed=2)).tokens == 0
    assert restored_with(tmp_path, tiny(torch.bfloat16)).tokens == 0
    assert restored_with(tmp_path, tiny(rope_parameters={"rope_type": "default", "rope_theta": 5e5})).tokens == 0
    assert restored_with(tmp_path, tiny(rms_norm_eps=1e-3)).tokens == 0
    assert restored_with(tmp_path, tiny(), model_id="other").tokens == 0
    with opened(tmp_path) as store:
        space = keyspace_for(store, model, tenant="other", block_tokens=BLOCK)
        assert PrefixCache(space, model).restore(PROMPT).tokens == 0


def test_weights_changed_in_place_are_noticed_and_found_again(tmp_path: Path) -> None:
    model = tiny()
    filled(tmp_path, model)
    with opened(tmp_path) as store:
        prefixes = prefixes_of(store, model)
        weight = model.model.layers[1].self_attn.k_proj.weight
        original = weight.detach().clone()
        with torch.no_grad():
            weight[0, 0] += 1
        for call in (lambda: prefixes.restore(PROMPT), lambda: prefixes.store(PROMPT, DynamicCache())):
            with pytest.raises(InvalidArgument, match="weights were changed"):
                call()
        assert prefixes_of(store, model).restore(PROMPT).tokens == 0
        with torch.no_grad():
            weight.copy_(original)
        assert prefixes_of(store, model).restore(PROMPT).tokens == STORED * BLOCK


def test_the_digest_is_of_every_byte_and_tied_names(model: Any) -> None:
    assert weights_digest(model) == weights_digest(tiny())
    tied = tiny(tie_word_embeddings=True)
    untied = tiny(tie_word_embeddings=False)
    assert weights_digest(tied) != weights_digest(untied)
    other = tiny()
    with torch.no_grad():
        other.model.norm.weight[-1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert weights_digest(model) != weights_digest(other)
    turned = tiny()
    turned.model.rotary_emb.inv_freq[-1] *= 2
    assert weights_digest(model) != weights_digest(turned)


# --- refusals -------------------------------------------------------------------------------------------------
def test_models_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    sliding = transformers.MistralForCausalLM(
        transformers.MistralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, sliding_window=16,
        )
    ).eval()  # fmt: skip
    by_length = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    encoder = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).eval()
    meta = tiny().to("meta")
    with opened(tmp_path) as store:
        for refused, why in (
            (sliding, "DynamicSlidingWindowLayer.*supported: decoder-only"),
            (tiny(rope_parameters=by_length), "rotary scaling 'dynamic'"),
            (encoder, "not a decoder-only text model"),
            (tiny().train(), "training mode"),
            (meta, "offloaded or meta"),
            (torch.nn.Linear(2, 2), "not a transformers model"),
        ):
            with pytest.raises(InvalidArgument, match=why):
                keyspace_for(store, refused, tenant="acme")


def test_caches_that_cannot_be_kept_are_refused(tmp_path: Path, model: Any) -> None:
    two = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.zeros((2, 9), dtype=torch.long), **{cache_argument(model): two})
    half = DynamicCache(config=tiny(torch.bfloat16).config)
    forward(tiny(torch.bfloat16), PROMPT, half)
    short = DynamicCache()
    short.update(torch.zeros(1, 2, 9, 16), torch.zeros(1, 2, 9, 16), 0)
    sliding = DynamicCache(config=transformers.MistralConfig(num_hidden_layers=2, sliding_window=16))
    with opened(tmp_path) as store:
        prefixes = prefixes_of(store, model)
        for cache, why in (
            (StaticCache(config=model.config, max_cache_len=64), "StaticCache cannot be kept; supported"),
            (sliding, "DynamicSlidingWindowLayer cannot be kept; supported"),
            (DynamicCache(config=model.config, offloading=True), "offload"),
            (two, "2 sequences"),
            (half, "bfloat16.*float32"),
            (short, "1 layers.*2 needed"),
            (DynamicCache(config=model.config), "maybe empty"),
        ):
            with pytest.raises(InvalidArgument, match=why):
                prefixes.store(PROMPT, cache)
        assert store.status()["blocks"] == 0


def test_bad_arguments_are_named(tmp_path: Path, model: Any) -> None:
    with opened(tmp_path) as store:
        prefixes = prefixes_of(store, model)
        for tokens in (torch.zeros((2, 9), dtype=torch.long), [], [-1, 2], [0.5], [[[1]]]):
            with pytest.raises(InvalidArgument):
                prefixes.restore(tokens)
        layout = geometry_of(tiny(torch.bfloat16)).layout(BLOCK)
        other = store.keyspace(model="m", weights="sha256:00", layout=layout, tenant="acme")
        with pytest.raises(InvalidArgument, match="this model's cache is"):
            PrefixCache(other, model)
