"""The store's directory: what marks it as one, who may write it, and its root secret.

    DIR/perdure.json    format version, store id, creation time
    DIR/lock            flock()ed by the one writer; names its host, pid and boot id (in a store that many hosts share:
                        in each one's own state directory)
    DIR/keystore/       root secret (0600); everything keyed is derived from it
    DIR/control/        control store (LMDB): the truth, fully synced
    DIR/index/          block index (LMDB): disposable, `perdure rebuild DIR` recreates it
    DIR/segments/       block data and segment indexes
    DIR/mirrors/        of a store over several roots (see `roots`): second copies of other roots' segments

Contract: nothing is created in a directory that is not empty and not a store; a store of a newer format is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure import limits
from perdure.clock import Clock
from perdure.errors import FormatError, StoreLocked, StorePathError
from perdure.io.mounts import NETWORK, mount_of

MARK = "perdure.json"
_SECRET = "keystore/root.key"


@dataclass(frozen=True, slots=True)
class Identity:
    """Contents of perdure.json."""

    store: str
    created_s: int
    catalog: str = "lmdb"  # kind, see `perdure.catalogs`


def prepare(path: Path, *, create: bool, clock: Clock, catalog: str = "lmdb") -> Identity:
    """Check a directory, making it a store (with that kind of catalog) if it is missing or empty and `create` is set.

    Raises StorePathError (missing, not a directory, not writable) or FormatError (something else lies there, or newer).
    """
    try:
        if not path.exists():
            if not create:
                raise StorePathError(f"{path}: no such directory; a store is made by opening it for writing")
            path.mkdir(mode=0o700, parents=True, exist_ok=True)  # another host may be at it
        if not path.is_dir():
            raise StorePathError(f"{path}: not a directory; a Perdure store is a directory")
        mark = path / MARK
        if not mark.exists():
            _refuse_foreign(path, create)
            identity = Identity(secrets.token_hex(16), int(clock.wall()))
            _write_secret(path)
            content = {"format": limits.format_version, "store": identity.store, "created_s": identity.created_s}
            if catalog != identity.catalog:
                content["catalog"] = catalog
            _write_new(mark, json.dumps(content).encode())
        return _read_mark(mark)
    except PermissionError as error:
        raise StorePathError(f"{path}: {error.strerror} ({error.filename}); check owner and mode") from error
    except StorePathError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise StorePathError(f"{path}: {error}") from error


def _refuse_foreign(path: Path, create: bool) -> None:
    known = {"keystore", "lock"}  # a creation that was cut off
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(f"{MARK}."))
    if MARK in names:  # another process has made it a store at this moment
        return
    if not set(names) <= known:
        raise FormatError(f"{path}: not empty and not a Perdure store (no {MARK}, but {names[0]!r}); use an empty one")
    if not create:
        raise FormatError(f"{path}: not a Perdure store (no {MARK})")


def _read_mark(mark: Path) -> Identity:
    try:
        content: Any = json.loads(mark.read_text())
        version = int(content["format"])
        identity = Identity(str(content["store"]), int(content["created_s"]), str(content.get("catalog", "lmdb")))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{mark}: damaged or not written by Perdure ({error})") from error
    if version > limits.format_version:
        raise FormatError(
            f"{mark.parent}: format version {version}; this Perdure reads up to {limits.format_version}: upgrade it"
        )
    return identity


def _write_new(path: Path, data: bytes) -> None:
    """Durable small file; an existing one stays (first wins)."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # no hard links here: rename instead
        os.rename(temporary, path)
        temporary = path
    if temporary != path:
        temporary.unlink()
    for directory in (path.parent, path.parent.parent):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_secret(path: Path) -> None:
    if not (path / _SECRET).exists():
        _write_new(path / _SECRET, secrets.token_bytes(32))


def root_secret(path: Path) -> bytes:
    """32 bytes. Raises FormatError if it is missing or damaged: without it no block can be named or verified."""
    file = path / _SECRET
    try:
        secret = file.read_bytes()
    except FileNotFoundError:
        raise FormatError(
            f"{file}: missing; restore it from a backup, without it no stored block can be used"
        ) from None
    if len(secret) != 32:
        raise FormatError(f"{file}: {len(secret)} bytes, 32 expected; restore it from a backup")
    return secret


def state_directory(path: Path, mounts: Path | None = None) -> Path:
    """A directory for what only this host may use, made if it is missing. Raises StorePathError."""
    try:
        mount = mount_of(path) if mounts is None else mount_of(path, mounts)
        if mount.kind in NETWORK:
            raise StorePathError(
                f"{path}: lies on a network file system ({mount.kind} at {mount.point}), where locks cannot be relied "
                "on; use a directory on a disk of this host: state=... or --state-dir"
            )
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except StorePathError:
        raise
    except OSError as error:
        raise StorePathError(f"{path}: {error}; the state directory must be writable") from error
    return path


class WriterLock:
    """flock on DIR/lock, held while the store is open for writing. Not inherited by children."""

    def __init__(self, path: Path, clock: Clock):
        self._file = path / "lock"
        self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 4096, 0).decode(errors="replace")
            os.close(self._descriptor)
            raise StoreLocked(
                f"{path} is open for writing by another process ({describe_holder(holder)}); "
                "close that one, or use perdure.open(..., read_only=True); processes that share a store in a cluster "
                "need a state directory each"
            ) from None
        me = {"host": socket.gethostname(), "pid": os.getpid(), "boot_id": clock.boot_id().hex()}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(me).encode(), 0)

    def close(self) -> None:
        """Also right in a forked child: closing its copy leaves the parent's lock alone."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def describe_holder(content: str) -> str:
    try:
        who = json.loads(content)
        return f"host {who['host']}, pid {who['pid']}, boot id {who['boot_id']}"
    except (ValueError, KeyError, TypeError):
        return "holder unknown: the lock file has not been filled in yet"


def lock_holder(path: Path) -> str | None:
    """Who has the store open for writing right now, None if nobody."""
    try:
        descriptor = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return describe_holder(os.pread(descriptor, 4096, 0).decode(errors="replace"))
    finally:
        os.close(descriptor)
