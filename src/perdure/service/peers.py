"""What the service holds for one client, from its hello to its end: keyspaces, grants, pins, leases, regions, rings.

Contract
- Everything here ends with the client: with its connection or its process, whichever goes first. `end` may be called by
  any thread, any number of times.
- A grant pins blocks. For copying it ends by itself after `limits.fetch_grant_s`; a view is over at its deadline, but
  its memory is not reused before the client releases it or dies.
- Touches are checked against the slots' generations and only steer eviction and counters.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perdure import limits
from perdure.catalog.api import Lease, as_keys
from perdure.core import Core
from perdure.errors import ProtocolError, ServiceBusy
from perdure.governance.audit import AuditLog, Event
from perdure.governance.principals import Principal
from perdure.keyspace import Keyspace, PinHandle
from perdure.pool.dram import Slot
from perdure.reports import ReadReport
from perdure.service import shared
from perdure.service.domains import Domain, Domains
from perdure.service.fields import pack_slot
from perdure.service.messages import Retired, encode
from perdure.service.regions import LentRegion, Region
from perdure.service.turns import cost_of


@dataclass(slots=True)
class Grant:
    slots: list[Slot]
    nbytes: int
    deadline: float
    view: bool


@dataclass(slots=True, eq=False)
class Ring:
    memory: LentRegion
    tail: int = 0
    seen: int = -1
    counted: list[int] = field(default_factory=lambda: [0, 0, 0])
    words: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.words = self.memory.memory.array.data.cast("Q")

    def silent(self) -> bool:
        """Nothing new since it was drained: what a thousand idle clients cost, many times a second."""
        words = self.words
        return (
            words[shared.HEAD] == self.tail
            and words[shared.SEEN] == self.seen
            and words[shared.LOOKUPS] == self.counted[0]
        )


class Peer:
    """One client. `token` lets further connections join it. remote: address of the host it is on; empty: this one."""

    def __init__(self, core: Core, domains: Domains, pid: int, name: str, *, remote: str = ""):
        self.core, self.domains, self.pid, self.name, self.remote = core, domains, pid, name, remote
        self.connections = 0  # kept by the server
        self.token = os.urandom(16)
        self.lock = threading.Lock()
        self.ended = False
        self.principal: Principal | None = None  # set by the server, where there is a policy
        self.spaces: list[Keyspace] = []
        self.openings: list[Any] = []  # `guard.Opening` of each, where there is a policy
        self.regions: dict[int, Region] = {}
        self.pins: dict[int, PinHandle] = {}
        self.late: dict[int, ReadReport] = {}
        self.rings: dict[Domain, Ring] = {}
        self._leases: dict[bytes, Lease] = {}
        self._grants: dict[int, Grant] = {}
        self._maps: dict[Domain, set[int]] = {}
        self._numbers = 0
        self.granted_bytes = 0
        self.notify: Callable[[bytes], None] = lambda data: None  # set by the server: one datagram, unasked for

    @property
    def who(self) -> str:
        """In the audit log: the principal, if there is a policy; what a client calls itself proves nothing."""
        known = "" if self.principal is None else f"{self.principal.name}, "
        return f"{known}{self.remote or f'unix pid {self.pid}'} {self.name}"

    def number(self) -> int:
        with self.lock:
            self._numbers += 1
            return self._numbers

    # --- keyspaces and maps
    def space(self, number: int) -> Keyspace:
        if not 0 <= number < len(self.spaces):
            raise ProtocolError(f"keyspace {number} was not opened by this client")
        return self.spaces[number]

    def open_space(self, space: Keyspace, opening: Any = None) -> int:
        with self.lock:
            if len(self.spaces) >= limits.spaces_per_client_max:
                raise ServiceBusy(f"{limits.spaces_per_client_max} keyspaces are open; use the ones you have")
            self.spaces.append(space)
            self.openings.append(opening)
            return len(self.spaces) - 1

    def turn_of(self, question: Any) -> tuple[bytes, int]:
        """Whose turn a question takes, and how much of it; of what names no keyspace, the client's own."""
        number = getattr(question, "space", -1)
        if not 0 <= number < len(self.spaces):
            return self.token, 1
        space, blocks = self.spaces[number], len(getattr(question, "keys", b"")) // limits.key_bytes
        return space.tenant_id, cost_of(blocks * space.layout.block_bytes)

    def maps(self, domain: Domain) -> set[int]:
        """Chunks of a domain that this client was given. Changed with the domain's lock held."""
        return self._maps.setdefault(domain, set())

    def tell_retired(self, tenant_id: bytes) -> None:
        with suppress(OSError):  # it will see the version change at its next call
            self.notify(encode(Retired(0, tenant_id)))

    def region(self, number: int) -> Region:
        region = self.regions.get(number)
        if region is None:
            raise ProtocolError(f"region {number} is not registered")
        return region

    def _tell_touched(self, audit: AuditLog, domain: Domain, blocks: int, nbytes: int) -> None:
        """What the client says it has read from mapped memory."""
        names = {space.tenant_id: space.tenant for space in self.spaces}
        tenant = names.get(domain.tenant_id, domain.tenant_id.hex())
        audit.note(Event("touched", who=self.who, tenant=tenant, blocks=blocks, bytes=nbytes, outcome="told by client"))

    # --- grants
    def promise(self, nbytes: int, bytes_max: int) -> bool:
        """Count what is about to be granted, before it is fetched: calls of one client run side by side. False, and
        nothing is counted, if it would look at more than `bytes_max`; one grant is always possible."""
        with self.lock:
            if self.granted_bytes and self.granted_bytes + nbytes > bytes_max:
                return False
            self.granted_bytes += nbytes
            return True

    def break_promise(self, nbytes: int) -> None:
        with self.lock:
            self.granted_bytes -= nbytes

    def grant(self, number: int, slots: list[Slot], nbytes: int, ttl_s: float) -> bool:
        """Keep slots pinned for the client, `nbytes` of them promised. False, and they are released, if it has ended or
        the number is in use."""
        grant = Grant(slots, nbytes, time.monotonic() + (ttl_s or limits.fetch_grant_s), bool(ttl_s))
        with self.lock:
            taken = not self.ended and number not in self._grants
            if taken:
                self._grants[number] = grant
            else:
                self.granted_bytes -= nbytes
        if not taken:
            self.core.pool.release(slots)
        return taken

    def end_grants(self, numbers: list[int]) -> bool:
        """Whether every one of them was still valid."""
        valid, now = True, time.monotonic()
        for number in numbers:
            with self.lock:
                grant = self._grants.pop(number, None)
                if grant is not None:
                    self.granted_bytes -= grant.nbytes
            valid = valid and grant is not None and now <= grant.deadline
            if grant is not None:
                self.core.pool.release(grant.slots)
        return valid

    def expire(self) -> None:
        """End what was granted for copying and never given back; pins whose time is over."""
        if not self._grants:
            return
        now = time.monotonic()
        with self.lock:
            over = [number for number, one in self._grants.items() if not one.view and now > one.deadline]
        self.end_grants(over)

    # --- leases
    def hold(self, lease: Lease) -> None:
        with self.lock:
            self._leases[lease.scope] = lease
            ended = self.ended
        if ended:
            self.core.leases.release(lease)

    def drop(self, lease: Lease) -> None:
        with self.lock:
            if self._leases.get(lease.scope) == lease:
                del self._leases[lease.scope]

    def holds(self, lease: Lease) -> bool:
        with self.lock:
            return self._leases.get(lease.scope) == lease

    # --- touches
    def drain(self) -> None:
        for domain, ring in list(self.rings.items()):
            self._drain(domain, ring)

    def _drain(self, domain: Domain, ring: Ring) -> None:
        if ring.silent():
            return
        memory = ring.memory.memory.array
        if not len(memory):  # it has ended meanwhile
            return
        words = shared.ring_words(memory)
        seen = int(words[shared.SEEN])
        if seen != ring.seen:
            ring.seen = seen
            self.domains.unmapped(domain, self, seen)
        counts = [int(words[word]) for word in (shared.LOOKUPS, shared.ASKED, shared.PRESENT)]
        if counts != ring.counted:
            delta = [max(0, new - old) for new, old in zip(counts, ring.counted, strict=True)]
            ring.counted = counts
            self.core.counters.add(lookups=delta[0], lookup_blocks=delta[1], lookup_found=delta[2])
        ring.tail, entries, lost = shared.read_touches(memory, ring.tail)
        if lost:
            self.core.counters.add(touches_lost=lost)
        if len(entries):
            self._touch(domain, entries)

    def _touch(self, domain: Domain, entries: shared.Entries) -> None:
        keys: list[bytes] = []
        nbytes = 0
        for packed, generation in entries.tolist():
            found = self.domains.slot_of(domain, packed)
            if found is None:
                continue
            memory, index = found
            now, key, _, _, size, _ = memory.header(index)
            if now == generation and not generation & 1:
                keys.append(key)
                nbytes += size
        if keys:
            array = as_keys(keys)
            self.core.touches.add(array, self.core.tick())
            if self.core.audit is not None:
                self._tell_touched(self.core.audit, domain, len(keys), nbytes)
            for gate in {space.admission for space in list(self.spaces)}:
                gate.asked(array)
            self.core.pool.touch(array)
            self.core.counters.add(blocks_found_memory=len(keys), bytes_read=nbytes, blocks_read_unasked=len(keys))

    # --- the end
    def end(self) -> None:
        with self.lock:
            if self.ended:
                return
            self.ended = True
            grants, self._grants = self._grants, {}
            leases, self._leases = list(self._leases.values()), {}
            pins, self.pins = list(self.pins.values()), {}
        for grant in grants.values():
            self.core.pool.release(grant.slots)
        for pin in pins:
            pin.release()
        for lease in leases:
            with suppress(Exception):  # it ends by itself
                self.core.leases.release(lease)
        for domain in list(self._maps):
            with domain.lock:
                domain.peers.discard(self)
            self.domains.unmapped(domain, self, None)
        with suppress(KeyError):  # popped one by one: a question under way may add another, and ends it then
            while True:
                self.rings.popitem()[1].memory.close()
        with suppress(KeyError):
            while True:
                self.regions.popitem()[1].close()

    def status(self) -> dict[str, object]:
        with self.lock:
            now = time.monotonic()
            views = [one for one in self._grants.values() if one.view]
            return {
                "pid": self.pid, "name": self.name, "address": self.remote, "keyspaces": len(self.spaces),
                "views": len(views),
                "views_overdue": sum(now > one.deadline for one in views), "granted_bytes": self.granted_bytes,
                "pins": len(self.pins), "leases": len(self._leases),
                "regions_bytes": sum(region.nbytes for region in self.regions.values()),
            }  # fmt: skip


def found_slots(slots: list[Slot | None], packed: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> list[Slot]:
    """The slots that are there; writes their numbers into `packed`."""
    there = [slot for slot in slots if slot is not None]
    numbers = [pack_slot(slot.chunk.number, slot.index) for slot in there]
    packed[[place for place, slot in enumerate(slots) if slot is not None] if len(there) < len(slots) else ...] = (
        numbers
    )
    return there


def memory_status(core: Core, clients: list[dict[str, object]]) -> dict[str, int]:
    """Of the pool. clients: their statuses."""
    memory = core.pool.stats()
    return {
        "budget_bytes": memory.budget_bytes, "mapped_bytes": memory.mapped_bytes, "bytes": memory.bytes,
        "staging_bytes": memory.lent_bytes, "stranded_bytes": memory.stranded_bytes, "pinned": memory.pinned,
        "views": sum(int(str(one["views"])) for one in clients), "evictions": memory.evictions,
    }  # fmt: skip
