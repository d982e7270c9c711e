"""Rows of `bench governance` about tenants beside each other: what a decision costs, what a neighbour who wants ten
times its share costs the other, and whether one can tell by time what the other has stored.

Contract
- Policy: reads of 64 blocks through the guard of a store in this process, whose answer costs nothing, less the same
  answer without a guard; CPU time of the thread. A look-up is told of its own blocks only: that is no decision but a
  look at each key, and has no target.
- Neighbour: a service of two tenants, each in a process of its own, all reads by message; the neighbour has a quota,
  its share. The victim asks at a steady rate below that. Its p99 while the neighbour asks as often as its quota allows,
  and ten times as often; both take turns. Latency counts from when a question was due.
- Timing: the audit of `perdure audit-isolation`, live; the median area under the ROC curve of several.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import perdure
from perdure.benchmarks import target
from perdure.benchmarks.harness import Row, interleave, limit_row, row
from perdure.benchmarks.service_host import Host
from perdure.benchmarks.target import WrongResult
from perdure.governance.policy import load
from perdure.limits import KIB, MIB
from perdure.observe.isolation import StoreProbe, audit
from perdure.reports import ReadReport
from perdure.segments.landing import BlockStatus
from perdure.service import messages as m
from perdure.service.domains import Domains
from perdure.service.guard import Guard
from perdure.service.peers import Peer

POLICY_US_MAX: Final = 5.0
NEIGHBOUR_RATIO_MAX: Final = 1.3
AUC_MAX: Final = 0.55
BATCH: Final = 64
BLOCK_BYTES: Final = 64 * KIB
READ_BLOCKS: Final = 8
SHARE_PER_S: Final = 100.0
VICTIM_PER_S: Final = 80.0
TIMES_SHARE: Final = 10.0
AUC_BLOCKS: Final = 64
POOL_BYTES: Final = 128 * MIB
TENANTS: Final = ("benchmark", "neighbour")  # the first is that of `target.keyspace`
FOUND: Final = int(BlockStatus.FOUND)


@dataclass(frozen=True, slots=True)
class Plan:
    """decisions: per repetition. seconds: of a phase of the neighbour's. samples: of an audit."""

    decisions: int
    seconds: float
    samples: int
    repetitions: int


FULL: Final = Plan(4_000, 5.0, 250, 5)
QUICK: Final = Plan(1_000, 2.0, 100, 5)


def rows(base: Path, plan: Plan, step: Callable[[str], None]) -> list[Row]:
    step("policy decisions")
    made = _policy_rows(base / "decisions", plan)
    with _service(base / "tenants") as sockets:
        step("noisy neighbour")
        made.append(_neighbour_row(sockets, plan))
        step("timing across tenants")
        made.append(_timing_row(sockets, plan))
    return made


def write_policy(folder: Path) -> list[Path]:
    """Two tenants with the same terms, one engine each; their sockets."""
    (folder / "tenants").mkdir(parents=True)
    sockets = [folder / f"{tenant[0]}.sock" for tenant in TENANTS]
    listed = (
        f'[[principal]]\nname = "{tenant}"\ntenants = ["{tenant}"]\nsocket = "{socket}"\n'
        for tenant, socket in zip(TENANTS, sockets, strict=True)
    )
    (folder / "principals.toml").write_text("\n".join(listed))
    for tenant in TENANTS:
        terms = f'tenant = "{tenant}"\nversion = 1\nmap = false\n'
        if tenant == TENANTS[1]:
            terms += f"[quota]\nrequests_per_s = {SHARE_PER_S}\n"
        (folder / "tenants" / f"{tenant}.toml").write_text(terms)
    return sockets


# --- decisions ------------------------------------------------------------------------------------------------
def _policy_rows(base: Path, plan: Plan) -> list[Row]:
    policy = base / "policy"
    write_policy(policy)
    with perdure.open(base / "store", capacity="256MiB", memory=0) as store:
        guard = Guard(store, load(policy), roots=[base])
        peer = Peer(store.core, Domains(store.core), 0, "bench")
        peer.principal = guard.policies.principals[TENANTS[0]]
        space = target.keyspace(store, 4 * KIB)
        opening = guard.admit(peer, m.OpenSpace(1, TENANTS[0], "m", "w", "", "", {}, "off", "", b""))
        number = peer.open_space(space, opening)
        keys = space.chain(target.tokens(BATCH))
        target.fill(space, keys, 4 * KIB, target.random_bytes(MIB))
        names = keys.tobytes()
        found = bytes([FOUND]) * BATCH
        read = partial(m.Read, 1, number, names, 0, b"", b"", time.monotonic() + 60, False)
        reads = _costs(guard, peer, read, partial(m.Delivered, 1, found, 0, {}, 0), plan)
        looks = _costs(guard, peer, partial(m.Lookup, 1, number, names), partial(m.Count, 1, BATCH), plan)
        return [
            limit_row(f"policy, read of {BATCH} blocks", "us", reads, POLICY_US_MAX),
            row(f"whose blocks, look-up of {BATCH}", "us", looks, (), "nothing", better="lower"),
        ]


def _costs(guard: Guard, peer: Peer, question: Callable[[], Any], answer: Callable[[], Any], plan: Plan) -> list[float]:
    """What the guard adds, in us a question, by repetition. Raises WrongResult."""

    def bare() -> float:
        asked = [question() for _ in range(plan.decisions)]
        began = time.thread_time()
        for _ in asked:
            answer()
        return (time.thread_time() - began) / plan.decisions * 1e6

    def guarded() -> float:
        asked, wrong = [question() for _ in range(plan.decisions)], 0
        began = time.thread_time()
        for one in asked:
            got, _ = guard.carry_out(peer, one, lambda: (answer(), []))
            wrong += isinstance(got, m.Count) and got.count != BATCH
        seconds = time.thread_time() - began
        if wrong or guard.refusal(peer, question()) is not None:
            raise WrongResult("the policy refuses what was to be timed")
        return seconds / plan.decisions * 1e6

    ours, without = interleave([guarded, bare], plan.repetitions)
    return [guarded - bare for guarded, bare in zip(ours, without, strict=True)]


# --- two tenants of a service ---------------------------------------------------------------------------------
@contextmanager
def _service(base: Path) -> Iterator[list[Path]]:
    """The sockets of the tenants' engines; each has stored some blocks, and the service has them in memory."""
    place = Path(tempfile.mkdtemp(prefix="perdure-bench-"))  # a socket's path must be short
    try:
        sockets = write_policy(place / "p")
        with Host(base, memory=POOL_BYTES, policy=place / "p"):
            for socket, tenant in zip(sockets, TENANTS, strict=True):
                with perdure.connect(socket, name="fill") as client:
                    space = keyspace_of(client, tenant)
                    target.fill(space, keys_of(space), BLOCK_BYTES, target.random_bytes(READ_BLOCKS * BLOCK_BYTES))
            yield sockets
    finally:
        shutil.rmtree(place, ignore_errors=True)


def keyspace_of(client: Any, tenant: str) -> Any:
    layout = perdure.KVLayout(
        block_tokens=target.BLOCK_TOKENS, block_bytes=BLOCK_BYTES, dtype="bfloat16", order="layer,kv,head,token,dim"
    )
    return client.keyspace(model="benchmark", weights=target.WEIGHTS, layout=layout, tenant=tenant, codec="off")


def keys_of(space: Any) -> Any:
    return space.chain(target.tokens(READ_BLOCKS))


def ask(socket: Path, tenant: str, per_s: float, seconds: float) -> dict[str, Any]:
    """Reads at a steady rate; those that are late follow at once. Latencies from when each was due, in seconds, and how
    many were delivered and refused. Raises WrongResult for anything else."""
    with perdure.connect(socket, name=tenant) as client:
        space = keyspace_of(client, tenant)
        keys, into = keys_of(space), target.random_bytes(READ_BLOCKS * BLOCK_BYTES)
        space.read(keys, into)
        latencies, delivered, refused = [], 0, 0
        began = time.perf_counter()
        for number in range(int(per_s * seconds)):
            due = began + number / per_s
            time.sleep(max(0.0, due - time.perf_counter()))
            report: ReadReport = space.read(keys, into)
            latencies.append(time.perf_counter() - due)
            delivered += report.usable == READ_BLOCKS
            refused += report.count(BlockStatus.DENIED) == READ_BLOCKS
            if time.perf_counter() - began > 2 * seconds:  # as much as it gets: a closed loop
                break
        if delivered + refused < len(latencies):
            raise WrongResult(f"{len(latencies) - delivered - refused} reads were neither delivered nor refused")
    return {"p99_s": float(np.percentile(latencies, 99)), "asked": len(latencies), "refused": refused}


def _neighbour_row(sockets: list[Path], plan: Plan) -> Row:
    asked: list[int] = []

    def beside(times: float) -> float:
        command = [sys.executable, "-m", __name__, str(sockets[1]), str(SHARE_PER_S * times), str(plan.seconds + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as neighbour:
            try:
                time.sleep(0.5)  # it is asking by then
                mine = ask(sockets[0], TENANTS[0], VICTIM_PER_S, plan.seconds)
                told = json.loads(neighbour.communicate(timeout=60)[0] or b"{}")
            finally:
                neighbour.kill()
        if mine["refused"] or not told:
            raise WrongResult("the victim was refused, or there was no neighbour")
        if times > 1:
            asked.append(round(told["asked"] / (plan.seconds + 1)))
        return float(mine["p99_s"]) * 1e3

    noisy, quiet = interleave([lambda: beside(TIMES_SHARE), lambda: beside(1.0)], plan.repetitions)
    return row(
        f"victim's p99, neighbour asks {TIMES_SHARE:g} times its share", "ms", noisy, quiet, "neighbour at its share",
        better="lower", target=1 / NEIGHBOUR_RATIO_MAX, note=f"the neighbour asked {min(asked)} times a second",
    )  # fmt: skip


def _timing_row(sockets: list[Path], plan: Plan) -> Row:
    """Tenant A is the one without a quota, and asks most."""
    with perdure.connect(sockets[0], name="a") as mine, perdure.connect(sockets[1], name="b") as theirs:
        probe = StoreProbe(mine, theirs, TENANTS, blocks=AUC_BLOCKS, block_bytes=4 * KIB)
        verdicts = [audit(_Patient(probe), plan.samples) for _ in range(plan.repetitions)]
    for one in verdicts:
        if one.inconclusive or one.hits["other"] or one.hits["same"] != one.samples:
            raise WrongResult(f"the audit of timing says nothing: {one.inconclusive or one.hits}")
    return limit_row("timing AUC across tenants", "AUC", [one.auc for one in verdicts], AUC_MAX)


class _Patient:
    """Keeps within the neighbour's quota: a refusal would look like a miss."""

    def __init__(self, probe: StoreProbe):
        self._probe = probe

    def store(self, sample: int) -> None:
        self._probe.store(sample)

    def ask(self, kind: str, sample: int) -> tuple[float, bool | None]:
        time.sleep(0.0 if kind == "same" else 1.5 / SHARE_PER_S)
        return self._probe.ask(kind, sample)


if __name__ == "__main__":
    json.dump(ask(Path(sys.argv[1]), TENANTS[1], float(sys.argv[2]), float(sys.argv[3])), sys.stdout)
