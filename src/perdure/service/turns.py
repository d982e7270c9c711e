"""Who is served next, when more is asked for than can be done at once.

Contract
- Restores before writes; among each the tenants take turns, whatever the number of their questions: one tenant's
  thousand sessions do not stand before another's one.
- Within a tenant: first come, first served. Nothing is dropped here: what has become late says so when its turn comes.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """What waits. Not thread-safe."""

    def __init__(self) -> None:
        self._classes: tuple[dict[bytes, deque[T]], dict[bytes, deque[T]]] = ({}, {})  # restores, writes; by tenant
        self._count = 0

    def put(self, tenant: bytes, writing: bool, what: T) -> None:
        self._classes[writing].setdefault(tenant, deque()).append(what)
        self._count += 1

    def discard(self, tenant: bytes, writing: bool, what: T) -> bool:
        """Take something out before its turn. False if it is not there any more."""
        queue = self._classes[writing].get(tenant, deque())
        try:
            queue.remove(what)
        except ValueError:
            return False
        if not queue:
            del self._classes[writing][tenant]
        self._count -= 1
        return True

    def take(self) -> T | None:
        """The next one; None if nothing waits."""
        for tenants in self._classes:
            for tenant in tenants:  # the first has waited longest for its turn
                queue = tenants.pop(tenant)
                what = queue.popleft()
                if queue:
                    tenants[tenant] = queue  # at the end
                self._count -= 1
                return what
        return None

    def __len__(self) -> int:
        return self._count


class Places:
    """A number of places that threads take by turns."""

    def __init__(self, places: int):
        self._free = places
        self._waiting: Turns[threading.Event] = Turns()
        self._lock = threading.Lock()

    def acquire(self, tenant: bytes, *, writing: bool, timeout_s: float) -> bool:
        """False if there was none by then."""
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            called = threading.Event()
            self._waiting.put(tenant, writing, called)
        if called.wait(max(0.0, timeout_s)):
            return True
        with self._lock:
            return not self._waiting.discard(tenant, writing, called)

    def release(self) -> None:
        with self._lock:
            called = self._waiting.take()
            if called is None:
                self._free += 1
            else:
                called.set()
