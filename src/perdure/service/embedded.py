"""A store in the engine's own process, under a policy: every call is the question a client of a service would ask, and
`guard` decides on it. Nothing is decided here.

Contract
- Who asks is the principal that the store was opened as; policy says whether that may be (`embedded = true`).
- Refusals are a service's: reads DENIED, writes REJECTED, look-ups find nothing, the rest raises AccessDenied; each is
  in the audit log, if there is one. A call has at most `limits.message_keys_max` keys, or raises InvalidArgument.
- It keeps the process's own calls within policy. It is no wall against other code in the process, which has the same
  memory and the same files: for that there is the service.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from perdure import keys as naming
from perdure import limits
from perdure.advice import Advice
from perdure.catalog.api import Durability, KeyArray, Lease
from perdure.errors import AccessDenied, InvalidArgument, PolicyError, StoreClosed
from perdure.governance.actor import acting
from perdure.governance.policy import Policies, load
from perdure.governance.verbs import GovernanceVerbs
from perdure.keys import KVLayout
from perdure.keyspace import Keyspace, PinHandle, check_seconds
from perdure.publication_verbs import PublicationVerbs
from perdure.reports import ReadReport, WriteReport
from perdure.service import messages as m
from perdure.service.domains import Domains
from perdure.service.fields import identity_of, layout_fields, pack_lease
from perdure.service.guard import Guard
from perdure.service.peers import Peer
from perdure.service.reloading import guard_of, in_force
from perdure.service.shown import denial
from perdure.service.verbs import grant_event
from perdure.session import SessionVerbs, listed
from perdure.store import Store
from perdure.store import open as open_store

_NAME = "embedded"
Fields = dict[str, Any]


class Verify(m.Message):
    """As `Store.verify`: an administrator's, as every kind that `guard` does not know."""


class RotateKek(m.Message):
    """As `Store.rotate_kek`: an administrator's."""


class GovernedPin(PinHandle):
    """A pin that policy counts."""

    def __init__(self, peer: Peer, number: int, pin: PinHandle):
        super().__init__(peer.core, pin.pin_id, pin.deadline_s)
        self._peer, self._number = peer, number

    def release(self) -> bool:
        self._peer.pins.pop(self._number, None)
        return super().release()


class GovernedKeyspace(SessionVerbs):
    """As `Keyspace`, of which it has all verbs."""

    def __init__(self, store: GovernedStore, number: int, space: Keyspace):
        self._store, self._peer, self._number, self._space = store, store.peer, number, space
        self.tenant, self.tenant_id, self.identity, self.layout = (
            space.tenant, space.tenant_id, space.identity, space.layout,
        )  # fmt: skip
        self.digest, self.shared_digest, self.codec = space.digest, space.shared_digest, space.codec

    def _question(self, kind: Callable[..., Any], keys: KeyArray, *fields: Any) -> Any:
        """Raises StoreClosed, InvalidArgument."""
        self._store.check()
        if len(keys) > limits.message_keys_max:
            raise InvalidArgument(
                f"{len(keys)} keys in one call: at most {limits.message_keys_max} under a policy; divide it"
            )
        return kind(0, self._number, keys.tobytes(), *fields)

    @property
    def erased(self) -> bool:
        return self._space.erased

    # --- names
    def chain(
        self, token_ids: ArrayLike, *, parent: bytes | None = None, extras: Mapping[int, bytes] | None = None
    ) -> KeyArray:
        return self._space.chain(token_ids, parent=parent, extras=extras)

    def adopt_hashes(self, hashes: Sequence[bytes]) -> KeyArray:
        return self._space.adopt_hashes(hashes)

    # --- asking
    def lookup(self, keys: KeyArray | Sequence[bytes]) -> int:
        array = naming.check_keys(keys)
        q = self._question(m.Lookup, array)
        count: int = self._store.asked(q, lambda: m.Count(0, self._space.lookup(array))).count
        return count

    def present(self, keys: KeyArray | Sequence[bytes]) -> NDArray[np.bool_]:
        array = naming.check_keys(keys)
        q = self._question(m.Present, array)
        reply = self._store.asked(q, lambda: m.Mask(0, self._space.present(array).tobytes()))
        return np.frombuffer(reply.mask, np.bool_).copy()

    def advise(
        self, keys: KeyArray | Sequence[bytes], *, prefill_tokens_per_s: float, deadline_s: float | None = None
    ) -> Advice:
        array = naming.check_keys(keys)
        q = self._question(m.Advise, array, prefill_tokens_per_s, deadline_s)

        def answer() -> m.Message:
            a = self._space.advise(array, prefill_tokens_per_s=prefill_tokens_per_s, deadline_s=deadline_s)
            return m.Advised(0, a.blocks, a.load_s, a.recompute_s, a.reason, a.stored, a.in_memory)

        told = self._store.asked(q, answer)
        return Advice(told.blocks, told.load_s, told.recompute_s, told.reason, told.stored, told.in_memory)

    # --- moving blocks
    def read(
        self, keys: KeyArray | Sequence[bytes], into: Any, *, deadline_s: float | None = None, direct: bool = False
    ) -> ReadReport:
        array = naming.check_keys(keys)
        q = self._question(m.Read, array, 0, b"", b"", 0.0, direct)
        with self._store.acting():
            denied: Any = self._store.guard.refusal(self._peer, q)
            if denied is not None:
                return ReadReport(np.frombuffer(denied.statuses, np.uint8).copy(), 0, 0, 0.0, problems=denied.problems)
            with self._store.guard.entered(self._peer, q):
                return self._space.read(array, into, deadline_s=deadline_s, direct=direct)

    def write(
        self,
        keys: KeyArray | Sequence[bytes],
        blocks: Any,
        *,
        durability: str | Durability = Durability.SESSION,
        ttl_s: float | None = None,
        lease: Lease | None = None,
        deadline_s: float | None = None,
    ) -> WriteReport:
        array = naming.check_keys(keys)
        if ttl_s is not None:
            check_seconds(ttl_s, "ttl_s", limits.ttl_s_max)
        q = self._question(m.Write, array, 0, b"", b"", "", ttl_s, None, 0.0)
        with self._store.acting():
            try:
                denied: Any = self._store.guard.refusal(self._peer, q)
            except AccessDenied as error:  # keys of others' blocks
                denied = denial(q, str(error))
            if denied is not None:
                return WriteReport(np.frombuffer(denied.statuses, np.uint8).copy(), 0, 0, 0, 0.0, denied.reasons)
            with self._store.guard.entered(self._peer, q):
                return self._space.write(
                    array, blocks, durability=durability, ttl_s=q.ttl_s, lease=lease, deadline_s=deadline_s
                )

    def submit_read(self, keys: KeyArray | Sequence[bytes], into: Any, **options: Any) -> Future[ReadReport]:
        self._store.check()
        return self._space.submit(self.read, keys, into, options)

    def submit_write(self, keys: KeyArray | Sequence[bytes], blocks: Any, **options: Any) -> Future[WriteReport]:
        self._store.check()
        return self._space.submit(self.write, keys, blocks, options)

    # --- lifetimes
    def reserve(
        self, keys: KeyArray | Sequence[bytes], *, ttl_s: float = limits.lease_ttl_s_default, wait_s: float = 0.0
    ) -> Lease | None:
        array = naming.check_keys(keys)
        q = self._question(m.Reserve, array, ttl_s, 0.0, 0.0)
        with self._store.acting():
            self._store.guard.refusal(self._peer, q)
            with self._store.guard.entered(self._peer, q):
                lease = self._space.reserve(array, ttl_s=ttl_s, wait_s=wait_s)
        if lease is not None:
            self._peer.hold(lease)
        return lease

    def follow(self, keys: KeyArray | Sequence[bytes], *, known: int = 0, wait_s: float) -> int:
        array = naming.check_keys(keys)
        q = self._question(m.Follow, array, known, 0.0, 0.0)
        answer = lambda: m.Count(0, self._space.follow(array, known=known, wait_s=wait_s))  # noqa: E731
        count: int = self._store.asked(q, answer).count
        return count

    def end_lease(self, lease: Lease) -> bool:
        def answer() -> m.Message:
            self._peer.drop(lease)
            return m.Answered(0, self._space.end_lease(lease))

        self._store.check()
        ended: bool = self._store.asked(m.EndLease(0, pack_lease(lease)), answer).yes
        return ended

    def pin(self, keys: KeyArray | Sequence[bytes], *, ttl_s: float) -> PinHandle:
        array = naming.check_keys(keys)
        q = self._question(m.Pin, array, ttl_s)
        self._peer.expire()  # pins whose time is over do not count

        def answer() -> m.Message:
            pin, number = self._space.pin(array, ttl_s=ttl_s), self._peer.number()
            self._peer.pins[number] = GovernedPin(self._peer, number, pin)
            return m.Made(0, number, 0)

        return self._peer.pins[self._store.asked(q, answer).number]

    def release(self, keys: KeyArray | Sequence[bytes]) -> None:
        array = naming.check_keys(keys)

        def answer() -> m.Message:
            self._space.release(array)
            return m.Answered(0, True)

        self._store.asked(self._question(m.Hint, array), answer)

    # --- sessions
    def session_ask(self, verb: str, fields: Fields) -> Fields:
        packed = {name: one.tobytes() if isinstance(one, np.ndarray) else one for name, one in fields.items()}
        q = m.SessionAsk(0, self._number, verb, packed)
        return self._store.document(q, lambda: self._space.session_ask(q.verb, q.fields))

    def wall(self) -> float:
        return self._space.wall()


class GovernedStore(GovernanceVerbs, PublicationVerbs):
    """As `Store`, of which it has all verbs. Made by `open_governed`."""

    def __init__(self, store: Store, guard: Guard, principal: str):
        self._store, self.guard = store, guard
        self.path: Path = store.path
        self.peer = Peer(store.core, Domains(store.core), os.getpid(), _NAME)
        self.peer.principal = guard.policies.principals[principal]

    # --- what all verbs do
    def check(self) -> None:
        """Raises StoreClosed."""
        self._store._check()  # noqa: SLF001 (of the same name in both)

    def acting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._store.core.audit is None else acting(self.peer.who)

    def asked(self, question: Any, answer: Callable[[], m.Message]) -> Any:
        """The answer, if policy lets it be asked. Raises AccessDenied."""
        with self.acting():
            self.guard.denials.flush()
            reply, _ = self.guard.carry_out(self.peer, question, lambda: (answer(), []))
        return reply

    def document(self, question: Any, answer: Callable[[], Fields]) -> Fields:
        self.check()
        content: Fields = self.asked(question, lambda: m.Document(0, answer())).content
        return content

    # --- use
    def keyspace(
        self,
        *,
        model: str,
        weights: str,
        layout: KVLayout,
        tenant: str = "",
        lora: str = "",
        draft: str = "",
        salt: str = "",
        codec: str | None = None,
    ) -> GovernedKeyspace:
        """As `Store.keyspace`. tenant: one of the principal's; "": its only one. Raises AccessDenied."""
        self.check()
        q = m.OpenSpace(0, tenant, model, weights, lora, draft, layout_fields(layout), codec or "", salt)
        identity_of(q)
        peer, core = self.peer, self._store.core
        with self.acting():
            opening = self.guard.admit(peer, q)
            space = self._store.keyspace(
                model=model, weights=weights, layout=layout, tenant=opening.capability.tenant, lora=lora, draft=draft,
                salt=opening.salt, codec=codec,
            )  # fmt: skip
            space.reads_published = opening.document.scope == "published"
            number = peer.open_space(space, opening)
            if core.audit is not None:
                core.audit.note(grant_event(core.audit, peer, space, opening, mapped=False))
        return GovernedKeyspace(self, number, space)

    def govern(self, verb: str, fields: Fields) -> Fields:
        q = m.Govern(0, verb, fields)
        return self.document(q, lambda: self._store.govern(q.verb, q.fields))

    def publication_ask(self, verb: str, fields: Fields) -> Fields:
        q = m.Publication(0, verb, fields)
        return self.document(q, lambda: self._store.publication_ask(q.verb, q.fields))

    def sessions(self, tenant: str | None = None) -> list[Fields]:
        """As `Store.sessions`: of the principal's tenant, or for an operator of every one."""
        return listed(self.session_admin, tenant)

    def session_admin(self, verb: str, fields: Fields) -> Fields:
        q = m.SessionAsk(0, -1, verb, fields)
        return self.document(q, lambda: self._store.session_admin(q.verb, q.fields))

    def status(self) -> Fields:
        """As `Store.status`; who may not see it all gets what its tenants have."""
        whole = {"boot": "", "pid": os.getpid(), "clients": []}
        told: Fields = self.document(m.Status(0), lambda: whole | {"store": self._store.status()})["store"]
        who, policies = self.peer.principal, self.guard.policies
        assert who is not None
        return told | {"policy": {"path": str(policies.path), "digest": policies.digest, "principal": who.name}}

    def explain(self, key: bytes) -> Fields:
        return self.document(m.Explain(0, key), lambda: self._store.explain(key))

    def explain_prefix(self, space: GovernedKeyspace, token_ids: ArrayLike) -> Fields:
        q = m.ExplainPrefix(0, space._number, naming.token_bytes(token_ids))  # noqa: SLF001 (same module)
        return self.document(q, lambda: self._store.explain_prefix(space._space, token_ids))  # noqa: SLF001

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Fields:
        """As `Store.verify`; an administrator's."""
        return self.document(Verify(0), lambda: self._store.verify(progress))

    def rotate_kek(self) -> int:
        """As `Store.rotate_kek`; an administrator's."""
        number: int = self.document(RotateKek(0), lambda: {"number": self._store.rotate_kek()})["number"]
        return number

    def sync(self) -> None:
        def answer() -> m.Message:
            self._store.sync()
            return m.Answered(0, True)

        self.asked(m.Sync(0), answer)

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        return self._store.wait_ready(timeout_s)

    # --- another policy
    def reload_policy(self) -> Fields:
        """Read the policy anew; an administrator's. What is open is decided anew at its next call; who the policy does
        not let open the store any more may do nothing. Raises PolicyError: the one before stays in force."""
        return self.document(m.Reload(0), self._reload)

    def _reload(self) -> Fields:
        guard, who = self.guard, self.peer.principal
        assert who is not None
        old = guard.policies
        new = in_force(guard, lambda policies: lambda: None)
        self.peer.principal = _stripped(who)
        if problem_of(new, who.name) is None:
            self.peer.principal = new.principals[who.name]
        return {
            "digest": new.digest, "changed": new.digest != old.digest, "disconnected": 0,
            "terms": sorted(one.name for one in new.documents.values()),
        }  # fmt: skip

    # --- end
    def close(self) -> None:
        """As `Store.close`; pins and leases end. Idempotent."""
        try:
            self.check()
        except StoreClosed:  # before, or it is the process's that this one was forked from
            return
        try:
            self.peer.end()
            self.guard.denials.flush(now=True)
        finally:
            self._store.close()

    def __enter__(self) -> GovernedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stripped(who: Any) -> Any:
    """Somebody without a tenant or a role."""
    return msgspec.structs.replace(who, tenants=(), roles=())


def problem_of(policies: Policies, principal: str) -> str | None:
    """Why a principal may not open a store in its own process, and what to do; None: it may."""
    who = policies.principals.get(principal)
    able = ", ".join(sorted(name for name, one in policies.principals.items() if one.embedded)) or "none"
    if who is None:
        return f"principal {principal!r} does not exist; those that may open a store in their process: {able}"
    if not who.embedded:
        return f"principal {principal!r} may not open a store in its own process (may: {able}); write embedded = true"
    return None


def open_governed(path: str | os.PathLike[str], policy: str | os.PathLike[str], principal: str,
                  options: Fields) -> GovernedStore:  # fmt: skip
    """Raises PolicyError, before anything is created; as `perdure.store.open`."""
    policies = load(Path(policy))
    problem = problem_of(policies, principal)
    if problem is not None:
        raise PolicyError(f"{policies.path}/principals.toml: {problem}")
    store = open_store(path, **options)
    try:
        return GovernedStore(store, guard_of(store, policies, options.get("mirror")), principal)
    except BaseException:
        store.close()
        raise
