"""The catalog protocol: a disposable block index and a control store that is the truth.

Contract
- **Block index**: where blocks are and how recent they are. It may be lost, deleted or rolled back at any time: that
  costs misses, never a wrong block, because every record on storage describes itself and readers verify it.
- **Control store**: segments, fences, leases, pins, tenants, small documents. Fully synced before a call returns, never
  rebuilt from data.
- All calls are thread-safe. A call either happens completely or raises `CatalogError` and changes nothing. In a catalog
  on several machines this holds for each group of keys that it keeps together, and `CatalogUnavailable` leaves open
  what happened: read again. Repeating a call is harmless in every catalog.
- The two halves are separate databases, so no transaction spans both. Publish order is: data durable, then index.

Implementations: `catalog.lmdb` (embedded, one machine), `catalog.valkey` (many hosts), `catalog.memory` (tests, and the
model of the truth).
The public conformance suite is `perdure.testing.catalog`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

KeyArray = NDArray[np.uint8]
"""Block keys: shape (n, 32), dtype uint8, C-contiguous."""

RECORD = np.dtype(
    [
        ("segment", "V16"),  # segment id
        ("tenant", "V16"),  # tenant id (keyed digest of its name)
        ("offset", "<u8"),  # of the record's header page in the segment, bytes
        ("stored_bytes", "<u4"),  # payload bytes on storage, before padding to pages
        ("block_bytes", "<u4"),  # payload bytes in the caller's memory
        ("created_s", "<u4"),  # wall clock, seconds since 1970
        ("expires_s", "<u4"),  # 0: never
        ("tenant_epoch", "<u4"),
        ("codec", "u1"),
        ("durability", "u1"),  # a Durability
        ("retention", "u1"),  # retention class: log2 bucket of the TTL in minutes, 255 without TTL
        ("cipher", "u1"),  # 0: none, 1: AES-256-GCM under the segment's key
    ]
)
"""Where one block is: 64 bytes. Arrays of it are the only form in which block locations travel."""
assert RECORD.itemsize == 64

RecordArray = NDArray[np.void]


class Durability(IntEnum):
    """What an acknowledged write survives. Ordered: a higher class implies the lower ones."""

    EPHEMERAL = 0  # death of the process, not of the machine
    SESSION = 1  # power loss: data and catalog are fsynced before the acknowledgement
    RETAINED = 2  # as SESSION, and in a second root where one is configured


class PublishResult(IntEnum):
    INSERTED = 0  # the key was absent
    EXISTS = 1  # a record that is at least as good is there; it stays (first writer wins)
    REPLACED = 2  # the present record was weaker than asked for (durability, retention, epoch, draining, expiry)


class SegmentState(IntEnum):
    OPEN = 0
    SEALED = 1
    DRAINING = 2  # its records are being removed; no "exists" may rely on it


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One segment as the control store knows it. `segment` is its id (16 bytes), never used twice."""

    segment: bytes
    state: SegmentState
    owner: bytes  # 16 bytes, random per opened store: who may write it while OPEN
    tenant: bytes
    durability: Durability
    retention: int
    boot_id: bytes  # of the machine when it was created (16 bytes)
    created_s: int
    allocated_bytes: int  # what it occupies or may occupy on the disk
    sealed_bytes: int  # 0 while OPEN
    records: int  # at seal
    expires_s: int  # latest expiry of its records, 0: some never expire

    @property
    def cold(self) -> bool:
        """Sealed, and on no disk any more: its bytes are in the object store. This is what decides where it is read."""
        return self.sealed_bytes > 0 and self.allocated_bytes == 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Exact accounting of one tenant's published blocks."""

    blocks: int
    block_bytes: int  # as the caller sees them
    record_bytes: int  # on storage: header page + payload padded to pages


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to do something (prefill a prefix) until `deadline_s` on the lease clock; `token` grows per scope."""

    scope: bytes
    holder: bytes
    token: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Pin:
    pin_id: int
    owner: bytes
    deadline_s: float
    keys: tuple[bytes, ...]


class BlockIndex(Protocol):
    """key -> RECORD, usage per tenant, lazily kept recency."""

    def lookup(self, keys: KeyArray) -> tuple[NDArray[np.bool_], RecordArray]:
        """Present mask (n,) and records (n,) (zeros where absent), in the order asked."""
        ...

    def prefix(self, keys: KeyArray) -> int:
        """Number of leading keys present; asks in growing batches and stops at the first hole."""
        ...

    def publish(
        self,
        keys: KeyArray,
        records: RecordArray,
        *,
        now_s: int,
        is_draining: Callable[[bytes], bool],
        admit: Callable[[], None] | None = None,
        sync: bool = True,
    ) -> NDArray[np.uint8]:
        """One transaction (or one per group): insert-if-absent, usage updated exactly; returns PublishResult per key.

        A present record counts as EXISTS only if its durability, retention and tenant_epoch are each >= the new one's,
        it has not expired at `now_s`, it expires no earlier than the new one (0 = never = latest), and its segment is
        not draining; otherwise it is replaced. A key that occurs twice in the batch: the first occurrence decides, the
        later ones are EXISTS. `admit` runs inside the transaction just before the first change and aborts it by raising
        (fences). With `sync=False` the commit may be lost in a power cut (never torn).
        """
        ...

    def replace(self, keys: KeyArray, old: RecordArray, new: RecordArray) -> NDArray[np.bool_]:
        """Compare-and-swap of locations (copy-forward): True where the present record equals `old` and became `new`."""
        ...

    def remove(self, keys: KeyArray, old: RecordArray | None = None) -> NDArray[np.bool_]:
        """Remove if unchanged (if `old` is given), else remove; True where a record was removed. Usage follows."""
        ...

    def scan(self, start: bytes, limit: int) -> tuple[KeyArray, RecordArray]:
        """Up to `limit` entries with key >= `start` in key order (fills the presence index in the background)."""
        ...

    def load(self, entries: Iterator[tuple[KeyArray, RecordArray]]) -> int:
        """Sorted bulk load (rebuild): insert-if-absent, in bounded transactions; returns how many keys were new."""
        ...

    def usage(self) -> dict[bytes, Usage]:
        """Exact totals per tenant id; tenants without blocks are absent."""
        ...

    def count(self) -> int: ...

    def touch(self, fingerprints: NDArray[np.uint64], minutes: NDArray[np.uint32]) -> None:
        """Remember recency (minutes since 1970) by key fingerprint (the key's first 8 bytes as little-endian u64).

        Advisory: may be lost, unsynced; a stored value never decreases.
        """
        ...

    def recency(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """All remembered (fingerprint, minute) pairs, sorted by fingerprint value."""
        ...

    def forget_recency(self, fingerprints: NDArray[np.uint64]) -> None: ...

    def sync(self) -> None:
        """Make all earlier publishes durable."""
        ...

    def close(self) -> None: ...


class ControlStore(Protocol):
    """Small, fully synced, the truth. Times passed in are the caller's clock readings; safety never depends on them:
    a fence decides who may publish, a deadline only how soon someone else may try."""

    # documents: (namespace, key) -> bytes
    def get(self, namespace: str, key: bytes) -> bytes | None: ...

    def compare_and_set(self, namespace: str, key: bytes, expected: bytes | None, new: bytes | None) -> bool:
        """Set if the present value equals `expected` (None: absent); `new` None deletes. False changes nothing."""
        ...

    def items(self, namespace: str, after: bytes = b"", limit: int | None = None) -> list[tuple[bytes, bytes]]:
        """In key order; with `after`, those with a greater key; `limit`: so many at most."""
        ...

    # segments
    def put_segment(self, record: SegmentRecord) -> None: ...

    def swap_segment(self, old: SegmentRecord | None, new: SegmentRecord) -> bool:
        """Set if the present record equals `old` (None: absent). False changes nothing."""
        ...

    def get_segment(self, segment: bytes) -> SegmentRecord | None: ...

    def delete_segment(self, segment: bytes) -> None: ...

    def segments(self) -> list[SegmentRecord]:
        """All segments in id order (ids are time-ordered)."""
        ...

    # leases with fencing tokens
    def acquire(self, scope: bytes, holder: bytes, now_s: float, ttl_s: float) -> Lease | None:
        """The lease with a token greater than every earlier one of the scope, or None while another holder's is alive.

        The same holder asking again while its lease is alive gets the same token with a new deadline."""
        ...

    def renew(self, lease: Lease, now_s: float, ttl_s: float) -> Lease | None:
        """None if the lease was lost (expired and taken by someone else, or released)."""
        ...

    def release(self, lease: Lease) -> bool: ...

    def check(self, lease: Lease) -> bool:
        """True while no later token was given out for the scope and the lease was not released."""
        ...

    # pins
    def pin(self, owner: bytes, keys: KeyArray, deadline_s: float) -> int:
        """A new pin id (never reused)."""
        ...

    def unpin(self, pin_id: int) -> bool: ...

    def pins(self) -> list[Pin]: ...

    def end_owner(self, owner: bytes) -> int:
        """Drop all pins of a dead owner, and all leases whose holder's name starts with the owner's (an owner takes
        every lease under a name of its own, so that its threads exclude each other); returns how many."""
        ...

    def expire(self, now_s: float) -> int:
        """Drop pins whose deadline passed; returns how many. Leases expire by `acquire`."""
        ...

    def close(self) -> None: ...


def as_keys(keys: Iterable[bytes]) -> KeyArray:
    """Byte keys -> KeyArray."""
    raw = b"".join(keys)
    return np.frombuffer(raw, np.uint8).reshape(-1, 32)


def fingerprints(keys: KeyArray) -> NDArray[np.uint64]:
    """First 8 bytes of each key as little-endian u64: enough to find a block, never to prove it is the right one."""
    return np.ascontiguousarray(keys[:, :8]).view("<u8").ravel()
