"""What the sweep tests share: stores to start from, a place to run them fast, work with a bound, and what must hold
after every fault."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from perdure import BlockStatus, Keyspace, Store
from perdure.catalog.api import KeyArray
from perdure.io.faulty import Fault, NthFault
from support import blocks

BLOCK_BYTES = 60_000
CAPACITY = 16 << 20  # segments of 1 MiB, and room for everything
BOUND_S = 60.0  # nothing takes so long; a verb that does hangs
SHM = Path("/dev/shm")

# (chain, blocks, durability): what the starting stores hold, all of it acknowledged and committed
CHAINS = [(1, 4, "session"), (2, 3, "ephemeral"), (3, 3, "retained"), (4, 2, "session"), (5, 20, "session")]


@contextlib.contextmanager
def quick_folder(fallback: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a sweep opens hundreds of stores, and an fsync of a disk takes a while."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(SHM).free > 256 << 20 and os.access(SHM, os.W_OK):
            fallback = Path(tempfile.mkdtemp(prefix="sweep-", dir=SHM))
    try:
        yield fallback
    finally:
        if fallback.parent == SHM:
            shutil.rmtree(fallback, ignore_errors=True)


def space_of(store: Store, tenant: str = "acme") -> Keyspace:
    return blocks.keyspace(store, tenant=tenant, block_bytes=BLOCK_BYTES)


def make_store(at: Path, *, died: bool) -> Path:
    """A store with `CHAINS` in it, closed, or as a killed process leaves it (`died`: open segments)."""
    source = at / "source"
    with perdure.open(source, capacity=CAPACITY, memory=0, mirror=at / "source-mirror") as store:
        space = space_of(store)
        for chain, count, durability in CHAINS:
            report = blocks.write(
                space, blocks.chain(space, chain, count), durability, ttl_s=86_400.0 if chain == 4 else None
            )
            assert report.durable
        store.sync()
        assert store.wait_ready(BOUND_S)
        if died:
            copy_store(at, "source", "died")
    if not died:
        copy_store(at, "source", "closed")
    shutil.rmtree(source)
    shutil.rmtree(at / "source-mirror")
    return at / ("died" if died else "closed")


def copy_store(at: Path, name: str, new: str) -> Path:
    """A store's directory and its mirror under a new name."""
    for suffix in ("", "-mirror"):
        shutil.rmtree(at / f"{new}{suffix}", ignore_errors=True)
        shutil.copytree(at / f"{name}{suffix}", at / f"{new}{suffix}")
    return at / new


class Armed:
    """Passes on to `plan` while `on`."""

    def __init__(self, plan: NthFault):
        self.plan, self.on = plan, False

    def next(self, op: str, path: str, nbytes: int) -> Fault | None:
        return self.plan.next(op, path, nbytes) if self.on else None

    def wait(self) -> None:
        self.plan.wait()


def bounded(work: Callable[[], Any], what: str) -> Any:
    """Do it in a thread; the test fails if it hangs or raises."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, work()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    for _ in range(int(BOUND_S)):  # in slices: a machine that stood still meanwhile costs one of them
        thread.join(1.0)
        if not thread.is_alive():
            break
    if not outcome:
        pytest.fail(f"{what}: hangs")
    fine, value = outcome[0]
    if not fine:
        if not isinstance(value, Exception):
            raise value
        pytest.fail(f"{what}: {''.join(traceback.format_exception(value))}")
    return value


def left_open(folder: Path) -> list[str]:
    """Descriptors on files below `folder`, and threads of the store."""
    found = [f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("perdure-")]
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith(str(folder)):
                found.append(target)
    return found


def assert_nothing_left(folder: Path) -> None:
    give_up = time.monotonic() + 10.0
    while left := left_open(folder):
        assert time.monotonic() < give_up, left
        time.sleep(0.002)


def assert_right(space: Keyspace, keys: KeyArray, *, corrupt: bool = False, **options: Any) -> np.ndarray[Any, Any]:
    """Read under faults: each block is found and equal, or reported; `corrupt`: bytes may really have been damaged."""
    statuses = blocks.read_back(space, keys, **options)
    assert blocks.WRONG not in statuses, f"wrong bytes were delivered: {statuses}"
    return statuses


def assert_all_there(space: Keyspace, chains: dict[int, int]) -> None:
    """Chain -> number of blocks acknowledged."""
    for chain, count in chains.items():
        statuses = blocks.read_back(space, blocks.chain(space, chain, count))
        assert (statuses == BlockStatus.FOUND).all(), f"chain {chain}: {statuses}"
