"""What a dead writer left behind: indexing its open segments, and rebuilding a lost block index from segments.

Contract
- A segment without an index object is scanned once, at every page boundary (parallel appends leave holes); a header
  counts only if it stands where it says and its MAC under the segment's secret verifies.
- What the block index knows decides which of them were published; when the index is lost, every record whose payload
  verifies is taken (its writer had the right to store it; the acknowledgement may be missing).
- A disk, or a keystore, that cannot tell is not a verdict: that is raised, and nothing is decided about the segment.
  Nor is a file that is not found where another host may just have made it (`unseen`).
- Runs beside serving. Never replays, never changes a segment file, never brings back a record that `dead` refuses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.catalog.api import BlockIndex, KeyArray, RecordArray, SegmentRecord, SegmentState
from perdure.errors import FormatError
from perdure.io.api import Engine, IOClass, Request
from perdure.io.memory import Scratch
from perdure.segments import format as fmt
from perdure.segments.landing import BlockStatus, Plan
from perdure.segments.reader import SegmentReader
from perdure.segments.store import SegmentStore
from perdure.segments.table import SegmentTable

_WINDOW_BYTES = 4 * limits.MIB
_VERIFY_BLOCKS = 64


class Recovery:
    def __init__(
        self, segments: SegmentStore, table: SegmentTable, engine: Engine, scratch: Scratch, reader: SegmentReader
    ):
        self._segments, self._table, self._engine = segments, table, engine
        self._scratch, self._reader = scratch, reader
        self.unseen: Callable[[SegmentRecord], bool] = lambda record: False  # its file may be there all the same

    def scan(self, segment: bytes) -> tuple[NDArray[np.void], int]:
        """Entries (INDEX_ENTRY) of all valid headers in a segment file, and the file's size. Raises OSError."""
        secret, page = self._segments.secret(segment), limits.page_bytes
        file = self._segments.reopen(segment)
        found: list[NDArray[np.void]] = []
        window = self._scratch.take(_WINDOW_BYTES)
        try:
            size = file.size()
            for at in range(0, size - size % page, _WINDOW_BYTES):
                length = min(_WINDOW_BYTES, size - size % page - at)
                request = Request(file, at, [window.view[:length]])
                self._engine.run([request], io_class=IOClass.WRITE_BACK)
                if request.error is not None:
                    raise request.error
                pages = np.frombuffer(window.view[:length], np.uint8).reshape(-1, page)
                hits = fmt.scan_headers(pages, secret, segment, at)
                headers = pages[hits, : limits.header_bytes].copy().view(fmt.HEADER).ravel()
                entries = np.zeros(len(headers), fmt.INDEX_ENTRY)
                entries["key"], entries["keyspace"] = headers["key"], headers["keyspace"]
                entries["record"] = fmt.records_of(headers)
                ends = entries["record"]["offset"] + fmt.record_bytes_array(entries["record"]["stored_bytes"])
                found.append(entries[ends <= size])
        finally:
            window.give_back()
            file.close()
        return (np.concatenate(found) if found else np.zeros(0, fmt.INDEX_ENTRY)), size

    def verified(self, entries: NDArray[np.void]) -> NDArray[np.bool_]:
        """Which entries' payloads verify (reads them all). Raises OSError if one, or its key, could not be read."""
        good = np.zeros(len(entries), bool)
        for at in range(0, len(entries), _VERIFY_BLOCKS):
            part = entries[at : at + _VERIFY_BLOCKS]
            plan = checked(self._reader, self._scratch, part)
            for error in plan.unread.values():
                raise error
            if (plan.statuses == BlockStatus.DENIED).any():
                raise OSError(errno.ENOKEY, f"it cannot be decrypted now: {next(iter(plan.problems.values()))}")
            good[at : at + len(part)] = plan.statuses == BlockStatus.FOUND
        return good

    def entries(self, segment: bytes) -> NDArray[np.void]:
        """Entries of a sealed segment: from its index object, or from its headers where that is missing or damaged.
        None at all if the file is gone. Raises OSError if the disk cannot tell."""
        try:
            return self._segments.read_index(segment).entries
        except (FileNotFoundError, FormatError):
            pass
        try:
            return self.scan(segment)[0]
        except FileNotFoundError:
            self._check_gone(segment)
            return np.zeros(0, fmt.INDEX_ENTRY)

    def is_gone(self, segment: bytes) -> bool:
        """Whether its file has been deleted. Raises OSError if the disk cannot tell."""
        try:
            self._segments.reopen(segment).close()
        except FileNotFoundError:
            self._check_gone(segment)
            return True
        return False

    def _check_gone(self, segment: bytes) -> None:
        """Its file is not found: raises OSError if that says nothing."""
        self._segments.check_mounted()
        record = self._table.get(segment)
        if record is not None and self.unseen(record):
            why = f"not found; it is younger than {limits.cluster_unseen_s:.0f} s, so this host may not see it yet"
            raise OSError(errno.ESTALE, why, segment.hex())

    def remove_temporaries(self, owner: bytes) -> None:
        """Remove index objects that dead writers left half-written; `owner` is who may be writing some right now."""
        for root, path, segment in self._segments.temporaries():
            record = self._table.get(segment)
            if record is None or record.owner != owner:
                with contextlib.suppress(FileNotFoundError):
                    root.unlink(path)

    def index_open_segment(self, record: SegmentRecord, index: BlockIndex) -> SegmentRecord | None:
        """Index a dead writer's segment; returns its new record, or None where nothing in it was published."""
        segment = record.segment
        try:
            entries, size = self.scan(segment)
        except FileNotFoundError:  # died between control record and file; its key may be there
            self._check_gone(segment)
            self._segments.delete(segment)
            self._table.delete(segment)
            return None
        if len(entries):
            present, records = index.lookup(entry_keys(entries))
            entries = entries[present & (records == entries["record"])]
        if not len(entries):
            self._segments.delete(segment)
            self._table.delete(segment)
            return None
        ends = entries["record"]["offset"] + fmt.record_bytes_array(entries["record"]["stored_bytes"])
        sealed = int(ends.max())
        secret = self._segments.secret(segment)
        self._segments.write_index(segment, fmt.pack_index(segment, record.tenant, sealed, entries, secret))
        expires = entries["record"]["expires_s"]
        new = dataclasses.replace(
            record, state=SegmentState.SEALED, allocated_bytes=size, sealed_bytes=sealed, records=len(entries),
            expires_s=0 if (expires == 0).any() else int(expires.max()),
        )  # fmt: skip
        self._table.put(new)
        return new

    def entries_of_all(
        self, dead: Callable[[SegmentRecord], bool], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[SegmentRecord, KeyArray, RecordArray]]:
        """(segment, keys, records) of every segment, from its index object or else its headers: what a rebuild loads.

        Of two records of one key the first is to be kept: those that promise more come first, and last those of a
        segment that is being drained, whose kept blocks have been copied. `dead` says which segments must not come back
        (erased tenants). A segment that cannot be read is left out, and its OSError raised after all others."""
        records = [record for record in self._table.all() if not dead(record)]
        records.sort(
            key=lambda one: (one.state is not SegmentState.DRAINING, one.durability, one.retention, one.segment),
            reverse=True,
        )
        problem: OSError | None = None
        for number, record in enumerate(records):
            try:
                entries = self._trusted(record.segment)
            except OSError as error:
                problem = error
                continue
            if len(entries):
                yield record, entry_keys(entries), np.ascontiguousarray(entries["record"])
            if progress is not None:
                progress(number + 1, len(records))
        if problem is not None:
            raise problem

    def _trusted(self, segment: bytes) -> NDArray[np.void]:
        """What its index object lists, or else what verifies."""
        try:
            return self._segments.read_index(segment).entries
        except (FileNotFoundError, FormatError):
            entries = self.entries(segment)
        return entries[self.verified(entries)]


def entry_keys(entries: NDArray[np.void]) -> KeyArray:
    return np.ascontiguousarray(entries["key"]).view(np.uint8).reshape(-1, limits.key_bytes)


def check_entries(reader: SegmentReader, scratch: Scratch, entries: NDArray[np.void]) -> NDArray[np.uint8]:
    """Statuses of reading and verifying stored records as they are (no decode, nothing delivered)."""
    return checked(reader, scratch, entries).statuses


def checked(reader: SegmentReader, scratch: Scratch, entries: NDArray[np.void], root: int | None = None) -> Plan:
    """As `check_entries`; the plan also says which records could not be read. root: of the copy in this one."""
    stored = entries["record"]["stored_bytes"].tolist()
    leases = [scratch.take(size) for size in stored]
    plan = Plan(
        keys=entries["key"].tolist(),
        keyspaces=entries["keyspace"].tolist(),
        rows=entries["record"].tolist(),
        destinations=[[lease.view] for lease in leases],
        element_bytes=1,
        deadline=None,
        raw=True,
    )
    try:
        if root is None:
            reader.read(plan)
        else:
            reader.read_copy(plan, root)
    finally:
        for lease in leases:
            lease.give_back()
    return plan
