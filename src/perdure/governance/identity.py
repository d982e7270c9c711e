"""Tokens and capabilities: what a gateway shows for one of its callers, and what it gets for it.

A gateway is a principal, known by its connection. For each caller it exchanges a JWT of the operator's issuer for a
capability: short-lived, bound to (principal, tenant, session scope, actions, end), and good with that principal only.

Contract
- A token counts only if it is signed by a key of the JWKS file with an algorithm of the list, which has signatures only
  (never `none`, never a MAC, whose key a verifier could sign with), for this issuer and audience, and is in its time,
  give or take `leeway_s`. Keys named in a token are not looked at. A private or symmetric key in the file is refused.
- A capability is a MAC away from its content; the key is drawn at every start, so capabilities end with the service.
- Nothing that is refused says why in more than the kind of problem; no token or capability is logged or kept.
"""

from __future__ import annotations

import hmac
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from perdure import limits
from perdure.errors import AccessDenied, PolicyError
from perdure.governance.policy import SPACE_ACTIONS
from perdure.governance.principals import Jwt, Principal
from perdure.governance.terms import read_text

_MAC_BYTES: Final = 32
_PRIVATE: Final = ("d", "p", "q", "dp", "dq", "qi", "oth", "k")


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says. actions: None: all that its bearer's principal has. session: names begin with it."""

    subject: str
    tenant: str
    session: str
    actions: frozenset[str] | None
    left_s: float


class Tokens:
    """Checks JWTs. wall: seconds since 1970. Raises PolicyError for keys that cannot be used."""

    def __init__(self, jwt: Jwt, folder: Path, wall: Callable[[], float]):
        self._jwt, self._wall = jwt, wall
        path = folder / jwt.keys
        try:
            from joserfc.errors import JoseError
            from joserfc.jwk import KeySet
        except ImportError:
            raise PolicyError("tokens need joserfc: pip install 'perdure[governance]'") from None
        try:
            content = json.loads(read_text(path))
            listed = content["keys"]
            for key in listed:
                if any(name in key for name in _PRIVATE):
                    raise PolicyError(f"{path}: holds a private or symmetric key; keep public keys only")
            self._keys = KeySet.import_key_set(content)
        except (ValueError, TypeError, KeyError, JoseError) as error:
            if isinstance(error, PolicyError):
                raise
            raise PolicyError(f"{path}: not a JWKS file ({error}); fetch it from your issuer") from None

    def check(self, token: str) -> Claims:
        """Raises AccessDenied."""
        from joserfc import jws
        from joserfc import jwt as jose
        from joserfc.errors import JoseError

        if len(token) > limits.token_bytes_max:
            raise AccessDenied(f"the token has more than {limits.token_bytes_max} bytes")
        now, about = self._wall(), self._jwt
        try:
            header = jws.extract_compact(token.encode()).headers()
            key = self._keys.get_by_kid(header.get("kid"))
            claims = jose.decode(token, key, algorithms=list(about.algorithms)).claims
            jose.JWTClaimsRegistry(
                now=math.floor(now), leeway=math.floor(about.leeway_s),
                iss={"essential": True, "value": about.issuer}, aud={"essential": True, "value": about.audience},
                exp={"essential": True}, sub={"essential": True},
            ).validate(claims)  # fmt: skip
        except JoseError as error:
            raise AccessDenied(f"the token is refused: {_kind(error)}; get a new one from the issuer") from None
        except Exception as error:  # noqa: BLE001 (whatever a parser does with a stranger's bytes)
            raise AccessDenied(f"the token is refused: {type(error).__name__}; get a new one from the issuer") from None
        return self._claims(claims, now)

    def _claims(self, claims: dict[str, Any], now: float) -> Claims:
        about = self._jwt
        left_s = float(claims["exp"]) + about.leeway_s - now
        if not left_s <= limits.token_ttl_s_max + 2 * about.leeway_s:
            raise AccessDenied(f"the token is good for more than {limits.token_ttl_s_max:.0f} s; issue shorter ones")
        tenant, session = claims.get(about.tenant_claim), claims.get(about.session_claim, "")
        if not isinstance(tenant, str) or not tenant or not isinstance(session, str):
            raise AccessDenied(f"the token's claims {about.tenant_claim!r} and {about.session_claim!r} must be text")
        actions = claims.get(about.actions_claim)
        if actions is not None and not (isinstance(actions, list) and all(isinstance(one, str) for one in actions)):
            raise AccessDenied(f"the token's claim {about.actions_claim!r} must be a list of actions")
        return Claims(str(claims["sub"]), tenant, session, None if actions is None else frozenset(actions), left_s)


def _kind(error: Exception) -> str:
    return str(getattr(error, "error", "")) or type(error).__name__


class Capability(msgspec.Struct, frozen=True, array_like=True):
    """What one principal may do with one tenant's blocks until `deadline_s` (CLOCK_BOOTTIME).

    subject: for whom, "" for the principal itself. session: the names it may use begin with it."""

    principal: str
    tenant: str
    subject: str
    session: str
    actions: frozenset[str]
    deadline_s: float
    policy: str

    @property
    def lent(self) -> bool:
        """For a token, and for a time; else it is the principal's own."""
        return self.deadline_s < math.inf


class Authority:
    """Issues capabilities and knows its own again. boottime: seconds of CLOCK_BOOTTIME."""

    def __init__(self, boottime: Callable[[], float]):
        self._boottime, self._key = boottime, os.urandom(32)

    def issue(self, capability: Capability) -> bytes:
        raw = msgspec.msgpack.encode(capability)
        return self._mac(raw) + raw

    def check(self, raw: bytes, principal: Principal) -> Capability:
        """Raises AccessDenied for what is forged, over, or another principal's."""
        mac, content = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if len(raw) > limits.token_bytes_max or not hmac.compare_digest(mac, self._mac(content)):
            raise AccessDenied(
                "the capability is forged, or of an earlier run of the service; exchange the token again"
            )
        capability = msgspec.msgpack.decode(content, type=Capability)
        if capability.principal != principal.name:
            raise AccessDenied("the capability was given to another principal; exchange a token of your own")
        if capability.deadline_s <= self._boottime():
            raise AccessDenied("the capability is over; exchange a token again")
        return capability

    def _mac(self, content: bytes) -> bytes:
        return hmac.digest(self._key, b"perdure/1/capability\0" + content, "sha256")


def granted(claims: Claims, principal: Principal, allowed: frozenset[str], wanted: frozenset[str]) -> frozenset[str]:
    """What of `wanted` (empty: everything) a token's bearer may do: what policy allows and the token does not leave
    out. Raises AccessDenied for a tenant that is not the principal's, and for actions that do not exist."""
    if claims.tenant not in principal.tenants:
        raise AccessDenied(f"{principal.name} may not act for tenant {claims.tenant!r}; add it to its tenants")
    unknown = sorted((wanted | (claims.actions or frozenset())) - set(SPACE_ACTIONS))
    if unknown:
        raise AccessDenied(f"there is no action {unknown[0]!r}; there are {', '.join(SPACE_ACTIONS)}")
    mine = allowed if claims.actions is None else allowed & claims.actions
    return mine & wanted if wanted else mine
