"""The load generator of `bench sessions`: plays a schedule of turns against a service, whatever becomes of them.

    python -m perdure.benchmarks.sessions_generator CPUS

Contract
- Open loop: each turn is issued at its time, by one of many threads, regardless of the turns before it. Its latency
  counts from that time, not from when a thread came to it (so no omission is coordinated); how late it was issued is
  reported beside it (`lag_s`).
- One turn: the session is found by its name (one question to the service), its context is read into registered memory
  with what is left of the deadline; here its latency ends. Then, in the turns' order within a session and by other
  threads, its new blocks are stored and the session is extended by them (opened, if this is its first turn).
- The context of a turn was stored before the run, in place of what earlier turns of the session store during it: so no
  turn has to wait for another one's write.
- Blocks count as delivered up to the first one that is not (`blocks`), as an engine can use them.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final

import numpy as np

import perdure
from perdure.benchmarks import target
from perdure.benchmarks.sessions_child import pin
from perdure.benchmarks.sessions_turns import NEW_BLOCKS_MAX, Turn
from perdure.errors import PerdureError
from perdure.segments.landing import BlockStatus

THREADS_PER_CLIENT: Final = 24  # each may hold a connection, and leave another one with a late answer
STORING_THREADS: Final = 16
SETTLE_S: Final = 60.0
SHARED_BLOCKS: Final = 8  # of all chains: what agents of one kind have in common
_F_ADD_SEALS, _F_SEAL_SHRINK = fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK


def chain(space: Any, number: int, blocks: int) -> target.Bytes:
    """Keys of a context, which shares its beginning with all others."""
    shared = min(SHARED_BLOCKS, blocks)
    tokens = np.concatenate([target.tokens(shared, seed=1), target.tokens(blocks - shared, seed=1_000 + number)])
    keys: target.Bytes = space.chain(tokens)
    return keys


class _Memory:
    """Registered memory of one thread, for one context."""

    def __init__(self, store: Any, nbytes: int):
        fd = os.memfd_create("perdure-bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)
            self.view = store.register(fd, nbytes).view
        finally:
            os.close(fd)


class _Played:
    """What became of one turn."""

    __slots__ = ("blocks", "from_memory", "lag_s", "latency_s", "problem", "stored_s")

    def __init__(self) -> None:
        self.lag_s = self.latency_s = self.stored_s = 0.0
        self.blocks = self.from_memory = 0
        self.problem = ""


class Generator:
    """Answers the questions of `Child.ask`."""

    def __init__(self) -> None:
        self._turns: SimpleQueue[tuple[Turn, float, _Played] | None] = SimpleQueue()
        self._stores: SimpleQueue[tuple[Turn, float, _Played] | None] = SimpleQueue()
        self._done = threading.Semaphore(0)
        self._deadline_s = 0.0
        self._label = ""
        self._sessions: dict[tuple[int, int], Any] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._serial = 0

    def open(self, socket: str, block_bytes: int, blocks_max: int, chains: int, threads: int) -> dict[str, Any]:
        """Connect, and let threads wait for turns."""
        self._block = block_bytes
        self._source = target.random_bytes(NEW_BLOCKS_MAX * block_bytes, seed=9)
        clients = [perdure.connect(socket, name="bench") for _ in range(-(-threads // THREADS_PER_CLIENT))]
        spaces = [target.keyspace(client, block_bytes) for client in clients]
        self._storing = target.keyspace(perdure.connect(socket, name="bench"), block_bytes)
        self._chains = [chain(spaces[0], number, blocks_max) for number in range(chains)]
        for number in range(threads):
            at = number % len(clients)
            memory = _Memory(clients[at], blocks_max * block_bytes)
            threading.Thread(target=self._restore_all, args=(spaces[at], memory), daemon=True).start()
        for _ in range(STORING_THREADS):
            threading.Thread(target=self._store_all, daemon=True).start()
        return {}

    def alone(self, sizes: Sequence[int], repetitions: int) -> dict[str, Any]:
        """Seconds of turns of these sizes, one at a time: {"seconds": a list per size}."""
        self._begin("alone", SETTLE_S)
        seconds: list[list[float]] = [[] for _ in sizes]
        for repetition in range(repetitions):
            for at, blocks in enumerate(sizes):
                played = self._play([Turn(0.0, at, repetition, blocks, 0)])[0]
                seconds[at].append(played.latency_s)
                _check(played, blocks)
        return {"seconds": seconds}

    def load(self, label: str, turns: Sequence[Sequence[Any]], deadline_s: float) -> dict[str, Any]:
        """Play a schedule; a list per field of `_Played`, in the order of the turns, and `seconds` it took."""
        self._begin(label, deadline_s)
        began = time.perf_counter()
        played = self._play([Turn(*turn) for turn in turns])
        seconds = time.perf_counter() - began
        return {"seconds": seconds} | {field: [getattr(one, field) for one in played] for field in _Played.__slots__}

    # --- inside
    def _begin(self, label: str, deadline_s: float) -> None:
        self._label, self._deadline_s = label, deadline_s
        self._sessions.clear()

    def _play(self, turns: list[Turn]) -> list[_Played]:
        played = [_Played() for _ in turns]
        for turn in turns:
            self._locks.setdefault(turn.place, threading.Lock())
        began = time.perf_counter() + 0.01
        for turn, one in zip(turns, played, strict=True):
            due = began + turn.at_s
            wait_s = due - time.perf_counter()
            if wait_s > 0:
                time.sleep(wait_s)
            self._turns.put((turn, due, one))
        for _ in turns:
            self._done.acquire()
        return played

    def _name(self, turn: Turn) -> str:
        return f"{self._label}/{turn.place}/{turn.life}"

    def _keys(self, turn: Turn) -> target.Bytes:
        return self._chains[(turn.place * 7 + turn.life) % len(self._chains)][: turn.blocks]

    def _restore_all(self, space: Any, memory: _Memory) -> None:
        while (work := self._turns.get()) is not None:
            turn, due, played = work
            try:
                self._restore(space, memory, turn, due, played)
            except Exception as error:  # noqa: BLE001 (reported with the turn)
                played.problem = f"{type(error).__name__}: {error}"
            if turn.new:
                self._stores.put(work)
            else:
                self._done.release()

    def _restore(self, space: Any, memory: _Memory, turn: Turn, due: float, played: _Played) -> None:
        played.lag_s = time.perf_counter() - due
        space.find_session(self._name(turn))
        left_s = max(0.0, due + self._deadline_s - time.perf_counter())
        into = memory.view[: turn.blocks * self._block]
        report = space.read(self._keys(turn), into, deadline_s=left_s, direct=True)
        played.latency_s = time.perf_counter() - due
        played.blocks, played.from_memory = int(report.usable), int(report.from_memory)
        fine = (int(BlockStatus.FOUND), int(BlockStatus.LATE))
        if any(status not in fine for status in report.statuses.tolist()):
            played.problem = f"blocks of {turn} were not delivered: {list(report.problems.values())[:1]}"
        report.wait_settled(SETTLE_S)

    def _store_all(self) -> None:
        while (work := self._stores.get()) is not None:
            turn, _, played = work
            began = time.perf_counter()
            try:
                with self._locks[turn.place]:
                    self._store(turn)
            except Exception as error:  # noqa: BLE001 (reported with the turn)
                played.problem = played.problem or f"{type(error).__name__}: {error}"
            played.stored_s = time.perf_counter() - began
            self._done.release()

    def _store(self, turn: Turn) -> None:
        place = (turn.place, turn.life)
        session = self._sessions.get(place)
        if session is None:
            session = self._sessions[place] = self._storing.session(self._name(turn))
            _accepted(session.extend(self._keys(turn)))
        self._serial += 1  # two threads may get the same one, but never for the same place
        tokens = target.tokens(turn.new, seed=hash((self._serial, *place)) % 2**32)
        keys = self._storing.chain(tokens, parent=self._keys(turn)[-1].tobytes())
        report = self._storing.write(keys, self._source[: turn.new * self._block])
        if not report.durable:
            raise target.WrongResult(f"new blocks of {turn} were not stored: {list(report.reasons.values())[:1]}")
        _accepted(session.extend(keys))


def _accepted(answer: Any) -> None:
    if not answer:
        raise target.WrongResult(f"a session was not extended: {answer.outcome}, {answer.why}")


def _check(played: _Played, blocks: int) -> None:
    if played.problem or played.blocks != blocks:
        raise target.WrongResult(f"{played.blocks} of {blocks} blocks came from an idle service: {played.problem}")


def answer_all() -> None:
    """Until stdin ends. What fails is the answer ({"error": ...})."""
    generator = Generator()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        verbs: dict[str, Callable[..., dict[str, Any]]] = {
            "open": generator.open, "alone": generator.alone, "load": generator.load,
        }  # fmt: skip
        try:
            answer = verbs[question.pop("verb")](**question)
        except (PerdureError, OSError) as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    pin(sys.argv[1])
    answer_all()
    os._exit(0)  # the threads wait for turns that will not come
