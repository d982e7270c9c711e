"""What a step fills and what it overwrites: which blocks the scheduler has the workers save.

Contract
- Saved are blocks full of confirmed tokens that are computed when the step is over; never the null block, never one
  that has slid out of its window. Each once, whatever became of its save: a lost save is a later miss.
- `overwritten` names every block that the step may write to from its first token on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.engines.vllm.adapters import Names
from perdure.engines.vllm.generated import Generated
from perdure.engines.vllm.hints import Hints
from perdure.engines.vllm.promote import Promotion, Shape
from perdure.engines.vllm.transfers import Part, Plan


@dataclass(slots=True)
class RequestState:
    """What the connector knows of one request of the engine.

    epoch, preemptions: when it was admitted last; blocks computed before are not its own any more. computed: the
    engine's own hit when tokens were offered. saved: per group, blocks that are saved or need not be. due: with how
    many computed tokens there is more to save, at the earliest. load: the job that is going on. refused: offered
    nothing any more. asked, offered: when it first waited for the weights' digest, and was first offered tokens.
    canary: position in tokens up to which a block that is stored is computed all the same. adapted: its names, if it
    has an adapter.
    """

    request: Any
    epoch: int
    preemptions: int
    saved: list[int]
    due: int = 0
    promotion: Promotion | None = None
    computed: int = 0
    load: int | None = None
    refused: bool = False
    asked: float = 0.0
    canary: int = 0
    offered: float = 0.0
    counted: bool = False
    sources: dict[bool, int] = field(default_factory=dict)
    hints: Hints = field(default_factory=Hints)
    adapted: Names | None = None

    @property
    def names(self) -> list[bytes]:
        """Of the request's blocks, as far as they are known."""
        hashes: list[bytes] = (self.request if self.adapted is None else self.adapted).block_hashes
        return hashes


class Saves:
    """shapes: of the KV-cache groups. hash_tokens: tokens per hash of a request."""

    def __init__(self, shapes: Sequence[Shape], hash_tokens: int, generated: Generated):
        self._shapes, self._hash_tokens, self._generated = list(shapes), hash_tokens, generated

    def part(self, state: RequestState, group: int, positions: Sequence[int], block_ids: Sequence[int]) -> Part:
        """Blocks of a group at these positions of the sequence; a block is named by the hash of its last part."""
        per_block, names = self._shapes[group].block_tokens // self._hash_tokens, state.names
        return Part(group, list(block_ids), [names[(at + 1) * per_block - 1] for at in positions])

    def full(self, state: RequestState, computed: int, table: Callable[[], Sequence[Sequence[int]]]) -> list[Part]:
        """Blocks that are full now and were not saved. table: gives the request's block ids, when they are needed."""
        request = state.request
        end = min(computed, len(state.names) * self._hash_tokens)
        if state.hints.store_tokens_max is not None:
            end = min(end, state.hints.store_tokens_max)
        parts: list[Part] = []
        ids: Sequence[Sequence[int]] | None = None
        for group, shape in enumerate(self._shapes):
            low, high = state.saved[group], end // shape.block_tokens
            if high <= low:
                continue
            ids = table() if ids is None else ids
            state.saved[group] = high
            chosen = [at for at in range(low, min(high, len(ids[group]))) if ids[group][at]]
            part = self.part(state, group, chosen, [ids[group][at] for at in chosen])
            if high * shape.block_tokens > request.num_prompt_tokens:
                part = self._worthwhile(part, chosen, request.num_prompt_tokens // shape.block_tokens)
            if part.block_ids:
                parts.append(part)
        state.due = min((at + 1) * shape.block_tokens for at, shape in zip(state.saved, self._shapes, strict=True))
        return parts

    def _worthwhile(self, part: Part, positions: Sequence[int], prompt_blocks: int) -> Part:
        kept = [
            at for at, (position, name) in enumerate(zip(positions, part.hashes, strict=True))
            if position < prompt_blocks or self._generated.wanted(name)
        ]  # fmt: skip
        return Part(part.group, [part.block_ids[at] for at in kept], [part.hashes[at] for at in kept])

    def note_overwritten(self, plan: Plan, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            for shape, ids in zip(self._shapes, new.block_ids, strict=True):
                plan.overwritten += ids[new.num_computed_tokens // shape.block_tokens :]
        cached = output.scheduled_cached_reqs
        for request_id, new_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if new_ids:
                resumed = request_id in cached.resumed_req_ids
                for shape, ids in zip(self._shapes, new_ids, strict=True):
                    plan.overwritten += ids[computed // shape.block_tokens :] if resumed else ids
        for copy in output.kv_cache_block_copies or ():
            plan.overwritten.append(copy.dst_block_id)
