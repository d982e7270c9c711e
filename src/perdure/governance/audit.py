"""The audit log of one store: who did what, appended before it is acknowledged, signed, and never changed.

Contract
- `append` returns after its record is in the file: it survives SIGKILL at any byte. Every `audit_checkpoint_s`, or
  `audit_checkpoint_records`, what was appended is synced and a checkpoint of the Merkle tree signed (Ed25519); what a
  power cut or an editor takes before that is not noticed. `durable` waits for that.
- Threads that append at the same time share one write.
- If the log cannot be written or synced, `guard` and `append` raise AuditUnavailable: what changes things is refused.
  Reads go on (`note`), are counted, and the first record after that says how many are missing.
- Never: tokens, text, salts, keys. Blocks and sessions are named by HMACs under a key that is not in the log.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from perdure import limits
from perdure.errors import AuditUnavailable, InvalidArgument
from perdure.governance import actor
from perdure.governance import audit_files as files
from perdure.governance.audit_files import Event as Event
from perdure.governance.checkpoint import Checkpoint, Signer
from perdure.governance.merkle import leaf_hash
from perdure.io.files import reserve_beyond_end
from perdure.keys import KeyArray, derive

_LOG = logging.getLogger("perdure.audit")
_ID_DIGITS: Final = 32
BUILT_IN: Final = "built-in/1"  # the policy of who has none: whoever opened the store may do everything


@dataclass(slots=True)
class _Waiting:
    event: Event
    done: bool = False
    problem: OSError | None = None


class AuditLog:
    """Made by `open_log`. Thread-safe."""

    def __init__(self, folder: Path, signer: Signer, id_key: bytes, wall: Callable[[], float] = time.time):
        self.folder = self._folder = folder
        self.signer = self._signer = signer
        self._id_key, self._wall = id_key, wall
        self.every_read = False  # engines get no memory that they could read without a message
        self._node = socket.gethostname()
        self.label = "".join(signer.verifier.name.split("/")[2:]).encode()  # b"": the only log of its store
        self._queue: list[_Waiting] = []
        self._queue_lock = threading.Lock()
        self._lock = threading.Lock()  # of everything about the file
        self._signing = threading.Lock()
        self._problem: OSError | None = None  # of the last write
        self._unsynced: OSError | None = None  # of the last sync
        self._torn = False  # there may be bytes behind the last record
        self._lost = 0
        self.records_lost = 0
        self._signed, self._synced_bytes = -1, 0
        self._wake, self._stop = threading.Event(), False
        folder.mkdir(mode=0o700, exist_ok=True)
        found = files.recover(folder, signer.verifier)
        self._tree, self._first, self._nbytes, self._prev = found.tree, found.first, found.nbytes, found.prev
        self._before = found.before
        self._reserved = 0
        files.write_new(folder / files.KEY, f"{signer.verifier}\n".encode())
        if not (folder / files.CHECKPOINT).exists():
            files.write_new(folder / files.CHECKPOINT, self._note(0, self._tree.root()))
        self._fd, self._sha = self._open_file(self._first), found.sha
        os.ftruncate(self._fd, self._nbytes)
        self._thread = threading.Thread(target=self._work, name="perdure-audit", daemon=True)
        try:
            if found.cut:
                self.append(Event("recovered", counts={"bytes_cut": found.cut}))
        except BaseException:
            os.close(self._fd)
            raise
        self._thread.start()

    # --- ids
    def id_of(self, kind: str, data: bytes) -> str:
        """Name of a block, keyspace or session in the log."""
        return block_id(self._id_key, kind, data)

    # --- recording
    def guard(self) -> None:
        """Before something is changed: raises AuditUnavailable if it could not be recorded."""
        if self._problem is not None or self._unsynced is not None:
            self.append(Event("resumed"), durable=self._unsynced is not None)

    def append(self, event: Event, *, durable: bool = False) -> None:
        """Raises AuditUnavailable; then the record is not in the log."""
        self.append_all([event])
        if durable:
            try:
                self.checkpoint()
            except OSError as error:
                raise _unavailable(error) from error

    def append_all(self, events: list[Event]) -> None:
        """All or none. Raises AuditUnavailable."""
        acting, now = actor.current(), self._wall()
        waiting = [_Waiting(event) for event in events]
        for one in events:
            one.who, one.trace, one.at = one.who or acting.who or f"local pid {os.getpid()}", acting.trace, now
            one.policy = one.policy or acting.policy or BUILT_IN
        with self._queue_lock:
            self._queue += waiting
        with self._lock:
            if not waiting[-1].done:
                self._write()
        problem = waiting[-1].problem if waiting[-1].done else OSError(errno.EINTR, "it was interrupted")
        if problem is not None:
            raise _unavailable(problem)

    def note(self, event: Event) -> None:
        """Record what only looks: never raises; what cannot be recorded is counted."""
        with contextlib.suppress(AuditUnavailable):
            self.append(event)

    def message(self, op: str, space: Any, keys: KeyArray, **fields: Any) -> Event:
        """The record of one call that moved blocks of a keyspace."""
        raw = keys.tobytes()
        first, last = raw[: limits.key_bytes], raw[-limits.key_bytes :]
        return Event(
            op, tenant=space.tenant, space=self.id_of("space", space.digest), first=self.id_of("block", first),
            last=self.id_of("block", last), all=self.id_of("blocks", raw), blocks=len(keys), **fields,
        )  # fmt: skip

    # --- the file (with the lock held)
    def _write(self) -> None:
        """Everything that waits, in one go."""
        with self._queue_lock:
            waiting, self._queue = self._queue, []
        if not waiting:
            return
        events = [one.event for one in waiting]
        if self._lost:
            events.insert(0, Event("gap", at=self._wall(), counts={"records_lost": self._lost}))
        lines, leaves, number, prev = [], [], self._tree.size, self._prev
        for event in events:
            event.n, event.prev, event.node = number, prev, self._node
            line = files.line_of(event)
            leaf = leaf_hash(line)
            lines.append(line)
            leaves.append(leaf)
            number, prev = number + 1, files.previous(leaf)
        data = b"\n".join(lines) + b"\n"
        try:
            self._put(data)
        except OSError as error:
            if self._problem is None:
                _LOG.error("the audit log cannot be written: %s", error)
            self._problem = error
            self._lost += len(waiting)
            self.records_lost += len(waiting)
            for one in waiting:
                one.done, one.problem = True, error
            return
        self._problem, self._torn, self._lost, self._prev = None, False, 0, prev
        self._nbytes += len(data)
        self._sha.update(data)
        for leaf in leaves:
            self._tree.append(leaf)
        for one in waiting:
            one.done = True
        if self._tree.size - self._signed >= limits.audit_checkpoint_records:
            self._wake.set()

    def _put(self, data: bytes) -> None:
        if self._torn:
            os.ftruncate(self._fd, self._nbytes)
        self._torn = True
        if self._nbytes + len(data) > self._reserved:
            step = limits.audit_reserve_bytes
            reserve_beyond_end(self._folder / files.log_name(self._first), len(data) + step)
            self._reserved = self._nbytes + len(data) + step
        view = memoryview(data)
        while view.nbytes:
            view = view[self._pwrite(view, self._nbytes + len(data) - view.nbytes) :]

    def _pwrite(self, view: memoryview, at: int) -> int:
        return os.pwrite(self._fd, view, at)

    def _open_file(self, first: int) -> int:
        path = self._folder / files.log_name(first)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        files.sync_folder(self._folder)
        return descriptor

    # --- signing
    def _note(self, size: int, root: bytes) -> bytes:
        return self._signer.sign(Checkpoint(self._signer.verifier.name, size, root).text())

    def checkpoint(self) -> None:
        """Sync and sign what there is; close a file that is large enough. Raises OSError."""
        with self._signing:
            with self._lock:
                size, root, nbytes = self._tree.size, self._tree.root(), self._nbytes
            if size != self._signed:
                self._sync(nbytes)
                files.write_new(self._folder / files.CHECKPOINT, self._note(size, root))
                self._signed = size
            if nbytes >= limits.audit_file_bytes:
                self._rotate()

    def _sync(self, nbytes: int) -> None:
        """Raises OSError; then nothing is changed any more until one has succeeded."""
        try:
            if self._unsynced is not None:  # the kernel takes pages that it could not write for written
                start = self._synced_bytes
                os.pwrite(self._fd, os.pread(self._fd, nbytes - start, start), start)
            self._datasync()
        except OSError as error:
            self._unsynced = error
            raise
        self._unsynced, self._synced_bytes = None, nbytes

    def _datasync(self) -> None:
        os.fdatasync(self._fd)

    def rotate(self) -> None:
        """Close the file that is written to. Raises OSError."""
        self.checkpoint()
        with self._signing:
            self._rotate()

    def _rotate(self) -> None:
        with self._lock:
            if self._tree.size == self._first:
                return
            os.ftruncate(self._fd, self._nbytes)
            self._sync(self._nbytes)
            digest = files.Digest(
                self._signer.verifier.name, self._first, self._tree.size - self._first, self._sha.digest(),
                self._before, tuple(self._tree.frontier),
            )  # fmt: skip
            note = self._signer.sign(digest.text())
            files.write_new(self._folder / files.digest_name(self._first), note)
            files.write_new(self._folder / files.CHECKPOINT, self._note(self._tree.size, self._tree.root()))
            self._signed = self._tree.size
            descriptor = self._open_file(self._tree.size)
            os.close(self._fd)
            self._fd, self._sha = descriptor, hashlib.sha256()
            self._first, self._nbytes, self._before = self._tree.size, 0, hashlib.sha256(note).digest()
            self._reserved, self._synced_bytes = 0, 0

    def _work(self) -> None:
        while not self._stop:
            self._wake.wait(limits.audit_checkpoint_s)
            self._wake.clear()
            try:
                self.checkpoint()
            except OSError as error:  # tried again; `append` says so if the file cannot be written
                _LOG.error("the audit log could not be signed: %s", error)

    def status(self) -> dict[str, Any]:
        return {
            "records": self._tree.size, "signed": max(0, self._signed), "records_lost": self.records_lost,
            "problem": str(problem) if (problem := self._problem or self._unsynced) else None,
            "key": str(self._signer.verifier),
        }  # fmt: skip

    def close(self) -> None:
        """Sign what there is. Idempotent."""
        if self._stop:
            return
        self._stop = True
        self._wake.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self.checkpoint()
        with self._lock:  # its number may be another file's at once: nobody may write to it any more
            fd, self._fd = self._fd, -1
        os.close(fd)


def _unavailable(error: OSError) -> AuditUnavailable:
    return AuditUnavailable(
        f"the audit log cannot be written ({error}); nothing is changed without a record: make room or mend the disk"
    )


def block_id(id_key: bytes, kind: str, data: bytes) -> str:
    return hmac.digest(id_key, kind.encode() + b"\0" + data, "sha256").hex()[:_ID_DIGITS]


def id_key_of(root_secret: bytes) -> bytes:
    return derive(root_secret, "perdure/1/audit-ids")


def open_log(
    directory: Path,
    store: str,
    root_secret: bytes,
    wall: Callable[[], float] = time.time,
    mode: str | bool = "on",
    *,
    one_of_many: bool = False,
) -> AuditLog | None:
    """The log of a store, if it is to have one. directory: the store's, or, where many processes share that and each
    has a log (`one_of_many`), the state directory of this one. mode: "on", "off", "auto" (as last
    time, at first off), "reads" (and no engine reads memory unseen).

    Raises InvalidArgument, AuditDamaged, AuditUnavailable."""
    if mode not in ("auto", "off", "on", "reads", True, False):
        raise InvalidArgument(f"audit={mode!r}: must be auto, off, on or reads")
    folder, off = directory / files.FOLDER, mode in ("off", False)
    if (off or mode == "auto") and not (folder / files.KEY).exists():
        return None
    try:
        log = AuditLog(folder, files.signer_of(directory, store, one_of_many=one_of_many), id_key_of(root_secret), wall)
        if not off:
            mode = files.lasting(folder / files.MODE, "on" if mode is True else str(mode), "on")
    except OSError as error:
        raise _unavailable(error) from error
    if off:  # nobody ends it unseen
        try:
            log.append(Event("config", detail="audit: off, until the store is opened with it"), durable=True)
        finally:
            log.close()
        return None
    log.every_read = mode == "reads"
    log.note(Event("open", detail=f"audit {mode}"))
    return log
