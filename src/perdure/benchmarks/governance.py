"""`perdure bench governance`: what encryption, the audit log and policy cost, tenants beside each other
(`governance_tenants`), and how long it takes until nothing of a large tenant can be read.

Contract: both sides take turns on stores with the same blocks; bytes do not compress. Cold: no DRAM tier, direct reads
into the caller's memory. Warm: from the DRAM tier. The large tenant is `store_reopen`'s: records in the catalog that
point into sparse files; giving those up is not measured. Data goes to a temporary directory below `directory`, and is
removed.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from perdure.benchmarks import governance_tenants, store_reopen, target
from perdure.benchmarks.harness import Measured, Report, Row, interleave, limit_row, machine, rate_row, row, size_name
from perdure.benchmarks.progress import Progress
from perdure.benchmarks.target import Bytes, Plan, WrongResult
from perdure.governance.audit import Event, open_log
from perdure.limits import MIB

COLD_TARGET = 0.95  # of the same restore without encryption
WARM_TARGET = 0.85
AUDIT_TARGET = 0.97
EVENTS_PER_S = 100_000
BATCH = 16
LOG_EVENTS = 64
LOG_CALLS = 500
WARM_BYTES = 64 * MIB
ERASE_LIMIT_MS = 100.0
_ERASURES = 3


class _Pair:
    """Two stores with the same blocks, the second opened with `options`."""

    def __init__(self, plan: Plan, base: Path, block_bytes: int, memory: int, options: dict[str, Any]):
        self._plan, self._block, self._stack = plan, block_bytes, ExitStack()
        blocks = (WARM_BYTES if memory else plan.dataset_bytes // 2) // block_bytes
        source = target.random_bytes(min(64 * MIB, blocks * block_bytes))
        self._into = target.random_bytes(BATCH * block_bytes, seed=4)
        self._spaces, self._keys = [], target.tokens(blocks)
        for name, extra in (("plain", {}), ("ours", options)):
            opened = target.opened(base / name, block_bytes, memory=memory, **extra)
            _, space = self._stack.enter_context(opened)
            target.fill(space, space.chain(self._keys), block_bytes, source)
            self._spaces.append(space)

    def series(self) -> list[list[Measured]]:
        """Ours, and without."""
        plain, ours = self._spaces
        with self._stack:
            arms = [partial(self._read, space, random.Random(1)) for space in (ours, plain)]
            return interleave(arms, self._plan.repetitions)

    def _read(self, space: Any, rng: random.Random) -> Measured:
        keys: Bytes = space.chain(self._keys)
        count = max(1, self._plan.work_bytes // (BATCH * self._block))
        batches = target.runs(keys, BATCH, count, rng)
        return target.read_all(space, batches, self._block, self._into, direct=True)


def _rows_of(plan: Plan, base: Path, block_bytes: int, step: Callable[[str], None]) -> list[Row]:
    made = []
    for what, memory, options, wanted in (
        ("cold restore, encrypted", 0, {"encryption": "on"}, COLD_TARGET),
        ("warm restore, encrypted on the disk", 3 * WARM_BYTES, {"encryption": "on"}, WARM_TARGET),
        ("cold restore, audited", 0, {"audit": "on"}, AUDIT_TARGET),
        ("warm restore, audited", 3 * WARM_BYTES, {"audit": "on"}, AUDIT_TARGET),
    ):
        name = f"{what}, {size_name(block_bytes)}, batch {BATCH}"
        step(name)
        root = base / "pair"
        root.mkdir()
        ours, plain = _Pair(plan, root, block_bytes, memory, options).series()
        shutil.rmtree(root)
        made.append(rate_row(name, ours, plain, "the same without", target=wanted))
    return made


def _log_rows(base: Path, repetitions: int) -> list[Row]:
    """The log alone: records of the size that reads leave."""
    (base / "keystore").mkdir()
    log = open_log(base, "0" * 32, bytes(32))
    assert log is not None

    def event() -> Event:
        return Event("read", tenant="benchmark", first="0" * 32, last="0" * 32, all="0" * 32, blocks=BATCH)

    def batched() -> float:
        started = time.perf_counter()
        for _ in range(LOG_CALLS):
            log.append_all([event() for _ in range(LOG_EVENTS)])
        return LOG_CALLS * LOG_EVENTS / (time.perf_counter() - started)

    def single() -> float:
        started = time.perf_counter()
        for _ in range(LOG_CALLS):
            log.append(event())
        return (time.perf_counter() - started) / LOG_CALLS * 1e6

    try:
        rates, times = interleave([batched, single], repetitions)
    finally:
        log.close()
    wanted = [float(EVENTS_PER_S)]
    return [
        row(f"audit records a second, {LOG_EVENTS} a call", "1/s", rates, wanted, "the limit", target=1.0),
        limit_row("audit record, one a call", "us", times, 1e6 / EVENTS_PER_S),
    ]


def _erase_row(plan: Plan, base: Path) -> Row:
    """From the order, recorded and synced, to nobody being able to read any of it."""
    taken = []
    for _ in range(_ERASURES):
        root = base / "erase"
        options: dict[str, Any] = {"capacity": store_reopen.CAPACITY, "encryption": "on", "audit": "on"}
        keys = store_reopen.build(root, plan.catalog_blocks, encryption="on")
        with target.opened(root, store_reopen.BLOCK_BYTES, **options) as (store, space):
            store_reopen.wait_filled(store)
            if space.lookup(keys) != len(keys):
                raise WrongResult("the blocks to be erased are not found")
            started = time.perf_counter()
            told = store.erase(tenant=space.tenant)
            taken.append((time.perf_counter() - started) * 1e3)
            if told["state"] == "held" or space.lookup(keys) or space.present(keys).any():
                raise WrongResult("the erased blocks are still found")
        shutil.rmtree(root)
    return limit_row(f"erase a tenant of {plan.catalog_blocks:,} blocks: unreadable", "ms", taken, ERASE_LIMIT_MS)


def run(directory: os.PathLike[str] | str, *, quick: bool = False, json: bool = False) -> Report:
    """Measure on the file system of `directory`. `json`: no progress is drawn. Raises WrongResult."""
    base = Path(tempfile.mkdtemp(prefix="bench-", dir=directory))
    try:
        plan = target.plan_for(base, quick=quick)
        tenants = governance_tenants.QUICK if quick else governance_tenants.FULL
        sizes = plan.block_bytes[:: len(plan.block_bytes) - 1] if quick else plan.block_bytes
        report = Report("Governance beside the same work without it", machine(base, quick=quick))
        with Progress("bench governance", 5 + 4 * len(sizes), silent=json) as progress:
            progress.step("audit log")
            report.rows += _log_rows(base, plan.repetitions)
            progress.step(f"erasing {plan.catalog_blocks:,} blocks")
            report.rows.append(_erase_row(plan, base))
            report.rows += governance_tenants.rows(base, tenants, progress.step)
            for block_bytes in sizes:
                report.rows += _rows_of(plan, base, block_bytes, progress.step)
        return report
    finally:
        shutil.rmtree(base, ignore_errors=True)
