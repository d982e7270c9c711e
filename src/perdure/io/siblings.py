"""Siblings of the real files, for tests and benchmarks: no disk at all, a disk of a given rate, and (from
`perdure.io.faulty`, named here too) one that fails.

Contract
- Each is a `Files` and gives `File`s with `native = False`, so every engine moves their data through `preadv` and
  `pwritev`, and no rate or count is bypassed.
- `NoopFiles` keeps names, sizes and the small files of `write_once`; data written vanishes, data read is zeros.
- `ThrottledFiles` behaves like one device: all files share its time, so the bytes moved never exceed the rate over any
  interval, whatever the concurrency. It sleeps in the thread that transfers.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from perdure import limits
from perdure.errors import InvalidArgument
from perdure.io.api import Buffer, File, Files
from perdure.io.faulty import OPERATIONS as OPERATIONS
from perdure.io.faulty import Fault as Fault
from perdure.io.faulty import FaultPlan as FaultPlan
from perdure.io.faulty import FaultWhile as FaultWhile
from perdure.io.faulty import FaultyFiles as FaultyFiles
from perdure.io.faulty import NthFault as NthFault
from perdure.io.files import checked_path
from perdure.io.wrappers import FileAround, FilesAround, total_bytes


class NoopFile:
    native = False
    direct = False
    memory_alignment = 1

    def __init__(self, files: NoopFiles, path: str) -> None:
        self._files = files
        self.path = path
        self.device = files.device

    def fileno(self) -> int:
        raise OSError(errno.EBADF, "a NoopFile has no descriptor", self.path)

    def size(self) -> int:
        return self._files.sizes.get(self.path, 0)

    def preadv(self, buffers: Sequence[Buffer], offset: int) -> int:
        left = wanted = min(total_bytes(buffers), max(self.size() - offset, 0))
        for piece in buffers:
            part = piece[: min(left, piece.nbytes)]
            np.frombuffer(part, dtype=np.uint8).fill(0)
            left -= part.nbytes
        return wanted

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        nbytes = total_bytes(buffers)
        self._files.grow(self.path, offset + nbytes)
        return nbytes

    def allocate(self, offset: int, length: int) -> None:
        self._files.grow(self.path, offset + length)

    def truncate(self, length: int) -> None:
        self._files.sizes[self.path] = length

    def datasync(self) -> None:
        pass

    def close(self) -> None:
        pass


class NoopFiles:
    """A namespace in memory. `capacity` is what `free_bytes` counts down from; nothing enforces it."""

    root = "noop"
    memory_alignment = 1

    def __init__(self, capacity: int = 1024 * limits.GIB, device: int = 0) -> None:
        self.device = device
        self.sizes: dict[str, int] = {}
        self._capacity = capacity
        self._small: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def create(self, path: str, *, direct: bool = True) -> NoopFile:
        with self._lock:
            if checked_path(path) in self.sizes:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self.sizes[path] = 0
        return NoopFile(self, path)

    def open(self, path: str, *, direct: bool = True, write: bool = False) -> NoopFile:
        self._size_of(path)
        return NoopFile(self, path)

    def write_once(self, path: str, data: bytes) -> bool:
        with self._lock:
            if checked_path(path) in self.sizes:
                return False
            self.sizes[path] = len(data)
            self._small[path] = bytes(data)
            return True

    def read(self, path: str) -> bytes:
        return self._small.get(path) or bytes(self._size_of(path))

    def unlink(self, path: str) -> None:
        self._size_of(path)
        with self._lock:
            self.sizes.pop(path, None)
            self._small.pop(path, None)

    def sync_directory(self, path: str) -> None:
        pass

    def list(self, path: str) -> list[str]:
        prefix = "" if path in ("", ".") else f"{checked_path(path)}/"
        with self._lock:
            return sorted({name[len(prefix) :].split("/")[0] for name in self.sizes if name.startswith(prefix)})

    def free_bytes(self) -> int:
        with self._lock:
            return max(self._capacity - sum(self.sizes.values()), 0)

    def grow(self, path: str, size: int) -> None:
        with self._lock:
            self.sizes[path] = max(self.sizes.get(path, 0), size)

    def _size_of(self, path: str) -> int:
        try:
            return self.sizes[checked_path(path)]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None


class TimeSource(Protocol):
    """What throttling needs of time; the module `time` is one, tests bring their own."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class ThrottledFiles(FilesAround):
    """`inner` behind a device of the given rates (bytes per second) that takes `latency_s` longer per transfer.

    Reads and writes share the device's time. Latencies overlap, transfers do not.
    """

    def __init__(
        self,
        inner: Files,
        read_bytes_per_s: float,
        write_bytes_per_s: float,
        latency_s: float = 0.0,
        *,
        clock: TimeSource = time,
    ) -> None:
        super().__init__(inner)
        if min(read_bytes_per_s, write_bytes_per_s) <= 0 or latency_s < 0:
            raise InvalidArgument("ThrottledFiles: rates must be positive and the latency not negative")
        self._read_rate = read_bytes_per_s
        self._write_rate = write_bytes_per_s
        self._latency_s = latency_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock.monotonic()

    def wrap(self, file: File) -> File:
        return _ThrottledFile(self, file)

    def write_once(self, path: str, data: bytes) -> bool:
        ready_at = self.occupy(len(data), write=True)
        created = self.inner.write_once(path, data)
        self.sleep_until(ready_at)
        return created

    def read(self, path: str) -> bytes:
        data = self.inner.read(path)
        self.sleep_until(self.occupy(len(data), write=False))
        return data

    def occupy(self, nbytes: int, *, write: bool) -> float:
        """Take the device's next free time for a transfer; when that transfer is over."""
        seconds = nbytes / (self._write_rate if write else self._read_rate)
        with self._lock:
            self._free_at = max(self._free_at, self._clock.monotonic()) + seconds
            return self._free_at + self._latency_s

    def sleep_until(self, ready_at: float) -> None:
        while (seconds := ready_at - self._clock.monotonic()) > 0:
            self._clock.sleep(seconds)


class _ThrottledFile(FileAround):
    def __init__(self, files: ThrottledFiles, inner: File) -> None:
        super().__init__(inner)
        self._files = files

    def preadv(self, buffers: Sequence[Buffer], offset: int) -> int:
        ready_at = self._files.occupy(total_bytes(buffers), write=False)
        moved = self.inner.preadv(buffers, offset)
        self._files.sleep_until(ready_at)
        return moved

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        ready_at = self._files.occupy(total_bytes(buffers), write=True)
        moved = self.inner.pwritev(buffers, offset)
        self._files.sleep_until(ready_at)
        return moved
