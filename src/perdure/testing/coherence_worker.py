"""A process that uses a store which others use too, and writes down what it saw; and a run of several of them.

As a program: `python -m perdure.testing.coherence_worker SETUP_JSON NUMBER`, until its standard input ends.
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
from typing import Any

import numpy as np

from perdure import store as stores
from perdure.errors import CatalogError
from perdure.testing.coherence import CAS, DONE, GET, LOOK, MISSED, PUT, REFUSED, REMOVE, UNKNOWN, WRONG
from perdure.testing.store import EXISTS, FOUND, STORED, block_of, blocks_of, chain, keyspace

_NAMESPACE = "coherence"
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Setup:
    """data: the store's directory; folder: for state directories and histories. seed: of what each process does."""

    data: str
    catalog: str
    folder: str
    seed: int
    blocks: int = 40
    heads: int = 3


class Worker:
    def __init__(self, setup: Setup, number: int, run: int = 0):
        self._setup, self._random = setup, random.Random(f"{setup.seed}/{number}/{run}")
        self._name = f"{number}.{run}"
        self._file = (Path(setup.folder) / f"history-{self._name}.jsonl").open("w")
        state = Path(setup.folder) / f"state{number}"
        self._store = stores.open(setup.data, catalog=setup.catalog, state=state, memory="8MiB", capacity="256MiB")
        self._space = keyspace(self._store)
        self._keys = chain(self._space, 1, setup.blocks)
        self._ids = 0

    def _did(self, **told: Any) -> None:
        self._file.write(json.dumps({"id": self._ids, **told}) + "\n")
        self._file.flush()

    def step(self) -> None:
        """One operation, written down."""
        self._ids += 1
        op = self._random.choices([PUT, GET, REMOVE, CAS, LOOK], [4, 8, 1, 3, 3])[0]
        if op in (CAS, LOOK):
            self._head(op, self._random.randrange(self._setup.heads))
        else:
            self._block(op, self._random.randrange(self._setup.blocks))

    def _block(self, op: str, number: int) -> None:
        keys = self._keys[number : number + 1]
        self._did(op=op, what=str(number), began_s=time.monotonic())
        errors = self._errors()
        outcome, core = UNKNOWN, self._store.core
        with contextlib.suppress(CatalogError):
            if op == PUT:
                status = int(self._space.write(keys, blocks_of(keys)).statuses[0])
                outcome = DONE if status in (STORED, EXISTS) else REFUSED
            elif op == GET:
                size = self._space.layout.block_bytes
                memory = np.zeros((1, size), np.uint8)
                found = int(self._space.read(keys, memory).statuses[0]) == FOUND
                right = memory.tobytes() == block_of(keys[0].tobytes(), size)
                outcome = (DONE if right else WRONG) if found else MISSED
                if outcome == MISSED and self._errors() != errors:  # the catalog did not answer
                    outcome = UNKNOWN
            else:
                core.index.remove(keys)
                core.pool.drop(keys)
                outcome = DONE
        self._did(ended_s=time.monotonic(), outcome=outcome)

    def _errors(self) -> int:
        return self._store.core.counters.snapshot().get("catalog_errors", 0)

    def _head(self, op: str, number: int) -> None:
        control, name = self._store.core.control, b"%d" % number
        self._did(op=LOOK, what=f"head{number}", began_s=time.monotonic())
        try:
            present = control.get(_NAMESPACE, name)
        except CatalogError:
            return
        expected = (present or b"").decode()
        self._did(ended_s=time.monotonic(), outcome=DONE, value=expected)
        if op == LOOK:
            return
        self._ids += 1
        value = f"{self._name}-{self._ids}"
        self._did(op=CAS, what=f"head{number}", began_s=time.monotonic(), expected=expected, value=value)
        try:
            done = control.compare_and_set(_NAMESPACE, name, present, value.encode())
        except CatalogError:
            return
        self._did(ended_s=time.monotonic(), outcome=DONE if done else REFUSED)

    def close(self) -> None:
        self._store.close()
        self._file.close()


class Processes:
    """Workers, each in a process of its own. `start` again with the same number replaces one that was killed."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self._runs: dict[int, int] = {}

    def start(self, number: int) -> None:
        run = self._runs[number] = self._runs.get(number, -1) + 1
        command = [sys.executable, "-m", __name__, json.dumps(asdict(self.setup)), str(number), str(run)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.running[number] = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)

    def kill(self, number: int) -> None:
        process = self.running.pop(number)
        process.kill()
        process.communicate()

    def end(self) -> list[Path]:
        """Let them come to their end; their histories, and those of the killed. Raises AssertionError if one failed."""
        for process in self.running.values():
            assert process.stdin is not None
            process.stdin.close()
        failed = [number for number, process in self.running.items() if process.wait(_END_S)]
        assert not failed, f"workers {failed} ended badly; seed {self.setup.seed}"
        return sorted(Path(self.setup.folder).glob("history-*.jsonl"))


@contextlib.contextmanager
def processes(setup: Setup, count: int) -> Iterator[Processes]:
    """`count` workers at work; none outlives the block."""
    made = Processes(setup)
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

    def wait() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    while not ended.is_set():
        worker.step()
    worker.close()


if __name__ == "__main__":
    _main(sys.argv[1:])
