"""The DRAM tier: budget, pins, recency, size classes, and no torn block while others evict."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from perdure.errors import InvalidArgument
from perdure.pool.dram import DramPool, Slot, SlotState

PAGE = 4096


def keys(*numbers: int) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(n.to_bytes(32, "big") for n in numbers), np.uint8).reshape(-1, 32)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def put(pool: DramPool, number: int, nbytes: int = PAGE) -> bool:
    slot = pool.reserve(nbytes)
    if slot is None:
        return False
    slot.view[:] = bytes([number % 251]) * nbytes
    return pool.publish(slot, key(number))


def present(pool: DramPool, *numbers: int) -> list[int]:
    """Which blocks are here; looks without marking them used."""
    return [n for n in numbers if key(n) in pool._index]


def one(pool: DramPool, number: int) -> Slot:
    slot = pool.get(keys(number))[0]
    assert slot is not None
    return slot


def address(slot: Slot) -> int:
    return int(np.frombuffer(slot.view, np.uint8).__array_interface__["data"][0])


def test_a_published_block_is_found_with_its_bytes() -> None:
    pool = DramPool(64 * PAGE)
    slot = pool.reserve(5000)
    assert slot is not None
    assert slot.view.format == "B"
    assert slot.view.nbytes == 5000
    assert address(slot) % PAGE == 0
    slot.view[:] = b"x" * 5000
    assert pool.get(keys(1)) == [None]
    assert pool.publish(slot, key(1))
    found = pool.get(keys(2, 1, 3, 1))
    assert found == [None, slot, None, slot]
    assert bytes(slot.view) == b"x" * 5000
    assert pool.stats().pinned == 1
    pool.release(found)
    stats = pool.stats()
    assert (stats.pinned, stats.slots, stats.bytes, stats.hits, stats.misses) == (0, 1, 2 * PAGE, 2, 3)


def test_budget_zero_means_no_pool() -> None:
    pool = DramPool(0)
    assert pool.reserve(1) is None
    assert pool.get(keys(1, 2)) == [None, None]
    pool.release([None, None])
    assert pool.drop(keys(1)) == 0
    pool.drop_all()
    pool.touch(keys(1))
    stats = pool.stats()
    assert (stats.mapped_bytes, stats.slots, stats.hits, stats.misses) == (0, 0, 0, 0)


@pytest.mark.parametrize("budget", [1, PAGE - 1, PAGE, 5 * PAGE + 1, 64 * PAGE, 100 * PAGE, 129 * PAGE])
def test_the_budget_is_used_and_never_exceeded(budget: int) -> None:
    pool = DramPool(budget, chunk_bytes=64 * PAGE)
    for n in range(300):
        put(pool, n)
    stats = pool.stats()
    assert stats.mapped_bytes <= budget
    assert stats.mapped_bytes % PAGE == 0
    chunks = max(1, -(-budget // (64 * PAGE)))
    assert stats.slots == budget // chunks // PAGE * chunks
    assert stats.bytes == stats.slots * PAGE
    assert stats.evictions == (300 - stats.slots if stats.slots else 0)


def test_a_block_larger_than_a_chunk_is_refused() -> None:
    pool = DramPool(16 * PAGE, chunk_bytes=8 * PAGE)
    assert pool.reserve(8 * PAGE + 1) is None
    whole = pool.reserve(8 * PAGE)
    assert whole is not None
    assert whole.view.nbytes == 8 * PAGE
    with pytest.raises(InvalidArgument):
        pool.reserve(0)


def test_the_least_recently_used_goes_first_and_of_a_batch_the_tail() -> None:
    pool = DramPool(6 * PAGE)
    for n in range(6):
        put(pool, n)
    pool.release(pool.get(keys(0, 1, 2)))
    put(pool, 10)
    assert present(pool, *range(6)) == [0, 1, 2, 4, 5]  # 3: oldest
    put(pool, 11)
    put(pool, 12)
    assert present(pool, *range(6)) == [0, 1, 2]
    put(pool, 13)
    assert present(pool, *range(6)) == [0, 1]  # 2: the tail of the batch
    pool.touch(keys(10, 11, 12, 13, 0, 1))
    put(pool, 14)
    assert present(pool, *range(15)) == [0, 10, 11, 12, 13, 14]


def test_publishing_a_key_that_is_here_keeps_the_first_block() -> None:
    pool = DramPool(4 * PAGE)
    assert put(pool, 1)
    slot = pool.reserve(PAGE)
    assert slot is not None
    slot.view[:] = b"z" * PAGE
    assert not pool.publish(slot, key(1))
    assert bytes(one(pool, 1).view[:1]) == b"\x01"
    assert pool.stats().slots == 1
    assert slot.state is SlotState.FREE


def test_memory_in_use_is_never_reused() -> None:
    pool = DramPool(4 * PAGE)
    for n in range(2):
        put(pool, n)
    pinned = pool.get(keys(0, 1))
    reserved = pool.reserve(PAGE)
    assert reserved is not None
    taken = {address(s) for s in [*pinned, reserved] if s}
    for n in range(10, 30):
        slot = pool.reserve(PAGE)
        assert slot is not None
        assert address(slot) not in taken
        pool.publish(slot, key(n))
    assert pool.reserve(2 * PAGE) is None  # the only chunk is in use, so it cannot be recut
    last = pool.reserve(PAGE)
    assert last is not None
    assert pool.reserve(PAGE) is None  # everything is pinned or reserved
    pool.release(pinned)
    assert address(pool.reserve(PAGE) or last) in taken


def test_a_dropped_block_is_invisible_at_once_and_its_memory_waits_for_the_pin() -> None:
    pool = DramPool(2 * PAGE)
    put(pool, 1)
    put(pool, 2)
    slots = pool.get(keys(1))
    slot = slots[0]
    assert slot is not None
    assert pool.drop(keys(1, 3)) == 1
    assert pool.get(keys(1)) == [None]
    other = pool.reserve(PAGE)  # takes the place of 2
    assert other is not None
    assert address(other) != address(slot)
    assert pool.reserve(PAGE) is None
    assert bytes(slot.view) == b"\x01" * PAGE
    pool.release(slots)
    assert pool.reserve(PAGE) is not None


def test_a_block_dropped_while_it_is_loaded_stays_dropped() -> None:
    pool = DramPool(8 * PAGE)
    before = [pool.reserve(PAGE) for _ in range(4)]
    pool.drop(keys(1))
    after = pool.reserve(PAGE)
    assert all(before)
    assert after is not None
    assert not pool.publish(before[0], key(1))  # type: ignore[arg-type]
    assert pool.publish(before[1], key(2))  # type: ignore[arg-type]
    assert pool.publish(after, key(1))
    pool.drop_all()
    assert not pool.publish(before[2], key(5))  # type: ignore[arg-type]
    pool.discard(before[3])  # type: ignore[arg-type]
    assert pool.stats().slots == 0
    assert pool._drops == {}
    assert put(pool, 1)
    slot = pool.reserve(PAGE)
    assert slot is not None
    pool.drop(keys(*range(20, 40)))
    pool.publish(slot, key(2))
    assert pool._drops == {}  # remembered only while something is being loaded


def test_drops_beyond_what_is_remembered_refuse_everything_being_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.limits.batch_blocks_max", 2)
    pool = DramPool(8 * PAGE)
    slot = pool.reserve(PAGE)
    assert slot is not None
    pool.drop(keys(1, 2, 3))
    assert len(pool._drops) <= 2
    assert not pool.publish(slot, key(2))


def test_drop_all_spares_what_is_pinned_until_it_is_released() -> None:
    pool = DramPool(4 * PAGE)
    for n in range(4):
        put(pool, n)
    slots = pool.get(keys(2))
    pool.drop_all()
    assert present(pool, 0, 1, 2, 3) == []
    assert bytes(slots[0].view) == b"\x02" * PAGE  # type: ignore[union-attr]
    free = [pool.reserve(PAGE) for _ in range(4)]
    assert free.count(None) == 1
    pool.release(slots)
    assert pool.reserve(PAGE) is not None


def test_misuse_is_an_error() -> None:
    pool = DramPool(4 * PAGE)
    put(pool, 1)
    slot = one(pool, 1)
    for wrong in (lambda: pool.publish(slot, key(2)), lambda: pool.discard(slot)):
        with pytest.raises(InvalidArgument):
            wrong()
    pool.release([slot])
    with pytest.raises(InvalidArgument):
        pool.release([slot])


def test_a_chunk_of_an_idle_class_is_cut_anew() -> None:
    pool = DramPool(16 * PAGE, chunk_bytes=8 * PAGE)
    for n in range(16):
        put(pool, n)
    assert put(pool, 100, 2 * PAGE)  # the new class takes the colder chunk as a whole
    assert present(pool, *range(16)) == list(range(8, 16))
    for n in range(101, 104):
        assert put(pool, n, 2 * PAGE)
    assert present(pool, *range(100, 104)) == [100, 101, 102, 103]
    assert pool.stats().recuts == 1
    for n in range(104, 120):  # the class in use grows into the chunk of the one that is not
        assert put(pool, n, 2 * PAGE)
    assert present(pool, *range(16)) == []
    assert pool.stats().slots == 8
    assert pool.stats().mapped_bytes == 16 * PAGE


def test_a_class_in_use_is_not_pushed_out_by_a_busy_one() -> None:
    pool = DramPool(16 * PAGE, chunk_bytes=8 * PAGE)
    put(pool, 1, 4 * PAGE)
    for n in range(100, 200):
        put(pool, n)
        pool.release(pool.get(keys(1)))
    assert present(pool, 1) == [1]


def test_memory_freed_by_one_class_serves_another_without_eviction() -> None:
    pool = DramPool(8 * PAGE, chunk_bytes=8 * PAGE)
    for n in range(8):
        put(pool, n)
    pool.drop(keys(*range(8)))
    assert put(pool, 100, 8 * PAGE)
    assert (pool.stats().evictions, pool.stats().recuts) == (0, 0)


def test_a_machine_that_refuses_memory_costs_hits_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = DramPool(16 * PAGE, chunk_bytes=8 * PAGE)
    for n in range(8):
        put(pool, n)

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    assert put(pool, 8)
    assert pool.stats().slots == 8
    assert DramPool(PAGE).reserve(1) is None


class PoolMachine(RuleBasedStateMachine):
    """Random calls; every pinned or reserved slot keeps the pattern written into it, whatever happens to the rest."""

    @initialize(chunks=st.integers(1, 3))
    def start(self, chunks: int) -> None:
        self.pool = DramPool(chunks * 6 * PAGE, chunk_bytes=6 * PAGE)
        self.serial = 0
        self.reserved: dict[Slot, bytes] = {}
        self.pinned: list[tuple[Slot, bytes]] = []
        self.truth: dict[int, bytes] = {}

    @rule(nbytes=st.sampled_from([1, PAGE, PAGE + 1, 2 * PAGE, 6 * PAGE]))
    def reserve(self, nbytes: int) -> None:
        slot = self.pool.reserve(nbytes)
        if slot is not None:
            self.serial += 1
            pattern = (self.serial.to_bytes(4, "big") * (nbytes // 4 + 1))[:nbytes]
            slot.view[:] = pattern
            self.reserved[slot] = pattern

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), number=st.integers(0, 12))
    def publish(self, data: st.DataObject, number: int) -> None:
        slot = data.draw(st.sampled_from(list(self.reserved)))
        pattern = self.reserved.pop(slot)
        was_there = key(number) in self.pool._index
        if self.pool.publish(slot, key(number)):
            assert not was_there
            self.truth[number] = pattern

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(list(self.reserved)))
        del self.reserved[slot]
        self.pool.discard(slot)

    @rule(numbers=st.lists(st.integers(0, 12), max_size=6))
    def get(self, numbers: list[int]) -> None:
        for number, slot in zip(numbers, self.pool.get(keys(*numbers)), strict=True):
            if slot is not None:
                self.pinned.append((slot, self.truth[number]))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.pinned) - 1))
        self.pool.release([self.pinned.pop(at)[0]])

    @rule(numbers=st.lists(st.integers(0, 12), max_size=3))
    def drop(self, numbers: list[int]) -> None:
        self.pool.drop(keys(*numbers))
        for number in numbers:
            self.truth.pop(number, None)
        assert present(self.pool, *numbers) == []

    @rule()
    def drop_all(self) -> None:
        self.pool.drop_all()
        self.truth.clear()

    @invariant()
    def patterns_hold(self) -> None:
        if not hasattr(self, "pool"):
            return
        for slot, pattern in [*self.pinned, *self.reserved.items()]:
            assert bytes(slot.view) == pattern
        for name, slot in self.pool._index.items():
            assert bytes(slot.view) == self.truth[int.from_bytes(name, "big")]

    @invariant()
    def accounts_hold(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert pool.stats().mapped_bytes <= pool.budget_bytes
        assert pool.stats().pinned == len({s for s, _ in self.pinned if s.state is SlotState.PUBLISHED})
        assert pool._reserved == len(self.reserved)
        in_use = {s for s, _ in self.pinned} | set(self.reserved)
        for chunk in pool._chunks:
            assert chunk.held == len([s for s in in_use if s.chunk is chunk])
            assert (not chunk.slots) == (chunk in pool._idle)
            assert (chunk in chunk.owner.partial) == (bool(chunk.slots) and not chunk.full())
        assert {n for c in pool._classes.values() for n in c.lru} == set(pool._index)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_no_torn_block_is_seen_while_others_evict() -> None:
    pool = DramPool(24 * 16 * PAGE, chunk_bytes=8 * 16 * PAGE)
    wrong: list[str] = []
    seen = [0] * 4

    def work(worker: int) -> None:
        rng = random.Random(worker)
        copied = np.empty(16 * PAGE, np.uint8)
        try:
            for _ in range(400):
                number = rng.randrange(60)
                nbytes = (8 if number % 3 else 16) * PAGE
                found = pool.get(keys(number))
                slot = found[0]
                if slot is not None:
                    np.copyto(copied[:nbytes], np.frombuffer(slot.view, np.uint8))
                    if not (copied[:nbytes] == number).all():
                        wrong.append(f"block {number} is torn")
                    seen[worker] += 1
                elif (new := pool.reserve(nbytes)) is not None:
                    np.frombuffer(new.view, np.uint8)[:] = number
                    pool.publish(new, key(number))
                pool.release(found)
                if rng.random() < 0.02:
                    pool.drop(keys(number))
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert sum(seen) > 100
    stats = pool.stats()
    assert stats.pinned == 0
    assert stats.evictions > 0
    assert stats.mapped_bytes <= pool.budget_bytes
