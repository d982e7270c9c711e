"""vLLM's tiered offloading on a CPU: `TieringOffloadingSpec` with copies by memcpy instead of a GPU's streams.

    "spec_name": "CpuTieringSpec", "spec_module_path": "perdure.engines.vllm.cpu_spec"

Contract
- Everything but the copies between the KV cache and the primary tier is vLLM's own, so that what is tested here on a
  CPU is the tier as it runs on a GPU. The stock spec refuses a CPU in `get_worker`.
- A copy is done when `submit_store` or `submit_load` returns: nothing is in flight between two steps.
- Not for production: on a CPU the primary tier is a second copy of memory that is as fast as the first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from perdure.errors import InvalidArgument


class MemcpyWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM has no types here
    """One worker's copies between its KV cache and its part of the shared region. Owns the region."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int):
        self._region, self._blocks_per_chunk = region, blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._cache: list[NDArray[np.int8]] = []  # (blocks, page)
        self._shared: list[NDArray[np.int8]] = []  # (chunks, blocks per chunk, page)
        for one in kv_caches.tensors:
            page = one.page_size_bytes
            self._cache.append(one.tensor.view(torch.int8).view(-1, page).numpy())
            chunks = region.create_next_worker_view(page * blocks_per_chunk)
            self._shared.append(chunks.unflatten(1, (blocks_per_chunk, page)).numpy())
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._copy(job_id, src_spec, dst_spec.block_ids, store=True)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._copy(job_id, dst_spec, src_spec.block_ids, store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for."""

    def shutdown(self) -> None:
        self._cache.clear()
        self._shared.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, cache_spec: GPULoadStoreSpec, chunk_ids: Sequence[int], *, store: bool) -> None:
        started, moved = time.monotonic(), 0
        blocks, chunks = np.asarray(cache_spec.block_ids), np.asarray(chunk_ids)
        block_at = chunk_at = 0
        for refs, count, first in zip(self._groups, cache_spec.group_sizes, cache_spec.block_indices, strict=True):
            if not count:
                continue
            # a group's blocks may begin and end inside a chunk
            places = np.arange(count) + first % self._blocks_per_chunk
            used = int(places[-1]) // self._blocks_per_chunk + 1
            mine = blocks[block_at : block_at + count]
            rows = chunks[chunk_at : chunk_at + used][places // self._blocks_per_chunk]
            columns = places % self._blocks_per_chunk
            pairs = list(zip(mine.tolist(), rows.tolist(), columns.tolist(), strict=True))
            for ref in refs:
                cache, shared, nbytes = self._cache[ref.tensor_idx], self._shared[ref.tensor_idx], ref.page_size_bytes
                for block, row, column in pairs:  # page by page: fancy indexing would copy everything twice
                    here, there = cache[block, :nbytes], shared[row, column, :nbytes]
                    np.copyto(*((there, here) if store else (here, there)))
                moved += count * nbytes
            block_at, chunk_at = block_at + count, chunk_at + used
        self._finished.append(TransferResult(job_id, True, moved, time.monotonic() - started))


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering spec, its worker replaced."""

    _worker: Any

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        if self.config.canonical_layout:
            raise InvalidArgument("canonical_layout: not copied by CpuTieringSpec; leave it out on a CPU")
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemcpyWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
