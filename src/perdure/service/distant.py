"""A tenant's view of one model's blocks on a data node: as `remote.RemoteKeyspace`, the bytes by TCP.

Contract
- One question per `limits.message_keys_max` keys both looks up and reads; what is found is received straight into the
  caller's memory. A block that is LATE may have been received in part; nothing touches its memory after the call.
- A connection that fails is made anew inside the call, within its deadline (`limits.reconnect_s_default` without one),
  and what has not been answered is asked for again: both verbs may be repeated.
- There is nothing to map, register or look at here: `view` and registered memory need a service on this host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from perdure import codecs, limits
from perdure.buffers import Parts
from perdure.catalog.api import KeyArray
from perdure.errors import InvalidArgument, ProtocolError, ServiceUnavailable
from perdure.reports import ReadReport, WriteReport
from perdure.segments.landing import BlockStatus
from perdure.service import messages as m
from perdure.service.fields import raise_failure
from perdure.service.remote import RemoteKeyspace, Terms, note
from perdure.service.remote_reads import GRACE_S, Call
from perdure.service.streams import Stream
from perdure.service.transport import Late

T = TypeVar("T")
_FOUND, _CORRUPT = int(BlockStatus.FOUND), int(BlockStatus.CORRUPT)


class Source(Protocol):
    """Where the payload of an answer comes from."""

    def fill(self, parts: Sequence[memoryview], until: float) -> None:
        """Its next bytes. Raises ProtocolError if there are not so many."""


class DistantKeyspace(RemoteKeyspace):
    """Made by `RemoteStore.keyspace`."""

    _get_bytes_max = limits.message_keys_max * limits.block_bytes_max
    """Of blocks in one Get."""

    def view(self, keys: KeyArray | Sequence[bytes], **_: Any) -> NoReturn:
        raise InvalidArgument(f"view: {self._store.where} shares no memory with this process; use read")

    def _until(self, until: float) -> tuple[float, float]:
        return 0.0, max(limits.wait_s_min, until - time.monotonic())  # hosts share no clock

    def _maps(self, call: Call) -> None:
        """There are none."""

    # --- reading
    def _read(
        self, keys: KeyArray, blocks: list[Parts], deadline: float | None, direct: bool, report: ReadReport
    ) -> None:
        todo = np.ones(len(keys), bool)

        def go_on() -> None:
            call = self.begin(deadline)
            for part in self._rounds(np.flatnonzero(todo).tolist(), self._get_bytes_max):
                self._get(call, keys, part, blocks, deadline, report, todo)

        self._again(go_on, deadline)

    def _get(
        self, call: Call, keys: KeyArray, part: list[int], blocks: list[Parts], deadline: float | None,
        report: ReadReport, todo: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        names, left_s = keys[part].tobytes(), call.until - time.monotonic()
        with self._payload(call) as (stream, number):
            stream.send(m.encode_question(m.Get(number, call.space, names, max(0.0, left_s))), until=call.until)
            first, last = 0, False
            while not last:
                until = by(deadline)
                data, _ = stream.receive_frame(until)
                answer = self._expect(data, number, m.Sent)
                here = part[first : first + len(answer.statuses)]
                if len(here) != len(answer.statuses) or (not here and not answer.last):
                    raise ProtocolError(f"{self._store.where}: an answer about blocks that were not asked for")
                self._take(stream, answer, here, blocks, report, until)
                todo[here] = False
                first, last = first + len(here), answer.last

    def _take(
        self, source: Source, answer: m.Sent, here: list[int], blocks: list[Parts], report: ReadReport, until: float
    ) -> None:
        """Receive the blocks of one frame, and report on them."""
        statuses = np.frombuffer(answer.statuses, np.uint8).copy()
        found = np.flatnonzero(statuses == _FOUND).tolist()
        encoded = np.frombuffer(answer.codecs, np.uint8)
        stored = np.frombuffer(answer.stored, "<u4")
        if len(encoded) not in (0, len(here)) or len(stored) != len(encoded):
            raise ProtocolError(f"{self._store.where}: codecs of another number of blocks")
        problems = {here[place]: why for place, why in answer.problems.items() if place < len(here)}
        if not len(encoded):
            source.fill([one for place in found for one in blocks[here[place]]], until)
        for place in found if len(encoded) else ():
            parts = blocks[here[place]]
            if not encoded[place]:
                source.fill(parts, until)
                continue
            if stored[place] > self.layout.block_bytes:
                raise ProtocolError(f"{self._store.where}: {stored[place]} bytes stored of a smaller block")
            memory = memoryview(bytearray(int(stored[place])))
            source.fill([memory], until)
            try:
                codecs.decode(int(encoded[place]), memory, parts, self.layout.element_bytes)
            except codecs.CodecError as error:
                statuses[place], problems[here[place]] = _CORRUPT, f"payload does not decode: {error}"
        report.statuses[here] = statuses
        report.from_memory += answer.from_memory
        report.problems |= problems

    # --- writing
    def _store_blocks(
        self, keys: KeyArray, blocks: list[Parts], terms: Terms, deadline: float | None, report: WriteReport,
        todo: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        def go_on() -> None:
            call = self.begin(deadline)
            for part in self._rounds(np.flatnonzero(todo).tolist(), limits.frame_blocks_bytes_max):
                self._put(call, keys, part, [one for at in part for one in blocks[at]], terms, by(deadline), report)
                todo[part] = False

        self._again(go_on, deadline)

    def _put(
        self, call: Call, keys: KeyArray, part: list[int], payload: Parts, terms: Terms, until: float,
        report: WriteReport, landing: int = 0,
    ) -> None:  # fmt: skip
        names, left_s = keys[part].tobytes(), until - time.monotonic()
        with self._payload(call) as (stream, number):
            question = m.Put(number, call.space, names, *terms, max(0.0, left_s), landing)
            stream.send(m.encode_question(question), payload=payload, until=until)
            data, _ = stream.receive(until + GRACE_S)
            note(report, part, self._expect(data, number, m.Written))

    # --- connections
    @contextmanager
    def _payload(self, call: Call) -> Iterator[tuple[Stream, int]]:
        """A connection for payload, and the number of the question that is asked on it."""
        transport = self._store.transport
        stream = cast("Stream", transport.take(call.run, call.until, payload=True))
        whole = False
        try:
            yield stream, transport.number()
            whole = True
        except TimeoutError:
            raise Late from None
        except OSError as error:
            raise ServiceUnavailable(f"{self._store.where}: the connection failed ({error})") from error
        finally:
            if whole:
                transport.give(call.run, stream, payload=True)
            else:
                stream.close()

    def _expect(self, data: bytes, number: int, kind: type[Any]) -> Any:
        if not data:
            raise ConnectionResetError("end of the connection")
        answer = m.decode_answer(data)
        if isinstance(answer, m.Failed):
            raise_failure(answer)
        if not isinstance(answer, kind) or answer.id != number:
            raise ProtocolError(f"{self._store.where}: {type(answer).__name__} is no answer to the question")
        return answer

    def _again(self, go_on: Callable[[], T], deadline: float | None) -> T:
        give_up = time.monotonic() + limits.reconnect_s_default if deadline is None else deadline
        while True:
            try:
                return go_on()
            except ServiceUnavailable:
                if time.monotonic() + limits.reconnect_wait_s >= give_up:
                    raise
                time.sleep(limits.reconnect_wait_s)


def by(deadline: float | None) -> float:
    """When to stop waiting for the next frame."""
    return time.monotonic() + limits.call_s_default if deadline is None else deadline + GRACE_S
