"""The segments of one store: the control store's records, mirrored in memory and numbered for the presence index.

Contract: a change is in the control store (fsynced) before it is visible here. Ordinals are given once per process and
never reused. One writer process per store, so the mirror cannot go stale. Thread-safe.
"""

from __future__ import annotations

import dataclasses
import threading

from perdure.catalog.api import ControlStore, SegmentRecord, SegmentState

NO_TTL = 255
"""Retention class of blocks that have no TTL; the others are the power of two of minutes that the TTL fits into."""


class SegmentTable:
    def __init__(self, control: ControlStore):
        self._control = control
        self._lock = threading.Lock()
        self._records: dict[bytes, SegmentRecord] = {record.segment: record for record in control.segments()}
        self._names: list[bytes] = sorted(self._records)
        self._ordinals: dict[bytes, int] = {name: number for number, name in enumerate(self._names)}
        self._draining = {s for s, record in self._records.items() if record.state is SegmentState.DRAINING}

    def put(self, record: SegmentRecord) -> None:
        self._control.put_segment(record)
        with self._lock:
            self._records[record.segment] = record
            if record.state is SegmentState.DRAINING:
                self._draining.add(record.segment)
        self.ordinal(record.segment)

    def delete(self, segment: bytes) -> None:
        self._control.delete_segment(segment)
        with self._lock:
            self._records.pop(segment, None)
            self._draining.discard(segment)

    def drain(self, record: SegmentRecord) -> None:
        """From now on no "exists" may rely on this segment."""
        self.put(dataclasses.replace(record, state=SegmentState.DRAINING))

    def get(self, segment: bytes) -> SegmentRecord | None:
        return self._records.get(segment)

    def all(self) -> list[SegmentRecord]:
        """In id order."""
        with self._lock:
            return [self._records[name] for name in sorted(self._records)]

    def is_draining(self, segment: bytes) -> bool:
        """Whether a segment is being given up, or is already: no "exists" may rely on a record in it."""
        return segment in self._draining or segment not in self._records

    @property
    def any_expiring(self) -> bool:
        """Whether any segment holds blocks with a TTL."""
        return any(record.expires_s or record.retention != NO_TTL for record in list(self._records.values()))

    def ordinal(self, segment: bytes) -> int:
        """Number of a segment in this process; given to names that are not (or no longer) in the table too."""
        number = self._ordinals.get(segment)
        if number is None:
            with self._lock:
                number = self._ordinals.setdefault(segment, len(self._names))
                if number == len(self._names):
                    self._names.append(segment)
        return number

    def tenant(self, ordinal: int) -> bytes:
        """Whose a segment is, by its ordinal; empty if it is not in the table (any more)."""
        record = self._records.get(self._names[ordinal])
        return record.tenant if record is not None else b""
