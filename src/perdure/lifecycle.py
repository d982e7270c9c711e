"""What will happen to what is stored, and when: erasures, holds, times to live, sessions, pins.

Contract: read-only, made of what is on the disk now; times in seconds since 1970. Blocks are told of by their segments,
each of which has one owner and times to live of one class; what was written in the last minutes counts as open.
"""

from __future__ import annotations

from typing import Any, Final

from perdure.catalog.api import SegmentRecord, SegmentState
from perdure.core import Core
from perdure.inspect import keyspaces
from perdure.session_form import Fields, Head

_SHOWN_MAX: Final = 100


def told(core: Core, tenant: str | None) -> Fields:
    """{"now_s", "expiry_paused", "erasures", "holds", "tenants": by name, "sessions": those that end next}."""
    names = {one["tenant_id"]: one["tenant"] for one in keyspaces(core).values()}
    usage = core.index.usage()
    segments: dict[str, list[SegmentRecord]] = {}
    for record in core.table.all():
        segments.setdefault(names.get(record.tenant.hex(), record.tenant.hex()), []).append(record)
    sizes = {names.get(one.hex(), one.hex()): used for one, used in usage.items()}
    frozen = {names.get(one.hex(), one.hex()) for one in core.holds.tenants()}
    tenants = {
        name: {
            "blocks": sizes[name].blocks if name in sizes else 0,
            "stored_bytes": sum(record.allocated_bytes for record in segments.get(name, [])),
            "held": name in frozen,
        } | _expiring(segments.get(name, []))
        for name in sorted({*segments, *sizes}) if tenant in (None, name)
    }  # fmt: skip
    return {
        "now_s": int(core.steady.now()),
        "expiry_paused": core.steady.paused,
        "erasures": [one for one in core.erasures.waiting() if tenant in (None, one["tenant"])],
        "holds": [one for one in core.holds.all() if tenant in (None, one["tenant"])],
        "tenants": tenants,
        "sessions": _sessions(core, names, tenant),
    }


def _expiring(records: list[SegmentRecord]) -> dict[str, Any]:
    ends = [one.expires_s for one in records if one.state is not SegmentState.OPEN and one.expires_s]
    return {
        "expiring": {"segments": len(ends), "first_s": min(ends, default=0), "last_s": max(ends, default=0)},
        "until_evicted": sum(one.state is SegmentState.SEALED and not one.expires_s for one in records),
        "open": sum(one.state is SegmentState.OPEN for one in records),
    }


def _sessions(core: Core, names: dict[str, str], tenant: str | None) -> dict[str, Any]:
    every = [(names.get(key[:16].hex(), ""), key[:16], head) for key, head in core.sessions.all()]
    mine = sorted((one for one in every if tenant in (None, one[0])), key=lambda one: one[2].expires_s)
    return {"count": len(mine), "next": [_session(core, *one) for one in mine[:_SHOWN_MAX]]}


def _session(core: Core, tenant: str, tenant_id: bytes, head: Head) -> dict[str, Any]:
    return {
        "name": head.name, "tenant": tenant, "blocks": head.blocks, "ends_s": head.expires_s, "idle_ttl_s": head.ttl_s,
        "pinned_until_s": head.pinned_until_s, "hold": core.holds.covers(tenant_id, head),
    }  # fmt: skip
