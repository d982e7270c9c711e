"""Real accounting of what segments occupy, checked before anything is written.

Contract: `used` is the sum of what all segment files occupy or may come to occupy, kept per segment, so that a step
that is repeated or fails half-way cannot count anything twice. Nothing is taken beyond `capacity`; a part of it is kept
back for copy-forward, so that a full store can still make room. Processes that share a store look at what the others
have taken before they take more: only what several take at the same moment may go beyond.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from perdure import limits


class NoSpace(OSError):
    """The store's capacity is used up (not the file system's: that is a plain ENOSPC)."""

    def __init__(self, need: int, used: int, capacity: int):
        super().__init__(errno.EDQUOT, f"capacity: {need} more bytes asked for, {used} of {capacity} in use")
        self.need = need


def kept_back_bytes(capacity: int, segment_bytes: int) -> int:
    """What new blocks may not take: copies of the largest segment fit in, and in a large store those of several
    victims, each with a segment of its class."""
    return max(segment_bytes, int(capacity * limits.kept_back_ratio))


class SpaceBudget:
    """Bytes in use against a capacity. Thread-safe."""

    def __init__(self, capacity: int, kept_back: int):
        self.capacity, self.kept_back = capacity, kept_back
        self._used = 0
        self._of: dict[bytes, int] = {}
        self._unsealed: set[bytes] = set()
        self.look: Callable[[], None] = lambda: None  # see what others have taken, before more is taken
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return self._used

    def take(self, segment: bytes, nbytes: int, *, least: int, reserve: bool = False) -> int:
        """`nbytes` more for a segment; how many it got. Raises NoSpace and takes nothing if they do not fit
        (CatalogError if it cannot be seen what others have taken).

        `reserve`: copy-forward may use what is kept back, and makes do with `least` where no more is left of it."""
        self.look()
        limit = self.capacity if reserve else self.capacity - self.kept_back
        with self._lock:
            if reserve:
                nbytes = max(least, min(nbytes, limit - self._used))
            if self._used + nbytes > limit:
                raise NoSpace(nbytes, self._used, limit)
            self._used += nbytes
            self._of[segment] = self._of.get(segment, 0) + nbytes
            return nbytes

    def settle(self, segment: bytes, nbytes: int) -> None:
        """What a segment really occupies, whatever was taken for it and whatever the capacity says; 0: it is gone."""
        with self._lock:
            self._used += nbytes - self._of.pop(segment, 0)
            if nbytes:
                self._of[segment] = nbytes

    def note_unsealed(self, segment: bytes) -> None:
        """A seal or removal failed (disk or catalog error): the segment stays as it is, `keeper` tries again."""
        with self._lock:
            self._unsealed.add(segment)

    def take_unsealed(self) -> set[bytes]:
        with self._lock:
            unsealed, self._unsealed = self._unsealed, set()
            return unsealed
