"""The demo's child processes: one job each, spoken to in JSON lines, killed with their parent or by it.

Contract
- A child gets its job as one line on stdin and answers with lines on stdout: any number of progress lines, then one
  result or one error. A job in two halves gives a result for each, and waits between them for `Child.go_on`. What it
  writes on stderr is shown only if it fails.
- A child that dies, falls silent for `SILENCE_S`, or reports an error raises DemoError with its last words.
- `Child.kill` is SIGKILL: nothing in the child runs after it. No child outlives the `with` block, nor this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from perdure.errors import PerdureError
from perdure.testing.hosts import Host, Loopback

WORKER = "perdure.demo.worker"
SILENCE_S = 300.0  # the longest single step is a chunk of prefill; conversion on a slow disk is next
CONNECT_S = 30.0  # how long a client waits for the service
_LAST_WORDS_BYTES = 2000
# Asks the kernel for SIGKILL at the parent's end (PR_SET_PDEATHSIG), then becomes the command: same process, same id.
_LAUNCHER = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
# Nothing is looked up outside, and the only progress bar is ours.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
    "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error",
}  # fmt: skip
# Threads that wait do not spin, in every process of the demo alike. On two cores that others used too, spinning made
# prefill 3 to 10 times slower; on idle cores it is 15 % faster. What the user has set stays.
_DEFAULTS = {"OMP_WAIT_POLICY": "passive"}
LOCAL = Loopback()

Progress = Callable[[str, int, int | None], None]
"""What is being done, units done, units in all (None: unknown)."""


class DemoError(PerdureError):
    """A process of the demo failed; the message has its last words."""


def bound(command: list[str]) -> list[str]:
    """A command that is killed when this process ends, however that happens. Its first word is a path."""
    return [sys.executable, "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


class Bound:
    """A host whose processes are killed when this process ends."""

    def __init__(self, host: Host):
        self._host, self.address, self.inside = host, host.address, host.inside

    def command(self, words: Sequence[str]) -> list[str]:
        return bound(self._host.command(words))


class Child:
    """One job in a process of its own."""

    def __init__(self, job: dict[str, Any], note: Progress, host: Host = LOCAL):
        self._note = note
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._what = str(job["kind"])
        self.process = subprocess.Popen(
            bound(host.command([sys.executable, "-m", WORKER])), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, env=_DEFAULTS | os.environ | _ENVIRONMENT, text=True, encoding="utf-8",
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, name="perdure-demo-reader", daemon=True)
        self._reader.start()
        self._tell(json.dumps(job))

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def result(self) -> dict[str, Any]:
        """Wait for the result. The child is alive afterwards if its job says so."""
        while True:
            try:
                line = self._lines.get(timeout=SILENCE_S)
            except queue.Empty:
                raise DemoError(f"the {self._what} process said nothing for {SILENCE_S:.0f} s") from None
            if not line:
                status = self.process.wait()
                raise DemoError(f"the {self._what} process ended with status {status}: {self._last_words()}")
            try:
                message = json.loads(line)
            except ValueError:  # a library printed something
                continue
            if "progress" in message:
                self._note(*message["progress"])
            elif "error" in message:
                raise DemoError(f"the {self._what} process failed: {message['error']}")
            elif "result" in message:
                answer: dict[str, Any] = message["result"]
                return answer

    def go_on(self) -> None:
        """Let a job in two halves begin its second one."""
        self._tell("go on")

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: `result` says why
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _LAST_WORDS_BYTES))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-5:]) or "no message"


def perform(job: dict[str, Any], note: Progress) -> dict[str, Any]:
    """Run a job to its end in a process of its own."""
    with Child(job, note) as child:
        return child.result()
