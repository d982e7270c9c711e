"""Rows of `bench engines` about vLLM's offloading tiers: Perdure beside vLLM's own `fs` tier, in one engine.

Contract
- Both are secondary tiers of the same engine process; each prompt is stored in both, and each restore names the tier it
  may come from. Everything else of the way (lookups, primary tier, copies into the cache, the forward pass) is shared.
  Between two restores the local prefix cache and the primary tier are emptied. The arms take turns.
- "from memory": blocks in the service's DRAM, beside files of the `fs` tier in /dev/shm. "from the disk": the service
  has been started anew, so its DRAM is empty, beside files on the store's device, read by O_DIRECT where it can.
- Perdure verifies every block; the `fs` tier keeps no checksums. Outputs of all arms must be equal, else WrongResult.
- A restore's own time is its TTFT less the median TTFT of a local prefix hit in the same engine.
- Runs on a CPU, so the forward pass of the last tokens is most of a TTFT.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from perdure.benchmarks.engines_tier_process import EngineProcess
from perdure.benchmarks.harness import Measured, Row, interleave, limit_row, rate_row, row
from perdure.benchmarks.service_host import Host
from perdure.benchmarks.target import WrongResult
from perdure.limits import GIB

TOKENS = 4800
BLOCK_TOKENS = 128  # vLLM's on a CPU
REPETITIONS = 5
WARM_TOKENS = 300
SHM = Path("/dev/shm")
FS = "vLLM's fs tier"
OURS, THEIRS = "remote", "local"  # localities: how a request says which tier it may load from
LOCAL_TARGET = 1.25
_POOL_BYTES = GIB
_STORED_S = 120.0
_POLL_S = 0.05
_RESTART_S = 1.5  # until the tier tries to connect again, and some


def prompt(seed: int, count: int) -> list[int]:
    """Tokens that mean nothing: a prompt nobody has seen."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(count)]


def stored(engine: EngineProcess, tiers: int = 1) -> float:
    """Wait until no store is going on; bytes written so far, by all tiers together."""
    before, give_up = -1.0, time.monotonic() + _STORED_S
    while time.monotonic() < give_up:
        engine.generate(prompt(int(time.monotonic() * 1000), 8))  # a step, in which vLLM collects finished jobs
        found = engine.ask("metrics", prefix="vllm:kv_offload_tiering_")["metrics"]
        written = sum(value for name, value in found.items() if "write_bytes" in name)
        active = sum(value for name, value in found.items() if "active_cascade" in name)
        kinds = sum(1 for name, value in found.items() if "write_bytes" in name and value)
        if not active and written == before and kinds >= tiers:
            return float(written)
        before = written
        time.sleep(_POLL_S)
    raise WrongResult(f"the tiers did not finish storing in {_STORED_S} s")


class Place:
    """A service and the other tier's folder; the address stays the same when the service is started anew."""

    def __init__(self, base: Path, files: Path):
        self.base, self.files = base, files
        self._link = base / "socket"
        self._host: Host | None = None
        self.restart()

    def restart(self) -> None:
        self.stop()
        self._host = Host(self.base / "store", memory=_POOL_BYTES)
        self._link.unlink(missing_ok=True)
        self._link.symlink_to(self._host.socket)
        with self._host.connect() as store:
            store.wait_ready(_STORED_S)

    def stop(self) -> None:
        if self._host is not None:
            self._host.stop()
            self._host = None

    def tiers(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "perdure", "module_path": "perdure.engines.vllm.tier", "url": f"unix://{self._link}",
                "weights": "files", "after_reset": "same", "locality": OURS.upper(),
            },
            {"type": "fs", "root_dir": str(self.files), "locality": THEIRS.upper()},
        ]  # fmt: skip


class Arms:
    """The same prompt, restored from one tier or the other, or found in the engine's own cache."""

    def __init__(self, engine: EngineProcess, place: Place, tokens: list[int], *, cold_service: bool):
        self._engine, self._place, self._tokens, self._cold = engine, place, tokens, cold_service
        self._cached = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self.first = engine.generate(tokens)
        self.nbytes = 0.0

    def _timed(self, where: str | None) -> float:
        answer = self._engine.generate(self._tokens, **({"from": where} if where else {}))
        if answer["ids"] != self.first["ids"] or answer["cached"] != self._cached:
            raise WrongResult(f"restored from {where or 'the local cache'}: {answer}, at first {self.first}")
        return float(answer["seconds"])

    def ours(self) -> float:
        self._engine.ask("forget")
        if self._cold:
            self._place.restart()
            time.sleep(_RESTART_S)
            self._engine.generate(prompt(7, BLOCK_TOKENS + 1))  # the tier connects again
        return self._timed(OURS)

    def theirs(self) -> float:
        self._engine.ask("forget")
        return self._timed(THEIRS)

    def local(self) -> float:
        return self._timed(None)


def _restore_rows(
    base: Path, model: Path, files: Path, what: str, step: Callable[[str], None], tokens: int, repetitions: int
) -> list[Row]:
    cold_service = what == "from the disk"
    place = Place(base, files)
    try:
        step(f"vLLM starts, {what}")
        options = {"model": str(model), "tiers": place.tiers(), "cpu_bytes": GIB}
        with EngineProcess(base, "engine", **options) as engine:
            engine.generate(prompt(99, WARM_TOKENS))
            step(f"a prompt of {tokens} tokens is computed and stored")
            arms = Arms(engine, place, prompt(1, tokens), cold_service=cold_service)
            stored(engine, 2)
            arms.ours(), arms.theirs(), arms.local()  # once for nothing
            step(f"restores {what}")
            before = _bytes_read(engine)
            ours, theirs, local = interleave([arms.ours, arms.theirs, arms.local], repetitions)
            nbytes = int((_bytes_read(engine) - before) / (2 * repetitions))
            engine.end()
    finally:
        place.stop()
    hit = median(local)
    name = f"vLLM tier, {tokens:,} tokens restored {what}"
    rates = [[Measured(nbytes, max(one - hit, 1e-6)) for one in series] for series in (ours, theirs)]
    note = f"TTFT {median(ours):.3f} s and {median(theirs):.3f} s less that of a local hit, {hit:.3f} s"
    made = [
        row(f"{name}: TTFT", "s", ours, theirs, FS, better="lower", target=1.0),
        rate_row(f"{name}: rate", rates[0], rates[1], FS, target=1.0, note=note),
    ]
    if not cold_service:
        made.append(limit_row(f"{name}: TTFT over a local prefix hit", "x", [one / hit for one in ours], LOCAL_TARGET))
    return made


def _bytes_read(engine: EngineProcess) -> float:
    found = engine.ask("metrics", prefix="vllm:kv_offload_tiering_read_bytes")["metrics"]
    return float(sum(found.values()))


def rows(
    base: Path, model: Path, step: Callable[[str], None], *, tokens: int = TOKENS, repetitions: int = REPETITIONS
) -> list[Row]:
    """base: a folder on the device to measure. model: a directory that vLLM loads. Six steps; two engines are started,
    one after the other. Raises EngineFailed, ServiceFailed, WrongResult."""
    made: list[Row] = []
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="perdure-bench-", dir=SHM) as memory:
        made += _restore_rows(base / "memory", model, Path(memory), "from memory", step, tokens, repetitions)
    shutil.rmtree(base / "memory", ignore_errors=True)
    made += _restore_rows(base / "disk", model, base / "disk" / "fs", "from the disk", step, tokens, repetitions)
    shutil.rmtree(base / "disk", ignore_errors=True)
    return made
