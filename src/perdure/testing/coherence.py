"""Whether what many processes saw of one store can have happened: recorded histories, and their checker.

    events = load(files)                          # what the processes of `coherence_worker` wrote down
    violations = check(events, lossy=windows)     # `coherence_run` makes such a run on hosts, with nemeses

Contract
- Blocks: a delivered block has the bytes that its key stands for. A read that begins after a write was acknowledged,
  whoever wrote, finds the block, unless a removal or an eviction came after the write began. Excused are reads during
  which the catalog did not answer or a fault was injected, and blocks written before a failover that ended after that
  (`lossy`): it may lose them.
- Heads (compare-and-set of a register whose values are all different): every value has one successor, all acknowledged
  changes are on the one chain from the first value, and who comes later in time does not come earlier on the chain.
  A change whose answer was lost counts if somebody saw its value, else not. No failover excuses the loss of a change
  that was acknowledged. What is merely looked at during one may be old, or be lost afterwards.
- Fences (tokens of one lease): none is given twice, and later ones are greater, failover or not.
- A removal whose answer was lost may still happen for `LATE_S`: a cut connection delivers it when it is mended.
- Times are one machine's CLOCK_MONOTONIC. An operation that was cut off by a kill has no end.
- Not checked: that a refused compare-and-set was refused for a reason; that evictions were needed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

PUT, GET, REMOVE, EVICT, CAS, LOOK, FENCE = "put", "get", "remove", "evict", "cas", "look", "fence"
"""Operations. evict: room was made, which may have taken any block (`what` is empty)."""

DONE, MISSED, WRONG, REFUSED, UNKNOWN = "done", "missed", "wrong", "refused", "unknown"
"""Outcomes. done: stored or there already; found; removed; changed; looked. refused: a write, a
compare-and-set, a lease; or an eviction that was not needed."""

LATE_S = 10.0  # twice as long as any connection is cut here: the kernel sends again after 0.2, 0.4, 0.8 ... s
_BEFORE_S = 0.5  # what was on its way to a server or a replica when a process was killed, or a failover began

Windows = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Event:
    """One operation of one process. what: number of a block, name of a head or of a lease. value: what a head became or
    was; the token of a lease."""

    process: str
    op: str
    what: str
    began_s: float
    ended_s: float = math.inf
    outcome: str = UNKNOWN
    expected: str = ""
    value: str = ""


def load(files: Iterable[Path]) -> list[Event]:
    """What processes wrote down, one JSON object a line: an intent before each operation, its outcome after it; and
    when they were killed (`note_kill`), so that what they were removing then is not taken to go on for ever."""
    events = []
    for file in files:
        intents: dict[int, dict[str, Any]] = {}
        killed_s = math.inf
        for line in file.read_text().splitlines():
            try:
                told = json.loads(line)
            except ValueError:  # the last line of one that was killed
                continue
            killed_s = told.pop("killed_s", killed_s)
            if told:
                intents.setdefault(told.pop("id"), {"process": file.stem}).update(told)
        for intent in intents.values():
            if intent["op"] in (REMOVE, EVICT) and "ended_s" not in intent:
                intent |= {"ended_s": killed_s + _BEFORE_S, "outcome": DONE}
        events += [Event(**intent) for intent in intents.values()]
    return sorted(events, key=lambda event: event.began_s)


def note_kill(file: Path, killed_s: float) -> None:
    with file.open("a") as history:
        history.write("\n" + json.dumps({"killed_s": killed_s}) + "\n")


def check(events: Sequence[Event], lossy: Windows = ()) -> list[str]:
    """What cannot have happened, one line each. lossy: (began, ended) of failovers that may lose publishes."""
    found = list(_check_blocks(events, lossy))
    for what, mine in _by_what(events, (CAS, LOOK)).items():
        found += [f"{what}: {line}" for line in _Head(mine, lossy).violations()]
    for mine in _by_what(events, (FENCE,)).values():
        found += _check_fence([event for event in mine if event.outcome == DONE])
    return found


def summary(events: Sequence[Event]) -> dict[str, int]:
    """How many of each operation ended how; and changes that were made though nobody was told so ("unacknowledged")."""
    told = dict(sorted(Counter(f"{event.op} {event.outcome}" for event in events).items()))
    heads = [_Head(mine, ()) for mine in _by_what(events, (CAS, LOOK)).values()]
    return told | {"unacknowledged": sum(change.outcome == UNKNOWN for head in heads for change in head.effective)}


def _by_what(events: Sequence[Event], ops: Sequence[str]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for event in events:
        if event.op in ops:
            found.setdefault(event.what, []).append(event)
    return found


def _overlaps(windows: Windows, began: float, ended: float) -> bool:
    return any(window[1] > began and window[0] < ended for window in windows)


def _check_blocks(events: Sequence[Event], lossy: Windows) -> Iterator[str]:
    evictions = [(one.began_s, one.ended_s) for one in events if one.op == EVICT and one.outcome != REFUSED]
    for mine in _by_what(events, (PUT, GET, REMOVE)).values():
        puts = [event for event in mine if event.op == PUT and event.outcome == DONE]
        gone = evictions + [
            (one.began_s, one.ended_s + (LATE_S if one.outcome == UNKNOWN else 0.0)) for one in mine if one.op == REMOVE
        ]
        for get in (event for event in mine if event.op == GET):
            if get.outcome == WRONG:
                yield f"wrong bytes: {get}"
            if get.outcome != MISSED:
                continue
            for put in puts:
                excused = _overlaps([*gone, *lossy], put.began_s, get.ended_s)
                if put.ended_s < get.began_s and not excused:
                    yield f"not found: {get} after {put}"
                    break


class _Head:
    """What happened to one register."""

    def __init__(self, events: Sequence[Event], lossy: Windows):
        windows = [(began - _BEFORE_S, ended) for began, ended in lossy]
        self._looks = [event for event in events if event.op == LOOK and event.outcome == DONE]
        self._changes = [event for event in events if event.op == CAS and event.outcome in (DONE, UNKNOWN)]
        self._sure = [look for look in self._looks if not _overlaps(windows, look.began_s, look.ended_s)]
        self.effective = self._what_happened()

    def _what_happened(self) -> list[Event]:
        """Acknowledged changes, those somebody surely saw, and those that such ones stand on."""
        by_value = {change.value: change for change in self._changes}
        found = {change.value: change for change in self._changes if change.outcome == DONE}
        needed = [look.value for look in self._sure] + [change.expected for change in found.values()]
        while needed:
            value = needed.pop()
            if value in by_value and value not in found:
                found[value] = by_value[value]
                needed.append(by_value[value].expected)
        return sorted(found.values(), key=lambda change: change.began_s)

    def violations(self) -> Iterator[str]:
        after: dict[str, Event] = {}
        for change in self.effective:
            other = after.setdefault(change.expected, change)
            if other is not change:
                yield f"two changes of one value: {other} and {change}"
        position, value = {"": 0}, ""
        while value in after and after[value].value not in position:
            value = after[value].value
            position[value] = len(position)
        for change in self.effective:
            if change.value not in position:
                yield f"a change that is not on the chain: {change}"
        written = {"", *(change.value for change in self._changes)}
        for look in self._looks:
            if look.value not in written:
                yield f"a value that nobody wrote: {look}"
        yield from self._order(position)

    def _order(self, position: dict[str, int]) -> Iterator[str]:
        acknowledged = [change for change in self.effective if change.outcome == DONE]
        answered = [event for event in [*acknowledged, *self._sure] if event.value in position]
        finished, latest, at = sorted(answered, key=lambda event: event.ended_s), 0, 0
        for event in sorted(answered, key=lambda event: event.began_s):
            while at < len(finished) and finished[at].ended_s < event.began_s:
                latest = max(latest, position[finished[at].value])
                at += 1
            if position[event.value] < latest:
                yield f"the past came back: {event}"


def _check_fence(taken: Sequence[Event]) -> Iterator[str]:
    by_token = sorted(taken, key=lambda event: int(event.value))
    for one, other in pairwise(by_token):
        if one.value == other.value:
            yield f"one token twice: {one} and {other}"
    earliest_end, whose = math.inf, None  # among those with a greater token
    for event in reversed(by_token):
        if earliest_end < event.began_s:
            yield f"a lower token later: {event} after {whose}"
        if event.ended_s < earliest_end:
            earliest_end, whose = event.ended_s, event
