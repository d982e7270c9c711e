"""Whether what many processes saw of one store can have happened: recorded histories, and their checker.

    histories = run(Setup(data, catalog, seed=7))          # processes of `coherence_worker`, under your nemeses
    violations = check(histories)

Contract
- Blocks: a delivered block has the bytes that its key stands for. A read that begins after a write was acknowledged,
  whoever wrote, finds the block, unless a removal came after the write began. Excused are reads during which the
  catalog did not answer, and blocks written before a failover that ended after that (`lossy`): it may lose them.
- Heads (compare-and-set of a register whose values are all different): every value has one successor, all acknowledged
  changes are on the one chain from the first value, and who comes later in time does not come earlier on the chain.
  A change whose answer was lost counts if somebody saw its value, else not.
- Times are one machine's CLOCK_MONOTONIC. An operation that was cut off by a kill has no end.
- Not checked: that a refused compare-and-set was refused for a reason; that removals are evictions the store wanted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PUT, GET, REMOVE, CAS, LOOK = "put", "get", "remove", "cas", "look"
DONE, MISSED, WRONG, REFUSED, UNKNOWN = "done", "missed", "wrong", "refused", "unknown"
"""Outcomes. done: stored or there already; found; removed; changed; looked. refused: a write or compare-and-set."""


@dataclass(frozen=True, slots=True)
class Event:
    """One operation of one process. what: number of a block or name of a head. value: what a head became or was."""

    process: str
    op: str
    what: str
    began_s: float
    ended_s: float = math.inf
    outcome: str = UNKNOWN
    expected: str = ""
    value: str = ""


def load(files: Iterable[Path]) -> list[Event]:
    """What processes wrote down, one JSON object a line: an intent before each operation, its outcome after it."""
    events = []
    for file in files:
        intents: dict[int, dict[str, object]] = {}
        for line in file.read_text().splitlines():
            try:
                told = json.loads(line)
            except ValueError:  # the last line of one that was killed
                continue
            intents.setdefault(told.pop("id"), {"process": file.stem}).update(told)
        events += [Event(**intent) for intent in intents.values()]  # type: ignore[arg-type]
    return sorted(events, key=lambda event: event.began_s)


def check(events: Sequence[Event], lossy: Sequence[tuple[float, float]] = ()) -> list[str]:
    """What cannot have happened, one line each. lossy: (began, ended) of failovers that may lose publishes."""
    found = list(_check_blocks(events, lossy))
    for name in sorted({event.what for event in events if event.op in (CAS, LOOK)}):
        found += _check_head([event for event in events if event.op in (CAS, LOOK) and event.what == name])
    return found


def _check_blocks(events: Sequence[Event], lossy: Sequence[tuple[float, float]]) -> Iterator[str]:
    by_block: dict[str, list[Event]] = {}
    for event in events:
        if event.op in (PUT, GET, REMOVE):
            by_block.setdefault(event.what, []).append(event)
    for mine in by_block.values():
        puts = [event for event in mine if event.op == PUT and event.outcome == DONE]
        removals = [event for event in mine if event.op == REMOVE]
        for get in (event for event in mine if event.op == GET):
            if get.outcome == WRONG:
                yield f"wrong bytes: {get}"
            if get.outcome != MISSED:
                continue
            for put in puts:
                removed = any(one.ended_s > put.began_s and one.began_s < get.ended_s for one in removals)
                lost = any(ended > put.began_s and began < get.ended_s for began, ended in lossy)
                if put.ended_s < get.began_s and not removed and not lost:
                    yield f"not found: {get} after {put}"
                    break


def _check_head(events: Sequence[Event]) -> Iterator[str]:
    seen = {event.value for event in events if event.op == LOOK and event.outcome == DONE}
    seen |= {event.expected for event in events if event.op == CAS and event.outcome == DONE}
    effective = [
        event
        for event in events
        if event.op == CAS and (event.outcome == DONE or (event.outcome == UNKNOWN and event.value in seen))
    ]
    after: dict[str, Event] = {}
    for change in effective:
        other = after.setdefault(change.expected, change)
        if other is not change:
            yield f"two changes of one value: {other} and {change}"
    position, value = {"": 0}, ""
    while value in after and after[value].value not in position:
        value = after[value].value
        position[value] = len(position)
    for event in effective:
        if event.value not in position:
            yield f"a change that is not on the chain: {event}"
    answered = [event for event in events if event.outcome == DONE and event.value in position]
    for event in events:
        if event.op == LOOK and event.outcome == DONE and event.value not in position:
            yield f"a value that nobody wrote: {event}"
    finished, latest, at = sorted(answered, key=lambda event: event.ended_s), 0, 0
    for event in sorted(answered, key=lambda event: event.began_s):
        while at < len(finished) and finished[at].ended_s < event.began_s:
            latest = max(latest, position[finished[at].value])
            at += 1
        if position[event.value] < latest:
            yield f"the past came back: {event}"
