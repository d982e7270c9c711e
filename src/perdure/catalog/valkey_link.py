"""Connections to the nodes of a Valkey Cluster: questions to many nodes at once, all answers by one deadline.

Contract
- `exchange` sends to every node before it waits for any, and returns by the deadline, whatever the nodes do: sockets
  never block, and connecting counts as waiting.
- A connection whose answers were not all read is closed: an answer can never be taken for that of another question.
- A node that did not answer is left alone for a moment, twice as long each time, at most
  `limits.cluster_retry_s_max`: meanwhile calls fail at once instead of waiting for it. One call at a time finds out
  whether it is back.
- Names of hosts are looked up when a connection is made; that lookup is the system's and has no deadline of ours.
"""

from __future__ import annotations

import errno
import hashlib
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import libvalkey

from perdure import limits
from perdure.errors import CatalogError

Address = tuple[str, int]
Command = tuple[bytes | str | int, ...]
ReplyError = libvalkey.ReplyError
_RECEIVE_BYTES = 1 << 18


class Script:
    """A server-side script. Its keys must all be in the slot of its unit."""

    def __init__(self, source: str):
        self.source = source
        self.digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    def call(self, keys: Sequence[bytes], *arguments: bytes | str | int) -> Command:
        return ("EVALSHA", self.digest, len(keys), *keys, *arguments)


class Link:
    """One connection, used by one exchange at a time."""

    __slots__ = ("connected", "expected", "fresh", "greeting", "node", "out", "reader", "replies", "socket")

    def __init__(self, node: Node, greeting: Sequence[Command]):
        host, port = node.address
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.node = node
        self.socket = socket.socket(family, kind, protocol)
        self.reader = libvalkey.Reader()
        self.greeting = len(greeting)  # answers to be read before any other
        self.out = memoryview(b"".join(map(libvalkey.pack_command, greeting)))
        self.expected, self.replies = 0, list[Any]()
        self.fresh, self.connected = True, False
        try:
            self.socket.setblocking(False)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            problem = self.socket.connect_ex(address)
            if problem not in (0, errno.EINPROGRESS):
                raise OSError(problem, "connect")
        except BaseException:
            self.socket.close()
            raise

    def ask(self, commands: Sequence[Command]) -> None:
        self.out = memoryview(bytes(self.out) + b"".join(map(libvalkey.pack_command, commands)))
        self.expected, self.replies = len(commands), []
        if self.connected:
            self.send()

    def send(self) -> None:
        while self.out:
            try:
                sent = self.socket.send(self.out)
            except BlockingIOError:
                return
            self.out = self.out[sent:]

    def step(self, events: int) -> bool:
        """Do what can be done without waiting; True when all answers are there. Raises OSError if it broke."""
        if not self.connected:
            problem = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if problem:
                raise OSError(problem, "connect")
            self.connected = True
        if self.out:
            self.send()
        if events & ~select.POLLOUT:
            self._receive()
        return len(self.replies) == self.expected

    def _receive(self) -> None:
        try:
            got = self.socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not got:
            raise ConnectionResetError("the node closed the connection")
        self.reader.feed(got)
        try:
            while (reply := self.reader.gets()) is not False:
                if self.greeting:
                    self.greeting -= 1
                    if isinstance(reply, ReplyError):
                        raise CatalogError(f"catalog: {self.node}: {reply}")
                else:
                    self.replies.append(reply)
        except libvalkey.ProtocolError as problem:
            raise ConnectionResetError(f"not the Valkey protocol: {problem}") from None

    def close(self) -> None:
        self.socket.close()


class Node:
    """One server by its address, and its idle connections. Thread-safe."""

    def __init__(self, address: Address, greeting: Sequence[Command] = ()):
        self.address = address
        self._greeting = greeting
        self._idle: list[Link] = []
        self._lock = threading.Lock()
        self._failures = 0
        self._retry_at = 0.0
        self._retired = False

    def usable(self, now: float) -> bool:
        """Whether to ask it now. While it is in doubt, one caller each time is told so and finds out."""
        if not self._failures:
            return True
        with self._lock:
            if now < self._retry_at:
                return False
            self._wait(now)
            return True

    @property
    def in_doubt(self) -> bool:
        return self._failures > 0

    @property
    def retry_at(self) -> float:
        return self._retry_at if self._failures else 0.0

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            self._wait(time.monotonic())

    def _wait(self, now: float) -> None:
        pause = limits.cluster_retry_s_min * 2 ** min(max(self._failures - 1, 0), 16)
        self._retry_at = now + min(pause, limits.cluster_retry_s_max)

    def take(self) -> Link:
        """An idle connection, else a new one. Raises OSError."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self.connect()

    def connect(self) -> Link:
        """A connection that is not kept among the idle ones. Raises OSError."""
        return Link(self, self._greeting)

    def answered(self) -> None:
        self._failures = 0

    def give_back(self, link: Link) -> None:
        link.fresh = False
        self.answered()
        with self._lock:
            if not self._retired and len(self._idle) < limits.cluster_connections_idle_max:
                self._idle.append(link)
                return
        link.close()

    def drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def retire(self) -> None:
        """Keep no connection from now on."""
        self._retired = True
        self.drop_idle()

    def __str__(self) -> str:
        return "{}:{}".format(*self.address)


def exchange(
    asked: dict[Node, list[Command]], deadline: float, *, enough: int | None = None
) -> dict[Node, list[Any] | None]:
    """The replies of each node, None where they did not all come by `deadline` (monotonic). With `enough`, returns as
    soon as so many nodes have answered. A command may have been carried out though its answer is missing."""
    answers: dict[Node, list[Any] | None] = dict.fromkeys(asked)
    patient = enough is None and deadline - time.monotonic() >= limits.cluster_judge_s_min
    links: dict[int, Link] = {}
    poll = select.poll()
    try:
        for node, commands in asked.items():
            _begin(node, commands, links, poll)
        while links and (enough is None or sum(one is not None for one in answers.values()) < enough):
            left = deadline - time.monotonic()
            ready = poll.poll(max(0.0, left) * 1000)
            if not ready and left <= 0:
                break
            for descriptor, events in ready:
                link = links[descriptor]
                try:
                    done = link.step(events)
                except OSError:
                    _drop(links, poll, descriptor)
                    _broke(link)
                    continue
                if done:
                    poll.unregister(descriptor)
                    del links[descriptor]
                    answers[link.node] = link.replies
                    link.node.give_back(link)
                elif not link.out:
                    poll.modify(descriptor, select.POLLIN)
    finally:
        for descriptor, link in list(links.items()):
            _drop(links, poll, descriptor)
            if patient:  # it had time to answer
                link.node.failed()
                link.node.drop_idle()
    return answers


def _begin(node: Node, commands: Sequence[Command], links: dict[int, Link], poll: select.poll) -> None:
    try:
        link = node.take()
    except OSError:  # also of a name that is not known
        node.failed()
        return
    try:
        link.ask(commands)
    except OSError:
        link.close()
        _broke(link)
        return
    links[link.socket.fileno()] = link
    poll.register(link.socket, select.POLLIN | (select.POLLOUT if link.out or not link.connected else 0))


def _broke(link: Link) -> None:
    """Of one that was idle that says nothing about the node: the server may have been restarted since."""
    if link.fresh:
        link.node.failed()
    else:
        link.node.drop_idle()


def _drop(links: dict[int, Link], poll: select.poll, descriptor: int) -> None:
    poll.unregister(descriptor)
    links.pop(descriptor).close()
