"""The segments of one store: the control store's records, mirrored in memory and numbered for the presence index.

Contract
- A change is in the control store (fsynced) before it is visible here. Ordinals are given once per process and never
  reused. Thread-safe.
- A store of one process: the mirror cannot go stale.
- A store that many processes share: changes are compare-and-sets against the mirror, so that nobody changes what
  another one has changed meanwhile; what is not in the mirror is asked for; `refresh` brings what others changed, at a
  cost that does not grow with the segments there are.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping

from perdure.catalog.api import ControlStore, SegmentRecord, SegmentState
from perdure.errors import OwnershipLost

NO_TTL = 255
"""Retention class of blocks that have no TTL; the others are the power of two of minutes that the TTL fits into."""


News = Callable[[Collection[bytes]], Mapping[bytes, SegmentRecord | None]]
"""What others changed since it was last asked, at first all segments, and in any case those named, as they are now;
None: there is none. Raises CatalogError."""


class SegmentTable:
    """`news`: of a store that many processes share."""

    def __init__(self, control: ControlStore, news: News | None = None):
        self._control, self._news = control, news
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()  # an older answer must not be taken for the newer one
        self._records: dict[bytes, SegmentRecord] = {}
        self._unsealed: set[bytes] = set()  # open ones, of anybody
        self._draining: set[bytes] = set()
        self._changes = 0
        self._changed_at: dict[bytes, int] = {}  # segment -> number of its last change by this process
        self._again: set[bytes] = set()  # to be asked for at the next refresh
        self._untold: set[bytes] = set()  # seen by `find` to be other than before; `refresh` has not told it
        found = {record.segment: record for record in control.segments()} if news is None else news(())
        for segment, record in found.items():
            self._set(segment, record)
        self._names: list[bytes] = sorted(self._records)
        self._ordinals: dict[bytes, int] = {name: number for number, name in enumerate(self._names)}

    def put(self, record: SegmentRecord) -> None:
        """Raises OwnershipLost if another process has changed it."""
        if self._news is None:
            self._control.put_segment(record)
        elif not self._control.swap_segment(self._records.get(record.segment), record):
            self.find(record.segment, fresh=True)
            raise OwnershipLost(f"segment {record.segment.hex()} was changed by another process")
        self._note(record.segment, record)

    def delete(self, segment: bytes) -> None:
        self._control.delete_segment(segment)
        self._note(segment, None)

    def _note(self, segment: bytes, record: SegmentRecord | None) -> None:
        with self._lock:
            self._changes += 1
            self._changed_at[segment] = self._changes
            self._again.add(segment)  # what another one changed meanwhile may have been told before
            self._set(segment, record)
        if record is not None:
            self.ordinal(segment)

    def _set(self, segment: bytes, record: SegmentRecord | None) -> None:
        self._draining.discard(segment)
        self._unsealed.discard(segment)
        if record is None:
            self._records.pop(segment, None)
            return
        self._records[segment] = record
        if record.state is SegmentState.DRAINING:
            self._draining.add(segment)
        elif record.state is SegmentState.OPEN:
            self._unsealed.add(segment)

    def find(self, segment: bytes, *, fresh: bool = False) -> SegmentRecord | None:
        """As `get`, also what another process has made or deleted since the last look; `fresh`: look again."""
        record = self._records.get(segment)
        if self._news is not None and (record is None or fresh):
            record = self._control.get_segment(segment)
            if record != self._records.get(segment):
                self._untold.add(segment)
            self._note(segment, record)
        return record

    def refresh(self) -> tuple[list[SegmentRecord], list[bytes]]:
        """See what others have changed: records that were new or other, and segments that are gone."""
        with self._refreshing:
            return self._refresh()

    def _refresh(self) -> tuple[list[SegmentRecord], list[bytes]]:
        assert self._news is not None
        with self._lock:
            began = self._changes
            asked = list(self._again)
        found = self._news(asked)
        other: list[SegmentRecord] = []
        gone: list[bytes] = []
        with self._lock:
            self._changed_at = {segment: at for segment, at in self._changed_at.items() if at > began}
            self._again.difference_update(asked)
            for segment, record in found.items():
                if segment in self._changed_at:  # by this process meanwhile: which of the two came first is not known
                    self._again.add(segment)
                elif record != self._records.get(segment) or segment in self._untold:
                    self._untold.discard(segment)
                    self._set(segment, record)
                    if record is None:
                        gone.append(segment)
                    else:
                        other.append(record)
        for record in other:
            self.ordinal(record.segment)
        return other, gone

    def drain(self, record: SegmentRecord) -> None:
        """From now on no "exists" may rely on this segment."""
        self.put(dataclasses.replace(record, state=SegmentState.DRAINING))

    def get(self, segment: bytes) -> SegmentRecord | None:
        return self._records.get(segment)

    def all(self) -> list[SegmentRecord]:
        """In id order."""
        with self._lock:
            return [self._records[name] for name in sorted(self._records)]

    def unsealed(self) -> list[SegmentRecord]:
        """The open ones, of all processes, in id order."""
        with self._lock:
            return [self._records[name] for name in sorted(self._unsealed)]

    def is_draining(self, segment: bytes) -> bool:
        """Whether a segment is being given up, or is already: no "exists" may rely on a record in it."""
        return segment in self._draining or self.find(segment) is None

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
