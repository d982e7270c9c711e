"""Models of a few layers with random weights, as directories that vLLM and transformers load offline.

Contract
- The weights come from a seed: the same bytes in every run. They spread widely, so that other tokens or other KV give
  other answers; `load_format=dummy` does not, every prompt gets the same tokens.
- No tokenizer: prompts are token ids, and vLLM is told `skip_tokenizer_init`.
- `KINDS`: "llama" (four KV heads, for TP = 2), "gemma3" (sliding window beside full attention), "gpt-oss" (the same,
  with sinks and experts), "qwen3-next" (linear attention beside full; bf16).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCABULARY_TOKENS = 2048
WINDOW_TOKENS = 128
KINDS = ("llama", "gemma3", "gpt-oss", "qwen3-next")
_COMMON = {
    "vocab_size": VOCABULARY_TOKENS, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip


def llm(kind: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for this kind, saved below `folder` on the first call."""
    return {
        "model": str(saved(kind, folder)), "skip_tokenizer_init": True, "max_model_len": 4096,
        "dtype": "bfloat16" if kind == "qwen3-next" else "float32",
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
        model.to(torch.bfloat16 if kind == "qwen3-next" else torch.float32).save_pretrained(target)
    return target


def prompt(count: int, seed: int = 1) -> list[int]:
    """Token ids; another seed is another prompt from its first token on."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY_TOKENS) for _ in range(count)]


def _weights(model: Any) -> Iterator[tuple[str, Any]]:
    yield from sorted(model.named_parameters())


def _drawn(torch: Any, name: str, weight: Any, generator: Any) -> Any:
    """Norms stay near what they were, biases small; the rest keeps the size of what it multiplies, and a bit more."""
    noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
    if "norm" in name or weight.dim() < 2 or "conv" in name:
        return weight + 0.1 * noise
    if "embed" in name:
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
    if kind == "qwen3-next":
        return t.Qwen3NextForCausalLM(
            t.Qwen3NextConfig(
                **_COMMON, num_hidden_layers=4, num_key_value_heads=2, head_dim=64, num_experts=4,
                num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
                linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
                layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            )
        )  # fmt: skip
    raise ValueError(f"kind={kind!r}: one of {', '.join(KINDS)}")
