"""Memory shared between processes: memfds, their seals, and maps that end with their last view.

Contract
- A memfd has no name in any file system: nothing is left in /dev/shm by a crash, the kernel frees it with the last map.
- `seal_for_readers`: afterwards nobody can map it writable, write to it, or change its size; the maker's own map stays
  writable (F_SEAL_FUTURE_WRITE). `seal_size`: the size is fixed, so no reader of it can be killed by SIGBUS.
- A map is unmapped when the last view or array of it is gone, never before; it is not inherited by forked children.
- A map keeps no descriptor (Python's mmap keeps a duplicate for each, and a pool has thousands of chunks).

Not guaranteed: huge pages. Where the machine has none reserved, ordinary ones are used and `huge` says so.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perdure.errors import InvalidArgument

_F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1; not named in fcntl
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MFD_HUGETLB: Final = 4
HUGE_PAGE_BYTES: Final = 2 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MAP_SHARED: Final = 1


def map_fd(fd: int, nbytes: int, *, writable: bool) -> NDArray[np.uint8]:
    """The first `nbytes` of a descriptor as a uint8 array (nbytes,). The descriptor may be closed afterwards.

    Raises OSError where the kernel refuses (EPERM: the memory is sealed against writing)."""
    if nbytes < 1:
        raise InvalidArgument(f"map_fd: {nbytes} bytes cannot be mapped")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    at = _LIBC.mmap(None, nbytes, protection, _MAP_SHARED, fd, 0)
    if at == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {nbytes} bytes: {os.strerror(number)}")
    _LIBC.madvise(at, nbytes, mmap.MADV_DONTFORK)
    memory = (ctypes.c_ubyte * nbytes).from_address(at)
    weakref.finalize(memory, _LIBC.munmap, at, nbytes).atexit = False
    array: NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
    array.flags.writeable = writable
    return array


def populate(array: NDArray[np.uint8]) -> bool:
    """Make every page present now, so that no request waits for page faults. False if the kernel cannot (then they
    come one by one, as they are used)."""
    at = array.__array_interface__["data"][0]
    return not _LIBC.madvise(at, array.nbytes, _MADV_POPULATE_WRITE)


class SharedMemory:
    """A memfd of this process's making and its writable map. `fd` is for sending; `array` is uint8 (nbytes,)."""

    def __init__(self, name: str, nbytes: int, *, huge: bool = False):
        self.nbytes = nbytes
        self.huge = False
        self.fd = -1
        if huge and nbytes % HUGE_PAGE_BYTES == 0:
            with suppress(OSError):  # none reserved, or too few
                self._make(name, _MFD_HUGETLB)
                self.huge = True
        if self.fd < 0:
            self._make(name, 0)

    def _make(self, name: str, flags: int) -> None:
        fd = os.memfd_create(f"perdure-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.ftruncate(fd, self.nbytes)
            self.array = map_fd(fd, self.nbytes, writable=True)
            if flags & _MFD_HUGETLB and not populate(self.array):  # else a later fault would be SIGBUS
                raise OSError(f"{self.nbytes} bytes of huge pages are not there")
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd

    def seal_size(self) -> None:
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def seal_for_readers(self) -> None:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    def close(self) -> None:
        """Close the descriptor and let go of the map; idempotent, but one thread at a time. Views that are out keep the
        memory."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self.array = np.zeros(0, np.uint8)
            os.close(fd)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def is_shrink_sealed(fd: int) -> bool:
    """Whether nobody can cut this memory short: only then is it safe to touch it through a map."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # not a memfd
        return False


@contextmanager
def closing(fds: list[int]) -> Iterator[list[int]]:
    """Close received descriptors at the end, whatever happens."""
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)
