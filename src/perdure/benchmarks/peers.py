"""The same work through Perdure, LMCache and a file-per-block store, each in its own process and environment.

Contract
- The workers are told the same commands over pipes, take turns, and are stopped (SIGSTOP) while another one works, so
  that background threads of one do not spend the cores of another. Every delivered block is compared with the bytes
  that were stored, in every system.
- A peer that cannot be installed or started is a row that says so; the others run.
- The benchmark installs LMCache into a virtual environment of its own under `cache_dir`, once.
- Data goes below `directory` and is removed at the end, also after an error.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.benchmarks import peer_protocol
from perdure.benchmarks.harness import Measured, Report, Row, count_row, machine, rate_row, size_name, unmeasured
from perdure.benchmarks.progress import Progress
from perdure.errors import PerdureError
from perdure.limits import GIB, KIB, MIB

HERE = Path(__file__).parent
LMCACHE = "0.5.6"
TORCH = "torch==2.13.0"
# What LMCache imports on a machine without a GPU. Its own requirements would add gigabytes of CUDA packages.
LMCACHE_NEEDS = (
    "aiofile",
    "aiofiles",
    "blake3",
    "aiohttp",
    "awscrt",
    "cryptography",
    "fastapi",
    "httpx",
    "huggingface_hub>=1.5.0",
    "msgspec",
    "numpy<=2.2.6",
    "numba",
    "nvtx",
    "opentelemetry-api<=1.40.0",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp",
    "opentelemetry-exporter-prometheus<=0.61b0",
    "prometheus_client<=0.24.1",
    "psutil",
    "py-cpuinfo",
    "pyyaml",
    "pyzmq>=25",
    "grpcio>=1.78.0",
    "protobuf<7",
    "redis",
    "safetensors",
    "sortedcontainers",
    "transformers>=5.4",
    "uvicorn",
    "httptools",
    "cachetools",
    "setuptools<81",
    "requests",
)
INSTALL_TIMEOUT_S = 1800
ANSWER_TIMEOUT_S = 300
OURS = "perdure"
PUT, PUT_DURABLE = "put", "put that survives power loss"
FIRST, WARM = "first get", "get warm"


class PeerFailed(PerdureError):
    """A worker could not be installed or started, or reported an error."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `work_bytes` per repetition and system; a batch larger than that runs once."""

    block_bytes: tuple[int, ...]
    batches: tuple[int, ...]
    work_bytes: int
    repetitions: int


FULL = Plan((512 * KIB, 2 * MIB, 8 * MIB), (1, 16, 64), 256 * MIB, 5)
QUICK = Plan((512 * KIB, 8 * MIB), (1, 16), 32 * MIB, 5)


class Worker:
    """One system in its own process. It only runs while it answers, unless `pause` is off. `own`: it imports the
    perdure that this process runs, whatever is installed."""

    def __init__(self, key: str, command: Sequence[str], *, pause: bool = True, own: bool = False):
        self.key = key
        self.name = key
        self._pause = pause
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in `end`
        environment = _environment() | ({"PYTHONPATH": str(HERE.parents[1])} if own else {})
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )

    def ask(self, verb: str, **arguments: object) -> dict[str, Any]:
        """Carry out one command; raises PeerFailed with the worker's own error."""
        self._process.send_signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_TIMEOUT_S)
            if not ready:
                self._process.kill()
                raise PeerFailed(f"{self.key}: no answer to {verb!r} in {ANSWER_TIMEOUT_S} s")
            line = self._process.stdout.readline()
        except OSError as error:
            raise PeerFailed(f"{self.key}: {error}; {self._last_words()}") from error
        if not line:
            raise PeerFailed(f"{self.key} ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self.key}: {answer['error']}")
        if self._pause:
            self._process.send_signal(signal.SIGSTOP)
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else "no output"

    def end(self) -> None:
        """Let the process go; never raises."""
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.communicate(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._log.close()


def _environment() -> dict[str, str]:
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {key: value for key, value in os.environ.items() if key not in dropped}


def install_lmcache(cache_dir: Path) -> Path:
    """The Python of LMCache's environment under `cache_dir`, made if it is not there; raises PeerFailed."""
    steps = ([TORCH], LMCACHE_NEEDS, ["--no-deps", f"lmcache=={LMCACHE}"])
    return install(cache_dir, f"lmcache-{LMCACHE}", f"LMCache {LMCACHE}", steps)


def install(cache_dir: Path, folder: str, what: str, steps: Sequence[Sequence[str]]) -> Path:
    """The Python of an environment for a peer with wheels for CPython 3.11, made with one pip install per step."""
    home = (cache_dir / folder).absolute()
    python = home / "bin" / "python"
    if (home / "complete").exists():
        return python
    maker = sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")
    if maker is None:
        raise PeerFailed(f"{what} is installed for CPython 3.11 only, and there is no python3.11 here")
    cache_dir.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    for step in ([maker, "-m", "venv", "--clear", str(home)], *([*pip, *step] for step in steps)):
        try:
            done = subprocess.run(step, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, env=_environment())
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerFailed(f"installing {what}: {error}") from error
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
            raise PeerFailed(f"installing {what}: {lines[-1] if lines else 'pip failed'}")
    (home / "complete").touch()
    return python


def _workers(cache_dir: Path, wanted: Sequence[str]) -> tuple[list[Worker], dict[str, str]]:
    """Started workers, ours first, and the reason for each that cannot be."""
    made = [Worker(OURS, [sys.executable, "-m", "perdure.benchmarks.peer_perdure"])]
    failed: dict[str, str] = {}
    if "files" in wanted:
        made.append(Worker("files", [sys.executable, "-m", "perdure.benchmarks.peer_files"]))
    systems = [name for name in ("fs_native", "local_disk") if name in wanted]
    if systems:
        try:
            python = install_lmcache(cache_dir)
        except PeerFailed as error:
            failed.update({name: str(error) for name in systems})
        else:
            made += [Worker(name, [str(python), str(HERE / "peer_lmcache.py"), name]) for name in systems]
    return made, failed


NAMES = {
    "files": "file per block",
    "fs_native": f"LMCache {LMCACHE} fs_native",
    "local_disk": f"LMCache {LMCACHE} local disk",
}


class Round:
    """All work at one block size and batch: a fresh directory per system, puts, cold gets, warm gets."""

    def __init__(self, plan: Plan, directory: Path, block_bytes: int, batch: int):
        self._plan = plan
        self._directory = directory
        self._block_bytes = block_bytes
        self._batch = batch
        self._count = max(1, plan.work_bytes // (block_bytes * batch))
        self._random = random.Random(block_bytes ^ batch)
        self.series: dict[tuple[str, str], list[Measured]] = {}
        self.failed: dict[str, str] = {}

    def _ids(self, repetition: int) -> list[list[int]]:
        base = repetition * self._count * self._batch
        return [list(range(base + i * self._batch, base + (i + 1) * self._batch)) for i in range(self._count)]

    def open(self, workers: list[Worker], *, memory: bool) -> None:
        fields = {"block_bytes": self._block_bytes, "batch": self._batch, "memory": memory}
        for worker in self._alive(workers):
            root = self._directory / worker.key
            root.mkdir(parents=True, exist_ok=True)
            try:
                worker.name = worker.ask("open", root=str(root), **fields)["name"]
            except PeerFailed as error:
                if worker.key == OURS:
                    raise
                self.failed[worker.key] = str(error)

    def _turns(
        self, workers: list[Worker], what: str, verb: str, batches: Any, repetition: int, **more: object
    ) -> None:
        order = self._alive(workers)
        for worker in order if repetition % 2 == 0 else order[::-1]:
            try:
                answer = worker.ask(verb, batches=batches, **more)
                count = answer["blocks"] if verb == "put" else answer["found"]
                expected = self._count * self._batch
                if count != expected or answer.get("wrong"):
                    raise PeerFailed(f"{worker.key}: {what}: {count} of {expected} blocks, {answer.get('wrong')} wrong")
            except PeerFailed as error:
                if worker.key == OURS:
                    raise
                self.failed[worker.key] = str(error)
                continue
            done = Measured(expected * self._block_bytes, answer["seconds"], answer["cpu_seconds"])
            self.series.setdefault((what, worker.key), []).append(done)

    def run(self, workers: list[Worker]) -> None:
        self.open(workers, memory=False)
        self.put_and_get(workers)
        self.open(workers, memory=True)
        batches = self._ids(0)
        for worker in self._alive(workers):
            worker.ask("get", batches=batches, cold=False)
        self._get_warm(workers, batches)

    def run_in_memory(self, workers: list[Worker]) -> None:
        """Put once, then warm gets only: for systems whose blocks are in a server's memory."""
        self.open(workers, memory=True)
        batches = self._ids(0)
        self._turns(workers, PUT, "put", batches, 0, durable=False)
        self._turns(workers, FIRST, "get", batches, 1, cold=False)
        self._get_warm(workers, batches)

    def _get_warm(self, workers: list[Worker], batches: list[list[int]]) -> None:
        for repetition in range(self._plan.repetitions):
            self._random.shuffle(batches)
            self._turns(workers, WARM, "get", batches, repetition, cold=False)

    def put_and_get(self, workers: list[Worker]) -> None:
        """Puts, cold gets of what was put, and puts that survive power loss (where a system offers that)."""
        repetitions = self._plan.repetitions
        for repetition in range(repetitions):
            self._turns(workers, PUT, "put", self._ids(repetition), repetition, durable=False)
        for repetition in range(repetitions):
            batches = self._ids(repetition)
            self._random.shuffle(batches)
            self._turns(workers, "get cold", "get", batches, repetition, cold=True)
        durable = [w for w in workers if w.key in (OURS, "files")]
        for repetition in range(repetitions):
            ids = self._ids(repetitions + repetition)
            self._turns(durable, PUT_DURABLE, "put", ids, repetition, durable=True)

    def _alive(self, workers: list[Worker]) -> list[Worker]:
        return [w for w in workers if w.key not in self.failed]

    def rows(self, workers: list[Worker]) -> list[Row]:
        made = []
        block = size_name(self._block_bytes)
        for what in (PUT, PUT_DURABLE, "get cold", WARM):
            for worker in workers[1:]:
                name = f"{what}, {block}, batch {self._batch}, against {worker.name}"
                reference = self.series.get((what, worker.key), [])
                if worker.key in self.failed:
                    made.append(unmeasured(name, "GB/s", worker.name, self.failed[worker.key], target=1.0))
                elif reference:
                    made.append(rate_row(name, self.series[what, OURS], reference, worker.name, target=1.0))
        return made


def flip_byte(root: Path, mark: bytes) -> int:
    """Flip one bit of the last place below `root` where `mark` is stored; how many files hold it."""
    holders = 0
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p.stat().st_size):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
            at = view.rfind(mark)
            if at < 0:
                continue
            holders += 1
            view[at + 10] ^= 1
            view.flush()
            os.fsync(file.fileno())
    return holders


def _integrity(directory: Path, workers: list[Worker], block_bytes: int) -> list[Row]:
    """Store blocks, flip one bit of one of them on the disk, read all of them cold: is the changed one delivered?"""
    served: dict[str, int] = {}
    blocks = list(range(8))
    mark = peer_protocol.Contents(block_bytes).mark(blocks[3])
    for worker in workers:
        root = directory / worker.key
        root.mkdir(parents=True)
        worker.ask("open", root=str(root), block_bytes=block_bytes, batch=len(blocks), memory=False)
        worker.ask("put", batches=[blocks], durable=False)
        if flip_byte(root, mark) != 1:
            raise PeerFailed(f"{worker.key}: the block to damage was not found on the disk")
        answer = worker.ask("get", batches=[blocks], cold=True)
        served[worker.key] = answer["wrong"]
        if worker.key == OURS and answer["found"] != len(blocks) - 1:
            raise PeerFailed(f"{OURS}: {answer['found']} of {len(blocks) - 1} undamaged blocks delivered")
    name = "one bit flipped on the disk: wrong blocks served, against "
    return [count_row(name + w.name, "blocks", served[OURS], served[w.key], w.name) for w in workers[1:]]


def run(
    directory: os.PathLike[str] | str,
    *,
    cache_dir: os.PathLike[str] | str,
    quick: bool = False,
    json: bool = False,
    peers: Sequence[str] = ("files", "fs_native", "local_disk"),
) -> Report:
    """Measure; `directory` takes the data, `cache_dir` the peers' environments. `json`: no progress is drawn.

    Raises PeerFailed when our own worker fails, or a peer fails in the middle of the work."""
    plan = QUICK if quick else FULL
    base = Path(tempfile.mkdtemp(prefix="peers-", dir=directory))
    report = Report("Perdure beside other KV-cache stores", machine(base, free_gib=shutil.disk_usage(base).free // GIB))
    rounds = [(size, batch) for size in plan.block_bytes for batch in plan.batches]
    workers: list[Worker] = []
    try:
        with Progress("peers", len(rounds) + 2, silent=json) as progress:
            progress.step("environments")
            workers, failed = _workers(Path(cache_dir), peers)
            for size, batch in rounds:
                progress.step(f"{size // KIB} KiB, batch {batch}")
                where = base / f"{size}-{batch}"
                one = Round(plan, where, size, batch)
                one.run(workers)
                report.rows += one.rows(workers)
                shutil.rmtree(where)
            progress.step("integrity")
            report.rows += _integrity(base / "integrity", workers, 512 * KIB)
        for worker in workers[1:]:
            if worker.key != "files":
                name = f"{PUT_DURABLE}, against {worker.name}"
                report.rows.append(unmeasured(name, "GB/s", worker.name, "it never calls fsync", target=1.0))
        for name, reason in failed.items():
            report.rows.append(unmeasured(f"all work against {NAMES[name]}", "GB/s", NAMES[name], reason, target=1.0))
    finally:
        for worker in workers:
            worker.end()
        shutil.rmtree(base, ignore_errors=True)
    return report
