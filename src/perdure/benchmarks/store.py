"""`perdure bench store`: the store against the limits of the machine it runs on.

Rows: keys and lookups against absolute limits, warm reads against memcpy, cold reads and writes against fio, restores
of real KV with the codec on a slow device, reopening after SIGKILL. See `store_memory`, `store_disk`, `store_codec`,
`store_reopen`. A full run takes about eight minutes, a quick one below one; a quick run's figures are only a check.

Contract: data goes to a temporary directory below `directory` and is removed at the end, also after an error.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from perdure.benchmarks import fio, store_codec, store_disk, store_memory, store_reopen, target
from perdure.benchmarks.harness import Report, machine
from perdure.benchmarks.progress import Progress
from perdure.limits import GIB

SECTIONS = ("memory", "disk", "codec", "reopen")


def run(
    directory: os.PathLike[str] | str,
    *,
    quick: bool = False,
    json: bool = False,
    codec_sample: os.PathLike[str] | str | None = None,
    model_cache: os.PathLike[str] | str | None = None,
    sections: Sequence[str] = SECTIONS,
    plan: target.Plan | None = None,
) -> Report:
    """Measure on the file system of `directory`. `json`: no progress is drawn.

    codec_sample: a file of raw bf16 KV (blocks of `kv_sample.BLOCK_BYTES` bytes). model_cache: where the demo's model
    is kept, or may be put, to make one; needs torch. Without either the KV is synthetic and the row says so.
    sections: which of SECTIONS; plan: what is measured, if neither the full nor the quick one.
    Raises WrongResult when the store does not do the work that is timed."""
    base = Path(tempfile.mkdtemp(prefix="bench-", dir=directory))
    try:
        plan = plan or target.plan_for(base, quick=quick)
        found = fio.find(base)
        about = machine(
            base,
            fio=f"{found.version} {found.engine}" if found else None,
            free_gib=shutil.disk_usage(base).free // GIB,
            quick=quick,
        )
        report = Report("Perdure beside the limits of this machine", about)
        with Progress("bench store", _steps(plan, sections), silent=json) as progress:
            if "memory" in sections:
                report.rows += store_memory.rows(plan, base, progress.step)
            if "disk" in sections:
                report.rows += store_disk.rows(plan, base, found, progress.step)
            if "codec" in sections:
                report.rows += store_codec.rows(plan, base, found, codec_sample, model_cache, progress.step)
            if "reopen" in sections:
                report.rows += store_reopen.rows(plan, base, progress.step)
        return report
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _steps(plan: target.Plan, sections: Sequence[str]) -> int:
    sizes, batches = len(plan.block_bytes), len(plan.batches)
    each = {"memory": 2 + sizes, "disk": sizes * (1 + 2 * batches), "codec": 3, "reopen": 4}
    return sum(each[section] for section in sections)
