"""Wiping the DRAM tier: what was erased leaves no bytes in it.

Contract
- `withdraw` makes blocks invisible at once, those being loaded included. What somebody still looks at is wiped when the
  last pin on it goes.
- `wipe` overwrites memory that holds no block now: slots that were freed, chunks that are idle. Chunks are made of
  fresh memory, and given back to the system when they go, so what it did not reach is wiped by the kernel.
- The pool's lock is held for bookkeeping, and never while bytes are overwritten. Meanwhile that memory is reserved.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from perdure.pool.chunks import Chunk, Slot
from perdure.pool.dram import DramPool

# ruff: noqa: SLF001 (the pool's own bookkeeping, in a room of its own)


def withdraw(pool: DramPool, doomed: Callable[[Slot], bool]) -> int:
    """Make the blocks of doomed slots invisible; how many. Slots reserved before are not published any more."""
    with pool._lock:
        pool._tick = pool._all_dropped_at = pool._tick + 1
        slots = [slot for slot in pool._index.values() if doomed(slot)]
        for slot in slots:
            slot.wipe = bool(slot.pins)
            pool._unpublish(slot)
    return len(slots)


def wipe(pool: DramPool, domain: bytes) -> int:
    """Overwrite the free memory of a domain (of the whole pool, where domains share chunks); how many bytes."""
    with pool._lock:
        chunks = [one for one in pool._chunks if not pool.shared or one.owner.domain == domain]
        idle = [chunk for chunk in pool._idle if chunk in chunks]
        for chunk in idle:
            pool._idle.remove(chunk)
            chunk.held += 1
        slots = [slot for chunk in chunks if chunk not in idle for slot in _taken(pool, chunk)]
    for view in [chunk.memory.view for chunk in idle] + [slot.view for slot in slots]:
        np.frombuffer(view, np.uint8)[:] = 0
    for slot in slots:
        pool.discard(slot)
    with pool._lock:
        for chunk in idle:
            chunk.held -= 1
            pool._idle.append(chunk)
    return sum(chunk.memory.view.nbytes for chunk in idle) + sum(slot.view.nbytes for slot in slots)


def _taken(pool: DramPool, chunk: Chunk) -> list[Slot]:
    """All freed slots of a chunk, reserved."""
    slots = [chunk.take(chunk.owner.slot_bytes, pool._tick) for _ in range(len(chunk.free))]
    pool._reserved += len(slots)
    for slot in slots:
        pool._hide(slot)
    if chunk.full():
        chunk.owner.partial.pop(chunk, None)
    return slots
