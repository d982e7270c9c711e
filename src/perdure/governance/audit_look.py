"""Looking at an audit log offline, beside its writer or far from it: verify, prove, query, export.

Contract
- Only the folder is needed, and for trust the verifier key from elsewhere (`key`), or an older checkpoint (`against`):
  who can write the folder can replace log and key together, and cut both back to an older checkpoint.
- `verify` says what is wrong and where; records behind the newest checkpoint are counted as not signed yet.
- `export` copies what is signed, after it has verified, and never replaces a record that the target has.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from perdure.errors import AuditDamaged, InvalidArgument
from perdure.governance import audit_files as files
from perdure.governance.audit_files import Event
from perdure.governance.checkpoint import Checkpoint, Verifier, open_checkpoint
from perdure.governance.merkle import Tree, consistency_proof, consistent, inclusion_proof, leaf_hash, root

PROOF_HEAD: Final = "c2sp.org/tlog-proof@v1"


@dataclass(slots=True)
class Verdict:
    """records: in the folder; signed: covered by the newest checkpoint; problems: empty if all is well."""

    origin: str
    records: int = 0
    signed: int = 0
    files: int = 0
    root: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def folder_of(directory: Path) -> Path:
    """A store's log, or the folder of a log itself. Raises InvalidArgument."""
    for folder in (directory / files.FOLDER, directory):
        if (folder / files.KEY).is_file():
            return folder
    raise InvalidArgument(f"{directory}: there is no audit log (no {files.KEY}); it is made where audit is on")


def verifier_of(folder: Path, key: str | None) -> Verifier:
    return Verifier.parse(key if key is not None else (folder / files.KEY).read_text())


def records(folder: Path) -> Iterator[tuple[bytes, Event]]:
    """(line, record) of all complete records that can be read, in order; checks nothing."""
    for first in files.firsts(folder):
        for line in files.lines_of((folder / files.log_name(first)).read_bytes()):
            try:
                yield line, files.decode(line)
            except msgspec.MsgspecError:
                continue


def verify(folder: Path, key: str | None = None, against: bytes | None = None) -> Verdict:
    """Check every record, digest and the newest checkpoint. `against`: a checkpoint kept elsewhere."""
    verifier = verifier_of(folder, key)
    verdict, wanted = Verdict(verifier.name), {}
    for what, note in (("checkpoint", _read(folder / files.CHECKPOINT)), ("the checkpoint kept elsewhere", against)):
        if note is None and what == "checkpoint":
            verdict.problems.append("checkpoint: missing")
        if note is not None:
            try:
                wanted[what] = open_checkpoint(note, verifier, verifier.name)
            except AuditDamaged as error:
                verdict.problems.append(f"{what}: {error}")
    tree = _Checked(folder, verifier, verdict, {one.size: (what, one) for what, one in wanted.items()}).run()
    verdict.records, verdict.root = tree.size, base64.b64encode(tree.root()).decode()
    newest = wanted.get("checkpoint")
    verdict.signed = 0 if newest is None else newest.size
    for what, one in wanted.items():
        if one.size > tree.size:
            verdict.problems.append(f"cut short: {tree.size} records are left of the {one.size} of {what}")
    return verdict


class _Checked:
    """One walk over all records."""

    def __init__(self, folder: Path, verifier: Verifier, verdict: Verdict, wanted: dict[int, tuple[str, Checkpoint]]):
        self._folder, self._verifier, self._verdict, self._wanted = folder, verifier, verdict, wanted
        self._tree, self._prev, self._before = Tree(), "", hashlib.sha256(b"").digest()

    def run(self) -> Tree:
        self._compare()
        names = files.firsts(self._folder)
        for first in names:
            self._verdict.files += 1
            if first != self._tree.size:
                self._problem(f"{files.log_name(first)}: begins at {first}, but {self._tree.size} records come before")
            self._file(first, last=first == names[-1])
        digests = {int(path.stem) for path in self._folder.glob("*.digest") if path.stem.isdigit()}
        for first in sorted(digests - set(names)):
            self._problem(f"{files.log_name(first)}: missing, its digest is there")
        return self._tree

    def _problem(self, text: str) -> None:
        self._verdict.problems.append(text)

    def _file(self, first: int, *, last: bool) -> None:
        name = files.log_name(first)
        data = (self._folder / name).read_bytes()
        for line in files.lines_of(data):
            self._line(name, line)
        note = _read(self._folder / files.digest_name(first))
        if note is None:
            if not last:
                self._problem(f"{files.digest_name(first)}: missing")
            return
        try:
            digest = files.Digest.parse(self._verifier.open(note), self._verifier.name)
        except AuditDamaged as error:
            self._problem(f"{files.digest_name(first)}: {error}")
            return
        if digest.before != self._before:
            self._problem(f"{files.digest_name(first)}: does not follow the digest before it")
        self._before = hashlib.sha256(note).digest()
        if digest.first != first or hashlib.sha256(data).digest() != digest.sha256:
            self._problem(f"{name}: not the file that was closed and signed with {digest.count} records")
        elif digest.first + digest.count != self._tree.size or list(digest.frontier) != self._tree.frontier:
            self._problem(f"{name}: its tree is not the one that was signed")

    def _line(self, name: str, line: bytes) -> None:
        number = self._tree.size
        try:
            event = files.decode(line)
        except msgspec.MsgspecError as error:
            self._problem(f"{name}: record {number} is no record: {error}")
        else:
            if event.n != number:
                self._problem(f"{name}: record {number} says it is {event.n}")
            elif event.prev != self._prev:
                self._problem(f"{name}: record {number - 1} was changed after record {number} was written")
        leaf = leaf_hash(line)
        self._tree.append(leaf)
        self._prev = files.previous(leaf)
        self._compare()

    def _compare(self) -> None:
        what, one = self._wanted.get(self._tree.size, ("", None))
        if one is not None and self._tree.root() != one.root:
            self._problem(f"the first {one.size} records are not those of {what}")


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


# --- proofs
def _leaves(folder: Path) -> list[bytes]:
    return [
        leaf_hash(line)
        for first in files.firsts(folder)
        for line in files.lines_of((folder / files.log_name(first)).read_bytes())
    ]


def prove(folder: Path, number: int) -> tuple[bytes, str]:
    """A record and its proof (c2sp.org/tlog-proof): index, hashes, checkpoint. Raises InvalidArgument, AuditDamaged."""
    note = (folder / files.CHECKPOINT).read_bytes()
    newest = open_checkpoint(note, verifier_of(folder, None), verifier_of(folder, None).name)
    if not 0 <= number < newest.size:
        raise InvalidArgument(f"record {number}: {newest.size} are signed, from 0 on")
    leaves = _leaves(folder)[: newest.size]
    if len(leaves) < newest.size or root(leaves) != newest.root:
        raise AuditDamaged("the records are not those of the checkpoint; see `perdure audit verify`")
    hashes = [base64.b64encode(one).decode() for one in inclusion_proof(leaves, number)]
    lines = "".join(f"{line}\n" for line in (PROOF_HEAD, f"index {number}", *hashes))
    (line,) = [line for line, event in records(folder) if event.n == number]
    return line, f"{lines}\n{note.decode()}"


def prove_growth(folder: Path, old: bytes, key: str | None = None) -> list[bytes]:
    """Consistency proof from an older checkpoint to the newest one. Raises AuditDamaged if it did not just grow."""
    verifier = verifier_of(folder, key)
    before = open_checkpoint(old, verifier, verifier.name)
    newest = open_checkpoint((folder / files.CHECKPOINT).read_bytes(), verifier, verifier.name)
    leaves = _leaves(folder)[: newest.size]
    if before.size > len(leaves) or len(leaves) < newest.size:
        raise AuditDamaged(f"cut short: {len(leaves)} records are left of {max(before.size, newest.size)}")
    proof = consistency_proof(leaves, before.size)
    if not consistent(before.size, before.root, newest.size, newest.root, proof):
        raise AuditDamaged(f"the log of {newest.size} records does not continue the one of {before.size}")
    return proof


# --- export
def export(folder: Path, target: Path, key: str | None = None) -> Verdict:
    """Copy what is signed into another folder, which may hold an earlier export. Raises AuditDamaged, OSError."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    verdict = verify(folder, key, against=_read(target / files.CHECKPOINT))
    if not verdict.ok:
        raise AuditDamaged(f"not exported: {'; '.join(verdict.problems)}")
    for first in files.firsts(folder):
        if first < verdict.signed:
            data = (folder / files.log_name(first)).read_bytes()
            whole = list(files.lines_of(data))[: verdict.signed - first]
            _grow(target / files.log_name(first), b"".join(line + b"\n" for line in whole))
            note = _read(folder / files.digest_name(first))
            if note is not None:
                _grow(target / files.digest_name(first), note)
    for name in (files.KEY, files.CHECKPOINT):
        files.write_new(target / name, (folder / name).read_bytes())
    return verdict


def _grow(path: Path, data: bytes) -> None:
    """Write a file, or what it lacks of it; a file with other contents is refused."""
    there = _read(path) or b""
    if not data.startswith(there):
        raise AuditDamaged(f"{path}: other contents than the log's; it is left as it is")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)[len(there) :]
        while view.nbytes:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
