"""One tenant's view of one model's blocks: the verbs as a user calls them.

Checks every argument before anything is touched, then hands over to `reading` and `writing`. Thread-safe. In a forked
child, and after the store was closed, every verb raises StoreClosed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perdure import flight, limits, reading, writing
from perdure import keys as naming
from perdure.admission import Admissions
from perdure.advice import Advice, advise
from perdure.buffers import as_blocks
from perdure.catalog.api import Durability, KeyArray, Lease, fingerprints
from perdure.core import Core
from perdure.encoding import Encoder
from perdure.errors import CatalogUnavailable, InvalidArgument, ReadOnlyStore
from perdure.reports import ReadReport, WriteReport
from perdure.segments.format import record_bytes
from perdure.session import REJECTED, Scope, SessionVerbs
from perdure.tenants import UNHEARD
from perdure.writing import Terms

T = TypeVar("T")


class PinHandle:
    """Keeps blocks from being evicted until it is released or its time is over. Ends with the process."""

    def __init__(self, core: Core, pin_id: int, deadline_s: float):
        self._core, self.pin_id, self.deadline_s = core, pin_id, deadline_s

    def release(self) -> bool:
        """False if the pin had ended already."""
        return self._core.pins.drop(self.pin_id)

    def __enter__(self) -> PinHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Keyspace(SessionVerbs):
    """Made by `Store.keyspace`. `digest`: 32 bytes, the parent of the first block of every chain."""

    def __init__(
        self,
        core: Core,
        check: Callable[[], None],
        tenant: str,
        identity: naming.KeyspaceIdentity,
        codec: str,
        admissions: Admissions,
    ):
        secret, self.epoch = core.tenants.secret(tenant)
        digests = naming.keyspace_digests(secret, identity)
        self._core, self._check = core, check
        self.tenant, self.identity, self.layout = tenant, identity, identity.layout
        self.tenant_id = core.tenants.id_of(tenant)
        self.digest, self.shared_digest = digests.digest, digests.shared
        self.codec, self.admission = Encoder(codec, identity.layout.element_bytes), admissions.of(self)
        self.audited = True  # its reads and writes are recorded, where there is a log
        self.reads_published = True  # other tenants' published prefixes are found too
        need = record_bytes(self.layout.block_bytes)
        if not core.read_only and need > core.writer.segment_bytes:
            raise InvalidArgument(
                f"a block of {self.layout.block_bytes} bytes needs {need} bytes, a segment of this store has "
                f"{core.writer.segment_bytes}; open it with a capacity of at least "
                f"{need * limits.segments_per_capacity_min} bytes, or use smaller blocks"
            )

    @property
    def erased(self) -> bool:
        """The tenant was erased since: nothing is found under these names any more, and nothing stored."""
        return self._core.tenants.epoch(self.tenant_id) != self.epoch

    @property
    def closed(self) -> bool:
        """Nothing is found or delivered: it was erased, or this host cannot know whether it was."""
        return not self._core.tenants.is_current() or self.erased

    # --- names
    def chain(
        self, token_ids: ArrayLike, *, parent: bytes | None = None, extras: Mapping[int, bytes] | None = None
    ) -> KeyArray:
        """Keys of the full blocks of a token sequence: uint8 (len // block_tokens, 32); the partial tail has none.

        parent: key of the block before the first token, if the sequence continues one. extras: block position -> bytes
        that identify what the tokens do not (images, for example).
        """
        return naming.chain(self.digest if parent is None else parent, token_ids, self.layout.block_tokens, extras)

    def adopt_hashes(self, hashes: Sequence[bytes]) -> KeyArray:
        """Keys for an engine's own cryptographic chain hashes, one per block."""
        return naming.adopt_hashes(self.digest, hashes)

    # --- asking
    def lookup(self, keys: KeyArray | Sequence[bytes]) -> int:
        """Leading blocks that can be used. Reads no data: `read` has the last word."""
        self._check()
        array = naming.check_keys(keys)
        found = 0 if self.closed else reading.lookup(self._core, self._stored(array))
        self.admission.asked(array, found)
        return found

    def present(self, keys: KeyArray | Sequence[bytes]) -> NDArray[np.bool_]:
        """Which blocks are stored, per key."""
        self._check()
        array = naming.check_keys(keys)
        return np.zeros(len(array), np.bool_) if self.closed else reading.present_mask(self._core, self._stored(array))

    def advise(
        self, keys: KeyArray | Sequence[bytes], *, prefill_tokens_per_s: float, deadline_s: float | None = None
    ) -> Advice:
        """How many leading blocks are worth loading, from the rates measured so far in this process, where the blocks
        are and what the disk has to do before.

        prefill_tokens_per_s: what the engine computes. deadline_s: advise only what is there by then. Before the first
        read nothing is known, and loading is advised.
        """
        check_seconds(prefill_tokens_per_s, "prefill_tokens_per_s", math.inf)
        limit = seconds_of(deadline_s)
        self.admission.advised(prefill_tokens_per_s)
        array = naming.check_keys(keys)
        core = self._core
        there = array[: self.lookup(array)]
        return advise(
            np.array(core.pool.holds(self._stored(there)), bool), core.rates, block_bytes=self.layout.block_bytes,
            block_tokens=self.layout.block_tokens, prefill_tokens_per_s=prefill_tokens_per_s, deadline_s=limit,
        )  # fmt: skip

    def _stored(self, keys: KeyArray) -> KeyArray:
        """The names under which `keys` are stored: others for published blocks that it has not stored itself."""
        publications = self._core.publications
        stored: KeyArray = publications.resolved(self, keys) if publications and not self.closed else keys
        return stored

    def published(self, keys: KeyArray) -> list[int]:
        """Positions of the blocks that only a publication of another tenant may have."""
        publications = self._core.publications
        found: list[int] = publications.elsewhere(self, keys) if publications and not self.closed else []
        return found

    # --- moving blocks
    def read(
        self,
        keys: KeyArray | Sequence[bytes],
        into: Any,
        *,
        deadline_s: float | None = None,
        direct: bool = False,
    ) -> ReadReport:
        """Deliver blocks into the caller's memory, each verified, each reported.

        into: one buffer of n * block_bytes, a list of n buffers, or a list of n lists of parts; anything with the
        buffer protocol, and torch CPU tensors. deadline_s: seconds from now; what is not there by then is LATE.
        direct: let the device write straight into `into`, without a copy through the DRAM tier; then the memory of LATE
        blocks must not be reused before `report.wait_settled()`. Without a deadline, and without a DRAM tier, reads are
        direct anyway. Raises BufferMismatch.
        """
        self._check()
        array = naming.check_keys(keys)
        blocks = as_blocks(into, len(array), self.layout.block_bytes, writable=True, what="into")
        return reading.read(self._core, self, array, blocks, deadline_s=seconds_of(deadline_s), direct=direct)

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
        """Store blocks; returns when they are as durable as asked for, each reported.

        durability: "ephemeral" survives the process, "session" a power cut, "retained" also the loss of one root where
        the store has a mirror. ttl_s: forget them after so many seconds. lease: from `reserve`; if it was lost,
        StaleFence is raised and nothing becomes visible. Raises BufferMismatch, ReadOnlyStore.
        """
        self._check()
        core = self._core
        if core.read_only:
            raise ReadOnlyStore(f"{core.path} was opened read-only; open it without read_only=True to write")
        array = naming.check_keys(keys)
        parts = as_blocks(blocks, len(array), self.layout.block_bytes, writable=False, what="blocks")
        if ttl_s is not None:
            check_seconds(ttl_s, "ttl_s", limits.ttl_s_max)
        if lease is not None:
            check_lease(lease)
        now, limit = core.steady.now(), seconds_of(deadline_s)
        retention, expires_s = writing.retention(ttl_s, now)
        terms = Terms(
            durability=durability_of(durability),
            retention=retention,
            created_s=int(now),
            expires_s=expires_s,
            lease=lease,
            deadline=None if limit is None else time.monotonic() + limit,
        )
        return writing.write(core, self, array, parts, terms)

    def submit_read(self, keys: KeyArray | Sequence[bytes], into: Any, **options: Any) -> Future[ReadReport]:
        """`read` in the background. Give every call memory of its own. `deadline_s` counts from now, not from when a
        thread is free."""
        self._check()
        return self.submit(self.read, keys, into, options)

    def submit_write(self, keys: KeyArray | Sequence[bytes], blocks: Any, **options: Any) -> Future[WriteReport]:
        """`write` in the background. The blocks' memory must not change before the future is done."""
        self._check()
        return self.submit(self.write, keys, blocks, options)

    def submit(self, verb: Callable[..., T], keys: Any, data: Any, options: dict[str, Any]) -> Future[T]:
        """`verb` of keys and data, in the background."""
        submitted = time.monotonic()

        def later() -> T:
            given = seconds_of(options.get("deadline_s"))
            late = {} if given is None else {"deadline_s": max(0.0, given - (time.monotonic() - submitted))}
            return verb(keys, data, **(options | late))

        return self._core.calls.submit(copy_context().run, later)

    # --- lifetimes
    def reserve(
        self,
        keys: KeyArray | Sequence[bytes],
        *,
        ttl_s: float = limits.lease_ttl_s_default,
        wait_s: float = 0.0,
    ) -> Lease | None:
        """The right to compute the prefix that ends with the last of `keys`, or None while someone else has it.

        The lease is fenced: pass it to `write`. It ends by `end_lease`, after ttl_s, or with its process. wait_s: wait
        so long for it: until its holder has ended it, died or let it expire; None also once all of `keys` are stored.
        After None ask `lookup`; after a lease too, for what the last holder has got done.
        """
        limit = wait_seconds(wait_s)
        wish = self.reservation(keys, ttl_s)
        return flight.wait(self._core, wish, time.monotonic() + limit, self._check) if limit else wish.acquire()

    def reservation(self, keys: KeyArray | Sequence[bytes], ttl_s: float) -> flight.Reservation:
        """What `reserve` waits for, for who cannot block a thread."""
        self._check()
        array = naming.check_keys(keys)
        if not len(array):
            raise InvalidArgument("reserve: no keys, so there is nothing to reserve")
        check_seconds(ttl_s, "ttl_s", limits.lease_ttl_s_max)
        self._writable()
        return flight.Reservation(self._core, array, ttl_s)

    def follow(self, keys: KeyArray | Sequence[bytes], *, known: int = 0, wait_s: float) -> int:
        """Leading blocks that can be used, as soon as they are more than `known`, or all; after wait_s whatever there
        is. For who uses a prefix that someone else is still computing."""
        limit = wait_seconds(wait_s)
        found: int = flight.wait(self._core, self.following(keys, known), time.monotonic() + limit, self._check)
        return found

    def following(self, keys: KeyArray | Sequence[bytes], known: int) -> flight.Following:
        """What `follow` waits for, for who cannot block a thread."""
        self._check()
        return flight.Following(self._core, self._stored(naming.check_keys(keys)), check_known(known))

    def end_lease(self, lease: Lease) -> bool:
        """Give a lease back; False if it had been lost."""
        self._check()
        check_lease(lease)
        return self._core.leases.release(lease)

    def pin(self, keys: KeyArray | Sequence[bytes], *, ttl_s: float) -> PinHandle:
        """Keep blocks from being evicted for `ttl_s` seconds, or until released. Keys not stored yet are pinned too."""
        self._check()
        self._writable()
        check_seconds(ttl_s, "ttl_s", limits.pin_ttl_s_max)
        array, audit = naming.check_keys(keys), self._core.audit
        if audit is not None and len(array):
            audit.append(audit.message("pin", self, array, detail=f"{ttl_s:g} s"))
        pin_id = self._core.pins.add(array, ttl_s)
        return PinHandle(self._core, pin_id, self._core.clock.boottime() + ttl_s)

    # --- sessions
    def session_ask(self, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        self._check()
        self._writable()
        if not self._core.tenants.is_current():
            raise CatalogUnavailable(UNHEARD)
        if self.erased:
            return {"outcome": REJECTED, "why": writing.ERASED, "blocks": 0}
        told: dict[str, Any] = self._core.sessions.ask(Scope(self.tenant, self.tenant_id, self.digest), verb, fields)
        return told

    def wall(self) -> float:
        return self._core.clock.wall()

    def release(self, keys: KeyArray | Sequence[bytes]) -> None:
        """Hint: this session is over, evict its blocks first (unless someone uses them after all)."""
        self._check()
        self._core.touches.apply()  # what was used before this hint must not undo it
        self._core.presence.release(fingerprints(naming.check_keys(keys)))

    def _writable(self) -> None:
        if self._core.read_only:
            raise ReadOnlyStore(f"{self._core.path} was opened read-only; open it without read_only=True")


def seconds_of(deadline_s: float | None) -> float | None:
    """None: no deadline, also where it is farther away than clocks can tell."""
    if deadline_s is None:
        return None
    if not isinstance(deadline_s, Real) or not deadline_s >= 0:
        raise InvalidArgument(f"deadline_s={deadline_s!r}: must be seconds from now, 0 or more")
    return None if deadline_s > limits.deadline_s_max else float(deadline_s)


def check_seconds(value: float, name: str, most: float) -> None:
    if not isinstance(value, Real) or not 0 < value <= most:
        raise InvalidArgument(f"{name}={value!r}: must be a number above 0 and at most {most}")


def wait_seconds(wait_s: float) -> float:
    if not isinstance(wait_s, Real) or not wait_s >= 0:
        raise InvalidArgument(f"wait_s={wait_s!r}: must be seconds from now, 0 or more")
    return min(float(wait_s), limits.deadline_s_max)


def check_known(known: int) -> int:
    if not isinstance(known, Integral) or known < 0:
        raise InvalidArgument(f"known={known!r}: must be a number of blocks, 0 or more")
    return int(known)


def check_lease(lease: Lease) -> None:
    if not isinstance(lease, Lease):
        raise InvalidArgument(f"lease={lease!r}: pass what `reserve` returned")


def durability_of(value: str | Durability) -> Durability:
    if isinstance(value, Durability):
        return value
    try:
        return Durability[value.upper()]
    except (KeyError, AttributeError):
        known = ", ".join(d.name.lower() for d in Durability)
        raise InvalidArgument(f"durability={value!r}: must be one of {known}") from None
