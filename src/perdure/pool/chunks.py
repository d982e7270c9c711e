"""The pieces the DRAM tier is made of: chunks of memory, cut into slots of one size class. Bookkeeping only: every call
is made with the pool's lock held."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol, cast

import numpy as np

from perdure import limits
from perdure.catalog.api import KeyArray
from perdure.governance.shares import Shares
from perdure.pool.memory import ChunkMemory

_KEY: Final = np.dtype((np.void, limits.key_bytes))


class SlotState(IntEnum):
    RESERVED = 0  # exclusive, writable, invisible
    PUBLISHED = 1
    DROPPED = 2  # invisible, but pinned: the memory is free when the last pin goes
    FREE = 3  # the memory may belong to another slot


class Slot:
    """Memory for one block. `view`: format 'B', exactly the bytes reserved, page-aligned. `keyspace` and `nbytes`:
    whose it is and how much of it is the block, as told to `publish`. The rest is the pool's."""

    __slots__ = ("chunk", "index", "key", "keyspace", "nbytes", "pins", "reserved_at", "state", "used", "view", "wipe")

    def __init__(self, view: memoryview, chunk: Chunk, index: int, tick: int):
        self.view = view
        self.chunk = chunk
        self.index = index  # of the slot in its chunk
        self.key = self.keyspace = b""
        self.nbytes = view.nbytes
        self.pins = 0
        self.wipe = False  # when it is free: its block was erased
        self.state = SlotState.RESERVED
        self.reserved_at = self.used = tick

    @property
    def offset(self) -> int:
        """Of its first byte in its chunk."""
        return self.index * self.chunk.owner.slot_bytes


class SizeClass:
    """The blocks of one slot size in one domain. `lru`: published slots, coldest first. `partial`: chunks with free
    slots."""

    __slots__ = ("compare_in", "domain", "lru", "partial", "pinned", "slot_bytes")

    def __init__(self, domain: bytes, slot_bytes: int):
        self.domain = domain
        self.slot_bytes = slot_bytes
        self.lru: OrderedDict[bytes, Slot] = OrderedDict()
        self.partial: dict[Chunk, None] = {}
        self.pinned = 0  # of the published slots
        self.compare_in = 0  # evictions until the other classes are looked at again


class Chunk:
    """A piece of memory cut for one class. `held`: slots whose memory must stay (pinned or reserved)."""

    __slots__ = ("free", "fresh", "held", "memory", "number", "owner", "slots", "used")

    def __init__(self, memory: ChunkMemory, owner: SizeClass, number: int):
        self.memory = memory
        self.number = number  # unlike that of any other chunk of this pool, ever
        self.slots: dict[int, Slot] = {}
        self.adopt(owner)

    def adopt(self, owner: SizeClass) -> None:
        """Cut an empty chunk for a class."""
        self.owner = owner
        self.free: list[int] = []
        self.fresh = 0  # slots from here on were not used since the cut
        self.held = 0
        self.used = 0

    def full(self) -> bool:
        return not self.free and (self.fresh + 1) * self.owner.slot_bytes > self.memory.view.nbytes

    def take(self, nbytes: int, tick: int) -> Slot:
        if self.free:
            index = self.free.pop()
        else:
            index, self.fresh = self.fresh, self.fresh + 1
        start = index * self.owner.slot_bytes
        slot = self.slots[index] = Slot(self.memory.view[start : start + nbytes], self, index, tick)
        self.held += 1
        return slot


def rival_of(size_class: SizeClass, chunks: list[Chunk], shares: Shares | None, budget_bytes: int) -> Chunk | None:
    """The chunk of another class that was used longest ago and may go for this one. None if there is none."""
    others = [chunk for chunk in chunks if chunk.owner is not size_class and not chunk.held]
    if shares is not None:
        used: Counter[bytes] = Counter()
        for chunk in chunks:
            used[chunk.owner.domain] += chunk.memory.view.nbytes
        victims = shares.victims(size_class.domain, used, budget_bytes)
        others = [chunk for chunk in others if chunk.owner.domain in victims]
    return min(others, key=lambda chunk: chunk.used, default=None)


class Observer(Protocol):
    """Who keeps what other processes see of the pool. Called with the pool's lock held: it only takes note."""

    def published(self, slot: Slot) -> None: ...

    def withdrawn(self, slot: Slot) -> None: ...

    def opened(self, chunk: Chunk) -> None:
        """A chunk now belongs to the domain of its owner, for good."""
        ...

    def retired(self, chunk: Chunk) -> bool:
        """A chunk is given up. True: other processes still map it, so its memory stays charged until
        `DramPool.unstranded`."""
        ...


@dataclass(frozen=True, slots=True)
class PoolStats:
    budget_bytes: int
    mapped_bytes: int  # chunks: never above the budget
    lent_bytes: int  # staging, landing areas and rings of engines
    stranded_bytes: int  # chunks given up that engines still map
    bytes: int  # in slots that hold a block
    slots: int
    pinned: int
    hits: int
    misses: int
    evictions: int
    recuts: int  # chunks evicted as a whole for another size class


def key_names(keys: KeyArray) -> list[bytes]:
    if len(keys) == 1:
        return [keys.tobytes()]
    return cast("list[bytes]", np.ascontiguousarray(keys).view(_KEY).ravel().tolist())
