"""One rank's paged KV cache as bytes: a block is the pages of a group's layers, in the group's order, without padding.

Contract
- Host memory is read and written in place. Device memory is copied through host memory, on a stream of its own that
  starts after what the engine had queued when `mark` was called; a copy has ended when the call returns.
- Whoever copies says which blocks nobody writes to meanwhile; nothing here locks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perdure.engines.vllm.identity import layer_specs, page_bytes
from perdure.errors import InvalidArgument

Bytes = NDArray[np.uint8]


class Pages:
    """kv_caches: layer name -> tensor, as vLLM registers them."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any):
        self._layers: list[list[torch.Tensor]] = []
        self.block_bytes: list[int] = []
        for group in kv_cache_config.kv_cache_groups:
            views = [_view(kv_caches[name], spec, kv_cache_config.num_blocks) for name, spec in layer_specs(group)]
            self._layers.append(views)
            self.block_bytes.append(sum(view.shape[1] for view in views))
        self.in_host_memory = all(view.device.type == "cpu" for views in self._layers for view in views)
        self._arrays = [[view.numpy() for view in views] for views in self._layers] if self.in_host_memory else []
        device = self._layers[0][0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def parts(self, group: int, block_ids: Sequence[int]) -> list[list[Bytes]]:
        """The memory of blocks, page by page. Of host memory only."""
        return [[array[block] for array in self._arrays[group]] for block in block_ids]

    def mark(self) -> Any:
        """A point in the engine's work; `gather` and `scatter` start behind it."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def gather(self, group: int, block_ids: Sequence[int], into: Bytes, after: Any = None) -> None:
        """Copy blocks into rows of `into`, uint8 (blocks, block bytes)."""
        if self.in_host_memory:
            for row, block in zip(into, block_ids, strict=True):
                at = 0
                for array in self._arrays[group]:
                    np.copyto(row[at : at + array.shape[1]], array[block])
                    at += array.shape[1]
            return
        host, at = torch.from_numpy(into), 0
        with self._behind(after):
            for view in self._layers[group]:
                chosen = view.index_select(0, torch.tensor(block_ids, device=view.device))
                host[:, at : at + view.shape[1]].copy_(chosen)
                at += view.shape[1]
        self._settle()

    def scatter(self, group: int, block_ids: Sequence[int], rows: Bytes, after: Any = None) -> None:
        """Copy rows, uint8 (blocks, block bytes), into blocks."""
        host, at = torch.from_numpy(rows), 0
        with self._behind(after):
            for view in self._layers[group]:
                part = host[:, at : at + view.shape[1]].to(view.device)
                view.index_copy_(0, torch.tensor(block_ids, device=view.device), part)
                at += view.shape[1]
        self._settle()

    def _behind(self, after: Any) -> Any:
        if self._stream is None:
            return nullcontext()
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def _settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _view(cache: torch.Tensor, spec: Any, num_blocks: int) -> torch.Tensor:
    """Pages of one layer as bytes, (blocks, page bytes), over the same memory."""
    blocks = cache if cache.shape[0] == num_blocks else cache.unflatten(0, (num_blocks, -1))
    size, element = page_bytes(spec), cache.element_size()
    inner = sorted(zip(blocks.stride()[1:], blocks.shape[1:], strict=True))
    reach = 1
    for stride, length in inner:
        if length > 1 and stride != reach:
            raise InvalidArgument(f"the pages of this KV cache lie in pieces (strides {tuple(blocks.stride())})")
        reach *= length
    if reach * element != size:
        raise InvalidArgument(f"a page of this KV cache has {reach * element} bytes, {size} were expected")
    start, step = blocks.storage_offset() * element, blocks.stride(0) * element
    flat = torch.tensor([], dtype=torch.uint8, device=cache.device)
    return flat.set_(cache.untyped_storage(), start, (num_blocks, size), (step, 1))
