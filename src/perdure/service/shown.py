"""What a client of a governed service is told: of other tenants' blocks nothing; denials in the form of its answers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.catalog.api import KeyArray, fingerprints
from perdure.core import Core
from perdure.errors import AccessDenied
from perdure.governance.policy import Policies
from perdure.governance.terms import NARROW, lifetimes
from perdure.keyspace import Keyspace
from perdure.presence_table import NO_SEGMENT
from perdure.reports import WriteStatus
from perdure.segments.landing import BlockStatus
from perdure.service import messages as m
from perdure.service.fields import NO_SLOT, keys_of
from perdure.service.peers import Peer
from perdure.service.verbs import Waiting

ABSENT, MINE, OTHER = 0, 1, 2
_SHOWN = frozenset({m.Status, m.Explain, m.ExplainPrefix, m.Lookup, m.Follow, m.Advise, m.Present, m.Govern})


class Owners:
    """Whose blocks are stored under which keys."""

    def __init__(self, core: Core):
        self._core = core

    def of(self, keys: KeyArray, tenant_id: bytes) -> NDArray[np.uint8]:
        """Per key whose the stored block is: ABSENT, MINE or OTHER."""
        core, owners = self._core, np.zeros(len(keys), np.uint8)
        segments = core.presence.segments_of(fingerprints(keys))
        if len(keys) and segments[0] != NO_SEGMENT and (segments == segments[0]).all():  # as a rule
            tenant = core.table.tenant(int(segments[0]))
            if tenant:
                owners[:] = MINE if tenant == tenant_id else OTHER
                return owners
        stored = segments != NO_SEGMENT
        for ordinal in np.unique(segments).tolist() if stored.any() else ():
            tenant = b"" if ordinal == NO_SEGMENT else core.table.tenant(ordinal)
            owners[segments == ordinal] = MINE if tenant == tenant_id else OTHER if tenant else ABSENT
        rest = np.flatnonzero(owners == ABSENT)
        if len(rest) and not core.presence.complete:
            present, records = core.locate(keys[rest])
            mine = np.array([row == tenant_id for row in records["tenant"].tolist()], bool)
            owners[rest] = np.where(present, np.where(mine, MINE, OTHER), ABSENT)
        return owners

    def readable(self, keys: KeyArray, space: Keyspace) -> NDArray[np.bool_]:
        """Which keys are of blocks that the tenant may read, if they are stored: its own, and published ones."""
        readable: NDArray[np.bool_] = self.of(keys, space.tenant_id) == MINE
        readable[space.published(keys)] = True
        return readable

    def prefix(self, keys: KeyArray, space: Keyspace) -> int:
        """Leading keys whose blocks are."""
        own = self.readable(keys, space)
        return len(keys) if own.all() else int(own.argmin())


def own_block(peer: Peer, reply: m.Document) -> dict[str, Any]:
    """What an engine is told of a block: everything of its own tenants', of others' that it is not there."""
    record = reply.content.get("record", {})
    if record.get("tenant_id") in {space.tenant_id.hex() for space in peer.spaces}:
        return {key: value for key, value in reply.content.items() if key != "keyspace"}
    return {"key": reply.content["key"], "present": False, "memory": None, "incidents": [],
            "verdict": "miss: not in the catalog (never stored, evicted or removed)"}  # fmt: skip


def own_status(status: dict[str, Any], tenants: set[str]) -> dict[str, Any]:
    """What an engine is told of the service: that it runs, and what its tenants have."""
    store = status["store"]
    return {
        "boot": status["boot"], "pid": status["pid"], "clients": [], "clients_omitted": 0,
        "store": {
            "format": store["format"], "healthy": store["healthy"], "background": store["background"],
            "tenants": {name: one for name, one in store["tenants"].items() if name in tenants},
            "keyspaces": [
                {key: one[key] for key in ("tenant", "model", "block_tokens", "block_bytes")}
                for one in store["keyspaces"] if one["tenant"] in tenants
            ],
        },
    }  # fmt: skip


def denial(q: Any, why: str) -> m.Message:
    """The answer to what may not be done, where it has room for that. Raises AccessDenied where not."""
    if isinstance(q, m.Lookup | m.Follow):
        return m.Count(q.id, 0)
    if isinstance(q, m.Present):
        return m.Mask(q.id, bytes(len(keys_of(q.keys))))
    if isinstance(q, m.Advise):
        return m.Advised(q.id, 0, 0.0, 0.0, f"denied: {why}")
    if isinstance(q, m.Fetch | m.Read | m.Get | m.Write | m.Put):
        count = len(keys_of(q.keys))
        if isinstance(q, m.Write | m.Put):
            return m.Written(q.id, bytes([WriteStatus.REJECTED]) * count, 0, 0, {0: f"denied: {why}"} if count else {})
        statuses, problems = bytes([BlockStatus.DENIED]) * count, {0: f"denied: {why}"} if count else {}
        if isinstance(q, m.Get):
            return m.Sent(q.id, statuses, b"", b"", 0, problems, True)
        if isinstance(q, m.Read):
            return m.Delivered(q.id, statuses, 0, problems, 0)
        return m.Fetched(q.id, statuses, np.full(count, NO_SLOT, np.uint64).tobytes(), 0, problems, [])
    raise AccessDenied(why)


def shown(policies: Policies, owners: Owners, peer: Peer, q: Any, reply: m.Message | Waiting) -> m.Message | Waiting:
    """The answer without what is other tenants'."""
    if type(q) not in _SHOWN:
        return reply
    if isinstance(q, m.Status | m.Explain):
        who = peer.principal
        assert who is not None
        action = "status" if isinstance(q, m.Status) else "explain"
        if isinstance(reply, m.Document) and not policies.decide(who, "", action).allowed:
            mine = {space.tenant for space in peer.spaces} | set(who.tenants)
            reply.content = own_status(reply.content, mine) if action == "status" else own_block(peer, reply)
        return reply
    if isinstance(q, m.Govern) and q.verb == "lifecycle" and isinstance(reply, m.Document):
        for tenant, told in reply.content["tenants"].items():
            told["terms"] = lifetimes(policies.documents.get(tenant))
    if isinstance(q, m.ExplainPrefix) and isinstance(reply, m.Document):
        narrow = peer.openings[q.space].document.scope in NARROW
        elsewhere = [] if narrow else reply.content["elsewhere"]  # a digest is what names are made from
        reply.content["elsewhere"] = [{key: one[key] for key in ("usable", "differs")} for one in elsewhere]
    elif isinstance(q, m.Lookup | m.Follow):
        keys, space = keys_of(q.keys), peer.space(q.space)
        if isinstance(reply, m.Count):
            reply.count = owners.prefix(keys[: reply.count], space)
        elif isinstance(reply, Waiting):
            return Waiting(reply.wish, reply.until, lambda found: m.Count(q.id, owners.prefix(keys[:found], space)))
    elif isinstance(q, m.Advise) and isinstance(reply, m.Advised):
        if owners.prefix(keys_of(q.keys)[: reply.stored], peer.space(q.space)) < reply.stored:
            return m.Advised(q.id, 0, 0.0, 0.0, "nothing of it is stored")
    elif isinstance(q, m.Present) and isinstance(reply, m.Mask):
        own = owners.readable(keys_of(q.keys), peer.space(q.space))
        reply.mask = (np.frombuffer(reply.mask, np.bool_) & own).tobytes()
    return reply
