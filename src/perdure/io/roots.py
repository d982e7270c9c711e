"""One namespace over several directories, on several devices: the store's own, and roots that hold segments only.

    files under `segments/` lie in any root, the segment and its index in the same one; `Roots` finds them
    files under `mirrors/` are second copies (`Roots.second`, where they are called `segments/` too), in another root
    everything else lies in the store's directory

Contract
- A new segment goes where most space is free, among the roots that are there and do not fail; its second copy into
  another root, on another device if there is one.
- A root that is *away* (its mark is missing or wrong: not mounted, another disk) is not touched: nothing is made on the
  file system underneath. The mark is looked at before and after a file is made in a root, and before a file that is
  not found counts as gone. What is not found while a root is away raises RootUnavailable, never FileNotFoundError.
- A root that *fails* (repeated I/O errors) gets no new segments and is read as ever; after a quiet time and a probe
  that works it is in service again (`look`).
- What cannot be opened or read in its own root is taken from its second copy. `open(write=True)` never does that.
- Never: moving a file, or deciding that one is lost.
"""

from __future__ import annotations

import builtins
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from perdure import limits
from perdure.errors import InvalidArgument, RootUnavailable
from perdure.io.api import File, Files
from perdure.io.root_files import RootFile, noting

T = TypeVar("T")

_FIRST: Final = "segments"
_SECOND: Final = "mirrors"
_PROBE: Final = "root.probe"
_FAILURES: Final = frozenset(
    {
        errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.ESTALE,
        errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    }
)  # fmt: skip
"""What says something about a device. Not: full (ENOSPC), missing (ENOENT), or our own fault (EMFILE, EINVAL)."""


@dataclass(slots=True, eq=False)
class Root:
    """One directory. absent: why it cannot be used now, looked at afresh ("": it can). make: its namespace."""

    number: int
    path: str
    absent: Callable[[], str]
    make: Callable[[], Files]
    files: Files | None = None
    away: str = ""  # why
    failing: bool = False
    errors: deque[float] = field(default_factory=deque)
    errors_total: int = 0

    def state(self) -> str:
        return "away" if self.away else "failing" if self.failing else "ok"


class Roots:
    """`Files` over all roots; `roots[0]` is the store's directory. Thread-safe. Raises StorePathError where that is
    missing.

    mirrored: whether a segment (its id) may have a second copy; it is asked while a root is away.
    """

    def __init__(
        self,
        roots: Sequence[Root],
        *,
        clock: Callable[[], float] = time.monotonic,
        mirrored: Callable[[bytes], bool] = lambda _: True,
    ) -> None:
        if not roots or len(roots) > limits.roots_entries_max:
            raise InvalidArgument(f"{len(roots)} roots: 1 to {limits.roots_entries_max} can be used")
        self.roots, self.mirrored = tuple(roots), mirrored
        self._clock = clock
        self._where: dict[str, Root] = {}  # path without its suffix -> its root
        self._lock, self._writing = threading.Lock(), threading.Lock()
        for root in self.roots:
            root.away = root.absent()
            if not root.away:
                root.files = root.make()
        self._base = roots[0].files or roots[0].make()
        self.root = self._base.root
        self.memory_alignment = max(root.files.memory_alignment for root in self.roots if root.files is not None)
        self.second = SecondCopies(self)

    # --- as one namespace
    def create(self, path: str, *, direct: bool = True) -> File:
        if not _placed(path):
            return self._base.create(path, direct=direct)
        with suppress(FileNotFoundError, RootUnavailable):
            self._open(path, direct=direct, write=False).close()
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        root = self._place(path)
        with self._made_in(root, path) as files:
            file = files.create(path, direct=direct)
        return self._wrap(root, file)

    def open(self, path: str, *, direct: bool = True, write: bool = False) -> File:
        if not _placed(path):
            return self._base.open(path, direct=direct, write=write)
        return self._or_second(path, lambda where: self._open(where, direct=direct, write=write), only_first=write)

    def write_once(self, path: str, data: bytes) -> bool:
        if not _placed(path):
            return self._base.write_once(path, data)
        with self._writing:  # who writes it at the same time must write it into the same root
            root = self._beside(path)
            with self._made_in(root, path) as files:
                return files.write_once(path, data)

    def read(self, path: str) -> bytes:
        if not _placed(path):
            return self._base.read(path)
        return self._or_second(path, lambda where: self._anywhere(where, lambda _, files: files.read(where)))

    def unlink(self, path: str) -> None:
        """In every root that has it."""
        if not _placed(path):
            self._base.unlink(path)
            return
        removed, problem = False, None
        for root, files in self._there():
            try:
                with noting(self._note_for(root)):
                    files.unlink(path)
                removed = True
                self._remember(path, root)
            except FileNotFoundError:
                self._confirm(root)
            except OSError as error:
                problem = error
        if problem is not None:
            raise problem
        if not removed:
            raise self._missing(path)

    def sync_directory(self, path: str) -> None:
        if not _placed(path):
            self._base.sync_directory(path)
            return
        found = False
        for root, files in self._there():
            with suppress(FileNotFoundError), noting(self._note_for(root)):
                files.sync_directory(path)
                found = True
        if not found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def list(self, path: str) -> builtins.list[str]:
        """Of placed files: those in all roots that are there."""
        if not _placed(path):
            return self._base.list(path)
        names: set[str] = set()
        for root, files in self._there():
            with noting(self._note_for(root)):
                names.update(files.list(path))
        return sorted(names)

    def free_bytes(self) -> int:
        """Of all roots that take new segments; a device that holds several counts once."""
        free: dict[object, int] = {}
        for root, files in self._there():
            if not root.failing:
                with suppress(OSError):
                    free[os.stat(root.path).st_dev] = files.free_bytes()
        return sum(free.values())

    # --- health
    @property
    def complete(self) -> bool:
        """Whether all roots are there: what is not found then is gone."""
        return not any(root.away for root in self.roots)

    def look(self, *, probe: bool = True) -> bool:
        """Look again at roots that are away or fail; whether one has come back into service. probe: those that fail are
        tried, which writes to them."""
        back = False
        for root in self.roots:
            self._confirm(root)
            if root.away and not root.absent():
                root.files = root.files or root.make()
                root.away, back = "", True
            if probe and root.failing and not root.away and self._is_well(root):
                root.failing, back = False, True
        return back

    def status(self) -> builtins.list[dict[str, Any]]:
        """state: ok, failing (no new segments) or away (nothing is read or written)."""
        answer = []
        for root in self.roots:
            free = 0
            with suppress(OSError):
                free = root.files.free_bytes() if root.files is not None and not root.away else 0
            answer.append(
                {"root": root.number, "path": root.path, "state": root.state(), "why": root.away,
                 "free_bytes": free, "errors": root.errors_total}
            )  # fmt: skip
        return answer

    def note(self, root: Root, error: OSError) -> None:
        """A failure of the device, if it is one."""
        if error.errno not in _FAILURES or isinstance(error, RootUnavailable):
            return
        with self._lock:
            now = self._clock()
            root.errors_total += 1
            root.errors.append(now)
            while root.errors[0] < now - limits.root_window_s:
                root.errors.popleft()
            root.failing = root.failing or len(root.errors) > limits.root_errors_entries_max

    def _is_well(self, root: Root) -> bool:
        with self._lock:
            if root.errors and self._clock() - root.errors[-1] < limits.root_quiet_s:
                return False
        files, content = root.files, os.urandom(limits.page_bytes)
        if files is None:
            return False
        try:
            with noting(self._note_for(root)):
                with suppress(FileNotFoundError):
                    files.unlink(_PROBE)
                files.write_once(_PROBE, content)
                same = files.read(_PROBE) == content
                files.unlink(_PROBE)
        except OSError:
            with self._lock:
                root.errors.append(self._clock())  # also of a disk that is full: no reason to come back
            return False
        return same

    def _confirm(self, root: Root) -> None:
        """A file was not found there: is the root?"""
        why = root.absent()
        if why:
            root.away = why

    def _note_for(self, root: Root) -> Callable[[OSError], None]:
        return lambda error: self.note(root, error)

    # --- where things are
    def _there(self) -> Iterator[tuple[Root, Files]]:
        for root in self.roots:
            if not root.away and root.files is not None:
                yield root, root.files

    def _wrap(self, root: Root, file: File) -> File:
        return RootFile(file, self._note_for(root))

    def _open(self, path: str, *, direct: bool, write: bool) -> File:
        return self._anywhere(path, lambda root, files: self._wrap(root, files.open(path, direct=direct, write=write)))

    def _anywhere(self, path: str, use: Callable[[Root, Files], T]) -> T:
        """Of the first root where it works, the one it was found in last before the others."""
        known, problem = self._where.get(_stem(path)), None
        for root, files in sorted(self._there(), key=lambda one: one[0] is not known):
            try:
                with noting(self._note_for(root)):
                    found = use(root, files)
            except FileNotFoundError:
                self._confirm(root)
                continue
            except OSError as error:
                problem = error
                continue
            self._remember(path, root)
            return found
        raise problem or self._missing(path)

    def _or_second(self, path: str, use: Callable[[str], T], *, only_first: bool = False) -> T:
        try:
            return use(path)
        except OSError:
            if not only_first and path.startswith(f"{_FIRST}/"):
                with suppress(OSError):
                    return use(_second_of(path))
            raise

    def _missing(self, path: str) -> OSError:
        """It is nowhere: gone, or in a root that is away?"""
        known = self._where.get(_stem(path))
        away = [root for root in self.roots if root.away and (known is None or known is root)]
        if not away or (path.startswith(f"{_SECOND}/") and not self._may_have_second(path)):
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        one = away[0]
        return RootUnavailable(errno.ESTALE, f"{path}: not here, but root {one.number} is away ({one.away})")

    def _may_have_second(self, path: str) -> bool:
        try:
            return self.mirrored(bytes.fromhex(_stem(path).rpartition("/")[2]))
        except ValueError:
            return True

    def _remember(self, path: str, root: Root) -> None:
        if len(self._where) >= limits.roots_known_entries_max:
            self._where = {}
        self._where[_stem(path)] = root

    def _holder(self, path: str) -> Root | None:
        """Whose root has the segment of a path, as far as it can be told."""
        try:
            return self._found(path)
        except OSError:
            return None

    def _found(self, path: str) -> Root:
        """Raises FileNotFoundError if none has it, another OSError if it cannot be told."""
        segment = f"{_stem(path)}.seg"

        def look(root: Root, files: Files) -> Root:
            files.open(segment).close()
            return root

        return self._anywhere(segment, look)

    def _beside(self, path: str) -> Root:
        """Never in another root than the segment: where one part is known, the other counts as known to be too."""
        try:
            return self._found(path)
        except FileNotFoundError:
            return self._where.get(_stem(path)) or self._place(path)

    def _place(self, path: str) -> Root:
        """Where a new segment goes. Raises RootUnavailable if no root is fit."""
        twin = self._holder(_other_of(path))
        found: builtins.list[tuple[bool, int, int]] = []
        for root, files in self._there():
            self._confirm(root)
            if not root.away and not root.failing and root is not twin:
                with suppress(OSError), noting(self._note_for(root)):
                    apart = twin is None or os.stat(root.path).st_dev != os.stat(twin.path).st_dev
                    found.append((apart, files.free_bytes(), -root.number))
        if not found:
            what = "no second root" if twin is not None else "no root"
            raise RootUnavailable(
                errno.ENODEV,
                f"{path}: {what} is in service; `perdure status` says why: mount them or look at the disks",
            )
        number = -max(found)[2]
        return next(root for root in self.roots if root.number == number)

    @contextmanager
    def _made_in(self, root: Root, path: str) -> Iterator[Files]:
        """Around making a file: it stays only in a root that was there before and after."""
        self._confirm(root)
        if root.away or root.files is None:
            raise self._missing(path)
        with noting(self._note_for(root)):
            yield root.files
        self._confirm(root)
        if root.away:
            with suppress(OSError):
                root.files.unlink(path)
            raise RootUnavailable(errno.ESTALE, f"{path}: root {root.number} went away ({root.away})")
        self._remember(path, root)


class SecondCopies:
    """`Files` of the second copies of segments, under the names of the first."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self.root = roots.root
        self.memory_alignment = roots.memory_alignment

    def create(self, path: str, *, direct: bool = True) -> File:
        return self._called(path, self._roots.create(_second_of(path), direct=direct))

    def open(self, path: str, *, direct: bool = True, write: bool = False) -> File:
        return self._called(path, self._roots.open(_second_of(path), direct=direct, write=write))

    def write_once(self, path: str, data: bytes) -> bool:
        return self._roots.write_once(_second_of(path), data)

    def read(self, path: str) -> bytes:
        return self._roots.read(_second_of(path))

    def unlink(self, path: str) -> None:
        self._roots.unlink(_second_of(path))

    def sync_directory(self, path: str) -> None:
        self._roots.sync_directory(_second_of(path))

    def list(self, path: str) -> builtins.list[str]:
        return self._roots.list(_second_of(path))

    def free_bytes(self) -> int:
        return self._roots.free_bytes()

    @staticmethod
    def _called(path: str, file: File) -> File:
        file.path = path
        return file


def _placed(path: str) -> bool:
    return path.partition("/")[0] in (_FIRST, _SECOND)


def _second_of(path: str) -> str:
    folder, slash, rest = path.partition("/")
    if folder != _FIRST:
        raise InvalidArgument(f"{path!r}: only what lies under {_FIRST}/ has second copies")
    return f"{_SECOND}{slash}{rest}"


def _other_of(path: str) -> str:
    folder, slash, rest = path.partition("/")
    return f"{_SECOND if folder == _FIRST else _FIRST}{slash}{rest}"


def _stem(path: str) -> str:
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{name.partition('.')[0]}"
