"""Legal holds: what is on hold is not erased, evicted or forgotten, whatever its time to live says.

    DIR/control/holds/<id>.hold     it is on until this is gone

Contract
- `place` returns when it is on, here and after any crash, and recorded before. An erasure that would touch it waits.
- It keeps, and does not serve: what outlives its time is kept on the disk, and found by nobody.
- What a session is made of is looked up whenever room is made: what it gains while it is on hold is on hold. Where that
  cannot be told, nothing of the tenant is given up.
- A tenant on hold keeps its segments as they are; of others the blocks on hold are copied when their segments go.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.catalog.api import fingerprints
from perdure.core import Core
from perdure.errors import InvalidArgument
from perdure.governance.audit import Event
from perdure.selection import About, blocks_of, is_of, sessions_of
from perdure.session_form import Head

FOLDER: Final = "control/holds"


class Hold(msgspec.Struct, omit_defaults=True):
    """As `selection.About`."""

    id: str
    kind: str
    tenant: str
    tenant_id: str
    at_s: float
    target: str = ""
    subject: str = ""
    keys: list[str] = []
    reason: str = ""
    who: str = ""


class Holds:
    """Of one store. Thread-safe."""

    def __init__(self, core: Core):
        """Raises OSError."""
        self._core, self._lock = core, threading.Lock()
        self._all: dict[str, Hold] = {}
        self._known: dict[str, tuple[list[tuple[bytes, int]], NDArray[np.uint64]]] = {}
        for name in core.files.list(FOLDER):
            stem, _, kind = name.partition(".")
            if kind == "hold":
                self._all[stem] = msgspec.json.decode(core.files.read(f"{FOLDER}/{name}"), type=Hold)

    def __bool__(self) -> bool:
        return bool(self._all)

    # --- verbs
    def place(
        self, kind: str, tenant: str, *, target: str = "", subject: str = "", keys: Iterable[bytes] = (), reason: str
    ) -> dict[str, Any]:
        """As `all` shows it. Raises InvalidArgument, AuditUnavailable, OSError."""
        core, audit = self._core, self._core.audit
        if core.sharing.shared:
            raise InvalidArgument("hold: not built for stores that several processes share; leave `catalog` out")
        if len(self._all) >= limits.holds_entries_max:
            raise InvalidArgument(f"hold: {limits.holds_entries_max} are on already; hold tenants rather than sessions")
        hold = Hold(
            secrets.token_hex(8), kind, tenant, core.tenants.id_of(tenant).hex(), core.steady.now(), target, subject,
            [key.hex() for key in keys], reason,
        )  # fmt: skip
        if kind in ("session", "subject"):
            if not any(True for _ in sessions_of(core, hold)):
                raise InvalidArgument(f"hold: {tenant!r} has no such {kind}; nothing is on hold")
            blocks_of(core, hold, pages=True)  # what is not known now cannot be kept
        if audit is not None:
            audit.guard()
            event = Event("hold", tenant=tenant, object=hold.id, detail=kind)
            audit.append(event, durable=True)
            hold.who = event.who
        core.files.write_once(f"{FOLDER}/{hold.id}.hold", msgspec.json.encode(hold))
        with self._lock:
            self._all[hold.id] = hold
        return self._shown(hold)

    def release(self, tenant: str, name: str) -> dict[str, Any]:
        """Take it off. Raises InvalidArgument, AuditUnavailable, OSError: then it is still on."""
        core, audit, hold = self._core, self._core.audit, self._all.get(name)
        if hold is None or hold.tenant != tenant:
            raise InvalidArgument(f"unhold: {tenant!r} has no hold {name!r}; see `perdure lifecycle`")
        told = self._shown(hold)
        if audit is not None:
            audit.guard()
            audit.append(Event("unhold", tenant=tenant, object=hold.id, detail=hold.kind), durable=True)
        core.files.unlink(f"{FOLDER}/{hold.id}.hold")
        with self._lock:
            self._all.pop(hold.id, None)
            self._known.pop(hold.id, None)
        return told

    def all(self) -> list[dict[str, Any]]:
        return [self._shown(hold) for hold in list(self._all.values())]

    def _shown(self, hold: Hold) -> dict[str, Any]:
        prints = None if hold.kind == "tenant" else self._prints(hold)
        told = {name: getattr(hold, name) for name in ("id", "kind", "tenant", "target", "reason", "who", "at_s")}
        return told | {"blocks": None if prints is None else len(prints)}

    # --- what it keeps
    def tenants(self) -> set[bytes]:
        """Tenants (ids) of which nothing goes: on hold as a whole, or it cannot be told what is."""
        return {
            bytes.fromhex(hold.tenant_id)
            for hold in list(self._all.values()) if hold.kind == "tenant" or self._prints(hold) is None
        }  # fmt: skip

    def prints(self) -> NDArray[np.uint64]:
        """Fingerprints of the blocks on hold, but those of tenants that are on hold as a whole."""
        found = [self._prints(hold) for hold in list(self._all.values()) if hold.kind != "tenant"]
        some = [one for one in found if one is not None]
        return np.unique(np.concatenate(some)) if some else np.zeros(0, np.uint64)

    def covers(self, tenant_id: bytes, head: Head) -> str:
        """Id of a hold that a session is under; "": none."""
        mine = [hold for hold in list(self._all.values()) if hold.tenant_id == tenant_id.hex()]
        return next((hold.id for hold in mine if hold.kind == "tenant" or is_of(hold, head)), "")

    def why(self, about: About) -> str:
        """Why an erasure must wait; "": it need not."""
        for hold in list(self._all.values()):
            if hold.tenant_id == about.tenant_id and self._touches(hold, about):
                return f"hold {hold.id} ({hold.reason})"
        return ""

    def _touches(self, hold: Hold, about: About) -> bool:
        if "tenant" in (hold.kind, about.kind):
            return True
        if any(is_of(hold, head) for _, _, head in sessions_of(self._core, about)):
            return True
        held = self._prints(hold)
        try:
            return held is None or bool(np.isin(fingerprints(blocks_of(self._core, about)), held).any())
        except InvalidArgument:  # it is not known what it is about
            return True

    def _prints(self, hold: Hold) -> NDArray[np.uint64] | None:
        """None: it cannot be told."""
        heads = [(head.root, head.blocks) for _, _, head in sessions_of(self._core, hold)]
        known = self._known.get(hold.id)
        if known is None or known[0] != heads:
            try:
                known = heads, fingerprints(blocks_of(self._core, hold, pages=True))
            except InvalidArgument:
                return None
            with self._lock:
                self._known[hold.id] = known
        return known[1]
