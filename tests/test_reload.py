"""A policy that is changed while the service runs: it counts for what is open, or nothing of it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from joserfc import jwk, jwt
from support.policies import policy_directory
from support.served import serving

import perdure
from perdure import RemoteStore
from perdure.cli import main
from perdure.errors import AccessDenied, AuditUnavailable, PolicyError, StorePathError
from perdure.governance import audit_look
from perdure.governance.audit import Event
from perdure.governance.policy import load
from perdure.testing.store import DENIED, FOUND, MISSING, REJECTED, STORED, chain, keyspace, read, write

NO_PINS = '@id("no-pins")\nforbid (principal, action == Perdure::Action::"pin", resource);'
NO_WRITES = '@id("no-writes")\nforbid (principal, action == Perdure::Action::"write", resource);'


class Reloaded:
    def __init__(self, folder: Path, stack: ExitStack, **options: Any):
        self.folder, self._stack, self.sockets = folder, stack, folder / "r"
        self.sockets.mkdir()
        self.policy = policy_directory(folder / "p", sockets=self.sockets)
        self.store, self.server = stack.enter_context(serving(folder / "s", policy=self.policy, audit="on", **options))
        assert self.server.guard is not None
        self.guard = self.server.guard

    def client(self, name: str) -> RemoteStore:
        return self._stack.enter_context(perdure.connect(self.sockets / f"{name}.sock", name=name))

    def reload(self, rules: str = "", **terms: Any) -> dict[str, Any]:
        """As the operator, by the main socket, after a change."""
        policy_directory(self.policy, sockets=self.sockets, version=2, **terms)
        (self.policy / "rules/own.cedar").write_text(rules)
        with perdure.connect(self.folder / "s") as operator:
            return operator.reload_policy()

    def events(self) -> list[Event]:
        return [event for _, event in audit_look.records(self.folder / "s/audit") if event.op == "policy"]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., Reloaded]]:
    with ExitStack() as stack:
        yield lambda **options: Reloaded(tmp_path, stack, **options)


def test_what_is_open_follows(service: Callable[..., Reloaded]) -> None:
    s = service()
    client = s.client("engine-a")
    space = keyspace(client)
    keys = chain(space, 1, 3)
    assert write(space, keys) == [STORED] * 3
    run = client.current()[0]
    told = s.reload(NO_WRITES)
    assert (told["changed"], told["disconnected"], told["terms"]) == (True, 0, ["acme@2", "globex@2"])
    report = space.write(chain(space, 2, 1), np.zeros((1, 8192), np.uint8))
    assert report.statuses.tolist() == [REJECTED]
    assert "no-writes" in report.reasons[0]
    assert read(space, keys) == [FOUND] * 3
    assert client.current()[0] is run  # not even reconnected
    s.reload()
    assert write(space, chain(space, 2, 1)) == [STORED]
    assert [one.policy[0] for one in s.events()] == ["#"] * 3
    assert s.reload() == told | {"changed": False, "digest": s.guard.policies.digest}
    assert len(s.events()) == 3


def test_what_was_opened_meanwhile_is_decided_anew_at_its_next_question(service: Callable[..., Reloaded]) -> None:
    s = service()
    space = keyspace(s.client("engine-a"))
    (s.policy / "rules/own.cedar").write_text(NO_WRITES)
    s.guard.adopt(load(s.policy), None)  # and nobody looks at what is open
    assert space.write(chain(space, 1, 1), np.zeros((1, 8192), np.uint8)).statuses.tolist() == [REJECTED]


def test_quotas_and_shares_follow(service: Callable[..., Reloaded]) -> None:
    s = service()
    space = keyspace(s.client("engine-a"))
    s.reload(acme="[quota]\npins = 1\n[share]\nweight = 7")
    with space.pin(chain(space, 1, 1), ttl_s=60.0), pytest.raises(AccessDenied, match="quota pins: acme@2 has 1"):
        space.pin(chain(space, 1, 1), ttl_s=60.0)
    assert s.guard.shares.weight(space.tenant_id) == 7


def test_who_loses_mapped_memory_is_disconnected(service: Callable[..., Reloaded]) -> None:
    s = service()
    client, other = s.client("engine-a"), s.client("engine-b")
    space, theirs = keyspace(client), keyspace(other, tenant="globex")
    keys = chain(space, 1, 3)
    write(space, keys)
    assert read(space, keys) == [FOUND] * 3
    runs = [one.current()[0] for one in (client, other)]
    assert s.reload(acme="map = false")["disconnected"] == 1
    assert runs[0].ended.wait(5.0)
    assert not runs[1].ended.is_set()
    assert read(space, keys) == [FOUND] * 3  # by message, on another connection
    assert not space._opened[1].mapped
    assert theirs.lookup(keys) == 0


@pytest.mark.parametrize(
    "terms", [{"acme": 'scope = "private"'}, {"acme": 'scope = "group"', "group_of": {"engine-a": "g"}}]
)
def test_a_narrower_scope_ends_what_was_open(service: Callable[..., Reloaded], terms: dict[str, Any]) -> None:
    s = service()
    client = s.client("engine-a")
    space = keyspace(client)
    keys = chain(space, 1, 3)
    write(space, keys)
    run = client.current()[0]
    assert s.reload(**terms)["disconnected"] == 1
    assert run.ended.wait(5.0)  # a call that the end of the connection meets is a miss
    assert read(space, keys) == [DENIED] * 3
    assert space.lookup(keys) == 0
    again = keyspace(s.client("engine-a"))
    assert again.digest != space.digest


def test_principals_come_and_go(service: Callable[..., Reloaded]) -> None:
    s = service()
    client = s.client("engine-a")
    space = keyspace(client)
    listed = s.policy / "principals.toml"
    text = listed.read_text()
    moved = text.replace("engine-a.sock", "moved.sock")
    for changed, there in ((moved, True), (text.replace('"engine-a"', '"engine-c"'), False)):
        listed.write_text(changed)
        with perdure.connect(s.folder / "s") as operator:
            told = operator.reload_policy()
        assert told["disconnected"] == (1 if there else 0)
        assert (s.sockets / "moved.sock").exists() == there
        assert (s.sockets / "engine-a.sock").exists() != there
    with perdure.connect(s.sockets / "engine-a.sock") as new:
        assert keyspace(new).digest == space.digest
        assert [one.principal.name for one in s.server._peers.values()] == ["engine-c"]


def test_tokens_lose_what_is_not_allowed_any_more(tmp_path: Path) -> None:
    key = jwk.generate_key("EC", "P-256", {"kid": "one"})
    about = 'keys = "jwks.json"\nalgorithms = ["ES256"]\nissuer = "i"\naudience = "perdure"'
    policy = policy_directory(tmp_path / "p", sockets=tmp_path, jwt=about)
    (policy / "jwks.json").write_text(json.dumps({"keys": [key.as_dict(private=False)]}))
    now = time.time()
    claims = {"iss": "i", "aud": "perdure", "sub": "x", "tenant": "acme", "exp": now + 60}
    token = jwt.encode({"alg": "ES256", "kid": "one"}, claims, key, algorithms=["ES256"])
    with serving(tmp_path / "s", policy=policy) as (_, server), perdure.connect(tmp_path / "proxy.sock") as proxy:
        permit = proxy.exchange(token)
        open_before = keyspace(proxy, tenant="", capability=permit.capability)
        (policy / "rules/own.cedar").write_text(NO_WRITES)
        server.reload()
        opened_after = keyspace(proxy, tenant="", capability=permit.capability)
        for space in (open_before, opened_after):
            report = space.write(chain(space, 1, 1), np.zeros((1, 8192), np.uint8))
            assert report.statuses.tolist() == [REJECTED]
            assert read(space, chain(space, 1, 1)) == [MISSING]


# --- refused
@pytest.mark.parametrize("wrong", ["rule", "terms", "socket", "audit"])
def test_what_is_refused_changes_nothing(
    service: Callable[..., Reloaded], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = service()
    space = keyspace(s.client("engine-a"))
    before = s.guard.policies
    listed = s.policy / "principals.toml"
    (s.policy / "rules/own.cedar").write_text(NO_PINS)
    if wrong == "rule":
        (s.policy / "rules/own.cedar").write_text(NO_PINS.replace('"pin"', '"pim"'))
    elif wrong == "terms":
        (s.policy / "tenants/acme.toml").write_text('tenant = "acme"\nversion = 2\nscoop = "tenant"\n')
    elif wrong == "socket":
        new = f'[[principal]]\nname = "new"\ntenants = ["acme"]\nsocket = "{s.sockets}/new.sock"\n'
        bad = f'[[principal]]\nname = "bad"\ntenants = ["acme"]\nsocket = "{s.folder}/none/bad.sock"\n'
        listed.write_text(listed.read_text() + new + bad)
    audit = s.store.core.audit
    assert audit is not None
    if wrong == "audit":
        monkeypatch.setattr(audit, "_pwrite", broken)
    kinds = {"socket": StorePathError, "audit": AuditUnavailable}
    with perdure.connect(s.folder / "s") as operator, pytest.raises(kinds.get(wrong, PolicyError)):
        operator.reload_policy()
    monkeypatch.undo()
    assert s.guard.policies is before
    space.pin(chain(space, 1, 1), ttl_s=60.0).release()
    assert not (s.sockets / "new.sock").exists()
    if wrong != "audit":
        last = s.events()[-1]
        assert (last.decision, last.outcome) == ("deny", "refused")
        assert last.detail
        assert last.policy == before.stamp("")


def broken(*_: Any) -> int:
    raise OSError(28, "no space")


def test_only_an_operator_may(service: Callable[..., Reloaded]) -> None:
    s = service()
    for name in ("engine-a", "auditor", "proxy"):
        with pytest.raises(AccessDenied, match="administer"):
            s.client(name).reload_policy()
    with serving(s.folder / "t") as _, perdure.connect(s.folder / "t") as client:  # noqa: SIM117
        with pytest.raises(AccessDenied, match="no policy"):
            client.reload_policy()


def test_the_command(service: Callable[..., Reloaded]) -> None:
    s = service()
    where = str(s.folder / "s")
    (s.policy / "rules/own.cedar").write_text(NO_PINS)
    done = CliRunner().invoke(main, ["policy", "reload", where])
    assert done.exit_code == 0
    assert "in force: acme@1, globex@1" in done.output
    (s.policy / "rules/own.cedar").write_text("permit (")
    done = CliRunner().invoke(main, ["policy", "reload", where])
    assert done.exit_code == 2
    assert "own.cedar:1" in done.output


# --- the signal
def test_sighup(tmp_path: Path) -> None:
    policy = policy_directory(tmp_path / "p", sockets=tmp_path)
    arguments = ["serve", "--data", str(tmp_path / "s"), "--policy", str(policy), "--capacity", "64MiB", "--memory",
                 "8MiB", "--metrics", "", "--audit", "on"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-m", "perdure", *arguments], env=environment, stderr=subprocess.PIPE)
    try:
        until(lambda: (tmp_path / "engine-a.sock").exists())
        with perdure.connect(tmp_path / "engine-a.sock") as client:
            space = keyspace(client)
            (policy / "rules/own.cedar").write_text("permit (")
            child.send_signal(signal.SIGHUP)
            until(lambda: [event for event in policy_events(tmp_path / "s") if event.outcome == "refused"])
            assert write(space, chain(space, 1, 1)) == [STORED]
            (policy / "rules/own.cedar").write_text(NO_WRITES)
            child.send_signal(signal.SIGHUP)
            until(lambda: len(policy_events(tmp_path / "s")) == 3)
            until(lambda: space.write(chain(space, 2, 1), np.zeros((1, 8192), np.uint8)).statuses[0] == REJECTED)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.communicate()


def policy_events(folder: Path) -> list[Event]:
    return [event for _, event in audit_look.records(folder / "audit") if event.op == "policy"]


def until(true: Callable[[], Any]) -> None:
    give_up = time.monotonic() + 60
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.05)
