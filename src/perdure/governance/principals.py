"""Who may ask: the principals of a service, as its operator lists them in `principals.toml`.

    [[principal]]
    name = "engine-a"
    tenants = ["acme"]
    roles = ["engine"]
    socket = "/run/perdure/engine-a.sock"     # a listening socket of its own; uid, gid: whose connections it takes
    [[principal]]
    name = "gateway"
    tenants = ["acme", "globex"]
    roles = ["engine"]
    spiffe = "spiffe://example.org/gateway"   # URI in the certificate of a host that connects by TLS
    [jwt]                                     # tokens that principals exchange for capabilities
    keys = "jwks.json"
    algorithms = ["ES256"]
    issuer = "https://login.example.org"
    audience = "perdure"

Contract
- What a principal is comes from how it connected, never from what it says. Two principals never share a socket or a
  SPIFFE id. A principal without either cannot connect; with
  `embedded` a process that opens the store itself may say that it is this one.
- Whose connections a socket takes is checked by peer credentials as well: the socket says who, uid and gid must agree.
- PolicyError names file, line where it can be told, problem and remedy.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from perdure import limits
from perdure.errors import PolicyError
from perdure.governance.terms import convert, parse_toml, read_text, where

FILE: Final = "principals.toml"
ROLES: Final = ("engine", "operator", "auditor")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,126}")
_SPIFFE: Final = re.compile(r"spiffe://[a-z0-9._-]{1,255}(/[A-Za-z0-9._-]+)+")
Algorithm = Literal["EdDSA", "Ed25519", "ES256", "ES384", "ES512", "PS256", "PS384", "PS512", "RS256", "RS384", "RS512"]
"""Signatures only: with a MAC whoever can check a token can make one."""


class Principal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """tenants: whose blocks it may ask for. tokens: only for who shows a token. group: its session group. mode: of its
    socket, octal. embedded: a process may open a store as it, without a service."""

    name: str
    tenants: tuple[str, ...] = ()
    roles: tuple[Literal["engine", "operator", "auditor"], ...] = ("engine",)
    tokens: bool = False
    group: str = ""
    socket: str = ""
    uid: int | None = None
    gid: int | None = None
    mode: str = "0600"
    spiffe: str = ""
    embedded: bool = False

    @property
    def way(self) -> tuple[str | int | None, ...]:
        """How it connects."""
        return self.socket, self.uid, self.gid, self.spiffe


LOCAL: Final = Principal(name="local-operator", roles=("operator",))
"""Who connects to the service's main socket: for every tenant, as an operator."""


class Jwt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """keys: JWKS file, beside principals.toml if relative. *_claim: where a token says what it is for. leeway_s: how
    far clocks may differ. ttl_s_max: how long a capability lives at most."""

    keys: str
    algorithms: tuple[Algorithm, ...]
    issuer: str
    audience: str
    tenant_claim: str = "tenant"
    actions_claim: str = "actions"
    session_claim: str = "session"
    leeway_s: float = 30.0
    ttl_s_max: float = 300.0


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of principals.toml."""

    principal: tuple[Principal, ...] = ()
    jwt: Jwt | None = None


def read(path: Path) -> Listed:
    """Of DIR/principals.toml. Raises PolicyError."""
    text = read_text(path)
    content = parse_toml(path, text)
    for name in content:
        if name not in ("principal", "jwt"):
            raise PolicyError(f"{where(path, text, name)}: {name!r} does not exist; write [[principal]] or [jwt]")
    listed: Listed = convert(path, text, content, Listed)
    seen: dict[tuple[str, Any], str] = {}
    for one in listed.principal:
        problem = _problem(one)
        for field in ("name", "socket", "spiffe"):
            value = getattr(one, field)
            other = seen.setdefault((field, value), one.name) if value else one.name
            if other != one.name or (field == "name" and [p.name for p in listed.principal].count(value) > 1):
                problem = f"{field}={value!r} belongs to {other!r} already; give each principal its own"
        if problem is not None:
            raise PolicyError(f"{_place(path, text, one.name)}: principal {one.name!r}: {problem}")
    if listed.jwt is not None:
        problem = _jwt_problem(listed.jwt)
        if problem is not None:
            raise PolicyError(f"{where(path, text, 'jwt')}: jwt: {problem}")
    return listed


def _place(path: Path, text: str, name: str) -> str:
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"\s*name\s*=\s*[\"']{re.escape(name)}[\"']", line):
            return f"{path}:{number}"
    return str(path)


def _problem(one: Principal) -> str | None:
    if not _NAME.fullmatch(one.name):
        return "name: must be letters, digits, '.', '_', '@' and '-', 127 at most"
    if one.name == LOCAL.name:
        return "name: belongs to whoever connects to the service's main socket; choose another"
    if not one.socket and not one.spiffe and not one.embedded:
        return 'it cannot connect; write socket = "/path", spiffe = "spiffe://..." or embedded = true'
    if one.socket and not one.socket.startswith("/"):
        return f"socket={one.socket!r}: must be an absolute path"
    if len(one.socket.encode()) > limits.socket_path_bytes_max:
        return f"socket={one.socket!r}: a Unix socket's path has at most {limits.socket_path_bytes_max} bytes"
    if one.spiffe and not _SPIFFE.fullmatch(one.spiffe):
        return f"spiffe={one.spiffe!r}: must be spiffe://TRUST-DOMAIN/PATH"
    if not re.fullmatch(r"0[0-7]{3}", one.mode) or int(one.mode, 8) & 0o111:
        return f'mode={one.mode!r}: write octal digits without execute bits, such as "0600" or "0660"'
    if int(one.mode, 8) & 0o007 and one.uid is None and one.gid is None:
        return f"mode={one.mode!r}: everybody could connect; write uid or gid, or close it"
    if one.embedded and one.tokens:
        return "embedded: it shows tokens, which only a service takes; leave out tokens or embedded"
    if not one.roles:
        return f"roles is empty; write some of {', '.join(ROLES)}"
    if "engine" in one.roles and not one.tenants:
        return 'an engine needs tenants; write tenants = ["NAME"]'
    return None


def _jwt_problem(jwt: Jwt) -> str | None:
    if not jwt.algorithms:
        return 'algorithms is empty; write the ones your issuer signs with, such as ["ES256"]'
    if not jwt.issuer or not jwt.audience:
        return "issuer and audience must not be empty"
    if not 0 <= jwt.leeway_s <= limits.token_leeway_s_max:
        return f"leeway_s={jwt.leeway_s}: must be 0 to {limits.token_leeway_s_max}; set the clocks instead"
    if not 0 < jwt.ttl_s_max <= limits.capability_ttl_s_max:
        return f"ttl_s_max={jwt.ttl_s_max}: must be above 0 and at most {limits.capability_ttl_s_max}"
    return None
