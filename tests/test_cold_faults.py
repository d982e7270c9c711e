"""The cold tier when the object store, the disk or the catalog does not do its part, or a process dies on the way."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.blocks import files_of, wrong_books
from support.cold import (
    BLOCK,
    MIB,
    PER_SEGMENT,
    Bucket,
    Opening,
    cold_everything,
    cold_store,
    fill,
    flip,
    opening,
    segment_of,
    told,
)

import perdure
from perdure import Seams, Store, limits
from perdure.catalog.api import SegmentRecord
from perdure.catalog.faulty import FaultyControl
from perdure.clock import FakeClock
from perdure.errors import CatalogError
from perdure.io.files import PosixFiles
from perdure.io.siblings import Fault, FaultWhile, FaultyFiles, NthFault
from perdure.segments.reclaim import Outcome
from perdure.segments.store import index_path
from perdure.testing.store import CORRUPT, EXISTS, FOUND, LATE, MISSING, STORED, keyspace, read, write


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def opened(tmp_path: Path, clock: FakeClock, bucket: Bucket) -> Iterator[Opening]:
    with opening(tmp_path, clock, bucket) as made:
        yield made


# --- the object store fails
def test_a_store_that_cannot_be_reached_is_late_and_nothing_is_forgotten(
    opened: Opening, clock: FakeClock, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    store, space, chains = cold_store(opened, clock)
    bucket.plan = down = FaultWhile("eio")
    assert read(space, chains[0]) == [LATE] * PER_SEGMENT
    assert down.fired == 1
    assert read(space, chains[1], deadline_s=5.0) == [LATE] * PER_SEGMENT
    assert down.fired == 1  # it is left alone
    assert read(space, chains[-1]) == [FOUND] * PER_SEGMENT
    mixed = np.concatenate([chains[-1], chains[2]])
    assert read(space, mixed) == [FOUND] * PER_SEGMENT + [LATE] * PER_SEGMENT
    status = store.status()
    assert not status["cold"]["answers"]
    assert status["cold"]["errors"] == 1
    assert "eio" in status["cold"]["last_error"]
    assert status["healthy"]
    assert not status["incidents"]
    clock.advance(limits.object_retry_s_max)
    assert read(space, chains[0]) == [LATE] * PER_SEGMENT
    assert down.fired == 2
    down.armed = False
    clock.advance(limits.object_retry_s_max)
    assert [read(space, keys) for keys in chains] == [[FOUND] * PER_SEGMENT] * 12
    assert store.status()["cold"]["answers"]
    assert [message.split(";")[0].split(":")[0] for message in caplog.messages] == [
        "the cold tier does not answer", "the cold tier answers again",
    ]  # fmt: skip


def test_a_slow_store_is_late_at_the_deadline_and_holds_up_nobody(
    opened: Opening, clock: FakeClock, bucket: Bucket
) -> None:
    store, space, chains = cold_store(opened, clock)
    bucket.plan = slow = FaultWhile("hang", ops=("preadv",))
    try:
        for keys in chains[:3]:
            mixed = np.concatenate([keys, chains[-1]])
            memory = np.full((len(mixed), BLOCK), 0xEE, np.uint8)
            report = space.read(mixed, into=memory, deadline_s=0.2)
            assert report.statuses.tolist() == [LATE] * PER_SEGMENT + [FOUND] * PER_SEGMENT
            assert (memory[:PER_SEGMENT] == 0xEE).all()
        fill(store, space, clock, range(20, 21))
    finally:
        slow.resume()
        slow.armed = False
    assert [read(space, keys) for keys in chains] == [[FOUND] * PER_SEGMENT] * 12
    assert not store.status()["incidents"]


def test_wrong_bytes_are_never_delivered(opened: Opening, clock: FakeClock, bucket: Bucket) -> None:
    """Once: the second look finds the right ones. Always: corrupt, an incident, and it can be stored again."""
    store, space, chains = cold_store(opened, clock)
    bucket.plan = NthFault(1, "torn", ops=("preadv",))
    assert read(space, chains[0]) == [FOUND] * PER_SEGMENT
    (path,) = [one for one in bucket.objects() if one.stem == segment_of(store, chains[1])]
    flip(path, 5000)
    assert read(space, chains[1]) == [CORRUPT] + [FOUND] * (PER_SEGMENT - 1)
    assert store.status()["incidents"][-1]["kind"] == "corrupt"
    assert read(space, chains[1][:1]) == [MISSING]
    assert write(space, chains[1][:1]) == [STORED]


def test_an_object_that_somebody_deleted_is_a_miss(opened: Opening, clock: FakeClock, bucket: Bucket) -> None:
    store, space, chains = cold_store(opened, clock)
    (path,) = [one for one in bucket.objects() if one.stem == segment_of(store, chains[0])]
    path.unlink()
    assert read(space, chains[0]) == [MISSING] * PER_SEGMENT
    assert space.lookup(chains[0]) == 0
    assert write(space, chains[0]) == [STORED] * PER_SEGMENT
    assert read(space, chains[1]) == [FOUND] * PER_SEGMENT


def test_an_object_cut_short_is_a_miss_where_it_is_cut(opened: Opening, clock: FakeClock, bucket: Bucket) -> None:
    store, space, chains = cold_store(opened, clock)
    (path,) = [one for one in bucket.objects() if one.stem == segment_of(store, chains[0])]
    path.write_bytes(path.read_bytes()[: 10 * MIB // PER_SEGMENT + 5000])
    half = PER_SEGMENT // 2
    assert read(space, chains[0][:half]) == [FOUND] * half
    assert read(space, chains[0][half:]) == [FOUND] * 2 + [MISSING] * 6
    assert [one["kind"] for one in store.status()["incidents"]] == ["missing"] * 6
    assert store.status()["cold"]["answers"]
    assert write(space, chains[0]) == [EXISTS] * 10 + [STORED] * 6
    path.unlink()  # for `verify`: what is cut does not verify
    assert read(space, chains[0][:10]) == [MISSING] * 10


@pytest.mark.parametrize("op", ["create", "link"])
def test_an_upload_that_fails_is_tried_again(opened: Opening, clock: FakeClock, bucket: Bucket, op: str) -> None:
    """`link`: the object is there, the answer was lost. Meanwhile writes evict as without a cold tier."""
    store = opened()
    store.core.reader.used_far = None
    space = keyspace(store, block_bytes=BLOCK)
    bucket.plan = down = FaultWhile("eio", ops=(op,))
    chains = fill(store, space, clock, range(9))
    assert down.fired > 0
    assert told(store, "segments") == 0
    assert len(bucket.objects()) == (0 if op == "create" else len(bucket.objects()))
    assert store.status()["reclaim"]["segments_dropped"] >= 2
    down.armed = False
    clock.advance(limits.object_retry_s_max)
    fill(store, space, clock, range(9, 14))
    assert told(store, "segments") >= 4
    assert [read(space, keys) for keys in chains[4:]] == [[FOUND] * PER_SEGMENT] * 5
    store._keeper.chores()
    assert {path.stem for path in bucket.objects()} == {one.segment.hex() for one in store.core.cold.tier.segments()}


def test_another_object_of_the_name_is_not_taken_for_the_segment(
    opened: Opening, clock: FakeClock, bucket: Bucket
) -> None:
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    (keys,) = fill(store, space, clock, range(1))
    record = store.core.table.all()[0]
    store.core.writer.close()
    path = bucket.folder / store.core.cold.tier.name(record.segment)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half")
    cold_everything(store)
    assert read(space, keys) == [FOUND] * PER_SEGMENT


# --- two at once
def test_two_who_upload_a_segment_make_one_object(opened: Opening, clock: FakeClock, bucket: Bucket) -> None:
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    (keys,) = fill(store, space, clock, range(1))
    record, tier = sealed(store), store.core.cold.tier
    with ThreadPoolExecutor(2) as both:
        list(both.map(tier.upload, [record, record]))
    assert len(bucket.objects()) == 1
    assert [tier.settle(record), tier.settle(record)] == [True, False]
    assert told(store, "segments_demoted") == 1
    assert read(space, keys) == [FOUND] * PER_SEGMENT


def sealed(store: Store) -> SegmentRecord:
    for one in store.core.writer.open_segments():
        store.core.writer.retire(one)
    return store.core.table.all()[0]


class Then:
    """A plan: no fault, but something happens before the first operation of a kind."""

    def __init__(self, op: str, what: Callable[[], Any]):
        self._op, self._what = op, what

    def next(self, op: str, path: str = "", nbytes: int = 0) -> None:
        if op == self._op:
            self._op = ""
            self._what()

    def wait(self) -> None:
        raise AssertionError("nothing hangs")


def test_an_object_made_after_its_segment_has_gone_goes_too(opened: Opening, clock: FakeClock, bucket: Bucket) -> None:
    """Given up and collected while the upload is under way: nobody would know of the object."""
    store = opened()
    fill(store, keyspace(store, block_bytes=BLOCK), clock, range(1))
    record, tier = sealed(store), store.core.cold.tier

    def give_up() -> None:
        assert store.core.reclaimer.drop(record, None) is Outcome.GONE
        tier.collect()

    bucket.plan = Then("create", give_up)
    tier.upload(record)
    assert len(bucket.objects()) == 1
    assert not tier.settle(record)
    tier.collect()
    assert bucket.objects() == []
    assert tier.ledger() == {}


def test_an_object_made_while_its_note_is_deleted_goes_too(opened: Opening, clock: FakeClock, bucket: Bucket) -> None:
    """As before, but between the deletion of the object and that of its note."""
    store = opened()
    fill(store, keyspace(store, block_bytes=BLOCK), clock, range(1))
    record, tier = sealed(store), store.core.cold.tier
    made = threading.Event()
    gone = threading.Event()

    def wait_for_deletion() -> None:
        assert store.core.reclaimer.drop(record, None) is Outcome.GONE
        gone.set()
        assert may_go.wait(30.0)

    may_go = threading.Event()
    bucket.plan = Then("create", wait_for_deletion)
    upload = threading.Thread(target=lambda: (tier.upload(record), made.set()))
    upload.start()
    assert gone.wait(30.0)

    def let_it_be_made() -> None:
        bucket.deleted = lambda: None
        may_go.set()
        assert made.wait(30.0)

    bucket.deleted = let_it_be_made
    tier.collect()
    upload.join()
    assert len(bucket.objects()) == len(tier.ledger()) == 1
    tier.collect()
    assert bucket.objects() == []
    assert tier.ledger() == {}


class From:
    """A plan for any seam: the n-th call after `arm`, and every later one, fails."""

    def __init__(self, fault: Any):
        self._fault, self._left = fault, 0

    def arm(self, number: int) -> None:
        self._left = number

    def next(self, op: str, path: str = "", nbytes: int = 0) -> Any:
        if self._left == 0:
            return None
        self._left = max(1, self._left - 1)
        return self._fault if self._left == 1 else None

    def wait(self) -> None:
        raise AssertionError("nothing hangs")


# --- the block index is lost
def test_a_lost_index_is_rebuilt_with_what_is_cold(opened: Opening, clock: FakeClock) -> None:
    """From segment indexes, which stay on the disk; without one, from the object's headers."""
    store, _, chains = cold_store(opened, clock)
    lost = store.path / index_path(bytes.fromhex(segment_of(store, chains[0])))
    store.close()
    lost.unlink()
    perdure.rebuild(store.path)
    store = opened()
    assert [read(keyspace(store, block_bytes=BLOCK), keys) for keys in chains] == [[FOUND] * PER_SEGMENT] * 12


@pytest.mark.parametrize("call", [1, 2])
def test_a_rebuild_waits_for_a_store_that_cannot_be_reached(
    opened: Opening, clock: FakeClock, bucket: Bucket, call: int
) -> None:
    """From the first call, that reads headers, or the second, that verifies. What cannot be read is not judged: the
    records come back when the store does."""
    store, _, chains = cold_store(opened, clock)
    lost = store.path / index_path(bytes.fromhex(segment_of(store, chains[0])))
    store.close()
    lost.unlink()
    shutil.rmtree(store.path / "index")
    bucket.plan = down = From(Fault("eio"))
    down.arm(call + 1)
    with closing(perdure.open(store.path, memory=0, seams=Seams(clock=clock, objects=bucket))) as store:
        space = keyspace(store, block_bytes=BLOCK)
        assert space.follow(chains[-1], wait_s=30.0) == PER_SEGMENT  # what is on the disk is there
        assert not store.wait_ready(1.0)
        assert space.lookup(chains[0]) == 0
        down.arm(0)
        while not store.wait_ready(0.1):
            clock.advance(limits.object_retry_s_max)
        assert [read(space, keys) for keys in chains] == [[FOUND] * PER_SEGMENT] * 12


# --- a process dies on the way
@pytest.mark.parametrize("what", ["control", "control answers", "objects", "files"])
def test_a_crash_at_any_step_leaves_every_block_usable(
    opened: Opening, clock: FakeClock, bucket: Bucket, what: str
) -> None:
    """What a demotion needs stops at its n-th call, for every n; then the store is opened again: every block can be
    read, before and after what was left over is tidied up."""
    store = opened()
    chains = fill(store, keyspace(store, block_bytes=BLOCK), clock, range(4))
    store.close()
    stopped = 0
    for number in range(2, 100):
        plan = From({"control": "error", "control answers": "unknown"}.get(what) or Fault("eio"))
        seams: dict[str, Any] = {}
        if what == "files":
            seams["files"] = lambda root, plan=plan: FaultyFiles(PosixFiles(root), plan)
        elif what != "objects":
            seams["control"] = lambda inner, plan=plan: FaultyControl(inner, plan)
        store = opened(**seams)
        store._keeper.stop()
        record = next(one for one in store.core.table.all() if not one.cold)
        bucket.plan = plan if what == "objects" else bucket.plan
        plan.arm(number)
        try:
            store.core.cold.tier.upload(record)
            done = store.core.cold.tier.settle(record) and record.segment.hex() not in files_of(store, ".seg")
        except (OSError, CatalogError):
            done = False
        plan.arm(0)
        store.close()
        store = opened()
        store.core.reader.used_far = None
        space = keyspace(store, block_bytes=BLOCK)
        assert [read(space, keys) for keys in chains] == [[FOUND] * PER_SEGMENT] * 4
        store._keeper.chores()
        assert not wrong_books(store)
        assert [read(space, keys) for keys in chains] == [[FOUND] * PER_SEGMENT] * 4
        store.close()
        if done:
            break
        stopped += 1
        if not any(not one.cold for one in store.core.table.all()):
            pytest.fail("no segment is left to demote")
    assert stopped == {"control": 3, "control answers": 3, "objects": 3}.get(what, stopped)
    assert stopped >= 1
