"""The DRAM tier as a service shares it: chunks of several tenants, mapped by engines, against a simple model.

The model knows what it was told (observer, chunk headers) and what it did; the pool's own books are not asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from perdure import limits
from perdure.pool.chunks import Chunk, Slot
from perdure.pool.dram import DramPool

PAGE = limits.page_bytes
CHUNK = 6 * PAGE
DOMAINS = [bytes([letter]) * limits.id_bytes for letter in b"ab"]
SIZES = [PAGE - 1, 3 * PAGE, CHUNK]
NUMBERS = 12  # keys of each domain
POISON = 0xEE


def key(domain: int, number: int) -> bytes:
    return bytes([domain]) + number.to_bytes(31, "big")


def array_of(names: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(names), np.uint8).reshape(-1, limits.key_bytes)


class Memory:
    """A chunk's memory as engines see it."""

    def __init__(self, nbytes: int, model: Model):
        self.content = bytearray(nbytes)
        self.view = memoryview(self.content)
        self.generations: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}
        self.model = model
        self.closed = False
        model.memories.append(self)

    def announce(
        self, index: int, generation: int, key: bytes, keyspace: bytes, offset: int, nbytes: int, expires_s: int
    ) -> None:
        assert generation % 2 == 0
        assert generation > self.generations.get(index, 0), "readers could take the block of before for this one"
        self.generations[index], self.keys[index] = generation, key

    def withdraw(self, index: int, generation: int) -> None:
        assert generation % 2 == 1
        assert generation > self.generations.get(index, 0)
        self.generations[index] = generation

    def close(self) -> None:
        assert not self.closed
        assert not [slot for slot in self.model.in_use() if slot.chunk.memory is self], "given up while in use"
        self.closed = True
        self.content[:] = bytes([POISON]) * len(self.content)


@dataclass
class Model:
    """The observer of the pool, and what is true of it."""

    memories: list[Memory] = field(default_factory=list)
    domain_of: dict[int, bytes] = field(default_factory=dict)  # chunk -> whose it is, for good
    chunks: dict[int, Chunk] = field(default_factory=dict)
    mapped: set[int] = field(default_factory=set)  # by engines
    stranded: set[int] = field(default_factory=set)
    visible: dict[bytes, Slot] = field(default_factory=dict)
    reserved: dict[Slot, bytes] = field(default_factory=dict)
    pinned: list[Slot] = field(default_factory=list)
    content: dict[Slot, bytes] = field(default_factory=dict)  # of all that is reserved, visible or pinned
    retelling: bool = False
    dropping: bool = False

    def in_use(self) -> list[Slot]:
        return [*self.reserved, *dict.fromkeys(self.pinned)]

    # --- what the pool tells
    def published(self, slot: Slot) -> None:
        assert self.retelling or slot.key not in self.visible
        assert self.domain_of[slot.chunk.number] == slot.chunk.owner.domain == DOMAINS[slot.key[0]]
        self.visible[slot.key] = slot

    def withdrawn(self, slot: Slot) -> None:
        assert self.dropping or slot not in self.pinned, "evicted while somebody looked at it"
        assert self.visible.pop(slot.key) is slot

    def opened(self, chunk: Chunk) -> None:
        assert self.retelling or chunk.number not in self.domain_of
        self.domain_of[chunk.number], self.chunks[chunk.number] = chunk.owner.domain, chunk

    def retired(self, chunk: Chunk) -> bool:
        assert not [slot for slot in [*self.in_use(), *self.visible.values()] if slot.chunk is chunk]
        del self.chunks[chunk.number]
        if chunk.number in self.mapped:
            self.stranded.add(chunk.number)
        return chunk.number in self.mapped


class SharedPoolMachine(RuleBasedStateMachine):
    @initialize(chunks=st.integers(1, 4))
    def start(self, chunks: int) -> None:
        self.model = Model()
        self.pool = DramPool(chunks * CHUNK, CHUNK, memory=lambda nbytes: Memory(nbytes, self.model), shared=True)
        self.pool.observe(self.model)
        self.serial = self.hits = self.misses = 0
        self.lent: list[int] = [limits.lent_bytes_min]  # free beside a small pool; from here on it counts
        assert self.pool.lend(limits.lent_bytes_min)

    # --- fill
    @rule(domain=st.integers(0, 1), nbytes=st.sampled_from(SIZES))
    def reserve(self, domain: int, nbytes: int) -> None:
        self._reserve(domain, nbytes)

    def _reserve(self, domain: int, nbytes: int) -> Slot | None:
        pages = -(-nbytes // PAGE) * PAGE
        idle = not self.model.in_use()
        alike = [
            slot
            for slot in self.model.visible.values()
            if slot.chunk.owner.domain == DOMAINS[domain] and slot.chunk.owner.slot_bytes == pages
        ]
        stranded = len(self.model.stranded)
        slot = self.pool.reserve(nbytes, DOMAINS[domain])
        if slot is None:
            charged = sum(self.lent[1:]) + CHUNK * len(self.model.stranded)
            if len(self.model.stranded) == stranded:  # else: what was given up for it is not free before it is unmapped
                assert not (idle and charged + CHUNK <= self.pool.budget_bytes), "nothing was in use, yet nothing given"
                assert all(one in self.model.pinned for one in alike), "there was something to evict"
            return None
        assert slot not in self.model.content
        assert self.model.domain_of[slot.chunk.number] == DOMAINS[domain]
        generations = slot.chunk.memory.generations  # type: ignore[attr-defined]
        assert generations[slot.index] % 2 == 1, "engines could still take what was here"
        self.serial += 1
        self.model.reserved[slot] = DOMAINS[domain]
        self.model.content[slot] = (self.serial.to_bytes(4, "big") * (nbytes // 4 + 1))[:nbytes]
        slot.view[:] = self.model.content[slot]
        return slot

    @rule(
        domain=st.integers(0, 1),
        nbytes=st.sampled_from(SIZES),
        numbers=st.lists(st.integers(0, NUMBERS - 1), min_size=1, max_size=6),
        pin=st.booleans(),
    )
    def put(self, domain: int, nbytes: int, numbers: list[int], pin: bool) -> None:
        for number in numbers:
            slot = self._reserve(domain, nbytes)
            if slot is not None:
                self._publish(slot, number, pin)

    @precondition(lambda self: self.model.reserved)
    @rule(data=st.data(), number=st.integers(0, NUMBERS - 1), pin=st.booleans())
    def publish(self, data: st.DataObject, number: int, pin: bool) -> None:
        self._publish(data.draw(st.sampled_from(list(self.model.reserved))), number, pin)

    def _publish(self, slot: Slot, number: int, pin: bool) -> None:
        name = key(DOMAINS.index(self.model.reserved[slot]), number)
        there = name in self.model.visible
        del self.model.reserved[slot]
        if self.pool.publish(slot, name, pin=pin):
            assert not there
            assert self.model.visible[name] is slot
            if pin:
                self.model.pinned.append(slot)

    @precondition(lambda self: self.model.reserved)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(list(self.model.reserved)))
        del self.model.reserved[slot]
        self.pool.discard(slot)

    # --- use
    @rule(domain=st.integers(0, 1), numbers=st.lists(st.integers(0, NUMBERS - 1), min_size=1, max_size=4))
    def get(self, domain: int, numbers: list[int]) -> None:
        names = [key(domain, number) for number in numbers]
        found = self.pool.get(array_of(names))
        assert found == [self.model.visible.get(name) for name in names]
        there = [slot for slot in found if slot is not None]
        self.model.pinned += there
        self.hits += len(there)
        self.misses += len(names) - len(there)

    @precondition(lambda self: self.model.pinned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = self.model.pinned.pop(data.draw(st.integers(0, len(self.model.pinned) - 1)))
        self.pool.release([slot])

    @rule()
    def release_all(self) -> None:
        self.pool.release(self.model.pinned)
        self.model.pinned.clear()

    @rule(domain=st.integers(0, 1), numbers=st.lists(st.integers(0, NUMBERS - 1), min_size=1, max_size=4))
    def touch(self, domain: int, numbers: list[int]) -> None:
        self.pool.touch(array_of([key(domain, number) for number in numbers]))

    @rule(domain=st.integers(0, 1), numbers=st.lists(st.integers(0, NUMBERS - 1), min_size=1, max_size=3, unique=True))
    def drop(self, domain: int, numbers: list[int]) -> None:
        names = [key(domain, number) for number in numbers]
        there = sum(name in self.model.visible for name in names)
        self.model.dropping = True
        assert self.pool.drop(array_of(names)) == there
        self.model.dropping = False
        assert not self.model.visible.keys() & set(names)

    @rule()
    def drop_all(self) -> None:
        self.model.dropping = True
        self.pool.drop_all()
        self.model.dropping = False
        assert not self.model.visible

    # --- memory that moves
    @rule(nbytes=st.sampled_from([1, PAGE, CHUNK, 2 * CHUNK]))
    def lend(self, nbytes: int) -> None:
        if self.pool.lend(nbytes):
            self.lent.append(nbytes)

    @precondition(lambda self: len(self.lent) > 1)
    @rule()
    def repay(self) -> None:
        self.pool.repay(self.lent.pop())

    @rule()
    def prefault(self) -> None:
        self.pool.prefault()

    @precondition(lambda self: self.model.chunks)
    @rule(data=st.data())
    def an_engine_maps_a_chunk(self, data: st.DataObject) -> None:
        self.model.mapped.add(data.draw(st.sampled_from(sorted(self.model.chunks))))

    @precondition(lambda self: self.model.mapped)
    @rule(data=st.data())
    def the_engines_unmap_a_chunk(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.model.mapped)))
        self.model.mapped.discard(number)
        if number in self.model.stranded:
            self.model.stranded.discard(number)
            self.pool.unstranded()

    @rule()
    def another_observer(self) -> None:
        """It is told of what is there already."""
        visible, chunks = dict(self.model.visible), dict(self.model.chunks)
        self.pool.observe(None)
        self.model.visible.clear()
        self.model.chunks.clear()
        self.model.retelling = True
        self.pool.observe(self.model)
        self.model.retelling = False
        assert self.model.visible == visible
        assert self.model.chunks == chunks

    # --- what always holds
    @invariant()
    def nobody_has_anothers_memory(self) -> None:
        model = self.model
        live = dict.fromkeys([*model.in_use(), *model.visible.values()])
        taken: set[tuple[int, int]] = set()
        for slot in live:
            pages = {
                (slot.chunk.number, page)
                for page in range(slot.offset // PAGE, (slot.offset + slot.chunk.owner.slot_bytes) // PAGE)
            }
            assert not taken & pages, "two owners of one page"
            taken |= pages
            assert not slot.chunk.memory.closed  # type: ignore[attr-defined]
            assert bytes(slot.view) == model.content[slot]
        model.content = {slot: content for slot, content in model.content.items() if slot in live}

    @invariant()
    def engines_see_what_is_there(self) -> None:
        for name, slot in self.model.visible.items():
            memory = slot.chunk.memory
            assert memory.generations[slot.index] % 2 == 0  # type: ignore[attr-defined]
            assert memory.keys[slot.index] == name  # type: ignore[attr-defined]
        seen = sum(
            generation % 2 == 0
            for chunk in self.model.chunks.values()
            for generation in chunk.memory.generations.values()  # type: ignore[attr-defined]
        )
        assert seen == len(self.model.visible)

    @invariant()
    def the_accounts_agree(self) -> None:
        model, stats = self.model, self.pool.stats()
        charged, stranded = sum(self.lent[1:]), CHUNK * len(model.stranded)
        mapped = CHUNK * sum(not memory.closed for memory in model.memories)
        assert mapped + charged + stranded <= stats.budget_bytes
        assert (stats.mapped_bytes, stats.lent_bytes, stats.stranded_bytes) == (mapped, sum(self.lent), stranded)
        assert stats.slots == len(model.visible)
        assert stats.bytes == sum(slot.chunk.owner.slot_bytes for slot in model.visible.values())
        shown = {id(slot) for slot in model.visible.values()}
        assert stats.pinned == len({id(slot) for slot in model.pinned} & shown)
        assert (stats.hits, stats.misses) == (self.hits, self.misses)


TestSharedPool = SharedPoolMachine.TestCase
TestSharedPool.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
