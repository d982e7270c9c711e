"""The store as the benchmarks open it, data to put into it, and the plan of what is measured.

Contract: public calls only, with everything on that users have on. Bytes do not compress unless a benchmark says so.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import perdure
from perdure.benchmarks.harness import Measured, Stopwatch
from perdure.errors import PerdureError
from perdure.limits import GIB, KIB, MIB

BLOCK_TOKENS = 16
WEIGHTS = "sha256:" + "0" * 64
Bytes = NDArray[np.uint8]


class WrongResult(PerdureError):
    """The store did not do the work that was to be timed: the figure would mean nothing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures. `dataset_bytes` per block size on the disk, `work_bytes` per repetition."""

    block_bytes: tuple[int, ...]
    batches: tuple[int, ...]
    dataset_bytes: int
    work_bytes: int
    batch_bytes_max: int
    session_batches_max: int
    repetitions: int
    catalog_blocks: int
    codec_blocks: int

    def batch(self, wanted: int, block_bytes: int) -> int:
        """`wanted` blocks, or as many as the bound on a batch's bytes allows."""
        return max(1, min(wanted, self.batch_bytes_max // block_bytes))


FULL = Plan((64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB), (1, 16, 256), GIB, 256 * MIB, 512 * MIB, 64, 5, 1_000_000, 256)
QUICK = Plan((64 * KIB, 2 * MIB), (1, 16), 128 * MIB, 64 * MIB, 64 * MIB, 16, 5, 100_000, 128)


def plan_for(directory: Path, *, quick: bool) -> Plan:
    """FULL or QUICK, with a smaller data set where the disk has little room."""
    plan = QUICK if quick else FULL
    room = shutil.disk_usage(directory).free // 8  # the store, fio's file, and what the writes leave until removed
    if room >= plan.dataset_bytes:
        return plan
    dataset = max(64 * MIB, room // (64 * MIB) * (64 * MIB))
    work = min(plan.work_bytes, dataset)
    return dataclasses.replace(
        plan, dataset_bytes=dataset, work_bytes=work, batch_bytes_max=min(plan.batch_bytes_max, work)
    )


def random_bytes(nbytes: int, seed: int = 3) -> Bytes:
    """Page-aligned bytes that do not compress."""
    buffer = perdure.aligned_buffer(nbytes)
    generator = np.random.default_rng(seed)
    for at in range(0, nbytes, 8 * MIB):
        end = min(nbytes, at + 8 * MIB)
        buffer[at:end] = np.frombuffer(generator.bytes(end - at), np.uint8)
    return buffer


def tokens(blocks: int, seed: int = 1, block_tokens: int = BLOCK_TOKENS) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 50_000, blocks * block_tokens, np.uint32)


@contextmanager
def opened(
    root: Path,
    block_bytes: int,
    *,
    memory: int = 0,
    capacity: int | None = 64 * GIB,
    codec: str = "off",
    **options: Any,
) -> Iterator[tuple[Any, Any]]:
    """(store, keyspace) of an opened store."""
    with perdure.open(root, capacity=capacity, memory=memory, **options) as store:
        yield store, keyspace(store, block_bytes, codec)


def keyspace(store: Any, block_bytes: int, codec: str = "off") -> Any:
    layout = perdure.KVLayout(
        block_tokens=BLOCK_TOKENS, block_bytes=block_bytes, dtype="bfloat16", order="layer,kv,head,token,dim"
    )
    return store.keyspace(model="benchmark", weights=WEIGHTS, layout=layout, tenant="benchmark", codec=codec)


def fill(space: Any, keys: Bytes, block_bytes: int, source: Bytes, durability: str = "session") -> None:
    """Store `keys` in chain order; block i holds the i-th block of `source`, cyclically."""
    count = max(1, len(source) // block_bytes)
    for at in range(0, len(keys), count):
        some = keys[at : at + count]
        report = space.write(some, source[: len(some) * block_bytes], durability=durability)
        if report.stored != len(some):
            raise WrongResult(f"{report.stored} of {len(some)} blocks stored: {list(report.reasons.values())[:1]}")


def write_all(space: Any, batches: list[Bytes], block_bytes: int, source: Bytes, durability: str) -> Measured:
    """Time the writes of all batches; raises WrongResult unless every block was stored."""
    stored, total = 0, sum(map(len, batches))
    with Stopwatch() as watch:
        for keys in batches:
            stored += space.write(keys, source[: len(keys) * block_bytes], durability=durability).stored
    if stored != total:
        raise WrongResult(f"{stored} of {total} blocks stored")
    return watch.of(total * block_bytes)


def read_all(space: Any, batches: list[Bytes], block_bytes: int, into: Bytes, **how: Any) -> Measured:
    """Time the reads of all batches into one buffer; raises WrongResult unless every block was delivered."""
    usable, total = 0, sum(map(len, batches))
    with Stopwatch() as watch:
        for keys in batches:
            usable += space.read(keys, into=into[: len(keys) * block_bytes], **how).usable
    if usable != total:
        raise WrongResult(f"{usable} of {total} blocks delivered")
    return watch.of(total * block_bytes)


def runs(keys: Bytes, batch: int, count: int, rng: random.Random) -> list[Bytes]:
    """`count` batches of consecutive keys from random places of a chain; no place twice until all were used."""
    places = list(range(0, len(keys) - batch + 1, batch))
    chosen: list[int] = []
    while len(chosen) < count:
        chosen += rng.sample(places, min(len(places), count - len(chosen)))
    return [keys[at : at + batch] for at in chosen]
