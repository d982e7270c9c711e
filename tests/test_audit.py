"""The audit log: RFC 6962's own vectors, proofs against another implementation, tampering, kills, failure, and what the
store records."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.served import serving, tcp_address

import perdure
from perdure import limits
from perdure.cli import main
from perdure.errors import AuditDamaged, AuditUnavailable, InvalidArgument, ProtocolError
from perdure.governance import audit_files, audit_look, merkle
from perdure.governance.actor import acting, tracing
from perdure.governance.audit import AuditLog, Event, _Waiting, open_log
from perdure.governance.checkpoint import Checkpoint, Signer, Verifier, open_checkpoint
from perdure.governance.denials import Denials
from perdure.service import messages as m
from perdure.testing.store import CORRUPT, DENIED, FOUND, STORED, chain, keyspace, read, write

STORE = "5e" * 16
SECRET = b"s" * 32

# --- the tree: inputs and roots of the tests of Certificate Transparency (RFC 6962)
LEAVES = [bytes.fromhex(one) for one in (
    "", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f",
)]  # fmt: skip
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def mth(data: list[bytes]) -> bytes:
    """The definition of section 2.1, word for word."""
    if not data:
        return hashlib.sha256(b"").digest()
    if len(data) == 1:
        return hashlib.sha256(b"\0" + data[0]).digest()
    k = 1
    while 2 * k < len(data):
        k *= 2
    return hashlib.sha256(b"\1" + mth(data[:k]) + mth(data[k:])).digest()


def path(number: int, data: list[bytes]) -> list[bytes]:
    if len(data) == 1:
        return []
    k = 1
    while 2 * k < len(data):
        k *= 2
    if number < k:
        return [*path(number, data[:k]), mth(data[k:])]
    return [*path(number - k, data[k:]), mth(data[:k])]


def subproof(m: int, data: list[bytes], whole: bool) -> list[bytes]:
    if m == len(data):
        return [] if whole else [mth(data)]
    k = 1
    while 2 * k < len(data):
        k *= 2
    if m <= k:
        return [*subproof(m, data[:k], whole), mth(data[k:])]
    return [*subproof(m - k, data[k:], False), mth(data[:k])]


def test_roots_are_those_of_the_rfc() -> None:
    hashes = [merkle.leaf_hash(one) for one in LEAVES]
    assert [merkle.root(hashes[: n + 1]).hex() for n in range(8)] == ROOTS
    assert merkle.root([]).hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert [one.hex() for one in merkle.inclusion_proof(hashes[:3], 2)] == [ROOTS[1]]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 13, 33])
def test_proofs_equal_another_implementation(count: int) -> None:
    data = [bytes([number]) * 3 for number in range(count)]
    hashes, top = [merkle.leaf_hash(one) for one in data], mth(data)
    for number in range(count):
        proof = merkle.inclusion_proof(hashes, number)
        assert proof == path(number, data)
        assert merkle.included(hashes[number], number, count, proof, top)
        assert not merkle.included(hashes[number - 1], number, count, proof, top) or count == 1
        assert not merkle.included(hashes[number], number, count, [*proof, top], top)
        assert not proof or not merkle.included(hashes[number], number, count, proof[:-1], top)
    for old in range(1, count + 1):
        proof = merkle.consistency_proof(hashes, old)
        assert proof == subproof(old, data, True)
        assert merkle.consistent(old, mth(data[:old]), count, top, proof)
        assert not merkle.consistent(old, b"x" * 32, count, top, proof)
        for place in range(len(proof)):
            wrong = [*proof[:place], b"x" * 32, *proof[place + 1 :]]
            assert not merkle.consistent(old, mth(data[:old]), count, top, wrong)
    tree = merkle.Tree()
    for one in hashes:
        tree.append(one)
        tree = merkle.Tree(tree.size, tree.frontier)
    assert tree.root() == top


def test_signed_note() -> None:
    signer = Signer("example.com/log", bytes(32))
    note = signer.sign(Checkpoint("example.com/log", 3, b"r" * 32).text())
    verifier = Verifier.parse(str(signer.verifier))
    assert open_checkpoint(note, verifier, "example.com/log").size == 3
    assert note.decode().split("\n")[3:5] == ["", note.decode().split("\n")[4]]
    witness = note + b"\xe2\x80\x94 witness AAAA\n"
    assert open_checkpoint(witness, verifier, "example.com/log").size == 3
    for bad in (
        note.replace(b"\n3\n", b"\n4\n"),
        b"",
        note[:-1],
        b"\xff\n\n",
        b"\n\n",
        note.replace(b"example", b"exempla"),
    ):
        with pytest.raises(AuditDamaged):
            open_checkpoint(bad, verifier, "example.com/log")
    with pytest.raises(AuditDamaged, match="another log"):
        open_checkpoint(note, verifier, "other")
    for text in ("", "a+b", "a+00000000+AAAA", "a b+00000000+" + base64.b64encode(b"\1" + bytes(32)).decode()):
        with pytest.raises(InvalidArgument):
            Verifier.parse(text)


# --- the log
def opened(directory: Path) -> AuditLog:
    (directory / "keystore").mkdir(exist_ok=True)
    log = open_log(directory, STORE, SECRET)
    assert log is not None
    return log


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """A log of three files with 40 records, closed."""
    with closing(opened(tmp_path)) as log:
        for number in range(39):  # and the record of its opening
            log.append(Event("put", tenant="acme", blocks=number))
            if number in (10, 25):
                log.rotate()
    return tmp_path / "audit"


def test_verify_prove_and_go_on(logged: Path) -> None:
    verdict = audit_look.verify(logged)
    assert (verdict.ok, verdict.records, verdict.signed, verdict.files) == (True, 40, 40, 3)
    old = (logged / "checkpoint").read_bytes()
    with closing(opened(logged.parent)) as log:
        log.append(Event("read"))
    verdict = audit_look.verify(logged, against=old)
    assert (verdict.ok, verdict.records) == (True, 42)
    assert audit_look.prove_growth(logged, old)
    for number in (0, 17, 41):
        line, proof = audit_look.prove(logged, number)
        head, _, note = proof.partition("\n\n")
        kind, index, *hashes = head.split("\n")
        checkpoint = open_checkpoint(
            note.encode(), Verifier.parse((logged / "key.pub").read_text()), f"perdure/{STORE}"
        )
        raws = [base64.b64decode(one) for one in hashes]
        assert (kind, index) == ("c2sp.org/tlog-proof@v1", f"index {number}")
        leaf = merkle.leaf_hash(line)
        assert merkle.included(leaf, number, checkpoint.size, raws, checkpoint.root)
        assert json.loads(line)["n"] == number
    with pytest.raises(InvalidArgument):
        audit_look.prove(logged, 42)


def files_of(logged: Path) -> list[Path]:
    return sorted(logged.glob("*.log"))


def flip(logged: Path, file: int = 1, at: int = 300) -> None:
    path = files_of(logged)[file]
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def swap(logged: Path) -> None:
    lines = files_of(logged)[2].read_bytes().splitlines(keepends=True)
    lines[3], lines[4] = lines[4], lines[3]
    files_of(logged)[2].write_bytes(b"".join(lines))


def replace(logged: Path) -> None:
    """A record changed so that it still is one: only the next record, and the signature, tell."""
    path = files_of(logged)[2]
    path.write_bytes(path.read_bytes().replace(b'"blocks":30', b'"blocks":31'))


def drop(logged: Path) -> None:
    lines = files_of(logged)[0].read_bytes().splitlines(keepends=True)
    files_of(logged)[0].write_bytes(b"".join(lines[:4] + lines[5:]))


def cut(logged: Path) -> None:
    os.truncate(files_of(logged)[2], files_of(logged)[2].stat().st_size - 150)


def lose(logged: Path) -> None:
    files_of(logged)[1].unlink()


def forge(logged: Path) -> None:
    """Everything again, signed by another key."""
    shutil.rmtree(logged)
    (logged.parent / "keystore/audit.key").unlink()
    with closing(opened(logged.parent)) as log:
        log.append(Event("put"))


@pytest.mark.parametrize("tamper", [flip, swap, replace, drop, cut, lose, forge])
def test_tampering_is_found(logged: Path, tamper: Callable[[Path], None]) -> None:
    key = (logged / "key.pub").read_text()
    tamper(logged)
    verdict = audit_look.verify(logged, key)
    assert not verdict.ok
    where = {"replace": "record 31 was changed", "drop": "record 4 says it is 5", "swap": "record 30 says it is 31"}
    assert where.get(tamper.__name__, "") in "\n".join(verdict.problems)
    with pytest.raises(AuditDamaged):
        audit_look.export(logged, logged.parent / "elsewhere", key)


@pytest.mark.parametrize("tamper", [swap, replace, cut])
def test_nothing_is_appended_to_a_log_that_was_changed(logged: Path, tamper: Callable[[Path], None]) -> None:
    tamper(logged)
    before = files_of(logged)[2].read_bytes()
    with pytest.raises(AuditDamaged):
        opened(logged.parent)
    assert files_of(logged)[2].read_bytes() == before
    (logged / "checkpoint").unlink()
    with pytest.raises(AuditDamaged, match="missing"):
        opened(logged.parent)


def test_a_log_put_back_to_an_old_state_is_found_by_who_kept_a_checkpoint(logged: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(logged, old)
    with closing(opened(logged.parent)) as log:
        log.append(Event("erase"))
    kept = (logged / "checkpoint").read_bytes()
    assert audit_look.verify(old).ok
    assert not audit_look.verify(old, against=kept).ok


def test_what_a_kill_left_of_the_last_record_is_cut(tmp_path: Path) -> None:
    """At every byte of the last write."""
    with closing(opened(tmp_path)) as log:
        log.append(Event("put", blocks=1))
    path = files_of(tmp_path / "audit")[0]
    whole = path.read_bytes()
    record = whole.splitlines(keepends=True)[-1]
    number = audit_files.decode(record).n + 1
    link = audit_files.previous(merkle.leaf_hash(record[:-1]))
    more = audit_files.line_of(Event("put", n=number, prev=link, blocks=2)) + b"\n"
    for length in (0, 1, len(more) // 2, len(more) - 1, len(more)):
        copy = tmp_path / f"at{length}"
        shutil.copytree(tmp_path / "audit", copy / "audit")
        shutil.copytree(tmp_path / "keystore", copy / "keystore")
        (copy / "audit" / path.name).write_bytes(whole + more[:length])
        with closing(opened(copy)) as log:
            log.append(Event("read"))
        found = [event.op for _, event in audit_look.records(copy / "audit")][number:]
        kept, torn = length == len(more), 0 < length < len(more)
        assert found == ["put"] * kept + ["recovered"] * torn + ["open", "read"]
        assert audit_look.verify(copy / "audit").ok


KILLED = """
import sys, threading
from pathlib import Path
from perdure.governance.audit import Event, open_log
log = open_log(Path(sys.argv[1]), "5e" * 16, b"s" * 32)
lock = threading.Lock()
def work(thread):
    for number in range(1_000_000):
        log.append(Event("put", detail=f"{thread}-{number}"))
        with lock:
            print(f"{thread}-{number}", flush=True)
for thread in range(3):
    threading.Thread(target=work, args=(thread,)).start()
"""


def test_acknowledged_records_survive_sigkill(tmp_path: Path) -> None:
    (tmp_path / "keystore").mkdir()
    src = str(Path(perdure.__file__).parent.parent)
    acked: list[str] = []
    for lines in (1, 200, 2500):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": src},
        ) as process:  # fmt: skip
            assert process.stdout is not None
            acked += [process.stdout.readline().strip() for _ in range(lines)]
            process.send_signal(signal.SIGKILL)
            *rest, _ = process.stdout.read().split("\n")
            acked += rest
    opened(tmp_path).close()
    found = [event.detail for _, event in audit_look.records(tmp_path / "audit")]
    assert not set(acked) - set(found)
    assert audit_look.verify(tmp_path / "audit").ok


class Full(AuditLog):
    """Its disk can be full, after half of what is written."""

    full = lost = False

    def _datasync(self) -> None:
        if self.lost:
            raise OSError(errno.EIO, "lost writes")
        super()._datasync()

    def _pwrite(self, view: memoryview, at: int) -> int:
        if self.full:
            os.pwrite(self._fd, view[: view.nbytes // 2], at)
            raise OSError(errno.ENOSPC, "no space left")
        return super()._pwrite(view, at)


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Full]:
    (tmp_path / "keystore").mkdir()
    with closing(Full(tmp_path / "audit", audit_files.signer_of(tmp_path, STORE), SECRET)) as log:
        yield log


def test_a_log_that_cannot_be_written(failing: Full, tmp_path: Path) -> None:
    failing.append(Event("put"))
    failing.full = True
    with pytest.raises(AuditUnavailable, match="no space left"):
        failing.append(Event("put"))
    with pytest.raises(AuditUnavailable):
        failing.guard()
    failing.note(Event("read"))
    assert failing.records_lost == 3
    assert "no space" in failing.status()["problem"]
    failing.full = False
    failing.guard()
    failing.append(Event("put"), durable=True)
    assert [event.op for _, event in audit_look.records(tmp_path / "audit")] == ["put", "gap", "resumed", "put"]
    assert audit_look.verify(tmp_path / "audit").signed == 4


# --- the store
def ops(directory: Path) -> list[str]:
    return [event.op for _, event in audit_look.records(directory / "audit")]


def test_a_log_that_cannot_be_synced(failing: Full, tmp_path: Path) -> None:
    failing.append(Event("put"))
    failing.lost = True
    with pytest.raises(AuditUnavailable):
        failing.append(Event("erase"), durable=True)
    with pytest.raises(AuditUnavailable):
        failing.guard()
    assert failing.status()["problem"]
    failing.lost = False
    failing.guard()
    assert failing.status()["problem"] is None
    verdict = audit_look.verify(tmp_path / "audit")
    assert (verdict.ok, verdict.signed) == (True, verdict.records)


def test_names_that_are_no_text_do_not_stop_others(failing: Full, tmp_path: Path) -> None:
    failing.append_all([Event("put", detail="before"), Event("put", detail="\ud800"), Event("put", detail="after")])
    assert [event.detail for _, event in audit_look.records(tmp_path / "audit")] == ["before", "\\ud800", "after"]


def test_a_record_whose_write_was_interrupted_is_not_taken_for_written(tmp_path: Path) -> None:
    """By a signal in the thread that writes for the others."""
    (tmp_path / "keystore").mkdir()

    class Interrupted(AuditLog):
        interrupt = True

        def _pwrite(self, view: memoryview, at: int) -> int:
            if self.interrupt:
                os.pwrite(self._fd, view[: view.nbytes // 2], at)
                self._queue.append(_Waiting(Event("put")))
                raise KeyboardInterrupt
            return super()._pwrite(view, at)

    with closing(Interrupted(tmp_path / "audit", audit_files.signer_of(tmp_path, STORE), SECRET)) as log:
        with pytest.raises(KeyboardInterrupt):
            log.append(Event("put", detail="x" * 100))
        log._queue.clear()
        log._write()
        log.interrupt = False
        log.append(Event("read"))
    assert [event.op for _, event in audit_look.records(tmp_path / "audit")] == ["read"]
    assert audit_look.verify(tmp_path / "audit").ok


def test_reads_stay_audited_when_the_store_is_opened_without_saying_so(tmp_path: Path) -> None:
    for mode, every in (("on", False), ("reads", True), ("auto", True), ("on", False), ("auto", False)):
        with perdure.open(tmp_path, audit=mode, memory=0) as store:
            assert store.core.audit is not None
            assert store.core.audit.every_read is every


def test_what_a_store_records(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "s", audit="on", memory=0) as store:
        space = keyspace(store)
        keys = chain(space, 1, 4)
        with acting("gateway", trace="t-1"):
            assert write(space, keys) == [STORED] * 4
        assert read(space, keys[:2]) == [FOUND] * 2
        session = space.session("agent")
        session.extend(keys)
        session.handoff()
        status = store.status()["audit"]
        assert status["records"] >= 5
    events = {event.op: event for _, event in audit_look.records(tmp_path / "s/audit")}
    assert {"open", "config", "put", "read", "session-open", "session-extend", "session-handoff", "close"} == set(
        events
    )
    assert events["put"].policy == "built-in/1"
    put, got = events["put"], events["read"]
    assert (put.who, put.trace, put.tenant, put.blocks, put.counts) == ("gateway", "t-1", "acme", 4, {"stored": 4})
    assert (got.blocks, got.counts, got.first) == (2, {"found": 2}, put.first)
    assert events["session-open"].object == events["session-handoff"].object != ""
    raw = b"".join(line for line, _ in audit_look.records(tmp_path / "s/audit"))
    secret = (tmp_path / "s/keystore/root.key").read_bytes()
    for hidden in (keys[0].tobytes(), keys[3].tobytes(), secret):
        assert hidden.hex().encode() not in raw
    assert b"agent" not in raw
    with perdure.open(tmp_path / "s", memory=0):  # as last time
        pass
    assert ops(tmp_path / "s")[-2:] == ["open", "close"]
    with perdure.open(tmp_path / "s", memory=0, audit="off") as store:
        assert store.status()["audit"] is None
    with pytest.raises(InvalidArgument):
        perdure.open(tmp_path / "s", audit="maybe")
    assert not (tmp_path / "t/audit").exists()


def test_a_block_that_does_not_verify_is_recorded(tmp_path: Path) -> None:
    with perdure.open(tmp_path, audit="on", memory=0) as store:
        space = keyspace(store)
        keys = chain(space, 1, 1)
        write(space, keys)
        (file,) = (tmp_path / "segments").rglob("*.seg")
        with file.open("r+b") as raw:
            raw.seek(limits.page_bytes + 5)
            raw.write(b"\0\1\2")
        assert read(space, keys) == [CORRUPT]
    assert "verify-failed" in ops(tmp_path)


def test_writes_are_refused_and_reads_go_on_without_a_log(tmp_path: Path) -> None:
    with perdure.open(tmp_path, memory=0) as store:
        space = keyspace(store)
        keys = chain(space, 1, 2)
        assert write(space, keys[:1]) == [STORED]
        with closing(Full(tmp_path / "audit", audit_files.signer_of(tmp_path, STORE), SECRET)) as log:
            store.core.audit = log
            log.full = True
            with pytest.raises(AuditUnavailable):
                write(space, keys[1:])  # the record fails: not acknowledged
            keys = chain(space, 2, 1)
            with pytest.raises(AuditUnavailable):
                write(space, keys)
            assert not space.present(keys).any()  # the log was known to fail: not written
            assert read(space, chain(space, 1, 1)) == [FOUND]
            with pytest.raises(AuditUnavailable):
                space.session("agent")
            log.full = False
            assert write(space, keys) == [STORED]
            store.core.audit = None


def test_commands(logged: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    done = run(main, ["audit", "verify", str(tmp_path), "--json"])
    assert (done.exit_code, json.loads(done.output)["records"]) == (0, 40)
    assert run(main, ["audit", "verify", str(logged)]).exit_code == 0
    done = run(main, ["audit", "prove", str(tmp_path), "3"])
    assert done.exit_code == 0
    assert "index 3" in done.output
    assert run(main, ["audit", "prove", str(tmp_path)]).exit_code == 2
    lines = run(main, ["audit", "query", str(tmp_path), "--op", "put", "--json"]).output.splitlines()
    assert len(lines) == 39
    assert "12 blocks" in run(main, ["audit", "query", str(tmp_path), "--tenant", "acme"]).output
    for options, count in ((["--decision", "deny"], 0), (["--decision", "allow"], 40), (["--trace", "t"], 0)):
        assert len(run(main, ["audit", "query", str(tmp_path), *options]).output.splitlines()) == count
    assert run(main, ["audit", "export", str(tmp_path), str(tmp_path / "out")]).exit_code == 0
    with closing(opened(tmp_path)) as log:
        log.append(Event("read"))
        log.rotate()
    assert run(main, ["audit", "export", str(tmp_path), str(tmp_path / "out")]).exit_code == 0
    assert run(main, ["audit", "verify", str(tmp_path / "out"), "--against", str(logged / "checkpoint")]).exit_code == 0
    replace(logged)
    done = run(main, ["audit", "verify", str(tmp_path)])
    assert done.exit_code == 1
    assert "record 31" in done.output
    assert run(main, ["audit", "verify", str(tmp_path / "nothing")]).exit_code == 2


def test_messages_name_all_their_blocks(tmp_path: Path) -> None:
    (tmp_path / "keystore").mkdir()
    with closing(opened(tmp_path)) as log, perdure.open(tmp_path / "s", memory=0) as store:
        space = keyspace(store)
        keys = chain(space, 1, 3)
        one, other = (log.message("read", space, part) for part in (keys, np.ascontiguousarray(keys[[0, 0, 2]])))
        assert (one.first, one.last) == (other.first, other.last)
        assert one.all != other.all


@pytest.mark.parametrize("mode", ["on", "reads"])
def test_what_a_service_records(tmp_path: Path, mode: str) -> None:
    """On behalf of whom; and in mode "reads" every read, because no memory is mapped."""
    with serving(tmp_path, listen=("127.0.0.1", 0), audit=mode) as (_, server):
        with perdure.connect(tmp_path, name="engine") as client:
            space = keyspace(client)
            keys = chain(space, 1, 4)
            assert write(space, keys) == [STORED] * 4
            for _ in range(3):
                assert read(space, keys) == [FOUND] * 4
        with perdure.connect(tcp_address(server), name="far") as client:
            assert read(keyspace(client), keys) == [FOUND] * 4
    events = [event for _, event in audit_look.records(tmp_path / "audit")]
    (put,) = [event for event in events if event.op == "put"]
    assert put.who == f"unix pid {os.getpid()} engine"
    reads = [event.who for event in events if event.op == "read"]
    assert any(who.startswith("127.0.0.1:") for who in reads)
    grants = [event.tenant for event in events if event.op == "grant-map"]
    if mode == "reads":
        assert (reads.count(put.who), grants) == (3, [])
    else:
        assert set(grants) == {"acme"}
    assert audit_look.verify(tmp_path / "audit").ok


def test_a_service_refuses_writes_without_a_log(tmp_path: Path) -> None:
    with serving(tmp_path) as (store, _), perdure.connect(tmp_path) as client:
        space = keyspace(client)
        with closing(Full(tmp_path / "audit", audit_files.signer_of(tmp_path, STORE), SECRET)) as log:
            store.core.audit = log
            log.full = True
            with pytest.raises(AuditUnavailable):
                write(space, chain(space, 1, 1))
            log.full = False
            assert write(space, chain(space, 2, 1)) == [STORED]
            store.core.audit = None


# --- what must not happen to the files
def test_what_a_failed_write_left_is_gone_before_the_next_one(failing: Full, tmp_path: Path) -> None:
    """Shorter records must not leave its tail behind them."""
    failing.full = True
    with pytest.raises(AuditUnavailable):
        failing.append(Event("put", detail="x" * 4000))
    failing.full = False
    failing.append(Event("put"))
    assert os.fstat(failing._fd).st_size == failing._nbytes
    assert audit_look.verify(tmp_path / "audit").ok


def test_what_the_kernel_could_not_write_is_written_again(failing: Full, tmp_path: Path) -> None:
    failing.append(Event("put"))
    failing.lost = True
    with pytest.raises(OSError, match="lost writes"):
        failing.checkpoint()
    written: list[int] = []
    failing.lost, pwrite = False, os.pwrite
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, data, at: written.append(len(data)) or pwrite(fd, data, at))
        failing.checkpoint()
    assert written == [failing._nbytes]


def test_nothing_is_written_after_the_end(tmp_path: Path) -> None:
    """The number of its descriptor may be another file's by then."""
    (tmp_path / "keystore").mkdir()
    log = opened(tmp_path)
    log.close()
    with (tmp_path / "other").open("w+b") as other:
        with pytest.raises(AuditUnavailable):
            log.append(Event("put"))
        assert other.read() == b""


def test_a_file_that_cannot_be_begun_leaves_the_old_one(failing: Full, monkeypatch: pytest.MonkeyPatch) -> None:
    failing.append(Event("put"))

    def refused(first: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(failing, "_open_file", refused)
        with pytest.raises(OSError, match="too many"):
            failing.rotate()
    failing.append(Event("put"))
    failing.rotate()
    failing.append(Event("put"), durable=True)
    assert audit_look.verify(failing._folder).ok


# --- what is covered
def test_denials_are_told_once_and_then_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keystore").mkdir()
    monkeypatch.setattr(limits, "audit_denials_records_max", 3)
    now = 100.0
    with closing(opened(tmp_path)) as log:
        denials = Denials(lambda: log, lambda: now)
        for number in range(5):
            for _ in range(4):
                denials.note("a", "acme", "read", f"why {number}", "acme@1#x")
        denials.flush()  # too early
        assert ops(tmp_path)[1:] == ["denied"] * 3
        now += limits.audit_checkpoint_s
        denials.flush()
        denials.note("a", "acme", "read", "why 4")
    events = [event for _, event in audit_look.records(tmp_path / "audit") if event.op == "denied"]
    assert [event.counts for event in events[3:]] == [{"again": 3}] * 3 + [{"others": 8}, {}]
    assert {event.decision for event in events} == {"deny"}
    assert (events[0].outcome, events[0].detail, events[0].policy) == ("read", "why 0", "acme@1#x")


def test_settings_that_change_are_recorded(tmp_path: Path) -> None:
    for options in ({}, {}, {"encryption": "on"}, {"capacity": "512MiB", "kek": f"file:{tmp_path / 'kek'}"}):
        with perdure.open(tmp_path / "s", memory=0, audit="on", **({"capacity": "256MiB"} | options)):
            pass
    changes = [event.detail for _, event in audit_look.records(tmp_path / "s/audit") if event.op == "config"]
    assert len(changes) == 3
    assert changes[1] == "encryption: off -> on"
    assert "capacity: 268435456 -> 536870912" in changes[2]
    with perdure.open(tmp_path / "s", memory=0, audit="off"):
        pass
    *_, last = (event for _, event in audit_look.records(tmp_path / "s/audit"))
    assert (last.op, last.detail.partition(",")[0]) == ("config", "audit: off")


def test_keys_of_tenants_are_recorded(tmp_path: Path) -> None:
    options = {"memory": 0, "audit": "on", "encryption": "on", "capacity": "256MiB"}
    with perdure.open(tmp_path, **options) as store:
        space = keyspace(store)
        assert write(space, chain(space, 1, 2)) == [STORED] * 2
    (tmp_path / "keystore/kek.json").rename(tmp_path / "elsewhere")
    with perdure.open(tmp_path, **options) as store:
        space = keyspace(store)
        assert read(space, chain(space, 1, 1)) == [DENIED]
    events = [event for _, event in audit_look.records(tmp_path / "audit")]
    made, refused = (next(event for event in events if event.op == op) for op in ("key-create", "key-refused"))
    assert (made.tenant, refused.tenant, refused.decision) == ("acme", "acme", "deny")
    assert events[-2].decision == "deny"


def test_pins_and_looks_of_operators_are_recorded(tmp_path: Path) -> None:
    with perdure.open(tmp_path, memory=0, audit="on") as store:
        space = keyspace(store)
        keys = chain(space, 1, 2)
        write(space, keys)
        with space.pin(keys, ttl_s=5.0):
            pass
        store.explain(keys[0].tobytes())
        store.session_admin("list", {})
    events = {(event.op, event.detail): event for _, event in audit_look.records(tmp_path / "audit")}
    assert events["pin", "5 s"].blocks == 2
    assert events["admin", "explain"].first == events["pin", "5 s"].first
    assert ("admin", "sessions list") in events


@pytest.mark.parametrize("tcp", [False, True])
def test_a_trace_follows_its_request(tmp_path: Path, tcp: bool) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with serving(tmp_path, listen=("127.0.0.1", 0), audit="reads") as (store, server):
        with perdure.connect(tcp_address(server) if tcp else tmp_path) as client, tracing(trace):
            space = keyspace(client)
            keys = chain(space, 1, 4)
            assert write(space, keys) == [STORED] * 4
            out = np.zeros((4, space.layout.block_bytes), np.uint8)
            assert space.submit_read(keys, out).result().usable == 4
            space.session("s")
        with tracing("t" * 1000):
            inner = keyspace(store)
            assert inner.submit_read(keys, out).result().usable == 4
    events = [event for _, event in audit_look.records(tmp_path / "audit")]
    traces = {
        op: [event.trace for event in events if event.op == op] for op in ("grant", "put", "session-open", "read")
    }
    assert traces == {"grant": [trace], "put": [trace], "session-open": [trace], "read": [trace, "t" * 128]}
    with pytest.raises(InvalidArgument):
        tracing("")


def test_memory_is_mapped_by_nobody_where_every_read_counts(tmp_path: Path) -> None:
    with serving(tmp_path, audit="reads"), perdure.connect(tmp_path) as client:
        space = keyspace(client)
        run, deadline = client.current()
        number = space.begin().space
        with pytest.raises(ProtocolError, match="no memory to map"):
            client.ask(run, lambda i: m.Attach(i, number, [0, 0], []), deadline)
