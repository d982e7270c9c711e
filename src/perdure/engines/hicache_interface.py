"""What the adapter expects of SGLang's `hicache_storage` module, checked when it is imported."""

from __future__ import annotations

import inspect
from typing import Any

# Method of HiCacheStorage -> the arguments it is called with.
METHODS = {
    "register_mem_pool_host": ("mem_pool_host",),
    "register_mem_host_pool_v2": ("host_pool", "host_pool_name"),
    "batch_exists_v2": ("keys", "pool_transfers", "extra_info"),
    "batch_get_v2": ("transfers", "extra_info"),
    "batch_set_v2": ("transfers", "extra_info"),
    "batch_get_v1": ("keys", "host_indices", "extra_info"),
    "batch_set_v1": ("keys", "host_indices", "extra_info"),
    "get": ("key", "target_location", "target_sizes"),
    "batch_get": ("keys", "target_locations", "target_sizes"),
    "set": ("key", "value", "target_location", "target_sizes"),
    "batch_set": ("keys", "values", "target_locations", "target_sizes"),
    "exists": ("key",),
    "batch_exists": ("keys", "extra_info"),
    "clear": (),
    "get_stats": (),
}
TYPES = ("HiCacheStorage", "PoolTransferResult")


def differences(module: Any) -> list[str]:
    """Where a module differs from what the adapter answers to."""
    found = [f"no {name}" for name in TYPES if not hasattr(module, name)]
    base = getattr(module, "HiCacheStorage", None)
    if base is None:
        return found
    for name, wanted in METHODS.items():
        method = getattr(base, name, None)
        if method is None:
            found.append(f"no {name}")
            continue
        told = tuple(inspect.signature(method).parameters)[1:]
        if told != wanted:
            found.append(f"{name} takes {told}, not {wanted}")
    unknown = set(getattr(base, "__abstractmethods__", ())) - METHODS.keys()
    return found + [f"{name} must be written" for name in sorted(unknown)]


def refuse_interface(module: Any) -> None:
    """ImportError where SGLang's interface is another one than the adapter was written for."""
    found = differences(module)
    if found:
        raise ImportError(
            f"this version of SGLang has another HiCacheStorage than Perdure knows ({'; '.join(found)}); "
            "0.5.23 has the one it knows"
        )
