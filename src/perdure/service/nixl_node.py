"""The node's side of NIXL: blocks on their way into and out of memory that clients on other hosts have offered.

Contract
- The node alone starts transfers; it registers bounce buffers only, never the pool, and tells no client of them.
- Every transfer has a deadline. One that is late goes on by itself: its region is lost, its bounce buffer is not used
  again before NIXL says that it has ended. After `limits.stall_s` the connection to that client's agent is closed.
- A region is never used again after a transfer that did not end well. Its memory may be offered again, by the same
  client or its successor, when nothing touches it any more: until then the offer is refused, afterwards the old region
  is over, whoever may still ask for it.
- Offered only where the operator has chosen UCX's transports (UCX_TLS): see `nixl_agent` for whom that trusts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

from perdure import limits
from perdure.buffers import copy_parts
from perdure.errors import ConfigError, InvalidArgument, ProtocolError, ServiceBusy, ServiceUnavailable
from perdure.io.memory import address
from perdure.pool.dram import DramPool
from perdure.service import messages as m
from perdure.service.nixl_agent import Agent, Broken
from perdure.service.regions import LentRegion, Region

_POLL_S = (20e-6, 1e-3)  # at first, and at most
_SWEEP_S = 0.01


class Bounce:
    """A registered buffer of the node's."""

    def __init__(self, mover: Mover, memory: LentRegion):
        self._mover, self._memory = mover, memory
        self.view: memoryview = memory.memory.array.data
        self.start = address(self.view)

    def give_back(self) -> None:
        self._mover.give(self)

    def close(self) -> None:
        self.view = memoryview(b"")
        self._memory.close()


class _Known:
    """A client's agent, and how many regions are its."""

    def __init__(self, name: str):
        self.name, self.regions = name, 0


class _Unsettled(NamedTuple):
    transfer: Any
    far: Far
    bounce: Bounce
    give_up: float


class Far(Region):
    """Memory of a client on another host."""

    def __init__(self, mover: Mover, known: _Known, start: int, nbytes: int):
        super().__init__()
        self._mover, self.known, self.start, self.nbytes = mover, known, start, nbytes
        self.users = 0
        self.ended = self.lost = False

    def take(self, *_: Any, **__: Any) -> NoReturn:
        raise ProtocolError("this memory is on another host; ask with Get and Put")

    @contextmanager
    def used(self) -> Iterator[Far]:
        """Hold it for one question. Raises ServiceUnavailable if it is lost or over."""
        self._mover.enter(self)
        try:
            yield self
        finally:
            self._mover.leave(self)

    def write(self, parts: Sequence[memoryview], until: float) -> bool:
        """Whether these bytes, one after the other, were there by `until`. Raises ServiceUnavailable."""
        total = sum(part.nbytes for part in parts)
        if not total:
            return True
        if total > self.nbytes:
            raise ProtocolError(f"{total} bytes for a region of {self.nbytes}")
        bounce = self._mover.take(until)
        if bounce is None:
            return False
        try:
            copy_parts(parts, [bounce.view[:total]])
        except BaseException:
            bounce.give_back()
            raise
        done = self._mover.move("WRITE", self, bounce, total, until)
        if done:
            bounce.give_back()
        return done

    def read(self, nbytes: int, until: float) -> Bounce | None:
        """A buffer with the first bytes of the region, to be given back; None if late. Raises ServiceUnavailable."""
        if nbytes > self.nbytes:
            raise ProtocolError(f"{nbytes} bytes from a region of {self.nbytes}")
        bounce = self._mover.take(until)
        if bounce is None or not nbytes:
            return bounce
        return bounce if self._mover.move("READ", self, bounce, nbytes, until) else None

    def _let_go(self) -> None:
        self._mover.end(self)


class Mover:
    """One per service. Its agent is made for the first region that a client offers."""

    def __init__(self, pool: DramPool):
        self._pool = pool
        self._agent: Agent | None = None
        self._changed = threading.Condition()
        self._known: dict[str, _Known] = {}
        self._fars: dict[tuple[str, int], Far] = {}  # by agent and address
        self._bounces: list[Bounce] = []
        self._made = 0
        self._unsettled: list[_Unsettled] = []

    # --- regions
    def register(self, q: m.Region) -> Far:
        """Raises ServiceUnavailable where NIXL is not offered, InvalidArgument for what NIXL cannot read, ServiceBusy
        while a transfer may still touch the memory."""
        if not 0 < q.nbytes <= limits.frame_blocks_bytes_max or not 0 < q.start < 2**64 - q.nbytes:
            raise InvalidArgument(f"{q.nbytes} bytes at {q.start}: 1 to {limits.frame_blocks_bytes_max} can be offered")
        with self._changed:
            agent = self._made_agent()
            try:
                name = agent.meet(q.about)
            except Broken as error:
                raise InvalidArgument(f"about: not what a NIXL agent says of itself ({error})") from None
            known = self._known.setdefault(name, _Known(name))
            known.regions += 1
            far = Far(self, known, q.start, q.nbytes)
            self._sweep()
            old = self._fars.get((name, q.start))
            if old is not None and old.users:
                self._drop(far)
                raise ServiceBusy("a transfer may still touch this memory; offer it again later")
            self._fars[name, q.start] = far
            if old is not None:
                self.end(old)
        return far

    def _made_agent(self) -> Agent:
        if self._agent is None:
            if not os.environ.get("UCX_TLS"):
                raise ServiceUnavailable(
                    "this node does not offer NIXL: whoever reaches its fabric would be trusted; choose the transports "
                    "by setting UCX_TLS where `perdure serve` is started, or connect to tcp://HOST:PORT"
                )
            try:
                self._agent = Agent()
            except (ConfigError, Broken) as error:
                raise ServiceUnavailable(f"this node does not offer NIXL: {error}") from None
        return self._agent

    def enter(self, far: Far) -> None:
        with self._changed:
            self._sweep()
            if far.ended or far.lost:
                raise ServiceUnavailable("the region is over; offer its memory again")
            far.users += 1

    def leave(self, far: Far) -> None:
        with self._changed:
            far.users -= 1
            if far.ended and not far.users:
                self._drop(far)

    def end(self, far: Far) -> None:
        with self._changed:
            first, far.ended = not far.ended, True
            if first and not far.users:
                self._drop(far)

    def _drop(self, far: Far) -> None:
        if self._fars.get((far.known.name, far.start)) is far:
            del self._fars[far.known.name, far.start]
        far.known.regions -= 1
        if not far.known.regions:
            self._forget(far.known)

    def _forget(self, known: _Known) -> None:
        """Its other regions are lost with it: a new one makes the connection anew."""
        if self._agent is not None and self._known.get(known.name) is known:
            del self._known[known.name]
            with suppress(Broken):
                self._agent.forget(known.name)

    # --- bounce buffers
    def take(self, until: float) -> Bounce | None:
        """None if there is none by `until`. Raises ServiceBusy."""
        with self._changed:
            while True:
                self._sweep()
                if self._bounces:
                    return self._bounces.pop()
                if self._made < limits.nixl_bounce_regions_max:
                    return self._make()
                left = until - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(left, _SWEEP_S))

    def _make(self) -> Bounce:
        assert self._agent is not None
        bounce = Bounce(self, LentRegion(self._pool, "NIXL", limits.frame_blocks_bytes_max))
        try:
            self._agent.register(bounce.view)
        except Broken as error:
            bounce.close()
            raise ServiceUnavailable(f"NIXL takes no memory of the node's: {error}") from None
        self._made += 1
        return bounce

    def give(self, bounce: Bounce) -> None:
        with self._changed:
            if self._agent is None:
                bounce.close()
            else:
                self._bounces.append(bounce)
                self._changed.notify()

    # --- transfers
    def move(self, verb: str, far: Far, bounce: Bounce, nbytes: int, until: float) -> bool:
        """Whether it was done by `until`; if not, or on ServiceUnavailable, the bounce buffer is no more the caller's
        and the region is lost."""
        agent, transfer = self._agent, None
        try:
            if agent is None:
                raise Broken("the node is stopping")
            transfer = agent.start(verb, bounce.start, far.start, nbytes, far.known.name)
            pause, most = _POLL_S
            while not agent.done(transfer):
                if time.monotonic() >= until:
                    with self._changed:
                        far.lost, far.users = True, far.users + 1
                        give_up = time.monotonic() + limits.stall_s
                        self._unsettled.append(_Unsettled(transfer, far, bounce, give_up))
                    return False
                time.sleep(pause)
                pause = min(2 * pause, most)
            agent.release(transfer)
        except Broken as error:
            if agent is not None and transfer is not None:
                with suppress(Broken):
                    agent.release(transfer)
            with self._changed:
                far.lost = True
                self._forget(far.known)
            bounce.give_back()
            raise ServiceUnavailable(f"a {verb} by NIXL failed: {error}") from None
        return True

    def _sweep(self) -> None:
        """Look after late transfers. With the lock held."""
        agent, late, self._unsettled = self._agent, self._unsettled, []
        for one in late:
            with suppress(Broken):
                if agent is None:
                    continue
                if not agent.done(one.transfer):
                    if time.monotonic() < one.give_up:
                        self._unsettled.append(one)
                        continue
                    self._forget(one.far.known)
            with suppress(Broken):
                if agent is not None:
                    agent.release(one.transfer)
            one.bounce.give_back()
            self.leave(one.far)

    def close(self) -> None:
        with self._changed:
            agent, self._agent = self._agent, None
            late, self._unsettled = self._unsettled, []
            bounces, self._bounces = [*self._bounces, *(one.bounce for one in late)], []
        if agent is not None:
            for one in late:
                with suppress(Broken):
                    agent.release(one.transfer)
            agent.close()
        for bounce in bounces:
            bounce.close()
