"""`perdure bench storm`: many who want the same at the same moment, and a service that dies under load.

Rows: how long after a publish a waiter knows; the prefill work of agents that ask for one cold prefix at once, with
single flight and without; what a publisher pays for ten thousand waiters; how soon sessions are served again after the
service was killed and replaced, and what they had to compute twice.

Contract
- Services are processes of their own, clients are in others (`storm_worker`); prefill is simulated by sleeping.
- A wake-up is timed from the moment at which the publish is told to who waits until the waiter's call has returned:
  in the same process, or in another, through a service in this process that the publisher's thread is one of.
- Data goes to a temporary directory below `directory` and is removed at the end. Needs the development packages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import perdure
from perdure import limits
from perdure.benchmarks import target
from perdure.benchmarks.harness import Report, Row, limit_row, machine, row
from perdure.benchmarks.progress import Progress
from perdure.benchmarks.storm_worker import blocks_of, watch
from perdure.benchmarks.target import WrongResult
from perdure.catalog.api import fingerprints
from perdure.flight import Following
from perdure.limits import KIB, MIB
from perdure.service.messages import Count, Message
from perdure.service.parking import Parking, Ticket
from perdure.service.server import Server, shared_pool
from perdure.service.sockets import address_text
from perdure.service.verbs import Waiting
from perdure.waiting import Waiter

WAKE_LIMIT_MS = 1.0
WORK_LIMIT = 1.05
GOODPUT_SHARE = 0.9
SEED = 1
_BIN_S = 0.25
_PAUSE_S = 0.003  # for the waiter to wait again
_CAPACITY, _MEMORY = "2GiB", "512MiB"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `blocks` of `block_bytes`: the cold prefix, published `step` blocks at a time."""

    wakes: int
    agents: int
    processes: int
    blocks: int
    step: int
    block_bytes: int
    tokens_per_s: float
    parked: int
    publishes: int
    sessions: int
    before_s: float
    after_s: float
    think_s: float


FULL = Plan(1000, 64, 4, 1875, 64, 16 * KIB, 10_000.0, 10_000, 12, 200, 8.0, 16.0, 1.0)
QUICK = Plan(200, 32, 2, 480, 32, 16 * KIB, 10_000.0, 2_000, 8, 60, 3.0, 6.0, 0.5)


class Crew:
    """Worker processes with one job, begun together."""

    def __init__(self, jobs: Sequence[dict[str, Any]]):
        command, here = [sys.executable, "-m", "perdure.benchmarks.storm_worker"], os.pathsep.join(sys.path)
        self._workers = [
            subprocess.Popen(
                [*command, json.dumps(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": here},
            )
            for job in jobs
        ]  # fmt: skip

    def __enter__(self) -> Crew:
        return self

    def start(self) -> float:
        """When all of them began."""
        for worker in self._workers:
            self._line(worker)
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        return time.monotonic()

    def poke(self) -> None:
        """A byte to each."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write("x")
            worker.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(self._line(worker)) for worker in self._workers]

    @staticmethod
    def _line(worker: subprocess.Popen[str]) -> str:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            raise WrongResult("a worker of the storm has ended; its error is above")
        return line

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
            worker.communicate()


def run(
    directory: os.PathLike[str] | str, *, quick: bool = False, json: bool = False, plan: Plan | None = None
) -> Report:
    """Raises WrongResult when the store does not do the work that is timed. `json`: no progress is drawn."""
    from perdure.testing.transport import ServiceProcess

    base = Path(tempfile.mkdtemp(prefix="storm-", dir=directory))
    chosen = plan or (QUICK if quick else FULL)
    report = Report("Storms: many who want the same, and a service that dies", machine(base, quick=quick))
    usual = sys.getswitchinterval()
    sys.setswitchinterval(limits.switch_interval_s)  # as in a service
    try:
        with Progress("bench storm", 7, silent=json) as progress:
            progress.step("wake-up, of the machine and embedded")
            report.rows += wake_bare(chosen)
            report.rows += wake_embedded(chosen, base / "embedded")
            progress.step("publishing beside waiters")
            report.rows.append(publish_beside_waiters(chosen, base / "parked"))
            for kind in ("unix", "tcp"):
                progress.step(f"wake-up, {kind}")
                report.rows += wake_served(chosen, base / kind, kind)
            flags = {"capacity": _CAPACITY, "memory": _MEMORY}
            with ServiceProcess(base / "fly", **flags) as service:
                progress.step(f"{chosen.agents} agents, one prefix")
                report.rows += cold_prefix(chosen, service.address("unix"), progress)
            progress.step("kill and restart")
            report.rows += killed(chosen, base / "killed", flags)
        return report
    finally:
        sys.setswitchinterval(usual)
        shutil.rmtree(base, ignore_errors=True)


# --- wake-ups
def wake_bare(plan: Plan) -> list[Row]:
    """What the machine itself takes, with whatever else runs on it."""
    sent = []
    with Crew([{"job": "poked", "blocks": plan.wakes}]) as crew:
        crew.start()
        for _ in range(plan.wakes):
            time.sleep(_PAUSE_S)
            sent.append(time.monotonic())
            crew.poke()
        seen = crew.answers()[0]["seen"]
    return _wake_rows("a byte through a pipe", seen, sent, limit=False)


def wake_embedded(plan: Plan, root: Path) -> list[Row]:
    with target.opened(root, plan.block_bytes, capacity=None, memory=0) as (store, space):
        job, seen, ready = {"blocks": plan.wakes, "seed": SEED, "block_bytes": plan.block_bytes}, {}, threading.Event()
        thread = threading.Thread(target=lambda: seen.update(watch(store, job, ready.set)), name="perdure-bench-waiter")
        thread.start()
        ready.wait()
        published = publish(store, space, plan)
        thread.join()
    return _wake_rows("embedded", seen["seen"], published)


def wake_served(plan: Plan, root: Path, kind: str) -> list[Row]:
    with ExitStack() as stack:
        seams = perdure.Seams(pool=shared_pool)
        store, space = stack.enter_context(target.opened(root, plan.block_bytes, memory=64 * MIB, seams=seams))
        server = Server(store, socket=root / "storm.sock", listen=("127.0.0.1", 0))
        server.start()
        stack.callback(server.stop)
        assert server.node is not None
        address = f"unix://{server.path}" if kind == "unix" else f"tcp://{address_text(*server.node.address)}"
        job = {"job": "watch", "address": address, "blocks": plan.wakes, "seed": SEED, "block_bytes": plan.block_bytes}
        crew = stack.enter_context(Crew([job]))
        crew.start()
        time.sleep(_PAUSE_S)
        published = publish(store, space, plan)
        seen = crew.answers()[0]["seen"]
    return _wake_rows(kind, seen, published)


def publish(store: Any, space: Any, plan: Plan) -> list[float]:
    """Store the blocks of the chain one by one; when those who wait were told of each."""
    keys = space.chain(target.tokens(plan.wakes, SEED))
    blocks, published = blocks_of(keys, plan.block_bytes), list[float]()
    for at, name in enumerate(fingerprints(keys).tolist()):
        time.sleep(_PAUSE_S)
        store.core.waiters.add(Waiter(lambda _: published.append(time.monotonic())), (name,))
        space.write(keys[at : at + 1], blocks[at : at + 1], durability="ephemeral")
    return published


def _wake_rows(kind: str, seen: list[float], published: list[float], *, limit: bool = True) -> list[Row]:
    p50, p99 = np.percentile(np.subtract(seen, published) * 1e3, [50, 99]).tolist()
    name = f"wake-up p99, {kind}"
    return [
        row(f"wake-up p50, {kind}", "ms", [p50], better="lower"),
        limit_row(name, "ms", [p99], WAKE_LIMIT_MS) if limit else row(name, "ms", [p99], better="lower"),
    ]


def publish_beside_waiters(plan: Plan, root: Path) -> Row:
    """A write whose last block `plan.parked` questions of a service wait for, and one that nobody waits for."""
    beside, quiet, answers = list[float](), list[float](), list[Message]()
    with target.opened(root, plan.block_bytes, capacity=None, memory=0) as (store, space):
        parking = Parking(store.core)
        parking.start()
        try:
            for turn in range(2 * plan.publishes):
                keys = space.chain(target.tokens(plan.step, 100 + turn))
                blocks, waited_for = blocks_of(keys, plan.block_bytes), turn % 2 == 0
                for number in range(plan.parked if waited_for else 0):
                    wish = Following(store.core, keys, len(keys) - 1)
                    until = time.monotonic() + 600.0
                    waiting = Waiting(wish, until, partial(Count, number))
                    parking.park(Ticket(parking, number, waiting, answers.append))
                began = time.perf_counter()
                space.write(keys, blocks, durability="ephemeral")
                (beside if waited_for else quiet).append((time.perf_counter() - began) * 1e3)
                while len(parking):
                    time.sleep(0.001)
        finally:
            parking.stop()
    if len(answers) != plan.parked * plan.publishes:
        raise WrongResult(f"{len(answers)} of {plan.parked * plan.publishes} parked questions were answered")
    name = f"write of {plan.step} blocks that {plan.parked} wait for"
    return row(name, "ms", beside, quiet, "nobody waits", better="lower")


# --- one prefix
def cold_prefix(plan: Plan, address: str, progress: Progress) -> list[Row]:
    work, seconds = _fly(plan, address, alone=False)
    progress.step("the same without single flight")
    naive, naive_s = _fly(plan, address, alone=True)
    alone_s = plan.blocks * target.BLOCK_TOKENS / plan.tokens_per_s
    what = f"{plan.agents} agents, one cold prefix of {plan.blocks * target.BLOCK_TOKENS} tokens"
    return [
        limit_row(f"{what}: prefill work", "of one", [work], WORK_LIMIT),
        row(f"{what}: prefill work beside none", "of one", [work], [naive], "no single flight", better="lower"),
        row(f"{what}: until all have it", "s", [seconds], [alone_s], "one prefill, computed", better="lower",
            note=f"without single flight {naive_s:.2f} s: simulated prefills do not slow each other down"),
    ]  # fmt: skip


def _fly(plan: Plan, address: str, *, alone: bool) -> tuple[float, float]:
    """(blocks computed by all / blocks, seconds until the last agent has the prefix)."""
    job = {
        "job": "fly", "address": address, "agents": plan.agents // plan.processes, "blocks": plan.blocks,
        "step": plan.step, "block_bytes": plan.block_bytes, "tokens_per_s": plan.tokens_per_s, "alone": alone,
        "seed": 7 + alone,
    }  # fmt: skip
    with Crew([job] * plan.processes) as crew:
        began = crew.start()
        answers = crew.answers()
    computed = sum(sum(answer["computed"]) for answer in answers)
    return computed / plan.blocks, max(max(answer["done"]) for answer in answers) - began


# --- death
def killed(plan: Plan, root: Path, flags: dict[str, str]) -> list[Row]:
    from perdure.testing.transport import ServiceProcess

    with ExitStack() as stack:
        service = stack.enter_context(ServiceProcess(root, **flags))
        job = {
            "job": "sessions", "address": service.address("unix"), "sessions": plan.sessions // plan.processes,
            "block_bytes": plan.block_bytes, "tokens_per_s": plan.tokens_per_s, "history": 24, "new": 2,
            "think_s": plan.think_s, "seconds": plan.before_s + plan.after_s,
        }  # fmt: skip
        crew = stack.enter_context(Crew([job | {"seed": seed} for seed in range(plan.processes)]))
        began = crew.start()
        time.sleep(plan.before_s)
        died = time.monotonic()
        service.kill()
        stack.enter_context(ServiceProcess(root, **flags))
        restarted_s = time.monotonic() - died
        answers = crew.answers()
    turns = np.sort(np.concatenate([answer["turns"] for answer in answers]))
    computed, distinct = (sum(answer[name] for answer in answers) for name in ("computed", "distinct"))
    back_s = back_after(turns, began + plan.before_s / 2, died)
    what = f"SIGKILL of the service under {plan.sessions} sessions"
    note = f"the service itself is ready {restarted_s:.2f} s after its death"
    back = [] if back_s is None else [back_s]
    return [
        row(f"{what}: until goodput is back at {GOODPUT_SHARE:.0%}", "s", back, better="lower",
            note=note if back else f"not within {plan.after_s} s; {note}"),
        limit_row(f"{what}: prefill work", "of needed", [computed / distinct], WORK_LIMIT),
    ]  # fmt: skip


def back_after(turns: Any, since: float, died: float) -> float | None:
    """Seconds from `died` to the end of the first bin, after the worst one, with GOODPUT_SHARE of the turns there were
    from `since` on; None if there is none."""
    before = np.count_nonzero((turns >= since) & (turns < died)) / (died - since)
    edges = np.arange(died, turns[-1] if len(turns) else died, _BIN_S)
    counts = np.histogram(turns, edges)[0] if len(edges) > 1 else np.zeros(0)
    worst = int(counts[: len(counts) // 2 + 1].argmin()) if len(counts) else 0
    good = worst + np.flatnonzero(counts[worst:] / _BIN_S >= GOODPUT_SHARE * before)
    return float(edges[good[0] + 1] - died) if len(good) else None
