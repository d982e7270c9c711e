"""What every store must do for those who want the same prefix at the same time, as a test class to inherit beside
`testing.store.StoreConformance`.

Contract: as there. Nothing is asserted about durations; that calls come back is what `_WAIT_S` bounds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from perdure.catalog.api import KeyArray
from perdure.errors import InvalidArgument, StaleFence, StoreClosed
from perdure.keyspace import Keyspace
from perdure.store import Store
from perdure.testing.store import FOUND, STORED, chain, read, write

_WAIT_S = 60.0
_SETTLE_S = 0.05  # for a thread to begin waiting; the outcome is the same if it has not


@contextmanager
def waiters(count: int = 1) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def started(pool: ThreadPoolExecutor, verb: Any, *args: Any, **options: Any) -> Future[Any]:
    """A call in the background that has most likely begun to wait."""
    future = pool.submit(verb, *args, **options)
    time.sleep(_SETTLE_S)
    return future


class Flights:
    """What 64 callers do who want the same prefix: compute what is missing while holding the lease, else wait."""

    def __init__(self, keys: KeyArray, step: int):
        self.keys, self.step = keys, step
        self.computed = 0
        self.flying = 0
        self.most = 0
        self._lock = threading.Lock()

    def fly(self, space: Keyspace) -> int:
        """Until the whole prefix can be used; how many blocks this caller has computed."""
        mine, count = 0, len(self.keys)
        while space.lookup(self.keys) < count:
            lease = space.reserve(self.keys, ttl_s=_WAIT_S, wait_s=_WAIT_S)
            if lease is None:
                continue
            with self._lock:
                self.flying += 1
                self.most = max(self.most, self.flying)
            known = space.lookup(self.keys)
            for first in range(known, count, self.step):
                part = self.keys[first : min(first + self.step, count)]
                mine += len(part)
                write(space, part, lease=lease, durability="ephemeral")
            with self._lock:
                self.flying -= 1
            space.end_lease(lease)
        with self._lock:
            self.computed += mine
        return mine


class FlightConformance:
    """Inherit beside `StoreConformance`, whose fixtures it uses."""

    # --- reserve
    def test_who_waits_gets_the_lease_when_it_is_ended(self, space: Keyspace) -> None:
        keys = chain(space, 1, 3)
        first = space.reserve(keys)
        assert first is not None
        with waiters() as pool:
            second = started(pool, space.reserve, keys, wait_s=_WAIT_S)
            assert space.end_lease(first)
            lease = second.result(_WAIT_S)
        assert lease is not None
        assert lease.token > first.token
        assert write(space, keys, lease=lease) == [STORED] * 3

    @pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 4, 0, 3, 1, 2]])
    def test_who_waits_gets_nothing_when_all_is_stored(self, space: Keyspace, order: list[int]) -> None:
        keys = chain(space, 1, 6)
        lease = space.reserve(keys)
        with waiters() as pool:
            second = started(pool, space.reserve, keys, wait_s=_WAIT_S)
            for at in order:
                assert not second.done()
                assert write(space, keys[at : at + 1], lease=lease) == [STORED]
            assert second.result(_WAIT_S) is None
        assert space.lookup(keys) == 6

    def test_what_is_stored_already_needs_no_lease(self, space: Keyspace) -> None:
        keys = chain(space, 1, 3)
        write(space, keys)
        assert space.reserve(keys, wait_s=_WAIT_S) is None
        lease = space.reserve(keys)  # without waiting it is only about the lease
        assert lease is not None
        assert space.reserve(keys, wait_s=_WAIT_S) is None

    def test_waiting_ends(self, space: Keyspace) -> None:
        keys = chain(space, 1, 3)
        assert space.reserve(keys) is not None
        assert space.reserve(keys, wait_s=0.02) is None
        write(space, keys[:2])
        assert space.follow(keys, known=2, wait_s=0.02) == 2
        assert space.follow(keys, known=2, wait_s=0.0) == 2

    def test_a_lease_that_expires_goes_to_who_waits(self, space: Keyspace) -> None:
        """FAULTS 19: its late holder is refused, and overwrites nothing."""
        keys = chain(space, 1, 4)
        late = space.reserve(keys, ttl_s=0.1)
        assert late is not None
        lease = space.reserve(keys, wait_s=_WAIT_S)
        assert lease is not None
        assert lease.token > late.token
        with pytest.raises(StaleFence):
            write(space, keys, lease=late)
        assert space.lookup(keys) == 0
        assert not space.end_lease(late)
        assert write(space, keys, lease=lease) == [STORED] * 4
        with pytest.raises(StaleFence):
            write(space, keys, lease=late)
        assert read(space, keys) == [FOUND] * 4

    def test_other_prefixes_do_not_wait(self, space: Keyspace) -> None:
        assert space.reserve(chain(space, 1, 3), wait_s=_WAIT_S) is not None
        assert space.reserve(chain(space, 1, 4), wait_s=_WAIT_S) is not None
        assert space.reserve(chain(space, 2, 3), wait_s=_WAIT_S) is not None

    @pytest.mark.parametrize("durability", ["ephemeral", "session"])
    def test_what_was_acknowledged_outlives_the_lease(self, store: Store, space: Keyspace, durability: str) -> None:
        """Ephemeral blocks are committed a little later, when the lease may have ended."""
        keys = chain(space, 1, 5)
        lease = space.reserve(keys)
        assert lease is not None
        assert write(space, keys, lease=lease, durability=durability) == [STORED] * 5
        assert space.end_lease(lease)
        store.sync()
        assert store.status()["blocks"] == 5
        assert read(space, keys) == [FOUND] * 5

    # --- follow
    def test_who_follows_sees_every_step(self, space: Keyspace) -> None:
        keys = chain(space, 1, 9)
        seen = [0]

        def follow() -> None:
            while seen[-1] < 9:
                seen.append(space.follow(keys, known=seen[-1], wait_s=_WAIT_S))

        with waiters() as pool:
            done = started(pool, follow)
            for first in range(0, 9, 3):
                write(space, keys[first : first + 3])
                time.sleep(_SETTLE_S)
            done.result(_WAIT_S)
        assert seen == sorted(set(seen))
        assert seen[-1] == 9

    def test_a_hole_ends_what_can_be_followed(self, space: Keyspace) -> None:
        keys = chain(space, 1, 5)
        write(space, keys[[0, 1, 3, 4]])
        assert space.follow(keys, known=1, wait_s=_WAIT_S) == 2
        assert space.follow(keys, known=2, wait_s=0.02) == 2
        with waiters() as pool:
            rest = started(pool, space.follow, keys, known=2, wait_s=_WAIT_S)
            write(space, keys[2:3])
            assert rest.result(_WAIT_S) == 5

    def test_there_is_nothing_more_to_follow(self, space: Keyspace) -> None:
        keys = chain(space, 1, 3)
        assert space.follow(keys[:0], wait_s=_WAIT_S) == 0
        write(space, keys)
        assert space.follow(keys, known=3, wait_s=_WAIT_S) == 3
        assert space.follow(keys, known=100, wait_s=_WAIT_S) == 3

    @pytest.mark.parametrize("wait_s", [-1.0, float("nan"), "5", None])
    def test_a_wait_that_is_none(self, space: Keyspace, wait_s: Any) -> None:
        keys = chain(space, 1, 1)
        with pytest.raises(InvalidArgument, match="wait_s"):
            space.reserve(keys, wait_s=wait_s)
        with pytest.raises(InvalidArgument, match="wait_s"):
            space.follow(keys, wait_s=wait_s)
        with pytest.raises(InvalidArgument, match="known"):
            space.follow(keys, known=-1, wait_s=1.0)

    # --- many
    def test_64_callers_compute_a_prefix_once(self, store: Store, space: Keyspace) -> None:
        """FAULTS 13 and 14."""
        flights = Flights(chain(space, 1, 40), step=8)
        with waiters(64) as pool:
            list(pool.map(lambda _: flights.fly(space), range(64)))
        assert flights.most == 1
        assert flights.computed == 40
        store.sync()
        assert store.status()["blocks"] == 40
        assert read(space, flights.keys) == [FOUND] * 40

    def test_closing_ends_waiting(self, store: Store, space: Keyspace) -> None:
        keys = chain(space, 1, 2)
        assert space.reserve(keys) is not None
        with waiters(2) as pool:
            calls = [
                started(pool, space.reserve, keys, wait_s=_WAIT_S), started(pool, space.follow, keys, wait_s=_WAIT_S)
            ]  # fmt: skip
            store.close()
            for call in calls:
                with pytest.raises(StoreClosed):
                    call.result(_WAIT_S)
