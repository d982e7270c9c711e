"""vLLM in processes of their own, for tests, the demo and benchmarks: started, watched, killed as a whole.

Contract
- A `ProcessGroup` is a session of its own: `kill` sends SIGKILL to every process in it (API server, engine core,
  workers) and returns when none of them runs any more. `kill_leader` kills the first one alone, as a crash does.
- Nothing outlives the `with` block: what vLLM leaves in /dev/shm when it is killed (a GiB with its offloading tier) is
  removed by `kill`. If this process is killed, so is the leader; the others end when they notice.
- What the processes write is kept in the file `log`; `last_words` are its last lines.
- Not for use from a thread that ends before the group: the kernel ties the leader's life to the thread that started it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from perdure.demo.process import bound
from perdure.errors import PerdureError
from perdure.limits import GIB

START_S = 300.0  # imports take 11 s on idle cores, the engine 10 to 40 s
GONE_S = 30.0
POLL_S = 0.05
# Threads that wait do not spin (`perdure.demo.process`); nothing is looked up outside, and nobody is told of the use.
DEFAULTS = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1",
}  # fmt: skip


class EngineFailed(PerdureError):
    """A process of vLLM ended, or said nothing in time; the message has its last words."""


def connector(url: str, **extra: Any) -> dict[str, Any]:
    """The value of `--kv-transfer-config` for Perdure's connector. extra: more of `kv_connector_extra_config`."""
    return {
        "kv_connector": "PerdureConnector",
        "kv_connector_module_path": "perdure.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url, **extra},
    }


def tiering(*tiers: dict[str, Any], cpu_bytes: int = GIB) -> dict[str, Any]:
    """The same for vLLM's offloading on a CPU, with these secondary tiers. cpu_bytes: of its primary tier."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec", "spec_module_path": "perdure.engines.vllm.cpu_spec",
            "cpu_bytes_to_use": cpu_bytes, "secondary_tiers": list(tiers),
        },
    }  # fmt: skip


class ProcessGroup:
    """A command in a session of its own. environment: added to this process's; None removes a variable."""

    def __init__(
        self,
        command: list[str],
        log: Path,
        *,
        environment: Mapping[str, str | None] | None = None,
        streams: dict[str, Any] | None = None,
    ) -> None:
        self.log = log
        with log.open("ab") as file:
            self._begin = file.tell()
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file} | (streams or {})
            given = {**DEFAULTS, **os.environ, **ENVIRONMENT, **(environment or {})}
            options["env"] = {name: value for name, value in given.items() if value is not None}
            self.process: subprocess.Popen[Any] = subprocess.Popen(bound(command), start_new_session=True, **options)

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def members(self) -> list[int]:
        """Process ids of the group that still run; what has died and was not waited for is not among them."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                except OSError:  # it ended meanwhile
                    continue
                if int(group) == self.process.pid and state not in "ZX":
                    found.append(int(entry.name))
        return sorted(found)

    def kill(self) -> int:
        """SIGKILL to all. Returns how many there were. Raises EngineFailed if one is still there after `GONE_S`."""
        killed = self.members()
        shared = {path for pid in killed for path in shared_memory(pid)}
        if killed:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        give_up = time.monotonic() + GONE_S
        while left := self.members():
            if time.monotonic() > give_up:
                raise EngineFailed(f"processes {left} were killed {GONE_S:.0f} s ago and still run")
            time.sleep(POLL_S)
        for path in shared:
            path.unlink(missing_ok=True)
        return len(killed)

    def kill_leader(self) -> None:
        """SIGKILL to the first process only; the others notice by themselves, or not."""
        self.process.kill()
        self.process.wait()

    def output(self) -> str:
        """What it has written so far."""
        with self.log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def last_words(self) -> str:
        lines = [line.strip() for line in self.output().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return " | ".join((errors or lines)[-4:]) or "no message"


def shared_memory(pid: int) -> set[Path]:
    """Files in /dev/shm that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it ended meanwhile
        return set()
    mapped = (line.partition("/dev/shm/")[2] for line in lines if not line.endswith("(deleted)"))
    return {Path("/dev/shm") / name for name in mapped if name}


def as_json(config: dict[str, Any]) -> str:
    return json.dumps(config, separators=(",", ":"))
