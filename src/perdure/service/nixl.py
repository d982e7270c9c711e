"""A tenant's view of one model's blocks on a data node, as `distant.DistantKeyspace`, the bytes by NIXL (`nixl://`).

Contract
- Questions and answers go by TCP as before. The node writes found blocks into a landing of this process's own, and
  reads blocks to be stored from there; the caller's memory is never known to NIXL.
- A landing serves one question at a time. One whose question did not end well may still be written into: it is lost
  until the node takes it anew, which says that nothing touches it (a node that replaced another has the store to
  itself). Of a closed client it stays until the process ends.
- Blocks larger than a landing go by TCP; so does everything while `limits.nixl_lost_regions_max` landings are lost.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.buffers import Parts, copy_parts
from perdure.catalog.api import KeyArray
from perdure.errors import ConfigError, ProtocolError, ServiceBusy, ServiceUnavailable
from perdure.io.memory import address
from perdure.reports import ReadReport, WriteReport, WriteStatus
from perdure.segments.landing import BlockStatus
from perdure.service import messages as m
from perdure.service.distant import DistantKeyspace, by
from perdure.service.nixl_agent import Agent, Broken
from perdure.service.remote import Terms
from perdure.service.remote_reads import Call
from perdure.service.transport import Late, Run, Transport

_BYTES: Final = limits.frame_blocks_bytes_max
_ABANDONED: Final[list[Landing]] = []  # of closed clients: a node may still write there


class Landing:
    """Memory that the node reaches. settled: whether nothing can touch it."""

    def __init__(self, agent: Agent):
        self.view = memoryview(mmap.mmap(-1, _BYTES))
        self.start, self.about = address(self.view), agent.register(self.view)
        self.run: Run | None = None  # it has `number` there
        self.number = 0
        self.settled = True


class Landed:
    """The payload of an answer, in a landing."""

    def __init__(self, view: memoryview):
        self._left = view

    def fill(self, parts: Sequence[memoryview], until: float) -> None:
        size = sum(part.nbytes for part in parts)
        if size > self._left.nbytes:
            raise ProtocolError(f"{size} bytes of payload are due, the landing has {self._left.nbytes}")
        if size:
            copy_parts([self._left[:size]], parts)
            self._left = self._left[size:]


class Landings:
    """Of one client. Thread-safe."""

    def __init__(self, transport: Transport):
        self._transport = transport
        try:
            self._agent = Agent()
        except Broken as error:
            raise ConfigError(f"NIXL does not start here: {error}") from None
        self._changed = threading.Condition()
        self._idle: list[Landing] = []
        self._lost: list[Landing] = []
        self._out = 0
        self._closed = False

    def check(self, run: Run, until: float) -> None:
        """Raises ServiceUnavailable if the node does not offer NIXL."""
        try:
            with self.lent(run, until):
                pass
        except Late:
            raise ServiceUnavailable(f"{self._transport.where}: the service did not answer in time") from None

    @contextmanager
    def lent(self, run: Run, until: float) -> Iterator[Landing | None]:
        """A landing that this run of the node knows, for one question; None if too many are lost. It is lost itself
        if it is not `settled` afterwards. Raises Late, and what the service raised."""
        self._recover(run, until)
        landing = self._take(until)
        try:
            if landing is not None:
                self._introduce(landing, run, until)
            yield landing
        finally:
            if landing is not None:
                self._give(landing)

    def _take(self, until: float) -> Landing | None:
        with self._changed:
            while not self._idle:
                if self._out < limits.nixl_landing_regions_max and len(self._lost) < limits.nixl_lost_regions_max:
                    self._idle.append(self._make())
                elif not self._out:
                    return None
                elif not self._changed.wait(max(0.0, until - time.monotonic())):
                    raise Late
            self._out += 1
            return self._idle.pop()

    def _make(self) -> Landing:
        try:
            return Landing(self._agent)
        except Broken as error:
            raise ServiceUnavailable(f"NIXL takes no memory here: {error}") from None

    def _give(self, landing: Landing) -> None:
        with self._changed:
            self._out -= 1
            if self._closed and not landing.settled:
                _ABANDONED.append(landing)
            elif not self._closed:
                (self._idle if landing.settled else self._lost).append(landing)
            self._changed.notify()

    def _introduce(self, landing: Landing, run: Run, until: float) -> None:
        def offer(number: int) -> m.Message:
            return m.Region(number, "nixl", _BYTES, landing.about, landing.start)

        if landing.run is not run:
            landing.number = self._transport.ask(run, offer, until).number
            landing.run = run

    def _recover(self, run: Run, until: float) -> None:
        """Offer what is lost again."""
        while self._lost:
            with self._changed:
                if not self._lost:
                    return
                landing = self._lost.pop(0)
                landing.run = None
            try:
                self._introduce(landing, run, until)
                landing.settled = True
            except ServiceBusy:
                return
            finally:
                with self._changed:
                    (self._idle if landing.settled else self._lost).append(landing)
                    self._changed.notify()

    def close(self) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                _ABANDONED.extend(self._lost)
                self._agent.close()
                self._idle.clear()


class NixlKeyspace(DistantKeyspace):
    """Made by `RemoteStore.keyspace`."""

    _get_bytes_max = _BYTES

    @contextmanager
    def _landing(self, call: Call, until: float) -> Iterator[Landing | None]:
        if self.layout.block_bytes > _BYTES:
            yield None
            return
        with self._store.landings.lent(call.run, until) as landing:
            yield landing

    def _get(
        self, call: Call, keys: KeyArray, part: list[int], blocks: list[Parts], deadline: float | None,
        report: ReadReport, todo: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        until = by(deadline)
        with self._landing(call, until) as landing:
            if landing is None:
                super()._get(call, keys, part, blocks, deadline, report, todo)
                return
            names, left_s = keys[part].tobytes(), call.until - time.monotonic()
            landing.settled = False
            with self._payload(call) as (stream, number):
                question = m.Get(number, call.space, names, max(0.0, left_s), landing.number)
                stream.send(m.encode_question(question), until=call.until)
                answer = self._expect(stream.receive(until)[0], number, m.Sent)
            if len(answer.statuses) != len(part) or not answer.last:
                raise ProtocolError(f"{self._store.where}: an answer about blocks that were not asked for")
            self._take(Landed(landing.view), answer, part, blocks, report, until)
            todo[part] = False
            landing.settled = BlockStatus.LATE not in answer.statuses

    def _put(
        self, call: Call, keys: KeyArray, part: list[int], payload: Parts, terms: Terms, until: float,
        report: WriteReport, landing: int = 0,
    ) -> None:  # fmt: skip
        with self._landing(call, until) as lent:
            if lent is None:
                super()._put(call, keys, part, payload, terms, until, report)
                return
            size = len(part) * self.layout.block_bytes
            copy_parts(payload, [lent.view[:size]])
            lent.settled = False
            super()._put(call, keys, part, [], terms, until, report, lent.number)
            lent.settled = not (report.statuses[part] == WriteStatus.LATE).any()
