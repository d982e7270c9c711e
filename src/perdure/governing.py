"""What an operator asks of a store about keeping and erasing, whether it is in this process or behind a service.

Contract: `govern` is the only way in. Each verb takes and gives dictionaries that fit a message, and checks every
field, because they come from other processes as they come from this one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from perdure import erasure_orders, holds, lifecycle, limits, session_admin
from perdure.catalog.api import as_keys
from perdure.core import Core
from perdure.erasure import Erasures
from perdure.erasure_orders import Order
from perdure.errors import CatalogError, InvalidArgument, ReadOnlyStore
from perdure.governance.keystore import rotate
from perdure.governance.verbs import GovernanceVerbs
from perdure.holds import Holds
from perdure.io.api import Files
from perdure.selection import blocks_of, sessions_of
from perdure.session_form import Fields, subject_id
from perdure.session_heads import NAMESPACE
from perdure.tenants import cannot_be_read


class Governing(GovernanceVerbs):
    """The part of `Store` that governs it."""

    path: Path
    _core: Core
    _check: Callable[[], None]

    def govern(self, verb: str, fields: Fields) -> Fields:
        self._check()
        if self._core.read_only and verb not in READING:
            raise ReadOnlyStore(f"{self.path} was opened read-only; open it without read_only=True")
        return administer(self._core, verb, fields)

    def rotate_kek(self) -> int:
        """A new key-encryption key, recorded; see `Keystore.rotate`. Raises KeyUnavailable, AuditUnavailable,
        InvalidArgument."""
        self._check()
        if self._core.read_only or self._core.segments.keys is None:
            raise ReadOnlyStore(f"{self.path} was opened read-only; open it without read_only=True")
        if self._core.sharing.shared:
            raise InvalidArgument("keys rotate: not built for stores that several processes share")
        return rotate(self._core.segments.keys, self._core.audit)

    def session_admin(self, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        """What `perdure sessions` asks; see `session_admin.administer`."""
        self._check()
        return session_admin.administer(self._core, verb, fields)


_ATTEMPTS_MAX: Final = 100
READING: Final = ("erasure", "lifecycle")
GOVERNING: Final = {"erase": "erase", "hold": "hold", "unhold": "hold", "lifecycle": "hold"}
"""Verbs about a tenant, and what policy calls them."""


def administer(core: Core, verb: str, fields: Fields) -> Fields:
    """verb: "erase" {"tenant", and at most one of "session", "subject", "blocks"}; "erasure" {"id"}; "hold" as "erase",
    with {"reason"}; "unhold" {"tenant", "id"}; "lifecycle" {"tenant"}, or of all.

    Raises InvalidArgument, AuditUnavailable, CatalogError, OSError."""
    told: Fields
    if verb == "erase":
        told = core.erasures.erase(_kind(verb, fields), _text(fields, "tenant"), **_named(core, fields))
    elif verb == "erasure":
        told = core.erasures.state_of(fields.get("id"))
    elif verb == "hold":
        told = _hold(core, fields)
    elif verb == "unhold":
        told = core.holds.release(_text(fields, "tenant"), _text(fields, "id"))
        core.erasures.look_again()
    elif verb == "lifecycle":
        told = lifecycle.told(core, None if fields.get("tenant") is None else _text(fields, "tenant"))
    else:
        raise InvalidArgument(f"govern: {verb!r} must be erase, erasure, hold, unhold or lifecycle")
    return told


def _kind(verb: str, fields: Fields) -> str:
    """What a verb is about."""
    named = [one for one in ("session", "subject", "blocks") if fields.get(one) is not None]
    if len(named) > 1:
        raise InvalidArgument(f"{verb}: {' and '.join(named)} at a time; one {verb} is about one thing")
    return "tenant" if not named else "block" if named == ["blocks"] else named[0]


def _named(core: Core, fields: Fields) -> dict[str, Any]:
    """A session by its name, a subject by its id, blocks by their keys."""
    if fields.get("session") is not None:
        return {"target": _text(fields, "session")}
    if fields.get("subject") is not None:
        secret, _ = core.tenants.secret(_text(fields, "tenant"))
        return {"subject": subject_id(secret, _text(fields, "subject")).hex()}
    return {} if fields.get("blocks") is None else {"keys": _keys(fields["blocks"])}


def _hold(core: Core, fields: Fields) -> Fields:
    tenant, kind, reason = _text(fields, "tenant"), _kind("hold", fields), _text(fields, "reason")
    with core.erasures.beginning:  # an erasure sees it, or has begun before
        told: Fields = core.holds.place(kind, tenant, **_named(core, fields), reason=reason)
    begun = [one["id"] for one in core.erasures.waiting() if one["tenant"] == tenant and one["state"] != "held"]
    return told | {"erasing": begun}


def pending(files: Files) -> list[str]:
    """Names of holds, and of erasures that have not ended. Raises StorePathError."""
    found = list[str]()
    for folder, kind in ((holds.FOLDER, ".hold"), (erasure_orders.FOLDER, ".order")):
        try:
            found += [name for name in files.list(folder) if name.endswith(kind)]
        except OSError as error:
            raise cannot_be_read(files.root, folder, error) from error
    return found


def serve(core: Core) -> Erasures:
    """The erasures of a store, which know its sessions and what is on hold."""
    core.holds = Holds(core)
    core.reclaimer.frozen, core.reclaimer.held = core.holds.tenants, core.holds.prints
    core.reclaimer.erased = lambda keys, records: core.tenants.passed(records) | core.tenants.buried(keys)
    made = Erasures(core, partial(blocks_of, core), partial(_end_sessions, core))
    made.held = core.holds.why
    return made


def is_retained(core: Core, fields: Fields, promised_s: float) -> bool:
    """Whether something of what is to be erased is younger than was promised to be kept."""
    tenant = fields.get("tenant")
    if not promised_s or not isinstance(tenant, str):
        return False
    since, tenant_id = core.steady.now() - promised_s, core.tenants.id_of(tenant)
    if fields.get("blocks"):
        present, records = core.locate(as_keys(_keys(fields["blocks"])))
        return bool((records["created_s"][present] > since).any())
    for one in core.table.all():
        if one.tenant == tenant_id:
            entries = core.recovery.entries(one.segment)
            if (entries["record"]["created_s"] > since).any():
                return True
    return False


def _end_sessions(core: Core, order: Order) -> None:
    """Raises CatalogError: it is tried again."""
    for _ in range(_ATTEMPTS_MAX):
        left = False
        for key, raw, _head in list(sessions_of(core, order, before_epoch=order.epoch)):
            left |= not core.control.compare_and_set(NAMESPACE, key, raw, None)  # or its worker was faster
            core.sessions.unpin(key)
        if not left:
            return
    raise CatalogError("erase: sessions are changed faster than they can be ended; tried again")


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not 0 < len(value.encode()) <= limits.session_name_bytes_max:
        raise InvalidArgument(f"{name}={value!r}: must be text of 1 to {limits.session_name_bytes_max} bytes in UTF-8")
    return value


def _keys(value: Any) -> list[bytes]:
    if (
        not isinstance(value, list) or not 0 < len(value) <= limits.message_keys_max
        or not all(isinstance(one, bytes) and len(one) == limits.key_bytes for one in value)
    ):  # fmt: skip
        raise InvalidArgument(f"blocks: a list of 1 to {limits.message_keys_max} keys of {limits.key_bytes} bytes")
    return value
