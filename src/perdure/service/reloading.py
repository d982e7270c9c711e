"""A policy that was changed comes into force while the service runs.

Contract
- Taken whole or refused whole: a directory that cannot be read, a socket that cannot be bound, a change that cannot be
  recorded leave everything as it was. That it was refused is recorded too.
- What clients have open is decided anew at their next question. Who has lost memory that it maps, its keyspace, or the
  way it connects by is disconnected at once: what it holds ends, and it may come back under the new policy.
- Questions under way end under the old one. What a client has seen in memory that it mapped, it has seen.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from perdure.errors import PerdureError, PolicyError, StorePathError
from perdure.governance.audit import Event
from perdure.governance.policy import Policies, load
from perdure.keys import tenant_id, tenant_secret
from perdure.roots import known
from perdure.service import adopting
from perdure.service.doors import Doors
from perdure.service.guard import Guard
from perdure.service.peers import Peer
from perdure.store import Store

_LOG = logging.getLogger("perdure.policy")
_WHY_CHARACTERS: Final = 400


class Reloading:
    """Of one service. Thread-safe."""

    def __init__(
        self, guard: Guard, doors: Doors, epoll: select.epoll, peers: Mapping[bytes, Peer],
        cut: Callable[[Peer], None],
    ):  # fmt: skip
        self._guard, self._doors, self._epoll, self._peers, self._cut = guard, doors, epoll, peers, cut
        self._lock = threading.Lock()

    def __call__(self) -> dict[str, Any]:
        """What is in force now. Raises PolicyError, StorePathError, AuditUnavailable, CatalogError."""
        guard = self._guard
        with self._lock:
            old = guard.policies
            opened: Any = None

            def prepare(policies: Policies) -> Callable[[], None]:
                nonlocal opened
                opened = self._doors.opened(policies.principals.values())
                return lambda: self._doors.shut(opened)

            new = in_force(guard, prepare)
            self._doors.follow(new.principals.values(), opened, self._epoll)
            lost = [peer for peer in list(self._peers.values()) if not guard.renew(peer)]
            for peer in lost:
                self._cut(peer)
        _LOG.info("policy %s in force, %d clients disconnected", new.digest, len(lost))
        return {
            "digest": new.digest, "changed": new.digest != old.digest, "disconnected": len(lost),
            "terms": sorted(one.name for one in new.documents.values()),
        }  # fmt: skip


def in_force(guard: Guard, prepare: Callable[[Policies], Callable[[], None]]) -> Policies:
    """Read the policy anew, and let it decide from now on. prepare: what else must succeed before; returns what undoes
    it. Raises PolicyError, StorePathError, AuditUnavailable, CatalogError: the one before stays."""
    try:
        new = load(guard.policies.path)
        tokens = guard.tokens_of(new)
        undo = prepare(new)
    except (PolicyError, StorePathError) as error:
        _refused(guard, error)
        raise
    try:
        adopting.record(guard.core, new)
    except PerdureError:
        undo()
        raise
    guard.adopt(new, tokens)
    return new


def _refused(guard: Guard, error: PerdureError) -> None:
    _LOG.error("the policy before stays in force: %s", error)
    if guard.core.audit is not None:
        stamp, why = guard.policies.stamp(""), str(error)[:_WHY_CHARACTERS]
        guard.core.audit.note(Event("policy", policy=stamp, decision="deny", outcome="refused", detail=why))


def guard_of(store: Store, policies: Policies, mirror: str | os.PathLike[str] | None) -> Guard:
    """What decides by a policy about a store. Raises PolicyError, AuditUnavailable, CatalogError."""
    core = store.core
    roots: list[Path | str] = [store.path, *([Path(mirror)] if mirror else []), *known(store.path).values()]
    if core.cold is not None:
        roots.append(core.cold.tier.objects.where)
    secret, keys = core.root_secret, core.segments.keys
    return Guard(
        store,
        policies,
        roots=roots,
        encrypts=lambda tenant: keys is not None and keys.encrypts(tenant_id(tenant_secret(secret, tenant))),
    )
