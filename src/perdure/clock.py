"""Time, the one seam through which the core reads any clock.

Three readings, used for different things: `monotonic` for deadlines of calls (the engine's own), `boottime` for leases
and pins (goes on while the machine sleeps, never steps), `wall` for expiry, which must outlive a boot. A wall clock
that jumps must neither expire nor keep anything wrongly, so the store reads wall time through `SteadyWall`.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Protocol

from perdure import limits


class Clock(Protocol):
    def monotonic(self) -> float: ...

    def boottime(self) -> float: ...

    def wall(self) -> float: ...

    def boot_id(self) -> bytes:
        """16 bytes that change with every boot of the machine."""
        ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def boottime(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    def boot_id(self) -> bytes:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


class FakeClock:
    """Stands still until told: `advance` moves all three clocks, `step` only the wall clock."""

    def __init__(self, wall: float = 1_800_000_000.0, boottime: float = 1_000.0, boot_id: bytes = b"\1" * 16):
        self._wall, self._boottime, self._boot_id = wall, boottime, boot_id

    def monotonic(self) -> float:
        return time.monotonic()  # deadlines of real I/O stay real

    def boottime(self) -> float:
        return self._boottime

    def wall(self) -> float:
        return self._wall

    def boot_id(self) -> bytes:
        return self._boot_id

    def advance(self, seconds: float) -> None:
        self._wall += seconds
        self._boottime += seconds

    def step(self, seconds: float) -> None:
        self._wall += seconds


class SteadyWall:
    """Wall time that follows CLOCK_BOOTTIME from the moment the store was opened, so a stepped clock changes nothing.

    `paused` is True while the machine's wall clock disagrees by more than `limits.clock_step_s_max` with what it should
    read: expiry and deletion by age stop, and `status` shows the alert. `last_seen` (wall seconds of the previous run,
    if known) catches a clock that was set back between two runs; that is over once it shows that time again.
    """

    def __init__(self, clock: Clock, last_seen: float | None = None):
        self._clock = clock
        self._offset = clock.wall() - clock.boottime()
        self._last_seen = last_seen

    def now(self) -> float:
        """Seconds since 1970, never stepping."""
        return self._clock.boottime() + self._offset

    @property
    def step_s(self) -> float:
        """How far the wall clock is from where it should be (positive: ahead)."""
        wall = self._clock.wall()
        if self._last_seen is not None and self._last_seen - wall > limits.clock_step_s_max:
            return wall - self._last_seen
        return wall - self.now()

    @property
    def paused(self) -> bool:
        return abs(self.step_s) > limits.clock_step_s_max
