"""What happens in the demo, in order, and whether each step did what it says. Runs no model itself."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from perdure import limits, store
from perdure.demo import agents
from perdure.demo.model import BLOCK_TOKENS
from perdure.demo.process import CONNECT_S, DemoError, Progress
from perdure.demo.report import Stage
from perdure.demo.service import Service
from perdure.demo.worker import QUESTION, QUESTIONS, SESSION
from perdure.service.client import connect
from perdure.session import ACCEPTED, MISSING, REJECTED

_CONTEXT_TOKENS_MIN = 4 * BLOCK_TOKENS


def play(
    directory: Path, *, context_tokens: int | None, answer_tokens: int, model_cache: Path | None
) -> dict[str, Any]:
    """All scenes. Returns a JSON-able outcome: `ok`, `rows` of the table, `flip`, `checks` by name, and the figures."""
    if context_tokens is not None and context_tokens < _CONTEXT_TOKENS_MIN:
        raise DemoError(f"tokens={context_tokens}: at least {_CONTEXT_TOKENS_MIN} are needed for a few full blocks")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perdure-demo-") as logits, Stage() as stage:
        run = secrets.token_hex(4)  # a store that has seen the demo before has not seen this session
        model = stage.scene("model", {"kind": "prepare", "model_cache": str(model_cache or default_model_cache()),
                                      "context_tokens": context_tokens, "run": run})  # fmt: skip
        ready = time.monotonic()
        job = model | {
            "store": str(directory), "answer_tokens": answer_tokens, "logits": logits, "session": f"{SESSION}-{run}",
            "resume": (len(model["prompt"]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS,
        }  # fmt: skip
        told = _scenes(stage, directory, job)
        rows = _rows(told, logits)
    checks, cold = _checks(job, told, rows), told["cold"]
    return {
        "ok": all(checks.values()),
        "checks": checks,
        "rows": rows,
        "flip": told["flip"],
        "storm": told["agents"]["turns"][-1]["killed"],
        "store": str(directory),
        "model": {"directory": model["model"], "weights": cold["weights"], "digest_s": round(cold["digest_s"], 3)},
        "context_tokens": model["context"],
        "block_tokens": BLOCK_TOKENS,
        "stored": {
            key: cold[key] for key in ("stored_blocks", "present_blocks", "stored_bytes", "store_s")
        },
        "killed_by_signal": cold["signal"],
        "service_killed_by_signal": told["service_signals"],
        "setup_s": round(ready - began, 1),
        "scenes_s": stage.seconds,
        "seconds": round(time.monotonic() - ready, 1),
    }  # fmt: skip


def _scenes(stage: Stage, directory: Path, job: dict[str, Any]) -> dict[str, Any]:
    """What each process told, by the name of its scene; the service is replaced three times."""
    told: dict[str, Any] = {}
    signals: list[int] = []
    with Service(directory) as service:

        def start(note: Progress) -> None:
            note("starting", 0, None)
            service.start()

        def replace(note: Progress) -> None:
            signals.append(service.kill())
            start(note)

        def flip_and_replace(note: Progress) -> dict[str, Any]:
            flip = _flip(directory, told["cold"]["keys"])
            replace(note)  # what it had of the block in memory hid the flip
            return flip

        stage.during("service", start)
        told["cold"] = stage.killed("cold", job | {"kind": "cold", "stay": True})
        told["shared"], told["restored"] = stage.interrupted(
            "restored", job | {"kind": "outlives", "token": told["cold"]["token"]}, replace
        )
        told["agents"] = stage.during("agents", lambda note: agents.play(job, note, replace))
        told["reference"] = stage.scene("compare", job | {"kind": "reference"})
        told["flip"] = stage.during("flip", flip_and_replace)
        told["flipped"] = stage.scene("flipped", job | {"kind": "restored", "name": "flipped"})
        told["flip"] |= _look_again(directory, told["flip"])
    return told | {"service_signals": signals}


def default_model_cache() -> Path:
    chosen = os.environ.get("PERDURE_MODEL_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perdure"


# --- the flipped byte
def _flip(directory: Path, keys: list[str]) -> dict[str, Any]:
    """Flip one byte of the payload of a block in the middle of the prefix; say what the store knows about the block."""
    position = len(keys) // 2
    key = bytes.fromhex(keys[position])
    with connect(directory, wait_s=CONNECT_S, name="demo flip") as client:
        where = client.explain(key)
        if not where["present"]:
            raise DemoError(f"block {key.hex()} is not in the store: {where['verdict']}")
        path, offset = directory / where["file"], where["record"]["offset"] + limits.page_bytes
        offset += where["record"]["stored_bytes"] // 2
        with path.open("r+b", buffering=0) as file:
            byte = os.pread(file.fileno(), 1, offset)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 0xFF]), offset)
            os.fsync(file.fileno())
        verdict = client.explain(key)["verdict"]  # reads the disk, never the service's memory
    return {"key": key.hex(), "position": position, "file": where["file"], "offset": offset, "verdict": verdict}


def _look_again(directory: Path, flip: dict[str, Any]) -> dict[str, Any]:
    """What the service says after the question was asked again; beside it, whether all that is stored verifies."""
    with connect(directory, wait_s=CONNECT_S, name="demo look") as client:
        after = client.explain(bytes.fromhex(flip["key"]))
    with store.open(directory, read_only=True, memory=0) as looking:
        verified = looking.verify()
    return {
        "verdict_after": after["verdict"],
        "incidents": after["incidents"],
        "verified_blocks": verified["blocks"],
        "verified": verified["ok"],
    }


# --- the report
def _rows(told: dict[str, Any], logits: str) -> list[dict[str, Any]]:
    cold = told["cold"]
    rows = [row_of(name, QUESTION, told[name], cold, logits) for name in ("cold", "shared", "restored")]
    reference = iter(told["reference"]["answers"])
    for title, questions, turn in zip(("agent", "storm"), QUESTIONS, told["agents"]["turns"], strict=True):
        for number, question in enumerate(questions):
            expected = next(reference)
            if answer := turn["answers"].get(number):
                rows.append(row_of(f"{title} {number + 1}", question, answer, expected, logits))
    return [*rows, row_of("byte flipped", QUESTION, told["flipped"], cold, logits)]


def row_of(name: str, question: str, ours: dict[str, Any], cold: dict[str, Any], logits: str) -> dict[str, Any]:
    mine, theirs = (np.load(Path(logits) / f"{answer['name']}.npy") for answer in (ours, cold))
    both = min(len(mine), len(theirs))
    restored = ours.get("restored_bytes", 0)
    recomputed = len(ours.get("recomputed_blocks", ()))
    return {
        "name": name,
        "question": question,
        "first_token_s": ours["first_token_s"],
        "cold_first_token_s": cold["first_token_s"],
        "prefilled_tokens": ours["prefilled_tokens"] + recomputed * BLOCK_TOKENS,
        "prompt_tokens": ours["prompt_tokens"],
        "restored_tokens": ours.get("restored_tokens", 0),
        "restored_bytes": restored,
        "restored_blocks": ours.get("restored_blocks", 0),
        "from_memory_blocks": ours.get("from_memory_blocks", 0),
        "restored_bytes_per_s": restored / ours["restored_s"] if restored else 0.0,
        "recomputed_blocks": recomputed,
        "tokens_identical": ours["tokens"] == cold["tokens"],
        "logits_differ_max": float(np.abs(mine[:both] - theirs[:both]).max()),
        "text": ours["text"],
    }


def _checks(job: dict[str, Any], told: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, bool]:
    cold, shared, restored, flipped, flip = (told[name] for name in ("cold", "shared", "restored", "flipped", "flip"))
    before = [shared, restored, *(one for turn in told["agents"]["turns"] for one in turn["answers"].values())]
    accepted, again = shared["adopted"]
    return {
        "all answers are identical to the cold ones": all(row["tokens_identical"] for row in rows),
        "the cold process was killed with SIGKILL": cold["signal"] == signal.SIGKILL,
        "its session went on in the next process": {*cold["session"], accepted} == {ACCEPTED}
        and shared["session_is_prompt"],
        "and the token of the hand-off worked once": again in (REJECTED, MISSING),
        "the service was killed with SIGKILL each time": told["service_signals"] == [signal.SIGKILL] * 3,
        "a client went on with the new service": shared["boot"] != restored["boot"] and restored["restored_blocks"] > 0,
        "which had everything on its disk": not restored["from_memory_blocks"]
        and restored["restored_blocks"] == shared["restored_blocks"],
        "the new process prefilled less than one block": restored["prefilled_tokens"] <= BLOCK_TOKENS,
        "every agent found the branch made for it": {*restored["branches"]} == {ACCEPTED}
        and {*told["agents"]["blocks"]} == {job["context"] // BLOCK_TOKENS},
        **agents.checks(job, told["agents"]),
        "nothing was recomputed before the flip": not any(one["recomputed_blocks"] for one in before),
        "explain names the flipped block as corrupt": flip["verdict"].startswith("corrupt"),
        "exactly the flipped block was recomputed": flipped["recomputed_blocks"] == [flip["position"]],
        "and stored again": flipped["stored_again"] == 1 and flip["verdict_after"].startswith("hit"),
        "explain remembers the incident": bool(flip["incidents"]) and flip["incidents"][-1]["kind"] == "corrupt",
        "every block of the store verifies": flip["verified"],
    }
