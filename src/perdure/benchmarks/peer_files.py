"""A file-per-block store, as good as that design can be: the baseline that a log of segments has to beat.

The form is that of the file tiers that ship with inference engines: one file a block, named by its key, spread over
256 directories; a put writes a temporary file and renames it; O_DIRECT; a pool of threads. Existence of the file is
the index. It keeps no checksum, no accounting and no limit, like its models, and that work is therefore missing from
its figures.

Contract
- put: temporary file (unique name), full-length writes, rename. `durable`: also fdatasync of
  the file and fsync of its directory.
- get, memory off: O_DIRECT straight into the caller's rows. Memory on: buffered reads, the page cache is the RAM tier.
- Tolerates a missing or short file (not delivered). Does not detect changed bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import count, repeat
from pathlib import Path
from typing import Any

from perdure.benchmarks.peer_protocol import Bytes, serve

THREADS = 8


class FilePerBlock:
    """See the module's contract. One instance, one directory, one caller at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "files")
        self._serial = count()
        self._root = ""
        self._direct = os.O_DIRECT
        self._known: set[str] = set()

    def open(self, root: str, block_bytes: int, memory: bool) -> None:
        self._root = root
        self._block_bytes = block_bytes
        self._direct = 0 if memory or block_bytes % 4096 else os.O_DIRECT
        for number in range(256):
            Path(root, f"{number:02x}").mkdir(parents=True, exist_ok=True)

    def prepare(self, blocks: Sequence[int]) -> list[str]:
        names = [blake2b(b"block %d" % block, digest_size=32).hexdigest() for block in blocks]
        return [f"{self._root}/{name[:2]}/{name}" for name in names]

    def put(self, keys: Any, rows: Bytes, durable: bool) -> int:
        if len(keys) == 1:
            self._put_one(keys[0], rows[0], durable)
        else:
            list(self._pool.map(self._put_one, keys, rows, repeat(durable)))
        if durable:
            for directory in {os.path.dirname(key) for key in keys}:
                _sync_directory(directory)
        return len(keys)

    def _put_one(self, path: str, row: Bytes, durable: bool) -> None:
        temporary = f"{path}.{next(self._serial)}.tmp"
        # Writes stay direct also when reads are buffered: else a put would only measure the page cache.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if row.nbytes % 4096 == 0 else 0)
        handle = os.open(temporary, flags, 0o600)
        try:
            view, done = row.data, 0
            while done < row.nbytes:
                done += os.pwrite(handle, view[done:], done)
            if durable:
                os.fdatasync(handle)
        finally:
            os.close(handle)
        os.rename(temporary, path)

    def get(self, keys: Any, rows: Bytes) -> list[bool]:
        if len(keys) == 1:
            return [self._get_one(keys[0], rows[0])]
        return list(self._pool.map(self._get_one, keys, rows))

    def _get_one(self, path: str, row: Bytes) -> bool:
        try:
            handle = os.open(path, os.O_RDONLY | self._direct)
        except FileNotFoundError:
            return False
        try:
            view, done = row.data, 0
            while done < row.nbytes:
                got = os.preadv(handle, [view[done:]], done)
                if got == 0:
                    return False
                done += got
            return True
        finally:
            os.close(handle)

    def forget(self) -> None:
        """Nothing: cold reads are O_DIRECT, and direct writes leave nothing in the page cache."""

    def close(self) -> None:
        return None

    def about(self) -> dict[str, Any]:
        return {"name": "file per block", "threads": THREADS, "direct": bool(self._direct)}


def _sync_directory(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


if __name__ == "__main__":
    serve(FilePerBlock())
