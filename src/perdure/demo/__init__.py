"""`perdure demo`: a real model's context outlives the process that computed it.

Separate processes share one service: the first prefills a guide of 4,000 tokens, answers, and is killed with SIGKILL;
the second restores from the service's memory and answers the same; then the service is killed with SIGKILL and started
again, and the second process asks once more through the client it has: from the disk, with the same answer. A third
restores once and answers three other questions. Then one byte on the disk is flipped, the service is killed again
because its memory would hide that, and the question asked again. Every answer is compared, token by token, with a cold
one.

`run` returns 0 if all tokens are identical and every step did what it says, else 1. It leaves the store behind.
"""

from __future__ import annotations

import json as _json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def run(
    directory: Path,
    *,
    json: bool = False,
    tokens: int | None = None,
    answer_tokens: int = 24,
    model_cache: Path | None = None,
) -> int:
    """Run the demo with its store in `directory`; report on stdout, progress on stderr. Returns the exit status.

    tokens: how much of the guide to use, default all of it. model_cache: where the converted model is kept (538 MB),
    default $PERDURE_MODEL_CACHE, else perdure/ in the user's cache directory. Raises PerdureError if a step cannot run.
    """
    from perdure.demo import report, scenes

    outcome: dict[str, Any] = scenes.play(
        Path(directory), context_tokens=tokens, answer_tokens=answer_tokens, model_cache=model_cache
    )
    if json:
        sys.stdout.write(_json.dumps(outcome, indent=2) + "\n")
    else:
        report.show(outcome)
    return 0 if outcome["ok"] else 1


def run_vllm(directory: Path, *, json: bool = False, setup_s: float | None = None) -> int:
    """The demo with two vLLM servers (`vllm_scenes`), with its store in `directory`. Returns the exit status.

    setup_s: what making the environment took, shown with the other phases. Raises PerdureError if a step cannot run."""
    from perdure.demo import vllm_report, vllm_scenes
    from perdure.demo.process import DemoError

    if find_spec("vllm") is None:
        raise DemoError("vllm is not installed here: `make demo-vllm` makes an environment that has it")
    outcome = vllm_scenes.play(Path(directory)) | {"setup_s": setup_s}
    if json:
        sys.stdout.write(_json.dumps(outcome, indent=2) + "\n")
    else:
        vllm_report.show(outcome, setup_s)
    return 0 if outcome["ok"] else 1


def run_cluster(
    directory: Path,
    *,
    json: bool = False,
    tokens: int | None = None,
    answer_tokens: int = 24,
    model_cache: Path | None = None,
) -> int:
    """The demo with three hosts (`cluster_scenes`), at work in `directory`. Arguments and exit status as `run`.

    Raises PerdureError if a step cannot run."""
    from perdure.demo import cluster_scenes

    outcome = cluster_scenes.play(
        Path(directory), context_tokens=tokens, answer_tokens=answer_tokens, model_cache=model_cache
    )
    if json:
        sys.stdout.write(_json.dumps(outcome, indent=2) + "\n")
    else:
        cluster_scenes.show(outcome)
    return 0 if outcome["ok"] else 1


def run_governance(directory: Path, *, json: bool = False) -> int:
    """The demo with two tenants (`governance_scenes`), at work in `directory`. Returns the exit status.

    Raises PerdureError if a step cannot run."""
    from perdure.demo import governance_scenes

    outcome = governance_scenes.play(Path(directory))
    if json:
        sys.stdout.write(_json.dumps(outcome, indent=2) + "\n")
    else:
        governance_scenes.show(outcome)
    return 0 if outcome["ok"] else 1
