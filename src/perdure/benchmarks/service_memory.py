"""Rows of `bench service` that touch no disk: copies, views and lookups of what lies in the service's DRAM.

Contract
- The service is another process. Copies and lookups are message-free, which a row of its own counts; a view is two
  messages, one to get it and one to release it, and both are timed.
- Memcpy is numpy's, of as many blocks of the same size, between memory of this process, in random order as the reads.
- Bytes are compared with what was stored before anything is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from perdure.benchmarks import store_memory, target
from perdure.benchmarks.harness import Measured, Row, count_row, interleave, limit_row, rate_row, row, size_name
from perdure.benchmarks.service_host import Host, Plan
from perdure.benchmarks.target import Bytes, WrongResult
from perdure.limits import MIB

HIT_EXTRA_US = 30.0
VIEW_LIMIT_US = 100.0
VIEW_BLOCK_LIMIT_US = 3.0
COPY_TARGET = 0.95
LOOKUP_BLOCK_BYTES = 4096
LOOKUP_BLOCKS = 8192
SETTLE_TRIES = 50
SETTLE_S = 0.1


class Settled:
    """A keyspace whose blocks all lie in the service's DRAM, known to this client: reads need no message."""

    def __init__(self, store: Any, plan: Plan):
        self.store, self._block = store, plan.block_bytes
        self.space = target.keyspace(store, plan.block_bytes)
        self.source = target.random_bytes(plan.warm_bytes)
        self.keys = self.space.chain(target.tokens(plan.warm_bytes // plan.block_bytes))
        self._fill()
        self._settle()

    def _fill(self) -> None:
        step = 64 * MIB // self._block
        for at in range(0, len(self.keys), step):
            part = self.source[at * self._block : (at + step) * self._block]
            target.fill(self.space, self.keys[at : at + step], self._block, part, "ephemeral")

    def _settle(self) -> None:
        """Read until all blocks come without a message; compares the bytes of each."""
        into = target.random_bytes(self._block, 11)
        for _ in range(SETTLE_TRIES):
            before = self.store.transport.messages
            for number in range(len(self.keys)):
                got = self.space.read(self.keys[number : number + 1], into=into)
                at = number * self._block
                if got.usable != 1 or not np.array_equal(into, self.source[at : at + self._block]):
                    raise WrongResult(f"block {number} was not delivered as it was stored")
            if self.store.transport.messages == before:
                return
            time.sleep(SETTLE_S)
        raise WrongResult("reads of blocks in the service's DRAM still need messages")

    def check_view(self, batch: int) -> None:
        with self.space.view(self.keys[:batch]) as view:
            for number, block in enumerate(view.blocks):
                at = number * self._block
                if block is None or not np.array_equal(
                    np.frombuffer(block, np.uint8), self.source[at : at + self._block]
                ):
                    raise WrongResult(f"block {number} of a view is not what was stored")


def _us(series: list[Measured], block_bytes: int) -> list[float]:
    """Microseconds per block."""
    return [one.seconds / (one.nbytes / block_bytes) * 1e6 for one in series]


def copy_rows(settled: Settled, plan: Plan) -> list[Row]:
    """One block, and a batch, copied out of the service's DRAM, beside memcpy."""
    block, size = plan.block_bytes, size_name(plan.block_bytes)
    read = partial(store_memory.warm_series, settled.space, settled.keys)
    one = read(1, block, settled.source, plan.repetitions)
    made = [
        row(
            f"DRAM hit, {size}, batch 1, copied without a message",
            "µs",
            _us(one[0], block),
            [us + HIT_EXTRA_US for us in _us(one[1], block)],
            f"numpy memcpy of the same blocks + {HIT_EXTRA_US:g} µs",
            better="lower",
            target=1.0,
        )
    ]
    many = read(plan.batch, block, settled.source, plan.repetitions)
    name = f"DRAM hits, {size}, batch {plan.batch}, copied without a message"
    made.append(rate_row(name, many[0], many[1], "numpy memcpy of the same blocks", target=COPY_TARGET))
    return made


def _view_us(space: Any, batches: list[Bytes]) -> float:
    """Median microseconds of a view and its release."""
    times, seen = [], 0
    for keys in batches:
        began = time.perf_counter()
        view = space.view(keys)
        found = view.report.from_memory
        view.release()
        times.append(time.perf_counter() - began)
        seen += found
    if seen != sum(map(len, batches)):
        raise WrongResult(f"{seen} blocks of views came from memory")
    return statistics.median(times) * 1e6


def view_rows(settled: Settled, plan: Plan) -> list[Row]:
    """Views of one block and of a batch, each with its release."""
    keys, batch = settled.keys, plan.batch
    settled.check_view(batch)
    ones = [keys[at % len(keys) :][:1] for at in range(plan.looks)]
    places = range(0, len(keys) - batch + 1, batch)
    many = [keys[places[at % len(places)] :][:batch] for at in range(plan.looks)]
    one, several = interleave([partial(_view_us, settled.space, some) for some in (ones, many)], plan.repetitions)
    size = size_name(plan.block_bytes)
    return [
        limit_row(f"view of 1 block of {size} and its release, p50", "µs", one, VIEW_LIMIT_US),
        limit_row(
            f"view of {batch} blocks of {size} and its release, p50, per block",
            "µs",
            [us / batch for us in several],
            VIEW_BLOCK_LIMIT_US,
        ),
    ]


def lookup_rows(store: Any, plan: Plan) -> list[Row]:
    """As `bench store` asks them, of blocks stored through the service."""
    space = target.keyspace(store, LOOKUP_BLOCK_BYTES)
    present, absent = (space.chain(target.tokens(LOOKUP_BLOCKS, seed)) for seed in (1, 2))
    target.fill(space, present, LOOKUP_BLOCK_BYTES, target.random_bytes(4 * MIB), "ephemeral")
    for _ in range(SETTLE_TRIES):
        before = store.transport.messages
        if space.lookup(present) == len(present) and not space.lookup(absent) and store.transport.messages == before:
            break
        time.sleep(SETTLE_S)
    before = store.transport.messages
    made = store_memory.lookup_rows(space, present, absent, plan.repetitions, "through the service")
    return [*made, _count(store, before, "lookups")]


def _count(store: Any, before: int, what: str) -> Row:
    sent = store.transport.messages - before
    return count_row(f"messages sent by all timed {what}", "messages", sent, None, "")


def rows(plan: Plan, base: Path, step: Callable[[str], None]) -> list[Row]:
    """All rows of this module."""
    with Host(base / "memory", memory=3 * plan.warm_bytes) as host, host.connect() as store:
        step("filling the service's DRAM")
        settled = Settled(store, plan)
        step("copies out of DRAM")
        before = store.transport.messages
        made = copy_rows(settled, plan)
        made.append(_count(store, before, "copies out of DRAM"))
        step("views")
        made += view_rows(settled, plan)
        step("lookups")
        return made + lookup_rows(store, plan)
