"""The cold tier: what goes there, what comes back, and what happens when the object store does not do its part.

The object store is a directory (`file://`), behind a plan of faults. tests/test_cold_s3.py has a real one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.blocks import files_of, wrong_books

import perdure
from perdure import Keyspace, Seams, Store, limits
from perdure.catalog.api import KeyArray
from perdure.catalog.faulty import FaultyControl
from perdure.clock import FakeClock
from perdure.errors import CatalogError, InvalidArgument
from perdure.io.api import IOClass, IOState, Request
from perdure.io.engine import ThreadEngine
from perdure.io.files import PosixFiles
from perdure.io.objects import FaultyObjects, ObjectFile, Objects, ObjectStoreError, ObstoreObjects
from perdure.io.siblings import Fault, FaultPlan, FaultWhile, FaultyFiles, NthFault
from perdure.io.split import SplitEngine
from perdure.testing.store import CORRUPT, FOUND, LATE, MISSING, STORED, chain, keyspace, read, write
from perdure.viewing import fetch

MIB = 1 << 20
BLOCK = 60_000  # 16 records fill a segment of 1 MiB
PER_SEGMENT = 16
Opening = Callable[..., Store]


class Bucket:
    """A directory as an object store, with a plan of faults that tests may change."""

    def __init__(self, folder: Path):
        self.url, self.folder = f"file://{folder}", folder
        self.plan: FaultPlan = NthFault(0, "eio")

    def __call__(self, url: str) -> Objects:
        assert url == self.url
        return FaultyObjects(ObstoreObjects(url), self)

    def next(self, op: str, path: str, nbytes: int) -> Any:
        return self.plan.next(op, path, nbytes)

    def wait(self) -> None:
        self.plan.wait()

    def objects(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*.seg"))

    def asked(self, *ops: str) -> NthFault:
        """From now on only counts."""
        self.plan = plan = NthFault(0, "eio", ops=ops)
        return plan


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def opened(tmp_path: Path, clock: FakeClock, bucket: Bucket) -> Iterator[Opening]:
    """Opens the store of this test (8 MiB: seven segments and one kept back); at the end its books must be right."""
    stores: list[Store] = []

    def opening(**options: Any) -> Store:
        seams = {name: options.pop(name) for name in ("files", "index", "control") if name in options}
        chosen = {
            "capacity": 8 * MIB, "memory": 0, "cold": bucket.url,
            "seams": Seams(clock=clock, objects=bucket, **seams),
        } | options  # fmt: skip
        stores.append(perdure.open(tmp_path / "store", **chosen))
        assert stores[-1].wait_ready(30.0)
        return stores[-1]

    yield opening
    bucket.plan = NthFault(0, "eio")
    for store in stores:
        if store._closed is None:
            store.close()
    with closing(perdure.open(tmp_path / "store", memory=0, seams=Seams(clock=clock, objects=bucket))) as store:
        assert store.wait_ready(30.0)
        store._keeper.chores()
        assert not wrong_books(store)
        assert store.verify()["ok"]


def fill(store: Store, space: Keyspace, clock: FakeClock, numbers: range, **options: Any) -> list[KeyArray]:
    """Chains, one segment each, a minute apart; what the disk has no room for is demoted after each."""
    chains = [chain(space, number, PER_SEGMENT) for number in numbers]
    for keys in chains:
        clock.advance(60)
        assert write(space, keys, **options) == [STORED] * len(keys)
        if store.core.cold is not None:
            store.core.cold.demote()
    return chains


def cold_store(opened: Opening, clock: FakeClock, **options: Any) -> tuple[Store, Keyspace, list[KeyArray]]:
    """A store with twelve chains, the first ones in the cold tier; nothing is promoted by itself."""
    store = opened(**options)
    store.core.reader.used_far = None
    space = keyspace(store, block_bytes=BLOCK)
    chains = fill(store, space, clock, range(12))
    assert store.status()["cold"]["segments"] >= 5
    return store, space, chains


def told(store: Store, name: str) -> Any:
    return store.status()["cold"][name]


# --- going there
def test_nothing_is_lost_when_the_disk_is_full(opened: Opening, clock: FakeClock, bucket: Bucket) -> None:
    """Three times the capacity: every block can be used, the disk is not exceeded, objects are what is not on it."""
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    chains = fill(store, space, clock, range(24))
    assert [space.lookup(keys) for keys in chains] == [PER_SEGMENT] * 24
    status = store.status()
    assert status["used_bytes"] <= 7 * MIB
    assert status["reclaim"]["segments_dropped"] == 0
    assert status["cold"]["segments"] == len(bucket.objects()) >= 17
    assert status["cold"]["bytes"] == sum(path.stat().st_size for path in bucket.objects())
    assert [read(space, keys) for keys in chains] == [[FOUND] * PER_SEGMENT] * 24
    assert status["segments"]["sealed"]["count"] + status["cold"]["segments"] + 1 >= 24


def test_after_reopening_cold_blocks_are_found_without_being_told_where(opened: Opening, clock: FakeClock) -> None:
    store, _, chains = cold_store(opened, clock)
    store.close()
    store = opened(cold=None)
    assert [read(keyspace(store, block_bytes=BLOCK), keys) for keys in chains] == [[FOUND] * PER_SEGMENT] * 12
    assert store.status()["counters"]["blocks_found_cold"] >= 5 * PER_SEGMENT


def test_readers_beside_a_writer_follow_a_segment_that_goes(opened: Opening, clock: FakeClock, bucket: Bucket) -> None:
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    chains = fill(store, space, clock, range(5))
    seams = Seams(clock=clock, objects=bucket)
    with closing(perdure.open(store.path, read_only=True, memory=0, seams=seams)) as reader:
        beside = keyspace(reader, block_bytes=BLOCK)
        assert read(beside, chains[0]) == [FOUND] * PER_SEGMENT
        fill(store, space, clock, range(5, 12))
        assert [read(beside, keys) for keys in chains] == [[FOUND] * PER_SEGMENT] * 5
    assert told(store, "segments") >= 5


def test_what_is_released_or_expires_soon_is_not_uploaded(opened: Opening, clock: FakeClock) -> None:
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    released = chain(space, 100, PER_SEGMENT)
    write(space, released)
    space.release(released)
    brief, _ = fill(store, space, clock, range(101, 103), ttl_s=limits.cold_ttl_s_min + 120)
    fill(store, space, clock, range(8))
    assert space.lookup(released) == space.lookup(brief) == 0
    assert told(store, "segments_demoted") == store.status()["cold"]["segments"]
    assert store.status()["reclaim"]["segments_dropped"] >= 2


def test_pinned_and_hot_blocks_stay_on_the_disk(opened: Opening, clock: FakeClock) -> None:
    store = opened()
    store.core.reader.used_far = None
    space = keyspace(store, block_bytes=BLOCK)
    (first,) = fill(store, space, clock, range(1))
    space.pin(first[:4], ttl_s=36_000)
    fill(store, space, clock, range(1, 12))
    assert read(space, first) == [FOUND] * PER_SEGMENT
    counters = store.status()["counters"]
    assert counters["blocks_found_disk"] >= 4
    assert counters["blocks_found_cold"] == PER_SEGMENT - 4


# --- coming back
def test_a_restore_is_one_ranged_read_per_segment(opened: Opening, clock: FakeClock, bucket: Bucket) -> None:
    """Neighbours are one request, and so are blocks with a small gap between them."""
    store, space, chains = cold_store(opened, clock)
    asked = bucket.asked("preadv")
    assert read(space, chains[0]) == [FOUND] * PER_SEGMENT
    assert [op for op, _, _ in asked.log] == ["preadv"]
    assert read(space, np.ascontiguousarray(chains[1][::3])) == [FOUND] * 6
    assert asked.count == 2
    wide = 2 * limits.cold_gap_bytes_max // BLOCK
    assert wide < PER_SEGMENT
    assert read(space, np.ascontiguousarray(chains[2][[0, wide]])) == [FOUND] * 2
    assert asked.count == 4


@pytest.mark.parametrize(
    "options", [{"encryption": "on"}, {"memory": 4 * MIB}, {"encryption": "on", "memory": 4 * MIB}]
)
def test_encrypted_and_kept_in_memory(
    opened: Opening, clock: FakeClock, options: dict[str, Any], bucket: Bucket
) -> None:
    store, space, chains = cold_store(opened, clock, **options)
    asked = bucket.asked("preadv")
    assert read(space, chains[0], deadline_s=30.0) == [FOUND] * PER_SEGMENT
    assert asked.count == 1
    assert read(space, chains[0]) == [FOUND] * PER_SEGMENT
    assert asked.count == (1 if "memory" in options else 2)
    assert read(space, chains[1], direct=True) == [FOUND] * PER_SEGMENT
    fetched = fetch(store.core, space, chains[2], deadline_s=30.0)
    assert fetched.report.usable == (PER_SEGMENT if "memory" in options else 0)
    store.core.pool.release(fetched.slots)


@pytest.mark.parametrize("encryption", ["off", "on"])
def test_compressed_blocks_come_back_and_are_promoted(opened: Opening, clock: FakeClock, encryption: str) -> None:
    store = opened(encryption=encryption)
    space = keyspace(store, block_bytes=BLOCK, codec="on")
    keys = chain(space, 0, 64)
    half = np.zeros((64, BLOCK), np.uint8)
    half[:, ::7] = np.arange(half[:, ::7].shape[1]) % 251
    assert space.write(keys, half, durability="session").stored == 64
    cold_everything(store)
    for _ in range(2):
        out = np.zeros_like(half)
        assert space.read(keys, into=out).usable == 64
        assert np.array_equal(out, half)
        assert store.core.cold.promoter.wait_idle(30.0)
    assert told(store, "blocks_promoted") == 64


def cold_everything(store: Store) -> None:
    """Every segment goes to the cold tier."""
    core = store.core
    for one in core.writer.open_segments():
        core.writer.retire(one)
    for record in core.table.all():
        if not record.cold:
            core.cold.tier.upload(record)
            assert core.cold.tier.settle(record)


def test_what_is_used_comes_back_to_the_disk(opened: Opening, clock: FakeClock, bucket: Bucket) -> None:
    """Without a second read of the object; and the object goes when nothing is left of it."""
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    chains = fill(store, space, clock, range(3))
    cold_everything(store)
    asked = bucket.asked("preadv")
    assert read(space, chains[0]) == [FOUND] * PER_SEGMENT
    assert store.core.cold.promoter.wait_idle(30.0)
    assert told(store, "blocks_promoted") == PER_SEGMENT
    assert read(space, chains[0]) == [FOUND] * PER_SEGMENT
    assert asked.count == 1
    store._keeper.chores()
    assert len(bucket.objects()) == told(store, "segments") == 2
    assert [read(space, keys) for keys in chains] == [[FOUND] * PER_SEGMENT] * 3


def test_promotion_demotes_what_is_colder_and_evicts_nothing(opened: Opening, clock: FakeClock) -> None:
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    chains = fill(store, space, clock, range(20))
    for keys in chains:
        clock.advance(60)
        assert read(space, keys) == [FOUND] * PER_SEGMENT
        assert store.core.cold.promoter.wait_idle(30.0)
    assert told(store, "blocks_promoted") > 0
    assert store.status()["reclaim"]["blocks_evicted"] == 0
    assert [space.lookup(keys) for keys in chains] == [PER_SEGMENT] * 20


# --- the tier's own capacity
def test_the_tier_keeps_its_capacity_and_drops_what_was_used_longest_ago(
    opened: Opening, clock: FakeClock, bucket: Bucket
) -> None:
    store = opened(cold_capacity=6 * MIB)
    store.core.reader.used_far = None
    space = keyspace(store, block_bytes=BLOCK)
    chains = fill(store, space, clock, range(10))
    clock.advance(60)
    read(space, chains[0])
    space.pin(chains[1][:1], ttl_s=360_000)
    chains += fill(store, space, clock, range(10, 20))
    usable = [space.lookup(keys) for keys in chains]
    assert usable[0] == usable[1] == PER_SEGMENT  # used, pinned
    assert usable[2] == usable[3] == 0
    assert usable[-10:] == [PER_SEGMENT] * 10
    assert sum(path.stat().st_size for path in bucket.objects()) <= 6 * MIB
    assert told(store, "objects_deleted") >= 2


# --- the object store fails
def test_a_store_that_cannot_be_reached_is_late_and_nothing_is_forgotten(
    opened: Opening, clock: FakeClock, bucket: Bucket
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
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1  # in the first block's payload
    path.write_bytes(raw)
    assert read(space, chains[1]) == [CORRUPT] + [FOUND] * (PER_SEGMENT - 1)
    assert store.status()["incidents"][-1]["kind"] == "corrupt"
    assert read(space, chains[1][:1]) == [MISSING]
    assert write(space, chains[1][:1]) == [STORED]


def segment_of(store: Store, keys: KeyArray) -> str:
    _, records = store.core.locate(keys[:1])
    return str(records["segment"][0].tobytes().hex())


def test_an_object_that_somebody_deleted_is_a_miss(opened: Opening, clock: FakeClock, bucket: Bucket) -> None:
    store, space, chains = cold_store(opened, clock)
    (path,) = [one for one in bucket.objects() if one.stem == segment_of(store, chains[0])]
    path.unlink()
    assert read(space, chains[0]) == [MISSING] * PER_SEGMENT
    assert space.lookup(chains[0]) == 0
    assert write(space, chains[0]) == [STORED] * PER_SEGMENT
    assert read(space, chains[1]) == [FOUND] * PER_SEGMENT


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


# --- a process dies on the way
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


# --- the setting
def test_the_bucket_is_remembered_and_not_changed_while_it_is_used(
    opened: Opening, clock: FakeClock, bucket: Bucket
) -> None:
    store, _, chains = cold_store(opened, clock)
    store.close()
    for other in ("off", "file:///elsewhere"):
        with pytest.raises(InvalidArgument, match=r"segments lie in file://.*cold='drop'"):
            opened(cold=other)
    store = opened(cold="drop", capacity=None)
    space = keyspace(store, block_bytes=BLOCK)
    assert store.status()["cold"] is None
    found = [space.lookup(keys) for keys in chains]
    assert 0 < found.count(PER_SEGMENT) < 12
    assert found.count(0) + found.count(PER_SEGMENT) == 12
    assert [len(set(read(space, keys))) for keys in chains] == [1] * 12
    store.close()
    assert bucket.objects()  # they are the bucket's owner's
    opened(cold="off").close()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "is possible"),
        ("s3:", "is possible"),
        ("gs://bucket", "'s3://BUCKET/PREFIX' is possible"),
        ("s3://key:secret@bucket/prefix", "come from the environment"),
        ("s3://bucket/prefix?secret=1", "come from the environment"),
    ],
)
def test_urls_that_are_none(tmp_path: Path, url: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as raised:
        perdure.open(tmp_path / "store", cold=url)
    assert "secret" not in str(raised.value)


def test_a_capacity_needs_a_bucket(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"pass cold='s3://BUCKET/PREFIX' too"):
        perdure.open(tmp_path / "store", cold_capacity="1TiB")


# --- the parts
def test_objects_are_made_once_read_in_ranges_and_deleted(bucket: Bucket) -> None:
    objects = ObstoreObjects(bucket.url)
    assert objects.create("a/b.seg", memoryview(bytes(range(100))))
    assert not objects.create("a/b.seg", memoryview(b"other"))
    assert objects.size("a/b.seg") == 100
    parts = [memoryview(bytearray(3)), memoryview(bytearray(4))]
    assert objects.read_into("a/b.seg", parts, 10) == 7
    assert b"".join(parts) == bytes(range(10, 17))
    assert objects.read_into("a/b.seg", parts, 96) == 4
    objects.delete("a/b.seg")
    objects.delete("a/b.seg")
    for call in (lambda: objects.size("a/b.seg"), lambda: objects.read_into("a/b.seg", parts, 0)):
        with pytest.raises(FileNotFoundError):
            call()


def test_a_batch_for_disk_and_objects_is_under_way_together(bucket: Bucket, tmp_path: Path) -> None:
    """The object's request hangs until the disk's has ended; if one came after the other, neither would."""
    objects = ObstoreObjects(bucket.url)
    objects.create("o", memoryview(b"o" * 4096))
    file = PosixFiles(tmp_path).create("f")
    file.pwritev([memoryview(b"f" * 4096)], 0)
    disk_ended = threading.Event()

    class Waits(FaultyObjects):
        def read_into(self, name: str, buffers: Any, offset: int) -> int:
            assert disk_ended.wait(30.0)
            return self.inner.read_into(name, buffers, offset)

    far = Request(ObjectFile(Waits(objects, bucket), "o", 4096), 0, [memoryview(bytearray(4096))])
    near = Request(file, 0, [memoryview(bytearray(4096))])
    engine = SplitEngine(ThreadEngine(), ThreadEngine())
    ended: list[Request] = []

    def done(request: Request) -> None:
        ended.append(request)
        if request is near:
            disk_ended.set()

    with closing(engine):
        engine.run([far, near], io_class=IOClass.RESTORE, deadline=time.monotonic() + 60.0, done=done)
    assert ended == [near, far]
    assert [request.state for request in (far, near)] == [IOState.DONE] * 2
    assert bytes(far.buffers[0]) == b"o" * 4096


def test_an_object_file_is_for_reading(bucket: Bucket) -> None:
    objects = ObstoreObjects(bucket.url)
    objects.create("o", memoryview(b"o" * 10))
    file = ObjectFile(objects, "o", 10)
    assert file.size() == 10
    assert file.preadv([memoryview(bytearray(5))], 10) == 0
    for call in (
        lambda: file.pwritev([memoryview(b"x")], 0), lambda: file.truncate(1), lambda: file.allocate(0, 1), file.fileno,
    ):  # fmt: skip
        with pytest.raises(OSError):
            call()


def test_an_object_store_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "the-key", "SECRET_ACCESS_KEY": "the-secret", "REGION": "us-east-1",
                        "ENDPOINT_URL": "http://127.0.0.1:9", "ALLOW_HTTP": "true"}.items():  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    objects = ObstoreObjects("s3://bucket/prefix", call_s=2.0)
    with pytest.raises(ObjectStoreError, match="s3://bucket/prefix") as raised:
        objects.size("name")
    assert "the-" not in str(raised.value)
