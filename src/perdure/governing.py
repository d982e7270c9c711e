"""What an operator asks of a store about keeping and erasing, whether it is in this process or behind a service.

Contract: `govern` is the only way in. Each verb takes and gives dictionaries that fit a message, and checks every
field, because they come from other processes as they come from this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from perdure import limits, session_admin
from perdure.core import Core
from perdure.errors import InvalidArgument, ReadOnlyStore
from perdure.governance.audit import Event
from perdure.governance.keystore import rotate
from perdure.session_form import Fields

_POLL_S = 0.2


class GovernanceVerbs:
    """What stores have of it, wherever they are."""

    def govern(self, verb: str, fields: Fields) -> Fields:
        """Carry out a verb of `administer`."""
        raise NotImplementedError

    def erase(
        self,
        *,
        tenant: str,
        session: str | None = None,
        subject: str | None = None,
        blocks: Iterable[bytes] | None = None,
        wait_s: float = 0.0,
    ) -> Fields:
        """Erase a tenant, or of it a session, all sessions of a subject, or blocks by their keys.

        Returns when nothing of it can be read any more, or when what is on the disk is gone too, for which it waits
        `wait_s`: {"id", "state"}: "unreadable"; "erased", with "receipt"; "held": it is done when the hold is released.
        Raises InvalidArgument, AuditUnavailable, AccessDenied."""
        fields: Fields = {"tenant": tenant, "session": session, "subject": subject}
        if blocks is not None:
            fields["blocks"] = list(blocks)
        told = self.govern("erase", fields)
        until = time.monotonic() + wait_s
        while told["state"] == "unreadable" and time.monotonic() < until:
            time.sleep(_POLL_S)
            told = self.erasure(told["id"])
        return told

    def erasure(self, order: str) -> Fields:
        """State of an erasure, as `erase` returns it."""
        return self.govern("erasure", {"id": order})


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
        """A new key-encryption key, recorded; see `Keystore.rotate`. Raises KeyUnavailable, AuditUnavailable."""
        self._check()
        if self._core.read_only or self._core.segments.keys is None:
            raise ReadOnlyStore(f"{self.path} was opened read-only; open it without read_only=True")
        return rotate(self._core.segments.keys, self._core.audit)

    def session_admin(self, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        """What `perdure sessions` asks; see `session_admin.administer`."""
        self._check()
        if self._core.read_only and verb not in ("list", "show"):
            raise ReadOnlyStore(f"{self.path} was opened read-only; open it without read_only=True")
        audit = self._core.audit if verb in ("release", "expire") else None
        if audit is not None:
            audit.guard()
        told = session_admin.administer(self._core, verb, fields)
        if audit is not None:
            audit.append(
                Event("admin", detail=f"sessions {verb}", tenant=str(fields.get("tenant") or "")), durable=True
            )
        return told


READING = ("erasure",)


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
