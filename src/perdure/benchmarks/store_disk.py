"""Disk rows of `bench store`: cold reads and writes against fio with the same bytes, depth and spread of offsets.

Contract
- Cold: the store is opened without a DRAM tier and reads with O_DIRECT into the caller's page-aligned buffer, checksums
  verified; fio reads a file of the data set's size, as many consecutive blocks from each random offset as our batch
  has, at min(batch, 8) in flight (our cap per device).
- Writes go to a fresh store each time, fio's to a fresh file. `session`: fio calls fdatasync after as many blocks as
  our batch has.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from perdure import limits
from perdure.benchmarks import target
from perdure.benchmarks.fio import Fio, Job
from perdure.benchmarks.harness import Measured, Row, interleave, rate_row, size_name, unmeasured
from perdure.benchmarks.target import Bytes, Plan
from perdure.limits import GIB

READ_TARGET = 0.95
WRITE_TARGET = 0.90
DEADLINE_S = 30.0
NO_FIO = "fio is not installed (Debian package 'fio')"


class DiskRows:
    """All disk rows of one block size. Makes its data below `base` and removes it."""

    def __init__(self, plan: Plan, base: Path, fio: Fio | None, block_bytes: int):
        self._plan, self._base, self._fio, self._block = plan, base, fio, block_bytes
        self._random = random.Random(block_bytes)
        self._blocks = plan.dataset_bytes // block_bytes
        self._serial = 0
        self._file = base / "fio.data"
        largest = max(plan.batch(batch, block_bytes) for batch in plan.batches)
        self._source = target.random_bytes(largest * block_bytes)
        self._into = target.random_bytes(largest * block_bytes, seed=4)

    def run(self, step: Callable[[str], None]) -> list[Row]:
        rows: list[Row] = []
        root = self._base / "read"
        step(f"filling {size_name(self._block)}")
        with target.opened(root, self._block) as (_, space):
            keys = space.chain(target.tokens(self._blocks))
            target.fill(space, keys, self._block, self._source)
        if self._fio is not None:
            self._fio.prepare(self._file, self._blocks * self._block)
        with target.opened(root, self._block) as (_, space):
            for batch in self._batches():
                step(f"cold read {size_name(self._block)}, batch {batch}")
                rows += self._cold(space, keys, batch)
        shutil.rmtree(root)
        self._file.unlink(missing_ok=True)
        for batch in self._batches():
            step(f"write {size_name(self._block)}, batch {batch}")
            rows.append(self._write(batch, "ephemeral"))
            rows.append(self._write(batch, "session"))
        return rows

    def _batches(self) -> list[int]:
        return sorted({self._plan.batch(batch, self._block) for batch in self._plan.batches})

    def _name(self, what: str, batch: int) -> str:
        return f"{what}, {size_name(self._block)}, batch {batch}"

    def _work(self, batch: int) -> int:
        """Batches per repetition."""
        return max(1, self._plan.work_bytes // (batch * self._block))

    # --- reading

    def _cold(self, space: Any, keys: Bytes, batch: int) -> list[Row]:
        depth = min(batch, limits.inflight_per_device_max)
        direct: dict[str, Any] = {"direct": True}
        staged: dict[str, Any] = {"direct": False, "deadline_s": DEADLINE_S}
        arms = [partial(self._read, space, keys, batch, how) for how in (direct, staged)]
        if self._fio is not None:
            arms.append(partial(self._fio_read, batch, depth))
        series = interleave(arms, self._plan.repetitions)
        reference = series[2] if self._fio is not None else []
        pattern = "randread" if batch == 1 else f"randread:{batch}"
        name = f"fio {pattern}, depth {depth}"
        made = []
        for what, ours, wanted in (
            ("cold read", series[0], READ_TARGET),
            ("cold read with a deadline (staged)", series[1], None),
        ):
            if reference:
                made.append(rate_row(self._name(what, batch), ours, reference, name, target=wanted))
            else:
                made.append(rate_row(self._name(what, batch), ours, note=NO_FIO))
        return made

    def _read(self, space: Any, keys: Bytes, batch: int, how: dict[str, Any]) -> Measured:
        batches = target.runs(keys, batch, self._work(batch), self._random)
        return target.read_all(space, batches, self._block, self._into, **how)

    def _fio_read(self, batch: int, depth: int) -> Measured:
        assert self._fio is not None
        job = Job(
            self._file,
            self._blocks * self._block,
            self._block,
            depth,
            self._work(batch) * batch * self._block,
            run_blocks=batch,
            seed=self._random.getrandbits(30),
        )
        return self._fio.run(job)

    # --- writing

    def _write(self, batch: int, durability: str) -> Row:
        count = self._work(batch)
        synced = durability == "session"
        if synced:
            count = min(count, self._plan.session_batches_max)
        arms = [partial(self._write_ours, batch, count, durability)]
        if self._fio is not None:
            arms.append(partial(self._fio_write, batch, count, synced=synced))
        series = interleave(arms, self._plan.repetitions)
        name = self._name(f"write {durability}", batch)
        if self._fio is None:
            return rate_row(name, series[0], note=NO_FIO)
        depth = min(batch, limits.inflight_per_device_max)
        reference = f"fio write, depth {depth}" + (f", fdatasync every {batch}" if synced else "")
        return rate_row(name, series[0], series[1], reference, target=None if synced else WRITE_TARGET)

    def _write_ours(self, batch: int, count: int, durability: str) -> Measured:
        self._serial += 1
        root = self._base / f"write-{self._serial}"
        with target.opened(root, self._block, capacity=8 * GIB) as (_, space):
            keys = space.chain(target.tokens(batch * count, seed=self._serial))
            batches = [keys[at : at + batch] for at in range(0, len(keys), batch)]
            done = target.write_all(space, batches, self._block, self._source, durability)
        shutil.rmtree(root)
        return done

    def _fio_write(self, batch: int, count: int, *, synced: bool) -> Measured:
        assert self._fio is not None
        total = batch * count * self._block
        depth = min(batch, limits.inflight_per_device_max)
        every = batch if synced else 0
        job = Job(self._file, total, self._block, depth, total, write=True, fdatasync_every=every)
        try:
            return self._fio.run(job)
        finally:
            self._file.unlink(missing_ok=True)


def rows(plan: Plan, base: Path, fio: Fio | None, step: Callable[[str], None]) -> list[Row]:
    """All disk rows. Without fio ours are reported alone, and the targets as not measured."""
    made: list[Row] = []
    for block_bytes in plan.block_bytes:
        where = base / f"disk-{block_bytes}"
        where.mkdir()
        made += DiskRows(plan, where, fio, block_bytes).run(step)
        shutil.rmtree(where)
    if fio is None:
        made.append(unmeasured("cold read against fio", "GB/s", "fio", NO_FIO, target=READ_TARGET))
        made.append(unmeasured("write against fio", "GB/s", "fio", NO_FIO, target=WRITE_TARGET))
    return made
