"""The reading half of `remote.RemoteKeyspace`: blocks from the service's memory, or delivered into registered memory.

What lies in the service's memory is copied without a message (`maps`). The rest is brought there by the service and
copied from there, or delivered straight into registered memory. Batches longer than a message are cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure import keys as naming
from perdure import limits
from perdure.buffers import Parts, as_blocks, copy_parts
from perdure.catalog.api import KeyArray
from perdure.errors import PerdureError, ProtocolError, ServiceBusy, ServiceUnavailable
from perdure.keyspace import check_seconds, seconds_of
from perdure.reports import ReadReport
from perdure.segments.landing import BlockStatus
from perdure.service import messages as m
from perdure.service.client import Region, RemoteStore
from perdure.service.local import Late, Run
from perdure.service.maps import MAPPABLE, DomainMaps

_FOUND, _MISSING, _LATE = int(BlockStatus.FOUND), int(BlockStatus.MISSING), int(BlockStatus.LATE)


class View:
    """Blocks where they lie in the service's memory, read-only. `blocks`: a memoryview each, None where not FOUND.

    They stay unchanged until `release`, for `ttl_s` at most: it says whether that was so. Drop the memoryviews before
    or at the release. Ends with the process."""

    def __init__(
        self, store: RemoteStore, run: Run, report: ReadReport, blocks: list[memoryview | None], grants: list[int]
    ):
        self._store, self._run, self._grants = store, run, grants
        self.report, self.statuses, self.blocks = report, report.statuses, blocks

    def release(self) -> bool:
        """Whether the bytes were valid until now."""
        grants, self._grants, self.blocks = self._grants, [], []
        if not grants:
            return False
        try:
            deadline = time.monotonic() + limits.call_s_default
            return bool(self._store.ask(self._run, lambda i: m.Release(i, grants, True), deadline).yes)
        except ServiceUnavailable:
            return False

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RemoteReads:
    """What reading needs, and reading."""

    def __init__(self, store: RemoteStore, tenant: str, identity: naming.KeyspaceIdentity, codec: str):
        self._store, self.tenant, self.identity, self.layout, self._codec = (
            store,
            tenant,
            identity,
            identity.layout,
            codec,
        )
        self._opened: tuple[bytes, m.SpaceOpened] | None = None
        self._grants = 0
        run, deadline = store.current()
        opened = self._open(run, deadline)
        self.digest, self.shared_digest, self.tenant_id = opened.digest, opened.shared_digest, opened.tenant_id

    def _open(self, run: Run, deadline: float) -> m.SpaceOpened:
        known = self._opened
        if known is not None and known[0] == run.welcome.boot:
            return known[1]
        one, fields = self.identity, m.layout_fields(self.layout)
        opened: m.SpaceOpened = self._store.ask(
            run,
            lambda i: m.OpenSpace(i, self.tenant, one.model, one.weights, one.lora, one.draft, fields, self._codec),
            deadline,
        )
        if known is not None and known[1].digest != opened.digest:
            raise ProtocolError(f"{self._store.path}: another store is served here now; its blocks have other names")
        self._opened = (run.welcome.boot, opened)
        return opened

    def number(self, run: Run, deadline: float | None = None) -> int:
        return self._open(run, time.monotonic() + limits.call_s_default if deadline is None else deadline).space

    def _at(self, deadline: float | None) -> tuple[Run, float, int, DomainMaps | None]:
        run, until = self._store.current(deadline)
        opened = self._open(run, until)
        maps = None
        if opened.mapped and MAPPABLE:
            maps = self._store.maps(run, opened.tenant_id, opened.space, until)
        return run, until, opened.space, maps

    def refresh(self) -> None:
        """Unmap what the service has given up."""
        try:
            self._at(time.monotonic() + limits.send_wait_s)
        except (PerdureError, Late):
            return

    # --- reading
    def read(
        self, keys: KeyArray | Sequence[bytes], into: Any, *, deadline_s: float | None = None, direct: bool = False
    ) -> ReadReport:
        """As `Keyspace.read`. Memory that was registered is filled by the service itself if `direct`, or without a
        deadline; other memory by a copy from the service's."""
        started = time.monotonic()
        array = naming.check_keys(keys)
        blocks = as_blocks(into, len(array), self.layout.block_bytes, writable=True, what="into")
        limit = seconds_of(deadline_s)
        deadline = None if limit is None else started + limit
        report = ReadReport(np.full(len(array), _MISSING, np.uint8), 0, 0, 0.0)
        if len(array):
            try:
                self._read(array, blocks, deadline, direct, report)
            except Late:
                report.statuses[report.statuses == _MISSING] = _LATE
            except ServiceUnavailable as error:
                report.problems |= dict.fromkeys(np.flatnonzero(report.statuses != _FOUND).tolist(), str(error))
        return _finish(report, self.layout.block_bytes, started)

    def _read(
        self, keys: KeyArray, blocks: list[Parts], deadline: float | None, direct: bool, report: ReadReport
    ) -> None:
        run, until, number, maps = self._at(deadline)
        registered = self._store.region_of(blocks) if direct or deadline is None else None
        if maps is not None:
            done = maps.copy(self.digest, keys, self.layout.block_bytes, blocks)
            report.statuses[done] = _FOUND
            report.from_memory += int(done.sum())
        rest = np.flatnonzero(report.statuses != _FOUND)
        if not len(rest):
            return
        if registered is not None:
            region, extents = registered
            where = self._store.region_number(run, region, until)
            for part in self._rounds(rest, extents, limits.region_bytes_max):
                self._deliver(run, until, number, keys, part, where, [extents[at] for at in part], direct, report)
            return
        if maps is not None and run.welcome.fetch_bytes >= self.layout.block_bytes:
            rest = np.array(self._fetch(run, until, number, keys, rest, blocks, report), np.intp)
        if len(rest):
            self._through_staging(run, until, number, keys, rest, blocks, report)

    def _fetch(
        self, run: Run, until: float, number: int, keys: KeyArray, rest: NDArray[np.intp], blocks: list[Parts],
        report: ReadReport,
    ) -> list[int]:  # fmt: skip
        """Copy what the service brings into its memory; returns what there was no room for."""
        homeless: list[int] = []
        for part in self._rounds(rest, None, run.welcome.fetch_bytes):
            try:
                grant, answer = self._ask_fetch(run, until, number, keys[part], 0.0)
            except ServiceBusy:
                homeless += part
                continue
            try:
                found, _ = self._granted(run, until, number, answer)
                for place, (position, block) in enumerate(zip(part, found, strict=True)):
                    if block is not None:
                        copy_parts([block], blocks[position])
                        report.statuses[position] = _FOUND
                    elif place in answer.no_room:
                        homeless.append(position)
                    else:
                        report.statuses[position] = answer.statuses[place]
                        if answer.statuses[place] == _FOUND:  # its chunk could not be mapped
                            report.statuses[position] = _MISSING
                            homeless.append(position)
                report.problems |= {part[place]: why for place, why in answer.problems.items() if place < len(part)}
                report.from_memory += answer.from_memory
            finally:
                self._store.transport.tell(run, m.Release(0, [grant], False))
        return homeless

    def _ask_fetch(self, run: Run, until: float, number: int, keys: KeyArray, view_s: float) -> tuple[int, m.Fetched]:
        self._grants += 1
        grant = (id(self) << 32 | self._grants) & (2**63 - 1)
        left = max(0.0, until - time.monotonic())

        def settle(answer: Any) -> None:
            if answer is not None:
                self._store.transport.tell(run, m.Release(0, [grant], False))

        answer: m.Fetched = self._store.transport.ask(
            run, lambda i: m.Fetch(i, number, keys.tobytes(), left, grant, view_s), until + GRACE_S, settle=settle
        )
        if len(answer.statuses) != len(keys) or len(answer.slots) != 8 * len(keys):
            raise ProtocolError("the service answered for another number of blocks")
        return grant, answer

    def _granted(
        self, run: Run, until: float, number: int, answer: m.Fetched
    ) -> tuple[list[memoryview | None], DomainMaps]:
        """The blocks that were pinned for us, mapped anew if they lie in chunks we do not know."""
        slots = np.frombuffer(answer.slots, np.uint64).tolist()
        maps = self._store.maps(run, self.tenant_id, number, until + GRACE_S)
        size = self.layout.block_bytes
        blocks: list[memoryview | None] = []
        for slot in slots:
            block = None if slot == m.NO_SLOT else maps.granted(slot)
            blocks.append(block if block is not None and block.nbytes == size else None)
        return blocks, maps

    def _through_staging(
        self, run: Run, until: float, number: int, keys: KeyArray, rest: NDArray[np.intp], blocks: list[Parts],
        report: ReadReport,
    ) -> None:  # fmt: skip
        """Where there is no memory to map: the service delivers into staging memory, and we copy."""
        size = self.layout.block_bytes
        for part in self._rounds(rest, None, STAGED_BYTES):
            region = self._store.take_staging(run, len(part) * size, until)
            extents = [[(place * size, size)] for place in range(len(part))]
            where = region.numbers[run.welcome.boot]

            def settle(answer: Any, region: Region = region) -> None:
                self._store.give_staging(region)

            try:
                self._deliver(run, until, number, keys, part, where, extents, False, report, settle)
            except Late:
                raise
            except BaseException:
                self._store.give_staging(region)
                raise
            for place, position in enumerate(part):
                if report.statuses[position] == _FOUND:
                    copy_parts([region.view[place * size : (place + 1) * size]], blocks[position])
            self._store.give_staging(region)

    def _deliver(
        self, run: Run, until: float, number: int, keys: KeyArray, part: list[int], region: int,
        extents: list[list[tuple[int, int]]], direct: bool, report: ReadReport,
        settle: Callable[[Any], None] | None = None,
    ) -> None:  # fmt: skip
        table, parts = m.pack_extents(extents)
        left, names = max(0.0, until - time.monotonic()), keys[part].tobytes()
        answer: m.Delivered = self._store.transport.ask(
            run, lambda i: m.Read(i, number, names, region, table, parts, left, direct), until + GRACE_S, settle=settle
        )
        report.statuses[part] = np.frombuffer(answer.statuses, np.uint8)
        report.from_memory += answer.from_memory
        report.problems |= {part[place]: why for place, why in answer.problems.items() if place < len(part)}
        if answer.late:
            report.settle_by(lambda timeout_s: self._wait_settled(run, answer.late, timeout_s))

    def _wait_settled(self, run: Run, late: int, timeout_s: float | None) -> bool:
        give_up = time.monotonic() + (limits.deadline_s_max if timeout_s is None else timeout_s)
        while True:
            left = give_up - time.monotonic()
            try:
                wait_s = min(max(left, 0.0), 1.0)
                if self._store.ask(run, lambda i, w=wait_s: m.Settled(i, late, w), give_up + 1.0).yes:
                    return True
            except ServiceUnavailable:
                return run.ended.is_set()  # who is dead touches nothing
            if left <= 0:
                return False

    def view(self, keys: KeyArray | Sequence[bytes], *, deadline_s: float | None = None,
             ttl_s: float = limits.view_ttl_s_default) -> View:  # fmt: skip
        """Blocks where they lie in the service's memory, brought there if need be: a pointer for a copy to a GPU.

        ttl_s: how long they stay unchanged at most. Raises ServiceUnavailable where nothing can be mapped."""
        started = time.monotonic()
        check_seconds(ttl_s, "ttl_s", limits.view_ttl_s_max)
        array = naming.check_keys(keys)
        limit = seconds_of(deadline_s)
        run, until, number, maps = self._at(None if limit is None else started + limit)
        if maps is None:
            raise ServiceUnavailable(
                f"{self._store.path}: nothing to map here; start the service with --memory, on x86-64"
            )
        report = ReadReport(np.full(len(array), _MISSING, np.uint8), 0, 0, 0.0)
        blocks: list[memoryview | None] = [None] * len(array)
        grants: list[int] = []
        try:
            for part in self._rounds(np.arange(len(array)), None, run.welcome.fetch_bytes):
                grant, answer = self._ask_fetch(run, until, number, array[part], ttl_s)
                grants.append(grant)
                found, _ = self._granted(run, until, number, answer)
                for place, position in enumerate(part):
                    blocks[position] = found[place]
                    status = answer.statuses[place]
                    report.statuses[position] = _MISSING if status == _FOUND and found[place] is None else status
                report.problems |= {part[place]: why for place, why in answer.problems.items() if place < len(part)}
                report.problems |= {part[place]: "no room in the service's memory" for place in answer.no_room}
                report.from_memory += answer.from_memory
        except Late:
            report.statuses[report.statuses == _MISSING] = _LATE
        except BaseException:
            self._store.transport.tell(run, m.Release(0, grants, False))
            raise
        return View(self._store, run, _finish(report, self.layout.block_bytes, started), blocks, grants)

    def _rounds(
        self, positions: NDArray[np.intp], extents: list[list[tuple[int, int]]] | None, bytes_max: int
    ) -> list[list[int]]:
        """Cut positions into what fits one message, and `bytes_max`."""
        rounds: list[list[int]] = []
        most = max(1, min(limits.message_keys_max, bytes_max // self.layout.block_bytes))
        if extents is None:
            return [positions[at : at + most].tolist() for at in range(0, len(positions), most)]
        pieces = 0
        for position in positions.tolist():
            count = len(extents[position])
            if not rounds or len(rounds[-1]) >= most or pieces + count > limits.message_extents_max:
                rounds.append([])
                pieces = 0
            rounds[-1].append(position)
            pieces += count
        return rounds


GRACE_S = 0.25  # the service keeps the deadline; an answer that is on its way then is worth waiting for
STAGED_BYTES = 16 * limits.MIB


def _finish(report: ReadReport, block_bytes: int, started: float) -> ReadReport:
    found = report.statuses == _FOUND
    total = int(np.count_nonzero(found))
    report.usable = len(found) if total == len(found) else int(found.argmin())
    report.bytes = total * block_bytes
    report.seconds = time.monotonic() - started
    return report
