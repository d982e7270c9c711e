"""Perdure as a secondary tier of vLLM's own offloading: GPU <-> CPU by vLLM's kernels, CPU <-> service by this.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 34359738368, "secondary_tiers": [{
            "type": "perdure", "module_path": "perdure.engines.vllm.tier",
            "url": "unix:///run/perdure.sock", "weights": "revision:0f3c..."}]}}'

Contract
- All of it runs in the scheduler's process, and its thread waits for nothing but in `drain_jobs`, which is vLLM's call
  for it, and `shutdown`: questions and transfers have threads of their own.
- What is corrupt, late, denied or gone is a failed key, and exactly those that arrived verified are `successful_keys`.
  Without a service everything is a miss; requests go on.
- `drain_jobs` is how a tier learns of `reset_cache` (sleep, pause and weight updates alike): it seals the weights'
  epoch, cancels what has not begun, and nothing of before is found afterwards (`tier_identity.Weights`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from perdure.engines.vllm.tier_engine import check, engine_config
from perdure.engines.vllm.tier_identity import TierSettings, draft_of, layouts_of
from perdure.engines.vllm.tier_jobs import Done, Jobs, Primary, Service
from perdure.engines.vllm.tier_lookup import Lookups

BLOCKS = "vllm:kv_offload_perdure_blocks"
UP = "vllm:kv_offload_perdure_up"
EPOCH = "vllm:kv_offload_perdure_epoch"


class PerdureTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM has no types here
    """Made by vLLM; the keyword arguments beyond its own are those of `tier_identity.TierSettings`."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None,
        locality: str | None = None, enable_kv_events: bool = False, **options: Any,
    ):  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = TierSettings.of(options)
        self.locality = None if locality is None else Locality(locality)
        config = offloading_spec.config
        engine = engine_config(config.engine_id)
        if engine is not None:
            check(engine, settings.adapters)
        layouts = layouts_of(config, self.block_size_bytes, engine)
        self._region_fd = _region_fd(offloading_spec) if settings.share_region else None
        self._primary = Primary(primary_kv_view, self._region_fd)
        try:
            self._service = Service(settings, config, layouts, self._primary, draft_of(engine))
            self._lookups = Lookups(
                self._service.space, lookup_s=settings.lookup_s, hold_s=settings.hold_s, fetch_s=settings.load_s
            )
        except BaseException:
            self._primary.release()
            self._close_region()
            raise
        self._jobs = Jobs(self._service, self._primary)
        wanted = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if wanted else None
        self._counts: dict[str, int] = {}

    # --- lookups
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()
        for request in context.new_req_ids:  # it has what it was going to get
            self._lookups.forget(request)

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.forget(req_context.req_id)

    # --- transfers
    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        self._jobs.load(job_metadata.job_id, keys, job_metadata.chunk_ids.tolist(), self._lookups.take(keys))

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._jobs.store(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._lookups.collect()
        return [self._result(done) for done in self._jobs.finished()]

    def _result(self, done: Done) -> JobResult:
        for name, count in done.counts.items():
            self._counts[name] = self._counts.get(name, 0) + count
        failed = [key for key in done.keys if key not in done.ok]
        if done.is_load:
            self._lookups.loaded(done.keys, frozenset(failed))
        else:
            self._lookups.stored(done.ok)
            if self._events is not None and done.ok:
                self._events.append(
                    OffloadingEvent(sorted(done.ok), self.medium, removed=False, locality=self.locality)
                )
        successful = tuple(key for key in done.keys if key in done.ok) if failed and done.is_load else ()
        return JobResult(done.job_id, not failed, successful or None, done.seconds, done.nbytes)

    def drain_jobs(self) -> None:
        """Every job has ended when this returns. The weights' epoch ends with them."""
        self._service.seal()
        self._jobs.drain()
        self._lookups.reset()

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events:
            yield from self._events
            self._events.clear()

    # --- figures
    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {
            BLOCKS: OffloadingCounterMetadata(
                documentation="Chunks stored in, held by and loaded from Perdure, by what was done and how it went.",
                labelnames=("direction", "outcome"),
            ),
            UP: OffloadingGaugeMetadata(documentation="Whether the Perdure service is there."),
            EPOCH: OffloadingGaugeMetadata(documentation="How often the weights' epoch was sealed by a reset."),
        }

    def get_stats(self) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

        stats = OffloadingConnectorStats()
        for name, count in self._counts.items():
            direction, _, outcome = name.partition(":")
            stats.increase_counter(BLOCKS, count, (direction, outcome))
        self._counts.clear()
        for source, count in self._lookups.found().items():
            stats.increase_counter(BLOCKS, count, ("held", source))
        stats.set_gauge(UP, int(self._service.up()))
        stats.set_gauge(EPOCH, self._service.epoch)
        return stats

    # --- the end
    def shutdown(self) -> None:
        """Nothing of ours touches vLLM's memory after this."""
        self._service.close()
        self._jobs.stop()
        self._lookups.stop()
        self._primary.release()
        self._close_region()

    def _close_region(self) -> None:
        if self._region_fd is not None:
            os.close(self._region_fd)
            self._region_fd = None


perdure = PerdureTier
"""As `type` names it: vLLM looks the type up in the module."""


def _region_fd(spec: Any) -> int | None:
    """A descriptor of our own on the primary tier's file, None where there is none."""
    region = getattr(spec, "_scheduler_mmap", None)
    with suppress(OSError):
        if region is not None and region.fd is not None:
            return os.dup(region.fd)
        return os.open(f"/dev/shm/vllm_offload_{spec.config.engine_id}.mmap", os.O_RDWR | os.O_CLOEXEC)
    return None
