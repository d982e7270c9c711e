"""One LMDB environment per directory and process, with the care LMDB asks of its users.

Contract
- Transactions only through `read` and `write`; no transaction outlives the call. Safe from any number of threads.
- Every commit is fsynced before `write` returns, and is whole or absent after a crash or power cut. LMDB's unsynced
  modes are not used: on a file system that reorders writes they may lose the whole database.
- A full map is grown and the transaction repeated; a map grown by another process is adopted.
- Every LMDB error becomes `CatalogError` that says what failed, where, and what to do. Nothing was changed, except that
  an error of the commit itself leaves open whether it happened.
- Not usable in a forked child: calls raise `StoreClosed`, and closing touches nothing of the parent's.
- LMDB's pages carry no checksums. A file cut short is refused at open (reading it would kill the process by SIGBUS);
  flipped bits in a page may go unnoticed or give `CatalogError`. For block records that is harmless: they are hints.
- Local file systems only: LMDB's locks and shared map do not work across machines.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb

from perdure import limits
from perdure.errors import CatalogError, FormatError, InvalidArgument, ReadOnlyStore, StoreClosed

Result = TypeVar("Result")
Transaction = Any
"""lmdb.Transaction; the binding's types are not imported by the type checker."""

_FORMAT_KEY: Final = b"format"
_SHORTFALL_BYTES_MAX: Final = limits.MIB  # pages that were freed in the transaction that made them are never written
_DAMAGE: Final = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """What an environment is for: its databases, its format, and the words for its errors."""

    name: str
    databases: tuple[str, ...]
    format_version: int
    when_damaged: str


class _Gate:
    """Many readers inside at once, or one thread alone; closed for good in the end."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._inside = 0
        self._alone = False
        self.closed = False

    def enter(self) -> None:
        with self._condition:
            while self._alone:
                self._condition.wait()
            if self.closed:
                raise StoreClosed("the catalog was closed")
            self._inside += 1

    def leave(self) -> None:
        with self._condition:
            self._inside -= 1
            if self._alone and self._inside == 0:
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._condition:
            while self._alone:
                self._condition.wait()
            self._alone = True
            while self._inside:
                self._condition.wait()
        try:
            yield
        finally:
            with self._condition:
                self._alone = False
                self._condition.notify_all()


class Environment:
    """The process's one handle of the LMDB files in a directory; shared by all `Connection`s to them."""

    def __init__(self, path: Path, kind: Kind, map_bytes: int, read_only: bool):
        self.path, self.kind, self.read_only = path, kind, read_only
        self.users = 1
        self._pid = os.getpid()
        self._names = ("about", *kind.databases)
        self._gate = _Gate()
        self._write_lock = threading.Lock()
        self._writer: int | None = None  # the thread inside `write`
        self._readers_checked_s = time.monotonic()
        try:
            self._lmdb = self._open(map_bytes)
        except lmdb.Error as problem:
            raise self._error("opening it", problem) from problem
        except OSError as problem:
            raise CatalogError(f"{kind.name} {path}: {problem}; the directory must be writable") from problem
        try:
            self.identity = _identity(path)
            self._check_length()
            self.databases = self._open_databases()
            self._lmdb.reader_check()
        except lmdb.Error as problem:
            self._lmdb.close()
            raise self._error("opening it", problem) from problem
        except BaseException:
            self._lmdb.close()
            raise

    # --- opening

    def _open(self, map_bytes: int) -> Any:
        data = self.path / "data.mdb"
        if self.read_only and not data.exists():
            raise CatalogError(f"{self.kind.name} {self.path}: does not exist; open the store for writing once")
        if not self.read_only:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        created = not data.exists()
        environment = lmdb.open(
            str(self.path),
            map_size=0 if self.read_only else map_bytes,  # 0: as large as the last writer's
            max_dbs=len(self.kind.databases) + 1,
            max_readers=limits.catalog_reader_threads_max,
            max_spare_txns=1,
            readonly=self.read_only,
            create=False,
            mode=0o700,
        )
        if created:  # the names must survive a power cut as the first commit does
            _sync_directory(self.path)
            _sync_directory(self.path.parent)
        return environment

    def _check_length(self) -> None:
        """Refuse a data file that ends before its last page: touching what is missing raises SIGBUS."""
        data = self.path / "data.mdb"
        needed = (self._lmdb.info()["last_pgno"] + 1) * self._lmdb.stat()["psize"]
        length = data.stat().st_size  # asked for second: another process may be appending
        if length >= needed:
            return
        if self.read_only or needed - length > _SHORTFALL_BYTES_MAX:
            raise CatalogError(
                f"{self.kind.name} {data}: {length} bytes long, {needed} are in use: it was cut short; "
                f"{self.kind.when_damaged}"
            )
        os.truncate(data, needed)

    def _open_databases(self) -> dict[str, Any]:
        """Create everything in one transaction if the file is new; refuse a foreign file and other versions."""
        new = self._lmdb.stat()["entries"] == 0
        if new and self.read_only:
            raise CatalogError(f"{self.kind.name} {self.path}: is still empty; open the store for writing once")
        expected = f"{self.kind.name} {self.kind.format_version}"
        if self.read_only:
            # Not in a transaction of ours: the binding keeps finished read transactions for reuse instead of committing
            # them, and handles opened in one that never commits are lost.
            databases = {name: self._lmdb.open_db(name.encode(), create=False) for name in self._names}
            with self._lmdb.begin() as txn:
                found = txn.get(_FORMAT_KEY, db=databases["about"])
        else:
            with self._lmdb.begin(write=True) as txn:
                databases = {name: self._lmdb.open_db(name.encode(), txn=txn, create=new) for name in self._names}
                if new:
                    txn.put(_FORMAT_KEY, expected.encode(), db=databases["about"])
                found = txn.get(_FORMAT_KEY, db=databases["about"])
        if found != expected.encode():
            raise FormatError(
                f"{self.path}: holds {found!r}, this program needs {expected!r}; use the program that wrote it, or "
                f"{self.kind.when_damaged}"
            )
        return databases

    # --- transactions

    def read(self, database: Any, body: Callable[[Transaction], Result]) -> Result:
        """`body` in one read transaction (a snapshot). `body` must not call back into the catalog."""
        while True:
            self._gate.enter()
            try:
                with self._lmdb.begin(db=database) as txn:
                    return body(txn)
            except lmdb.MapResizedError:
                pass  # another process grew the map
            except lmdb.Error as problem:
                raise self._error("reading", problem) from problem
            finally:
                self._gate.leave()
            self._write("reading", self._adopt_map)

    def write(self, action: str, database: Any, body: Callable[[Transaction], Result]) -> Result:
        """`body` in one write transaction; may run again after the map was grown. If it changes nothing, nothing is
        written or fsynced. What it raises aborts the transaction and is raised here. Other writers wait, readers don't.
        """

        def transact() -> Result:
            txn = self._lmdb.begin(db=database, write=True)
            try:
                result = body(txn)
                if os.getpid() != self._pid:
                    raise StoreClosed("a callback forked; the child must not go on with its parent's transaction")
            except BaseException:
                if os.getpid() != self._pid:
                    raise
                # The binding's abort waits for a moment without any call in LMDB. Under steady reading that moment may
                # not come for minutes, so the readers are held back for it; commits don't wait.
                with self._gate.alone():
                    txn.abort()
                raise
            try:
                txn.commit()
            except lmdb.MapFullError:
                raise
            except lmdb.Error as problem:
                raise self._error(f"{action}: commit", problem, "read it again: it may have happened") from problem
            return result

        return self._write(action, transact)

    def _write(self, action: str, work: Callable[[], Result]) -> Result:
        if self._writer == threading.get_ident():
            raise CatalogError(f"{self.kind.name} {self.path}: {action} from inside a callback of a write")
        with self._write_lock:
            if self._gate.closed:
                raise StoreClosed("the catalog was closed")
            self._writer = threading.get_ident()
            try:
                self._check_readers()
                while True:
                    try:
                        return work()
                    except lmdb.MapFullError:
                        self._grow_map()
                    except lmdb.MapResizedError:
                        self._adopt_map()
            except lmdb.Error as problem:
                raise self._error(action, problem) from problem
            finally:
                self._writer = None

    def _check_readers(self) -> None:
        """A reader killed inside its transaction keeps old pages alive, so the file would grow until someone looks."""
        now_s = time.monotonic()
        if now_s - self._readers_checked_s >= limits.catalog_reader_check_s:
            self._readers_checked_s = now_s
            self._lmdb.reader_check()

    def _grow_map(self) -> None:
        size = self._lmdb.info()["map_size"]
        if size >= limits.catalog_map_bytes_max:
            raise CatalogError(f"{self.kind.name} {self.path}: is full at {size} bytes; nothing was changed")
        with self._gate.alone():
            self._lmdb.set_mapsize(
                min(max(2 * size, size + limits.catalog_map_grow_bytes_min), limits.catalog_map_bytes_max)
            )

    def _adopt_map(self) -> None:
        with self._gate.alone():
            self._lmdb.set_mapsize(0)

    def check_may_close(self) -> None:
        if self._writer == threading.get_ident():
            raise CatalogError(f"{self.kind.name} {self.path}: closed from inside a callback of a write")

    def close(self) -> None:
        with self._write_lock, self._gate.alone():
            self._gate.closed = True
            self._lmdb.close()

    def never_free(self) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._lmdb))

    def _error(self, action: str, problem: lmdb.Error, outcome: str = "nothing was changed") -> CatalogError:
        place = f"{self.kind.name} {self.path}: {action}: {problem}"
        if isinstance(problem, _DAMAGE):
            return CatalogError(f"{place}; it is damaged or not ours: {self.kind.when_damaged}")
        if isinstance(problem, lmdb.PanicError):
            return CatalogError(f"{place}; an earlier write failed half-way: close the store and open it again")
        if getattr(problem, "code", 0) in (errno.ENOSPC, errno.EDQUOT):
            return CatalogError(f"{place}; free space on its file system; {outcome}")
        return CatalogError(f"{place}; {outcome}")


class Connection:
    """One opener's use of an environment: what it may do, and until when."""

    def __init__(self, path: str | Path, kind: Kind, *, map_bytes: int, read_only: bool):
        least, most = limits.index_map_bytes_min, limits.catalog_map_bytes_max
        if not isinstance(map_bytes, int) or not least <= map_bytes <= most:
            raise InvalidArgument(f"map_bytes: {least} to {most} are possible, got {map_bytes!r}")
        self._pid = os.getpid()
        self._read_only = read_only
        self._environment = _attach(Path(path), kind, -(-map_bytes // limits.page_bytes) * limits.page_bytes, read_only)
        self._closed = False

    def database(self, name: str) -> Any:
        return self._environment.databases[name]

    def read(self, database: Any, body: Callable[[Transaction], Result]) -> Result:
        self.check_open()
        return self._environment.read(database, body)

    def write(self, action: str, database: Any, body: Callable[[Transaction], Result]) -> Result:
        self.check_open()
        if self._read_only:
            raise ReadOnlyStore(f"{self._environment.kind.name} {self._environment.path}: {action}: opened read-only")
        return self._environment.write(action, database, body)

    def check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the catalog was closed")
        if os.getpid() != self._pid:
            raise StoreClosed(f"the catalog was opened by process {self._pid}; a forked child must open its own")

    def close(self) -> None:
        """Idempotent; waits for calls in progress. In a forked child nothing happens."""
        if os.getpid() != self._pid:
            return
        with _environments_lock:
            if self._closed:
                return
            self._environment.check_may_close()
            self._closed = True
            self._environment.users -= 1
            if self._environment.users == 0:
                _environments.remove(self._environment)
                self._environment.close()


# LMDB must not open the same files twice in one process (closing one drops the locks of the other), yet a read-only
# store beside a writing one in the same process is legitimate: both use one environment.
_environments: list[Environment] = []
_environments_lock = threading.Lock()


def _attach(path: Path, kind: Kind, map_bytes: int, read_only: bool) -> Environment:
    with _environments_lock:
        identity = _identity(path)
        if identity is not None and identity in _parents:
            raise CatalogError(
                f"{kind.name} {path}: is open in the process that this one was forked from; open it after forking, or "
                "start processes with spawn"
            )
        for environment in _environments:
            if environment.identity == identity:
                if environment.kind != kind:
                    raise FormatError(f"{path}: is a {environment.kind.name}, not a {kind.name}")
                if environment.read_only and not read_only:
                    raise CatalogError(f"{kind.name} {path}: this process has it open read-only; close that first")
                environment.users += 1
                return environment
        environment = Environment(path, kind, map_bytes, read_only)
        _environments.append(environment)
        return environment


def _identity(path: Path) -> tuple[int, int] | None:
    """Of the data file, not of the path: a database deleted and made anew is another one."""
    try:
        status = (path / "data.mdb").stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _after_fork_in_child() -> None:
    """Leave the parent's environments alone for good: the binding would close them when their last reference goes (at
    the latest when the child ends), which gives the parent's place in the table of readers to others, or waits forever
    for a thread that was inside LMDB and exists only in the parent. So that reference never goes."""
    global _environments, _environments_lock
    for environment in _environments:
        environment.never_free()
        _parents.add(environment.identity)
    _environments, _environments_lock = [], threading.Lock()


_parents: set[tuple[int, int] | None] = set()
os.register_at_fork(after_in_child=_after_fork_in_child)
