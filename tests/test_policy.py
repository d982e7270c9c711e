"""Policy directories: what is decided, and that every mistake in one is refused with its place and what to write."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.policies import MATRIX, policy_directory

from perdure.cli import main
from perdure.errors import PolicyError
from perdure.governance import matrix, policy, terms
from perdure.governance.policy import ACTIONS, SERVICE_ACTIONS, SPACE_ACTIONS, Policies, Where
from perdure.governance.terms import Document, Quota


def decided(policies: Policies, principal: str, tenant: str, action: str, at: Where | None = None) -> tuple[str, ...]:
    """The word and the rules."""
    decision = policies.decide(policies.principals[principal], tenant, action, at or Where())
    return decision.word, *decision.rules


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return policy_directory(tmp_path / "p")


# --- deciding
def test_an_engine_may_use_its_own_tenant_and_no_other(made: Path) -> None:
    policies = policy.load(made)
    for action in ("read", "map", "write", "pin", "release", "session", "handoff"):
        assert decided(policies, "engine-a", "acme", action) == ("allow", "base:engines")
        assert decided(policies, "engine-a", "globex", action) == ("deny", "principal:tenants")
    for action in ("publish", "hold", "erase", *SERVICE_ACTIONS):
        assert decided(policies, "engine-a", "acme", action)[0] == "deny"


def test_no_rule_reaches_beyond_a_principals_tenants(made: Path) -> None:
    (made / "rules" / "wide.cedar").write_text('@id("wide") permit (principal, action, resource);')
    policies = policy.load(made)
    for action in SPACE_ACTIONS:
        assert decided(policies, "engine-a", "globex", action) == ("deny", "principal:tenants")
    assert decided(policies, "engine-a", "acme", "erase") == ("allow", "wide")


def test_deny_beats_permit_and_hold_beats_erasure(made: Path) -> None:
    (made / "rules" / "more.cedar").write_text(
        '@id("all") permit (principal, action, resource);\n'
        '@id("no-pins") forbid (principal, action == Perdure::Action::"pin", resource);\n'
    )
    policies = policy.load(made)
    assert decided(policies, "engine-a", "acme", "pin") == ("deny", "no-pins")
    assert decided(policies, "operator", "acme", "erase")[0] == "allow"
    assert decided(policies, "operator", "acme", "erase", Where(held=True)) == ("deny", "base:held")
    assert decided(policies, "operator", "acme", "erase", Where(retained=True)) == ("deny", "base:retained")


def test_a_tenant_without_terms_is_refused_everything(made: Path) -> None:
    (made / "tenants" / "acme.toml").unlink()
    policies = policy.load(made)
    for action in SPACE_ACTIONS:
        assert decided(policies, "engine-a", "acme", action) == ("deny", "terms")


def test_a_rule_that_fails_denies(made: Path) -> None:
    """It might have been the one that forbids."""
    (made / "rules" / "fails.cedar").write_text(
        '@id("fails") forbid (principal, action == Perdure::Action::"read", resource)\n'
        "when { 9223372036854775807 + 1 > 0 };"
    )
    assert decided(policy.load(made), "engine-a", "acme", "read")[0] == "deny"


@pytest.mark.parametrize(
    ("line", "at", "term"),
    [
        ('roots = ["/srv/eu"]', Where(roots=("/srv/us",)), "terms:roots"),
        ('roots = ["/srv/eu"]', Where(roots=("/srv/eu/kv", "/srv/eu-mirror")), "terms:roots"),
        ('tiers = ["memory"]', Where(persistent=True), "terms:tiers"),
        ('encryption = "required"', Where(encrypted=False), "terms:encryption"),
    ],
)
def test_terms_say_where_blocks_may_lie(made: Path, line: str, at: Where, term: str) -> None:
    policy_directory(made, acme=line)
    policies = policy.load(made)
    assert decided(policies, "engine-a", "acme", "write", at) == ("deny", term)
    assert decided(policies, "engine-a", "acme", "read", at)[0] == "allow"
    good = Where(roots=("/srv/eu/kv",), persistent=False, encrypted=True)
    assert decided(policies, "engine-a", "acme", "write", good)[0] == "allow"


@pytest.mark.parametrize("line", ['scope = "private"', 'scope = "group"', "map = false"])
def test_mapped_memory_is_for_whole_tenants_only(made: Path, line: str) -> None:
    policy_directory(made, acme=line)
    assert decided(policy.load(made), "engine-a", "acme", "map")[0] == "deny"


def test_publication_needs_the_terms_and_the_rule(made: Path) -> None:
    assert decided(policy.load(made), "operator", "acme", "publish") == ("deny", "terms:publication")
    policy_directory(made, acme="publication = true")
    assert decided(policy.load(made), "operator", "acme", "publish")[0] == "allow"
    assert decided(policy.load(made), "engine-a", "acme", "publish")[0] == "deny"


def test_how_long_blocks_are_kept() -> None:
    bound = Document(tenant="t", version=1, retention_min_s=60, retention_max_s=600, idle_ttl_s=100)
    assert [bound.ttl(asked) for asked in (None, 1, 300, 9000)] == [600, 60, 300, 600]
    assert [bound.session_ttl(asked) for asked in (None, 1, 90, 9000)] == [100, 60, 90, 100]
    free = Document(tenant="t", version=1)
    assert [free.ttl(asked) for asked in (None, 5)] == [None, 5]


def test_the_digest_changes_with_whatever_decides(made: Path) -> None:
    first = policy.load(made).digest
    assert policy.load(made).digest == first
    (made / "rules" / "more.cedar").write_text('@id("x") forbid (principal, action, resource);')
    second = policy.load(made).digest
    policy_directory(made, acme="map = false")
    assert len({first, second, policy.load(made).digest}) == 3


# --- what is refused
@pytest.mark.parametrize(
    ("content", "place", "says"),
    [
        ('version = 1\nscop = "tenant"', "acme.toml:3", "nearest key that exists is 'scope'"),
        ('version = 1\nscope = "world"', "acme.toml:3", "Invalid enum value"),
        ("", "acme.toml", "write version = ..."),
        ("version = 0", "acme.toml:2", "raise it"),
        ("version = -1", "acme.toml:2", "0 or more"),
        ("version = 1\n[quota]\npinz = 3", "acme.toml:4", "'pins'"),
        ('version = 1\n[quota]\nstored_bytes = "5 furlongs"', "acme.toml:4", "20GiB"),
        ("version = 1\n[quota]\ninflight = -5", "acme.toml:4", "0 or more"),
        ("version = 1\nretention_max_s = nan", "acme.toml:3", "finite"),
        ("version = 1\nretention_max_s = 5\nretention_min_s = 6", "acme.toml:4", "longer than retention_max_s"),
        ("version = 1\nretention_min_s = 100\nidle_ttl_s = 5", "acme.toml:4", "retention_min_s"),
        ('version = 1\nscope = "private"\npublication = true', "acme.toml:4", "publication"),
        ('version = 1\nroots = ["kv"]', "acme.toml:3", "absolute"),
        ('version = 1\ntiers = ["disk"]', "acme.toml:3", "memory"),
        ("version = 1\n[share]\nweight = 0", "acme.toml:4", "weight"),
        ("version = 1\nversion = 2", "acme.toml", "not TOML"),
    ],
)
def test_bad_terms_are_refused_with_their_place(made: Path, content: str, place: str, says: str) -> None:
    (made / "tenants" / "acme.toml").write_text(f'tenant = "acme"\n{content}\n')
    with pytest.raises(PolicyError) as refused:
        policy.load(made)
    assert place in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ("permit (principal, action, resource);", 1, '@id("...")'),
        ('\n\n@id("a") permit (principal, action, resource) wen {};', 3, "not a Cedar rule"),
        ('@id("a") permit (principal, action == Perdure::Action::"raed", resource);', 1, "unrecognized action"),
        ('// "\n@id("a") permit (principal, action, resource) when { principal.nam == "x" };', 2, "`nam`"),
        ('@id("a") permit (principal, action, resource) when { context.held == 5 };', 1, "not"),
        ('@id("base:engines") forbid (principal, action, resource);', 1, "base: is taken"),
        (
            '@id("a") forbid (principal, action, resource);\n@id("a") permit (principal, action, resource);',
            2,
            "already",
        ),
        ('@id("a") permit (principal, action, resource)', 1, "no end"),
        ('@id("a") permit (principal == ?principal, action, resource);', 1, "without slots"),
    ],
)
def test_bad_rules_are_refused_with_their_place(made: Path, content: str, line: int, says: str) -> None:
    (made / "rules" / "bad.cedar").write_text(content)
    with pytest.raises(PolicyError) as refused:
        policy.load(made)
    assert f"bad.cedar:{line}" in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('[[principal]]\nname = "a"\ntenants = ["t"]', "it cannot connect"),
        ('[[principal]]\nname = "a"\nsocket = "/s"', "an engine needs tenants"),
        ('[[principal]]\nname = "a/b"\ntenants = ["t"]\nsocket = "/s"', "letters, digits"),
        ('[[principal]]\nname = "a"\ntenants = ["t"]\nsocket = "s"', "absolute path"),
        ('[[principal]]\nname = "a"\ntenants = ["t"]\nspiffe = "http://x/y"', "spiffe://TRUST-DOMAIN/PATH"),
        ('[[principal]]\nname = "a"\ntenants = ["t"]\nsocket = "/s"\nmode = "0666"', "everybody"),
        ('[[principal]]\nname = "a"\ntenants = ["t"]\nsocket = "/s"\nmode = "rw"', "octal"),
        ('[[principal]]\nname = "a"\ntenants = ["t"]\nsocket = "/s"\nroles = ["root"]', "Invalid enum value"),
        ('[[principal]]\nname = "a"\ntenants = ["t"]\nsokket = "/s"', "'socket'"),
        ("[[principals]]", "[[principal]]"),
        ('[jwt]\nkeys = "k"\nalgorithms = ["HS256"]\nissuer = "i"\naudience = "a"', "Invalid enum value"),
        ('[jwt]\nkeys = "k"\nalgorithms = ["none"]\nissuer = "i"\naudience = "a"', "Invalid enum value"),
        ('[jwt]\nkeys = "k"\nalgorithms = []\nissuer = "i"\naudience = "a"', "algorithms is empty"),
        ('[jwt]\nkeys = "k"\nalgorithms = ["ES256"]\nissuer = "i"\naudience = ""', "audience"),
        ('[jwt]\nkeys = "k"\nalgorithms = ["ES256"]\nissuer = "i"\naudience = "a"\nleeway_s = 9999', "clocks"),
    ],
)
def test_bad_principals_are_refused(made: Path, content: str, says: str) -> None:
    (made / "principals.toml").write_text(content)
    with pytest.raises(PolicyError) as refused:
        policy.load(made)
    assert "principals.toml" in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize("field", ["name", "socket", "spiffe"])
def test_principals_share_nothing_that_tells_them_apart(made: Path, field: str) -> None:
    lines = [
        f'[[principal]]\nname = "{one}"\ntenants = ["t"]\nsocket = "/s/{one}"\nspiffe = "spiffe://d/{one}"\n'
        for one in ("x", "y")
    ]
    same = {"name": '"y"', "socket": "/s/y", "spiffe": "spiffe://d/y"}[field]
    (made / "principals.toml").write_text("".join(lines).replace(same, same.replace("y", "x")))
    with pytest.raises(PolicyError, match="belongs to 'x' already"):
        policy.load(made)


def test_a_missing_or_huge_directory_is_refused(tmp_path: Path, made: Path) -> None:
    with pytest.raises(PolicyError, match="not a directory"):
        policy.load(tmp_path / "none")
    (made / "rules" / "big.cedar").write_text("// " + "x" * (1 << 20))
    with pytest.raises(PolicyError, match="split it"):
        policy.load(made)
    (made / "rules" / "big.cedar").write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyError, match="UTF-8"):
        policy.load(made)


@given(st.text(max_size=80))
def test_nothing_in_a_file_raises_anything_else(text: str) -> None:
    for read in (lambda: policy._statements(text, "x"), lambda: terms.parse_toml(Path("x"), text)):
        with contextlib.suppress(PolicyError):
            read()


def test_quota_sizes_are_bytes(made: Path) -> None:
    policy_directory(made, acme='[quota]\nstored_bytes = "2GiB"\npins = 3')
    assert policy.load(made).documents["acme"].quota == Quota(stored_bytes=2 << 30, pins=3)


# --- golden decisions and the command
def test_the_matrix_says_what_differs(made: Path) -> None:
    policies = policy.load(made)
    expected = matrix.read(made / "matrix.txt", policies)
    assert len(expected) > len(MATRIX.splitlines())  # * stands for several
    assert matrix.compare(policies, expected) == []
    (made / "matrix.txt").write_text("engine-a acme read -> deny\nengine-a acme write -> allow by base:operators\n")
    failures = matrix.compare(policies, matrix.read(made / "matrix.txt", policies))
    assert [one.place.rpartition(":")[2] for one in failures] == ["1", "2"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "expects nothing"),
        ("engine-a acme read allow", "write: PRINCIPAL"),
        ("engine-a acme read -> maybe", "allow or deny"),
        ("engine-x acme read -> allow", "no principal"),
        ("engine-a acme reed -> allow", "unknown"),
        ("engine-a acme status -> allow", "write - for the tenant"),
        ("engine-a acme read wet -> allow", "condition 'wet'"),
        ("engine-a acme read -> allow of base:engines", "write: PRINCIPAL"),
    ],
)
def test_a_bad_matrix_is_refused(made: Path, line: str, says: str) -> None:
    (made / "matrix.txt").write_text(line)
    with pytest.raises(PolicyError, match=r"matrix\.txt") as refused:
        matrix.read(made / "matrix.txt", policy.load(made))
    assert says in str(refused.value)


def run(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["policy", *map(str, arguments)])
    return done.exit_code, done.output


def test_the_command(made: Path, tmp_path: Path) -> None:
    status, out = run("check", made)
    assert (status, "acme@1" in out, "globex@1" in out) == (0, True, True)
    assert run("test", made)[0] == 0
    status, out = run("explain", made, "operator", "acme", "erase", "--if", "held")
    assert (status, "base:held" in out, "deny" in out) == (0, True, True)
    told = json.loads(run("explain", made, "engine-a", "acme", "--json")[1])
    assert set(told["decisions"]) == set(SPACE_ACTIONS) < set(ACTIONS)
    assert told["terms"]["version"] == 1
    other = policy_directory(tmp_path / "q", acme="map = false")
    status, out = run("diff", made, other)
    assert status == 1
    assert "acme: map: True -> False" in out
    assert "engine-a acme map: allow -> deny" in out
    assert "raise version" in out
    policy_directory(other, acme="map = false", version=2)
    assert run("diff", made, other)[0] == 0
    (made / "matrix.txt").write_text("engine-a acme read -> deny")
    status, out = run("test", made)
    assert (status, "expected deny, is allow" in out) == (1, True)
    (made / "principals.toml").write_text("x")
    status, out = run("check", made)
    assert (status, "principals.toml" in out) == (2, True)
