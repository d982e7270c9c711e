"""Who waits for what: blocks to be published, leases to end. Nobody polls; whoever makes it true wakes them.

Contract
- A name is the fingerprint of a block or the scope of a lease. Waiters of a name are handed over together, in one call
  per way of waking (`Wake`), outside every lock: a publisher pays the same for one waiter as for ten thousand.
- Being woken is a hint: whoever is woken looks again, and waits again if it is not enough. Names are
  forgotten when they are notified. Who registers first and looks afterwards misses nothing.
- Leases are mirrored in memory, so that asking for one that somebody has costs no transaction. The control store
  decides; only this process gives them out (it has the writer's lock).
- Time is CLOCK_BOOTTIME: a lease ends also while the machine sleeps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence

from perdure.catalog.api import ControlStore, KeyArray, Lease, fingerprints
from perdure.clock import Clock
from perdure.errors import CatalogError

Name = int | bytes
"""Fingerprint of a block, or scope of a lease."""


class Waiter:
    """One who waits. wake: told all of its waiters at once; must not raise, block, or take long."""

    __slots__ = ("names", "wake")

    def __init__(self, wake: Wake):
        self.wake = wake
        self.names: Sequence[Name] = ()  # while it is registered


Wake = Callable[[list[Waiter]], None]


class Waiters:
    """The registry. Thread-safe."""

    def __init__(self) -> None:
        self._names: dict[Name, dict[Wake, dict[Waiter, None]]] = {}
        self._lock = threading.Lock()

    def add(self, waiter: Waiter, names: Sequence[Name]) -> None:
        """Wake it when one of `names` is notified, and not for what it was registered for before."""
        with self._lock:
            self._forget(waiter)
            waiter.names = names
            for name in names:
                self._names.setdefault(name, {}).setdefault(waiter.wake, {})[waiter] = None

    def remove(self, waiter: Waiter) -> None:
        """Wait no more; nothing happens if it has been woken."""
        with self._lock:
            self._forget(waiter)

    def _forget(self, waiter: Waiter) -> None:
        for name in waiter.names:
            ways = self._names.get(name, {})
            same = ways.get(waiter.wake, {})
            same.pop(waiter, None)
            if not same:
                ways.pop(waiter.wake, None)
            if not ways:
                self._names.pop(name, None)
        waiter.names = ()

    def published(self, keys: KeyArray) -> None:
        """These blocks can be found now."""
        if self._names:
            self.notify(fingerprints(keys).tolist())

    def notify(self, names: Iterable[Name]) -> None:
        known = self._names
        for name in [one for one in names if one in known]:
            with self._lock:
                ways = known.pop(name, {})
            for wake, waiters in ways.items():
                wake(list(waiters))

    def wake_all(self) -> None:
        """Let everybody look again: what they wait for may have ended with something else."""
        self.notify(list(self._names))

    def __len__(self) -> int:
        """Names that are waited for."""
        return len(self._names)


class Leases:
    """Who may compute what, and until when. Thread-safe."""

    def __init__(self, control: ControlStore, clock: Clock, owner: bytes, waiters: Waiters):
        self._control, self._clock, self._owner, self._waiters = control, clock, owner, waiters
        self._held: dict[bytes, Lease] = {}
        self._doubts: dict[bytes, float] = {}  # scopes whose lease may be held, by a call that failed, until when
        self._lock = threading.Lock()

    def acquire(self, scope: bytes, ttl_s: float) -> Lease | None:
        """The lease, or None while someone has it. Raises CatalogError."""
        now = self._clock.boottime()
        held = self._held.get(scope)
        if held is not None and held.deadline_s > now:
            return None
        holder = self._owner + os.urandom(8)  # ends with the owner, see ControlStore.end_owner
        try:
            lease = self._control.acquire(scope, holder, now, ttl_s)
        except CatalogError:
            self._doubt(scope, now + ttl_s)
            raise
        if lease is not None:
            with self._lock:
                known = self._held.get(scope)
                if known is None or known.token < lease.token:
                    self._held[scope] = lease
        return lease

    def release(self, lease: Lease) -> bool:
        """False if it had been lost. Raises CatalogError."""
        try:
            return self._control.release(lease)
        except CatalogError:
            self._doubt(lease.scope, lease.deadline_s)
            raise
        finally:
            self._end([lease])

    def _doubt(self, scope: bytes, deadline_s: float) -> None:
        with self._lock:
            self._doubts[scope] = max(deadline_s, self._doubts.get(scope, 0.0))

    def left_s(self, scope: bytes) -> float | None:
        """Seconds until the lease of a scope expires; None if nobody has it."""
        held = self._held.get(scope)
        until = self._doubts.get(scope) if held is None else held.deadline_s
        return None if until is None else max(0.0, until - self._clock.boottime())

    def expire(self) -> None:
        """Wake those who wait for leases whose time is over. Called now and then, and by who waits for one."""
        if not self._held and not self._doubts:
            return
        now = self._clock.boottime()
        with self._lock:
            over = [lease for lease in self._held.values() if lease.deadline_s <= now]
            settled = [scope for scope, deadline_s in self._doubts.items() if deadline_s <= now]
            for scope in settled:
                del self._doubts[scope]
        self._end(over)
        self._waiters.notify(settled)

    def _end(self, leases: list[Lease]) -> None:
        with self._lock:
            for lease in leases:
                known = self._held.get(lease.scope)
                if known is not None and known.token == lease.token:
                    del self._held[lease.scope]
        self._waiters.notify([lease.scope for lease in leases])
