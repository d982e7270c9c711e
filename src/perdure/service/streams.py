"""Byte streams between hosts: frames of a message and the blocks that belong to it, over TCP, with TLS where asked for.

Format: a frame is `PDF1`, message bytes (u32), payload bytes (u64), little-endian; then the message (`messages`), then
the payload: blocks one after the other, as the message says.

Contract
- Lengths are checked before anything is allocated. Payload is received straight into the memory it is for; whatever of
  it nobody wants is `skip`ped, or the stream cannot be used any more.
- Every wait ends by `until`. A stream that timed out inside a frame is broken: it says so, and never yields another.
- TLS is 1.3, both sides show certificates, and the client checks that the node's names its host.
"""

from __future__ import annotations

import math
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from perdure import limits
from perdure.errors import ConfigError, ProtocolError, ServiceUnavailable
from perdure.service import sockets

_FRAME: Final = struct.Struct("<4sIQ")
_MAGIC: Final = b"PDF1"
_PARTS_MAX: Final = 512  # of one system call; Linux takes 1,024
_SEND_BYTES: Final = 2 * limits.MIB  # per call: measured over loopback, 512 KiB cost 10 % more, 16 MiB a third
_SKIP_BYTES: Final = 256 * limits.KIB


class Stream:
    """One TCP connection, as `transport.Channel`, and with payload. Used by one thread at a time."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._payload = 0  # bytes of the frame that was received last which are still to be taken
        self._broken = False
        self._timeout = sockets.KernelTimeout(sock)

    # --- frames
    def send(
        self,
        message: bytes,
        fds: Sequence[int] = (),
        *,
        payload: Sequence[memoryview] = (),
        until: float = math.inf,
    ) -> None:
        """One frame. Raises OSError, TimeoutError among them."""
        assert not fds
        size = sum(part.nbytes for part in payload)
        head = memoryview(_FRAME.pack(_MAGIC, len(message), size) + message)
        self._broken = True  # unless all of it gets out
        self._send_all([head, *payload], until)
        self._broken = False

    def receive(self, until: float) -> tuple[bytes, list[int]]:
        """The message of the next frame; its payload is then to be taken by `fill` or `skip`."""
        data, payload = self.receive_frame(until)
        if payload:
            raise ProtocolError(f"a message with {payload} bytes of payload where none belongs")
        return data, []

    def receive_frame(self, until: float, stall_s: float = math.inf) -> tuple[bytes, int]:
        """(message, bytes of payload); an empty message at the end of the connection. stall_s: how long the rest of a
        frame that has begun may take."""
        if self._broken or self._payload:
            raise ConnectionResetError("the connection was given up inside a frame")
        head = bytearray(_FRAME.size)
        got = self._first(memoryview(head), until)
        if not got:
            return b"", 0
        self._broken = True  # unless all of it comes
        until = min(until, time.monotonic() + stall_s)
        self._fill([memoryview(head)[got:]], until)
        magic, size, payload = _FRAME.unpack(head)
        if magic != _MAGIC:
            raise ProtocolError("this is not a Perdure data node's protocol (bytes that do not start a frame)")
        if not 0 < size <= limits.message_bytes_max or payload > limits.frame_payload_bytes_max:
            raise ProtocolError(
                f"a frame of {size} + {payload} bytes: a message has 1 to {limits.message_bytes_max} bytes, "
                f"a payload at most {limits.frame_payload_bytes_max}"
            )
        data = bytearray(size)
        self._fill([memoryview(data)], until)
        self._broken, self._payload = False, payload
        return bytes(data), payload

    def fill(self, parts: Sequence[memoryview], until: float) -> None:
        """Receive the next bytes of the payload into `parts`. Raises ProtocolError if there are not so many."""
        size = sum(part.nbytes for part in parts)
        if size > self._payload:
            raise ProtocolError(f"{size} bytes of payload are due, the frame has {self._payload}")
        self._broken = True
        self._fill(parts, until)
        self._broken = False
        self._payload -= size

    def skip(self, nbytes: int, until: float) -> None:
        """Receive the next bytes of the payload and forget them."""
        waste = memoryview(bytearray(min(nbytes, _SKIP_BYTES)))
        while nbytes:
            step = min(nbytes, waste.nbytes)
            self.fill([waste[:step]], until)
            nbytes -= step

    def _fill(self, parts: Sequence[memoryview], until: float) -> None:
        first, left = 0, [part for part in parts if part.nbytes]
        while first < len(left):
            got = self._receive_some(left[first : first + _PARTS_MAX], until)
            if not got:
                raise ConnectionResetError("the connection ended inside a frame")
            first = _advance(left, first, got)

    def _send_all(self, parts: Sequence[memoryview], until: float) -> None:
        first, left = 0, [part for part in parts if part.nbytes]
        while first < len(left):
            first = _advance(left, first, self._send_some(_some(left, first), until))

    def _first(self, head: memoryview, until: float) -> int:
        """The first bytes of a frame, which may be a while in coming."""
        for _ in sockets.spinning(until):
            with suppress(BlockingIOError):
                return self._sock.recv_into(head, 0, socket.MSG_DONTWAIT)
        return self._receive_some([head], until)

    # --- the socket
    def _receive_some(self, parts: list[memoryview], until: float) -> int:
        """Bytes received; 0 at the end of the connection. The kernel waits for all of them, or until the time is up."""
        while True:
            self._timeout.set(socket.SO_RCVTIMEO, until)
            try:
                return self._sock.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue

    def _send_some(self, parts: list[memoryview], until: float) -> int:
        while True:
            self._timeout.set(socket.SO_SNDTIMEO, until)
            try:
                return self._sock.sendmsg(parts)
            except BlockingIOError:
                continue

    def ready(self) -> bool:
        return self._broken or sockets.readable(self._sock)

    def usable(self) -> bool:
        return not self.ready()  # nobody speaks unasked, but the end of the connection

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        with suppress(OSError):
            socket.socket.shutdown(self._sock, how)  # not SSLSocket's, after which a send would be in the clear

    def close(self) -> None:
        with suppress(OSError):
            self._sock.close()


class TlsStream(Stream):
    """The same, encrypted. What is received passes through OpenSSL's buffer, 16 KiB at a time."""

    _sock: ssl.SSLSocket

    def uris(self) -> list[str]:
        """That the other side's certificate names (SPIFFE ids are such)."""
        names: Any = (self._sock.getpeercert() or {}).get("subjectAltName", ())
        return [value for kind, value in names if kind == "URI"]

    def _first(self, head: memoryview, until: float) -> int:
        return self._receive_some([head], until)

    def _receive_some(self, parts: list[memoryview], until: float) -> int:
        self._limit(until)
        return self._sock.recv_into(parts[0])

    def _send_some(self, parts: list[memoryview], until: float) -> int:
        self._limit(until)
        return self._sock.send(parts[0])

    def _limit(self, until: float) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time is up")
        self._sock.settimeout(None if left == math.inf else min(left, limits.deadline_s_max))

    def ready(self) -> bool:
        return bool(self._sock.pending()) or super().ready()


def _some(parts: list[memoryview], first: int) -> list[memoryview]:
    """What to send in one call: about `_SEND_BYTES`."""
    end, size = first, 0
    while end < len(parts) and end - first < _PARTS_MAX and size < _SEND_BYTES:
        size += parts[end].nbytes
        end += 1
    some = parts[first:end]
    if some[-1].nbytes > 2 * _SEND_BYTES:
        some[-1] = some[-1][:_SEND_BYTES]
    return some


def _advance(parts: list[memoryview], first: int, nbytes: int) -> int:
    """The place of the part that is next after `nbytes` of `parts[first:]`, which is cut to what is left of it."""
    while nbytes and nbytes >= parts[first].nbytes:
        nbytes -= parts[first].nbytes
        first += 1
    if nbytes:
        parts[first] = parts[first][nbytes:]
    return first


# --- making them
class TlsFiles(NamedTuple):
    """PEM files: a certificate chain, its private key, and the authority that signs the other side's certificates."""

    cert: Path
    key: Path
    ca: Path

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Raises ConfigError."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.verify_mode = ssl.CERT_REQUIRED
        if server:
            made.num_tickets = 0
        try:
            made.load_cert_chain(self.cert, self.key, password=lambda: b"")  # never ask at the terminal
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tls_cert={self.cert}, tls_key={self.key}: not a certificate and its key ({error})"
            ) from error
        try:
            made.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            raise ConfigError(f"tls_ca={self.ca}: not certificates of an authority, in PEM ({error})") from error
        return made


def tune(sock: socket.socket) -> None:
    """Small frames at once; a host that is gone is noticed, also by a connection that waits for its next question.

    Over loopback no congestion control that paces: a default of BBR costs a third of the rate there, and twice the time
    of a 2 MiB block (measured). Between hosts the system's choice stands."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sockets.is_loopback(str(sock.getpeername()[0])):
        with suppress(OSError):  # the kernel may not have it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, limits.keepalive_idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, limits.keepalive_idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, limits.keepalive_attempts_max)
    gone_s = limits.keepalive_idle_s * (limits.keepalive_attempts_max + 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * gone_s)


def connect_tcp(host: str, port: int, tls: ssl.SSLContext | None, until: float) -> Stream:
    """A connection to a data node. Raises ServiceUnavailable, TimeoutError."""
    where = f"tcp://{host}:{port}"
    sock: Any = None
    try:
        sock = socket.create_connection((host, port), timeout=max(0.001, until - time.monotonic()))
        tune(sock)
        if tls is not None:
            sock.settimeout(max(0.001, until - time.monotonic()))
            sock = tls.wrap_socket(sock, server_hostname=host)
            return TlsStream(sock)
        sock.settimeout(None)
        return Stream(sock)
    except (OSError, ValueError) as error:
        if sock is not None:
            sock.close()
        if isinstance(error, TimeoutError):
            raise
        hint = "start the node: perdure serve --data DIR --listen HOST:PORT"
        if isinstance(error, ssl.SSLError):
            hint = "check tls_cert, tls_key and tls_ca on both sides, and that the node's certificate names its host"
        raise ServiceUnavailable(f"{where}: {error}; {hint}") from error


def accept_tls(sock: socket.socket, tls: ssl.SSLContext, until: float) -> Stream:
    """The node's side of a TLS connection. Raises OSError, ssl.SSLError among them."""
    sock.settimeout(max(0.001, until - time.monotonic()))
    return TlsStream(tls.wrap_socket(sock, server_side=True))
