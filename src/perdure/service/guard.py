"""Governs a service: which principal a connection is, what it may do with whose blocks, and how much at a time.

Contract
- A keyspace is opened under a capability: decided by policy for the connection's principal, or shown by it. From then
  on a question costs a look at that capability; questions that need none are those about what a client itself holds.
- The tenant comes from the capability, never from the message alone. What narrows (policy's scope, the caller's salt)
  is part of the names; nothing the caller says widens.
- Refused reads are DENIED per block, refused writes REJECTED with the reason; look-ups find nothing. Other questions
  are answered with AccessDenied. A question of a kind that this file does not know is the operator's.
- Keys of another tenant's blocks, wherever a client may have them from, are to it as if they were not stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from perdure import limits
from perdure.errors import AccessDenied
from perdure.governance.actor import acting
from perdure.governance.audit import Event
from perdure.governance.denials import Denials
from perdure.governance.identity import Authority, Capability, Tokens, granted
from perdure.governance.policy import SPACE_ACTIONS, Policies, Where
from perdure.governance.principals import Principal
from perdure.governance.shares import Shares
from perdure.governance.terms import Document
from perdure.governing import GOVERNING, is_retained
from perdure.service import adopting
from perdure.service import messages as m
from perdure.service.fields import keys_of, lease_of
from perdure.service.peers import Peer
from perdure.service.quotas import Quotas
from perdure.service.regions import lies_in_memory
from perdure.service.shown import OTHER, Owners, denial, shown
from perdure.service.verbs import Reply
from perdure.store import Store

FREE: Final = (m.Release, m.Settled, m.Unregister, m.Unpin, m.OpenSpace, m.Exchange, m.Status, m.Explain)
"""About what the client itself holds, or decided when they are answered."""
_NEEDS: Final[dict[type, str]] = {
    m.Attach: "map", m.Lookup: "read", m.Present: "read", m.Advise: "read", m.Follow: "read", m.Fetch: "read",
    m.Read: "read", m.Get: "read", m.ExplainPrefix: "read", m.Write: "write", m.Put: "write", m.Reserve: "write",
    m.Pin: "pin", m.Hint: "release",
}  # fmt: skip
_SESSION_VERBS: Final = {
    "handoff": "handoff", "adopt": "handoff", "pin": "pin", "release": "release", "prefetch": "read",
}  # fmt: skip
_NAMED: Final = ("name", "new_name")
_NEVER: Final = math.inf
_WRITES: Final = (m.Write, m.Put)
_CHANGING: Final = frozenset({m.SessionAsk, m.Pin, m.Hint, m.Reserve, *_WRITES})


@dataclass(frozen=True, slots=True)
class Opening:
    """How a keyspace is opened. under: the policy that decided. names: the scope, and whose names it makes of it."""

    capability: Capability
    document: Document
    salt: str
    mapped: bool
    under: Policies
    names: tuple[str, ...]

    @property
    def on_behalf(self) -> str:
        return f" for {self.capability.subject}" if self.capability.subject else ""


def _names(document: Document, who: Principal, subject: str) -> tuple[str, ...]:
    whose = {"private": (who.name, subject), "group": (who.group,)}.get(document.scope, ())
    return (document.scope, *whose)


class Guard:
    """Of one service. encrypts: whether a tenant's new blocks are."""

    def __init__(
        self, store: Store, policies: Policies, *, roots: Iterable[Path | str],
        encrypts: Callable[[str], bool] | None = None,
    ):  # fmt: skip
        """roots: directories, and the bucket, that the store's bytes lie in. encrypts: whether a tenant's new blocks
        are encrypted."""
        self.core, self.policies = store.core, policies
        self._owners = Owners(store.core)
        self._roots = tuple(str(root) for root in roots)
        self._persistent = not all("://" not in root and lies_in_memory(root) for root in self._roots)
        self._encrypts = encrypts or (lambda tenant: False)
        self._now = store.core.clock.boottime
        self.authority = Authority(self._now)
        self._tokens = self.tokens_of(policies)
        self.reload: Callable[[], dict[str, Any]] = dict  # set by the server
        adopting.record(store.core, policies)
        self.quotas = Quotas(store.core)
        self.denials = Denials(lambda: store.core.audit)
        self.shares = Shares(store.core.root_secret, policies.documents)
        store.core.reclaimer.shares = store.core.pool.shares = self.shares
        store.core.publications.permit(self._publishes)

    def _publishes(self, tenant: str) -> bool:
        document = self.policies.documents.get(tenant)
        return document is not None and document.publication

    # --- another policy
    def tokens_of(self, policies: Policies) -> Tokens | None:
        """Raises PolicyError."""
        return None if policies.jwt is None else Tokens(policies.jwt, policies.path, self.core.clock.wall)

    def adopt(self, policies: Policies, tokens: Tokens | None) -> None:
        """It decides from now on, also about what is open."""
        self.policies, self._tokens = policies, tokens
        self.shares.adopt(policies.documents)
        self.core.publications.permit(self._publishes)

    def renew(self, peer: Peer) -> bool:
        """Whether a client may go on: it connects as it did, and keeps its keyspaces and the memory that it maps."""
        old = peer.principal
        new = None if old is None else self.policies.principals.get(old.name)
        if old is None or new is None or new.way != old.way:
            return False
        peer.principal = new
        for number, opening in enumerate(peer.openings):
            peer.openings[number] = renewed = self._renewed(peer, opening)
            if not renewed.capability.actions or (opening.mapped and not renewed.mapped):
                return False
        return True

    def _renewed(self, peer: Peer, opening: Opening) -> Opening:
        """As decided now; nothing is allowed where its names would be others."""
        under, old, who = self.policies, opening.capability, peer.principal
        assert who is not None
        document = under.documents.get(old.tenant) or opening.document
        new = self._restricted(who, old) if old.lent else self._own(who, old.tenant)
        if _names(document, who, old.subject) != opening.names or (who.tokens and not old.lent):
            new = msgspec.structs.replace(new, actions=frozenset())
        return Opening(new, document, opening.salt, "map" in new.actions, under, opening.names)

    def _restricted(self, who: Principal, lent: Capability) -> Capability:
        """A capability that was lent under a policy of before, without what is not allowed any more."""
        if lent.policy == self.policies.stamp(lent.tenant):
            return lent
        allowed = self._own(who, lent.tenant)
        return msgspec.structs.replace(lent, actions=lent.actions & allowed.actions, policy=allowed.policy)

    # --- who
    def principals(self) -> Iterable[Principal]:
        return self.policies.principals.values()

    def by_certificate(self, uris: Iterable[str], address: str) -> Principal:
        """The principal that a certificate's URIs name. Raises AccessDenied."""
        named = list(uris)
        found = [one for one in self.principals() if one.spiffe and named == [one.spiffe]]
        if not found:
            why = "the certificate names no principal of this service by a single SPIFFE id"
            self.denials.note(address.rpartition(":")[0], "", "connect", why, self.policies.stamp(""))
            raise AccessDenied(why)
        return found[0]

    def turned_away(self, credentials: tuple[int, int], error: AccessDenied) -> None:
        uid, gid = credentials
        self.denials.note(f"unix uid {uid} gid {gid}", "", "connect", str(error), self.policies.stamp(""))

    # --- opening
    def admit(self, peer: Peer, q: m.OpenSpace) -> Opening:
        """Raises AccessDenied."""
        with self._recorded(peer, q.tenant, "open"):
            return self._admit(peer, q)

    def _admit(self, peer: Peer, q: m.OpenSpace) -> Opening:
        who, under = peer.principal, self.policies
        assert who is not None
        if q.capability:
            capability = self._restricted(who, self.authority.check(q.capability, who))
            if q.tenant not in ("", capability.tenant):
                raise AccessDenied(f"the capability is for tenant {capability.tenant!r}, not {q.tenant!r}")
        elif who.tokens:
            raise AccessDenied(f"{who.name} acts for others only: exchange a token, and pass the capability")
        else:
            capability = self._own(who, self._tenant(who, q.tenant))
        document = under.documents.get(capability.tenant)
        if document is None or not capability.actions & {"read", "write"}:
            raise AccessDenied(self.policies.decide(who, capability.tenant, "read", self._where(capability.tenant)).why)
        if document.scope == "group" and not who.group:
            raise AccessDenied(
                f"{document.name} shares within session groups, and {who.name} has none; give it a group"
            )
        names = _names(document, who, capability.subject)
        parts = (names if len(names) > 1 else ()) + (("salt", q.salt) if q.salt else ())
        salt = "".join(f"{len(part.encode())}:{part}" for part in parts)
        return Opening(capability, document, salt, "map" in capability.actions, under, names)

    def _tenant(self, who: Principal, asked: str) -> str:
        if not asked and len(who.tenants) == 1:
            return who.tenants[0]
        if asked not in who.tenants:
            raise AccessDenied(
                f"{who.name} is no principal of tenant {asked!r}"
                if asked
                else f"{who.name} has several tenants; name one"
            )
        return asked

    def _own(self, who: Principal, tenant: str) -> Capability:
        """Decided now, for as long as the policy stays."""
        decided = self.policies.decide_all(who, tenant, SPACE_ACTIONS, self._where(tenant))
        allowed = frozenset(action for action, one in decided.items() if one.allowed)
        return Capability(who.name, tenant, "", "", allowed, _NEVER, self.policies.stamp(tenant))

    def _where(self, tenant: str) -> Where:
        return Where(self._roots, persistent=self._persistent, encrypted=self._encrypts(tenant))

    def exchange(self, peer: Peer, q: m.Exchange) -> m.Granted:
        """A capability for a token. Raises AccessDenied."""
        with self._recorded(peer, "", "exchange"):
            return self._exchange(peer, q)

    def _exchange(self, peer: Peer, q: m.Exchange) -> m.Granted:
        who = peer.principal
        assert who is not None
        if self._tokens is None or self.policies.jwt is None:
            raise AccessDenied("this service takes no tokens; write [jwt] into principals.toml")
        claims = self._tokens.check(q.token)
        if claims.session and not q.session.startswith(claims.session):
            raise AccessDenied("the token is for other sessions; ask for a name that begins as its claim does")
        allowed = self._own(who, claims.tenant).actions if claims.tenant in who.tenants else frozenset[str]()
        # mapped memory could still be read when the capability is over
        actions = granted(claims, who, allowed, frozenset(q.actions)) - {"map"}
        ttl_s = min(claims.left_s, self.policies.jwt.ttl_s_max)
        stamp = self.policies.stamp(claims.tenant)
        capability = Capability(who.name, claims.tenant, claims.subject, q.session, actions, self._now() + ttl_s, stamp)
        if self.core.audit is not None:
            told = f"{', '.join(sorted(actions)) or 'nothing'} for {ttl_s:.0f} s, to {claims.subject}"
            self.core.audit.note(Event("grant-capability", tenant=claims.tenant, policy=stamp, detail=told))
        return m.Granted(q.id, self.authority.issue(capability), claims.tenant, sorted(actions), ttl_s)

    # --- questions
    def carry_out(self, peer: Peer, question: Any, answer: Callable[[], Reply]) -> Reply:
        """Answer a question if it may be asked. Raises AccessDenied."""
        refused = self.refusal(peer, question)
        if refused is not None:
            return refused, []
        with self.entered(peer, question):
            reply, fds = answer()
        if isinstance(question, m.Pin) and isinstance(reply, m.Made):
            self.quotas.pinned(peer, peer.openings[question.space].document.tenant, reply.number)
        return shown(self.policies, self._owners, peer, question, reply), fds

    def entered(self, peer: Peer, question: Any) -> AbstractContextManager[None]:
        """The question is being answered: under which policy, and for whom."""
        opening = self._opening(peer, question)
        if opening is None:
            return nullcontext()
        counted = self.quotas.entered(opening.document.tenant, question)
        return counted if self.core.audit is None else self._acting(counted, peer, opening)

    @contextmanager
    def _acting(self, counted: AbstractContextManager[None], peer: Peer, opening: Opening) -> Iterator[None]:
        with counted, acting(peer.who + opening.on_behalf, policy=opening.capability.policy):
            yield

    def refusal(self, peer: Peer, q: Any) -> m.Message | None:
        """None, or the answer to what may not be done; raises AccessDenied where the answer has no room for it. Bounds
        the question's times to the tenant's terms."""
        try:
            return self._refusal(peer, q)
        except AccessDenied as error:
            self._deny(peer, q, str(error))
            raise

    @contextmanager
    def _recorded(self, peer: Peer, tenant: str, what: str) -> Iterator[None]:
        """A denial inside is in the audit log."""
        try:
            yield
        except AccessDenied as error:
            self.denials.note(peer.who, tenant, what, str(error), self.policies.stamp(tenant))
            raise

    def _deny(self, peer: Peer, q: Any, why: str) -> None:
        opening = peer.openings[q.space] if 0 <= getattr(q, "space", -1) < len(peer.openings) else None
        what = q.verb if isinstance(q, m.SessionAsk | m.Govern) else type(q).__name__.lower()
        if opening is None:
            self.denials.note(peer.who, "", what, why, self.policies.stamp(""))
        else:
            capability = opening.capability
            self.denials.note(peer.who + opening.on_behalf, capability.tenant, what, why, capability.policy)

    def _refusal(self, peer: Peer, q: Any) -> m.Message | None:
        action = _NEEDS.get(type(q))  # by type alone: this is asked for every batch
        if action is None and isinstance(q, m.SessionAsk) and q.space >= 0:
            action = _SESSION_VERBS.get(q.verb, "session")
        opening = self._opening(peer, q)
        if action is None or opening is None:
            self._check_other(peer, q)
            return None
        problem = self._problem(peer, opening, action)
        if problem is not None:
            return self._denied(peer, q, problem)
        if type(q) in _CHANGING:
            if isinstance(q, m.SessionAsk):
                self._bound_session(opening, q)
            self._bound_keys(peer, q)
        problem = self.quotas.problem(peer, opening.document, q)  # last: what it lets through is counted
        if problem is not None:
            return self._denied(peer, q, problem)
        if isinstance(q, _WRITES):
            q.ttl_s = opening.document.ttl(q.ttl_s)
        return None

    def _check_other(self, peer: Peer, q: Any) -> None:
        """What names no keyspace. Raises AccessDenied."""
        if isinstance(q, FREE):
            return
        if isinstance(q, m.EndLease):
            if not peer.holds(lease_of(q.lease)):
                raise AccessDenied("the lease is not this client's")
        elif isinstance(q, m.Region | m.Sync):
            if isinstance(q, m.Region) and q.kind == "nixl":
                raise AccessDenied("NIXL has no identities: a governed service moves no payload by it; use tcp://")
            if not peer.openings:
                raise AccessDenied("open a keyspace first")
        elif isinstance(q, m.SessionAsk):
            self._administer(peer, q)
        elif isinstance(q, m.Govern):
            self._governing(peer, q)
        elif isinstance(q, m.Publication):
            self._publication(peer, q)
        else:
            self._service_action(peer, "administer")

    def _denied(self, peer: Peer, q: Any, why: str) -> m.Message:
        answer = denial(q, why)  # raises AccessDenied
        self._deny(peer, q, why)
        return answer

    def _bound_keys(self, peer: Peer, q: Any) -> None:
        """Nothing is done to other tenants' blocks. Raises AccessDenied."""
        told = q.fields.get("keys") if isinstance(q, m.SessionAsk) else getattr(q, "keys", None)
        if isinstance(told, bytes) and (self._owners.of(keys_of(told), peer.space(q.space).tenant_id) == OTHER).any():
            raise AccessDenied("keys of blocks that are another tenant's")

    def _opening(self, peer: Peer, q: Any) -> Opening | None:
        """What a question's keyspace was opened under; None for kinds that have none."""
        if type(q) not in _NEEDS and not (isinstance(q, m.SessionAsk) and q.space >= 0):
            return None
        peer.space(q.space)  # raises ProtocolError
        opening: Opening = peer.openings[q.space]
        if opening.under is not self.policies:
            opening = peer.openings[q.space] = self._renewed(peer, opening)
        return opening

    def _problem(self, peer: Peer, opening: Opening, action: str) -> str | None:
        capability = opening.capability
        if action not in capability.actions:
            who = peer.principal
            assert who is not None
            decided = self.policies.decide(who, capability.tenant, action, self._where(capability.tenant))
            return f"the capability leaves out {action!r}" if decided.allowed else f"{action}: {decided.why}"
        if capability.deadline_s != _NEVER and self._now() >= capability.deadline_s:
            return "the capability is over; exchange a token and open the keyspace again"
        return None

    # --- sessions
    def _bound_session(self, opening: Opening, q: m.SessionAsk) -> None:
        """Names within the capability's scope, times within the terms, the subject its own. Raises AccessDenied."""
        if q.verb == "open" and opening.capability.subject:
            q.fields = q.fields | {"subject": opening.capability.subject}
        scope = opening.capability.session
        names = [q.fields.get(field) for field in _NAMED if q.fields.get(field) is not None]
        inside = names and all(isinstance(name, str) and name.startswith(scope) for name in names)
        if scope and not inside and q.verb != "prefetch":
            raise AccessDenied("the capability is for sessions whose names begin with what it was exchanged for")
        asked = q.fields.get("ttl_s")
        if opening.document.retention_min_s and (q.verb == "release" or (q.verb == "expire" and asked == 0)):
            raise AccessDenied(f"{opening.document.name} promises retention; the session ends by itself")
        if q.verb not in ("open", "expire") or not (asked is None or isinstance(asked, int | float)):
            return
        bounded = opening.document.session_ttl(limits.session_ttl_s_default if asked is None else asked)
        if q.verb == "open" or asked:
            q.fields = q.fields | {"ttl_s": bounded}

    def _administer(self, peer: Peer, q: m.SessionAsk) -> None:
        """Sessions by name: an operator's of everybody's, an engine's of its tenant's, where that is one room."""
        who = peer.principal
        assert who is not None
        if self.policies.decide(who, "", "administer").allowed:
            return
        tenant = self._tenant(who, str(q.fields.get("tenant") or ""))
        document = self.policies.documents.get(tenant)
        action = {"release": "release"}.get(q.verb, "session")
        decided = self.policies.decide(who, tenant, action, self._where(tenant))
        if not decided.allowed or document is None or document.scope not in ("tenant", "published"):
            raise AccessDenied(f"sessions: {decided.why if not decided.allowed else 'not all of the tenant are yours'}")
        if peer.principal is not None and any(one.capability.session for one in peer.openings):
            raise AccessDenied("sessions: the capability is for some of them only; open them by name")
        q.fields = q.fields | {"tenant": tenant}

    def _governing(self, peer: Peer, q: m.Govern) -> None:
        """An operator of the tenant. A hold does not forbid to order an erasure: that waits for the hold's end."""
        action, tenant = GOVERNING.get(q.verb), q.fields.get("tenant")
        if action is None or not isinstance(tenant, str) or not tenant:
            self._service_action(peer, "administer")
            return
        who, document = peer.principal, self.policies.documents.get(tenant)
        assert who is not None
        promised_s = 0 if document is None else document.retention_min_s
        retained = action == "erase" and is_retained(self.core, q.fields, promised_s)
        decided = self.policies.decide(who, tenant, action, replace(self._where(tenant), retained=retained))
        if not decided.allowed:
            raise AccessDenied(f"{q.verb}: {decided.why}")

    def _publication(self, peer: Peer, q: m.Publication) -> None:
        """Publishing: who may for the tenant, on its terms. Its end: also the service's operator, whatever the terms
        say by now. A list: who may see the status, else of what concerns one's tenants. Raises AccessDenied."""
        who, published = peer.principal, self.core.publications
        assert who is not None
        if q.verb == "published":
            if not self.policies.decide(who, "", "status").allowed:
                q.fields = {"tenants": list(who.tenants)}
            return
        tenant = published.tenant_of(q.verb, q.fields)
        decided = self.policies.decide(who, tenant, "publish", self._where(tenant))
        document = self.policies.documents.get(tenant)
        ending = q.verb == "unpublish" and self.policies.decide(who, "", "administer").allowed
        if not ending and (who.tokens or not decided.allowed or document is None):
            raise AccessDenied(f"{q.verb}: {decided.why if tenant in who.tenants else 'no such prefix of yours'}")
        asked = q.fields.get("ttl_s")
        if document is not None and q.verb == "publish" and (asked is None or isinstance(asked, int | float)):
            q.fields = q.fields | {"ttl_s": document.ttl(asked)}

    def _service_action(self, peer: Peer, action: str) -> None:
        who = peer.principal
        assert who is not None
        decided = self.policies.decide(who, "", action)
        if not decided.allowed:
            raise AccessDenied(f"{action}: {decided.why}")
