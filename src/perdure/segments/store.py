"""Segment files and their second copies: names, handles, write-once indexes. POSIX directories.

Contract
- A segment id is used once, ever; a file is created O_EXCL by its one writer and deleted as a whole.
- Readers share descriptors, kept open in a bounded LRU. A deleted segment's descriptor stays valid until its last
  reader lets go; a reader that comes later gets FileNotFoundError, never other bytes.
- The second namespace, where there is one, holds the same file under the same name (`retained` durability): a mirror
  directory, or second copies in other roots (`io.roots`).
- With a cold tier, a segment whose record says so is opened there; its index stays on the disk.
- Never: recycling a name or an extent, writing to a segment that another writer created.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from perdure import limits
from perdure.errors import FormatError, KeyUnavailable, RootUnavailable
from perdure.governance.keystore import Keystore, SegmentKey
from perdure.io.api import File, Files
from perdure.keys import key_domain
from perdure.segments import format as fmt

_OPEN_FILES_MAX = 256


class Elsewhere(Protocol):
    """The cold tier, as far as reading goes."""

    def file(self, segment: bytes, *, fresh: bool = False) -> File | None:
        """None if the segment is not there; `fresh`: ask again, it was not on the disk."""
        ...


@dataclass(slots=True)
class _Handle:
    file: File
    users: int = 0
    doomed: bool = False  # close when the last user is gone


def segment_path(segment: bytes) -> str:
    name = segment.hex()
    return f"segments/{name[-2:]}/{name}.seg"


def index_path(segment: bytes) -> str:
    return segment_path(segment)[:-4] + ".idx"


class SegmentStore:
    """All segments of one store. Thread-safe."""

    def __init__(self, roots: Sequence[Files], root_secret: bytes, keys: Keystore | None = None):
        self.roots, self.keys = tuple(roots), keys
        self.cold: Elsewhere | None = None
        self._root_secret = root_secret
        self._handles: OrderedDict[bytes, _Handle] = OrderedDict()
        self._secrets: dict[bytes, bytes] = {}
        self._deletions = 0
        self._suspects: set[bytes] = set()
        self._lock = threading.Lock()
        self.making = threading.Lock()  # while a file of a copy is made, or the files of a segment are deleted

    def secret(self, segment: bytes) -> bytes:
        """Secret of a segment's header MACs."""
        secret = self._secrets.get(segment)
        if secret is None:
            secret = self._secrets[segment] = fmt.segment_secret(self._root_secret, segment)
        return secret

    def new_key(self, tenant: bytes, epoch: int, segment: bytes) -> SegmentKey | None:
        """Key of a segment about to be created, durable; None if the tenant's are not encrypted. Raises OSError."""
        if self.keys is None or not self.keys.encrypts(tenant):
            return None
        try:
            return self.keys.create(key_domain(tenant, epoch), segment)
        except KeyUnavailable as error:
            raise OSError(errno.ENOKEY, f"nothing can be encrypted: {error}") from error

    def create(self, segment: bytes, *, roots: int = 1) -> list[File]:
        """New empty segment file in the first `roots` roots; all or none."""
        files: list[File] = []
        try:
            for root in self.roots[:roots]:
                files.append(root.create(segment_path(segment)))  # noqa: PERF401 (what was made must be undone)
        except OSError:
            for file, root in zip(files, self.roots, strict=False):
                file.close()
                root.unlink(segment_path(segment))
            raise
        return files

    def room_elsewhere(self, nbytes: int) -> bool:
        """A root is full: whether a new segment would find room in another one."""
        return len(self.roots) > 1 and self.roots[0].free_bytes() >= nbytes

    def acquire(self, segment: bytes) -> File:
        """Shared handle for reading; give it back with `release`. Raises OSError (FileNotFoundError: it is gone)."""
        with self._lock:
            handle = self._handles.get(segment)
            if handle is not None and not handle.doomed:
                handle.users += 1
                self._handles.move_to_end(segment)
                return handle.file
            deletions = self._deletions
        file = self.reopen(segment)
        with self._lock:
            # Deleted since it was opened? Then nobody would ever close it, and its bytes would stay on the disk.
            handle = self._handles.setdefault(segment, _Handle(file, doomed=deletions != self._deletions))
            handle.users += 1
            stale = self._shrink()
        if handle.file is not file:  # another thread was faster
            stale.append(file)
        for other in stale:
            other.close()
        return handle.file

    def merging(self, segment: bytes) -> tuple[int, int]:
        """Bytes that one request of it may read, and how far apart records of one request may lie."""
        if self.cold is not None and self.cold.file(segment) is not None:
            return limits.cold_read_bytes_max, limits.cold_gap_bytes_max
        return limits.read_io_bytes_max, 0

    def release(self, segment: bytes, file: File) -> None:
        with self._lock:
            handle = self._handles.get(segment)
            if handle is not None and handle.file is file:
                handle.users -= 1
                if not (handle.doomed and handle.users == 0):
                    return
                del self._handles[segment]
        file.close()

    def _shrink(self) -> list[File]:
        """Unused handles beyond the bound, oldest first (the lock is held; closing is the caller's)."""
        excess = len(self._handles) - _OPEN_FILES_MAX
        idle = [name for name, handle in self._handles.items() if handle.users == 0][: max(excess, 0)]
        return [self._handles.pop(name).file for name in idle]

    def reopen(self, segment: bytes, *, root: int = 0) -> File:
        """A descriptor of one's own (second look at a block that did not verify). The caller closes it."""
        far = None if self.cold is None else self.cold.file(segment)
        if far is not None:
            return far
        try:
            return self.roots[root].open(segment_path(segment))
        except FileNotFoundError:
            far = None if self.cold is None else self.cold.file(segment, fresh=True)  # moved there by another process
            if far is None:
                raise
            return far

    def write_index(self, segment: bytes, data: bytes, *, roots: int = 1) -> None:
        """Write-once; an index that is there already stays."""
        for root in self.roots[:roots]:
            root.write_once(index_path(segment), data)

    def read_index(self, segment: bytes) -> fmt.SegmentIndex:
        """Raises FileNotFoundError (never sealed) or FormatError (damaged in every root)."""
        problem: FormatError | None = None
        for root in self.roots:
            try:
                return fmt.unpack_index(root.read(index_path(segment)), segment, self.secret(segment))
            except FormatError as error:
                problem = error
            except FileNotFoundError:
                continue
        if problem is not None:
            raise problem
        raise FileNotFoundError(index_path(segment))

    def delete(self, segment: bytes) -> None:
        """Unlink file and index in every root, durably; what is already gone is fine."""
        self.forget(segment)
        if self.keys is not None:
            self.keys.drop(segment)
        self._unlink(segment, (segment_path(segment), index_path(segment)))

    def leave_disk(self, segment: bytes) -> None:
        """Unlink the file in every root, durably; its index stays. Raises OSError."""
        self.forget(segment)
        self._unlink(segment, (segment_path(segment),))

    def _unlink(self, segment: bytes, paths: Sequence[str]) -> None:
        with self.making:
            for root in self.roots:
                for path in paths:
                    with contextlib.suppress(FileNotFoundError):
                        root.unlink(path)
                # Else a power cut could bring back files whose control record is gone: bytes nobody would account for.
                with contextlib.suppress(FileNotFoundError):
                    root.sync_directory(segment_path(segment).rpartition("/")[0])

    def exists(self, segment: bytes) -> bool:
        """Whether a root has its file, or may have it, being away. Raises OSError."""
        for root in self.roots:
            try:
                root.open(segment_path(segment)).close()
            except FileNotFoundError:
                continue
            except RootUnavailable:
                return True
            return True
        return False

    def check_deletable(self, segment: bytes) -> None:
        """Raises OSError while a copy is where it cannot be removed."""
        for root in self.roots if len(self.roots) > 1 else ():
            with contextlib.suppress(FileNotFoundError):
                root.open(segment_path(segment), write=True).close()

    def check_mounted(self) -> None:
        """A file is missing: raises OSError if the whole store is, for then that says nothing about the file."""
        if self.roots[0].list("segments"):
            return
        try:
            self.roots[0].read("perdure.json")
        except FileNotFoundError:
            raise OSError(errno.ESTALE, "neither segments nor perdure.json: the file system is not mounted") from None

    def note_suspects(self, segments: set[bytes]) -> None:
        """A block in each could be read from its second copy only."""
        with self._lock:
            self._suspects |= segments

    def take_suspects(self) -> set[bytes]:
        with self._lock:
            suspects, self._suspects = self._suspects, set()
            return suspects

    def forget(self, segment: bytes) -> None:
        """Its file goes: let go of the shared handle, whose bytes would stay on the disk."""
        with self._lock:
            self._deletions += 1
            handle = self._handles.get(segment)
            self._secrets.pop(segment, None)
            if handle is None:
                return
            handle.doomed = handle.users > 0
            if not handle.doomed:
                del self._handles[segment]
        if not handle.doomed:
            handle.file.close()

    def list(self) -> builtins.list[bytes]:
        """Ids of all segment files, second copies included, in id (time) order."""
        files = (one for root in self.roots for one in _files(root))
        return sorted({segment for _, segment, suffix in files if suffix == "seg"})

    def temporaries(self) -> Iterator[tuple[Files, str, bytes]]:
        """(root, path, segment) of files that a `write_once` left when its process died."""
        for root in self.roots:
            for path, segment, suffix in _files(root):
                if suffix.endswith("tmp"):
                    yield root, path, segment

    def close(self) -> None:
        with self._lock:
            files = [handle.file for handle in self._handles.values()]
            self._handles.clear()
        for file in files:
            file.close()


def _files(root: Files) -> Iterator[tuple[str, bytes, str]]:
    """(path, segment, suffix) of the files of all segments in a root."""
    for shard in root.list("segments"):
        for name in root.list(f"segments/{shard}"):
            stem, _, suffix = name.partition(".")
            if len(stem) == 2 * limits.id_bytes:
                with contextlib.suppress(ValueError):  # not ours
                    yield f"segments/{shard}/{name}", bytes.fromhex(stem), suffix
