"""A process that uses a store which others use too, and writes down what it saw; and several of them, on hosts or not.

As a program: `python -m perdure.testing.coherence_worker SETUP_JSON NUMBER RUN`, until its standard input ends. Each
line there is an order, a JSON object: {"weather": "slow"} or another of `WEATHER`, {"step_s": 60.0} for its wall clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from perdure import store as stores
from perdure.errors import CatalogError
from perdure.io.faulty import FaultyFiles
from perdure.io.files import PosixFiles
from perdure.testing.coherence import (
    CAS,
    DONE,
    EVICT,
    FENCE,
    GET,
    LOOK,
    MISSED,
    PUT,
    REFUSED,
    REMOVE,
    UNKNOWN,
    WRONG,
    note_kill,
)
from perdure.testing.coherence_faults import FENCE_SCOPE, PLANTS, WELL, HostClock, Weather
from perdure.testing.hosts import Host, Loopback
from perdure.testing.store import EXISTS, FOUND, STORED, block_of, blocks_of, chain, keyspace

_NAMESPACE: Final = "coherence"
_END_S: Final = 60.0
_FENCE_S: Final = 0.05
_CLOCKS_S: Final = 3600.0  # so far apart may the hosts' clocks be at the beginning


@dataclass(frozen=True, slots=True)
class Setup:
    """data: the store's directory; folder: for state directories and histories. seed: of what each process does.
    pause_s: between operations. plant: a bug, one of `coherence_faults.PLANTS`."""

    data: str
    catalog: str
    folder: str
    seed: int
    blocks: int = 40
    heads: int = 6
    pause_s: float = 0.0
    plant: str = ""


class Worker:
    def __init__(self, setup: Setup, number: int, run: int = 0):
        self._setup, self._random = setup, random.Random(f"{setup.seed}/{number}/{run}")
        self._name = f"{number}.{run}"
        self._file = (Path(setup.folder) / f"history-{self._name}.jsonl").open("w")
        self.weather = Weather(self._random.random())
        self.clock = HostClock(self._random.uniform(-_CLOCKS_S, _CLOCKS_S), self._random.uniform(0, _CLOCKS_S))
        seams = stores.Seams(clock=self.clock, files=lambda root: FaultyFiles(PosixFiles(root), self.weather))
        if setup.plant:
            PLANTS[setup.plant](seams)
        self._store = self._open(Path(setup.folder) / f"state{number}", seams)
        self._space = keyspace(self._store)
        self._keys = chain(self._space, 1, setup.blocks)
        self._ids = 0

    def _open(self, state: Path, seams: stores.Seams) -> stores.Store:
        """As whoever looks after a service starts it again until it is up."""
        give_up = time.monotonic() + _END_S
        while True:
            try:
                return stores.open(
                    self._setup.data, catalog=self._setup.catalog, state=state, memory="8MiB", capacity="256MiB",
                    seams=seams,
                )  # fmt: skip
            except CatalogError:
                if time.monotonic() > give_up:
                    raise

    def _intend(self, op: str, what: str, **told: Any) -> None:
        self._ids += 1
        self._did(op=op, what=what, began_s=time.monotonic(), **told)

    def _did(self, **told: Any) -> None:
        self._file.write(json.dumps({"id": self._ids, **told}) + "\n")
        self._file.flush()

    def step(self) -> None:
        """One operation, written down."""
        op = self._random.choices([PUT, GET, REMOVE, CAS, LOOK, FENCE], [4, 8, 1, 3, 3, 1])[0]
        if op == FENCE:
            self._fence()
        elif op in (CAS, LOOK):
            self._head(op, self._random.randrange(self._setup.heads))
        else:
            self._block(op, self._random.randrange(self._setup.blocks))
        time.sleep(self._setup.pause_s)

    def _block(self, op: str, number: int) -> None:
        keys, evicted = self._keys[number : number + 1], self._evicted()
        if op == PUT:  # to make room for it other blocks may have to go
            self._intend(EVICT, "")
            eviction = self._ids
        self._intend(op, str(number))
        trouble, outcome = self._trouble(), UNKNOWN
        with contextlib.suppress(CatalogError):
            if op == PUT:
                status = int(self._space.write(keys, blocks_of(keys)).statuses[0])
                outcome = DONE if status in (STORED, EXISTS) else REFUSED
            elif op == GET:
                outcome = self._read(keys)
                if outcome == MISSED and self._trouble() != trouble:
                    outcome = UNKNOWN
            else:
                self._store.core.index.remove(keys)
                self._store.core.pool.drop(keys)
                outcome = DONE
        self._did(ended_s=time.monotonic(), outcome=outcome)
        if op == PUT:
            outcome = REFUSED if self._evicted() == evicted else DONE
            self._did(id=eviction, ended_s=time.monotonic(), outcome=outcome)

    def _read(self, keys: Any) -> str:
        size = self._space.layout.block_bytes
        memory = np.zeros((1, size), np.uint8)
        if int(self._space.read(keys, memory).statuses[0]) != FOUND:
            return MISSED
        return DONE if memory.tobytes() == block_of(keys[0].tobytes(), size) else WRONG

    def _evicted(self) -> int:
        return self._store.core.reclaimer.counters.blocks_evicted

    def _trouble(self) -> tuple[int, int]:
        """Calls that the catalog did not answer, and faults that were injected, so far."""
        return self._store.core.counters.snapshot().get("catalog_errors", 0), self.weather.fired

    def _head(self, op: str, number: int) -> None:
        control, name = self._store.core.control, b"%d" % number
        self._intend(LOOK, f"head{number}")
        try:
            present = control.get(_NAMESPACE, name)
        except CatalogError:
            return
        expected = (present or b"").decode()
        self._did(ended_s=time.monotonic(), outcome=DONE, value=expected)
        if op == LOOK:
            return
        value = f"{self._name}-{self._ids}"
        self._intend(CAS, f"head{number}", expected=expected, value=value)
        try:
            done = control.compare_and_set(_NAMESPACE, name, present, value.encode())
        except CatalogError:
            return
        self._did(ended_s=time.monotonic(), outcome=DONE if done else REFUSED)

    def _fence(self) -> None:
        """A lease under a name of its own each time, so that each gets a token of its own."""
        core = self._store.core
        self._intend(FENCE, "lease")
        try:
            name = f"{self._name}-{self._ids}".encode().ljust(16, b"-")
            lease = core.control.acquire(FENCE_SCOPE, name, core.clock.boottime(), _FENCE_S)
        except CatalogError:
            return
        outcome = {"outcome": REFUSED} if lease is None else {"outcome": DONE, "value": str(lease.token)}
        self._did(ended_s=time.monotonic(), **outcome)

    def close(self) -> None:
        self.weather.kind = WELL
        self._store.close()
        self._file.close()


class Processes:
    """Workers, each in a process of its own. `start` again with the same number replaces one that was killed."""

    def __init__(self, setup: Setup, hosts: Sequence[Host] = ()):
        self.setup, self._hosts = setup, hosts
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self._runs: dict[int, int] = {}

    def start(self, number: int) -> None:
        run = self._runs[number] = self._runs.get(number, -1) + 1
        host = self._hosts[number] if self._hosts else Loopback()
        command = [sys.executable, "-m", __name__, json.dumps(asdict(self.setup)), str(number), str(run)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.running[number] = subprocess.Popen(host.command(command), stdin=subprocess.PIPE, env=environment)

    def wait_ready(self) -> None:
        """Until each has begun to work. Raises AssertionError if one has ended, or does not begin."""
        give_up = time.monotonic() + _END_S
        for number, process in self.running.items():
            while not (file := self._history(number)).exists() or not file.stat().st_size:
                assert process.poll() is None, f"worker {number} has ended"
                assert time.monotonic() < give_up, f"worker {number} does not begin"
                time.sleep(0.02)

    def _history(self, number: int) -> Path:
        return Path(self.setup.folder) / f"history-{number}.{self._runs[number]}.jsonl"

    def order(self, number: int, **order: Any) -> None:
        """Told while it works; see the module."""
        told = self.running[number].stdin
        assert told is not None
        told.write(json.dumps(order).encode() + b"\n")
        told.flush()

    def kill(self, number: int) -> None:
        process = self.running.pop(number)
        process.kill()
        process.communicate()
        note_kill(self._history(number), time.monotonic())

    def end(self) -> list[Path]:
        """Let them come to their end; their histories, and those of the killed. Raises AssertionError if one failed."""
        for process in self.running.values():
            assert process.stdin is not None
            process.stdin.close()
        failed = [number for number, process in self.running.items() if process.wait(_END_S)]
        assert not failed, f"workers {failed} ended badly; seed {self.setup.seed}"
        return sorted(Path(self.setup.folder).glob("history-*.jsonl"))


@contextlib.contextmanager
def processes(setup: Setup, count: int, hosts: Sequence[Host] = ()) -> Iterator[Processes]:
    """`count` workers at work, one on each host if there are some; none outlives the block."""
    made = Processes(setup, hosts)
    try:
        for number in range(count):
            made.start(number)
        yield made
    finally:
        for process in made.running.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def _main(arguments: Sequence[str]) -> None:
    worker = Worker(Setup(**json.loads(arguments[0])), int(arguments[1]), int(arguments[2]))
    ended = threading.Event()

    def obey() -> None:
        for line in sys.stdin.buffer:
            order = json.loads(line)
            if "weather" in order:
                worker.weather.kind = order["weather"]
            worker.clock.step(order.get("step_s", 0.0))
        ended.set()

    threading.Thread(target=obey, daemon=True).start()
    while not ended.is_set():
        worker.step()
    worker.close()


if __name__ == "__main__":
    _main(sys.argv[1:])
