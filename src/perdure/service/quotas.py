"""How much each tenant asks for and has: requests a second, requests at one time, pins, stored bytes.

Contract
- What would pass a bound is refused with the bound's name; nothing waits here. Stored bytes never exceed theirs by more
  than the batches that are being written: what was let through and may not be in the catalog yet is counted on top.
- A tenant without bounds costs a dictionary look-up per question. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from perdure import limits
from perdure.core import Core
from perdure.governance.terms import Document, Quota
from perdure.segments.format import record_bytes
from perdure.service import messages as m
from perdure.service.fields import keys_of
from perdure.service.peers import Peer

_UNBOUND: Final = Quota()
_UNSEEN_S: Final = 2 * limits.ephemeral_publish_delay_s + limits.background_retry_s
_BURST_S: Final = 1.0  # of requests that were not used may be used later


@dataclass(slots=True, eq=False)
class Use:
    """Of one tenant."""

    inflight: int = 0
    tokens: float = -1.0  # requests that may come now; below 0: not counted yet
    at: float = 0.0
    pins: set[tuple[Peer, int]] = field(default_factory=set)
    seen_bytes: int = 0
    coming: deque[tuple[float, int]] = field(default_factory=deque)  # let through: when, bytes


class Quotas:
    def __init__(self, core: Core):
        self._core, self._now = core, core.clock.monotonic
        self._uses: dict[str, Use] = {}
        self._lock = threading.Lock()

    def _use(self, tenant: str) -> Use:
        return self._uses.get(tenant) or self._uses.setdefault(tenant, Use())

    @contextmanager
    def entered(self, tenant: str) -> Iterator[None]:
        """A question of the tenant's is being answered."""
        use = self._use(tenant)
        with self._lock:
            use.inflight += 1
        try:
            yield
        finally:
            with self._lock:
                use.inflight -= 1

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
                size = peer.space(q.space).layout.block_bytes
                nbytes = len(keys_of(q.keys)) * record_bytes(size)
                if not self._fits(use, nbytes, quota.stored_bytes, peer.space(q.space).tenant_id):
                    return f"quota stored_bytes: {document.name} may store {quota.stored_bytes}; release sessions"
        return None

    def _take(self, use: Use, per_s: float) -> bool:
        now, most = self._now(), max(1.0, per_s * _BURST_S)
        use.tokens = most if use.tokens < 0 else min(most, use.tokens + (now - use.at) * per_s)
        use.at = now
        if use.tokens < 1:
            return False
        use.tokens -= 1
        return True

    def _fits(self, use: Use, nbytes: int, most: int, tenant_id: bytes) -> bool:
        if use.seen_bytes + sum(size for _, size in use.coming) + nbytes > most or not use.coming:
            now = self._now()
            while use.coming and use.coming[0][0] < now - _UNSEEN_S:
                use.coming.popleft()
            usage = self._core.index.usage().get(tenant_id)
            use.seen_bytes = 0 if usage is None else usage.record_bytes
            if use.seen_bytes + sum(size for _, size in use.coming) + nbytes > most:
                return False
        use.coming.append((self._now(), nbytes))
        return True

    # --- pins
    def pinned(self, peer: Peer, tenant: str, number: int) -> None:
        with self._lock:
            self._use(tenant).pins.add((peer, number))

    @staticmethod
    def _pins(use: Use) -> int:
        use.pins = {(peer, number) for peer, number in use.pins if number in peer.pins}
        return len(use.pins)
