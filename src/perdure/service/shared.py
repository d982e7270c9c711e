"""The small pages that service and engine share beside the pool: the directory of a domain, and an engine's ring.

Directory (service writes, engines map it read-only): one u64 each for the versions of the presence table, of the slot
table and of the set of chunks; whether an absent key is really absent; the second that expiry is judged by; a beat;
until when (ns of CLOCK_BOOTTIME) blocks may be delivered at all, 0 where that has no end (`perdure.epochs`).
Ring (one per engine and domain, the engine writes): what it looked up and read without a message. The service drains it
several times a second and believes nothing in it: touches are checked against the slots' generations.

Each word is one aligned u64, written in one piece. Nothing here decides what is delivered to whom.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from perdure import limits

DIRECTORY_BYTES: Final = limits.page_bytes
PRESENCE, SLOTS, CHUNKS, COMPLETE, EXPIRY_S, BEAT_NS, UNTIL_NS = range(7)
"""Words of the directory."""

HEAD, SEEN, LOOKUPS, ASKED, PRESENT = range(5)
"""Words of a ring: entries ever written, the set of chunks the engine maps at most, lookups, their blocks, found."""

_RING_HEADER_BYTES: Final = 128
_RING_HEADER_WORDS: Final = _RING_HEADER_BYTES // 8
ENTRY: Final = np.dtype([("slot", "<u8"), ("generation", "<u8")])
RING_BYTES: Final = -(-(_RING_HEADER_BYTES + limits.ring_entries * ENTRY.itemsize) // limits.page_bytes) * (
    limits.page_bytes
)

Words = NDArray[np.uint64]
Entries = NDArray[np.void]


def directory_words(memory: NDArray[np.uint8]) -> Words:
    return memory[:DIRECTORY_BYTES].view(np.uint64)


def ring_words(memory: NDArray[np.uint8]) -> Words:
    return memory[:_RING_HEADER_BYTES].view(np.uint64)


def ring_entries(memory: NDArray[np.uint8]) -> Entries:
    return memory[_RING_HEADER_BYTES:][: limits.ring_entries * ENTRY.itemsize].view(ENTRY)


def write_touches(ring: memoryview, touches: list[tuple[int, int]]) -> None:
    """Append touches (slot, generation); the oldest are overwritten if the service is slow. One writer at a time.

    ring: its words (format 'Q'), which are three times as fast as an array's where there are few."""
    head = ring[HEAD]
    for number, (slot, generation) in enumerate(touches, head):
        at = _RING_HEADER_WORDS + 2 * (number % limits.ring_entries)
        ring[at], ring[at + 1] = slot, generation
    ring[HEAD] = head + len(touches)


def read_touches(memory: NDArray[np.uint8], tail: int) -> tuple[int, Entries, int]:
    """(new tail, entries since `tail`, how many were lost). What an engine wrote, so: numbers of any value."""
    head = int(ring_words(memory)[HEAD])
    fresh = (head - tail) % 2**64
    count = min(fresh, limits.ring_entries)
    at = (head - count + np.arange(count, dtype=np.uint64)) % np.uint64(limits.ring_entries)
    return head, ring_entries(memory)[at], fresh - count if fresh <= 2 * limits.ring_entries else 0
