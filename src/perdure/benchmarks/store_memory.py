"""Rows of `bench store` that touch no disk: keys, lookups (presence index and catalog), and reads from the DRAM tier.

Contract
- Latency rows give the median over repetitions of the mean of an inner loop, in ms; the reference is the limit itself.
- "Catalog only" asks a store that was opened read-only: it has no presence index, so the catalog answers.
- Warm reads copy from the DRAM tier into the caller's buffer; the reference is numpy's memcpy of as many blocks of the
  same size from one part of a region to another, both larger than the processor's private caches, taking turns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from perdure.benchmarks import target
from perdure.benchmarks.harness import Measured, Row, Stopwatch, interleave, limit_row, rate_row, row, size_name
from perdure.benchmarks.target import Bytes, Plan, WrongResult
from perdure.limits import MIB

CHAIN_TOKENS = 131_072
CHAIN_LIMIT_MS = 10.0
LOOKUP_LIMITS_MS = {16: 0.02, 1_000: 0.2, 4_096: 1.0}
LOOKUP_LOOPS = {16: 500, 1_000: 100, 4_096: 30, 8_192: 20}
CATALOG_LIMIT_MS = 5.0
LOOKUP_BLOCK_BYTES = 4096
WARM_TARGET = 0.80
WARM_TARGET_FROM = 2 * MIB
WARM_BYTES = 256 * MIB


def mean_ms(call: Callable[[], object], loops: int) -> float:
    """Mean milliseconds of `call` over `loops` calls."""
    started = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - started) / loops * 1e3


def chain_rows(base: Path, repetitions: int) -> list[Row]:
    """Hashing the keys of 128 K tokens at 16 tokens a block, from an array and from a Python list."""
    ids = target.tokens(CHAIN_TOKENS // target.BLOCK_TOKENS)
    forms: dict[str, Any] = {"numpy array": ids, "list of int": ids.tolist()}
    with target.opened(base / "chain", LOOKUP_BLOCK_BYTES) as (_, space):
        arms = [partial(mean_ms, partial(space.chain, form), 1) for form in forms.values()]
        series = interleave(arms, repetitions + 2)
    return [
        limit_row(f"chain of 128 K tokens at 16 a block, {name}", "ms", times, CHAIN_LIMIT_MS)
        for name, times in zip(forms, series, strict=True)
    ]


def _expect(space: Any, keys: Bytes, found: int) -> None:
    got = space.lookup(keys)
    if got != found:
        raise WrongResult(f"lookup of {len(keys)} keys found {got}, not {found}")


def lookup_rows(space: Any, present: Bytes, absent: Bytes, repetitions: int, where: str) -> list[Row]:
    """Lookups of present and absent keys against their limits; `present` has at least 8,192 keys."""
    made: list[Row] = []
    cases = [(count, kind) for count in LOOKUP_LIMITS_MS for kind in ("present", "absent")]
    arms = []
    for count, kind in cases:
        keys = (present if kind == "present" else absent)[:count]
        _expect(space, keys, count if kind == "present" else 0)
        arms.append(partial(mean_ms, partial(space.lookup, keys), LOOKUP_LOOPS[count]))
    for (count, kind), times in zip(cases, interleave(arms, repetitions), strict=True):
        name = f"lookup of {count:,} {kind} blocks, {where}"
        made.append(limit_row(name, "ms", times, LOOKUP_LIMITS_MS[count]))
    made.append(_linear_row(space, present, repetitions, where))
    return made


def _linear_row(space: Any, present: Bytes, repetitions: int, where: str) -> Row:
    """128 K tokens (8,192 keys) must cost as much per key as 4,096 do."""
    counts = (8_192, 4_096)
    arms = [partial(mean_ms, partial(space.lookup, present[:count]), LOOKUP_LOOPS[count]) for count in counts]
    per_key = [
        [ms * 1e6 / count for ms in times] for count, times in zip(counts, interleave(arms, repetitions), strict=True)
    ]
    name = f"lookup per block at 8,192 (128 K tokens), {where}"
    return row(name, "ns", per_key[0], per_key[1], "per block at 4,096", better="lower", target=0.9)


def catalog_row(root: Path, present: Bytes, repetitions: int, where: str) -> Row:
    """4,096 present keys through the catalog alone: a read-only opener has no presence index."""
    with target.opened(root, LOOKUP_BLOCK_BYTES, capacity=None, read_only=True) as (_, space):
        keys = present[:4096]
        _expect(space, keys, 4096)
        times = [mean_ms(partial(space.lookup, keys), 5) for _ in range(repetitions)]
    return limit_row(f"lookup of 4,096 present blocks, catalog only, {where}", "ms", times, CATALOG_LIMIT_MS)


def small_store_rows(base: Path, plan: Plan) -> list[Row]:
    """Lookups in a store of 8,192 blocks that were really written."""
    root = base / "lookup"
    with target.opened(root, LOOKUP_BLOCK_BYTES) as (_, space):
        present, absent = (space.chain(target.tokens(8_192, seed)) for seed in (1, 2))
        target.fill(space, present, LOOKUP_BLOCK_BYTES, target.random_bytes(4 * MIB), "ephemeral")
        made = lookup_rows(space, present, absent, plan.repetitions, "8,192 stored")
    made.append(catalog_row(root, present, plan.repetitions, "8,192 stored"))
    return made


class Memcpy:
    """Copies of whole blocks between two halves of memory, never the same place twice in a row."""

    def __init__(self, sources: Bytes, destinations: Sequence[Bytes]):
        self._sources, self._destinations, self._turn = sources, destinations, 0

    def __call__(self, batches: list[int], batch: int, block_bytes: int) -> Measured:
        sources, total = self._sources, 0
        with Stopwatch() as watch:
            for first in batches:
                into = self._destinations[self._turn % len(self._destinations)]
                self._turn += 1
                for number in range(batch):
                    at = (first + number) * block_bytes
                    np.copyto(into[number * block_bytes : (number + 1) * block_bytes], sources[at : at + block_bytes])
                total += batch * block_bytes
        return watch.of(total)


def warm_rows(base: Path, plan: Plan, step: Callable[[str], None]) -> list[Row]:
    """Reads that the DRAM tier answers, against numpy's memcpy."""
    made: list[Row] = []
    warm_bytes = min(WARM_BYTES, plan.dataset_bytes)
    source = target.random_bytes(warm_bytes)
    for block_bytes in plan.block_bytes:
        step(f"warm read {size_name(block_bytes)}")
        blocks = warm_bytes // block_bytes
        root = base / f"warm-{block_bytes}"
        with target.opened(root, block_bytes, memory=3 * warm_bytes) as (_, space):
            keys = space.chain(target.tokens(blocks))
            target.fill(space, keys, block_bytes, source, "ephemeral")
            batches = sorted({min(plan.batch(wanted, block_bytes), blocks // 4) for wanted in plan.batches})
            made += [_warm(space, keys, batch, block_bytes, source, plan) for batch in batches]
    return made


def _warm(space: Any, keys: Bytes, batch: int, block_bytes: int, source: Bytes, plan: Plan) -> Row:
    series = warm_series(space, keys, batch, block_bytes, source, plan.repetitions)
    name = f"warm read (DRAM tier), {size_name(block_bytes)}, batch {batch}"
    wanted = WARM_TARGET if block_bytes >= WARM_TARGET_FROM else None
    return rate_row(name, series[0], series[1], "numpy memcpy of the same blocks", target=wanted)


def warm_series(
    space: Any, keys: Bytes, batch: int, block_bytes: int, source: Bytes, repetitions: int
) -> list[list[Measured]]:
    """Reads of all `keys` in batches of random order, and memcpy of as many blocks of `source`: both series."""
    size = batch * block_bytes
    destinations = [target.random_bytes(size, seed) for seed in range(5, 5 + max(2, min(8, 64 * MIB // size)))]
    rng = random.Random(size)
    places = list(range(0, len(keys) - batch + 1, batch))
    memcpy = Memcpy(source, destinations)
    state = {"turn": 0}

    def ours(*, check: bool = True) -> Measured:
        order = rng.sample(places, len(places))
        from_memory = 0
        with Stopwatch() as watch:
            for first in order:
                into = destinations[state["turn"] % len(destinations)]
                state["turn"] += 1
                report = space.read(keys[first : first + batch], into=into)
                from_memory += report.from_memory
        if check and from_memory != len(places) * batch:
            raise WrongResult(f"{from_memory} of {len(places) * batch} blocks came from the DRAM tier")
        return watch.of(len(places) * size)

    def reference() -> Measured:
        return memcpy(rng.sample(places, len(places)), batch, block_bytes)

    ours(check=False)
    return interleave([ours, reference], repetitions)


def rows(plan: Plan, base: Path, step: Callable[[str], None]) -> list[Row]:
    """All rows of this module."""
    step("chain")
    made = chain_rows(base, plan.repetitions)
    step("lookup")
    made += small_store_rows(base, plan)
    return made + warm_rows(base, plan, step)
