"""Unix SEQPACKET sockets: one datagram is one message, with descriptors beside it; and the addresses of services.

Contract
- A datagram longer than `limits.message_bytes_max`, or with more descriptors than allowed, is refused whole: its
  descriptors are closed, ProtocolError is raised.
- Every descriptor received is close-on-exec.
- A socket file is replaced only if nobody listens on it; one that another service listens on is an error.
"""

from __future__ import annotations

import array
import contextlib
import errno
import ipaddress
import math
import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from perdure import limits
from perdure.errors import InvalidArgument, ProtocolError, ServiceUnavailable, StorePathError

SO_PEERPIDFD: Final = 77  # Linux 6.5
SOCKET_NAME: Final = "perdure.sock"
_local = threading.local()
_SPIN: Final = len(os.sched_getaffinity(0)) > 1
_POLL_S: Final = 0.0005  # less is not worth waiting
_TIMEVAL: Final = struct.Struct("@ll")
_CREDENTIALS: Final = struct.Struct("3i")
_DESCRIPTORS_MAX: Final = limits.message_descriptors_max + 3
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(4 * _DESCRIPTORS_MAX)


def send(sock: socket.socket, data: bytes, fds: Sequence[int], flags: int = 0) -> None:
    """One message. Raises OSError; BlockingIOError if it does not fit the other side's buffer now."""
    if fds:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        sock.sendmsg([data], rights, flags)
    else:
        sock.send(data, flags)


def receive(sock: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """One message, empty at the end of the connection; the descriptors are the caller's to close."""
    buffer = getattr(_local, "buffer", None)
    if buffer is None:  # one per thread: a new one for each message would be mapped and unmapped every time
        buffer = _local.buffer = memoryview(bytearray(limits.message_bytes_max))
    count, ancillary, answer_flags, _ = sock.recvmsg_into([buffer], _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC)
    data = bytes(buffer[:count])
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if answer_flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise ProtocolError(
            f"a message has at most {limits.message_bytes_max} bytes and {_DESCRIPTORS_MAX} descriptors"
        )
    return data, list(fds)


def readable(sock: socket.socket) -> bool:
    """Whether there is something to receive, the end of the connection included."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def peer_of(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, pidfd) of the process at the other end; pidfd -1 where the kernel cannot say."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    try:
        return pid, uid, sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return pid, uid, os.pidfd_open(pid)
    except OSError:
        return pid, uid, -1


def credentials(sock: socket.socket) -> tuple[int, int]:
    """(uid, gid) of the process at the other end, as of when it connected."""
    _, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid, gid


def check_path(path: Path) -> None:
    if len(os.fsencode(path)) > limits.socket_path_bytes_max:
        raise InvalidArgument(
            f"socket path {path}: {len(os.fsencode(path))} bytes, a Unix socket's path has at most "
            f"{limits.socket_path_bytes_max}; choose a shorter one, such as /run/perdure.sock"
        )


def listen_unix(path: Path, backlog: int = 1024) -> socket.socket:
    """A listening socket at `path`, for its owner only (0600). Replaces a socket that nobody listens on."""
    check_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        try:
            sock.bind(str(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _remove_stale(path)
            sock.bind(str(path))
        sock.listen(backlog)
    except StorePathError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise StorePathError(
            f"socket {path}: {error.strerror}; check that its directory exists and is yours"
        ) from error
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(before)
    return sock


def _remove_stale(path: Path) -> None:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise StorePathError(f"socket {path}: something else than a socket is there; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise StorePathError(f"socket {path}: in use by something else ({error.strerror})") from error
    raise StorePathError(f"socket {path}: another service listens on it; stop that one or choose another path")


def connect_unix(path: Path, timeout_s: float | None) -> socket.socket:
    """A connection to the service at `path`, blocking, close-on-exec. Raises ServiceUnavailable."""
    check_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(path))
        sock.settimeout(None)
    except (OSError, ValueError) as error:
        sock.close()
        why = {errno.ENOENT: "there is no such socket", errno.ECONNREFUSED: "nobody listens on it"}.get(
            getattr(error, "errno", 0) or 0, str(error)
        )
        raise ServiceUnavailable(f"{path}: {why}; start the service: perdure serve --data DIR") from error
    return sock


def spinning(until: float) -> Iterator[None]:
    """As often as it is worth looking before sleeping: an idle CPU takes longer to wake than a short answer to come.
    Not where there is no hurry, and not on a single CPU, where the service could not answer meanwhile."""
    if until != math.inf and _SPIN:
        give_up = time.monotonic() + limits.answer_spin_s
        while time.monotonic() < give_up:
            yield


class KernelTimeout:
    """A timeout that the kernel keeps: Python's own costs two system calls and a poll for every call, and MSG_WAITALL
    its effect. It is shorter than the time that is left, by half at most, so that it need not be set for every call;
    after a BlockingIOError the caller sets it anew, and goes on."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._told: dict[int, float] = {}  # what the kernel was told last, by socket option

    def set(self, option: int, until: float) -> None:
        """Raises TimeoutError if the time is up."""
        left = min(until - time.monotonic(), limits.stall_s)
        if left <= 0:
            raise TimeoutError("nothing moved in time")
        if not left / 2 <= self._told.get(option, 0.0) <= left:
            chosen = self._told[option] = max(0.75 * left, _POLL_S)
            packed = _TIMEVAL.pack(int(chosen), int(chosen % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, option, packed)


class UnixChannel:
    """A connection to the service at a path, as `transport.Channel`."""

    def __init__(self, path: Path, until: float):
        self._sock = connect_unix(path, max(0.001, until - time.monotonic()))
        self._timeout = KernelTimeout(self._sock)

    def send(self, message: bytes, fds: Sequence[int] = (), *, until: float = math.inf) -> None:
        send(self._sock, message, fds)  # a question fits the buffer of a connection that has none under way

    def receive(self, until: float) -> tuple[bytes, list[int]]:
        if until - time.monotonic() < _POLL_S:
            if not readable(self._sock):
                raise TimeoutError
            return receive(self._sock)
        for _ in spinning(until):
            with contextlib.suppress(BlockingIOError):
                return receive(self._sock, socket.MSG_DONTWAIT)
        while True:
            self._timeout.set(socket.SO_RCVTIMEO, until)
            with contextlib.suppress(BlockingIOError):
                return receive(self._sock)

    def ready(self) -> bool:
        return readable(self._sock)

    def usable(self) -> bool:
        return True  # the thread that listens on the first connection sees the service's end

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def socket_path(address: str | os.PathLike[str]) -> Path:
    """Of "unix:///path", a socket's path, or a store's directory (its `perdure.sock`)."""
    text = os.fspath(address)
    path = Path(text.removeprefix("unix://"))
    with contextlib.suppress(OSError):
        if path.is_dir():
            return path / SOCKET_NAME
    return path


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of "HOST:PORT" or "[IPV6]:PORT"; port 0 means any free one. ValueError says what is wrong."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or (":" in bare and not host.startswith("[")):
        raise ValueError("not an address")
    if not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"port {port!r} is not a number from 0 to 65535")
    return bare, int(port)


def address_text(host: str, port: int) -> str:
    """What `parse_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name other than localhost is taken to be reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
