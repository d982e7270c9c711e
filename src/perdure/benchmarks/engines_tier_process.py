"""The parent's side of `engines_tier_child`: a vLLM process to ask, killed by its process group.

Contract: `end` and `kill` leave no process behind; a question that is not answered in time, or by an error, raises
EngineFailed with the end of the engine's output.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from perdure.testing.vllm_process import EngineFailed

READY_S = 240.0
ANSWER_S = 180.0
_CHILD = "perdure.benchmarks.engines_tier_child"
_TOLD_BYTES = 2000


class EngineProcess:
    """options: as in `engines_tier_child`. folder: for its pipe and its log."""

    def __init__(self, folder: Path, name: str, **options: Any):
        folder.mkdir(parents=True, exist_ok=True)
        pipe, self.log = folder / f"{name}.answers", folder / f"{name}.log"
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        self._answers = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self._rest = b""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", _CHILD, str(pipe), json.dumps(options)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        try:
            self._receive(READY_S)
        except BaseException:
            self.kill()
            raise

    def ask(self, question: str, timeout_s: float = ANSWER_S, **fields: Any) -> dict[str, Any]:
        self.send(question, **fields)
        return self._receive(timeout_s)

    def send(self, question: str, **fields: Any) -> None:
        """Without waiting for the answer, which `receive` gets."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write((json.dumps({"ask": question, **fields}) + "\n").encode())
            self.process.stdin.flush()
        except OSError as error:
            raise EngineFailed(f"the engine has ended: {error}\n{self.told()}") from error

    def receive(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        give_up = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            if time.monotonic() > give_up:
                raise EngineFailed(f"no answer in {timeout_s} s\n{self.told()}")
            if self.process.poll() is not None:
                raise EngineFailed(f"the engine ended ({self.process.returncode})\n{self.told()}")
            if not select.select([self._answers], [], [], 0.2)[0]:
                continue
            with contextlib.suppress(BlockingIOError):
                data = os.read(self._answers, 1 << 20)
                if not data:  # nobody has opened the other end yet
                    time.sleep(0.05)
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{answer['error']}\n{self.told()}")
        return answer

    def generate(self, tokens: list[int], **fields: Any) -> dict[str, Any]:
        return self.ask("generate", tokens=tokens, **fields)

    def told(self) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_bytes()[-_TOLD_BYTES:].decode(errors="replace")
        return ""

    def end(self, timeout_s: float = 60.0) -> None:
        """As a user ends it: vLLM shuts its workers and connectors down."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
