"""A policy comes into force: recorded first, as what it is and as what it changes.

Contract: raises AuditUnavailable, and then the policy before stays in force; what was last in force is remembered with
the store, so a change between two runs is recorded too.
"""

from __future__ import annotations

import json
from typing import Final

from perdure.core import STORE_NAMESPACE, Core
from perdure.governance.audit import Event
from perdure.governance.policy import Policies

_KEY: Final = b"audited policy"


def record(core: Core, policies: Policies) -> None:
    """Where there is an audit log, and the policy is another than last time. Raises AuditUnavailable, CatalogError."""
    audit = core.audit
    if audit is None:
        return
    key = _KEY + audit.label
    kept = core.control.get(STORE_NAMESPACE, key)
    before = json.loads(kept) if kept else {"digest": "", "terms": []}
    if before["digest"] == policies.digest:
        return
    terms = sorted(one.name for one in policies.documents.values())
    gone = sorted({*before["terms"]} - {*terms})
    told = f"terms {', '.join(terms) or 'none'}" + (f"; no more {', '.join(gone)}" if gone else "")
    change = f"{before['digest'] or 'none'} -> {policies.digest}"
    audit.append(Event("policy", policy=policies.stamp(""), detail=told, outcome=change), durable=True)
    now = json.dumps({"digest": policies.digest, "terms": terms}).encode()
    core.control.compare_and_set(STORE_NAMESPACE, key, kept, now)
