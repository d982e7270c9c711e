"""One process of the demo: loads the model, does one job, says what it measured.

Started as `python -m perdure.demo.worker` by `demo.process`, which says how they talk. Jobs: `prepare` (model and token
ids), `cold` (prefill, answer, store, then wait to be killed), `reference` (cold answers of the branches), `restored`,
`outlives` (restored twice, before and after the service is replaced), `forked`. All but the first and `reference` are
clients of the demo's service.

Measuring: time to first token begins when the token ids are there and ends with the first token of the answer. Loading
the model and its one-time costs are not in it: every process runs a warm-up of 1,024 other tokens first.

Comparing: a prefill that is cut into other pieces adds its floats in another order, so fp32 logits differ in the last
bits even in one process. Here a cold run ends its prefill with the piece that a restored run computes after restoring;
then restored and cold logits are equal to the bit, and the report says how far they are apart.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from perdure.demo.process import CONNECT_S
from perdure.errors import InvalidArgument

PREFILL_CHUNK = 512
WARM_UP_TOKENS = 2 * PREFILL_CHUNK
BLOCK_TOKENS = 16
TENANT = "demo"

QUESTION = "What does a write of the class session survive?"
BRANCHES = (
    "How long does a lease last by default?",
    "Which command reads and checks every block of the store?",
    "What should an operator do before putting a store into service?",
)


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _note(what: str, done: int, total: int | None = None) -> None:
    _say({"progress": [what, done, total]})


# --- jobs
def prepare(job: dict[str, Any]) -> dict[str, Any]:
    """Model directory, and the token ids of all prompts: one shared context, then a question each."""
    from transformers import AutoTokenizer

    from perdure.engines.smollm import model_path

    model = model_path(job["model_cache"], _note)
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
    prompts = [
        context + tokenizer(f"Question: {question} Answer in one sentence.{tail}", add_special_tokens=False).input_ids
        for question in (QUESTION, *BRANCHES)
    ]
    return {"model": str(model), "context": len(context), "prompts": prompts, "questions": [QUESTION, *BRANCHES]}


def cold(job: dict[str, Any]) -> dict[str, Any]:
    run = _Run(job)
    prefixes = run.prefixes()
    prompt = job["prompts"][0]
    answer = run.answer(prompt, run.empty(), 0, job["resume"][0], "cold")
    _note("storing blocks", 0)
    report = prefixes.store(prompt + answer["tokens"], run.cache)
    if not report.durable:
        raise RuntimeError(f"not every block was stored: {sorted(set(report.reasons.values()))}")
    return answer | {
        "stored_blocks": report.stored, "present_blocks": len(report.statuses), "stored_bytes": report.bytes,
        "store_s": report.seconds, "weights": prefixes.space.identity.weights,
        "keys": [key.tobytes().hex() for key in prefixes.space.chain(prompt)], "digest_s": run.digest_s,
    }  # fmt: skip


def reference(job: dict[str, Any]) -> dict[str, Any]:
    """What the branches' answers are without any store: every prompt prefilled from its first token."""
    run = _Run(job)
    answers = []
    for number in range(1, len(job["prompts"])):
        what = f"prefill {number} of {len(job['prompts']) - 1}"
        answers.append(
            run.answer(job["prompts"][number], run.empty(), 0, job["resume"][number], f"branch{number}", what)
        )
    return {"answers": answers}


def restored(job: dict[str, Any]) -> dict[str, Any]:
    """The same question in a new process; blocks that had to be computed are stored again."""
    run = _Run(job)
    with run.store:
        return _ask_again(run, run.prefixes(), job["name"])


def outlives(job: dict[str, Any]) -> dict[str, Any]:
    """The same question twice through one client; between them the parent replaces the service."""
    run = _Run(job)
    with run.store:
        prefixes = run.prefixes()
        first = _ask_again(run, prefixes, "shared")
        _say({"result": first | {"boot": run.store.service_status()["boot"]}})
        if not sys.stdin.readline():
            raise EOFError("the parent has ended")
        second = _ask_again(run, prefixes, "restored")
        return second | {"boot": run.store.service_status()["boot"]}


def _ask_again(run: _Run, prefixes: Any, name: str) -> dict[str, Any]:
    prompt = run.job["prompts"][0]
    started = time.perf_counter()
    back = prefixes.restore(prompt)
    answer = run.answer(prompt, back.cache, back.tokens, back.tokens, name, started=started)
    written = prefixes.store(prompt + answer["tokens"], back.cache, back)
    return answer | _brought_back(back) | {"stored_again": written.stored}


def forked(job: dict[str, Any]) -> dict[str, Any]:
    """The context is restored once; every branch shares it and asks its own question."""
    run = _Run(job)
    with run.store:
        prefixes = run.prefixes()
        started = time.perf_counter()
        back = prefixes.restore(job["prompts"][0][: job["context"]])
        restore_s = time.perf_counter() - started
        answers = []
        for number in range(1, len(job["prompts"])):
            name = f"fork{number}"
            cache = back.fork()
            answers.append(run.answer(job["prompts"][number], cache, back.tokens, back.tokens, name))
            prefixes.store(job["prompts"][number] + answers[-1]["tokens"], cache, back)
    return _brought_back(back) | {"answers": answers, "restore_s": restore_s}


def _brought_back(back: Any) -> dict[str, Any]:
    report = back.report
    return {
        "restored_blocks": int(back.held.sum()), "from_memory_blocks": report.from_memory,
        "restored_tokens": back.tokens - len(back.recomputed) * BLOCK_TOKENS,
        "recomputed_blocks": list(back.recomputed), "restored_bytes": report.bytes, "restored_s": report.seconds,
        "problems": {str(position): why for position, why in report.problems.items()},
    }  # fmt: skip


# --- the model
class _Run:
    """A loaded, warmed-up model and what this process does with it."""

    def __init__(self, job: dict[str, Any]):
        if job["kind"] != "reference":  # as an engine does: the store first, the model takes longer
            import perdure

            self.store = perdure.connect(job["store"], wait_s=CONNECT_S, name=f"demo {job['kind']}")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from perdure.engines.model_identity import cache_argument

        _note("loading the model", 0)
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
        warm_up = (job["prompts"][0][::-1] * WARM_UP_TOKENS)[:WARM_UP_TOKENS]
        self._prefill(warm_up, self.empty(), 0, len(warm_up) - 1, "warming up")

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
        logits = self._prefill(prompt, cache, start, resume, what)
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

    def _prefill(self, prompt: list[int], cache: Any, start: int, resume: int, what: str) -> Any:
        """Logits of the last token: chunks up to `resume`, then the rest in one forward."""
        at = start
        while at < resume:
            end = min(at + PREFILL_CHUNK, resume)
            self._forward(prompt[at:end], cache)
            at = end
            _note(what, at, len(prompt))
        return self._forward(prompt[at:], cache)

    def _forward(self, tokens: Sequence[int], cache: Any) -> Any:
        torch = self._torch
        with torch.inference_mode():
            out = self.model(input_ids=torch.tensor([tokens]), logits_to_keep=1, **{self._argument: cache})
            return out.logits[0, -1]


_JOBS = {
    "prepare": prepare, "cold": cold, "reference": reference, "restored": restored, "outlives": outlives,
    "forked": forked,
}  # fmt: skip


def main() -> int:
    job = json.loads(sys.stdin.readline())
    try:
        _say({"result": _JOBS[job["kind"]](job)})
    except Exception as error:  # noqa: BLE001 (the parent shows it)
        import traceback

        traceback.print_exc()
        _say({"error": f"{type(error).__name__}: {error}"})
        return 1
    if job.get("stay"):
        sys.stdin.read()  # until the parent kills this process, or dies itself
    return 0


if __name__ == "__main__":
    sys.exit(main())
