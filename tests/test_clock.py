"""Clocks that jump: nothing expires, nothing is deleted and nothing is kept wrongly because a wall clock was set.

`FakeClock.advance` is time that passes, `FakeClock.step` is somebody setting the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.blocks import wrong_books

import perdure
from perdure import Keyspace, Seams, Store, limits
from perdure.clock import FakeClock, SteadyWall, SystemClock
from perdure.testing.store import FOUND, MISSING, STORED, chain, keyspace, read, write

DAY_S = 86_400.0
TTL_S = 600.0
SURELY_GONE_S = TTL_S * 17 / 16 + 2  # the expiry is rounded up, to a sixteenth of the TTL
Opening = Callable[..., Store]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def opened(tmp_path: Path, clock: FakeClock) -> Iterator[Opening]:
    """Opens the store, after closing it if it is open."""
    stores: list[Store] = []

    def opening(at: FakeClock = clock, **options: Any) -> Store:
        for store in stores:
            store.close()
        chosen = {"capacity": "8MiB", "memory": "1MiB", "seams": Seams(clock=at)} | options
        stores.append(perdure.open(tmp_path / "store", **chosen))
        assert stores[-1].wait_ready(30.0)
        return stores[-1]

    yield opening
    for store in stores:
        store.close()


def segments(store: Store) -> int:
    return sum(one["count"] for one in store.status()["segments"].values())


def seen(store: Store) -> tuple[bool, float]:
    status = store.status()
    return status["expiry_paused"], status["clock_step_s"]


def is_there(store: Store, space: Keyspace, number: int, there: bool) -> None:
    """By every verb, from memory and from the disk."""
    keys = chain(space, number, 3)
    assert space.lookup(keys) == (3 if there else 0)
    assert space.present(keys).tolist() == [there] * 3
    assert read(space, keys) == [FOUND if there else MISSING] * 3
    verdict = store.explain(keys[0].tobytes())["verdict"]
    assert verdict.startswith("hit" if there else "miss"), verdict


# --- without any jump
@pytest.mark.parametrize("ttl_s", [1.0, 59.0, TTL_S, 7 * DAY_S])
@pytest.mark.parametrize("durability", ["ephemeral", "session"])
def test_ttl_is_kept_to(opened: Opening, clock: FakeClock, ttl_s: float, durability: str) -> None:
    store = opened()
    space = keyspace(store)
    assert write(space, chain(space, 1, 3), ttl_s=ttl_s, durability=durability) == [STORED] * 3
    assert write(space, chain(space, 2, 3), durability=durability) == [STORED] * 3
    store.sync()
    clock.advance(ttl_s - 0.5)
    is_there(store, space, 1, there=True)
    clock.advance(ttl_s / 16 + 2.5)
    is_there(store, space, 1, there=False)
    is_there(store, space, 2, there=True)
    assert write(space, chain(space, 1, 3), ttl_s=ttl_s, durability=durability) == [STORED] * 3
    is_there(store, space, 1, there=True)


def test_expired_segments_are_swept_and_their_space_comes_back(opened: Opening, clock: FakeClock) -> None:
    store = opened()
    space = keyspace(store)
    write(space, chain(space, 1, 3), ttl_s=TTL_S)
    write(space, chain(space, 2, 3))
    store = opened()
    space = keyspace(store)
    used = store.status()["used_bytes"]
    store._keeper.chores()
    assert (segments(store), store.status()["used_bytes"]) == (2, used)
    clock.advance(SURELY_GONE_S)
    store._keeper.chores()
    assert (segments(store), store.status()["used_bytes"]) == (1, used // 2)
    assert store.status()["blocks"] == 3
    assert not wrong_books(store)
    is_there(store, space, 1, there=False)
    is_there(store, space, 2, there=True)


def test_a_day_switched_off_counts(opened: Opening, clock: FakeClock) -> None:
    """The machine was off: the wall clock is ahead of the last run, and right."""
    store = opened()
    space = keyspace(store)
    write(space, chain(space, 1, 3), ttl_s=TTL_S)
    write(space, chain(space, 2, 3), ttl_s=2 * DAY_S)
    rebooted = FakeClock(wall=clock.wall() + DAY_S, boottime=5.0, boot_id=b"\2" * 16)
    store = opened(rebooted)
    space = keyspace(store)
    assert seen(store) == (False, 0.0)
    is_there(store, space, 1, there=False)
    is_there(store, space, 2, there=True)


# --- set while the store is open
@pytest.mark.parametrize("step_s", [-DAY_S, -61.0, 61.0, DAY_S, 20 * 365 * DAY_S])
def test_a_jump_pauses_expiry_until_it_is_undone(opened: Opening, clock: FakeClock, step_s: float) -> None:
    store = opened()
    space = keyspace(store)
    write(space, chain(space, 1, 3), ttl_s=TTL_S)
    clock.advance(1.0)
    clock.step(step_s)
    assert seen(store) == (True, step_s)
    is_there(store, space, 1, there=True)
    clock.advance(SURELY_GONE_S)
    assert seen(store) == (True, step_s)
    store._core.writer.seal_idle(time.monotonic() + 1.0)
    store._keeper.chores()
    is_there(store, space, 1, there=True)
    clock.step(-step_s)
    assert seen(store) == (False, 0.0)
    is_there(store, space, 1, there=False)
    store._keeper.chores()
    assert segments(store) == 0


@pytest.mark.parametrize("step_s", [-59.0, 59.0])
def test_a_small_correction_changes_nothing(opened: Opening, clock: FakeClock, step_s: float) -> None:
    store = opened()
    space = keyspace(store)
    write(space, chain(space, 1, 3), ttl_s=TTL_S)
    clock.step(step_s)
    assert seen(store) == (False, step_s)
    clock.advance(TTL_S - 1)
    is_there(store, space, 1, there=True)
    clock.advance(SURELY_GONE_S - TTL_S)
    is_there(store, space, 1, there=False)


@pytest.mark.parametrize("step_s", [-DAY_S, DAY_S])
def test_what_is_written_during_a_jump_lives_as_long_as_asked(opened: Opening, clock: FakeClock, step_s: float) -> None:
    store = opened()
    space = keyspace(store)
    clock.step(step_s)
    assert write(space, chain(space, 1, 3), ttl_s=TTL_S) == [STORED] * 3
    is_there(store, space, 1, there=True)
    clock.step(-step_s)
    clock.advance(TTL_S - 1)
    is_there(store, space, 1, there=True)
    clock.advance(SURELY_GONE_S - TTL_S)
    is_there(store, space, 1, there=False)


def test_leases_and_pins_do_not_look_at_the_wall(opened: Opening, clock: FakeClock) -> None:
    store = opened()
    space = keyspace(store)
    keys = chain(space, 1, 3)
    lease = space.reserve(keys, ttl_s=30.0)
    pin = space.pin(keys, ttl_s=30.0)
    assert lease is not None
    for step_s in (DAY_S, -2 * DAY_S, DAY_S):
        clock.step(step_s)
        store._keeper.chores()
        assert space.reserve(keys, ttl_s=30.0) is None
        assert store.status()["pins"] == 1
        assert write(space, keys, lease=lease)[0] != perdure.WriteStatus.REJECTED
    clock.advance(31.0)
    store._keeper.chores()
    assert store.status()["pins"] == 0
    assert not pin.release()
    assert space.reserve(keys, ttl_s=30.0) is not None


def test_a_jump_does_not_turn_the_order_of_eviction_round(opened: Opening, clock: FakeClock) -> None:
    store = opened(memory=0)
    space = keyspace(store, block_bytes=60_000)
    chains = [chain(space, number, 16) for number in range(10)]
    for number, keys in enumerate(chains):
        clock.advance(60)
        clock.step([DAY_S, -3 * DAY_S, 2 * DAY_S][number % 3])
        assert write(space, keys) == [STORED] * 16
    whole = [number for number, keys in enumerate(chains) if space.lookup(keys) == 16]
    assert whole == list(range(whole[0], 10))
    assert 3 <= whole[0] <= 6


# --- set while it was closed
def test_set_back_between_two_runs(opened: Opening, clock: FakeClock) -> None:
    """Nothing expires until the clock shows again what it showed before; then everything is as it was."""
    store = opened()
    space = keyspace(store)
    write(space, chain(space, 1, 3), ttl_s=TTL_S)
    for further_s in (-7200.0, 0.0):  # the second time the clock is still behind what the first run saw
        store.close()
        clock.step(further_s)
        store = opened()
        space = keyspace(store)
        paused, step_s = seen(store)
        assert paused
        assert step_s <= -3600.0
        clock.advance(SURELY_GONE_S)
        store._keeper.chores()
        is_there(store, space, 1, there=True)
        assert write(space, chain(space, 2, 3)) in ([STORED] * 3, [perdure.WriteStatus.EXISTS] * 3)
    clock.advance(7200.0)
    assert seen(store)[0] is False
    is_there(store, space, 1, there=False)
    is_there(store, space, 2, there=True)


@pytest.mark.parametrize("wall", [0.0, 1_000_000.0])
def test_a_machine_without_a_clock(opened: Opening, clock: FakeClock, wall: float) -> None:
    """Its battery is dead, it starts in 1970: before the store was made."""
    store = opened()
    space = keyspace(store)
    write(space, chain(space, 1, 3), ttl_s=TTL_S)
    store = opened(FakeClock(wall=wall, boottime=1.0))
    space = keyspace(store)
    assert seen(store)[0]
    is_there(store, space, 1, there=True)
    assert write(space, chain(space, 2, 3)) == [STORED] * 3
    assert write(space, chain(space, 3, 3), ttl_s=TTL_S) == [STORED] * 3
    is_there(store, space, 2, there=True)
    is_there(store, space, 3, there=True)
    store._keeper.chores()
    store = opened()
    space = keyspace(store)
    assert seen(store) == (False, 0.0)
    is_there(store, space, 1, there=True)
    is_there(store, space, 2, there=True)


def test_a_store_made_in_1970(tmp_path: Path) -> None:
    seams = Seams(clock=FakeClock(wall=0.0))
    with perdure.open(tmp_path / "store", capacity="8MiB", seams=seams) as store:
        space = keyspace(store)
        assert write(space, chain(space, 1, 3)) == [STORED] * 3
        is_there(store, space, 1, there=True)
    with perdure.open(tmp_path / "store", seams=Seams(clock=FakeClock())) as store:
        space = keyspace(store)
        is_there(store, space, 1, there=True)
        assert write(space, chain(space, 2, 3), ttl_s=TTL_S) == [STORED] * 3
        is_there(store, space, 2, there=True)


# --- the clocks
def test_steady_wall_follows_boottime() -> None:
    clock = FakeClock(wall=1000.0, boottime=10.0)
    steady = SteadyWall(clock)
    clock.advance(5.0)
    clock.step(1e6)
    assert steady.now() == 1005.0
    assert (steady.step_s, steady.paused) == (1e6, True)
    clock.step(-1e6 + limits.clock_step_s_max)
    assert (steady.step_s, steady.paused) == (limits.clock_step_s_max, False)
    clock.step(1.0)
    assert steady.paused


def test_the_system_clock() -> None:
    clock = SystemClock()
    before = clock.monotonic(), clock.boottime(), clock.wall()
    after = clock.monotonic(), clock.boottime(), clock.wall()
    assert all(one <= two for one, two in zip(before[:2], after[:2], strict=True))
    assert clock.boottime() >= clock.monotonic() - 1.0
    assert clock.wall() > 1.7e9
    assert len(clock.boot_id()) == 16
    assert clock.boot_id() == SystemClock().boot_id()
