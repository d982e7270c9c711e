"""Blocks where they lie in the DRAM tier: brought there if need be, pinned, and looked at without a copy.

Contract
- `fetch` reads what is not in memory yet straight into slots of the DRAM tier, verified as every read is. A slot that
  the disk may still write to after the deadline is nobody's until that has ended.
- A fetched block stays where it is, unchanged, until its pins are released: not by eviction, not by removal.
- Blocks there is no room for are reported as such (`no_room`): the caller reads them into memory of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perdure.buffers import Parts
from perdure.catalog.api import KeyArray, fingerprints
from perdure.core import Core
from perdure.pool.dram import Slot
from perdure.reading import finish, from_disk
from perdure.reports import ReadReport
from perdure.segments.landing import BlockStatus

if TYPE_CHECKING:
    from perdure.keyspace import Keyspace

_FOUND, _MISSING = int(BlockStatus.FOUND), int(BlockStatus.MISSING)


@dataclass(slots=True)
class Fetched:
    """report: as of a read. slots: pinned, None where not FOUND. no_room: positions that found no place in memory.
    elsewhere: of published blocks, which lie in no memory of this tenant's."""

    report: ReadReport
    slots: list[Slot | None]
    no_room: list[int] = field(default_factory=list)
    elsewhere: list[int] = field(default_factory=list)


def fetch(core: Core, space: Keyspace, keys: KeyArray, *, deadline_s: float | None) -> Fetched:
    started = time.monotonic()
    deadline = None if deadline_s is None else started + deadline_s
    leave_limbo(core)
    report = ReadReport(np.full(len(keys), _MISSING, np.uint8), 0, 0, 0.0)
    fetched = Fetched(report, [None] * len(keys))
    if len(keys):
        pin_present(core, space, keys, fetched)
        if report.from_memory < len(keys):
            bring(core, space, keys, fetched, deadline)
    fetched.no_room += fetched.elsewhere
    finish(core, space, keys, report, started)
    return fetched


def leave_limbo(core: Core) -> None:
    """Give back the slots of late reads that have ended."""
    for _ in range(len(core.limbo)):
        try:
            settled, slots = core.limbo.popleft()
        except IndexError:  # another thread was faster
            return
        if settled.is_set():
            for slot in slots:
                core.pool.discard(slot)
        else:
            core.limbo.append((settled, slots))


def pin_present(core: Core, space: Keyspace, keys: KeyArray, fetched: Fetched) -> None:
    """The first step of `fetch`: pin what the DRAM tier holds and may be shown."""
    if not core.knows_expiry or space.closed:
        return
    slots = core.pool.get(keys)
    if not any(slots):
        return
    visible: NDArray[np.bool_] = core.presence.visible(fingerprints(keys), core.expiry_now())
    refused = []
    for position, slot in enumerate(slots):
        if slot is None:
            continue
        if visible[position] and _is_of(slot, space):
            fetched.slots[position] = slot
            fetched.report.statuses[position] = _FOUND
            fetched.report.from_memory += 1
        else:
            refused.append(slot)
    if refused:
        core.pool.release(refused)


def _is_of(slot: Slot, space: Keyspace) -> bool:
    return slot.keyspace == space.digest and slot.nbytes == space.layout.block_bytes


def bring(core: Core, space: Keyspace, keys: KeyArray, fetched: Fetched, deadline: float | None) -> None:
    """The second step of `fetch`: read the rest from the disk into new slots; publish, pinned, what verifies."""
    report, size = fetched.report, space.layout.block_bytes
    targets: list[Parts] = [[] for _ in keys]
    reserved: dict[int, Slot] = {}
    expiries: dict[int, int] = {}
    fetched.elsewhere = space.published(keys)
    wanted = report.statuses != _FOUND
    wanted[fetched.elsewhere] = False
    for position in np.flatnonzero(wanted).tolist():
        slot = core.pool.reserve(size, space.tenant_id)
        if slot is None:
            fetched.no_room.append(position)
            continue
        reserved[position], targets[position] = slot, [slot.view]
    try:
        from_disk(core, space, keys, targets, deadline, True, report, expiries)
    except BaseException:
        report.statuses[list(reserved)] = _MISSING
        raise
    finally:
        rest = [slot for position, slot in reserved.items() if report.statuses[position] != _FOUND]
        if report._settled is None:  # noqa: SLF001 (the report is ours)
            for slot in rest:
                core.pool.discard(slot)
        elif rest:
            core.limbo.append((report._settled, rest))  # noqa: SLF001
    for position, slot in reserved.items():
        if report.statuses[position] == _FOUND:
            _publish(core, space, keys[position : position + 1], fetched, position, slot, expiries.get(position, 0))


def _publish(
    core: Core, space: Keyspace, key: KeyArray, fetched: Fetched, position: int, slot: Slot, expires_s: int
) -> None:
    if core.pool.publish(slot, key.tobytes(), space.digest, expires_s=expires_s, pin=True):
        fetched.slots[position] = slot
        return
    (other,) = core.pool.get(key)  # another thread brought it at the same time, or it was dropped meanwhile
    if other is not None and _is_of(other, space):
        fetched.slots[position] = other
    else:
        core.pool.release([other])
        fetched.report.statuses[position] = _MISSING
