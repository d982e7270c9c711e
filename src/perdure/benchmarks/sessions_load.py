"""Load rows of `bench sessions`: p99 of restores beside an ideal queue, goodput and missed deadlines under overload.

Contract
- Load: the part of the device's time (`RATE_BYTES_PER_S`, records with their headers) that the offered restores take.
- Ideal queue: one server, first come first served, the same arrivals and sizes, and no cost but the device's time for
  the bytes. A second one takes as long as a restore from the idle service does (medians before every round, on a
  straight line over the sizes): that includes waits during which a loaded service does other work, so it is the laxer
  one, and only in the note.
- Every step is played once per round; a row has one figure per round. Generated arrivals differ between rounds, and are
  the same for every number of sessions.
- Steps that are judged by their p99 have a deadline of `PATIENCE_S`, which they are not meant to reach; the others have
  the plan's.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from perdure.benchmarks import sessions_turns as turns_of
from perdure.benchmarks import target
from perdure.benchmarks.harness import Row, count_row, row, unmeasured
from perdure.benchmarks.sessions_child import CAPACITY_BYTES, Child, cpus
from perdure.benchmarks.sessions_generator import SHARED_BLOCKS, chain
from perdure.benchmarks.sessions_turns import Trace, Turn
from perdure.limits import KIB
from perdure.segments.format import record_bytes

RATE_BYTES_PER_S: Final = 500e6
LOAD: Final = 0.7
DEADLINE_LOAD: Final = 0.8
OVERLOAD: Final = 2.0
PATIENCE_S: Final = 10.0
QUEUE_TARGET: Final = 1 / 1.5
GROWTH_TARGET: Final = 0.5
GOODPUT_TARGET: Final = 0.9
MISSES_PERCENT_MAX: Final = 1.0
COMPARED: Final = 10  # sessions, with which the p99 of the most is compared
_FILL_BLOCKS: Final = 64
_ALONE_SIZES: Final = 4

NO_TRACE = "set PERDURE_TRACES, or pass --traces: the folder of the public traces"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures. `chains` contexts of `blocks_max` blocks are stored beforehand; a step offers load for about
    `step_s`; `idle` sessions are opened for their memory, `listed` put into a store to be listed."""

    block_bytes: int
    blocks_max: int
    chains: int
    sessions: tuple[int, ...]
    step_s: float
    rounds: int
    deadline_s: float
    threads: int
    idle: int
    listed: int


FULL: Final = Plan(256 * KIB, 64, 64, (1, 10, 100, 1_000), 10.0, 3, 1.0, 144, 10_000, 100_000)
QUICK: Final = Plan(256 * KIB, 64, 12, (1, 10, 100), 4.0, 1, 1.0, 144, 2_000, 100_000)


@dataclass(slots=True)
class Played:
    """One step of one round: what happened to its turns, and what would have in the ideal queue."""

    turns: list[Turn]
    told: dict[str, Any]
    ideal_s: list[float]
    device_s: list[float]

    def ms(self, field: str, percent: float = 99.0) -> float:
        return _ms(self.told[field], percent)

    def ideal_ms(self) -> float:
        """Of the ideal queue: bytes at the device's rate alone, unless the measured times are even less."""
        return min(_ms(self.device_s), _ms(self.ideal_s))

    @property
    def missed(self) -> int:
        return sum(got < turn.blocks for got, turn in zip(self.told["blocks"], self.turns, strict=True))

    def goodput(self, block_bytes: int, *, whole: bool = False) -> float:
        """MB/s delivered in time, from the first turn's time to the last delivery; `whole`: of whole contexts only."""
        end_s = max(
            turn.at_s + float(spent_s) for turn, spent_s in zip(self.turns, self.told["latency_s"], strict=True)
        )
        got = ((int(blocks), turn) for blocks, turn in zip(self.told["blocks"], self.turns, strict=True))
        return sum(blocks for blocks, turn in got if not whole or blocks == turn.blocks) * block_bytes / end_s / 1e6


@dataclass(slots=True)
class Loads:
    """All steps, by name."""

    plan: Plan
    trace: Trace | None
    service: Child
    generator: Child
    steps: dict[str, list[Played]] = field(default_factory=dict)
    alone: list[tuple[int, float]] = field(default_factory=list)

    def play(self, step: Callable[[str], None]) -> None:
        for number in range(self.plan.rounds):
            line = self._alone()
            for places in self.plan.sessions:
                for kind in ("generated", "trace") if self.trace else ("generated",):
                    step(f"{kind}, {places} sessions")
                    self._play(f"{kind} {places}", self._turns(kind, number, places, LOAD), PATIENCE_S, line)
            for load in (DEADLINE_LOAD, 1.0, OVERLOAD):
                step(f"{load:.0%} load")
                turns = self._turns("generated", number, self.plan.sessions[-1], load)
                self._play(f"load {load}", turns, self.plan.deadline_s, line)

    def _alone(self) -> tuple[float, float]:
        """Seconds that a restore takes an idle service: per block, and at least."""
        sizes = np.linspace(turns_of.FIRST, self.plan.blocks_max, _ALONE_SIZES).astype(int).tolist()
        seconds = self.generator.ask("alone", sizes=sizes, repetitions=5)["seconds"]
        medians = [float(np.median(series)) for series in seconds]
        self.alone += zip(sizes, medians, strict=True)
        slope, least = np.polyfit(sizes, medians, 1)
        return float(slope), max(0.0, float(least))

    def _turns(self, kind: str, number: int, places: int, load: float) -> list[Turn]:
        plan, seed = self.plan, 1_000 * number + round(100 * load)
        blocks = load * RATE_BYTES_PER_S * plan.step_s / record_bytes(plan.block_bytes)
        if kind == "trace":
            assert self.trace is not None
            return turns_of.replayed(self.trace, seed, places, blocks, plan.step_s)
        return turns_of.generated(seed, places, blocks, plan.step_s, plan.blocks_max)

    def _play(self, name: str, turns: list[Turn], deadline_s: float, line: tuple[float, float]) -> None:
        done = self.steps.setdefault(name, [])
        told = self.generator.ask("load", label=f"{name}/{len(done)}", turns=turns, deadline_s=deadline_s)
        problems = [problem for problem in told["problem"] if problem]
        if problems:
            raise target.WrongResult(f"{name}: {len(problems)} of {len(turns)} turns failed: {problems[0]}")
        if any(told["from_memory"]):
            raise target.WrongResult(f"{name}: blocks came from memory, the device was not loaded as the rows say")
        per_block, least = line
        of_rate = record_bytes(self.plan.block_bytes) / RATE_BYTES_PER_S
        ideal = turns_of.ideal(turns, lambda blocks: least + per_block * blocks)
        done.append(Played(turns, told, ideal, turns_of.ideal(turns, lambda blocks: of_rate * blocks)))


def fill(root: Path, plan: Plan) -> None:
    """Store all contexts, at the disk's own rate."""
    source = target.random_bytes(_FILL_BLOCKS * plan.block_bytes)
    with target.opened(root, plan.block_bytes, capacity=CAPACITY_BYTES) as (_, space):
        for number in range(plan.chains):
            keys = chain(space, number, plan.blocks_max)
            target.fill(space, keys[SHARED_BLOCKS if number else 0 :], plan.block_bytes, source)


def rows(plan: Plan, base: Path, trace: Trace | None, step: Callable[[str], None]) -> list[Row]:
    """Play all steps on a store below `base`. Raises WrongResult, ChildFailed."""
    root = base / "load"
    step("storing contexts")
    fill(root, plan)
    place = Path(tempfile.mkdtemp(prefix="perdure-bench-"))  # a socket's path must be short
    mine, theirs = cpus()
    try:
        with (
            Child("perdure.benchmarks.sessions_service", root, place / "s", RATE_BYTES_PER_S, theirs) as service,
            Child("perdure.benchmarks.sessions_generator", mine) as generator,
        ):
            generator.ask(
                "open", socket=str(place / "s"), block_bytes=plan.block_bytes, blocks_max=plan.blocks_max,
                chains=plan.chains, threads=plan.threads,
            )  # fmt: skip
            loads = Loads(plan, trace, service, generator)
            loads.play(step)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)
    return [*_queue_rows(loads), *_growth_rows(loads), *_overload_rows(loads)]


def _queue_rows(loads: Loads) -> list[Row]:
    made: list[Row] = []
    for kind in ("generated", "trace"):
        for places in loads.plan.sessions:
            name, steps = f"restore p99, {_many(places)}, {kind}", loads.steps.get(f"{kind} {places}", [])
            if not steps:
                made.append(unmeasured(name, "ms", "ideal queue", NO_TRACE, target=QUEUE_TARGET))
                continue
            made.append(row(
                name, "ms", [one.ms("latency_s") for one in steps], [one.ideal_ms() for one in steps],
                f"ideal queue, {LOAD:.0%} load", better="lower", target=QUEUE_TARGET, note=_about(steps),
            ))  # fmt: skip
    every = [one for steps in loads.steps.values() for one in steps]
    lags, stored = ([one.ms(field) for one in every] for field in ("lag_s", "stored_s"))
    made.append(row("load generator's own lag, p99", "ms", lags, note="inside the latencies above; one figure a step"))
    made.append(
        row(
            "blocks of a turn stored and session extended, p99",
            "ms",
            stored,
            note="not part of a restore; without a DRAM tier the pages of its manifest come from the loaded device too",
        )
    )
    return made


def _about(steps: list[Played]) -> str:
    turns, late = sum(len(one.turns) for one in steps), sum(one.missed for one in steps)
    p50 = float(np.median([one.ms("latency_s", 50.0) for one in steps]))
    measured = float(np.median([_ms(one.ideal_s) for one in steps]))
    said = f"{turns} turns, p50 {p50:.1f} ms; a queue with the times measured alone: p99 {measured:.0f} ms"
    return said + (f"; {late} not whole within {PATIENCE_S:.0f} s" if late else "")


def _ms(seconds: list[float], percent: float = 99.0) -> float:
    return 1e3 * float(np.percentile(seconds, percent))


def _growth_rows(loads: Loads) -> list[Row]:
    most, made = loads.plan.sessions[-1], []
    for kind in ("generated", "trace"):
        many, few = (loads.steps.get(f"{kind} {places}", []) for places in (most, COMPARED))
        if many and few and most != COMPARED:
            made.append(row(
                f"restore p99, {_many(most)} beside {COMPARED}, {kind}", "ms", [one.ms("latency_s") for one in many],
                [one.ms("latency_s") for one in few], _many(COMPARED), better="lower", target=GROWTH_TARGET,
            ))  # fmt: skip
    return made


def _overload_rows(loads: Loads) -> list[Row]:
    size, plan = loads.plan.block_bytes, loads.plan
    within = f"within {plan.deadline_s:g} s of the scheduled time"
    peaks = [
        max(one.goodput(size) for name, steps in loads.steps.items() if not name.endswith(str(OVERLOAD)) for one in
            steps[number : number + 1])
        for number in range(plan.rounds)
    ]  # fmt: skip
    over = loads.steps[f"load {OVERLOAD}"]
    late = sum(one.missed for one in over) / sum(len(one.turns) for one in over)
    whole = float(np.median([one.goodput(size, whole=True) for one in over]))
    calm = loads.steps[f"load {DEADLINE_LOAD}"]
    turns = sum(len(one.turns) for one in calm)
    return [
        row(
            f"goodput at {OVERLOAD:g} times the device's rate", "MB/s", [one.goodput(size) for one in over], peaks,
            f"most at loads up to {1.0:.0%}", target=GOODPUT_TARGET,
            note=f"leading blocks of each context, {within}; {late:.0%} were not whole; whole ones {whole:.0f} MB/s",
        ),
        count_row(
            f"restores late at {DEADLINE_LOAD:.0%} load", "turns", sum(one.missed for one in calm), None, "",
            allowed=int(turns * MISSES_PERCENT_MAX / 100),
            note=f"of {turns}, not whole {within}; {MISSES_PERCENT_MAX:g} % are allowed",
        ),
    ]  # fmt: skip


def _many(places: int) -> str:
    return f"{places:,} session{'s' if places > 1 else ''}"
