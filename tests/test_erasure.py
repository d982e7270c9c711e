"""Erasing tenants and blocks: unreadable at once, gone for good, whatever crashes, races or is rebuilt meanwhile."""

from __future__ import annotations

import ast
import contextlib
import json
import shutil
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support import blocks as data
from support.blocks import FOUND, MISSING
from support.policies import policy_directory
from support.served import serving

import perdure
from perdure import Keyspace, Store
from perdure.cli import main
from perdure.errors import AccessDenied, AuditUnavailable, Erased, InvalidArgument
from perdure.governance import audit_look
from perdure.governance.checkpoint import Verifier
from perdure.testing.store import chain as client_chain
from perdure.testing.store import keyspace as client_keyspace
from perdure.testing.store import read, tokens, write

WAIT_S = 60.0
CAPACITY = 64 << 20
REJECTED, STORED = int(perdure.WriteStatus.REJECTED), int(perdure.WriteStatus.STORED)


def opened(path: Path, **options: Any) -> Store:
    return perdure.open(path, **({"capacity": CAPACITY, "memory": "16MiB"} | options))


def fill(store: Store, tenant: str = "acme", chains: int = 3, blocks: int = 4, **options: Any) -> list[Any]:
    space = data.keyspace(store, tenant=tenant)
    made = [data.chain(space, number, blocks) for number in range(1, chains + 1)]
    for keys in made:
        assert data.write(space, keys, **options).statuses.tolist() == [STORED] * blocks
    return made


def statuses(space: Keyspace, keys: Any) -> list[int]:
    return [int(one) for one in data.read_back(space, keys)]


def erased(store: Store, **what: Any) -> dict[str, Any]:
    told = store.erase(wait_s=WAIT_S, **what)
    assert told["state"] == "erased", told
    return told


def on_disk(store: Store, keys: Any) -> list[str]:
    """Files of segments that hold the plain bytes of one of these blocks."""
    found = []
    for path in [one for one in Path(store.path).rglob("*") if one.is_file() and "index" not in one.parts]:
        raw = path.read_bytes()
        if any(data.content(key.tobytes(), data.BLOCK_BYTES)[:4096].tobytes() in raw for key in keys):
            found.append(str(path))
    return found


@pytest.fixture(params=["on", "off"], ids=["encrypted", "plain"])
def encryption(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- tenants
def test_a_tenant_is_unreadable_at_once_and_others_stay(tmp_path: Path, encryption: str) -> None:
    with closing(opened(tmp_path / "s", encryption=encryption, audit="on")) as store:
        mine, theirs = fill(store), fill(store, "globex")
        space, other = data.keyspace(store), data.keyspace(store, tenant="globex")
        told = store.erase(tenant="acme")
        assert told["state"] in ("unreadable", "erased")
        for keys in mine:
            assert statuses(space, keys) == [MISSING] * 4
            assert (space.lookup(keys), space.present(keys).any()) == (0, False)
        report = data.write(space, mine[0])
        assert report.statuses.tolist() == [REJECTED] * 4
        assert "open it again" in report.reasons[0]
        for keys in theirs:
            assert statuses(other, keys) == [FOUND] * 4
        assert store.erasure(told["id"])["id"] == told["id"]
        anew = data.keyspace(store)
        assert anew.digest != space.digest
        keys = data.chain(anew, 1, 4)
        assert data.write(anew, keys).durable
        assert statuses(anew, keys) == [FOUND] * 4
        while store.erasure(told["id"])["state"] != "erased":
            store.core.erasures.wait(told["id"], WAIT_S)
        assert statuses(anew, keys) == [FOUND] * 4
        assert [one for some in mine for one in on_disk(store, some)] == []
        assert store.status()["tenants"]["acme"]["blocks"] == 4
        assert data.wrong_books(store, settled=False) == []


def test_it_stays_erased_whatever_is_opened_rebuilt_or_put_back(tmp_path: Path, encryption: str) -> None:
    path, old = tmp_path / "s", tmp_path / "old"
    with closing(opened(path, encryption=encryption)) as store:
        keys = fill(store)[0]
        digest = data.keyspace(store).digest
    shutil.copytree(path, old)
    with closing(opened(path)) as store:
        erased(store, tenant="acme")
    for folder in ("segments", "index"):  # from a backup of the data, which is older than the erasure
        shutil.rmtree(path / folder)
        shutil.copytree(old / folder, path / folder)
    (path / "control/data.mdb").write_bytes((old / "control/data.mdb").read_bytes())
    with closing(opened(path)) as store:
        space = data.keyspace(store)
        assert space.digest != digest
        assert store.core.index.lookup(keys)[0].all()  # so the index says
        assert not store.core.locate(keys)[0].any()
    perdure.rebuild(path)
    with closing(opened(path)) as store:
        assert store.wait_ready(WAIT_S)
        assert not store.core.index.lookup(keys)[0].any()


def test_names_of_before_cannot_be_made_again(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "s")) as store:
        fill(store)
        (secret,) = [path.read_bytes() for path in (tmp_path / "s/keystore/names").iterdir() if path.suffix == ""][:1]
        erased(store, tenant="acme")
        assert secret not in [path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()]


def test_a_tenant_of_before_names_had_secrets_keeps_its_names(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with closing(opened(path)) as store:
        space = data.keyspace(store)
        store.core.segments.keys.destroy_tenant(b"x" * 16)  # type: ignore[union-attr]
        (name,) = (path / "keystore/names").iterdir()
    name.unlink()  # as an older version has left it: registered, and without a secret of its own
    with closing(opened(path)) as store:
        before = data.keyspace(store)
        keys = data.chain(before, 1, 3)
        assert before.digest != space.digest
        assert data.write(before, keys).durable
    with closing(opened(path)) as store:
        again = data.keyspace(store)
        assert again.digest == before.digest
        assert statuses(again, keys) == [FOUND] * 3
        erased(store, tenant="acme")
        assert data.keyspace(store).digest != before.digest


# --- blocks
def test_blocks_go_and_their_neighbours_stay(tmp_path: Path, encryption: str) -> None:
    with closing(opened(tmp_path / "s", encryption=encryption, audit="on")) as store:
        one, two, three = fill(store)
        space = data.keyspace(store)
        before = {record.segment for record in store.core.table.all()}
        told = store.erase(tenant="acme", blocks=[key.tobytes() for key in two[1:3]])
        assert statuses(space, two) == [FOUND, MISSING, MISSING, FOUND]
        told = store.core.erasures.wait(told["id"], WAIT_S)
        assert told["state"] == "erased"
        assert statuses(space, two) == [FOUND, MISSING, MISSING, FOUND]
        assert statuses(space, one) == statuses(space, three) == [FOUND] * 4
        after = {record.segment for record in store.core.table.all()}
        assert not before & after, "the segment they were in has been given up"
        keystore = store.core.segments.keys
        assert keystore is not None
        assert not any(map(keystore.has, before))
        assert on_disk(store, two[1:3]) == []
        assert data.write(space, two[1:3]).statuses.tolist() == [STORED] * 2
        assert statuses(space, two) == [FOUND] * 4
        assert data.wrong_books(store, settled=False) == []
    with closing(opened(tmp_path / "s")) as store:
        space = data.keyspace(store)
        assert [statuses(space, keys) for keys in (one, two, three)] == [[FOUND] * 4] * 3


def test_copies_in_the_garbage_of_a_segment_go_too(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "s", encryption="off", memory=0)) as store:
        keys = fill(store, chains=1, durability="ephemeral")[0]
        space = data.keyspace(store)
        store.sync()
        assert data.write(space, keys, "session").statuses.tolist() == [STORED] * 4  # a stronger copy replaces it
        assert len({record.segment for record in store.core.table.all()}) == 2
        erased(store, tenant="acme", blocks=[keys[0].tobytes()])
        assert on_disk(store, keys[:1]) == []
        assert statuses(space, keys) == [MISSING, FOUND, FOUND, FOUND]


# --- published prefixes
def test_what_is_published_is_unpublished_first(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "s")) as store:
        space = client_keyspace(store, tenant="acme")
        keys = client_chain(space, 1, 3)
        assert write(space, keys) == [STORED] * 3
        store.publish(space.digest, tokens(1, 3), name="system", readers=["globex"])
        for what in ({}, {"blocks": [keys[2].tobytes()]}):
            with pytest.raises(InvalidArgument, match="published system, which are copies; unpublish"):
                store.erase(tenant="acme", **what)
        assert read(space, keys) == [FOUND] * 3
        other = client_keyspace(store, tenant="globex")
        theirs = client_chain(other, 1, 3)
        assert other.lookup(theirs) == 3
        erased(store, tenant="globex")
        assert read(other, theirs) == [MISSING] * 3, "under the names it had"
        assert other.lookup(theirs) == 0
        store.unpublish("system")
        erased(store, tenant="acme")
        assert store.published() == []


# --- sessions and subjects
def test_a_session_goes_with_its_blocks(tmp_path: Path, encryption: str) -> None:
    with closing(opened(tmp_path / "s", encryption=encryption)) as store:
        one, two, three = fill(store)
        space = data.keyspace(store)
        for name, keys in (("a", one), ("b", two)):
            assert space.session(name).extend(keys)
        erased(store, tenant="acme", session="a")
        assert space.find_session("a") is None
        assert space.find_session("b") is not None
        assert [statuses(space, keys) for keys in (one, two, three)] == [[MISSING] * 4, [FOUND] * 4, [FOUND] * 4]
        assert on_disk(store, one) == []
        with pytest.raises(InvalidArgument, match="nothing of this session"):
            store.erase(tenant="acme", session="a")


def test_a_subject_goes_with_all_its_sessions(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "s")) as store:
        one, two, three = fill(store)
        space = data.keyspace(store)
        for name, keys, subject in (("a", one, "user-7"), ("b", two, "user-7"), ("c", three, "user-8")):
            assert space.session(name, subject=subject).extend(keys)
        assert space.find_session("a").branch("a/tool")  # type: ignore[union-attr]
        assert not any(b"user-7" in path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file())
        erased(store, tenant="acme", subject="user-7")
        assert [one["name"] for one in store.sessions("acme")] == ["c"]
        assert [statuses(space, keys) for keys in (one, two, three)] == [[MISSING] * 4, [MISSING] * 4, [FOUND] * 4]
        assert not any(b"user-7" in path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file())


def test_sessions_of_an_erased_tenant_are_over(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "s")) as store:
        keys = fill(store)[0]
        old = data.keyspace(store)
        session = old.session("a")
        assert session.extend(keys)
        other = data.keyspace(store, tenant="globex").session("a")
        told = store.erase(tenant="acme")
        assert session.handoff().outcome == "rejected"
        assert len(session.keys()) == 0
        anew = data.keyspace(store)
        assert anew.find_session("a") is None
        assert anew.session("a").blocks == 0
        store.core.erasures.wait(told["id"], WAIT_S)
        assert anew.find_session("a") is not None
        assert other.pin(60)
        assert sorted(one["tenant"] for one in store.sessions()) == ["acme", "globex"]


# --- through a service
def test_a_client_erases_and_engines_have_nothing_left(tmp_path: Path) -> None:
    with serving(tmp_path / "s", encryption="on", audit="on") as (store, _), perdure.connect(tmp_path / "s") as client:
        space = client_keyspace(client)
        keys = client_chain(space, 1, 8)
        assert write(space, keys) == [STORED] * 8
        assert read(space, keys) == [FOUND] * 8
        told = client.erase(tenant="acme", wait_s=WAIT_S)
        assert told["state"] == "erased"
        assert read(space, keys) == [MISSING] * 8
        assert (space.lookup(keys), write(space, keys)) == (0, [REJECTED] * 8)
        anew = client_keyspace(client)
        assert anew.digest != space.digest
        again = client_chain(anew, 1, 8)
        assert write(anew, again) == [STORED] * 8
        assert read(anew, again) == [FOUND] * 8
        assert Verifier.parse(store.status()["audit"]["key"]).open(told["receipt"]["statement"].encode())


def test_only_operators_of_a_tenant_erase_it(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    policy = policy_directory(tmp_path / "p", sockets=tmp_path / "r", globex="retention_min_s = 3600")
    with serving(tmp_path / "s", policy=policy) as _, contextlib.ExitStack() as stack:
        engine, other, operator = (
            stack.enter_context(perdure.connect(tmp_path / "r" / f"{name}.sock"))
            for name in ("engine-a", "engine-b", "operator")
        )
        space, theirs = client_keyspace(engine, tenant="acme"), client_keyspace(other, tenant="globex")
        assert write(space, client_chain(space, 1, 2)) == write(theirs, client_chain(theirs, 1, 2)) == [STORED] * 2
        with pytest.raises(AccessDenied, match="no rule permits"):
            engine.erase(tenant="acme")
        with pytest.raises(AccessDenied, match="retained"):
            operator.erase(tenant="globex")
        with pytest.raises(AccessDenied):
            operator.erase(tenant="initech")
        assert operator.erase(tenant="acme", wait_s=WAIT_S)["state"] == "erased"
        assert read(space, client_chain(space, 1, 2)) == [MISSING] * 2
        assert read(theirs, client_chain(theirs, 1, 2)) == [FOUND] * 2


def test_the_command(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "s", audit="on", encryption="on")) as store:
        keys = fill(store)[0]
    receipt = tmp_path / "receipt.json"
    done = run("erase", tmp_path / "s", "--tenant", "acme", "--block", keys[0].tobytes().hex(), "--receipt", receipt)
    assert done.exit_code == 0, done.output
    assert "kind block" in done.output
    assert json.loads(receipt.read_text())["statement"].endswith("\n")
    done = run("erase", tmp_path / "s", "--tenant", "acme", "--json")
    told = json.loads(done.output)
    assert told["state"] == "erased"
    assert json.loads(run("erase", tmp_path / "s", "--state", told["id"], "--json").output) == told
    for wrong in ((), ("--tenant", "acme", "--block", "xyz"), ("--tenant", "acme", "--state", "0" * 16)):
        assert run("erase", tmp_path / "s", *wrong).exit_code == 2


def run(*words: Any) -> Any:
    return CliRunner().invoke(main, [str(word) for word in words])


# --- receipts
def test_a_receipt_proves_what_the_log_says(tmp_path: Path, encryption: str) -> None:
    with closing(opened(tmp_path / "s", encryption=encryption, audit="on")) as store:
        fill(store)
        told = erased(store, tenant="acme")
        receipt, key = told["receipt"], store.status()["audit"]["key"]
        lines = Verifier.parse(key).open(receipt["statement"].encode()).splitlines()
        assert f"id {told['id']}" in lines
        assert f"done {'keys destroyed' if encryption == 'on' else 'records removed'}" in lines
        assert "blocks 12" in lines
        record = json.loads(receipt["record"])
        assert (record["op"], record["object"], record["tenant"]) == ("erased", told["id"], "acme")
        folder = audit_look.folder_of(tmp_path / "s")
        assert audit_look.verify(folder, key).ok
        begun = [event for _, event in audit_look.records(folder) if event.op == "erase"]
        assert [event.object for event in begun] == [told["id"]]
        assert begun[0].n < record["n"]


def test_without_a_log_the_receipt_says_so(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "s")) as store:
        fill(store)
        receipt = erased(store, tenant="acme")["receipt"]
        text = Verifier.parse(receipt["key"]).open(receipt["statement"].encode())
        assert "record none: there is no audit log" in text
        assert receipt["record"] == receipt["proof"] == ""


def test_nothing_is_erased_that_cannot_be_recorded(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "s", audit="on")) as store:
        keys = fill(store)[0]
        audit = store.core.audit
        assert audit is not None
        real, audit._pwrite = audit._pwrite, _full  # type: ignore[method-assign]
        with pytest.raises(AuditUnavailable):
            store.erase(tenant="acme")
        audit._pwrite = real  # type: ignore[method-assign]
        assert statuses(data.keyspace(store), keys) == [FOUND] * 4
        assert store.core.erasures.waiting() == []


def _full(view: memoryview, at: int) -> int:
    raise OSError(28, "no space left on device")


# --- races
@pytest.mark.parametrize("durability", ["ephemeral", "session"])
def test_racing_puts_and_reads_bring_nothing_back(tmp_path: Path, durability: str) -> None:
    with closing(opened(tmp_path / "s", encryption="on")) as store:
        space = data.keyspace(store)
        keys = data.chain(space, 1, 64)
        stop, wrong = threading.Event(), []

        def put() -> None:
            at = 0
            while not stop.is_set():
                part = keys[at % 64 : at % 64 + 4]
                data.write(space, part, durability)
                at += 4

        def look() -> None:
            while not stop.is_set():
                wrong.extend(one for one in statuses(space, keys) if one not in (FOUND, MISSING))

        threads = [threading.Thread(target=work) for work in (put, put, look)]
        for thread in threads:
            thread.start()
        data.read_back(space, keys)
        told = store.erase(tenant="acme")
        found = statuses(space, keys)
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert found == [MISSING] * 64
        assert wrong == []
        assert store.core.erasures.wait(told["id"], WAIT_S)["state"] == "erased"
        assert statuses(space, keys) == [MISSING] * 64
        assert store.core.table.all() == []
        assert on_disk(store, keys) == []


@pytest.mark.parametrize("what", [{}, {"session": "a"}, {"subject": "user-7"}], ids=["tenant", "session", "subject"])
def test_racing_handoffs_bring_nothing_back(tmp_path: Path, what: dict[str, str]) -> None:
    with closing(opened(tmp_path / "s")) as store:
        keys = fill(store, chains=1)[0]
        space = data.keyspace(store)
        begun = threading.Barrier(4)
        assert space.session("a", subject="user-7").extend(keys)

        def hand_over() -> None:
            """As its workers do: no one opens it again."""
            begun.wait()
            while (session := space.find_session("a")) is not None:
                space.adopt(session.handoff().token)

        threads = [threading.Thread(target=hand_over) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait()
        told = store.erase(tenant="acme", **what)
        for thread in threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in threads)
        assert store.core.erasures.wait(told["id"], WAIT_S)["state"] == "erased"
        assert list(store.core.control.items("session")) == []
        assert statuses(space, keys) == [MISSING] * 4


def test_a_publish_that_comes_after_it_is_refused(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "s")) as store:
        keys = fill(store)[0]
        records = store.core.index.lookup(keys)[1]
        store.core.tenants.check(keys, records)
        store.erase(tenant="acme")
        with pytest.raises(Erased):
            store.core.tenants.check(keys, records)


def test_memory_is_wiped(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "s")) as store:
        keys = fill(store)[0]
        other = fill(store, "globex")[0]
        pool = store.core.pool
        chunk = pool._chunks[0].memory.view
        plain = data.content(keys[0].tobytes(), data.BLOCK_BYTES)[:4096].tobytes()
        assert plain in chunk.tobytes()
        erased(store, tenant="acme")
        assert plain not in chunk.tobytes()
        assert statuses(data.keyspace(store, tenant="globex"), other) == [FOUND] * 4


# --- bad input
@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ({"tenant": ""}, "tenant"),
        ({"tenant": "acme", "blocks": []}, "1 to"),
        ({"tenant": "acme", "blocks": [b"short"]}, "32 bytes"),
        ({"tenant": "acme", "blocks": [bytes(32)], "session": "s"}, "one thing"),
        ({"tenant": "a" * 300}, "tenant"),
    ],
)
def test_bad_input_says_what(tmp_path: Path, what: dict[str, Any], problem: str) -> None:
    with closing(opened(tmp_path / "s")) as store:
        with pytest.raises(InvalidArgument, match=problem):
            store.erase(**what)
        with pytest.raises(InvalidArgument, match="16 hex digits"):
            store.erasure("../../etc")
        with pytest.raises(InvalidArgument, match="none with this id"):
            store.erasure("0" * 16)


def test_a_tenant_without_blocks_is_erased(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "s")) as store:
        assert "blocks 0" in erased(store, tenant="nobody")["receipt"]["statement"]


# --- a stranger verifies
STRANGER = Path(__file__).parent.parent / "src/perdure/demo/stranger.py"


def stranger(receipt: Path, key: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(STRANGER), str(receipt), key]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_program_in_the_docs_is_the_one_that_is_tested() -> None:
    code = STRANGER.read_text()
    assert f"```python\n{code}```\n" in (STRANGER.parents[3] / "docs/erasure.md").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    imported = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else one.name for node in imported for one in node.names}
    assert {str(name).split(".")[0] for name in names} == {"base64", "hashlib", "json", "sys", "cryptography"}


def test_a_stranger_verifies_receipts(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "s", encryption="on", audit="on")) as store:
        one, two, three = fill(store)
        told = [erased(store, tenant="acme", blocks=[keys[0].tobytes()])["receipt"] for keys in (one, two, three)]
        told.append(erased(store, tenant="acme")["receipt"])
        key = store.status()["audit"]["key"]
    with closing(opened(tmp_path / "other", audit="on")) as store:
        other = store.status()["audit"]["key"]
        told.append(erased(store, tenant="acme")["receipt"])
    path = tmp_path / "receipt.json"
    for receipt in told[:-1]:  # at four places of trees of four sizes
        path.write_text(json.dumps(receipt))
        done = stranger(path, key)
        assert done.returncode == 0, done.stderr
        assert done.stdout == receipt["statement"].partition("\n\n")[0] + "\n"
        assert stranger(path, other).returncode != 0
    mine, foreign = told[0], told[-1]
    forged = [
        mine | {"statement": mine["statement"].replace("blocks 1", "blocks 2")},
        mine | {"record": mine["record"].replace("erased", "erasee")},
        mine | {"record": told[1]["record"]},
        mine | {"statement": told[1]["statement"]},
        mine | {"proof": told[1]["proof"]},
        mine | {"proof": foreign["proof"]},
        mine | {"statement": mine["proof"].partition("\n\n")[2]},  # a checkpoint is no statement
        mine | {"record": "", "proof": ""},
        foreign,
    ]
    for number, receipt in enumerate(forged):
        path.write_text(json.dumps(receipt))
        assert stranger(path, key).returncode != 0, number
