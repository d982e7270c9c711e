"""Is the data bad, or the host? Decides whether a block that does not verify may be removed.

A flipped bit damages one block; a dying disk, a lost mount or bad memory damages many at once, and then removing what
"failed" would destroy good data. Beyond a few failures a minute, or failures in several segments, nothing is removed
any more, only counted, until a quiet window has passed; `sick` is shown by `status`.
"""

from __future__ import annotations

import threading
from collections import deque

from perdure import limits
from perdure.clock import Clock


class Health:
    """Sliding window over verification failures. Thread-safe."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._failures: deque[tuple[float, bytes]] = deque()
        self._sick = False
        self._lock = threading.Lock()

    def may_remove(self, segment: bytes) -> bool:
        """Count one failure in a segment and say whether its record may be removed."""
        with self._lock:
            now = self._clock.boottime()
            self._failures.append((now, segment))
            self._forget(now)
            segments = {name for _, name in self._failures}
            if (
                len(self._failures) > limits.corrupt_removals_per_window_max
                or len(segments) >= limits.corrupt_segments_per_window_max
            ):
                self._sick = True
            return not self._sick

    @property
    def sick(self) -> bool:
        with self._lock:
            self._forget(self._clock.boottime())
            return self._sick

    def _forget(self, now: float) -> None:
        while self._failures and self._failures[0][0] < now - limits.corrupt_window_s:
            self._failures.popleft()
        if not self._failures:
            self._sick = False
