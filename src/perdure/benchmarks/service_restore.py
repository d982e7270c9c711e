"""Rows of `bench service` about restores from the disk through the service, beside the embedded store.

Contract
- Equal work: both stores hold the same blocks, each in a directory of its own on the same device; both sides read the
  same ranges of them, no range twice, in calls of the same batch. Both have a DRAM tier of the same size that was
  filled before. Reads of the disk are O_DIRECT. No block comes from DRAM, which is checked.
- Service, client and embedded store are three processes; readers take turns and are stopped while the other one reads.
- Reference: the embedded store's direct read into memory of its caller (`perdure.aligned_buffer`), its fastest way. The
  service's copy into private memory has a row against each of the embedded ways: through the DRAM tier with a copy,
  which is the same work, and direct.
- A view is memory that can be read; nothing is copied out of it. Both others deliver into memory of the caller.
- CPU seconds are those of the reading process: what an engine spends. Rows of their own add the service's.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from perdure.benchmarks.harness import Measured, Row, interleave, rate_row, row, size_name, unmeasured
from perdure.benchmarks.peers import Worker
from perdure.benchmarks.service_host import Host, Plan
from perdure.benchmarks.target import WrongResult
from perdure.limits import GIB

RATE_TARGET = 0.95
CPU_TARGET = 10.0  # embedded / ours: a tenth
GROUPS = 3  # ranges that are read by different ways of one side
DIRECT = "embedded store, direct into its caller's memory"
STAGED = "embedded store, through its DRAM tier and a copy"
NAMES = {
    "view": "by view",
    "registered": "into registered memory",
    "private": "into private memory",
}


class Restores:
    """The ranges of a chain, and who has read which of them."""

    def __init__(self, plan: Plan, client: Worker, embedded: Worker):
        self._plan = plan
        self._workers = {"client": client, "embedded": embedded}
        self._range = plan.range_bytes // plan.block_bytes
        self._warm = -(-plan.pool_bytes // plan.range_bytes)
        self.chain = (self._warm + GROUPS * plan.repetitions) * self._range
        self._next: dict[tuple[str, str], int] = {}
        self.together: dict[tuple[str, str], list[float]] = {}  # CPU seconds per GiB of reader and service

    def _read(self, side: str, way: str, first: int) -> Measured:
        blocks = list(range(first, first + self._range))
        batches = [blocks[at : at + self._plan.batch] for at in range(0, len(blocks), self._plan.batch)]
        told: dict[str, Any] = self._workers[side].ask("read", way=way, chain=self.chain, batches=batches)
        if told["found"] != len(blocks) or told["wrong"] or told["from_memory"]:
            raise WrongResult(f"{side}, {way}, {len(blocks)} cold blocks: {told}")
        nbytes = len(blocks) * self._plan.block_bytes
        both = Measured(nbytes, told["seconds"], told["cpu_seconds"] + told["server_cpu_seconds"])
        self.together.setdefault((side, way), []).append(both.cpu_s_per_gib)
        return Measured(nbytes, told["seconds"], told["cpu_seconds"])

    def fill(self, side: str) -> None:
        stored = self._workers[side].ask("fill", chain=self.chain, batch=self._plan.batch)["stored"]
        if stored != self.chain:
            raise WrongResult(f"{side}: {stored} of {self.chain} blocks stored")

    def warm(self) -> None:
        """Fill both DRAM tiers with blocks that are not read again."""
        for side in self._workers:
            for number in range(self._warm):
                self._read(side, "private", number * self._range)
        self.together.clear()

    def next(self, side: str, way: str, group: int) -> Measured:
        """Read the next range of a group."""
        turn = self._next.get((side, way), 0)
        self._next[side, way] = turn + 1
        return self._read(side, way, (self._warm + group * self._plan.repetitions + turn) * self._range)


def _start(name: str) -> Worker:
    return Worker(name, [sys.executable, "-m", "perdure.benchmarks.service_reader"], own=True)


Series = dict[tuple[str, str], list[Measured]]


def _measure(plan: Plan, base: Path, step: Callable[[str], None]) -> tuple[Series, Restores]:
    workers = [_start("client"), _start("embedded")]
    common = {"block_bytes": plan.block_bytes, "batch": plan.batch, "memory": plan.pool_bytes}
    try:
        restores = Restores(plan, *workers)
        client, embedded = workers
        step("filling two stores for restores")
        with Host(base / "service", memory=plan.pool_bytes) as host:
            client.ask("open", kind="client", where=str(host.socket), **common)
            restores.fill("client")
            client.ask("close")
        embedded.ask("open", kind="embedded", where=str(base / "embedded"), **common)
        restores.fill("embedded")
        with Host(base / "service", memory=plan.pool_bytes) as host:  # started anew: nothing of it is in its DRAM
            client.ask("open", kind="client", where=str(host.socket), servers=[host.pid], **common)
            embedded.ask("open", kind="embedded", where=str(base / "embedded"), **common)
            step("restores")
            restores.warm()
            ways = [("client", "registered"), ("client", "private"), ("client", "view")]
            ways += [("embedded", "direct"), ("embedded", "private")]
            groups = [0, 1, 2, 0, 1]
            arms = [partial(restores.next, *way, group) for way, group in zip(ways, groups, strict=True)]
            series = dict(zip(ways, interleave(arms, plan.repetitions), strict=True))
            for worker in workers:
                worker.ask("close")
        return series, restores
    finally:
        for worker in workers:
            worker.end()


def _rate_rows(series: Series, what: str) -> list[Row]:
    direct, staged = series["embedded", "direct"], series["embedded", "private"]
    made = [
        rate_row(f"{what} {NAMES[way]}", series["client", way], direct, DIRECT, target=RATE_TARGET)
        for way in ("view", "registered")
    ]
    private, name = series["client", "private"], f"{what} {NAMES['private']}"
    made.append(rate_row(name, private, staged, STAGED, target=RATE_TARGET))
    note = "informs: a copy more than the reference"
    return [*made, rate_row(f"{name}, beside direct reads", private, direct, DIRECT, note=note)]


def _cpu_rows(series: Series, restores: Restores, what: str) -> list[Row]:
    """CPU seconds per GiB of the reading process, and with the service's; the reference is that of the rate's row."""
    made = []
    for way, other, name, wanted in (
        ("view", "direct", DIRECT, CPU_TARGET),
        ("registered", "direct", DIRECT, CPU_TARGET),
        ("private", "private", STAGED, None),
    ):
        ours, reference = ([m.cpu_s_per_gib for m in series[key]] for key in (("client", way), ("embedded", other)))
        title = f"engine's CPU, {what} {NAMES[way]}"
        note = "" if wanted else "informs: the engine copies"
        made.append(row(title, "s/GiB", ours, reference, name, better="lower", target=wanted, note=note))
        title, ours = f"engine's and service's CPU, {what} {NAMES[way]}", restores.together["client", way]
        made.append(row(title, "s/GiB", ours, reference, name, better="lower", note="informs"))
    return made


def rows(plan: Plan, base: Path, step: Callable[[str], None]) -> list[Row]:
    """All rows of this module; not measured where the disk has no room for the two stores."""
    what = f"cold restore, {size_name(plan.block_bytes)}, batch {plan.batch},"
    home = base / "restore"
    home.mkdir()
    need = 2 * (plan.pool_bytes + plan.range_bytes * (GROUPS * plan.repetitions + 1))
    free = shutil.disk_usage(home).free
    if free < 1.5 * need:
        why = f"two stores of {need // GIB} GiB together do not fit the {free // GIB} GiB that are free"
        return [unmeasured(f"{what} {name}", "GB/s", DIRECT, why, target=RATE_TARGET) for name in NAMES.values()]
    series, restores = _measure(plan, home, step)
    shutil.rmtree(home, ignore_errors=True)
    return [*_rate_rows(series, what), *_cpu_rows(series, restores, what)]
