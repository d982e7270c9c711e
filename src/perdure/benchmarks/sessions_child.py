"""Processes of `bench sessions`: the service and the load generator, each on CPUs of its own where there are two.

Contract
- One JSON object per line on stdin is a question, one per line on stdout its answer. What a child has to say to people
  goes to its log; the last line of it is in the error when it ends unasked.
- A child ends when its stdin does, and is killed if it does not.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import perdure
from perdure.errors import PerdureError
from perdure.limits import GIB

CAPACITY_BYTES: Final = 16 * GIB
_ANSWER_S: Final = 180.0
_END_S: Final = 60.0


class ChildFailed(PerdureError):
    """A process of the benchmark ended or said nothing; the message has its last words."""


def cpus() -> tuple[str, str]:
    """For the load generator and for the service: the last CPU and all others, or both times the only one."""
    every = sorted(os.sched_getaffinity(0))
    return str(every[-1]), ",".join(map(str, every[:-1] or every))


def pin(numbers: str) -> None:
    """Let this process, before it starts threads, run on these CPUs only."""
    os.sched_setaffinity(0, {int(number) for number in numbers.split(",")})


class Child:
    """A Python module as a process; it has said its first line when this returns."""

    def __init__(self, module: str, *arguments: object):
        self._module = module
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in `end`
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PERDURE_")}
        environment["PYTHONPATH"] = str(Path(perdure.__file__).parents[1])
        command: Sequence[str] = [sys.executable, "-m", module, *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )
        try:
            self._answer()
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, verb: str, **arguments: object) -> dict[str, Any]:
        """Raises ChildFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed(str(error)) from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise self._failed("it ended" if ready else f"no answer in {_ANSWER_S:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildFailed(f"{self._module}: {answer['error']}")
        return answer

    def _failed(self, why: str) -> ChildFailed:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return ChildFailed(f"{self._module}: {why}; {lines[-1] if lines else 'it said nothing'}")

    def end(self) -> None:
        """Never raises."""
        try:
            self._process.communicate(timeout=_END_S)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
