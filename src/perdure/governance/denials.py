"""What was refused, for the audit log: bounded, whatever a caller does to be refused.

Contract
- The first denial of its kind (who, whose, what, why) is recorded at once; how often it came again, once every
  `limits.audit_checkpoint_s`, at the call of `flush`. Beyond `limits.audit_denials_records_max` kinds in that time the
  rest is counted together. A kill takes counts of that time, never the first of a kind.
- Never raises: a denial holds, whether or not it can be recorded. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from perdure import limits
from perdure.governance.audit import AuditLog, Event

_Kind = tuple[str, str, str, str, str]


class Denials:
    def __init__(self, audit: Callable[[], AuditLog | None], monotonic: Callable[[], float] = time.monotonic):
        self._audit, self._monotonic = audit, monotonic
        self._lock = threading.Lock()
        self._again: dict[_Kind, int] = {}
        self._others, self._since = 0, monotonic()

    def note(self, who: str, tenant: str, what: str, why: str, policy: str = "") -> None:
        """what: the action that was refused."""
        audit = self._audit()
        if audit is None:
            return
        kind = (who, tenant, what, why, policy)
        with self._lock:
            if kind in self._again:
                self._again[kind] += 1
                return
            if len(self._again) >= limits.audit_denials_records_max:
                self._others += 1
                return
            self._again[kind] = 0
        audit.note(_event(kind))

    def flush(self, *, now: bool = False) -> None:
        """Record the counts, if it is time. now: whether or not it is."""
        audit = self._audit()
        if audit is None or (not now and self._monotonic() - self._since < limits.audit_checkpoint_s):
            return
        with self._lock:
            again, self._again = self._again, {}
            others, self._others, self._since = self._others, 0, self._monotonic()
        for kind, count in again.items():
            if count:
                audit.note(_event(kind, again=count))
        if others:
            audit.note(Event("denied", decision="deny", counts={"others": others}))


def _event(kind: _Kind, **counts: int) -> Event:
    who, tenant, what, why, policy = kind
    return Event(
        "denied", who=who, tenant=tenant, outcome=what, decision="deny", detail=why, policy=policy, counts=counts
    )
