"""Whose turn it is."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np

from perdure import limits
from perdure.service.turns import Places, Turns, cost_of
from perdure.testing.transport import until


def test_tenants_take_turns_and_restores_go_first() -> None:
    turns: Turns[str] = Turns()
    for number in range(3):
        turns.put(b"big", True, f"write {number}")
    for number in range(5):
        turns.put(b"big", False, f"big {number}")
    turns.put(b"small", False, "small 0")
    turns.put(b"late", False, "late 0")
    order = [turns.take() for _ in range(len(turns))]
    assert order == ["big 0", "small 0", "late 0", "big 1", "big 2", "big 3", "big 4", "write 0", "write 1", "write 2"]
    assert turns.take() is None


def test_a_turn_is_as_long_as_the_tenants_weight() -> None:
    turns: Turns[str] = Turns(lambda tenant: 3 if tenant == b"heavy" else 1)
    for number in range(6):
        turns.put(b"heavy", False, f"h{number}")
        turns.put(b"light", False, f"l{number}")
    order = [turns.take() for _ in range(12)]
    assert order == ["h0", "h1", "h2", "l0", "h3", "h4", "h5", "l1", "l2", "l3", "l4", "l5"]


def test_what_moves_much_takes_several_turns() -> None:
    """Of two tenants that always want something, each moves the same, whatever the size of its questions."""
    turns: Turns[bytes] = Turns()
    moved: Counter[bytes] = Counter()
    for _ in range(400):
        turns.put(b"big", False, b"big", 7)
        turns.put(b"small", False, b"small", 1)
    while moved[b"small"] < 400:
        who = turns.take()
        assert who is not None
        moved[who] += 7 if who == b"big" else 1
    assert abs(moved[b"big"] - moved[b"small"]) <= 7
    assert cost_of(0) == cost_of(1) == cost_of(limits.turn_bytes) == 1
    assert cost_of(limits.turn_bytes + 1) == 2


def test_no_tenant_waits_longer_than_a_round() -> None:
    """Against a model: between two turns of a tenant that waits, every other one has at most one."""
    rng, turns = np.random.default_rng(3), Turns[tuple[int, int]]()
    waiting: dict[int, list[int]] = {}
    since: dict[int, Counter[int]] = {}
    for number in range(4000):
        tenant = int(rng.integers(6)) if rng.random() < 0.3 else 0
        if rng.random() < 0.52:
            turns.put(bytes([tenant]), False, (tenant, number))
            if not waiting.setdefault(tenant, []):
                since[tenant] = Counter()
            waiting[tenant].append(number)
        elif (taken := turns.take()) is not None:
            served, which = taken
            assert waiting[served].pop(0) == which, "first come, first served"
            for other, counts in since.items():
                if other != served and waiting.get(other):
                    counts[served] += 1
                    assert counts[served] <= 1
            since[served] = Counter()
    assert len(turns) == sum(map(len, waiting.values()))


def test_places_are_given_by_turns_and_never_twice() -> None:
    places = Places(2)
    assert places.acquire(b"a", writing=False, timeout_s=0.0)
    assert places.acquire(b"a", writing=False, timeout_s=0.0)
    assert not places.acquire(b"a", writing=False, timeout_s=0.01)
    order: list[str] = []

    def wait(tenant: bytes, name: str) -> None:
        assert places.acquire(tenant, writing=False, timeout_s=60.0)
        order.append(name)
        places.release()

    threads = []
    for tenant, name in ((b"a", "a1"), (b"a", "a2"), (b"b", "b1")):
        threads.append(threading.Thread(target=wait, args=(tenant, name)))
        threads[-1].start()
        until(lambda: len(places._waiting) == len(threads))
    places.release()
    for thread in threads:
        thread.join()
    assert order == ["a1", "b1", "a2"]
    places.release()
    assert places._free == 2


def test_places_under_fire() -> None:
    places, inside, most = Places(3), [0], [0]
    lock = threading.Lock()

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(200):
            if places.acquire(bytes([number % 4]), writing=bool(number & 1), timeout_s=float(rng.random()) * 0.002):
                with lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                with lock:
                    inside[0] -= 1
                places.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] <= 3
    assert not len(places._waiting)
    assert places._free == 3
