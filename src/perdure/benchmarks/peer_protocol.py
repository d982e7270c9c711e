"""The work that every store in `peers` is given, and the pipe over which a worker process is told to do it.

Contract
- Stands alone (numpy and the standard library), because a peer's own environment has no perdure in it: a worker script
  imports it from its own directory.
- One JSON object per line on stdin is a command, one per line on the original stdout its answer; whatever the peer
  prints goes to stderr. Only the transfer is timed; keys, buffers and expected bytes are made before the clock starts,
  and every delivered block is compared with the expected bytes after it stops.
- Block contents depend only on (seed, block id), differ between ids, and do not compress.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
WINDOW_STRIDE = 4096
WINDOWS = 4093  # prime, so that ids spread over windows; the id itself is stamped into the block as well
MARK_BYTES = 32


class Contents:
    """Expected bytes of blocks: a window into one random buffer, with the id stamped at its start and in the middle."""

    def __init__(self, block_bytes: int, seed: int = 7):
        self.block_bytes = block_bytes
        generator = np.random.default_rng(seed)
        self._base = generator.integers(0, 256, block_bytes + WINDOW_STRIDE * WINDOWS, np.uint8)
        self._seed = seed

    def mark(self, block: int) -> bytes:
        """Bytes found in this block only, at its start and in its middle."""
        return b"PEERBENCH" + block.to_bytes(8, "big") + self._seed.to_bytes(4, "big") + b"\xa5" * 11

    def fill(self, out: Bytes, blocks: Sequence[int]) -> None:
        """Write the expected bytes of `blocks` into `out` (n, block_bytes)."""
        for row, block in zip(out, blocks, strict=True):
            start = (block * 2654435761 % WINDOWS) * WINDOW_STRIDE
            row[:] = self._base[start : start + self.block_bytes]
            mark = np.frombuffer(self.mark(block), np.uint8)
            row[: mark.size] = mark
            middle = self.block_bytes // 2
            row[middle : middle + mark.size] = mark

    def wrong(self, got: Bytes, blocks: Sequence[int], scratch: Bytes) -> int:
        """How many rows of `got` are not the expected bytes."""
        count = 0
        for row, block in zip(got, blocks, strict=True):
            self.fill(scratch[:1], [block])
            count += not np.array_equal(row, scratch[0])
        return count


def aligned(rows: int, row_bytes: int) -> Bytes:
    """Page-aligned, touched memory of shape (rows, row_bytes)."""
    memory = np.frombuffer(mmap.mmap(-1, max(1, rows * row_bytes)), np.uint8)
    memory[::4096] = 1
    return memory[: rows * row_bytes].reshape(rows, row_bytes)


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Called in a server's process, as its `preexec_fn` for example: it is killed when the worker that started it ends,
    however that happens.

    Makes one system call and takes no lock, so that it is safe between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


class System(Protocol):
    """A store under test. `blocks` are small integers; each system makes its own keys from them, before the clock."""

    def open(self, root: str, block_bytes: int, memory: bool) -> None:
        """Open or create under `root`. `memory`: keep read blocks in RAM (warm runs) where the system can."""
        ...

    def prepare(self, blocks: Sequence[int]) -> Any:
        """Keys of `blocks`, made outside the timed part."""
        ...

    def put(self, keys: Any, rows: Bytes, durable: bool) -> int:
        """Store; returns when the blocks can be read by others (`durable`: and survive power loss). Blocks stored."""
        ...

    def get(self, keys: Any, rows: Bytes) -> list[bool]:
        """Deliver into `rows`; True per block that the system says was delivered."""
        ...

    def forget(self) -> None:
        """Drop what is kept in RAM, so that the next get comes from the disk."""
        ...

    def close(self) -> None: ...

    def about(self) -> dict[str, Any]:
        """Version and the settings that matter."""
        ...


def cpu_seconds_of(pids: Sequence[int]) -> float:
    """CPU seconds that these processes have used so far, to the nanosecond: Linux' clock of another process."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


class Worker:
    """Carries out commands on a `System`. A system with `helpers()` (the ids of its servers' processes) has the CPU
    seconds that they use during a get told as `server_cpu_seconds`."""

    def __init__(self, system: System):
        self.system = system
        self.contents = Contents(4096)
        self.buffer = aligned(1, 4096)
        self.scratch = aligned(1, 4096)

    def open(self, root: str, block_bytes: int, batch: int, memory: bool) -> dict[str, Any]:
        if self.contents.block_bytes != block_bytes:
            self.contents = Contents(block_bytes)
        self.buffer, self.scratch = aligned(batch, block_bytes), aligned(1, block_bytes)
        self.system.open(root, block_bytes, memory)
        return self.system.about()

    def put(self, batches: list[list[int]], durable: bool) -> dict[str, Any]:
        seconds = cpu = 0.0
        stored = 0
        for blocks in batches:
            rows = self.buffer[: len(blocks)]
            self.contents.fill(rows, blocks)
            keys = self.system.prepare(blocks)
            cpu0, wall0 = time.process_time(), time.perf_counter()
            stored += self.system.put(keys, rows, durable)
            seconds += time.perf_counter() - wall0
            cpu += time.process_time() - cpu0
        self.system.forget()
        return {"seconds": seconds, "cpu_seconds": cpu, "blocks": stored}

    def get(self, batches: list[list[int]], cold: bool) -> dict[str, Any]:
        seconds = cpu = served = 0.0
        found = wrong = 0
        pids: list[int] = getattr(self.system, "helpers", list)()
        for blocks in batches:
            rows = self.buffer[: len(blocks)]
            keys = self.system.prepare(blocks)
            if cold:
                self.system.forget()
            rows[:, ::WINDOW_STRIDE] = 0
            served0 = cpu_seconds_of(pids)
            cpu0, wall0 = time.process_time(), time.perf_counter()
            delivered = self.system.get(keys, rows)
            seconds += time.perf_counter() - wall0
            cpu += time.process_time() - cpu0
            served += cpu_seconds_of(pids) - served0
            found += sum(delivered)
            kept = [i for i, ok in enumerate(delivered) if ok]
            wrong += self.contents.wrong(rows[kept], [blocks[i] for i in kept], self.scratch) if kept else 0
        answer = {"seconds": seconds, "cpu_seconds": cpu, "found": found, "wrong": wrong}
        return {**answer, "server_cpu_seconds": served} if pids else answer

    def forget(self) -> dict[str, Any]:
        self.system.forget()
        return {}

    def close(self) -> dict[str, Any]:
        self.system.close()
        return {}


def serve(system: System) -> None:
    """Answer commands about a store under test until stdin ends."""
    answer(Worker(system), ("open", "put", "get", "forget", "close"))


def answer(worker: Any, verbs: Sequence[str]) -> None:
    """Call the method that each command on stdin names, until stdin ends. An exception is its answer ("error")."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        verb = command.pop("verb")
        try:
            if verb not in verbs:
                raise ValueError(f"unknown verb {verb!r}")
            told = json.dumps(getattr(worker, verb)(**command))
        except Exception as error:  # noqa: BLE001 - a worker reports any failure of the peer to its parent
            where = traceback.format_exc(limit=-3)
            told = json.dumps({"error": f"{type(error).__name__}: {error}", "where": where})
        answers.write(told + "\n")
        answers.flush()
