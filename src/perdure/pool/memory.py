"""What the chunks of the DRAM tier are made of: memory of this process, or memory that engines map.

A shared chunk is one memfd: the slots' bytes, then one header per slot. A reader in another process needs no message:

    read the header (generation, key, keyspace, where, how long)  ->  copy  ->  read the generation again

and accepts the copy only if the generation is even and unchanged and key and keyspace are those it asked for. The
writer makes the generation odd before the first byte of a slot changes and even after the last. Generations come from
one counter per pool, so they never repeat, whatever a chunk is cut into. x86-64 only: there loads and stores stay in
order.

Header, 128 bytes: generation u64, key 32, keyspace 32, offset u64 (in the chunk), bytes u64, expires u32 (seconds since
1970, 0: never), rest reserved.
"""

from __future__ import annotations

import mmap
import struct
from contextlib import suppress
from typing import Final, Protocol

from perdure import limits
from perdure.io.shared import SharedMemory, populate

HEADER: Final = struct.Struct("=Q32s32sQQI")  # native stores: the generation in one piece
HEADER_BYTES: Final = 128
_BODY: Final = struct.Struct("=32s32sQQI")


def header_bytes(chunk_bytes: int) -> int:
    """Room for the headers of the most slots a chunk can have; those never used cost no memory."""
    return max(1, chunk_bytes // limits.page_bytes) * HEADER_BYTES


class ChunkMemory(Protocol):
    """Memory for one chunk. `view`: the slots' bytes, format 'B', page-aligned."""

    view: memoryview

    def announce(
        self, index: int, generation: int, key: bytes, keyspace: bytes, offset: int, nbytes: int, expires_s: int
    ) -> None:
        """Slot `index` holds a block: readers may take it."""
        ...

    def withdraw(self, index: int, generation: int) -> None:
        """Readers must not take what slot `index` holds; called before any of its bytes changes. `generation`: odd."""
        ...

    def close(self) -> None: ...


class PrivateMemory:
    """Memory of this process only: there is nobody to announce anything to."""

    def __init__(self, nbytes: int):
        # private: shared anonymous memory is shmem, which gets no huge pages by default
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # a hint: fewer page faults and TLB misses
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(memory)

    def announce(
        self, index: int, generation: int, key: bytes, keyspace: bytes, offset: int, nbytes: int, expires_s: int
    ) -> None:
        pass

    def withdraw(self, index: int, generation: int) -> None:
        pass

    def close(self) -> None:
        pass


class SharedChunk:
    """A chunk that engines map read-only. Its pages are there from the start: no request waits for page faults."""

    def __init__(self, nbytes: int, *, huge: bool = False):
        headers = header_bytes(nbytes)
        if huge:
            headers += -headers % limits.huge_page_bytes
        self.memory = SharedMemory("pool", nbytes + headers, huge=huge)
        self.nbytes = nbytes
        self.slots_max = max(1, nbytes // limits.page_bytes)
        self.view = self.memory.array[:nbytes].data
        if not self.memory.huge:
            populate(self.memory.array[:nbytes])
        self._headers = self.memory.array[nbytes:].data
        self._generations = self._headers.cast("Q")
        self.memory.seal_for_readers()

    def announce(
        self, index: int, generation: int, key: bytes, keyspace: bytes, offset: int, nbytes: int, expires_s: int
    ) -> None:
        _BODY.pack_into(self._headers, index * HEADER_BYTES + 8, key, keyspace, offset, nbytes, expires_s)
        self._generations[index * (HEADER_BYTES // 8)] = generation

    def withdraw(self, index: int, generation: int) -> None:
        self._generations[index * (HEADER_BYTES // 8)] = generation

    def generation(self, index: int) -> int:
        return int(self._generations[index * (HEADER_BYTES // 8)])

    def header(self, index: int) -> tuple[int, bytes, bytes, int, int, int]:
        """(generation, key, keyspace, offset, bytes, expires_s) as they are now."""
        return HEADER.unpack_from(self._headers, index * HEADER_BYTES)

    def close(self) -> None:
        self._generations.release()
        self._headers.release()
        self.memory.close()
