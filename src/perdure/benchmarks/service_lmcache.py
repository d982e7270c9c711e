"""LMCache's remote server as a worker, run by the Python of LMCache's environment: `service_lmcache.py`.

Contract
- `python -m lmcache.v1.server HOST PORT cpu` in a process of its own, on 127.0.0.1, and LMCache's own client
  (`RemoteBackend` with an `lm://` address): `batched_get_blocking` into its memory, then a copy into the caller's rows,
  as every store here delivers into the caller's memory. The naive codec moves the bytes as they are.
- Blocks are put through the same client before anything is timed; they stay in the server's memory.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import numpy as np

peer_protocol: Any = importlib.import_module(
    "peer_protocol" if __name__ == "__main__" else "perdure.benchmarks.peer_protocol"
)

HOST = "127.0.0.1"
MODEL = "bench/model"
POOL_GIB = 1.0
START_S = 120.0


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until the server accepts; raises RuntimeError when it ends or takes too long."""
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and process.poll() is None:
        try:
            socket.create_connection((HOST, port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"LMCache's server did not start (exit status {process.poll()})")


class LMCacheServer:
    """See the module's contract."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._backend: Any = None

    def open(self, root: str, block_bytes: int, memory: bool) -> None:
        self.close()
        port = free_port()
        command = [sys.executable, "-m", "lmcache.v1.server", HOST, str(port), "cpu"]
        end = peer_protocol.end_with_parent
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=end)
        wait_for(port, self._server)
        torch = importlib.import_module("torch")
        v1 = "lmcache.v1"
        settings = {"local_cpu": False, "max_local_cpu_size": POOL_GIB, "remote_url": f"lm://{HOST}:{port}"}
        config = importlib.import_module(f"{v1}.config").LMCacheEngineConfig.from_defaults(
            **settings, remote_serde="naive", chunk_size=256
        )
        shape = (1, 2, 256, 1, block_bytes // 1024)
        about = importlib.import_module(f"{v1}.metadata").LMCacheMetadata(MODEL, 1, 1, 0, 0, torch.bfloat16, shape)
        self._shape = torch.Size([2, 1, 256, block_bytes // 1024])
        self._format = importlib.import_module(f"{v1}.memory_management").MemoryFormat.KV_2LTD
        self._dtype = torch.bfloat16
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        backends = f"{v1}.storage_backend"
        self._cpu = importlib.import_module(f"{backends}.local_cpu_backend").LocalCPUBackend(
            config, about, dst_device="cpu"
        )
        self._backend = importlib.import_module(f"{backends}.remote_backend").RemoteBackend(
            config, about, self._loop, self._cpu, dst_device="cpu"
        )

    def helpers(self) -> list[int]:
        return [] if self._server is None else [self._server.pid]

    def prepare(self, blocks: Sequence[int]) -> list[Any]:
        make = importlib.import_module("lmcache.utils").CacheEngineKey
        return [make(MODEL, 1, 0, block + 1, self._dtype) for block in blocks]

    def put(self, keys: Any, rows: Any, durable: bool) -> int:
        if durable:
            raise NotImplementedError("LMCache's server keeps blocks in memory")
        for key, row in zip(keys, rows, strict=True):
            block = self._cpu.allocate(self._shape, self._dtype, self._format)
            np.copyto(np.frombuffer(block.byte_array, np.uint8), row)
            self._backend.submit_put_task(key, block).result(timeout=60)
            block.ref_count_down()
        return len(keys)

    def get(self, keys: Any, rows: Any) -> list[bool]:
        blocks = self._backend.batched_get_blocking(keys)
        for row, block in zip(rows, blocks, strict=True):
            if block is not None:
                np.copyto(row, np.frombuffer(block.byte_array, np.uint8))
                block.ref_count_down()
        return [block is not None for block in blocks]

    def forget(self) -> None:
        """Nothing: a hit in the server's memory is what is measured."""

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._cpu.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._backend = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def about(self) -> dict[str, Any]:
        return {"name": f"LMCache {metadata.version('lmcache')} server"}


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        sys.stderr.write(f"usage: {Path(argv[0]).name}\n")
        return 2
    peer_protocol.serve(LMCacheServer())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
