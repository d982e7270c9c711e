"""The demo's agents: three branches of one session, each in a process of its own, asked at the same moment.

The first time all of them answer, and one of them has prefilled what is new to all. Before the second time the service
is killed with SIGKILL, and during it the agent that prefills, after the first piece it has stored: the others answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from perdure.demo.model import BLOCK_TOKENS
from perdure.demo.process import Child, Progress
from perdure.demo.worker import QUESTIONS

AGENTS = len(QUESTIONS[0])


def play(job: dict[str, Any], note: Progress, replace: Callable[[Progress], None]) -> dict[str, Any]:
    """blocks: of each branch at its start. turns: of each, the `answers` by agent, and who was `killed`, if any."""
    with ThreadPoolExecutor(AGENTS) as pool, contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(Child(job | {"kind": "agent", "number": number}, note)) for number in range(AGENTS)
        ]
        begun = list(pool.map(Child.result, children))
        first = _turn(pool, children, kill=False)
        replace(note)
        second = _turn(pool, children, kill=True)
    return {"blocks": [one["blocks"] for one in begun], "turns": [first, second]}


def _turn(pool: ThreadPoolExecutor, children: list[Child], *, kill: bool) -> dict[str, Any]:
    answers, killed = dict[int, dict[str, Any]](), dict[str, Any]()
    for child in children:
        child.go_on()
    waiting: dict[Future[dict[str, Any]], int] = {
        pool.submit(child.result): number for number, child in enumerate(children)
    }
    while waiting:
        for done in wait(waiting, return_when=FIRST_COMPLETED).done:
            number, told = waiting.pop(done), done.result()
            child = children[number]
            if "holding" not in told:
                answers[number] = told
                continue
            if kill and not killed:
                child.kill()
                killed = {"number": number, "stored_tokens": told["holding"], "signal": -child.process.returncode}
                continue
            child.go_on()
            waiting[pool.submit(child.result)] = number
    return {"answers": answers, "killed": killed}


def checks(job: dict[str, Any], told: dict[str, Any]) -> dict[str, bool]:
    """Whether each turn cost one prefill, and what was survived."""
    before = job["context"] // BLOCK_TOKENS * BLOCK_TOKENS
    works = list[bool]()
    for turn in told["turns"]:
        answers, killed = turn["answers"].values(), turn["killed"]
        end = max(answer["shared_tokens"] for answer in answers)
        computed = sum(answer["computed_tokens"] for answer in answers)
        if killed:
            computed += killed["stored_tokens"] - before
        works.append(end - before > 0 and computed <= 1.05 * (end - before))
        before = end
    first, second = told["turns"]
    return {
        "three branches at once cost one prefill": works[0] and len(first["answers"]) == AGENTS,
        "the agent that prefilled was killed with SIGKILL": second["killed"].get("signal") == 9,
        "another went on where it had stopped": works[1] and len(second["answers"]) == AGENTS - 1,
    }
