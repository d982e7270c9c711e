"""What an operator asks of a store about keeping and erasing, whether it is in this process or behind a service.

Contract: `govern` is the only way in. Each verb takes and gives dictionaries that fit a message, and checks every
field, because they come from other processes as they come from this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from perdure import limits, session_admin
from perdure.catalog.api import KeyArray, as_keys
from perdure.core import Core
from perdure.erasure import Erasures, Order
from perdure.errors import InvalidArgument, ReadOnlyStore
from perdure.governance.keystore import rotate
from perdure.governance.verbs import GovernanceVerbs
from perdure.inspect import keyspaces
from perdure.manifest import ManifestMissing
from perdure.session_form import Fields, Head, decode_head, subject_id
from perdure.session_heads import NAMESPACE


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


READING: Final = ("erasure",)
GOVERNING: Final = {"erase": "erase"}
"""Verbs about a tenant, and what policy calls them."""


def administer(core: Core, verb: str, fields: Fields) -> Fields:
    """verb: "erase" {"tenant", and at most one of "session", "subject", "blocks"}; "erasure" {"id"}.

    Raises InvalidArgument, AuditUnavailable, CatalogError, OSError."""
    if verb == "erase":
        return _erase(core, fields)
    if verb == "erasure":
        told: Fields = core.erasures.state_of(fields.get("id"))
        return told
    raise InvalidArgument(f"govern: {verb!r} must be erase or erasure")


def _erase(core: Core, fields: Fields) -> Fields:
    named = [one for one in ("session", "subject", "blocks") if fields.get(one) is not None]
    if len(named) > 1:
        raise InvalidArgument(f"erase: {' and '.join(named)} at a time; one erasure is about one thing")
    tenant = _text(fields, "tenant")
    if not named:
        told: Fields = core.erasures.erase("tenant", tenant)
    elif named == ["blocks"]:
        told = core.erasures.erase("block", tenant, keys=_keys(fields["blocks"]))
    else:
        told = core.erasures.erase(named[0], tenant, target=_text(fields, named[0]))
    return told


def serve(core: Core) -> Erasures:
    """The erasures of a store, which know its sessions."""
    return Erasures(core, partial(_blocks_of, core), partial(_end_sessions, core))


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


def _sessions_of(core: Core, order: Order) -> Iterator[tuple[bytes, bytes, Head]]:
    """(key, value, head) of the sessions that an order is about."""
    tenant_id = bytes.fromhex(order.tenant_id)
    subject = subject_id(core.tenants.secret(order.tenant)[0], order.target) if order.kind == "subject" else b""
    known = keyspaces(core) if order.kind == "tenant" else {}
    for key, raw in core.control.items(NAMESPACE, tenant_id):
        if key[: limits.id_bytes] != tenant_id:
            return
        head = decode_head(raw)
        if (
            (order.kind == "session" and head.name == order.target)
            or (order.kind == "subject" and head.subject == subject)
            or (order.kind == "tenant" and known.get(head.keyspace, {}).get("epoch", 0) < order.epoch)
        ):
            yield key, raw, head


def _blocks_of(core: Core, order: Order) -> KeyArray:
    """The blocks that an order is about. Raises InvalidArgument if that is not known (any more)."""
    if order.kind == "block":
        return as_keys(bytes.fromhex(key) for key in order.keys)
    found: list[KeyArray] = [np.zeros((0, limits.key_bytes), np.uint8)]
    for _, _, head in _sessions_of(core, order):
        try:
            found.append(core.sessions.manifests.keys(order.tenant, head.root, head.blocks, 0, head.blocks))
        except ManifestMissing as error:
            raise InvalidArgument(
                f"erase: which blocks session {head.name!r} consists of is not known any more ({error}); "
                "erase them by their keys, or the tenant"
            ) from None
    return np.unique(np.concatenate(found), axis=0)


def _end_sessions(core: Core, order: Order) -> None:
    for key, raw, _ in list(_sessions_of(core, order)):
        core.control.compare_and_set(NAMESPACE, key, raw, None)
        core.sessions.unpin(key)


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
