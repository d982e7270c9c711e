"""Giving blocks a new place: appended to the open segment of their class, then moved by compare-and-swap.

Contract: an erase, an eviction or a newer move wins; durability, expiry and epoch stay what they were. What is not
moved stays where it was; the bytes appended for it are garbage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perdure.buffers import Parts
from perdure.catalog.api import BlockIndex, Durability, KeyArray, RecordArray, fingerprints
from perdure.errors import CatalogError
from perdure.presence import PresenceIndex
from perdure.segments.table import SegmentTable
from perdure.segments.writer import Batch, SegmentWriter


class Mover:
    """Thread-safe."""

    def __init__(self, table: SegmentTable, index: BlockIndex, presence: PresenceIndex, writer: SegmentWriter):
        self._table, self._index, self._presence, self._writer = table, index, presence, writer

    def stands(self, keys: KeyArray, old: RecordArray) -> NDArray[np.bool_]:
        """Which blocks are still where these records say. Raises CatalogError."""
        present, current = self._index.lookup(keys)
        same: NDArray[np.bool_] = present & (current == old)
        return same

    def move(
        self, keyspace: bytes, keys: KeyArray, old: RecordArray, payloads: Sequence[Parts], *, reserve: bool
    ) -> NDArray[np.bool_]:
        """Blocks of one keyspace, class and epoch, with their stored bytes (not encrypted); which of them have moved.

        reserve: what the space keeps back may be used. Raises NoSpace, OSError, CatalogError."""
        durability = Durability(int(old["durability"][0]))
        batch = Batch(
            keyspace, keys, payloads, int(old["block_bytes"][0]), old["codec"], old["tenant"][0].tobytes(),
            int(old["tenant_epoch"][0]), durability, int(old["retention"][0]), old["created_s"], old["expires_s"],
        )  # fmt: skip
        appended = self._writer.append(batch, deadline=None, reserve=reserve)
        try:
            if durability >= Durability.SESSION:
                for opened in appended.segments:
                    opened.sync()
            moved = np.zeros(len(keys), bool)
            done = np.flatnonzero(appended.written)
            moved[done] = self._replace(keys[done], old[done], appended.records[done])
            for opened in appended.segments:
                mine = np.flatnonzero(moved & (appended.records["segment"] == np.void(opened.segment)))
                if len(mine):
                    self._writer.published(opened, keyspace, keys[mine], appended.records[mine])
                    self._presence.insert(
                        fingerprints(keys[mine]), segment=self._table.ordinal(opened.segment), recency=0,
                        expires_s=np.ascontiguousarray(old["expires_s"][mine]),
                    )  # fmt: skip
        finally:
            for opened in appended.segments:
                self._writer.finish(opened)
        return moved

    def _replace(self, keys: KeyArray, old: RecordArray, new: RecordArray) -> NDArray[np.bool_]:
        """Move records by compare-and-swap; where the answer is lost, what stands in the index is the answer."""
        try:
            return self._index.replace(keys, old, new)
        except CatalogError:
            moved = self.stands(keys, new)
            if not moved.any():
                raise
            return moved
