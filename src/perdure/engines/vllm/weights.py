"""Digest of the weights that a vLLM worker has loaded, byte for byte where they can be read.

Contract
- Covers every parameter and buffer of the model in this process (static KV scales and rotary tables among them) and the
  model's configuration. Weights that were changed in place have another digest.
- vLLM's CPU kernels keep packed copies that cannot be read back. Of those, `PROBE_COLUMNS` columns are found exactly
  through the kernel itself, and the bytes of the checkpoint's files are digested too. What latent attention (MLA) packs
  of a projection can be read. Where there are no such files, or a module keeps weights in some other hidden way,
  WeightsHidden asks for the setting `weights`.
- Never: changing the model. Costs about 0.5 s per GB and core; nothing is cached, each call looks again.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from perdure import keys as naming
from perdure.engines.model_identity import NOT_IDENTITY, tensor_digest, tensors_of
from perdure.engines.vllm.affinity import unbind
from perdure.errors import InvalidArgument

PROBE_COLUMNS = 64
_DIGEST_THREADS = 4
_PACKED_PROJECTION = ("_w_scale", "_w_uk_packed", "_w_uv_packed")  # of vLLM's AMXMLAImpl
_CHECKPOINT = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


class WeightsHidden(InvalidArgument):
    """The loaded weights cannot be told from others here; the message says what to set."""


def loaded_model(layer_names: Iterable[str]) -> torch.nn.Module:
    """The model in this process that has attention layers of these names: vLLM hands a connector no reference to it.

    Raises WeightsHidden unless there is exactly one.
    """
    wanted = set(layer_names)
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    children = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in children]
    found = [root for root in roots if wanted <= _names_of_layers(root)]
    if len(found) != 1:
        raise WeightsHidden(
            f"{len(found)} models in this process have the layers {', '.join(sorted(wanted)[:2])}, ...; "
            'set "weights": "<algorithm>:<digest>" in kv_connector_extra_config, and change it with the weights'
        )
    return found[0]


def _names_of_layers(root: torch.nn.Module) -> set[str]:
    """Names that vLLM knows the root's layers by: it gives them to attention layers as `layer_name`."""
    return {str(getattr(module, "layer_name", "")) for module in root.modules()}


def shard_digest(model: Any, config: Any, model_path: str) -> str:
    """Digest of what this rank has loaded, as "sha256:<hex>". config: the Hugging Face configuration."""
    tensors = [pair for pair in tensors_of(model) if not pair[1].is_meta]
    unique = {_memory_of(tensor): tensor for _, tensor in tensors}
    with ThreadPoolExecutor(_DIGEST_THREADS, thread_name_prefix="perdure-digest", initializer=unbind) as pool:
        digests = dict(zip(unique, pool.map(tensor_digest, unique.values()), strict=True))
    fields = [
        (name, f"{tensor.dtype}{tuple(tensor.shape)}".encode() + digests[_memory_of(tensor)])
        for name, tensor in tensors
    ]
    hidden = list(_hidden(model))
    fields += [(f"{name} packed", digest) for name, digest in hidden]
    if hidden:
        fields.append(("checkpoint", _checkpoint_digest(Path(model_path))))
    fields.append(("config", _meaning(config)))
    return "sha256:" + hashlib.sha256(naming.encode_fields(fields)).hexdigest()


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _hidden(model: Any) -> Iterator[tuple[str, bytes]]:
    """Modules whose weights were replaced by nothing, and what their kernels answer."""
    packed = _packed_projections(model)
    for name, module in model.named_modules():
        gone = [key for key, value in module.named_parameters(recurse=False) if not value.numel()]
        if not gone:
            continue
        if id(module) in packed:
            yield name, packed[id(module)]
            continue
        kernel, width = getattr(module, "cpu_linear", None), _input_width(module)
        if kernel is None or width is None:
            raise WeightsHidden(
                f"{name}.{gone[0]} was repacked and cannot be read back; "
                'set "weights": "<algorithm>:<digest>" in kv_connector_extra_config, and change it with the weights'
            )
        yield name, _probe(kernel, module, gone[0], width)


def _packed_projections(model: Any) -> dict[int, bytes]:
    """Digests of what attention layers have packed of their `kv_b_proj`, by the id of that module."""
    found = {}
    for module in model.modules():
        projection, kernel = getattr(module, "kv_b_proj", None), getattr(module, "impl", None)
        if projection is None or kernel is None:
            continue
        tensors = sorted((key, value) for key, value in vars(kernel).items() if key in _PACKED_PROJECTION)
        fields = [(key, tensor_digest(value)) for key, value in tensors if value is not None]
        if fields:
            found[id(projection)] = hashlib.sha256(naming.encode_fields(fields)).digest()
    return found


def _input_width(module: Any) -> int | None:
    for name in ("input_size_per_partition", "input_size", "embedding_dim"):
        width = getattr(module, name, None)
        if isinstance(width, int) and width > 0:
            return width
    return None


def _probe(kernel: Any, module: Any, name: str, width: int) -> bytes:
    """Columns of a packed weight: a kernel's answer to a unit vector is exact, whatever the order it adds in."""
    weight = getattr(module, name)
    columns = torch.linspace(0, width - 1, min(PROBE_COLUMNS, width)).long()
    units = torch.zeros((len(columns), width), dtype=weight.dtype, device=weight.device)
    units[torch.arange(len(columns)), columns] = 1
    with torch.inference_mode():
        return tensor_digest(kernel(units, weight, None))


def _checkpoint_digest(path: Path) -> bytes:
    files = sorted({file for pattern in _CHECKPOINT for file in path.glob(pattern)})
    if not files:
        raise WeightsHidden(
            f"{path}: no checkpoint files there to tell packed weights by; "
            'set "weights": "<algorithm>:<digest>" in kv_connector_extra_config, and change it with the weights'
        )
    fields = []
    for file in files:
        with file.open("rb") as data:
            fields.append((file.name, hashlib.file_digest(data, "sha256").digest()))
    return hashlib.sha256(naming.encode_fields(fields)).digest()


def _meaning(config: Any) -> bytes:
    fields = {name: value for name, value in config.to_dict().items() if name not in NOT_IDENTITY}
    return json.dumps(fields, sort_keys=True, default=str).encode()
