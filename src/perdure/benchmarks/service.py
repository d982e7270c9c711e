"""`perdure bench service`: what the service costs an engine, beside memcpy, the embedded store, a socket and peers.

Rows: hits, views and lookups in the service's DRAM, restores from the disk, the data node over TCP, many clients. See
`service_memory`, `service_restore`, `service_tcp`, `service_clients`. A full run takes about three minutes, a quick one
below two, not counting the environments of peers, which are made once; a quick run's figures are only a check.

Contract: data goes to a temporary directory below `directory` and is removed at the end, also after an error; so are
the services' processes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from perdure.benchmarks import service_clients, service_memory, service_restore, service_tcp
from perdure.benchmarks.harness import Report, machine
from perdure.benchmarks.progress import Progress
from perdure.benchmarks.service_host import FULL, QUICK, Plan
from perdure.limits import GIB

SECTIONS = ("memory", "restore", "tcp", "clients")
STEPS = {"memory": 4, "restore": 2, "tcp": 2 + len(service_tcp.INSTALLS), "clients": 1}


def run(
    directory: os.PathLike[str] | str,
    *,
    cache_dir: os.PathLike[str] | str | None = None,
    quick: bool = False,
    json: bool = False,
    sections: Sequence[str] = SECTIONS,
    plan: Plan | None = None,
) -> Report:
    """Measure on the file system of `directory`. `json`: no progress is drawn. cache_dir: where the peers' environments
    are or may be put; without it those peers are not measured. sections: which of SECTIONS; plan: what is measured, if
    neither the full nor the quick one.

    Raises WrongResult when the service does not do the work that is timed, ServiceFailed when it does not start."""
    plan = plan or (QUICK if quick else FULL)
    base = Path(tempfile.mkdtemp(prefix="service-", dir=directory))
    try:
        about = machine(base, free_gib=shutil.disk_usage(base).free // GIB, quick=quick)
        report = Report("Perdure's service beside memcpy, the embedded store, a bare socket and peers", about)
        with Progress("bench service", sum(STEPS[section] for section in sections), silent=json) as progress:
            if "memory" in sections:
                report.rows += service_memory.rows(plan, base, progress.step)
            if "restore" in sections:
                report.rows += service_restore.rows(plan, base, progress.step)
            if "tcp" in sections:
                environments = None if cache_dir is None else Path(cache_dir)
                report.rows += service_tcp.rows(plan, base, progress.step, environments)
            if "clients" in sections:
                report.rows += service_clients.rows(plan, base, progress.step)
        return report
    finally:
        shutil.rmtree(base, ignore_errors=True)
