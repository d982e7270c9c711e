"""The audit log on the disk: names, records, digests of closed files, and opening it after any kind of end.

    DIR/audit/key.pub            verifier key (C2SP), for whoever checks the log
    DIR/audit/checkpoint         newest signed checkpoint: origin, records, root
    DIR/audit/mode               as the store was last opened: on, reads
    DIR/audit/<first>.log        one JSON object per line; the line without its newline is the leaf of the Merkle tree
    DIR/audit/<first>.digest     of a closed file, signed: records, SHA-256, SHA-256 of the digest before, frontier
    DIR/keystore/audit.key       the private key (0600)

Contract
- A record names its number and the start of the hash of the record before: an edit is found where it is.
- `recover` cuts what a killed writer left half-written, behind the last checkpoint only. What the checkpoint covers of
  the newest file must be there unchanged, else AuditDamaged: then nothing is written, and an operator has to look.
  Closed files are not read again: `audit_look.verify` does.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from perdure.errors import AuditDamaged
from perdure.governance.checkpoint import SEED_BYTES, Checkpoint, Signer, Verifier, open_checkpoint
from perdure.governance.merkle import Tree, leaf_hash

FOLDER: Final = "audit"
CHECKPOINT: Final = "checkpoint"
MODE: Final = "mode"
KEY: Final = "key.pub"
PREVIOUS_DIGITS: Final = 16
_DIGITS: Final = 20


class Event(msgspec.Struct, omit_defaults=True):
    """One record. Ids are HMACs under a key of the store; never tokens, text, salts or keys. `n`, `at`, `prev` and
    `node` are the log's own; times are seconds since 1970."""

    op: str
    n: int = -1
    at: float = 0.0
    prev: str = ""
    node: str = ""
    who: str = ""
    trace: str = ""
    tenant: str = ""
    space: str = ""
    first: str = ""  # of the first block of the message
    last: str = ""  # of the last one, which names the whole prefix
    all: str = ""  # of all of them, in order
    object: str = ""  # of a session
    blocks: int = 0
    bytes: int = 0
    outcome: str = ""
    counts: dict[str, int] = {}
    decision: str = "allow"
    policy: str = ""  # id and version: TENANT@VERSION#DIGEST of the terms and rules, or built-in/1
    detail: str = ""


_encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Event).decode


def line_of(event: Event) -> bytes:
    """Never raises for a text that is no text: the names in it are others'."""
    try:
        return _encode(event)
    except UnicodeEncodeError:
        for name, value in zip(event.__struct_fields__, msgspec.structs.astuple(event), strict=True):
            if isinstance(value, str):
                setattr(event, name, value.encode(errors="backslashreplace").decode())
        return _encode(event)


def log_name(first: int) -> str:
    return f"{first:0{_DIGITS}}.log"


def digest_name(first: int) -> str:
    return f"{first:0{_DIGITS}}.digest"


def firsts(folder: Path) -> list[int]:
    """First record numbers of the log files, in order."""
    return sorted(int(path.stem) for path in folder.glob("*.log") if path.stem.isdigit() and len(path.stem) == _DIGITS)


def write_new(path: Path, data: bytes) -> None:
    """Replace a small file at once, durably."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            view = memoryview(data)
            while view.nbytes:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def lasting(path: Path, asked: str, first: str) -> str:
    """A setting that is kept in a file. "auto": what was asked for the last time, at first `first`. Raises OSError."""
    there = path.read_text() if path.exists() else first
    if asked == "auto":
        return there
    if asked != there:
        write_new(path, asked.encode())
    return asked


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def signer_of(directory: Path, store: str, *, one_of_many: bool = False) -> Signer:
    """The log's private key, made at the first time. one_of_many: the store has other logs, so the name of this one
    says which. Raises AuditDamaged, OSError."""
    path = directory / "keystore" / "audit.key"
    if not path.exists():
        if (directory / FOLDER / KEY).exists():
            raise AuditDamaged(f"{path}: missing, but there is a log; restore it from a backup, or move the log away")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_new(path, secrets.token_bytes(SEED_BYTES))
    seed = path.read_bytes()
    if len(seed) != SEED_BYTES:
        raise AuditDamaged(f"{path}: {len(seed)} bytes, {SEED_BYTES} expected; restore it from a backup")
    which = "/" + hashlib.sha256(b"perdure/1/log-name\0" + seed).hexdigest()[:8] if one_of_many else ""
    return Signer(f"perdure/{store}{which}", seed)


@dataclass(frozen=True, slots=True)
class Digest:
    """What is signed of a closed file."""

    origin: str
    first: int
    count: int
    sha256: bytes
    before: bytes  # SHA-256 of the digest file before; of nothing for the first
    frontier: tuple[bytes, ...]  # of the tree at its end

    def text(self) -> str:
        raws = [base64.b64encode(raw).decode() for raw in (self.sha256, self.before, *self.frontier)]
        return "".join(f"{line}\n" for line in (f"{self.origin}/digest", self.first, self.count, *raws))

    @classmethod
    def parse(cls, text: str, origin: str) -> Digest:
        """Raises AuditDamaged."""
        try:
            head, first, count, *rest = text.removesuffix("\n").split("\n")
            raws = [base64.b64decode(one, validate=True) for one in rest]
            if head != f"{origin}/digest" or len(raws) < 2:
                raise ValueError("another kind of note")
            return cls(origin, int(first), int(count), raws[0], raws[1], tuple(raws[2:]))
        except (ValueError, binascii.Error) as error:
            raise AuditDamaged(f"not a digest: {error}") from None

    def tree(self) -> Tree:
        return Tree(self.first + self.count, self.frontier)


def lines_of(data: bytes) -> Iterator[bytes]:
    """The complete lines of a file, without their newlines."""
    at = 0
    while (end := data.find(b"\n", at)) >= 0:
        yield data[at:end]
        at = end + 1


def previous(leaf: bytes) -> str:
    return leaf.hex()[:PREVIOUS_DIGITS]


@dataclass(slots=True)
class Recovered:
    """first: of the file to go on in; nbytes: its good length; cut: bytes behind it that are no records."""

    tree: Tree
    first: int
    nbytes: int
    cut: int
    prev: str
    before: bytes
    sha: Any  # hashlib's, of the good part


def recover(folder: Path, verifier: Verifier) -> Recovered:
    """Where to go on. Raises AuditDamaged, OSError."""
    origin = verifier.name
    checkpoint = _newest(folder, verifier)
    tree, before, prev = Tree(), hashlib.sha256(b"").digest(), ""
    names = firsts(folder)
    for first in names[-2:]:
        note = folder / digest_name(first)
        if not note.exists():
            continue
        digest = Digest.parse(verifier.open(note.read_bytes()), origin)
        tree, before = digest.tree(), hashlib.sha256(note.read_bytes()).digest()
        prev = _last_link(folder / log_name(first))
    first = tree.size
    path = folder / log_name(first)
    data = path.read_bytes() if path.exists() else b""
    good = 0
    for line in lines_of(data):
        if tree.size >= checkpoint.size and not _fits(line, tree.size, prev):
            break
        leaf = leaf_hash(line)
        tree.append(leaf)
        prev, good = previous(leaf), good + len(line) + 1
        if tree.size == checkpoint.size and tree.root() != checkpoint.root:
            raise AuditDamaged(f"{path}: its first {tree.size - first} records are not the ones that were signed")
    if tree.size < checkpoint.size:
        raise AuditDamaged(f"{path}: cut short: {tree.size} records are left of {checkpoint.size} that were signed")
    sha = hashlib.sha256(memoryview(data)[:good])
    return Recovered(tree, first, good, len(data) - good, prev, before, sha)


def _newest(folder: Path, verifier: Verifier) -> Checkpoint:
    path = folder / CHECKPOINT
    if path.exists():
        return open_checkpoint(path.read_bytes(), verifier, verifier.name)
    if firsts(folder):
        raise AuditDamaged(f"{path}: missing, but there are records; nothing says how many there were")
    return Checkpoint(verifier.name, 0, Tree().root())


def _last_link(path: Path) -> str:
    """Hash of the last record of a closed file."""
    data = path.read_bytes()
    return previous(leaf_hash(data[:-1].rpartition(b"\n")[2])) if data else ""


def _fits(line: bytes, number: int, prev: str) -> bool:
    try:
        event = decode(line)
    except msgspec.MsgspecError:
        return False
    return event.n == number and event.prev == prev
