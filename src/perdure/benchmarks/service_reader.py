"""One reader of `bench service`'s restores, in a process of its own: a client of the service, or the embedded store.

Contract
- Told over a pipe as the peers' workers are; only the transfer is timed, and every delivered block is compared with the
  expected bytes after the clock has stopped. CPU seconds are those of this process; the service's are told beside them.
- Ways of a client: "private" memory, "registered" memory (a sealed memfd that the service fills), "view" (the time of
  its release is part of it). Ways of the embedded store: "direct" into memory of the caller, and "private" through its
  DRAM tier, which is what the service does for private memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import perdure
from perdure.benchmarks import peer_protocol, target
from perdure.benchmarks.peer_protocol import Bytes, Contents, aligned
from perdure.benchmarks.service_host import CAPACITY_BYTES
from perdure.io.shared import SharedMemory


class Reader:
    """`blocks` are positions in one chain; block i holds the contents that `peer_protocol.Contents` gives to i."""

    def __init__(self) -> None:
        self._store: Any = None
        self._region: Any = None

    def open(
        self, kind: str, where: str, block_bytes: int, batch: int, memory: int, servers: Sequence[int] = ()
    ) -> dict[str, Any]:
        """kind "client": `where` is the service's socket, `servers` its processes; "embedded": the store's directory,
        opened with a DRAM tier of `memory` bytes."""
        self.close()
        self._servers = servers
        self._contents, self._scratch = Contents(block_bytes), aligned(1, block_bytes)
        self._rows = perdure.aligned_buffer(batch * block_bytes).reshape(batch, block_bytes)
        if kind == "client":
            self._store = perdure.connect(where, name="bench")
        else:
            self._store = perdure.open(Path(where), capacity=CAPACITY_BYTES, memory=memory)
            self._store.wait_ready()
        self._space = target.keyspace(self._store, block_bytes)
        if kind == "client":
            memfd = SharedMemory("bench", batch * block_bytes)
            memfd.seal_size()
            self._region = self._store.register(memfd.fd)
            memfd.close()
        return {}

    def _keys(self, blocks: Sequence[int], chain: int) -> Bytes:
        if getattr(self, "_chain", None) is None or len(self._chain) != chain:
            self._chain: Bytes = self._space.chain(target.tokens(chain))
        return np.ascontiguousarray(self._chain[list(blocks)])

    def fill(self, chain: int, batch: int) -> dict[str, Any]:
        """Store the whole chain of so many blocks."""
        stored = 0
        for first in range(0, chain, batch):
            blocks = range(first, min(first + batch, chain))
            rows = self._rows[: len(blocks)]
            self._contents.fill(rows, blocks)
            report = self._space.write(self._keys(blocks, chain), rows.reshape(-1), durability="ephemeral")
            stored += report.stored
        self._store.sync()
        return {"stored": stored}

    def read(self, way: str, chain: int, batches: list[list[int]]) -> dict[str, Any]:
        seconds = cpu = served = 0.0
        found = wrong = from_memory = 0
        for blocks in batches:
            keys, rows = self._keys(blocks, chain), self._destination(way, len(blocks))
            served0 = peer_protocol.cpu_seconds_of(self._servers)
            cpu0, wall0 = time.process_time(), time.perf_counter()
            if way == "view":
                seen = self._space.view(keys)
                report = seen.report
            else:
                report = self._space.read(keys, into=rows.reshape(-1), direct=way in ("direct", "registered"))
            seconds += time.perf_counter() - wall0
            cpu += time.process_time() - cpu0
            served += peer_protocol.cpu_seconds_of(self._servers) - served0
            found += report.usable
            from_memory += report.from_memory
            if way != "view":
                wrong += self._contents.wrong(rows, blocks, self._scratch)
                continue
            wrong += self._wrong_views(seen.blocks, blocks)
            cpu0, wall0 = time.process_time(), time.perf_counter()
            valid = seen.release()
            seconds += time.perf_counter() - wall0
            cpu += time.process_time() - cpu0
            wrong += 0 if valid else len(blocks)
        told = {"found": found, "wrong": wrong, "from_memory": from_memory, "server_cpu_seconds": served}
        return {"seconds": seconds, "cpu_seconds": cpu, **told}

    def _destination(self, way: str, count: int) -> Bytes:
        if way == "registered":
            memory = np.frombuffer(self._region.view, np.uint8)
            return memory[: count * self._rows.shape[1]].reshape(count, -1)
        self._rows[:count, :: peer_protocol.WINDOW_STRIDE] = 0
        return self._rows[:count]

    def _wrong_views(self, views: list[memoryview | None], blocks: Sequence[int]) -> int:
        wrong = 0
        for view, block in zip(views, blocks, strict=True):
            if view is None:
                wrong += 1
            else:
                row = np.frombuffer(view, np.uint8).reshape(1, -1)
                wrong += self._contents.wrong(row, [block], self._scratch)
        return wrong

    def close(self) -> dict[str, Any]:
        if self._store is not None:
            self._store.close()
            self._store = None
        return {}


if __name__ == "__main__":
    peer_protocol.answer(Reader(), ("open", "fill", "read", "close"))
