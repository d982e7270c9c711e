"""Rows of `bench engines` about promotions: from a tier into vLLM's primary tier, without a model beside it.

Contract
- vLLM's own tiering manager and shared region, driven as its scheduler does: it asks for every chunk in each step, a
  millisecond apart, until all of them are in the primary tier. Perdure and a tier of vLLM's own (`fs`, or `obj` through
  NIXL's plugin into an S3 server on loopback) are two tiers of one manager; each context is stored in both, and a
  restore names the tier. The arms take turns.
- Time runs from the first question to the last chunk's arrival. Perdure verifies every chunk; vLLM's tiers keep no
  checksums. What arrived is compared after the clock was stopped.
- "from memory" and "from the disk" as in `engines_tier`.
- The scheduler's time is what our tier's methods took of it, summed over a step of a restore from it.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import Locality, LookupResult, ReqContext, ScheduleEndContext, TierFilter, TierMatcher
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from perdure.benchmarks.harness import Measured, Row, interleave, limit_row, rate_row
from perdure.benchmarks.target import WrongResult
from perdure.engines.vllm.tier import PerdureTier
from perdure.limits import MIB

CHUNK_BYTES = 5 * MIB + 640 * 1024  # of SmolLM2 in float32, 128 tokens
CHUNKS = 37  # 4,800 tokens
STEP_S_MAX = 0.0002
OURS, THEIRS = Locality.REMOTE, Locality.LOCAL
_STEP_PAUSE_S = 0.001  # as vLLM's engine between steps without work
_GIVE_UP_S = 60.0
_NO_STEP = ScheduleEndContext((), ())
_numbers = itertools.count()


class TimedTier(PerdureTier):
    """The tier, and what it takes of the scheduler's time."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.spent_s = 0.0
        self.steps: list[float] = []

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        started = time.perf_counter()
        found = super().lookup(key, req_context)
        self.spent_s += time.perf_counter() - started
        return found

    def submit_load(self, job_metadata: Any) -> None:
        started = time.perf_counter()
        super().submit_load(job_metadata)
        self.spent_s += time.perf_counter() - started

    def get_finished_jobs(self) -> Any:
        started = time.perf_counter()
        found = super().get_finished_jobs()
        self.spent_s += time.perf_counter() - started
        return found

    def on_schedule_end(self, context: Any) -> None:
        started = time.perf_counter()
        super().on_schedule_end(context)
        self.steps.append(self.spent_s + time.perf_counter() - started)
        self.spent_s = 0.0


timed = TimedTier


class Promotions:
    """vLLM's manager with both tiers, and contexts that were stored in both. theirs: the settings of vLLM's tier."""

    def __init__(self, url: str, theirs: dict[str, Any], contexts: int):
        tiers = [
            {
                "type": "timed", "module_path": __name__, "url": url, "weights": "bench:1", "after_reset": "same",
                "locality": OURS.value,
            },
            theirs | {"locality": THEIRS.value},
        ]  # fmt: skip
        self._spec = TieringOffloadingSpec(
            OffloadingConfig(
                groups=(OffloadingGroupConfig(128, ("layer",), 0),),
                worker_kv_bytes_per_block=CHUNK_BYTES,
                enable_kv_cache_events=False,
                extra_config={"cpu_bytes_to_use": (CHUNKS + 1) * CHUNK_BYTES, "secondary_tiers": tiers},
                engine_id=f"bench-{time.monotonic_ns()}",
                model=OffloadingModelConfig("bench", "float32"),
                cache=OffloadingCacheConfig(128, 1),
                parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
                kv_cache_layout="LBHNC",
            )
        )
        self._manager = self._spec.get_manager()
        self.tier: TimedTier = self._manager.secondary_tiers[0]
        self._pattern = np.random.default_rng(0).integers(0, 256, CHUNK_BYTES, np.uint8)
        rng = np.random.default_rng(1)
        self._contexts = [[rng.bytes(32) + bytes(4) for _ in range(CHUNKS)] for _ in range(contexts)]
        for keys in self._contexts:
            self._store(keys)
        self._turns = dict.fromkeys((OURS, THEIRS), 0)

    def _rows(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._spec._scheduler_mmap.mmap_obj, np.uint8).reshape(-1, CHUNK_BYTES)  # noqa: SLF001

    def _content(self, key: bytes) -> NDArray[np.uint8]:
        return np.roll(self._pattern, int.from_bytes(key[:3], "big"))

    def _request(self, tier: Locality | None = None) -> ReqContext:
        chosen = TierFilter.ALL if tier is None else TierFilter((TierMatcher(locality=tier),))
        request = ReqContext(f"bench-{next(_numbers)}", load_tier_filter=chosen)
        self._manager.on_new_request(request)
        return request

    def _store(self, keys: list[bytes]) -> None:
        request = self._request()
        made = self._manager.prepare_store(keys, request)
        rows = self._rows()
        for key, place in zip(made.keys_to_store, made.store_spec.chunk_ids, strict=True):
            rows[int(place)] = self._content(key)
        del rows
        self._manager.complete_store(made.keys_to_store, request)
        give_up = time.monotonic() + _GIVE_UP_S
        while self._manager.has_pending_work():
            self._manager.on_schedule_end(_NO_STEP)
            time.sleep(_STEP_PAUSE_S)
            if time.monotonic() > give_up:
                raise WrongResult("the tiers did not finish storing")
        self._manager.on_request_finished(request)
        self._manager.reset_cache()

    def _promote(self, tier: Locality) -> Measured:
        self._manager.reset_cache()
        keys = self._contexts[self._turns[tier] % len(self._contexts)]
        self._turns[tier] += 1
        request = self._request(tier)
        started, cpu = time.perf_counter(), time.process_time()
        self.tier.spent_s, known = 0.0, len(self.tier.steps)
        while True:
            found = {self._manager.lookup(key, request) for key in keys}
            self._manager.on_schedule_end(_NO_STEP)
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & found:
                break
            time.sleep(_STEP_PAUSE_S)
        measured = Measured(CHUNKS * CHUNK_BYTES, time.perf_counter() - started, time.process_time() - cpu)
        if tier is THEIRS:
            del self.tier.steps[known:]
        if found != {LookupResult.HIT}:
            raise WrongResult(f"from {tier.value}: not every chunk was found")
        spec = self._manager.prepare_load(keys, request)
        rows = self._rows()
        for key, place in zip(keys, spec.chunk_ids, strict=True):
            if not np.array_equal(rows[int(place)], self._content(key)):
                raise WrongResult(f"from {tier.value}: wrong bytes")
        del rows
        self._manager.complete_load(keys, request)
        self._manager.on_request_finished(request)
        return measured

    def ours(self) -> Measured:
        return self._promote(OURS)

    def theirs(self) -> Measured:
        return self._promote(THEIRS)

    def __enter__(self) -> Promotions:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.shutdown()


def rows_of(url: str, theirs: dict[str, Any], what: str, contexts: int, repetitions: int) -> list[Row]:
    """Rows of one case: `contexts` are restored in turn. theirs: the settings of vLLM's tier."""
    with Promotions(url, theirs, contexts) as both:
        for _ in range(contexts):  # once for nothing
            both.ours(), both.theirs()
        both.tier.steps.clear()
        ours, other = interleave([both.ours, both.theirs], repetitions)
        steps = sorted(both.tier.steps)
    name = f"vLLM tier, {CHUNKS} chunks of {CHUNK_BYTES / MIB:.1f} MiB {what}"
    p99 = steps[min(len(steps) - 1, len(steps) * 99 // 100)]
    return [
        rate_row(
            f"{name}: into the primary tier",
            ours,
            other,
            f"vLLM's {theirs['type']} tier",
            target=1.0,
            note="ours is verified, theirs is not",
        ),
        limit_row(
            f"{name}: scheduler's time per step, p99",
            "s",
            [p99],
            STEP_S_MAX,
            note=f"wall time of {len(steps)} steps, median {steps[len(steps) // 2] * 1e6:.0f} us",
        ),
    ]
