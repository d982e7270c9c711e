"""How large a cluster can get: from what one operation costs here to nodes, shards and memory for many hosts.

    perdure bench cluster --json > cluster.json
    perdure cluster scale cluster.json                # the tables of docs/scale.md

Contract
- Everything follows from the measured rows of `cluster_costs` and the `Load`; nothing else is assumed but what a row of
  the tables says. A figure that does not fit what the catalog can be spread over is told, not rounded away.
- `simulate` is a queueing model, not a measurement: hosts with one core each for the catalog, primaries that do one
  command at a time, in the order of arrival; arrivals of lookups are Poisson, beats are regular. No network: add a
  round trip. The same seed gives the same figures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.benchmarks import cluster_costs as measured
from perdure.errors import InvalidArgument
from perdure.limits import GIB, KIB, MIB

GROUPS: Final = limits.cluster_index_slots  # the index cannot be spread over more primaries
_CHANGES_OF_A_SEGMENT: Final = 4  # made, sealed, drained, deleted
_HOST_BYTES_MAX: Final = 2 * GIB
_CONTROL_GROUPS: Final = limits.cluster_control_slots
_PRIMARIES_MIN: Final = 3
COPIES: Final = 2  # a primary and its replica
_CPU_SHARE_MAX, _MEMORY_SHARE_MAX = 0.5, 0.7
_CROWDED: Final = 0.85  # of the load that primaries can bear
_NODE_BYTES: Final = 64 * GIB
_CALLS: Final = 30_000  # of a simulation
_HOSTS: Final = (8, 64, 512)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of CPU, and bytes. command_s, key_s: of a primary, for one MGET and for one key in it."""

    command_s: float
    key_s: float
    host_call_s: float
    host_key_s: float
    publish_s: float
    record_bytes: float
    beat_s: float
    news_s: float
    host_beat_s: float
    host_news_s: float
    host_segment_bytes: float
    change_s: float

    def server_s(self, batch: int) -> float:
        """Of all primaries, for one lookup."""
        return commands(batch) * self.command_s + batch * self.key_s

    def host_s(self, batch: int) -> float:
        return self.host_call_s + batch * self.host_key_s


def commands(batch: int) -> float:
    """How many hash slots a lookup meets on average, in each of which is one MGET: keys lie in them as if at random."""
    return GROUPS * (1 - (1 - 1 / GROUPS) ** batch)


def read_report(file: Path) -> dict[str, Any]:
    """Raises InvalidArgument."""
    try:
        report = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{file}: is no report of `perdure bench cluster --json`: {error}") from None
    if not isinstance(report, dict):
        raise InvalidArgument(f"{file}: is no report of `perdure bench cluster --json`")
    return report


def costs_of(report: Mapping[str, Any]) -> Costs:
    """Of a report of `bench cluster` in its JSON form. Raises InvalidArgument if rows are lacking."""
    rows = {entry["name"]: entry["ours"] for entry in report.get("rows", [])}

    def value(name: str) -> float:
        if rows.get(name) is None:
            raise InvalidArgument(f"no row {name!r}: this is not a report of `perdure bench cluster --json`")
        return float(rows[name])

    def seconds(name: str) -> float:
        return value(name) / 1e6

    small, large = measured.SMALL_BATCH, measured.LARGE_BATCH
    command_s, key_s = _line(
        (commands(small), small, seconds(measured.SERVER_SMALL)),
        (commands(large), large, seconds(measured.SERVER_LARGE)),
    )
    host_call_s, host_key_s = _line((1, small, seconds(measured.HOST_SMALL)), (1, large, seconds(measured.HOST_LARGE)))
    return Costs(
        command_s, key_s, host_call_s, host_key_s, seconds(measured.SERVER_PUBLISH),
        value(measured.RECORD_BYTES), seconds(measured.SERVER_BEAT), seconds(measured.SERVER_NEWS),
        seconds(measured.HOST_BEAT), seconds(measured.HOST_NEWS), value(measured.SEGMENT_BYTES),
        seconds(measured.SERVER_CHANGE),
    )  # fmt: skip


def _line(one: tuple[float, float, float], other: tuple[float, float, float]) -> tuple[float, float]:
    """a, b of a * x + b * y = z through two points, neither below zero."""
    solved = np.linalg.solve(np.array([one[:2], other[:2]], float), np.array([one[2], other[2]], float))
    return max(0.0, float(solved[0])), max(0.0, float(solved[1]))


@dataclass(frozen=True, slots=True)
class Load:
    """lookups_per_s: calls, of `batch` blocks each, in all. published_share: new blocks per block looked up.
    changes_per_s: of sessions."""

    hosts: int
    blocks: float
    lookups_per_s: float
    batch: int
    block_bytes: int = 2 * MIB
    published_share: float = 0.05
    changes_per_s: float = 0.0

    @property
    def segments(self) -> float:
        return math.ceil(self.blocks * self.block_bytes / limits.segment_bytes_max)

    @property
    def segment_changes_per_s(self) -> float:
        """Of blocks that are published and, in the long run, given up as fast."""
        published = self.lookups_per_s * self.batch * self.published_share * self.block_bytes
        return _CHANGES_OF_A_SEGMENT * published / limits.segment_bytes_max

    @property
    def beats_per_s(self) -> float:
        return self.hosts / limits.cluster_beat_s


@dataclass(frozen=True, slots=True)
class Need:
    """cpu: cores of primaries that are busy, by what with. primaries: for CPU at half load, for memory, and the greater
    one. host_bytes: what a host needs to know all segments. problems: what does not fit."""

    cpu: dict[str, float]
    memory_bytes: float
    primaries_for_cpu: int
    primaries_for_memory: int
    host_cores: float
    host_bytes: float
    problems: tuple[str, ...]

    @property
    def primaries(self) -> int:
        return max(_PRIMARIES_MIN, self.primaries_for_cpu, self.primaries_for_memory)


def derive(costs: Costs, load: Load) -> Need:
    keys_per_s = load.lookups_per_s * load.batch
    cpu = {
        "lookups": load.lookups_per_s * costs.server_s(load.batch),
        "publishes": keys_per_s * load.published_share * costs.publish_s,
        "sessions": load.changes_per_s * costs.change_s,
        "beats": load.beats_per_s * costs.beat_s,
        "news": load.hosts * load.segment_changes_per_s * costs.news_s,
    }
    memory = load.blocks * costs.record_bytes
    of_beats = costs.host_beat_s / limits.cluster_beat_s + load.segment_changes_per_s * costs.host_news_s
    host_cores = load.lookups_per_s / load.hosts * costs.host_s(load.batch) + of_beats
    for_cpu = math.ceil(sum(cpu.values()) / _CPU_SHARE_MAX)
    for_memory = math.ceil(memory / (_NODE_BYTES * _MEMORY_SHARE_MAX))
    problems = []
    if max(for_cpu, for_memory) > GROUPS:
        problems.append(f"{max(for_cpu, for_memory):,} primaries: the index lies in {GROUPS} slots")
    host_bytes = load.segments * costs.host_segment_bytes
    if host_bytes > _HOST_BYTES_MAX:
        problems.append(f"{host_bytes / GIB:.1f} GiB in each host for {load.segments:,.0f} segments")
    return Need(cpu, memory, for_cpu, for_memory, host_cores, host_bytes, tuple(problems))


# --- simulation
@dataclass(frozen=True, slots=True)
class Seen:
    """Of a simulated run: milliseconds from the call to its answer; how busy the busiest primary was."""

    p50_ms: float
    p99_ms: float
    busiest: float
    cpu_us_per_lookup: float


def simulate(costs: Costs, load: Load, primaries: int, *, calls: int = _CALLS, seed: int = 1) -> Seen:
    """`calls` lookups at the load's rate, on at most `GROUPS` primaries, and the beats of all hosts with the news of
    segments. Not publishes, nor sessions."""
    random = np.random.default_rng(seed)
    arrived = np.cumsum(random.exponential(1 / load.lookups_per_s, calls))
    asked = _through_hosts(arrived, random.integers(load.hosts, size=calls), costs.host_s(load.batch), load.hosts)
    counts = random.multinomial(load.batch, np.full(GROUPS, 1 / GROUPS), size=calls)
    beats = _beats(random, load, float(arrived[-1]))
    beat_s = costs.beat_s + load.segment_changes_per_s * limits.cluster_beat_s * costs.news_s
    answered, busy, total_s = asked.copy(), 0.0, 0.0
    for primary in range(primaries):
        mine = counts[:, _of_primary(GROUPS, primaries, primary)]
        work = (mine > 0).sum(1) * costs.command_s + mine.sum(1) * costs.key_s
        concerned = np.flatnonzero(work)
        part_s = beat_s * _of_primary(_CONTROL_GROUPS, primaries, primary).sum() / _CONTROL_GROUPS
        times = np.concatenate([asked[concerned], beats])
        services = np.concatenate([work[concerned], np.full(len(beats), part_s)])
        ended = _queue(times, services)[: len(concerned)]
        answered[concerned] = np.maximum(answered[concerned], ended)
        busy = max(busy, float(services.sum() / arrived[-1]))
        total_s += float(services.sum())
    waited = (answered - arrived) * 1e3
    return Seen(
        float(np.percentile(waited, 50)), float(np.percentile(waited, 99)), busy, total_s / calls * 1e6
    )  # fmt: skip


def _of_primary(groups: int, primaries: int, primary: int) -> NDArray[np.bool_]:
    """Which groups it has: they lie evenly in the slots, and slots on primaries."""
    mine: NDArray[np.bool_] = np.arange(groups) * primaries // groups == primary
    return mine


def _through_hosts(arrived: Floats, whose: NDArray[np.int64], service_s: float, hosts: int) -> Floats:
    """When each call leaves its host, which does one at a time."""
    left = np.empty_like(arrived)
    for host in range(hosts):
        mine = np.flatnonzero(whose == host)
        left[mine] = _queue(arrived[mine], np.full(len(mine), service_s))
    return left


def _beats(random: np.random.Generator, load: Load, until_s: float) -> Floats:
    """Of all hosts, each at its own phase."""
    each = np.arange(0.0, until_s, limits.cluster_beat_s)
    phases = random.uniform(0, limits.cluster_beat_s, load.hosts)
    times = (phases[:, None] + each[None, :]).ravel()
    return times[times < until_s]


def _queue(arrived: Floats, service_s: Floats) -> Floats:
    """When each is done by one server, first come, first served."""
    order = np.argsort(arrived, kind="stable")
    sums = np.cumsum(service_s[order])
    ended = sums + np.maximum.accumulate(arrived[order] - (sums - service_s[order]))
    out = np.empty_like(arrived)
    out[order] = ended
    return out


# --- tables
def tables(report: Mapping[str, Any]) -> str:
    """Markdown, of a report in its JSON form. Raises InvalidArgument if it is not one of `bench cluster`."""
    costs = costs_of(report)
    rows = {entry["name"]: entry["ours"] for entry in report["rows"] if entry["ours"] is not None}
    million, batch = 1e6, measured.SMALL_BATCH
    cases = [
        (f"1e6 blocks looked up a second, {batch} a call", Load(512, 1e9, million / batch, batch)),
        (f"1e6 calls a second, {batch} blocks each", Load(512, 1e9, million, batch)),
        ("the first with blocks of 32 KiB", Load(512, 1e9, million / batch, batch, block_bytes=32 * KIB)),
    ]
    return "\n\n".join([_needs(costs, cases), _simulated(costs, batch), _growth(rows)]) + "\n"


def _needs(costs: Costs, cases: Sequence[tuple[str, Load]]) -> str:
    columns = [
        "1e9 blocks, 512 hosts", "cores busy: lookups, publishes, beats, news", "primaries: for CPU, for memory",
        "memory of all copies", "cores, memory of a host", "does not fit",
    ]  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, load in cases:
        need = derive(costs, load)
        parts = ", ".join(f"{need.cpu[what]:,.1f}" for what in ("lookups", "publishes", "beats", "news"))
        memory, problems = COPIES * need.memory_bytes / GIB, "; ".join(need.problems)
        lines.append(
            f"| {name} | {parts} | {need.primaries_for_cpu:,}, {need.primaries_for_memory} "
            f"| {memory:,.0f} GiB | {need.host_cores:,.2f}, {need.host_bytes / GIB:,.2f} GiB | {problems or '-'} |"
        )
    return "\n".join(lines)


def _simulated(costs: Costs, batch: int) -> str:
    """Each host brings its share of the load, and of the primaries; and the whole load on fewer primaries."""
    columns = ["hosts", "lookups/s", "primaries", "server CPU per lookup", "busiest primary", "p50", "p99"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for hosts in _HOSTS:
        load = Load(hosts, 0, 1e6 / batch * hosts / _HOSTS[-1], batch)
        lines.append(_line_of(costs, load, derive(costs, load).primaries))
    load = Load(_HOSTS[-1], 0, 1e6 / batch, batch)
    least = math.ceil(derive(costs, load).primaries * _CPU_SHARE_MAX / _CROWDED)
    return "\n".join([*lines, _line_of(costs, load, least)])


def _line_of(costs: Costs, load: Load, primaries: int) -> str:
    used = min(GROUPS, primaries)
    seen = simulate(costs, load, used)
    return (
        f"| {load.hosts} | {load.lookups_per_s:,.0f} | {used} | {seen.cpu_us_per_lookup:.0f} us "
        f"| {seen.busiest:.0%} | {seen.p50_ms:.2f} ms | {seen.p99_ms:.2f} ms |"
    )


def _growth(rows: Mapping[str, float]) -> str:
    prefixes = (measured.GROWTH.split("{}")[0], measured.SERVER_CHANGE, "catalog lookups of")
    lines = ["| as it grows | measured |", "|---|---|"]
    for name, value in rows.items():
        if name.startswith(prefixes):
            unit = "keys per CPU-s" if name.startswith("catalog") else "us"
            lines.append(f"| {name} | {value:,.0f} {unit} |")
    return "\n".join(lines)
