"""The reading verbs: which leading blocks can be used, and delivering them.

Contract
- `lookup` is a hint and says so: nothing is read. A positive may still fail in `read`, which then reports it.
- `read` delivers from the DRAM tier or the disk, verified, by the deadline, and reports every block by itself.
- A block that does not verify is read again, then looked up again (it may have moved), then quarantined: its record is
  removed if unchanged, so that it can be stored again at once. A sick host removes nothing (`segments.health`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.buffers import Parts, copy_parts
from perdure.catalog.api import Durability, KeyArray, RecordArray, fingerprints
from perdure.core import Core
from perdure.errors import CatalogError
from perdure.keys import key_list
from perdure.reports import ReadReport
from perdure.segments.reader import BlockStatus, Plan

if TYPE_CHECKING:
    from perdure.keyspace import Keyspace

_RECENCY_BLOCKS_PER_TICK = 64  # tail-first: blocks deeper in a chain count as a little older


def lookup(core: Core, keys: KeyArray) -> int:
    """Leading blocks that can be used: present and not expired."""
    count = len(keys)
    complete = (
        core.presence.complete
    )  # before the probe (the fill may end meanwhile) and after it (keys may be dropped)
    found = core.presence.prefix(fingerprints(keys), core.expiry_now())
    if found < count and not (complete and core.presence.complete):
        found = _catalog_prefix(core, keys, found)
    core.counters.add(lookups=1, lookup_blocks=count, lookup_found=found)
    return found


def _catalog_prefix(core: Core, keys: KeyArray, known: int) -> int:
    """Continue a prefix in the catalog: the presence index has not been filled yet, or keeps only the hot part."""
    if not core.pending and not core.table.any_expiring:
        return known + core.index.prefix(keys[known:])
    step = limits.lookup_gallop_first_blocks
    while known < len(keys):
        part = keys[known : known + step]
        alive = core.alive(*core.locate(part))
        if not alive.all():
            return known + int(np.flatnonzero(~alive)[0])
        known += len(part)
        step *= limits.lookup_gallop_factor
    return known


def present_mask(core: Core, keys: KeyArray) -> NDArray[np.bool_]:
    """Which blocks are stored and not expired, per key."""
    present, records = core.locate(keys)
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
    statuses = np.full(count, BlockStatus.MISSING, np.uint8)
    report = ReadReport(statuses, 0, 0, 0.0)
    if count:
        _from_memory(core, space, keys, destinations, report)
        rest = np.flatnonzero(statuses != BlockStatus.FOUND)
        if len(rest):
            _from_disk(core, space, keys, destinations, rest, deadline, direct, report)
    found = statuses == BlockStatus.FOUND
    holes = np.flatnonzero(~found)
    report.usable = int(holes[0]) if len(holes) else count
    total = int(np.count_nonzero(found))
    report.bytes = total * space.layout.block_bytes
    report.seconds = time.monotonic() - started
    if total:
        _touch(core, keys, found)
    _count(core, report, total, count)
    return report


def _from_memory(
    core: Core, space: Keyspace, keys: KeyArray, destinations: Sequence[Parts], report: ReadReport
) -> None:
    """Deliver what the DRAM tier holds; those bytes were verified when they got there."""
    if not core.pool.budget_bytes:
        return
    slots = core.pool.get(keys)
    held = [slot for slot in slots if slot is not None]
    if not held:
        return
    started, size = time.monotonic(), space.layout.block_bytes
    try:
        complete = core.presence.complete
        visible = core.presence.visible(fingerprints(keys), core.expiry_now()) if complete else None
        for position, slot in enumerate(slots):
            if slot is None or (visible is not None and not visible[position]) or slot.view.nbytes < size:
                continue
            copy_parts([slot.view[:size]], destinations[position])
            report.statuses[position] = BlockStatus.FOUND
            report.from_memory += 1
    finally:
        core.pool.release(held)
    core.rates.memory_read.add(report.from_memory * size, time.monotonic() - started)


def _from_disk(
    core: Core,
    space: Keyspace,
    keys: KeyArray,
    destinations: Sequence[Parts],
    rest: NDArray[np.intp],
    deadline: float | None,
    direct: bool,
    report: ReadReport,
) -> None:
    for attempt in range(2):
        started = time.monotonic()
        try:
            present, records = core.locate(keys[rest])
        except CatalogError:  # a hint that cannot be asked is a miss
            core.counters.add(catalog_errors=1)
            return
        usable = core.alive(present, records)
        mine = records["tenant"] == np.void(space.tenant_id)
        report.statuses[rest[usable & ~mine]] = BlockStatus.DENIED
        usable &= mine & (records["block_bytes"] == space.layout.block_bytes)
        chosen = rest[usable]
        if not len(chosen):
            return
        plan = Plan(
            keys=key_list(np.ascontiguousarray(keys[chosen])),
            keyspaces=[space.digest] * len(chosen),
            records=records[usable],
            destinations=[destinations[position] for position in chosen.tolist()],
            element_bytes=space.layout.element_bytes,
            deadline=deadline,
            direct=direct or (deadline is None and not core.pool.budget_bytes),
        )
        core.reader.read(plan)
        report.statuses[chosen] = plan.statuses
        if not plan.settled.is_set():
            report._settled = plan.settled  # noqa: SLF001 (the report is ours)
        delivered = int(np.count_nonzero(plan.statuses == BlockStatus.FOUND))
        if delivered:
            core.rates.disk_read.add(delivered * space.layout.block_bytes, time.monotonic() - started)
        if not plan.problems:
            return
        report.problems |= {int(chosen[position]): why for position, why in plan.problems.items()}
        bad = np.array(sorted(plan.problems), np.intp)
        moved = _quarantine(core, keys[chosen[bad]], plan, bad) if not core.read_only else np.zeros(len(bad), bool)
        report.statuses[chosen] = plan.statuses
        rest = chosen[bad[moved]]
        if attempt or not len(rest):
            return
        for position in rest.tolist():
            del report.problems[position]


def _quarantine(core: Core, keys: KeyArray, plan: Plan, bad: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Take blocks that did not verify out of the catalog, if they are still where they were read.

    Returns which of them had moved meanwhile (their new place deserves a read).
    """
    records: RecordArray = plan.records[bad]
    moved = np.zeros(len(bad), bool)
    try:
        present, current = core.locate(keys)
    except CatalogError:
        return moved
    moved = present & (current != records)
    boot_id = core.clock.boot_id()
    for number, position in enumerate(bad.tolist()):
        status, why = BlockStatus(plan.statuses[position]), plan.problems[position]
        if moved[number] or status not in (BlockStatus.CORRUPT, BlockStatus.MISSING):
            continue
        segment = records["segment"][number].tobytes()
        owner = core.table.get(segment)
        lost = (
            records["durability"][number] == Durability.EPHEMERAL and owner is not None and owner.boot_id != boot_id
        )  # a power cut may take what was never fsynced: expected, not a sign of a bad disk
        if lost:
            plan.statuses[position] = BlockStatus.MISSING
        elif not core.health.may_remove(segment):
            core.counters.add(quarantine_withheld=1)
            continue
        try:
            core.pending.remove([plan.keys[position]])
            core.index.remove(keys[number : number + 1], records[number : number + 1])
        except CatalogError:
            continue
        core.presence.remove(fingerprints(keys[number : number + 1]))
        core.pool.drop(keys[number : number + 1])
        core.counters.add(quarantined=1)
        core.incidents.add(
            plan.keys[position],
            kind="lost" if lost else BlockStatus(plan.statuses[position]).name.lower(),
            why=why,
            segment=segment.hex(),
            offset=int(records["offset"][number]),
        )
    return moved


def _touch(core: Core, keys: KeyArray, found: NDArray[np.bool_]) -> None:
    positions = np.flatnonzero(found)
    ticks = np.maximum(core.tick() - positions // _RECENCY_BLOCKS_PER_TICK, 1).astype(np.uint32)
    core.presence.touch(fingerprints(keys)[positions], ticks)


def _count(core: Core, report: ReadReport, found: int, count: int) -> None:
    if found == count and not report.problems:
        core.counters.add(
            reads=1, blocks_found_memory=report.from_memory, blocks_found_disk=found - report.from_memory,
            bytes_read=report.bytes,
        )  # fmt: skip
        return
    core.counters.add(
        reads=1,
        blocks_found_memory=report.from_memory,
        blocks_found_disk=found - report.from_memory,
        bytes_read=report.bytes,
        blocks_missing=report.count(BlockStatus.MISSING),
        blocks_corrupt=report.count(BlockStatus.CORRUPT),
        blocks_denied=report.count(BlockStatus.DENIED),
        blocks_late=report.count(BlockStatus.LATE),
    )
