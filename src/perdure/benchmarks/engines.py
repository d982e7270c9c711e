"""`perdure bench engines`: what Perdure saves and costs in vLLM, beside vLLM's own caches, and in LMCache.

Sections: "connector" (`engines_connector`), "replay" (`engines_replay`), "tier" (`engines_tier`, beside vLLM's `fs`
and `obj` tiers), "lmcache" (`engines_lmcache`, beside its `fs_native`, in an environment of its own). vLLM runs
SmolLM2-135M on a CPU, so the forward pass of the last tokens is most of what a restored prompt takes.

Contract: data goes to a temporary directory below `directory` and is removed at the end, also after an error; so are
the processes. A section whose engine is not installed is in the report, with the reason. One that failed is there, too,
and in `Report.failed`; it costs the other sections nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from perdure.benchmarks import engines_connector, engines_lmcache, engines_replay, engines_tier
from perdure.benchmarks.harness import Report, Row, machine, unmeasured
from perdure.benchmarks.progress import Progress
from perdure.benchmarks.service_host import ServiceFailed
from perdure.benchmarks.target import WrongResult
from perdure.engines.smollm import model_path
from perdure.limits import GIB
from perdure.testing.vllm_process import EngineFailed

SECTIONS = ("connector", "replay", "tier", "lmcache")
TOKENS, REPETITIONS = 4800, 5
QUICK_TOKENS, QUICK_REPETITIONS = 1500, 3
_STEPS = {"connector": 6, "replay": 2, "tier": 9, "lmcache": 7}


def run(
    directory: os.PathLike[str] | str,
    *,
    model_cache: Path,
    quick: bool = False,
    json: bool = False,
    sections: Sequence[str] = SECTIONS,
    cache_dir: Path | None = None,
) -> Report:
    """Measure on the file system of `directory`. model_cache: where the converted model is, or is put. cache_dir: where
    LMCache's environment is or may be put; without it LMCache is not measured. `json`: no progress is drawn."""
    tokens, repetitions = (QUICK_TOKENS, QUICK_REPETITIONS) if quick else (TOKENS, REPETITIONS)
    base = Path(tempfile.mkdtemp(prefix="engines-", dir=directory)).resolve()
    try:
        about = machine(base, free_gib=shutil.disk_usage(base).free // GIB, quick=quick, tokens=tokens)
        report = Report("Perdure in vLLM and LMCache beside their own caches", about)
        if find_spec("vllm") is None:
            report.rows.append(unmeasured("vLLM", "s", "", "vllm is not installed here: make bench-engines"))
            return report
        with Progress("bench engines", 1 + sum(_STEPS[name] for name in sections), silent=json) as progress:
            progress.step("the model")
            model = model_path(model_cache)
            made: dict[str, Callable[[], list[Row]]] = {
                "connector": lambda: engines_connector.rows(
                    base / "connector", model, progress.step, tokens=tokens, repetitions=repetitions
                ),
                "replay": lambda: engines_replay.rows(base / "replay", model, progress.step, quick=quick),
                "tier": lambda: engines_tier.rows(
                    base / "tier", model, progress.step, tokens=tokens, repetitions=repetitions
                ),
                "lmcache": lambda: engines_lmcache.rows(
                    engines_lmcache.QUICK if quick else engines_lmcache.FULL, base, progress.step, cache_dir
                ),
            }
            for name in sections:
                _add(report, name, made[name])
        return report
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _add(report: Report, name: str, made: Callable[[], list[Row]]) -> None:
    """The section's rows, or one that says why there are none."""
    try:
        report.rows += made()
    except (EngineFailed, ServiceFailed, WrongResult) as error:
        report.rows.append(unmeasured(f"section {name}", "s", "", str(error)))
        report.failed.append(f"section {name}: {error}")
