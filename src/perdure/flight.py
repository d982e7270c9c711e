"""Single flight: of all who want the same prefix one computes it, the others wait for what it publishes.

Contract
- A `Wish` is looked at, never blocked on: `arm` leaves its waiter registered so that nothing that fulfils it later can
  be missed, whoever waits (a thread here, a parked question in the service).
- A dead holder costs at most the rest of its lease. A waiter never waits beyond its own time.
- What a wish found is a hint, as `lookup` is: `read` has the last word.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from perdure import limits, reading
from perdure.catalog.api import KeyArray, Lease, fingerprints
from perdure.core import Core
from perdure.errors import CatalogError
from perdure.waiting import Name, Waiter, Waiters


class Look(NamedTuple):
    """decided: whether `value` is the answer. names: what may change it; value: the answer if the time were over."""

    decided: bool
    value: Any
    names: tuple[Name, ...] = ()


class Wish(Protocol):
    def look(self) -> Look:
        """Try now. Raises what the catalog raises."""
        ...

    def patience_s(self) -> float | None:
        """After how long to look again although nobody said anything; None: no need."""
        ...


class Reservation:
    """The right to compute the prefix that ends with the last of `keys`, or None once all of them are stored."""

    def __init__(self, core: Core, keys: KeyArray, ttl_s: float):
        self._core, self._prefix, self._ttl_s = core, _Prefix(core, keys), ttl_s
        self._scope = keys[-1].tobytes()

    def acquire(self) -> Lease | None:
        """The lease if nobody has it, whatever is stored."""
        return self._core.leases.acquire(self._scope, self._ttl_s)

    def look(self) -> Look:
        prefix, leases = self._prefix, self._core.leases
        if prefix.grow():
            return Look(True, None)
        lease = self.acquire()
        if lease is None:
            return Look(False, None, (self._scope, prefix.missing(prefix.count - 1)))
        try:
            needless = prefix.grow()  # its last holder published everything just before it ended
        except CatalogError:
            leases.release(lease)
            raise
        if needless:
            leases.release(lease)
        return Look(True, None if needless else lease)

    def patience_s(self) -> float | None:
        return self._core.leases.left_s(self._scope)


class Following:
    """The number of leading blocks that can be used, once it is more than `known` or all there are."""

    def __init__(self, core: Core, keys: KeyArray, known: int):
        self._prefix, self._known = _Prefix(core, keys), known

    def look(self) -> Look:
        prefix = self._prefix
        if prefix.grow() or prefix.found > self._known:
            return Look(True, prefix.found)
        return Look(False, prefix.found, (prefix.missing(min(self._known, prefix.count - 1)),))

    def patience_s(self) -> float | None:
        return None


class _Prefix:
    """How much of a chain is there, asked for from where it ended the last time."""

    def __init__(self, core: Core, keys: KeyArray):
        self._core, self._keys = core, keys
        self.count, self.found = len(keys), 0

    def grow(self) -> bool:
        """Whether all of it is there."""
        if self.found < self.count:
            self.found += reading.leading(self._core, self._keys[self.found :])
        return self.found == self.count

    def missing(self, last: int) -> Name:
        """A block up to `last` that is not there. The last one if possible: it is published when all others are."""
        at = last if not reading.leading(self._core, self._keys[last : last + 1]) else self.found
        return int(fingerprints(self._keys[at : at + 1])[0])


def arm(waiters: Waiters, waiter: Waiter, wish: Wish) -> Look:
    """Look until it is decided, or `waiter` is registered for what was missing at the last look."""
    names: tuple[Name, ...] = ()
    try:
        while True:
            look = wish.look()
            if look.decided:
                waiters.remove(waiter)
            if look.decided or look.names == names:
                return look
            names = look.names
            waiters.add(waiter, names)
    except BaseException:
        waiters.remove(waiter)
        raise


def wait(core: Core, wish: Wish, until: float, check: Callable[[], None]) -> Any:
    """Block this thread until the wish is decided or `until` (monotonic seconds) has come; its value then. `check`
    raises where waiting has no sense any more; asked whenever the thread wakes."""
    bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # one lock, where an Event takes two
    waiter = Waiter(lambda waiters: bell.put(None))
    often = limits.beat_s if core.read_only else limits.wait_check_s  # beside a writer nobody wakes us
    try:
        while True:
            check()
            look = arm(core.waiters, waiter, wish)
            left = until - time.monotonic()
            if look.decided or left <= 0:
                return look.value
            patience = wish.patience_s()
            try:
                bell.get(timeout=min(left, often, left if patience is None else patience))
            except queue.Empty:
                core.leases.expire()
    finally:
        core.waiters.remove(waiter)
