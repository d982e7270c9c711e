"""A streaming client of an OpenAI-compatible server that times the first token. Standard library only.

Contract: greedy unless told otherwise. `first_token_s` runs from before the request is sent to the first chunk with a
token, so it includes tokenization and queueing. `cached_tokens` is what the server says, None if it does not
(`--enable-prompt-tokens-details`). A refusal or a broken stream raises EngineFailed.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from perdure.testing.vllm_process import EngineFailed
from perdure.testing.vllm_server import MODEL

ANSWER_S = 300.0
Message = dict[str, str]


@dataclass(slots=True)
class Answer:
    """One answer. `logprobs`: of the chosen tokens, if asked for."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    first_token_s: float = 0.0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: str | None = None


def ask(
    address: tuple[str, int],
    prompt: str | Sequence[int] | Sequence[Message],
    *,
    max_tokens: int = 16,
    logprobs: bool = False,
    **body: Any,
) -> Answer:
    """Ask and wait for the whole answer. prompt: text, token ids, or the messages of a chat.

    body: more of the request, such as `cache_salt`, `session_id`, `kv_transfer_params`, `temperature`."""
    chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], dict)
    request: dict[str, Any] = {
        "model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0,
        "max_tokens": max_tokens, "return_token_ids": True, "messages" if chat else "prompt": prompt,
    }  # fmt: skip
    if logprobs:
        request |= {"logprobs": True} if chat else {"logprobs": 0}
    answer = Answer()
    began = time.perf_counter()
    for chunk in _stream(address, "/v1/chat/completions" if chat else "/v1/completions", request | body):
        for choice in chunk.get("choices", ()):
            _take(answer, choice)
            if answer.tokens and not answer.first_token_s:
                answer.first_token_s = time.perf_counter() - began
        if usage := chunk.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            answer.cached_tokens = details.get("cached_tokens")
    answer.seconds = time.perf_counter() - began
    return answer


def ask_at_once(address: tuple[str, int], prompts: Sequence[Any], **options: Any) -> list[Answer]:
    """All of them at the same time, each on a connection of its own; answers in the order of the prompts."""
    with ThreadPoolExecutor(len(prompts), thread_name_prefix="ask") as threads:
        return list(threads.map(lambda prompt: ask(address, prompt, **options), prompts))


def _take(answer: Answer, choice: dict[str, Any]) -> None:
    delta = choice.get("delta")
    answer.text += (choice.get("text") if delta is None else delta.get("content")) or ""
    answer.tokens += choice.get("token_ids") or []
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    told = choice.get("logprobs") or {}
    answer.logprobs += told.get("token_logprobs") or [one["logprob"] for one in told.get("content") or ()]


def _stream(address: tuple[str, int], path: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a stream of server-sent events."""
    connection = http.client.HTTPConnection(*address, timeout=ANSWER_S)
    try:
        connection.request("POST", path, json.dumps(request), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise EngineFailed(f"{path}: status {response.status}: {response.read().decode(errors='replace')[:500]}")
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise EngineFailed(f"{path}: {chunk['error']}")
            yield chunk
        raise EngineFailed(f"{path}: the stream ended before its end")
    except (OSError, http.client.HTTPException) as error:
        raise EngineFailed(f"{path}: {error!r}") from error
    finally:
        connection.close()
