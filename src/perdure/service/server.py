"""The service's sockets: who is connected, and threads that take a question, do it and answer, without a hand-over.

Contract
- All threads wait on one epoll set; the one that is woken reads, does and answers itself. A connection is armed again
  after its answer, so it has one question at a time; who does not take answers is cut off.
- Questions that may wait for the disk take at most `limits.service_data_threads_max` threads. The others queue by
  `turns`, at most one per connection: a writer is not read from while its question waits (back-pressure).
- A question that waits for someone else's publish or lease is parked (`parking`): it has its connection, but no thread.
- A client ends with the connection of its hello, or with its process (pidfd), also where a child keeps the socket.
- A message that is not the protocol ends its connection. Nothing a client sends ends the service.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from perdure import limits
from perdure.errors import AccessDenied, PerdureError, ProtocolError, ServiceBusy
from perdure.governance.principals import Principal
from perdure.observe.metrics import Metrics
from perdure.pool.dram import DramPool
from perdure.pool.memory import SharedChunk
from perdure.service import counting, sockets
from perdure.service import messages as m
from perdure.service.domains import Domains
from perdure.service.doors import Connection, Door, Doors
from perdure.service.fields import failure
from perdure.service.guard import Guard
from perdure.service.node import Node
from perdure.service.parking import Parking, Ticket
from perdure.service.peers import Peer, memory_status
from perdure.service.reloading import Reloading
from perdure.service.sockets import address_text
from perdure.service.streams import TlsFiles
from perdure.service.turns import Turns, even
from perdure.service.verbs import READING, WRITING, Verbs, Waiting, fetch_bytes
from perdure.store import Store
from perdure.viewing import leave_limbo

_LOG = logging.getLogger("perdure.service")
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # descriptors or kernel memory
_ONCE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
_ENDED = select.EPOLLRDHUP | select.EPOLLONESHOT  # of a connection whose question is parked


def shared_pool(budget_bytes: int, *, huge: bool = False) -> DramPool:
    """The DRAM tier of a service: chunks that engines map. For the `pool` seam of `perdure.open`."""
    return DramPool(budget_bytes, memory=lambda nbytes: SharedChunk(nbytes, huge=huge), shared=True)


_Work = tuple[Connection, Any, list[int], float]
"""Connection, question, its descriptors, and when it came."""


class Server:
    """Serves one open store. Binds at once, answers after `start`."""

    def __init__(
        self,
        store: Store,
        *,
        socket: Path,
        clients_max: int = limits.connections_max,
        listen: tuple[str, int] | None = None,
        tls: TlsFiles | None = None,
        guard: Guard | None = None,
    ):
        self._store, self.core = store, store.core
        self.path, self.guard = Path(socket), guard
        self.node = None if listen is None else Node(self, *listen, tls)
        try:
            self._doors = Doors(self.path, None if guard is None else guard.principals())
        except BaseException:
            if self.node is not None:
                self.node.stop(0.0)
            raise
        self._clients_max = clients_max
        self.boot = os.urandom(16)
        self.domains = Domains(self.core)
        self.core.pool.observe(self.domains)
        self.core.presence.mirror_to(self.domains)
        self.verbs = Verbs(store, self.domains, self.status, guard)
        self.parking = Parking(self.core)
        self._epoll = select.epoll()
        self._stop = threading.Event()
        self._waker, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()
        self._connections: dict[int, Connection] = {}
        self._pids: dict[int, Connection] = {}
        self._peers: dict[bytes, Peer] = {}
        self._busy = 0
        self._waiting: Turns[_Work] = Turns(even if guard is None else guard.shares.weight)
        self._threads = [
            threading.Thread(target=self._work, name=f"perdure-serve-{number}", daemon=True)
            for number in range(limits.service_threads)
        ] + [threading.Thread(target=target, name=f"perdure-{name}", daemon=True)
             for name, target in (("beat", self._beat), ("prefault", self._prefault))]  # fmt: skip
        self.reload: Callable[[], Any] = dict  # the policy anew, where there is one
        if guard is not None:
            self.reload = guard.reload = Reloading(guard, self._doors, self._epoll, self._peers, self._cut)
        self._started = False
        self.metrics: Metrics | None = None  # set before `start`

    # --- life
    def start(self) -> None:
        self._epoll.register(self._waker, select.EPOLLIN)
        self._doors.register(self._epoll)
        self._started = True
        for thread in self._threads:
            thread.start()
        self.parking.start()
        if self.node is not None:
            self.node.start()

    def stop(self, drain_s: float = 10.0) -> None:
        """No new questions; those that are running end, within `drain_s`; then all clients are cut off."""
        if self._stop.is_set():
            return
        self._doors.unlink()
        self._stop.set()
        os.write(self._woken, b"x")
        give_up = time.monotonic() + drain_s
        if self.node is not None:
            self.node.stop(drain_s)
        if self._started:
            for thread in self._threads:
                thread.join(max(0.0, give_up - time.monotonic()))
        self.parking.stop()
        for peer in list(self._peers.values()):
            peer.end()
        if self.guard is not None:
            self.guard.denials.flush(now=True)
        self.verbs.mover.close()
        for connection in list(self._connections.values()):
            self._close(connection)
        self._doors.close()
        self._epoll.close()
        os.close(self._waker)
        os.close(self._woken)
        self.core.pool.observe(None)
        self.domains.close()

    def status(self) -> dict[str, Any]:
        """JSON-able: the boot id, clients, memory, and the store's own status."""
        clients = [peer.status() for peer in list(self._peers.values())]
        return {
            "boot": self.boot.hex(),
            "pid": os.getpid(),
            "socket": str(self.path),
            "listen": "" if self.node is None else address_text(*self.node.address),
            "clients": clients,
            "connections": self._open(),
            "queue": len(self._waiting),
            "waiting": len(self.parking) + (0 if self.node is None else self.node.waiting),
            "memory": memory_status(self.core, clients),
            "store": self._store.status(),
        }  # fmt: skip

    # --- threads
    def _work(self) -> None:
        while not self._stop.is_set():
            for fd, _ in self._epoll.poll(1.0, 1):
                try:
                    self._woken_by(fd)
                except Exception:  # noqa: BLE001 (the other clients are still to be served)
                    _LOG.exception("a connection could not be served")

    def _woken_by(self, fd: int) -> None:
        door = self._doors.get(fd)
        if door is not None:
            self._accept(door)
            return
        ended, connection = self._pids.get(fd), self._connections.get(fd)
        if ended is not None:
            self._close(ended)
        elif connection is not None:  # else it was closed by another thread
            self._serve(connection)

    def _beat(self) -> None:
        """Clocks, leases, rings, grants and greetings that never came."""
        while not self._stop.wait(limits.beat_s):
            try:
                self.core.leases.expire()
                self.domains.beat()
                self.domains.settle()
                if self.guard is not None:
                    self.guard.denials.flush()
                leave_limbo(self.core)
                for peer in list(self._peers.values()):
                    peer.drain()
                    peer.expire()
                late = time.monotonic() - limits.hello_wait_s
                for connection in list(self._connections.values()):
                    if connection.peer is None and connection.birth < late:
                        self._close(connection)
            except Exception:  # noqa: BLE001 (the beat goes on, whatever one client has done)
                _LOG.exception("the beat failed")

    def _prefault(self) -> None:
        """Make the pool's memory before it is needed: a page fault costs a request more than a copy."""
        while not self._stop.wait(0.0 if self.core.pool.prefault() else 0.5):
            pass

    # --- connections
    def _open(self) -> int:
        return len(self._connections) + (0 if self.node is None else self.node.connections)

    def room(self) -> bool:
        return self._open() < self._clients_max

    def _accept(self, door: Door) -> None:
        with suppress(OSError):
            try:
                sock, _ = door.sock.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:  # who waits is taken when some are free again; meanwhile no spinning
                    self._stop.wait(limits.beat_s)
                raise
            refused = self._refused(door, sock)
            if refused is not None:
                with suppress(OSError):
                    sockets.send(sock, m.encode(failure(0, refused)), [], socket.MSG_DONTWAIT)
                sock.close()
            else:
                connection = Connection(sock, door.principal)
                sock.setblocking(False)
                with self._lock:  # another thread may be walking over them
                    self._connections[sock.fileno()] = connection
                self._epoll.register(sock.fileno(), _ONCE)
        self._doors.arm(self._epoll, door)

    def _refused(self, door: Door, sock: socket.socket) -> PerdureError | None:
        try:
            door.check(sock)
        except AccessDenied as error:
            if self.guard is not None:
                self.guard.turned_away(sockets.credentials(sock), error)
            return error
        return None if self.room() else ServiceBusy(f"{self._clients_max} connections are open; raise --clients-max")

    def _close(self, connection: Connection) -> None:
        with self._lock:
            if connection.closed:
                return
            connection.closed = True
            self._connections.pop(connection.sock.fileno(), None)
            if connection.pidfd >= 0:
                self._pids.pop(connection.pidfd, None)
            peer = connection.peer if connection.main else None
            if connection.peer is not None and not connection.main:
                connection.peer.connections -= 1
            others = [one for one in self._connections.values() if peer is not None and one.peer is peer]
        if connection.parked is not None:
            self.parking.drop(connection.parked)
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
        connection.sock.close()
        if connection.pidfd >= 0:
            os.close(connection.pidfd)
        for other in others:
            self._close(other)
        if peer is not None:
            self.dismiss(peer)

    def _arm(self, connection: Connection, events: int = _ONCE) -> None:
        with suppress(OSError, ValueError):
            self._epoll.modify(connection.sock.fileno(), events)

    # --- questions
    def _serve(self, connection: Connection) -> None:
        fds: list[int] = []
        try:
            data, fds = sockets.receive(connection.sock, socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionResetError
            question = m.decode_question(data)
            if connection.peer is not None:
                self._dispatch(connection, question, fds)
                return
            self._greet(connection, question)
            self._arm(connection)
        except BlockingIOError:
            self._arm(connection)
        except PerdureError as error:
            self._send(connection, failure(0, error), [])
            self._close(connection)
        except OSError:
            self._close(connection)
        for fd in fds:
            os.close(fd)

    def _greet(self, connection: Connection, question: Any) -> None:
        pid, pidfd = 0, -1
        if isinstance(question, m.Hello):
            pid, _, pidfd = sockets.peer_of(connection.sock)
        try:
            peer, answer = self.greet(question, pid, principal=connection.principal)
        except BaseException:
            if pidfd >= 0:
                os.close(pidfd)
            raise
        main = isinstance(question, m.Hello)
        with self._lock:
            gone = connection.closed  # it took too long to say it
            if not gone:
                connection.peer, connection.main, connection.pidfd = peer, main, pidfd
                if pidfd >= 0:
                    self._pids[pidfd] = connection
        if gone:
            if pidfd >= 0:
                os.close(pidfd)
            (self.dismiss if main else self.left)(peer)
            return
        if main:
            peer.notify = lambda data: sockets.send(connection.sock, data, [], socket.MSG_DONTWAIT)
        if pidfd >= 0:
            self._epoll.register(pidfd, select.EPOLLIN | select.EPOLLONESHOT)
        self._send(connection, answer, [])

    def greet(
        self, question: Any, pid: int = 0, *, remote: str = "", principal: Principal | None = None
    ) -> tuple[Peer, m.Message]:
        """The client that a new connection belongs to, and what to tell it. Raises ProtocolError, ServiceBusy."""
        if isinstance(question, m.Hello):
            if question.version != limits.wire_version:
                raise ProtocolError(
                    f"the client speaks version {question.version}, this service {limits.wire_version}; "
                    "install the same version of Perdure on both sides"
                )
            peer = Peer(self.core, self.domains, pid, question.name[:64], remote=remote)
            peer.principal = principal
            with self._lock:
                self._peers[peer.token] = peer
            return peer, m.Welcome(
                question.id, limits.wire_version, peer.token, self.boot, fetch_bytes(self._store), os.getpid()
            )
        if not isinstance(question, m.Join):
            raise ProtocolError("the first message must be Hello or Join")
        with self._lock:
            joined = self._peers.get(question.client)
            if joined is None or bool(joined.remote) != bool(remote) or joined.principal != principal:
                raise ServiceBusy("no such client")
            if joined.connections >= limits.connections_per_client_max:
                raise ServiceBusy(f"{limits.connections_per_client_max} connections are open; use fewer at a time")
            joined.connections += 1
        return joined, m.Joined(question.id)

    def dismiss(self, peer: Peer) -> None:
        """End a client and what it holds."""
        with self._lock:
            self._peers.pop(peer.token, None)
        peer.end()

    def _cut(self, peer: Peer) -> None:
        for connection in [one for one in list(self._connections.values()) if one.main and one.peer is peer]:
            self._close(connection)
        self.dismiss(peer)

    def left(self, peer: Peer) -> None:
        """A connection that had joined is closed."""
        with self._lock:
            peer.connections -= 1

    def _dispatch(self, connection: Connection, question: Any, fds: list[int]) -> None:
        work: _Work = (connection, question, fds, time.monotonic())
        if not isinstance(question, READING + WRITING):
            self._answer(*work)
            return
        with self._lock:
            if self._busy >= limits.service_data_threads_max:
                assert connection.peer is not None
                tenant, cost = connection.peer.turn_of(question)
                self._waiting.put(tenant, isinstance(question, WRITING), work, cost)
                return
            self._busy += 1
        while True:
            self._answer(*work)
            with self._lock:
                following = self._waiting.take()
                if following is None:
                    self._busy -= 1
                    return
                work = following

    def _answer(self, connection: Connection, question: Any, fds: list[int], since: float) -> None:
        """Never raises."""
        peer = connection.peer
        assert peer is not None
        answer: m.Message | Waiting
        out: list[int] = []
        try:
            answer, out = self.verbs.answer(peer, question, fds)
        except Exception as error:  # noqa: BLE001 (a question must not end the service)
            if not isinstance(error, PerdureError):
                _LOG.exception("a question failed")
            answer = failure(question.id, error)
        if isinstance(answer, Waiting):
            self._arm(connection, _ENDED)  # before it is parked: its answer arms it again
            self._park(connection, question, answer, since)
        else:
            self._reply(connection, question, answer, out, since)
        for fd in (*fds, *out):
            os.close(fd)

    def _park(self, connection: Connection, question: Any, waiting: Waiting, since: float) -> None:
        reply = lambda answer: self._reply(connection, question, answer, [], since)  # noqa: E731
        ticket = connection.parked = Ticket(self.parking, question.id, waiting, reply)
        self.parking.park(ticket)
        if connection.closed:  # before it could see that something is parked
            self.parking.drop(ticket)

    def _reply(self, connection: Connection, question: Any, answer: m.Message, out: list[int], since: float) -> None:
        """Never raises."""
        peer = connection.peer
        assert peer is not None
        asked = not isinstance(question, m.Release) or question.tell
        if asked and not self._send(connection, answer, out):
            self.verbs.undo(peer, answer)
        self.note(peer, question, answer, time.monotonic() - since)
        self._arm(connection)

    def note(self, peer: Peer, question: Any, answer: m.Message, seconds: float) -> None:
        """Count a question that has been answered: nobody waits for this. Never raises."""
        try:
            if self.metrics is not None:
                counting.count(self.metrics, peer, question, answer, seconds)
        except Exception:  # noqa: BLE001 (metrics must not end the service)
            _LOG.exception("a question could not be counted")

    def _send(self, connection: Connection, answer: m.Message, fds: list[int]) -> bool:
        """False, and the connection is closed, if it does not take its answers, or is gone."""
        data = m.encode(answer)
        if len(data) > limits.message_bytes_max:
            data, fds = m.encode(failure(answer.id, ServiceBusy("the answer is longer than a message; ask less"))), []
        try:
            sockets.send(connection.sock, data, fds, socket.MSG_DONTWAIT)
        except OSError:
            self._close(connection)
            return False
        return True
