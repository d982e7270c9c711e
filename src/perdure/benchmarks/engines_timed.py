"""Perdure's connector with a stopwatch on its scheduler side, for `bench engines`. vLLM imports it by module path.

Contract: the seconds that the connector's methods took between two steps of the scheduler, one per step, as doubles in
the file that the environment variable STEPS_VARIABLE names. Writing them is not timed. Everything else is the
connector's.
"""

from __future__ import annotations

import functools
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure.benchmarks.engines_connector import STEPS_VARIABLE
from perdure.engines.vllm import PerdureConnector

_METHODS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "update_connector_output",
    "request_finished", "request_finished_all_groups", "build_connector_meta",
)  # fmt: skip
_LAST = "build_connector_meta"


class _Steps:
    """Nested calls count once."""

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        self._depth = 0
        self._step_s = 0.0

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            self._depth += 1
            started = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._step_s += time.perf_counter() - started
                    if name == _LAST:
                        self._file.write(struct.pack("<d", self._step_s))
                        self._step_s = 0.0

        return call


class TimedConnector(PerdureConnector):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        path = os.environ.get(STEPS_VARIABLE)
        if path and role.name == "SCHEDULER":
            steps = _Steps(Path(path))
            for name in _METHODS:
                setattr(self, name, steps.timed(name, getattr(self, name)))
