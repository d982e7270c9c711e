"""The reading half of `remote.RemoteKeyspace`: blocks from the service's memory, or delivered into registered memory.

What lies in the service's memory is copied without a message (`maps`). The rest is brought there by the service and
copied from there, or delivered straight into registered memory. Batches longer than a message are cut.

Contract: each copy is checked against the slot's header before and after, also of blocks the service has just brought:
a process that slept meanwhile has lost its claim to the slot, and must not notice by wrong bytes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import numpy as np

from perdure import keys as naming
from perdure import limits
from perdure.buffers import Parts, as_blocks, copy_parts
from perdure.catalog.api import KeyArray
from perdure.errors import AccessDenied, PerdureError, ProtocolError, ServiceBusy, ServiceUnavailable
from perdure.keys import key_list
from perdure.keyspace import check_seconds, seconds_of
from perdure.reports import ReadReport
from perdure.segments.landing import BlockStatus
from perdure.service import messages as m
from perdure.service.client import Region, RemoteStore
from perdure.service.fields import NO_SLOT, layout_fields, pack_extents
from perdure.service.maps import MAPPABLE, DomainMaps
from perdure.service.staging import STAGED_BYTES
from perdure.service.transport import Late, Run

GRACE_S = 0.25  # the service keeps the deadline; an answer that is on its way then is worth waiting for
_POLL_S = 0.01
_OVERLAP_BYTES = 16 * limits.MIB  # of a round that is read while the one before is being copied
_ROUNDS_AHEAD = 2
_FOUND, _MISSING, _DENIED, _LATE = map(
    int, (BlockStatus.FOUND, BlockStatus.MISSING, BlockStatus.DENIED, BlockStatus.LATE)
)

Extents = list[list[tuple[int, int]]]
"""Per block its parts in a region: (offset, bytes)."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a verb: the run of the service it goes to, the keyspace's number there, and its deadline."""

    run: Run
    space: int
    until: float


class View:
    """Blocks where they lie in the service's memory, read-only. `blocks`: a memoryview each, None where not FOUND.

    They stay unchanged until `release`, for `ttl_s` at most: it says whether that was so. Drop the memoryviews before
    or at the release. Ends with the process."""

    def __init__(
        self, store: RemoteStore, run: Run, report: ReadReport, blocks: list[memoryview | None], grants: list[int],
        until: float,
    ):  # fmt: skip
        self._store, self._run, self._grants, self._until = store, run, grants, until
        self.report, self.statuses, self.blocks = report, report.statuses, blocks

    @property
    def valid(self) -> bool:
        """Whether the bytes were what the service has verified until now."""
        return bool(self._grants) and time.monotonic() <= self._until and not self._run.ended.is_set()

    def release(self) -> bool:
        """Whether the bytes were valid until now: the service keeps them for as long as it said, or dies. Waits for
        nobody."""
        valid = self.valid
        grants, self._grants, self.blocks = self._grants, [], []
        if grants:
            self._store.transport.tell(self._run, m.Release(0, grants, False))
        return valid

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RemoteReads:
    """What every verb needs, and reading."""

    def __init__(
        self, store: RemoteStore, tenant: str, identity: naming.KeyspaceIdentity, codec: str, capability: bytes = b""
    ):  # fmt: skip
        self._store, self._codec, self._capability = store, codec, capability
        self.tenant, self.identity, self.layout = tenant, identity, identity.layout
        self._opened: tuple[Run, m.SpaceOpened] | None = None
        opened = self._open(*store.current())
        self.digest, self.shared_digest, self.tenant_id = opened.digest, opened.shared_digest, opened.tenant_id

    def _open(self, run: Run, deadline: float) -> m.SpaceOpened:
        known = self._opened
        if known is not None and known[0] is run:
            return known[1]
        one, fields = self.identity, layout_fields(self.layout)
        opened: m.SpaceOpened = self._store.ask(
            run,
            lambda i: m.OpenSpace(
                i,
                self.tenant,
                one.model,
                one.weights,
                one.lora,
                one.draft,
                fields,
                self._codec,
                one.salt,
                self._capability,
            ),
            deadline,
        )
        if known is not None and known[1].digest != opened.digest:
            raise AccessDenied(
                f"{self._store.where}: its blocks have other names now (another store, or policy); open it again"
            )
        self._opened = (run, opened)
        return opened

    def begin(self, deadline: float | None = None) -> Call:
        """A call that ends at `deadline` (monotonic seconds). Raises ServiceUnavailable, StoreClosed."""
        run, until = self._store.current(deadline)
        return Call(run, self._open(run, until).space, until)

    def _maps(self, call: Call) -> DomainMaps | None:
        """Up to date; None where there is nothing to map, or no room to tell the service what was used. Raises Late."""
        if not (MAPPABLE and self._open(call.run, call.until).mapped):
            return None
        try:
            return self._store.maps(call.run, self.tenant_id, call.space, call.until)
        except ServiceBusy:
            return None

    def refresh(self) -> None:
        """Unmap what the service has given up."""
        try:
            self._maps(self.begin(time.monotonic() + limits.send_wait_s))
        except (PerdureError, Late):
            return

    # --- reading
    def read(
        self, keys: KeyArray | Sequence[bytes], into: Any, *, deadline_s: float | None = None, direct: bool = False
    ) -> ReadReport:
        """As `Keyspace.read`. Memory that was registered is filled by the service itself if `direct`, or without a
        deadline; then LATE blocks' memory must not be reused before `report.wait_settled()`. Other memory is filled by
        a copy from the service's."""
        started = time.monotonic()
        array = naming.check_keys(keys)
        blocks = as_blocks(into, len(array), self.layout.block_bytes, writable=True, what="into")
        limit = seconds_of(deadline_s)
        deadline = None if limit is None else started + limit
        report = ReadReport(np.full(len(array), _LATE, np.uint8), 0, 0, 0.0)
        if len(array):
            try:
                self._read(array, blocks, deadline, direct, report)
            except Late:
                pass  # which is what their status says
            except (ServiceUnavailable, ServiceBusy, AccessDenied) as error:
                rest = report.statuses == _LATE
                report.statuses[rest] = _DENIED if isinstance(error, AccessDenied) else _MISSING
                report.problems |= dict.fromkeys(np.flatnonzero(rest).tolist(), str(error))
        if report.from_memory == len(array):
            report.usable, report.bytes = len(array), len(array) * self.layout.block_bytes
            report.seconds = time.monotonic() - started
            return report
        return _finish(report, self.layout.block_bytes, started)

    def _read(
        self, keys: KeyArray, blocks: list[Parts], deadline: float | None, direct: bool, report: ReadReport
    ) -> None:
        call = self.begin(deadline)
        maps = self._maps(call)
        if maps is not None:
            done = maps.copy(self.digest, keys, self.layout.block_bytes, blocks)
            report.statuses[done] = _FOUND
            report.from_memory = int(np.count_nonzero(done))
            if report.from_memory == len(keys):
                return
        rest = np.flatnonzero(report.statuses != _FOUND).tolist()
        registered = self._store.region_of(blocks) if rest and (direct or deadline is None) else None
        if registered is not None:
            region, extents = registered
            for part in self._rounds(rest, limits.region_bytes_max, extents):
                self._deliver_direct(call, keys, part, region, [extents[at] for at in part], report)
            return
        if maps is not None and call.run.welcome.fetch_bytes >= self.layout.block_bytes:
            rest = self._fetch(call, keys, rest, blocks, report)
        for part in self._rounds(rest, STAGED_BYTES):
            self._through_staging(call, keys, part, blocks, report)

    def _fetch(self, call: Call, keys: KeyArray, rest: list[int], blocks: list[Parts], report: ReadReport) -> list[int]:
        """Copy what the service brings into its memory; returns what there was no room for."""
        homeless: list[int] = []
        for part, asked in self._ahead(call, keys, rest):
            if asked is None:
                homeless += part
                continue
            grant, answer = asked
            try:
                maps = self._store.maps(call.run, self.tenant_id, call.space, call.until + GRACE_S)
                copied = self._copy_granted(maps, keys[part], answer, [blocks[at] for at in part])
            finally:
                self._store.transport.tell(call.run, m.Release(0, [grant], False))
            _note(report, part, answer)
            no_room = set(answer.no_room)
            lost = [
                part[at]
                for at, done in enumerate(copied)
                if not done and (at in no_room or answer.statuses[at] == _FOUND)
            ]
            report.statuses[lost] = _LATE  # until they come another way
            homeless += lost
        return homeless

    def _ahead(
        self, call: Call, keys: KeyArray, rest: list[int]
    ) -> Iterator[tuple[list[int], tuple[int, m.Fetched] | None]]:
        """Rounds of a read with the service's answers, None where it has no room now. Of a long read the next rounds
        are asked for while this one is being copied: the disk does not wait for us, nor we for it."""
        most = call.run.welcome.fetch_bytes
        if len(rest) * self.layout.block_bytes > _OVERLAP_BYTES:
            most = min(most // (_ROUNDS_AHEAD + 1), _OVERLAP_BYTES)
        rounds = self._rounds(rest, most)

        def ask(part: list[int]) -> tuple[int, m.Fetched] | None:
            try:
                return self._ask_fetch(call, keys[part], 0.0)
            except ServiceBusy:
                return None

        if len(rounds) == 1:
            yield rounds[0], ask(rounds[0])
            return
        asked: deque[Future[tuple[int, m.Fetched] | None]] = deque()
        with ThreadPoolExecutor(_ROUNDS_AHEAD, thread_name_prefix="perdure-ahead") as threads:
            try:
                for number, part in enumerate(rounds):
                    while len(asked) < _ROUNDS_AHEAD and number + len(asked) < len(rounds):
                        asked.append(threads.submit(copy_context().run, ask, rounds[number + len(asked)]))
                    yield part, asked.popleft().result()
            finally:  # what was asked for and is not wanted any more
                for future in asked:
                    with suppress(Exception):
                        left = future.result()
                        if left is not None:
                            self._store.transport.tell(call.run, m.Release(0, [left[0]], False))

    def _copy_granted(
        self, maps: DomainMaps, keys: KeyArray, answer: m.Fetched, destinations: list[Parts]
    ) -> list[bool]:
        """Which blocks of an answer could be copied."""
        slots, size = np.frombuffer(answer.slots, np.uint64).tolist(), self.layout.block_bytes
        return [
            slot != NO_SLOT and maps.copy_granted(slot, key, self.digest, size, destination)
            for slot, key, destination in zip(slots, key_list(keys), destinations, strict=True)
        ]

    def _ask_fetch(self, call: Call, keys: KeyArray, view_s: float) -> tuple[int, m.Fetched]:
        grant = self._store.grant_number()

        def settle(answer: Any) -> None:
            if isinstance(answer, m.Fetched):
                self._store.transport.tell(call.run, m.Release(0, [grant], False))

        answer: m.Fetched = self._store.transport.ask(
            call.run, lambda i: m.Fetch(i, call.space, keys.tobytes(), call.until, grant, view_s),
            call.until + GRACE_S, settle=settle,
        )  # fmt: skip
        if len(answer.statuses) != len(keys) or len(answer.slots) != 8 * len(keys):
            raise ProtocolError("the service answered for another number of blocks")
        return grant, answer

    def _through_staging(
        self, call: Call, keys: KeyArray, part: list[int], blocks: list[Parts], report: ReadReport
    ) -> None:
        """Where there is no memory to map: the service delivers into staging memory, and we copy."""
        size, staging = self.layout.block_bytes, self._store.staging
        region = staging.take(call.run, len(part) * size, call.until)
        extents: Extents = [[(place * size, size)] for place in range(len(part))]
        self._deliver(call, keys, part, region, extents, False, report, lambda answer: staging.give(call.run, region))
        try:
            for place, position in enumerate(part):
                if report.statuses[position] == _FOUND:
                    copy_parts([region.view[place * size : (place + 1) * size]], blocks[position])
        finally:
            staging.give(call.run, region)

    def _deliver_direct(
        self, call: Call, keys: KeyArray, part: list[int], region: Region, extents: Extents, report: ReadReport
    ) -> None:
        self._store.region_number(call.run, region, call.until)
        settled, late = threading.Event(), []

        def settle(answer: Any) -> None:
            late.append(answer)
            settled.set()

        try:
            self._deliver(call, keys, part, region, extents, True, report, settle)
        except Late:
            report.settle_by(lambda timeout_s: self._wait_answer(call.run, settled, late, timeout_s))
            raise

    def _deliver(
        self, call: Call, keys: KeyArray, part: list[int], region: Region, extents: Extents, direct: bool,
        report: ReadReport, settle: Callable[[Any], None],
    ) -> None:  # fmt: skip
        table, parts = pack_extents(extents)
        number, names = region.numbers[call.run.welcome.client], keys[part].tobytes()
        answer: m.Delivered = self._store.transport.ask(
            call.run, lambda i: m.Read(i, call.space, names, number, table, parts, call.until, direct),
            call.until + GRACE_S, settle=settle,
        )  # fmt: skip
        _note(report, part, answer)
        if answer.late:
            report.settle_by(lambda timeout_s: self._wait_settled(call.run, answer.late, timeout_s))

    def _wait_answer(self, run: Run, came: threading.Event, answers: list[Any], timeout_s: float | None) -> bool:
        """Until a late answer has come, and what it says is still going on has ended."""
        give_up = time.monotonic() + (limits.deadline_s_max if timeout_s is None else timeout_s)
        while not came.is_set():
            self._store.transport.collect(run)
            if time.monotonic() >= give_up:
                return came.is_set()
            came.wait(_POLL_S)
        late = answers[0].late if isinstance(answers[0], m.Delivered) else 0
        return not late or self._wait_settled(run, late, max(0.0, give_up - time.monotonic()))

    def _wait_settled(self, run: Run, late: int, timeout_s: float | None) -> bool:
        give_up = time.monotonic() + (limits.deadline_s_max if timeout_s is None else timeout_s)
        while True:
            wait_s = min(max(give_up - time.monotonic(), 0.0), 1.0)
            try:
                if self._store.ask(run, lambda i, w=wait_s: m.Settled(i, late, w), give_up + 1.0).yes:
                    return True
            except ServiceUnavailable:
                return run.ended.is_set()  # who is dead touches nothing
            if time.monotonic() >= give_up:
                return False

    def view(
        self,
        keys: KeyArray | Sequence[bytes],
        *,
        deadline_s: float | None = None,
        ttl_s: float = limits.view_ttl_s_default,
    ) -> View:
        """Blocks where they lie in the service's memory, brought there if need be: a pointer for a copy to a GPU.

        ttl_s: how long they stay unchanged at most. Raises ServiceUnavailable where nothing can be mapped, ServiceBusy
        if this process looks at too much already."""
        started = time.monotonic()
        check_seconds(ttl_s, "ttl_s", limits.view_ttl_s_max)
        array = naming.check_keys(keys)
        limit = seconds_of(deadline_s)
        report = ReadReport(np.full(len(array), _LATE, np.uint8), 0, 0, 0.0)
        blocks: list[memoryview | None] = [None] * len(array)
        grants: list[int] = []
        call = self.begin(None if limit is None else started + limit)
        try:
            if self._maps(call) is None:
                raise ServiceUnavailable(
                    f"{self._store.where}: nothing to map here; start the service with --memory, on x86-64"
                )
            for part in self._rounds(list(range(len(array))), call.run.welcome.fetch_bytes):
                grant, answer = self._ask_fetch(call, array[part], ttl_s)
                grants.append(grant)
                _note(report, part, answer)
                self._look(call, array[part], part, answer, blocks, report)
        except Late:
            pass  # which is what their status says
        except BaseException:
            self._store.transport.tell(call.run, m.Release(0, grants, False))
            raise
        _finish(report, self.layout.block_bytes, started)
        return View(self._store, call.run, report, blocks, grants, started + ttl_s)

    def _look(
        self, call: Call, keys: KeyArray, part: list[int], answer: m.Fetched, blocks: list[memoryview | None],
        report: ReadReport,
    ) -> None:  # fmt: skip
        """The memory of the blocks that were pinned for us."""
        maps = self._store.maps(call.run, self.tenant_id, call.space, call.until + GRACE_S)
        slots = np.frombuffer(answer.slots, np.uint64).tolist()
        for position, block in zip(part, maps.granted(slots, key_list(keys), self.digest), strict=True):
            blocks[position] = block
            if block is None and report.statuses[position] == _FOUND:
                report.statuses[position] = _MISSING
        report.problems |= {part[place]: "no room in the service's memory" for place in answer.no_room}

    def _rounds(self, positions: list[int], bytes_max: int, extents: Extents | None = None) -> list[list[int]]:
        """Cut positions into what fits one message, and `bytes_max`."""
        most = max(1, min(limits.message_keys_max, bytes_max // self.layout.block_bytes))
        if extents is None:
            return [positions[at : at + most] for at in range(0, len(positions), most)]
        rounds: list[list[int]] = []
        pieces = 0
        for position in positions:
            count = len(extents[position])
            if not rounds or len(rounds[-1]) >= most or pieces + count > limits.message_extents_max:
                rounds.append([])
                pieces = 0
            rounds[-1].append(position)
            pieces += count
        return rounds


def _note(report: ReadReport, part: list[int], answer: m.Fetched | m.Delivered) -> None:
    """Put an answer about the blocks `part` into the report of the whole call."""
    report.statuses[part] = np.frombuffer(answer.statuses, np.uint8)
    report.from_memory += answer.from_memory
    report.problems |= {part[place]: why for place, why in answer.problems.items() if place < len(part)}


def _finish(report: ReadReport, block_bytes: int, started: float) -> ReadReport:
    found = report.statuses == _FOUND
    total = int(np.count_nonzero(found))
    report.usable = len(found) if total == len(found) else int(found.argmin())
    report.bytes = total * block_bytes
    report.seconds = time.monotonic() - started
    return report
