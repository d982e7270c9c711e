"""Erasures and holds where they meet other work: eviction, the cold tier, publications, roots that are away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import blocks as data
from support.cold import BLOCK, Bucket, cold_everything, fill, opening, segment_of
from test_erasure import client_chain, client_keyspace, erased, on_disk, tokens
from test_erasure import fill as fill_plain
from test_erasure import opened as open_plain
from test_roots import Place, stored
from test_roots import place as place

import perdure
from perdure import limits
from perdure.clock import FakeClock
from perdure.errors import InvalidArgument
from perdure.io.siblings import FaultWhile
from perdure.testing.store import FOUND, MISSING, keyspace, read

Open = Callable[..., perdure.Store]


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def cold(tmp_path: Path, clock: FakeClock, bucket: Bucket) -> Iterator[Open]:
    with opening(tmp_path, clock, bucket) as made:
        yield made


def retire_all(store: perdure.Store) -> None:
    for one in store.core.writer.open_segments():
        store.core.writer.retire(one)


# --- the cold tier
def test_a_segment_that_goes_cold_before_it_is_rewritten(cold: Open, clock: FakeClock) -> None:
    store = cold()
    space = keyspace(store, block_bytes=BLOCK)
    (keys,) = fill(store, space, clock, range(1))
    core: Any = store.core
    retire_all(store)
    segment = bytes.fromhex(segment_of(store, keys))
    rewrite = core.erasures._rewrite

    def late(record: Any, names: Any) -> Any:
        if record.segment == segment and not core.table.get(segment).cold:
            core.cold.tier.upload(record)
            with core.reclaimer.turn():
                assert core.cold.tier.settle(record)
        return rewrite(record, names)

    core.erasures._rewrite = late
    store.erase(tenant="acme", blocks=[keys[4].tobytes()], wait_s=20.0)
    assert read(space, keys) == [FOUND] * 4 + [MISSING] + [FOUND] * 11


def test_no_receipt_while_a_plain_object_is_left(cold: Open, clock: FakeClock, bucket: Bucket) -> None:
    """Its segment was dropped before; its object could not be deleted then."""
    store = cold()
    fill(store, keyspace(store, block_bytes=BLOCK), clock, range(1))
    cold_everything(store)
    bucket.plan = down = FaultWhile("eio", ops=("unlink",))
    tier = store.core.cold.tier
    for record in tier.segments():
        store.core.reclaimer.drop(record, None)
    assert len(bucket.objects()) == 1
    told = store.erase(tenant="acme", wait_s=1.0)
    assert told["state"] == "unreadable"
    down.armed = False
    clock.advance(10_000)
    assert store.core.erasures.wait(told["id"], 60.0)["state"] == "erased"
    assert not bucket.objects()


def test_a_bucket_is_not_left_with_objects_that_are_to_be_deleted(cold: Open, clock: FakeClock, bucket: Bucket) -> None:
    """With another one or none, nobody would delete them, and an erasure would count as done."""
    store = cold()
    fill(store, keyspace(store, block_bytes=BLOCK), clock, range(2))
    cold_everything(store)
    bucket.plan = FaultWhile("eio", ops=("unlink",))
    for record in store.core.cold.tier.segments():
        store.core.reclaimer.drop(record, None)
    told = store.erase(tenant="acme", wait_s=1.0)
    assert told["state"] == "unreadable"
    store.close()
    for other in ("off", "file:///elsewhere"):
        with pytest.raises(InvalidArgument, match=r"2 segments lie in file://.*leave `cold` out"):
            cold(cold=other)
    with pytest.raises(InvalidArgument, match=rf"{told['id']}.*let the erasures end first"):
        cold(cold="drop")
    assert len(bucket.objects()) == 2
    bucket.plan = FaultWhile("eio", ops=())
    store = cold(cold=None)
    assert store.core.erasures.wait(told["id"], 60.0)["state"] == "erased"
    assert not bucket.objects()
    store.close()
    cold(cold="off")


def test_a_hold_keeps_cold_segments_whose_blocks_have_moved(cold: Open, clock: FakeClock, bucket: Bucket) -> None:
    store = cold()
    space = keyspace(store, block_bytes=BLOCK)
    (keys,) = fill(store, space, clock, range(1))
    cold_everything(store)
    hold = store.hold(tenant="acme", reason="litigation")
    assert read(space, keys) == [FOUND] * len(keys)
    assert store.core.cold.promoter.wait_idle(30.0)
    assert store.status()["cold"]["blocks_promoted"] == len(keys)
    store._keeper.chores()
    assert len(bucket.objects()) == store.status()["cold"]["segments"] == 1
    store.unhold(tenant="acme", hold=hold["id"])
    store._keeper.chores()
    assert not bucket.objects()
    assert read(space, keys) == [FOUND] * len(keys)


def test_a_cold_tier_is_not_dropped_while_something_is_on_hold(cold: Open, clock: FakeClock) -> None:
    store = cold()
    (keys,) = fill(store, keyspace(store, block_bytes=BLOCK), clock, range(1))
    cold_everything(store)
    store.hold(tenant="acme", reason="litigation")
    store.close()
    with pytest.raises(InvalidArgument, match="take the holds"):
        cold(cold="drop")
    store = cold()
    assert store.core.index.lookup(keys)[0].all()


# --- eviction
@pytest.mark.parametrize("kind", ["tenant", "blocks"])
def test_what_is_erased_is_not_copied_forward(tmp_path: Path, kind: str) -> None:
    """Room is made while an erasure goes on: pinned blocks would move to a segment that it does not know."""
    with contextlib.closing(open_plain(tmp_path / "s")) as store:
        store.wait_ready(20)
        (keys,) = fill_plain(store, chains=1)
        data.keyspace(store).pin(keys, ttl_s=600)
        core: Any = store.core
        sealed, dropped = core.erasures._seal, list[Any]()

        def seal(*order: Any) -> None:
            sealed(*order)
            if not dropped:
                dropped.extend(core.reclaimer.drop(record, None) for record in core.table.all())

        core.erasures._seal = seal
        some = {} if kind == "tenant" else {"blocks": [key.tobytes() for key in keys[:2]]}
        erased(store, tenant="acme", **some)
        assert dropped
        gone = keys if kind == "tenant" else keys[:2]
        assert on_disk(store, gone) == []
    perdure.rebuild(tmp_path / "s")
    with contextlib.closing(open_plain(tmp_path / "s")) as store:
        store.wait_ready(20)
        assert data.read_back(data.keyspace(store), gone).tolist() == [data.MISSING] * len(gone)


# --- publications
def test_what_was_unpublished_is_not_left_on_the_disk(tmp_path: Path) -> None:
    with contextlib.closing(open_plain(tmp_path / "s")) as store:
        store.wait_ready(20)
        space = client_keyspace(store, tenant="acme")
        size, text = space.layout.block_bytes, b"SECRETSECRET"
        space.write(client_chain(space, 1, 3), bytearray((text * (size * 3 // len(text) + 1))[: size * 3]))
        store.sync()
        store.publish(space.digest, tokens(1, 3), name="p", readers=["globex"])
        store.unpublish("p")
        erased(store, tenant="acme")
        assert not [path for path in (tmp_path / "s").rglob("*.seg") if text in path.read_bytes()]


# --- roots
def sealed_while_away(place: Place) -> tuple[Any, Any]:
    place.free = [1 << 30, 3 << 30, 2 << 30]
    place.open()
    space = data.keyspace(place.store)
    keys = data.chain(space, 1, 6)
    assert data.write(space, keys, "session").stored == 6
    assert len(place.segments(1)) == 1
    place.unmount(1)
    retire_all(place.store)
    data.read_back(space, keys)
    return space, keys


def test_blocks_of_a_segment_that_is_sealed_while_its_root_is_away_come_back(place: Place) -> None:
    space, keys = sealed_while_away(place)
    place.mount(1)
    place.tend()
    assert data.read_back(space, keys).tolist() == [data.FOUND] * 6


def test_no_receipt_while_a_root_with_a_plain_file_is_away(place: Place) -> None:
    sealed_while_away(place)
    assert place.store.erase(tenant="acme", wait_s=1.0)["state"] == "unreadable"
    place.mount(1)
    place.tend()
    (order,) = place.store.core.erasures.waiting()
    assert place.store.core.erasures.wait(order["id"], 60.0)["state"] == "erased"
    assert not place.segments(1)


@pytest.mark.parametrize("folder", ["segments", "mirrors"])
def test_files_of_a_cold_segment_go_when_their_root_is_there_again(place: Place, tmp_path: Path, folder: str) -> None:
    """The process died before it could unlink them; the next one finds the root away. Second copies are files, too."""
    place.free = [limits.GIB, 9 * limits.GIB, 2 * limits.GIB]
    url = f"file://{tmp_path}/bucket"
    store = place.open(cold=url)
    _, keys = stored(place, 1, durability="retained")
    (name,) = [path for number in range(3) for path in place.segments(number, folder)]
    (number,) = [number for number in range(3) if name.is_relative_to(place.paths[number])]
    content = name.read_bytes()
    cold_everything(store)
    assert not name.exists()
    name.write_bytes(content)
    place.close()
    if number:
        place.unmount(number)
    store = place.open()
    store._keeper.chores()
    if number:
        place.mount(number)
    place.tend()
    store._keeper.chores()
    assert not name.exists()
    assert (data.read_back(data.keyspace(store), keys) == FOUND).all()
