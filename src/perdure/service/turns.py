"""Who is served next, when more is asked for than can be done at once.

Contract
- Restores before writes; among each the tenants take turns, whatever the number of their questions: one tenant's
  thousand sessions do not stand before another's one. A turn is as many questions as the tenant's weight, and one that
  moves more than `limits.turn_bytes` is several (deficit round robin).
- Within a tenant: first come, first served. Nothing is dropped here: what has become late says so when its turn comes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from perdure import limits

T = TypeVar("T")
Weight = Callable[[bytes], int]


def even(tenant: bytes) -> int:
    """The weight of every tenant, where none has a say."""
    return 1


def cost_of(nbytes: int) -> int:
    """Of a question that moves so many bytes, in turns of weight 1."""
    return max(1, -(-nbytes // limits.turn_bytes))


@dataclass(slots=True)
class _Queue(Generic[T]):
    """Of one tenant. credit: what it may still do in its turn; below 0: what it did beyond its last one."""

    items: deque[tuple[int, T]] = field(default_factory=deque)
    credit: int = 0


class Turns(Generic[T]):
    """What waits. weight: of a tenant, 1 or more. Not thread-safe."""

    def __init__(self, weight: Weight = even) -> None:
        self._classes: tuple[dict[bytes, _Queue[T]], dict[bytes, _Queue[T]]] = ({}, {})  # restores, writes; by tenant
        self._weight, self._count = weight, 0

    def put(self, tenant: bytes, writing: bool, what: T, cost: int = 1) -> None:
        self._classes[writing].setdefault(tenant, _Queue()).items.append((cost, what))
        self._count += 1

    def discard(self, tenant: bytes, writing: bool, what: T) -> bool:
        """Take something out before its turn. False if it is not there any more."""
        queue = self._classes[writing].get(tenant, _Queue[T]())
        found = next((item for item in queue.items if item[1] is what), None)
        if found is None:
            return False
        queue.items.remove(found)
        if not queue.items:
            del self._classes[writing][tenant]
        self._count -= 1
        return True

    def take(self) -> T | None:
        """The next one; None if nothing waits."""
        for tenants in self._classes:
            while tenants:
                tenant, queue = next(iter(tenants.items()))  # the first has waited longest for its turn
                if queue.credit <= 0:
                    queue.credit += self._weight(tenant)
                if queue.credit <= 0:  # it still pays for its last turn
                    tenants[tenant] = tenants.pop(tenant)
                    continue
                cost, what = queue.items.popleft()
                queue.credit -= cost
                if not queue.items:
                    del tenants[tenant]
                elif queue.credit <= 0:
                    tenants[tenant] = tenants.pop(tenant)  # at the end
                self._count -= 1
                return what
        return None

    def __len__(self) -> int:
        return self._count


class Places:
    """A number of places that threads take by turns."""

    def __init__(self, places: int, weight: Weight = even):
        self._free = places
        self._waiting: Turns[threading.Event] = Turns(weight)
        self._lock = threading.Lock()

    def acquire(self, tenant: bytes, *, writing: bool, timeout_s: float, cost: int = 1) -> bool:
        """False if there was none by then."""
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            called = threading.Event()
            self._waiting.put(tenant, writing, called, cost)
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
