"""What a loaded Hugging Face model's KV cache is: its geometry, its identity, and which models are refused.

Contract
- Geometry is taken from the model itself, by a forward of one token, not from the names of configuration fields.
- The digest covers what is *loaded*: every parameter and buffer (rotary frequencies included) byte for byte, and the
  configuration. Weights that were changed in place have another digest, so their KV is a miss.
- A model whose KV of a token depends on more than the tokens before it, or is not kept for every token, is refused
  with InvalidArgument that names what is supported.
- Never: changing the model, its mode or its configuration.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from perdure import keys as naming
from perdure.errors import InvalidArgument
from perdure.keys import KVLayout

SUPPORTED = "decoder-only text models with full attention in every layer, whose cache is a DynamicCache"
ORDER = "layer,kv,head,token,dim"
_DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3",
    torch.float8_e5m2: "float8_e5m2",
}
# Rotary scalings whose frequencies follow the length of the whole sequence: a token's key is not final.
_ROPE_BY_LENGTH = {"dynamic", "longrope", "su"}
# Configuration that says nothing about the KV of given weights: where it came from, and what happens after the logits.
NOT_IDENTITY = {
    "_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "return_dict", "output_attentions",
    "output_hidden_states", "initializer_range", "task_specific_params", "problem_type", "id2label", "label2id",
}  # fmt: skip
_DIGEST_THREADS = 4


@dataclass(frozen=True, slots=True)
class Geometry:
    """One token's KV: `layers` times a key of kv_heads x key_dim and a value of kv_heads x value_dim elements.

    devices: where the model keeps each layer's cache."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]

    @property
    def token_bytes(self) -> int:
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * int(self.dtype.itemsize)

    def layout(self, block_tokens: int) -> KVLayout:
        return KVLayout(
            block_tokens=block_tokens,
            block_bytes=block_tokens * self.token_bytes,
            dtype=_DTYPES[self.dtype],
            order=ORDER,
            layers=(0, self.layers),
            kv_heads=(0, self.kv_heads),
        )


def cache_argument(module: Any) -> str:
    """Name under which a model takes its cache: `cache` since transformers 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def geometry_of(model: Any) -> Geometry:
    """Geometry of a model's cache, from a forward of one token. Raises InvalidArgument for models not supported."""
    _refuse_configuration(model)
    cache = DynamicCache(config=model.config)
    refuse_cache(cache)
    module = model.base_model
    with torch.inference_mode():
        module(
            input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device),
            use_cache=True,
            **{cache_argument(module): cache},
        )
    shapes = {(layer.keys.shape, layer.values.shape, layer.keys.dtype, layer.values.dtype) for layer in cache.layers}
    if len(shapes) != 1:
        raise InvalidArgument(f"the layers of this model's cache differ in shape or dtype; supported: {SUPPORTED}")
    keys, values, dtype, value_dtype = shapes.pop()
    if keys[:3] != values[:3] or keys[0] != 1 or keys[2] != 1 or dtype != value_dtype or dtype not in _DTYPES:
        raise InvalidArgument(
            f"cache of shape {tuple(keys)} / {tuple(values)}, {dtype} / {value_dtype} for one token is not supported; "
            "keys and values must be [1, heads, tokens, dim] in one floating-point type"
        )
    devices = tuple(layer.keys.device for layer in cache.layers)
    return Geometry(len(cache.layers), keys[1], keys[3], values[3], dtype, devices)


def _refuse_configuration(model: Any) -> None:
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "base_model"):
        raise InvalidArgument(f"{type(model).__name__} is not a transformers model; supported: {SUPPORTED}")
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or config.get_text_config() is not config:
        raise InvalidArgument(f"{name} is not a decoder-only text model; supported: {SUPPORTED}")
    if getattr(config, "use_bidirectional_attention", False):
        raise InvalidArgument(f"{name} attends to later tokens; supported: {SUPPORTED}")
    if model.training:
        raise InvalidArgument(f"{name} is in training mode; call model.eval() first")
    if model.device.type == "meta":
        raise InvalidArgument(f"{name} is not in memory (offloaded or meta); load its weights first")
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise InvalidArgument(f"{name} has adapters loaded that can be switched; merge the adapter into the weights")
    lengths = set(_rope_types(config)) & _ROPE_BY_LENGTH
    if lengths:
        raise InvalidArgument(
            f"{name} uses rotary scaling {lengths.pop()!r}: the keys of a prefix change with the length of the whole "
            "sequence, so they cannot be kept; supported are default, linear, yarn and llama3"
        )


def _rope_types(config: Any) -> Iterator[str]:
    queue = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    while queue:
        entry = queue.pop()
        if isinstance(entry, Mapping):
            queue.extend(entry.values())
            yield from (str(entry[name]) for name in ("rope_type", "type") if name in entry)


def refuse_cache(cache: Any) -> None:
    """InvalidArgument unless `cache` is a DynamicCache of plain full-attention layers held in memory."""
    if type(cache) is not DynamicCache:
        raise InvalidArgument(f"a {type(cache).__name__} cannot be kept; supported: {SUPPORTED}")
    odd = next((layer for layer in cache.layers if type(layer) is not DynamicLayer), None)
    if odd is not None:
        raise InvalidArgument(f"a cache with a {type(odd).__name__} cannot be kept; supported: {SUPPORTED}")
    if getattr(cache, "offloading", False):
        raise InvalidArgument("a cache that offloads its layers cannot be kept; make it without offloading=True")


# --- identity
def tensors_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Every parameter and buffer by name, in name order, tied ones under each of their names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return sorted(named, key=lambda pair: pair[0])


def weights_stamp(model: Any) -> tuple[tuple[int, int], ...]:
    """Changes when a parameter is replaced or written in place (about 1 us per tensor); says nothing across processes.

    Not noticed: writes through `.data` or another framework's view of the memory, and tensors made in inference mode.
    """
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in model.parameters())  # noqa: SLF001


def weights_digest(model: Any) -> str:
    """Digest of the loaded weights, buffers and configuration, as "sha256:<hex>".

    SHA-256 over (name, dtype, shape, SHA-256 of the bytes) of every tensor in name order, encoded as in
    `keys.encode_fields`; tensors are hashed in parallel (540 MB on two cores: about 0.3 s). Raises InvalidArgument for
    weights that are not in memory.
    """
    tensors = tensors_of(model)
    absent = next((name for name, tensor in tensors if tensor.is_meta), None)
    if absent is not None:
        raise InvalidArgument(f"{absent} is not in memory (offloaded or meta), so it cannot be hashed; pass a digest")
    unique = {_memory_of(tensor): tensor for _, tensor in tensors}
    with ThreadPoolExecutor(_DIGEST_THREADS, thread_name_prefix="perdure-digest") as pool:
        digests = dict(zip(unique, pool.map(tensor_digest, unique.values()), strict=True))
    fields = [
        (name, f"{tensor.dtype}{tuple(tensor.shape)}".encode() + digests[_memory_of(tensor)])
        for name, tensor in tensors
    ]
    fields.append(("config", _meaning(model.config)))
    return "sha256:" + hashlib.sha256(naming.encode_fields(fields)).hexdigest()


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def tensor_digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy()).digest()


def _meaning(config: Any) -> bytes:
    fields = {name: value for name, value in config.to_dict().items() if name not in NOT_IDENTITY}
    return json.dumps(fields, sort_keys=True, default=str).encode()
