"""`perdure bench sessions`: many multi-turn sessions on one service, at a load where it counts.

Rows: p99 of restores by 1 to 1,000 sessions beside an ideal queue, goodput and late restores at 80 % and 200 % load
(`sessions_load`); memory of idle sessions, and listing of all (`sessions_idle`). The device is throttled to
`sessions_load.RATE_BYTES_PER_S` so that it, and not the processors, is what is loaded. The service and the generator of
the load are processes of their own. A full run takes about six minutes, a quick one below 90 s.

Contract: data goes to a temporary directory below `directory` and is removed at the end, also after an error.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from perdure.benchmarks import sessions_idle, sessions_load
from perdure.benchmarks.harness import Report, machine
from perdure.benchmarks.progress import Progress
from perdure.benchmarks.sessions_child import cpus
from perdure.benchmarks.sessions_load import FULL, QUICK, Plan
from perdure.benchmarks.sessions_turns import load_trace
from perdure.limits import GIB

SECTIONS = ("load", "idle")


def run(
    directory: os.PathLike[str] | str,
    *,
    quick: bool = False,
    json: bool = False,
    traces: os.PathLike[str] | str | None = None,
    sections: Sequence[str] = SECTIONS,
    plan: Plan | None = None,
) -> Report:
    """Measure on the file system of `directory`. `json`: no progress is drawn.

    traces: the folder of the public traces; without it their rows are not measured. sections: which of SECTIONS; plan:
    what is measured, if neither the full nor the quick one. Raises InvalidArgument for a folder without the trace,
    WrongResult when the service does not do the work that is timed, ChildFailed."""
    plan = plan or (QUICK if quick else FULL)
    trace = None if traces is None else load_trace(Path(traces), plan.blocks_max)
    base = Path(tempfile.mkdtemp(prefix="bench-", dir=directory))
    mine, theirs = cpus()
    try:
        about = machine(
            base,
            free_gib=shutil.disk_usage(base).free // GIB,
            quick=quick,
            generator_cpus=mine,
            service_cpus=theirs,
        )
        report = Report("Many sessions on one service of Perdure", about)
        with Progress("bench sessions", _steps(plan, sections, trace is not None), silent=json) as progress:
            if "load" in sections:
                report.rows += sessions_load.rows(plan, base, trace, progress.step)
            if "idle" in sections:
                report.rows += sessions_idle.rows(base, plan.idle, plan.listed, progress.step)
        return report
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _steps(plan: Plan, sections: Sequence[str], traced: bool) -> int:
    each = {"load": 1 + plan.rounds * (3 + len(plan.sessions) * (1 + traced)), "idle": 2}
    return sum(each[section] for section in sections)
