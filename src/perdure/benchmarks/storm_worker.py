"""The clients of `perdure bench storm`, many in one process: threads that ask, wait, compute and store.

Contract
- One job per process, as JSON in the first argument. It says "ready" on stdout, begins at a line on stdin, and answers
  with a line of JSON; times are readings of CLOCK_MONOTONIC, which all processes of a machine share.
- Computing is sleeping: blocks / the rate of the job. What is computed is counted by who computes it.
- Every block begins with its key, and is looked at where it is read.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import perdure
from perdure import limits
from perdure.benchmarks import target
from perdure.benchmarks.target import Bytes, WrongResult
from perdure.errors import ServiceUnavailable

PATIENCE_S = 60.0
_RETRY_S = 0.02


def blocks_of(keys: Bytes, block_bytes: int) -> Bytes:
    """Contents that name their block."""
    made = np.zeros((len(keys), block_bytes), np.uint8)
    made[:, : limits.key_bytes] = keys
    return made


def check(keys: Bytes, blocks: Bytes) -> None:
    if not np.array_equal(blocks[:, : limits.key_bytes], keys):
        raise WrongResult("a block that was read is another one")


def compute(blocks: int, tokens_per_s: float) -> None:
    time.sleep(blocks * target.BLOCK_TOKENS / tokens_per_s)


def watch(store: Any, job: dict[str, Any], go: Callable[[], None]) -> dict[str, Any]:
    """Follow a chain to its end; when each block was seen first."""
    space = target.keyspace(store, job["block_bytes"])
    keys, seen = space.chain(target.tokens(job["blocks"], job["seed"])), list[float]()
    go()
    while len(seen) < len(keys):
        found = space.follow(keys, known=len(seen), wait_s=PATIENCE_S)
        seen += [time.monotonic()] * (found - len(seen))
    return {"seen": seen}


def poked(job: dict[str, Any], go: Callable[[], None]) -> dict[str, Any]:
    """When each byte came by stdin."""
    seen = list[float]()
    go()
    while len(seen) < job["blocks"]:
        came = os.read(0, job["blocks"])
        if not came:
            break
        seen += [time.monotonic()] * len(came)
    return {"seen": seen}


def fly(store: Any, job: dict[str, Any], go: Callable[[], None]) -> dict[str, Any]:
    """Agents that want the same cold prefix at once. alone: without single flight, as if each were the only one."""
    count, size = job["blocks"], job["block_bytes"]
    space = target.keyspace(store, size)
    keys = space.chain(target.tokens(count, job["seed"]))

    def one(_: int) -> tuple[int, float]:
        computed = 0
        while (known := space.lookup(keys)) < count:
            lease = None if job["alone"] else space.reserve(keys, wait_s=PATIENCE_S)
            if lease is None and not job["alone"]:
                continue
            known = space.lookup(keys)
            for first in range(known, count, job["step"]):
                part = keys[first : first + job["step"]]
                compute(len(part), job["tokens_per_s"])
                computed += len(part)
                space.write(part, blocks_of(part, size), lease=lease, durability="ephemeral")
            if lease is not None:
                space.end_lease(lease)
        done, last = time.monotonic(), keys[-job["step"] :]
        into = np.zeros((len(last), size), np.uint8)
        report = space.read(last, into=into)
        if report.usable != len(last):
            raise WrongResult(f"a prefix that was published cannot be read: {list(report.problems.values())[:1]}")
        check(last, into)
        return computed, done

    with ThreadPoolExecutor(job["agents"]) as pool:
        go()
        outcomes = list(pool.map(one, range(job["agents"])))
    return {"computed": [computed for computed, _ in outcomes], "done": [done for _, done in outcomes]}


def sessions(store: Any, job: dict[str, Any], go: Callable[[], None]) -> dict[str, Any]:
    """Sessions that read their history, compute a little and store it, until the job's time is over."""
    space = target.keyspace(store, job["block_bytes"])
    made = [Session(space, job, number) for number in range(job["sessions"])]
    with ThreadPoolExecutor(len(made)) as pool:
        go()
        end = time.monotonic() + job["seconds"]
        list(pool.map(lambda session: session.run(end), made))
    return {
        "turns": sorted(at for session in made for at in session.turns),
        "computed": sum(session.computed for session in made),
        "distinct": sum(session.distinct for session in made),
    }


class Session:
    """One conversation after another. It keeps what it has computed itself until the store is seen to have it."""

    def __init__(self, space: Any, job: dict[str, Any], number: int):
        self._space, self._job = space, job
        self._random = random.Random(job["seed"] * 10_007 + number)
        self.turns: list[float] = []
        self.computed = self.distinct = 0

    def run(self, end: float) -> None:
        most, new, size = self._job["history"], self._job["new"], self._job["block_bytes"]
        into = np.zeros((most, size), np.uint8)
        while time.monotonic() < end:
            keys = self._space.chain(target.tokens(most, self._random.getrandbits(31)))
            sure = 0  # blocks that were seen in the store; those after them are still in our own memory
            for have in range(0, most, new):
                time.sleep(self._random.uniform(0.5, 1.5) * self._job["think_s"])
                stored = self._stored(keys[:have], end)
                if stored is None:
                    return
                usable = self._space.read(keys[:stored], into=into[:stored]).usable
                check(keys[:usable], into[:usable])
                self.computed += max(0, sure - usable)  # lost after it was seen: prefilled once more
                if usable < have:
                    self._store(keys[usable:have])
                sure = usable
                compute(new, self._job["tokens_per_s"])
                self.computed += new
                self.distinct += new
                self._store(keys[have : have + new])
                self.turns.append(time.monotonic())

    def _stored(self, keys: Bytes, end: float) -> int | None:
        """Leading blocks that the service has, asked until it answers; None at the end of the job."""
        while time.monotonic() < end:
            try:
                mask = self._space.present(keys)
            except ServiceUnavailable:
                time.sleep(_RETRY_S)
                continue
            return len(keys) if mask.all() else int(mask.argmin())
        return None

    def _store(self, keys: Bytes) -> None:
        self._space.write(keys, blocks_of(keys, self._job["block_bytes"]), durability="ephemeral")


JOBS = {"watch": watch, "fly": fly, "sessions": sessions}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    job = json.loads(sys.argv[1])

    def go() -> None:
        say("ready")
        while os.read(0, 1) != b"\n":
            pass

    if job["job"] == "poked":
        say(json.dumps(poked(job, go)))
        return
    with perdure.connect(job["address"]) as store:
        say(json.dumps(JOBS[job["job"]](store, job, go)))


if __name__ == "__main__":
    main()
