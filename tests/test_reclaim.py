"""Making room: what is evicted first, what never is, and what happens when nothing can be or the disk is full.

Time is a fake clock, so recency is what the tests say; every test ends with the books compared with the files.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.blocks import wrong_books

import perdure
from perdure import Durability, Keyspace, Seams, Store, limits
from perdure.catalog.api import KeyArray, SegmentState
from perdure.catalog.faulty import FailCalls, FaultyIndex
from perdure.clock import FakeClock
from perdure.io.api import File, Files
from perdure.io.files import PosixFiles
from perdure.io.siblings import FaultWhile, FaultyFiles
from perdure.io.wrappers import FileAround, FilesAround
from perdure.segments.space import NoSpace, SpaceBudget, kept_back_bytes
from perdure.testing.store import (
    EXISTS,
    FOUND,
    MISSING,
    REJECTED,
    STORED,
    blocks_of,
    chain,
    keyspace,
    read,
    write,
)

MIB = 1 << 20
BLOCK = 60_000  # 16 records fill a segment of 1 MiB
PER_SEGMENT = 16
SMALL = 4096  # 128 records fill a segment
Opening = Callable[..., Store]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def opened(tmp_path: Path, clock: FakeClock) -> Iterator[Opening]:
    """Opens the store of this test (8 MiB: seven segments and one kept back); closes it, and looks at its books."""
    stores: list[Store] = []

    def opening(**options: Any) -> Store:
        seams = {name: options.pop(name) for name in ("files", "index", "control") if name in options}
        chosen = {"capacity": 8 * MIB, "memory": 0, "seams": Seams(clock=clock, **seams)} | options
        stores.append(perdure.open(tmp_path / "store", **chosen))
        assert stores[-1].wait_ready(30.0)
        return stores[-1]

    yield opening
    for store in stores:
        if store._closed is None:
            assert not wrong_books(store, settled=False)
            store.close()
    with closing(perdure.open(tmp_path / "store", memory=0, seams=Seams(clock=clock))) as store:
        assert store.wait_ready(30.0)
        store._keeper.chores()
        assert not wrong_books(store)
        assert store.verify()["ok"]


def fill(space: Keyspace, clock: FakeClock, numbers: range, blocks: int = PER_SEGMENT) -> list[KeyArray]:
    """Chains, one segment each, a minute apart."""
    chains = [chain(space, number, blocks) for number in numbers]
    for keys in chains:
        clock.advance(60)
        assert write(space, keys) == [STORED] * blocks
    return chains


def on_disk(store: Store) -> int:
    return sum(path.stat().st_size for path in store.path.glob("segments/*/*.seg"))


def whole(space: Keyspace, chains: list[KeyArray]) -> list[int]:
    """Which of the chains can be used from end to end."""
    return [number for number, keys in enumerate(chains) if space.lookup(keys) == len(keys)]


# --- the bound
def test_capacity_is_never_exceeded(opened: Opening, clock: FakeClock) -> None:
    """Three times the capacity, in every class: each write finds room, and no moment has more files than allowed."""
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    worst, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal worst
        while not stop.is_set():
            sizes = []
            for path in store.path.glob("segments/*/*.seg"):
                try:
                    sizes.append(path.stat().st_size)
                except FileNotFoundError:  # deleted while we looked: others may have grown since
                    break
            else:
                worst = max(worst, sum(sizes))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for number in range(24):
            clock.advance(60)
            keys = chain(space, number, PER_SEGMENT)
            assert write(space, keys, durability=Durability(number % 3)) == [STORED] * PER_SEGMENT
            assert store.status()["used_bytes"] <= 8 * MIB
            assert read(space, keys) == [FOUND] * PER_SEGMENT
    finally:
        stop.set()
        watcher.join()
    assert 3 * MIB < worst <= 8 * MIB
    store.sync()
    status = store.status()
    assert status["reclaim"]["blocks_evicted"] == 24 * PER_SEGMENT - status["blocks"]


def test_a_write_larger_than_the_store_keeps_its_head(opened: Opening) -> None:
    """A prefix is of use, a tail without it is not: a write never evicts its own blocks to go on."""
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    keys = chain(space, 1, 10 * PER_SEGMENT)
    report = space.write(keys, blocks_of(keys, BLOCK))
    stored = report.stored
    assert 6 * PER_SEGMENT <= stored < 8 * PER_SEGMENT
    assert report.statuses.tolist() == [STORED] * stored + [REJECTED] * (len(keys) - stored)
    assert sorted(report.reasons) == list(range(stored, len(keys)))
    assert "capacity" in report.reasons[len(keys) - 1]
    assert space.lookup(keys) == stored
    assert read(space, keys) == [FOUND] * stored + [MISSING] * (len(keys) - stored)


def test_small_capacity_given_later_is_kept_to(opened: Opening, clock: FakeClock, tmp_path: Path) -> None:
    with closing(opened(capacity=16 * MIB)) as store:
        fill(keyspace(store, block_bytes=BLOCK), clock, range(12))
    store = opened(capacity=6 * MIB)
    assert store.status()["used_bytes"] > 6 * MIB
    space = keyspace(store, block_bytes=BLOCK)
    fill(space, clock, range(20, 21))
    assert store.status()["used_bytes"] <= 6 * MIB
    assert whole(space, [chain(space, number, PER_SEGMENT) for number in range(12)]) == list(range(8, 12))


@pytest.mark.parametrize("capacity", [8 * MIB, 1 << 30, 32 << 30, 4 << 40])
def test_what_is_kept_back_is_a_segment_and_a_hundredth(capacity: int) -> None:
    segment = min(max(capacity // limits.segments_per_capacity_min, MIB), limits.segment_bytes_max)
    kept = kept_back_bytes(capacity, segment)
    assert segment <= kept < capacity // 2
    assert kept >= capacity // 100
    budget = SpaceBudget(capacity, kept)
    budget.take(b"a", capacity - kept, least=1)
    with pytest.raises(NoSpace):
        budget.take(b"b", 1, least=1)
    assert budget.take(b"b", capacity, least=1, reserve=True) == kept
    with pytest.raises(NoSpace):
        budget.take(b"c", 1, least=1, reserve=True)


def test_a_large_full_store_seals_deletes_and_goes_on(tmp_path: Path, clock: FakeClock) -> None:
    """A store of 32 GiB, all but 48 MiB of it in use by others: new blocks leave alone what is kept back, pinned ones
    are copied into it."""
    with closing(perdure.open(tmp_path / "s", capacity=32 << 30, memory=0, seams=Seams(clock=clock))) as store:
        assert store.wait_ready(30.0)
        budget = store.core.space
        kept = budget.kept_back
        assert kept >= budget.capacity // 100
        budget.settle(b"others", budget.capacity - kept - 48 * MIB)
        space = keyspace(store, block_bytes=BLOCK)
        pinned = fill(space, clock, range(1))[0]
        pin = space.pin(pinned, ttl_s=360_000.0)
        most = 0
        for number in range(1, 120):
            clock.advance(60)
            keys = chain(space, number, PER_SEGMENT)
            assert write(space, keys) == [STORED] * PER_SEGMENT
            most = max(most, budget.used)
        assert most <= budget.capacity
        assert store.status()["reclaim"]["segments_dropped"] > 0
        assert store.status()["reclaim"]["blocks_copied"] > 0
        assert read(space, pinned) == [FOUND] * PER_SEGMENT
        assert read(space, keys) == [FOUND] * PER_SEGMENT
        assert pin.release()
        for opened in store.core.writer.open_segments():  # the fullest moment to seal in
            store.core.writer.retire(opened)
        sealed = store.status()["segments"]["sealed"]["count"]
        assert len(list(store.path.glob("segments/*/*.idx"))) == sealed > 0
        assert store.core.reclaimer.make_room(48 * MIB)
        assert budget.used <= budget.capacity - kept - 48 * MIB
        assert not wrong_books(store, settled=False)


# --- the order
def test_coldest_goes_first(opened: Opening, clock: FakeClock) -> None:
    space = keyspace(opened(), block_bytes=BLOCK)
    chains = fill(space, clock, range(6))
    clock.advance(60)
    assert read(space, chains[0]) == [FOUND] * PER_SEGMENT
    gone = []
    for number in range(10, 15):
        before = whole(space, chains)
        fill(space, clock, range(number, number + 1))
        gone += sorted(set(before) - set(whole(space, chains)))
    assert gone == [1, 2, 3, 4, 5][: len(gone)]
    assert len(gone) >= 4
    assert 0 in whole(space, chains)


def test_order_of_eviction_survives_reopening(opened: Opening, clock: FakeClock) -> None:
    """FAULTS 8: recency is kept, to the minute."""
    with closing(opened()) as store:
        space = keyspace(store, block_bytes=BLOCK)
        chains = fill(space, clock, range(6))
        for number in (4, 0, 2):
            clock.advance(120)
            read(space, chains[number])
    space = keyspace(opened(), block_bytes=BLOCK)
    gone = []
    for number in range(10, 15):
        before = whole(space, chains)
        fill(space, clock, range(number, number + 1))
        gone += sorted(set(before) - set(whole(space, chains)))
    assert gone == [1, 3, 5, 4, 0, 2][: len(gone)]
    assert len(gone) >= 4


def test_a_chain_is_evicted_from_its_tail(opened: Opening, clock: FakeClock) -> None:
    space = keyspace(opened(), block_bytes=SMALL)
    long = fill(space, clock, range(1), blocks=640)[0]
    lengths = [640]
    for number in range(1, 6):
        fill(space, clock, range(number, number + 1), blocks=128)
        lengths.append(space.lookup(long))
        assert space.present(long).sum() == lengths[-1], "a tail without its prefix was kept"
    assert lengths == sorted(lengths, reverse=True)
    assert 0 < lengths[-1] < 640


def test_released_goes_first_unless_it_is_used_after_all(opened: Opening, clock: FakeClock) -> None:
    space = keyspace(opened(), block_bytes=BLOCK)
    chains = fill(space, clock, range(6))
    clock.advance(60)
    space.release(chains[5])
    space.release(chains[4])
    clock.advance(60)
    assert read(space, chains[4]) == [FOUND] * PER_SEGMENT
    fill(space, clock, range(10, 12))
    assert whole(space, chains)[-1] == 4
    assert 5 not in whole(space, chains)
    assert 1 in whole(space, chains)


def test_expired_goes_before_what_is_alive(opened: Opening, clock: FakeClock) -> None:
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    chains = fill(space, clock, range(4))
    clock.advance(60)
    mortal = chain(space, 9, PER_SEGMENT)
    assert write(space, mortal, ttl_s=300.0) == [STORED] * PER_SEGMENT
    clock.advance(600)
    fill(space, clock, range(10, 12))
    assert whole(space, chains) == [0, 1, 2, 3]
    assert not space.present(mortal).any()


def test_evicted_blocks_are_gone_from_memory_too(opened: Opening, clock: FakeClock) -> None:
    store = opened(memory=64 * MIB)
    space = keyspace(store, block_bytes=BLOCK)
    chains = fill(space, clock, range(12))
    assert store.status()["memory"]["slots"] == store.status()["blocks"]
    for keys in chains:
        expected = [FOUND if there else MISSING for there in space.present(keys)]
        assert read(space, keys) == expected
        assert space.lookup(keys) == [*expected, MISSING].index(MISSING)
    assert read(space, chains[0]) == [MISSING] * PER_SEGMENT


# --- what stays
@pytest.mark.parametrize("durability", list(Durability))
def test_pinned_is_never_evicted(opened: Opening, clock: FakeClock, durability: Durability) -> None:
    """Pinned blocks lie among others in three segments; each is copied forward when its segment goes."""
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    for number in range(3):
        clock.advance(60)
        assert write(space, chain(space, number, PER_SEGMENT), durability=durability) == [STORED] * PER_SEGMENT
    store.sync()  # what waits for its commit keeps its segment open
    pinned = np.concatenate([chain(space, number, PER_SEGMENT)[2:5] for number in range(3)])
    with space.pin(pinned, ttl_s=3600.0):
        fill(space, clock, range(10, 22))
        assert read(space, pinned) == [FOUND] * 9
        assert [int(there) for there in space.present(chain(space, 0, PER_SEGMENT))] == [0, 0, 1, 1, 1, *[0] * 11]
        assert store.status()["reclaim"]["blocks_copied"] >= 6
        assert store.explain(pinned[0].tobytes())["record"]["durability"] == durability.name.lower()
    assert store.status()["pins"] == 0


def test_a_pin_ends_at_its_deadline(opened: Opening, clock: FakeClock) -> None:
    """FAULTS 10."""
    space = keyspace(opened(), block_bytes=BLOCK)
    pinned = fill(space, clock, range(1))[0]
    space.pin(pinned, ttl_s=15 * 60.0)
    fill(space, clock, range(10, 22))
    assert space.lookup(pinned) == PER_SEGMENT
    fill(space, clock, range(22, 30))
    assert space.lookup(pinned) == 0


def test_pins_of_keys_not_stored_yet(opened: Opening, clock: FakeClock) -> None:
    space = keyspace(opened(), block_bytes=BLOCK)
    with space.pin(chain(space, 0, PER_SEGMENT), ttl_s=36_000.0):
        pinned = fill(space, clock, range(1))[0]
        fill(space, clock, range(10, 22))
        assert read(space, pinned) == [FOUND] * PER_SEGMENT


def test_hot_blocks_of_a_cold_segment_survive(opened: Opening, clock: FakeClock) -> None:
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    chains = fill(space, clock, range(6))
    hot = np.concatenate([keys[:4] for keys in chains[:3]])
    for number in range(10, 22):
        assert read(space, hot) == [FOUND] * 12
        fill(space, clock, range(number, number + 1))
    reclaim = store.status()["reclaim"]
    assert reclaim["blocks_copied"] >= 12
    assert reclaim["bytes_copied"] == reclaim["blocks_copied"] * 64 << 10
    assert reclaim["blocks_copied"] < reclaim["blocks_evicted"], "more was copied than was freed"


def test_copied_blocks_keep_expiry_and_stay_readable_after_reopening(opened: Opening, clock: FakeClock) -> None:
    with closing(opened()) as store:
        space = keyspace(store, block_bytes=BLOCK)
        keys = chain(space, 0, 2 * PER_SEGMENT)
        assert write(space, keys, ttl_s=86_400.0) == [STORED] * len(keys)
        before = store.explain(keys[3].tobytes())["record"]
        with space.pin(keys[[3, 20]], ttl_s=36_000.0):
            fill(space, clock, range(10, 22))
        after = store.explain(keys[3].tobytes())["record"]
        assert after["segment"] != before["segment"]
        for name in ("expires_s", "created_s", "durability", "stored_bytes", "codec"):
            assert after[name] == before[name]
    space = keyspace(opened(), block_bytes=BLOCK)
    assert read(space, keys[3:4]) == [FOUND]
    clock.advance(2 * 86_400)
    assert read(space, keys[3:4]) == [MISSING]


def test_compressed_blocks_are_copied_as_they_are(opened: Opening, clock: FakeClock) -> None:
    store = opened()
    space = keyspace(store, block_bytes=BLOCK, codec="on")
    keys = chain(space, 0, 4)
    data = blocks_of(keys, BLOCK)
    data[:] = 7
    space.write(keys, data)
    before = store.explain(keys[1].tobytes())["record"]
    assert before["codec"] != "none"
    with space.pin(keys[1:2], ttl_s=36_000.0):
        fill(space, clock, range(10, 22))
    after = store.explain(keys[1].tobytes())["record"]
    assert after["segment"] != before["segment"]
    assert (after["codec"], after["stored_bytes"]) == (before["codec"], before["stored_bytes"])
    memory = np.zeros(BLOCK, np.uint8)
    assert space.read(keys[1:2], memory).usable == 1
    assert (memory == 7).all()


def test_everything_pinned_rejects_and_loses_nothing(opened: Opening, clock: FakeClock) -> None:
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    chains = fill(space, clock, range(6))
    pins = [space.pin(keys, ttl_s=36_000.0) for keys in chains]
    new = chain(space, 9, 2 * PER_SEGMENT)
    report = space.write(new, blocks_of(new, BLOCK))
    assert report.count(perdure.WriteStatus.REJECTED) >= PER_SEGMENT
    assert not report.durable
    rejected = np.flatnonzero(report.statuses == REJECTED).tolist()
    assert sorted(report.reasons) == rejected
    assert "capacity" in report.reasons[rejected[0]]
    assert whole(space, chains) == list(range(6))
    assert store.status()["counters"]["blocks_rejected"] == len(rejected)
    for pin in pins[:3]:
        assert pin.release()
    assert set(write(space, new)) <= {STORED, EXISTS}
    assert whole(space, chains)[-3:] == [3, 4, 5]


# --- cut off
def test_a_drain_that_failed_is_finished_later(opened: Opening, clock: FakeClock) -> None:
    """The index refuses the removal: the write goes on with another victim, the drained one goes with the chores."""
    plan = FailCalls(1, op="remove")
    store = opened(index=lambda index: FaultyIndex(index, plan))
    space = keyspace(store, block_bytes=BLOCK)
    chains = fill(space, clock, range(8))
    assert plan.seen >= 1
    draining = [one for one in store._core.table.all() if one.state is SegmentState.DRAINING]
    assert len(draining) == 1
    assert read(space, chains[0]) == [FOUND] * PER_SEGMENT, "its blocks can be read until they are removed"
    assert write(space, chains[0])[0] == STORED, "'exists' relied on a segment that is being drained"
    store._keeper.sweep()
    assert draining[0].segment not in [one.segment for one in store._core.table.all()]
    assert not list(store.path.glob(f"segments/*/{draining[0].segment.hex()}*"))
    assert read(space, chains[0])[0] == FOUND


@pytest.mark.parametrize("op", ["unlink", "sync_directory"])
def test_a_drain_cut_off_before_the_file_is_gone(opened: Opening, clock: FakeClock, op: str) -> None:
    """The disk refuses the deletion and the process ends; the next one finishes it and has its space back."""
    plan = FaultWhile("eio", {op})
    plan.armed = False
    with closing(opened(files=lambda root: FaultyFiles(PosixFiles(root), plan))) as store:
        space = keyspace(store, block_bytes=BLOCK)
        chains = fill(space, clock, range(6))
        plan.armed = True
        new = chain(space, 9, 2 * PER_SEGMENT)
        for _ in range(3):
            assert REJECTED in write(space, new), "space that was not given back was used"
        assert whole(space, chains) == [1, 2, 3, 4, 5], "more than one segment was given up for nothing"
        used = store.status()["used_bytes"]
        assert used <= 8 * MIB
        assert store.status()["segments"]["draining"]["count"] > 0
    plan.armed = False
    store = opened()
    store._keeper.chores()
    assert store.status()["segments"]["draining"]["count"] == 0
    assert store.status()["used_bytes"] == on_disk(store) < used
    space = keyspace(store, block_bytes=BLOCK)
    assert set(write(space, new)) <= {STORED, EXISTS}
    assert read(space, new) == [FOUND] * len(new)
    assert read(space, chains[-1]) == [FOUND] * PER_SEGMENT


def test_pinned_blocks_that_cannot_be_copied_keep_their_segment(opened: Opening, clock: FakeClock) -> None:
    plan = FailCalls(1, times=1000, op="replace")
    store = opened(index=lambda index: FaultyIndex(index, plan))
    space = keyspace(store, block_bytes=BLOCK)
    first = fill(space, clock, range(1))[0]
    with space.pin(first[:2], ttl_s=36_000.0):
        fill(space, clock, range(10, 14))
        for number in range(20, 28):  # as much as there is room for without that segment
            clock.advance(60)
            write(space, chain(space, number, PER_SEGMENT))
            assert read(space, first[:2]) == [FOUND] * 2


# --- the file system is full
class SmallDisk(FilesAround):
    """A file system with room for `room` bytes of segments, whatever the store thinks it may use."""

    def __init__(self, inner: Files, room: int, code: int):
        super().__init__(inner)
        self.room, self.code = room, code
        self._of: dict[str, int] = {}
        self._lock = threading.Lock()

    def wrap(self, file: File) -> File:
        return _SmallDiskFile(self, file)

    def take(self, path: str, nbytes: int) -> None:
        with self._lock:
            have = self._of.get(path, 0)
            if nbytes > have and sum(self._of.values()) - have + nbytes > self.room:
                raise OSError(self.code, os.strerror(self.code), path)
            self._of[path] = nbytes

    def unlink(self, path: str) -> None:
        super().unlink(path)
        with self._lock:
            self._of.pop(path, None)


class _SmallDiskFile(FileAround):
    def __init__(self, disk: SmallDisk, inner: File):
        super().__init__(inner)
        self._disk = disk

    def allocate(self, offset: int, length: int) -> None:
        self._disk.take(self.path, offset + length)
        super().allocate(offset, length)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._disk.take(self.path, length)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_smaller_than_the_capacity(opened: Opening, clock: FakeClock, code: int) -> None:
    """FAULTS 9: the disk fills before the capacity does; cold blocks give way, and every write finds room."""
    disks: list[SmallDisk] = []

    def files(root: str) -> Files:
        disks.append(SmallDisk(PosixFiles(root), 5 * MIB, code))
        return disks[-1]

    store = opened(capacity=16 * MIB, files=files)
    space = keyspace(store, block_bytes=BLOCK)
    chains = fill(space, clock, range(12))
    status = store.status()
    assert status["counters"]["file_system_full"] > 0
    assert status["used_bytes"] <= 5 * MIB
    assert whole(space, chains)[-3:] == [9, 10, 11]
    assert whole(space, chains) == list(range(whole(space, chains)[0], 12))
    assert status["healthy"]
    disks[0].room = 16 * MIB
    evicted = store.status()["reclaim"]["blocks_evicted"]
    chains = fill(space, clock, range(20, 26))
    assert store.status()["reclaim"]["blocks_evicted"] == evicted, "there was room, yet blocks were evicted"
    assert whole(space, chains) == list(range(6))


@pytest.mark.parametrize("op", ["create", "allocate", "pwritev"])
@pytest.mark.parametrize("kind", ["enospc", "edquot"])
def test_a_disk_that_stays_full_rejects_and_recovers(opened: Opening, clock: FakeClock, op: str, kind: Any) -> None:
    plan = FaultWhile(kind, {op})
    plan.armed = False
    store = opened(files=lambda root: FaultyFiles(PosixFiles(root), plan))
    space = keyspace(store, block_bytes=BLOCK)
    kept = fill(space, clock, range(3))
    pin = space.pin(np.concatenate(kept), ttl_s=36_000.0)
    plan.armed = True
    new = chain(space, 9, 2 * PER_SEGMENT)
    report = space.write(new, blocks_of(new, BLOCK))
    assert set(report.statuses.tolist()) <= {STORED, REJECTED}
    assert REJECTED in report.statuses
    last = len(new) - 1
    assert os.strerror(errno.ENOSPC if kind == "enospc" else errno.EDQUOT) in report.reasons[last]
    assert whole(space, kept) == [0, 1, 2]
    assert space.lookup(new) == (report.statuses == STORED).argmin()
    plan.armed = False
    assert set(write(space, new)) <= {STORED, EXISTS}
    assert read(space, new) == [FOUND] * len(new)
    assert pin.release()


def test_an_index_object_that_does_not_fit_is_written_later(opened: Opening, clock: FakeClock) -> None:
    """A seal that fails loses nothing: the blocks stay readable, the keeper seals again."""
    plan = FaultWhile("enospc", {"write_once"})
    store = opened(files=lambda root: FaultyFiles(PosixFiles(root), plan))
    space = keyspace(store, block_bytes=BLOCK)
    chains = fill(space, clock, range(3))
    assert not list(store.path.glob("segments/*/*.idx"))
    for keys in chains:
        assert read(space, keys) == [FOUND] * PER_SEGMENT
    plan.armed = False
    store._keeper.chores()
    assert len(list(store.path.glob("segments/*/*.idx"))) >= 2
    assert not wrong_books(store, settled=False)
    fill(space, clock, range(10, 20))
    assert whole(space, chains) == []
