"""What the tier can learn of the engine around it: vLLM hands a tier its `OffloadingConfig` and no `VllmConfig`.

Contract
- `engine_config` looks among this process's objects for the `VllmConfig` with the engine's id, once, when the tier is
  made; None where there is none (vLLM's classes without an engine).
- With it, what a tier could not tell apart is refused (`check`), and what changes the KV of a token besides the
  weights' bytes is part of the keyspace (`meaning`). Without it, `weights` alone has to say so.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from perdure.engines.model_identity import NOT_IDENTITY
from perdure.engines.vllm.identity import hash_identity, loses_prefixes
from perdure.errors import InvalidArgument

BY_NAME = "by-name"


def engine_config(engine_id: str) -> Any:
    """The VllmConfig of the engine, or None."""
    for one in gc.get_objects():
        if type(one).__name__ == "VllmConfig" and type(one).__module__.startswith("vllm."):
            transfer = getattr(one, "kv_transfer_config", None)
            if transfer is not None and transfer.engine_id == engine_id:
                return one
    return None


def check(engine: Any, adapters: str) -> None:
    """Raises InvalidArgument for what would give wrong blocks."""
    if engine.lora_config is not None and adapters != BY_NAME:
        raise InvalidArgument(
            "perdure tier: vLLM tells a tier the name of a LoRA adapter and not its content; use PerdureConnector, "
            f"which knows it, or set adapters='{BY_NAME}' if one name means one adapter wherever this tenant and "
            "'weights' are used"
        )
    algorithm = str(engine.cache_config.prefix_caching_hash_algo)
    if not algorithm.startswith("sha256") and os.environ.get("PYTHONHASHSEED") is None:
        raise InvalidArgument(
            f"perdure tier: block hashes by {algorithm} with a random seed name nothing in another process; use "
            "--prefix-caching-hash-algo sha256_cbor, or the same PYTHONHASHSEED in every engine"
        )
    if getattr(engine.cache_config, "calculate_kv_scales", False):
        raise InvalidArgument("perdure tier: KV scales are computed at run time; use static ones, from the checkpoint")
    if loses_prefixes(engine):
        raise InvalidArgument(
            "perdure tier: vLLM's attention backend CPU_MLA (latent attention on a CPU without AMX) computes wrongly "
            "behind any prefix; use a CPU with AMX, or a GPU"
        )


def model_dtype(engine: Any) -> str:
    return str(engine.model_config.dtype).removeprefix("torch.")


def meaning(engine: Any) -> str:
    """Digest of the settings that change the KV of a token: how blocks are hashed, the model's configuration with its
    overrides, revision, quantization, whether the weights are real, and of a draft model which one it is."""
    model, draft = engine.model_config, engine.speculative_config
    hf_config = {name: value for name, value in model.hf_config.to_dict().items() if name not in NOT_IDENTITY}
    fields = {
        "hash": hash_identity(engine),
        "config": hf_config,
        "dtype": model_dtype(engine),
        "kv_dtype": str(engine.cache_config.cache_dtype),
        "revision": str(model.revision),
        "quantization": str(model.quantization),
        "dummy": str(engine.load_config.load_format) == "dummy",
        "draft": None if draft is None else [str(draft.method), _name(str(draft.model)), str(draft.revision)],
        "layout": str(engine.cache_config.kv_cache_layout),
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def draft_directory(engine: Any) -> str | None:
    """Of a draft model with weights of its own, if it is a local directory."""
    draft = engine.speculative_config
    if draft is None or not draft.model or draft.model == engine.model_config.model:
        return None
    return str(draft.model) if Path(draft.model).is_dir() else None


def _name(model: str) -> str:
    """Without the directory it lies in, which says nothing."""
    return Path(model).name if Path(model).is_dir() else model
