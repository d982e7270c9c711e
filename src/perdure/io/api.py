"""The two seams through which every byte of block data reaches the disk.

`Files` is the namespace: create, open, sync, link, unlink, list. `Engine` moves data between files and memory:
batches of vectored requests with a class, a deadline and a bound on what is in flight per device.

Contract
- A request ends exactly once: DONE (every byte moved: short transfers are continued, never reported as done), FAILED
  (an OSError is attached; end of file on a read is `ShortTransfer`), or LATE (the deadline passed first).
- `done` is called once per request that ended DONE or FAILED before the deadline, never for a LATE one.
- A LATE request may still be running in the kernel. The engine keeps its buffers alive, and calls its `settle` hook
  once when the kernel can no longer touch them. For every other request `settle` is called right after `done`.
- Restores go before write-back: a waiting RESTORE request takes the next free place of its device.
- Not guaranteed: any order between the requests of a batch, or which thread calls `done` and `settle`.

Siblings: `ThreadEngine` (any file, any platform), `AioEngine` (Linux native AIO for O_DIRECT files: no thread hop,
which costs 60 us here against 53 us for a 64 KiB read), `NoopFiles`, `ThrottledFiles`, `FaultyFiles`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, runtime_checkable

Buffer = memoryview
"""One contiguous piece of memory, format 'B'."""


class IOClass(IntEnum):
    """Lower goes first."""

    RESTORE = 0
    WRITE_BACK = 1


class IOState(IntEnum):
    PENDING = 0
    DONE = 1
    FAILED = 2
    LATE = 3


class ShortTransfer(OSError):
    """The file ended before the read was complete (or the device stopped accepting a write)."""

    def __init__(self, path: str, offset: int, wanted: int, got: int):
        super().__init__(errno.ENODATA, f"{path}: {got} of {wanted} bytes at offset {offset}")


@runtime_checkable
class File(Protocol):
    """An open file. `direct` says whether it was opened with O_DIRECT."""

    path: str
    direct: bool
    device: int  # st_dev: what the in-flight cap counts by
    native: bool  # a plain file of the kernel's: an engine may go past preadv to its descriptor. False for siblings
    memory_alignment: int  # of addresses, offsets and lengths for direct transfers; others are slower, not wrong

    def fileno(self) -> int: ...

    def size(self) -> int: ...

    def preadv(self, buffers: Sequence[Buffer], offset: int) -> int: ...

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int: ...

    def allocate(self, offset: int, length: int) -> None:
        """Reserve space (posix_fallocate semantics: ENOSPC now rather than at a later write)."""
        ...

    def truncate(self, length: int) -> None: ...

    def datasync(self) -> None: ...

    def close(self) -> None: ...


class Files(Protocol):
    """The namespace of one root directory; paths are relative to it, and no call leaves it."""

    root: str
    memory_alignment: int  # of addresses and lengths for direct transfers (512 or 4096)

    def create(self, path: str, *, direct: bool = True) -> File:
        """O_EXCL create for writing, parent directories made; falls back to buffered where O_DIRECT is refused."""
        ...

    def open(self, path: str, *, direct: bool = True, write: bool = False) -> File: ...

    def write_once(self, path: str, data: bytes) -> bool:
        """Whole small file: temp, fsync, link, fsync of the directory. False if it exists already (first wins)."""
        ...

    def read(self, path: str) -> bytes: ...

    def unlink(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None: ...

    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted; empty if it does not exist."""
        ...

    def free_bytes(self) -> int: ...


@dataclass(slots=True, eq=False)
class Request:
    """One vectored transfer of adjacent bytes. `buffers` are writable for reads; at most IOV_MAX of them."""

    file: File
    offset: int
    buffers: Sequence[Buffer]
    write: bool = False
    context: object = None  # the caller's own
    settle: Callable[[], None] | None = None
    prepare: Callable[[], None] | None = None  # called once, just before a write, by the thread that carries it out
    state: IOState = IOState.PENDING
    error: OSError | None = None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(b.nbytes for b in self.buffers)


class Engine(Protocol):
    def run(
        self,
        requests: Sequence[Request],
        *,
        io_class: IOClass,
        deadline: float | None = None,
        done: Callable[[Request], None] | None = None,
    ) -> None:
        """Carry out a batch; returns when every request has ended. `deadline` is a `time.monotonic()` reading.

        An exception raised by `done` is raised here after the batch has settled or the deadline has passed."""
        ...

    def unsettled(self) -> int:
        """Late requests the kernel still works on."""
        ...

    def close(self) -> None: ...
