"""Linux native AIO by system call number (libaio is not installed everywhere): one kernel context and its requests.

Contract
- A context is used by one thread at a time. It keeps the memory of what it submitted referenced until the completion
  has been harvested and its slot cleared.
- Reads only, and only of memory and offsets aligned for the file: `load` refuses others.
- Submissions carry RWF_NOWAIT: the kernel refuses with EAGAIN what it could not start without blocking.
- Tolerated: partial submissions, signals. Never: a context destroyed in a forked child, where its number means nothing.

Interface: io_setup(2), io_submit(2), io_getevents(2), io_destroy(2); struct iocb and io_event of <linux/aio_abi.h>,
little-endian.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
import sys
from collections.abc import Iterator
from typing import Final

from perdure import limits
from perdure.io.api import Request
from perdure.io.engine import rest_of
from perdure.io.memory import aligned_buffer

_NUMBERS: Final = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}  # setup, destroy, getevents, submit
_SETUP, _DESTROY, _GETEVENTS, _SUBMIT = _NUMBERS.get(platform.machine(), (-1, -1, -1, -1))
# data, key, rw_flags, opcode, priority, fd, buffer, nbytes, offset, reserved, flags, resfd
_IOCB: Final = struct.Struct("<QIIHhIQQqQII")
_EVENT: Final = struct.Struct("<QQqq")  # data iocb res res2
_IOVEC: Final = struct.Struct("<QQ")
_PREAD: Final = 0
_PREADV: Final = 7
_NOWAIT: Final = 8  # RWF_NOWAIT
_SLOTS: Final = limits.aio_inflight_per_call_max
_SLOT_IOVEC_BYTES: Final = limits.io_vectors_max * _IOVEC.size

_syscall = ctypes.CDLL(None, use_errno=True).syscall  # releases the GIL: a submission may take 50 us for 2 MiB
_syscall.restype = ctypes.c_long
_addressof = ctypes.addressof
_writable_at = ctypes.c_char.from_buffer


class AioContext:
    """One kernel AIO context with `_SLOTS` places, used by one thread at a time. Raises OSError if none can be had.

    A loaded or submitted slot keeps its request, and so the memory, alive until `clear`.
    """

    def __init__(self) -> None:
        self.requests: list[Request | None] = [None] * _SLOTS
        self.moved = [0] * _SLOTS  # bytes of the request that earlier, short transfers moved
        self.free = list(range(_SLOTS))
        self.loaded: list[int] = []
        self.inflight = 0
        self._iocbs = bytearray(_SLOTS * _IOCB.size)
        self._iocbs_at = _addressof(_writable_at(self._iocbs))
        self._iovecs = aligned_buffer(_SLOTS * _SLOT_IOVEC_BYTES).data  # pages of it exist once they are used
        self._iovecs_at = _addressof(_writable_at(self._iovecs))
        self._pointers = (ctypes.c_uint64 * _SLOTS)()
        self._events = bytearray(_SLOTS * _EVENT.size)
        self._timeout = (ctypes.c_long * 2)()
        self._pid = os.getpid()
        # Arguments are built once: converting them on each call would cost more than the call.
        handle = ctypes.c_ulong(0)
        if _syscall(ctypes.c_long(_SETUP), ctypes.c_uint(_SLOTS), ctypes.byref(handle)) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._handle = handle
        self._count = ctypes.c_long(0)
        self._submit_arguments = (ctypes.c_long(_SUBMIT), handle, self._count, ctypes.byref(self._pointers))
        self._harvest_arguments = (
            ctypes.c_long(_GETEVENTS),
            handle,
            ctypes.c_long(1),
            ctypes.c_long(_SLOTS),
            ctypes.byref(ctypes.c_char.from_buffer(self._events)),
        )
        self._timeout_argument = ctypes.byref(self._timeout)

    def load(self, request: Request, moved: int = 0) -> bool:
        """Describe what remains of a read in a free slot. False: it is not aligned for direct I/O, nothing changed."""
        file = request.file
        buffers = rest_of(request.buffers, moved) if moved else request.buffers
        slot = self.free[-1]
        offset = bits = request.offset + moved
        if len(buffers) == 1:
            opcode = _PREAD
            at = _addressof(_writable_at(buffers[0]))
            count = buffers[0].nbytes
            bits |= at | count
        else:
            opcode = _PREADV
            first = position = slot * _SLOT_IOVEC_BYTES
            for buffer in buffers:
                nbytes = buffer.nbytes
                if nbytes:
                    at = _addressof(_writable_at(buffer))
                    bits |= at | nbytes
                    _IOVEC.pack_into(self._iovecs, position, at, nbytes)
                    position += _IOVEC.size
            at = self._iovecs_at + first
            count = (position - first) // _IOVEC.size
        if bits & (file.memory_alignment - 1):
            return False
        _IOCB.pack_into(
            self._iocbs, slot * _IOCB.size, slot, 0, _NOWAIT, opcode, 0, file.fileno(), at, count, offset, 0, 0, 0
        )
        self.free.pop()
        self.requests[slot] = request
        self.moved[slot] = moved
        self.loaded.append(slot)
        return True

    def submit(self) -> int:
        """Offer the loaded slots to the kernel; those it takes leave `loaded`. Returns the next one's errno, or 0."""
        loaded = self.loaded
        count = len(loaded)
        for index, slot in enumerate(loaded):
            self._pointers[index] = self._iocbs_at + slot * _IOCB.size
        self._count.value = count
        taken = _syscall(*self._submit_arguments)
        if taken == count:
            loaded.clear()
            self.inflight += count
            return 0
        if taken <= 0:
            return ctypes.get_errno() if taken else errno.EAGAIN
        del loaded[:taken]
        self.inflight += taken
        return 0

    def harvest(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Wait for a completion, take all there are: (slot, bytes moved or -errno). Empty: too late, or a signal."""
        if timeout_s is None:
            count = _syscall(*self._harvest_arguments, None)
        else:
            seconds = int(timeout_s)
            self._timeout[0] = seconds
            self._timeout[1] = int((timeout_s - seconds) * 1e9)
            count = _syscall(*self._harvest_arguments, self._timeout_argument)
        if count < 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                return []
            raise OSError(code, os.strerror(code))
        self.inflight -= count
        events = []
        for index in range(count):
            slot, _, result, _ = _EVENT.unpack_from(self._events, index * _EVENT.size)
            events.append((slot, result))
        return events

    def clear(self, slot: int) -> None:
        self.requests[slot] = None
        self.free.append(slot)

    def reset(self) -> None:
        """Clear the slots that were loaded for a single request, submitted or not; nothing may be in flight."""
        self.loaded.clear()
        if len(self.free) != _SLOTS:
            self.requests = [None] * _SLOTS
            self.free = list(range(_SLOTS))

    def busy(self) -> Iterator[Request]:
        """The requests of all slots that are loaded or in flight."""
        return (request for request in self.requests if request is not None)

    def destroy(self) -> None:
        """Give the context back to the kernel, which would first wait for what is in flight."""
        handle, self._handle.value = self._handle.value, 0
        if handle and self._pid == os.getpid():  # a forked child has no contexts
            _syscall(ctypes.c_long(_DESTROY), ctypes.c_ulong(handle))

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.destroy()


@functools.cache
def available() -> bool:
    if _SETUP < 0 or sys.byteorder != "little" or sys.maxsize < 2**32:
        return False
    try:
        AioContext().destroy()
    except OSError as error:
        return error.errno == errno.EAGAIN  # used up for now, not missing
    return True
