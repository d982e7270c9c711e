"""The bare limit of moving blocks between two processes over TCP, as a worker: `service_bare.py`.

Contract
- Stands alone like every worker. The server is a process of its own; its blocks are in a memfd that the worker fills
  before anything is timed, so that no store, no checksum and no lookup is part of it.
- The pattern is that of a store's get: one request with the numbers of a batch's blocks, one answer with their bytes in
  that order, received straight into the caller's rows by blocking calls; the server sends from memory with sendmsg.
- Both ends are on 127.0.0.1; the kernel picks the port.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

peer_protocol: Any = importlib.import_module(
    "peer_protocol" if __name__ == "__main__" else "perdure.benchmarks.peer_protocol"
)

SLOTS = 256
COUNT = struct.Struct("<I")
SEND_BYTES = 2 << 20  # more in one call is slower on a loopback: the bytes are out of the cache when they are received


def receive(connection: socket.socket, into: memoryview) -> None:
    """Fill `into`. Raises ConnectionError at the end of the stream."""
    while into.nbytes:
        got = connection.recv_into(into, into.nbytes, socket.MSG_WAITALL)
        if not got:
            raise ConnectionError("the other end has closed the connection")
        into = into[got:]


def send(connection: socket.socket, parts: list[memoryview]) -> None:
    """Send all of `parts`, about `SEND_BYTES` in one call."""
    first = 0
    while first < len(parts):
        last = nbytes = 0
        while first + last < len(parts) and nbytes < SEND_BYTES:
            nbytes += parts[first + last].nbytes
            last += 1
        sent = connection.sendmsg(parts[first : first + last])
        while first < len(parts) and sent >= parts[first].nbytes:
            sent -= parts[first].nbytes
            first += 1
        if sent:
            parts[first] = parts[first][sent:]


def tune(connection: socket.socket) -> None:
    """As fast as we know how to make it, as the data node does: no delay, and no congestion control that paces."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def run_server(memory_fd: int, block_bytes: int) -> None:
    """Print the port, then serve one connection until it ends."""
    memory = memoryview(mmap.mmap(memory_fd, SLOTS * block_bytes, mmap.MAP_SHARED, mmap.PROT_READ))
    blocks = [memory[at : at + block_bytes] for at in range(0, SLOTS * block_bytes, block_bytes)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)  # noqa: T201 - the worker reads it
        connection, _ = listener.accept()
    tune(connection)
    head = memoryview(bytearray(COUNT.size))
    numbers = np.empty(SLOTS, "<u4")
    with connection:
        while connection.recv_into(head, COUNT.size, socket.MSG_WAITALL):
            (count,) = COUNT.unpack(head)
            wanted = numbers[:count]
            receive(connection, wanted.data.cast("B"))
            send(connection, [blocks[number] for number in wanted.tolist()])


class BareSocket:
    """See the module's contract. Holds blocks 0 to 255."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None
        self._connection: socket.socket | None = None

    def open(self, root: str, block_bytes: int, memory: bool) -> None:
        self.close()
        fd = os.memfd_create("bare", os.MFD_CLOEXEC)
        os.truncate(fd, SLOTS * block_bytes)
        self._memory = np.frombuffer(mmap.mmap(fd, SLOTS * block_bytes), np.uint8).reshape(SLOTS, block_bytes)
        command = [sys.executable, str(Path(__file__)), "server", str(fd), str(block_bytes)]
        end = peer_protocol.end_with_parent
        self._server = subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE, text=True, preexec_fn=end)
        os.close(fd)
        assert self._server.stdout is not None
        self._connection = socket.create_connection(("127.0.0.1", int(self._server.stdout.readline())), timeout=20)
        self._connection.settimeout(None)
        tune(self._connection)

    def helpers(self) -> list[int]:
        return [] if self._server is None else [self._server.pid]

    def prepare(self, blocks: Sequence[int]) -> Any:
        return np.array(blocks, "<u4")

    def put(self, keys: Any, rows: Any, durable: bool) -> int:
        self._memory[keys] = rows
        return len(keys)

    def get(self, keys: Any, rows: Any) -> list[bool]:
        assert self._connection is not None
        self._connection.sendall(COUNT.pack(len(keys)) + keys.tobytes())
        for row in rows:
            receive(self._connection, row.data)
        return [True] * len(keys)

    def forget(self) -> None:
        """Nothing: the blocks are in the server's memory, and that is what is measured."""

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._server is not None:
            self._server.communicate(timeout=20)
            self._server = None

    def about(self) -> dict[str, Any]:
        return {"name": "bare TCP socket"}


def main(argv: Sequence[str]) -> int:
    if len(argv) == 4 and argv[1] == "server":
        run_server(int(argv[2]), int(argv[3]))
    elif len(argv) == 1:
        peer_protocol.serve(BareSocket())
    else:
        sys.stderr.write(f"usage: {Path(argv[0]).name}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
