"""The cold tier: sealed segments whose bytes are in an object store and on no disk any more.

Contract
- The segment's record in the control store decides: `SegmentRecord.cold`. Records of blocks stay as they are; reads go
  through `SegmentReader` as from a disk, with the same verification.
- Order: note in the ledger that there may be an object, create it, change the segment's record, unlink the file. A
  process that dies in between leaves the file, the object or both, each complete, and the ledger knows the object.
- An object is deleted some time after its segment's record has gone (`collect`), never before. Nobody waits for it.
  One that is created after that is found by its note, which is written anew each time: a deletion meanwhile fails.
- A mirrored segment goes there only while its copies are equal: else the only good one could be given up.
- A store that fails is left alone for a while; reads from it are then late at once. It is never asked under a lock.
- Objects that lie there count towards the tier's capacity, whatever they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import secrets
import threading
from collections.abc import Iterator, Sequence

from perdure import limits
from perdure.catalog.api import ControlStore, SegmentRecord
from perdure.clock import Clock
from perdure.errors import CatalogError
from perdure.io.api import Buffer, File, ShortTransfer
from perdure.io.memory import aligned_buffer
from perdure.io.objects import ObjectFile, Objects, ObjectStoreError
from perdure.segments.space import SpaceBudget
from perdure.segments.store import SegmentStore
from perdure.segments.table import SegmentTable

_LOG = logging.getLogger("perdure.cold")
LEDGER = "cold"
"""Namespace of the control store: segment -> bytes of the object that there may be, and when it was noted (random)."""
_COPY_BYTES = 8 * limits.MIB


@dataclasses.dataclass(slots=True)
class ColdCounters:
    segments_demoted: int = 0
    bytes_demoted: int = 0
    segments_refused: int = 0  # could not be read, or their copies differ
    objects_deleted: int = 0
    errors: int = 0  # calls that the object store did not answer as it should
    reads: int = 0
    bytes_read: int = 0


class Watched:
    """Objects of a store that is left alone for a while after it has failed. Counts. Thread-safe."""

    def __init__(self, inner: Objects, clock: Clock, counters: ColdCounters):
        self.where = inner.where
        self.last_error: str | None = None  # of the failures since the last success
        self._inner, self._clock, self._counters = inner, clock, counters
        self._wait_s = limits.object_retry_s_min
        self._again_at = 0.0
        self._lock = threading.Lock()

    def create(self, name: str, data: Buffer) -> bool:
        with self._asking():
            return self._inner.create(name, data)

    def size(self, name: str) -> int:
        with self._asking():
            return self._inner.size(name)

    def read_into(self, name: str, buffers: Sequence[Buffer], offset: int) -> int:
        with self._asking():
            got = self._inner.read_into(name, buffers, offset)
        with self._lock:
            self._counters.reads += 1
            self._counters.bytes_read += got
        return got

    def delete(self, name: str) -> None:
        with self._asking():
            self._inner.delete(name)

    @property
    def answers(self) -> bool:
        """Whether it is worth asking now."""
        return self.last_error is None or self._clock.boottime() >= self._again_at

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        with self._lock:
            if not self.answers:
                raise ObjectStoreError(self.where, f"left alone after: {self.last_error}")
        try:
            yield
        except ObjectStoreError as error:
            with self._lock:
                self._counters.errors += 1
                if self.last_error is None:
                    _LOG.warning("the cold tier does not answer; what is there is late until it does: %s", error)
                self.last_error = str(error)
                self._again_at = self._clock.boottime() + self._wait_s
                self._wait_s = min(2 * self._wait_s, limits.object_retry_s_max)
            raise
        except FileNotFoundError:
            self._answered()
            raise
        else:
            self._answered()

    def _answered(self) -> None:
        with self._lock:
            if self.last_error is not None:
                _LOG.warning("the cold tier answers again: %s", self.where)
            self.last_error, self._wait_s = None, limits.object_retry_s_min


class ColdTier:
    """Thread-safe."""

    def __init__(
        self,
        objects: Objects,
        store: str,
        control: ControlStore,
        table: SegmentTable,
        segments: SegmentStore,
        space: SpaceBudget,
        clock: Clock,
        capacity: int,
    ):
        """store: id, which is part of every object's name. capacity: bytes that objects may take."""
        self.counters = ColdCounters()
        self.objects = Watched(objects, clock, self.counters)
        self.capacity = capacity
        self._store, self._control, self._table = store, control, table
        self._segments, self._space = segments, space
        self._left_over: set[bytes] = set()  # cold segments whose files could not be unlinked
        self._looked = False
        self._making = threading.Lock()  # an object is being made, or erased

    # --- where it is
    def file(self, segment: bytes, *, fresh: bool = False) -> File | None:
        record = self._table.get(segment)
        if fresh and (record is None or not record.cold):
            with contextlib.suppress(CatalogError):  # then it is where it was
                record = self._control.get_segment(segment)
        if record is None or not record.cold:
            return None
        return ObjectFile(self.objects, self.name(segment), record.sealed_bytes)

    def name(self, segment: bytes) -> str:
        text = segment.hex()
        return f"{self._store}/{text[-2:]}/{text}.seg"

    def segments(self) -> list[SegmentRecord]:
        return [record for record in self._table.all() if record.cold]

    def ledger(self) -> dict[bytes, int]:
        """Segment -> bytes of each object that may be there. Raises CatalogError."""
        return {segment: int(note.split()[0]) for segment, note in self._control.items(LEDGER)}

    def _note(self, segment: bytes, nbytes: int) -> None:
        note = f"{nbytes} {secrets.token_hex(8)}".encode()
        while not self._control.compare_and_set(LEDGER, segment, self._control.get(LEDGER, segment), note):
            pass  # another process has noted or deleted it this moment

    # --- there
    def upload(self, record: SegmentRecord) -> None:
        """Make the segment's object. Raises OSError, CatalogError."""
        with self._making:
            self._upload(record)

    def _upload(self, record: SegmentRecord) -> None:
        data = self._whole(record, 0)
        for root in range(1, len(self._segments.roots)):
            with contextlib.suppress(FileNotFoundError):
                if self._whole(record, root) != data:
                    raise OSError(errno.EIO, "the copies of a mirrored segment differ", record.segment.hex())
        self._note(record.segment, record.sealed_bytes)
        self._create(self.name(record.segment), data)
        self._note(record.segment, record.sealed_bytes)

    def _create(self, name: str, data: memoryview) -> None:
        if self.objects.create(name, data):
            return
        if self.objects.size(name) == data.nbytes:  # made by a process that died, or whose answer was lost
            return
        self.objects.delete(name)
        if not self.objects.create(name, data):
            raise ObjectStoreError(self.objects.where, f"{name} is there, of another size, and cannot be replaced")

    def _whole(self, record: SegmentRecord, root: int) -> memoryview:
        data = aligned_buffer(record.sealed_bytes).data
        file = self._segments.reopen(record.segment, root=root)
        try:
            at = 0
            while at < data.nbytes:
                got = file.preadv([data[at : at + _COPY_BYTES]], at)
                if got <= 0:
                    raise ShortTransfer(file.path, 0, data.nbytes, at)
                at += got
        finally:
            file.close()
        return data

    def settle(self, record: SegmentRecord) -> bool:
        """Its object is there: let it count, and give up the file. False if the segment has changed meanwhile.

        Nobody may give the segment up at the same time. Raises CatalogError."""
        if self._table.find(record.segment, fresh=True) != record:
            return False
        self._table.put(dataclasses.replace(record, allocated_bytes=0))
        self.counters.segments_demoted += 1
        self.counters.bytes_demoted += record.sealed_bytes
        self._left_over.add(record.segment)
        self._unlink_left_over()
        return True

    def _unlink_left_over(self) -> None:
        for segment in list(self._left_over):
            try:
                self._segments.leave_disk(segment)
            except OSError:  # tried again by `collect`
                continue
            self._space.settle(segment, 0)
            self._left_over.discard(segment)

    # --- gone
    def find_left_over(self) -> None:
        """Files of cold segments, where a process died before it could unlink them; also when a root is there again.

        Raises OSError."""
        on_disk = set(self._segments.list())
        self._left_over |= {record.segment for record in self.segments()} & on_disk
        self._looked = True

    def erase(self, segment: bytes) -> None:
        """Delete the segment's object now, if there may be one. Raises OSError, CatalogError."""
        with self._making:
            note = self._control.get(LEDGER, segment)
            if note is not None:
                self._delete(segment, note)

    def _delete(self, segment: bytes, note: bytes) -> None:
        self.objects.delete(self.name(segment))
        if self._control.compare_and_set(LEDGER, segment, note, None):
            self.counters.objects_deleted += 1

    def collect_all(self) -> None:
        """As `collect`, those included that are being made now."""
        with self._making:
            self.collect()

    def collect(self) -> None:
        """Delete the objects of segments that are gone, and the files of cold ones. Raises OSError, CatalogError."""
        if not self._looked:
            self.find_left_over()
        self._unlink_left_over()
        for segment, note in self._control.items(LEDGER):
            if self._table.get(segment) is None and self._table.find(segment, fresh=True) is None:
                self._delete(segment, note)
