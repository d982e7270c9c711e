"""Perdure's data node as a worker: a service in a process of its own, asked over TCP by another host's client.

Contract: as every worker. Blocks are put through the same connection before anything is timed, and stay in the
service's DRAM. The service ends with the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import perdure
from perdure.benchmarks import peer_perdure, target
from perdure.benchmarks.peer_protocol import Bytes, serve
from perdure.benchmarks.service_host import Host
from perdure.errors import ServiceUnavailable
from perdure.limits import GIB

POOL_BYTES = GIB
ADDRESS = "127.0.0.1:0"


class DataNode:
    """See the module's contract."""

    def __init__(self) -> None:
        self._host: Host | None = None
        self._store: Any = None

    def open(self, root: str, block_bytes: int, memory: bool) -> None:
        self.close()
        self._host = Host(Path(root) / "data", memory=POOL_BYTES, listen=ADDRESS)
        if self._host.listen.rpartition(":")[2] in ("", "0"):
            raise ServiceUnavailable(f"the service does not say where it listens ({self._host.listen!r})")
        self._store = perdure.connect(f"tcp://{self._host.listen}", name="bench")
        self._space = target.keyspace(self._store, block_bytes)
        self._keys = self._space.chain(target.tokens(peer_perdure.BLOCK_TOKENS))

    def helpers(self) -> list[int]:
        return [] if self._host is None else [self._host.pid]

    def prepare(self, blocks: Sequence[int]) -> Any:
        top = max(blocks) + 1
        if top > len(self._keys):
            self._keys = self._space.chain(target.tokens(2 * top))
        return self._keys[list(blocks)].copy()

    def put(self, keys: Any, rows: Bytes, durable: bool) -> int:
        report = self._space.write(keys, rows.reshape(-1), durability="session" if durable else "ephemeral")
        return int(report.stored)

    def get(self, keys: Any, rows: Bytes) -> list[bool]:
        report = self._space.read(keys, into=rows.reshape(-1))
        return [status == perdure.BlockStatus.FOUND for status in report.statuses.tolist()]

    def forget(self) -> None:
        """Nothing: hits in the service's DRAM are what is measured."""

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._host is not None:
            self._host.stop()
            self._host = None

    def about(self) -> dict[str, Any]:
        return {"name": f"Perdure {perdure.__version__}, TCP"}


if __name__ == "__main__":
    node = DataNode()
    try:
        serve(node)
    finally:
        node.close()
