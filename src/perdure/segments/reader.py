"""Reading blocks: adjacent records merged into few direct reads, verified, delivered into the caller's memory.

Contract
- A block is delivered only after its header (identity, place, MAC) and its payload's checksum were verified.
- Whatever fails is read once more through a new descriptor (from the other root where there is one); what still
  fails is reported as corrupt or missing, with the reason. Files that are gone and records cut short are misses.
- Blocks not delivered by the deadline are late. With `direct`, disk reads go straight into the caller's memory and a
  late one may still land there after the call: the report says when it has settled. Otherwise bytes land in memory
  of our own (a DRAM slot or scratch) and are copied after verification: a late block never touches the caller's.
- Never: removing records (that is the store's decision), holding a lock across I/O.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure import codecs, limits
from perdure.buffers import Parts, all_aligned, copy_parts
from perdure.catalog.api import RECORD
from perdure.io.api import Engine, IOClass, Request, ShortTransfer
from perdure.io.memory import Scratch
from perdure.pool.dram import DramPool, Slot
from perdure.segments import format as fmt
from perdure.segments.store import SegmentStore

Row = tuple[Any, ...]
"""A catalog record as a tuple in RECORD order: ten times cheaper to look at than an element of the array."""

_GONE = {errno.ENOENT, errno.ESTALE}
_DIRECT_PARTS_MAX = 64  # more, or smaller ones, cost the kernel more than a copy
_DIRECT_PART_BYTES_MIN = 4 * limits.KIB
_SEGMENT, _OFFSET, _STORED, _CODEC = map((RECORD.names or ()).index, ("segment", "offset", "stored_bytes", "codec"))


class BlockStatus(IntEnum):
    """What became of one block of a read."""

    FOUND = 0
    MISSING = 1  # not stored, expired, or its file is gone or cut short
    CORRUPT = 2  # stored, but what is on the disk does not verify; never delivered
    DENIED = 3  # policy does not let this caller have it
    LATE = 4  # not there by the deadline


# An attribute of an enum costs as much as a checksum of 4 KiB.
_FOUND, _LATE = int(BlockStatus.FOUND), int(BlockStatus.LATE)


@dataclass(slots=True, eq=False)
class Plan:
    """One read and its outcome. All sequences have one entry per block; rows are catalog records as tuples (`Row`)."""

    keys: Sequence[bytes]
    keyspaces: Sequence[bytes]
    rows: Sequence[Row]
    destinations: Sequence[Parts]
    element_bytes: int
    deadline: float | None
    direct: bool = False
    raw: bool = False  # deliver the stored bytes as they are (copy-forward, verify); destinations have stored_bytes
    statuses: NDArray[np.uint8] = field(init=False)
    problems: dict[int, str] = field(init=False)
    settled: threading.Event = field(init=False)  # set: no request of this plan can touch memory any more
    _outstanding: int = field(init=False, default=0)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.statuses = np.full(len(self.keys), _LATE, np.uint8)
        self.problems = {}
        self.settled = threading.Event()
        self.settled.set()

    def encoded(self, position: int) -> bool:
        """Whether the stored bytes must be decoded on delivery."""
        return not self.raw and self.rows[position][_CODEC] != codecs.NONE

    def begin(self) -> None:
        with self._lock:
            self._outstanding += 1
            self.settled.clear()

    def end(self) -> None:
        with self._lock:
            self._outstanding -= 1
            if self._outstanding == 0:
                self.settled.set()


@dataclass(slots=True, eq=False)
class _Block:
    """Where one block's record lands. `slot`: memory of the DRAM tier, until it is published or given back."""

    position: int
    header: memoryview
    payload: Parts
    slot: Slot | None
    in_place: bool  # the payload is the caller's memory


class _Landing:
    """What one request holds on to: file, scratch, slots. Let go when the I/O has settled and no decoder needs it."""

    def __init__(self, plan: Plan, blocks: list[_Block], release: Callable[[], None]):
        self.blocks, self._plan, self._release = blocks, plan, release
        self._holds = 1
        self._lock = threading.Lock()
        plan.begin()

    def hold(self) -> None:
        with self._lock:
            self._holds += 1

    def drop(self) -> None:
        with self._lock:
            self._holds -= 1
            last = self._holds == 0
        if last:
            self._release()
            self._plan.end()


class SegmentReader:
    """Carries out plans. Thread-safe."""

    def __init__(self, segments: SegmentStore, engine: Engine, scratch: Scratch, pool: DramPool, decode_threads: int):
        self._segments, self._engine, self._scratch, self._pool = segments, engine, scratch, pool
        self._decoders = ThreadPoolExecutor(decode_threads, thread_name_prefix="perdure-decode")

    def read(self, plan: Plan) -> None:
        """Fill `plan.statuses`, and `plan.problems` for what is corrupt or missing on the disk."""
        rows = plan.rows
        self._pass(plan, sorted(range(len(rows)), key=lambda at: (rows[at][_SEGMENT], rows[at][_OFFSET])), root=None)
        for root in range(len(self._segments.roots) - 1, -1, -1):
            again = sorted(plan.problems)
            if again:
                self._pass(plan, again, root=root)

    # --- one pass over the disk
    def _pass(self, plan: Plan, order: list[int], root: int | None) -> None:
        """`root` None: merged, through shared descriptors; else one by one through fresh descriptors in that root."""
        requests: list[Request] = []
        run: list[int] = []
        segment, first, end = b"", 0, 0
        for position in order:
            row = plan.rows[position]
            size = fmt.record_bytes(row[_STORED])
            joins = (
                root is None
                and row[_OFFSET] == end
                and row[_SEGMENT] == segment
                and end + size - first <= limits.read_io_bytes_max
                and 3 * len(run) + 3 <= limits.io_vectors_max
            )
            if run and not joins:
                self._request(plan, run, requests, root)
                run = []
            if not run:
                segment, first = row[_SEGMENT], row[_OFFSET]
            run.append(position)
            end = row[_OFFSET] + size
        if run:
            self._request(plan, run, requests, root)
        decodes: list[Future[None]] = []

        def done(request: Request) -> None:
            self._arrived(plan, request, decodes)

        self._engine.run(requests, io_class=IOClass.RESTORE, deadline=plan.deadline, done=done)
        for future in decodes:  # CPU work only: bounded without a deadline
            future.result()

    def _request(self, plan: Plan, run: list[int], requests: list[Request], root: int | None) -> None:
        """One vectored read for adjacent records; what does not fit the vector limit or the alignment is staged."""
        segment, first = plan.rows[run[0]][_SEGMENT], plan.rows[run[0]][_OFFSET]
        try:
            file = self._segments.acquire(segment) if root is None else self._segments.reopen(segment, root=root)
        except OSError as error:
            for position in run:
                self._failed(plan, position, error)
            return
        page = limits.page_bytes
        targets = [self._target(plan, position, root) for position in run]
        sizes = [fmt.record_bytes(plan.rows[position][_STORED]) for position in run]
        scratch = self._scratch.take(
            sum(size if target is None else 2 * page for size, target in zip(sizes, targets, strict=True))
        )
        own, at, vectors = scratch.view, 0, 0
        buffers: list[memoryview] = []
        blocks: list[_Block] = []
        for position, target, size in zip(run, targets, sizes, strict=True):
            stored = plan.rows[position][_STORED]
            header = own[at : at + page]
            if target is None:
                blocks.append(_Block(position, header, [own[at + page : at + page + stored]], None, False))
                buffers.append(own[at : at + size])
                at += size
                continue
            vectors += 1
            if isinstance(target, Slot):
                blocks.append(_Block(position, header, [target.view[:stored]], target, False))
                buffers += (header, target.view)
            else:
                blocks.append(_Block(position, header, target, None, True))
                buffers += (header, *target)
                if size - page > stored:
                    buffers.append(own[at + page : at + size - stored])
            at += 2 * page
        if not vectors:  # everything lies back to back in scratch
            buffers = [own[:at]]

        def release() -> None:
            for block in blocks:
                if block.slot is not None:
                    self._pool.discard(block.slot)
            scratch.give_back()
            if root is None:
                self._segments.release(segment, file)
            else:
                file.close()

        landing = _Landing(plan, blocks, release)
        requests.append(Request(file, first, buffers, context=landing, settle=landing.drop))

    def _target(self, plan: Plan, position: int, root: int | None) -> Parts | Slot | None:
        """The caller's own parts (direct), a DRAM slot, or None for scratch."""
        row = plan.rows[position]
        stored = row[_STORED]
        if root is not None or plan.encoded(position) or plan.raw:
            return None
        if not plan.direct:
            return self._pool.reserve(fmt.record_bytes(stored) - limits.page_bytes)
        parts = plan.destinations[position]
        fits = len(parts) <= _DIRECT_PARTS_MAX and stored // len(parts) >= _DIRECT_PART_BYTES_MIN
        return parts if fits and all_aligned(parts, self._segments.roots[0].memory_alignment) else None

    # --- what came back
    def _arrived(self, plan: Plan, request: Request, decodes: list[Future[None]]) -> None:
        landing = request.context
        assert isinstance(landing, _Landing)
        for block in landing.blocks:
            if request.error is not None:  # of merged records maybe only one is bad: the second pass looks at each
                self._failed(plan, block.position, request.error)
            elif plan.encoded(block.position):
                landing.hold()
                decodes.append(self._decoders.submit(self._deliver_and_drop, plan, block, landing))
            else:
                self._deliver(plan, block)

    def _deliver_and_drop(self, plan: Plan, block: _Block, landing: _Landing) -> None:
        try:
            self._deliver(plan, block)
        finally:
            landing.drop()

    def _deliver(self, plan: Plan, block: _Block) -> None:
        """Verify one block and hand it over."""
        position = block.position
        row = plan.rows[position]
        problem = fmt.header_problem(
            block.header,
            fmt.expected_identity(plan.keyspaces[position], plan.keys[position], row),
            self._segments.secret(row[_SEGMENT]),
        )
        if problem is None and fmt.payload_tag(block.payload) != fmt.header_tag(block.header):
            problem = "payload checksum does not match"
        if problem is not None:
            plan.problems[position] = problem
            plan.statuses[position] = BlockStatus.DENIED if problem == fmt.OTHER_KEYSPACE else BlockStatus.CORRUPT
            return
        destination = plan.destinations[position]
        if plan.encoded(position):
            try:
                codecs.decode(row[_CODEC], block.payload[0], destination, plan.element_bytes)
            except codecs.CodecError as error:
                plan.problems[position] = f"payload does not decode: {error}"
                plan.statuses[position] = BlockStatus.CORRUPT
                return
            self._keep_decoded(plan, position)
        elif not block.in_place:
            copy_parts(block.payload, destination)
        if block.slot is not None:
            self._pool.publish(block.slot, plan.keys[position])
            block.slot = None
        if plan.problems:
            plan.problems.pop(position, None)
        plan.statuses[position] = _FOUND

    def _keep_decoded(self, plan: Plan, position: int) -> None:
        """The DRAM tier holds blocks as the engine wants them, decoded once."""
        nbytes = sum(part.nbytes for part in plan.destinations[position])
        slot = None if plan.direct else self._pool.reserve(fmt.record_bytes(nbytes) - limits.page_bytes)
        if slot is not None:
            copy_parts(plan.destinations[position], [slot.view[:nbytes]])
            self._pool.publish(slot, plan.keys[position])

    def _failed(self, plan: Plan, position: int, error: OSError) -> None:
        gone = isinstance(error, ShortTransfer) or error.errno in _GONE
        plan.statuses[position] = BlockStatus.MISSING if gone else BlockStatus.CORRUPT
        plan.problems[position] = (
            f"{'record cut short' if isinstance(error, ShortTransfer) else 'read failed'}: {error}"
        )

    def close(self) -> None:
        self._decoders.shutdown(wait=True)
