"""Real accounting of what segments occupy, checked before anything is written.

Contract: `used` is the sum of what all segment files occupy or may come to occupy; it never exceeds `capacity`. A part
is kept back for copy-forward, so that a full store can still make room.
"""

from __future__ import annotations

import errno
import threading


class NoSpace(OSError):
    """The store's capacity is used up (not the file system's: that is a plain ENOSPC)."""

    def __init__(self, need: int, used: int, capacity: int):
        super().__init__(errno.EDQUOT, f"capacity: {need} more bytes asked for, {used} of {capacity} in use")
        self.need = need


class SpaceBudget:
    """Bytes in use against a capacity. Thread-safe."""

    def __init__(self, capacity: int, kept_back: int):
        self.capacity, self.kept_back = capacity, kept_back
        self._used = 0
        self._unsealed: set[bytes] = set()
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return self._used

    def take(self, nbytes: int, *, reserve: bool = False) -> None:
        """Raises NoSpace and takes nothing if it does not fit. `reserve`: copy-forward may use what is kept back."""
        limit = self.capacity if reserve else self.capacity - self.kept_back
        with self._lock:
            if self._used + nbytes > limit:
                raise NoSpace(nbytes, self._used, limit)
            self._used += nbytes

    def give(self, nbytes: int) -> None:
        with self._lock:
            self._used -= nbytes

    def adopt(self, nbytes: int) -> None:
        """Count what is already on the disk, whatever the capacity says."""
        with self._lock:
            self._used += nbytes

    def note_unsealed(self, segment: bytes) -> None:
        """A seal failed (disk error): the segment stays as it is and the next recovery indexes it."""
        with self._lock:
            self._unsealed.add(segment)

    def take_unsealed(self) -> set[bytes]:
        with self._lock:
            unsealed, self._unsealed = self._unsealed, set()
            return unsealed
