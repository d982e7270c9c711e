"""Rows of `bench engines`: a replay of agent sessions on two vLLM processes, and how many tokens they prefill.

Contract: the sessions grow turn by turn, as in the public agent traces but smaller, and every fourth turn rewrites the
end of its context. A session's turns go to both processes in turns, as a router without affinity sends them; their
caches hold less than all sessions. The same requests run twice: with a salt of their own and nothing stored, so that
only vLLM's own prefix caches help, and with Perdure. Prefilled is what a prompt has less what vLLM calls cached.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from perdure.benchmarks.engines_connector import BLOCK_TOKENS, Place, engine, prompt, warmed
from perdure.benchmarks.harness import Row, row
from perdure.testing.vllm_offline import OfflineEngine

_SYSTEM_BLOCKS = 4  # the same for all sessions
_CACHE_BLOCKS = 64  # of each process
_LENGTH_TOKENS = 4096
_SESSIONS, _TURNS = 8, 6
_QUICK_SESSIONS, _QUICK_TURNS = 3, 3
_REWRITES = 4  # every so many turns


def requests(sessions: int, turns: int) -> Iterator[tuple[int, list[int]]]:
    """(session, prompt), turn after turn."""
    rng = random.Random(5)
    system = prompt(1, _SYSTEM_BLOCKS * BLOCK_TOKENS)
    talks = [[*system, *prompt(100 + number, 3 * BLOCK_TOKENS)] for number in range(sessions)]
    for turn in range(turns):
        for number in rng.sample(range(sessions), sessions):
            talk = talks[number]
            if turn % _REWRITES == _REWRITES - 1:  # the agent compacts its history
                del talk[-rng.randrange(BLOCK_TOKENS, 3 * BLOCK_TOKENS) :]
            talk += prompt(1000 * turn + number + 7, rng.randrange(BLOCK_TOKENS // 2, 2 * BLOCK_TOKENS))
            yield number, list(talk)


def _replayed(pair: tuple[OfflineEngine, OfflineEngine], sessions: int, turns: int, **options: Any) -> tuple[int, int]:
    """Tokens in all, and prefilled."""
    asked = prefilled = 0
    for at, (number, tokens) in enumerate(requests(sessions, turns)):
        turn = at // sessions
        [answer] = pair[(number + turn) % 2].generate([tokens], max_tokens=4, **options)
        asked += len(tokens)
        prefilled += len(tokens) - (answer.cached_tokens or 0)
    return asked, prefilled


def rows(base: Path, model: Path, step: Callable[[str], None], *, quick: bool) -> list[Row]:
    """Raises EngineFailed, ServiceFailed."""
    sessions, turns = (_QUICK_SESSIONS, _QUICK_TURNS) if quick else (_SESSIONS, _TURNS)
    more = {"num_gpu_blocks_override": _CACHE_BLOCKS, "max_model_len": _LENGTH_TOKENS}
    with (
        Place(base) as place,
        engine(model, base, "one", place.url, **more) as one,
        engine(model, base, "two", place.url, **more) as two,
    ):
        warmed((one, two))
        step("a replay with vLLM's own prefix caches")
        asked, local = _replayed((one, two), sessions, turns, salt="alone", params={"max_store_tokens": 0})
        step("the same with Perdure")
        _, ours = _replayed((one, two), sessions, turns)
    name = f"vLLM, {sessions} agent sessions of {turns} turns on two processes: tokens prefilled"
    note = f"{asked:,} tokens were asked"
    return [
        row(name, "tokens", [ours], [local], "vLLM's own prefix caches", better="lower", note=note),
        row(f"{name}, beside no cache", "tokens", [ours], [asked], "no cache", better="lower"),
    ]
