"""PerdureConnector: what vLLM calls, handed on to the scheduler's or the worker's half.

Contract
- Nothing raises into vLLM after the construction: an error turns this half off for a while, and vLLM computes.
- A load that vLLM waits for is reported in any case, also while off.
- Configurations that cannot be kept exactly are refused at construction (`identity.check_supported`).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from perdure.engines.vllm import identity
from perdure.engines.vllm.scheduler import Scheduler
from perdure.engines.vllm.settings import Settings, settings_of
from perdure.engines.vllm.stats import PromMetrics, Stats, stats_of
from perdure.engines.vllm.telling import Teller, teller_of
from perdure.engines.vllm.transfers import Outcome, Shard
from perdure.engines.vllm.worker import Worker

_LOG = logging.getLogger("perdure.vllm")
T = TypeVar("T")


class Guard:
    """Calls that must not fail. After an error `open` is False for a while, longer each time."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._wait_s = settings.retry_s_min
        self._closed_until = 0.0
        self._errors = 0

    @property
    def open(self) -> bool:
        return time.monotonic() >= self._closed_until

    def take_errors(self) -> int:
        """How many there were since the last time."""
        errors, self._errors = self._errors, 0
        return errors

    def call(self, default: T, function: Callable[..., T], *arguments: Any, always: bool = False) -> T:
        """What the function answers, or `default`. always: also while off."""
        if not always and not self.open:
            return default
        try:
            return function(*arguments)
        except Exception:  # noqa: BLE001 - whatever it is, vLLM goes on without the cache
            self._errors += 1
            self._closed_until = time.monotonic() + self._wait_s
            _LOG.exception("perdure: the connector is off for %.0f s", self._wait_s)
            self._wait_s = min(2 * self._wait_s, self._settings.retry_s_max)
            return default


class PerdureConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        identity.check_version()
        transfer = vllm_config.kv_transfer_config
        settings = settings_of(transfer.kv_connector_extra_config)
        identity.check_supported(vllm_config, kv_cache_config)
        self._settings = settings
        self._guard = Guard(settings)
        self._loads = bool(transfer.is_kv_consumer) and settings.mode != "off"
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._teller: Teller | None = None
        if role == KVConnectorRole.SCHEDULER:
            from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

            _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
            self._scheduler = Scheduler(settings, vllm_config, kv_cache_config, hash_tokens=hash_tokens)
            self._scheduler.stores = bool(transfer.is_kv_producer)
            self._teller = teller_of(settings, vllm_config, self._scheduler.shapes, self._scheduler.hashes_of)
            if self._teller is not None:
                self._scheduler.epoch_ended = self._teller.new_epoch
            if transfer.kv_load_failure_policy != "recompute":
                _LOG.warning(
                    "perdure: kv_load_failure_policy is %r: a block that is lost while it is loaded ends its request "
                    'with an error; set "kv_load_failure_policy": "recompute"', transfer.kv_load_failure_policy,
                )  # fmt: skip
        else:
            self._worker = Worker(settings, vllm_config, kv_cache_config, _rank(vllm_config.parallel_config))

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # --- scheduler
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.bind_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        assert self._scheduler is not None
        if self._loads:
            self._guard.call(None, self._scheduler.on_new_request, request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        if not self._loads:
            return 0, False
        nothing: tuple[int | None, bool] = (0, False)
        return self._guard.call(nothing, self._scheduler.matched, request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        planned = self._guard.call(
            False, self._planned, request, blocks, num_external_tokens, always=bool(num_external_tokens)
        )
        if not planned and num_external_tokens:
            self._scheduler.fail_load(request, blocks)

    def _planned(self, request: Any, blocks: Any, tokens: int) -> bool:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks, tokens)
        return True

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._scheduler is not None
        plan = self._guard.call(None, self._scheduler.plan, scheduler_output)
        return plan if plan is not None else self._scheduler.bare_plan()

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        self._guard.call(
            None, self._scheduler.told, connector_output.finished_recving or (), connector_output.failed_recving or (),
            connector_output.invalid_block_ids or (), connector_output.kv_connector_worker_meta, always=True,
        )  # fmt: skip

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._guard.call(None, self._tell, request)
        self._guard.call(None, self._scheduler.finished, request, block_ids, always=True)
        return False, None

    def _tell(self, request: Any) -> None:
        if self._teller is not None and self._scheduler is not None:
            self._teller.ended(request, *self._scheduler.stored_in(request))

    def take_events(self) -> Iterable[Any]:
        return () if self._teller is None else self._guard.call([], self._teller.take)

    def reset_cache(self) -> bool | None:
        assert self._scheduler is not None
        self._guard.call(None, self._scheduler.new_epoch, always=True)
        return True

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        assert self._scheduler is not None
        self._guard.call(None, self._scheduler.handshake, metadata, always=True)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        assert self._scheduler is not None
        unknown = {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens} if num_external_tokens else {}
        if not num_external_tokens:
            return unknown
        return self._guard.call(unknown, self._scheduler.sources, request, num_external_tokens)

    # --- both
    def get_kv_connector_stats(self) -> Stats | None:
        counters: dict[str, float] = {}
        saved_s: list[float] = []
        if self._worker is not None:
            counters = self._worker.tally.take()
        if self._scheduler is not None:
            counters, saved_s = self._scheduler.tally.take(), self._scheduler.saved_s
            self._scheduler.saved_s = []
        counters["errors"] = self._guard.take_errors()
        return stats_of(counters, saved_s)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats | None:
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- worker
    def get_handshake_metadata(self) -> Shard | None:
        """None as a child of MultiConnector, which hands one child's on in the name of all: `Outcome` tells it then."""
        assert self._worker is not None
        if has_kv_transfer_group() and get_kv_transfer_group() is not self:
            return None
        return self._guard.call(None, self._worker.shard)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        context = self._vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in kv_caches if name in context]
        self._guard.call(None, self._worker.register, kv_caches, _backend(layers), _scales(layers))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert self._worker is not None
        self._guard.call(None, self._worker.before_step, kv_connector_metadata, always=True)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._guard.call(None, self._worker.start_loads, self._get_connector_metadata(), always=True)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._guard.call(None, self._worker.after_step, self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        finished, failed = self._worker.results()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.bad_blocks()

    def build_connector_worker_meta(self) -> Outcome | None:
        assert self._worker is not None
        return self._worker.outcome()

    def shutdown(self) -> None:
        for half in (self._teller, self._scheduler, self._worker):
            if half is not None:
                self._guard.call(None, half.close, always=True)


def _rank(parallel: Any) -> tuple[int, int]:
    """(pipeline rank, tensor rank) of this worker."""
    tp = int(parallel.tensor_parallel_size)
    return int(parallel.rank) // tp % int(parallel.pipeline_parallel_size), int(parallel.rank) % tp


def _backend(layers: Iterable[Any]) -> str:
    """Names of the attention backends of these layers."""
    return "+".join(sorted({str(layer.get_attn_backend().get_name()) for layer in layers}))


def _scales(layers: Iterable[Any]) -> str:
    """Digest of the layers' static KV scales."""
    values = [[float(getattr(one, name, 1.0)) for name in ("_k_scale_float", "_v_scale_float")] for one in layers]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:32]


# MultiConnector finds the class of its children's statistics by this name alone.
KVConnectorFactory.register_connector("PerdureConnector", "perdure.engines.vllm", "PerdureConnector")
