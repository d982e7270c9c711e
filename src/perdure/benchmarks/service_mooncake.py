"""Mooncake Store as a worker, run by the Python of its own environment: `service_mooncake.py`.

A remote hit: this process has no segment of its own, another one holds the blocks, a master knows where. TCP.

Contract
- Its ports bind all interfaces, so this refuses to run outside a network namespace with a loopback only.
- Reads are `batch_get_into` into registered memory: the rows themselves where they are the worker's buffer, as in every
  other system. Puts are plain; they are not what is measured. Everything stays in memory: no eviction at this size.
- The master's client TTL is raised, because a worker is stopped while others have their turn. Other settings: defaults.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

peer_protocol: Any = importlib.import_module(
    "peer_protocol" if __name__ == "__main__" else "perdure.benchmarks.peer_protocol"
)
lonet: Any = importlib.import_module("service_lonet" if __name__ == "__main__" else "perdure.benchmarks.service_lonet")

PACKAGE = "mooncake-transfer-engine-non-cuda"
HOST = "127.0.0.1"
MASTER_PORT, METRICS_PORT = 50051, 9003
SEGMENT_BYTES = 1 << 30
START_S = 30.0


def store(segment_bytes: int, port: int) -> Any:
    """A client of the master with so much memory for others. Raises RuntimeError; the master may not be up yet."""
    made = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    give_up = time.monotonic() + START_S
    while True:
        arguments = (f"{HOST}:{port}", "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", f"{HOST}:{MASTER_PORT}")
        code = made.setup(*arguments)
        if code == 0:
            return made
        if time.monotonic() > give_up:
            raise RuntimeError(f"Mooncake: setup failed with {code}")
        time.sleep(0.2)


def hold() -> None:
    """The process that holds the blocks, until stdin ends."""
    held = store(SEGMENT_BYTES, 17_001)
    os.write(1, b"READY\n")
    sys.stdin.read()
    held.close()


class Mooncake:
    """See the module's contract."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._store: Any = None
        self._registered: tuple[int, int] | None = None

    def open(self, root: str, block_bytes: int, memory: bool) -> None:
        if lonet.reachable():
            raise PermissionError("Mooncake binds all interfaces: it is run in a loopback-only network namespace")
        self.close()
        folder = Path(sys.executable).parent
        log = (Path(root) / "mooncake.log").open("ab")
        options = [f"-rpc_port={MASTER_PORT}", f"-metrics_port={METRICS_PORT}", "-client_ttl=3600"]
        end = peer_protocol.end_with_parent
        master = subprocess.Popen([str(folder / "mooncake_master"), *options], stdout=log, stderr=log, preexec_fn=end)
        self._processes.append(master)
        command, pipe = [sys.executable, str(Path(__file__)), "hold"], subprocess.PIPE
        holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, preexec_fn=end)
        self._processes.append(holder)
        log.close()
        assert holder.stdout is not None
        for line in holder.stdout:
            if line.strip() == b"READY":
                break
        else:
            raise RuntimeError("the holder of Mooncake's segment has ended")
        self._store = store(0, 17_002)

    def helpers(self) -> list[int]:
        return [process.pid for process in self._processes]

    def prepare(self, blocks: Sequence[int]) -> list[str]:
        return [f"block-{block}" for block in blocks]

    def put(self, keys: Any, rows: Any, durable: bool) -> int:
        if durable:
            raise NotImplementedError("Mooncake keeps blocks in memory")
        codes = [self._store.put(key, row.data) for key, row in zip(keys, rows, strict=True)]
        if any(codes):
            raise RuntimeError(f"Mooncake: put failed with {sorted(set(codes))}")
        return len(keys)

    def get(self, keys: Any, rows: Any) -> list[bool]:
        start, nbytes = rows.ctypes.data, rows[0].nbytes
        self._register(start, rows.nbytes)
        places = [start + i * nbytes for i in range(len(keys))]
        got = self._store.batch_get_into(keys, places, [nbytes] * len(keys))
        return [one == nbytes for one in got]

    def _register(self, start: int, nbytes: int) -> None:
        """Once for the worker's buffer: all later rows lie in it."""
        known = self._registered
        if known is not None and known[0] <= start and start + nbytes <= known[0] + known[1]:
            return
        if known is not None:
            self._store.unregister_buffer(known[0])
        code = self._store.register_buffer(start, nbytes)
        if code:
            raise RuntimeError(f"Mooncake: register_buffer failed with {code}")
        self._registered = (start, nbytes)

    def forget(self) -> None:
        """Nothing: a remote hit in memory is what is measured."""

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = self._registered = None
        for process in reversed(self._processes):
            if process.stdin is not None:
                process.stdin.close()
            else:
                process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def about(self) -> dict[str, Any]:
        return {"name": f"Mooncake {metadata.version(PACKAGE)}, TCP, batch_get_into"}


def main(argv: Sequence[str]) -> int:
    if argv[1:] == ["hold"]:
        hold()
    elif len(argv) == 1:
        peer_protocol.serve(Mooncake())
    else:
        sys.stderr.write(f"usage: {Path(argv[0]).name}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
