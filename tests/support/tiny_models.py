"""Models of a few layers with random weights, as directories that vLLM and transformers load offline.

Contract
- The weights come from a seed: the same bytes in every run. They spread widely, so that other tokens or other KV give
  other answers; `load_format=dummy` does not, every prompt gets the same tokens.
- No tokenizer, but for "blip2": prompts are token ids, and vLLM is told `skip_tokenizer_init`.
- `KINDS`: "llama" (four KV heads, for TP = 2), "gemma3" (sliding window beside full attention), "gpt-oss" (the same,
  with sinks and experts), "deepseek" (latent attention), "qwen3-next" (linear attention beside full). `BF16` names
  those that vLLM runs in bf16 only; there a cold prompt and a hit differ in their last digits.
- "blip2" sees one image per prompt, whose `IMAGE_TOKENS` vLLM puts before the prompt's own. Its processor needs a
  tokenizer, in which token i is the word "t<i>".
- `fp8_scales` gives a model of kind "llama" static scales of its KV cache.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCABULARY_TOKENS = 2048
WINDOW_TOKENS = 128
KINDS = ("llama", "gemma3", "gpt-oss", "deepseek", "qwen3-next")
BF16 = ("deepseek", "qwen3-next")
IMAGE_PIXELS = 56  # in each direction
IMAGE_TOKENS = 32
_IMAGE_TOKEN = VOCABULARY_TOKENS - 1
_COMMON = {
    "vocab_size": VOCABULARY_TOKENS, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip


def llm(kind: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for this kind, saved below `folder` on the first call."""
    return {
        "model": str(saved(kind, folder)), "skip_tokenizer_init": kind != "blip2", "max_model_len": 4096,
        "dtype": "bfloat16" if kind in BF16 else "float32",
    } | more  # fmt: skip


def saved(kind: str, folder: Path, seed: int = 1) -> Path:
    """The model's directory below `folder`."""
    target = folder / f"{kind}-{seed}"
    if not target.exists():
        import torch

        model = _make(kind)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in _weights(model):
                weight.copy_(_drawn(torch, name, weight, generator))
        model.to(torch.bfloat16 if kind in BF16 else torch.float32).save_pretrained(target)
        if kind == "blip2":
            _save_processor(target)
    return target


def fp8_scales(folder: Path, value: float) -> Path:
    """A copy of "llama" whose checkpoint has this scale for keys, and twice that for values, in every layer."""
    target = folder / f"llama-scales-{value}"
    if not target.exists():
        import torch
        from safetensors.torch import load_file, save_file

        shutil.copytree(saved("llama", folder), target)
        config = json.loads((target / "config.json").read_text())
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "ignore": [],
            "kv_cache_scheme": scheme,
        }  # fmt: skip
        (target / "config.json").write_text(json.dumps(config))
        weights = load_file(target / "model.safetensors")
        for layer in range(config["num_hidden_layers"]):
            for name, scale in (("k_scale", value), ("v_scale", 2 * value)):
                weights[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale)
        save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def prompt(count: int, seed: int = 1) -> list[int]:
    """Token ids; another seed is another prompt from its first token on."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY_TOKENS) for _ in range(count)]


def image(seed: int = 1) -> list[list[list[int]]]:
    """Noise: rows of pixels of red, green and blue."""
    rng = random.Random(seed)
    return [[[rng.randrange(256) for _ in range(3)] for _ in range(IMAGE_PIXELS)] for _ in range(IMAGE_PIXELS)]


def _weights(model: Any) -> Iterator[tuple[str, Any]]:
    yield from sorted(model.named_parameters())


def _drawn(torch: Any, name: str, weight: Any, generator: Any) -> Any:
    """Norms stay near what they were, biases small; the rest keeps the size of what it multiplies, and a bit more."""
    noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
    if "norm" in name or weight.dim() < 2 or "conv" in name:
        return weight + 0.1 * noise
    if "embed" in name or "query_tokens" in name:
        return noise
    return 1.5 * noise / weight.shape[-1] ** 0.5


def _make(kind: str) -> Any:
    import transformers as t

    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**_COMMON, num_hidden_layers=4, num_key_value_heads=4, head_dim=32))
    if kind == "gemma3":
        return t.Gemma3ForCausalLM(
            t.Gemma3TextConfig(
                **_COMMON, num_hidden_layers=6, num_key_value_heads=2, head_dim=64, sliding_window=WINDOW_TOKENS,
                query_pre_attn_scalar=64, layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
            )
        )  # fmt: skip
    if kind == "gpt-oss":
        return t.GptOssForCausalLM(
            t.GptOssConfig(
                **_COMMON, num_hidden_layers=4, num_key_value_heads=2, head_dim=64, sliding_window=WINDOW_TOKENS,
                layer_types=["sliding_attention", "full_attention"] * 2, num_local_experts=4, num_experts_per_tok=2,
            )
        )  # fmt: skip
    if kind == "deepseek":
        return t.DeepseekV2ForCausalLM(
            t.DeepseekV2Config(
                **_COMMON, num_hidden_layers=3, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=512,
                qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=3,
            )
        )  # fmt: skip
    if kind == "qwen3-next":
        return t.Qwen3NextForCausalLM(
            t.Qwen3NextConfig(
                **_COMMON, num_hidden_layers=4, num_key_value_heads=2, head_dim=64, num_experts=4,
                num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
                linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
                layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            )
        )  # fmt: skip
    if kind == "blip2":
        small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        return t.Blip2ForConditionalGeneration(
            t.Blip2Config(
                vision_config=small | {"image_size": IMAGE_PIXELS, "patch_size": 14},
                qformer_config=small | {"encoder_hidden_size": 64, "vocab_size": 100},
                text_config=_COMMON | {
                    "model_type": "opt", "ffn_dim": 256, "num_hidden_layers": 4, "word_embed_proj_dim": 128,
                },
                num_query_tokens=IMAGE_TOKENS, image_token_index=_IMAGE_TOKEN,
            )
        )  # fmt: skip
    raise ValueError(f"kind={kind!r}: one of {', '.join(KINDS)}, blip2")


def _save_processor(target: Path) -> None:
    import tokenizers
    import transformers as t

    words = {f"t{token}": token for token in range(_IMAGE_TOKEN)} | {"<image>": _IMAGE_TOKEN}
    by_word = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t3"))
    by_word.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = t.PreTrainedTokenizerFast(
        tokenizer_object=by_word, bos_token="t1", eos_token="t2", pad_token="t0", unk_token="t3",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    tokenizer.image_token = t.AddedToken("<image>", normalized=False, special=True)
    pixels = t.BlipImageProcessorPil(size={"height": IMAGE_PIXELS, "width": IMAGE_PIXELS})
    t.Blip2Processor(pixels, tokenizer, num_query_tokens=IMAGE_TOKENS).save_pretrained(target)
