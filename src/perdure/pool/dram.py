"""DRAM tier of the embedded store: recently used blocks in page-aligned memory, bounded to the byte.

Contract
- Memory comes in chunks, each cut into slots of one size class (block size in whole pages). Chunks are mapped on demand
  while the budget allows; then the coldest block of the class goes, or a whole chunk of a class that is used less, and
  the chunk is cut anew. The mapped bytes never exceed the budget.
- A block is visible between `publish` and its eviction or `drop`. Memory of a pinned or reserved slot is never reused:
  not by eviction, not by `drop`, not by a recut. A slot whose pin was released must not be read any more.
- A block that was dropped while someone was loading it stays dropped: a slot reserved before the drop is not published
  under that key.
- Blocks are whatever the caller wrote before `publish`: verify first. The pool never looks at the bytes.
- Thread-safe: one lock, held for bookkeeping only, never while bytes are copied.
- Never: I/O, waiting for memory. When nothing can be evicted, `reserve` says None and the caller goes without.

Recency is LRU, tail-first within a batch: of blocks used together the later ones in the prefix are evicted first,
because a prefix without its tail is still of use and a tail without its prefix is not.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, cast

import numpy as np

from perdure import limits
from perdure.catalog.api import KeyArray
from perdure.errors import InvalidArgument

_KEY: Final = np.dtype((np.void, limits.key_bytes))


class SlotState(IntEnum):
    RESERVED = 0  # exclusive, writable, invisible
    PUBLISHED = 1
    DROPPED = 2  # invisible, but pinned: the memory is free when the last pin goes
    FREE = 3  # the memory may belong to another slot


class Slot:
    """Memory for one block. `view`: format 'B', exactly the bytes reserved, page-aligned. `keyspace`: whose it is,
    as told to `publish`. The rest is the pool's."""

    __slots__ = ("chunk", "index", "key", "keyspace", "pins", "reserved_at", "state", "used", "view")

    def __init__(self, view: memoryview, chunk: _Chunk, index: int, tick: int):
        self.view = view
        self.chunk = chunk
        self.index = index  # of the slot in its chunk
        self.key = self.keyspace = b""
        self.pins = 0
        self.state = SlotState.RESERVED
        self.reserved_at = self.used = tick


class _SizeClass:
    """The blocks of one slot size. `lru`: published slots, coldest first. `partial`: chunks with free slots."""

    __slots__ = ("compare_in", "lru", "partial", "pinned", "slot_bytes")

    def __init__(self, slot_bytes: int):
        self.slot_bytes = slot_bytes
        self.lru: OrderedDict[bytes, Slot] = OrderedDict()
        self.partial: dict[_Chunk, None] = {}
        self.pinned = 0  # of the published slots
        self.compare_in = 0  # evictions until the other classes are looked at again


class _Chunk:
    """A piece of memory cut for one class. `held`: slots whose memory must stay (pinned or reserved)."""

    __slots__ = ("free", "fresh", "held", "memory", "owner", "slots", "used")

    def __init__(self, nbytes: int, owner: _SizeClass):
        # private: shared anonymous memory is shmem, which gets no huge pages by default
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # a hint: fewer page faults and TLB misses
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(memory)
        self.slots: dict[int, Slot] = {}
        self.adopt(owner)

    def adopt(self, owner: _SizeClass) -> None:
        """Cut an empty chunk for a class."""
        self.owner = owner
        self.free: list[int] = []
        self.fresh = 0  # slots from here on were not used since the cut
        self.held = 0
        self.used = 0

    def full(self) -> bool:
        return not self.free and (self.fresh + 1) * self.owner.slot_bytes > self.memory.nbytes

    def take(self, nbytes: int, tick: int) -> Slot:
        if self.free:
            index = self.free.pop()
        else:
            index, self.fresh = self.fresh, self.fresh + 1
        start = index * self.owner.slot_bytes
        slot = self.slots[index] = Slot(self.memory[start : start + nbytes], self, index, tick)
        self.held += 1
        return slot


@dataclass(frozen=True, slots=True)
class PoolStats:
    budget_bytes: int
    mapped_bytes: int  # chunks: never above the budget
    bytes: int  # in slots that hold a block
    slots: int
    pinned: int
    hits: int
    misses: int
    evictions: int
    recuts: int  # chunks evicted as a whole for another size class


class DramPool:
    """See the module's contract. `budget_bytes` 0: no pool; nothing is ever found or reserved.

    A budget below a multiple of the chunk size is divided evenly, so that all of it can be used.
    """

    def __init__(self, budget_bytes: int, chunk_bytes: int = limits.pool_chunk_bytes):
        page = limits.page_bytes
        self.budget_bytes = budget_bytes
        self._chunks_max = -(-budget_bytes // chunk_bytes)
        self._chunk_bytes = budget_bytes // self._chunks_max // page * page if budget_bytes else 0
        if not self._chunk_bytes:
            self._chunks_max = 0
        self._lock = threading.Lock()
        self._index: dict[bytes, Slot] = {}
        self._classes: dict[int, _SizeClass] = {}
        self._chunks: list[_Chunk] = []
        self._idle: list[_Chunk] = []  # chunks without a single slot in use: anyone's
        self._tick = 0  # of calls: what "used" counts in
        self._reserved = 0
        self._drops: dict[bytes, int] = {}  # key -> tick of its last drop, while slots reserved before it may exist
        self._all_dropped_at = 0
        self._hits = self._misses = self._evictions = self._recuts = 0

    # --- use -------------------------------------------------------------------------------------------------
    def get(self, keys: KeyArray) -> list[Slot | None]:
        """Pin the blocks that are here and mark them used; None where absent. Every slot returned must be released."""
        if not self._chunks_max:
            return [None] * len(keys)
        found: list[Slot | None] = []
        misses = 0
        with self._lock:
            tick = self._tick = self._tick + 1
            index = self._index
            for name in reversed(_names(keys)):
                slot = index.get(name)
                found.append(slot)
                if slot is None:
                    misses += 1
                    continue
                chunk = slot.chunk
                owner = chunk.owner
                if not slot.pins:
                    chunk.held += 1
                    owner.pinned += 1
                slot.pins += 1
                slot.used = chunk.used = tick
                owner.lru.move_to_end(name)
            self._misses += misses
            self._hits += len(found) - misses
        found.reverse()
        return found

    def release(self, slots: Iterable[Slot | None]) -> None:
        """End one pin of each slot (None is skipped). InvalidArgument if a slot is not pinned."""
        with self._lock:
            for slot in slots:
                if slot is None:
                    continue
                if slot.pins < 1:
                    raise InvalidArgument("a slot was released more often than it was returned by get()")
                slot.pins -= 1
                if not slot.pins:
                    slot.chunk.held -= 1
                    if slot.state is SlotState.DROPPED:
                        self._free(slot)
                    else:
                        slot.chunk.owner.pinned -= 1

    def touch(self, keys: KeyArray) -> None:
        """Mark blocks used in the order of a prefix (after publishing a batch in the order its reads came back)."""
        with self._lock:
            self._tick += 1
            for name in reversed(_names(keys)):
                slot = self._index.get(name)
                if slot is not None:
                    slot.used = slot.chunk.used = self._tick
                    slot.chunk.owner.lru.move_to_end(name)

    # --- fill ------------------------------------------------------------------------------------------------
    def reserve(self, nbytes: int) -> Slot | None:
        """Memory for a block of `nbytes`, to be ended by `publish` or `discard`; its content is undefined.

        None if the block is larger than a chunk or everything evictable is in use.
        """
        if nbytes < 1:
            raise InvalidArgument(f"a block has at least one byte, not {nbytes}")
        if nbytes > self._chunk_bytes:
            return None
        slot_bytes = -(-nbytes // limits.page_bytes) * limits.page_bytes
        with self._lock:
            size_class = self._classes.get(slot_bytes)
            if size_class is None:
                size_class = self._classes[slot_bytes] = _SizeClass(slot_bytes)
            chunk = self._chunk_with_room(size_class)
            if chunk is None:
                return None
            slot = chunk.take(nbytes, self._tick)
            if chunk.full():
                del size_class.partial[chunk]
            self._reserved += 1
            return slot

    def publish(self, slot: Slot, key: bytes, keyspace: bytes = b"") -> bool:
        """Make a reserved slot visible as `key`. False, and the slot is freed, if the key is here already or was
        dropped since the slot was reserved. `keyspace` is for the caller to compare: the pool finds by key alone."""
        with self._lock:
            self._end_reservation(slot)
            refused = slot.reserved_at < max(self._all_dropped_at, self._drops.get(key, 0))
            if not self._reserved:
                self._drops.clear()
            if refused or key in self._index:
                self._free(slot)
                return False
            self._tick += 1
            slot.key, slot.keyspace = key, keyspace
            slot.state = SlotState.PUBLISHED
            slot.used = slot.chunk.used = self._tick
            self._index[key] = slot.chunk.owner.lru[key] = slot
            return True

    def discard(self, slot: Slot) -> None:
        """Give back a reserved slot. The caller warrants that nothing writes into it any more."""
        with self._lock:
            self._end_reservation(slot)
            if not self._reserved:
                self._drops.clear()
            self._free(slot)

    def drop(self, keys: KeyArray) -> int:
        """Make blocks invisible at once; memory that is pinned is reused after its release. Returns how many."""
        names = _names(keys)
        dropped = 0
        with self._lock:
            self._tick += 1
            if self._reserved:
                self._drops.update(dict.fromkeys(names, self._tick))
                if len(self._drops) > limits.batch_blocks_max:  # costs some loads their place in memory
                    self._drops.clear()
                    self._all_dropped_at = self._tick
            for name in names:
                slot = self._index.get(name)
                if slot is not None:
                    self._unpublish(slot)
                    dropped += 1
        return dropped

    def drop_all(self) -> None:
        """As `drop` of every key, those being loaded included."""
        with self._lock:
            self._tick += 1
            self._all_dropped_at = self._tick
            for slot in list(self._index.values()):
                self._unpublish(slot)

    def stats(self) -> PoolStats:
        with self._lock:
            return PoolStats(
                budget_bytes=self.budget_bytes,
                mapped_bytes=len(self._chunks) * self._chunk_bytes,
                bytes=sum(len(c.lru) * c.slot_bytes for c in self._classes.values()),
                slots=len(self._index),
                pinned=sum(c.pinned for c in self._classes.values()),
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                recuts=self._recuts,
            )

    # --- memory (all below: with the lock held) --------------------------------------------------------------
    def _end_reservation(self, slot: Slot) -> None:
        if slot.state is not SlotState.RESERVED:
            raise InvalidArgument(f"the slot is {slot.state.name.lower()}, not reserved")
        slot.chunk.held -= 1
        self._reserved -= 1

    def _unpublish(self, slot: Slot) -> None:
        owner = slot.chunk.owner
        del self._index[slot.key]
        del owner.lru[slot.key]
        if slot.pins:
            slot.state = SlotState.DROPPED
            owner.pinned -= 1
        else:
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        chunk = slot.chunk
        slot.state = SlotState.FREE
        del chunk.slots[slot.index]
        if chunk.slots:
            chunk.free.append(slot.index)
            chunk.owner.partial[chunk] = None
        else:
            chunk.owner.partial.pop(chunk, None)
            self._idle.append(chunk)

    def _chunk_with_room(self, size_class: _SizeClass) -> _Chunk | None:
        if not size_class.partial and not self._idle and not self._grow(size_class):
            self._evict_for(size_class)
        if not size_class.partial:
            if not self._idle:
                return None
            chunk = self._idle.pop()
            chunk.adopt(size_class)
            size_class.partial[chunk] = None
        return next(iter(size_class.partial))

    def _grow(self, size_class: _SizeClass) -> bool:
        if len(self._chunks) >= self._chunks_max:
            return False
        try:
            chunk = _Chunk(self._chunk_bytes, size_class)
        except OSError:  # the machine has less memory than the budget says: make do with what there is
            return False
        self._chunks.append(chunk)
        self._idle.append(chunk)
        return True

    def _evict_for(self, size_class: _SizeClass) -> None:
        """Free the coldest slot of the class, or the coldest chunk of another class if that was used before it."""
        evictable = len(size_class.lru) > size_class.pinned
        rival = None
        if not evictable or size_class.compare_in <= 0:
            size_class.compare_in = self._chunk_bytes // size_class.slot_bytes  # O(chunks) once per chunk's worth
            others = (c for c in self._chunks if c.owner is not size_class and not c.held)
            rival = min(others, key=lambda c: c.used, default=None)
        if evictable:
            coldest = self._coldest(size_class)
            if rival is None or rival.used >= coldest.used:
                size_class.compare_in -= 1
                self._evictions += 1
                self._unpublish(coldest)
                return
        if rival is not None:
            self._recuts += 1
            self._evictions += len(rival.slots)
            for slot in list(rival.slots.values()):
                self._unpublish(slot)

    def _coldest(self, size_class: _SizeClass) -> Slot:
        """The coldest unpinned slot; there is one. Pinned ones met on the way are in use, so they go to the hot end."""
        while True:
            key, slot = next(iter(size_class.lru.items()))
            if not slot.pins:
                return slot
            size_class.lru.move_to_end(key)


def _names(keys: KeyArray) -> list[bytes]:
    if len(keys) == 1:
        return [keys.tobytes()]
    return cast("list[bytes]", np.ascontiguousarray(keys).view(_KEY).ravel().tolist())
