"""`perdure bench policy`: what is kept and what is written, against Belady's optimum and against writing everything.

Rows, per trace: token hits of the real store, and of a simulated LRU over blocks, each beside Belady's at the same
capacity; where sessions are known, with and without `release` at their ends. Then, with a small DRAM tier in front,
what is written to the flash per hit from it, the token hits, and the compute saved less the price of the writes, with
admission by value beside writing everything, at several prices. See `policy_traces`, `policy_sim`, `policy_store`.

Contract: figures are counts on a clock of their own, so they are the same on any machine, up to when the background
commits. Data goes to a temporary directory below `directory` and is removed at the end, also after an error.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import perdure
from perdure.benchmarks import policy_sim, policy_store, policy_traces
from perdure.benchmarks.harness import Report, Row, machine, row
from perdure.benchmarks.policy_sim import Hits
from perdure.benchmarks.policy_store import BLOCK_BYTES, LLAMA_8B, LLAMA_70B, QWEN_32B, RECORD_BYTES, Model
from perdure.benchmarks.policy_traces import BLOCK_TOKENS, Trace
from perdure.benchmarks.progress import Progress

_DAILY_CYCLES: Final = 1_825  # one drive write per day for five years, what data sheets promise for random writes
_BELADY: Final = "Belady (MIN with bypass)"
_ALWAYS: Final = "always"


@dataclass(frozen=True, slots=True)
class Price:
    """flash_cycles: None for the default of `perdure.AdmissionPrices`, that of sequential writes."""

    model: Model
    flash_cycles: float | None = None

    @property
    def admission(self) -> perdure.ValueAdmission:
        return policy_store.by_value(self.model, flash_cycles=self.flash_cycles)

    @property
    def write_cost(self) -> float:
        """Of writing a block, in the time to compute it."""
        how = self.admission
        return how.prices.write_s(BLOCK_BYTES) / (BLOCK_TOKENS / self.model.prefill_tokens_per_s)

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.admission.prices.flash_cycles:,.0f} cycles"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run replays. Shares are of a trace's distinct blocks; uses_max bounds the replays with a DRAM tier."""

    requests_max: int
    uses_max: int
    shares: tuple[float, ...]
    tiered_share: float
    memory_share: float
    prices: tuple[Price, ...]


_PRICES: Final = (Price(LLAMA_70B), Price(LLAMA_8B), Price(QWEN_32B, _DAILY_CYCLES), Price(LLAMA_8B, _DAILY_CYCLES))
FULL: Final = Plan(1 << 30, 1_200_000, (0.01, 0.05, 0.10, 0.25), 0.25, 0.03, _PRICES)
QUICK: Final = Plan(2_000, 60_000, (0.05, 0.25), 0.25, 0.03, _PRICES[1:3])


def run(
    directory: os.PathLike[str] | str,
    *,
    traces: os.PathLike[str] | str | None = None,
    quick: bool = False,
    json: bool = False,
    plan: Plan | None = None,
) -> Report:
    """Replay the traces in the folder `traces`; without one, a small made-up one. `json`: no progress is drawn.

    plan: what is replayed, if neither the full nor the quick one. A full run takes about twenty minutes, a quick one
    two. Raises InvalidArgument for a folder without traces, WrongResult if the store does not deliver what it found."""
    plan = plan or (QUICK if quick else FULL)
    loaded = policy_traces.load(None if traces is None else Path(traces))
    base = Path(tempfile.mkdtemp(prefix="bench-", dir=directory))
    try:
        about = machine(
            base,
            quick=quick,
            traces="made up" if loaded[0].made_up else ", ".join(trace.name for trace in loaded),
            made_up=loaded[0].made_up,
            stand_in=f"{BLOCK_BYTES} bytes per block of {BLOCK_TOKENS} tokens",
        )
        report = Report("What is kept and what is written", about)
        steps = sum(len(plan.shares) * (1 + _has_sessions(trace)) + 1 + len(plan.prices) for trace in loaded)
        with Progress("bench policy", steps, silent=json) as progress:
            for trace in loaded:
                report.rows += hit_rows(base, trace.head(plan.requests_max, 1 << 60), plan, progress.step)
                report.rows += admission_rows(base, trace.head(plan.requests_max, plan.uses_max), plan, progress.step)
        return report
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _has_sessions(trace: Trace) -> bool:
    return any(request.ends is not None for request in trace.requests)


def _blocks(trace: Trace, share: float) -> int:
    """A share of the trace's blocks; at least what the smallest store holds."""
    return policy_store.capacity_bytes(int(share * trace.unique)) // RECORD_BYTES


def _replayed(base: Path, trace: Trace, blocks: int, **how: object) -> Hits:
    root = base / "store"
    try:
        return policy_store.replay(root, trace, blocks, **how)  # type: ignore[arg-type]
    finally:
        shutil.rmtree(root, ignore_errors=True)


# --- what is kept
def hit_rows(base: Path, trace: Trace, plan: Plan, step: Callable[[str], None]) -> list[Row]:
    """Token hits at each capacity, beside Belady's."""
    made: list[Row] = []
    ideal = policy_sim.lru(trace, trace.unique).percent
    for share in plan.shares:
        blocks = _blocks(trace, share)
        best = policy_sim.belady(trace, blocks).percent
        about = f"{trace.name}, {share:.0%} of its blocks"
        note = f"{blocks:,} blocks, {len(trace.requests):,} requests; with all {trace.unique:,} blocks {ideal:.1f} %"
        for release in (False, True) if _has_sessions(trace) else (False,):
            step(f"{about}{', released' if release else ''}")
            ended = ", sessions released" if release else ""
            store = _replayed(base, trace, blocks, release=release).percent
            simulated = policy_sim.lru(trace, blocks, release=release).percent
            made += [
                row(f"{about}: token hits{ended}", "%", [store], [best], _BELADY, note=note),
                row(f"{about}: token hits of block LRU, simulated{ended}", "%", [simulated], [best], _BELADY),
            ]
    return made


# --- what is written
def admission_rows(base: Path, trace: Trace, plan: Plan, step: Callable[[str], None]) -> list[Row]:
    """Writes, hits and what they are worth, with a DRAM tier in front: by value beside always."""
    blocks, memory = _blocks(trace, plan.tiered_share), int(plan.memory_share * trace.unique)
    about = f"{trace.name}, {plan.tiered_share:.0%} behind {plan.memory_share:.0%} in DRAM"
    step(f"{about}: always")
    always = _replayed(base, trace, blocks, memory_blocks=memory)
    made: list[Row] = []
    for price in plan.prices:
        step(f"{about}: {price.name}")
        value = _replayed(base, trace, blocks, memory_blocks=memory, admission=price.admission)
        name = f"{about}, {price.name}"
        made += [
            row(f"{name}: flash bytes written per flash byte hit", "ratio", [value.written_per_flash_hit],
                [always.written_per_flash_hit], _ALWAYS, better="lower",
                note=f"written {value.written_blocks:,}, flash hits {value.hit_blocks - value.memory_blocks:,} blocks; "
                f"always {always.written_blocks:,} and {always.hit_blocks - always.memory_blocks:,}"),
            row(f"{name}: token hits", "%", [value.percent], [always.percent], _ALWAYS,
                note=f"{len(trace.requests):,} requests; from DRAM {value.memory_share:.0%} of the hit blocks, "
                f"always {always.memory_share:.0%}"),
            row(f"{name}: prefill saved less price of writes", "%", [_worth(trace, value, price)],
                [_worth(trace, always, price)], _ALWAYS,
                note=f"of the prefill without a cache; writing a block costs {price.write_cost:.2f} of computing it"),
        ]  # fmt: skip
    return made


def _worth(trace: Trace, hits: Hits, price: Price) -> float:
    return 100 * (hits.hit_blocks - price.write_cost * hits.written_blocks) / max(trace.uses, 1)
