"""Perdure as a worker of `peers`, in a process of its own like every peer: public calls only, verification on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import perdure
from perdure.benchmarks.peer_protocol import Bytes, serve

BLOCK_TOKENS = 16
POOL = "3GiB"


class Perdure:
    """The embedded store. Cold: no DRAM tier, direct reads into the caller's rows. Warm: the DRAM tier."""

    def __init__(self) -> None:
        self._store: Any = None
        self._keys: NDArray[np.uint8] = np.empty((0, 32), np.uint8)

    def open(self, root: str, block_bytes: int, memory: bool) -> None:
        self.close()
        self._memory = memory
        self._store = perdure.open(root, capacity="64GiB", memory=POOL if memory else 0)
        layout = perdure.KVLayout(
            block_tokens=BLOCK_TOKENS, block_bytes=block_bytes, dtype="bfloat16", order="layer,kv,head,token,dim"
        )
        weights = "sha256:" + "0" * 64
        self._space = self._store.keyspace(
            model="bench/model", weights=weights, layout=layout, tenant="bench", codec="off"
        )
        self._keys = np.empty((0, 32), np.uint8)

    def prepare(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        top = max(blocks) + 1
        if top > len(self._keys):
            tokens = np.arange(2 * top * BLOCK_TOKENS, dtype=np.uint32) % 50_021
            self._keys = self._space.chain(tokens)
        return np.ascontiguousarray(self._keys[list(blocks)])

    def put(self, keys: Any, rows: Bytes, durable: bool) -> int:
        report = self._space.write(keys, rows.reshape(-1), durability="session" if durable else "ephemeral")
        return int(report.stored)

    def get(self, keys: Any, rows: Bytes) -> list[bool]:
        report = self._space.read(keys, into=rows.reshape(-1), direct=not self._memory)
        return [status == perdure.BlockStatus.FOUND for status in report.statuses.tolist()]

    def forget(self) -> None:
        """Nothing: cold runs open the store without a DRAM tier and read with O_DIRECT."""

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def about(self) -> dict[str, Any]:
        return {"name": f"Perdure {perdure.__version__}", "memory": self._memory, "verified": True}


if __name__ == "__main__":
    serve(Perdure())
