"""An engine's maps of its tenant's share of the service: lookups and reads of blocks in memory without a message.

Contract
- `prefix` and `copy` send nothing, take no lock against the service and wait for nothing of it.
- A block is delivered only if its slot's header names the key and keyspace that were asked for, had an even generation
  before the copy and has the same one after it. Whatever else is seen is a miss here; the service is asked then.
- x86-64 only (ordered loads): elsewhere there are no maps, and every read is a message.
- Where many hosts share the store, nothing is delivered after the time until which the service may (`UNTIL_NS`).
- Everything seen here is the state of one run of the service. When that has ended, the maps are dropped as a whole.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.buffers import Parts, copy_parts
from perdure.catalog.api import KeyArray, fingerprints
from perdure.io.shared import map_fd
from perdure.keys import key_list
from perdure.pool.memory import HEADER, HEADER_BYTES
from perdure.presence_table import Table, leading, locate, locate_one, table_over
from perdure.service import shared
from perdure.service.fields import SLOT_INDEX_BITS, SLOT_INDEX_MASK, pack_slot, unpack_slot
from perdure.service.messages import Attached

_PART_BYTES: Final = 4 * limits.MIB  # of a copy, worth a thread of its own
_COPIERS: Final = min(4, os.cpu_count() or 1)
_FEW_KEYS: Final = 8  # for so many the vectors of numpy cost more than they save
MAPPABLE: Final = platform.machine() in ("x86_64", "AMD64")


class ChunkMap:
    """A chunk of the pool, read-only."""

    __slots__ = ("data", "generations", "headers")

    def __init__(self, memory: NDArray[np.uint8], chunk_bytes: int):
        self.data = memory[:chunk_bytes].data
        self.headers = memory[chunk_bytes:].data
        self.generations = self.headers.cast("Q")


class DomainMaps:
    """Of one tenant. `update` replaces tables and chunks as the service says; readers keep what they started with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._directory: memoryview | None = None  # words, as of the ring
        self._ring: memoryview | None = None
        self._presence: tuple[Table | None, int] = (None, 0)  # with its version, replaced as one
        self._slots: tuple[Table | None, int] = (None, 0)
        self.chunks: dict[int, ChunkMap] = {}
        self._chunks_version = 0
        self._copiers: ThreadPoolExecutor | None = None

    def update(self, answer: Attached, fds: list[int]) -> None:
        with self._lock:
            descriptors = iter(fds)
            version = self._chunks_version
            for what, number, nbytes, extra in answer.items:
                if what == "version":
                    version = number
                    continue
                memory = map_fd(next(descriptors), nbytes, writable=what == "ring")
                if what == "directory":
                    self._directory = memory.data.cast("Q")
                elif what == "ring":
                    self._ring = memory.data.cast("Q")
                elif what == "presence":
                    self._presence = (table_over(memory, extra), number)
                elif what == "slots":
                    self._slots = (table_over(memory, extra), number)
                elif what == "chunk":
                    self.chunks[number] = ChunkMap(memory, extra)
            if not answer.more:
                live = set(answer.live)
                self.chunks = {number: chunk for number, chunk in self.chunks.items() if number in live}
                self._chunks_version = version
                if self._ring is not None:
                    self._ring[shared.SEEN] = version

    @property
    def versions(self) -> list[int]:
        """Of the presence and the slot table that are mapped."""
        return [self._presence[1], self._slots[1]]

    @property
    def stale(self) -> bool:
        """Whether the service has newer tables or other chunks than are mapped."""
        words = self._directory
        return words is None or (
            words[shared.PRESENCE] != self._presence[1]
            or words[shared.SLOTS] != self._slots[1]
            or words[shared.CHUNKS] != self._chunks_version
        )

    def prefix(self, keys: KeyArray) -> tuple[int, bool]:
        """(leading blocks that are present, whether the next one is surely absent)."""
        (table, version), words = self._presence, self._directory
        if table is None or words is None:
            return 0, False
        complete = bool(words[shared.COMPLETE])
        found = leading(table, fingerprints(keys), words[shared.EXPIRY_S])
        sure = complete and bool(words[shared.COMPLETE]) and words[shared.PRESENCE] == version
        if self._ring is not None:
            with self._lock:
                self._ring[shared.LOOKUPS] += 1
                self._ring[shared.ASKED] += len(keys)
                self._ring[shared.PRESENT] += found
        return found, sure

    def copy(
        self, keyspace: bytes, keys: KeyArray, block_bytes: int, destinations: Sequence[Parts]
    ) -> NDArray[np.bool_]:
        """Copy what lies in memory; which blocks were delivered. Others' destinations may have been written to."""
        done = np.zeros(len(keys), bool)
        table, words, chunks = self._slots[0], self._directory, self.chunks
        if table is None or words is None or not len(keys):
            return done
        now_s, places, names = words[shared.EXPIRY_S], _places(table, keys), key_list(keys)

        def copied(first: int, end: int) -> list[tuple[int, int]]:
            touches = []
            for position in range(first, end):
                place = places[position]
                chunk = None if place is None else chunks.get(place[0])
                if place is None or chunk is None:
                    continue
                generation = copy_block(
                    chunk, place[1], names[position], keyspace, block_bytes, now_s, destinations[position]
                )
                if generation:
                    done[position] = True
                    touches.append((pack_slot(*place), generation))
            return touches

        touches = self._in_parts(copied, len(keys), block_bytes)
        if 0 < words[shared.UNTIL_NS] <= time.clock_gettime_ns(time.CLOCK_BOOTTIME):  # now, or while it was copied
            return np.zeros(len(keys), bool)
        if touches and self._ring is not None:
            with self._lock:
                shared.write_touches(self._ring, touches)
        return done

    def _in_parts(
        self, copied: Callable[[int, int], list[tuple[int, int]]], count: int, block_bytes: int
    ) -> list[tuple[int, int]]:
        """Of a long copy this thread does the first part, others the rest: one core does not fill the memory bus."""
        parts = min(_COPIERS, count * block_bytes // _PART_BYTES)
        if parts <= 1:
            return copied(0, count)
        with self._lock:
            self._copiers = self._copiers or ThreadPoolExecutor(_COPIERS - 1, thread_name_prefix="perdure-copy")
        step = -(-count // parts)
        rest = [self._copiers.submit(copied, at, min(at + step, count)) for at in range(step, count, step)]
        touches = copied(0, step)
        for part in rest:
            touches += part.result()
        return touches

    def granted(self, slots: Sequence[int], keys: Sequence[bytes], keyspace: bytes) -> list[memoryview | None]:
        """The blocks in slots that are pinned for us; None where there is no slot, it holds another block, or its chunk
        is not mapped. Only while the pins are held."""
        chunks, unpack, found = self.chunks, HEADER.unpack_from, list[memoryview | None]()
        for packed, key in zip(slots, keys, strict=True):
            chunk = chunks.get(packed >> SLOT_INDEX_BITS)
            if chunk is None:
                found.append(None)
                continue
            at = (packed & SLOT_INDEX_MASK) * HEADER_BYTES
            _, its_key, its_space, offset, nbytes, _ = unpack(chunk.headers, at)
            same = its_key == key and its_space == keyspace
            found.append(chunk.data[offset : offset + nbytes] if same else None)
        return found

    def copy_granted(self, packed: int, key: bytes, keyspace: bytes, block_bytes: int, destination: Parts) -> bool:
        """Copy a block the service has brought for us. Checked as any other copy: if this process slept too long, the
        slot is no longer ours."""
        number, index = unpack_slot(packed)
        chunk = self.chunks.get(number)
        return chunk is not None and bool(copy_block(chunk, index, key, keyspace, block_bytes, 0, destination))


def _places(table: Table, keys: KeyArray) -> list[tuple[int, int] | None]:
    """(number of the chunk, index of the slot) of each key, None where absent."""
    if len(keys) <= _FEW_KEYS:
        found = [locate_one(table, int.from_bytes(key[:8], "little")) for key in key_list(keys)]
        return [None if at < 0 else (int(table.segment[at]), int(table.expires_s[at])) for at in found]
    where = locate(table, fingerprints(keys))
    chunks, slots = (column.take(where, mode="clip").tolist() for column in (table.segment, table.expires_s))
    places = zip(where.tolist(), chunks, slots, strict=True)
    return [None if at < 0 else (chunk, index) for at, chunk, index in places]


def copy_block(
    chunk: ChunkMap, index: int, key: bytes, keyspace: bytes, block_bytes: int, now_s: int, destination: Parts
) -> int:
    """Copy one block if its slot holds it before and after: the slot's generation, 0 if it does not."""
    if index >= len(chunk.headers) // HEADER_BYTES:
        return 0
    generation, its_key, its_space, offset, nbytes, expires_s = HEADER.unpack_from(chunk.headers, index * HEADER_BYTES)
    if (
        generation & 1
        or its_key != key
        or its_space != keyspace
        or nbytes != block_bytes
        or 0 < expires_s <= now_s
        or offset + nbytes > len(chunk.data)
    ):
        return 0
    copy_parts([chunk.data[offset : offset + nbytes]], destination)
    same = chunk.generations[index * (HEADER_BYTES // 8)] == generation
    return int(generation) if same else 0
