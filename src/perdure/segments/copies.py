"""Second copies of `retained` segments over several roots: missing ones are made, bad records repaired from the other.

Contract
- A copy has the same name, offsets and bytes of records as the first. Its index object is written last: with it the
  copy is whole. A copy without one (whoever made it died) is continued.
- Record by record: one that verifies in one root and not in the other is written there, at its offset. A record that
  verifies in both is not touched, one that verifies in neither stays as it is.
- Nothing is copied while a root is away: what is missing may be there. That is no error.
- What was written is read again before it counts, and an index replaces a damaged one only as the other copy has it.
- A root that cannot tell (an I/O error, a key that is not there now) is no verdict: OSError, tried again later.
- A segment that is given up meanwhile (erased, evicted, gone to the cold tier) leaves nothing behind, also after a
  crash: no file is made once its deletion has begun.
- Never: on the way of a request; `reader` only notes which segments a read had to turn to the other copy for.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.catalog.api import Durability, SegmentRecord, SegmentState
from perdure.errors import FormatError, RootUnavailable
from perdure.io.api import Engine, File, Files, IOClass, Request
from perdure.io.memory import Scratch
from perdure.io.roots import Roots
from perdure.segments import format as fmt
from perdure.segments.landing import BlockStatus
from perdure.segments.reader import SegmentReader
from perdure.segments.recovery import checked
from perdure.segments.store import SegmentStore, index_path, segment_path
from perdure.segments.table import SegmentTable

_BLOCKS = 64
_SIDES = (0, 1)  # places in `SegmentStore.roots`: first and second copies


class Copies:
    """Tends the copies of one store; one thread at a time. `count`: told of copies_made and records_repaired."""

    def __init__(
        self,
        roots: Roots,
        segments: SegmentStore,
        table: SegmentTable,
        reader: SegmentReader,
        engine: Engine,
        scratch: Scratch,
        count: Callable[..., None],
    ):
        self.roots = roots
        self._segments, self._table, self._reader = segments, table, reader
        self._engine, self._scratch, self._count = engine, scratch, count
        self._whole: set[bytes] = set()  # seen with both copies by this process

    def status(self) -> dict[str, Any]:
        """The roots, how many of them are out of service, and sealed retained segments without two copies at hand."""
        single = 0
        for record in self._retained():
            try:
                single += record.segment not in self._whole and not self._is_whole(record)
            except OSError:
                single += 1
        roots = self.roots.status()
        return {"list": roots, "out": sum(one["state"] != "ok" for one in roots), "single_copies": single}

    def tend(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Repair what reads found bad, and complete what has no second copy. Raises the first OSError at the end."""
        problem: OSError | None = None
        suspects = self._segments.take_suspects()
        self._whole -= suspects
        for record in self._retained():
            if stopped():
                break
            if record.segment in self._whole:
                continue
            try:
                if record.segment in suspects or not self._is_whole(record):
                    if not self.roots.complete:
                        continue
                    self.mend(record)
                self._whole.add(record.segment)
            except OSError as error:
                if self._is_given_up(record.segment):
                    continue
                if not isinstance(error, RootUnavailable):
                    problem = problem or error
                if record.segment in suspects:
                    self._segments.note_suspects({record.segment})
        self._whole.intersection_update(record.segment for record in self._table.all())
        if problem is not None:
            raise problem

    def _retained(self) -> list[SegmentRecord]:
        return [
            record
            for record in self._table.all()
            if record.durability == Durability.RETAINED and record.state is SegmentState.SEALED and not record.cold
        ]

    def _is_whole(self, record: SegmentRecord) -> bool:
        """Whether both copies are there, with their indexes. What is in them is not looked at."""
        for side in _SIDES:
            files = self._segments.roots[side]
            try:
                with closing(files.open(segment_path(record.segment), write=True)) as file:  # this copy, no other
                    if file.size() < record.sealed_bytes:
                        return False
                files.open(index_path(record.segment), write=True).close()
            except FileNotFoundError:
                return False
        return True

    def mend(self, record: SegmentRecord) -> None:
        """Make both copies whole, as far as either has it. Raises OSError."""
        segment = record.segment
        entries = self._entries(record)
        with self._both(segment) as (files, made):
            for at in range(0, len(entries), _BLOCKS):
                part = entries[at : at + _BLOCKS]
                good = [self._good(part, side) for side in _SIDES]
                for side in _SIDES:
                    bad = np.flatnonzero(good[1 - side] & ~good[side])
                    for row in part["record"][bad]:
                        self._copy(files[1 - side], files[side], row)
                    if len(bad) and not self._good(part[bad], side).all():
                        raise OSError(
                            errno.EIO, f"segment {segment.hex()}: what was written to copy {side} is not there"
                        )
                    if len(bad) and not made[side]:
                        self._count(mirror_records_repaired=len(bad))
            for file in files:
                if file.size() < record.sealed_bytes:
                    file.truncate(record.sealed_bytes)
                file.datasync()
        self._write_indexes(record, entries)
        if any(made):
            self._count(mirror_copies_made=1)

    def _entries(self, record: SegmentRecord) -> NDArray[np.void]:
        """Of an index that verifies: what a scan finds may be less, and is no reason to replace one."""
        try:
            return self._segments.read_index(record.segment).entries
        except FormatError as error:
            raise OSError(errno.EIO, f"neither copy has an index that verifies: {error}") from error

    @contextmanager
    def _both(self, segment: bytes) -> Iterator[tuple[list[File], list[bool]]]:
        """Both copies, open for writing, and which of them had to be made."""
        files: list[File] = []
        made: list[bool] = []
        try:
            for side in _SIDES:
                try:
                    files.append(self._segments.roots[side].open(segment_path(segment), write=True))
                    made.append(False)
                except FileNotFoundError:
                    with self._making(segment):
                        files.append(self._segments.roots[side].create(segment_path(segment)))
                    made.append(True)
            yield files, made
        finally:
            for file in files:
                file.close()

    @contextmanager
    def _making(self, segment: bytes) -> Iterator[None]:
        """Around making a file, while no deletion is under way. Raises OSError: there has been one."""
        with self._segments.making:
            if self._is_given_up(segment):
                raise FileNotFoundError(errno.ENOENT, "given up meanwhile", segment_path(segment))
            self._segments.roots[0].open(index_path(segment), direct=False).close()  # goes before the record does
            yield

    def _is_given_up(self, segment: bytes) -> bool:
        """Deleted, or in the cold tier."""
        record = self._table.get(segment)
        return record is None or record.cold

    def _good(self, entries: NDArray[np.void], side: int) -> NDArray[np.bool_]:
        """Which records verify in one copy."""
        plan = checked(self._reader, self._scratch, entries, side)
        for error in plan.unread.values():
            if error.errno != errno.ENODATA:  # beyond the end of a copy that is not whole
                raise error
        if (plan.statuses == BlockStatus.DENIED).any():
            raise OSError(errno.ENOKEY, f"it cannot be decrypted now: {next(iter(plan.problems.values()))}")
        good: NDArray[np.bool_] = plan.statuses == BlockStatus.FOUND
        return good

    def _copy(self, source: File, target: File, record: np.void) -> None:
        offset, nbytes = int(record["offset"]), int(fmt.record_bytes(int(record["stored_bytes"])))
        lease = self._scratch.take(nbytes)
        try:
            for file, write in ((source, False), (target, True)):
                request = Request(file, offset, [lease.view[:nbytes]], write=write)
                self._engine.run([request], io_class=IOClass.WRITE_BACK)
                if request.error is not None:
                    raise request.error
        finally:
            lease.give_back()

    def _write_indexes(self, record: SegmentRecord, entries: NDArray[np.void]) -> None:
        """Where a copy has none, or a damaged one."""
        secret = self._segments.secret(record.segment)
        data = fmt.pack_index(record.segment, record.tenant, record.sealed_bytes, entries, secret)
        for files in self._segments.roots:
            self._write_index(files, record.segment, data)

    def _write_index(self, files: Files, segment: bytes, data: bytes) -> None:
        path = index_path(segment)
        with self._making(segment):
            try:
                with closing(files.open(path, direct=False, write=True)) as file:
                    content = bytearray(file.size())
                    file.preadv([memoryview(content)], 0)
                fmt.unpack_index(bytes(content), segment, self._segments.secret(segment))
                return
            except FileNotFoundError:
                pass
            except FormatError:
                files.unlink(path)
            files.write_once(path, data)
