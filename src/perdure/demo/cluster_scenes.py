"""`perdure demo-cluster`: three hosts, one directory, one Valkey Cluster; a context outlives the host that computed it.

The hosts are network namespaces; the cluster's servers run on a fourth. Host 1 prefills, answers and dies as a whole.
Host 2, which has never seen the context, goes on with its session and makes a branch; host 3 asks the branch another
question. What goes over the cables is counted: to the catalog, and from host to host.
"""

from __future__ import annotations

import secrets
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from perdure.demo.model import BLOCK_TOKENS
from perdure.demo.process import Bound, Child, DemoError, Progress
from perdure.demo.report import Stage
from perdure.demo.scenes import default_model_cache, row_of
from perdure.demo.service import Service
from perdure.demo.worker import FORK_QUESTION, QUESTION, SESSION
from perdure.session import ACCEPTED
from perdure.testing.hosts import Network, lacking, network
from perdure.testing.valkey import cluster

HOSTS = ("host1", "host2", "host3")
_CATALOG = "valkey"
_PATIENCE = "?read_s=2&write_s=10"  # hosts, servers and model share this machine's cores

TITLES = {
    "model": "model and prompts",
    "up": "hosts, Valkey Cluster, services",
    "cold": "host 1: prefill, answer; kill the host",
    "continued": "host 2: go on with the session",
    "forked": "host 3: a branch, another question",
    "compare": "a cold answer to compare",
}


def play(
    directory: Path, *, context_tokens: int | None = None, answer_tokens: int = 24, model_cache: Path | None = None
) -> dict[str, Any]:
    """All scenes. Returns a JSON-able outcome: `ok`, `rows`, `checks` by name, `packets`. Nothing is left in
    `directory`. Raises PerdureError."""
    if problem := lacking():
        raise DemoError(f"three hosts on one machine: {problem}")
    began = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=directory.resolve()) as work, Stage(TITLES) as stage:
        told = _Play(stage, Path(work), answer_tokens).run(context_tokens, model_cache or default_model_cache())
        rows = _rows(told, work)
    checks = _checks(told, rows)
    return {
        "ok": all(checks.values()),
        "checks": checks,
        "rows": rows,
        "packets": told["packets"],
        "killed_processes": told["cold"]["killed"],
        "context_tokens": told["context"],
        "block_tokens": BLOCK_TOKENS,
        "scenes_s": stage.seconds,
        "seconds": round(time.monotonic() - began, 1),
    }


class _Play:
    """The scenes, and what they told."""

    def __init__(self, stage: Stage, work: Path, answer_tokens: int):
        self._stage, self._work, self._answer_tokens = stage, work, answer_tokens
        self._services: dict[str, Service] = {}

    def run(self, context_tokens: int | None, model_cache: Path) -> dict[str, Any]:
        run = secrets.token_hex(4)
        model = self._stage.scene("model", {"kind": "prepare", "model_cache": str(model_cache), "run": run,
                                            "context_tokens": context_tokens})  # fmt: skip
        job = model | {
            "answer_tokens": self._answer_tokens, "logits": str(self._work), "session": f"{SESSION}-{run}",
            "resume": (len(model["prompt"]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS,
        }  # fmt: skip
        told: dict[str, Any] = {"context": model["context"]}
        during = self._stage.during
        with ExitStack() as ends:
            net = ends.enter_context(network([*HOSTS, _CATALOG]))
            during("up", lambda note: self._up(net, ends, note))
            told["control"] = net.prove(HOSTS)
            before = _packets(net)
            told["cold"] = during("cold", lambda note: self._cold(net, job, note))
            token = told["cold"]["token"]
            told["continued"], told["again"] = during(
                "continued", lambda note: self._twice(net, job | {"kind": "outlives", "token": token}, note)
            )
            told["forked"] = during("forked", lambda note: self._on(net, "host3", job | {"kind": "fork"}, note))
            told["packets"] = {name: count - before[name] for name, count in _packets(net).items()}
        compared = job | {"kind": "reference", "shared": [job["fork"][: job["context"]]], "prompts": [[job["fork"]]]}
        told["reference"] = self._stage.scene("compare", compared)
        return told

    def _up(self, net: Network, ends: ExitStack, note: Progress) -> None:
        note("Valkey Cluster", 0, None)
        try:  # nothing but the hosts reaches its address, so it needs no password
            made = cluster(self._work / "valkey", hosts=[Bound(net[_CATALOG])], protected_mode="no")
            servers = ends.enter_context(made)
        except AssertionError as error:
            raise DemoError(f"the Valkey Cluster did not come up: {error}") from None
        for name in HOSTS:
            note(name, 0, None)
            options = ("--catalog", servers.url + _PATIENCE, "--state-dir", str(self._work / name))
            (self._work / name).mkdir()
            self._services[name] = ends.enter_context(Service(self._work / "data", *options, host=net[name]))
            self._services[name].start()

    def _on(self, net: Network, name: str, job: dict[str, Any], note: Progress) -> dict[str, Any]:
        with Child(job | {"store": str(self._work / name)}, note, net[name]) as child:
            return child.result()

    def _cold(self, net: Network, job: dict[str, Any], note: Progress) -> dict[str, Any]:
        """The process stays, so that it is killed together with the service."""
        job = job | {"kind": "cold", "stay": True, "store": str(self._work / "host1")}
        with Child(job, note, net["host1"]) as child:
            answer = child.result()
            killed = net["host1"].kill()
            signals = [-child.process.wait(), self._services["host1"].kill()]
        return answer | {"killed": killed, "signals": signals}

    def _twice(self, net: Network, job: dict[str, Any], note: Progress) -> tuple[dict[str, Any], dict[str, Any]]:
        """From the directory, then from the host's memory."""
        with Child(job | {"store": str(self._work / "host2")}, note, net["host2"]) as child:
            first = child.result()
            child.go_on()
            return first, child.result()


# --- packets
def _packets(net: Network) -> dict[str, int]:
    """Between hosts, and between hosts and the catalog, both ways."""
    return {
        "host to host": net.packets_among(HOSTS),
        "hosts and catalog": sum(net.packets(one, _CATALOG) + net.packets(_CATALOG, one) for one in HOSTS),
    }


# --- the report
def _rows(told: dict[str, Any], logits: str) -> list[dict[str, Any]]:
    cold, (fork,) = told["cold"], told["reference"]["answers"]
    return [
        row_of("cold, host 1", QUESTION, cold, cold, logits),
        row_of("host 2", QUESTION, told["continued"], cold, logits),
        row_of("host 2 again", QUESTION, told["again"], cold, logits),
        row_of("host 3, fork", FORK_QUESTION, told["forked"], fork, logits),
    ]


def _checks(told: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, bool]:
    cold, continued, again, forked = (told[name] for name in ("cold", "continued", "again", "forked"))
    packets, control = told["packets"], told["control"]
    full = told["context"] // BLOCK_TOKENS
    return {
        "all answers are identical to the cold ones": all(row["tokens_identical"] for row in rows),
        "host 1 was killed with SIGKILL: service and model": cold["signals"] == [signal.SIGKILL] * 2,
        "its session went on on host 2": continued["adopted"][0] == ACCEPTED and continued["session_is_prompt"],
        "which prefilled less than one block": continued["prefilled_tokens"] <= BLOCK_TOKENS,
        "from the directory at first, then from memory": continued["restored_blocks"] > 0
        and not continued["from_memory_blocks"]
        and again["from_memory_blocks"] == again["restored_blocks"] == continued["restored_blocks"],
        "host 3 went on with a branch made on host 2": forked["blocks"] == full and forked["restored_blocks"] >= full,
        "no block had to be recomputed": not any(row["recomputed_blocks"] for row in rows),
        "no packet went from host to host": packets["host to host"] == 0,
        "while the same counters saw the control's, and the catalog's": control.counted == control.sent > 0
        and packets["hosts and catalog"] > 0,
    }


def show(outcome: dict[str, Any]) -> None:
    """The outcome for people, on stdout."""
    from rich.console import Console
    from rich.text import Text

    from perdure.demo.report import show_checks, table

    console, packets = Console(), outcome["packets"]
    console.print(table(outcome, _CAPTION))
    for row in outcome["rows"]:
        console.print(Text(f"{row['name']}: {row['question']}\n    {' '.join(row['text'].split())}"), highlight=False)
    lines = f"""
killed: host 1 with all its {outcome["killed_processes"]} processes; hosts 2 and 3 had never seen the context
packets: {packets["host to host"]} from host to host, {packets["hosts and catalog"]:,} between hosts and catalog
{outcome["seconds"]} s in all
"""
    console.print(Text(lines), highlight=False, soft_wrap=True)
    show_checks(outcome["checks"])


_CAPTION = (
    "first token: from token ids to the first token of the answer, with the\n"
    "model loaded and warmed up; cold: the same prompt without a store.\n"
    "read: from the shared directory, or from the memory of that host."
)
