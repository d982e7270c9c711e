"""DRAM tier: recently used blocks in page-aligned memory, bounded to the byte.

Contract
- Memory comes in chunks, each cut into slots of one size class (block size in whole pages). Chunks are made on demand
  while the budget allows; then the coldest block of the class goes, or a whole chunk of a class that is used less, and
  the chunk is cut anew. The mapped bytes, those lent and those stranded never exceed the budget together.
- Shared chunks belong to one isolation domain (tenant) for their whole life, because engines map them: memory moves
  between domains by giving up a chunk and making another. What engines still map of it stays charged ("stranded").
- A block is visible between `publish` and its eviction or `drop`. Memory of a pinned or reserved slot is never reused:
  not by eviction, not by `drop`, not by a recut. A slot whose pin was released must not be read any more.
- A block that was dropped while someone loads it stays dropped: no slot reserved before is published under its key.
- Blocks are whatever the caller wrote before `publish`: verify first. The pool never looks at the bytes.
- Thread-safe: one lock, held for bookkeeping only, never while bytes are copied.
- Never: I/O, waiting for memory. When nothing can be evicted, `reserve` says None and the caller goes without.

Recency is LRU, tail-first within a batch: of blocks used together the later ones in the prefix are evicted first,
because a prefix without its tail is still of use and a tail without its prefix is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from perdure import limits
from perdure.catalog.api import KeyArray
from perdure.errors import InvalidArgument
from perdure.governance.shares import Shares
from perdure.pool.chunks import Chunk, Observer, PoolStats, SizeClass, Slot, SlotState, key_names, rival_of
from perdure.pool.memory import ChunkMemory, PrivateMemory

__all__ = ["DramPool", "PoolStats", "Slot", "SlotState"]


class DramPool:
    """See the module's contract. `budget_bytes` 0: no pool; nothing is ever found or reserved.

    A budget below a multiple of the chunk size is divided evenly, so that all of it can be used.
    """

    def __init__(
        self,
        budget_bytes: int,
        chunk_bytes: int = limits.pool_chunk_bytes,
        *,
        memory: Callable[[int], ChunkMemory] = PrivateMemory,
        shared: bool = False,
    ):
        """memory: makes a chunk. shared: engines map the chunks, so each belongs to one domain."""
        page = limits.page_bytes
        self.budget_bytes = budget_bytes
        self.shared = shared
        self._observer: Observer | None = None
        self._make = memory
        self._chunks_max = -(-budget_bytes // chunk_bytes)
        self._chunk_bytes = budget_bytes // self._chunks_max // page * page if budget_bytes else 0
        self._chunks_max = self._chunks_max if self._chunk_bytes else 0
        self._lock = threading.Lock()
        self._index: dict[bytes, Slot] = {}
        self._classes: dict[tuple[bytes, int], SizeClass] = {}
        self._chunks: list[Chunk] = []
        self._idle: list[Chunk] = []  # chunks without a single slot in use: anyone's (of their domain, if shared)
        self._spares: list[ChunkMemory] = []  # made ahead of need; they are nobody's yet
        self._numbers = 0
        self._generation = 0
        self._lent = self._stranded = 0
        self._tick = 0  # of calls: what "used" counts in
        self._drops: dict[bytes, int] = {}  # key -> tick of its last drop, while slots reserved before it may exist
        self._all_dropped_at = 0
        self._reserved = self._hits = self._misses = self._evictions = self._recuts = 0
        self.shares: Shares | None = None

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
            for name in reversed(key_names(keys)):
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
            for name in reversed(key_names(keys)):
                slot = self._index.get(name)
                if slot is not None:
                    slot.used = slot.chunk.used = self._tick
                    slot.chunk.owner.lru.move_to_end(name)

    def holds(self, keys: KeyArray) -> list[bool]:
        """Which blocks are here. Does not count as a use."""
        with self._lock:
            return [name in self._index for name in key_names(keys)]

    def pins_of(self, key: bytes) -> int | None:
        """How many look at a block now; None if it is not here. Does not count as a use."""
        with self._lock:
            slot = self._index.get(key)
            return None if slot is None else slot.pins

    # --- fill ------------------------------------------------------------------------------------------------
    def reserve(self, nbytes: int, domain: bytes = b"") -> Slot | None:
        """Memory for a block of `nbytes`, to be ended by `publish` or `discard`; its content is undefined.

        domain: whose it will be (16-byte tenant id); of no account where nothing is shared.

        None if the block is larger than a chunk or everything evictable is in use.
        """
        if nbytes < 1:
            raise InvalidArgument(f"a block has at least one byte, not {nbytes}")
        if nbytes > self._chunk_bytes:
            return None
        slot_bytes = -(-nbytes // limits.page_bytes) * limits.page_bytes
        name = (domain if self.shared else b"", slot_bytes)
        with self._lock:
            size_class = self._classes.get(name)
            if size_class is None:
                size_class = self._classes[name] = SizeClass(*name)
            chunk = self._chunk_with_room(size_class)
            if chunk is None:
                return None
            slot = chunk.take(nbytes, self._tick)
            self._hide(slot)
            if chunk.full():
                del size_class.partial[chunk]
            self._reserved += 1
            return slot

    def publish(
        self,
        slot: Slot,
        key: bytes,
        keyspace: bytes = b"",
        *,
        nbytes: int | None = None,
        expires_s: int = 0,
        pin: bool = False,
    ) -> bool:
        """Make a reserved slot visible as `key`. False, and the slot is freed, if the key is here already or was
        dropped since the slot was reserved.

        keyspace: for whoever reads to compare: the pool finds by key alone. nbytes: of the block, where the slot is
        larger. expires_s: seconds since 1970, 0 never. pin: as `get` would, in the same step.
        """
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
            if nbytes is not None:
                slot.nbytes = nbytes
            slot.state = SlotState.PUBLISHED
            chunk = slot.chunk
            slot.used = chunk.used = self._tick
            self._index[key] = chunk.owner.lru[key] = slot
            if pin:
                slot.pins = 1
                chunk.held += 1
                chunk.owner.pinned += 1
            self._generation += 2
            chunk.memory.announce(slot.index, self._generation, key, keyspace, slot.offset, slot.nbytes, expires_s)
            if self._observer is not None:
                self._observer.published(slot)
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
        names = key_names(keys)
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
            self._tick = self._all_dropped_at = self._tick + 1
            for slot in list(self._index.values()):
                self._unpublish(slot)

    # --- the node's memory, of which the pool is the largest part ------------------------------------------------
    def lend(self, nbytes: int) -> bool:
        """Take `nbytes` of the budget for something else; blocks make room for it. False if too much is in use.

        Beside a small pool `limits.lent_bytes_min` are always there: its service could serve nobody without."""
        with self._lock:
            self._lent += nbytes
            while self._over() and self._give_up_coldest():
                pass
            if self._over() or self._charged > max(0, self.budget_bytes - self._chunk_bytes):
                self._lent -= nbytes
                return False
            return True

    def repay(self, nbytes: int) -> None:
        with self._lock:
            self._lent -= nbytes

    def unstranded(self) -> None:
        """No engine maps a chunk any more that was retired as stranded."""
        with self._lock:
            self._stranded -= self._chunk_bytes

    def observe(self, observer: Observer | None) -> None:
        """From now on `observer` is told of every change, first of what is there already."""
        with self._lock:
            self._observer = observer
            if observer is None:
                return
            for chunk in self._chunks:
                observer.opened(chunk)
                for slot in chunk.slots.values():
                    if slot.state is SlotState.PUBLISHED:
                        observer.published(slot)

    def prefault(self) -> bool:
        """Make one chunk ahead of need; False when the budget is used up. Takes tens of ms per chunk."""
        with self._lock:
            if not self._may_grow():
                return False
        try:
            memory = self._make(self._chunk_bytes)
        except OSError:
            return False
        with self._lock:
            if self._may_grow():
                self._spares.append(memory)
                return True
        memory.close()
        return False

    def close(self) -> None:
        """Let go of all memory; nothing may be asked of the pool afterwards. Views that are out keep theirs."""
        with self._lock:
            for memory in [*(chunk.memory for chunk in self._chunks), *self._spares]:
                memory.close()
            self._chunks, self._spares, self._idle, self._chunks_max = [], [], [], 0
            self._index.clear()
            self._classes.clear()

    def stats(self) -> PoolStats:
        with self._lock:
            used, slots = sum(len(c.lru) * c.slot_bytes for c in self._classes.values()), len(self._index)
            mapped = (len(self._chunks) + len(self._spares)) * self._chunk_bytes
            pinned = sum(c.pinned for c in self._classes.values())
            return PoolStats(
                self.budget_bytes, mapped, self._lent, self._stranded, used, slots, pinned,
                self._hits, self._misses, self._evictions, self._recuts,
            )  # fmt: skip

    # --- memory (all below: with the lock held) --------------------------------------------------------------
    def _end_reservation(self, slot: Slot) -> None:
        if slot.state is not SlotState.RESERVED:
            raise InvalidArgument(f"the slot is {slot.state.name.lower()}, not reserved")
        slot.chunk.held -= 1
        self._reserved -= 1

    def _hide(self, slot: Slot) -> None:
        """Before any byte of the slot changes: readers in other processes must not take it."""
        self._generation += 2
        slot.chunk.memory.withdraw(slot.index, self._generation + 1)

    def _unpublish(self, slot: Slot) -> None:
        self._hide(slot)
        if self._observer is not None:
            self._observer.withdrawn(slot)
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
        if slot.wipe:
            slot.view[:] = bytes(slot.view.nbytes)
        slot.state = SlotState.FREE
        del chunk.slots[slot.index]
        if chunk.slots:
            chunk.free.append(slot.index)
            chunk.owner.partial[chunk] = None
        else:
            chunk.owner.partial.pop(chunk, None)
            self._idle.append(chunk)

    def _chunk_with_room(self, size_class: SizeClass) -> Chunk | None:
        if not size_class.partial and not self._idle_for(size_class) and not self._grow(size_class):
            self._evict_for(size_class)
        if not size_class.partial:
            chunk = self._idle_for(size_class)
            if chunk is None:  # what was evicted belonged to another domain
                if not self._idle or not self._retire(self._idle[0]) or not self._grow(size_class):
                    return None
                chunk = self._idle_for(size_class)
                assert chunk is not None
            self._idle.remove(chunk)
            chunk.adopt(size_class)
            size_class.partial[chunk] = None
        return next(iter(size_class.partial))

    def _idle_for(self, size_class: SizeClass) -> Chunk | None:
        """The idle chunk of last use that this class may have."""
        return next((chunk for chunk in reversed(self._idle) if chunk.owner.domain == size_class.domain), None)

    def _retire(self, chunk: Chunk) -> bool:
        """Give an idle chunk back to the system. False if engines still map it."""
        self._idle.remove(chunk)
        self._chunks.remove(chunk)
        stranded = self._observer is not None and self._observer.retired(chunk)
        if stranded:
            self._stranded += self._chunk_bytes
        chunk.memory.close()
        return not stranded

    @property
    def _charged(self) -> int:
        """What is lent, as far as it counts against the budget."""
        small = self.budget_bytes < 4 * limits.lent_bytes_min
        return max(0, self._lent - limits.lent_bytes_min) if small else self._lent

    def _over(self) -> bool:
        mapped = (len(self._chunks) + len(self._spares)) * self._chunk_bytes
        return mapped + self._charged + self._stranded > self.budget_bytes

    def _may_grow(self) -> bool:
        taken = (len(self._chunks) + len(self._spares) + 1) * self._chunk_bytes
        return taken + self._charged + self._stranded <= self.budget_bytes and len(self._chunks) < self._chunks_max

    def _give_up_coldest(self) -> bool:
        """A spare, or the chunk that was used longest ago, goes back to the system."""
        if self._spares:
            self._spares.pop().close()
            return True
        chunk = min((c for c in self._chunks if not c.held), key=lambda c: c.used, default=None)
        if chunk is None:
            return False
        self._evictions += len(chunk.slots)
        for slot in list(chunk.slots.values()):
            self._unpublish(slot)  # the last one makes the chunk idle
        return self._retire(chunk)

    def _grow(self, size_class: SizeClass) -> bool:
        if self._spares:
            memory = self._spares.pop()
        elif not self._may_grow():
            return False
        else:
            try:
                memory = self._make(self._chunk_bytes)
            except OSError:  # the machine has less memory than the budget says: make do with what there is
                return False
        self._numbers += 1
        chunk = Chunk(memory, size_class, self._numbers)
        self._chunks.append(chunk)
        self._idle.append(chunk)
        if self._observer is not None:
            self._observer.opened(chunk)
        return True

    def _evict_for(self, size_class: SizeClass) -> None:
        """Free the coldest slot of the class, or the coldest chunk of another class if that was used before it."""
        evictable = len(size_class.lru) > size_class.pinned
        rival = None
        if not evictable or size_class.compare_in <= 0:
            size_class.compare_in = self._chunk_bytes // size_class.slot_bytes  # O(chunks) once per chunk's worth
            rival = rival_of(size_class, self._chunks, self.shares, self.budget_bytes)
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

    def _coldest(self, size_class: SizeClass) -> Slot:
        """The coldest unpinned slot; there is one. Pinned ones met on the way are in use, so they go to the hot end."""
        while True:
            key, slot = next(iter(size_class.lru.items()))
            if not slot.pins:
                return slot
            size_class.lru.move_to_end(key)
