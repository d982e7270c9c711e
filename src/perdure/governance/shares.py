"""Who may evict whom, and who gets how many turns: tenants' shares of one store.

Contract
- A tenant that has its share or more evicts its own blocks, and nobody else's. One that has less may evict those that
  have more than theirs, or where nobody has, more than was guaranteed. What was guaranteed only its tenant evicts.
- A share is what was guaranteed, or the part of the room that the weights of those who have something give it,
  whichever is more. Tenants without terms have no share: they are evicted by anybody, and evict as if they had less.
"""

from __future__ import annotations

from collections.abc import Mapping

from perdure import keys as naming
from perdure.governance.terms import Document, Share

_NONE = Share(weight=0)


class Shares:
    """Of the tenants that have terms."""

    def __init__(self, root_secret: bytes, documents: Mapping[str, Document]):
        self._root_secret = root_secret
        self.adopt(documents)

    def adopt(self, documents: Mapping[str, Document]) -> None:
        """These terms count from now on."""
        secret = self._root_secret
        self._of = {naming.tenant_id(naming.tenant_secret(secret, name)): one.share for name, one in documents.items()}

    def weight(self, tenant_id: bytes) -> int:
        """Turns, against 1 of a tenant without terms."""
        return self._of.get(tenant_id, Share()).weight

    def victims(self, asking: bytes, used: Mapping[bytes, int], room_bytes: int) -> set[bytes]:
        """Tenant ids whose blocks may go to make room for `asking`. used: bytes by tenant id."""
        weights = {one: self._of.get(one, _NONE).weight for one in {*used, asking}}
        total = max(1, sum(weights.values()))
        guaranteed = {one: self._of.get(one, _NONE).guaranteed_bytes for one in weights}
        share = {one: max(guaranteed[one], room_bytes * weights[one] // total) for one in weights}
        if asking in self._of and used.get(asking, 0) >= share[asking]:
            return {asking}
        above = {one for one, nbytes in used.items() if nbytes > share[one]}
        return {asking} | (above or {one for one, nbytes in used.items() if nbytes > guaranteed[one]})
