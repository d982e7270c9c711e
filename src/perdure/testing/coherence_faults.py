"""What goes wrong inside a process of a coherence run: its storage, its clock, or, planted on purpose, its code.

Contract
- `Weather` is a plan for `FaultyFiles`: all of one process's files, for as long as its `kind` says so.
- `HostClock` differs from this machine's by constants from the beginning, and by steps of the wall clock when told.
- `PLANTS` are bugs that a run must find, to show that it can find something. Never used otherwise.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from perdure.catalog.api import PublishResult
from perdure.clock import SystemClock
from perdure.io.faulty import Fault
from perdure.store import Seams

WELL, SLOW, STALE, FULL = "well", "slow", "stale", "full"
WEATHER: Final = (WELL, SLOW, STALE, FULL)
"""slow: every operation takes up to `_SLOW_S` longer. stale: half of all reads and opens fail with ESTALE. full:
nothing can be created or written (ENOSPC)."""

FENCE_SCOPE: Final = b"coherence-lease-"
_SLOW_S: Final = 0.1
_STALE_SHARE: Final = 0.5
_STALE_OPS: Final = ("open", "read", "preadv")
_FULL_OPS: Final = ("create", "allocate", "pwritev", "write_once")
_FORGOTTEN_SHARE: Final = 0.5


class Weather:
    """Of one host's storage."""

    def __init__(self, seed: float):
        self.kind = WELL
        self.fired = 0  # operations that failed so far
        self._random = random.Random(seed)

    def next(self, op: str, path: str, nbytes: int) -> Fault | None:
        kind = self.kind
        if kind == SLOW:
            time.sleep(self._random.uniform(0, _SLOW_S))
        elif kind == STALE and op in _STALE_OPS and self._random.random() < _STALE_SHARE:
            self.fired += 1
            return Fault("estale")
        elif kind == FULL and op in _FULL_OPS:
            self.fired += 1
            return Fault("enospc")
        return None

    def wait(self) -> None:
        """Nothing hangs."""


class HostClock(SystemClock):
    """ahead_s: of its wall clock; up_s: of its time since boot."""

    def __init__(self, ahead_s: float, up_s: float):
        self._ahead_s, self._up_s = ahead_s, up_s

    def wall(self) -> float:
        return super().wall() + self._ahead_s

    def boottime(self) -> float:
        return super().boottime() + self._up_s

    def step(self, seconds: float) -> None:
        self._ahead_s += seconds


class _Around:
    def __init__(self, inner: Any):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _ForgetfulIndex(_Around):
    """Half of the time it publishes nothing and says that it did."""

    def publish(self, keys: Any, *rest: Any, **options: Any) -> Any:
        if random.random() < _FORGOTTEN_SHARE:
            return np.full(len(keys), int(PublishResult.INSERTED), np.uint8)
        return self._inner.publish(keys, *rest, **options)


class _CarelessControl(_Around):
    """It compares with what is there, not with what the caller saw there."""

    def compare_and_set(self, namespace: str, key: bytes, expected: bytes | None, new: bytes | None) -> Any:
        return self._inner.compare_and_set(namespace, key, self._inner.get(namespace, key), new)


class _FencelessControl(_Around):
    """The tokens of the run's own lease are in no order."""

    def acquire(self, scope: bytes, *rest: Any) -> Any:
        lease = self._inner.acquire(scope, *rest)
        return replace(lease, token=random.randrange(1 << 62)) if lease and scope == FENCE_SCOPE else lease


def _plant(name: str, around: Callable[[Any], Any]) -> Callable[[Seams], None]:
    return lambda seams: setattr(seams, name, around)


PLANTS: Final[dict[str, Callable[[Seams], None]]] = {
    "forgetful index": _plant("index", _ForgetfulIndex),
    "careless compare-and-set": _plant("control", _CarelessControl),
    "unordered fences": _plant("control", _FencelessControl),
}
