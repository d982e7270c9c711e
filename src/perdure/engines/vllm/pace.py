"""How fast the engine goes: its speed of prefill, and whether it stands still, by the scheduler's own steps."""

from __future__ import annotations

import time

_TOKENS_MIN = 64  # a step of fewer tokens says nothing about the speed of prefill
_WEIGHT = 0.3


class Pace:
    """prefill_rate: tokens per second; what it is given until it is measured."""

    def __init__(self, prefill_rate: float):
        self.prefill_rate = prefill_rate
        self._last: tuple[float, int] | None = None
        self._still_since: float | None = None

    def step(self, tokens: int, loading: bool) -> None:
        """A step of so many tokens is planned. The time until the next one is what this one takes."""
        now = time.monotonic()
        if self._last is not None and self._last[1] >= _TOKENS_MIN:
            rate = self._last[1] / max(now - self._last[0], 1e-6)
            self.prefill_rate += _WEIGHT * (rate - self.prefill_rate)
        self._last = (now, tokens)
        if tokens or loading:
            self._still_since = None
        elif self._still_since is None:
            self._still_since = now

    def still_s(self, now: float, since: float) -> float:
        """How long nothing has been computed or loaded, at most since then."""
        return 0.0 if self._still_since is None else now - max(self._still_since, since)
