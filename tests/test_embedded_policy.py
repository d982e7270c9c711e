"""A store in this process under a policy: held to it by the code of the service, and as a service holds its clients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.policies import policy_directory
from support.served import serving

import perdure
from perdure.errors import AccessDenied, InvalidArgument, PolicyError, StoreClosed
from perdure.governance import audit_look
from perdure.governance.audit import Event
from perdure.limits import MIB, message_keys_max
from perdure.service.embedded import GovernedStore
from perdure.testing.store import (
    BLOCK_BYTES,
    DENIED,
    FOUND,
    REJECTED,
    STORED,
    chain,
    keyspace,
    read,
    tokens,
    write,
)

NO_PINS = '@id("no-pins") forbid (principal, action == Perdure::Action::"pin", resource);\n'
NO_READS = '@id("no-reads") forbid (principal, action == Perdure::Action::"read", resource);\n'


class Embedded:
    """One directory, opened as one principal after the other."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack):
        self.folder, self._stack, self.policy = folder, stack, folder / "p"

    def open(self, principal: str = "engine-a", **options: Any) -> GovernedStore:
        chosen: dict[str, Any] = {"memory": 32 * MIB, "capacity": "256MiB", "audit": "on"} | options
        store = perdure.open(self.folder / "s", policy=self.policy, principal=principal, **chosen)
        return self._stack.enter_context(store)

    def terms(self, lines: str = "", **more: Any) -> Embedded:
        policy_directory(self.policy, sockets=self.folder, acme=lines, **more)
        return self

    def rule(self, text: str) -> Embedded:
        (self.policy / "rules/own.cedar").write_text(text)
        return self

    def roles(self, principal: str, roles: str) -> Embedded:
        path = self.policy / "principals.toml"
        head, name, tail = path.read_text().partition(f'name = "{principal}"\n')
        first, _, rest = tail.partition("roles = ")
        path.write_text(f"{head}{name}{first}roles = {roles}\n{rest.partition(chr(10))[2]}")
        return self

    def denied(self) -> list[Event]:
        return [event for _, event in audit_look.records(self.folder / "s/audit") if event.op == "denied"]


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Embedded]:
    with contextlib.ExitStack() as stack:
        yield Embedded(tmp_path, stack).terms()


# --- opening
@pytest.mark.parametrize(
    ("principal", "problem"),
    [("engine-z", "does not exist; those that may .*engine-a"), ("gateway", "write embedded = true")],
)
def test_who_may_not_open_it_is_refused_before_anything_is_made(
    embedded: Embedded, principal: str, problem: str
) -> None:
    with pytest.raises(PolicyError, match=problem):
        embedded.open(principal)
    assert not (embedded.folder / "s").exists()


def test_a_policy_that_is_not_valid_opens_nothing(embedded: Embedded) -> None:
    embedded.rule('@id("x") permit (principal, action == Perdure::Action::"raed", resource);')
    with pytest.raises(PolicyError, match=r"own\.cedar:1"):
        embedded.open()
    assert not (embedded.folder / "s").exists()


def test_the_options_go_together(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="pass policy=DIR"):
        perdure.open(tmp_path / "s", principal="engine-a")
    with pytest.raises(InvalidArgument, match="name who this process is"):
        perdure.open(tmp_path / "s", policy=tmp_path)  # type: ignore[call-overload]


def test_a_principal_without_a_way_to_connect_may_be_embedded_only(embedded: Embedded) -> None:
    (embedded.policy / "principals.toml").write_text(
        '[[principal]]\nname = "me"\ntenants = ["acme"]\nembedded = true\n'
    )
    space = keyspace(embedded.open("me"), tenant="")
    assert write(space, chain(space, 1, 2)) == [STORED] * 2
    (embedded.policy / "principals.toml").write_text(
        '[[principal]]\nname = "me"\ntenants = ["acme"]\nembedded = true\ntokens = true\n'
    )
    with pytest.raises(PolicyError, match="which only a service takes"):
        embedded.open("me")


# --- one per kind of rule
def test_the_tenant_must_be_ones_own_and_a_denial_is_audited(embedded: Embedded) -> None:
    store = embedded.open()
    with pytest.raises(AccessDenied, match="no principal of tenant"):
        keyspace(store, tenant="globex")
    store.close()
    assert [(one.tenant, one.outcome) for one in embedded.denied()] == [("globex", "open")]
    assert embedded.denied()[0].who.startswith("engine-a,")


def test_rules_of_ones_own_bind(embedded: Embedded) -> None:
    space = keyspace(embedded.rule(NO_READS).open())
    keys = chain(space, 1, 2)
    assert write(space, keys) == [STORED] * 2
    assert read(space, keys) == [DENIED] * 2
    assert space.lookup(keys) == 0
    assert not space.present(keys).any()


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ('roots = ["/srv/elsewhere"]', "roots: its bytes may not lie in"),
        ('tiers = ["memory"]', "tiers: its bytes may lie in memory only"),
        ('encryption = "required"', "encryption: required"),
        ("[quota]\nstored_bytes = 1000", "quota stored_bytes"),
        ("[quota]\ninflight = 0", "quota inflight"),
    ],
)
def test_terms_refuse_writes_with_the_reason(
    embedded: Embedded, lines: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.service.guard.lies_in_memory", lambda root: False)
    store = embedded.terms(lines).open()
    space = keyspace(store)
    keys = chain(space, 1, 2)
    report = space.write(keys, np.zeros((2, BLOCK_BYTES), np.uint8))
    assert report.statuses.tolist() == [REJECTED] * 2
    assert reason in report.reasons[0]
    store.close()
    assert [one.outcome for one in embedded.denied()] == ["write"]


def test_required_encryption_is_met_by_a_store_that_encrypts(embedded: Embedded) -> None:
    space = keyspace(embedded.terms('encryption = "required"').open(encryption="on"))
    assert write(space, chain(space, 1, 2)) == [STORED] * 2


def test_retention_is_bounded_both_ways(embedded: Embedded) -> None:
    store = embedded.terms("retention_min_s = 100\nretention_max_s = 200").open()
    space = keyspace(store)
    for number, asked in enumerate((1.0, None)):
        write(space, chain(space, number, 1), ttl_s=asked)
    core = store._store.core
    present, records = core.locate(np.concatenate([chain(space, number, 1) for number in (0, 1)]))
    assert present.all()
    kept = (records["expires_s"].astype(int) - records["created_s"]).tolist()
    assert 100 <= kept[0] < 110  # rounded up, coarsely
    assert 200 <= kept[1] < 210
    job = space.session("job", ttl_s=1.0)
    with pytest.raises(AccessDenied, match="promises retention"):
        job.release()


def test_requests_a_second_are_bounded(embedded: Embedded) -> None:
    space = keyspace(embedded.terms("[quota]\nrequests_per_s = 0.001").open())
    keys = chain(space, 1, 1)
    assert write(space, keys) == [STORED]
    report = space.read(keys, bytearray(BLOCK_BYTES))
    assert report.statuses.tolist() == [DENIED]
    assert "quota requests_per_s" in report.problems[0]


def test_pins_are_counted_and_given_back(embedded: Embedded) -> None:
    space = keyspace(embedded.terms("[quota]\npins = 1").open())
    keys = chain(space, 1, 2)
    pin = space.pin(keys, ttl_s=60.0)
    with pytest.raises(AccessDenied, match="quota pins"):
        space.pin(keys, ttl_s=60.0)
    assert pin.release()
    assert space.pin(keys, ttl_s=60.0).release()


def test_holds_and_erasures_are_the_operators(embedded: Embedded) -> None:
    engine = embedded.open()
    space = keyspace(engine)
    write(space, chain(space, 1, 2))
    for refused in (lambda: engine.erase(tenant="acme"), lambda: engine.hold(tenant="acme", reason="case")):
        with pytest.raises(AccessDenied):
            refused()
    engine.close()
    operator = embedded.open("operator")
    held = operator.hold(tenant="acme", reason="case")["id"]
    assert operator.erase(tenant="acme")["state"] == "held"
    operator.unhold(tenant="acme", hold=held)
    operator.close()
    engine = embedded.terms("retention_min_s = 3600", version=2).open()
    again = keyspace(engine)
    assert write(again, chain(again, 1, 2)) == [STORED] * 2
    engine.close()
    retaining = embedded.open("operator")
    with pytest.raises(AccessDenied, match="retained"):
        retaining.erase(tenant="acme")


def test_scope_is_part_of_the_names(embedded: Embedded) -> None:
    embedded.terms('scope = "private"')
    first = embedded.open()
    mine = keyspace(first)
    keys = chain(mine, 1, 2)
    write(mine, keys)
    digest = mine.digest
    first.close()
    assert keyspace(embedded.open("engine-a2")).digest != digest


def test_what_is_the_operators_is_refused_to_an_engine(embedded: Embedded) -> None:
    store = embedded.open()
    for refused in (store.verify, store.reload_policy, store.rotate_kek):
        with pytest.raises(AccessDenied, match="administer"):
            refused()
    assert set(store.status()) >= {"tenants", "policy"}
    assert "space" not in store.status()


def test_a_lease_is_ended_by_who_holds_it(embedded: Embedded) -> None:
    space = keyspace(embedded.open())
    lease = space.reserve(chain(space, 1, 2))
    assert lease is not None
    assert space.end_lease(lease)
    with pytest.raises(AccessDenied, match="not this client's"):
        space.end_lease(lease)


# --- another policy
def test_what_is_open_is_decided_anew_after_a_reload(embedded: Embedded) -> None:
    store = embedded.roles("engine-a", '["engine", "operator"]').open()
    space = keyspace(store)
    keys = chain(space, 1, 2)
    write(space, keys)
    assert read(space, keys) == [FOUND] * 2
    embedded.rule(NO_READS)
    assert store.reload_policy()["changed"]
    assert read(space, keys) == [DENIED] * 2
    embedded.rule("permit (nonsense);")
    with pytest.raises(PolicyError):
        store.reload_policy()
    assert read(space, keys) == [DENIED] * 2  # the one before stays
    embedded.rule("")
    text = (embedded.policy / "principals.toml").read_text()
    (embedded.policy / "principals.toml").write_text(text.replace("embedded = true", "embedded = false"))
    store.reload_policy()
    assert read(space, keys) == [DENIED] * 2
    with pytest.raises(AccessDenied):
        keyspace(store)


# --- edges
def test_a_call_has_so_many_keys_and_ends_with_the_store(embedded: Embedded) -> None:
    store = embedded.open()
    space = keyspace(store)
    with pytest.raises(InvalidArgument, match="divide it"):
        space.lookup(chain(space, 1, message_keys_max + 1))
    store.close()
    with pytest.raises(StoreClosed):
        space.lookup(chain(space, 1, 1))
    with pytest.raises(StoreClosed):
        store.status()


# --- the same as a service
def _outcomes(client: Callable[[str], Any]) -> list[Any]:
    """A list of operations, allowed and denied ones, and what came of each."""
    seen: list[Any] = []

    def tried(name: str, operation: Callable[[], Any]) -> None:
        try:
            seen.append((name, operation()))
        except AccessDenied as error:
            seen.append((name, f"denied: {error}"))

    store = client("engine-a")
    space = keyspace(store)
    keys, tail = chain(space, 1, 4), chain(space, 2, 1)
    buffer = bytearray(4 * BLOCK_BYTES)
    tried("write", lambda: write(space, keys))
    tried("read", lambda: read(space, keys))
    tried("lookup", lambda: space.lookup(keys))
    tried("present", lambda: space.present(keys).tolist())
    tried("advise", lambda: space.advise(keys, prefill_tokens_per_s=1.0).blocks)
    tried("follow", lambda: space.follow(keys, wait_s=0.0))
    tried("pin", lambda: space.pin(keys, ttl_s=5.0))
    tried("session", lambda: bool(space.session("job").extend(keys)))
    tried("release a session", lambda: bool(space.find_session("job").release()))  # type: ignore[union-attr]
    tried("hint", lambda: space.release(keys))
    tried("reserve", lambda: space.end_lease(space.reserve(tail)))  # type: ignore[arg-type]
    tried("wrong tenant", lambda: keyspace(store, tenant="globex"))
    tried("sessions", lambda: [one["name"] for one in store.sessions("acme")])
    tried("other sessions", lambda: store.sessions("globex"))
    tried("erase", lambda: store.erase(tenant="acme"))
    tried("hold", lambda: store.hold(tenant="acme", reason="x"))
    tried("lifecycle", lambda: store.lifecycle("acme"))
    tried("publish", lambda: store.publish(space.digest, tokens(1, 4), name="n"))
    tried("explain", lambda: store.explain(keys[0].tobytes())["present"])
    tried("status", lambda: sorted(store.status()["tenants"]))
    tried("reload", store.reload_policy)
    store.close()
    thief = client("engine-b")
    theirs = keyspace(thief, tenant="globex")
    tried("their lookup", lambda: theirs.lookup(keys))
    tried("their present", lambda: theirs.present(keys).tolist())
    tried("their read", lambda: theirs.read(keys, buffer).statuses.tolist())
    tried("their write", lambda: write(theirs, keys))
    tried("their pin", lambda: theirs.pin(keys, ttl_s=5.0))
    tried("their release", lambda: theirs.release(keys))
    tried("their reserve", lambda: theirs.reserve(keys))
    tried("their explain", lambda: thief.explain(keys[0].tobytes())["present"])
    thief.close()
    operator = client("operator")
    tried("operator's keyspace", lambda: keyspace(operator))
    tried("operator's sessions", lambda: [one["name"] for one in operator.sessions("acme")])
    tried("operator's hold", lambda: sorted(operator.hold(tenant="acme", reason="x")))
    tried("operator's erase, held", lambda: operator.erase(tenant="acme")["state"])
    tried("operator's publish", lambda: operator.publish(space.digest, tokens(1, 4), name="n"))
    operator.close()
    return seen


def test_a_store_and_a_service_decide_alike(tmp_path: Path) -> None:
    sockets = tmp_path / "r"
    sockets.mkdir()
    policy = policy_directory(tmp_path / "p", sockets=sockets, acme="retention_min_s = 5\nidle_ttl_s = 60")
    (policy / "rules/own.cedar").write_text(NO_PINS)
    options: dict[str, Any] = {"memory": 192 * MIB, "capacity": "256MiB", "audit": "on"}
    in_process = _outcomes(lambda name: perdure.open(tmp_path / "embedded", policy=policy, principal=name, **options))
    with serving(tmp_path / "served", policy=policy, audit="on"):
        served = _outcomes(lambda name: perdure.connect(sockets / f"{name}.sock"))
    assert in_process == served
    denied = [name for name, what in served if isinstance(what, str) and what.startswith("denied")]
    assert {"pin", "erase", "publish", "reload", "their pin", "operator's keyspace"} <= {*denied}
    told = [
        [(one.outcome, one.tenant, one.detail) for _, one in audit_look.records(tmp_path / place / "audit")
         if one.op == "denied" and not one.counts]
        for place in ("embedded", "served")
    ]  # fmt: skip
    assert told[0] == told[1]
    assert len(told[0]) > 10
