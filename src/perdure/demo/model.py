"""The demo's model in one of its processes: loaded, warmed up, prefilled in pieces, asked; and how it tells its parent.

Comparing: a prefill that is cut into other pieces adds its floats in another order, so fp32 logits differ in the last
bits even in one process. Here a cold run ends its prefill with the piece that a restored run computes after restoring;
then restored and cold logits are equal to the bit, and the report says how far they are apart.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perdure.demo.process import CONNECT_S

PREFILL_CHUNK = 512
WARM_UP_TOKENS = 2 * PREFILL_CHUNK
BLOCK_TOKENS = 16
TENANT = "demo"


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def note(what: str, done: int, total: int | None = None) -> None:
    say({"progress": [what, done, total]})


def pause() -> None:
    """Until the parent says go on. Raises EOFError if it has ended."""
    if not sys.stdin.readline():
        raise EOFError("the parent has ended")


class Run:
    """A loaded, warmed-up model and what this process does with it."""

    def __init__(self, job: dict[str, Any]):
        if job["kind"] != "reference":  # as an engine does: the store first, the model takes longer
            import perdure

            self.store = perdure.connect(job["store"], wait_s=CONNECT_S, name=f"demo {job['kind']}")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from perdure.engines.model_identity import cache_argument

        note("loading the model", 0)
        self._torch = torch
        self.job, self.directory = job, Path(job["logits"])
        self.model = AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=torch.float32, local_files_only=True
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(job["model"], local_files_only=True)
        self._argument = cache_argument(self.model)
        self._ends = {self.tokenizer.eos_token_id, self.model.config.eos_token_id}
        self.cache: Any = None
        self.digest_s = 0.0
        warm_up = (job["prompt"][::-1] * WARM_UP_TOKENS)[:WARM_UP_TOKENS]
        self.prefill(warm_up, self.empty(), 0, len(warm_up) - 1, "warming up")

    def empty(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def prefixes(self) -> Any:
        from perdure.engines.smollm import MODEL_ID
        from perdure.engines.transformers import PrefixCache, keyspace_for

        started = time.perf_counter()
        space = keyspace_for(  # not compressed: of fp32 KV that saves 14 %, and decoding would cost more than reading
            self.store, self.model, tenant=TENANT, model_id=MODEL_ID, block_tokens=BLOCK_TOKENS, codec="off"
        )
        self.digest_s = time.perf_counter() - started
        return PrefixCache(space, self.model)

    def answer(
        self,
        prompt: list[int],
        cache: Any,
        start: int,
        resume: int,
        name: str,
        what: str = "prefill",
        started: float | None = None,
    ) -> dict[str, Any]:
        """Greedy answer to a prompt whose first `start` tokens are in the cache; its logits go to a file."""
        import numpy as np

        torch = self._torch
        started = time.perf_counter() if started is None else started
        logits = self.prefill(prompt, cache, start, resume, what)
        tokens = [int(logits.argmax())]
        first_s = time.perf_counter() - started
        seen = [logits]
        while len(tokens) < self.job["answer_tokens"] and tokens[-1] not in self._ends:
            seen.append(self._forward(tokens[-1:], cache))
            tokens.append(int(seen[-1].argmax()))
        total_s = time.perf_counter() - started
        np.save(self.directory / f"{name}.npy", torch.stack(seen).numpy())
        self.cache = cache
        return {
            "name": name, "tokens": tokens, "text": self.tokenizer.decode(tokens, skip_special_tokens=True).strip(),
            "first_token_s": first_s, "total_s": total_s, "prompt_tokens": len(prompt),
            "prefilled_tokens": len(prompt) - start,
        }  # fmt: skip

    def prefill(self, prompt: list[int], cache: Any, start: int, resume: int, what: str) -> Any:
        """Logits of the last token: chunks up to `resume`, then the rest in one forward."""
        at = start
        while at < resume:
            end = min(at + PREFILL_CHUNK, resume)
            self._forward(prompt[at:end], cache)
            at = end
            note(what, at, len(prompt))
        return self._forward(prompt[at:], cache)

    def _forward(self, tokens: Sequence[int], cache: Any) -> Any:
        torch = self._torch
        with torch.inference_mode():
            out = self.model(input_ids=torch.tensor([tokens]), logits_to_keep=1, **{self._argument: cache})
            return out.logits[0, -1]
