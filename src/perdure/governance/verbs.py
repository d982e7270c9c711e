"""What every store can be asked about keeping and erasing: one in this process, a service, a data node.

Contract: all of it is a verb of `governing.administer`, asked through `govern`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final

_POLL_S: Final = 0.2
Fields = dict[str, Any]


class GovernanceVerbs:
    """Of a store, wherever it is."""

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

    def hold(
        self,
        *,
        tenant: str,
        reason: str,
        session: str | None = None,
        subject: str | None = None,
        blocks: Iterable[bytes] | None = None,
    ) -> Fields:
        """Keep what `erase` with these would erase, whatever its time to live, until `unhold`.

        {"id", "blocks" on hold now (None: all of the tenant's), "erasing": ids of erasures that had begun before}.
        Raises InvalidArgument, AuditUnavailable, AccessDenied."""
        fields: Fields = {"tenant": tenant, "session": session, "subject": subject, "reason": reason}
        if blocks is not None:
            fields["blocks"] = list(blocks)
        return self.govern("hold", fields)

    def unhold(self, *, tenant: str, hold: str) -> Fields:
        """Take a hold off; erasures that waited for it begin. Raises as `hold`."""
        return self.govern("unhold", {"tenant": tenant, "id": hold})

    def lifecycle(self, tenant: str | None = None) -> Fields:
        """What will happen when: see `perdure.lifecycle`."""
        return self.govern("lifecycle", {"tenant": tenant})

    def erasure(self, order: str) -> Fields:
        """State of an erasure, as `erase` returns it."""
        return self.govern("erasure", {"id": order})
