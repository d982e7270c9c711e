"""Sessions as their users see them: an agent's context under a name, continued by any worker.

    session = space.session("agent-7")                  # opened, or found again after whatever happened
    session.extend(keys)                                # after each turn: the blocks it consists of
    child = session.branch("agent-7/tool").session      # shares everything up to here
    token = session.handoff().token                     # the next worker: space.adopt(token).session
    keys = session.keys()                               # what to look up and read

The same for an embedded store, a service and a data node: all of them carry out the verbs of `session_heads.Sessions`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Final, NamedTuple

import numpy as np

from perdure import keys as naming
from perdure import limits
from perdure.catalog.api import KeyArray, as_keys
from perdure.errors import CatalogError, InvalidArgument

ACCEPTED: Final = "accepted"
CLIPPED: Final = "clipped"
REJECTED: Final = "rejected"
MISSING: Final = "missing"
ONCE: Final = frozenset({"branch", "handoff", "adopt", "release"})  # verbs that answer otherwise the second time


class Scope(NamedTuple):
    """Whose sessions: a tenant's, of one keyspace."""

    tenant: str
    tenant_id: bytes
    keyspace: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """outcome: "accepted"; "clipped": done, but for less than was asked (`why` says what); "rejected": not done;
    "missing": there is no such session, or its manifest is lost: compute, and open it anew. True if it was done."""

    outcome: str
    why: str = ""
    session: Session | None = None
    token: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.outcome in (ACCEPTED, CLIPPED)


class Session:
    """One worker's hold of a session. Made by `space.session`, `branch` and `adopt`.

    name: within its tenant and keyspace. blocks: how many it consists of, as far as this worker knows. shared: how many
    of the first it has in common with others. Thread-safe as far as one turn at a time goes."""

    def __init__(self, verbs: SessionVerbs, told: dict[str, Any]):
        self._verbs = verbs
        self.name: str = told["name"]
        self.owner: int = told["owner"]
        self.blocks: int = told["blocks"]
        self.shared: int = told["shared"]

    def extend(self, keys: KeyArray | Sequence[bytes]) -> Answer:
        """Blocks that follow on those it has. Said twice, it is accepted twice; where another worker continued the
        session in another way, it is rejected."""
        array = naming.check_keys(keys)
        answer = Answer(ACCEPTED)
        for at in range(0, max(1, len(array)), limits.message_keys_max):
            part = array[at : at + limits.message_keys_max]
            answer = self._ask("extend", keys=part.tobytes(), at=self.blocks)
            if not answer or answer.outcome == CLIPPED:
                return answer
        return answer

    def keys(self) -> KeyArray:
        """Of all its blocks, uint8 (n, 32); none if the session is missing."""
        parts: list[KeyArray] = []
        start = 0
        while True:
            told = self._told("keys", start=start)
            part = as_keys([told.get("keys", b"")])
            if told["outcome"] != ACCEPTED:
                return np.zeros((0, limits.key_bytes), np.uint8)
            parts.append(part)
            start += len(part)
            self.blocks = told["blocks"]
            if start >= self.blocks or not len(part):
                return np.concatenate(parts)

    def branch(self, name: str, *, at: int | None = None) -> Answer:
        """Another session that shares the blocks up to here, or the first `at`; copies nothing."""
        told = self._told("branch", new_name=name, at=at)
        return self._verbs.answer_with_session(told)

    def handoff(self, *, ttl_s: float = limits.handoff_ttl_s_default) -> Answer:
        """A token for another worker, who goes on with it; until then this one may. Works once, for `ttl_s`. The end
        of the session is brought into memory meanwhile."""
        return self._ask("handoff", ttl_s=ttl_s)

    def pin(self, ttl_s: float) -> Answer:
        """Keep its blocks from being evicted, those added later too; also across a restart."""
        return self._ask("pin", ttl_s=ttl_s)

    def release(self) -> Answer:
        """It is over: forget it, and evict first what no branch shares."""
        return self._ask("release")

    def expire(self, ttl_s: float) -> Answer:
        """Let it be over when nobody used it for `ttl_s`; 0: at once."""
        return self._ask("expire", ttl_s=ttl_s)

    def next_use(self, at: float) -> Answer:
        """When it will be continued, in seconds since 1970 (`time.time() + 30`): kept until then, and brought into
        memory in time."""
        return self._ask("next_use", in_s=max(0.0, at - self._verbs.wall()))

    def history(self) -> list[dict[str, Any]]:
        """What happened to it last, oldest first: `at_s`, `event`, `blocks`. Empty if it is missing."""
        return self._ask("history").events

    def _told(self, verb: str, **fields: Any) -> dict[str, Any]:
        return self._verbs.session_ask(verb, fields | {"name": self.name, "owner": self.owner})

    def _ask(self, verb: str, **fields: Any) -> Answer:
        told = self._told(verb, **fields)
        self.blocks = told.get("blocks", self.blocks)
        self.shared = told.get("shared", self.shared)
        return Answer(told["outcome"], told["why"], self, told.get("token", b""), told.get("events", []))


class SessionVerbs:
    """What a keyspace has of sessions, wherever it is."""

    def session_ask(self, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Carry out a verb of `session_heads.Sessions`."""
        raise NotImplementedError

    def wall(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def prefetch(self, keys: KeyArray | Sequence[bytes], *, needed_by: float | None = None) -> int:
        """Bring blocks into the DRAM tier before they are read. needed_by: in seconds since 1970 (None: now). Returns
        how many will be, counted from the end; it is a hint, and `read` has the last word."""
        array = naming.check_keys(keys)
        in_s = 0.0 if needed_by is None else max(0.0, needed_by - self.wall())
        coming = 0
        for end in range(len(array), 0, -limits.message_keys_max):
            part = array[max(0, end - limits.message_keys_max) : end]
            taken = self.session_ask("prefetch", {"keys": part.tobytes(), "in_s": in_s})["blocks"]
            coming += taken
            if taken < len(part):
                break
        return coming

    def look_ahead(self, queue: Iterable[KeyArray | Sequence[bytes]], *, request_s: float) -> int:
        """Bring what an engine's waiting requests will read, the next one first: `queue` has the keys of each, and one
        is started every `request_s` seconds. Returns for how many all that is stored of them is coming; ask again as
        the queue moves."""
        if not isinstance(request_s, Real) or not 0 <= request_s < math.inf:
            raise InvalidArgument(f"request_s={request_s!r}: must be the seconds between two requests, 0 or more")
        started, whole = self.wall(), 0
        for place, keys in enumerate(queue):
            array = naming.check_keys(keys)
            there = array[: self.lookup(array)]
            if self.prefetch(there, needed_by=started + place * request_s) < len(there):
                break  # no more memory is to be promised now
            whole += 1
        return whole

    def lookup(self, keys: KeyArray | Sequence[bytes]) -> int:
        raise NotImplementedError

    def session(self, name: str, *, ttl_s: float | None = None, subject: str = "") -> Session:
        """The session of this name, opened if there is none.

        ttl_s: idle time after which it is over (default: a week). subject: whom it is about, for `erase`; kept as a
        keyed hash, and decided by the token where there is one. Raises InvalidArgument, CatalogError."""
        fields = {"name": name, "create": True, "ttl_s": ttl_s, "subject": subject}
        answer = self.answer_with_session(self.session_ask("open", fields))
        if answer.session is None:
            raise CatalogError(answer.why)
        return answer.session

    def find_session(self, name: str) -> Session | None:
        """The session of this name, or None."""
        return self.answer_with_session(self.session_ask("open", {"name": name})).session

    def adopt(self, token: bytes) -> Answer:
        """Go on with a session that was handed off: `answer.session`. From now on its earlier owner is rejected."""
        return self.answer_with_session(self.session_ask("adopt", {"token": token}))

    def answer_with_session(self, told: dict[str, Any]) -> Answer:
        done = told["outcome"] in (ACCEPTED, CLIPPED)
        return Answer(told["outcome"], told["why"], Session(self, told) if done else None)


def listed(ask: Callable[[str, dict[str, Any]], dict[str, Any]], tenant: str | None) -> list[dict[str, Any]]:
    """All sessions, of one tenant if named. ask: of a store, its `session_admin`, which tells some at a time."""
    found: list[dict[str, Any]] = []
    after = b""
    while True:
        told = ask("list", {"tenant": tenant, "after": after})
        found += told["sessions"]
        after = told["after"]
        if not after:
            return found
