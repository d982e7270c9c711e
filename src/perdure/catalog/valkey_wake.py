"""News of what others publish and release, from the shard channels of a Valkey Cluster.

Contract
- One thread listens on the primary of each channel's slot; through a replica news came 38 ms late instead of below 1.
- News is a hint. While a channel cannot be listened to, and after that once, everybody who waits is told to look: so
  nothing is missed for longer than `limits.cluster_poll_s`, also where a connection broke or a slot has moved.
- A node that says nothing, not even to a ping, is left for the one that serves its slots by then.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from perdure import limits
from perdure.catalog.valkey_cluster import Cluster
from perdure.catalog.valkey_link import Link, Node
from perdure.errors import CatalogError

Channels = dict[bytes, tuple[int, bool]]
"""Name -> its slot, and whether its messages are fingerprints (else the scope of a lease)."""

_SILENCE_S = 3 * limits.cluster_poll_s


class _Ear:
    """A connection that listens."""

    def __init__(self, node: Node):
        self.node, self.link = node, node.connect()
        self.asked: set[bytes] = set()
        self.heard_at = time.monotonic()


class Watcher:
    """Wakes waiters until it is closed. Uses the map of slots of `cluster`, and connections of its own."""

    def __init__(
        self,
        cluster: Cluster,
        channels: Channels,
        notify: Callable[[Iterable[int | bytes]], None],
        wake_all: Callable[[], None],
    ):
        """notify: wake who waits for these fingerprints or scopes; wake_all: whoever waits for anything."""
        self._cluster, self._channels = cluster, channels
        self._notify, self._wake_all = notify, wake_all
        self._ears: dict[Node, _Ear] = {}
        self._heard: set[bytes] = set()  # channels that are listened to
        self._bell, self._ring = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stop = threading.Event()
        self.ready = threading.Event()  # every channel has been listened to
        self._thread = threading.Thread(target=self._run, name="perdure-valkey-wake", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. In a forked child, where the thread is not, nothing happens."""
        if self._stop.is_set() or not self._thread.is_alive():
            return
        self._stop.set()
        os.write(self._ring, b".")
        self._thread.join()
        os.close(self._bell)
        os.close(self._ring)

    def _run(self) -> None:
        deaf = True
        while not self._stop.is_set():
            try:
                self._subscribe()
                self._listen(limits.cluster_poll_s)
            except CatalogError:  # it does not let us in: whoever asks it is told
                self._stop.wait(limits.cluster_poll_s)
            whole = len(self._heard) == len(self._channels)
            if deaf or not whole:
                self._wake_all()
            if whole:
                self.ready.set()
            deaf = not whole
        for ear in list(self._ears.values()):
            self._drop(ear)

    def _subscribe(self) -> None:
        """Ask each slot's primary for the channels that it is not being asked for yet; ping those who are silent."""
        names = list(self._channels)
        slots = [self._channels[name][0] for name in names]
        owners = dict(zip(names, self._cluster.owners(slots, time.monotonic() + limits.cluster_poll_s), strict=True))
        now = time.monotonic()
        for ear in list(self._ears.values()):
            if now - ear.heard_at > _SILENCE_S:
                ear.node.failed()
                self._drop(ear)
            elif any(owners[name] is not ear.node for name in ear.asked):
                self._drop(ear)
        wanted: dict[Node, list[bytes]] = {}
        for name, node in owners.items():
            if node is not None and not (node in self._ears and name in self._ears[node].asked):
                wanted.setdefault(node, []).append(name)
        for node, missing in wanted.items():
            if node in self._ears or node.usable(now):
                self._ask(node, missing)
        for ear in list(self._ears.values()):
            if ear.node not in wanted:
                self._send(ear, [("PING",)])

    def _ask(self, node: Node, names: list[bytes]) -> None:
        try:
            ear = self._ears.get(node) or _Ear(node)
        except OSError:
            node.failed()
            return
        self._ears[node] = ear
        ear.asked.update(names)
        self._send(ear, [("SSUBSCRIBE", name) for name in names])  # one each: their slots differ

    def _send(self, ear: _Ear, commands: list[Any]) -> None:
        kept = ear.link.replies
        try:
            ear.link.ask(commands)
        except OSError:
            self._broke(ear)
        ear.link.replies = kept

    def _listen(self, wait_s: float) -> None:
        """Pass on what comes, for so long, or until a connection has to be made anew."""
        until = time.monotonic() + wait_s
        while not self._stop.is_set() and (left := until - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self._bell, select.POLLIN)
            ears = {ear.link.socket.fileno(): ear for ear in self._ears.values()}
            for descriptor, ear in ears.items():
                waits = bool(ear.link.out) or not ear.link.connected
                poll.register(descriptor, select.POLLIN | (select.POLLOUT if waits else 0))
            for descriptor, events in poll.poll(left * 1000):
                if descriptor in ears and not self._hear(ears[descriptor], events):
                    return

    def _hear(self, ear: _Ear, events: int) -> bool:
        """False if this connection is over, or no longer has a channel it had."""
        link: Link = ear.link
        try:
            link.step(events)
        except OSError:
            self._broke(ear)
            return False
        replies, link.replies = link.replies, []
        if replies:
            ear.heard_at = time.monotonic()
            ear.node.answered()
        stays = True
        for reply in replies:
            kind = reply[0] if isinstance(reply, list) else b""
            if kind == b"smessage":
                self._tell(reply[1], reply[2])
            elif kind == b"ssubscribe":
                self._heard.add(reply[1])
            elif kind == b"sunsubscribe" or isinstance(reply, Exception):  # the slot has moved
                stays = False
        if not stays:
            self._cluster.doubt()
            self._drop(ear)
        return stays

    def _tell(self, channel: bytes, message: bytes) -> None:
        if channel not in self._channels:
            return
        if self._channels[channel][1]:
            self._notify(np.frombuffer(message[: len(message) // 8 * 8], "<u8").tolist())
        else:
            self._notify([message])

    def _broke(self, ear: _Ear) -> None:
        ear.node.failed()
        self._drop(ear)

    def _drop(self, ear: _Ear) -> None:
        self._heard -= ear.asked
        self._ears.pop(ear.node, None)
        ear.link.close()
