"""A service with a policy: who one is decides what one gets, whatever one says. Through the real service."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from joserfc import jwk, jwt
from support.policies import policy_directory
from support.served import serving, tcp_address

import perdure
from perdure import RemoteStore
from perdure.catalog.api import Lease
from perdure.errors import AccessDenied, ConfigError, ServiceBusy
from perdure.governance import audit_look
from perdure.governance.audit import Event
from perdure.service import messages as m
from perdure.service import sockets
from perdure.service.doors import Door
from perdure.service.streams import TlsFiles
from perdure.testing.store import DENIED, FOUND, MISSING, REJECTED, STORED, chain, keyspace, read, write

ISSUER = jwk.generate_key("EC", "P-256", {"kid": "one"})
JWT = 'keys = "jwks.json"\nalgorithms = ["ES256"]\nissuer = "https://issuer"\naudience = "perdure"'


class Governed:
    """A service with the support's policy; `client(name)` connects as that principal."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, store: dict[str, Any], **terms: Any):
        self.folder, self._stack, self.sockets = folder, stack, folder / "r"
        self.sockets.mkdir()
        self.policy = policy_directory(folder / "p", sockets=self.sockets, **terms)
        self.keys_file()
        self.store, self.server = stack.enter_context(serving(folder / "s", policy=self.policy, **store))

    def keys_file(self) -> None:
        (self.policy / "jwks.json").write_text(json.dumps({"keys": [ISSUER.as_dict(private=False)]}))

    def client(self, name: str) -> RemoteStore:
        return self._stack.enter_context(perdure.connect(self.sockets / f"{name}.sock", name=name))

    def events(self, op: str) -> list[Event]:
        return [event for _, event in audit_look.records(self.folder / "s/audit") if event.op == op]

    def operator(self) -> RemoteStore:
        return self._stack.enter_context(perdure.connect(self.folder / "s"))


@pytest.fixture
def governed(tmp_path: Path) -> Iterator[Callable[..., Governed]]:
    with contextlib.ExitStack() as stack:
        yield lambda store={}, **terms: Governed(tmp_path, stack, dict(store), **terms)


def token(**claims: Any) -> str:
    now = time.time()
    content = {"iss": "https://issuer", "aud": "perdure", "sub": "caller", "tenant": "acme", "exp": now + 60} | claims
    return jwt.encode({"alg": "ES256", "kid": "one"}, content, ISSUER, algorithms=["ES256"])


# --- who
def test_the_socket_says_who_and_the_tenant_follows(governed: Callable[..., Governed]) -> None:
    service = governed()
    a, b = service.client("engine-a"), service.client("engine-b")
    for name in ("globex", "initech"):
        with pytest.raises(AccessDenied, match="no principal of tenant"):
            keyspace(a, tenant=name)
    mine, same, theirs = keyspace(a), keyspace(a, tenant=""), keyspace(b, tenant="globex")
    assert mine.digest == same.digest != theirs.digest
    keys = chain(mine, 1, 8)
    assert write(mine, keys) == [STORED] * 8
    assert read(mine, keys) == read(keyspace(service.client("engine-a2")), keys) == [FOUND] * 8


def test_the_main_socket_is_the_operators(governed: Callable[..., Governed]) -> None:
    operator = governed().operator()
    assert operator.service_status()["memory"]["budget_bytes"] > 0
    with pytest.raises(AccessDenied, match="no rule permits it"):
        keyspace(operator)


@pytest.mark.parametrize("line", ["uid = 12345", "gid = 12345"])
def test_other_credentials_are_turned_away(tmp_path: Path, line: str) -> None:
    directory = policy_directory(tmp_path / "p", sockets=tmp_path)
    text = (directory / "principals.toml").read_text()
    (directory / "principals.toml").write_text(text.replace('name = "engine-a"\n', f'name = "engine-a"\n{line}\n'))
    with serving(tmp_path / "s", policy=directory), pytest.raises(AccessDenied, match="principal engine-a"):
        perdure.connect(tmp_path / "engine-a.sock")


def test_the_main_socket_checks_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path / "s", policy=policy_directory(tmp_path / "p", sockets=tmp_path)) as (_, server):
        door: Door = next(one for one in server._doors._doors.values() if one.path.name == "perdure.sock")
        monkeypatch.setattr(sockets, "credentials", lambda sock: (54321, 54321))
        with pytest.raises(AccessDenied, match="54321"):
            door.check(door.sock)


def test_a_connection_joins_its_own_principal_only(governed: Callable[..., Governed]) -> None:
    service = governed()
    a = service.client("engine-a")
    stolen = a.current()[0].welcome.client
    b = sockets.connect_unix(service.sockets / "engine-b.sock", 10.0)
    try:
        b.send(m.encode(m.Join(1, stolen)))
        answer = m.decode_answer(b.recv(65536))
        assert isinstance(answer, m.Failed)
        assert answer.kind == ServiceBusy.__name__
    finally:
        b.close()


def test_sockets_are_for_their_owner_and_gone_at_the_end(governed: Callable[..., Governed]) -> None:
    service = governed()
    paths = list(service.sockets.iterdir())
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    service.server.stop()
    assert not any(path.exists() for path in paths)


# --- tenants apart
@pytest.fixture
def two(governed: Callable[..., Governed]) -> tuple[Governed, Any, Any, Any]:
    """acme has written eight blocks and opened a session; globex knows their keys."""
    service = governed()
    mine, theirs = keyspace(service.client("engine-a")), keyspace(service.client("engine-b"), tenant="globex")
    keys = chain(mine, 1, 8)
    assert write(mine, keys) == [STORED] * 8
    mine.session("secret-job").extend(keys)
    return service, mine, theirs, keys


def test_no_hit_on_anothers_blocks(two: tuple[Governed, Any, Any, Any]) -> None:
    service, mine, theirs, keys = two
    assert theirs.lookup(keys) == 0
    assert not theirs.present(keys).any()
    assert theirs.follow(keys, wait_s=0.01) == 0
    assert set(read(theirs, keys)) <= {DENIED, MISSING}
    service.store.core.pool.drop_all()
    assert set(read(theirs, keys)) <= {DENIED, MISSING}
    with theirs.view(keys) as view:
        assert not any(block is not None for block in view.blocks)
    assert theirs.advise(keys, prefill_tokens_per_s=1.0).blocks == 0
    assert mine.lookup(keys) == 8  # nothing was removed by trying
    assert read(mine, keys) == [FOUND] * 8


def test_nothing_is_done_to_anothers_blocks(two: tuple[Governed, Any, Any, Any]) -> None:
    service, mine, theirs, keys = two
    with pytest.raises(AccessDenied):
        theirs.release(keys)
    with pytest.raises(AccessDenied):
        theirs.pin(keys, ttl_s=5.0)
    with pytest.raises(AccessDenied):
        theirs.reserve(keys)
    assert write(theirs, keys) == [REJECTED] * 8
    job = theirs.session("theirs")
    with pytest.raises(AccessDenied):
        job.extend(keys)
    lease: Lease | None = mine.reserve(chain(mine, 2, 3))
    assert lease is not None
    with pytest.raises(AccessDenied, match="not this client's"):
        theirs.end_lease(lease)
    assert mine.end_lease(lease)
    assert not service.store.core.control.pins()
    assert read(mine, keys) == [FOUND] * 8


def test_anothers_sessions_are_neither_listed_nor_changed_nor_adopted(two: tuple[Governed, Any, Any, Any]) -> None:
    service, mine, theirs, _ = two
    theirs.session("own")
    b = theirs._store
    for tenant in (None, "globex"):
        assert [one["name"] for one in b.sessions(tenant)] == ["own"]
    for verb in ("show", "release", "expire"):
        with pytest.raises(AccessDenied):
            b.session_admin(verb, {"name": "secret-job", "tenant": "acme", "ttl_s": 0})
        assert b.session_admin(verb, {"name": "secret-job", "tenant": None, "ttl_s": 0})["sessions"] == []
    handed = mine.find_session("secret-job").handoff().token
    assert not theirs.adopt(handed)
    assert theirs.find_session("secret-job") is None
    assert mine.adopt(handed)
    names = {one["name"] for one in service.operator().sessions()}
    assert names == {"own", "secret-job"}


def test_status_and_explain_tell_of_ones_own_only(two: tuple[Governed, Any, Any, Any]) -> None:
    service, mine, theirs, keys = two
    a, b = mine._store, theirs._store
    assert set(a.status()["tenants"]) == {"acme"}
    assert b.status()["tenants"] == {}
    for one in (a.service_status(), b.service_status()):
        assert one["clients"] == []
    assert mine.digest.hex() not in str(b.service_status())
    assert a.explain(keys[0].tobytes())["present"]
    told = b.explain(keys[0].tobytes())
    assert not told["present"]
    assert "acme" not in str(told)
    assert service.operator().explain(keys[0].tobytes())["present"]


def test_before_a_keyspace_is_open_there_is_nothing(governed: Callable[..., Governed]) -> None:
    client = governed().client("engine-a")
    run, deadline = client.current()
    for question in (
        lambda i: m.Lookup(i, 0, b""),
        lambda i: m.Attach(i, 0, [0, 0], []),
        lambda i: m.Region(i, "staging", 4096),
        lambda i: m.Sync(i),
        lambda i: m.SessionAsk(i, 3, "open", {"name": "x"}),
    ):
        with pytest.raises((AccessDenied, perdure.errors.ProtocolError)):
            client.ask(run, question, deadline)


# --- what policy bounds
def test_rules_bind_reads_and_writes(governed: Callable[..., Governed], tmp_path: Path) -> None:
    (tmp_path / "p" / "rules").mkdir(parents=True)
    (tmp_path / "p" / "rules" / "x.cedar").write_text(
        '@id("reader") forbid (principal == Perdure::Principal::"engine-a2", '
        'action in [Perdure::Action::"write", Perdure::Action::"handoff"], resource);\n'
    )
    service = governed()
    writer, reader = keyspace(service.client("engine-a")), keyspace(service.client("engine-a2"))
    keys = chain(writer, 1, 4)
    report = reader.write(keys, np.zeros((4, 8192), np.uint8))
    assert report.statuses.tolist() == [REJECTED] * 4
    assert "forbidden by reader" in report.reasons[0]
    assert write(writer, keys) == [STORED] * 4
    assert read(reader, keys) == [FOUND] * 4
    with pytest.raises(AccessDenied, match="forbidden by reader"):
        reader.session("x").handoff()


@pytest.mark.parametrize("scope", ["private", "group"])
def test_narrow_scopes_keep_principals_of_one_tenant_apart(governed: Callable[..., Governed], scope: str) -> None:
    service = governed(acme=f'scope = "{scope}"', group_of={"engine-a": "g", "engine-a2": "h", "gateway": "g"})
    one, two, three = (keyspace(service.client(name)) for name in ("engine-a", "engine-a2", "gateway"))
    assert one.digest != two.digest
    assert (one.digest == three.digest) is (scope == "group")
    keys = chain(one, 1, 4)
    assert write(one, keys) == [STORED] * 4
    assert two.lookup(chain(two, 1, 4)) == 0
    assert read(one, keys) == [FOUND] * 4
    before = one._store.transport.messages
    assert one.lookup(keys) == 4
    assert one._store.transport.messages > before  # no memory is mapped, which would be the whole tenant's
    run, deadline = one._store.current()
    with pytest.raises(AccessDenied):
        one._store.ask(run, lambda i: m.Attach(i, 0, [0, 0], []), deadline)


def test_a_salt_narrows(governed: Callable[..., Governed]) -> None:
    service = governed(acme='scope = "private"')
    a, a2 = service.client("engine-a"), service.client("engine-a2")
    plain, salted = keyspace(a), keyspace(a, salt="x")
    assert len({plain.digest, salted.digest, keyspace(a2).digest, keyspace(a2, salt="x").digest}) == 4
    forged = "7:private8:engine-a0:"  # what the service itself makes of the scope
    assert keyspace(a2, salt=forged).digest not in (plain.digest, keyspace(a, salt=forged).digest)


def test_retention_bounds_what_is_asked(governed: Callable[..., Governed]) -> None:
    service = governed(acme="retention_max_s = 1000\nretention_min_s = 100\nidle_ttl_s = 500")
    space = keyspace(service.client("engine-a"))
    now = service.store.core.steady.now()
    for number, (asked, kept) in enumerate([(None, 1000), (5.0, 100), (300.0, 300), (9e6, 1000)]):
        keys = chain(space, number, 1)
        assert write(space, keys, ttl_s=asked) == [STORED]
        _, records = service.store.core.locate(keys)
        assert kept <= int(records["expires_s"][0]) - now <= kept * 1.5 + 60
    space.session("s")
    assert 400 < service.store.sessions()[0]["expires_s"] - now <= 560
    for end in (lambda: space.session("s").expire(0), space.session("s").release):
        with pytest.raises(AccessDenied, match="promises retention"):
            end()


def test_quotas_refuse_by_name(governed: Callable[..., Governed]) -> None:
    service = governed(acme='[quota]\nstored_bytes = "100KiB"\npins = 1', globex="[quota]\nrequests_per_s = 5")
    space = keyspace(service.client("engine-a"))
    keys = chain(space, 1, 20)
    report = space.write(keys, np.zeros((20, 8192), np.uint8))
    assert report.statuses.tolist() == [REJECTED] * 20
    assert "quota stored_bytes" in report.reasons[0]
    with space.pin(keys[:1], ttl_s=60.0), pytest.raises(AccessDenied, match="quota pins"):
        space.pin(keys[:1], ttl_s=60.0)
    space.pin(keys[:1], ttl_s=60.0).release()
    other = keyspace(service.client("engine-b"), tenant="globex")
    there = [other.present(chain(other, 1, 1)) is not None for _ in range(3)]
    assert all(there)
    report = other.read(chain(other, 1, 1), np.zeros((1, 8192), np.uint8))
    for _ in range(20):
        report = other.read(chain(other, 1, 1), np.zeros((1, 8192), np.uint8))
    assert report.statuses.tolist() == [DENIED]
    assert "quota requests_per_s" in report.problems[0]


# --- gateways
def test_a_gateway_gets_a_capability_for_a_token(governed: Callable[..., Governed]) -> None:
    service = governed(jwt=JWT)
    gateway, engine = service.client("gateway"), keyspace(service.client("engine-a"))
    permit = gateway.exchange(token(session="job-7/"), session="job-7/x", actions=["read", "session"])
    assert (permit.tenant, set(permit.actions)) == ("acme", {"read", "session"})
    space = keyspace(gateway, tenant="", capability=permit.capability)
    keys = chain(engine, 1, 4)
    write(engine, keys)
    assert space.digest == engine.digest
    assert read(space, keys) == [FOUND] * 4
    report = space.write(chain(space, 2, 1), np.zeros((1, 8192), np.uint8))
    assert report.statuses.tolist() == [REJECTED]
    assert "leaves out 'write'" in report.reasons[0]
    space.session("job-7/x1").extend(keys)
    for name in ("job-8", "job-7"):
        with pytest.raises(AccessDenied, match="names begin with"):
            space.session(name)
    with pytest.raises(AccessDenied, match="is for tenant"):
        keyspace(gateway, tenant="globex", capability=permit.capability)


def test_who_acts_for_others_only_needs_a_token(governed: Callable[..., Governed]) -> None:
    proxy = governed(jwt=JWT).client("proxy")
    with pytest.raises(AccessDenied, match="exchange a token"):
        keyspace(proxy)
    assert keyspace(proxy, capability=proxy.exchange(token()).capability).tenant == "acme"


def test_capabilities_are_their_principals_alone(governed: Callable[..., Governed]) -> None:
    service = governed(jwt=JWT)
    permit = service.client("gateway").exchange(token())
    for thief in ("engine-a", "engine-a2", "engine-b"):
        with pytest.raises(AccessDenied, match="another principal"):
            keyspace(service.client(thief), tenant="", capability=permit.capability)
    changed = bytearray(permit.capability)
    changed[-1] ^= 1
    with pytest.raises(AccessDenied, match="forged"):
        keyspace(service.client("gateway"), capability=bytes(changed))


def test_tokens_do_not_reach_beyond_a_principal(governed: Callable[..., Governed]) -> None:
    service = governed(jwt=JWT)
    with pytest.raises(AccessDenied, match="may not act for tenant"):
        service.client("engine-a").exchange(token(tenant="globex"))
    with pytest.raises(AccessDenied, match="refused"):
        service.client("gateway").exchange(token(exp=time.time() - 60))
    with pytest.raises(AccessDenied, match="other sessions"):
        service.client("gateway").exchange(token(session="a/"), session="b/")
    with pytest.raises(AccessDenied, match="no action"):
        service.client("gateway").exchange(token(), actions=["fly"])


def test_an_expired_capability_denies_what_is_open(governed: Callable[..., Governed]) -> None:
    service = governed(jwt=JWT + "\nttl_s_max = 0.2")
    gateway = service.client("gateway")
    space = keyspace(gateway, tenant="", capability=gateway.exchange(token()).capability)
    keys = chain(space, 1, 2)
    assert space.lookup(keys) == 0
    time.sleep(0.3)
    assert read(space, keys) == [DENIED] * 2
    report = space.write(keys, np.zeros((2, 8192), np.uint8))
    assert "capability is over" in report.reasons[0]


def test_a_service_without_policy_exchanges_nothing(tmp_path: Path) -> None:
    with serving(tmp_path / "s"), perdure.connect(tmp_path / "s") as client, pytest.raises(AccessDenied):
        client.exchange("x")


def test_a_capability_for_some_sessions_touches_no_other(governed: Callable[..., Governed]) -> None:
    service = governed(jwt=JWT)
    gateway, engine = service.client("gateway"), keyspace(service.client("engine-a"))
    handed = engine.session("job-8").handoff().token
    space = keyspace(gateway, capability=gateway.exchange(token(), session="job-7/").capability)
    run, deadline = gateway.current()
    number = space.begin().space
    for verb, fields in (("adopt", {"token": handed}), ("open", {}), ("open", {"name": 7}), ("handoff", {})):
        with pytest.raises(AccessDenied, match="names begin with"):
            gateway.ask(run, lambda i, verb=verb, fields=fields: m.SessionAsk(i, number, verb, fields), deadline)
    with pytest.raises(AccessDenied, match="some of them only"):
        gateway.sessions("acme")
    assert engine.adopt(handed)


def test_a_group_scope_needs_a_group(governed: Callable[..., Governed]) -> None:
    service = governed(acme='scope = "group"', group_of={"engine-a": "g"})
    assert keyspace(service.client("engine-a")).tenant == "acme"
    with pytest.raises(AccessDenied, match="has none; give it a group"):
        keyspace(service.client("engine-a2"))


def test_nixl_has_no_identities(governed: Callable[..., Governed]) -> None:
    client = governed().client("engine-a")
    keyspace(client).lookup(chain(keyspace(client), 1, 1))
    run, deadline = client.current()
    with pytest.raises(AccessDenied, match="NIXL has no identities"):
        client.ask(run, lambda i: m.Region(i, "nixl", 4096, b"x", 1), deadline)


def test_requests_at_one_time_are_bounded(governed: Callable[..., Governed]) -> None:
    service = governed(acme="[quota]\ninflight = 1")
    space = keyspace(service.client("engine-a"))
    keys = chain(space, 1, 1)
    assert service.server.guard is not None
    with service.server.guard.quotas.entered("acme", object()):  # another of the tenant's is being answered
        report = space.read(keys, np.zeros((1, 8192), np.uint8))
    assert "quota inflight" in report.problems[0]
    assert write(space, keys) == [STORED]


# --- the audit log
def test_what_was_allowed_and_what_not_is_recorded_with_its_policy(governed: Callable[..., Governed]) -> None:
    service = governed({"audit": "reads"}, jwt=JWT, version=4)
    gateway, engine = service.client("gateway"), service.client("engine-a")
    permit = gateway.exchange(token(), session="job-7/", actions=["read"])
    mine, theirs = keyspace(engine), keyspace(gateway, tenant="", capability=permit.capability)
    keys = chain(mine, 1, 4)
    assert write(mine, keys) == [STORED] * 4
    assert read(theirs, keys) == [FOUND] * 4
    assert write(theirs, chain(mine, 2, 1)) == [REJECTED]
    for _ in range(20):
        with pytest.raises(AccessDenied):
            keyspace(engine, tenant="globex")
    with pytest.raises(AccessDenied):
        gateway.exchange(token(exp=1))
    with pytest.raises(AccessDenied):
        theirs.session("job-8-of-somebody")
    service.server.stop()
    assert service.server.guard is not None
    stamp = service.server.guard.policies.stamp("acme")
    assert stamp.startswith("acme@4#")
    (policy,), grants = service.events("policy"), service.events("grant")
    assert "acme@4" in policy.detail
    assert service.server.guard.policies.digest in policy.outcome
    assert {(one.policy, one.tenant) for one in grants} == {(stamp, "acme")}
    assert (grants[-1].detail, " for caller" in grants[-1].who) == ("read", True)
    (capability,) = service.events("grant-capability")
    assert (capability.policy, capability.detail) == (stamp, "read for 90 s, to caller")
    (put,), (got,) = service.events("put"), service.events("read")
    assert (put.policy, got.policy, got.who.split(",")[0]) == (stamp, stamp, "gateway")
    assert got.who.endswith(" for caller")
    denied = service.events("denied")
    assert {(one.outcome, one.tenant, one.decision) for one in denied} == {
        ("write", "acme", "deny"), ("open", "globex", "deny"), ("exchange", "", "deny"), ("open", "acme", "deny"),
    }  # fmt: skip
    assert sum(one.counts.get("again", 1) for one in denied if one.tenant == "globex") == 20
    assert len(denied) < 12
    raw = b"".join(line for line, _ in audit_look.records(service.folder / "s/audit"))
    for hidden in (permit.capability[:16].hex().encode(), b"job-7", b"job-8", b"eyJ"):
        assert hidden not in raw


def test_who_is_not_let_in_is_recorded(tmp_path: Path) -> None:
    directory = policy_directory(tmp_path / "p", sockets=tmp_path)
    text = (directory / "principals.toml").read_text()
    (directory / "principals.toml").write_text(text.replace('name = "engine-a"\n', 'name = "engine-a"\nuid = 12345\n'))
    with serving(tmp_path / "s", policy=directory, audit="on"), pytest.raises(AccessDenied):
        perdure.connect(tmp_path / "engine-a.sock")
    denied = [event for _, event in audit_look.records(tmp_path / "s/audit") if event.op == "denied"]
    assert [(one.outcome, f"uid {os.getuid()}" in one.who) for one in denied] == [("connect", True)]


# --- other hosts
@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TlsFiles]:
    folder = tmp_path_factory.mktemp("tls")
    ca_key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])

    def made(name: str, key: ec.EllipticCurvePrivateKey, extension: Any, *, critical: bool) -> None:
        subject = issuer if name == "ca" else x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = x509.CertificateBuilder(
            issuer, subject, key.public_key(), x509.random_serial_number(), now - timedelta(1), now + timedelta(1)
        )
        usage = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        builder = builder.add_extension(extension, critical=critical).add_extension(usage, critical=False)
        if name == "ca":
            own = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
            builder = builder.add_extension(own, critical=False)
        certificate = builder.sign(ca_key, hashes.SHA256())
        (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    made("ca", ca_key, x509.BasicConstraints(ca=True, path_length=0), critical=True)

    def issue(*names: str) -> TlsFiles:
        key, name = ec.generate_private_key(ec.SECP256R1()), f"{abs(hash(names))}"
        alternatives = [
            x509.UniformResourceIdentifier(one) if "://" in one else x509.IPAddress(ip_address(one)) for one in names
        ]
        made(name, key, x509.SubjectAlternativeName(alternatives), critical=False)
        raw = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / f"{name}.key").write_bytes(raw)
        return TlsFiles(folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem")

    return issue


def test_certificates_say_who_on_tcp(tmp_path: Path, authority: Callable[..., TlsFiles]) -> None:
    directory = policy_directory(tmp_path / "p", sockets=tmp_path)
    node = authority("127.0.0.1")
    with (
        serving(tmp_path / "s", policy=directory, listen=("127.0.0.1", 0), tls=node, audit="on") as (_, server),
        contextlib.ExitStack() as stack,
    ):

        def client(*names: str) -> RemoteStore:
            files = authority(*names)
            options = {f"tls_{field}": str(getattr(files, field)) for field in TlsFiles._fields}
            return stack.enter_context(perdure.connect(tcp_address(server), **options))

        a, b = client("spiffe://test/engine-a"), client("spiffe://test/engine-b")
        mine, theirs = keyspace(a), keyspace(b, tenant="globex")
        keys = chain(mine, 1, 8)
        assert write(mine, keys) == [STORED] * 8
        assert mine.lookup(keys) == 8
        assert read(mine, keys) == [FOUND] * 8
        assert theirs.lookup(keys) == 0
        assert set(read(theirs, keys)) <= {DENIED, MISSING}
        assert write(theirs, keys) == [REJECTED] * 8
        assert read(mine, keys) == [FOUND] * 8
        with pytest.raises(AccessDenied):
            keyspace(b)
        for names in (["127.0.0.1"], ["spiffe://test/nobody"], ["spiffe://test/engine-a", "spiffe://test/engine-b"]):
            with pytest.raises(AccessDenied, match="certificate names no principal"):
                client(*names)
    denied = [event for _, event in audit_look.records(tmp_path / "s/audit") if event.op == "denied"]
    assert {"connect", "open"} <= {event.outcome for event in denied}
    assert {event.who for event in denied if event.outcome == "connect"} == {"127.0.0.1"}


def test_a_policy_needs_certificates_on_tcp(tmp_path: Path) -> None:
    directory = policy_directory(tmp_path / "p", sockets=tmp_path)
    with (
        pytest.raises(ConfigError, match="certificates"),
        serving(tmp_path / "s", policy=directory, listen=("127.0.0.1", 0)),
    ):
        pass


def test_explaining_a_prefix_tells_no_digest_of_other_keyspaces(governed: Callable[..., Governed]) -> None:
    """From a digest names can be made: of what another principal keeps to itself."""
    service = governed(acme='scope = "private"', globex="")
    one, two = keyspace(service.client("engine-a")), keyspace(service.client("engine-a2"))
    write(one, chain(one, 1, 4))
    told = two._store.explain_prefix(two, np.arange(64, dtype=np.uint32) + (1 << 16))
    assert told["elsewhere"] == []
    assert one.digest.hex() not in str(told) + str(two._store.service_status())
    wide = keyspace(service.client("engine-b"), tenant="globex")
    other = keyspace(wide._store, tenant="globex", model="another")
    write(other, chain(other, 1, 4))
    told = wide._store.explain_prefix(wide, np.arange(64, dtype=np.uint32) + (1 << 16))
    assert [one["differs"] for one in told["elsewhere"]] == [["model"]]
    assert other.digest.hex() not in str(told)


def test_a_capability_maps_no_memory(governed: Callable[..., Governed]) -> None:
    gateway = governed(jwt=JWT).client("gateway")
    permit = gateway.exchange(token())
    assert "map" not in permit.actions
    space = keyspace(gateway, tenant="", capability=permit.capability)
    keys = chain(space, 1, 2)
    assert write(space, keys) == [STORED] * 2
    before = gateway.transport.messages
    assert read(space, keys) == [FOUND] * 2
    assert gateway.transport.messages > before
