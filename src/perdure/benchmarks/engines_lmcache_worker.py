"""LMCache 0.5.6 with an L2 adapter, run by the Python of LMCache's environment: `engines_lmcache_worker.py l2|manager`.

Two ways that LMCache uses an adapter:
- `l2`: the rounds of LMCache's own `lmcache bench l2`, by its own functions; contents are ours, so that each delivered
  object can be compared.
- `manager`: `StorageManager`, a DRAM pool in front; objects are put, and got by prefetch, as in `peer_lmcache`.

`open` takes the adapter as LMCache's own JSON object, as text in place of a directory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HERE = "" if __name__ == "__main__" else "perdure.benchmarks."
peer_protocol: Any = importlib.import_module(_HERE + "peer_protocol")
peer_lmcache: Any = importlib.import_module(_HERE + "peer_lmcache")

ALIGN_BYTES = 4096
CONTENTS_SEED = 11


def configuration(adapter: str) -> Any:
    """LMCache's configuration of an adapter given as JSON."""
    parse = importlib.import_module("lmcache.v1.distributed.l2_adapters.config").parse_args_to_l2_adapters_config
    return parse(argparse.Namespace(l2_adapter=[adapter])).adapters[0]


def drop_pages(adapter: str) -> None:
    """Write back and drop the page cache of a file adapter's files."""
    root = json.loads(adapter).get("base_path")
    for path in Path(root).iterdir() if root else ():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class Manager(peer_lmcache.FsNative):  # type: ignore[misc]  # LMCache is not there when this file is checked
    """`StorageManager` over any adapter; `root` is the adapter's JSON."""

    def adapter(self, root: str) -> Any:
        self._adapter = root
        return configuration(root)

    def forget(self) -> None:
        super().forget()
        drop_pages(self._adapter)

    def about(self) -> dict[str, Any]:
        return {"name": json.loads(self._adapter)["type"]}


class Rounds:
    """Rounds of `lmcache bench l2`, one per command."""

    def __init__(self) -> None:
        self._adapter: Any = None

    def open(self, adapter: str, block_bytes: int, batch: int) -> dict[str, Any]:
        self.close()
        bench = "lmcache.cli.commands.bench.l2_adapter_bench"
        self._data = importlib.import_module(f"{bench}.data")
        self._runner = importlib.import_module(f"{bench}.runner")
        self._spec, self._size, self._count = adapter, block_bytes, batch
        self._contents = peer_protocol.Contents(block_bytes, CONTENTS_SEED)
        self._scratch = peer_protocol.aligned(1, block_bytes)
        memory = self._data.make_aligned_tensor(batch * block_bytes, ALIGN_BYTES)
        self._objects = self._data.make_memory_objects(memory, batch, block_bytes, 0)
        self._rows = memory.numpy().reshape(batch, block_bytes)
        described = self._data.create_l1_memory_desc(memory, align_bytes=ALIGN_BYTES)
        create = importlib.import_module("lmcache.v1.distributed.l2_adapters").create_l2_adapter
        self._adapter = create(configuration(adapter), l1_memory_desc=described)
        return {"name": type(self._adapter).__name__}

    def _round(self, verb: str, first: int) -> tuple[float, int]:
        keys = self._data.make_object_keys(self._count, key_offset=first)
        shared = {"in_flight": 1, "num_keys": self._count, "rounds": 1, "log": lambda text: None}
        if verb == "lookup":
            result = self._runner.bench_lookup(self._adapter, keys_for_round=lambda number: [keys], **shared)
        else:
            run = getattr(self._runner, f"bench_{verb}")
            shared |= {"data_size": self._size, "objs_for_round": lambda number: [self._objects]}
            result = run(self._adapter, keys_for_round=lambda number: [keys], **shared)
        if not result.round_durations:
            raise TimeoutError(f"{verb} of {self._count} objects did not end")
        return result.round_durations[0], result.success_counts[0]

    def store(self, first: int) -> dict[str, Any]:
        self._contents.fill(self._rows, list(range(first, first + self._count)))
        seconds, done = self._round("store", first)
        return {"seconds": seconds, "done": done}

    def load(self, first: int) -> dict[str, Any]:
        self._rows[:] = 0
        seconds, done = self._round("load", first)
        wrong = self._contents.wrong(self._rows, list(range(first, first + self._count)), self._scratch)
        return {"seconds": seconds, "done": done, "wrong": wrong}

    def lookup(self, first: int) -> dict[str, Any]:
        seconds, done = self._round("lookup", first)
        return {"seconds": seconds, "done": done}

    def forget(self) -> dict[str, Any]:
        drop_pages(self._spec)
        return {}

    def close(self) -> dict[str, Any]:
        if self._adapter is not None:
            self._adapter.close()
            self._adapter = None
        return {}


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2 or argv[1] not in ("l2", "manager"):
        sys.stderr.write(f"usage: {Path(argv[0]).name} l2|manager\n")
        return 2
    if argv[1] == "manager":
        peer_protocol.serve(Manager())
    else:
        peer_protocol.answer(Rounds(), ("open", "store", "load", "lookup", "forget", "close"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
