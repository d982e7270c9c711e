"""What a store remembers from one opening to the next: its capacity, its writer, its cold tier, whether its block index
is whole; and its roots."""

from __future__ import annotations

import json
from typing import Any

from perdure import limits
from perdure.catalog.api import ControlStore, Durability
from perdure.catalogs import Catalogs
from perdure.core import INDEX_LOST_KEY, STORE_NAMESPACE, Core
from perdure.errors import InvalidArgument
from perdure.governance.audit import Event
from perdure.inspect import keyspaces
from perdure.io.roots import Roots
from perdure.options import parse_size
from perdure.segments.copies import Copies

_CAPACITY_DEFAULT = "20GiB"
_SETTINGS_KEY = b"audited settings"


def check_sharing(catalog: str | None, state: object, roots: object) -> None:
    """Raises InvalidArgument."""
    if catalog is None and state is not None:
        raise InvalidArgument("state=...: only a store whose catalog is a cluster has a state directory of its own")
    if catalog is not None and roots:
        raise InvalidArgument(
            f"roots={roots!r}: the processes that share a directory would have to agree on its roots, which is not "
            "built yet; leave roots out, or leave `catalog` out"
        )


def capacity_bytes_of(control: ControlStore, capacity: int | str | None, read_only: bool) -> int:
    """The capacity asked for, else the one from last time; remembered."""
    stored = control.get(STORE_NAMESPACE, b"capacity")
    if capacity is None:
        value = int(stored) if stored else parse_size(_CAPACITY_DEFAULT, "capacity")
    else:
        value = parse_size(capacity, "capacity")
    if value < limits.capacity_bytes_min:
        raise InvalidArgument(
            f"capacity={capacity!r}: at least {limits.capacity_bytes_min} bytes are needed (an open and a sealed "
            "segment, and room to copy forward)"
        )
    new = str(value).encode()
    if new != stored and not read_only:
        control.compare_and_set(STORE_NAMESPACE, b"capacity", stored, new)
    return value


def index_lost_of(control: ControlStore, catalogs: Catalogs, drop: bool, read_only: bool) -> bool:
    """Whether the block index has to be rebuilt. Remembered until that is done: a process that dies meanwhile leaves an
    index that looks whole and is not."""
    marked = control.get(STORE_NAMESPACE, INDEX_LOST_KEY)
    lost = marked is not None or drop or (not catalogs.index_is_whole() and bool(control.segments()))
    if lost and not read_only:
        control.compare_and_set(STORE_NAMESPACE, INDEX_LOST_KEY, marked, b"rebuilding")
        if drop:
            catalogs.drop_index()
    return lost


def segment_bytes_of(capacity: int) -> int:
    """Segment size: small in a small store, so that reclaim has a choice."""
    share = capacity // limits.segments_per_capacity_min // limits.page_bytes * limits.page_bytes
    return min(max(share, limits.segment_bytes_min), limits.segment_bytes_max)


def record_settings(core: Core, settings: dict[str, Any]) -> None:
    """Settings that are others than at the last opening are in the audit log before the store is used, and so is from
    now on what becomes of tenants' keys. Raises AuditUnavailable, CatalogError."""
    audit = core.audit
    if audit is None:
        return
    settings = settings | {"capacity": core.space.capacity, "audit": "reads" if audit.every_read else "on"}
    if core.segments.keys is not None:
        settings["encryption"] = core.segments.keys.mode
    if core.cold is not None:
        settings["cold"] = core.cold.tier.objects.where
    key = _SETTINGS_KEY + audit.label
    kept = core.control.get(STORE_NAMESPACE, key)
    before = json.loads(kept) if kept else {}
    changed = [f"{name}: {before.get(name)} -> {one}" for name, one in settings.items() if before.get(name) != one]
    if changed:
        audit.append(Event("config", detail="; ".join(changed)), durable=True)
        core.control.compare_and_set(STORE_NAMESPACE, key, kept, json.dumps(settings).encode())

    def tell(op: str, tenant_id: bytes, why: str) -> None:
        names = (one["tenant"] for one in keyspaces(core).values() if one["tenant_id"] == tenant_id.hex())
        event = Event(op, tenant=next(names, tenant_id.hex()), detail=why)
        if op == "key-create":
            audit.append(event)
        else:
            event.decision = "deny"
            audit.note(event)

    if core.segments.keys is not None:
        core.segments.keys.tell = tell


def tend_copies(core: Core, roots: Roots | None) -> None:
    """Over several roots: let second copies be tended, and ask only segments that have some for theirs."""
    if roots is None:
        return

    def mirrored(segment: bytes) -> bool:
        record = core.table.get(segment)
        return record is None or record.durability == Durability.RETAINED

    roots.mirrored = mirrored
    core.copies = Copies(roots, core.segments, core.table, core.reader, core.engine, core.scratch, core.counters.add)


def take_over(control: ControlStore, owner: bytes) -> None:
    """This process is the writer now: what the one before it held has ended."""
    before = control.get(STORE_NAMESPACE, b"owner")
    if before is not None:
        control.end_owner(before)
    control.compare_and_set(STORE_NAMESPACE, b"owner", before, owner)
