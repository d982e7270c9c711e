"""Rows of `bench engines` about the vLLM connector: what a restore takes, and what storing costs.

Contract
- One pair of vLLM processes at a time; both are warmed up with a long prompt first. Each prompt is computed by a plain
  vLLM and by one with the connector in turns; then two new processes, one on the service's socket and one on its TCP
  port, restore it and ask again for their own prefix hit. Then the service is started anew, so that its memory is
  empty, and the prompts are restored from the disk.
- vLLM's worker turns in its queue for a second after its last step: a whole core, of which another engine must have
  nothing left over. So every timed request waits until that is over.
- Every engine computes with the same number of cores: left to itself vLLM reserves one more with a connector than
  without, and none if there are then too few left.
- Times to the first token are vLLM's own. The model runs in its own type, bf16, where a hit in vLLM's own prefix cache
  may be answered otherwise than a cold prompt; so every restored answer must equal those of the prefix hits, else
  WrongResult. A restore that did not restore everything is WrongResult, too.
- The bound for the disk is the local hit plus 1.1 times the bytes at fio's rate, as measured in the same repetition.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perdure.benchmarks import fio
from perdure.benchmarks.harness import Row, limit_row, row, unmeasured
from perdure.benchmarks.service_host import Host
from perdure.benchmarks.target import WrongResult
from perdure.limits import GIB, MIB
from perdure.testing.vllm_offline import Generated, OfflineEngine
from perdure.testing.vllm_process import connector

DTYPE = "bfloat16"
STEPS_VARIABLE = "PERDURE_BENCH_STEPS"  # names the file of `engines_timed`
BLOCK_TOKENS = 128  # vLLM's on a CPU
_WARM_TOKENS = 2000
_DECODED_TOKENS = 32
_LENGTH_TOKENS = 8192
_POOL_BYTES = 2 * GIB
_SETTLED_S = 120.0
_POLL_S = 0.25
# A busy machine answers late: that shows in the times, and must not make a miss of a restore, which ends the run.
_SETTINGS = {"retry_s_min": 0.2, "retry_s_max": 1.0, "lookup_wait_ms_max": 2000.0}
_RECONNECT_S = 2.0
_QUIET_S = 1.5
_CORES = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}  # one for the engine's other processes and threads
_FIO_BLOCK_BYTES = 2 * MIB
_FIO_DEPTH = 8
MEMORY_TARGET, DISK_FACTOR, STORE_TARGET, DECODE_TARGET, NODE_TARGET, STEP_MS = 1.25, 1.1, 1.03, 1.01, 1.10, 0.2

Step = Callable[[str], None]


def prompt(seed: int, count: int) -> list[int]:
    """Tokens that mean nothing: a prompt nobody has seen."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(count)]


class Place:
    """A service whose socket keeps its address when it is started anew."""

    def __init__(self, base: Path):
        self.base = base
        self._link = base / "socket"
        base.mkdir(parents=True, exist_ok=True)
        self.host = self._start()

    def _start(self) -> Host:
        host = Host(self.base / "store", memory=_POOL_BYTES, listen="127.0.0.1:0")
        self._link.unlink(missing_ok=True)
        self._link.symlink_to(host.socket)
        return host

    def restart(self) -> None:
        self.host.stop()
        self.host = self._start()

    @property
    def url(self) -> str:
        return f"unix://{self._link.absolute()}"

    def settled(self) -> int:
        """Wait until nothing more is being stored; bytes of KV in the store."""
        before, give_up = -1, time.monotonic() + _SETTLED_S
        with self.host.connect() as store:
            while time.monotonic() < give_up:
                now = sum(int(one["kv_bytes"]) for one in store.status()["tenants"].values())
                if now and now == before:
                    return now
                before = now
                time.sleep(_POLL_S)
        raise WrongResult(f"storing did not end in {_SETTLED_S:.0f} s")

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.host.stop()


def engine(model: Path, base: Path, name: str, url: str | None = None, **more: Any) -> OfflineEngine:
    """A vLLM that is starting. url: of the service that its connector uses; None: no connector."""
    transfer = None
    if url is not None:
        timed = {"kv_connector": "TimedConnector", "kv_connector_module_path": "perdure.benchmarks.engines_timed"}
        transfer = connector(url, **_SETTINGS) | timed
    return OfflineEngine(
        {"model": model, "dtype": DTYPE, "max_model_len": _LENGTH_TOKENS} | more, base / f"{name}.log",
        transfer=transfer, environment=_CORES | {STEPS_VARIABLE: str(base / f"{name}.steps")}, wait=False,
    )  # fmt: skip


def warmed(engines: Sequence[OfflineEngine]) -> None:
    for number, one in enumerate(engines):
        one.wait_ready()
        one.generate([prompt(10_000 + number, _WARM_TOKENS)], salt="warm", params={"max_store_tokens": 0})


def first_token_s(answer: Generated) -> float:
    if answer.first_token_s is None:
        raise WrongResult("vLLM does not say when the first token came")
    return answer.first_token_s


class _Prompts:
    """The prompts of a run, and what they are answered when they are restored or hit."""

    def __init__(self, tokens: int, count: int):
        self.prompts = [prompt(number + 1, tokens) for number in range(count)]
        self.restored_tokens = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self._answers: dict[int, list[int]] = {}

    def ask(self, one: OfflineEngine, number: int, cached: int, **options: Any) -> Generated:
        """Raises WrongResult if another number of tokens was cached, or the answer of a hit is another than before."""
        time.sleep(_QUIET_S)
        [answer] = one.generate([self.prompts[number]], ignore_eos=True, **options)
        if answer.cached_tokens != cached or (
            cached and self._answers.setdefault(number, answer.tokens) != answer.tokens
        ):
            raise WrongResult(
                f"prompt {number} in {one.log.stem}: {answer.cached_tokens} tokens cached, {cached} expected; "
                f"answer {answer.tokens}, before {self._answers.get(number)}"
            )
        return answer


def _stored(model: Path, place: Place, prompts: _Prompts) -> list[Row]:
    """Every prompt is computed with and without the connector."""
    ttft: dict[bool, list[float]] = {False: [], True: []}
    decode: dict[bool, list[float]] = {False: [], True: []}
    with (
        engine(model, place.base, "plain") as plain,
        engine(model, place.base, "first", place.url) as first,
    ):
        warmed((plain, first))
        for number in range(len(prompts.prompts)):
            for ours in (False, True) if number % 2 == 0 else (True, False):
                answer = prompts.ask(first if ours else plain, number, 0, max_tokens=_DECODED_TOKENS)
                ttft[ours].append(first_token_s(answer))
                decode[ours].append((answer.decode_s or 0.0) / (_DECODED_TOKENS - 1))
        place.settled()
    tokens = len(prompts.prompts[0])
    return [
        row(f"vLLM connector, {tokens:,} tokens computed and stored: TTFT", "s", ttft[True], ttft[False],
            "vLLM without a connector", better="lower", target=1 / STORE_TARGET),
        row("vLLM connector, a token decoded while the prompt is being stored", "s", decode[True], decode[False],
            "vLLM without a connector", better="lower", target=1 / DECODE_TARGET),
    ]  # fmt: skip


def _restored(
    model: Path, place: Place, prompts: _Prompts, step: Step, fio_s: Callable[[int], float | None]
) -> list[Row]:
    """Every prompt in two new processes, from the service's memory; then from its disk."""
    full, count = prompts.restored_tokens, len(prompts.prompts)
    times: dict[str, list[float]] = {name: [] for name in ("memory", "hit", "node", "disk", "disk hit", "bound")}
    nbytes = place.settled() // count
    with (
        engine(model, place.base, "same-host", place.url) as near,
        engine(model, place.base, "node", f"tcp://{place.host.listen}") as far,
    ):
        warmed((near, far))
        step("restores from the service's memory, and from a node")
        for number in range(count):
            for one, name in (
                ((near, "memory"), (far, "node")) if number % 2 == 0 else ((far, "node"), (near, "memory"))
            ):
                times[name].append(first_token_s(prompts.ask(one, number, full)))
                hit = first_token_s(prompts.ask(one, number, full))
                if one is near:
                    times["hit"].append(hit)
        far.kill()
        step("the service starts anew")
        place.restart()
        near.call("reset_prefix_cache")
        time.sleep(_RECONNECT_S)
        near.generate([prompt(20_000, BLOCK_TOKENS + 1)])
        step("restores from the disk")
        for number in range(count):
            times["disk"].append(first_token_s(prompts.ask(near, number, full)))
            times["disk hit"].append(first_token_s(prompts.ask(near, number, full)))
            read_s = fio_s(nbytes)
            if read_s is not None:
                times["bound"].append(times["disk hit"][-1] + DISK_FACTOR * read_s)
    return _restore_rows(times, len(prompts.prompts[0]), nbytes)


def _restore_rows(times: dict[str, list[float]], tokens: int, nbytes: int) -> list[Row]:
    name = f"vLLM connector, {tokens:,} tokens in a new process"
    size = f"{nbytes / 1e6:.0f} MB"
    made = [
        row(f"{name}, from the service's memory: TTFT", "s", times["memory"], times["hit"], "its own prefix hit",
            better="lower", target=1 / MEMORY_TARGET, note=f"{size}; p99 {_p99(times['memory']):.3f} s"),
        row(f"{name}, from a node over TCP: TTFT", "s", times["node"], times["memory"], "same host, from memory",
            better="lower", target=1 / NODE_TARGET, note=f"loopback; p99 {_p99(times['node']):.3f} s"),
    ]  # fmt: skip
    disk, bound = f"{name}, from the disk: TTFT", "its own prefix hit + 1.1 x bytes / fio"
    if times["bound"]:
        made.append(row(disk, "s", times["disk"], times["bound"], bound, better="lower", target=1.0,
                        note=f"{size}; p99 {_p99(times['disk']):.3f} s"))  # fmt: skip
    else:
        made.append(unmeasured(disk, "s", bound, "fio is not installed: make tools", target=1.0))
    return made


def _p99(values: Any) -> float:
    return float(np.quantile(values, 0.99, method="higher"))


def _step_rows(place: Place) -> list[Row]:
    steps = np.concatenate([np.fromfile(path) for path in sorted(place.base.glob("*.steps"))])
    note = f"{len(steps):,} steps; median {np.median(steps) * 1e3:.3f} ms, longest {steps.max() * 1e3:.2f} ms"
    return [
        limit_row(
            "vLLM connector, added to a step of the scheduler, p99", "ms", [_p99(steps) * 1e3], STEP_MS, note=note
        )
    ]


def _reader(base: Path, nbytes_max: int) -> Callable[[int], float | None]:
    """Seconds fio needs to read so many bytes, 2 MiB at a time, at random places of a file."""
    found = fio.find(base)
    if found is None:
        return lambda nbytes: None
    path, size = base / "fio", nbytes_max // _FIO_BLOCK_BYTES * _FIO_BLOCK_BYTES
    found.prepare(path, size)
    seeds = iter(range(1, 1 << 20))

    def read_s(nbytes: int) -> float:
        length = min(size, max(1, nbytes // _FIO_BLOCK_BYTES) * _FIO_BLOCK_BYTES)
        job = fio.Job(path, size, _FIO_BLOCK_BYTES, _FIO_DEPTH, length, seed=next(seeds))
        return found.run(job).seconds * nbytes / length

    return read_s


def rows(base: Path, model: Path, step: Step, *, tokens: int, repetitions: int) -> list[Row]:
    """base: a folder on the device to measure. Raises EngineFailed, ServiceFailed, WrongResult."""
    with Place(base) as place:
        prompts = _Prompts(tokens, repetitions)
        step("vLLM with and without the connector")
        made = _stored(model, place, prompts)
        reader = _reader(base, place.settled())
        step("new processes")
        made += _restored(model, place, prompts, step, reader)
        return made + _step_rows(place)
