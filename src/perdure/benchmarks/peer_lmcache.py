"""LMCache 0.5.6 as a worker, run by the Python of its own environment: `peer_lmcache.py fs_native|local_disk`.

Two ways that LMCache keeps blocks on a local disk, each through the calls its engine integration makes:
- `fs_native`: the multi-process architecture's `StorageManager` (DRAM pool in front) with the C++ `fs_native` adapter.
- `local_disk`: the in-process architecture's `LocalCPUBackend` and `LocalDiskBackend`.

Contract
- put: reserve memory, copy the caller's bytes in, finish, wait until LMCache itself reports the blocks stored on disk
  (its listener or completion callback; no polling). LMCache never fsyncs, so `durable` is refused.
- get: prefetch or batched get into LMCache's memory, then copy into the caller's rows: both stores deliver into the
  caller's memory. The copy is part of the time, as it is on a machine without a GPU.
- As many I/O threads as our own in-flight cap, O_DIRECT on; other settings are LMCache's defaults.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import numpy as np
import torch
from numpy.typing import NDArray

# Run as a script, this file finds its sibling in its own directory; perdure is not in that environment.
peer_protocol: Any = importlib.import_module(
    "peer_protocol" if __name__ == "__main__" else "perdure.benchmarks.peer_protocol"
)

Bytes = NDArray[np.uint8]
MODEL = "bench/model"
THREADS = 8
POOL_BYTES = 3 << 30
WAIT_S = 120.0


def _lmcache(module: str) -> Any:
    return importlib.import_module(f"lmcache.{module}")


def _view(block: Any) -> Bytes:
    return np.frombuffer(block.byte_array, np.uint8)


class FsNative:
    """`StorageManager` + `fs_native`. See the module's contract."""

    def __init__(self) -> None:
        self._manager: Any = None
        self._stored = threading.Condition()
        self._outstanding: set[Any] = set()

    def open(self, root: str, block_bytes: int, memory: bool) -> None:
        api, config = _lmcache("v1.distributed.api"), _lmcache("v1.distributed.config")
        self.close()
        self._api = api
        self._layout = api.MemoryLayoutDesc(shapes=[torch.Size([block_bytes // 2])], dtypes=[torch.bfloat16])
        self._rank = api.ObjectKey.ComputeKVRank(1, 0, 1, 0)
        pool = config.L1MemoryManagerConfig(size_in_bytes=POOL_BYTES, use_lazy=False, shm_name="")
        adapters = "v1.distributed.l2_adapters"
        settings = config.StorageManagerConfig(
            l1_manager_config=config.L1ManagerConfig(memory_config=pool),
            eviction_config=config.EvictionConfig(eviction_policy="LRU"),
            l2_adapter_config=_lmcache(f"{adapters}.config").L2AdaptersConfig([self.adapter(root)]),
            prefetch_policy="retain" if memory else "default",  # the default keeps nothing that it loaded in DRAM
        )
        self._manager = _lmcache("v1.distributed.storage_manager").StorageManager(settings)
        self._manager.register_l2_listener(self._listener())

    def adapter(self, root: str) -> Any:
        """Configuration of the L2 adapter."""
        return _lmcache("v1.distributed.l2_adapters.fs_native_l2_adapter").FSNativeL2AdapterConfig(
            base_path=root, num_workers=THREADS, use_odirect=True
        )

    def _listener(self) -> Any:
        base: Any = _lmcache("v1.distributed.internal_api").L2AdapterListener
        stored, outstanding = self._stored, self._outstanding

        class Stored(base):  # type: ignore[misc]  # LMCache is not there when this file is checked
            def on_l2_keys_stored(self, keys: Any, sizes: Any) -> None:
                with stored:
                    outstanding.difference_update(keys)
                    stored.notify_all()

            def on_l2_keys_accessed(self, keys: Any) -> None: ...

            def on_l2_keys_deleted(self, keys: Any) -> None: ...

        return Stored()

    def prepare(self, blocks: Sequence[int]) -> list[Any]:
        hashes = [block.to_bytes(32, "big") for block in blocks]
        return [self._api.ObjectKey(chunk_hash=h, model_name=MODEL, kv_rank=self._rank) for h in hashes]

    def put(self, keys: Any, rows: Bytes, durable: bool) -> int:
        if durable:
            raise NotImplementedError("LMCache never fsyncs")
        self._outstanding.update(keys)
        reserved = self._manager.reserve_write(keys, self._layout)
        for key, row in zip(keys, rows, strict=True):
            np.copyto(_view(reserved[key]), row)
        self._manager.finish_write(keys)
        with self._stored:
            if not self._stored.wait_for(lambda: not self._outstanding, WAIT_S):
                raise TimeoutError(f"{len(self._outstanding)} of {len(keys)} blocks not stored after {WAIT_S} s")
        return len(keys)

    def get(self, keys: Any, rows: Bytes) -> list[bool]:
        group = self._api.GroupedObjectKeys(keys=keys, object_group_id=0, layout_desc=self._layout)
        handle = self._manager.submit_prefetch_task(self._api.PrefetchTaskSpec(key_groups=[group]))
        if not self._manager.wait_prefetch_status(handle, WAIT_S):
            raise TimeoutError("prefetch")
        result = self._manager.query_prefetch_status(handle)
        hits = [bool(result.hit_cells[0].test(i)) for i in range(len(keys))]
        present = [key for key, hit in zip(keys, hits, strict=True) if hit]
        if present:
            with self._manager.read_prefetched_results(present) as objects:
                if objects is None:
                    raise RuntimeError("prefetched blocks are gone")
                for row, block in zip((r for r, hit in zip(rows, hits, strict=True) if hit), objects, strict=True):
                    np.copyto(row, _view(block))
            self._manager.finish_read_prefetched(present)
        return hits

    def forget(self) -> None:
        self._manager.clear(force=True)

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def about(self) -> dict[str, Any]:
        return {"name": f"LMCache {metadata.version('lmcache')} fs_native", "threads": THREADS, "direct": True}


class LocalDisk:
    """`LocalCPUBackend` + `LocalDiskBackend`. See the module's contract."""

    def __init__(self) -> None:
        self._disk: Any = None
        self._root = ""

    def open(self, root: str, block_bytes: int, memory: bool) -> None:
        self._memory = memory
        self._shape = torch.Size([2, 1, block_bytes // 4, 1])
        self._format = _lmcache("v1.memory_management").MemoryFormat.KV_2LTD
        if self._disk is not None and self._root == root:
            return  # its index lives in this object only: a new one would not find the files
        self.close()
        self._root = root
        config = _lmcache("v1.config").LMCacheEngineConfig.from_defaults(
            local_cpu=True,
            max_local_cpu_size=POOL_BYTES / 2**30,
            local_disk=root,
            max_local_disk_size=64.0,
            extra_config={"use_odirect": True, "disk_io_threads": THREADS},
        )
        shape = (1, 2, 256, 1, block_bytes // 1024)
        about = _lmcache("v1.metadata").LMCacheMetadata(MODEL, 1, 1, 0, 0, torch.bfloat16, shape)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        backends = "v1.storage_backend"
        self._cpu = _lmcache(f"{backends}.local_cpu_backend").LocalCPUBackend(config, about, dst_device="cpu")
        self._disk = _lmcache(f"{backends}.local_disk_backend").LocalDiskBackend(
            config, self._loop, self._cpu, dst_device="cpu"
        )

    def prepare(self, blocks: Sequence[int]) -> list[Any]:
        make = _lmcache("utils").CacheEngineKey
        return [make(MODEL, 1, 0, block + 1, torch.bfloat16) for block in blocks]

    def put(self, keys: Any, rows: Bytes, durable: bool) -> int:
        if durable:
            raise NotImplementedError("LMCache never fsyncs")
        outstanding, done = threading.Semaphore(0), len(keys)
        blocks = [self._cpu.allocate(self._shape, torch.bfloat16, self._format) for _ in keys]
        for block, row in zip(blocks, rows, strict=True):
            np.copyto(_view(block), row)
        self._disk.batched_submit_put_task(keys, blocks, on_complete_callback=lambda _: outstanding.release())
        for _ in range(done):
            if not outstanding.acquire(timeout=WAIT_S):
                raise TimeoutError(f"not stored after {WAIT_S} s")
        for block in blocks:
            block.ref_count_down()
        return done

    def get(self, keys: Any, rows: Bytes) -> list[bool]:
        if self._memory:
            blocks = [self._cpu.get_blocking(key) for key in keys]
            if any(block is None for block in blocks):
                blocks = self._disk.batched_get_blocking(keys)
                kept = [(key, block) for key, block in zip(keys, blocks, strict=True) if block is not None]
                self._cpu.batched_submit_put_task([key for key, _ in kept], [block for _, block in kept])
        else:
            blocks = self._disk.batched_get_blocking(keys)
        for block, row in zip(blocks, rows, strict=True):
            if block is not None:
                np.copyto(row, _view(block))
                block.ref_count_down()
        return [block is not None for block in blocks]

    def forget(self) -> None:
        self._cpu.clear()

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()
            self._cpu.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._disk = None

    def about(self) -> dict[str, Any]:
        return {"name": f"LMCache {metadata.version('lmcache')} local disk", "threads": THREADS, "direct": True}


def main(argv: Sequence[str]) -> int:
    systems = {"fs_native": FsNative, "local_disk": LocalDisk}
    if len(argv) != 2 or argv[1] not in systems:
        sys.stderr.write(f"usage: {Path(argv[0]).name} {'|'.join(systems)}\n")
        return 2
    peer_protocol.serve(systems[argv[1]]())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
