"""One process of the demo: loads the model, does one job, says what it measured.

Started as `python -m perdure.demo.worker` by `demo.process`, which says how they talk. Jobs: `prepare` (model and token
ids), `cold` (prefill, answer, store, hand the session off, then wait to be killed), `outlives` (goes on with that
session; asks before and after the service is replaced, and makes the branches), `agent` (one of those), `fork` (one
question to a branch), `reference` (the same questions without a store), `restored`. All but `prepare` and `reference`
are clients of the service.

Measuring: time to first token begins when the token ids are there and ends with the first token of the answer. Loading
the model and its one-time costs are not in it: every process runs a warm-up of 1,024 other tokens first.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import resources
from typing import Any

from perdure.demo.model import BLOCK_TOKENS, Run, note, pause, say
from perdure.errors import InvalidArgument

SESSION = "guide"
TURNS = 2  # of the agents
HANDOFF_TTL_S = 600.0
_WAIT_S = 120.0  # for a prefix that another agent computes
_PIECES = 3  # in which an agent computes and stores what is new to all
_SECTION_TOKENS_MAX = 768

QUESTION = "What does a write of the class session survive?"
QUESTIONS = (  # of each agent, by turn
    (
        "How long does a lease last?",
        "What is a pin for?",
        "What is a release?",
    ),
    (
        "How many processes may write to a directory at a time?",
        "Which blocks may be gone after a power cut?",
        "What happens to a process that was paused for a long time?",
    ),
)
FORK_QUESTION = QUESTIONS[0][0]
_LOOKED_UP = ("8.", "7.")  # the section of the guide that all agents look up before they ask, by turn


# --- jobs
def prepare(job: dict[str, Any]) -> dict[str, Any]:
    """Model directory, and the token ids of all prompts: one shared context, then a question each."""
    from transformers import AutoTokenizer

    from perdure.engines.smollm import model_path

    model = model_path(job["model_cache"], note)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    guide = (resources.files("perdure.demo") / "guide.md").read_text(encoding="utf-8")
    mark = "\0"
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{guide}\n\n{mark}"}], tokenize=False, add_generation_prompt=True
    )
    head, tail = whole.split(mark)
    context = tokenizer(head, add_special_tokens=False).input_ids
    if (job["context_tokens"] or 0) > len(context):
        raise InvalidArgument(f"tokens={job['context_tokens']}: the guide has {len(context)}")
    context = context[: job["context_tokens"]]

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return found

    def ask(question: str) -> list[int]:
        return ids(f"Question: {question} Answer in one sentence.{tail}")

    shared, prompts = list[list[int]](), list[list[list[int]]]()
    before = context + ids(f"Run {job['run']}. ")
    most = min(_SECTION_TOKENS_MAX, len(context) // 4 // BLOCK_TOKENS * BLOCK_TOKENS)
    sections = guide.split("\n## ")
    for name, questions in zip(_LOOKED_UP, QUESTIONS, strict=True):
        section = next(text for text in sections if text.startswith(name))
        before = before + ids(f"\n\n{section}\n")[:most]
        shared.append(before)
        prompts.append([before + ask(question) for question in questions])
    return {
        "model": str(model), "context": len(context), "prompt": context + ask(QUESTION),
        "fork": context + ask(FORK_QUESTION), "shared": shared, "prompts": prompts,
        "section_tokens": most,
    }  # fmt: skip


def cold(job: dict[str, Any]) -> dict[str, Any]:
    run = Run(job)
    prefixes = run.prefixes()
    prompt = job["prompt"]
    answer = run.answer(prompt, run.empty(), 0, job["resume"], "cold")
    note("storing blocks", 0)
    report = prefixes.store(prompt + answer["tokens"], run.cache)
    if not report.durable:
        raise RuntimeError(f"not every block was stored: {sorted(set(report.reasons.values()))}")
    session = prefixes.space.session(job["session"], ttl_s=HANDOFF_TTL_S)
    extended = session.extend(prefixes.space.chain(prompt))
    handed = session.handoff(ttl_s=HANDOFF_TTL_S)
    return answer | {
        "token": handed.token.hex(), "session": [extended.outcome, handed.outcome],
        "stored_blocks": report.stored, "present_blocks": len(report.statuses), "stored_bytes": report.bytes,
        "store_s": report.seconds, "weights": prefixes.space.identity.weights,
        "keys": [key.tobytes().hex() for key in prefixes.space.chain(prompt)], "digest_s": run.digest_s,
    }  # fmt: skip


def reference(job: dict[str, Any]) -> dict[str, Any]:
    """The agents' answers without any store: what they share is prefilled once here, and its time counted for each."""
    run = Run(job)
    cache, length, shared_s, answers = run.empty(), 0, 0.0, list[dict[str, Any]]()
    for turn, shared in enumerate(job["shared"]):
        started = time.perf_counter()
        end = _full(len(shared))
        run.prefill(shared[: end + 1], cache, length, end, f"prefill {turn + 1} of {TURNS}")
        shared_s += time.perf_counter() - started
        for number, prompt in enumerate(job["prompts"][turn]):
            _shorten(cache, end)
            answer = run.answer(prompt, cache, end, end, f"reference{turn}{number}")
            answers.append(answer | {"first_token_s": answer["first_token_s"] + shared_s})
        _shorten(cache, end)
        length = end
    return {"answers": answers}


def _shorten(cache: Any, tokens: int) -> None:
    """Negative, by how much: newer transformers take nothing else."""
    if (more := int(cache.get_seq_length()) - tokens) > 0:
        cache.crop(-more)


def _full(tokens: int) -> int:
    """What a restored run need not compute: full blocks, and at least one token is left."""
    return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def restored(job: dict[str, Any]) -> dict[str, Any]:
    """The same question in a new process; blocks that had to be computed are stored again."""
    run = Run(job)
    with run.store:
        return _ask_again(run, run.prefixes(), job["name"])


def outlives(job: dict[str, Any]) -> dict[str, Any]:
    """Goes on with the session it was handed: asks twice through one client; between, the service is replaced."""
    run = Run(job)
    with run.store:
        prefixes = run.prefixes()
        token = bytes.fromhex(job["token"])
        adopted, again = prefixes.space.adopt(token), prefixes.space.adopt(token)
        session = adopted.session
        held = session.keys()
        wanted = prefixes.space.chain(job["prompt"])
        first = _ask_again(run, prefixes, "shared")
        say({"result": first | {
            "boot": run.store.service_status()["boot"], "adopted": [adopted.outcome, again.outcome],
            "session_is_prompt": held.shape == wanted.shape and bool((held == wanted).all()),
        }})  # fmt: skip
        pause()
        second = _ask_again(run, prefixes, "restored")
        names = [f"{job['session']}/{number + 1}" for number in range(len(QUESTIONS[0]))]
        branches = [session.branch(name, at=job["context"] // BLOCK_TOKENS).outcome for name in names]
        return second | {"boot": run.store.service_status()["boot"], "branches": branches}


def _ask_again(run: Run, prefixes: Any, name: str) -> dict[str, Any]:
    prompt = run.job["prompt"]
    started = time.perf_counter()
    back = prefixes.restore(prompt)
    answer = run.answer(prompt, back.cache, back.tokens, back.tokens, name, started=started)
    written = prefixes.store(prompt + answer["tokens"], back.cache, back)
    return answer | _brought_back(back) | {"stored_again": written.stored}


def agent(job: dict[str, Any]) -> dict[str, Any]:
    """One branch. In each turn all agents look up the same section, and ask their own questions at the same moment: one
    of them prefills it, and holds on after the first piece of it until the parent says go on (or kills it)."""
    run, number = Run(job), job["number"]
    with run.store:
        prefixes = run.prefixes()
        session = prefixes.space.find_session(f"{job['session']}/{number + 1}")
        say({"result": {"blocks": session.blocks}})
        turns = list[dict[str, Any]]()
        for turn, shared in enumerate(job["shared"]):
            pause()
            turns.append(_turn(run, prefixes, session, turn, shared))
            say({"result": turns[-1]})
    return {}


def fork(job: dict[str, Any]) -> dict[str, Any]:
    """Another question about what the first branch of the session holds."""
    run = Run(job)
    with run.store:
        prefixes = run.prefixes()
        session = prefixes.space.find_session(f"{job['session']}/1")
        started = time.perf_counter()
        back = prefixes.restore(job["fork"])
        answer = run.answer(job["fork"], back.cache, back.tokens, back.tokens, "fork", started=started)
        return answer | _brought_back(back) | {"blocks": session.blocks}


def _turn(run: Run, prefixes: Any, session: Any, turn: int, shared: list[int]) -> dict[str, Any]:
    from perdure.engines.prefill import prefill_once

    job, number = run.job, run.job["number"]
    pieces = list[int]()

    def stored(tokens: int) -> None:
        pieces.append(tokens)
        if len(pieces) == 1:
            say({"result": {"holding": tokens}})
            pause()

    started = time.perf_counter()
    made = prefill_once(
        prefixes, shared, wait_s=_WAIT_S, step_tokens=max(BLOCK_TOKENS, job["section_tokens"] // _PIECES), note=stored
    )
    back, prompt = made.restored, job["prompts"][turn][number]
    answer = run.answer(prompt, back.cache, back.tokens, back.tokens, f"agent{turn}{number}", started=started)
    prefixes.store(prompt + answer["tokens"], back.cache, back)
    extended = session.extend(prefixes.space.chain(shared)[session.blocks :])
    return answer | _brought_back(back) | {
        "computed_tokens": made.computed_tokens, "shared_tokens": back.tokens, "session": extended.outcome,
        "prefilled_tokens": answer["prefilled_tokens"] + made.computed_tokens,
    }  # fmt: skip


def _brought_back(back: Any) -> dict[str, Any]:
    report = back.report
    return {
        "restored_blocks": int(back.held.sum()), "from_memory_blocks": report.from_memory,
        "restored_tokens": back.tokens - len(back.recomputed) * BLOCK_TOKENS,
        "recomputed_blocks": list(back.recomputed), "restored_bytes": report.bytes, "restored_s": report.seconds,
        "problems": {str(position): why for position, why in report.problems.items()},
    }  # fmt: skip


_JOBS = {
    "prepare": prepare, "cold": cold, "reference": reference, "restored": restored, "outlives": outlives,
    "agent": agent, "fork": fork,
}  # fmt: skip


def main() -> int:
    job = json.loads(sys.stdin.readline())
    try:
        say({"result": _JOBS[job["kind"]](job)})
    except Exception as error:  # noqa: BLE001 (the parent shows it)
        import traceback

        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    if job.get("stay"):
        sys.stdin.read()  # until the parent kills this process, or dies itself
    return 0


if __name__ == "__main__":
    sys.exit(main())
