"""What the siblings of the real files have in common: files and namespaces that pass every operation on.

Contract
- `native` is False, so engines move data through `preadv` and `pwritev` of the wrapper, never past it.
- Never: an operation swallowed, repeated or reordered. All else is the wrapped object's contract.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from perdure.io.api import Buffer, File, Files


def total_bytes(buffers: Sequence[Buffer]) -> int:
    return sum(piece.nbytes for piece in buffers)


class FileAround:
    """A file that passes everything on; the siblings override what they change."""

    native = False

    def __init__(self, inner: File) -> None:
        self.inner = inner
        self.path = inner.path
        self.direct = inner.direct
        self.device = inner.device
        self.memory_alignment = inner.memory_alignment

    def fileno(self) -> int:
        return self.inner.fileno()

    def size(self) -> int:
        return self.inner.size()

    def preadv(self, buffers: Sequence[Buffer], offset: int) -> int:
        return self.inner.preadv(buffers, offset)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        return self.inner.pwritev(buffers, offset)

    def allocate(self, offset: int, length: int) -> None:
        self.inner.allocate(offset, length)

    def truncate(self, length: int) -> None:
        self.inner.truncate(length)

    def datasync(self) -> None:
        self.inner.datasync()

    def close(self) -> None:
        self.inner.close()


class FilesAround:
    """A namespace that passes everything on, and wraps the files it gives."""

    def __init__(self, inner: Files) -> None:
        self.inner = inner
        self.root = inner.root
        self.memory_alignment = inner.memory_alignment

    def create(self, path: str, *, direct: bool = True) -> File:
        return self.wrap(self.inner.create(path, direct=direct))

    def open(self, path: str, *, direct: bool = True, write: bool = False) -> File:
        return self.wrap(self.inner.open(path, direct=direct, write=write))

    def wrap(self, file: File) -> File:
        raise NotImplementedError

    def write_once(self, path: str, data: bytes) -> bool:
        return self.inner.write_once(path, data)

    def read(self, path: str) -> bytes:
        return self.inner.read(path)

    def unlink(self, path: str) -> None:
        self.inner.unlink(path)

    def sync_directory(self, path: str) -> None:
        self.inner.sync_directory(path)

    def list(self, path: str) -> builtins.list[str]:
        return self.inner.list(path)

    def free_bytes(self) -> int:
        return self.inner.free_bytes()
