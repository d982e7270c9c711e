"""Rows of `bench engines` about vLLM's offloading tiers: Perdure beside vLLM's own `fs` and `obj` tiers.

Contract
- Both tiers of a row are secondary tiers of the same engine process; each prompt is stored in both, and each
  restore names the tier it may come from. Everything else of the way (lookups, primary tier, copies into the cache,
  the forward pass) is shared. Between two restores the local prefix cache and the primary tier are emptied. The arms
  take turns.
- "from memory": blocks in the service's DRAM, beside files of the `fs` tier in /dev/shm. "from the disk": prompts are
  restored in turn, more of them than the service's DRAM holds, beside files on the store's device, which the `fs` tier
  reads by O_DIRECT where it can. Where the service had the blocks is counted, and checked.
- Neither side compresses (Perdure's default, `auto`, would: less to read, more work for two cores that also run the
  model). Perdure verifies every block; the `fs` tier keeps no checksums. Other outputs of an arm are a WrongResult.
- A restore's own time is its TTFT less the shortest TTFT of a local prefix hit in the same engine.
- Runs on a CPU, so the forward pass of the last tokens is most of a TTFT.
- vLLM's `obj` tier (promotions alone): through NIXL's OBJ plugin from SeaweedFS on loopback, whose files lie on the
  store's device; ours comes from the disk. Two more things differ, both to its advantage or not, as the server has it:
  an S3 server's answer crosses a socket, and may come from the page cache.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from perdure.benchmarks.harness import Measured, Row, interleave, rate_row, row, unmeasured
from perdure.benchmarks.service_host import Host
from perdure.benchmarks.target import WrongResult
from perdure.limits import GIB
from perdure.testing import seaweed
from perdure.testing.vllm_offline import Generated, OfflineEngine
from perdure.testing.vllm_process import tiering

TOKENS = 4800
BLOCK_TOKENS = 128  # vLLM's on a CPU
REPETITIONS = 5
PROMOTIONS = 15
WARM_TOKENS = 300
LENGTH_TOKENS = 8192
SHM = Path("/dev/shm")
FS, OBJ = "vLLM's fs tier", "vLLM's obj tier"
OURS, THEIRS = "remote", "local"  # localities: how a request says which tier it may load from
READ = "vllm:kv_offload_tiering_read_bytes"
HELD = "vllm:kv_offload_perdure_blocks"
_STORED_S = 120.0
_POLL_S = 0.05
_LEAST_S = 1e-6
_VOLUME_MIB = 1024  # what is stored is below 1 GiB, in several of these


def prompt(seed: int, count: int) -> list[int]:
    """Tokens that mean nothing: a prompt nobody has seen."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(count)]


def forget(engine: OfflineEngine) -> None:
    """Its prefix cache and the primary tier, so that the next prompt comes from a secondary one."""
    engine.call("reset_prefix_cache", reset_connector=True)


def generate(engine: OfflineEngine, tokens: list[int], where: str | None = None, max_tokens: int = 1) -> Generated:
    """where: the locality of the tiers that it may come from."""
    params = {"kv_load_tiers": [{"locality": where}]} if where else None
    [answer] = engine.generate([tokens], max_tokens=max_tokens, params=params, ignore_eos=True)
    return answer


def stored(engine: OfflineEngine, tiers: int = 1) -> float:
    """Wait until no store is going on; bytes written so far, by all tiers together."""
    before, give_up = -1.0, time.monotonic() + _STORED_S
    while time.monotonic() < give_up:
        engine.generate([[1, 2, 3]], max_tokens=1)  # a step, in which vLLM collects finished jobs
        found = engine.metrics("vllm:kv_offload_tiering_")
        written = sum(value for name, value in found.items() if "write_bytes" in name)
        active = sum(value for name, value in found.items() if "active_cascade" in name)
        kinds = sum(1 for name, value in found.items() if "write_bytes" in name and value)
        if not active and written == before and kinds >= tiers:
            return float(written)
        before = written
        time.sleep(_POLL_S)
    raise WrongResult(f"the tiers did not finish storing in {_STORED_S} s")


@dataclass(frozen=True, slots=True)
class Case:
    """Where blocks are restored from. prompts: how many are restored in turn. pool_bytes: the service's DRAM."""

    what: str
    source: str  # as the tier counts it
    prompts: int
    pool_bytes: int


MEMORY = Case("from memory", "memory", 1, GIB)
DISK = Case("from the disk", "disk", 4, GIB // 2)


def tiers_of(service: Host, files: Path) -> list[dict[str, Any]]:
    return [
        {
            "type": "perdure", "module_path": "perdure.engines.vllm.tier", "url": f"unix://{service.socket}",
            "weights": "files", "after_reset": "same", "codec": "off", "locality": OURS.upper(),
        },
        {"type": "fs", "root_dir": str(files), "locality": THEIRS.upper()},
    ]  # fmt: skip


class Arms:
    """Prompts, restored from one tier or the other, or found in the engine's own cache."""

    def __init__(self, engine: OfflineEngine, prompts: list[list[int]]):
        self._engine, self._prompts = engine, prompts
        self._cached = (len(prompts[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self._first = [generate(engine, tokens).tokens for tokens in prompts]
        self._turns = {OURS: 0, THEIRS: 0}
        self._last = 0

    def _timed(self, number: int, where: str | None) -> float:
        answer = generate(self._engine, self._prompts[number], where)
        if answer.tokens != self._first[number] or answer.cached_tokens != self._cached:
            raise WrongResult(
                f"restored from {where or 'the local cache'}: {answer.tokens}, {answer.cached_tokens} cached, "
                f"at first {self._first[number]}"
            )
        if answer.first_token_s is None:
            raise WrongResult("vLLM does not say when the first token came")
        return answer.first_token_s

    def _restore(self, where: str) -> float:
        forget(self._engine)
        self._last = self._turns[where] % len(self._prompts)
        self._turns[where] += 1
        return self._timed(self._last, where)

    def ours(self) -> float:
        return self._restore(OURS)

    def theirs(self) -> float:
        return self._restore(THEIRS)

    def local(self) -> float:
        return self._timed(self._last, None)


def _restore_rows(
    base: Path, model: Path, files: Path, case: Case, step: Callable[[str], None], tokens: int, repetitions: int
) -> list[Row]:
    with Host(base / "store", memory=case.pool_bytes) as service:
        step(f"vLLM starts, {case.what}")
        llm = {"model": model, "dtype": "float32", "max_model_len": LENGTH_TOKENS}
        with OfflineEngine(llm, base / "engine.log", transfer=tiering(*tiers_of(service, files))) as engine:
            generate(engine, prompt(99, WARM_TOKENS))
            step(f"{case.prompts} x {tokens} tokens are computed and stored")
            arms = Arms(engine, [prompt(seed, tokens) for seed in range(case.prompts)])
            stored(engine, 2)
            for _ in range(case.prompts):  # once for nothing
                arms.ours(), arms.theirs(), arms.local()
            step(f"restores {case.what}")
            before = engine.metrics(READ)
            ours, theirs, local = interleave([arms.ours, arms.theirs, arms.local], repetitions)
            after = engine.metrics(READ)
            _check_source(engine, case)
            engine.end()
    nbytes = int((sum(after.values()) - sum(before.values())) / (2 * repetitions))
    hit = min(local)
    name = f"vLLM tier, {tokens:,} tokens restored {case.what}"
    rates = [[Measured(nbytes, max(one - hit, _LEAST_S)) for one in series] for series in (ours, theirs)]
    note = f"TTFT {median(ours):.3f} s and {median(theirs):.3f} s less the shortest of a local hit, {hit:.3f} s"
    return [
        row(f"{name}: TTFT", "s", ours, theirs, FS, better="lower", target=1.0),
        rate_row(f"{name}: rate", rates[0], rates[1], FS, target=1.0, note=note),
        row(f"{name}: TTFT beside a local hit", "s", ours, local, "local prefix-cache hit", better="lower"),
    ]


def _check_source(engine: OfflineEngine, case: Case) -> None:
    """That the service had the blocks where they were to be; the first round, for nothing, may differ."""
    found = engine.metrics(HELD)
    mine = sum(value for name, value in found.items() if name.endswith(f":held,{case.source}"))
    other = sum(value for name, value in found.items() if ":held," in name) - mine
    if other > mine / 4:
        raise WrongResult(f"{case.what}: {mine:.0f} blocks came from {case.source}, {other:.0f} did not")


def promotion_rows(
    base: Path, step: Callable[[str], None], *, repetitions: int = PROMOTIONS, memory: Path = SHM
) -> list[Row]:
    """Without a model: a minute. Three steps. memory: a folder on a tmpfs."""
    from perdure.benchmarks.engines_tier_promotion import rows_of

    made: list[Row] = []
    base.mkdir(parents=True, exist_ok=True)
    for case, peer in ((MEMORY, _fs), (DISK, _fs), (DISK, _obj)):
        step(f"promotions {case.what}")
        what = f"{case.what}, beside objects" if peer is _obj else case.what
        if peer is _obj and (why := _no_obj()):
            made.append(unmeasured(f"vLLM tier, {what}: into the primary tier", "GB/s", OBJ, why, target=1.0))
            continue
        where = memory if case is MEMORY else base
        with (
            tempfile.TemporaryDirectory(prefix="perdure-bench-", dir=where) as files,
            tempfile.TemporaryDirectory(prefix="store-", dir=base) as data,
            Host(Path(data) / "store", memory=case.pool_bytes) as service,
            peer(Path(files)) as theirs,
        ):
            made += rows_of(f"unix://{service.socket}", theirs, what, case.prompts, repetitions)
    return made


@contextlib.contextmanager
def _fs(files: Path) -> Iterator[dict[str, Any]]:
    yield {"type": "fs", "root_dir": str(files)}


@contextlib.contextmanager
def _obj(files: Path) -> Iterator[dict[str, Any]]:
    """Settings of the `obj` tier, while an S3 server keeps its objects in `files`."""
    # Without it vLLM 0.32's tier ends its engine: it asks each transfer for its telemetry, which NIXL does not keep.
    telemetry = mock.patch.dict(os.environ, {"NIXL_TELEMETRY_ENABLE": "y"})
    with seaweed.weed(files, _VOLUME_MIB) as server, telemetry:
        server.wait_ready()
        where = {"bucket": seaweed.BUCKET, "endpoint_override": server.url, "scheme": "http", "region": seaweed.REGION}
        yield {"type": "obj", "store_config": where | {"access_key": seaweed.KEY, "secret_key": seaweed.SECRET}}


def _no_obj() -> str | None:
    """Why vLLM's `obj` tier cannot be measured here, None if it can."""
    for package in ("nixl", "obstore"):
        if find_spec(package) is None:
            return f"the package `{package}` is not installed: make bench-engines"
    return seaweed.missing()


def rows(
    base: Path, model: Path, step: Callable[[str], None], *, tokens: int = TOKENS, repetitions: int = REPETITIONS
) -> list[Row]:
    """base: a folder on the device to measure. model: a directory that vLLM loads. Nine steps; two engines are
    started, one after the other. Raises EngineFailed, ServiceFailed, WrongResult."""
    made = promotion_rows(base, step)
    for case in (MEMORY, DISK):
        where = SHM if case is MEMORY else base
        with (
            tempfile.TemporaryDirectory(prefix="perdure-bench-", dir=where) as files,
            tempfile.TemporaryDirectory(prefix="engine-", dir=base) as data,
        ):
            made += _restore_rows(Path(data), model, Path(files), case, step, tokens, repetitions)
    return made
