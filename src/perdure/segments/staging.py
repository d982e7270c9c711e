"""A batch of blocks on its way to the disk: staged, hashed or encrypted, and given their headers, once.

Contract: runs in the threads that write, so that the first bytes go out while the rest is still being prepared. The
caller's memory is read, never changed; what is encrypted is written from memory of our own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.buffers import Parts, copy_parts
from perdure.catalog.api import Durability, KeyArray, RecordArray
from perdure.governance.keystore import SegmentKey
from perdure.segments import format as fmt


@dataclass(slots=True)
class Batch:
    """Blocks ready for storage, one entry per block; `payloads` are as they go to the disk (encoded)."""

    keyspace: bytes
    keys: KeyArray
    payloads: Sequence[Parts]
    block_bytes: int
    codecs: NDArray[np.uint8]
    tenant: bytes
    tenant_epoch: int
    durability: Durability
    retention: int
    created_s: int | NDArray[np.uint32]
    expires_s: int | NDArray[np.uint32]
    fence: int = 0


class Preparation:
    """Staging, checksums and headers of one write's records; once, whichever root's thread comes first."""

    def __init__(
        self,
        batch: Batch,
        run: range,
        records: RecordArray,
        headers: memoryview,
        staged: list[tuple[Parts, memoryview, int]],
        secret: bytes,
        key: SegmentKey | None,
    ):
        self._batch, self._run, self._records, self._headers = batch, run, records, headers
        self._staged, self._secret, self._key = staged, secret, key
        self._done = False
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            if self._done:
                return
            for parts, view, size in self._staged if self._key is None else ():
                copy_parts(parts, [view[:size]])
                view[size:] = bytes(view.nbytes - size)
            batch, chosen = self._batch, slice(self._run.start, self._run.stop)
            pages = np.frombuffer(self._headers, np.uint8).reshape(len(self._run), limits.page_bytes)
            fields = fmt.HeaderFields(batch.keyspace, batch.fence, b"" if self._key is None else self._key.key_id)
            tags = None if self._key is not None else [fmt.payload_tag(parts) for parts in batch.payloads[chosen]]
            fmt.write_headers(pages, batch.keys[chosen], self._records, fields, tags or self._encrypt, self._secret)
            self._done = True

    def _encrypt(self, number: int, nonce: bytes, authenticated: bytes) -> bytes:
        """From the caller's memory into ours; the tag."""
        assert self._key is not None
        parts, view, size = self._staged[number]
        source = parts[0]
        if len(parts) > 1:
            source = view[:size]
            copy_parts(parts, [source])
        end = size + fmt.GCM_TAG_BYTES
        self._key.cipher.encrypt_into(nonce, source, authenticated, view[:end])
        tag = bytes(view[size:end])
        view[size:] = bytes(view.nbytes - size)
        return tag
