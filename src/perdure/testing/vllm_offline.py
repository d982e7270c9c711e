"""`vllm.LLM` in a process of its own, spoken to in JSON lines: quicker to start than a server, and can be killed.

    with OfflineEngine({"model": path, "dtype": "float32"}, log) as engine:
        [first] = engine.generate([tokens], max_tokens=8)

Contract
- Prompts are token ids, text, or what vLLM takes as a dictionary (`prompt_embeds` as lists of numbers, an image of
  `multi_modal_data` as rows of pixels of red, green and blue); answers are greedy unless told otherwise. An answer that
  failed says so in `finish`.
- `call` calls a method of `vllm.LLM` by name (`reset_prefix_cache`, `sleep`, `wake_up`).
- An engine that ends or raises is EngineFailed with its last words. It is killed as a group at the end; `end` lets
  vLLM shut its workers and connectors down before.
- Run as a script this module is the process: it imports vllm, and nothing else here does.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from perdure.testing.vllm_process import START_S, EngineFailed, ProcessGroup

_DEFAULTS: dict[str, Any] = {
    "enforce_eager": True, "max_model_len": 4096, "prefix_caching_hash_algo": "sha256_cbor", "disable_log_stats": False,
}  # fmt: skip


END_S = 60.0
Prompt = Sequence[int] | str | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer. first_token_s: from the request's arrival in the engine; decode_s: from there to the last token. None
    where vLLM does not say."""

    tokens: list[int]
    logprobs: list[float]
    text: str
    cached_tokens: int | None
    finish: str | None
    first_token_s: float | None
    decode_s: float | None
    prompt_tokens: list[int]
    prompt_logprobs: list[float] | None = None


class OfflineEngine(ProcessGroup):
    """llm: arguments of `vllm.LLM`. Made when the model is loaded, unless `wait` is false: then `wait_ready` waits.

    within: a command that ends in running another one (`unshare --mount`), to run the engine by."""

    def __init__(
        self,
        llm: dict[str, Any],
        log: Path,
        *,
        transfer: dict[str, Any] | None = None,
        environment: Mapping[str, str | None] | None = None,
        wait: bool = True,
        within: Sequence[str] = (),
    ) -> None:
        super().__init__(
            [*within, sys.executable, "-m", __name__], log, environment=environment,
            streams={"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True},
        )  # fmt: skip
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="vllm-offline-reader", daemon=True)
        self._reader.start()
        job = _DEFAULTS | {key: str(value) if isinstance(value, Path) else value for key, value in llm.items()}
        self._tell(job | ({} if transfer is None else {"kv_transfer_config": transfer}))
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.kill()
                raise

    def wait_ready(self) -> None:
        """Returns when the model is loaded. Raises EngineFailed."""
        self._result()

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = 8,
        salt: str | None = None,
        params: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> list[Generated]:
        """All prompts at once. params: `kv_transfer_params`; sampling: more of `vllm.SamplingParams`."""
        return self.begin(prompts, max_tokens=max_tokens, salt=salt, params=params, **sampling).finish()

    def begin(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = 8,
        salt: str | None = None,
        params: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> OfflineEngine:
        """As `generate`, but comes back at once; `finish` has the answers. For doing something to it meanwhile."""
        prompts = [one if isinstance(one, (str, dict)) else list(one) for one in prompts]
        arguments = {"temperature": 0.0, "logprobs": 0, "max_tokens": max_tokens} | sampling
        if params is not None:
            arguments["extra_args"] = {"kv_transfer_params": params}
        self._tell({"generate": prompts, "salt": salt, "sampling": arguments})
        return self

    def finish(self) -> list[Generated]:
        return [Generated(**one) for one in self._result()]

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Of `vllm.LLM`; what is not JSON comes back as its repr."""
        self._tell({"call": method, "arguments": arguments, "named": named})
        return self._result()

    def metrics(self, prefix: str) -> dict[str, float]:
        """vLLM's counters whose names begin with it, by "name:label,label"."""
        self._tell({"metrics": prefix})
        return {str(name): float(value) for name, value in self._result().items()}

    def end(self) -> None:
        """As a user ends it. What is still there after `END_S` is killed."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.kill()

    def kill(self) -> int:
        killed = super().kill()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
        return killed

    def _tell(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it has died: `_result` says why
            return

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _result(self) -> Any:
        try:
            line = self._lines.get(timeout=START_S)
        except Empty:
            raise EngineFailed(f"vLLM said nothing for {START_S:.0f} s: {self.last_words()}") from None
        if not line:
            raise EngineFailed(f"vLLM ended with status {self.process.wait()}: {self.last_words()}")
        message = json.loads(line)
        if "error" in message:
            raise EngineFailed(f"vLLM: {message['error']}")
        return message["result"]


# --- the process
def _main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints goes to the log

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message, default=repr) + "\n")
        answers.flush()

    llm: Any = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if llm is None:
                import vllm

                llm = vllm.LLM(**message)
                answer(result="ready")
            elif "generate" in message:
                answer(result=_generate(llm, message))
            elif "metrics" in message:
                answer(result=_metrics(llm, message["metrics"]))
            else:
                answer(result=getattr(llm, message["call"])(*message["arguments"], **message["named"]))
        except Exception as error:  # the other side raises it
            answer(error=f"{type(error).__name__}: {error}")
            if llm is None:
                raise


def _generate(llm: Any, message: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    salt = {"cache_salt": message["salt"]} if message["salt"] else {}
    prompts = [_prompt(one) | salt for one in message["generate"]]
    outputs = llm.generate(prompts, SamplingParams(**message["sampling"]), use_tqdm=False)
    return [_answer(one) for one in outputs]


def _prompt(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        return {name: _PARTS.get(name, lambda same: same)(value) for name, value in given.items()}
    return {"prompt": given} if isinstance(given, str) else {"prompt_token_ids": given}


def _tensor(numbers: Any) -> Any:
    import torch

    return torch.tensor(numbers)


def _media(given: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    from PIL import Image

    return given | {"image": Image.fromarray(np.array(given["image"], np.uint8))}


_PARTS: dict[str, Any] = {"prompt_embeds": _tensor, "multi_modal_data": _media}


def _metrics(llm: Any, prefix: str) -> dict[str, float]:
    found = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if value is not None and metric.name.startswith(prefix):
            labels = [text for name, text in sorted(metric.labels.items()) if name not in ("engine", "model_name")]
            found[f"{metric.name}:{','.join(labels)}"] = float(value)
    return found


def _answer(output: Any) -> dict[str, Any]:
    one = output.outputs[0]
    chosen = zip(one.token_ids, one.logprobs or (), strict=False)
    prompt = output.prompt_logprobs
    return {
        "tokens": list(one.token_ids),
        "logprobs": [entry[token].logprob for token, entry in chosen],
        "text": one.text,
        "cached_tokens": output.num_cached_tokens,
        "finish": one.finish_reason,
        "first_token_s": getattr(output.metrics, "first_token_latency", None),
        "decode_s": None if output.metrics is None else output.metrics.last_token_ts - output.metrics.first_token_ts,
        "prompt_tokens": list(output.prompt_token_ids or ()),
        "prompt_logprobs": None if prompt is None else [
            entry[token].logprob for token, entry in zip(output.prompt_token_ids, prompt, strict=True) if entry
        ],
    }  # fmt: skip


if __name__ == "__main__":
    _main()
