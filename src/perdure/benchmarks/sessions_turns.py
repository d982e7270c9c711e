"""Turns of many sessions, drawn before they are played: from a public trace or from a seed. And the ideal queue.

Contract
- A schedule offers exactly the load it was asked for: its blocks take `load` of the device's time over its length. The
  same seed gives the same schedule.
- Generated: turns come at random (Poisson), each of a random session; a session grows by `GROWTH` blocks a turn, ends
  after `LIFE_TURNS` turns, and another one begins in its place.
- From a trace: every place plays sessions of the trace one after the other, with their own pauses (cut at
  `PAUSE_S_MAX`) and contexts (one block for `TOKENS_PER_BLOCK` tokens, 1 to `blocks_max` of them); only then is time
  scaled to the load.
- Nothing is guaranteed of the load over a part of the schedule: bursts of the trace stay bursts.
"""

from __future__ import annotations

import gzip
import heapq
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from perdure.errors import InvalidArgument

FIRST: Final = 12
GROWTH: Final = 3
LIFE_TURNS: Final = 12
TOKENS_PER_BLOCK: Final = 4096
PAUSE_S_MAX: Final = 600.0
NEW_BLOCKS_MAX: Final = 16
_TRACE: Final = "*sessions*.jsonl.gz"


class Turn(NamedTuple):
    """At `at_s` of the schedule the session in place `place` restores `blocks` blocks, and then stores `new` more.
    `life`: how many sessions have ended in that place before this one."""

    at_s: float
    place: int
    life: int
    blocks: int
    new: int


class Step(NamedTuple):
    """What the next turn of a session of the trace is: seconds after the one before, blocks restored and stored."""

    pause_s: float
    blocks: int
    new: int


Trace = Sequence[Sequence[Step]]


def generated(seed: int, places: int, blocks: float, seconds: float, blocks_max: int) -> list[Turn]:
    """About `blocks` blocks restored within `seconds`, by sessions in `places` places."""
    rng = random.Random(seed)
    states = [rng.randrange(LIFE_TURNS) for _ in range(places)]
    drawn: list[Turn] = []
    left = blocks
    while left > 0:
        place = rng.randrange(places)
        life, turn = divmod(states[place], LIFE_TURNS)
        states[place] += 1
        size = min(FIRST + GROWTH * turn, blocks_max)
        drawn.append(Turn(0.0, place, life, size, GROWTH))
        left -= size
    moments = random.Random(f"moments {seed}")  # of its own, so that other numbers of places meet the same arrivals
    times = sorted(moments.uniform(0.0, seconds) for _ in drawn)
    return _scaled([one._replace(at_s=at) for one, at in zip(drawn, times, strict=True)], seconds, blocks, seconds)


def replayed(trace: Trace, seed: int, places: int, blocks: float, seconds: float) -> list[Turn]:
    """As `generated`, by the sessions of a trace, each place from a random moment of a random one on."""
    rng = random.Random(seed)
    streams = [_stream(trace, rng, place) for place in range(places)]
    heads = [(turn.at_s, place, turn) for place, turn in enumerate(map(next, streams))]
    heapq.heapify(heads)
    drawn: list[Turn] = []
    left = blocks
    while left > 0:
        _, place, turn = heads[0]
        drawn.append(turn)
        left -= turn.blocks
        following = next(streams[place])
        heapq.heapreplace(heads, (following.at_s, place, following))
    return _scaled(drawn, drawn[-1].at_s, blocks, seconds)


def _stream(trace: Trace, rng: random.Random, place: int) -> Iterator[Turn]:
    steps = list(trace[rng.randrange(len(trace))])
    start = rng.randrange(len(steps))
    at = -rng.random() * steps[start].pause_s  # the place is somewhere in this pause when the schedule begins
    life = 0
    while True:
        for step in steps[start:]:
            at += step.pause_s
            yield Turn(max(at, 0.0), place, life, step.blocks, step.new)
        steps, start, life = list(trace[rng.randrange(len(trace))]), 0, life + 1


def _scaled(turns: list[Turn], length_s: float, blocks: float, seconds: float) -> list[Turn]:
    """Let the turns last as long as their blocks need at the rate of `blocks` in `seconds`."""
    wanted_s = seconds * sum(turn.blocks for turn in turns) / blocks
    scale = wanted_s / length_s if length_s > 0 else 0.0
    return [turn._replace(at_s=turn.at_s * scale) for turn in turns]


def load_trace(folder: Path, blocks_max: int) -> Trace:
    """The sessions of the agents' trace in `folder` (see its README). Raises InvalidArgument."""
    found = sorted(folder.glob(_TRACE))
    if not found:
        raise InvalidArgument(
            f"traces {str(folder)!r}: there is no {_TRACE} in it; name the folder of the public traces"
        )
    try:
        with gzip.open(found[0], "rt") as lines:
            return [steps for steps in (_steps(json.loads(line), blocks_max) for line in lines) if steps]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{found[0]}: not a trace of sessions: {error!r}") from error


def _steps(session: dict[str, object], blocks_max: int) -> list[Step]:
    """A request restores what it has in common with the requests before it, from its first block on."""
    size = int(session["block_size"])  # type: ignore[call-overload]
    seen: set[int] = set()
    before_s, steps = 0.0, []
    for request in session["requests"]:  # type: ignore[attr-defined]
        ids = [number for first, count in request["runs"] for number in range(first, first + count)]
        shared = next((at for at, number in enumerate(ids) if number not in seen), len(ids))
        seen.update(ids)
        restored, stored = ((part * size) // TOKENS_PER_BLOCK for part in (shared, len(ids) - shared))
        pause_s = min(max(float(request["t"]) - before_s, 0.0), PAUSE_S_MAX)
        steps.append(Step(pause_s, min(max(restored, 1), blocks_max), min(max(stored, 1), NEW_BLOCKS_MAX)))
        before_s = float(request["t"])
    return steps[1:]  # the first one has nothing to restore


def ideal(turns: Sequence[Turn], service_s: Callable[[int], float]) -> list[float]:
    """Seconds that each turn spends in a queue with one server, first come first served, without any other cost."""
    free_s, spent = 0.0, []
    for turn in turns:
        free_s = max(free_s, turn.at_s) + service_s(turn.blocks)
        spent.append(free_s - turn.at_s)
    return spent
