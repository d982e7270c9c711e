"""What engines may map, per isolation domain (tenant): presence table, slot table, chunks of the pool, a directory.

Contract
- An engine gets descriptors of its own domain only, read-only; nothing in them is a secret of another tenant's.
- The presence table repeats the store's index for one tenant, change by change, in order. The slot table says in which
  slot of the pool a key's block lies; it may lag behind the pool, and the slot's header has the last word.
- A chunk that is given up while engines map it stays charged to the node's memory until each has unmapped it or died.
- Called by pool and presence index with their locks held: `published`, `withdrawn`, `opened`, `retired`, `inserted`,
  `removed`, `cleared` wait for nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from perdure.catalog.api import KeyArray, as_keys, fingerprints
from perdure.core import Core
from perdure.io.shared import SharedMemory
from perdure.pool.chunks import Chunk
from perdure.pool.dram import Slot
from perdure.pool.memory import SharedChunk
from perdure.presence import PresenceIndex
from perdure.presence_table import Column, Columns, Fingerprints
from perdure.service import shared
from perdure.service.fields import unpack_slot

if TYPE_CHECKING:
    from perdure.service.peers import Peer

_TABLE_KEYS_MIN = 1 << 12


class SharedTable:
    """A table in a sealed memfd; a rehash makes another one, with the next version."""

    def __init__(self, name: str, versions: shared.Words, word: int):
        self._name, self._versions, self._word = name, versions, word
        self._made: SharedMemory | None = None
        self.memory: SharedMemory | None = None
        self.index = PresenceIndex(_TABLE_KEYS_MIN, allocate=self._allocate)
        self.adopt()

    def _allocate(self, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        self._made = SharedMemory(self._name, nbytes)
        self._made.seal_for_readers()
        return self._made.array

    def adopt(self) -> None:
        """After a change: if it has made a new table, engines are to take that one."""
        if self._made is not self.memory:
            old, self.memory = self.memory, self._made
            self._versions[self._word] += np.uint64(1)
            if old is not None:
                old.close()

    @property
    def version(self) -> int:
        return int(self._versions[self._word])

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()


class Domain:
    """One tenant's share. `lock`: its tables' descriptors, and who maps what."""

    def __init__(self, tenant_id: bytes):
        self.tenant_id = tenant_id
        self.lock = threading.Lock()
        self._page = SharedMemory("directory", shared.DIRECTORY_BYTES)
        self._page.seal_for_readers()
        self.words = shared.directory_words(self._page.array)
        self.presence = SharedTable("presence", self.words, shared.PRESENCE)
        self.slots = SharedTable("slots", self.words, shared.SLOTS)
        self.chunks: dict[int, SharedChunk] = {}
        self.peers: set[Peer] = set()
        self.stranded: dict[int, set[Peer]] = {}  # chunk -> who still maps it
        self.retired_at: dict[int, int] = {}  # chunk -> version of the set of chunks without it

    def insert(self, new: Columns, only_absent: bool) -> None:
        self.presence.index.insert(
            new.fp, segment=new.segment, recency=0, expires_s=new.expires_s, only_absent=only_absent
        )
        self._adopt(self.presence)

    def remove(self, fp: Fingerprints) -> None:
        self.presence.index.remove(fp)
        self._adopt(self.presence)

    def place(self, placed: dict[bytes, tuple[int, int] | None]) -> None:
        """Repeat what became of keys in the pool: (chunk, index), None where gone."""
        gone = [key for key, where in placed.items() if where is None]
        here = [(key, where) for key, where in placed.items() if where is not None]
        if gone:
            self.slots.index.remove(fingerprints(as_keys(gone)))
        if here:
            keys: KeyArray = as_keys(key for key, _ in here)
            numbers = np.array([where for _, where in here], np.uint32)
            self.slots.index.insert(fingerprints(keys), segment=numbers[:, 0], recency=0, expires_s=numbers[:, 1])
        self._adopt(self.slots)

    def _adopt(self, table: SharedTable) -> None:
        with self.lock:
            table.adopt()

    def beat(self, complete: bool, expiry_s: int, until_ns: int) -> None:
        self.words[shared.COMPLETE] = complete
        self.words[shared.EXPIRY_S] = expiry_s
        self.words[shared.UNTIL_NS] = until_ns
        self.words[shared.BEAT_NS] = time.monotonic_ns()

    def descriptor_of_page(self) -> tuple[int, int]:
        return os.dup(self._page.fd), self._page.nbytes

    def close(self) -> None:
        with self.lock:
            self.presence.close()
            self.slots.close()
            self._page.close()


class Domains:
    """All of them. The observer of the pool and the mirror of the presence index of one store."""

    def __init__(self, core: Core):
        self._core = core
        self._domains: dict[bytes, Domain] = {}
        self._tenants: dict[int, bytes] = {}  # ordinal of a segment -> whose it is
        self._events: deque[tuple[bytes, bytes, int, int] | tuple[bytes, bytes, None, None]] = deque()
        self._news: deque[Domain] = deque()  # domains that lost chunks
        self._settling = threading.Lock()
        self._making = threading.Lock()
        self._claiming = threading.Lock()
        self._unclaimed: dict[bytes, dict[int, SharedChunk]] = {}  # chunks of tenants without a domain

    def get(self, tenant_id: bytes) -> Domain:
        """The domain of a tenant; made, and filled from the index, when it is first asked for."""
        domain = self._domains.get(tenant_id)
        if domain is not None:
            return domain
        with self._making:
            if tenant_id not in self._domains:
                self._core.presence.copy_into(lambda every: self._make(tenant_id, every))
                self._domains[tenant_id].beat(self._core.presence.complete, self._core.expiry_now(), self._until_ns())
            return self._domains[tenant_id]

    def _make(self, tenant_id: bytes, every: Columns) -> None:
        domain = Domain(tenant_id)
        for ordinal in np.unique(every.segment).tolist():
            if self._tenant(ordinal) == tenant_id:
                domain.insert(every.at(every.segment == ordinal), False)
        with self._claiming:
            domain.chunks = self._unclaimed.pop(tenant_id, {})
            self._domains[tenant_id] = domain

    def all(self) -> list[Domain]:
        return list(self._domains.values())

    # --- mirror of the presence index
    def _tenant(self, ordinal: int) -> bytes:
        known = self._tenants.get(ordinal)
        if not known:
            known = self._tenants[ordinal] = self._core.table.tenant(ordinal)
        return known

    def inserted(self, new: Columns, only_absent: bool) -> None:
        first = int(new.segment[0]) if len(new.segment) else 0
        if (new.segment == first).all():
            self._insert(first, new, only_absent)
            return
        for ordinal in np.unique(new.segment).tolist():
            self._insert(ordinal, new.at(new.segment == ordinal), only_absent)

    def _insert(self, ordinal: int, new: Columns, only_absent: bool) -> None:
        domain = self._domains.get(self._tenant(ordinal))
        if domain is not None:
            domain.insert(new, only_absent)

    def removed(self, fp: Fingerprints, segment: Column) -> None:
        for ordinal in np.unique(segment).tolist():
            domain = self._domains.get(self._tenant(ordinal))
            if domain is not None:
                domain.remove(fp[segment == ordinal])

    def cleared(self) -> None:
        for domain in self.all():
            domain.words[shared.COMPLETE] = 0
            domain.presence.index.clear()
            domain._adopt(domain.presence)  # noqa: SLF001 (same module)

    # --- observer of the pool
    def published(self, slot: Slot) -> None:
        self._events.append((slot.chunk.owner.domain, slot.key, slot.chunk.number, slot.index))

    def withdrawn(self, slot: Slot) -> None:
        self._events.append((slot.chunk.owner.domain, slot.key, None, None))

    def opened(self, chunk: Chunk) -> None:
        assert isinstance(chunk.memory, SharedChunk)
        with self._claiming:
            domain = self._domains.get(chunk.owner.domain)
            if domain is None:
                self._unclaimed.setdefault(chunk.owner.domain, {})[chunk.number] = chunk.memory
                return
        with domain.lock:
            domain.chunks[chunk.number] = chunk.memory
            domain.words[shared.CHUNKS] += np.uint64(1)

    def retired(self, chunk: Chunk) -> bool:
        with self._claiming:
            domain = self._domains.get(chunk.owner.domain)
            if domain is None:
                self._unclaimed.get(chunk.owner.domain, {}).pop(chunk.number, None)
                return False
        with domain.lock:
            domain.chunks.pop(chunk.number, None)
            domain.words[shared.CHUNKS] += np.uint64(1)
            holders = {peer for peer in domain.peers if chunk.number in peer.maps(domain)}
            if not holders:
                return False
            domain.stranded[chunk.number] = holders
            domain.retired_at[chunk.number] = int(domain.words[shared.CHUNKS])
        self._news.append(domain)
        return True

    def settle(self) -> None:
        """Bring the slot tables up to date with the pool, and tell engines of chunks to unmap."""
        while self._events:
            with self._settling:
                placed: dict[bytes, dict[bytes, tuple[int, int] | None]] = {}
                for _ in range(len(self._events)):
                    tenant_id, key, number, index = self._events.popleft()
                    placed.setdefault(tenant_id, {})[key] = None if number is None or index is None else (number, index)
                for tenant_id, changes in placed.items():
                    domain = self._domains.get(tenant_id)
                    if domain is not None:
                        domain.place(changes)
        while self._news:
            domain = self._news.popleft()
            for peer in list(domain.peers):
                peer.tell_retired(domain.tenant_id)

    def unmapped(self, domain: Domain, peer: Peer, seen: int | None) -> None:
        """An engine has unmapped what was retired up to version `seen`; None: it is gone."""
        freed = 0
        with domain.lock:
            for number, holders in list(domain.stranded.items()):
                if seen is None or domain.retired_at[number] <= seen:
                    holders.discard(peer)
                if not holders:
                    del domain.stranded[number], domain.retired_at[number]
                    freed += 1
        for _ in range(freed):
            self._core.pool.unstranded()

    def _until_ns(self) -> int:
        epochs = self._core.sharing.epochs
        return 0 if epochs is None else max(1, int(max(0.0, epochs.until_s) * 1e9))

    def beat(self) -> None:
        complete, expiry_s, until_ns = self._core.presence.complete, self._core.expiry_now(), self._until_ns()
        for domain in self.all():
            domain.beat(complete, expiry_s, until_ns)

    def slot_of(self, domain: Domain, packed: int) -> tuple[SharedChunk, int] | None:
        """The chunk and index that an engine's number means, if they exist."""
        chunk, index = unpack_slot(packed)
        memory = domain.chunks.get(chunk)
        return None if memory is None or index >= memory.slots_max else (memory, index)

    def close(self) -> None:
        for domain in self.all():
            domain.close()
