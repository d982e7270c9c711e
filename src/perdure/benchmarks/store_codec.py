"""Rows of the lossless codec: restoring KV from a slow device faster than its raw rate, and the capacity gained.

Contract
- The device is this machine's, held to `RATES` by the throttled sibling of the files seam; fio is held to the same rate
  by its own limiter and reads a file of the size that the records have uncompressed, with the same runs of blocks.
- The rate counts KV bytes delivered into the caller's memory, verified, decoded and compared with what was stored.
- Capacity is what the records take on the disk without the codec over what they take with it, headers included.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import perdure
from perdure.benchmarks import kv_sample, target
from perdure.benchmarks.fio import Fio, Job
from perdure.benchmarks.harness import Measured, Row, interleave, rate_row, row, unmeasured
from perdure.benchmarks.target import Bytes, Plan, WrongResult
from perdure.io.files import PosixFiles
from perdure.io.siblings import ThrottledFiles

RATES = (500_000_000, 1_000_000_000)
RESTORE_TARGET = 1.3
CAPACITY_TARGET = 1.4
BATCH = 256  # a context of 4,096 tokens restored by one call
PASSES = 4
UNTHROTTLED = 1e12


def throttled(rate: float) -> perdure.Seams:
    """A device that reads `rate` bytes per second; writes are not held back, they only prepare."""
    return perdure.Seams(files=lambda root: ThrottledFiles(PosixFiles(root), rate, UNTHROTTLED))


class _Arms:
    """One sample, stored with and without the codec."""

    def __init__(self, base: Path, data: Bytes, fio: Fio | None):
        self._base, self._data, self.fio = base, data, fio
        self.blocks = len(data) // kv_sample.BLOCK_BYTES
        self.batch = min(BATCH, self.blocks)
        self.keys: dict[str, Bytes] = {}
        self.stored: dict[str, int] = {}
        self._into = target.random_bytes(self.batch * kv_sample.BLOCK_BYTES)
        self._rng = random.Random(9)
        self._file = base / "fio.data"

    def fill(self) -> None:
        for codec in ("on", "off"):
            with target.opened(self._base / codec, kv_sample.BLOCK_BYTES, codec=codec) as (store, space):
                self.keys[codec] = space.chain(target.tokens(self.blocks))
                target.fill(space, self.keys[codec], kv_sample.BLOCK_BYTES, self._data)
                tenants = store.status()["tenants"]
                self.stored[codec] = sum(tenant["stored_bytes"] for tenant in tenants.values())
        if self.fio is not None:
            self.fio.prepare(self._file, len(self._data))

    def check(self, space: Any, codec: str) -> None:
        """Everything comes back as it was stored."""
        for at in range(0, self.blocks - self.batch + 1, self.batch):
            space.read(self.keys[codec][at : at + self.batch], into=self._into)
            start = at * kv_sample.BLOCK_BYTES
            if not np.array_equal(self._into, self._data[start : start + len(self._into)]):
                raise WrongResult(f"codec {codec}: blocks from {at} on came back changed")

    def restore(self, space: Any, codec: str) -> Measured:
        batches = target.runs(self.keys[codec], self.batch, PASSES * self.blocks // self.batch, self._rng)
        return target.read_all(space, batches, kv_sample.BLOCK_BYTES, self._into, direct=True)

    def raw(self, rate: int) -> Measured:
        assert self.fio is not None
        nbytes = PASSES * self.blocks // self.batch * self.batch * kv_sample.BLOCK_BYTES
        job = Job(
            self._file,
            len(self._data),
            kv_sample.BLOCK_BYTES,
            8,
            nbytes,
            run_blocks=self.batch,
            rate_bytes_per_s=rate,
            seed=self._rng.getrandbits(30),
        )
        return self.fio.run(job)


def rows(
    plan: Plan,
    base: Path,
    fio: Fio | None,
    sample: os.PathLike[str] | str | None,
    cache_dir: os.PathLike[str] | str | None,
    step: Callable[[str], None],
) -> list[Row]:
    """Restore rate at each device rate against raw reads, and capacity. sample, cache_dir: see `kv_sample.sample`."""
    step("codec: sample")
    data, what = kv_sample.sample(sample, plan.codec_blocks, cache_dir)
    where = base / "codec"
    where.mkdir()
    arms = _Arms(where, data, fio)
    arms.fill()
    made = [
        row(
            f"capacity gained by the codec, {what}",
            "x",
            [arms.stored["off"] / arms.stored["on"]],
            [1.0],
            "the same blocks stored without it",
            target=CAPACITY_TARGET,
        )
    ]
    for rate in RATES:
        step(f"codec: restore at {rate // 1_000_000} MB/s")
        made += _restore_rows(arms, plan, where, rate, what)
    shutil.rmtree(where)
    return made


def _restore_rows(arms: _Arms, plan: Plan, where: Path, rate: int, what: str) -> list[Row]:
    device = f"{rate / 1e9:g} GB/s device"
    name = f"restore with the codec, {what}, {device}"
    seams = throttled(rate)
    with (
        target.opened(where / "on", kv_sample.BLOCK_BYTES, codec="on", seams=seams) as (_, coded),
        target.opened(where / "off", kv_sample.BLOCK_BYTES, codec="off", seams=seams) as (_, plain),
    ):
        arms.check(coded, "on")
        runs = [partial(arms.restore, coded, "on"), partial(arms.restore, plain, "off")]
        if arms.fio is not None:
            runs.append(partial(arms.raw, rate))
        series = interleave(runs, plan.repetitions)
    made = [
        rate_row(f"restore without the codec, {what}, {device}", series[1], series[2], f"fio held to {device}")
        if len(series) > 2
        else rate_row(f"restore without the codec, {what}, {device}", series[1])
    ]
    if len(series) > 2:
        reference = f"fio held to the same rate, randread:{arms.batch}"
        made.insert(0, rate_row(name, series[0], series[2], reference, target=RESTORE_TARGET))
    else:
        made.insert(0, rate_row(name, series[0], series[1], "the same reads without the codec", target=RESTORE_TARGET))
        made.append(unmeasured(f"{name}, against fio", "GB/s", "fio", "fio is not installed", target=RESTORE_TARGET))
    return made
