"""Rows of `bench service` about blocks that come from another host: the data node beside a bare socket and peers.

Contract
- All over TCP on a loopback, from a server's DRAM into the caller's memory: the same blocks, batches and order. Every
  system has a server of its own and a client of its own, takes turns with the others, and is checked byte by byte.
- Each runs in a network namespace that has nothing but a loopback, so that no server can be reached from outside.
  Without the right to make one they run in this machine's, but for Mooncake, which binds all interfaces: not measured.
- What cannot be installed or started is a row that says so.
- Not guaranteed: that a ratio holds on a real network, where the wire is the limit.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from perdure.benchmarks import peers, service_lonet
from perdure.benchmarks.harness import Row, rate_row, size_name, unmeasured
from perdure.benchmarks.peers import OURS, PeerFailed, Round, Worker
from perdure.benchmarks.service_host import Plan

MOONCAKE = "0.3.13.post1"
MOONCAKE_PACKAGE = "mooncake-transfer-engine-non-cuda"
TARGETS = {"bare": 0.80, "mooncake": 2.5, "lmcache": None}
NOTE = "ours and the bare socket choose cubic on loopback; peers have the system's congestion control"
NAMES = {
    "bare": "bare TCP socket",
    "mooncake": f"Mooncake {MOONCAKE}, TCP, batch_get_into",
    "lmcache": f"LMCache {peers.LMCACHE} server",
}
SCRIPTS = {"bare": "service_bare.py", "mooncake": "service_mooncake.py", "lmcache": "service_lmcache.py"}


def install_mooncake(cache_dir: Path) -> Path:
    """The Python of Mooncake's environment under `cache_dir`, made if it is not there; raises PeerFailed."""
    steps = (["numpy", "setuptools<81"], [f"{MOONCAKE_PACKAGE}=={MOONCAKE}"])
    return peers.install(cache_dir, f"mooncake-{MOONCAKE}", f"Mooncake {MOONCAKE}", steps)


INSTALLS: dict[str, Callable[[Path], Path]] = {"mooncake": install_mooncake, "lmcache": peers.install_lmcache}


def _no_namespace() -> str:
    """Why no namespace can be made here; empty if one can."""
    command = [sys.executable, service_lonet.__file__, sys.executable, "-c", ""]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else ""


class Systems:
    """The workers that could be started, ours first, and why the others could not be."""

    def __init__(self, cache_dir: Path, wanted: Sequence[str], step: Callable[[str], None]):
        self.failed: dict[str, str] = {}
        self.workers: list[Worker] = []
        alone = _no_namespace()
        prefix = [] if alone else [sys.executable, service_lonet.__file__]
        ours = [*prefix, sys.executable, "-m", "perdure.benchmarks.service_node"]
        self.workers.append(Worker(OURS, ours, own=True))
        for key in wanted:
            if key == "mooncake" and alone:
                self.failed[key] = f"it binds all interfaces, and {alone}"
                continue
            try:
                python = Path(sys.executable)
                if key in INSTALLS:
                    step(f"environment of {NAMES[key]}")
                    python = INSTALLS[key](cache_dir)
            except PeerFailed as error:
                self.failed[key] = str(error)
                continue
            script = Path(service_lonet.__file__).with_name(SCRIPTS[key])
            self.workers.append(Worker(key, [*prefix, str(python), str(script)]))

    def end(self) -> None:
        for worker in self.workers:
            with suppress(PeerFailed):
                worker.ask("close")
            worker.end()


def _name(plan: Plan, batch: int, other: str) -> str:
    return f"data node over TCP, DRAM hits, {size_name(plan.block_bytes)}, batch {batch}, against {other}"


def _absent(plan: Plan, batch: int, key: str, why: str) -> Row:
    return unmeasured(_name(plan, batch, NAMES[key]), "GB/s", NAMES[key], why, target=TARGETS[key])


def _batch_rows(plan: Plan, batch: int, base: Path, systems: Systems, wanted: Sequence[str]) -> list[Row]:
    work = peers.Plan((plan.block_bytes,), (batch,), plan.tcp_bytes, plan.repetitions)
    one = Round(work, base / f"tcp-{batch}", plan.block_bytes, batch)
    try:
        one.run_in_memory(systems.workers)
    except PeerFailed as error:
        return [_absent(plan, batch, key, str(error)) for key in wanted]
    failed = systems.failed | one.failed
    made = []
    for key in wanted:
        if key in failed:
            made.append(_absent(plan, batch, key, failed[key]))
            continue
        ours, reference = one.series[peers.WARM, OURS], one.series[peers.WARM, key]
        name = _name(plan, batch, NAMES[key])
        made.append(rate_row(name, ours, reference, NAMES[key], target=TARGETS[key], note=NOTE))
    return made


def rows(
    plan: Plan, base: Path, step: Callable[[str], None], cache_dir: Path | None, wanted: Sequence[str] = tuple(NAMES)
) -> list[Row]:
    """All rows of this module, for the peers `wanted`. cache_dir: where peers' environments are, or may be put; None:
    no peer that needs one."""
    known = wanted if cache_dir is not None else [key for key in wanted if key not in INSTALLS]
    systems = Systems(cache_dir or base, known, step)
    systems.failed |= {key: "its environment was not asked for" for key in wanted if key not in known}
    made: list[Row] = []
    try:
        for batch in (plan.batch, 1):
            step(f"over TCP, batch {batch}")
            made += _batch_rows(plan, batch, base, systems, wanted)
    finally:
        systems.end()
    return made
