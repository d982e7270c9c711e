"""vLLM's OpenAI-compatible server in a process group of its own.

Contract
- Starting is in two steps, so that several start side by side: the object starts it, `wait_ready` returns when it
  answers. A server that ends or is silent for too long raises EngineFailed with its last words.
- Greedy answers can be compared: eager mode, one configuration for all, block hashes that agree between processes.
"""

from __future__ import annotations

import http.client
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perdure.testing.vllm_process import POLL_S, START_S, EngineFailed, ProcessGroup, as_json

HOST = "127.0.0.1"
MODEL = "model"  # by this name it is asked for


def free_port() -> int:
    """A port that was free a moment ago; another process may take it before its user does."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class VllmServer(ProcessGroup):
    """A server of `model` on a free port of the loopback interface.

    transfer: value of `--kv-transfer-config`, see `vllm_process.connector`; None: vLLM alone. arguments: more flags.
    """

    def __init__(
        self,
        model: Path | str,
        log: Path,
        *,
        transfer: dict[str, Any] | None = None,
        dtype: str = "float32",
        max_model_len: int = 8192,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str | None] | None = None,
    ) -> None:
        self.port = free_port()
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", HOST,
            "--served-model-name", MODEL, "--port", str(self.port), "--dtype", dtype, "--enforce-eager",
            "--max-model-len", str(max_model_len), "--enable-prompt-tokens-details",
            "--prefix-caching-hash-algo", "sha256_cbor",
        ]  # fmt: skip
        if transfer is not None:
            command += ["--kv-transfer-config", as_json(transfer)]
        super().__init__([*command, *arguments], log, environment=environment)

    @property
    def address(self) -> tuple[str, int]:
        return HOST, self.port

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Returns when it answers. Raises EngineFailed."""
        give_up = time.monotonic() + timeout_s
        while not self._healthy():
            if self.process.poll() is not None:
                raise EngineFailed(f"vLLM ended with status {self.process.returncode}: {self.last_words()}")
            if time.monotonic() > give_up:
                raise EngineFailed(f"vLLM was not ready after {timeout_s:.0f} s: {self.last_words()}")
            time.sleep(POLL_S)

    def get(self, path: str) -> str:
        """The body of a GET, `/metrics` for one. Raises EngineFailed."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=START_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailed(f"GET {path}: {error!r}: {self.last_words()}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise EngineFailed(f"GET {path}: status {response.status}: {body[:200]}")
        return body

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=START_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
