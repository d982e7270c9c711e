"""Rows of `bench engines` about LMCache: Perdure as its L2 beside its own `fs_native`, in the same rounds.

Contract
- LMCache itself does the work, in its own environment: the rounds of `lmcache bench l2`, one adapter alone, and its
  `StorageManager` with its DRAM pool in front of the adapter. Every delivered object is compared with what was stored.
- `fs_native` runs as it comes (through the page cache, never synced) and with O_DIRECT. Ours is `native_plugin`, with
  checksums, at the durability of LMCache's adapters: it survives the process.
- Cold: the service was started anew and the files' page cache was dropped; each object is read once. Warm: it has been
  read before: from the service's DRAM, from the page cache, or with O_DIRECT from the disk again.
- The systems take turns, and each is stopped while another one works. What cannot be installed is a row that says so.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.benchmarks import peers
from perdure.benchmarks.harness import Measured, Row, rate_row, row, size_name, unmeasured
from perdure.benchmarks.peers import OURS, PeerFailed, Worker
from perdure.benchmarks.service_host import Host
from perdure.limits import KIB, MIB, inflight_per_device_max

BUFFERED, DIRECT = "fs_native", "fs_native O_DIRECT"
NEEDS = "xxhash>=3.4"  # what the client of the service imports, and LMCache does not
WEIGHTS = "sha256:" + "b" * 64
STORE, COLD, WARM, LOOKUP = "put", "get cold", "get warm", "lookup"
_MANAGER_BATCH = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """Objects of each size, `batch` of them per call; one call per repetition."""

    object_bytes: tuple[int, ...]
    batch: int
    repetitions: int
    pool_bytes: int


FULL = Plan((512 * KIB, 2 * MIB, 8 * MIB), 32, 7, 3072 * MIB)
QUICK = Plan((2 * MIB,), 16, 5, 512 * MIB)


def install(cache_dir: Path) -> Path:
    """The Python of LMCache's environment under `cache_dir`, with what our client needs; raises PeerFailed."""
    python = peers.install_lmcache(cache_dir)
    there = subprocess.run([str(python), "-c", "import xxhash"], capture_output=True, check=False)
    if there.returncode:
        pip = [str(python), "-m", "pip", "install", "--quiet", NEEDS]
        done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=peers.INSTALL_TIMEOUT_S)
        if done.returncode:
            raise PeerFailed(f"installing {NEEDS} beside LMCache: {done.stderr.strip().splitlines()[-1:]}")
    return python


def adapter(key: str, directory: Path, socket: Path | None) -> str:
    """LMCache's JSON of an adapter."""
    if key == OURS:
        params = {"url": f"unix://{socket}", "tenant": "bench", "weights": WEIGHTS, "dtype": "bfloat16"}
        spec: dict[str, Any] = {
            "type": "native_plugin", "module_path": "perdure.engines.lmcache", "class_name": "PerdureConnector",
            "adapter_params": params,
        }  # fmt: skip
    else:
        direct = {"use_odirect": True} if key == DIRECT else {}
        spec = {"type": "fs_native", "base_path": str(directory), "num_workers": inflight_per_device_max, **direct}
    return json.dumps(spec)


class Sides:
    """A worker per system, and the service of ours."""

    def __init__(self, python: Path, kind: str, base: Path, plan: Plan):
        self.base, self._pool_bytes, self._opening = base, plan.pool_bytes, dict[str, Any]()
        script = Path(__file__).with_name("engines_lmcache_worker.py")
        self.host: Host | None = None
        self.workers = {
            key: Worker(key, [str(python), str(script), kind], own=True) for key in (OURS, BUFFERED, DIRECT)
        }

    def open(self, **fields: Any) -> None:
        self._opening = fields
        self.host = Host(self.base / "service", memory=self._pool_bytes)
        for key in self.workers:
            self._open(key)

    def _open(self, key: str) -> None:
        directory = self.base / key.replace(" ", "-")
        directory.mkdir(exist_ok=True)
        spec = adapter(key, directory, self.host.socket if self.host else None)
        name = "root" if "memory" in self._opening else "adapter"
        self.workers[key].ask("open", **{name: spec}, **self._opening)

    def cool(self) -> None:
        """Nothing is in memory afterwards: the service is another process, the files' pages are dropped."""
        self.workers[OURS].ask("close")
        self.stop()
        self.host = Host(self.base / "service", memory=self._pool_bytes)
        self._open(OURS)
        for key in (BUFFERED, DIRECT):
            self.workers[key].ask("forget")

    def stop(self) -> None:
        if self.host is not None:
            self.host.stop()
            self.host = None

    def close(self) -> None:
        """What one size needed; the workers stay."""
        for worker in self.workers.values():
            worker.ask("close")
        self.stop()

    def end(self) -> None:
        for worker in self.workers.values():
            worker.end()
        self.stop()


Series = dict[tuple[str, str], list[Measured]]


def _turns(sides: Sides, repetition: int) -> list[str]:
    order = list(sides.workers)
    return order if repetition % 2 == 0 else order[::-1]


def _rounds(plan: Plan, sides: Sides, size: int) -> Series:
    """Rounds of `lmcache bench l2`."""
    made: Series = {}
    nbytes = size * plan.batch

    def one(what: str, verb: str, repetition: int, first: int) -> None:
        for key in _turns(sides, repetition):
            told = sides.workers[key].ask(verb, first=first)
            if told["done"] != plan.batch or told.get("wrong"):
                raise PeerFailed(f"{key}: {what}: {told['done']} of {plan.batch} objects, {told.get('wrong')} wrong")
            if what:
                made.setdefault((what, key), []).append(Measured(nbytes, told["seconds"]))

    sides.open(block_bytes=size, batch=plan.batch)
    count = plan.repetitions
    one("", "store", 0, count * plan.batch)  # warms up whatever is made at the first call
    for repetition in range(count):
        one(STORE, "store", repetition, repetition * plan.batch)
    sides.cool()
    one("", "load", 0, count * plan.batch)
    for repetition in range(count):
        one(COLD, "load", repetition, repetition * plan.batch)
    for repetition in range(count):
        one(LOOKUP, "lookup", repetition, repetition * plan.batch)
        one(WARM, "load", repetition, repetition * plan.batch)
    sides.close()
    return made


def _managed(plan: Plan, sides: Sides, size: int) -> Series:
    """`StorageManager`: put and get, its own pool keeping nothing that it loads."""
    made: Series = {}
    nbytes = size * _MANAGER_BATCH

    def one(what: str, verb: str, repetition: int, first: int, **more: Any) -> None:
        for key in _turns(sides, repetition):
            told = sides.workers[key].ask(verb, batches=[list(range(first, first + _MANAGER_BATCH))], **more)
            done = told["blocks"] if verb == "put" else told["found"]
            if done != _MANAGER_BATCH or told.get("wrong"):
                raise PeerFailed(f"{key}: {what}: {done} of {_MANAGER_BATCH} objects, {told.get('wrong')} wrong")
            if what:
                made.setdefault((what, key), []).append(Measured(nbytes, told["seconds"], told["cpu_seconds"]))

    sides.open(block_bytes=size, batch=_MANAGER_BATCH, memory=False)
    count = plan.repetitions
    one("", "put", 0, count * _MANAGER_BATCH, durable=False)
    for repetition in range(count):
        one(STORE, "put", repetition, repetition * _MANAGER_BATCH, durable=False)
    sides.cool()
    one("", "get", 0, count * _MANAGER_BATCH, cold=False)
    for what in (COLD, WARM):
        for repetition in range(count):
            one(what, "get", repetition, repetition * _MANAGER_BATCH, cold=False)
    sides.close()
    return made


_KINDS: dict[str, tuple[str, Callable[[Plan, Sides, int], Series]]] = {
    "l2": ("lmcache bench l2", _rounds),
    "manager": ("LMCache StorageManager", _managed),
}


def _rows_of(title: str, series: Series) -> list[Row]:
    made = []
    for what in (STORE, COLD, WARM):
        for key in (BUFFERED, DIRECT):
            other = f"LMCache {peers.LMCACHE} {key}"
            name = title.format(what) + f", against {key}"
            made.append(rate_row(name, series[what, OURS], series[what, key], other, target=1.0))
    if (LOOKUP, OURS) in series:
        ours, reference = ([m.seconds * 1e3 for m in series[LOOKUP, key]] for key in (OURS, BUFFERED))
        made.append(row(title.format(LOOKUP), "ms", ours, reference, BUFFERED, better="lower", note="informs"))
    return made


def rows(plan: Plan, base: Path, step: Callable[[str], None], cache_dir: Path | None) -> list[Row]:
    """All rows of this module. step: told what begins, once per size and kind and once for the environment.
    cache_dir: where LMCache's environment is, or may be put; None: it is not measured."""
    title = "{kind}, {size}, batch {batch}"
    made: list[Row] = []
    try:
        if cache_dir is None:
            raise PeerFailed("its environment was not asked for")
        step(f"environment of LMCache {peers.LMCACHE}")
        python = install(cache_dir)
    except PeerFailed as error:
        return [
            unmeasured(f"{name}: all rows", "GB/s", BUFFERED, str(error), target=1.0) for name, _ in _KINDS.values()
        ]
    for kind, (name, measure) in _KINDS.items():
        batch = plan.batch if kind == "l2" else _MANAGER_BATCH
        for size in plan.object_bytes:
            about = title.format(kind=name, size=size_name(size), batch=batch)
            step(about)
            home = base / f"lmcache-{kind}-{size}"
            home.mkdir()
            sides = Sides(python, kind, home, plan)
            try:
                made += _rows_of(f"{about}, {{}}", measure(plan, sides, size))
            except PeerFailed as error:
                made.append(unmeasured(about, "GB/s", BUFFERED, str(error), target=1.0))
            finally:
                sides.end()
                shutil.rmtree(home, ignore_errors=True)
    return made
