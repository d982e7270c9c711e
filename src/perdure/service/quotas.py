"""How much each tenant asks for and has: requests a second, requests at one time, pins, stored bytes.

Contract
- What would pass a bound is refused with the bound's name; nothing waits here. Before stored bytes would, the tenant's
  own coldest segments are given up; what is being written is counted on top of what the catalog says. Processes that
  share a directory share that bound (`allotment`); the others hold for each service.
- A tenant without bounds costs a dictionary look-up per question. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from perdure.core import Core
from perdure.errors import CatalogError
from perdure.governance.terms import Document, Quota
from perdure.publishing import flush_pending
from perdure.segments.format import record_bytes
from perdure.service import messages as m
from perdure.service.allotment import Allotment
from perdure.service.fields import keys_of
from perdure.service.peers import Peer

_UNBOUND: Final = Quota()
_BURST_S: Final = 1.0  # of requests that were not used may be used later


@dataclass(slots=True, eq=False)
class Use:
    """Of one tenant."""

    inflight: int = 0
    tokens: float = -1.0  # requests that may come now; below 0: not counted yet
    at: float = 0.0
    pins: set[tuple[Peer, int]] = field(default_factory=set)
    seen_bytes: int = -1  # in the catalog, when it was asked last; -1: never
    done_bytes: int = 0  # written since, at most
    coming: dict[int, int] = field(default_factory=dict)  # being written: bytes by question
    allotment: Allotment | None = None  # where other processes write for the tenant, too
    asking: threading.Lock = field(default_factory=threading.Lock)  # for more of it


class Entered:
    """While a question is being answered. Not a generator: this is done for every batch."""

    __slots__ = ("_lock", "_q", "_use")

    def __init__(self, lock: threading.Lock, use: Use, q: Any):
        self._lock, self._use, self._q = lock, use, q

    def __enter__(self) -> None:
        with self._lock:
            self._use.inflight += 1

    def __exit__(self, *_: object) -> None:
        use = self._use
        with self._lock:
            use.inflight -= 1
            use.done_bytes += use.coming.pop(id(self._q), 0)


class Quotas:
    def __init__(self, core: Core):
        self._core, self._now = core, core.clock.monotonic
        self._uses: dict[str, Use] = {}
        self._lock = threading.Lock()

    def _use(self, tenant: str) -> Use:
        return self._uses.get(tenant) or self._uses.setdefault(tenant, Use())

    def entered(self, tenant: str, q: Any) -> Entered:
        """A question of the tenant's, which has no `problem`, is being answered."""
        return Entered(self._lock, self._use(tenant), q)

    def problem(self, peer: Peer, document: Document, q: Any) -> str | None:
        """The bound that the question would pass, or None, and it is counted."""
        quota = document.quota
        if quota == _UNBOUND:
            return None
        use = self._use(document.tenant)
        with self._lock:
            if quota.inflight is not None and use.inflight >= quota.inflight:
                return f"quota inflight: {quota.inflight} requests of {document.name} are being answered; ask again"
            if quota.requests_per_s is not None and not self._take(use, quota.requests_per_s):
                return f"quota requests_per_s: {document.name} has more than {quota.requests_per_s:g}; ask later"
            if isinstance(q, m.Pin) and quota.pins is not None and self._pins(use) >= quota.pins:
                return f"quota pins: {document.name} has {quota.pins}; release one"
        if isinstance(q, m.Write | m.Put) and quota.stored_bytes is not None:
            space = peer.space(q.space)
            nbytes, most = len(keys_of(q.keys)) * record_bytes(space.layout.block_bytes), quota.stored_bytes

            def enough() -> bool:
                return self._fits(use, id(q), nbytes, most, space.tenant_id)

            if not (enough() or (nbytes <= most and self._made_room(space.tenant_id, nbytes, enough))):
                return f"quota stored_bytes: {document.name} may store {most}, and can give up no more"
        return None

    def _made_room(self, tenant_id: bytes, nbytes: int, enough: Callable[[], bool]) -> bool:
        with suppress(CatalogError):
            flush_pending(self._core)  # a segment with publishes on their way cannot be given up
        return self._core.reclaimer.make_room_of(tenant_id, nbytes, enough)

    def _take(self, use: Use, per_s: float) -> bool:
        now, most = self._now(), max(1.0, per_s * _BURST_S)
        use.tokens = most if use.tokens < 0 else min(most, use.tokens + (now - use.at) * per_s)
        use.at = now
        if use.tokens < 1:
            return False
        use.tokens -= 1
        return True

    def _fits(self, use: Use, number: int, nbytes: int, most: int, tenant_id: bytes) -> bool:
        if self._core.sharing.shared:
            with use.asking:  # not the lock of all tenants: the cluster may be slow
                with self._lock:
                    use.allotment = use.allotment or Allotment(self._core, tenant_id)
                    unpublished = self._pending_bytes(tenant_id) + sum(use.coming.values())
                if not use.allotment.take(nbytes, most, unpublished):
                    return False
                with self._lock:
                    use.coming[number] = nbytes
                return True
        with self._lock:
            for _ in range(2):
                if use.seen_bytes + use.done_bytes + sum(use.coming.values()) + nbytes <= most and use.seen_bytes >= 0:
                    use.coming[number] = nbytes
                    return True
                done = use.done_bytes
                usage = self._core.index.usage().get(tenant_id)
                use.seen_bytes = (0 if usage is None else usage.record_bytes) + self._pending_bytes(tenant_id)
                use.done_bytes -= done
            return False

    def _pending_bytes(self, tenant_id: bytes) -> int:
        """Of blocks that wait for their commit."""
        records = self._core.pending.records()
        return sum(record_bytes(int(one["stored_bytes"])) for one in records if one["tenant"].tobytes() == tenant_id)

    # --- pins
    def pinned(self, peer: Peer, tenant: str, number: int) -> None:
        with self._lock:
            self._use(tenant).pins.add((peer, number))

    @staticmethod
    def _pins(use: Use) -> int:
        use.pins = {(peer, number) for peer, number in use.pins if number in peer.pins}
        return len(use.pins)
