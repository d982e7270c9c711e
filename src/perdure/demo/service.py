"""The demo's service: `perdure serve` in a process of its own, killed and started again with the same store.

Contract
- `start` returns when the service is ready. One that cannot be started is a DemoError with the last line of its log.
- No service outlives the `with` block, nor this process, however it ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from perdure.demo import process
from perdure.demo.process import DemoError
from perdure.service.settings import PREFIX
from perdure.testing.hosts import Host

CAPACITY = "2GiB"
MEMORY = "512MiB"  # twice what the whole guide takes
_END_S = 60.0
_POLL_S = 0.02


class Service:
    """The service of the store in `directory`. options: further ones of `perdure serve`; host: where it runs."""

    def __init__(self, directory: Path, *options: str, host: Host = process.LOCAL):
        self._directory, self._options, self._host = directory, options, host
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._begin = 0  # of the current run, in the log
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.end()
        finally:
            self.kill()
            self._log.close()

    def start(self) -> None:
        """Returns when it is ready. Raises DemoError."""
        self._begin = os.fstat(self._log.fileno()).st_size
        command = self._host.command([
            sys.executable, "-m", "perdure.cli", "serve", "--data", str(self._directory), "--capacity", CAPACITY,
            "--memory", MEMORY, "--metrics", "", "--log-format", "json", *self._options,
        ])  # fmt: skip
        self.process = subprocess.Popen(
            process.bound(command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._log,
            env={name: value for name, value in os.environ.items() if not name.startswith(PREFIX)},
        )  # fmt: skip
        give_up = time.monotonic() + process.SILENCE_S
        while not self._ready():
            if self.process.poll() is not None:
                raise DemoError(f"the service ended with status {self.process.returncode}: {self._last_line()}")
            if time.monotonic() > give_up:
                raise DemoError(f"the service was not ready after {process.SILENCE_S:.0f} s: {self._last_line()}")
            time.sleep(_POLL_S)

    def kill(self) -> int:
        """SIGKILL, and wait until it is gone. Returns the signal it died of; 0 if it ended before by itself."""
        if self.process is None:
            return 0
        self.process.kill()
        return max(0, -self.process.wait())

    def end(self) -> None:
        """Let it seal its segments. Raises DemoError if it does not end well."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            status = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the service did not end in {_END_S:.0f} s: {self._last_line()}") from None
        if status:
            raise DemoError(f"the service ended with status {status}: {self._last_line()}")

    def _lines(self) -> list[str]:
        """What this run has logged so far, complete lines only."""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), size - self._begin, self._begin).decode(errors="replace")
        return [line for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]

    def _last_line(self) -> str:
        return (self._lines() or ["no message"])[-1]

    def _ready(self) -> bool:
        for line in self._lines():
            try:
                event = json.loads(line)["event"]
            except (ValueError, KeyError, TypeError):  # a warning of a library
                continue
            if event == "not ready":
                raise DemoError(f"the service is not ready: {line}")
            if event == "ready":
                return True
        return False
