"""Appending blocks: open segments, large direct writes, group fsync, seal.

Contract
- One open segment per (tenant, epoch, durability, retention class), bounded in number; the bytes of one batch lie
  together.
- `append` returns which records are completely in their file; nothing is visible until the caller publishes it.
- A segment is sealed once it is full, idle or its store closes, after its last append was published or given up: its
  index object lists what was published, everything else in it is garbage.
- Never: a write outside the range that was reserved for it, a second use of a range.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.buffers import Parts, all_aligned
from perdure.catalog.api import RECORD, Durability, KeyArray, RecordArray, SegmentRecord, SegmentState
from perdure.clock import Clock
from perdure.errors import CatalogError
from perdure.io.api import Engine, File, IOClass, IOState, Request
from perdure.io.memory import Scratch
from perdure.segments import format as fmt
from perdure.segments.opened import OpenSegment, SegmentClass
from perdure.segments.space import NoSpace, SpaceBudget
from perdure.segments.staging import Batch, Preparation
from perdure.segments.store import SegmentStore
from perdure.segments.table import SegmentTable

_STAGE_PART_BYTES_MIN = 16 * limits.KIB  # smaller parts are gathered first: the kernel handles few large ones faster


@dataclass(slots=True)
class Appended:
    """Outcome of `append`: records (n,), which of them are in their file, why the others are not, segments touched."""

    records: RecordArray
    written: NDArray[np.bool_]
    late: NDArray[np.bool_]
    errors: dict[int, OSError]
    segments: list[OpenSegment]


class SegmentWriter:
    """Owns every open segment of one store. Thread-safe; no lock is held across block I/O."""

    def __init__(
        self,
        segments: SegmentStore,
        table: SegmentTable,
        engine: Engine,
        scratch: Scratch,
        space: SpaceBudget,
        clock: Clock,
        owner: bytes,
        segment_bytes: int,
    ):
        self._segments, self._table, self._engine, self._scratch = segments, table, engine, scratch
        self._space, self._clock, self._owner, self.segment_bytes = space, clock, owner, segment_bytes
        self._open: dict[SegmentClass, OpenSegment] = {}
        self._lock = threading.Lock()
        self._creating = threading.Lock()

    # --- reservation
    def _segment_for(self, kind: SegmentClass, need: int, reserve: bool) -> OpenSegment:
        """A segment of the class with room for at least `need` bytes, its users counted up. Raises NoSpace, OSError."""
        while True:
            with self._lock:
                current = self._open.get(kind)
                if current is not None and not current.retired and current.tail + need <= current.allocated_bytes:
                    current.users += 1
                    current.last_used = self._clock.monotonic()
                    return current
            with self._creating:
                with self._lock:
                    current = self._open.get(kind)
                    if current is not None and not current.retired and current.tail + need <= current.allocated_bytes:
                        continue
                if current is not None and not current.retired and self._grow(current, need, reserve):
                    continue
                if current is not None:
                    self.retire(current)
                self._create(kind, need, reserve)

    def _grow(self, current: OpenSegment, need: int, reserve: bool) -> bool:
        """Allocate more of an open segment (it doubles, so that a small tenant stays small)."""
        have = current.allocated_bytes
        want = min(max(2 * have, current.tail + need), current.limit_bytes)
        if current.tail + need > want:
            return False
        with self._lock:  # a user like an append: it must not be sealed meanwhile
            if current.retired:
                return False
            current.users += 1
        try:
            least = current.tail + need - have
            want = have + self._space.take(current.segment, want - have, least=least, reserve=reserve)
            try:
                for file in current.files:
                    file.allocate(have, want - have)
            except OSError as error:
                self._space.settle(current.segment, have)
                if error.errno == errno.ENOSPC and self._segments.room_elsewhere(2 * want):
                    return False
                raise
            with self._lock:
                current.allocated_bytes = want
        finally:
            self.finish(current)
        return True

    def _create(self, kind: SegmentClass, need: int, reserve: bool) -> None:
        tenant, epoch, durability, retention = kind
        first = min(max(self.segment_bytes // 16, need, limits.segment_bytes_min), max(self.segment_bytes, need))
        segment = fmt.new_segment_id()
        first = self._space.take(segment, first, least=need, reserve=reserve)
        now, boot_id = int(self._clock.wall()), self._clock.boot_id()
        roots = len(self._segments.roots) if durability == Durability.RETAINED else 1
        record = SegmentRecord(
            segment, SegmentState.OPEN, self._owner, tenant, durability, retention, boot_id, now, first, 0, 0, 0
        )
        files: list[File] = []
        try:
            self._table.put(record)  # before the file: a file without a record would never be accounted for
            key = self._segments.new_key(tenant, epoch, segment)
            files = self._segments.create(segment, roots=roots)
            for file in files:
                file.allocate(0, first)
        except BaseException:
            for file in files:
                file.close()
            self._remove(segment)
            raise
        limit = max(self.segment_bytes, need)
        opened = OpenSegment(segment, kind, files, key, limit, now, boot_id, self._clock.monotonic(), first)
        with self._lock:
            self._open[kind] = opened
            crowd = sorted(self._open.values(), key=lambda one: one.last_used)[: -limits.segments_open_max]
        for one in crowd:
            self.retire(one)

    def _remove(self, segment: bytes) -> None:
        """Delete a segment. What fails on the way is tried again by `keeper`."""
        try:
            self._segments.delete(segment)
            self._table.delete(segment)
        except (OSError, CatalogError):
            self._space.note_unsealed(segment)
        else:
            self._space.settle(segment, 0)

    # --- append
    def append(self, batch: Batch, *, deadline: float | None, reserve: bool = False) -> Appended:
        """Write a batch to open segments. Every segment in the result must be given to `finish` once.

        Raises NoSpace, OSError or CatalogError only if nothing could be written; a later failure is reported per block.
        """
        count = len(batch.keys)
        stored = np.fromiter((sum(p.nbytes for p in parts) for parts in batch.payloads), np.uint32, count)
        sizes = fmt.record_bytes_array(stored)
        result = Appended(np.zeros(count, RECORD), np.zeros(count, bool), np.zeros(count, bool), {}, [])
        kind = (batch.tenant, batch.tenant_epoch, batch.durability, batch.retention)
        at = 0
        while at < count:
            try:
                opened = self._segment_for(kind, int(sizes[at]), reserve)
            except OSError as error:  # NoSpace included
                if at == 0:
                    raise
                result.errors |= dict.fromkeys(range(at, count), error)
                break
            except CatalogError as problem:
                if at == 0:
                    raise
                result.errors |= dict.fromkeys(range(at, count), OSError(errno.EIO, str(problem)))
                break
            with self._lock:  # another thread may have appended since
                offset = opened.tail
                fit = int(np.searchsorted(offset + np.cumsum(sizes[at:]), opened.allocated_bytes, side="right"))
                if fit:
                    opened.tail += int(sizes[at : at + fit].sum())
            if fit == 0:
                self.finish(opened)
                continue
            if opened in result.segments:  # it has grown since this batch's first run in it
                self.finish(opened)
            else:
                result.segments.append(opened)
            try:
                self._fill(batch, result, opened, slice(at, at + fit), offset, sizes, stored, deadline)
            except BaseException:
                for one in result.segments:
                    self.finish(one)
                raise
            at += fit
        return result

    def _fill(
        self,
        batch: Batch,
        result: Appended,
        opened: OpenSegment,
        span: slice,
        offset: int,
        sizes: NDArray[np.int64],
        stored: NDArray[np.uint32],
        deadline: float | None,
    ) -> None:
        """Write blocks `span` of the batch at `offset` of one segment."""
        records = result.records[span]
        records["segment"] = np.void(opened.segment)
        records["tenant"] = np.void(batch.tenant)
        records["offset"] = offset + np.concatenate(([0], np.cumsum(sizes[span])[:-1]))
        records["stored_bytes"] = stored[span]
        records["block_bytes"] = batch.block_bytes
        records["created_s"] = np.broadcast_to(batch.created_s, len(batch.keys))[span]
        records["expires_s"] = np.broadcast_to(batch.expires_s, len(batch.keys))[span]
        records["tenant_epoch"] = batch.tenant_epoch
        records["codec"] = batch.codecs[span]
        records["cipher"] = fmt.NO_CIPHER if opened.key is None else fmt.AES_256_GCM
        records["durability"] = batch.durability
        records["retention"] = batch.retention
        requests, settled = self._requests(batch, opened, span, records)
        left = len(requests)
        lock = threading.Lock()

        def settle() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                for release in settled:
                    release()

        for request in requests:
            request.settle = settle
        self._engine.run(requests, io_class=IOClass.WRITE_BACK, deadline=deadline)
        for request in requests:
            blocks = request.context
            assert isinstance(blocks, range)
            chosen = slice(blocks.start, blocks.stop)
            if request.state is IOState.LATE:
                result.late[chosen] = True
            elif request.error is not None:
                result.errors |= dict.fromkeys(blocks, request.error)
        for position in range(span.start, span.stop):
            result.written[position] = position not in result.errors and not result.late[position]
        with opened.changed:
            opened.written += 1
            if any(request.error is not None for request in requests):
                opened.retired = True

    def _requests(
        self, batch: Batch, opened: OpenSegment, span: slice, records: RecordArray
    ) -> tuple[list[Request], list[Callable[[], None]]]:
        """Vectored writes for one run of records, and what to give back when the last of them has settled.

        Staging, checksums and headers are left to the threads that write (`segments.staging`): the first bytes go out
        while the rest is still being hashed.
        """
        page, alignment = limits.page_bytes, self._segments.roots[0].memory_alignment
        lease = self._scratch.take(len(records) * page)
        headers, leases = lease.view, [lease.give_back]
        headers[:] = bytes(headers.nbytes)
        secret = self._segments.secret(opened.segment)
        requests: list[Request] = []
        buffers: list[memoryview] = []
        staged: list[tuple[Parts, memoryview, int]] = []
        first = span.start
        start = end = int(records["offset"][0])

        def flush(until: int) -> None:
            run, low, high = range(first, until), first - span.start, until - span.start
            prepare = Preparation(
                batch, run, records[low:high], headers[low * page : high * page], list(staged), secret, opened.key
            )
            requests.extend(
                Request(file, start, list(buffers), write=True, context=run, prepare=prepare) for file in opened.files
            )
            buffers.clear()
            staged.clear()

        for number, position in enumerate(range(span.start, span.stop)):
            parts = batch.payloads[position]
            size = int(records["stored_bytes"][number])
            padded = fmt.record_bytes(size) - page
            whole = padded == size and size // len(parts) >= _STAGE_PART_BYTES_MIN and all_aligned(parts, alignment)
            whole &= opened.key is None
            if buffers and (
                end + page + padded - start > limits.write_io_bytes_max
                or len(buffers) + 1 + (len(parts) if whole else 1) > limits.io_vectors_max
            ):
                flush(position)
                first, start = position, end
            if not whole:
                lease = self._scratch.take(padded if opened.key is None else padded + fmt.GCM_TAG_BYTES)
                leases.append(lease.give_back)
                staged.append((parts, lease.view, size))
                parts = [lease.view[:padded]]
            buffers.append(headers[number * page : (number + 1) * page])
            buffers.extend(parts)
            end += page + padded
        flush(span.stop)
        return requests, leases

    def start_again(self, owner: bytes) -> None:
        """Go on under another name: other processes take over what is open now, which is left as it is."""
        with self._lock:
            self._owner, left = owner, list(self._open.values())
            for one in left:
                one.taken = True
        for one in left:
            self.retire(one)

    # --- seal
    def published(self, opened: OpenSegment, keyspace: bytes, keys: KeyArray, records: RecordArray) -> None:
        """Remember which records of a segment became visible."""
        entries = np.zeros(len(keys), fmt.INDEX_ENTRY)
        entries["key"], entries["record"] = keys.view("V32").ravel(), records
        entries["keyspace"] = np.void(keyspace)
        with self._lock:
            opened.entries.append(entries)
            expiry = records["expires_s"]
            opened.lasting |= bool((expiry == 0).any())
            opened.expires_s = max(opened.expires_s, int(expiry.max(initial=0)))

    def finish(self, opened: OpenSegment) -> None:
        """The append that reserved a place has been published or given up."""
        with self._lock:
            opened.users -= 1
        self._seal_if_done(opened)

    def retire(self, opened: OpenSegment) -> None:
        """No more appends; seals now, or when the last user is through."""
        with self._lock:
            opened.retired = True
            if self._open.get(opened.kind) is opened:
                del self._open[opened.kind]
        self._seal_if_done(opened)

    def _seal_if_done(self, opened: OpenSegment) -> None:
        with self._lock:
            if not opened.retired or opened.users or opened.sealed:
                return
            opened.sealed = True
        self._seal(opened)

    def _seal(self, opened: OpenSegment) -> None:
        """Index object, then the control record. A failure leaves an unsealed segment, which `keeper` takes care of."""
        segment, (tenant, _, durability, retention) = opened.segment, opened.kind
        entries = np.concatenate(opened.entries) if opened.entries else np.zeros(0, fmt.INDEX_ENTRY)
        with self._lock:
            if self._open.get(opened.kind) is opened:
                del self._open[opened.kind]
        if opened.taken or not len(entries):
            for file in opened.files:
                file.close()
            if not opened.taken:
                self._remove(segment)
            return
        try:
            for file in opened.files:
                file.truncate(opened.tail)
                file.datasync()
            secret = self._segments.secret(segment)
            data = fmt.pack_index(segment, tenant, opened.tail, entries, secret)
            self._segments.write_index(segment, data, roots=len(opened.files))
            expires_s = 0 if opened.lasting else opened.expires_s
            self._table.put(
                SegmentRecord(
                    segment, SegmentState.SEALED, self._owner, tenant, durability, retention, opened.boot_id,
                    opened.created_s, opened.tail, opened.tail, len(entries), expires_s,
                )
            )  # fmt: skip
            self._space.settle(segment, opened.tail)
        except (OSError, CatalogError):
            self._space.note_unsealed(segment)
        finally:
            for file in opened.files:
                file.close()

    def seal_idle(self, older_than: float) -> None:
        """Retire open segments that nothing was appended to since `older_than` (monotonic seconds)."""
        with self._lock:
            idle = [one for one in self._open.values() if one.last_used < older_than and not one.users]
        for one in idle:
            self.retire(one)

    def open_segments(self) -> list[OpenSegment]:
        with self._lock:
            return list(self._open.values())

    def close(self) -> None:
        """Seal everything. Appends must have ended."""
        for one in self.open_segments():
            self.retire(one)


__all__ = ["Appended", "Batch", "NoSpace", "OpenSegment", "SegmentWriter"]
