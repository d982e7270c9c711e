"""Memory that an engine shares for writing: blocks are read into it and written from it without a copy in the engine.

Contract
- A memfd whose size is sealed is mapped: its owner cannot cut it short and kill the service (SIGBUS). What cannot
  be sealed (a file in /dev/shm) is touched by preadv and pwritev only. Anything else is refused: a file on a disk or of
  a user's file system could hang the thread that touches it.
- Every offset was checked against the region's size by `fields.extents_of`.
- What an engine does to its memory meanwhile harms only itself: bytes on the disk are described by the checksum of what
  was written, a block that changed while it was read is that engine's own.
"""

from __future__ import annotations

import ctypes
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from perdure import limits
from perdure.buffers import Parts
from perdure.errors import InvalidArgument, ServiceBusy
from perdure.io.memory import Scratch, ScratchLease
from perdure.io.shared import SharedMemory, is_shrink_sealed, map_fd
from perdure.pool.dram import DramPool

_MEMORY_FILES: Final = {0x01021994, 0x958458F6}  # tmpfs (memfd, /dev/shm), hugetlbfs
_LIBC = ctypes.CDLL(None, use_errno=True)

Extents = Sequence[Sequence[tuple[int, int]]]


class Region(ABC):
    """Registered memory. `take` gives memory for blocks, `store` puts what was read there in its place."""

    nbytes: int

    def __init__(self) -> None:
        self._open = True
        self._closing = threading.Lock()

    @abstractmethod
    def take(self, blocks: Extents, *, filled: bool) -> tuple[list[Parts], ScratchLease | None]:
        """The parts of each block; `filled`: with the bytes that are in the region now."""

    def store(self, blocks: Extents, parts: list[Parts], which: Sequence[int]) -> None:  # noqa: B027
        """Bring blocks that were read into parts of `take` to where they belong; nothing to do if they are there."""

    def close(self) -> None:
        """Idempotent, and safe from several threads: a client's end and its own question may come together."""
        with self._closing:
            was_open, self._open = self._open, False
        if was_open:
            self._let_go()

    @abstractmethod
    def _let_go(self) -> None: ...


class MappedRegion(Region):
    """A map of sealed memory, ours or the client's."""

    def __init__(self, fd: int, nbytes: int):
        super().__init__()
        self.nbytes = nbytes
        self._view: memoryview | None = map_fd(fd, nbytes, writable=True).data

    def take(self, blocks: Extents, *, filled: bool) -> tuple[list[Parts], ScratchLease | None]:
        view = self._view
        if view is None:
            raise InvalidArgument("the region was unregistered")
        return [[view[offset : offset + nbytes] for offset, nbytes in parts] for parts in blocks], None

    def _let_go(self) -> None:
        self._view = None  # unmapped when the last transfer has ended


class LentRegion(MappedRegion):
    """Memory of the service's own making, charged to the node's budget."""

    def __init__(self, pool: DramPool, kind: str, nbytes: int):
        if not pool.lend(nbytes):
            raise ServiceBusy(
                f"no {nbytes} bytes left for {kind} memory of another client; raise --memory, or run fewer clients"
            )
        self._pool = pool
        try:
            self.memory = SharedMemory(kind, nbytes)
            self.memory.seal_size()
            super().__init__(self.memory.fd, nbytes)
        except BaseException:
            pool.repay(nbytes)
            raise

    def _let_go(self) -> None:
        super()._let_go()
        self.memory.close()
        self._pool.repay(self.nbytes)


class _Descriptor:
    """Closed when nobody uses it any more: closed under a transfer, its number could be another file's by then."""

    def __init__(self, fd: int):
        self.fd = os.dup(fd)

    def __del__(self) -> None:
        os.close(self.fd)


class FileRegion(Region):
    """Memory that its owner may cut short at any time: never mapped, copied through scratch."""

    def __init__(self, fd: int, nbytes: int, scratch: Scratch):
        super().__init__()
        self.nbytes, self._scratch = nbytes, scratch
        self._descriptor: _Descriptor | None = _Descriptor(fd)

    def take(self, blocks: Extents, *, filled: bool) -> tuple[list[Parts], ScratchLease | None]:
        descriptor = self._opened()
        lease = self._scratch.take(sum(nbytes for parts in blocks for _, nbytes in parts))
        at, taken = 0, []
        try:
            for parts in blocks:
                pieces = []
                for offset, nbytes in parts:
                    piece = lease.view[at : at + nbytes]
                    if filled and os.preadv(descriptor.fd, [piece], offset) != nbytes:
                        raise InvalidArgument(
                            f"the region ends before offset {offset + nbytes}: its owner cut it short"
                        )
                    pieces.append(piece)
                    at += nbytes
                taken.append(pieces)
        except BaseException:
            lease.give_back()
            raise
        return taken, lease

    def store(self, blocks: Extents, parts: list[Parts], which: Sequence[int]) -> None:
        descriptor = self._opened()
        for place in which:
            for (offset, nbytes), piece in zip(blocks[place], parts[place], strict=True):
                if os.pwritev(descriptor.fd, [piece], offset) != nbytes:
                    raise InvalidArgument(f"the region takes no bytes at offset {offset}")

    def _opened(self) -> _Descriptor:
        descriptor = self._descriptor
        if descriptor is None:
            raise InvalidArgument("the region was unregistered")
        return descriptor

    def _let_go(self) -> None:
        self._descriptor = None


def register(fd: int, nbytes: int, scratch: Scratch) -> Region:
    """A client's own memory. Raises InvalidArgument for what is not memory, or smaller than it says."""
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode) or _file_system(fd) not in _MEMORY_FILES:
        raise InvalidArgument(
            "only memory can be registered: a memfd (sealed with F_SEAL_SHRINK), or a file in /dev/shm"
        )
    if not 0 < nbytes <= min(facts.st_size, limits.region_bytes_max):
        raise InvalidArgument(f"{nbytes} bytes asked for, the memory has {facts.st_size}")
    if is_shrink_sealed(fd):
        try:
            return MappedRegion(fd, nbytes)
        except OSError as error:
            raise InvalidArgument(f"the memory cannot be mapped for writing: {error}") from error
    return FileRegion(fd, nbytes, scratch)


def lies_in_memory(path: str) -> bool:
    """Whether what is in a directory is gone without power."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _file_system(fd) in _MEMORY_FILES
    finally:
        os.close(fd)


def _file_system(fd: int) -> int:
    """f_type of statfs(2), which Python does not tell."""
    buffer = (ctypes.c_long * 32)()
    if _LIBC.fstatfs(fd, ctypes.byref(buffer)):
        return 0
    return int(buffer[0]) & 0xFFFF_FFFF
