"""The HTTP side of the metrics: /metrics, /healthz (the process runs), /readyz (a block can be put and got).

Contract
- One request per connection; a request is at most `limits.metrics_request_bytes_max` long and has
  `limits.metrics_request_s` from the connection to the end of the answer. At most `limits.metrics_threads_max` are
  answered at a time; one more is closed without an answer.
- Only GET and HEAD, only these paths, nothing that changes anything. No access control: bind it to loopback.
- `stop` ends requests that are under way, and returns when all threads are gone.
"""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from perdure import limits
from perdure.errors import ConfigError
from perdure.observe import logs
from perdure.observe.metrics import Metrics

_TEXT: Final = "text/plain; charset=utf-8"
_REASONS: Final = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}  # fmt: skip
_log = logs.get("metrics")


class Endpoint:
    """Bound at once; serves between `start` and `stop`. not_ready: None if ready, else why not."""

    def __init__(self, metrics: Metrics, host: str, port: int, not_ready: Callable[[], str | None]):
        self._server = _Server(host, port, metrics, not_ready)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="perdure-metrics")
        self._started = False

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def start(self) -> None:
        self._started = True
        self._thread.start()

    def stop(self) -> None:
        if self._started:
            self._server.shutdown()
            self._thread.join()
            self._started = False
        self._server.end_connections()
        self._server.server_close()  # joins the threads of the requests


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = False
    block_on_close = True

    def __init__(self, host: str, port: int, metrics: Metrics, not_ready: Callable[[], str | None]):
        self.metrics, self.not_ready = metrics, not_ready
        self._room = threading.BoundedSemaphore(limits.metrics_threads_max)
        self._active: set[socket.socket] = set()
        self._lock = threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Request)
        except OSError as error:
            raise ConfigError(
                f"metrics: cannot listen on {host}:{port} ({error.strerror or error}); choose another address with "
                "--metrics HOST:PORT, or none with --metrics ''"
            ) from error

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._active.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        threading.current_thread().name = "perdure-metrics-request"
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._active.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        with self._lock:
            for connection in self._active:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # gone already
                    continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.exception("request failed")


class _Request(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        deadline = time.monotonic() + limits.metrics_request_s
        try:
            head = self._head(deadline)
            if head is None:
                return
            code, kind, body = self._answer(head)
            lines = [
                f"HTTP/1.1 {code} {_REASONS[code]}", f"Content-Type: {kind}", f"Content-Length: {len(body)}",
                "Connection: close", "Cache-Control: no-store", "X-Content-Type-Options: nosniff", "", "",
            ]  # fmt: skip
            if head.startswith(b"HEAD "):
                body = b""
            self.request.settimeout(max(0.001, deadline - time.monotonic()))
            self.request.sendall("\r\n".join(lines).encode() + body)  # the timeout is for all of it
        except OSError:  # too slow, or gone
            return

    def _head(self, deadline: float) -> bytes | None:
        """Request line and headers; None if the client went away first. TimeoutError at the deadline."""
        head = b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            if len(head) >= limits.metrics_request_bytes_max:
                return head
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.request.settimeout(left)
            piece = self.request.recv(limits.metrics_request_bytes_max - len(head))
            if not piece:
                return None
            head += piece
        return head

    def _answer(self, head: bytes) -> tuple[int, str, bytes]:
        if b"\r\n\r\n" not in head and b"\n\n" not in head:
            return 431, _TEXT, b"the request is too long\n"
        words = head.split(b"\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return 400, _TEXT, b"not an HTTP request\n"
        if words[0] not in (b"GET", b"HEAD"):
            return 405, _TEXT, b"only GET and HEAD\n"
        path = words[1].split(b"?", 1)[0]
        if path == b"/metrics":
            body, kind = self.server.metrics.render()
            return 200, kind, body
        if path == b"/healthz":
            return 200, _TEXT, b"alive\n"
        if path == b"/readyz":
            reason = self.server.not_ready()
            return (200, _TEXT, b"ready\n") if reason is None else (503, _TEXT, f"not ready: {reason}\n".encode())
        return 404, _TEXT, b"there are /metrics, /healthz and /readyz\n"
