"""Tokens and capabilities: only what is signed, for us, in its time, and only to whom it was given."""

from __future__ import annotations

import base64
import hmac
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from joserfc import jwk, jwt

from perdure import limits
from perdure.errors import AccessDenied, PolicyError
from perdure.governance.identity import Authority, Capability, Claims, Tokens, granted
from perdure.governance.principals import Jwt, Principal

NOW = 1_800_000_000.0
ABOUT = Jwt(keys="jwks.json", algorithms=("ES256",), issuer="https://issuer", audience="perdure")
GOOD = {"iss": "https://issuer", "aud": "perdure", "sub": "caller", "tenant": "acme", "exp": NOW + 60, "iat": NOW}
GATEWAY = Principal(name="gateway", tenants=("acme", "globex"), socket="/s")
KEY = jwk.generate_key("EC", "P-256", {"kid": "one"})
OTHER = jwk.generate_key("EC", "P-256", {"kid": "one"})


def write_keys(folder: Path, *keys: Any, private: bool = False) -> Path:
    content = {"keys": [key.as_dict(private=private) for key in keys or (KEY,)]}
    (folder / "jwks.json").write_text(json.dumps(content))
    return folder


def signed(claims: dict[str, Any], key: Any = KEY, alg: str = "ES256", **header: Any) -> str:
    return jwt.encode({"alg": alg, "kid": "one"} | header, claims, key, algorithms=[alg])


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(ABOUT, write_keys(tmp_path), lambda: NOW)


def test_a_good_token_says_who_and_for_how_long(tokens: Tokens) -> None:
    assert tokens.check(signed(GOOD)) == Claims("caller", "acme", "", None, 60 + ABOUT.leeway_s)
    claims = tokens.check(signed(GOOD | {"actions": ["read"], "session": "job-7/", "aud": ["x", "perdure"]}))
    assert (claims.actions, claims.session) == (frozenset({"read"}), "job-7/")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"exp": NOW - 31}, "expired"),
        ({"exp": None}, "missing_claim"),
        ({"nbf": NOW + 31}, "invalid_claim"),
        ({"iat": NOW + 31}, "invalid_claim"),
        ({"aud": "someone"}, "invalid_claim"),
        ({"aud": None}, "missing_claim"),
        ({"iss": "https://evil"}, "invalid_claim"),
        ({"iss": None}, "missing_claim"),
        ({"sub": None}, "missing_claim"),
        ({"tenant": None}, "must be text"),
        ({"tenant": ["acme"]}, "must be text"),
        ({"tenant": ""}, "must be text"),
        ({"session": 5}, "must be text"),
        ({"actions": "read"}, "list of actions"),
        ({"exp": NOW + 2 * limits.token_ttl_s_max}, "issue shorter ones"),
        ({"exp": float("inf")}, "refused"),
        ({"exp": float("nan")}, "refused|shorter"),
    ],
)
def test_claims_that_do_not_hold(tokens: Tokens, change: dict[str, Any], says: str) -> None:
    claims = {name: value for name, value in (GOOD | change).items() if value is not None}
    with pytest.raises(AccessDenied, match=says):
        tokens.check(signed(claims))


def test_clocks_may_differ_a_little(tokens: Tokens) -> None:
    tokens.check(signed(GOOD | {"exp": NOW - 29}))
    tokens.check(signed(GOOD | {"iat": NOW + 29, "nbf": NOW + 29}))


def part(content: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


def test_wrong_algorithms_are_refused(tokens: Tokens) -> None:
    with pytest.raises(AccessDenied):  # nothing signed at all
        tokens.check(f"{part({'alg': 'none', 'kid': 'one'})}.{part(GOOD)}.")
    for pem in (KEY.as_pem(private=False), json.dumps(KEY.as_dict(private=False)).encode()):
        text = f"{part({'alg': 'HS256', 'kid': 'one'})}.{part(GOOD)}"
        mac = base64.urlsafe_b64encode(hmac.digest(pem, text.encode(), "sha256")).rstrip(b"=").decode()
        with pytest.raises(AccessDenied):  # a MAC with the public key as its secret
            tokens.check(f"{text}.{mac}")
    strong = jwk.generate_key("EC", "P-384", {"kid": "one"})
    with pytest.raises(AccessDenied):  # a signature, with an algorithm that is not on the list
        tokens.check(signed(GOOD, strong, "ES384"))


def test_forged_tokens_are_refused(tokens: Tokens) -> None:
    with pytest.raises(AccessDenied):  # signed by someone else under our key's name
        tokens.check(signed(GOOD, OTHER))
    with pytest.raises(AccessDenied):  # brings its own key
        tokens.check(signed(GOOD, OTHER, jwk=OTHER.as_dict(private=False)))
    with pytest.raises(AccessDenied):
        tokens.check(signed(GOOD, kid="two"))
    head, _, tail = signed(GOOD).split(".")
    with pytest.raises(AccessDenied):
        tokens.check(f"{head}.{part(GOOD | {'tenant': 'globex'})}.{tail}")
    with pytest.raises(AccessDenied):
        tokens.check(signed(GOOD, crit=["b64"], b64=False))
    with pytest.raises(AccessDenied, match="bytes"):
        tokens.check("x" * (limits.token_bytes_max + 1))


@given(st.one_of(st.text(max_size=60), st.binary(max_size=60).map(lambda raw: f"{part({'alg': 'ES256'})}.{raw!r}.x")))
def test_whatever_comes_is_refused_by_type(tmp_path_factory: pytest.TempPathFactory, token: str) -> None:
    folder = write_keys(tmp_path_factory.getbasetemp())
    with pytest.raises(AccessDenied):
        Tokens(ABOUT, folder, lambda: NOW).check(token)


def test_several_keys_are_told_apart_by_name(tmp_path: Path) -> None:
    second = jwk.generate_key("EC", "P-256", {"kid": "two"})
    tokens = Tokens(ABOUT, write_keys(tmp_path, KEY, second), lambda: NOW)
    assert tokens.check(signed(GOOD, second, kid="two")).subject == "caller"
    with pytest.raises(AccessDenied):
        tokens.check(signed(GOOD, second))
    with pytest.raises(AccessDenied):
        tokens.check(jwt.encode({"alg": "ES256"}, GOOD, KEY, algorithms=["ES256"]))  # says no name


def test_bad_key_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="public keys only"):
        Tokens(ABOUT, write_keys(tmp_path, KEY, private=True), lambda: NOW)
    with pytest.raises(PolicyError, match="public keys only"):
        Tokens(ABOUT, write_keys(tmp_path, jwk.OctKey.import_key(b"secret" * 8), private=True), lambda: NOW)
    for content in ("", "[]", "{}", '{"keys": 5}', '{"keys": []}', '{"keys": [5]}', '{"keys": [{"kty": "EC"}]}'):
        (tmp_path / "jwks.json").write_text(content)
        with pytest.raises(PolicyError, match=r"jwks\.json"):
            Tokens(ABOUT, tmp_path, lambda: NOW)
    (tmp_path / "jwks.json").unlink()
    with pytest.raises(PolicyError, match="cannot be read"):
        Tokens(ABOUT, tmp_path, lambda: NOW)


# --- capabilities
CAPABILITY = Capability("gateway", "acme", "caller", "job/", frozenset({"read"}), 100.0, "acme@1")


def test_a_capability_is_good_for_its_principal_and_time_only() -> None:
    now = [50.0]
    authority = Authority(lambda: now[0])
    raw = authority.issue(CAPABILITY)
    assert authority.check(raw, GATEWAY) == CAPABILITY
    with pytest.raises(AccessDenied, match="another principal"):
        authority.check(raw, Principal(name="engine-b", tenants=("acme",), socket="/t"))
    now[0] = 100.0
    with pytest.raises(AccessDenied, match="over"):
        authority.check(raw, GATEWAY)
    with pytest.raises(AccessDenied, match="earlier run"):
        Authority(lambda: 50.0).check(raw, GATEWAY)


def test_a_changed_capability_is_refused_at_every_byte() -> None:
    authority = Authority(lambda: 50.0)
    raw = authority.issue(CAPABILITY)
    for at in range(len(raw)):
        with pytest.raises(AccessDenied):
            authority.check(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :], GATEWAY)
        with pytest.raises(AccessDenied):
            authority.check(raw[:at], GATEWAY)


def test_a_token_narrows_what_policy_allows_and_never_widens_it() -> None:
    allowed = frozenset({"read", "write"})
    claims = Claims("caller", "acme", "", frozenset({"read", "erase"}), 60.0)
    assert granted(claims, GATEWAY, allowed, frozenset()) == {"read"}
    assert granted(claims, GATEWAY, allowed, frozenset({"write", "read"})) == {"read"}
    assert granted(Claims("c", "acme", "", None, 60.0), GATEWAY, allowed, frozenset()) == allowed
    with pytest.raises(AccessDenied, match="may not act for tenant"):
        granted(Claims("c", "initech", "", None, 60.0), GATEWAY, allowed, frozenset())
    with pytest.raises(AccessDenied, match="no action"):
        granted(claims, GATEWAY, allowed, frozenset({"fly"}))
