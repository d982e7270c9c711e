"""The data node: the same store, for hosts that reach it by TCP (`perdure serve --listen HOST:PORT`).

Contract
- A thread per connection, which reads, does and answers itself, and waits where a question has to (unlike the Unix
  socket's). A host that stalls is cut off after `limits.stall_s`.
  At most `limits.transfers_inflight_max` of them hold blocks at a time; who gets no turn by its deadline is late.
- A `Get` is answered by frames of at most `limits.frame_blocks_bytes_max`: while one is on its way the next is read.
- A client ends with the connection of its hello; hosts that vanish are noticed by the kernel's keepalive.
- A client's questions may name memory that it has offered by NIXL (`nixl_node`): payload then goes there.
- Without TLS it binds loopback only: whoever reaches the port may ask for any tenant's blocks.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from perdure import limits
from perdure.errors import ConfigError, PerdureError, ProtocolError, ServiceBusy, ServiceUnavailable, StorePathError
from perdure.flight import wait
from perdure.governance.actor import acting
from perdure.reports import WriteStatus
from perdure.segments.landing import BlockStatus
from perdure.service import messages as m
from perdure.service import streams
from perdure.service.fields import failure, keys_of, lease_of
from perdure.service.nixl_node import Far
from perdure.service.outgoing import Lot, gather
from perdure.service.peers import Peer
from perdure.service.sockets import is_loopback
from perdure.service.streams import Stream, TlsStream
from perdure.service.turns import Places, cost_of, even
from perdure.service.verbs import Waiting

if TYPE_CHECKING:
    from perdure.governance.principals import Principal
    from perdure.service.server import Server

_LOG = logging.getLogger("perdure.node")
_ALLOWED = (
    m.OpenSpace, m.Lookup, m.Present, m.Reserve, m.Follow, m.EndLease, m.Pin, m.Unpin, m.Hint, m.Advise, m.Status,
    m.Explain, m.ExplainPrefix, m.Sync, m.SessionAsk, m.Publication, m.Exchange,
)  # fmt: skip
_PROBLEMS_MAX = 64  # told per frame


class Node:
    """The listener of one service. Binds at once, answers after `start`. `address`: (host, port) it is bound to."""

    def __init__(self, server: Server, host: str, port: int, tls: streams.TlsFiles | None):
        if tls is None and server.guard is not None:
            raise ConfigError(f"listen={host}:{port}: with a policy hosts are known by certificates; set tls_cert, "
                              "tls_key and tls_ca")  # fmt: skip
        if tls is None and not is_loopback(host):
            raise ConfigError(f"listen={host}:{port}: other machines could reach the store without TLS")
        self._tls = None if tls is None else tls.context(server=True)
        self._server = server
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=256)
        except OSError as error:
            raise StorePathError(
                f"listen={host}:{port}: {error.strerror}; choose a free address of this host"
            ) from error
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._lock = threading.Lock()
        weight = even if server.guard is None else server.guard.shares.weight
        self._turns = Places(limits.transfers_inflight_max, weight)
        self._streams: dict[Any, threading.Thread] = {}  # socket or stream -> its thread
        self._stopping = False
        self.waiting = 0  # connections whose question waits
        self._thread = threading.Thread(target=self._accept, name="perdure-node", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, drain_s: float) -> None:
        """No new questions; those that are running end, within `drain_s`; then all connections are cut."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            open_now = dict(self._streams)
        self._server.core.waiters.wake_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        give_up = time.monotonic() + drain_s
        for how in (socket.SHUT_RD, socket.SHUT_RDWR):
            for stream, thread in open_now.items():
                with suppress(OSError):
                    stream.shutdown(how)
                thread.join(max(0.0 if how == socket.SHUT_RD else 1.0, give_up - time.monotonic()))

    @property
    def connections(self) -> int:
        return len(self._streams)

    # --- connections
    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._stopping:
                    return
                _LOG.exception("a connection could not be accepted")
                time.sleep(0.1)
                continue
            thread = threading.Thread(target=self._greet, args=(sock, address), name="perdure-node-host", daemon=True)
            with self._lock:
                welcome = not self._stopping and self._server.room()
                if welcome:
                    self._streams[sock] = thread
            if welcome:
                thread.start()
            else:
                sock.close()

    def _greet(self, sock: socket.socket, address: Any) -> None:
        stream = Stream(sock)
        try:
            streams.tune(sock)
            until = time.monotonic() + limits.hello_wait_s
            if self._tls is not None:
                stream = streams.accept_tls(sock, self._tls, until)
                with self._lock:
                    self._streams[stream] = self._streams.pop(sock)
            self._host(stream, until, f"{address[0]}:{address[1]}")
        except (ssl.SSLError, TimeoutError) as error:
            _LOG.warning("a host was refused: %s", error)
        except OSError:
            pass  # it is gone
        except Exception:  # noqa: BLE001 (the other hosts are still to be served)
            _LOG.exception("a host could not be served")
        finally:
            stream.close()
            with self._lock:
                self._streams.pop(sock, None)
                self._streams.pop(stream, None)

    def _host(self, stream: Stream, until: float, address: str) -> None:
        """Serve one connection to its end."""
        data, payload = stream.receive_frame(until)
        if not data:
            return
        peer, mine = None, False
        try:
            question = m.decode_question(data)
            if payload:
                raise ProtocolError("a greeting has no payload")
            peer, answer = self._server.greet(question, remote=address, principal=self._principal(stream, address))
            mine = isinstance(question, m.Hello)
            stream.send(m.encode(answer), until=until)
            while not self._stopping and self._one(stream, peer):
                pass
        except PerdureError as error:  # not the protocol: nothing more can be made of what comes
            stream.send(m.encode(failure(0, error)), until=time.monotonic() + limits.send_wait_s)
        finally:
            if peer is not None:
                (self._server.dismiss if mine else self._server.left)(peer)

    def _principal(self, stream: Stream, address: str) -> Principal | None:
        """Who the host is, by its certificate. Raises AccessDenied."""
        guard = self._server.guard
        return (
            None
            if guard is None
            else guard.by_certificate(stream.uris() if isinstance(stream, TlsStream) else [], address)
        )

    def _one(self, stream: Stream, peer: Peer) -> bool:
        """One question and its answer; False at the end of the connection."""
        data, payload = stream.receive_frame(float("inf"), limits.stall_s)
        if not data or peer.ended:
            return False
        since = time.monotonic()
        question = m.decode_question(data)
        if payload and not isinstance(question, m.Put):
            raise ProtocolError(f"a {type(question).__name__} has no payload")
        try:
            with acting(peer.who, getattr(question, "trace", "")):
                summary = self._carry_out(stream, peer, question, payload, since)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 (a question must not end the connection)
            if not isinstance(error, PerdureError):
                _LOG.exception("a question failed")
            summary = failure(question.id, error)
            stream.send(m.encode(summary), until=time.monotonic() + limits.stall_s)
        self._server.note(peer, question, summary, time.monotonic() - since)
        return True

    def _carry_out(self, stream: Stream, peer: Peer, question: Any, payload: int, since: float) -> m.Message:
        if isinstance(question, m.Get):
            summary = self._get(stream, peer, question, since)
        else:
            if isinstance(question, m.Put):
                summary = self._put(stream, peer, question, payload, since)
            elif isinstance(question, _ALLOWED) or (isinstance(question, m.Region) and question.kind == "nixl"):
                summary = self._answer(peer, question)
            else:
                raise ProtocolError(f"{type(question).__name__} is no question for another host")
            try:
                stream.send(self._encoded(summary), until=time.monotonic() + limits.stall_s)
            except OSError:
                self._server.verbs.undo(peer, summary)
                raise
        return summary

    def _answer(self, peer: Peer, question: Any) -> m.Message:
        answer, _ = self._server.verbs.answer(peer, question, [])
        if not isinstance(answer, Waiting):
            return answer

        def check() -> None:
            if peer.ended or self._stopping:
                raise ConnectionAbortedError("nobody waits for this answer any more")

        with self._lock:
            self.waiting += 1
        try:
            return answer.answer_of(wait(self._server.core, answer.wish, answer.until, check))
        finally:
            with self._lock:
                self.waiting -= 1

    def _encoded(self, answer: m.Message) -> bytes:
        data = m.encode(answer)
        if len(data) > limits.message_bytes_max:
            data = m.encode(failure(answer.id, ServiceBusy("the answer is longer than a message; ask for less")))
        return data

    # --- moving blocks
    def _get(self, stream: Stream, peer: Peer, q: m.Get, since: float) -> m.Message:
        guard = self._server.guard
        refused = None if guard is None else guard.refusal(peer, q)
        if isinstance(refused, m.Sent):
            stream.send(m.encode(refused), until=time.monotonic() + limits.stall_s)
            return m.Delivered(q.id, refused.statuses, 0, refused.problems, 0)
        with nullcontext() if guard is None else guard.entered(peer, q), _far(peer, q.region) as far:
            return self._get_into(far, stream, peer, q, since)

    def _get_into(self, far: Far | None, stream: Stream, peer: Peer, q: m.Get, since: float) -> m.Message:
        space, keys = peer.space(q.space), keys_of(q.keys)
        until = since + _seconds(q.left_s)
        size, core = space.layout.block_bytes, self._server.core
        step = max(1, limits.frame_blocks_bytes_max // size)
        if far is not None and len(keys) * size > far.nbytes:
            raise ProtocolError(f"{len(keys)} blocks of {size} bytes into a region of {far.nbytes}")
        total = m.Delivered(q.id, b"", 0, {}, 0)
        for first in range(0, max(1, len(keys)), step):
            part = keys[first : first + step]
            last = first + step >= len(keys)
            left_s, cost = until - time.monotonic(), cost_of(len(part) * size)
            if not self._turns.acquire(space.tenant_id, writing=False, timeout_s=left_s, cost=cost):
                late = bytes([BlockStatus.LATE]) * (len(keys) - first)
                stream.send(m.encode(m.Sent(q.id, late, b"", b"", 0, {}, True)), until=until + limits.stall_s)
                total.statuses += late
                break
            try:
                lot = gather(core, space, part, deadline_s=max(0.0, until - time.monotonic()))
                try:
                    if far is not None and not far.write(lot.payload(), until):
                        lot.report.statuses[lot.report.statuses == BlockStatus.FOUND] = BlockStatus.LATE
                        lot.report.from_memory = 0
                    sent = _sent(q.id, lot, last)
                    payload = lot.payload() if far is None else []
                    stream.send(m.encode(sent), payload=payload, until=time.monotonic() + limits.stall_s)
                    lot.keep()
                finally:
                    lot.release()
            finally:
                self._turns.release()
            total.statuses += sent.statuses
            total.from_memory += sent.from_memory
        return total

    def _put(self, stream: Stream, peer: Peer, q: m.Put, payload: int, since: float) -> m.Message:
        guard = self._server.guard
        if guard is None:
            return self._put_from(stream, peer, q, payload, since)
        try:
            refused = guard.refusal(peer, q)
        except PerdureError:
            stream.skip(payload, since + limits.stall_s)
            raise
        if refused is not None:
            stream.skip(payload, since + limits.stall_s)
            return refused
        with guard.entered(peer, q):
            return self._put_from(stream, peer, q, payload, since)

    def _put_from(self, stream: Stream, peer: Peer, q: m.Put, payload: int, since: float) -> m.Message:
        """The payload is received whatever becomes of the question: the next one comes after it."""
        receive_by = since + limits.stall_s
        try:
            space, keys = peer.space(q.space), keys_of(q.keys)
            until = since + _seconds(q.left_s)
            size = space.layout.block_bytes
            nbytes = len(keys) * size
            if payload != (0 if q.region else nbytes):
                raise ProtocolError(f"{payload} bytes of payload for {len(keys)} blocks of {size} bytes")
        except PerdureError:
            stream.skip(payload, receive_by)
            raise
        left_s = until - time.monotonic()
        if not self._turns.acquire(space.tenant_id, writing=True, timeout_s=left_s, cost=cost_of(nbytes)):
            stream.skip(payload, receive_by)
            return m.Written(q.id, bytes([WriteStatus.LATE]) * len(keys), 0, 0, {})
        try:
            with _far(peer, q.region) as far:
                lease = self._server.core.scratch.take(nbytes) if far is None else far.read(nbytes, until)
            if lease is None:
                return m.Written(q.id, bytes([WriteStatus.LATE]) * len(keys), 0, 0, {})
            try:
                blocks = [[lease.view[at : at + size]] for at in range(0, nbytes, size)]
                if payload:
                    stream.fill([part for parts in blocks for part in parts], receive_by)
                report = space.write(
                    keys, blocks, durability=q.durability, ttl_s=q.ttl_s, deadline_s=max(0.0, until - time.monotonic()),
                    lease=None if q.lease is None else lease_of(q.lease),
                )  # fmt: skip
            finally:
                del blocks
                lease.give_back()
        finally:
            self._turns.release()
        reasons = dict(list(report.reasons.items())[:_PROBLEMS_MAX])
        return m.Written(q.id, report.statuses.tobytes(), report.stored, report.stored_bytes, reasons)


def _far(peer: Peer, number: int) -> AbstractContextManager[Far | None]:
    """The memory that a question names, held for it."""
    if not number:
        return nullcontext()
    region = peer.regions.get(number)
    if not isinstance(region, Far):
        raise ServiceUnavailable(f"region {number} is over, or never was")
    return region.used()


def _sent(number: int, lot: Lot, last: bool) -> m.Sent:
    report, encoded = lot.report, bool(lot.codecs.any())
    return m.Sent(
        number, report.statuses.tobytes(), lot.codecs.tobytes() if encoded else b"",
        lot.stored.tobytes() if encoded else b"", report.from_memory,
        dict(list(report.problems.items())[:_PROBLEMS_MAX]), last,
    )  # fmt: skip


def _seconds(left_s: float) -> float:
    if not 0 <= left_s <= limits.deadline_s_max:
        raise ProtocolError(f"left_s={left_s}: must be seconds from now")
    return left_s
