"""An engine process to measure and test the tier with: `vllm.LLM`, told what to do by JSON lines on its input.

    python -m perdure.benchmarks.engines_tier_child ANSWERS '{"model": ..., "tiers": [...], ...}'

Contract
- One answer for each line, written as a JSON line to the pipe or file ANSWERS; vLLM's own output goes where it goes.
- {"ask": "generate", "tokens": [...], "max_tokens": n, "from": locality or null, "salt": text} -> ids, logprobs, cached
  tokens, seconds. `from` lets the promotion come from tiers of that locality only.
- {"ask": "forget"}: drop the local prefix cache and the primary tier, so that the next prompt comes from a tier.
- {"ask": "local"}: drop the local prefix cache only. {"ask": "metrics"}: vLLM's counters whose names begin with it.
- Runs vLLM on a CPU, with `CpuTieringSpec`. An exception ends it, and is its last answer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

CPU_BYTES = 1 << 30
_LENGTH = 8192


def _engine(options: dict[str, Any]) -> Any:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(options.get("cache_gib", 1)),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = None
    if options.get("tiers") is not None:
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "perdure.engines.vllm.cpu_spec",
                "cpu_bytes_to_use": options.get("cpu_bytes", CPU_BYTES),
                "secondary_tiers": options["tiers"],
            },
        )
    return LLM(
        model=options["model"],
        dtype=options.get("dtype", "float32"),
        enforce_eager=True,
        max_model_len=options.get("length", _LENGTH),
        kv_transfer_config=transfer,
        disable_log_stats=False,
        **options.get("engine", {}),
    )


def _generate(engine: Any, question: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    extra = {}
    if question.get("from"):
        extra = {"kv_transfer_params": {"kv_load_tiers": [{"locality": question["from"]}]}}
    prompt: dict[str, Any] = {"prompt_token_ids": question["tokens"]}
    if question.get("salt"):
        prompt["cache_salt"] = question["salt"]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=question.get("max_tokens", 1), logprobs=0, ignore_eos=True, extra_args=extra or None
    )
    started = time.perf_counter()
    (output,) = engine.generate([prompt], sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    first = output.outputs[0]
    return {
        "ids": list(first.token_ids),
        "logprobs": [
            round(step[token].logprob, 4) for step, token in zip(first.logprobs, first.token_ids, strict=True)
        ],
        "cached": output.num_cached_tokens,
        "seconds": seconds,
    }


def _answer(engine: Any, question: dict[str, Any]) -> dict[str, Any]:
    ask = question["ask"]
    if ask == "generate":
        return _generate(engine, question)
    if ask in ("forget", "local"):
        return {"done": bool(engine.reset_prefix_cache(reset_connector=ask == "forget"))}
    if ask == "metrics":
        found: dict[str, float] = {}
        for metric in engine.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None and metric.name.startswith(question["prefix"]):
                labels = ",".join(v for k, v in sorted(metric.labels.items()) if k not in ("engine", "model_name"))
                found[f"{metric.name}:{labels}"] = float(value)
        return {"metrics": found}
    return {"error": f"unknown question {ask!r}"}


def _say(answers: IO[str], what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def main(answers_path: str, options_text: str) -> None:
    with Path(answers_path).open("w") as answers:
        try:
            engine = _engine(json.loads(options_text))
            _say(answers, {"ready": True})
            for line in sys.stdin:
                _say(answers, _answer(engine, json.loads(line)))
        except BaseException as error:
            _say(answers, {"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":  # vLLM starts its workers by importing this again
    main(*sys.argv[1:])
