"""What happens in the demo with vLLM, in order, and whether each step did what it says.

Two servers share one service. An agent talks with A; A's whole process group is killed between two turns; B goes on
from what A stored, and three sub-agents branch off at once. Each question is asked again with a salt nobody has used,
which makes it a cold one on the same server: its answer must be the same, token by token, and its time is beside.
"""

from __future__ import annotations

import functools
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure.demo import vllm_flip, vllm_talk
from perdure.demo.process import Progress
from perdure.demo.report import Stage
from perdure.demo.scenes import default_model_cache
from perdure.demo.service import Service
from perdure.demo.vllm_flip import BLOCK_TOKENS
from perdure.engines import smollm
from perdure.testing.vllm_client import Answer, ask, ask_at_once
from perdure.testing.vllm_process import connector
from perdure.testing.vllm_server import VllmServer

# Greedy; the small model repeats itself for ever without the penalty.
_ANSWER: dict[str, Any] = {"max_tokens": 24, "repetition_penalty": 1.3}
MODEL_TOKENS = 6144
TITLES = {
    "model": "model",
    "service": "the service",
    "servers": "vLLM servers A and B start",
    "warm": "warm both",
    "first": "1 an agent talks with A",
    "kill": "2 A is killed",
    "later": "3 it goes on with B",
    "branch": "4 three sub-agents at once",
    "flip": "5 flip a byte; kill service",
    "flipped": "6 ask B about it",
    "fs": "7 the same with vLLM's fs tier",
}
# Short times: in the demo the service is away for a second, and everybody waits for it.
_SETTINGS = {"retry_s_min": 0.2, "retry_s_max": 1.0, "lookup_wait_ms_max": 2000.0}


def play(directory: Path, *, model_cache: Path | None = None, fs_tier: bool = True) -> dict[str, Any]:
    """All scenes. Returns a JSON-able outcome: `ok`, `rows` of the table, `flip`, `checks` by name, and the figures."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perdure-demo-") as name, Stage(TITLES) as stage:
        work = Path(name)
        cache = model_cache or default_model_cache()
        model = stage.during("model", lambda note: smollm.model_path(cache, note))
        told = _Play(stage, directory, work, model).run(fs_tier)
        seconds = stage.seconds
    checks = _checks(told)
    return {
        "ok": all(checks.values()),
        "checks": checks,
        "rows": told["rows"],
        "killed_processes": told["killed"],
        "flip": told["flip"],
        "fs": told.get("fs"),
        "store": str(directory),
        "block_tokens": BLOCK_TOKENS,
        "scenes_s": seconds,
        "seconds": round(time.monotonic() - began, 1),
    }


class _Play:
    """The scenes, and what they told."""

    def __init__(self, stage: Stage, directory: Path, work: Path, model: Path):
        self._stage, self._directory, self._work, self._model = stage, directory, work, model
        self._tenant = f"demo-{secrets.token_hex(4)}"  # finds nothing of an earlier run in the same store
        self._talk = vllm_talk.opening()
        self._told: dict[str, Any] = {"rows": []}

    def run(self, fs_tier: bool) -> dict[str, Any]:
        told, during = self._told, self._stage.during
        with Service(self._directory) as service:
            during("service", _quietly(service.start))
            with self._server("a") as a, self._server("b") as b:
                during("servers", _quietly(lambda: (a.wait_ready(), b.wait_ready())))
                during("warm", _quietly(lambda: [self._cold(server, vllm_talk.WARM) for server in (a, b)]))
                during("first", lambda note: self._turns("A", a, vllm_talk.FIRST_TURNS, note))
                during("kill", _quietly(lambda: self._leave(a)))
                during("later", lambda note: self._turns("B", b, vllm_talk.LATER_TURNS, note))
                during("branch", _quietly(lambda: self._branch(b)))
                told["flip"] = during("flip", _quietly(lambda: self._flip(service)))
                during("flipped", _quietly(lambda: self._ask_flipped(b)))
        if fs_tier:
            told["fs"] = during("fs", _quietly(self._fs))
        return told

    def _server(self, name: str) -> VllmServer:
        url = f"unix://{(self._directory / 'perdure.sock').resolve()}"
        transfer = connector(url, tenant=self._tenant, **_SETTINGS)
        return VllmServer(self._model, self._work / f"{name}.log", transfer=transfer, max_model_len=MODEL_TOKENS)

    def _cold(self, server: VllmServer, prompt: Any) -> Answer:
        """With a salt of its own, and not stored."""
        return ask(
            server.address, prompt, **_ANSWER, cache_salt=secrets.token_hex(8),
            kv_transfer_params={"max_store_tokens": 0},
        )  # fmt: skip

    def _turns(self, name: str, server: VllmServer, turns: tuple[str, ...], note: Progress) -> None:
        for number, says in enumerate(turns):
            note("turns", number, len(turns))
            self._talk.append({"role": "user", "content": says})
            warm = ask(server.address, self._talk, **_ANSWER)
            self._row(f"turn {len(self._talk) // 2}", name, warm, self._cold(server, self._talk))
            self._talk.append({"role": "assistant", "content": warm.text})

    def _branch(self, server: VllmServer) -> None:
        prompts = vllm_talk.branch(self._talk)
        warm = ask_at_once(server.address, prompts, **_ANSWER)
        for number, (prompt, answer) in enumerate(zip(prompts, warm, strict=True)):
            self._row(f"sub-agent {number + 1}", "B", answer, self._cold(server, prompt))

    def _leave(self, server: VllmServer) -> None:
        """A's last words are about another document, which B has never seen; then it is killed as a whole."""
        vllm_flip.settled(lambda: len(vllm_flip.seen(self._directory)))
        self._told["before"] = before = vllm_flip.seen(self._directory)
        ask(server.address, vllm_talk.audit(), **_ANSWER)
        vllm_flip.settled(lambda: len(vllm_flip.seen(self._directory)) - len(before))
        self._told["audit"] = {
            key: place for key, place in vllm_flip.seen(self._directory).items() if key not in before
        }
        self._told["killed"] = server.kill()

    def _flip(self, service: Service) -> dict[str, Any]:
        """The service is killed after it, because its memory would hide the flip."""
        flip = vllm_flip.in_store(self._directory, self._told["audit"])
        service.kill()
        service.start()
        return flip

    def _ask_flipped(self, server: VllmServer) -> None:
        prompt, flip = vllm_talk.audit(), self._told["flip"]
        cold = self._cold(server, prompt)  # meanwhile the connector finds the new service
        warm = ask(server.address, prompt, **_ANSWER)
        self._row("byte flipped", "B", warm, cold)
        after = vllm_flip.explained(self._directory, flip["key"])
        flip |= {"verdict_after": after["verdict"], "incidents": after["incidents"]}

    def _fs(self) -> dict[str, Any]:
        return vllm_flip.in_fs_tier(self._model, self._work, self._work / "fs.log", vllm_talk.audit(), _ANSWER)

    def _row(self, name: str, server: str, warm: Answer, cold: Answer) -> None:
        self._told["rows"].append({
            "name": name, "server": server, "prompt_tokens": warm.prompt_tokens,
            "cached_tokens": warm.cached_tokens or 0, "first_token_s": warm.first_token_s,
            "cold_first_token_s": cold.first_token_s, "cold_cached_tokens": cold.cached_tokens or 0,
            "tokens_identical": warm.tokens == cold.tokens, "text": warm.text,
        })  # fmt: skip


def _quietly(work: Callable[[], Any]) -> Callable[[Progress], Any]:
    return functools.partial(lambda work, note: work(), work)


def _checks(told: dict[str, Any]) -> dict[str, bool]:
    rows = {row["name"]: row for row in told["rows"]}
    agents = [row for row in told["rows"] if row["name"].startswith("sub-agent")]
    last, first, flipped, flip = rows["turn 3"], rows["turn 4"], rows["byte flipped"], told["flip"]
    # Nobody tells who computed what the three share; what they computed in all is at most once what is new to B, and
    # for each the rest of a block and its own task.
    new = min(row["prompt_tokens"] for row in agents) - rows["turn 5"]["prompt_tokens"]
    computed = sum(row["prompt_tokens"] - row["cached_tokens"] for row in agents)
    return {
        "all answers are identical to the cold ones": all(row["tokens_identical"] for row in told["rows"]),
        "the cold ones found nothing": not any(row["cold_cached_tokens"] for row in told["rows"]),
        "A was killed with all its processes": told["killed"] > 1,
        "B went on from what A had stored": first["cached_tokens"]
        >= last["prompt_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS,
        "the sub-agents' common prefix was computed once": computed <= new + len(agents) * 2 * BLOCK_TOKENS,
        "explain names the flipped block as corrupt": flip["verdict"].startswith("corrupt"),
        "B computed the flipped block and what follows": 0
        < flipped["cached_tokens"]
        <= flip["position"] * BLOCK_TOKENS,
        "explain remembers the incident": bool(flip["incidents"]) and flip["incidents"][-1]["kind"] == "corrupt",
    }
