"""The harness itself: what tests of engines rely on. The first ones run without vLLM."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support import tiny_models
from support.engines import needs_vllm

from perdure.testing.transport import until
from perdure.testing.vllm_client import ask, ask_at_once
from perdure.testing.vllm_offline import OfflineEngine
from perdure.testing.vllm_process import EngineFailed, ProcessGroup, connector
from perdure.testing.vllm_server import VllmServer

LONG_TOKENS = 600  # four full blocks of 128 and a rest
CHILDREN = "import os, time\nfor _ in range(2):\n    os.fork()\nprint('up', flush=True)\ntime.sleep(600)"


class Scripted(BaseHTTPRequestHandler):
    """Answers each question with the chunks the test wants."""

    chunks: list[str] = []  # noqa: RUF012
    asked: list[dict[str, Any]] = []  # noqa: RUF012
    status = 200

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.status)
        self.end_headers()
        for chunk in self.chunks:
            self.wfile.write(f"data: {chunk}\n\n".encode())

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def scripted() -> Iterator[type[Scripted]]:
    handler = type("Handler", (Scripted,), {"asked": [], "chunks": []})
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        handler.address = http.server_address  # type: ignore[attr-defined]
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield handler
        http.shutdown()
        thread.join()


def test_the_client_reads_completions(scripted: Any) -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    scripted.chunks = [
        '{"choices": [{"text": "", "token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}}]}',
        '{"choices": [{"text": "hi", "token_ids": [6], "logprobs": {"token_logprobs": [-1.5]}}]}',
        '{"choices": [{"text": "", "finish_reason": "length"}]}',
        json.dumps({"choices": [], "usage": usage}),
        "[DONE]",
    ]
    answer = ask(scripted.address, [1, 2, 3], logprobs=True, cache_salt="s")
    assert (answer.text, answer.tokens, answer.logprobs) == ("hi", [5, 6], [-0.5, -1.5])
    assert (answer.prompt_tokens, answer.cached_tokens, answer.finish_reason) == (9, 8, "length")
    assert 0 < answer.first_token_s <= answer.seconds
    assert scripted.asked[0]["cache_salt"] == "s"
    assert scripted.asked[0]["prompt"] == [1, 2, 3]


def test_the_client_reads_chats(scripted: Any) -> None:
    scripted.chunks = [
        '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        '{"choices": [{"delta": {"content": "a"}, "token_ids": [7], "logprobs": {"content": [{"logprob": -2.0}]}}]}',
        "[DONE]",
    ]
    answers = ask_at_once(scripted.address, [[{"role": "user", "content": name}] for name in "xy"], logprobs=True)
    assert [(one.text, one.tokens, one.logprobs, one.cached_tokens) for one in answers] == [
        ("a", [7], [-2.0], None)
    ] * 2
    assert {one["messages"][0]["content"] for one in scripted.asked} == {"x", "y"}


@pytest.mark.parametrize(
    ("status", "chunks", "what"),
    [(200, [], "ended before"), (200, ['{"error": "out of luck"}'], "out of luck"), (400, ["no"], "status 400")],
)
def test_the_client_says_what_went_wrong(scripted: Any, status: int, chunks: list[str], what: str) -> None:
    scripted.status, scripted.chunks = status, chunks
    with pytest.raises(EngineFailed, match=what):
        ask(scripted.address, "hello")


def test_a_group_is_killed_as_a_whole(tmp_path: Path) -> None:
    with ProcessGroup([sys.executable, "-c", CHILDREN], tmp_path / "log") as group:
        until(lambda: group.output().count("up") == 4)
        assert len(group.members()) == 4
        group.kill_leader()
        assert len(group.members()) == 3
        assert group.kill() == 3
        assert group.members() == []


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    code = "import sys; sys.exit('SomeError: no such model')"
    environment = {"PYTHONSTARTUP": ""}
    with ProcessGroup([sys.executable, "-c", code], tmp_path / "log", environment=environment) as group:
        group.process.wait()
        assert group.last_words() == "SomeError: no such model"


def test_the_connector_is_named_as_in_the_documents() -> None:
    config = connector("unix:///run/perdure.sock", mode="shadow")
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {"url": "unix:///run/perdure.sock", "mode": "shadow"}


@needs_vllm
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_tiny_models_tell_prompts_apart(kind: str, models: Path, offline: Callable[..., OfflineEngine]) -> None:
    engine = offline(tiny_models.llm(kind, models))
    prompts = [tiny_models.prompt(LONG_TOKENS, seed) for seed in (1, 2)]
    # The far past must show: the same end after another beginning gives other logprobs, at least.
    prompts.append(prompts[1][:40] + prompts[0][40:])
    cold = [engine.generate([one])[0] for one in prompts]
    assert cold[0].tokens != cold[1].tokens
    assert len({tuple(one.logprobs) for one in cold}) == 3
    assert all(len(set(one.tokens)) > 2 for one in cold)
    again = engine.generate([prompts[0]])[0]
    if kind in tiny_models.BF16:  # a local hit differs from a cold run; of qwen3-next vLLM keeps no prefixes by default
        return
    assert again.cached_tokens
    assert again.tokens == cold[0].tokens
    assert again.logprobs == pytest.approx(cold[0].logprobs, abs=1e-3)


@needs_vllm
def test_a_server_answers_and_is_killed_as_a_whole(smollm: Path, server: Callable[..., VllmServer]) -> None:
    one = server(smollm, max_model_len=2048)
    one.wait_ready()
    messages = [{"role": "user", "content": "Name three colours. " * 60}]
    first, second = (ask(one.address, messages, logprobs=True) for _ in range(2))
    assert first.tokens == second.tokens
    assert first.cached_tokens == 0
    assert second.cached_tokens is not None
    assert second.cached_tokens >= 128
    assert "vllm:" in one.get("/metrics")
    assert one.kill() > 1
    with socket.socket() as probe:
        assert probe.connect_ex(one.address) != 0
