"""Page-aligned memory for direct I/O: buffers for callers, and a free-list of scratch buffers for the engine's users.

Contract
- Buffers are private anonymous mappings: page-aligned, zeroed when new, freed when the last reference goes.
- `Scratch` is thread-safe and bounds the bytes it keeps idle; the bytes that are taken are bounded by its users.
- A scratch buffer holds bytes of its earlier user (that is what makes it cheap): users write before they read.
- Never: a buffer handed out twice. A view that other code works on at the moment of `give_back` (an export is open: a
  hash, a decompressor, ctypes) is dropped instead of reused. Slices and arrays of the view are not noticed: they must
  not be used after it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.errors import InvalidArgument

_UINT8 = np.dtype(np.uint8)
_addressof = ctypes.addressof
_writable_at = ctypes.c_char.from_buffer  # 8x cheaper than asking numpy, refuses read-only memory


def aligned_buffer(nbytes: int) -> NDArray[np.uint8]:
    """`nbytes` of zeroed, page-aligned memory as a uint8 array of shape (nbytes,): needs no copy for direct I/O.

    The array owns the mapping: it is unmapped with the last view of it. Raises InvalidArgument for a negative size.
    """
    if nbytes < 0:
        raise InvalidArgument(f"aligned_buffer: nbytes must be >= 0, not {nbytes}")
    # Private, not the module's default of shared: a forked child must not write into the parent's blocks.
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(mapping, dtype=_UINT8)[:nbytes]


def address(view: memoryview) -> int:
    """The address of the first byte of a C-contiguous view (0 for an empty one). Valid while the view is alive."""
    if not view.nbytes:
        return 0
    if not view.readonly:
        return _addressof(_writable_at(view))
    return int(np.frombuffer(view, dtype=_UINT8).__array_interface__["data"][0])


def is_aligned(view: memoryview, alignment: int) -> bool:
    """Whether address and length are multiples of `alignment` (a power of two): what a direct transfer asks for."""
    return not (address(view) | view.nbytes) & (alignment - 1)


class ScratchLease:
    """One taken buffer: `view` has exactly the bytes asked for. Not thread-safe; `give_back` may be called again."""

    __slots__ = ("_buffer", "_owner", "view")

    def __init__(self, owner: Scratch, buffer: memoryview, nbytes: int) -> None:
        self._owner = owner
        self._buffer: memoryview | None = buffer
        self.view = buffer[:nbytes]

    def give_back(self) -> None:
        """Return the buffer. The view is released, so that a use after this raises ValueError."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        try:
            self.view.release()
        except BufferError:  # an export of the view is open: the memory is theirs now
            self._owner.take_back(None)
            return
        self._owner.take_back(buffer)


class Scratch:
    """A free-list of page-aligned buffers by power-of-two size; about 1 us per take and give-back."""

    def __init__(self, idle_bytes_max: int = limits.scratch_idle_bytes_max) -> None:
        self._idle_bytes_max = idle_bytes_max
        self._lock = threading.Lock()
        self._free: dict[int, list[memoryview]] = {}
        self.idle_bytes = 0
        self.taken = 0  # leases that are out now
        self.allocated = 0  # mappings ever made: what the free-list is there to keep low

    def take(self, nbytes: int) -> ScratchLease:
        """A buffer of `nbytes` (>= 0) with unspecified content."""
        if nbytes < 0:
            raise InvalidArgument(f"Scratch.take: nbytes must be >= 0, not {nbytes}")
        size = 1 << max(nbytes - 1, limits.page_bytes - 1).bit_length()
        with self._lock:
            self.taken += 1
            free = self._free.get(size)
            if free:
                self.idle_bytes -= size
                return ScratchLease(self, free.pop(), nbytes)
            self.allocated += 1
        try:
            return ScratchLease(self, aligned_buffer(size).data, nbytes)
        except BaseException:
            self.take_back(None)
            raise

    def wipe(self) -> None:
        """Overwrite what idle buffers still hold."""
        with self._lock:
            for buffer in (one for some in self._free.values() for one in some):
                np.frombuffer(buffer, np.uint8)[:] = 0

    def take_back(self, buffer: memoryview | None) -> None:
        with self._lock:
            self.taken -= 1
            if buffer is not None and self.idle_bytes + buffer.nbytes <= self._idle_bytes_max:
                self.idle_bytes += buffer.nbytes
                self._free.setdefault(buffer.nbytes, []).append(buffer)
