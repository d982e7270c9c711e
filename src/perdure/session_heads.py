"""The truth about sessions: one head each in the control store, changed by compare-and-set.

Format: namespace "session", under tenant id (16 bytes) ‖ session id (32 bytes: HMAC of the tenant's secret over
keyspace digest and name), see `session_form`. Which blocks a session consists of is in its manifest.

Contract
- Data first: a head names only pages of the manifest that are stored.
- Two workers that change one session cannot both win where they disagree: the second one is rejected, and nothing of
  what the first one did is lost. Saying the same thing twice is accepted twice.
- `owner` is a fence: it grows when a session is handed over, and what earlier owners ask is rejected.
- A hand-over token is bound to session, tenant and time, and works once. Nobody without the tenant's secret makes one.
- An idle session takes nothing but its head and pages on the disk.
- Times are the store's steady wall clock; while that is in doubt nothing expires.
"""

from __future__ import annotations

import hmac
import os
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from perdure import keys as naming
from perdure import limits
from perdure import session_form as form
from perdure.catalog.api import KeyArray, fingerprints
from perdure.core import Core
from perdure.errors import InvalidArgument
from perdure.governance.audit import Event
from perdure.manifest import BLOCKS_MAX, ManifestMissing, ManifestRefused, Manifests
from perdure.prefetch import Prefetcher
from perdure.session import ACCEPTED, CLIPPED, MISSING, REJECTED, Scope
from perdure.session_form import Fields, Head

NAMESPACE: Final = "session"
_TOKEN: Final = struct.Struct("<32s16sQ")  # session id, nonce, end of its life in seconds since 1970
_MAC_BYTES: Final = 16
_ATTEMPTS_MAX: Final = 8
_TOKENS_MAX: Final = 4  # that are out at one time
_EVENTS_MAX: Final = 8
_PAGE_LIVES: Final = 4  # pages are written for so many idle times of their session, and then written again
_HINTS: Final = ("next_use", "prefetch")  # not recorded
_LOOKING: Final = ("keys", "history", *_HINTS)
_KEYS_PER_ANSWER: Final = limits.message_keys_max


class _Stop(Exception):
    """Ends a change with an answer other than "accepted"."""

    def __init__(self, outcome: str, why: str):
        super().__init__(why)
        self.outcome, self.why = outcome, why


class Sessions:
    """All sessions of one store. `ask` is the only way in, whoever asks: this process, an engine, another host."""

    def __init__(self, core: Core, check: Callable[[], None], prefetcher: Prefetcher):
        self._core, self.manifests, self.prefetcher = core, Manifests(core, check), prefetcher
        self._pins: dict[bytes, list[int]] = {}  # of the sessions that are pinned now
        self._counted: tuple[float | None, int] = (None, 0)
        self._lock = threading.Lock()
        self._verbs: dict[str, Callable[[Scope, Fields], Fields]] = {
            "open": self._open, "keys": self._keys, "extend": self._extend, "branch": self._branch,
            "handoff": self._handoff, "adopt": self._adopt, "pin": self._pin, "release": self._release,
            "expire": self._expire, "next_use": self._next_use, "history": self._history,
            "prefetch": self._prefetch,
        }  # fmt: skip

    def ask(self, scope: Scope, verb: str, fields: Fields) -> Fields:
        """Carry out one verb of a session. The answer has `outcome`, `why`, and what the verb answers.

        Raises InvalidArgument for fields that no caller of ours sends, CatalogError, ReadOnlyStore."""
        handler = self._verbs.get(verb)
        if handler is None:
            raise InvalidArgument(f"session verb {verb!r}: must be one of {', '.join(self._verbs)}")
        audit = self._core.audit
        if audit is not None and verb not in _LOOKING:
            audit.guard()
        told = self._carry_out(handler, scope, fields)
        if audit is not None and verb not in _HINTS:
            name = str(fields.get("name", told.get("name", "")))
            event = Event(
                f"session-{verb}", tenant=scope.tenant, object=audit.id_of("session", scope.tenant_id + name.encode()),
                space=audit.id_of("space", scope.keyspace), outcome=str(told.get("outcome", "")),
            )  # fmt: skip
            (audit.note if verb in _LOOKING else audit.append)(event)
        return told

    def _carry_out(self, handler: Callable[[Scope, Fields], Fields], scope: Scope, fields: Fields) -> Fields:
        try:
            return handler(scope, fields)
        except _Stop as stop:
            return {"outcome": stop.outcome, "why": stop.why}
        except ManifestMissing as error:
            return {"outcome": MISSING, "why": str(error)}
        except ManifestRefused as error:
            return {"outcome": REJECTED, "why": str(error)}

    def all(self, after: bytes = b"", limit: int | None = None) -> list[tuple[bytes, Head]]:
        """(tenant id ‖ session id, head) of all sessions that are not over; of `limit` of them, after that key."""
        now = self._core.expiry_now()
        heads: list[tuple[bytes, Head]] = []
        while True:
            raws = self._core.control.items(NAMESPACE, after, limit)
            for after, raw in raws:
                head = form.decode_head(raw)
                if not 0 < head.expires_s <= now:
                    heads.append((after, head))
            if heads or not raws or limit is None:
                return heads

    def count(self) -> int:
        """How many there are, a few seconds old: to look is to read all heads."""
        now, (taken_s, known) = self._core.clock.monotonic(), self._counted
        if taken_s is None or now - taken_s > limits.sessions_counted_s:
            known = len(self.all())
            self._counted = (now, known)
        return known

    # --- verbs
    def _open(self, scope: Scope, f: Fields) -> Fields:
        name = form.text(f, "name")
        key, now = self._key(scope, name), self._now()
        head, raw = self._get(key)
        if head is None:
            if not f.get("create"):
                raise _Stop(MISSING, f"there is no session {name!r}")
            self._check_held(key, raw)
            ttl_s, clipped = form.ttl(f, "ttl_s", limits.session_ttl_s_default)
            head = Head(1, name, scope.keyspace, now, now, now + ttl_s, ttl_s, events=[(now, "opened", 0)])
            head.subject = form.subject(f, self._core.tenants.secret(scope.tenant)[0])
            if not self._core.control.compare_and_set(NAMESPACE, key, raw, form.encode_head(head)):
                head, _ = self._get(key)
                if head is None:
                    raise _Stop(REJECTED, f"others open and end session {name!r} at the same time; try again")
            return self._told(head, CLIPPED if clipped else ACCEPTED, clipped)
        return self._told(head)

    def _keys(self, scope: Scope, f: Fields) -> Fields:
        head = self._present(scope, f)
        start = form.number(f, "start", 0, BLOCKS_MAX)
        keys = self.manifests.keys(scope.tenant, head.root, head.blocks, start, start + _KEYS_PER_ANSWER)
        return self._told(head) | {"keys": keys.tobytes()}

    def _extend(self, scope: Scope, f: Fields) -> Fields:
        given, at = form.key_array(f), form.number(f, "at", 0, BLOCKS_MAX)
        clipped = ""

        def change(head: Head) -> None:
            nonlocal clipped
            keys = self._new_keys(scope, head, given, at)
            room = BLOCKS_MAX - head.blocks
            if len(keys) > room:
                clipped, keys = f"a session has at most {BLOCKS_MAX} blocks", keys[:room]
            self._prolong(scope, head)
            if len(keys):
                page_ttl_s = _PAGE_LIVES * head.ttl_s
                head.root = self.manifests.extend(scope.tenant, head.root, head.blocks, keys, page_ttl_s)
                expire_s = self._now() + page_ttl_s
                head.pages_expire_s = min(head.pages_expire_s, expire_s) if head.blocks else expire_s
                head.blocks += len(keys)
                self._note(head, "extended", len(keys))

        head = self._change(scope, f, change)
        if head.pinned_until_s > self._now():
            self._pin_keys(self._key(scope, head.name), given, head.pinned_until_s - self._now())
        return self._told(head, CLIPPED if clipped else ACCEPTED, clipped)

    def _new_keys(self, scope: Scope, head: Head, keys: KeyArray, at: int) -> KeyArray:
        """What of `keys`, which begin at block `at`, the session does not have yet."""
        if at > head.blocks:
            raise _Stop(REJECTED, f"the session has {head.blocks} blocks; these would begin at block {at}")
        overlap = min(head.blocks - at, len(keys))
        known = self.manifests.keys(scope.tenant, head.root, head.blocks, at, at + overlap)
        differs = np.flatnonzero((known != keys[:overlap]).any(axis=1))
        if len(differs):
            raise _Stop(
                REJECTED,
                f"another worker continued this session in another way from block {at + int(differs[0])} on; branch it",
            )
        return keys[overlap:]

    def _branch(self, scope: Scope, f: Fields) -> Fields:
        name = form.text(f, "new_name")
        new, at = self._key(scope, name), f.get("at")
        point = 0

        def change(head: Head) -> None:
            nonlocal point
            point = head.blocks if at is None else form.number(f, "at", 0, BLOCKS_MAX)
            if point > head.blocks:
                raise _Stop(REJECTED, f"the session has {head.blocks} blocks, it cannot branch at block {point}")
            if self._get(new)[0] is not None:
                raise _Stop(REJECTED, f"there is a session {name!r} already")
            head.shared = max(head.shared, point)
            self._prolong(scope, head)
            self._note(head, "branched", point)

        parent = self._change(scope, f, change)
        now = self._now()
        child = Head(
            1, name, scope.keyspace, now, now, now + parent.ttl_s, parent.ttl_s, point, parent.root,
            parent.pages_expire_s, shared=point, origin=parent.name, events=[(now, "branched off", point)],
            subject=parent.subject,
        )  # fmt: skip
        if point < parent.blocks:
            child.root = self.manifests.cut(scope.tenant, parent.root, parent.blocks, point, _PAGE_LIVES * parent.ttl_s)
        found, raw = self._get(new)
        self._check_held(new, raw)
        if found is not None or not self._core.control.compare_and_set(NAMESPACE, new, raw, form.encode_head(child)):
            raise _Stop(REJECTED, f"there is a session {name!r} already")
        return self._told(child)

    def _handoff(self, scope: Scope, f: Fields) -> Fields:
        ttl_s, clipped = form.ttl(f, "ttl_s", limits.handoff_ttl_s_default, limits.handoff_ttl_s_max)
        nonce = os.urandom(16)

        def change(head: Head) -> None:
            now = self._now()
            alive = [one for one in head.tokens if one[1] > now]
            if len(alive) >= _TOKENS_MAX:
                raise _Stop(REJECTED, f"{_TOKENS_MAX} tokens of this session are out already; wait until one ends")
            head.tokens = [*alive, (nonce, now + ttl_s)]
            self._prolong(scope, head)
            self._note(head, "handed off", head.blocks)

        head = self._change(scope, f, change)
        body = _TOKEN.pack(self._key(scope, head.name)[limits.id_bytes :], nonce, head.tokens[-1][1])
        self._prefetch_tail(scope, head)
        return self._told(head, CLIPPED if clipped else ACCEPTED, clipped) | {"token": body + self._mac(scope, body)}

    def _adopt(self, scope: Scope, f: Fields) -> Fields:
        token = f.get("token")
        if not isinstance(token, bytes) or len(token) != _TOKEN.size + _MAC_BYTES:
            raise _Stop(REJECTED, "this is no token of a hand-off")
        body, mac = token[: _TOKEN.size], token[_TOKEN.size :]
        if not hmac.compare_digest(mac, self._mac(scope, body)):
            raise _Stop(REJECTED, "the token is forged, or of another tenant or keyspace")
        session, nonce, expires_s = _TOKEN.unpack(body)
        if expires_s <= self._now():
            raise _Stop(REJECTED, "the token has expired")

        def change(head: Head) -> None:
            if nonce not in [one[0] for one in head.tokens]:
                raise _Stop(REJECTED, "the token was used already, or the session was taken over meanwhile")
            head.tokens, head.owner = [], head.owner + 1
            self._prolong(scope, head)
            self._note(head, "adopted", head.blocks)

        return self._told(self._change(scope, f, change, key=scope.tenant_id + session))

    def _pin(self, scope: Scope, f: Fields) -> Fields:
        ttl_s, clipped = form.ttl(f, "ttl_s", 0, int(limits.pin_ttl_s_max))

        def change(head: Head) -> None:
            self._prolong(scope, head, ttl_s)
            head.pinned_until_s = self._now() + ttl_s
            self._note(head, "pinned", head.blocks)

        head = self._change(scope, f, change)
        self._pin_all(scope, head, ttl_s)
        return self._told(head, CLIPPED if clipped else ACCEPTED, clipped)

    def _release(self, scope: Scope, f: Fields) -> Fields:
        head = self._present(scope, f)
        self._end(scope, head)
        try:
            own = self.manifests.keys(scope.tenant, head.root, head.blocks, head.shared, head.blocks)
        except ManifestMissing:  # then its blocks are the coldest anyway
            return self._told(head)
        self._core.touches.apply()  # what was used before this hint must not undo it
        self._core.presence.release(fingerprints(own))
        return self._told(head)

    def _expire(self, scope: Scope, f: Fields) -> Fields:
        ttl_s, clipped = form.ttl(f, "ttl_s", 0)

        def change(head: Head) -> None:
            head.ttl_s = max(1, ttl_s)
            self._prolong(scope, head)
            self._note(head, "expiry set", ttl_s)

        if ttl_s:
            head = self._change(scope, f, change)
        else:
            head = self._present(scope, f)
            self._end(scope, head)
        return self._told(head, CLIPPED if clipped else ACCEPTED, clipped)

    def _next_use(self, scope: Scope, f: Fields) -> Fields:
        """The blocks count as used at that time, and are brought to memory a little before it."""
        asked_s = form.seconds(f, "in_s")
        in_s = min(asked_s, limits.next_use_s_max)

        def change(head: Head) -> None:
            head.next_use_s = self._now() + int(in_s)
            self._prolong(scope, head, int(in_s))

        head = self._change(scope, f, change)
        keys = self.manifests.keys(scope.tenant, head.root, head.blocks, 0, head.blocks)
        if len(keys):
            self._core.touches.add(keys, self._core.tick() + int(in_s / limits.recency_tick_s))
            self._prefetch_tail(scope, head, in_s)
        if asked_s > in_s:
            return self._told(head, CLIPPED, f"{limits.next_use_s_max:.0f} s from now at most")
        return self._told(head)

    def _history(self, scope: Scope, f: Fields) -> Fields:
        head = self._present(scope, f)
        events = [{"at_s": at, "event": event, "blocks": blocks} for at, event, blocks in head.events]
        return self._told(head) | {"events": events, "origin": head.origin, "created_s": head.created_s}

    def _prefetch(self, scope: Scope, f: Fields) -> Fields:
        coming = self.prefetcher.add(scope.keyspace, form.key_array(f), form.seconds(f, "in_s"))
        return {"outcome": ACCEPTED, "why": "", "blocks": coming}

    # --- heads
    def _key(self, scope: Scope, name: str) -> bytes:
        secret, _ = self._core.tenants.secret(scope.tenant)
        return scope.tenant_id + naming.derive(secret, "perdure/1/session", scope.keyspace + name.encode())

    def _mac(self, scope: Scope, body: bytes) -> bytes:
        secret, _ = self._core.tenants.secret(scope.tenant)
        return naming.derive(secret, "perdure/1/handoff", scope.keyspace + body)[:_MAC_BYTES]

    def _now(self) -> int:
        return int(self._core.steady.now())

    def _get(self, key: bytes) -> tuple[Head | None, bytes | None]:
        """The head, None if there is none or it is over, and its bytes."""
        raw = self._core.control.get(NAMESPACE, key)
        if raw is None:
            return None, None
        head = form.decode_head(raw)
        return (None, raw) if 0 < head.expires_s <= self._core.expiry_now() else (head, raw)

    def _present(self, scope: Scope, f: Fields) -> Head:
        name = form.text(f, "name")
        head, _ = self._get(self._key(scope, name))
        return self._checked(head, name, f)

    @staticmethod
    def _checked(head: Head | None, name: str, f: Fields) -> Head:
        if head is None:
            raise _Stop(MISSING, f"there is no session {name!r}; it was never opened, or is over")
        if f.get("owner") not in (None, head.owner):
            raise _Stop(REJECTED, f"session {head.name!r} was handed over to another worker")
        return head

    def _change(self, scope: Scope, f: Fields, change: Callable[[Head], None], key: bytes | None = None) -> Head:
        """Change a head, again from the start where somebody else was faster."""
        name = "of this token" if key is not None else form.text(f, "name")
        key = self._key(scope, name) if key is None else key
        for _ in range(_ATTEMPTS_MAX):
            found, raw = self._get(key)
            head = self._checked(found, name, f)
            change(head)
            if self._core.control.compare_and_set(NAMESPACE, key, raw, form.encode_head(head)):
                return head
        raise _Stop(REJECTED, f"others change session {name!r} at the same time; try again")

    def _prolong(self, scope: Scope, head: Head, least_s: int = 0) -> None:
        """It was used: it lives on for its idle time, `least_s` at least, and so do its pages."""
        now = self._now()
        head.used_s, head.expires_s = now, now + max(head.ttl_s, least_s)
        if head.blocks and head.pages_expire_s < head.expires_s:
            life_s = _PAGE_LIVES * max(head.ttl_s, least_s)
            self.manifests.prolong(scope.tenant, head.root, head.blocks, life_s)
            head.pages_expire_s = now + life_s

    def _note(self, head: Head, event: str, blocks: int) -> None:
        head.events = [*head.events, (self._now(), event, blocks)][-_EVENTS_MAX:]

    def _told(self, head: Head, outcome: str = ACCEPTED, why: str = "") -> Fields:
        return {
            "outcome": outcome, "why": why, "name": head.name, "owner": head.owner, "blocks": head.blocks,
            "shared": head.shared,
        }  # fmt: skip

    def _check_held(self, key: bytes, raw: bytes | None) -> None:
        """Before a head is given up, of a session that is over too."""
        hold = "" if raw is None else self._core.holds.covers(key[: limits.id_bytes], form.decode_head(raw))
        if hold:
            raise _Stop(REJECTED, f"the session is on hold ({hold}): it stays as it is; choose another name")

    def _end(self, scope: Scope, head: Head) -> None:
        key = self._key(scope, head.name)
        raw = self._core.control.get(NAMESPACE, key)
        self._check_held(key, raw)
        if not self._core.control.compare_and_set(NAMESPACE, key, raw, None):
            raise _Stop(REJECTED, f"others change session {head.name!r} at the same time; try again")
        self.unpin(key)

    # --- pins
    def _pin_all(self, scope: Scope, head: Head, ttl_s: float) -> None:
        keys = self.manifests.keys(scope.tenant, head.root, head.blocks, 0, head.blocks)
        pages = self.manifests.pages(scope.tenant, head.root, head.blocks)
        key = self._key(scope, head.name)
        self.unpin(key)
        for part in (keys, pages) if ttl_s else ():
            self._pin_keys(key, part, ttl_s)

    def _pin_keys(self, key: bytes, keys: KeyArray, ttl_s: float) -> None:
        if len(keys):
            pin = self._core.pins.add(keys, ttl_s)
            with self._lock:
                self._pins.setdefault(key, []).append(pin)

    def unpin(self, key: bytes) -> None:
        with self._lock:
            pins = self._pins.pop(key, [])
        for pin in pins:
            self._core.pins.drop(pin)

    # --- memory
    def _prefetch_tail(self, scope: Scope, head: Head, in_s: float = 0.0) -> None:
        """What the next turn reads last is what no other session brings: begin with the tail."""
        count = self.prefetcher.blocks_of(scope.keyspace)
        start = max(0, head.blocks - count)
        keys = self.manifests.keys(scope.tenant, head.root, head.blocks, start, head.blocks)
        if len(keys):
            self.prefetcher.add(scope.keyspace, keys, in_s)

    # --- from time to time
    def sweep(self) -> None:
        """Remove the heads of sessions that are over; pins that are over are forgotten."""
        now = self._core.expiry_now()
        for key, raw in self._core.control.items(NAMESPACE) if now else ():
            head = form.decode_head(raw)
            if 0 < head.expires_s <= now and not self._core.holds.covers(key[: limits.id_bytes], head):
                self._core.control.compare_and_set(NAMESPACE, key, raw, None)
                self.unpin(key)

    def pin_again(self, scopes: Iterable[Scope]) -> None:
        """After opening: the pins of the process that had the store open ended with it; those of sessions go on."""
        known = {(scope.tenant_id, scope.keyspace): scope for scope in scopes}
        for key, head in self.all():
            left_s = head.pinned_until_s - self._now()
            scope = known.get((key[: limits.id_bytes], head.keyspace))
            if left_s > 0 and scope is not None:
                try:
                    self._pin_all(scope, head, left_s)
                except ManifestMissing:
                    continue
