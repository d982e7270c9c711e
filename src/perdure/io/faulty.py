"""Files that fail on purpose: wrap any namespace, and let a plan choose which operation fails how.

Contract
- The plan is asked before every operation. A fault without an effect on an operation (a short unlink) lets it through.
- `torn` lies as a power cut does: a prefix arrives, success is reported. `hang` blocks the calling thread until the
  plan resumes, then carries the operation out.
- Plans are thread-safe and deterministic: they count operations, not time.
- Never: a fault that the plan did not order.
"""

from __future__ import annotations

import builtins
import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from perdure.errors import InvalidArgument
from perdure.io.api import Buffer, File, Files
from perdure.io.wrappers import FileAround, FilesAround, total_bytes

_SECTOR_BYTES: Final = 512

_NAMESPACE_OPERATIONS: Final = ("create", "open", "read", "write_once", "link", "unlink", "list", "sync_directory")
_FILE_OPERATIONS: Final = ("preadv", "pwritev", "allocate", "truncate", "datasync")
OPERATIONS: Final = frozenset((*_NAMESPACE_OPERATIONS, *_FILE_OPERATIONS))
"""What a plan is asked about. `link` comes after the file of a `write_once` exists: failing there leaves the outcome
unknown to the caller, as a lost answer of a network file system does."""

FaultKind = Literal["eio", "enospc", "edquot", "estale", "short", "torn", "hang"]

_ERRORS: Final = {"eio": errno.EIO, "enospc": errno.ENOSPC, "edquot": errno.EDQUOT, "estale": errno.ESTALE}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one operation.

    eio, enospc, edquot, estale: it fails and does nothing. short: a transfer moves and reports a prefix (nothing, if it
    is one sector or less). torn: a prefix moves, all is reported. hang: it waits for the plan, then goes on.
    """

    kind: FaultKind
    fraction: float = 0.5  # of a short or torn transfer that arrives, rounded down to sectors

    def prefix(self, nbytes: int) -> int:
        return int(nbytes * self.fraction) // _SECTOR_BYTES * _SECTOR_BYTES


class FaultPlan(Protocol):
    def next(self, op: str, path: str, nbytes: int) -> Fault | None:
        """The fault of the operation that comes now (`nbytes` is 0 for those that move no data)."""
        ...

    def wait(self) -> None:
        """Called by an operation that hangs; returns when it may go on."""
        ...


class _Plan:
    """Counts operations (of the kinds in `ops`), remembers them, and lets hung ones wait for `resume`."""

    def __init__(self, kind: FaultKind, ops: Iterable[str] | None) -> None:
        self.ops = OPERATIONS if ops is None else frozenset(ops)
        if not self.ops <= OPERATIONS:
            raise InvalidArgument(f"no such operations: {sorted(self.ops - OPERATIONS)}")
        self.fault = Fault(kind)
        self.count = 0  # operations seen
        self.fired = 0  # faults handed out
        self.log: list[tuple[str, str, int]] = []  # (op, path, nbytes) of each operation seen
        self._lock = threading.Lock()
        self._resumed = threading.Event()
        self._hanging = threading.Semaphore(0)

    def next(self, op: str, path: str, nbytes: int) -> Fault | None:
        if op not in self.ops:
            return None
        with self._lock:
            self.count += 1
            self.log.append((op, path, nbytes))
            if not self.strikes(path):
                return None
            self.fired += 1
            return self.fault

    def strikes(self, path: str) -> bool:
        raise NotImplementedError

    def wait(self) -> None:
        self._hanging.release()
        self._resumed.wait()

    def wait_until_hanging(self, timeout_s: float = 10.0) -> None:
        """Block until one more operation hangs than at the last call; TimeoutError if none does."""
        if not self._hanging.acquire(timeout=timeout_s):
            raise TimeoutError("no operation hangs")

    def resume(self) -> None:
        """Let all that hangs go on; nothing hangs from now on."""
        self._resumed.set()


class NthFault(_Plan):
    """The n-th operation (from 1) fails, once or it and all later ones. Sweep n upwards until `count < n`: by then a
    run of the work has gone through without a fault. n = 0 never fails and only counts."""

    def __init__(self, n: int, kind: FaultKind, once: bool = True, ops: Iterable[str] | None = None) -> None:
        super().__init__(kind, ops)
        self._n = n
        self._once = once

    def strikes(self, path: str) -> bool:
        return 0 < self._n == self.count or (not self._once and 0 < self._n < self.count)


class FaultWhile(_Plan):
    """While `armed`, every operation of the kinds in `ops` on a path that contains `path` fails (a full disk, a dead
    one); set `armed = False` and it is well again."""

    def __init__(self, kind: FaultKind, ops: Iterable[str] | None = None, path: str = "") -> None:
        super().__init__(kind, ops)
        self._path = path
        self.armed = True

    def strikes(self, path: str) -> bool:
        return self.armed and self._path in path


class FaultyFiles(FilesAround):
    """`inner` with the faults of `plan`, for the namespace and for every file opened through it."""

    def __init__(self, inner: Files, plan: FaultPlan) -> None:
        super().__init__(inner)
        self.plan = plan

    def wrap(self, file: File) -> File:
        return _FaultyFile(self, file)

    def strike(self, op: str, path: str, nbytes: int = 0) -> Fault | None:
        """Ask the plan; raises or hangs as it says. Returns a fault that the operation itself must act out."""
        fault = self.plan.next(op, path, nbytes)
        if fault is None:
            return None
        if fault.kind in _ERRORS:
            code = _ERRORS[fault.kind]
            raise OSError(code, os.strerror(code), path)
        if fault.kind == "hang":
            self.plan.wait()
            return None
        return fault

    def create(self, path: str, *, direct: bool = True) -> File:
        self.strike("create", path)
        return super().create(path, direct=direct)

    def open(self, path: str, *, direct: bool = True, write: bool = False) -> File:
        self.strike("open", path)
        return super().open(path, direct=direct, write=write)

    def write_once(self, path: str, data: bytes) -> bool:
        fault = self.strike("write_once", path, len(data))
        if fault is not None and fault.kind == "torn":
            data = data[: int(len(data) * fault.fraction)]
        created = self.inner.write_once(path, data)
        self.strike("link", path)
        return created

    def read(self, path: str) -> bytes:
        fault = self.strike("read", path)
        data = self.inner.read(path)
        return data if fault is None else data[: int(len(data) * fault.fraction)]

    def unlink(self, path: str) -> None:
        self.strike("unlink", path)
        self.inner.unlink(path)

    def sync_directory(self, path: str) -> None:
        self.strike("sync_directory", path)
        self.inner.sync_directory(path)

    def list(self, path: str) -> builtins.list[str]:
        self.strike("list", path)
        return self.inner.list(path)


class _FaultyFile(FileAround):
    def __init__(self, files: FaultyFiles, inner: File) -> None:
        super().__init__(inner)
        self._files = files

    def preadv(self, buffers: Sequence[Buffer], offset: int) -> int:
        return self._transfer("preadv", self.inner.preadv, buffers, offset)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        return self._transfer("pwritev", self.inner.pwritev, buffers, offset)

    def allocate(self, offset: int, length: int) -> None:
        self._files.strike("allocate", self.path, length)
        self.inner.allocate(offset, length)

    def truncate(self, length: int) -> None:
        self._files.strike("truncate", self.path)
        self.inner.truncate(length)

    def datasync(self) -> None:
        self._files.strike("datasync", self.path)
        self.inner.datasync()

    def _transfer(
        self, op: str, move: Callable[[Sequence[Buffer], int], int], buffers: Sequence[Buffer], offset: int
    ) -> int:
        nbytes = total_bytes(buffers)
        fault = self._files.strike(op, self.path, nbytes)
        if fault is None:
            return move(buffers, offset)
        left = prefix = fault.prefix(nbytes)
        pieces: list[Buffer] = []
        for piece in buffers:
            if left:
                pieces.append(piece[: min(left, piece.nbytes)])
                left -= pieces[-1].nbytes
        moved = move(pieces, offset) if prefix else 0
        return nbytes if fault.kind == "torn" else moved
