"""What one rank's KV blocks are: keyspaces from vLLM's own configuration, and the configurations that are refused.

Contract
- Everything that changes the meaning of a block's bytes is in its keyspace: model and loaded weights, dtype, KV dtype
  and static scales, KV layout, attention backend, CPU instruction set, block size, layers, heads, LoRA content, and how
  vLLM hashes blocks (the hash covers tokens, media, prompt embeds, `cache_salt`). Equal shards have equal keyspaces.
- What cannot be kept exactly is refused at construction, with the setting that causes it and what to use instead.
- Pure: reads configuration, never the model (`weights` does), a device or the network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perdure import keys as naming
from perdure import limits
from perdure.errors import InvalidArgument
from perdure.keys import KeyspaceIdentity, KVLayout

VLLM_VERSIONS = ("0.32",)  # whose connector interface this package was tested with
TIER = "the tier: OffloadingConnector + TieringOffloadingSpec with secondary tier perdure.engines.vllm.tier"
_DRAFTLESS = {"ngram", "ngram_gpu", "suffix"}  # speculation that keeps no KV of its own
_CRYPTOGRAPHIC = {"sha256", "sha256_cbor"}
_FP8 = {"fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "fp8_e5m2": "float8_e5m2"}
_PLAIN_CACHE = {"auto", "bfloat16", "float16", "float32", *_FP8}
_SCATTERED = {"LHBNC", "BHLNC"}
_ATTENTION = {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"}


@dataclass(frozen=True, slots=True)
class Group:
    """One KV-cache group of one rank. window_tokens: how far its layers look back, None for all of the sequence.

    copy: how many ranks before this one hold the same blocks; the first of them stores for all.
    """

    number: int
    layer_names: tuple[str, ...]
    block_tokens: int
    window_tokens: int | None
    layout: KVLayout
    copy: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    what: str
    setting: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what} is not supported by PerdureConnector ({self.setting}); use {self.instead}"


# --- supported and refused
def check_version() -> None:
    """Raises InvalidArgument for a vLLM whose connector interface is not the one this was made for."""
    import vllm

    version = str(vllm.__version__)
    if version.split("+")[0].rsplit(".", 1)[0] not in VLLM_VERSIONS:
        raise InvalidArgument(
            f"vLLM {version} is not supported: its KV connector interface is experimental and changes; "
            f"install vLLM {' or '.join(VLLM_VERSIONS)}.x, or use a Perdure made for this version"
        )


def refusals(vllm_config: Any, kv_cache_config: Any | None = None) -> list[Refusal]:
    """Why the connector cannot serve this engine; [] if it can. Without `kv_cache_config` only settings are judged."""
    found = [*_refused_parallelism(vllm_config.parallel_config), *_refused_cache(vllm_config)]
    speculative = vllm_config.speculative_config
    if speculative is not None and str(speculative.method) not in _DRAFTLESS:
        found.append(
            Refusal(
                f"speculative decoding by {speculative.method}", f"speculative_config.method={speculative.method}",
                f"{TIER}, or method ngram",
            )
        )  # fmt: skip
    if loses_prefixes(vllm_config):
        found.append(
            Refusal(
                "latent attention on a CPU without AMX", "attention backend CPU_MLA, wrong behind any prefix",
                "a CPU with AMX, or a GPU",
            )
        )  # fmt: skip
    if kv_cache_config is None and getattr(getattr(vllm_config, "model_config", None), "has_inner_state", False):
        found.append(Refusal("Mamba or linear attention state", "the model", TIER))
    if kv_cache_config is not None:
        found += _refused_groups(kv_cache_config)
        layout = kv_cache_config.kv_cache_layout
        if layout in _SCATTERED:
            found.append(Refusal("a KV cache with pages in pieces", f"KV layout {layout}", "layout LBHNC or LBNHC"))
    return found


def loses_prefixes(vllm_config: Any) -> bool:
    """Whether this engine computes something else behind a prefix than without one, whoever has the prefix.

    So does vLLM 0.32's CPU_MLA, in fp32 from the first token on, behind its own cache too if that is forced on. vLLM
    turns its cache and chunked prefill off for it, but asks connectors all the same.
    """
    if not getattr(getattr(vllm_config, "model_config", None), "use_mla", False):
        return False
    if vllm_config.cache_config.enable_prefix_caching or vllm_config.scheduler_config.enable_chunked_prefill:
        return False
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def config_of(model: str) -> Any:
    """vLLM's configuration of a model, as its own defaults make it. Raises InvalidArgument without vLLM."""
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as error:
        raise InvalidArgument(f"to judge a model vLLM has to be installed here ({error})") from None
    check_version()
    try:
        return EngineArgs(model=model).create_engine_config()
    except (ValueError, OSError, RuntimeError) as error:
        raise InvalidArgument(f"{model}: vLLM refuses it: {error}") from error


def _refused_parallelism(parallel: Any) -> Iterator[Refusal]:
    for name, what in (("decode", "decode context parallelism"), ("prefill", "prefill context parallelism")):
        size = getattr(parallel, f"{name}_context_parallel_size", 1)
        if size > 1:
            yield Refusal(what, f"{name}_context_parallel_size={size}", f"{name}_context_parallel_size=1")
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        yield Refusal(
            "an engine over several nodes", f"nnodes={parallel.nnodes}",
            "one node per engine (data parallelism over nodes is fine), until the store has a cluster catalog",
        )  # fmt: skip


def _refused_cache(vllm_config: Any) -> Iterator[Refusal]:
    cache = vllm_config.cache_config
    algorithm = cache.prefix_caching_hash_algo
    if algorithm not in _CRYPTOGRAPHIC and os.environ.get("PYTHONHASHSEED") is None:
        yield Refusal(
            f"block hashes by {algorithm} with a random seed", f"prefix_caching_hash_algo={algorithm}",
            "prefix_caching_hash_algo=sha256_cbor, or the same PYTHONHASHSEED in every engine",
        )  # fmt: skip
    if cache.cache_dtype not in _PLAIN_CACHE:
        yield Refusal(
            "a KV cache with scales computed at run time", f"kv_cache_dtype={cache.cache_dtype}",
            "kv_cache_dtype=auto, or fp8 with static scales",
        )  # fmt: skip
    if getattr(cache, "calculate_kv_scales", False):
        yield Refusal("KV scales computed at run time", "calculate_kv_scales=true", "static scales in the checkpoint")


def _refused_groups(kv_cache_config: Any) -> Iterator[Refusal]:
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        for spec in _specs(group):
            kind = type(spec).__name__
            if kind == "MambaSpec":
                yield Refusal("Mamba or linear attention state", f"KV-cache group {number}", TIER)
            elif kind not in _ATTENTION or group.host_resident or not group.enable_kv_transfer:
                yield Refusal(f"a KV cache of kind {kind}", f"KV-cache group {number}", TIER)
            elif spec.prefix_replay_tokens or getattr(spec, "extra_retained_tokens", 0) or group.is_eagle_group:
                yield Refusal("a KV cache that is computed again from its window", f"KV-cache group {number}", TIER)
            else:
                continue
            break
        size = sum(page_bytes(spec) for _, spec in layer_specs(group))
        if size > limits.block_bytes_max:
            yield Refusal(
                f"a block of {size} bytes", f"block_size={group.kv_cache_spec.block_size}",
                f"a smaller block_size: at most {limits.block_bytes_max} bytes per block and rank",
            )  # fmt: skip


def check_supported(vllm_config: Any, kv_cache_config: Any | None = None) -> None:
    """Raises InvalidArgument that names everything that is refused."""
    found = refusals(vllm_config, kv_cache_config)
    if found:
        raise InvalidArgument("; ".join(map(str, found)))


_TABLE = (
    ("full attention, grouped or multi-head", "supported"),
    ("multi-head latent attention (MLA)", "supported, stored once for all ranks"),
    ("MLA on a CPU without AMX", "refused; vLLM's CPU_MLA computes wrongly behind any prefix"),
    ("sliding window, several KV-cache groups", "supported"),
    ("chunked prefill, preemption, priority, abort, n > 1", "supported"),
    ("prefix caching off", "supported"),
    ("prompt logprobs", "supported, not restored: vLLM computes such prompts in full"),
    ("cache_salt, multimodal inputs, prompt embeds", "supported, part of the block's name"),
    ("LoRA", "supported, by content of the adapter"),
    ("fp8 KV cache with static scales", "supported"),
    ("speculative decoding by n-gram or suffix", "supported"),
    ("tensor and pipeline parallelism on one host", "supported; another size is another keyspace: a miss"),
    ("data and expert parallelism", "supported; engines share one service"),
    ("sleep, pause, weight updates through reset_cache", "supported"),
    ("Mamba, linear attention", f"refused; use {TIER}"),
    ("MTP, EAGLE, draft models", f"refused; use {TIER}"),
    ("decode or prefill context parallelism", "refused; set both sizes to 1"),
    ("KV scales computed at run time (per token, nvfp4)", "refused; use fp8 with static scales, or auto"),
    ("tensor parallelism over several nodes", "refused; one node per engine"),
    ("xxhash block hashes without PYTHONHASHSEED", "refused; use sha256_cbor"),
)


def support_table(vllm_config: Any | None = None, kv_cache_config: Any | None = None) -> list[tuple[str, str]]:
    """Rows (feature, answer) for `perdure engine-check vllm`; with a configuration, first what it is refused for."""
    rows: list[tuple[str, str]] = []
    if vllm_config is not None:
        found = refusals(vllm_config, kv_cache_config)
        rows += [(f"this model: {one.what}", f"refused ({one.setting}); use {one.instead}") for one in found]
        if not found:
            rows.append(("this model", "supported"))
    return rows + list(_TABLE)


# --- keyspaces
def _specs(group: Any) -> list[Any]:
    return [spec for _, spec in layer_specs(group)]


def layer_specs(group: Any) -> list[tuple[str, Any]]:
    """(layer name, its KV-cache spec) of a group, in the group's order."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return [(name, group.kv_cache_spec if specs is None else specs[name]) for name in group.layer_names]


def page_bytes(spec: Any) -> int:
    """Bytes of one layer's part of a block, without padding."""
    return int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))


def groups_of(
    vllm_config: Any, kv_cache_config: Any, *, tp_rank: int = 0, backend: str = "", scales: str = ""
) -> list[Group]:
    """The KV-cache groups of one rank. `kv_cache_config`: of this rank (of a pipeline stage: with its own layers).

    backend: name of the attention backend, which decides what lies in a page. scales: digest of static KV scales.
    """
    return [
        _group(vllm_config, kv_cache_config, number, group, tp_rank, backend, scales)
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    ]


def _group(
    vllm_config: Any, kv_cache_config: Any, number: int, group: Any, tp_rank: int, backend: str, scales: str
) -> Group:
    named = layer_specs(group)
    first = named[0][1]
    window = getattr(group.kv_cache_spec, "sliding_window", None) if _is_windowed(first) else None
    if _is_windowed(first) and window is None:  # of a group of uniform layers
        window = first.sliding_window
    indexes = sorted(_layer_index(name) for name in group.layer_names)
    description = {
        "layers": [(name, type(spec).__name__, spec.num_kv_heads, spec.head_size, spec.head_size_v, page_bytes(spec))
                   for name, spec in named],
        "window": window,
    }  # fmt: skip
    heads, replicated, copy = _heads(vllm_config, first, tp_rank)
    kv_dtype = _kv_dtype(vllm_config, first)
    layout = KVLayout(
        block_tokens=first.block_size,
        block_bytes=sum(page_bytes(spec) for _, spec in named),
        dtype=_dtype_name(vllm_config.model_config.dtype),
        kv_dtype=kv_dtype,
        order=f"vllm:{kv_cache_config.kv_cache_layout or 'LBHNC'}:{backend}:{hash_identity(vllm_config)}",
        layers=(indexes[0], len(indexes)),
        kv_heads=heads,
        replicated=replicated,
        group=hashlib.sha256(json.dumps(description).encode()).hexdigest()[:32],
        scales=scales if kv_dtype.startswith("float8") else "",
        isa=_isa(vllm_config, first),
    )
    return Group(number, tuple(group.layer_names), first.block_size, window, layout, copy)


def _is_windowed(spec: Any) -> bool:
    return type(spec).__name__ == "SlidingWindowSpec"


def _layer_index(name: str) -> int:
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found.group(1)) if found else 0


def _heads(vllm_config: Any, spec: Any, tp_rank: int) -> tuple[tuple[int, int], bool, int]:
    """KV heads of this shard as (first, count), whether every rank holds the same, and how many before it do."""
    count = int(spec.num_kv_heads)
    if type(spec).__name__ == "MLAAttentionSpec":
        return (0, count), True, tp_rank
    tp = int(vllm_config.parallel_config.tensor_parallel_size)
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    ranks_per_shard = max(1, tp // max(1, total))
    return (tp_rank // ranks_per_shard * count, count), False, tp_rank % ranks_per_shard


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.").replace("float8_e4m3fn", "float8_e4m3")


def _kv_dtype(vllm_config: Any, spec: Any) -> str:
    return _FP8.get(vllm_config.cache_config.cache_dtype) or _dtype_name(spec.dtype)


def _isa(vllm_config: Any, spec: Any) -> str:
    """The CPU instruction set by which vLLM packs pages; "" on accelerators, where none does."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(
        _get_attn_isa(
            vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
        )
    )


def hash_identity(vllm_config: Any) -> str:
    """How this engine names blocks: algorithm and seed. Engines that differ in it share nothing."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED", "")
    return f"{algorithm}:{hashlib.sha256(seed.encode()).hexdigest()[:16] if seed else 'default'}"


def model_name(vllm_config: Any) -> str:
    """The model's name without directories: its weights have a digest, and where they lie says nothing."""
    name = str(vllm_config.model_config.model).rstrip("/")
    return name.rpartition("/")[2] or name


def combined_weights(digests: Mapping[tuple[int, int], str]) -> str:
    """One digest for all ranks, from theirs by (pipeline rank, tensor rank): the KV of each depends on all of them."""
    fields = [(f"{pp}/{tp}", digest.encode()) for (pp, tp), digest in sorted(digests.items())]
    if len(fields) == 1:
        return next(iter(digests.values()))
    return "sha256:" + hashlib.sha256(naming.encode_fields(fields)).hexdigest()


def keyspace_identity(vllm_config: Any, layout: KVLayout, weights: str, lora: str = "") -> KeyspaceIdentity:
    """Identity of the blocks of one group of one rank."""
    return KeyspaceIdentity(model_name(vllm_config), weights, layout, lora)
