"""Traces to replay: the public chat and agent traces where they are at hand, a made-up one else.

Contract
- Blocks are numbered 0.. per trace; a number stands for a whole prefix, so equal numbers are equal contexts.
- Blocks of 512 tokens. Chat (Mooncake's conversation trace): as published, the last, partial block of a request counts
  as one. Agents (kv-cache-tester's sessions, 64-token blocks): eight of theirs are one here, a partial tail is none.
- Sessions of agents are private, and start at random: `SESSIONS_AT_A_TIME` are alive on average. The same in every run.
- Never: a trace in the repository, or from the network.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from perdure.errors import InvalidArgument

BLOCK_TOKENS: Final = 512
SESSIONS_AT_A_TIME: Final = 16
CHAT_FILE: Final = "mooncake_conversation_trace.jsonl.gz"
AGENT_FILE: Final = "claude_code_sessions_dev.jsonl.gz"
_PER_BLOCK: Final = BLOCK_TOKENS // 64
_MADE_UP_SESSIONS: Final = 384
_SEED: Final = 4

Blocks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Request:
    """at_s: since the trace began. ends: the blocks of its session, if this is the last request of one."""

    at_s: float
    tokens: int
    blocks: Blocks
    ends: Blocks | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    requests: list[Request]
    unique: int  # blocks
    made_up: bool = False

    @property
    def uses(self) -> int:
        """Blocks asked for, over all requests."""
        return sum(len(request.blocks) for request in self.requests)

    def head(self, requests: int, uses: int) -> Trace:
        """The first requests only, at most so many and with so many uses of blocks; numbered anew."""
        some: list[Request] = []
        for request in self.requests[:requests]:
            uses -= len(request.blocks)
            if uses < 0:
                break
            some.append(request)
        if len(some) == len(self.requests):
            return self
        numbers = {block: at for at, block in enumerate(dict.fromkeys(b for one in some for b in one.blocks.tolist()))}

        def renumbered(blocks: Blocks) -> Blocks:
            return np.array([numbers[block] for block in blocks.tolist() if block in numbers], np.int64)

        made = [
            Request(one.at_s, one.tokens, renumbered(one.blocks), None if one.ends is None else renumbered(one.ends))
            for one in some
        ]
        return Trace(self.name, made, len(numbers), self.made_up)


def load(folder: Path | None) -> list[Trace]:
    """Those of the two public traces that are in `folder`; without a folder, the made-up one.

    Raises InvalidArgument where a folder has neither, or a file is not what its name says."""
    if folder is None:
        return [_agents("made-up agents", _made_up(), made_up=True)]
    kinds: tuple[tuple[str, Callable[[Iterable[Any]], Trace]], ...] = (
        (CHAT_FILE, _chat),
        (AGENT_FILE, lambda rows: _agents("agents", rows)),
    )
    found: list[Trace] = []
    for file, make in kinds:
        if (folder / file).is_file():
            try:
                found.append(make(_rows(folder / file)))
            except InvalidArgument:
                raise
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise InvalidArgument(f"{folder / file}: not the trace of that name ({error!r})") from error
    if not found:
        raise InvalidArgument(f"{folder}: holds neither {CHAT_FILE} nor {AGENT_FILE}")
    return found


def _rows(path: Path) -> Iterator[Any]:
    try:
        with gzip.open(path, "rt") as file:
            yield from map(json.loads, file)
    except (OSError, EOFError, ValueError) as error:
        raise InvalidArgument(f"{path}: not gzipped lines of JSON ({error})") from error


def _chat(rows: Iterable[Any]) -> Trace:
    numbers: dict[int, int] = {}
    requests = [
        Request(
            row["timestamp"] / 1000,
            row["input_length"],
            np.array([numbers.setdefault(one, len(numbers)) for one in row["hash_ids"]], np.int64),
        )
        for row in rows
    ]
    requests.sort(key=lambda one: one.at_s)
    return Trace("chat", requests, len(numbers))


def _agents(name: str, rows: Iterable[Any], *, made_up: bool = False) -> Trace:
    rng = random.Random(_SEED)
    sessions = list(rows)
    window_s = sum(session["requests"][-1]["t"] for session in sessions) / SESSIONS_AT_A_TIME
    requests: list[Request] = []
    count = 0
    for session in sessions:
        begins_s, at_s = rng.uniform(0, window_s), 0.0
        numbers: dict[int, int] = {}
        for place, row in enumerate(session["requests"], 1):
            ids = np.concatenate([np.arange(first, first + length) for first, length in row["runs"]])
            blocks = np.array(
                [numbers.setdefault(one, count + len(numbers)) for one in ids[_PER_BLOCK - 1 :: _PER_BLOCK].tolist()],
                np.int64,
            )
            at_s = max(at_s, float(row["t"]))  # a few are recorded out of order
            every = np.arange(count, count + len(numbers)) if place == len(session["requests"]) else None
            requests.append(Request(begins_s + at_s, row["in"], blocks, every))
        count += len(numbers)
    requests.sort(key=lambda one: one.at_s)
    return Trace(name, requests, count, made_up)


def _made_up() -> Iterator[Any]:
    """Agent sessions in the form of the public trace: each request extends the last one's prefix, every fourth rewrites
    its tail. A third of the sessions end after their first request."""
    for number in range(_MADE_UP_SESSIONS):
        rng = random.Random(1000 + number)
        prefix: list[int] = []
        next_id, at_s = 1, 0.0
        requests = []
        for turn in range(1 if number % 3 == 0 else 12):
            if turn % 4 == 3:
                prefix = prefix[: len(prefix) - rng.randint(1, len(prefix) // 4)]
                next_id += 1
            grown = rng.randint(200, 400) if turn == 0 else rng.randint(8, 64)
            prefix += range(next_id, next_id + grown)
            next_id += grown
            cuts = [0, *(at for at in range(1, len(prefix)) if prefix[at] != prefix[at - 1] + 1), len(prefix)]
            runs = [[prefix[a], b - a] for a, b in pairwise(cuts)]
            requests.append({"t": at_s, "in": len(prefix) * 64 + rng.randrange(64), "runs": runs})
            at_s += rng.uniform(2.0, 60.0)
        yield {"requests": requests}
