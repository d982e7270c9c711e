"""SGLang's side of its HiCache storage interface, written from it (hicache_storage.py of 0.5.23), and host pools that
are real memory: for tests, because SGLang cannot be installed without a GPU. Nothing here is SGLang's code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

PAGE_TOKENS = 4
SLOTS = 16  # pages of a pool


@dataclass
class HiCacheStorageConfig:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = True
    model_name: str | None = "model"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1


class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"


@dataclass
class PoolTransfer:
    name: str
    host_indices: Any = None
    device_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None: ...  # noqa: B027 - as SGLang has it

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None: ...  # noqa: B027 - as SGLang has it

    def batch_exists_v2(self, keys: Any, pool_transfers: Any = None, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    @abstractmethod
    def get(self, key: Any, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def set(self, key: Any, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    @abstractmethod
    def exists(self, key: Any) -> Any: ...

    def batch_exists(self, keys: Any, extra_info: Any = None) -> Any:
        return next((at for at, key in enumerate(keys) if not self.exists(key)), len(keys))

    def clear(self) -> Any: ...  # noqa: B027 - as SGLang has it

    def get_stats(self) -> Any: ...  # noqa: B027 - as SGLang has it


class HostPool:
    """Keys and values, or one latent per token (`mla`), of PAGE_TOKENS tokens per page, in one of SGLang's layouts.

    addresses: whether it tells its pages' addresses, as some of SGLang's pools do not."""

    def __init__(self, layout: str = "page_first", *, mla: bool = False, addresses: bool = True, head_dim: int = 8):
        import torch

        self.layout, self.page_size, self.size = layout, PAGE_TOKENS, PAGE_TOKENS * SLOTS
        self.layer_num, self.head_num, self.head_dim = 3, 1 if mla else 2, head_dim
        self.dtype = torch.bfloat16
        self._sides, self._addresses = (1 if mla else 2), addresses
        row = (self.head_num, self.head_dim)
        shapes = {
            "page_first": (self._sides, self.size, self.layer_num, *row),
            "page_first_direct": (self._sides, SLOTS, self.layer_num, PAGE_TOKENS, *row),
            "layer_first": (self._sides, self.layer_num, self.size, *row),
        }
        self.kv_buffer = torch.zeros(shapes[layout], dtype=self.dtype)

    @property
    def page_bytes(self) -> int:
        return int(self.kv_buffer.nbytes) // SLOTS

    def indices(self, *pages: int) -> Any:
        import torch

        return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])

    def view(self, page: int) -> Any:
        """A page's elements, [side, ...], wherever they lie."""
        tokens = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
        if self.layout == "page_first_direct":
            return self.kv_buffer[:, page]
        return self.kv_buffer[:, :, tokens] if self.layout == "layer_first" else self.kv_buffer[:, tokens]

    def fill(self, page: int, seed: int) -> None:
        import torch

        view = self.view(page)
        view.copy_(torch.rand(view.shape, generator=torch.Generator().manual_seed(seed)))

    def holds(self, page: int, seed: int) -> bool:
        import torch

        view = self.view(page)
        wanted = torch.rand(view.shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)
        return bool(torch.equal(view, wanted))

    def untouched(self, page: int) -> bool:
        return not bool(self.view(page).any())

    # --- what SGLang's storage backends call
    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        if not self._addresses:
            raise ValueError(f"Unsupported layout: {self.layout}")
        pointers, sizes = [], []
        for slot in indices.tolist()[::PAGE_TOKENS]:
            page = self.view(slot // PAGE_TOKENS)
            parts = [part for layer in range(self.layer_num) for part in page[:, layer]]
            for part in parts if self.layout == "layer_first" else page:
                pointers.append(part.data_ptr())
                sizes.append(part.nbytes)
        return pointers, sizes

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        return self.view(index // PAGE_TOKENS).flatten()

    def get_dummy_flat_data_page(self) -> Any:
        import torch

        return torch.zeros(self.page_bytes // self.dtype.itemsize, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: Any) -> None:
        view = self.view(index // PAGE_TOKENS)
        view.copy_(data_page.reshape(view.shape))


class LogicalPool:
    """An anchor that owns no bytes: its side pools hold them."""

    kv_buffer = None
    page_size = PAGE_TOKENS
