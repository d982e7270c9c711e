"""A client's connections to a service, whatever they are made of (`Channel`): a Unix socket beside it, or TCP.

Contract
- `ask` sends one question and waits for its answer until the deadline; then it raises `Late`, and the connection is put
  aside until its answer has come: only then is the memory that the question named free again (`settle`).
- Questions and payload have connections of their own: a lookup never waits behind the bytes of a block.
- A service that has ended is noticed at once by the thread that listens on the first connection; what was mapped from
  it is dropped, the next call connects anew, within its own deadline. Answers of one run never mix with another's.
- After fork() the child's copy is unusable and says so.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from perdure import limits
from perdure.errors import ProtocolError, ServiceBusy, ServiceUnavailable, StoreClosed
from perdure.io.shared import closing
from perdure.service import messages as m
from perdure.service.fields import raise_failure


class Late(Exception):
    """The answer did not come by the deadline."""


class Channel(Protocol):
    """One connection, used by one thread at a time. `until`: a reading of time.monotonic(), or infinity."""

    def send(self, message: bytes, fds: Sequence[int] = (), *, until: float = math.inf) -> None:
        """Raises OSError, TimeoutError among them."""

    def receive(self, until: float) -> tuple[bytes, list[int]]:
        """One message and the descriptors beside it, which are the caller's to close; empty at the end of the
        connection. Raises OSError, TimeoutError among them, and ProtocolError."""

    def ready(self) -> bool:
        """Whether `receive` would not wait."""

    def usable(self) -> bool:
        """False if it is known to have ended, although nobody has said anything."""

    def shutdown(self) -> None:
        """Let whoever waits on it see its end."""

    def close(self) -> None: ...


class Run:
    """One run of the service, as this client knows it: token, connections, and what belongs to it alone."""

    def __init__(self, main: Channel, welcome: m.Welcome):
        self.main, self.welcome = main, welcome
        self.idle: tuple[list[Channel], list[Channel]] = ([], [])  # for questions, for payload
        self.aside: list[tuple[Channel, int, Callable[[Any], None]]] = []
        self.ended = threading.Event()

    def channels(self) -> list[Channel]:
        return [self.main, *self.idle[0], *self.idle[1], *(channel for channel, _, _ in self.aside)]


class Transport:
    """Thread-safe. connect: makes a connection by a moment, or raises ServiceUnavailable, TimeoutError. where: the
    address, for messages. `messages`: questions sent so far. `on_retired`: told the tenant whose chunks are to be
    unmapped."""

    def __init__(self, connect: Callable[[float], Channel], where: str, name: str, wait_s: float):
        self._channel, self.where, self._name = connect, where, name
        self.messages = 0
        self.on_retired: Callable[[bytes], None] = lambda tenant_id: None
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._closed: str | None = None
        self._run: Run | None = None
        self._run = self._connect(time.monotonic() + wait_s, limits.hello_wait_s)
        _transports.add(self)

    # --- runs
    def run(self, deadline: float) -> Run:
        """The run that is up, connected to if need be. Raises ServiceUnavailable, StoreClosed."""
        while True:
            if self._closed is not None:
                raise StoreClosed(self._closed)
            run = self._run
            if run is not None and not run.ended.is_set():
                if run.main.usable():
                    return run
                self._end(run)
            if not self._connecting.acquire(timeout=max(0.0, min(deadline - time.monotonic(), 3600.0))):
                raise ServiceUnavailable(f"{self.where}: the service ended and did not come back in time")
            try:
                if self._run is run:
                    self._run = self._connect(deadline)
            except ServiceBusy as error:  # to a call, a service that has no room for this client is not there
                raise ServiceUnavailable(str(error)) from error
            finally:
                self._connecting.release()

    def _connect(self, deadline: float, patience_s: float = 0.0) -> Run:
        """patience_s: how long a service that listens may take to answer, at least."""
        while True:
            until = max(deadline, time.monotonic() + patience_s)
            try:
                channel = self._channel(until)
                break
            except TimeoutError:
                raise ServiceUnavailable(f"{self.where}: the service does not answer") from None
            except ServiceUnavailable:
                if deadline - time.monotonic() <= limits.reconnect_wait_s:
                    raise
                time.sleep(limits.reconnect_wait_s)
        try:
            answer = self._greet(channel, until)
            if isinstance(answer, m.Failed):
                raise_failure(answer)
            if not isinstance(answer, m.Welcome):
                raise ProtocolError(f"{self.where}: the service did not welcome us ({type(answer).__name__})")
        except (Late, TimeoutError):
            channel.close()
            raise ServiceUnavailable(f"{self.where}: the service does not answer") from None
        except OSError as error:
            channel.close()
            raise ServiceUnavailable(f"{self.where}: {error}") from error
        except BaseException:
            channel.close()
            raise
        run = Run(channel, answer)
        threading.Thread(target=_listen, args=(weakref.ref(self), run), name="perdure-client", daemon=True).start()
        return run

    def _greet(self, channel: Channel, until: float) -> Any:
        """The answer to our hello, also of a service without room, which answers unasked and closes: the first look at
        the socket then says only that it was closed."""
        with suppress(BrokenPipeError, ConnectionResetError):
            channel.send(m.encode(m.Hello(0, limits.wire_version, self._name)), until=until)
        with suppress(ConnectionResetError):
            return self._receive(channel, 0, until, [])
        return self._receive(channel, 0, until, [])

    # --- calls
    def ask(
        self,
        run: Run,
        question: Callable[[int], m.Message],
        deadline: float,
        *,
        send_fds: list[int] | None = None,
        receive: Callable[[Any, list[int]], None] | None = None,
        settle: Callable[[Any], None] | None = None,
    ) -> Any:
        """The answer. receive: gets it with its descriptors, which are closed afterwards. settle: called once, unless
        the answer is returned, when the service can no longer touch what the question named: with the late or failed
        answer, or with None if there is none.

        Raises Late, ServiceUnavailable (the run has ended), and what the service raised."""
        settle = settle or _ignore
        number = self.number()
        message = m.encode_question(question(number))
        try:
            self.collect(run)
            channel = self.take(run, deadline)
        except BaseException:  # nothing was sent
            settle(None)
            raise
        fds: list[int] = []
        try:
            channel.send(message, send_fds or (), until=deadline)
            answer = self._receive(channel, number, deadline, fds)
        except OSError as error:
            channel.close()
            settle(None)
            raise ServiceUnavailable(f"{self.where}: the service ended ({error})") from error
        except BaseException:  # late, or interrupted: the service may still be at work on it
            with self._lock:
                run.aside.append((channel, number, settle))
            raise
        self.give(run, channel)
        try:
            with closing(fds):
                if isinstance(answer, m.Failed):
                    raise_failure(answer)
                if receive is not None:
                    receive(answer, fds)
        except BaseException:
            settle(answer)
            raise
        return answer

    def number(self) -> int:
        """Of the next question."""
        self.messages += 1
        return next(self._ids)

    def tell(self, run: Run, message: m.Message) -> None:
        """Send what needs no answer; nothing happens if the run has ended."""
        with suppress(OSError, ServiceUnavailable, Late):
            until = time.monotonic() + limits.send_wait_s
            channel = self.take(run, until)
            try:
                self.messages += 1
                channel.send(m.encode(message), until=until)
            except OSError:
                channel.close()
                raise
            self.give(run, channel)

    def take(self, run: Run, deadline: float, *, payload: bool = False) -> Channel:
        """A connection for one question; to be given back, or closed. Raises ServiceUnavailable, Late."""
        with self._lock:
            if run.ended.is_set():
                raise ServiceUnavailable(f"{self.where}: the service ended")
            idle = run.idle[payload]
        while idle:
            with suppress(IndexError):
                channel = idle.pop()
                if channel.usable():
                    return channel
                channel.close()
        channel = self._open(deadline)
        try:
            channel.send(m.encode(m.Join(0, run.welcome.client)), until=deadline)
            answer = self._receive(channel, 0, deadline, [])
            if isinstance(answer, m.Failed):
                raise_failure(answer)
        except BaseException as error:
            channel.close()
            if isinstance(error, TimeoutError):
                raise Late from None
            if isinstance(error, OSError):
                raise ServiceUnavailable(f"{self.where}: {error}") from error
            raise
        return channel

    def _open(self, deadline: float) -> Channel:
        try:
            return self._channel(deadline)
        except TimeoutError:
            raise Late from None

    def give(self, run: Run, channel: Channel, *, payload: bool = False) -> None:
        with self._lock:
            kept = not run.ended.is_set() and len(run.idle[payload]) < limits.connections_idle_max
            if kept:
                run.idle[payload].append(channel)
        if not kept:
            channel.close()

    def _receive(self, channel: Channel, number: int, deadline: float, fds: list[int]) -> Any:
        while True:
            try:
                data, received = channel.receive(deadline)
            except TimeoutError:
                raise Late from None
            fds += received
            if not data:
                raise ConnectionResetError("end of the connection")
            answer = m.decode_answer(data)
            if answer.id == number or (isinstance(answer, m.Failed) and answer.id == 0):
                return answer

    def collect(self, run: Run) -> None:
        """Look for answers that came too late: what their questions named is free now."""
        if not run.aside:
            return
        with self._lock:
            aside, run.aside = run.aside, []
        for channel, number, settle in aside:
            if not channel.ready():
                with self._lock:
                    run.aside.append((channel, number, settle))
                continue
            fds: list[int] = []
            answer = None
            try:
                with closing(fds):
                    answer = self._receive(channel, number, time.monotonic(), fds)
                self.give(run, channel)
            except (OSError, ProtocolError, Late):
                channel.close()
            settle(answer)

    def __del__(self) -> None:
        if hasattr(self, "_run"):
            self.close()

    # --- the end
    def close(self) -> None:
        if self._closed is None:
            self._closed = "this client was closed; connect again"
            run = self._run
            if run is not None:
                self._end(run)

    def _end(self, run: Run) -> None:
        run.ended.set()
        with self._lock:
            every = run.channels()
            aside, run.aside, run.idle = run.aside, [], ([], [])
        for channel in every:
            channel.shutdown()
            channel.close()
        for _, _, settle in aside:
            settle(None)

    def _forked(self) -> None:
        if self._closed is None:
            self._closed = "connected by the parent process; connect again in this one"
            run = self._run
            if run is not None:
                for channel in run.channels():
                    channel.close()


def _ignore(answer: Any) -> None:
    """Nothing to settle."""


def _listen(owner: weakref.ref[Transport], run: Run) -> None:
    """Wait on a run's first connection for its end, and for news."""
    while True:
        try:
            data, fds = run.main.receive(math.inf)
        except (OSError, ProtocolError):
            data, fds = b"", []
        for fd in fds:
            os.close(fd)
        transport = owner()
        if transport is None or not data:
            break
        with suppress(ProtocolError):
            news = m.decode_answer(data)
            if isinstance(news, m.Retired):
                transport.on_retired(news.tenant_id)
        del transport
    if transport is not None:
        transport._end(run)  # noqa: SLF001 (same module)


_transports: weakref.WeakSet[Transport] = weakref.WeakSet()


def _after_fork() -> None:
    for transport in list(_transports):
        transport._forked()  # noqa: SLF001


os.register_at_fork(after_in_child=_after_fork)
