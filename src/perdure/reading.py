"""The reading verbs: which leading blocks can be used, and delivering them.

Contract
- `lookup` is a hint and says so: nothing is read. A positive may still fail in `read`, which then reports it.
- `read` delivers from the DRAM tier or the disk, verified, by the deadline, and reports every block by itself.
- A block that does not verify is read again, then looked up again (it may have moved), then quarantined: its record is
  removed if unchanged, so that it can be stored again at once. A sick host removes nothing (`segments.health`).
- An I/O error says nothing about the block's bytes: its record stays, is reported, and gives way to a new copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.buffers import Parts, copy_parts
from perdure.catalog.api import RECORD, Durability, KeyArray, SegmentRecord, as_keys, fingerprints
from perdure.core import Core
from perdure.errors import CatalogError, CatalogUnavailable, RootUnavailable
from perdure.governance.audit import AuditLog, Event
from perdure.keys import key_domain, key_list
from perdure.reports import ReadReport
from perdure.segments.landing import BlockStatus, Plan, Row

if TYPE_CHECKING:
    from perdure.keyspace import Keyspace

# As plain integers: an attribute of an enum costs as much as a checksum of 4 KiB.
_FOUND, _MISSING = int(BlockStatus.FOUND), int(BlockStatus.MISSING)
_SEGMENT, _TENANT, _OFFSET, _STORED, _BLOCK_BYTES, _EXPIRES, _DURABILITY, _CIPHER, _EPOCH = map(
    (RECORD.names or ()).index,
    ("segment", "tenant", "offset", "stored_bytes", "block_bytes", "expires_s", "durability", "cipher", "tenant_epoch"),
)


def lookup(core: Core, keys: KeyArray) -> int:
    """Leading blocks that can be used: present and not expired. Counted."""
    found = leading(core, keys)
    core.counters.add(lookups=1, lookup_blocks=len(keys), lookup_found=found)
    return found


def leading(core: Core, keys: KeyArray) -> int:
    """As `lookup`, not counted."""
    count = len(keys)
    complete = (
        core.presence.complete
    )  # before the probe (the fill may end meanwhile) and after it (keys may be dropped)
    found = core.presence.prefix(fingerprints(keys), core.expiry_now())
    if found < count and not (complete and core.presence.complete):
        found = _catalog_prefix(core, keys, found)
    return found


def _catalog_prefix(core: Core, keys: KeyArray, known: int) -> int:
    """Continue a prefix in the catalog: the presence index has not been filled yet, or keeps only the hot part."""
    try:
        return _asked_prefix(core, keys, known)
    except CatalogUnavailable:  # a hint that cannot be asked is a miss
        core.counters.add(catalog_errors=1)
        return known


def _asked_prefix(core: Core, keys: KeyArray, known: int) -> int:
    shared, erased = core.sharing.shared, core.tenants.filtering
    if not shared and not erased and not core.pending and not core.table.any_expiring:
        return known + core.index.prefix(keys[known:])
    step = limits.lookup_gallop_first_blocks
    while known < len(keys):
        part = keys[known : known + step]
        alive = core.alive(*core.locate(part))
        if not alive.all():
            return known + int(np.flatnonzero(~alive)[0])
        known += len(part)
        # Asking a cluster costs a round trip, whatever is asked: so at most two.
        step = limits.publish_batch_blocks_max if core.sharing.shared else step * limits.lookup_gallop_factor
    return known


def present_mask(core: Core, keys: KeyArray) -> NDArray[np.bool_]:
    """Which blocks are stored and not expired, per key."""
    try:
        present, records = core.locate(keys)
    except CatalogUnavailable:
        core.counters.add(catalog_errors=1)
        return np.zeros(len(keys), np.bool_)
    return core.alive(present, records)


def read(
    core: Core,
    space: Keyspace,
    keys: KeyArray,
    destinations: Sequence[Parts],
    *,
    deadline_s: float | None,
    direct: bool,
) -> ReadReport:
    started = time.monotonic()
    deadline = None if deadline_s is None else started + deadline_s
    count = len(keys)
    statuses = np.full(count, _MISSING, np.uint8)
    report = ReadReport(statuses, 0, 0, 0.0)
    if count:
        _from_memory(core, space, keys, destinations, report)
        from_disk(core, space, keys, destinations, deadline, direct, report)
        elsewhere = space.published(keys)
        if elsewhere:
            core.publications.deliver(space, keys, destinations, elsewhere, deadline, direct, report)
    finish(core, space, keys, report, started)
    return report


def finish(core: Core, space: Keyspace, keys: KeyArray, report: ReadReport, started: float) -> None:
    """Sums, recency, counters and news for the admission, of a report whose statuses are final."""
    space.admission.asked(keys)
    count, found = len(keys), report.statuses == _FOUND
    total = int(np.count_nonzero(found))
    report.usable = count if total == count else int(found.argmin())
    report.bytes = total * space.layout.block_bytes
    report.seconds = time.monotonic() - started
    if total == count:
        core.touches.add(keys, core.tick())
    elif total:
        core.touches.add(keys[found], core.tick())
    _count(core, report, total, count)
    if core.audit is not None and space.audited:
        record_read(core.audit, space, keys, report)


def _from_memory(
    core: Core, space: Keyspace, keys: KeyArray, destinations: Sequence[Parts], report: ReadReport
) -> None:
    """Deliver what the DRAM tier holds; those bytes were verified when they got there."""
    if not core.pool.budget_bytes or not core.knows_expiry or space.closed:
        return
    slots = core.pool.get(keys)
    held = [slot for slot in slots if slot is not None]
    if not held:
        return
    started, size = time.monotonic(), space.layout.block_bytes
    try:
        visible = core.presence.visible(fingerprints(keys), core.expiry_now())
        for position, slot in enumerate(slots):
            if slot is None or not visible[position] or slot.nbytes != size:
                continue
            if slot.keyspace != space.digest:  # another tenant's or layout's: the disk pass says what is wrong
                continue
            copy_parts([slot.view[:size]], destinations[position])
            report.statuses[position] = _FOUND
            report.from_memory += 1
        if space.closed:  # while it was copied
            report.statuses[:], report.from_memory = _MISSING, 0
    finally:
        core.pool.release(held)
    core.rates.memory_read.add(report.from_memory * size, time.monotonic() - started)


def from_disk(
    core: Core,
    space: Keyspace,
    keys: KeyArray,
    destinations: Sequence[Parts],
    deadline: float | None,
    direct: bool,
    report: ReadReport,
    expiries: dict[int, int] | None = None,
) -> None:
    """Read what the report does not have yet and there is memory for (`destinations`: an empty one is left out).

    expiries: position -> expiry of the blocks that have one, for who wants to keep them."""
    rest = np.flatnonzero(report.statuses != _FOUND)
    if not all(destinations):
        rest = np.array([position for position in rest.tolist() if destinations[position]], np.intp)
    for attempt in range(2 if len(rest) and not space.closed else 0):
        asked = keys if len(rest) == len(keys) else keys[rest]
        try:
            chosen, rows = placed(core, space, asked, rest, report)
        except CatalogError:  # a hint that cannot be asked is a miss
            core.counters.add(catalog_errors=1)
            return
        if not chosen:
            return
        if expiries is not None:
            expiries |= {at: row[_EXPIRES] for at, row in zip(chosen, rows, strict=True) if row[_EXPIRES]}
        plan = Plan(
            keys=key_list(keys[chosen]),
            keyspaces=[space.digest] * len(chosen),
            rows=rows,
            destinations=[destinations[position] for position in chosen],
            element_bytes=space.layout.element_bytes,
            deadline=deadline,
            direct=direct or (deadline is None and not core.pool.budget_bytes),
            domain=space.tenant_id,
        )
        turn = core.tenants.begin()
        try:
            perform(core, plan, [space.layout.block_bytes] * len(chosen))
        finally:
            core.tenants.end(turn)
        if space.closed:  # while it was read
            report._settled = plan.unsettled() or report._settled  # noqa: SLF001 (the report is ours)
            return
        report.statuses[chosen] = plan.statuses
        report.from_cold += sum(int(plan.statuses[place]) == _FOUND for place in plan.far)
        report._settled = plan.unsettled() or report._settled  # noqa: SLF001 (the report is ours)
        if not plan.problems:
            return
        moved = [] if core.read_only else _quarantine(core, plan)
        report.statuses[chosen] = plan.statuses
        again = set(moved) if attempt == 0 else set()
        report.problems |= {chosen[place]: why for place, why in plan.problems.items() if place not in again}
        rest = np.array([chosen[place] for place in moved], np.intp)
        if not again:
            return


def perform(core: Core, plan: Plan, sizes: list[int]) -> None:
    """Carry out a plan whose blocks count as `sizes` bytes in the rate of the disk."""
    total, rates = sum(sizes), core.rates
    found: list[int] = []
    rates.reading(total)
    try:
        core.reader.read(plan)
        found = np.flatnonzero(plan.statuses == _FOUND).tolist()
    finally:
        found = [] if plan.far else found  # the disk's rate is not the object store's
        rates.read(total, total if len(found) == len(sizes) else sum(sizes[place] for place in found))


def placed(
    core: Core, space: Keyspace, asked: KeyArray, rest: NDArray[np.intp], report: ReadReport
) -> tuple[list[int], list[Row]]:
    """Positions that can be read, with their records; the others' statuses are final."""
    present, records = core.locate(asked)
    now, tenant, size = core.expiry_now(), space.tenant_id, space.layout.block_bytes
    chosen: list[int] = []
    rows: list[Row] = []
    for position, there, row in zip(rest.tolist(), present.tolist(), records.tolist(), strict=True):
        if not there or 0 < row[_EXPIRES] <= now:
            continue
        if row[_TENANT] != tenant:
            report.statuses[position] = BlockStatus.DENIED
        elif row[_BLOCK_BYTES] == size:
            if row[_STORED] > size or row[_OFFSET] >= limits.segment_bytes_max:
                _refuse_record(core, asked, rest, position, row, report)
                continue
            chosen.append(position)
            rows.append(row)
    return chosen, rows


def _refuse_record(
    core: Core, asked: KeyArray, rest: NDArray[np.intp], position: int, row: Row, report: ReadReport
) -> None:
    """A record that no writer makes: the index is damaged. Nothing is allocated or read on its word."""
    place = int(np.searchsorted(rest, position))
    report.statuses[position] = BlockStatus.CORRUPT
    report.problems[position] = f"the index is damaged: {row[_STORED]} bytes at offset {row[_OFFSET]} of a segment"
    if not core.read_only:
        _remove(core, asked[place : place + 1], row, "corrupt", report.problems[position], keep=False)


def _quarantine(core: Core, plan: Plan) -> list[int]:
    """Take blocks that did not verify out of the catalog, if they are still where they were read.

    Returns the places in the plan whose block had moved meanwhile (its new place deserves a read).
    """
    places = sorted(plan.problems)
    keys = as_keys(plan.keys[place] for place in places)
    try:
        present, current = core.locate(keys)
    except CatalogError:
        return []
    moved: list[int] = []
    boot_id = core.clock.boot_id()
    for number, place in enumerate(places):
        row, status = plan.rows[place], plan.statuses[place]
        if present[number] and current[number].item() != row:
            moved.append(place)
        elif isinstance(plan.unread.get(place), RootUnavailable):
            plan.statuses[place] = BlockStatus.MISSING
            core.set_aside(keys[number : number + 1], row)
        elif status in (BlockStatus.CORRUPT, BlockStatus.MISSING):
            owner = _segment_now(core, row[_SEGMENT])
            unread = place in plan.unread
            # Another host's view of a shared directory may be behind: a file that exists is no reason to forget it.
            unread |= core.sharing.shared and owner is not None and status == BlockStatus.MISSING
            # Expected, not signs of a bad disk: the segment was given up, or a power cut took what was never fsynced.
            given_up = owner is None and _is_gone(core, row[_SEGMENT])
            cut = row[_DURABILITY] == Durability.EPHEMERAL and owner is not None and owner.boot_id != boot_id
            cut &= not core.sharing.shared  # another host's boot is always another one
            lost = (given_up or cut or _is_shredded(core, row)) and not unread
            if lost:
                plan.statuses[place] = BlockStatus.MISSING
            elif not core.health.may_remove(row[_SEGMENT]) and not unread:
                core.counters.add(quarantine_withheld=1)
                continue
            else:  # of many hosts this one's memory may be bad: on its word alone the others lose nothing
                unread |= core.sharing.shared
            kind = "lost" if lost else BlockStatus(status).name.lower()
            _remove(core, keys[number : number + 1], row, kind, plan.problems[place], keep=unread)
    return moved


def _is_shredded(core: Core, row: Row) -> bool:
    keys = core.segments.keys
    return bool(row[_CIPHER] and keys and keys.gone(key_domain(row[_TENANT], row[_EPOCH]), row[_SEGMENT]))


def _segment_now(core: Core, segment: bytes) -> SegmentRecord | None:
    try:
        return core.table.find(segment, fresh=True)
    except CatalogError:
        return core.table.get(segment)


def _is_gone(core: Core, segment: bytes) -> bool:
    try:
        return core.recovery.is_gone(segment)
    except OSError:
        return False


def _remove(core: Core, key: KeyArray, row: Row, kind: str, why: str, keep: bool) -> None:
    """Forget one block and remember why, for `status` and `explain`. `keep`: its record waits for a new copy."""
    record = np.array([row], RECORD)
    if keep:
        kind = "unreadable"
        core.unreadable.add(key.tobytes(), record.tobytes())
    else:
        try:
            core.pending.remove(key_list(key))
            core.index.remove(key, record)
        except CatalogError:
            return
    core.presence.remove(fingerprints(key))
    core.pool.drop(key)
    core.counters.add(**{"unreadable" if keep else "quarantined": 1})
    if core.audit is not None:
        core.audit.note(
            Event("verify-failed", first=core.audit.id_of("block", key.tobytes()), blocks=1, outcome=kind, detail=why)
        )
    core.incidents.add(key.tobytes(), kind=kind, why=why, segment=row[_SEGMENT].hex(), offset=row[_OFFSET])


def record_read(audit: AuditLog, space: Keyspace, keys: KeyArray, report: ReadReport) -> None:
    """One record per call. A log that cannot be written does not stop reads."""
    if not len(keys):
        return
    amounts = np.bincount(report.statuses, minlength=len(BlockStatus)).tolist()
    counts = {status.name.lower(): amount for status, amount in zip(BlockStatus, amounts, strict=False) if amount}
    event = audit.message("read", space, keys, bytes=report.bytes, counts=counts)
    if BlockStatus.DENIED.name.lower() in counts:
        event.decision = "deny"
    audit.note(event)


def _count(core: Core, report: ReadReport, found: int, count: int) -> None:
    amounts = {
        "reads": 1,
        "blocks_found_memory": report.from_memory,
        "blocks_found_disk": found - report.from_memory - report.from_cold,
        "blocks_found_cold": report.from_cold,
        "bytes_read": report.bytes,
    }
    if found != count:
        for status in (BlockStatus.MISSING, BlockStatus.CORRUPT, BlockStatus.DENIED, BlockStatus.LATE):
            amounts[f"blocks_{status.name.lower()}"] = report.count(status)
    core.counters.add(**amounts)
