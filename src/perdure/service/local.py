"""The shared-memory transport: a client's connections to the service beside it.

Contract
- `ask` sends one question and waits for its answer until the deadline; then it raises `Late`, and the connection is put
  aside until its answer has come: only then is the memory that the question named free again (`settle`).
- A service that has ended is noticed at once by the thread that listens on the first connection; what was mapped from
  it is dropped, the next call connects anew, within its own deadline. Answers of one run never mix with another's.
- After fork() the child's copy is unusable and says so.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from perdure import limits
from perdure.errors import ProtocolError, ServiceBusy, ServiceUnavailable, StoreClosed
from perdure.io.shared import closing
from perdure.service import messages as m
from perdure.service import sockets


class Late(Exception):
    """The answer did not come by the deadline."""


class Run:
    """One run of the service, as this client knows it: token, connections, and what belongs to it alone."""

    def __init__(self, main: socket.socket, welcome: m.Welcome):
        self.main, self.welcome = main, welcome
        self.idle: list[socket.socket] = []
        self.aside: list[tuple[socket.socket, int, Callable[[Any], None]]] = []
        self.ended = threading.Event()


class LocalTransport:
    """Thread-safe. `messages`: questions sent so far. `on_retired`: told the tenant whose chunks are to be unmapped."""

    def __init__(self, path: Path, name: str, wait_s: float):
        self.path, self._name = path, name
        self.messages = 0
        self.on_retired: Callable[[bytes], None] = lambda tenant_id: None
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._closed: str | None = None
        self._run: Run | None = None
        self._welcomed = False
        self.run(time.monotonic() + wait_s)
        _transports.add(self)

    # --- runs
    def run(self, deadline: float) -> Run:
        """The run that is up, connected to if need be. Raises ServiceUnavailable, StoreClosed; the first time, what the
        service refused us for."""
        while True:
            if self._closed is not None:
                raise StoreClosed(self._closed)
            run = self._run
            if run is not None and not run.ended.is_set():
                return run
            if not self._connecting.acquire(timeout=max(0.0, min(deadline - time.monotonic(), 3600.0))):
                raise ServiceUnavailable(f"{self.path}: the service ended and did not come back in time")
            try:
                if self._run is run:
                    self._run = self._connect(deadline)
                    self._welcomed = True
            except ServiceBusy as error:  # of a call it is that the service is not there; of `connect`, that it is full
                if self._welcomed:
                    raise ServiceUnavailable(str(error)) from error
                raise
            finally:
                self._connecting.release()

    def _connect(self, deadline: float) -> Run:
        while True:
            left = deadline - time.monotonic()
            try:
                sock = sockets.connect_unix(self.path, max(0.001, left))
                break
            except ServiceUnavailable:
                if left <= limits.reconnect_wait_s:
                    raise
                time.sleep(limits.reconnect_wait_s)
        try:
            answer = self._greet(sock, max(deadline, time.monotonic() + limits.reconnect_wait_s))
            if isinstance(answer, m.Failed):
                m.raise_failure(answer)
            if not isinstance(answer, m.Welcome):
                raise ProtocolError(f"{self.path}: the service did not welcome us ({type(answer).__name__})")
        except OSError as error:
            sock.close()
            raise ServiceUnavailable(f"{self.path}: {error}") from error
        except Late:
            sock.close()
            raise ServiceUnavailable(f"{self.path}: the service does not answer") from None
        except BaseException:
            sock.close()
            raise
        run = Run(sock, answer)
        threading.Thread(target=_listen, args=(weakref.ref(self), run), name="perdure-client", daemon=True).start()
        return run

    def _greet(self, sock: socket.socket, deadline: float) -> Any:
        """The answer to our hello, also of a service without room, which answers unasked and closes: the first look at
        the socket then says only that it was closed."""
        with suppress(BrokenPipeError, ConnectionResetError):
            sockets.send(sock, m.encode(m.Hello(0, limits.wire_version, self._name)), [])
        with suppress(ConnectionResetError):
            return self._receive(sock, 0, deadline, [])
        return self._receive(sock, 0, deadline, [])

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
        number = next(self._ids)
        message = m.encode(question(number))
        try:
            self.collect(run)
            sock = self._take(run, deadline)
        except BaseException:  # nothing was sent
            settle(None)
            raise
        fds: list[int] = []
        try:
            self.messages += 1
            sockets.send(sock, message, send_fds or [])
            answer = self._receive(sock, number, deadline, fds)
        except OSError as error:
            sock.close()
            settle(None)
            raise ServiceUnavailable(f"{self.path}: the service ended ({error})") from error
        except BaseException:  # late, or interrupted: the service may still be at work on it
            with self._lock:
                run.aside.append((sock, number, settle))
            raise
        with self._lock:
            run.idle.append(sock)
        try:
            with closing(fds):
                if isinstance(answer, m.Failed):
                    m.raise_failure(answer)
                if receive is not None:
                    receive(answer, fds)
        except BaseException:
            settle(answer)
            raise
        return answer

    def tell(self, run: Run, message: m.Message) -> None:
        """Send what needs no answer; nothing happens if the run has ended."""
        with suppress(OSError, ServiceUnavailable, Late):
            sock = self._take(run, time.monotonic() + limits.send_wait_s)
            try:
                self.messages += 1
                sockets.send(sock, m.encode(message), [])
            except OSError:
                sock.close()
                raise
            with self._lock:
                run.idle.append(sock)

    def _take(self, run: Run, deadline: float) -> socket.socket:
        with self._lock:
            if run.ended.is_set():
                raise ServiceUnavailable(f"{self.path}: the service ended")
            if run.idle:
                return run.idle.pop()
        sock = sockets.connect_unix(self.path, max(0.001, deadline - time.monotonic()))
        try:
            sockets.send(sock, m.encode(m.Join(0, run.welcome.client)), [])
            answer = self._receive(sock, 0, deadline, [])
            if isinstance(answer, m.Failed):
                m.raise_failure(answer)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                raise ServiceUnavailable(f"{self.path}: {error}") from error
            raise
        return sock

    def _receive(self, sock: socket.socket, number: int, deadline: float, fds: list[int]) -> Any:
        while True:
            left = deadline - time.monotonic()
            sock.settimeout(max(left, 0.0) or 0.0005)
            try:
                data, received = sockets.receive(sock)
            except (TimeoutError, BlockingIOError):
                raise Late from None
            finally:
                sock.settimeout(None)
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
        for sock, number, settle in aside:
            readable, _, _ = select.select([sock], [], [], 0)
            if not readable:
                with self._lock:
                    run.aside.append((sock, number, settle))
                continue
            fds: list[int] = []
            answer = None
            try:
                with closing(fds):
                    answer = self._receive(sock, number, time.monotonic(), fds)
                with self._lock:
                    run.idle.append(sock)
            except (OSError, ProtocolError, Late):
                sock.close()
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
            every = [run.main, *run.idle, *(sock for sock, _, _ in run.aside)]
            aside, run.aside, run.idle = run.aside, [], []
        for sock in every:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for _, _, settle in aside:
            settle(None)

    def _forked(self) -> None:
        if self._closed is None:
            self._closed = "connected by the parent process; connect again in this one"
            run = self._run
            if run is not None:
                for sock in (run.main, *run.idle, *(sock for sock, _, _ in run.aside)):
                    sock.close()


def _ignore(answer: Any) -> None:
    """Nothing to settle."""


def _listen(owner: weakref.ref[LocalTransport], run: Run) -> None:
    """Wait on a run's first connection for its end, and for news."""
    while True:
        try:
            data, fds = sockets.receive(run.main)
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


_transports: weakref.WeakSet[LocalTransport] = weakref.WeakSet()


def _after_fork() -> None:
    for transport in list(_transports):
        transport._forked()  # noqa: SLF001


os.register_at_fork(after_in_child=_after_fork)
