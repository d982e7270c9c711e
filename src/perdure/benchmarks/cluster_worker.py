"""One process of `bench cluster`: services of a shared store, and what they do when they are asked.

    python -m perdure.benchmarks.cluster_worker SETUP_JSON

Contract
- The stores are those that `perdure serve` opens, each with a state directory of its own; nothing but the files of
  counted ones is behind a seam. Questions and answers are those of `sessions_child.Child`.
- What is timed is the verb alone; its CPU seconds are this process's, all threads.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import perdure
from perdure import Seams
from perdure.benchmarks.harness import Stopwatch
from perdure.benchmarks.target import Bytes, WrongResult, fill, keyspace, random_bytes, tokens
from perdure.catalog.api import Durability, SegmentRecord, SegmentState
from perdure.catalog.valkey import ValkeyIndex
from perdure.catalog.valkey_control import ValkeyControl
from perdure.errors import PerdureError
from perdure.io.files import PosixFiles
from perdure.io.siblings import FaultyFiles, NthFault
from perdure.sharing import Among

_POLL_S = 0.0002
_GIVE_UP_S = 60.0
_LEASE_S = 120.0
_SESSIONS, _SESSION_BYTES = "bench", 1000
_ROUND_TRIES = 5  # the least of them: a beat in the background may count too


@dataclass(frozen=True, slots=True)
class Setup:
    """states: a state directory for each service of this process. counted: what they read is counted, and slower."""

    data: str
    catalog: str
    states: list[str]
    block_bytes: int
    memory: int = 0
    counted: bool = False

    def argument(self) -> str:
        return json.dumps(asdict(self))


class Worker:
    def __init__(self, setup: Setup, ends: ExitStack):
        self._size = setup.block_bytes
        self._reads: list[NthFault] = []
        self._stores = [ends.enter_context(self._open(setup, state)) for state in setup.states]
        self._spaces = [keyspace(store, self._size) for store in self._stores]
        self._leases: list[Any] = []
        self._memory: Bytes = random_bytes(self._size)

    def _open(self, setup: Setup, state: str) -> perdure.Store:
        seams = Seams()
        if setup.counted:
            plan = NthFault(0, "eio", ops=["preadv"])  # never fails: it counts
            self._reads.append(plan)
            seams = Seams(files=lambda root: FaultyFiles(PosixFiles(root), plan))
        return perdure.open(
            setup.data, catalog=setup.catalog, state=Path(state), capacity="16GiB", memory=setup.memory, codec="off",
            seams=seams,
        )  # fmt: skip

    def _keys(self, seed: int, blocks: int) -> Bytes:
        keys: Bytes = self._spaces[0].chain(tokens(blocks, seed))
        return keys

    def _buffer(self, blocks: int) -> Bytes:
        if len(self._memory) < blocks * self._size:
            self._memory = random_bytes(blocks * self._size)
        return self._memory[: blocks * self._size]

    # --- verbs
    def fill(self, seed: int, blocks: int) -> dict[str, Any]:
        fill(self._spaces[0], self._keys(seed, blocks), self._size, self._buffer(min(blocks, 64)))
        return {}

    def fill_some(self, seed: int, blocks: int) -> dict[str, Any]:
        keys, memory = self._keys(seed, blocks), self._buffer(min(blocks, 64))
        with Stopwatch() as watch:
            fill(self._spaces[0], keys, self._size, memory)
        return {"cpu_s": watch.cpu_seconds}

    def beats(self, count: int) -> dict[str, Any]:
        """What a service does twice a second."""
        sharing = self._stores[0].core.sharing
        if not isinstance(sharing, Among):
            raise WrongResult("the catalog is not a cluster's")
        with Stopwatch() as watch:
            for _ in range(count):
                sharing.beat()
        return {"cpu_s": watch.cpu_seconds}

    def make_segments(self, count: int) -> dict[str, Any]:
        """Records of segments that don't exist."""
        for _ in range(count):
            record = SegmentRecord(
                os.urandom(16), SegmentState.SEALED, bytes(16), bytes(16), Durability.SESSION, 255, bytes(16), 0,
                self._size, self._size, 1, 0,
            )  # fmt: skip
            self._stores[0].core.control.put_segment(record)
        return {}

    def resident(self) -> dict[str, Any]:
        return {"bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")}

    def make_sessions(self, count: int) -> dict[str, Any]:
        """As many documents of the size of a session's head."""
        control = self._stores[0].core.control
        for number in range(count):
            control.compare_and_set(_SESSIONS, b"%d" % number, None, bytes(_SESSION_BYTES))
        return {}

    def change(self, count: int) -> dict[str, Any]:
        control = self._stores[0].core.control
        present = control.get(_SESSIONS, b"0")
        with Stopwatch() as watch:
            for _ in range(count):
                new = os.urandom(_SESSION_BYTES)
                if not control.compare_and_set(_SESSIONS, b"0", present, new):
                    raise WrongResult("somebody else changed it")
                present = new
        return {"cpu_s": watch.cpu_seconds}

    def lookup(self, seed: int, blocks: int, batch: int, batches: int) -> dict[str, Any]:
        """Records of `batch` blocks in chain order, from the catalog: what a host does that does not know them."""
        keys, index = self._keys(seed, blocks), self._stores[0].core.index
        starts = [at * batch % (blocks - batch + 1) for at in range(batches)]
        found = 0
        with Stopwatch() as watch:
            for at in starts:
                found += int(index.lookup(keys[at : at + batch])[0].sum())
        if found != batch * batches:
            raise WrongResult(f"{found} of {batch * batches} records found")
        return {"count": found, "seconds": watch.seconds, "cpu_s": watch.cpu_seconds}

    def restore(self, seed: int, blocks: int) -> dict[str, Any]:
        keys, memory = self._keys(seed, blocks), self._buffer(blocks)
        with Stopwatch() as watch:
            usable = self._spaces[0].read(keys, into=memory).usable
        if usable != blocks:
            raise WrongResult(f"{usable} of {blocks} blocks delivered")
        return {"count": len(memory), "seconds": watch.seconds, "cpu_s": watch.cpu_seconds}

    def hold(self, seed: int, count: int) -> dict[str, Any]:
        """Take the leases of `count` blocks that are published later."""
        self._leases = [
            self._spaces[0].reserve(self._keys(seed + number, 1), ttl_s=_LEASE_S) for number in range(count)
        ]
        if None in self._leases:
            raise WrongResult("somebody else holds a lease")
        return {}

    def publish(self, seed: int, count: int, pause_s: float) -> dict[str, Any]:
        """When each write of one new block was acknowledged, on this machine's monotonic clock."""
        space, times = self._spaces[0], []
        for number in range(count):
            time.sleep(pause_s)
            lease = self._leases[number] if self._leases else None
            report = space.write(self._keys(seed + number, 1), self._buffer(1), durability="session", lease=lease)
            times.append(time.monotonic())
            if report.stored != 1:
                raise WrongResult(f"not stored: {report.reasons}")
        self._leases = []
        return {"times": times}

    def poll(self, seed: int, count: int) -> dict[str, Any]:
        """When a lookup first found each of these blocks."""
        space, times = self._spaces[0], []
        for number in range(count):
            keys, give_up = self._keys(seed + number, 1), time.monotonic() + _GIVE_UP_S
            while space.lookup(keys) != 1:
                time.sleep(_POLL_S)
                if time.monotonic() > give_up:
                    raise WrongResult(f"block {number} was not found within {_GIVE_UP_S:.0f} s")
            times.append(time.monotonic())
        return {"times": times}

    def wait(self, seed: int, count: int) -> dict[str, Any]:
        """When who waits for each of these blocks, which somebody else holds the lease of, was woken up."""
        space, times = self._spaces[0], []
        for number in range(count):
            if space.reserve(self._keys(seed + number, 1), wait_s=_GIVE_UP_S) is not None:
                raise WrongResult(f"nobody held the lease of block {number}")
            times.append(time.monotonic())
        return {"times": times}

    def hot(self, seed: int, blocks: int, times: int) -> dict[str, Any]:
        """Every service reads the prefix so many times; bytes that each took from the device."""
        keys, memory = self._keys(seed, blocks), self._buffer(blocks)
        before = [sum(nbytes for _, _, nbytes in plan.log) for plan in self._reads]
        for _ in range(times):
            for space in self._spaces:
                if (usable := space.read(keys, into=memory).usable) != blocks:
                    raise WrongResult(f"{usable} of {blocks} blocks delivered")
        after = [sum(nbytes for _, _, nbytes in plan.log) for plan in self._reads]
        return {"device_bytes": [now - then for now, then in zip(after, before, strict=True)]}

    def rounds(self, seed: int, blocks: int) -> dict[str, Any]:
        """Sequential rounds to the catalog of a lookup that finds nothing, of a write, and of a prefix that is long and
        known to another host only (`seed`, `blocks`)."""
        space = self._spaces[0]
        new = [self._keys(seed + 1 + number, 16) for number in range(_ROUND_TRIES + 1)]
        space.write(new.pop(), self._buffer(16))  # opens the segment
        known = self._keys(seed, blocks)
        return {
            "lookup": min(self._rounds(partial(space.lookup, keys)) for keys in new),
            "put": min(self._rounds(partial(space.write, keys, self._buffer(16))) for keys in new),
            "long lookup": self._rounds(partial(space.lookup, known)),
        }

    def _rounds(self, call: Callable[[], object]) -> int:
        core = self._stores[0].core
        index, control = core.index, core.control
        if not (isinstance(index, ValkeyIndex) and isinstance(control, ValkeyControl)):
            raise WrongResult("the catalog is not a cluster's")
        before = index.rounds + control.rounds
        call()
        return index.rounds + control.rounds - before


def answer_all(worker: Worker) -> None:
    """Until stdin ends. What fails is the answer ({"error": ...})."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("{}", file=answers, flush=True)
    verbs: dict[str, Callable[..., dict[str, Any]]] = {
        "fill": worker.fill, "lookup": worker.lookup, "restore": worker.restore, "hold": worker.hold,
        "publish": worker.publish, "poll": worker.poll, "wait": worker.wait, "hot": worker.hot, "rounds": worker.rounds,
        "fill_some": worker.fill_some, "beats": worker.beats, "make_segments": worker.make_segments,
        "resident": worker.resident,
        "make_sessions": worker.make_sessions, "change": worker.change,
    }  # fmt: skip
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = verbs[question.pop("verb")](**question)
        except (PerdureError, OSError) as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    with ExitStack() as _ends:
        answer_all(Worker(Setup(**json.loads(sys.argv[1])), _ends))
