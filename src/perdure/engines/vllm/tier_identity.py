"""What the tier is told about itself: its settings, and the keyspaces that vLLM's offloaded chunks belong to.

Contract
- A secondary tier sees no weights: vLLM hands it its `OffloadingConfig`, and `tier_engine` finds the settings of the
  engine. `weights` therefore has to name them; there is no default that could give another model's blocks.
- One keyspace for each KV-cache group. A chunk holds the bytes of all workers of one host, so how the model is spread
  over them is part of its layout: other sizes of tensor or pipeline parallelism are a miss.
- `reset_cache()` (sleep, pause and weight updates alike) seals the weights' epoch: see `Weights`.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from perdure import keys as naming
from perdure import limits
from perdure.codecs import POLICIES
from perdure.engines.vllm.affinity import unbind
from perdure.engines.vllm.tier_engine import BY_NAME, draft_directory, meaning, model_dtype
from perdure.errors import InvalidArgument, UnknownOption
from perdure.keys import KeyspaceIdentity, KVLayout
from perdure.keyspace import check_seconds, durability_of

_DTYPES = {
    "float64": "float64",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3",
    "fp8_e4m3": "float8_e4m3",
    "fp8_e5m2": "float8_e5m2",
    "uint8": "uint8",
    "int8": "int8",
}
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".gguf", ".json")
_NOT_WEIGHTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
_DIGEST_THREADS = 4
FILES = "files"


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The entry of `secondary_tiers`, beyond vLLM's own `type`, `module_path` and `backpressure`.

    url: the service's socket or directory. weights: "algorithm:value", a name for the loaded weights and adapters, and
    for what the engine's settings do not say; or "files", the digest of the files in the model's directory.
    weights_file: a file that holds such a name instead, read again after every reset. adapters: "by-name" allows LoRA.
    after_reset: "new" (blocks of before are never found again by this process, unless `weights_file` names the weights)
    or "same" (the operator vouches that resets change no weights). codec: "auto", "on" or "off"; without it as
    the service has it. share_region: let the service read vLLM's region.
    lookup_s: until a question that is not answered is a miss. hold_s: how long a block is held in the service's memory
    for a load. load_s, store_s: until a job gives up.
    """

    url: str
    tenant: str = "default"
    weights: str = ""
    weights_file: str = ""
    after_reset: str = "new"
    adapters: str = ""
    durability: str = "session"
    ttl_s: float | None = None
    codec: str | None = None
    share_region: bool = True
    lookup_s: float = 2.0
    hold_s: float = limits.view_ttl_s_default
    load_s: float = 10.0
    store_s: float = 30.0

    @classmethod
    def of(cls, config: dict[str, Any]) -> TierSettings:
        """Raises UnknownOption, naming the nearest known one, and InvalidArgument."""
        known = [field.name for field in fields(cls)]
        for name in config:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise UnknownOption(
                    f"perdure tier: unknown option {name!r}"
                    + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}")
                )
        if not config.get("url"):
            raise InvalidArgument("perdure tier: 'url' is missing: the service's socket, e.g. unix:///run/perdure.sock")
        made = cls(**config)
        made.check()
        return made

    def check(self) -> None:
        for name in ("url", "tenant", "weights", "weights_file"):
            naming.check_text(getattr(self, name), f"perdure tier {name}")
        for name, most in (
            ("lookup_s", 3600.0),
            ("hold_s", limits.view_ttl_s_max),
            ("load_s", 3600.0),
            ("store_s", 3600.0),
        ):
            check_seconds(getattr(self, name), f"perdure tier {name}", most)
        if self.ttl_s is not None:
            check_seconds(self.ttl_s, "perdure tier ttl_s", limits.ttl_s_max)
        durability_of(self.durability)
        if self.codec not in (None, *POLICIES):
            raise InvalidArgument(f"perdure tier codec={self.codec!r}: must be one of {', '.join(POLICIES)}")
        if self.after_reset not in ("new", "same"):
            raise InvalidArgument(f"perdure tier after_reset={self.after_reset!r}: must be 'new' or 'same'")
        if self.adapters not in ("", BY_NAME):
            raise InvalidArgument(f"perdure tier adapters={self.adapters!r}: must be {BY_NAME!r}, or left out")
        if not isinstance(self.share_region, bool):
            raise InvalidArgument(f"perdure tier share_region={self.share_region!r}: must be true or false")
        if bool(self.weights) == bool(self.weights_file):
            raise InvalidArgument(
                "perdure tier: name the loaded weights by one of 'weights' ('algorithm:value', or 'files' for the "
                "digest of the model's directory) and 'weights_file'; vLLM tells a tier only the model's name, and "
                "blocks of other weights under that name would be wrong"
            )


class Weights:
    """The name of the weights, in epochs that end with `seal`.

    vLLM tells a tier of a reset, not why. So what follows one is named anew: from `weights_file` if there is one; else,
    with after_reset "new", by a name nobody else has, and with "same" as before. Not noticed: weights that are changed
    without a reset (`collective_rpc` of one's own, `reload_weights` or `update_weights` while not paused).
    """

    def __init__(self, settings: TierSettings, model: str):
        self._settings, self._model = settings, model
        self._base = files_digest(model) if settings.weights == FILES else settings.weights
        self.epoch, self._nonce = 0, b""
        self._name: str | None = None
        self.name()  # a bad one is said at once

    def seal(self) -> None:
        self.epoch += 1
        self._name = None  # read when it is needed next: by then the weights have been changed
        if self._settings.after_reset == "new" and not self._settings.weights_file:
            self._nonce = os.urandom(limits.id_bytes)

    def name(self) -> str:
        """The same throughout an epoch. Raises InvalidArgument for a file that cannot be read."""
        if self._name is None:
            self._name = self._read()
        return self._name

    def _read(self) -> str:
        base = self._base
        if self._settings.weights_file:
            try:
                base = Path(self._settings.weights_file).read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidArgument(f"perdure tier weights_file: {error}") from None
        if self._nonce:
            return "epoch:" + hashlib.sha256(base.encode() + b"\0" + self._nonce).hexdigest()
        return base


def files_digest(model: str) -> str:
    """Digest of weights and configuration in a model's directory, as "files:<hex>": SHA-256 over (name, SHA-256 of the
    content) in name order, encoded as in `keys.encode_fields`.

    Raises InvalidArgument for what is no local directory: a name on a hub does not say which revision was loaded."""
    folder = Path(model)
    found = []
    if folder.is_dir():
        found = [
            one for one in sorted(folder.iterdir()) if one.suffix in _WEIGHT_FILES and one.name not in _NOT_WEIGHTS
        ]
    if not found:
        raise InvalidArgument(
            f"perdure tier weights='files': {model!r} is no directory with weights; pass weights='algorithm:value', "
            "for example with the revision of the model"
        )
    with ThreadPoolExecutor(_DIGEST_THREADS, thread_name_prefix="perdure-digest", initializer=unbind) as pool:
        digests = list(pool.map(_sha256, found))
    named = [(path.name, digest) for path, digest in zip(found, digests, strict=True)]
    return "files:" + hashlib.sha256(naming.encode_fields(named)).hexdigest()


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def layouts_of(config: Any, chunk_bytes: int, engine: Any = None) -> dict[int, KVLayout]:
    """The layout of a chunk of each KV-cache group, by the number that its keys end with, from vLLM's OffloadingConfig.

    chunk_bytes: of one row of the shared region, padding and all workers included. engine: its VllmConfig, if it is
    known. Raises InvalidArgument."""
    raw = str(config.model.dtype)
    kv_dtype = _DTYPES.get(raw)
    dtype = kv_dtype if engine is None else _DTYPES.get(model_dtype(engine))
    if dtype is None or kv_dtype is None:
        raise InvalidArgument(f"perdure tier: KV of dtype {raw!r} is not supported; known: {', '.join(_DTYPES)}")
    parallel, per_chunk = config.parallel, config.cache.blocks_per_chunk
    order = (
        f"vllm-chunk/{config.kv_cache_layout}/{raw}/blocks{per_chunk}/hash{config.cache.tokens_per_hash}"
        f"/tp{parallel.tp_size}/pp{parallel.pp_size}/pcp{parallel.pcp_size}/dcp{parallel.dcp_size}"
        f"/bytes{config.worker_kv_bytes_per_block}"
        + ("/canonical" if config.canonical_layout else "")
        + ("/replicated" if config.replicated_layout else "")
        + ("" if engine is None else f"/{meaning(engine)}")
    )
    made = {}
    for group in config.groups:
        layers = hashlib.sha256("\0".join(group.layer_names).encode()).hexdigest()
        made[group.group_id] = KVLayout(
            block_tokens=group.tokens_per_block * per_chunk,
            block_bytes=chunk_bytes,
            dtype=dtype,
            kv_dtype=kv_dtype,
            order=order,
            layers=(0, len(group.layer_names)),
            group=f"{group.group_id}/{layers}",
            isa=_isa(group.tokens_per_block),
        )
    return made


def _isa(block_tokens: int) -> str:
    """On a CPU, and only there, vLLM packs pages by instruction set, and by the head's size, which is the model's."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return ""
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    found = [_get_attn_isa(dtype, block_tokens) for dtype in (torch.bfloat16, torch.float32)]
    return "/".join([platform.machine(), *found])


def identity_of(config: Any, weights: str, layout: KVLayout, draft: str = "") -> KeyspaceIdentity:
    """Of a model in a directory the directory's name counts, not where it lies."""
    name = str(config.model.name)
    return KeyspaceIdentity(Path(name).name if Path(name).is_dir() else name, weights, layout, draft=draft)


def draft_of(engine: Any) -> str:
    """Digest of a draft model that lies in a directory of its own; "" otherwise."""
    folder = None if engine is None else draft_directory(engine)
    return "" if folder is None else files_digest(folder)
