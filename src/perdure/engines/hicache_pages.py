"""A host pool of SGLang as Perdure sees it: what the bytes of a page are, and where they lie.

Contract
- A page of a pool is one block. Where the pool tells its pages' addresses (`get_page_buffer_meta`) they are read and
  written in place, in parts; else page by page through the pool's own flat copies. The two have other names: the order
  of a page's elements differs.
- The layout is taken from the pool itself: its class, memory layout, element type, dimensions and the sizes of a page's
  parts. Pools that differ in one of them never share a block.
- Addresses are used during a call only, and only as many bytes as the pool said a page has.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from perdure.errors import InvalidArgument
from perdure.keys import KVLayout

KV = "kv"
# Side pools that every rank of an MLA model holds alike; SGLang's rank 0 alone writes them back.
_ALIKE_IN_MLA = (KV, "swa", "indexer", "deepseek_v4_")
_DIMENSIONS = (
    "layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim",
    "index_head_dim", "item_bytes",
)  # fmt: skip
_DTYPES = {"float8_e4m3fn": "float8_e4m3"}
_KNOWN_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "int8", "uint8")


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the model this process holds."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    mla: bool
    tp_per_host: int

    def alike(self, pool: str) -> bool:
        """Whether all tensor-parallel ranks hold the same bytes in this pool."""
        return self.mla and pool.startswith(_ALIKE_IN_MLA)

    def ranks(self, pool: str) -> list[int]:
        """Tensor-parallel ranks of this service without whose part a page cannot be used; this one first."""
        if self.alike(pool):
            return [self.tp_rank]
        first = self.tp_rank // self.tp_per_host * self.tp_per_host
        beside = range(first, min(first + self.tp_per_host, self.tp_size))
        return [self.tp_rank, *(rank for rank in beside if rank != self.tp_rank)]

    def group(self, pool: str, rank: int) -> str:
        """Name of one rank's part. The size is in it: heads are cut and doubled in ways a pool does not tell."""
        parts = [pool, f"pp{self.pp_rank}/{self.pp_size}", f"cp{self.cp_rank}/{self.cp_size}"]
        return " ".join(parts if self.alike(pool) else [*parts, f"tp{rank}/{self.tp_size}"])


class Pages:
    """The pages of one pool. `logical`: it owns no bytes, side pools hold them. `block_bytes`: of a page."""

    def __init__(self, name: str, pool: Any, *, in_place: bool, scales: str = ""):
        self.name, self.pool, self._scales = name, pool, scales
        self.page_tokens = int(getattr(pool, "logical_page_size", None) or getattr(pool, "page_size", 1) or 1)
        self.logical = hasattr(pool, "kv_buffer") and pool.kv_buffer is None and name == KV
        sizes = self._part_sizes() if in_place and not self.logical else None
        self.in_place = sizes is not None
        self._flat_dtype: Any = None
        if sizes is None and not self.logical:
            flat = pool.get_dummy_flat_data_page()
            sizes, self._flat_dtype = [_nbytes(flat)], flat.dtype
        self.sizes = sizes or []
        self._layouts: dict[tuple[Shard, int], KVLayout] = {}
        self.block_bytes = sum(self.sizes)
        if not self.block_bytes and not self.logical:
            raise InvalidArgument(f"SGLang's pool {name!r} ({type(pool).__name__}) says that a page has no bytes")

    def _part_sizes(self) -> list[int] | None:
        """Sizes of a page's parts, or None where the pool does not tell addresses."""
        import torch

        try:
            told = self.pool.get_page_buffer_meta(torch.arange(self.page_tokens))
        except (AttributeError, NotImplementedError, ValueError):
            return None
        if told is None:
            return None
        pointers, sizes = told
        return [int(sizes)] * len(pointers) if isinstance(sizes, int) else [int(size) for size in sizes]

    def layout(self, shard: Shard, rank: int) -> KVLayout:
        """Of the pages that tensor-parallel rank `rank` holds in such a pool."""
        made = self._layouts.get((shard, rank))
        if made is None:
            made = self._layouts[shard, rank] = self._layout(shard, rank)
        return made

    def _layout(self, shard: Shard, rank: int) -> KVLayout:
        pool = self.pool
        dtype, meaning = _dtype(pool), _dtype(getattr(pool, "device_pool", None)) or _dtype(pool)
        known = dtype if dtype in _KNOWN_DTYPES else "uint8"
        sizes = hashlib.sha256(",".join(map(str, self.sizes)).encode()).hexdigest()[:16]
        told = {name: getattr(pool, name, None) for name in _DIMENSIONS}
        dimensions = [f"{name}={value}" for name, value in told.items() if isinstance(value, int) and value > 0]
        how = f"in place, {len(self.sizes)} parts {sizes}" if self.in_place else "flat"
        order = f"sglang/1 {type(pool).__name__} {getattr(pool, 'layout', '')} {dtype} {meaning}, {how}"
        return KVLayout(
            block_tokens=self.page_tokens,
            block_bytes=self.block_bytes,
            dtype=known,
            order=" ".join([order, *dimensions]),
            layers=(int(getattr(pool, "start_layer", 0) or 0), int(getattr(pool, "layer_num", 0) or 0)),
            replicated=shard.alike(self.name),
            group=shard.group(self.name, rank),
            scales=self._scales,
        )

    def fits(self, keys: list[str], indices: Any) -> bool:
        """Whether there are as many slots as the keys' pages have."""
        return indices is not None and len(indices) == len(keys) * self.page_tokens

    def parts(self, indices: Any) -> list[list[memoryview]]:
        """Where the pages lie."""
        pointers, _ = self.pool.get_page_buffer_meta(indices)
        step = len(self.sizes)
        if len(pointers) % step:
            raise InvalidArgument(f"pool {self.name!r}: {len(pointers)} addresses, {step} parts per page")
        views = [
            memoryview(_bytes(size).from_address(int(pointer))).cast("B")
            for pointer, size in zip(pointers, self.sizes * (len(pointers) // step), strict=True)
        ]
        return [views[at : at + step] for at in range(0, len(views), step)]

    def first_slots(self, indices: Any) -> list[int]:
        slots: list[int] = indices.tolist()[:: self.page_tokens]
        return slots

    def gather(self, indices: Any) -> list[Any]:
        """Flat copies of the pages."""
        return [flat_bytes(self.pool.get_data_page(slot, flat=True)) for slot in self.first_slots(indices)]

    def scatter(self, slot: int, page: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Put a flat page into the pool."""
        import torch

        self.pool.set_from_flat_data_page(slot, torch.from_numpy(page).view(self._flat_dtype))


@cache
def _bytes(count: int) -> Any:
    return ctypes.c_ubyte * count


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def flat_bytes(tensor: Any) -> Any:
    """A tensor's bytes, in place if it is contiguous."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def _dtype(pool: Any) -> str:
    text = str(getattr(pool, "dtype", "")).removeprefix("torch.")
    return _DTYPES.get(text, text)
