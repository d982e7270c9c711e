"""The processes that get killed: a warm server forks one per job, so that a kill costs no start of an interpreter.

A job opens a store, checks what the outside record says must be there, then writes until it is killed, telling through
a pipe what it is about to write ("begin") and what was acknowledged ("ack"). Lines are shorter than PIPE_BUF, so they
are whole or absent. The record of what was acknowledged is kept by the test (`Victims`), outside of whatever dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).resolve().parent.parent
MESSAGE_BYTES = 1 << 20
PATIENCE_S = 60.0


# --- in the test's process ----------------------------------------------------------------------------------------


class Victim:
    """One forked process. `lines` yields what it said until it is dead."""

    def __init__(self, victims: Victims, pid: int, reader: int):
        self.pid, self._victims, self._reader = pid, victims, reader
        self._rest = b""
        self.heard: list[list[Any]] = []

    def hear(self, until: str | None = None, timeout_s: float = PATIENCE_S) -> list[Any] | None:
        """Read on: to the first line that starts with `until`, or to the end of the pipe (`until` None)."""
        give_up = time.monotonic() + timeout_s
        seen = len(self.heard)
        while True:
            for line in self.heard[seen:]:
                if line[0] == until:
                    return line
            seen = len(self.heard)
            os.set_blocking(self._reader, False)
            try:
                data = os.read(self._reader, 1 << 16)
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise TimeoutError(f"the victim did not say {until!r} but {self.heard[-3:]}") from None
                time.sleep(0.0005)
                continue
            if not data:
                return None
            *whole, self._rest = (self._rest + data).split(b"\n")
            self.heard += [json.loads(one) for one in whole]

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside, no thread of it runs, and everything it had said before is in `heard`."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            give_up = time.monotonic() + PATIENCE_S
            while any(_state(task) != "T" for task in Path(f"/proc/{self.pid}/task").iterdir()):
                if time.monotonic() > give_up:
                    raise TimeoutError("the victim does not stop")
                time.sleep(0.001)
            with contextlib.suppress(TimeoutError):
                self.hear(timeout_s=0.0)
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone with everything it held."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.end()

    def end(self) -> int:
        """Wait for it to be gone; its wait status. Everything it said is in `heard` then."""
        status = self._victims.wait(self.pid)
        self.hear()
        os.close(self._reader)
        return status


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


class Victims:
    """The warm server."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
        command = [sys.executable, "-m", "support.victim", str(theirs.fileno())]
        self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=TESTS)
        theirs.close()
        assert self._socket.recv(MESSAGE_BYTES) == b"ready"

    def start(self, **job: Any) -> Victim:
        reader, writer = os.pipe()
        raw = json.dumps(job).encode()
        assert len(raw) < MESSAGE_BYTES // 2
        socket.send_fds(self._socket, [raw], [writer])
        os.close(writer)
        return Victim(self, int(self._socket.recv(64)), reader)

    def wait(self, pid: int) -> int:
        self._socket.send(str(pid).encode())
        return int(self._socket.recv(64))

    def close(self) -> None:
        self._socket.close()
        self._server.wait(timeout=PATIENCE_S)


@contextlib.contextmanager
def victims() -> Iterator[Victims]:
    server = Victims()
    try:
        yield server
    finally:
        server.close()


# --- in the server ------------------------------------------------------------------------------------------------


def _serve(descriptor: int) -> None:
    control = socket.socket(fileno=descriptor)
    control.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MESSAGE_BYTES)
    control.send(b"ready")
    while True:
        raw, passed, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
        if not raw:
            return
        if not passed:
            control.send(str(os.waitpid(int(raw), 0)[1]).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _child(json.loads(raw), passed[0])
        os.close(passed[0])
        control.send(str(pid).encode())


def _child(job: dict[str, Any], out: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the test

    def say(*line: Any) -> None:
        os.write(out, json.dumps(line).encode() + b"\n")

    try:
        _JOBS[job.pop("kind")](say, **job)
        code = 0
    except BaseException:
        say("error", traceback.format_exc()[-3000:])
        code = 1
    os._exit(code)  # no handlers at exit: what a job wants closed it closes


# --- in the victim ------------------------------------------------------------------------------------------------


def _options(job_seams: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    import perdure
    from perdure.clock import SystemClock

    if not job_seams:
        return options

    class OtherBoot(SystemClock):
        def boot_id(self) -> bytes:
            return bytes.fromhex(job_seams["boot_id"])

    return options | {"seams": perdure.Seams(clock=OtherBoot())}


def work(
    say: Any,
    *,
    path: str,
    seed: int,
    first_chain: int,
    options: dict[str, Any],
    check: list[list[Any]],
    pins: list[list[Any]],
    spaces: list[dict[str, Any]],
    upgrades: bool = True,
    close_after: int | None = None,
    durabilities: tuple[str, ...] = ("ephemeral", "session", "retained"),
    seams: dict[str, Any] | None = None,
    rest_s: float = 0.0,
    again: bool = False,
) -> None:
    """Open, check, pin, write from two threads until killed (or close after so many batches)."""
    import perdure
    from support import blocks

    store = perdure.open(path, **_options(seams, **options))
    views = [blocks.keyspace(store, **one) for one in spaces]
    say("open")
    _check(say, store, views, check)
    if again:
        _store_again(say, views, check)
    for place, chain, count in pins:
        keys = blocks.chain(views[place], chain, count)
        views[place].pin(keys, ttl_s=3600.0)
        blocks.write(views[place], keys)
        found = blocks.read_back(views[place], keys)
        views[place].release(keys)  # without the pin they would be the first to go
        say("pinned", place, chain, found.tolist())
    stop = threading.Event()
    failures: list[str] = []

    def write(number: int) -> None:
        try:
            _write(say, store, views, random.Random(seed * 2 + number), first_chain + 50_000 * number, stop, upgrades,
                   durabilities, close_after, rest_s)  # fmt: skip
        except BaseException:
            failures.append(traceback.format_exc()[-3000:])
            stop.set()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        say("error", failures[0])
    say("closing")
    store.close()
    say("closed")


def _check(say: Any, store: Any, views: list[Any], check: list[list[Any]]) -> None:
    """Tell what is there of the chains in the outside record, before and after the background work, and the books."""
    from support import blocks

    say("checking")
    if store.status()["index_rebuilding"]:  # meanwhile anything may be missing, and nothing may be wrong
        store.wait_ready(PATIENCE_S)
    for place, chain, count in check:
        say("found", place, chain, blocks.read_back(views[place], blocks.chain(views[place], chain, count)).tolist())
    if not store.wait_ready(PATIENCE_S):
        say("error", "the background work after opening did not end")
    status = store.status()
    say("books", blocks.wrong_books(store))
    say("status", {key: status[key] for key in ("healthy", "counters", "incidents", "background", "used_bytes")})
    say("segments", [record.segment.hex() for record in store._core.table.all() if record.state.name != "DRAINING"])
    say("checked")


def _store_again(say: Any, views: list[Any], chains: list[list[Any]]) -> None:
    """What is missing can be stored at once: no key is blocked by what a dead writer left behind."""
    from support import blocks

    for place, chain, count in chains:
        keys = blocks.chain(views[place], chain, count)
        report = blocks.write(views[place], keys)
        found = blocks.read_back(views[place], keys)
        if not report.durable or (found != blocks.FOUND).any():
            say("error", f"chain {chain}: stored again as {report.statuses.tolist()}, then read as {found.tolist()}")


def _write(
    say: Any,
    store: Any,
    views: list[Any],
    rng: random.Random,
    chain: int,
    stop: threading.Event,
    upgrades: bool,
    durabilities: tuple[str, ...],
    close_after: int | None,
    rest_s: float,
) -> None:
    from perdure.catalog.api import Durability
    from support import blocks

    mine: list[tuple[int, int, int]] = []
    batches, first = 0, chain
    while not stop.is_set() and (close_after is None or batches < close_after):
        batches += 1
        place, durability = rng.randrange(len(views)), rng.choice(durabilities)
        space, count = views[place], rng.randint(1, 12)
        if upgrades and mine and rng.random() < 0.2:  # an existing chain, longer and maybe at another durability
            place, number, count = rng.choice(mine)
            space, count = views[place], count + rng.randint(0, 3)
        else:
            chain += 1
            number = chain
        keys = blocks.chain(space, number, count)
        data = blocks.contents(keys, space.layout.block_bytes)
        say("begin", place, number, count)
        report = space.write(keys, data, durability=durability, ttl_s=rng.choice([None, 86_400.0]))
        at = [one.tobytes() for one in store._core.locate(keys)[1]["segment"]]
        homes = [store._core.table.get(one) for one in at]
        lasting = [home is not None and home.durability >= Durability.SESSION for home in homes]
        say("ack", place, number, durability, report.statuses.tolist(), [one.hex() for one in at], lasting)
        mine.append((place, number, count))
        if rng.random() < 0.3:
            place, number, count = rng.choice(mine)
            back = blocks.read_back(views[place], blocks.chain(views[place], number, count))
            if np.isin(back, (blocks.WRONG, blocks.CORRUPT)).any():
                say("error", f"chain {number} read back as {back.tolist()}")
        if rng.random() < 0.1:
            say("sync", first)
            store.sync()
            say("synced", first)
        if rest_s:
            time.sleep(rest_s * rng.random())


def rebuild(say: Any, *, path: str) -> None:
    import perdure

    say("rebuilding")
    status = perdure.rebuild(path)
    say("rebuilt", status["blocks"])


_JOBS = {"work": work, "rebuild": rebuild}


if __name__ == "__main__":
    import support.blocks  # noqa: F401 (warm before the first fork, with the store and all it imports)

    _serve(int(sys.argv[1]))
