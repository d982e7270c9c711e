"""fio as the reference for the disk: one job, one process, its JSON turned into a `Measured`.

Contract
- The job reads or writes the bytes, block size, queue depth and spread of offsets that it is told, with O_DIRECT.
  Seconds are fio's own job runtime (without its start and file layout); CPU seconds are user + system of the job.
- Reads need a file that was written, not just allocated (`prepare` does that): unwritten extents read as zeros without
  touching the device.
- Never raises for a missing fio: `find()` returns None and the caller reports the row as unmeasured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.benchmarks.harness import Measured
from perdure.errors import PerdureError

TIMEOUT_S = 300
ENGINES = ("io_uring", "libaio", "psync")  # psync keeps depth 1; only where the kernel refuses the other two


class FioFailed(PerdureError):
    """fio ended with an error; its last line is in the message."""


@dataclass(frozen=True, slots=True)
class Job:
    """`run_blocks` blocks are read in sequence from each random offset (fio's `randread:N`); writes are sequential."""

    path: Path
    file_bytes: int
    block_bytes: int
    depth: int
    io_bytes: int
    write: bool = False
    run_blocks: int = 1
    fdatasync_every: int = 0
    rate_bytes_per_s: int = 0
    seed: int = 1

    def arguments(self, engine: str) -> list[str]:
        pattern = "write" if self.write else ("randread" if self.run_blocks == 1 else f"randread:{self.run_blocks}")
        arguments = [
            "--name=perdure",
            f"--filename={self.path}",
            f"--rw={pattern}",
            f"--bs={self.block_bytes}",
            f"--iodepth={self.depth}",
            f"--ioengine={engine}",
            f"--size={self.file_bytes}",
            f"--io_size={self.io_bytes}",
            f"--randseed={self.seed}",
            "--direct=1",
            "--randrepeat=0",
            "--thread",
            "--output-format=json",
            "--eta=never",
        ]
        if self.fdatasync_every:
            arguments.append(f"--fdatasync={self.fdatasync_every}")
        if self.rate_bytes_per_s:
            arguments.append(f"--rate={self.rate_bytes_per_s}")
        return arguments


class Fio:
    """A usable fio: its path, version, and the fastest asynchronous engine that works in `directory`."""

    def __init__(self, path: str, version: str, engine: str):
        self.path = path
        self.version = version
        self.engine = engine

    def run(self, job: Job) -> Measured:
        """Carry out the job; raises FioFailed."""
        return _measured(_execute(self.path, job.arguments(self.engine)), job)

    def prepare(self, path: Path, nbytes: int) -> None:
        """A file of `nbytes` that was really written, with bytes that do not compress."""
        if path.exists() and path.stat().st_size == nbytes:
            return
        self.run(Job(path, nbytes, 4 << 20 if nbytes % (4 << 20) == 0 else 4096, 8, nbytes, write=True))
        with path.open("r+b") as file:
            os.fdatasync(file.fileno())


def find(directory: Path) -> Fio | None:
    """fio with an engine that works on this kernel and file system, or None."""
    path = shutil.which("fio")
    if path is None:
        return None
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    probe = directory / f".fio-probe-{os.getpid()}"
    try:
        for engine in ENGINES:
            job = Job(probe, 65536, 4096, 4, 65536, write=True)
            try:
                _execute(path, job.arguments(engine))
            except FioFailed:
                continue
            return Fio(path, version, engine)
    finally:
        probe.unlink(missing_ok=True)
    return None


def _execute(path: str, arguments: list[str]) -> dict[str, Any]:
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FioFailed(f"fio: {error}") from error
    start = done.stdout.find("{")
    if done.returncode or start < 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise FioFailed(f"fio exited with {done.returncode}: {lines[-1] if lines else 'no output'}")
    parsed: dict[str, Any] = json.loads(done.stdout[start:])["jobs"][0]
    if parsed.get("error"):
        raise FioFailed(f"fio job error {parsed['error']}")
    return parsed


def _measured(parsed: dict[str, Any], job: Job) -> Measured:
    side = parsed["write" if job.write else "read"]
    nbytes, seconds = int(side["io_bytes"]), max(1, side["runtime"]) / 1e3
    if nbytes != job.io_bytes:
        raise FioFailed(f"fio moved {nbytes} of {job.io_bytes} bytes")
    cpu = (parsed["usr_cpu"] + parsed["sys_cpu"]) / 100 * parsed["job_runtime"] / 1e3
    return Measured(nbytes, seconds, cpu)
