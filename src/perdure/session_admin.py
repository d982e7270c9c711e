"""Sessions as an operator sees them: all of a store's, or those of a name, whatever keyspace they belong to.

Contract: `administer` is the only way in, for this process and for clients of a service. It changes sessions as their
owners would, but whoever owns them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from perdure import session_form as form
from perdure.core import Core
from perdure.errors import InvalidArgument, ReadOnlyStore
from perdure.governance.audit import Event
from perdure.inspect import keyspaces
from perdure.session import Scope
from perdure.session_form import Fields, Head

_PER_ANSWER: Final = 128  # so that it fits a message
_SHOWN: Final = ("blocks", "owner", "created_s", "used_s", "expires_s", "pinned_until_s", "next_use_s", "origin")


def administer(core: Core, verb: str, fields: Fields) -> Fields:
    """verb "list": {"sessions": ..., "after": where to go on, empty at the end}; "show", "release", "expire":
    {"sessions": ...} of that name, each with its outcome. Recorded. Raises InvalidArgument, ReadOnlyStore,
    CatalogError, AuditUnavailable."""
    audit, changes = core.audit, verb not in ("list", "show")
    if core.read_only and changes:
        raise ReadOnlyStore(f"{core.path} was opened read-only; open it without read_only=True")
    if audit is None:
        return _administer(core, verb, fields)
    if changes:
        audit.guard()
    told = _administer(core, verb, fields)
    event = Event("admin", detail=f"sessions {verb}", tenant=str(fields.get("tenant") or ""))
    if changes:
        audit.append(event, durable=True)
    else:
        audit.note(event)
    return told


def _administer(core: Core, verb: str, fields: Fields) -> Fields:
    if verb == "list":
        return _list(core, fields)
    if verb not in ("show", "release", "expire"):
        raise InvalidArgument(f"sessions: {verb!r} must be list, show, release or expire")
    name, tenant, told = form.text(fields, "name"), _tenant(fields), []
    for scope, model in _scopes(core, tenant):
        asked: Fields = {"name": name}
        if verb == "expire":
            asked["ttl_s"] = form.seconds(fields, "ttl_s")
        answer = core.sessions.ask(scope, "history" if verb == "show" else verb, asked)
        if answer["outcome"] != "missing":
            told.append({"tenant": scope.tenant, "model": model} | answer)
    return {"sessions": told}


def every(core: Core, tenant: str | None) -> list[Fields]:
    """All sessions, of one tenant if named."""
    return _named(core, [_shown(head) for _, head in core.sessions.all()], tenant)


def _list(core: Core, fields: Fields) -> Fields:
    after = fields.get("after", b"")
    if not isinstance(after, bytes):
        raise InvalidArgument(f"after={after!r}: must be bytes")
    heads = core.sessions.all(after, _PER_ANSWER)
    last = heads[-1][0] if heads else b""
    return {"sessions": _named(core, [_shown(head) for _, head in heads], _tenant(fields)), "after": last}


def _shown(head: Head) -> Fields:
    return {"name": head.name, "keyspace": head.keyspace.hex()} | {field: getattr(head, field) for field in _SHOWN}


def _named(core: Core, sessions: list[Fields], tenant: str | None) -> list[Fields]:
    """With the names of tenant and model."""
    known = {digest.hex(): (one["tenant"], one["model"]) for digest, one in keyspaces(core).items()}
    for one in sessions:
        one["tenant"], one["model"] = known.get(one["keyspace"], ("?", "?"))
    return [one for one in sessions if tenant in (None, one["tenant"])]


def _scopes(core: Core, tenant: str | None) -> Iterator[tuple[Scope, Any]]:
    for digest, one in keyspaces(core).items():
        if tenant in (None, one["tenant"]):
            yield Scope(one["tenant"], bytes.fromhex(one["tenant_id"]), digest), one["model"]


def _tenant(fields: Fields) -> str | None:
    tenant = fields.get("tenant")
    if tenant is not None and not isinstance(tenant, str):
        raise InvalidArgument(f"tenant={tenant!r}: must be text")
    return tenant
