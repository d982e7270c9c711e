"""Blocks on their way to another host: gathered in memory, in the form they are sent in, held until they are out.

Contract
- What the DRAM tier holds, or what is stored as the engine wants it, is sent from the tier's memory, pinned meanwhile.
- What is stored encoded crosses as it is stored: verified here, decoded by the host that asked for it. Afterwards
  (`keep`) it is decoded into the DRAM tier, where the next read finds it.
- `release` must be called when the bytes are out, or never will be.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from perdure import codecs
from perdure.buffers import Parts
from perdure.catalog.api import KeyArray
from perdure.core import Core
from perdure.errors import CatalogError
from perdure.keys import key_list
from perdure.keyspace import Keyspace
from perdure.pool.dram import Slot
from perdure.reading import finish, from_disk, perform, placed
from perdure.reports import ReadReport
from perdure.segments.landing import CODEC, EXPIRES, STORED, BlockStatus, Plan
from perdure.viewing import Fetched, bring, leave_limbo, pin_present

_FOUND, _MISSING = int(BlockStatus.FOUND), int(BlockStatus.MISSING)


@dataclass(slots=True)
class Lot:
    """report: as of a read. codecs, stored: per block, as they are sent. The rest is held until `release`."""

    core: Core
    space: Keyspace
    keys: KeyArray
    report: ReadReport
    codecs: NDArray[np.uint8]
    stored: NDArray[np.uint32]
    slots: list[Slot | None] = field(default_factory=list)
    own: dict[int, memoryview] = field(default_factory=dict)  # by position: memory that is not the DRAM tier's
    expiries: dict[int, int] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list)

    def payload(self) -> list[memoryview]:
        size = self.space.layout.block_bytes
        parts: list[memoryview] = []
        for position in np.flatnonzero(self.report.statuses == _FOUND).tolist():
            slot = self.slots[position]
            parts.append(self.own[position] if slot is None else slot.view[:size])
        return parts

    def keep(self) -> None:
        """Decode what was sent encoded into the DRAM tier, as far as there is room."""
        pool, space = self.core.pool, self.space
        for position in np.flatnonzero(self.codecs).tolist():
            slot = pool.reserve(space.layout.block_bytes, space.tenant_id)
            if slot is None:
                return
            key = self.keys[position : position + 1]
            try:
                codecs.decode(int(self.codecs[position]), self.own[position], [slot.view], space.layout.element_bytes)
            except codecs.CodecError:  # the ordinary way of reading deals with it
                pool.discard(slot)
                space.read(key, bytearray(space.layout.block_bytes))
                continue
            pool.publish(slot, key.tobytes(), space.digest, expires_s=self.expiries[position])

    def release(self) -> None:
        slots, self.slots = self.slots, []
        self.core.pool.release(slots)
        self.own.clear()
        for undo in self.undo:
            undo()
        self.undo.clear()


def gather(core: Core, space: Keyspace, keys: KeyArray, *, deadline_s: float) -> Lot:
    started = time.monotonic()
    deadline = started + deadline_s
    leave_limbo(core)
    count = len(keys)
    report = ReadReport(np.full(count, _MISSING, np.uint8), 0, 0, 0.0)
    lot = Lot(core, space, keys, report, np.zeros(count, np.uint8), np.zeros(count, np.uint32))
    fetched = Fetched(report, [None] * count)
    lot.slots = fetched.slots
    try:
        pin_present(core, space, keys, fetched)
        if report.from_memory < count:
            if space.codec.policy != "off":
                _encoded(lot, deadline)
            bring(core, space, keys, fetched, deadline)
            if fetched.no_room:
                _homeless(lot, fetched.no_room, deadline)
            if fetched.elsewhere:
                _published(lot, fetched.elsewhere, deadline)
        finish(core, space, keys, report, started)
    except BaseException:
        lot.release()
        raise
    return lot


def _encoded(lot: Lot, deadline: float) -> None:
    """Read what is stored encoded, as it is. What does not verify is left to the ordinary way of reading."""
    core, space, keys, report = lot.core, lot.space, lot.keys, lot.report
    rest = np.flatnonzero(report.statuses != _FOUND)
    try:
        chosen, rows = placed(core, space, keys[rest], rest, report)
    except CatalogError:
        return
    encoded = [(at, row) for at, row in zip(chosen, rows, strict=True) if row[CODEC] != codecs.NONE]
    if not encoded:
        return
    lease = core.scratch.take(sum(row[STORED] for _, row in encoded))
    lot.undo.append(lease.give_back)
    views: list[memoryview] = []
    start = 0
    for _, row in encoded:
        views.append(lease.view[start : start + row[STORED]])
        start += row[STORED]
    positions = [at for at, _ in encoded]
    plan = Plan(
        keys=key_list(keys[positions]), keyspaces=[space.digest] * len(encoded), rows=[row for _, row in encoded],
        destinations=[[view] for view in views], element_bytes=space.layout.element_bytes, deadline=deadline,
        domain=space.tenant_id, raw=True,
    )  # fmt: skip
    perform(core, plan, [row[STORED] for _, row in encoded])
    for place, (position, row) in enumerate(encoded):
        if plan.statuses[place] == _FOUND:
            report.statuses[position] = _FOUND
            lot.codecs[position], lot.stored[position] = row[CODEC], row[STORED]
            lot.own[position], lot.expiries[position] = views[place], row[EXPIRES]


def _homeless(lot: Lot, positions: list[int], deadline: float) -> None:
    """Read what finds no room in the DRAM tier into memory of our own."""
    from_disk(lot.core, lot.space, lot.keys, _own_memory(lot, positions), deadline, False, lot.report)


def _published(lot: Lot, positions: list[int], deadline: float) -> None:
    """Read what another tenant has published into memory of our own."""
    targets = _own_memory(lot, positions)
    lot.core.publications.deliver(lot.space, lot.keys, targets, positions, deadline, False, lot.report)


def _own_memory(lot: Lot, positions: list[int]) -> list[Parts]:
    size = lot.space.layout.block_bytes
    lease = lot.core.scratch.take(len(positions) * size)
    lot.undo.append(lease.give_back)
    targets: list[Parts] = [[] for _ in lot.keys]
    for place, position in enumerate(positions):
        lot.own[position] = lease.view[place * size : (place + 1) * size]
        targets[position] = [lot.own[position]]
    return targets
