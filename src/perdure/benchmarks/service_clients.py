"""Rows of `bench service` about many clients: some at work, and how much a thousand idle ones cost them.

Contract
- A client is a connection of its own (`perdure.connect`), with a keyspace and the service's tables mapped. Active ones
  are threads of a few processes, idle ones are spread over as many others.
- The work is a view of one small block in DRAM and its release: two messages each, because a read of such a block needs
  none and says nothing about the service. Clients begin together; the rate is all views by the time of the last one.
- With and without the idle clients take turns; these connect and disconnect while nothing is timed.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import perdure
from perdure.benchmarks import peer_protocol, target
from perdure.benchmarks.harness import Row, interleave, row, size_name
from perdure.benchmarks.peers import Worker
from perdure.benchmarks.service_host import Host, Plan
from perdure.benchmarks.target import WrongResult
from perdure.limits import GIB, KIB

BLOCK_BYTES = 64 * KIB
BLOCKS = 64
START_LEAD_S = 0.2
CONNECT_S = 30.0  # of a service that many connect to at once
DESCRIPTORS_PER_CLIENT = 8
CONNECTIONS_PER_CLIENT = 3  # one that listens, one that asks; more where calls overlap: the limit counts them all
POOL_BYTES = GIB


def raise_descriptors(wanted: int) -> None:
    """As many open descriptors as are wanted, or as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextmanager
def more_descriptors(wanted: int) -> Iterator[None]:
    """For a process started meanwhile, which inherits it; this one has its own limit again afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_descriptors(wanted)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Clients:
    """Clients in this process, told over a pipe."""

    def __init__(self) -> None:
        self._clients: list[tuple[Any, Any]] = []

    def connect(self, where: str, count: int) -> dict[str, Any]:
        """So many more clients, each of which has looked up the blocks once."""
        raise_descriptors(DESCRIPTORS_PER_CLIENT * (count + len(self._clients)) + 256)
        found = 0
        for _ in range(count):
            store = perdure.connect(where, name="bench", wait_s=CONNECT_S)
            space = target.keyspace(store, BLOCK_BYTES)
            self._clients.append((store, space))
            found += space.lookup(space.chain(target.tokens(BLOCKS)))
        return {"found": found}

    def fill(self) -> dict[str, Any]:
        """Store the blocks and bring them into DRAM."""
        space = self._clients[0][1]
        keys, source = space.chain(target.tokens(BLOCKS)), target.random_bytes(BLOCKS * BLOCK_BYTES)
        target.fill(space, keys, BLOCK_BYTES, source, "ephemeral")
        with space.view(keys) as view:
            same = sum(
                block is not None and np.array_equal(np.frombuffer(block, np.uint8), source[at : at + BLOCK_BYTES])
                for block, at in zip(view.blocks, range(0, len(source), BLOCK_BYTES), strict=True)
            )
        return {"same": same}

    def work(self, calls: int, start_at: float) -> dict[str, Any]:
        """Every client makes its calls from `start_at` (monotonic seconds) on: their seconds, and when all ended."""
        with ThreadPoolExecutor(len(self._clients)) as threads:
            at_once = threading.Barrier(len(self._clients))
            told = list(threads.map(lambda one: _views(one, calls, start_at, at_once), self._clients))
        return {
            "seconds": [second for seconds, _, _ in told for second in seconds],
            "seen": sum(seen for _, seen, _ in told),
            "ended": max(ended for _, _, ended in told),
        }

    def disconnect(self) -> dict[str, Any]:
        for store, _ in self._clients:
            store.close()
        self._clients.clear()
        return {}


def _views(client: tuple[Any, Any], calls: int, start_at: float, at_once: threading.Barrier) -> Any:
    _, space = client
    keys = space.chain(target.tokens(BLOCKS))
    seconds, seen = [], 0
    at_once.wait()
    time.sleep(max(0.0, start_at - time.monotonic()))
    for call in range(calls):
        place = call % BLOCKS
        began = time.perf_counter()
        view = space.view(keys[place : place + 1])
        seen += view.report.from_memory
        view.release()
        seconds.append(time.perf_counter() - began)
    return seconds, seen, time.monotonic()


@dataclass(frozen=True, slots=True)
class Load:
    """Of one repetition: views per second, and the 99th percentile of a view and its release."""

    calls_per_s: float
    p99_ms: float


class Crowd:
    """Active and idle clients of one service, in processes of their own."""

    def __init__(self, plan: Plan, where: str):
        self._plan, self._where = plan, where
        command = [sys.executable, "-m", "perdure.benchmarks.service_clients"]
        self.active, self.idle = (
            [Worker(f"{name} clients", command, pause=False, own=True) for _ in range(plan.processes)]
            for name in ("active", "idle")
        )

    def connect(self, workers: Sequence[Worker], count: int, expected: int) -> None:
        share = [count // len(workers) + (at < count % len(workers)) for at in range(len(workers))]
        told = _all(workers, [{"verb": "connect", "where": self._where, "count": one} for one in share])
        found = sum(one["found"] for one in told)
        if found != count * expected:
            raise WrongResult(f"{count} clients found {found} blocks, not {expected} each")

    def prepare(self) -> None:
        first = self.active[0]
        first.ask("connect", where=self._where, count=1)
        if first.ask("fill")["same"] != BLOCKS:
            raise WrongResult("the blocks of a view are not what was stored")
        first.ask("disconnect")
        self.connect(self.active, self._plan.processes * self._plan.threads, BLOCKS)
        self.load(idle=0)

    def load(self, idle: int) -> Load:
        if idle:
            self.connect(self.idle, idle, BLOCKS)
        start_at = time.monotonic() + START_LEAD_S
        calls = self._plan.calls
        told = _all(self.active, [{"verb": "work", "calls": calls, "start_at": start_at}] * len(self.active))
        total = calls * self._plan.processes * self._plan.threads
        if sum(one["seen"] for one in told) != total:
            raise WrongResult(f"not all of {total} views were of blocks in DRAM")
        seconds = np.concatenate([one["seconds"] for one in told])
        if idle:
            _all(self.idle, [{"verb": "disconnect"}] * len(self.idle))
        wall_s = max(one["ended"] for one in told) - start_at
        return Load(total / wall_s, float(np.percentile(seconds, 99)) * 1e3)

    def end(self) -> None:
        for worker in (*self.active, *self.idle):
            worker.end()


def _all(workers: Sequence[Worker], questions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask every worker its question, at the same time."""
    with ThreadPoolExecutor(len(workers)) as threads:
        return list(threads.map(lambda pair: pair[0].ask(**pair[1]), zip(workers, questions, strict=True)))


def rows(plan: Plan, base: Path, step: Callable[[str], None]) -> list[Row]:
    """All rows of this module."""
    clients = plan.idle + plan.processes * plan.threads + 1
    most = CONNECTIONS_PER_CLIENT * clients
    with more_descriptors(DESCRIPTORS_PER_CLIENT * clients + 256):
        started = Host(base / "clients", memory=POOL_BYTES, clients_max=most)
    with started as host:
        crowd = Crowd(plan, str(host.socket))
        try:
            step("clients at work")
            crowd.prepare()
            many, alone = interleave([partial(crowd.load, plan.idle), partial(crowd.load, 0)], plan.repetitions)
        finally:
            crowd.end()
    active = plan.processes * plan.threads
    what = f"view of 1 block of {size_name(BLOCK_BYTES)} and its release, {active} clients at work, {plan.idle:,} idle"
    note = "informs"
    return [
        row(
            f"{what}: rate",
            "calls/s",
            [one.calls_per_s for one in many],
            [one.calls_per_s for one in alone],
            f"the {active} clients alone",
            note=note,
        ),
        row(
            f"{what}: p99",
            "ms",
            [one.p99_ms for one in many],
            [one.p99_ms for one in alone],
            f"the {active} clients alone",
            better="lower",
            note=note,
        ),
    ]


if __name__ == "__main__":
    peer_protocol.answer(Clients(), ("connect", "fill", "work", "disconnect"))
