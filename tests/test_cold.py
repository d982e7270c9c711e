"""The cold tier: what goes there, what comes back, what it is told. Its faults: tests/test_cold_faults.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
from perdure import Seams, limits
from perdure.catalog.api import RECORD, as_keys
from perdure.clock import FakeClock
from perdure.errors import InvalidArgument
from perdure.io.siblings import FaultWhile
from perdure.segments.store import segment_path
from perdure.testing.store import FOUND, MISSING, chain, keyspace, read, write
from perdure.viewing import fetch


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
    _, space, chains = cold_store(opened, clock)
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


def test_what_was_removed_meanwhile_is_not_written_to_the_disk_again(opened: Opening, clock: FakeClock) -> None:
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    (keys,) = fill(store, space, clock, range(1))
    cold_everything(store)
    promoter = store.core.cold.promoter

    def erase_first(key: bytes, keyspace: bytes, row: Any, stored: Any) -> None:
        store.core.index.remove(as_keys([key]), np.array([row], RECORD))
        promoter.offer(key, keyspace, row, stored)

    store.core.reader.used_far = erase_first
    used = store.status()["used_bytes"]
    assert read(space, keys) == [FOUND] * PER_SEGMENT
    assert promoter.wait_idle(30.0)
    assert store.status()["used_bytes"] == used
    assert told(store, "blocks_promoted") == 0
    assert told(store, "blocks_left") == PER_SEGMENT


# --- leaving it
def test_objects_go_when_their_blocks_expire(opened: Opening, clock: FakeClock, bucket: Bucket) -> None:
    store = opened()
    space = keyspace(store, block_bytes=BLOCK)
    (lasting,) = fill(store, space, clock, range(1))
    (brief,) = fill(store, space, clock, range(1, 2), ttl_s=2 * limits.cold_ttl_s_min)
    cold_everything(store)
    assert len(bucket.objects()) == 2
    clock.advance(2 * limits.cold_ttl_s_min + 60)
    store._keeper.chores()
    assert [path.stem for path in bucket.objects()] == [segment_of(store, lasting)]
    assert told(store, "objects_deleted") == 1
    assert space.lookup(brief) == 0


def test_an_erasure_is_done_when_the_plain_object_has_gone(opened: Opening, clock: FakeClock, bucket: Bucket) -> None:
    """With the store away its blocks are unreadable at once; erased is said when nothing of them is left."""
    store = opened()
    mine = fill(store, keyspace(store, block_bytes=BLOCK), clock, range(2))
    other = keyspace(store, tenant="globex", block_bytes=BLOCK)
    (theirs,) = fill(store, other, clock, range(1))
    cold_everything(store)
    bucket.plan = down = FaultWhile("eio", ops=("unlink",))
    told = store.erase(tenant="acme", wait_s=1.0)
    assert told["state"] == "unreadable"
    assert read(keyspace(store, block_bytes=BLOCK), mine[0]) == [MISSING] * PER_SEGMENT
    assert down.fired > 0
    down.armed = False
    clock.advance(limits.object_retry_s_max)
    assert store.core.erasures.wait(told["id"], 30.0)["state"] == "erased"
    assert [path.stem for path in bucket.objects()] == [segment_of(store, theirs)]
    assert read(other, theirs) == [FOUND] * PER_SEGMENT


def test_an_erasure_does_not_wait_for_an_encrypted_object(opened: Opening, clock: FakeClock, bucket: Bucket) -> None:
    store = opened(encryption="on")
    fill(store, keyspace(store, block_bytes=BLOCK), clock, range(1))
    cold_everything(store)
    bucket.plan = down = FaultWhile("eio", ops=("unlink",))
    assert store.erase(tenant="acme", wait_s=30.0)["state"] == "erased"
    assert len(bucket.objects()) == 1
    down.armed = False
    clock.advance(limits.object_retry_s_max)
    store._keeper.chores()
    assert bucket.objects() == []


@pytest.mark.parametrize("encryption", ["off", "on"])
def test_blocks_are_erased_out_of_an_object_and_the_others_stay(
    opened: Opening, clock: FakeClock, bucket: Bucket, encryption: str
) -> None:
    store = opened(encryption=encryption)
    space = keyspace(store, block_bytes=BLOCK)
    (keys,) = fill(store, space, clock, range(1))
    name = segment_of(store, keys)
    cold_everything(store)
    told = store.erase(tenant="acme", blocks=[key.tobytes() for key in keys[4:6]], wait_s=30.0)
    assert told["state"] == "erased"
    store._keeper.chores()
    assert name not in [path.stem for path in bucket.objects()]
    assert read(space, keys) == [FOUND] * 4 + [MISSING] * 2 + [FOUND] * 10


def test_both_copies_of_a_mirrored_segment_leave_the_disk(
    opened: Opening, clock: FakeClock, bucket: Bucket, tmp_path: Path
) -> None:
    store = opened(mirror=tmp_path / "mirror")
    store.core.reader.used_far = None
    space = keyspace(store, block_bytes=BLOCK)
    (keys,) = fill(store, space, clock, range(1), durability="retained")
    name = segment_path(bytes.fromhex(segment_of(store, keys)))
    copies = [store.path / name, tmp_path / "mirror" / name]
    assert all(path.exists() for path in copies)
    cold_everything(store)
    assert not any(path.exists() for path in copies)
    assert read(space, keys) == [FOUND] * PER_SEGMENT


def test_a_mirrored_segment_whose_copies_differ_stays(
    opened: Opening, clock: FakeClock, bucket: Bucket, tmp_path: Path
) -> None:
    """The copy that would be uploaded is the bad one; the good one must not go."""
    store = opened(mirror=tmp_path / "mirror")
    store.core.reader.used_far = None
    space = keyspace(store, block_bytes=BLOCK)
    (keys,) = fill(store, space, clock, range(1), durability="retained")
    copies = [root / segment_path(bytes.fromhex(segment_of(store, keys))) for root in (store.path, tmp_path / "mirror")]
    for one in store.core.writer.open_segments():
        store.core.writer.retire(one)
    flip(copies[0], 5000)
    fill(store, space, clock, range(1, 8))
    assert told(store, "segments_refused") == 1
    assert all(path.exists() for path in copies)
    assert bucket.objects()
    assert read(space, keys) == [FOUND] * PER_SEGMENT
    flip(copies[0], 5000)


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
        ("s3://key:se/secret@bucket/prefix", "come from the environment"),
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
