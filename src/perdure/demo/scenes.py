"""What happens in the demo, in order, and whether each step did what it says. Runs no model itself."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from perdure import limits, store
from perdure.demo.process import DemoError
from perdure.demo.report import Stage
from perdure.demo.worker import BLOCK_TOKENS

_CONTEXT_TOKENS_MIN = 4 * BLOCK_TOKENS


def play(
    directory: Path, *, context_tokens: int | None, answer_tokens: int, model_cache: Path | None
) -> dict[str, Any]:
    """All scenes. Returns a JSON-able outcome: `ok`, `rows` of the table, `flip`, `checks` by name, and the figures."""
    if context_tokens is not None and context_tokens < _CONTEXT_TOKENS_MIN:
        raise DemoError(f"tokens={context_tokens}: at least {_CONTEXT_TOKENS_MIN} are needed for a few full blocks")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perdure-demo-") as logits, Stage() as stage:
        model = stage.scene("model", {"kind": "prepare", "model_cache": str(model_cache or default_model_cache()),
                                      "context_tokens": context_tokens})  # fmt: skip
        ready = time.monotonic()
        job = {
            "model": model["model"], "prompts": model["prompts"], "context": model["context"], "store": str(directory),
            "answer_tokens": answer_tokens, "logits": logits, "resume": _resume_points(model),
        }  # fmt: skip
        cold = stage.killed("cold", job | {"kind": "cold", "stay": True})
        restored = stage.scene("restored", job | {"kind": "restored", "name": "restored"})
        forked = stage.scene("forked", job | {"kind": "forked"})
        reference = stage.scene("compare", job | {"kind": "reference"})
        flip = _flip(directory, cold["keys"])
        flipped = stage.scene("flipped", job | {"kind": "restored", "name": "flipped"})
        flip |= _look_again(directory, flip)
        rows = [_row("cold", cold, cold, logits), _row("restored", restored, cold, logits)]
        for number, answer in enumerate(forked["answers"]):
            figures = answer | ({key: forked[key] for key in _RESTORE} if number == 0 else {})
            figures["first_token_s"] += forked["restore_s"] if number == 0 else 0.0
            rows.append(_row(f"fork {number + 1}", figures, reference["answers"][number], logits))
        rows.append(_row("byte flipped", flipped, cold, logits))
    checks = _checks(cold, restored, forked, flipped, flip, rows)
    return {
        "ok": all(checks.values()),
        "checks": checks,
        "rows": rows,
        "flip": flip,
        "store": str(directory),
        "model": {"directory": model["model"], "weights": cold["weights"], "digest_s": round(cold["digest_s"], 3)},
        "context_tokens": model["context"],
        "block_tokens": BLOCK_TOKENS,
        "questions": model["questions"],
        "stored": {
            key: cold[key] for key in ("stored_blocks", "present_blocks", "stored_bytes", "store_s")
        },
        "killed_by_signal": cold["signal"],
        "setup_s": round(ready - began, 1),
        "scenes_s": stage.seconds,
        "seconds": round(time.monotonic() - ready, 1),
    }  # fmt: skip


def default_model_cache() -> Path:
    chosen = os.environ.get("PERDURE_MODEL_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perdure"


def _resume_points(model: dict[str, Any]) -> list[int]:
    """Where a restored run takes over from the store, per prompt: after the blocks that are stored for it."""
    first, *branches = model["prompts"]
    shared = (model["context"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return [(len(first) - 1) // BLOCK_TOKENS * BLOCK_TOKENS] + [shared] * len(branches)


# --- the flipped byte
def _flip(directory: Path, keys: list[str]) -> dict[str, Any]:
    """Flip one byte of the payload of a block in the middle of the prefix; say what the store knows about the block."""
    position = len(keys) // 2
    key = bytes.fromhex(keys[position])
    with store.open(directory, read_only=True, memory=0) as looking:
        where = looking.explain(key)
        if not where["present"]:
            raise DemoError(f"block {key.hex()} is not in the store: {where['verdict']}")
        path, offset = directory / where["file"], where["record"]["offset"] + limits.page_bytes
        offset += where["record"]["stored_bytes"] // 2
        with path.open("r+b", buffering=0) as file:
            byte = os.pread(file.fileno(), 1, offset)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 0xFF]), offset)
            os.fsync(file.fileno())
        verdict = looking.explain(key)["verdict"]
    return {"key": key.hex(), "position": position, "file": where["file"], "offset": offset, "verdict": verdict}


def _look_again(directory: Path, flip: dict[str, Any]) -> dict[str, Any]:
    """What the store says after the question was asked again, and whether everything in it verifies."""
    with store.open(directory, read_only=True, memory=0) as looking:
        after = looking.explain(bytes.fromhex(flip["key"]))
        verified = looking.verify()
    return {
        "verdict_after": after["verdict"],
        "incidents": after["incidents"],
        "verified_blocks": verified["blocks"],
        "verified": verified["ok"],
    }


# --- the report
_RESTORE = ("restored_tokens", "restored_bytes", "restored_s", "recomputed_blocks")


def _row(name: str, ours: dict[str, Any], cold: dict[str, Any], logits: str) -> dict[str, Any]:
    mine, theirs = (np.load(Path(logits) / f"{answer['name']}.npy") for answer in (ours, cold))
    both = min(len(mine), len(theirs))
    restored = ours.get("restored_bytes", 0)
    recomputed = len(ours.get("recomputed_blocks", ()))
    return {
        "name": name,
        "first_token_s": ours["first_token_s"],
        "cold_first_token_s": cold["first_token_s"],
        "prefilled_tokens": ours["prefilled_tokens"] + recomputed * BLOCK_TOKENS,
        "prompt_tokens": ours["prompt_tokens"],
        "restored_tokens": ours.get("restored_tokens", 0),
        "restored_bytes": restored,
        "restored_bytes_per_s": restored / ours["restored_s"] if restored else 0.0,
        "recomputed_blocks": recomputed,
        "tokens_identical": ours["tokens"] == cold["tokens"],
        "logits_differ_max": float(np.abs(mine[:both] - theirs[:both]).max()),
        "text": ours["text"],
    }


def _checks(
    cold: dict[str, Any],
    restored: dict[str, Any],
    forked: dict[str, Any],
    flipped: dict[str, Any],
    flip: dict[str, Any],
    rows: list[dict[str, Any]],
) -> dict[str, bool]:
    return {
        "all answers are identical to the cold ones": all(row["tokens_identical"] for row in rows),
        "the cold process was killed with SIGKILL": cold["signal"] == signal.SIGKILL,
        "the new process prefilled less than one block": restored["prefilled_tokens"] <= BLOCK_TOKENS,
        "nothing was recomputed before the flip": not restored["recomputed_blocks"] and not forked["recomputed_blocks"],
        "explain names the flipped block as corrupt": flip["verdict"].startswith("corrupt"),
        "exactly the flipped block was recomputed": flipped["recomputed_blocks"] == [flip["position"]],
        "and stored again": flipped["stored_again"] == 1 and flip["verdict_after"].startswith("hit"),
        "explain remembers the incident": bool(flip["incidents"]) and flip["incidents"][-1]["kind"] == "corrupt",
        "every block of the store verifies": flip["verified"],
    }
