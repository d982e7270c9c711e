"""The service as the benchmarks start it: `perdure serve` in a process of its own, and the plan of what is measured.

Contract
- Settings are the defaults but for what is given here; the environment's PERDURE_* settings do not count.
- The process is told to end (SIGTERM) when the `with` block is left, also by an error, and killed if it does not,
  or if this process ends without having told it.
- The socket is in a temporary directory of its own: a path below a long data directory would not fit a socket's name.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import perdure
from perdure.errors import PerdureError
from perdure.limits import GIB, MIB

START_S = 60.0
STOP_S = 60.0
POLL_S = 0.02
CAPACITY_BYTES = 64 * GIB
_SERVE = """
from perdure.benchmarks.peer_protocol import end_with_parent
from perdure.cli import main

end_with_parent()
main()
"""


class ServiceFailed(PerdureError):
    """The service could not be started; the message has its last words."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures. `warm_bytes`: read again and again from DRAM. `range_bytes`: restored from the disk per
    repetition, in calls of `batch` blocks. `tcp_bytes`: over TCP per repetition. `calls`: of each active client."""

    block_bytes: int
    batch: int
    warm_bytes: int
    range_bytes: int
    pool_bytes: int
    tcp_bytes: int
    looks: int
    idle: int
    processes: int
    threads: int
    calls: int
    repetitions: int


FULL = Plan(2 * MIB, 64, 512 * MIB, 256 * MIB, 512 * MIB, 256 * MIB, 200, 1_000, 4, 8, 400, 5)
QUICK = Plan(2 * MIB, 64, 256 * MIB, 128 * MIB, 512 * MIB, 128 * MIB, 50, 1_000, 4, 8, 100, 5)


class Host:
    """A running service of the store in `data`. `listen`: host and port it also serves over TCP, "" without."""

    def __init__(
        self,
        data: Path,
        *,
        memory: int,
        listen: str = "",
        clients_max: int | None = None,
        policy: Path | None = None,
    ):
        self._place = Path(tempfile.mkdtemp(prefix="perdure-bench-"))
        self._log = self._place / "log"
        self.socket = self._place / "s"
        options = {"data": data, "capacity": CAPACITY_BYTES, "memory": memory, "socket": self.socket, "metrics": ""}
        if listen:
            options["listen"] = listen
        if policy is not None:
            options["policy"] = policy
        if clients_max is not None:
            options["clients-max"] = clients_max
        command = [sys.executable, "-c", _SERVE, "serve"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PERDURE_")}
        environment["PYTHONPATH"] = str(Path(perdure.__file__).parents[1])
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            self.listen = self._wait()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait(self) -> str:
        """Until it is ready; where it listens. Raises ServiceFailed."""
        give_up = time.monotonic() + START_S
        while True:
            ended = self._process.poll() is not None
            for line in self._log.read_text(errors="replace").splitlines():
                said = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
                if said.get("event") == "ready":
                    return str(said.get("listen", ""))
            if ended or time.monotonic() > give_up:
                lines = self._log.read_text(errors="replace").strip().splitlines()
                raise ServiceFailed(f"perdure serve is not ready: {lines[-1] if lines else 'no output'}")
            time.sleep(POLL_S)

    def connect(self) -> Any:
        return perdure.connect(self.socket, name="bench")

    def stop(self) -> None:
        """End the process and remove its socket. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._place, ignore_errors=True)

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
