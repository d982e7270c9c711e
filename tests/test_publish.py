"""Published prefixes: others read exactly them, nothing else, and not any longer than they are published."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.policies import policy_directory
from support.served import serving, tcp_address

import perdure
from perdure import RemoteStore, Store, aliases
from perdure.cli import main
from perdure.errors import AccessDenied, AuditUnavailable, InvalidArgument, ReadOnlyStore
from perdure.governance import audit_look
from perdure.governance.audit import Event
from perdure.limits import MIB
from perdure.testing.store import FOUND, MISSING, blocks_of, chain, keyspace, tokens, write

BLOCKS = 6
READERS = 'scope = "published"'
PUBLISHES = "publication = true"


def opened(path: Path, **options: Any) -> Store:
    return perdure.open(path, **{"memory": 32 * MIB, "capacity": "256MiB"} | options)


def got(space: Any, number: int, stored: Any, **options: Any) -> list[int]:
    """Statuses of reading chain `number` under the reader's own names; what is FOUND has the bytes of `stored`."""
    keys = chain(space, number, len(stored))
    into = np.zeros((len(keys), space.layout.block_bytes), np.uint8)
    report = space.read(keys, into, **options)
    assert report.wait_settled(5.0)
    want = blocks_of(stored, space.layout.block_bytes)
    for place, status in enumerate(report.statuses.tolist()):
        if status == FOUND:
            assert bytes(into[place]) == bytes(want[place])
    assert report.usable == space.lookup(keys) or report.usable == 0
    return list(report.statuses.tolist())


def events(folder: Path, op: str) -> list[Event]:
    return [event for _, event in audit_look.records(folder / "audit") if event.op == op]


# --- embedded
@pytest.mark.parametrize("encryption", ["off", "on", "tenants:acme"])
@pytest.mark.parametrize("memory", [0, 32 * MIB])
def test_exactly_the_published_range_is_shared(tmp_path: Path, encryption: str, memory: int) -> None:
    with opened(tmp_path, encryption=encryption, memory=memory) as store:
        acme, globex = keyspace(store), keyspace(store, tenant="globex")
        for number in (1, 2):
            write(acme, chain(acme, number, BLOCKS))
        keys = chain(acme, 1, BLOCKS)
        told = store.publish(acme.digest, tokens(1, 4), name="rules")
        assert (told["blocks"], told["present"], told["tenant"], told["readers"]) == (4, 4, "acme", ["*"])
        assert got(globex, 1, keys) == [FOUND] * 4 + [MISSING] * 2
        assert got(globex, 2, chain(acme, 2, BLOCKS)) == [MISSING] * BLOCKS
        assert globex.lookup(chain(globex, 1, BLOCKS)) == 4
        assert globex.present(chain(globex, 1, BLOCKS)).tolist() == [True] * 4 + [False] * 2
        assert globex.follow(chain(globex, 1, 4), wait_s=0.0) == 4
        assert globex.lookup(keys) == BLOCKS  # embedded, whoever has a key may ask
        assert [one["name"] for one in store.published()] == ["rules"]
        store.unpublish("rules")
        assert got(globex, 1, keys) == [MISSING] * BLOCKS
        assert globex.lookup(chain(globex, 1, BLOCKS)) == 0
        assert got(acme, 1, keys) == [FOUND] * BLOCKS
        assert store.published() == []
        assert not any(name.startswith("published/") for name in store.status()["tenants"])


def test_the_readers_own_blocks_come_first_and_continue_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        acme, globex = keyspace(store), keyspace(store, tenant="globex")
        write(acme, chain(acme, 1, BLOCKS))
        store.publish(acme.digest, tokens(1, 4), name="rules")
        mine = chain(globex, 1, BLOCKS)
        into = np.ones((1, globex.layout.block_bytes), np.uint8)
        globex.write(mine[:1], into)
        write(globex, mine[4:])
        report = globex.read(mine, data := np.zeros((BLOCKS, globex.layout.block_bytes), np.uint8))
        assert report.usable == BLOCKS
        assert data[0].tobytes() == into[0].tobytes()
        assert data[1].tobytes() == blocks_of(chain(acme, 1, 2))[1].tobytes()
        assert data[5].tobytes() == blocks_of(mine)[5].tobytes()
        store.unpublish("rules")
        assert globex.read(mine, data).statuses.tolist() == [FOUND] + [MISSING] * 3 + [FOUND] * 2


def test_only_named_readers_of_the_same_identity(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        acme = keyspace(store)
        write(acme, chain(acme, 1, 2))
        store.publish(acme.digest, tokens(1, 2), name="rules", readers=["globex"])
        found = {
            (tenant, *extra.values()): keyspace(store, tenant=tenant, **extra).lookup(
                chain(keyspace(store, tenant=tenant, **extra), 1, 2)
            )
            for tenant in ("globex", "initech")
            for extra in ({}, {"salt": "x"}, {"lora": "y"})
        }
        assert {name for name, count in found.items() if count} == {("globex",)}


def test_an_engines_own_hashes(tmp_path: Path) -> None:
    hashes = [bytes([number]) * 32 for number in range(3)]
    with opened(tmp_path) as store:
        acme, globex = keyspace(store), keyspace(store, tenant="globex")
        write(acme, acme.adopt_hashes(hashes))
        store.publish(acme.digest, hashes=hashes[:2], name="rules")
        assert globex.lookup(globex.adopt_hashes(hashes)) == 2


@pytest.mark.parametrize("encryption", ["off", "on"])
def test_it_survives_a_restart_and_so_does_its_end(tmp_path: Path, encryption: str) -> None:
    with opened(tmp_path, encryption=encryption) as store:
        acme = keyspace(store)
        write(acme, chain(acme, 1, 3))
        for name in ("rules", "gone"):
            store.publish(acme.digest, tokens(1, 3), name=name)
        store.unpublish("gone")
    raw = b"".join(
        path.read_bytes() for path in tmp_path.glob("**/*") if path.is_file() and "segments" not in path.parts
    )
    assert (tokens(1, 3).tobytes().hex().encode() in raw) == (encryption == "off")
    with opened(tmp_path) as store:
        globex = keyspace(store, tenant="globex")
        assert got(globex, 1, chain(keyspace(store), 1, 3)) == [FOUND] * 3
        assert [one["name"] for one in store.published()] == ["rules"]
        store.unpublish("rules")
    with opened(tmp_path) as store:
        assert keyspace(store, tenant="globex").lookup(chain(keyspace(store, tenant="globex"), 1, 3)) == 0
        keys = store.core.segments.keys
        assert keys is not None
        gone = list((tmp_path / "keystore/tenants").glob("*.gone")) if encryption == "on" else [1, 2]
        assert len(gone) == 2


def test_the_copy_does_not_need_the_tenants_key(tmp_path: Path) -> None:
    with opened(tmp_path, encryption="on", memory=0) as store:
        acme, globex = keyspace(store), keyspace(store, tenant="globex")
        keys = chain(acme, 1, 3)
        write(acme, keys)
        store.publish(acme.digest, tokens(1, 3), name="rules")
        assert store.core.segments.keys is not None
        store.core.segments.keys.destroy_tenant(acme.tenant_id)
        acme.reads_published = False
        assert got(acme, 1, keys) == [MISSING] * 3
        assert got(globex, 1, keys) == [FOUND] * 3


@pytest.mark.parametrize("state", ["copying", "ended"])
def test_what_was_left_half_done_is_ended(tmp_path: Path, state: str) -> None:
    with opened(tmp_path, audit="on") as store:
        acme = keyspace(store)
        write(acme, chain(acme, 1, 3))
        told = store.publish(acme.digest, tokens(1, 3), name="rules")
        one = store.core.publications._named("rules")
        store.core.publications._set(one, state=state)  # and then the process died
    with opened(tmp_path) as store:
        globex = keyspace(store, tenant="globex")
        assert globex.lookup(chain(globex, 1, 3)) == 0
        assert store.published() == []
        assert store.core.control.items("publication") == []
        store.publish(keyspace(store).digest, tokens(1, 3), name="rules")
    ended = events(tmp_path, "unpublish")
    assert [(one.object, one.outcome) for one in ended] == [
        (told["id"], "never completed" if state == "copying" else "")
    ]


def test_what_cannot_be_published(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        acme = keyspace(store)
        write(acme, chain(acme, 1, 3))
        for says, fields in (
            ("block 3 of 4 is missing", {"token_ids": tokens(1, 4)}),
            ("not one whole block", {"token_ids": tokens(1, 1)[:-1]}),
            ("not one whole block", {"hashes": []}),
            ("pass the tokens", {}),
            ("hashes of at most 255", {"hashes": [b""]}),
            ("readers=", {"token_ids": tokens(1, 1), "readers": []}),
            ("tenant ''", {"token_ids": tokens(1, 1), "readers": [""]}),
            ("ttl_s", {"token_ids": tokens(1, 1), "ttl_s": -1.0}),
        ):
            with pytest.raises(InvalidArgument, match=says):
                store.publish(acme.digest, **{"name": "rules"} | fields)
        with pytest.raises(InvalidArgument, match="no tenant has a keyspace"):
            store.publish(bytes(32), tokens(1, 1), name="rules")
        assert store.published() == []
        assert store.core.control.items("publication") == []
        store.publish(acme.digest, tokens(1, 1), name="rules")
        with pytest.raises(InvalidArgument, match="published already"):
            store.publish(acme.digest, tokens(1, 2), name="rules")
        with pytest.raises(InvalidArgument, match="nothing is published"):
            store.unpublish("other")
    with opened(tmp_path, read_only=True) as store:
        assert [one["present"] for one in store.published()] == [1]
        with pytest.raises(ReadOnlyStore):
            store.unpublish("rules")


def test_without_a_record_nothing_is_published(tmp_path: Path) -> None:
    with opened(tmp_path, audit="on") as store:
        acme, globex = keyspace(store), keyspace(store, tenant="globex")
        write(acme, chain(acme, 1, 2))
        store.publish(acme.digest, tokens(1, 2), name="kept", readers=["initech"])
        audit = store.core.audit
        assert audit is not None
        real, audit._pwrite = audit._pwrite, broken  # type: ignore[method-assign]
        for refused in (
            lambda: store.publish(acme.digest, tokens(1, 2), name="rules"),
            lambda: store.unpublish("kept"),
        ):
            with pytest.raises(AuditUnavailable):
                refused()
        assert globex.lookup(chain(globex, 1, 2)) == 0
        assert [one["name"] for one in store.published()] == ["kept"]
        audit._pwrite = real  # type: ignore[method-assign]
        store.publish(acme.digest, tokens(1, 2), name="again")
        assert globex.lookup(chain(globex, 1, 2)) == 2


def broken(*_: Any) -> int:
    raise OSError(28, "no space")


def test_everything_about_it_is_in_the_audit_log(tmp_path: Path) -> None:
    with opened(tmp_path, audit="on") as store:
        acme, globex = keyspace(store), keyspace(store, tenant="globex")
        write(acme, chain(acme, 1, 2))
        told = store.publish(acme.digest, tokens(1, 2), name="secret name", readers=["globex"])
        got(globex, 1, chain(acme, 1, 2))
        store.unpublish(told["id"])
    (made,), (used,), (ended,) = (events(tmp_path, op) for op in ("publish", "read-published", "unpublish"))
    assert (made.tenant, made.object, made.blocks, made.detail) == ("acme", told["id"], 2, "for globex")
    assert made.bytes == 2 * 8192
    assert (used.tenant, used.object, used.blocks) == ("globex", told["id"], 2)
    assert (ended.tenant, ended.object, ended.blocks) == ("acme", told["id"], 2)
    assert not any("secret name" in (one.detail, one.object, one.outcome) for one in (made, used, ended))


# --- through a service
class Governed:
    def __init__(self, folder: Path, stack: contextlib.ExitStack, **options: Any):
        self.folder, self._stack, self.sockets = folder, stack, folder / "r"
        self.sockets.mkdir(exist_ok=True)
        terms = options.pop("terms", {"acme": PUBLISHES, "globex": READERS})
        self.policy = policy_directory(folder / "p", sockets=self.sockets, **terms)
        self.store, self.server = stack.enter_context(serving(folder / "s", policy=self.policy, **options))

    def client(self, name: str) -> RemoteStore:
        return self._stack.enter_context(perdure.connect(self.sockets / f"{name}.sock", name=name))

    def stored(self) -> Any:
        space = keyspace(self.client("engine-a"))
        write(space, chain(space, 1, BLOCKS))
        write(space, chain(space, 2, BLOCKS))
        return space


@pytest.fixture
def governed(tmp_path: Path) -> Iterator[Callable[..., Governed]]:
    with contextlib.ExitStack() as stack:
        yield lambda **options: Governed(tmp_path, stack, **options)


@pytest.mark.parametrize("options", [{}, {"memory": 0}, {"audit": "reads"}, {"encryption": "on"}])
def test_tenants_of_a_service(governed: Callable[..., Governed], options: dict[str, Any]) -> None:
    service = governed(**options)
    acme, globex = service.stored(), keyspace(service.client("engine-b"), tenant="globex")
    own = chain(globex, 1, BLOCKS)
    assert globex.lookup(own) == 0  # opened before it was published
    operator = service.client("operator")
    operator.publish(acme.digest, tokens(1, 4), name="rules")
    stored = chain(acme, 1, BLOCKS)
    for _ in range(2):
        assert got(globex, 1, stored) == [FOUND] * 4 + [MISSING] * 2
        assert got(globex, 1, stored, deadline_s=10.0) == [FOUND] * 4 + [MISSING] * 2
    assert globex.present(own).tolist() == [True] * 4 + [False] * 2
    assert globex.advise(own, prefill_tokens_per_s=1.0).blocks == 4
    assert globex.follow(own, known=0, wait_s=0.1) == 4
    write(globex, own[4:])
    assert globex.lookup(own) == BLOCKS
    # nothing else of acme's: not by its own keys, nor the other prefix
    assert globex.lookup(stored) == 0
    assert got(globex, 2, chain(acme, 2, BLOCKS)) == [MISSING] * BLOCKS
    operator.unpublish("rules")
    assert globex.lookup(own) == 0
    assert globex.read(own, np.zeros((BLOCKS, 8192), np.uint8)).statuses.tolist() == [MISSING] * 4 + [FOUND] * 2
    assert got(acme, 1, stored) == [FOUND] * BLOCKS


@pytest.mark.parametrize("codec", ["off", "auto"])
def test_hosts_by_tcp(tmp_path: Path, codec: str) -> None:
    """Without a guard, whose hosts need certificates: what `gather` sends."""
    with serving(tmp_path, listen=("127.0.0.1", 0), codec=codec) as (store, server):
        acme = keyspace(store)
        write(acme, chain(acme, 1, 4))
        store.publish(acme.digest, tokens(1, 3), name="rules")
        with perdure.connect(tcp_address(server)) as client:
            assert keyspace(client, tenant="globex").lookup(chain(keyspace(client, tenant="globex"), 1, 4)) == 0
            globex = keyspace(client, tenant="globex")
            for peer in list(server._peers.values()):
                for space in peer.spaces:
                    space.reads_published = True
            assert got(globex, 1, chain(acme, 1, 4)) == [FOUND] * 3 + [MISSING]


def test_who_may_publish_and_read(governed: Callable[..., Governed]) -> None:
    service = governed(terms={"acme": PUBLISHES, "globex": ""})
    acme = service.stored()
    globex = keyspace(service.client("engine-b"), tenant="globex")
    operator, engine = service.client("operator"), service.client("engine-a")
    for client in (engine, service.client("engine-b"), service.client("proxy"), service.client("auditor")):
        with pytest.raises(AccessDenied, match="publish: "):
            client.publish(acme.digest, tokens(1, 2), name="rules")
    with pytest.raises(AccessDenied, match="globex@1 allows no publication"):
        operator.publish(globex.digest, tokens(1, 2), name="rules")
    with pytest.raises(AccessDenied, match="no such prefix"):
        service.client("engine-b").publish(bytes(32), tokens(1, 2), name="rules")
    operator.publish(acme.digest, tokens(1, 2), name="rules")
    assert globex.lookup(chain(globex, 1, 2)) == 0  # its terms: scope = "tenant"
    for client in (engine, service.client("engine-b")):
        with pytest.raises(AccessDenied, match="unpublish: "):
            client.unpublish("rules")
    assert [one["name"] for one in engine.published()] == ["rules"]
    operator.unpublish("rules")
    with pytest.raises(AccessDenied):
        service.client("engine-b").unpublish("rules")


def test_a_list_tells_others_only_what_is_for_them(governed: Callable[..., Governed]) -> None:
    service = governed()
    acme = service.stored()
    service.client("operator").publish(acme.digest, tokens(1, 2), name="rules", readers=["initech"])
    assert service.client("engine-b").published() == []
    assert [one["tenant"] for one in service.client("auditor").published()] == ["acme"]


def test_terms_bound_how_long_and_whether_at_all(governed: Callable[..., Governed]) -> None:
    service = governed(terms={"acme": f"{PUBLISHES}\nretention_max_s = 1000", "globex": READERS})
    acme, globex = service.stored(), keyspace(service.client("engine-b"), tenant="globex")
    told = service.client("operator").publish(acme.digest, tokens(1, 2), name="rules", ttl_s=9e6)
    assert told["expires_s"] - told["created_s"] == 1000
    assert globex.lookup(chain(globex, 1, 2)) == 2
    service.server.guard.policies.documents.pop("acme")
    service.store.core.publications.permit(service.server.guard._publishes)
    assert globex.lookup(chain(globex, 1, 2)) == 0


def test_a_service_without_a_policy_publishes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, _server), perdure.connect(tmp_path) as client:
        space = keyspace(client)
        write(space, chain(space, 1, 2))
        with pytest.raises(AccessDenied, match="policy's to allow"):
            client.publish(space.digest, tokens(1, 2), name="rules")


# --- the command
def run(*arguments: str) -> Any:
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def test_the_commands(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        acme = keyspace(store)
        write(acme, chain(acme, 1, 3))
    (tmp_path / "tokens").write_text(json.dumps(tokens(1, 3).tolist()))
    digest = acme.digest.hex()[:12]
    where = str(tmp_path / "s")
    said = run("publish", where, digest, "--name", "rules", "--tokens", str(tmp_path / "tokens"), "--reader", "globex")
    assert "48 tokens of acme" in said
    assert "for globex; 3 of 3 blocks stored" in said
    assert [one["name"] for one in json.loads(run("published", where, "--json"))] == ["rules"]
    with opened(tmp_path / "s") as store:
        globex = keyspace(store, tenant="globex")
        assert globex.lookup(chain(globex, 1, 3)) == 3
    assert "no more: rules" in run("unpublish", where, "rules")
    assert run("published", where) == ""
    for wrong in (["0" * 64, "--name", "x", "--tokens", str(tmp_path / "tokens")],):
        done = CliRunner().invoke(main, ["publish", where, *wrong])
        assert done.exit_code == 2
        assert "begins the digest of 0 keyspaces" in done.output


# --- the table
def test_only_whole_names_count() -> None:
    rng = np.random.default_rng(3)
    asked, stored = (rng.integers(0, 256, (50, 32), np.uint8) for _ in range(2))
    table = aliases.Aliases([aliases.Part(7, asked[:20], stored[:20]), aliases.Part(8, asked[20:], stored[20:])])
    rows = table.rows(asked[::-1])
    assert (table.stored[rows] == stored[::-1]).all()
    assert table.numbers[rows].tolist() == [8] * 30 + [7] * 20
    near = asked.copy()
    near[:, 31] ^= 1  # the same fingerprint
    assert (table.rows(near) == aliases.NOWHERE).all()
    assert (table.rows(np.full((3, 32), 255, np.uint8)) == aliases.NOWHERE).all()
