"""What the service counts, in Prometheus' terms: `perdure_` names, base units, `_total` for counters.

Contract
- `call`, `blocks` and `lookups` are called by the server as work completes: thread-safe, about a microsecond each,
  never raising. What was not finished is not counted.
- Gauges are collected from `Server.status()` at scrape time, so they cost nothing in between. If the status cannot be
  had, the scrape goes on without them and `perdure_status_up` is 0.
- At most `limits.metrics_tenants_entries_max` tenants have a label value of their own; later ones share "other".
- Never: keys or contents of blocks.

prometheus_client is imported when a Metrics is made, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from perdure import limits

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram
    from prometheus_client.metrics_core import Metric

OTHER: Final = "other"
_CALL_SECONDS: Final = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip

GAUGES: Final = {  # name -> (path in Server.status(), meaning)
    "perdure_memory_budget_bytes": ("memory.budget_bytes", "DRAM this node may use for blocks"),
    "perdure_memory_mapped_bytes": ("memory.mapped_bytes", "DRAM in chunks of the pool"),
    "perdure_memory_used_bytes": ("memory.bytes", "DRAM in slots that hold a block"),
    "perdure_memory_stranded_bytes": ("memory.stranded_bytes", "DRAM that departed or silent clients still hold"),
    "perdure_memory_staging_bytes": ("memory.staging_bytes", "DRAM of the clients' staging areas"),
    "perdure_memory_pinned_slots": ("memory.pinned", "slots that a read, write or view is using"),
    "perdure_views": ("memory.views", "views that clients hold"),
    "perdure_queue_calls": ("queue", "calls that wait for a thread"),
    "perdure_waiting_calls": ("waiting", "calls that wait for what another computes"),
    "perdure_capacity_bytes": ("store.capacity_bytes", "what the segments may occupy"),
    "perdure_used_bytes": ("store.used_bytes", "what the segments occupy"),
    "perdure_stored_blocks": ("store.blocks", "blocks in the catalog"),
    "perdure_pins": ("store.pins", "pins in force"),
    "perdure_presence_keys": ("store.presence.keys", "keys in the presence index"),
    "perdure_presence_bytes": ("store.presence.bytes", "memory of the presence index"),
    "perdure_healthy": ("store.healthy", "0 while many blocks fail to verify: look at the disk"),
    "perdure_roots_out": ("store.roots.out", "roots that are away (not mounted), or fail and get no new segments"),
    "perdure_single_copies": ("store.roots.single_copies", "retained segments without two copies at hand"),
    "perdure_expiry_paused": ("store.expiry_paused", "1 while the wall clock cannot be trusted"),
    "perdure_clock_step_seconds": ("store.clock_step_s", "how far the wall clock is from where it should be"),
    "perdure_cold_bytes": ("store.cold.bytes", "what segments in the cold tier take"),
    "perdure_cold_segments": ("store.cold.segments", "segments in the cold tier"),
    "perdure_cold_capacity_bytes": ("store.cold.capacity_bytes", "what objects of the cold tier may take"),
    "perdure_cold_answers": ("store.cold.answers", "0 while the object store fails"),
    "perdure_index_rebuilding": ("store.index_rebuilding", "1 while the block index is loaded anew"),
}  # fmt: skip
COUNTERS: Final = {  # the same, for what only grows
    "perdure_memory_evictions": ("memory.evictions", "blocks that left the DRAM tier for others"),
    "perdure_disk_written_bytes": ("store.counters.bytes_on_disk_written", "bytes written to the device"),
    "perdure_evicted_blocks": ("store.reclaim.blocks_evicted", "blocks that reclaim dropped to make room"),
    "perdure_copied_blocks": ("store.reclaim.blocks_copied", "blocks that reclaim copied forward"),
    "perdure_copied_bytes": ("store.reclaim.bytes_copied", "bytes that reclaim copied forward"),
    "perdure_dropped_segments": ("store.reclaim.segments_dropped", "segments that reclaim removed"),
    "perdure_cold_demoted_segments": ("store.cold.segments_demoted", "segments moved to the object store"),
    "perdure_cold_demoted_bytes": ("store.cold.bytes_demoted", "bytes uploaded for it"),
    "perdure_cold_found_blocks": ("store.counters.blocks_found_cold", "blocks delivered from the object store"),
    "perdure_cold_reads": ("store.cold.reads", "ranged reads of the object store"),
    "perdure_cold_read_bytes": ("store.cold.bytes_read", "bytes read from the object store"),
    "perdure_cold_errors": ("store.cold.errors", "calls that the object store did not answer as it should"),
    "perdure_cold_promoted_blocks": ("store.cold.blocks_promoted", "blocks that came back to the disk"),
    "perdure_catalog_errors": ("store.counters.catalog_errors", "catalog operations that failed"),
    "perdure_background_errors": ("store.counters.keeper_errors", "background work that failed and is tried again"),
    "perdure_file_system_full": ("store.counters.file_system_full", "writes that met a full file system"),
    "perdure_recovered_segments": ("store.counters.segments_recovered", "segments left open by a killed process"),
    "perdure_repaired_blocks": ("store.counters.mirror_records_repaired", "bad records made good from another root"),
    "perdure_mirrored_segments": ("store.counters.mirror_copies_made", "second copies made in the background"),
    "perdure_away_blocks": ("store.counters.blocks_away", "blocks asked for in a root that was away"),
    "perdure_quarantined_blocks": (
        "store.counters.quarantine_withheld", "corrupt blocks that were kept because too many failed at once"
    ),
}  # fmt: skip


class Metrics:
    """All metrics of one service, in a registry of its own."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

        self.registry = registry = CollectorRegistry()
        self._status: Callable[[], Mapping[str, Any]] | None = None
        self._tenants: dict[str, str] = {}
        self._children: dict[tuple[str, ...], Any] = {}

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"perdure_{name}", meaning, labels, registry=registry)

        self._calls: Histogram = Histogram(
            "perdure_call_seconds", "time of calls, at completion", ("verb", "outcome"),
            buckets=_CALL_SECONDS, registry=registry,
        )  # fmt: skip
        self._hits = counter("hit_blocks", "blocks that were asked for and delivered", "tenant", "tier")
        self._misses = counter("missed_blocks", "blocks that were asked for and not delivered", "tenant", "reason")
        self._delivered = counter("delivered_bytes", "bytes of blocks delivered", "tenant", "tier")
        self._written = counter("written_blocks", "blocks given to be stored, by what became of them",
                                "tenant", "status")  # fmt: skip
        self._stored = counter("stored_bytes", "bytes of blocks stored", "tenant")
        self._asked = counter("lookup_blocks", "blocks that look-ups asked about", "tenant")
        self._found = counter("lookup_found_blocks", "leading blocks that look-ups found", "tenant")
        self._ready = Gauge("perdure_ready", "1 while a block can be put and got", registry=registry)
        self._probe = Gauge("perdure_probe_seconds", "time of the last put and get", registry=registry)
        self._build = Info("perdure_build", "version, and boot id of the service", registry=registry)
        ProcessCollector(registry=registry)
        registry.register(_FromStatus(self))

    # --- called by the server
    def call(self, verb: str, outcome: str, seconds: float) -> None:
        """A call ended. outcome: ok, error or late."""
        child = self._children.get(("call", verb, outcome))
        if child is None:
            child = self._keep(("call", verb, outcome), self._calls.labels(verb, outcome))
        child.observe(seconds)

    def blocks(self, verb: str, tenant: str, tier: str, status: str, blocks: int, nbytes: int) -> None:
        """What became of blocks of one call. verb: read, view or write; tier: memory, disk or none."""
        if verb == "write":
            self._count("written", self._written, blocks, tenant, status)
            if status == "stored":
                self._count("stored", self._stored, nbytes, tenant)
        elif status == "found":
            self._count("hit", self._hits, blocks, tenant, tier)
            self._count("delivered", self._delivered, nbytes, tenant, tier)
        else:
            self._count("miss", self._misses, blocks, tenant, status)

    def lookups(self, tenant: str, asked: int, found: int) -> None:
        """A look-up was answered."""
        self._count("asked", self._asked, asked, tenant)
        self._count("found", self._found, found, tenant)

    # --- called by the process
    def watch(self, status: Callable[[], Mapping[str, Any]] | None) -> None:
        """Where the gauges come from at scrape time; None: nowhere, the server is going away."""
        self._status = status

    def probed(self, ready: bool, seconds: float) -> None:
        self._ready.set(1 if ready else 0)
        self._probe.set(seconds)

    def describe_build(self, version: str, boot: str) -> None:
        self._build.info({"version": version, "boot": boot})

    def render(self) -> tuple[bytes, str]:
        """The scrape, and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def current_status(self) -> Mapping[str, Any] | None:
        source = self._status
        try:
            return None if source is None else source()
        except Exception:  # noqa: BLE001 (a scrape during a shutdown, or of a sick store, must not fail as a whole)
            return None

    # --- inside
    def _count(self, what: str, counter: Counter, amount: int, tenant: str, *labels: str) -> None:
        child = self._children.get((what, tenant, *labels))
        if child is None:
            name = self._label(tenant)
            child = counter.labels(name, *labels)
            if name == tenant:  # tenants under "other" are not remembered: there is no bound on them
                self._keep((what, tenant, *labels), child)
        child.inc(amount)

    def _keep(self, key: tuple[str, ...], child: Any) -> Any:
        return self._children.setdefault(key, child)

    def _label(self, tenant: str) -> str:
        known = self._tenants.get(tenant)
        if known is not None:
            return known
        if len(self._tenants) >= limits.metrics_tenants_entries_max:  # two threads at once may exceed it by one
            return OTHER
        return self._tenants.setdefault(tenant, tenant)


class _FromStatus:
    """A prometheus collector of what the server's status says."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        return iter(())  # or the registry would collect once to learn the names

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._metrics.current_status()
        yield GaugeMetricFamily("perdure_status_up", "1 if the gauges could be collected", value=float(bool(status)))
        if not status:
            return
        clients = status.get("clients")
        if isinstance(clients, list):
            yield GaugeMetricFamily("perdure_clients", "clients connected", value=float(len(clients)))
        for name, (path, meaning) in GAUGES.items():
            value = number_at(status, path)
            if value is not None:
                yield GaugeMetricFamily(name, meaning, value=value)
        for name, (path, meaning) in COUNTERS.items():
            value = number_at(status, path)
            if value is None and path.startswith("store.counters."):
                value = 0.0  # the store leaves out what never happened
            if value is not None:
                yield CounterMetricFamily(name, meaning, value=value)
        yield from _by_label(status, "store.tenants", "tenant", "stored_bytes", "perdure_tenant_bytes",
                             "what a tenant's blocks take on the disk")  # fmt: skip


def _by_label(
    status: Mapping[str, Any], path: str, label: str, field: str, name: str, meaning: str
) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    entries = at(status, path)
    if not isinstance(entries, Mapping):
        return
    family = GaugeMetricFamily(name, meaning, labels=[label])
    rest = 0.0
    for number, (key, entry) in enumerate(entries.items()):
        value = float(entry.get(field, 0))
        if number < limits.metrics_tenants_entries_max:
            family.add_metric([str(key)], value)
        else:
            rest += value
    if rest:
        family.add_metric([OTHER], rest)
    yield family


def at(status: Mapping[str, Any], path: str) -> Any:
    """The entry at "store.presence.keys" of nested dicts; None where there is none."""
    found: Any = status
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def number_at(status: Mapping[str, Any], path: str) -> float | None:
    found = at(status, path)
    return float(found) if isinstance(found, int | float) else None
