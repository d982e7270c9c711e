"""The engine of threads: moves data with `preadv`/`pwritev` for any file on any platform.

Contract
- A request gets its place from the `DeviceGate` before it gets a thread, so the order of the gate is the order of
  execution, and a saturated device holds no threads.
- Tolerated: short transfers (continued), EINTR and EAGAIN (retried), a device that hangs: its requests end LATE at
  their deadline, and what an expired batch still had queued is dropped, never executed. Each hung transfer keeps one
  thread and one place; when all threads hang, later batches end LATE and nothing piles up.
- Never: a request that was executed twice, `done` after LATE, a lock held across I/O.
- Not guaranteed: anything in a forked child but StoreClosed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from perdure import limits
from perdure.errors import BufferMismatch, InvalidArgument, StoreClosed
from perdure.io.api import Buffer, IOClass, IOState, Request, ShortTransfer
from perdure.io.gate import DeviceGate, Ticket, remaining_s

_RETRY_S = 0.001  # EAGAIN from a file that should block: rare, but must not spin
_CLOSE_S = 0.1

Done = Callable[[Request], None]


def check_requests(requests: Sequence[Request]) -> None:
    """Refuse a batch that cannot be carried out, before its first byte moves.

    InvalidArgument: more buffers than IOV_MAX, a negative offset, a request that ran before. BufferMismatch: memory
    that is not contiguous bytes, or read-only memory to read into.
    """
    for request in requests:
        if len(request.buffers) > limits.io_vectors_max:
            raise InvalidArgument(
                f"{request.file.path}: {len(request.buffers)} buffers in one request, at most {limits.io_vectors_max}"
            )
        if request.offset < 0:
            raise InvalidArgument(f"{request.file.path}: offset {request.offset} is negative")
        if request.state is not IOState.PENDING:
            raise InvalidArgument(f"{request.file.path}: a request runs once, this one is {request.state.name}")
        for buffer in request.buffers:
            if buffer.readonly and not request.write:
                raise BufferMismatch(f"{request.file.path}: cannot read into read-only memory")
            if buffer.itemsize != 1 or not buffer.c_contiguous:
                raise BufferMismatch(f"{request.file.path}: buffers must be contiguous and of format 'B'")


def rest_of(buffers: Sequence[Buffer], moved: int) -> list[Buffer]:
    """What remains of `buffers` after their first `moved` bytes."""
    for index, buffer in enumerate(buffers):
        if moved < buffer.nbytes:
            return [buffer[moved:], *buffers[index + 1 :]]
        moved -= buffer.nbytes
    return []


def transfer(request: Request, abandoned: Callable[[], bool] = lambda: False) -> None:
    """Move every byte of a request in the calling thread; raises OSError. Stops between system calls if abandoned."""
    if request.prepare is not None:
        request.prepare()
    file, offset, buffers = request.file, request.offset, request.buffers
    move = file.pwritev if request.write else file.preadv
    wanted = request.nbytes
    moved = 0
    while moved < wanted:
        try:
            count = move(buffers, offset + moved)
        except (BlockingIOError, InterruptedError):
            if abandoned():
                raise
            time.sleep(_RETRY_S)
            continue
        if count <= 0:
            raise ShortTransfer(file.path, offset, wanted, moved)
        moved += count
        if moved < wanted:
            if abandoned():
                raise ShortTransfer(file.path, offset, wanted, moved)
            buffers = rest_of(buffers, count)


class _Phase:
    QUEUED = 0  # waits for a place of its device, or for a thread
    RUNNING = 1
    FINISHING = 2  # ended in time: `done` and `settle` are being called
    LATE = 3


class _Job(Ticket):
    __slots__ = ("batch", "engine", "phase", "request")

    def __init__(self, engine: ThreadEngine, batch: Batch, request: Request, io_class: IOClass) -> None:
        super().__init__(request.file.device, io_class)
        self.engine = engine
        self.batch = batch
        self.request = request
        self.phase = _Phase.QUEUED

    def granted(self) -> bool:
        return self.engine.make_ready(self)

    def abandoned(self) -> bool:
        return self.phase == _Phase.LATE


class Hooks:
    """Calls a batch's `done` and `settle`, and keeps the first exception of them for the caller of `run`."""

    __slots__ = ("done", "error")

    def __init__(self, done: Done | None) -> None:
        self.done = done
        self.error: BaseException | None = None

    def end(self, request: Request) -> None:
        """The request has its final state: tell the caller."""
        if self.done is not None and request.state is not IOState.LATE:
            self._call(self.done, request)
        if request.settle is not None:
            self._call(request.settle)

    def _call(self, hook: Callable[..., None], *arguments: Request) -> None:
        try:
            hook(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised by run() in the caller's thread
            if self.error is None:
                self.error = error


class Batch(Hooks):
    """A batch on its way through a ThreadEngine; `ThreadEngine.finish` waits for it."""

    __slots__ = ("deadline", "jobs", "latch", "lock", "pending")

    def __init__(self, deadline: float | None, done: Done | None, pending: int) -> None:
        super().__init__(done)
        self.deadline = deadline
        self.pending = pending
        self.jobs: list[_Job] = []
        self.lock = threading.Lock()
        self.latch = threading.Lock()  # a one-shot event, a third of the price of threading.Event
        if pending:
            self.latch.acquire()

    def ended(self, count: int = 1) -> None:
        with self.lock:
            self.pending -= count
            if not self.pending:
                self.latch.release()


class ThreadEngine:
    """`Engine` over blocking `preadv`/`pwritev` in daemon threads, started as they are needed.

    `done` and `settle` run on these threads; they must not call `run` of the same engine, which could wait for itself.
    """

    def __init__(self, gate: DeviceGate | None = None, threads: int = limits.io_threads_max) -> None:
        self.gate = gate if gate is not None else DeviceGate()
        self._threads_max = threads
        self._workers: set[threading.Thread] = set()
        self._idle = 0  # threads that wait and were not yet woken
        self._ready: tuple[OrderedDict[_Job, None], ...] = tuple(OrderedDict() for _ in IOClass)
        self._wake = threading.Condition(threading.Lock())
        self._unsettled = 0
        self._closed = False
        self._pid = os.getpid()

    def run(
        self,
        requests: Sequence[Request],
        *,
        io_class: IOClass,
        deadline: float | None = None,
        done: Done | None = None,
    ) -> None:
        if requests:
            check_requests(requests)
            self.finish(self.begin(requests, io_class=io_class, deadline=deadline, done=done))

    def begin(
        self,
        requests: Sequence[Request],
        *,
        io_class: IOClass,
        deadline: float | None = None,
        done: Done | None = None,
    ) -> Batch:
        """Queue a batch of checked requests; `finish` must follow."""
        if self._closed or self._pid != os.getpid():
            raise StoreClosed("the I/O engine was closed, or belongs to the process that forked this one")
        with self._wake:
            if not self._workers:  # here, where a failure to start one can still be raised
                self._start_thread()
        batch = Batch(deadline, done, len(requests))
        batch.jobs = [_Job(self, batch, request, io_class) for request in requests]
        try:
            if deadline is None or deadline > time.monotonic():  # else `wait` ends them all as LATE
                for job in batch.jobs:
                    self.gate.submit(job)
        except BaseException:
            self._expire(batch)
            raise
        return batch

    def finish(self, batch: Batch) -> None:
        """Wait until every request of the batch has ended; raises what `done` or `settle` raised first."""
        self.wait(batch)
        if batch.error is not None:
            raise batch.error

    def wait(self, batch: Batch) -> None:
        """As `finish`, but leaves `batch.error` to the caller."""
        try:
            if not batch.latch.acquire(timeout=remaining_s(batch.deadline)):
                self._expire(batch)
                batch.latch.acquire()  # for the calls of done() that have begun
        except BaseException:  # KeyboardInterrupt: what still runs must be LATE, or its memory would be taken for free
            self._expire(batch)
            raise
        batch.jobs = []  # jobs and batch refer to each other, and to the caller's memory

    def unsettled(self) -> int:
        return self._unsettled

    def close(self) -> None:
        """No new batches. Waits briefly for the threads to end; one in a hung transfer is left behind (a daemon)."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            self._idle = 0
            workers = list(self._workers)
        give_up = time.monotonic() + _CLOSE_S
        for thread in workers:
            if thread is not threading.current_thread() and self._pid == os.getpid():
                thread.join(max(give_up - time.monotonic(), 0.0))

    def make_ready(self, job: _Job) -> bool:
        """The gate's answer to a job: hand it to a thread. False if its batch expired meanwhile."""
        with self._wake:
            if job.phase == _Phase.LATE:
                return False
            self._ready[job.io_class][job] = None
            if self._idle:
                self._idle -= 1
                self._wake.notify()
            elif len(self._workers) < self._threads_max:
                with contextlib.suppress(RuntimeError):  # no more threads to be had: those that run get to it
                    self._start_thread()
        return True

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name="perdure-io", daemon=True)
        thread.start()
        self._workers.add(thread)

    def _next(self) -> _Job | None:
        with self._wake:
            while True:
                for queue in self._ready:
                    if queue:
                        return queue.popitem(last=False)[0]
                if self._closed:
                    self._workers.discard(threading.current_thread())
                    return None
                self._idle += 1
                self._wake.wait()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._carry_out(job)
            del job  # an idle thread must not keep a batch's memory and files alive

    def _carry_out(self, job: _Job) -> None:
        batch, request = job.batch, job.request
        with batch.lock:
            late = job.phase == _Phase.LATE
            if not late:
                job.phase = _Phase.RUNNING
        error: BaseException | None = None
        if not late:
            try:
                transfer(request, job.abandoned)
            except BaseException as raised:  # noqa: BLE001 - attached to the request, or raised by finish()
                error = raised
        self.gate.release(job.device)
        if late:  # dropped, and settled by _expire
            return
        with batch.lock:
            late = job.phase == _Phase.LATE
            if not late:
                job.phase = _Phase.FINISHING
        if late:
            self._settle_late(request)
            return
        if error is None:
            request.state = IOState.DONE
        else:
            if not isinstance(error, OSError):  # a bug in a File: the request fails, the caller sees the exception
                batch.error = batch.error or error
                error = OSError(errno.EIO, f"{request.file.path}: {error!r}")
            request.error = error
            request.state = IOState.FAILED
        batch.end(request)
        batch.ended()

    def _settle_late(self, request: Request) -> None:
        settle_late(request)
        with self._wake:
            self._unsettled -= 1

    def _expire(self, batch: Batch) -> None:
        """End what has not ended: queued jobs are dropped and settled here, running ones by their thread."""
        dropped: list[_Job] = []
        running = 0
        with batch.lock:
            for job in batch.jobs:
                if job.phase == _Phase.QUEUED:
                    dropped.append(job)
                elif job.phase == _Phase.RUNNING:
                    running += 1
                else:
                    continue
                job.phase = _Phase.LATE
                job.request.state = IOState.LATE
            with self._wake:
                self._unsettled += running
        for job in dropped:
            if not self.gate.withdraw(job) and self._unqueue(job):
                self.gate.release(job.device)
            batch.end(job.request)
        if dropped or running:
            batch.ended(len(dropped) + running)

    def _unqueue(self, job: _Job) -> bool:
        """Take a job from the threads. False if one has it already: that thread gives the place back."""
        with self._wake:
            queue = self._ready[job.io_class]
            if job not in queue:
                return False
            del queue[job]
            return True


def settle_late(request: Request) -> None:
    """Call `settle` where no caller waits any more: an exception goes to `threading.excepthook`, not up."""
    if request.settle is None:
        return
    try:
        request.settle()
    except BaseException as error:  # noqa: BLE001 - the thread serves others too
        threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))
