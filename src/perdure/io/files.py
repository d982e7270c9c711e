"""Files of one root directory on a POSIX file system, opened for direct I/O wherever the file system allows it.

Contract
- Where O_DIRECT is refused the file is opened buffered; `direct` says what is in force.
- Memory that is not aligned for direct I/O costs a copy through scratch memory; a write whose offset or length is not
  aligned switches its file to buffered I/O for good. Both are right, neither is fast.
- `create` returns after the empty file, and every directory made for it, are durable. `write_once` is atomic and
  durable where the file system has hard links; without them it is exclusive, but a power cut may leave a torn file.
- `close` is safe while transfers run: they finish or fail with EBADF, and never reach another file, because the
  descriptor's number is given up only with the last reference to the `File`.
- Never: a path outside the root (absolute, `..`, a symbolic link as the last component), a descriptor inherited by a
  child program.
- Not guaranteed: anything about files that other programs change underneath.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from typing import Final

from perdure import limits
from perdure.errors import InvalidArgument, StorePathError
from perdure.io.api import Buffer
from perdure.io.memory import Scratch, address, aligned_buffer

TEMPORARY_SUFFIX: Final = ".tmp"
"""End of the names `write_once` uses; a crash may leave one, never under the final name."""

_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_SECTOR_BYTES: Final = 512
_FALLOC_FL_KEEP_SIZE: Final = 1
_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS)
_NO_HARD_LINKS: Final = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_MISALIGNED: Final = (errno.EINVAL, errno.EFAULT)  # Linux 6.18 answers EFAULT to vectors smaller than a sector
_FILE_MODE: Final = 0o600  # what models remember of conversations is nobody else's
_DIRECTORY_MODE: Final = 0o700

_libc = ctypes.CDLL(None, use_errno=True)


def checked_path(path: str) -> str:
    """The path itself, if it stays below the root it is relative to; else InvalidArgument."""
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise InvalidArgument(f"{path!r}: paths are relative to the root, without '.', '..' or empty components")
    return path


def reserve_beyond_end(path: str | os.PathLike[str], nbytes: int) -> None:
    """Blocks for `nbytes` behind the end of a file, whose size stays: so far it grows on a full disk. Best effort."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _fallocate(fd, os.fstat(fd).st_size, nbytes, _FALLOC_FL_KEEP_SIZE)
        finally:
            os.close(fd)


def _fallocate(fd: int, offset: int, length: int, mode: int = 0) -> None:
    """fallocate(2) itself: where it is missing, glibc's posix_fallocate rewrites bytes under other writers."""
    call = getattr(_libc, "fallocate", None)
    if call is None:
        if mode == 0:
            os.posix_fallocate(fd, offset, length)
        return
    while call(fd, mode, ctypes.c_longlong(offset), ctypes.c_longlong(length)) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _gather(buffers: Sequence[Buffer], into: memoryview) -> None:
    at = 0
    for piece in buffers:
        into[at : at + piece.nbytes] = piece
        at += piece.nbytes


def _scatter(source: memoryview, buffers: Sequence[Buffer]) -> int:
    at = 0
    for piece in buffers:
        part = source[at : at + piece.nbytes]
        piece[: part.nbytes] = part
        at += part.nbytes
        if part.nbytes < piece.nbytes:
            break
    return at


class PosixFile:
    """One open file. Thread-safe; transfers may move fewer bytes than asked (the engine continues them)."""

    native = True

    def __init__(self, path: str, fd: int, *, direct: bool, memory_alignment: int, scratch: Scratch) -> None:
        self._fd = fd
        self._closed = False
        self._scratch = scratch
        self.path = path
        self.direct = direct
        self.memory_alignment = memory_alignment
        self.device = os.fstat(fd).st_dev

    def fileno(self) -> int:
        return self._fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def preadv(self, buffers: Sequence[Buffer], offset: int) -> int:
        try:
            return os.preadv(self._fd, buffers, offset)
        except OSError as error:
            if error.errno not in _MISALIGNED or not self._misaligned(buffers, offset):
                raise
        return self._read_through_scratch(buffers, offset)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        try:
            return os.pwritev(self._fd, buffers, offset)
        except OSError as error:
            if error.errno not in _MISALIGNED or not self._misaligned(buffers, offset):
                raise
        nbytes = sum(piece.nbytes for piece in buffers)
        if (offset | nbytes) & (self.memory_alignment - 1):
            self._leave_direct()
            return os.pwritev(self._fd, buffers, offset)
        lease = self._scratch.take(nbytes)
        try:
            _gather(buffers, lease.view)
            return os.pwritev(self._fd, [lease.view], offset)
        finally:
            lease.give_back()

    def allocate(self, offset: int, length: int) -> None:
        """Reserve `length` bytes; where the file system cannot, only the size is set, and ENOSPC comes with a write."""
        try:
            _fallocate(self._fd, offset, length)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise OSError(error.errno, error.strerror, self.path) from None
            if self.size() < offset + length:
                os.ftruncate(self._fd, offset + length)

    def truncate(self, length: int) -> None:
        os.ftruncate(self._fd, length)

    def datasync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):  # out of descriptors: then the file itself stays open until __del__
            # The number stays taken by a descriptor that refuses transfers, until no request can hold it any more.
            tombstone = os.open("/", os.O_PATH | os.O_CLOEXEC)
            try:
                os.dup2(tombstone, self._fd, inheritable=False)
            finally:
                os.close(tombstone)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._fd)

    def _misaligned(self, buffers: Sequence[Buffer], offset: int) -> bool:
        if not self.direct:
            return False
        bits = offset
        for piece in buffers:
            bits |= address(piece) | piece.nbytes
        return bool(bits & (self.memory_alignment - 1))

    def _read_through_scratch(self, buffers: Sequence[Buffer], offset: int) -> int:
        nbytes = sum(piece.nbytes for piece in buffers)
        start = offset - offset % limits.page_bytes
        end = -(-(offset + nbytes) // limits.page_bytes) * limits.page_bytes
        lease = self._scratch.take(end - start)
        try:
            got = os.preadv(self._fd, [lease.view], start) - (offset - start)
            if got <= 0:
                return 0
            return _scatter(lease.view[offset - start : offset - start + got], buffers)
        finally:
            lease.give_back()

    def _leave_direct(self) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
        self.direct = False


class PosixFiles:
    """The namespace below `root`, which must be a directory. `opener` and `linker` are seams for tests.

    Raises StorePathError if the root is missing or no directory; all else raises OSError as the system calls do, and
    InvalidArgument for a path that would leave the root.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        opener: Callable[[str, int, int], int] = os.open,
        linker: Callable[[str, str], None] = os.link,
    ) -> None:
        self.root = os.path.realpath(root)
        self._opener = opener
        self._linker = linker
        self._scratch = Scratch()
        try:
            mode = os.stat(self.root).st_mode
        except OSError as error:
            raise StorePathError(error.errno, f"{self.root}: {error.strerror}") from error
        if not stat.S_ISDIR(mode):
            raise StorePathError(errno.ENOTDIR, f"{self.root}: not a directory")
        self.direct, self.memory_alignment = self._probe()

    def create(self, path: str, *, direct: bool = True) -> PosixFile:
        full = self._resolve(path)
        self._make_directories(os.path.dirname(full))
        # Opened twice: open(O_CREAT | O_DIRECT) leaves the file behind where it then refuses O_DIRECT.
        fd = self._open(full, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.fsync(fd)
            self._sync(os.path.dirname(full))
        except BaseException:
            os.close(fd)
            raise
        if not (direct and self.direct):
            return self._file(path, fd, direct=False)
        os.close(fd)
        return self.open(path, write=True)

    def open(self, path: str, *, direct: bool = True, write: bool = False) -> PosixFile:
        full = self._resolve(path)
        flags = os.O_RDWR if write else os.O_RDONLY
        if direct and self.direct:
            try:
                return self._file(path, self._open(full, flags | _O_DIRECT), direct=True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return self._file(path, self._open(full, flags), direct=False)

    def write_once(self, path: str, data: bytes) -> bool:
        full = self._resolve(path)
        directory = os.path.dirname(full)
        self._make_directories(directory)
        temporary = f"{full}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        try:
            self._write_exclusive(temporary, data)
            try:
                self._linker(temporary, full)
                created = True
            except FileExistsError:
                created = False
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                created = self._write_final(full, data)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        self._sync(directory)  # also for the second writer, who relies on the first one's file from now on
        return created

    def read(self, path: str) -> bytes:
        fd = self._open(self._resolve(path), os.O_RDONLY)
        with open(fd, "rb") as source:
            return source.read()

    def unlink(self, path: str) -> None:
        os.unlink(self._resolve(path))

    def sync_directory(self, path: str) -> None:
        self._sync(self._resolve(path, directory=True))

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._resolve(path, directory=True)))
        except FileNotFoundError:
            return []

    def free_bytes(self) -> int:
        """What this user may still allocate."""
        state = os.statvfs(self.root)
        return state.f_bavail * state.f_frsize

    def _resolve(self, path: str, *, directory: bool = False) -> str:
        if directory and path in ("", "."):
            return self.root
        return f"{self.root}/{checked_path(path)}"

    def _open(self, full: str, flags: int) -> int:
        return self._opener(full, flags | os.O_CLOEXEC | os.O_NOFOLLOW, _FILE_MODE)

    def _file(self, path: str, fd: int, *, direct: bool) -> PosixFile:
        try:
            return PosixFile(path, fd, direct=direct, memory_alignment=self.memory_alignment, scratch=self._scratch)
        except BaseException:
            os.close(fd)
            raise

    def _make_directories(self, full: str) -> None:
        missing = []
        while not os.path.isdir(full):
            missing.append(full)
            full = os.path.dirname(full)
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, _DIRECTORY_MODE)
            self._sync(os.path.dirname(directory))

    def _sync(self, full: str) -> None:
        fd = os.open(full, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _write_exclusive(self, full: str, data: bytes) -> None:
        fd = self._open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            view = memoryview(data)
            while view.nbytes:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def _write_final(self, full: str, data: bytes) -> bool:
        """The way without hard links; a failed write is taken back, so that it does not count as the first one."""
        try:
            self._write_exclusive(full, data)
        except FileExistsError:
            return False
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(full)
            raise
        return True

    def _probe(self) -> tuple[bool, int]:
        """Whether direct transfers work below the root, and which memory alignment they ask for.

        One page is written to an unnamed file and read to addresses of both alignments. Where nothing may be written
        (a read-only mount), opening decides about O_DIRECT, and the stricter alignment is assumed.
        """
        page = limits.page_bytes
        if not _O_DIRECT:
            return False, page
        try:
            fd = self._opener(self.root, os.O_TMPFILE | os.O_RDWR | _O_DIRECT | os.O_CLOEXEC, _FILE_MODE)
        except OSError:
            return True, page
        try:
            memory = aligned_buffer(2 * page).data
            if os.pwritev(fd, [memory[:page]], 0) != page:
                return True, page
            try:
                os.preadv(fd, [memory[page + _SECTOR_BYTES : page + 2 * _SECTOR_BYTES]], 0)
            except OSError:
                return True, page
            return True, _SECTOR_BYTES
        except OSError as error:  # if the disk is not just full: O_DIRECT was taken at open and refused afterwards
            return error.errno in (errno.ENOSPC, errno.EDQUOT), page
        finally:
            os.close(fd)
