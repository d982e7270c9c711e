"""What the connector counts, as vLLM's log and `/metrics` show it.

Counters never fall; a saving is never negative: a load that took longer than computing would have saved nothing.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS: Final = {
    "lookups": "Requests whose prefix the service was asked for",
    "lookups_late": "Requests that were scheduled before the service had answered",
    "hits": "Requests of which tokens were loaded",
    "hit_tokens_memory": "Tokens loaded that the service had in memory",
    "hit_tokens_storage": "Tokens loaded that the service had to bring to memory first",
    "loads": "Loads that went well",
    "loaded_bytes": "Bytes copied into the engine's KV cache",
    "load_seconds": "Time of the loads that went well",
    "failed_loads": "Loads of which blocks did not come; the engine computed them",
    "failed_blocks": "Blocks that did not come",
    "saved_blocks": "Blocks that were stored",
    "saved_bytes": "Bytes that were stored",
    "known_blocks": "Blocks that need not be stored, because they were",
    "dropped_blocks": "Blocks that were not stored: overwritten before, no room, or the service is away",
    "ttft_saved_seconds": "Time to the first token that hits have saved, by the engine's measured speed of prefill",
    "prompt_logprobs": "Requests for prompt log-probabilities, which are computed in full",
    "offers_declined": "Requests that were offered tokens and found no room for them",
    "shadow_hits": "Requests that would have been hits (mode shadow)",
    "shadow_hit_tokens": "Tokens that would have been loaded (mode shadow)",
    "shadow_saved_seconds": "Time to the first token that they would have saved, without the time of loading",
    "canaries": "Blocks that were computed although they are stored, and compared",
    "canaries_tripped": "Of them, those that differed",
    "errors": "Errors that turned the connector off for a while",
}
_SAVED_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_SAVED = "saved_seconds_per_request"


class Tally:
    """Amounts by name, added up by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amounts: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._amounts[name] = self._amounts.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """What was added since the last time."""
        with self._lock:
            amounts, self._amounts = self._amounts, {}
        return amounts


class Stats(KVConnectorStats):  # type: ignore[misc]
    """data: counter -> amount since the last one, and a list of seconds saved, one for each hit."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> Stats:
        for name, amount in other.data.items():
            known = self.data.get(name)
            self.data[name] = amount if known is None else known + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"perdure {name}": round(self.data[name], 3) for name in COUNTERS if self.data.get(name)}


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._per_engine(
                metric_types[Counter](name=f"vllm:perdure_{name}", documentation=text, labelnames=labelnames)
            )
            for name, text in COUNTERS.items()
        }
        self._saved = self._per_engine(
            metric_types[Histogram](
                name="vllm:perdure_request_ttft_saved_seconds", documentation=COUNTERS["ttft_saved_seconds"],
                buckets=_SAVED_BUCKETS_S, labelnames=labelnames,
            )
        )  # fmt: skip

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            if name == _SAVED:
                for seconds in amount:
                    self._saved[engine_idx].observe(seconds)
            elif name in self._counters:
                self._counters[name][engine_idx].inc(amount)


def stats_of(counters: dict[str, float], saved_s: list[float]) -> Stats | None:
    data: dict[str, Any] = {name: amount for name, amount in counters.items() if amount}
    if saved_s:
        data[_SAVED] = saved_s
    return Stats(data=data) if data else None
