"""What each question of a client does, whatever transport it came by.

Contract: `answer` returns the answer and the descriptors to send with it (the caller closes them), or raises a
PerdureError that becomes the answer. Lengths, numbers and ranges of a question are checked before anything is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perdure import limits
from perdure.catalog.api import Lease
from perdure.core import Core
from perdure.errors import AccessDenied, CatalogError, InvalidArgument, ProtocolError, ServiceBusy
from perdure.flight import Wish
from perdure.governance.actor import acting
from perdure.governance.audit import AuditLog, Event
from perdure.keyspace import Keyspace
from perdure.reports import ReadReport
from perdure.segments.landing import BlockStatus
from perdure.service import messages as m
from perdure.service.domains import Domain, Domains
from perdure.service.fields import NO_SLOT, extents_of, identity_of, keys_of, lease_of, pack_lease, too_late
from perdure.service.nixl_node import Far, Mover
from perdure.service.peers import Peer, Ring, found_slots
from perdure.service.regions import LentRegion, Region, register
from perdure.service.shared import CHUNKS, RING_BYTES
from perdure.store import Store
from perdure.viewing import fetch

if TYPE_CHECKING:
    from perdure.service.guard import Guard, Opening

_CLIENTS_TOLD_MAX = 200  # so that the answer fits a message


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A question that cannot be answered yet. `answer_of` makes the answer of what the wish came to."""

    wish: Wish
    until: float
    answer_of: Callable[[Any], m.Message]


Reply = tuple[m.Message | Waiting, list[int]]

READING = (m.Fetch, m.Read, m.Explain, m.ExplainPrefix, m.Settled)
WRITING = (
    m.Write, m.Sync, m.Reserve, m.EndLease, m.Pin, m.Unpin, m.OpenSpace, m.Region, m.SessionAsk, m.Publication,
    m.Govern, m.Reload,
)  # fmt: skip
"""Questions that may wait for the disk; all others are answered at once."""


class Verbs:
    def __init__(
        self, store: Store, domains: Domains, status: Callable[[], dict[str, Any]], guard: Guard | None = None
    ):
        self._store, self._core, self._domains, self._status = store, store.core, domains, status
        self._guard = guard
        self.mover = Mover(store.core.pool)
        self._handlers: dict[type, Callable[..., Reply]] = {
            m.OpenSpace: self._open_space, m.Attach: self._attach, m.Lookup: self._lookup, m.Present: self._present,
            m.Fetch: self._fetch, m.Release: self._release, m.Read: self._read, m.Settled: self._settled,
            m.Region: self._region, m.Unregister: self._unregister, m.Write: self._write, m.Reserve: self._reserve,
            m.Follow: self._follow, m.EndLease: self._end_lease, m.Pin: self._pin, m.Unpin: self._unpin,
            m.Hint: self._hint, m.Advise: self._advise, m.Status: self._tell_status, m.Explain: self._explain,
            m.ExplainPrefix: self._explain_prefix, m.Sync: self._sync, m.SessionAsk: self._session,
            m.Exchange: self._exchange, m.Govern: self._govern, m.Publication: self._publication,
            m.Reload: self._reload,
        }  # fmt: skip

    def answer(self, peer: Peer, question: Any, fds: list[int]) -> Reply:
        if self._core.audit is None:
            return self._guarded(peer, question, fds)
        with acting(peer.who, getattr(question, "trace", "")):
            return self._guarded(peer, question, fds)

    def _guarded(self, peer: Peer, question: Any, fds: list[int]) -> Reply:
        if self._guard is None:
            return self._carry_out(peer, question, fds)
        return self._guard.carry_out(peer, question, lambda: self._carry_out(peer, question, fds))

    def _carry_out(self, peer: Peer, question: Any, fds: list[int]) -> Reply:
        handler = self._handlers.get(type(question))
        if handler is None:
            raise ProtocolError(f"{type(question).__name__} is no question for a client that has said hello")
        if isinstance(question, m.Region):
            return self._region(peer, question, fds)
        if isinstance(question, m.Fetch | m.Read | m.Write):
            left_s = question.until_s - time.monotonic()
            if not left_s <= limits.deadline_s_max:
                raise ProtocolError(f"until_s={question.until_s}: no reading of this host's clock")
            if left_s <= 0:
                return too_late(question), []
            return handler(peer, question, left_s)
        return handler(peer, question)

    # --- keyspaces and maps
    def _open_space(self, peer: Peer, q: m.OpenSpace) -> Reply:
        identity = identity_of(q)
        opening = None if self._guard is None else self._guard.admit(peer, q)
        tenant, salt = (q.tenant, q.salt) if opening is None else (opening.capability.tenant, opening.salt)
        space = self._store.keyspace(
            model=identity.model, weights=identity.weights, layout=identity.layout, tenant=tenant,
            lora=identity.lora, draft=identity.draft, salt=salt, codec=q.codec or None,
        )  # fmt: skip
        mapped = bool(self._core.pool.budget_bytes) and not peer.remote and not _unseen_forbidden(self._core)
        mapped = mapped and (opening is None or opening.mapped)
        if mapped:
            self._domains.get(space.tenant_id)
        space.reads_published = opening is not None and opening.document.scope == "published"
        number = peer.open_space(space, opening)
        if self._core.audit is not None:
            self._core.audit.note(grant_event(self._core.audit, peer, space, opening, mapped=mapped))
        return m.SpaceOpened(
            q.id, number, space.digest, space.shared_digest, space.tenant_id, mapped, space.reads_published
        ), []

    def _exchange(self, peer: Peer, q: m.Exchange) -> Reply:
        if self._guard is None:
            raise AccessDenied("this service has no policy, so there is nothing to exchange a token for")
        return self._guard.exchange(peer, q), []

    def _attach(self, peer: Peer, q: m.Attach) -> Reply:
        if len(q.versions) != 2:
            raise ProtocolError("versions of two tables are needed")
        if _unseen_forbidden(self._core):
            raise ProtocolError("this service audits every read: there is no memory to map")
        space = peer.space(q.space)
        domain = self._domains.get(space.tenant_id)
        items: list[tuple[str, int, int, int]] = []
        fds: list[int] = []
        try:
            # before the lock: its memory may have to be taken from the pool, which tells the domain
            ring = self._ring(peer, domain)
            with domain.lock:
                more = self._collect_maps(peer, domain, ring, q, items, fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        if self._core.audit is not None and len(items) > 1:
            chunks = sum(item[0] == "chunk" for item in items)
            self._core.audit.note(Event("grant-map", tenant=space.tenant, counts={"chunks": chunks}))
        return m.Attached(q.id, items, list(domain.chunks), more), fds

    def _ring(self, peer: Peer, domain: Domain) -> Ring:
        ring = peer.rings.get(domain)
        if ring is None:
            made = Ring(LentRegion(self._core.pool, "ring", RING_BYTES))
            ring = peer.rings.setdefault(domain, made)
            if ring is not made:  # another thread of the client was faster
                made.memory.close()
        if peer.ended:
            ring.memory.close()
            raise ProtocolError("this client has ended")
        return ring

    def _collect_maps(
        self,
        peer: Peer,
        domain: Domain,
        ring: Ring,
        q: m.Attach,
        items: list[tuple[str, int, int, int]],
        fds: list[int],
    ) -> bool:
        """What the client lacks; whether there is more. With the domain's lock held."""
        mine = peer.maps(domain)  # before the look at `ended`: so its end finds the domain
        if peer.ended:
            raise ProtocolError("this client has ended")
        domain.peers.add(peer)
        items.append(("version", int(domain.words[CHUNKS]), 0, 0))
        if not any(q.versions):
            page, nbytes = domain.descriptor_of_page()
            fds.append(page)
            fds.append(os.dup(ring.memory.memory.fd))
            items += [("directory", 0, nbytes, 0), ("ring", 0, RING_BYTES, 0)]
        for name, table, had in (("presence", domain.presence, q.versions[0]), ("slots", domain.slots, q.versions[1])):
            if table.memory is not None and table.version != had:
                items.append((name, table.version, table.memory.nbytes, len(table.index.table.fp)))
                fds.append(os.dup(table.memory.fd))
        known, most = set(q.chunks), limits.message_descriptors_max - len(fds)
        new = [number for number in domain.chunks if number not in known]
        for number in new[:most]:
            chunk = domain.chunks[number]
            items.append(("chunk", number, chunk.memory.nbytes, chunk.nbytes))
            fds.append(os.dup(chunk.memory.fd))
            mine.add(number)
        return len(new) > most

    # --- asking
    def _lookup(self, peer: Peer, q: m.Lookup) -> Reply:
        return m.Count(q.id, peer.space(q.space).lookup(keys_of(q.keys))), []

    def _present(self, peer: Peer, q: m.Present) -> Reply:
        return m.Mask(q.id, peer.space(q.space).present(keys_of(q.keys)).tobytes()), []

    def _advise(self, peer: Peer, q: m.Advise) -> Reply:
        a = peer.space(q.space).advise(
            keys_of(q.keys), prefill_tokens_per_s=q.prefill_tokens_per_s, deadline_s=q.deadline_s
        )
        return m.Advised(q.id, a.blocks, a.load_s, a.recompute_s, a.reason, a.stored, a.in_memory), []

    def _tell_status(self, peer: Peer, q: m.Status) -> Reply:
        status = self._status()
        clients = status["clients"]
        status["clients"], status["clients_omitted"] = clients[:_CLIENTS_TOLD_MAX], len(clients[_CLIENTS_TOLD_MAX:])
        return m.Document(q.id, status), []

    def _explain(self, peer: Peer, q: m.Explain) -> Reply:
        return m.Document(q.id, self._store.explain(q.key)), []

    def _explain_prefix(self, peer: Peer, q: m.ExplainPrefix) -> Reply:
        if len(q.tokens) % 4:
            raise ProtocolError("tokens are 4 bytes each")
        answer = self._store.explain_prefix(peer.space(q.space), np.frombuffer(q.tokens, "<u4"))
        return m.Document(q.id, answer), []

    def _session(self, peer: Peer, q: m.SessionAsk) -> Reply:
        if q.space < 0:
            return m.Document(q.id, self._store.session_admin(q.verb, q.fields)), []
        return m.Document(q.id, peer.space(q.space).session_ask(q.verb, q.fields)), []

    def _govern(self, peer: Peer, q: m.Govern) -> Reply:
        return m.Document(q.id, self._store.govern(q.verb, q.fields)), []

    def _publication(self, peer: Peer, q: m.Publication) -> Reply:
        if self._guard is None:
            raise AccessDenied("publishing is policy's to allow: serve with one (--policy), or stop the service for it")
        return m.Document(q.id, self._store.publication_ask(q.verb, q.fields)), []

    def _reload(self, peer: Peer, q: m.Reload) -> Reply:
        if self._guard is None:
            raise AccessDenied("this service has no policy to read anew; start it with --policy")
        return m.Document(q.id, self._guard.reload()), []

    def _sync(self, peer: Peer, q: m.Sync) -> Reply:
        self._store.sync()
        return m.Answered(q.id, True), []

    # --- moving blocks
    def _fetch(self, peer: Peer, q: m.Fetch, left_s: float) -> Reply:
        space, keys = peer.space(q.space), keys_of(q.keys)
        nbytes = len(keys) * space.layout.block_bytes
        if nbytes > fetch_bytes(self._store) and len(keys) > 1:
            raise ProtocolError(f"{nbytes} bytes in one fetch, at most {fetch_bytes(self._store)}")
        if not 0 <= q.view_s <= limits.view_ttl_s_max:
            raise InvalidArgument(f"view for {q.view_s} s: at most {limits.view_ttl_s_max}")
        if not peer.promise(nbytes, self._core.pool.budget_bytes // 2):
            raise ServiceBusy(
                f"this client looks at {peer.granted_bytes} bytes of the pool already, half of it at most; "
                "release views"
            )
        try:
            got = fetch(self._core, space, keys, deadline_s=left_s)
        except BaseException:
            peer.break_promise(nbytes)
            raise
        packed = np.full(len(keys), NO_SLOT, np.uint64)
        if not peer.grant(q.grant, found_slots(got.slots, packed), nbytes, q.view_s):
            raise ProtocolError(f"grant {q.grant} is in use")
        self._domains.settle()
        report = got.report
        return m.Fetched(
            q.id, report.statuses.tobytes(), packed.tobytes(), report.from_memory, report.problems, got.no_room
        ), []

    def _release(self, peer: Peer, q: m.Release) -> Reply:
        return m.Answered(q.id, peer.end_grants(q.grants)), []

    def _read(self, peer: Peer, q: m.Read, left_s: float) -> Reply:
        space, keys, region = peer.space(q.space), keys_of(q.keys), peer.region(q.region)
        blocks = extents_of(q.extents, q.parts, len(keys), space.layout.block_bytes, region.nbytes)
        parts, lease = region.take(blocks, filled=False)
        report: ReadReport | None = None
        try:
            report = space.read(keys, parts, deadline_s=left_s, direct=q.direct and lease is None)
            found = np.flatnonzero(report.statuses == int(BlockStatus.FOUND)).tolist()
            region.store(blocks, parts, found)
        finally:
            if lease is not None:
                del parts
                lease.give_back()
        self._domains.settle()
        late = 0
        if not report.wait_settled(0.0):
            late = peer.number()
            peer.late[late] = report
        return m.Delivered(q.id, report.statuses.tobytes(), report.from_memory, report.problems, late), []

    def _settled(self, peer: Peer, q: m.Settled) -> Reply:
        report = peer.late.get(q.late)
        if report is None:
            return m.Answered(q.id, True), []
        settled = report.wait_settled(min(max(q.wait_s, 0.0), 1.0))
        if settled:
            peer.late.pop(q.late, None)
        return m.Answered(q.id, settled), []

    def _write(self, peer: Peer, q: m.Write, left_s: float) -> Reply:
        space, keys, region = peer.space(q.space), keys_of(q.keys), peer.region(q.region)
        blocks = extents_of(q.extents, q.parts, len(keys), space.layout.block_bytes, region.nbytes)
        parts, lease = region.take(blocks, filled=True)
        try:
            report = space.write(
                keys, parts, durability=q.durability, ttl_s=q.ttl_s, deadline_s=left_s,
                lease=None if q.lease is None else lease_of(q.lease),
            )  # fmt: skip
        finally:
            if lease is not None:
                del parts
                lease.give_back()
        self._domains.settle()
        return m.Written(q.id, report.statuses.tobytes(), report.stored, report.stored_bytes, report.reasons), []

    # --- regions
    def _region(self, peer: Peer, q: m.Region, fds: list[int]) -> Reply:
        for number in [number for number, one in peer.regions.items() if isinstance(one, Far) and one.ended]:
            peer.regions.pop(number, None)
        if len(peer.regions) >= limits.regions_per_client_max:
            raise ServiceBusy(f"{limits.regions_per_client_max} regions are registered; unregister some")
        if not 0 < q.nbytes <= limits.region_bytes_max:
            raise InvalidArgument(f"a region of {q.nbytes} bytes: must be 1 to {limits.region_bytes_max}")
        region: Region
        if q.kind == "client":
            if len(fds) != 1:
                raise ProtocolError("the descriptor of the memory to register is missing")
            region, out = register(fds[0], q.nbytes, self._core.scratch), []
        elif q.kind in ("staging", "landing"):
            region = LentRegion(self._core.pool, q.kind, q.nbytes)
            out = [os.dup(region.memory.fd)]
        elif q.kind == "nixl" and peer.remote:
            region, out = self.mover.register(q), []
        else:
            raise ProtocolError(f"region kind {q.kind!r}: must be staging, landing or client")
        number = peer.number()
        peer.regions[number] = region
        if peer.ended:
            peer.regions.pop(number, None)
            region.close()
        return m.Made(q.id, number, region.nbytes), out

    def _unregister(self, peer: Peer, q: m.Unregister) -> Reply:
        region = peer.regions.pop(q.region, None)
        if region is not None:
            region.close()
        return m.Answered(q.id, region is not None), []

    # --- lifetimes
    def _reserve(self, peer: Peer, q: m.Reserve) -> Reply:
        wish = peer.space(q.space).reservation(keys_of(q.keys), q.ttl_s)

        def answer_of(lease: Lease | None) -> m.Message:
            if lease is not None:
                peer.hold(lease)
            return m.Leased(q.id, None if lease is None else pack_lease(lease))

        until = _wait_until(peer, q)
        return Waiting(wish, until, answer_of) if until else answer_of(wish.acquire()), []

    def _follow(self, peer: Peer, q: m.Follow) -> Reply:
        wish = peer.space(q.space).following(keys_of(q.keys), q.known)
        return Waiting(wish, _wait_until(peer, q), lambda found: m.Count(q.id, found)), []

    def undo(self, peer: Peer, answer: m.Message) -> None:
        """The answer did not reach the client: nobody knows of the lease in it."""
        if isinstance(answer, m.Leased) and answer.lease is not None:
            lease = lease_of(answer.lease)
            peer.drop(lease)
            with suppress(CatalogError):  # it ends by itself
                self._core.leases.release(lease)

    def _end_lease(self, peer: Peer, q: m.EndLease) -> Reply:
        lease = lease_of(q.lease)
        peer.drop(lease)
        return m.Answered(q.id, self._core.leases.release(lease)), []

    def _pin(self, peer: Peer, q: m.Pin) -> Reply:
        pin = peer.space(q.space).pin(keys_of(q.keys), ttl_s=q.ttl_s)
        number = peer.number()
        peer.pins[number] = pin
        if peer.ended:
            pin.release()
        return m.Made(q.id, number, 0), []

    def _unpin(self, peer: Peer, q: m.Unpin) -> Reply:
        pin = peer.pins.pop(q.pin, None)
        return m.Answered(q.id, pin is not None and pin.release()), []

    def _hint(self, peer: Peer, q: m.Hint) -> Reply:
        space: Keyspace = peer.space(q.space)
        space.release(keys_of(q.keys))
        return m.Answered(q.id, True), []


def _unseen_forbidden(core: Core) -> bool:
    """Whether engines may not read memory without a message."""
    return core.audit is not None and core.audit.every_read


def grant_event(audit: AuditLog, peer: Peer, space: Keyspace, opening: Opening | None, *, mapped: bool) -> Event:
    """The record of a keyspace that was opened: whoever holds it may do that until it disconnects."""
    event = Event(
        "grant", who=peer.who, tenant=space.tenant, space=audit.id_of("space", space.digest),
        detail="everything" if opening is None else ", ".join(sorted(opening.capability.actions)),
        outcome="mapped" if mapped else "by message",
    )  # fmt: skip
    if opening is not None:
        event.who, event.policy = event.who + opening.on_behalf, opening.capability.policy
    return event


def _wait_until(peer: Peer, q: m.Reserve | m.Follow) -> float:
    """When to answer at the latest, on this host's CLOCK_MONOTONIC; 0: at once."""
    now = time.monotonic()
    left_s = q.left_s if peer.remote else q.until_s and q.until_s - now
    if not left_s <= limits.deadline_s_max or q.left_s < 0:
        raise ProtocolError(f"until_s={q.until_s}, left_s={q.left_s}: no reading of this host's clock, or no seconds")
    return now + left_s if left_s else 0.0


def fetch_bytes(store: Store) -> int:
    """What one fetch may bring."""
    return min(limits.fetch_bytes_max, store.core.pool.budget_bytes // 4)
