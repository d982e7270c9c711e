"""Of a tenant's stored bytes, the part that this process may write without asking, where several processes share them.

Contract
- What the processes write of a tenant never passes its bound together: each takes a part in advance, by
  compare-and-set in the control store, of what is neither stored nor taken by others. A part ends by its time, and is
  reckoned up against what is stored at its holder's next one; near the bound parts are as small as the write that asks.
- What a process had on its way when its part ended, and published later, is not in the reckoning.
- Not thread-safe. Raises CatalogError.
"""

from __future__ import annotations

import json
from typing import Final

from perdure import limits
from perdure.core import Core
from perdure.errors import CatalogUnavailable

_NAMESPACE: Final = "quota"
_PARTS: Final = 64  # that a bound is cut into
_TRIES: Final = 20


class Allotment:
    """Of one tenant, in one process."""

    def __init__(self, core: Core, tenant_id: bytes):
        self._core, self._tenant = core, tenant_id
        self._left_bytes, self._until_s = 0, 0.0

    def take(self, nbytes: int, most_bytes: int, unpublished_bytes: int) -> bool:
        """Whether `nbytes` more may be written. unpublished_bytes: what this process is writing, and has written but
        not published."""
        if self._core.clock.boottime() >= self._until_s:
            self._left_bytes = 0
        if nbytes > self._left_bytes and not self._more(nbytes, most_bytes, unpublished_bytes):
            return False
        self._left_bytes -= nbytes
        return True

    def _more(self, nbytes: int, most_bytes: int, unpublished_bytes: int) -> bool:
        core, mine = self._core, self._core.sharing.owner.hex()
        for _ in range(_TRIES):
            now = core.clock.boottime()
            # before what is stored: of a part that is used up meanwhile the bytes count twice, never not at all
            raw = core.control.get(_NAMESPACE, self._tenant)
            parts: dict[str, tuple[int, float]] = {} if raw is None else json.loads(raw)
            others = {name: part for name, part in parts.items() if name != mine and part[1] > now}
            usage = core.index.usage().get(self._tenant)
            stored = 0 if usage is None else usage.record_bytes
            free = most_bytes - stored - sum(taken for taken, _ in others.values()) - unpublished_bytes
            if free < nbytes:
                return False
            part = min(free, max(nbytes, most_bytes // _PARTS))
            until = now + limits.quota_lease_s
            new = json.dumps(others | {mine: (unpublished_bytes + part, until)}).encode()
            if core.control.compare_and_set(_NAMESPACE, self._tenant, raw, new):
                self._left_bytes, self._until_s = part, until
                return True
        raise CatalogUnavailable(f"quota stored_bytes: {_TRIES} times another process was faster; try again")
