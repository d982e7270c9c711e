"""Caches of whole blocks, simulated: least recently used, and Belady's optimum, to hold the store against.

Contract
- A block hits only if all earlier blocks of its request hit. Capacity is in blocks, and counts nothing else: no
  headers, no segments, no room kept free.
- `lru`: used blocks are touched tail first, so a chain is evicted from its tail. With `release`, the blocks of a
  session that ends go first.
- `belady`: of all blocks seen, the ones asked for soonest are kept (MIN with bypass); what is never asked for again is
  not kept at all. At equal times the earlier block of the chain is kept.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from perdure.benchmarks.policy_traces import BLOCK_TOKENS, Trace

_NEVER: Final = 1 << 60


@dataclass(slots=True)
class Hits:
    """What a replay found. Blocks are counted in whole ones, tokens as the requests have them."""

    tokens: int = 0
    hit_tokens: int = 0
    hit_blocks: int = 0
    memory_blocks: int = 0  # of them from the DRAM tier
    written_blocks: int = 0  # onto the flash, copies of reclaim included

    def add(self, tokens: int, blocks: int) -> None:
        self.tokens += tokens
        self.hit_tokens += min(blocks * BLOCK_TOKENS, tokens)
        self.hit_blocks += blocks

    @property
    def percent(self) -> float:
        """Of the input tokens."""
        return 100 * self.hit_tokens / max(self.tokens, 1)

    @property
    def memory_share(self) -> float:
        """Of the hits."""
        return self.memory_blocks / max(self.hit_blocks, 1)

    @property
    def written_per_flash_hit(self) -> float:
        return self.written_blocks / max(self.hit_blocks - self.memory_blocks, 1)


def lru(trace: Trace, capacity: int, *, release: bool = False) -> Hits:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = Hits()
    for request in trace.requests:
        blocks = request.blocks.tolist()
        found = _leading(cache, blocks)
        hits.add(request.tokens, found)
        for block in reversed(blocks):
            if block in cache:
                cache.move_to_end(block)
            else:
                cache[block] = None
                hits.written_blocks += 1
        if release and request.ends is not None:
            for block in request.ends.tolist():
                if block in cache:
                    cache.move_to_end(block, last=False)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def belady(trace: Trace, capacity: int) -> Hits:
    following = _following(trace)
    kept: dict[int, tuple[int, int]] = {}  # block -> (-when it is asked for, -its place): the smallest goes first
    heap: list[tuple[int, int, int]] = []
    hits = Hits()
    for request, nexts in zip(trace.requests, following, strict=True):
        blocks = request.blocks.tolist()
        hits.add(request.tokens, _leading(kept, blocks))
        for place, (block, when) in enumerate(zip(blocks, nexts, strict=True)):
            if when == _NEVER:
                kept.pop(block, None)
                continue
            hits.written_blocks += block not in kept
            kept[block] = rank = (-when, -place)
            heapq.heappush(heap, (*rank, block))
        while len(kept) > capacity:
            when, place, block = heapq.heappop(heap)
            if kept.get(block) == (when, place):
                del kept[block]
        if len(heap) > 4 * capacity + 100_000:  # most of it is out of date
            heap = [(when, place, block) for block, (when, place) in kept.items()]
            heapq.heapify(heap)
    return hits


def _leading(cache: OrderedDict[int, None] | dict[int, tuple[int, int]], blocks: list[int]) -> int:
    for place, block in enumerate(blocks):
        if block not in cache:
            return place
    return len(blocks)


def _following(trace: Trace) -> list[list[int]]:
    """Per request and block: the number of the next request that has the block."""
    soonest: dict[int, int] = {}
    made: list[list[int]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[number].blocks.tolist()
        made.append([soonest.get(block, _NEVER) for block in blocks])
        soonest.update(dict.fromkeys(blocks, number))
    made.reverse()
    return made
