"""A tenant's view of one model's blocks, as `keyspace.Keyspace`, carried out by the service.

What lies in the service's memory is looked up and copied without a message (`maps`). The rest is brought there by the
service and copied from there, or delivered straight into registered memory. Batches longer than a message are cut.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perdure import keys as naming
from perdure import limits
from perdure.advice import Advice
from perdure.buffers import Parts, as_blocks, copy_parts
from perdure.catalog.api import Durability, KeyArray, Lease
from perdure.errors import AccessDenied, CatalogError, InvalidArgument, ServiceBusy, ServiceUnavailable
from perdure.keyspace import (
    check_known,
    check_lease,
    check_seconds,
    durability_of,
    seconds_of,
    wait_seconds,
)
from perdure.reports import ReadReport, WriteReport, WriteStatus
from perdure.service import messages as m
from perdure.service.client import Region, RemoteStore
from perdure.service.fields import lease_of, pack_extents, pack_lease
from perdure.service.remote_reads import GRACE_S, Call, Extents, RemoteReads
from perdure.service.staging import STAGED_BYTES
from perdure.service.transport import Late, Run
from perdure.session import ONCE, SessionVerbs

T = TypeVar("T")
_CALL_THREADS = 4


class RemotePin:
    """Ends by `release`, by its time, or with this process or the service."""

    def __init__(self, store: RemoteStore, run: Run, pin_id: int, deadline_s: float):
        self._store, self._run, self.pin_id, self.deadline_s = store, run, pin_id, deadline_s

    def release(self) -> bool:
        try:
            return bool(
                self._store.ask(
                    self._run, lambda i: m.Unpin(i, self.pin_id), time.monotonic() + limits.call_s_default
                ).yes
            )
        except ServiceUnavailable:
            return False

    def __enter__(self) -> RemotePin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RemoteKeyspace(RemoteReads, SessionVerbs):
    """Made by `RemoteStore.keyspace`."""

    _calls: ThreadPoolExecutor | None = None

    def end(self) -> None:
        if self._calls is not None:
            self._calls.shutdown(wait=True)

    # --- names
    def chain(
        self, token_ids: ArrayLike, *, parent: bytes | None = None, extras: Mapping[int, bytes] | None = None
    ) -> KeyArray:
        """As `Keyspace.chain`."""
        return naming.chain(self.digest if parent is None else parent, token_ids, self.layout.block_tokens, extras)

    def adopt_hashes(self, hashes: Sequence[bytes]) -> KeyArray:
        return naming.adopt_hashes(self.digest, hashes)

    # --- asking
    def lookup(self, keys: KeyArray | Sequence[bytes]) -> int:
        """As `Keyspace.lookup`: without a message where the service's memory says it all."""
        array = naming.check_keys(keys)
        found = 0
        try:
            call = self.begin()
            maps = self._maps(call)
            found, sure = (0, False) if maps is None else maps.prefix(array)
            sure = sure and not self._open(call.run, call.until).published
            while found < len(array) and not sure:
                part = array[found : found + limits.message_keys_max]
                more = self._question(m.Lookup, part.tobytes()).count
                found += more
                if more < len(part):
                    break
        except (ServiceUnavailable, ServiceBusy, AccessDenied, Late):
            pass  # what was found can be asked for; `read` has the last word
        return found

    def present(self, keys: KeyArray | Sequence[bytes]) -> NDArray[np.bool_]:
        """As `Keyspace.present`. Raises ServiceUnavailable."""
        masks = [self._question(m.Present, part.tobytes()).mask for part in _cut(naming.check_keys(keys))]
        return np.frombuffer(b"".join(masks), np.bool_).copy()

    def advise(
        self, keys: KeyArray | Sequence[bytes], *, prefill_tokens_per_s: float, deadline_s: float | None = None
    ) -> Advice:
        """As `Keyspace.advise`, for the first `limits.message_keys_max` keys. Raises ServiceUnavailable."""
        check_seconds(prefill_tokens_per_s, "prefill_tokens_per_s", math.inf)
        names = naming.check_keys(keys)[: limits.message_keys_max].tobytes()
        a = self._question(m.Advise, names, float(prefill_tokens_per_s), seconds_of(deadline_s))
        return Advice(a.blocks, a.load_s, a.recompute_s, a.reason, a.stored, a.in_memory)

    def _question(self, kind: Callable[..., m.Message], *fields: Any) -> Any:
        """Ask what may be asked again."""
        return self._again(lambda: self._ask_of(self.begin(), kind, *fields), None)

    def _ask_of(self, call: Call, kind: Callable[..., m.Message], *fields: Any) -> Any:
        return self._store.ask(call.run, lambda number: kind(number, call.space, *fields), call.until)

    def _again(self, go_on: Callable[[], T], deadline: float | None) -> T:
        """Do it; where connections fail by themselves, do it again after a failure while there is time."""
        return go_on()

    # --- writing
    def write(
        self,
        keys: KeyArray | Sequence[bytes],
        blocks: Any,
        *,
        durability: str | Durability = Durability.SESSION,
        ttl_s: float | None = None,
        lease: Lease | None = None,
        deadline_s: float | None = None,
    ) -> WriteReport:
        """As `Keyspace.write`; blocks in registered memory are stored from there, others through staging memory."""
        started = time.monotonic()
        array = naming.check_keys(keys)
        parts = as_blocks(blocks, len(array), self.layout.block_bytes, writable=False, what="blocks")
        if ttl_s is not None:
            check_seconds(ttl_s, "ttl_s", limits.ttl_s_max)
        if lease is not None:
            check_lease(lease)
        limit = seconds_of(deadline_s)
        report = WriteReport(np.full(len(array), WriteStatus.FAILED, np.uint8), 0, 0, 0, 0.0)
        terms = Terms(
            durability_of(durability).name.lower(),
            None if ttl_s is None else float(ttl_s),
            None if lease is None else pack_lease(lease),
        )
        if len(array):
            self._write(array, parts, terms, None if limit is None else started + limit, report)
        report.bytes = report.stored * self.layout.block_bytes
        report.seconds = time.monotonic() - started
        return report

    def _write(
        self, keys: KeyArray, blocks: list[Parts], terms: Terms, deadline: float | None, report: WriteReport
    ) -> None:
        todo = np.ones(len(keys), bool)
        try:
            self._store_blocks(keys, blocks, terms, deadline, report, todo)
        except Late:
            _refuse(report, todo, WriteStatus.LATE, "not written by the deadline")
        except ServiceUnavailable as error:
            _refuse(report, todo, WriteStatus.FAILED, str(error))
        except (ServiceBusy, CatalogError, AccessDenied) as error:
            _refuse(report, todo, WriteStatus.REJECTED, str(error))

    def _store_blocks(
        self, keys: KeyArray, blocks: list[Parts], terms: Terms, deadline: float | None, report: WriteReport,
        todo: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        """Have the service store the blocks and report on each, which `todo` is then rid of."""
        call = self.begin(deadline)
        registered = self._store.region_of(blocks)
        region, extents = (None, None) if registered is None else registered
        for part in self._rounds(list(range(len(keys))), limits.GIB if registered else STAGED_BYTES, extents):
            if region is None or extents is None:
                self._stage(call, keys, part, blocks, terms, report)
            else:
                self._send_registered(call, keys, part, region, [extents[at] for at in part], terms, report)
            todo[part] = False

    def _send_registered(
        self, call: Call, keys: KeyArray, part: list[int], region: Region, extents: Extents, terms: Terms,
        report: WriteReport,
    ) -> None:  # fmt: skip
        """What the caller must wait for, if no answer comes in time, is in the report."""
        self._store.region_number(call.run, region, call.until)
        came, answers = threading.Event(), []

        def settle(answer: Any) -> None:
            answers.append(answer)
            came.set()

        try:
            self._send(call, keys, part, region, extents, terms, report, settle)
        except BaseException:
            report.settle_by(lambda timeout_s: self._wait_answer(call.run, came, answers, timeout_s))
            raise

    def _stage(
        self, call: Call, keys: KeyArray, part: list[int], blocks: list[Parts], terms: Terms, report: WriteReport
    ) -> None:
        size, staging = self.layout.block_bytes, self._store.staging
        region = staging.take(call.run, len(part) * size, call.until)
        try:
            for place, position in enumerate(part):
                copy_parts(blocks[position], [region.view[place * size : (place + 1) * size]])
        except BaseException:
            staging.give(call.run, region)
            raise
        extents: Extents = [[(place * size, size)] for place in range(len(part))]
        self._send(call, keys, part, region, extents, terms, report, lambda answer: staging.give(call.run, region))
        staging.give(call.run, region)

    def _send(
        self, call: Call, keys: KeyArray, part: list[int], region: Region, extents: Extents, terms: Terms,
        report: WriteReport, settle: Callable[[Any], None] | None = None,
    ) -> None:  # fmt: skip
        table, parts = pack_extents(extents)
        number, names = region.numbers[call.run.welcome.client], keys[part].tobytes()
        answer: m.Written = self._store.transport.ask(
            call.run, lambda i: m.Write(i, call.space, names, number, table, parts, *terms, call.until),
            call.until + GRACE_S, settle=settle,
        )  # fmt: skip
        note(report, part, answer)

    def submit_read(self, keys: KeyArray | Sequence[bytes], into: Any, **options: Any) -> Future[ReadReport]:
        """As `Keyspace.submit_read`."""
        return self._submit(self.read, keys, into, options)

    def submit_write(self, keys: KeyArray | Sequence[bytes], blocks: Any, **options: Any) -> Future[WriteReport]:
        """As `Keyspace.submit_write`."""
        return self._submit(self.write, keys, blocks, options)

    def _submit(self, verb: Callable[..., Any], keys: Any, data: Any, options: dict[str, Any]) -> Future[Any]:
        with suppress(ServiceUnavailable):  # that the service is away is a status; that the store is closed is not
            self._store.current(time.monotonic())
        if self._calls is None:
            self._calls = ThreadPoolExecutor(_CALL_THREADS, thread_name_prefix="perdure-call")
        submitted = time.monotonic()

        def later() -> Any:
            given = seconds_of(options.get("deadline_s"))
            late = {} if given is None else {"deadline_s": max(0.0, given - (time.monotonic() - submitted))}
            return verb(keys, data, **(options | late))

        return self._calls.submit(copy_context().run, later)

    # --- lifetimes
    def reserve(
        self,
        keys: KeyArray | Sequence[bytes],
        *,
        ttl_s: float = limits.lease_ttl_s_default,
        wait_s: float = 0.0,
    ) -> Lease | None:
        """As `Keyspace.reserve`; the lease ends with this process too. Each call that waits has a connection of its
        own, of `limits.connections_per_client_max`; ServiceBusy if there is none left. Goes on waiting while the
        service is away; raises ServiceUnavailable if it still is at the end."""
        array = naming.check_keys(keys)
        if not len(array):
            raise InvalidArgument("reserve: no keys, so there is nothing to reserve")
        check_seconds(ttl_s, "ttl_s", limits.lease_ttl_s_max)
        limit = wait_seconds(wait_s)
        if not limit:
            return self._reserve(self.begin(), array[-1:], ttl_s, 0.0, 0.0)
        until = time.monotonic() + limit

        def go_on() -> Lease | None:
            while True:
                found = self.lookup(array) if len(array) > limits.message_keys_max else 0
                rest = array[found:]
                part = rest if len(rest) <= limits.message_keys_max else _with_last(rest)
                lease = self._reserve(self.begin(until), part, ttl_s, *self._until(until)) if len(rest) else None
                if lease is not None or len(part) == len(rest) or time.monotonic() >= until:
                    return lease

        return _patiently(go_on, until)

    def _reserve(self, call: Call, keys: KeyArray, ttl_s: float, until_s: float, left_s: float) -> Lease | None:
        transport = self._store.transport

        def settle(answer: Any) -> None:
            if isinstance(answer, m.Leased) and answer.lease is not None:  # too late: nobody would use it
                transport.tell(call.run, m.EndLease(transport.number(), answer.lease))

        question = lambda i: m.Reserve(i, call.space, keys.tobytes(), float(ttl_s), until_s, left_s)  # noqa: E731
        try:
            got = transport.ask(call.run, question, call.until + limits.wait_grace_s, settle=settle).lease
        except Late:
            if until_s or left_s:
                return None
            raise ServiceUnavailable(f"{self._store.where}: the service did not answer in time") from None
        return None if got is None else lease_of(got)

    def follow(self, keys: KeyArray | Sequence[bytes], *, known: int = 0, wait_s: float) -> int:
        """As `Keyspace.follow`. Has a connection and goes on waiting while the service is away, as `reserve`.
        Raises ServiceBusy."""
        array, least = naming.check_keys(keys), check_known(known)
        until, found = time.monotonic() + wait_seconds(wait_s), 0

        def go_on() -> None:
            nonlocal found
            while found <= least and found < len(array):
                part = array[found : found + limits.message_keys_max]
                call = self.begin(max(until, time.monotonic()) + limits.wait_grace_s)
                wanted = min(least - found, len(part) - 1)
                found += self._ask_of(call, m.Follow, part.tobytes(), wanted, *self._until(until)).count
                if len(array) > len(part):
                    found += self.lookup(array[found:])
                if time.monotonic() >= until:
                    return

        with suppress(ServiceUnavailable):  # what was found can be asked for
            _patiently(go_on, until)
        return found

    def _until(self, until: float) -> tuple[float, float]:
        """The end of a wait, as a question has it."""
        return until, 0.0

    def end_lease(self, lease: Lease) -> bool:
        """As `Keyspace.end_lease`."""
        check_lease(lease)
        call, data = self.begin(), pack_lease(lease)
        return bool(self._store.ask(call.run, lambda number: m.EndLease(number, data), call.until).yes)

    def pin(self, keys: KeyArray | Sequence[bytes], *, ttl_s: float) -> RemotePin:
        """As `Keyspace.pin`; at most `limits.message_keys_max` keys."""
        names = naming.check_keys(keys).tobytes()
        check_seconds(ttl_s, "ttl_s", limits.pin_ttl_s_max)
        call = self.begin()
        pin_id = self._ask_of(call, m.Pin, names, float(ttl_s)).number
        return RemotePin(self._store, call.run, pin_id, time.clock_gettime(time.CLOCK_BOOTTIME) + ttl_s)

    def session_ask(self, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Raises ServiceUnavailable; then it is not known whether it was done."""
        if verb in ONCE:
            told = self._ask_of(self.begin(), m.SessionAsk, verb, fields)
        else:
            told = self._question(m.SessionAsk, verb, fields)
        content: dict[str, Any] = told.content
        return content

    def release(self, keys: KeyArray | Sequence[bytes]) -> None:
        """Hint: this session is over, evict its blocks first."""
        for part in _cut(naming.check_keys(keys)):
            self._question(m.Hint, part.tobytes())


class Terms(NamedTuple):
    """What a write asks for, as the message has it."""

    durability: str
    ttl_s: float | None
    lease: m.LeaseData | None


def _patiently(go_on: Callable[[], T], until: float) -> T:
    """Do it; do it again when the service has gone away meanwhile, while there is time."""
    while True:
        try:
            return go_on()
        except ServiceUnavailable:
            if time.monotonic() + limits.reconnect_wait_s >= until:
                raise
            time.sleep(limits.reconnect_wait_s)


def _with_last(keys: KeyArray) -> KeyArray:
    """As many keys as fit a message, the last one among them: it names what is reserved."""
    return np.concatenate([keys[: limits.message_keys_max - 1], keys[-1:]])


def _cut(keys: KeyArray) -> list[KeyArray]:
    step = limits.message_keys_max
    return [keys[at : at + step] for at in range(0, len(keys), step)]


def note(report: WriteReport, part: list[int], answer: m.Written) -> None:
    """Put an answer about the blocks `part` into the report of the whole call."""
    report.statuses[part] = np.frombuffer(answer.statuses, np.uint8)
    report.stored += answer.stored
    report.stored_bytes += answer.stored_bytes
    report.reasons |= {part[place]: why for place, why in answer.reasons.items() if place < len(part)}


def _refuse(report: WriteReport, todo: NDArray[np.bool_], status: WriteStatus, why: str) -> None:
    report.statuses[todo] = status
    report.reasons |= dict.fromkeys(np.flatnonzero(todo).tolist(), why)
