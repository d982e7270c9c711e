"""`Engine` over Linux native AIO: reads of O_DIRECT files go to the kernel from the caller's own thread.

A hop to a thread and back costs as much as a 64 KiB read here (60 us against 53), so the caller submits, sleeps in
`io_getevents`, refills the queue, and only then hands completed requests to `done`: verification overlaps I/O.

Contract
- The kernel takes only what it can start without blocking (RWF_NOWAIT). Everything else goes to the fallback's threads:
  writes, buffered files, siblings, memory that is not aligned, file systems without RWF_NOWAIT, exhausted contexts.
- Places of the gate bound the transfers of all threads and of the fallback together.
- Tolerated: short transfers (continued), refused submissions, a hung device: what is in flight at the deadline becomes
  LATE, and its context goes to one reaper thread, which settles it, gives the places back and reuses the context.
- Never: memory that the kernel may still write is let go; an exception that leaves a transfer unwatched.
- Not guaranteed: that `done` of one request does not delay the others of its batch (they share the caller's thread).
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from perdure import limits
from perdure.errors import InvalidArgument, StoreClosed
from perdure.io.aio_context import AioContext, available
from perdure.io.api import Engine, IOClass, IOState, Request, ShortTransfer
from perdure.io.engine import Batch, Done, Hooks, ThreadEngine, check_requests, settle_late
from perdure.io.gate import DeviceGate

# Threads succeed with these, or know the error: would block, misaligned after all, no RWF_NOWAIT, a signal.
_REROUTED: Final = (errno.EAGAIN, errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP, errno.EINTR)
_REAP_S: Final = (0.001, 0.05)  # how often the reaper looks: first, and at most


class _Lane:
    """The waiting reads of one device, last one first, and the places of the gate this call holds but does not use."""

    __slots__ = ("device", "places", "waiting")

    def __init__(self, device: int) -> None:
        self.device = device
        self.waiting: list[Request] = []
        self.places = 0


class _Run:
    """One call of `AioEngine.run` for the requests that native AIO may take."""

    __slots__ = ("context", "deadline", "ended", "engine", "gate", "hooks", "io_class", "lanes", "rerouted")

    def __init__(
        self, engine: AioEngine, context: AioContext, hooks: Hooks, io_class: IOClass, deadline: float | None
    ) -> None:
        self.engine = engine
        self.gate = engine.gate
        self.context = context
        self.hooks = hooks
        self.io_class = io_class
        self.deadline = deadline
        self.lanes: dict[int, _Lane] = {}
        self.ended: list[Request] = []
        self.rerouted: list[Request] = []

    def execute(self, requests: Sequence[Request], reroute: Callable[[list[Request]], None]) -> None:
        """Returns when all have ended, were handed to `reroute`, or the deadline has passed (`abandon` must follow)."""
        for request in reversed(requests):
            device = request.file.device
            lane = self.lanes.get(device)
            if lane is None:
                lane = self.lanes[device] = _Lane(device)
            lane.waiting.append(request)
        context = self.context
        in_time = self.deadline is None or self.deadline > time.monotonic()
        if in_time:
            self._fill()
        while in_time and (context.inflight or self._wait_for_place()):
            timeout_s = None
            if self.deadline is not None:
                timeout_s = self.deadline - time.monotonic()
                if timeout_s <= 0.0:  # the last look: what has come in by now is in time
                    in_time = False
                    timeout_s = 0.0
            if context.inflight:
                self._sort(context.harvest(timeout_s))
            if in_time:
                self._fill()
            else:
                self._release_places()
            if self.rerouted:
                rerouted, self.rerouted = self.rerouted, []
                reroute(rerouted)
            ended, self.ended = self.ended, []
            for request in ended:
                self.hooks.end(request)

    def abandon(self) -> None:
        """End what is left as LATE, and hand the context on: to the reaper while the kernel uses it, else for reuse."""
        context = self.context
        for lane in self.lanes.values():
            for request in lane.waiting:
                self._late(request)
        self._release_places()
        for request in (*self.rerouted, *(self._unload(slot) for slot in context.loaded)):
            self._late(request)
        for request in self.ended:  # only if an exception came in between
            self.hooks.end(request)
        for request in context.busy():
            request.state = IOState.LATE
        context.loaded.clear()
        if context.inflight:
            self.engine.reaper.park(context)
        else:
            self.engine.recycle(context)

    def _late(self, request: Request) -> None:
        request.state = IOState.LATE
        self.hooks.end(request)

    def _unload(self, slot: int) -> Request:
        request = self.context.requests[slot]
        assert request is not None
        self.context.clear(slot)
        self.gate.release(request.file.device)
        return request

    def _wait_for_place(self) -> bool:
        """With nothing in flight: queue at the gate. False when nothing is left to do, or the deadline came first."""
        if self.ended or self.rerouted:
            return True
        lane = next((lane for lane in self.lanes.values() if lane.waiting), None)
        if lane is None:
            return False
        if not self.gate.acquire(lane.device, self.io_class, self.deadline):
            return False
        lane.places += 1
        self._fill()
        return True

    def _fill(self) -> None:
        """Submit as many waiting reads as there are places, and give back the places that are not needed."""
        context = self.context
        for lane in self.lanes.values():
            waiting = lane.waiting
            while waiting and context.free:
                if lane.places:
                    lane.places -= 1
                elif not self.gate.try_acquire(lane.device):
                    break
                request = waiting.pop()
                if not context.load(request):
                    self.rerouted.append(request)
                    lane.places += 1
        if context.loaded:
            self._submit()
        self._release_places()

    def _release_places(self) -> None:
        for lane in self.lanes.values():
            while lane.places:
                lane.places -= 1
                self.gate.release(lane.device)

    def _submit(self) -> None:
        context = self.context
        while context.loaded:
            code = context.submit()
            if not code:
                continue
            if code == errno.EAGAIN:  # the kernel is out of memory or of slots: later, or by threads
                for slot in context.loaded:
                    request = self._unload(slot)
                    if context.inflight:
                        self.lanes[request.file.device].waiting.append(request)
                    else:
                        self.rerouted.append(request)
                context.loaded.clear()
            else:
                self._failed(self._unload(context.loaded.pop(0)), code)

    def _sort(self, events: Iterable[tuple[int, int]]) -> None:
        """What became of the completed slots: ended, to be continued, or to be tried by threads."""
        context = self.context
        for slot, result in events:
            request = context.requests[slot]
            assert request is not None
            moved = context.moved[slot] + max(result, 0)
            context.clear(slot)
            if moved == request.nbytes:
                request.state = IOState.DONE
                self.ended.append(request)
            elif result > 0:
                if context.load(request, moved):
                    continue  # with the place it has
                self.rerouted.append(request)
            elif result == 0:
                self._fail(request, ShortTransfer(request.file.path, request.offset, request.nbytes, moved))
            else:
                self._failed(request, -result)
            device = request.file.device
            if self.gate.must_pass_on(device, self.io_class):
                self.gate.release(device)
            else:
                self.lanes[device].places += 1

    def _failed(self, request: Request, code: int) -> None:
        if code in _REROUTED:
            if code == errno.EOPNOTSUPP:
                self.engine.refuse(request.file.device)
            self.rerouted.append(request)
        else:
            self._fail(request, OSError(code, os.strerror(code), request.file.path))

    def _fail(self, request: Request, error: OSError) -> None:
        request.error = error
        request.state = IOState.FAILED
        self.ended.append(request)


class _Reaper:
    """Watches contexts whose callers have left, in one thread that lives as long as there are any."""

    def __init__(self, engine: AioEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._parked: list[AioContext] = []
        self._running = False
        self.unsettled = 0

    def park(self, context: AioContext) -> None:
        with self._lock:
            self.unsettled += context.inflight
            self._parked.append(context)
            if not self._running:
                with contextlib.suppress(RuntimeError):  # no thread to be had: the next park tries again
                    threading.Thread(target=self._work, name="perdure-io-reaper", daemon=True).start()
                    self._running = True

    def _work(self) -> None:
        pause_s = _REAP_S[0]
        while True:
            with self._lock:
                parked = list(self._parked)
                if not parked:
                    self._running = False
                    return
            settled = sum(map(self._reap, parked))
            pause_s = _REAP_S[0] if settled else min(2 * pause_s, _REAP_S[1])
            time.sleep(pause_s)

    def _reap(self, context: AioContext) -> int:
        events = context.harvest(0.0)
        for slot, _ in events:
            request = context.requests[slot]
            assert request is not None
            context.clear(slot)
            self._engine.gate.release(request.file.device)
            settle_late(request)
            with self._lock:
                self.unsettled -= 1
        if not context.inflight:
            with self._lock:
                self._parked.remove(context)
            self._engine.recycle(context)
        return len(events)


class AioEngine:
    """`Engine` that reads O_DIRECT files by native AIO and leaves everything else to `fallback`, which shares its gate.

    Create one per store; raises nothing if AIO is unavailable (then all goes to the fallback). `new_context` is a seam
    for tests of what the kernel seldom does.
    """

    def __init__(
        self,
        gate: DeviceGate | None = None,
        fallback: ThreadEngine | None = None,
        *,
        new_context: Callable[[], AioContext] = AioContext,
    ) -> None:
        if gate is None:
            gate = fallback.gate if fallback is not None else DeviceGate()
        self.gate = gate
        self.fallback = fallback if fallback is not None else ThreadEngine(gate)
        if self.fallback.gate is not gate:
            raise InvalidArgument("AioEngine: the fallback must share the gate, or the in-flight cap would not hold")
        self.reaper = _Reaper(self)
        self._new_context = new_context
        self._contexts: deque[AioContext] = deque()
        self._refused: frozenset[int] = frozenset()  # devices without RWF_NOWAIT
        self._closed = False
        self._pid = os.getpid()

    @staticmethod
    def available() -> bool:
        """Whether this kernel, architecture and sandbox allow native AIO."""
        return available()

    def run(
        self,
        requests: Sequence[Request],
        *,
        io_class: IOClass,
        deadline: float | None = None,
        done: Done | None = None,
    ) -> None:
        if not requests:
            return
        if self._closed or self._pid != os.getpid():
            raise StoreClosed("the I/O engine was closed, or belongs to the process that forked this one")
        check_requests(requests)
        if len(requests) == 1 and self._run_single(requests[0], deadline, done):
            return
        native: list[Request] = []
        others: list[Request] = []
        for request in requests:
            (native if self._suits(request) else others).append(request)
        context = self._take_context() if native else None
        if context is None:
            self.fallback.finish(self.fallback.begin(requests, io_class=io_class, deadline=deadline, done=done))
            return
        begun: list[Batch] = []

        def reroute(rerouted: list[Request]) -> None:
            begun.append(self.fallback.begin(rerouted, io_class=io_class, deadline=deadline, done=done))

        hooks = Hooks(done)
        run = _Run(self, context, hooks, io_class, deadline)
        try:
            if others:
                reroute(others)
            run.execute(native, reroute)
        finally:
            run.abandon()
            for batch in begun:
                self.fallback.wait(batch)
        for each in (hooks, *begun):
            if each.error is not None:
                raise each.error

    def unsettled(self) -> int:
        return self.reaper.unsettled + self.fallback.unsettled()

    def close(self) -> None:
        """No new batches; kernel contexts in use are destroyed when their calls end."""
        self._closed = True
        while self._contexts:
            self._contexts.pop().destroy()
        self.fallback.close()

    def refuse(self, device: int) -> None:
        """Remember that the file system of `device` cannot promise not to block a submission."""
        self._refused |= {device}

    def recycle(self, context: AioContext) -> None:
        if self._closed or len(self._contexts) >= limits.aio_contexts_idle_max:
            context.destroy()
        else:
            self._contexts.append(context)

    def _suits(self, request: Request) -> bool:
        file = request.file
        return (
            file.native
            and file.direct
            and not request.write
            and request.nbytes > 0
            and file.device not in self._refused
        )

    def _run_single(self, request: Request, deadline: float | None, done: Done | None) -> bool:
        """The commonest call, one read of a device with a free place, without queues (they cost 10 us after a sleep).

        False: it could not be done this simply (or failed, or came short), and nothing has been decided.
        """
        if not self._suits(request) or (deadline is not None and deadline <= time.monotonic()):
            return False
        if not self.gate.try_acquire(request.file.device):
            return False
        context = self._take_context()
        events: list[tuple[int, int]] = []
        try:
            if context is None or not context.load(request) or context.submit():
                return False
            while not events:
                timeout_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                events = context.harvest(timeout_s)
                if not events and timeout_s == 0.0:
                    request.state = IOState.LATE
                    return True
        finally:
            if context is not None and context.inflight:
                request.state = IOState.LATE
                self.reaper.park(context)
            else:
                self.gate.release(request.file.device)
                if context is not None:
                    context.reset()
                    self.recycle(context)
        if events[0][1] != request.nbytes:
            return False
        request.state = IOState.DONE
        hooks = Hooks(done)
        hooks.end(request)
        if hooks.error is not None:
            raise hooks.error
        return True

    def _take_context(self) -> AioContext | None:
        try:
            return self._contexts.pop()
        except IndexError:
            pass
        if not available():
            return None
        try:
            return self._new_context()
        except OSError:  # EAGAIN: fs.aio-max-nr is used up
            return None


def default_engine(gate: DeviceGate | None = None) -> Engine:
    """The fastest engine this machine has. One per store: engines with separate gates know nothing of each other."""
    return AioEngine(gate) if AioEngine.available() else ThreadEngine(gate)
