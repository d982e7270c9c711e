"""Reading blocks: adjacent records merged into few direct reads, verified, delivered into the caller's memory.

Contract
- A block is delivered only after its header (identity, place, MAC) and its payload's checksum, or its authentication
  tag where it is encrypted, were verified. Without its key it is denied; if that was destroyed, missing.
- Whatever fails is read once more through a new descriptor (from the other root where there is one); what still
  fails is reported as corrupt or missing, with the reason. Files that are gone and records cut short are misses.
  Without time for the second look a block is late: one look is no verdict. So it is if the object store cannot be
  asked.
- Blocks not delivered by the deadline are late. With `direct`, disk reads go straight into the caller's memory and a
  late one may still land there after the call: the report says when it has settled. Otherwise bytes land in memory
  of our own (a DRAM slot or scratch) and are copied after verification: a late block never touches the caller's.
- Never: removing records (that is the store's decision), holding a lock across I/O.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from cryptography.exceptions import InvalidTag

from perdure import codecs, limits
from perdure.buffers import Parts, all_aligned, copy_parts
from perdure.errors import KeyDestroyed, KeyUnavailable, RootUnavailable
from perdure.io.api import Engine, File, IOClass, Request, ShortTransfer
from perdure.io.memory import Scratch
from perdure.io.objects import ObjectFile, ObjectStoreError
from perdure.keys import key_domain
from perdure.pool.dram import DramPool, Slot
from perdure.segments import format as fmt
from perdure.segments.landing import (
    BLOCK_BYTES,
    CIPHER,
    CODEC,
    EPOCH,
    EXPIRES,
    FOUND,
    LATE,
    OFFSET,
    SEGMENT,
    STORED,
    TENANT,
    Area,
    Block,
    BlockStatus,
    Landing,
    Piece,
    Plan,
    Row,
    cut,
)
from perdure.segments.store import SegmentStore

_GONE = {errno.ENOENT, errno.ESTALE}
_DIRECT_PARTS_MAX = 64  # more, or smaller ones, cost the kernel more than a copy
_DIRECT_PART_BYTES_MIN = 4 * limits.KIB


class SegmentReader:
    """Carries out plans. Thread-safe."""

    def __init__(self, segments: SegmentStore, engine: Engine, scratch: Scratch, pool: DramPool, decode_threads: int):
        self._segments, self._engine, self._scratch, self._pool = segments, engine, scratch, pool
        self._decoders = ThreadPoolExecutor(decode_threads, thread_name_prefix="perdure-decode")
        self.used_far: Callable[[bytes, bytes, Row, Parts], None] | None = None
        """Told of each block delivered from the cold tier: key, keyspace, record, stored bytes, not encrypted (valid
        for the length of the call)."""

    def read(self, plan: Plan) -> None:
        """Fill `plan.statuses`, and `plan.problems` for what is corrupt or missing on the disk."""
        rows = plan.rows
        self._pass(plan, sorted(range(len(rows)), key=lambda at: (rows[at][SEGMENT], rows[at][OFFSET])), root=None)
        first, away = list(plan.problems), dict[int, OSError]()
        for root in range(len(self._segments.roots) - 1, -1, -1):
            again = [position for position in sorted(plan.problems) if plan.statuses[position] != LATE]
            if again:
                plan.statuses[again] = LATE  # until this look has come to its end
                for position in again:
                    del plan.problems[position]
                    plan.unread.pop(position, None)
                self._pass(plan, again, root=root)
                away |= {at: error for at, error in plan.unread.items() if isinstance(error, RootUnavailable)}
        plan.unread |= {at: error for at, error in away.items() if at in plan.problems}  # its other copy may be good
        if first and len(self._segments.roots) > 1:
            self._segments.note_suspects({rows[at][SEGMENT] for at in first if plan.statuses[at] == FOUND})

    def read_copy(self, plan: Plan, root: int) -> None:
        """As `read`, from one root only, each block once."""
        self._pass(plan, list(range(len(plan.rows))), root=root)

    # --- one pass over the disk
    def _pass(self, plan: Plan, order: list[int], root: int | None) -> None:
        """`root` None: merged, through shared descriptors; else one by one through fresh descriptors in that root."""
        requests: list[Request] = []
        run: list[int] = []
        segment, first, end, io_bytes, gap_bytes = b"", 0, 0, 0, 0
        for position in order:
            row = plan.rows[position]
            size = fmt.record_bytes(row[STORED])
            joins = (
                root is None
                and 0 <= row[OFFSET] - end <= gap_bytes
                and row[SEGMENT] == segment
                and row[OFFSET] + size - first <= io_bytes
                and 4 * len(run) + 4 <= limits.io_vectors_max
            )
            if run and not joins:
                self._request(plan, run, requests, root)
                run = []
            if not run:
                segment, first = row[SEGMENT], row[OFFSET]
                io_bytes, gap_bytes = self._segments.merging(segment)
            run.append(position)
            end = row[OFFSET] + size
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
        segment, first = plan.rows[run[0]][SEGMENT], plan.rows[run[0]][OFFSET]
        file = self._opened(plan, run, root)
        if file is None:
            return
        page, far = limits.page_bytes, isinstance(file, ObjectFile)
        targets = [None if far else self._target(plan, position, root) for position in run]
        sizes = [fmt.record_bytes(plan.rows[position][STORED]) for position in run]
        secret = [plan.rows[position][CIPHER] != fmt.NO_CIPHER for position in run]
        starts = [plan.rows[position][OFFSET] - first for position in run]
        gaps = [starts[0], *(b - a - size for a, b, size in zip(starts, starts[1:], sizes, strict=False))]
        scratch = self._scratch.take(
            sum(size if target is None else 2 * page for size, target in zip(sizes, targets, strict=True))
            + page * sum(secret)
            + sum(gaps)
        )
        own, at, scattered = scratch.view, 0, False
        areas: list[Area] = []
        blocks: list[Block] = []
        for position, target, size, sealed, gap in zip(run, targets, sizes, secret, gaps, strict=True):
            stored = plan.rows[position][STORED]
            if gap:
                areas.append(Area(own[at : at + gap], 0))
                at += gap
            header = own[at : at + page]
            areas.append(Area(header, 0))
            if sealed:
                payload = own[at + page : at + page + stored + fmt.GCM_TAG_BYTES]
                blocks.append(Block(position, header, [payload[:stored]], None, False, payload, far=far))
                areas.append(Area(own[at + page : at + size], 0))  # no checksum: the tag says it
                at += size + page
                scattered = True
                continue
            if target is None:
                blocks.append(Block(position, header, [own[at + page : at + page + stored]], None, False, far=far))
                areas.append(Area(own[at + page : at + size], stored))
                at += size
                continue
            scattered = True
            if isinstance(target, Slot):
                blocks.append(Block(position, header, [target.view[:stored]], target, False))
                areas.append(Area(target.view, stored))
            else:
                blocks.append(Block(position, header, target, None, True))
                areas += [Area(part, part.nbytes) for part in target]
                if size - page > stored:
                    areas.append(Area(own[at + page : at + size - stored], 0))
            at += 2 * page
        if len(run) == 1:
            pieces = cut(areas, limits.cold_read_bytes_max if far else limits.read_io_bytes_max)
        else:
            pieces = [Piece(0, [area.view for area in areas] if scattered else [own[:at]], [])]

        def release() -> None:
            for block in blocks:
                if block.slot is not None:
                    self._pool.discard(block.slot)
            scratch.give_back()
            if root is None:
                self._segments.release(segment, file)
            else:
                file.close()

        landing = Landing(plan, blocks, pieces, release)
        requests.extend(
            Request(file, first + piece.offset, piece.buffers, context=(landing, number), settle=landing.drop)
            for number, piece in enumerate(pieces)
        )

    def _opened(self, plan: Plan, run: list[int], root: int | None) -> File | None:
        """The file of a run. None, and the run has failed, if it cannot be opened."""
        segment = plan.rows[run[0]][SEGMENT]
        try:
            file = self._segments.acquire(segment) if root is None else self._segments.reopen(segment, root=root)
        except OSError as error:
            for position in run:
                self._failed(plan, position, error, None)
            return None
        if isinstance(file, ObjectFile):
            plan.far.update(run)
        return file

    def _target(self, plan: Plan, position: int, root: int | None) -> Parts | Slot | None:
        """The caller's own parts (direct), a DRAM slot, or None for scratch."""
        row = plan.rows[position]
        stored = row[STORED]
        if root is not None or plan.encoded(position) or plan.raw or row[CIPHER] != fmt.NO_CIPHER:
            return None
        if not plan.direct:
            return self._pool.reserve(fmt.record_bytes(stored) - limits.page_bytes, plan.domain)
        parts = plan.destinations[position]
        fits = len(parts) <= _DIRECT_PARTS_MAX and stored // len(parts) >= _DIRECT_PART_BYTES_MIN
        return parts if fits and all_aligned(parts, self._segments.roots[0].memory_alignment) else None

    # --- what came back
    def _arrived(self, plan: Plan, request: Request, decodes: list[Future[None]]) -> None:
        assert isinstance(request.context, tuple)
        landing, number = request.context
        if not landing.arrived(number, request.error):
            return
        for block in landing.blocks:
            if landing.error is not None:  # of merged records maybe only one is bad: the second pass looks at each
                self._failed(plan, block.position, landing.error, request.file)
            elif plan.encoded(block.position):
                landing.hold()
                decodes.append(self._decoders.submit(self._deliver_and_drop, plan, block, landing))
            else:
                self._deliver(plan, block, landing.tag())

    def _deliver_and_drop(self, plan: Plan, block: Block, landing: Landing) -> None:
        try:
            self._deliver(plan, block, landing.tag())
        finally:
            landing.drop()

    def _deliver(self, plan: Plan, block: Block, tag: bytes | None) -> None:
        """Verify one block and hand it over. `tag`: its payload's checksum, if it was computed on the way."""
        position = block.position
        row = plan.rows[position]
        problem = fmt.header_problem(
            block.header,
            fmt.expected_identity(plan.keyspaces[position], plan.keys[position], row),
            self._segments.secret(row[SEGMENT]),
        )
        if (
            problem == fmt.OTHER_KEYSPACE
        ):  # of the same tenant: there is no such block in this one, and that one is whole
            plan.statuses[position] = BlockStatus.MISSING
            return
        verdict = BlockStatus.CORRUPT
        if problem is None and block.sealed is not None:
            problem, verdict = self._decrypt(plan, block, block.sealed)
        elif problem is None and (tag or fmt.payload_tag(block.payload)) != fmt.header_tag(block.header):
            problem = "payload checksum does not match"
        if problem is not None:
            plan.problems[position] = problem
            plan.statuses[position] = verdict
            return
        destination = plan.destinations[position]
        if plan.encoded(position):
            try:
                codecs.decode(row[CODEC], block.payload[0], destination, plan.element_bytes)
            except codecs.CodecError as error:
                plan.problems[position] = f"payload does not decode: {error}"
                plan.statuses[position] = BlockStatus.CORRUPT
                return
            self._keep_decoded(plan, position)
        elif not block.in_place:
            copy_parts(block.payload, destination)
            if block.far and not plan.raw:
                self._keep_decoded(plan, position)
        if block.far and self.used_far is not None and not plan.raw:
            self.used_far(plan.keys[position], plan.keyspaces[position], row, block.payload)
        if block.slot is not None:
            self._publish(plan, position, block.slot)
            block.slot = None
        plan.statuses[position] = FOUND

    def _decrypt(self, plan: Plan, block: Block, sealed: memoryview) -> tuple[str | None, BlockStatus]:
        """Into a slot of the DRAM tier, the caller's memory (direct) or where it lies; wiped if it does not verify."""
        position, keys = block.position, self._segments.keys
        row = plan.rows[position]
        try:
            if keys is None:
                raise KeyUnavailable("it is encrypted, and there is no keystore")
            key = keys.key(key_domain(row[TENANT], row[EPOCH]), row[SEGMENT], plan.deadline)
        except TimeoutError:
            return "its key was not there by the deadline", BlockStatus.LATE
        except KeyDestroyed as error:
            return str(error), BlockStatus.MISSING
        except KeyUnavailable as error:
            return str(error), BlockStatus.DENIED
        if fmt.header_key_id(block.header) != key.key_id:
            return "it was encrypted with another key", BlockStatus.DENIED
        destination, target = plan.destinations[position], block.payload[0]
        if not plan.raw and not plan.encoded(position) and not block.far:
            if not plan.direct:
                block.slot = self._pool.reserve(target.nbytes, plan.domain)
                target = target if block.slot is None else block.slot.view[: target.nbytes]
            elif len(destination) == 1:
                target, block.in_place = destination[0], True
        sealed[-fmt.GCM_TAG_BYTES :] = fmt.header_tag(block.header)
        try:
            key.cipher.decrypt_into(fmt.header_nonce(block.header), sealed, block.header[: fmt.AAD_BYTES], target)
        except InvalidTag:
            target[:] = bytes(target.nbytes)
            return "its authentication tag does not verify", BlockStatus.CORRUPT
        block.payload = [target]
        return None, BlockStatus.FOUND

    def _keep_decoded(self, plan: Plan, position: int) -> None:
        """The DRAM tier holds blocks as the engine wants them, decoded once."""
        nbytes = sum(part.nbytes for part in plan.destinations[position])
        slot = None if plan.direct else self._pool.reserve(nbytes, plan.domain)
        if slot is not None:
            copy_parts(plan.destinations[position], [slot.view])
            self._publish(plan, position, slot)

    def _publish(self, plan: Plan, position: int, slot: Slot) -> None:
        row = plan.rows[position]
        self._pool.publish(
            slot, plan.keys[position], plan.keyspaces[position], nbytes=row[BLOCK_BYTES], expires_s=row[EXPIRES]
        )

    def _failed(self, plan: Plan, position: int, error: OSError, file: File | None) -> None:
        row, short = plan.rows[position], isinstance(error, ShortTransfer)
        if isinstance(error, ObjectStoreError):  # says nothing about the block
            plan.statuses[position], plan.problems[position], plan.unread[position] = LATE, str(error), error
            return
        plan.statuses[position] = BlockStatus.MISSING if short or error.errno in _GONE else BlockStatus.CORRUPT
        plan.problems[position] = f"{'record cut short' if short else 'read failed'}: {error}"
        ends = short and file is not None and file.size() < row[OFFSET] + fmt.record_bytes(row[STORED])
        ends |= short and isinstance(file, ObjectFile)  # the store's answer was complete
        if not ends and not isinstance(error, FileNotFoundError):
            plan.unread[position] = error

    def close(self) -> None:
        self._decoders.shutdown(wait=True)
