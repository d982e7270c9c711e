"""The scheduler's half: which tokens of a request can be loaded, which full blocks are saved.

Contract
- Never waits: the service is asked by `promote.Promoter`, whose numbers are looked at here.
- A hit is offered only for blocks that were verified and are held in the service's memory, in whole blocks of every
  KV-cache group, behind the engine's own hit, with a token left to compute. Asking again changes nothing.
- A request waits `lookup_wait_ms_max` for an answer, and while blocks come faster than the engine computes them
  `promote_wait_ms_max`. A request whose load failed, or whose offer finds no room for a while, is offered nothing more.
- Saved are blocks full of confirmed tokens computed by this step, never the null block; blocks that this step, or a
  load that starts in it, writes to are named in the plan.
- Weights: what is stored and looked up belongs to one epoch. `new_epoch` ends it; until every worker has told the
  digest of its weights anew nothing is offered and nothing saved.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure import limits
from perdure.engines.vllm import identity
from perdure.engines.vllm.link import Link
from perdure.engines.vllm.promote import Promoter, Promotion, Shape, Spaces, warm_up
from perdure.engines.vllm.settings import Settings
from perdure.engines.vllm.transfers import Outcome, Part, Plan, Shard, Transfer

_LOG = logging.getLogger("perdure.vllm")
OFFER_S_MAX = 1.0  # an offer that is not taken up for so long is for a request that finds no room: offer it nothing
_RATE_TOKENS_MIN = 64  # a step of fewer tokens says nothing about the speed of prefill
_RATE_WEIGHT = 0.3


@dataclass(slots=True)
class _Request:
    request: Any
    epoch: int
    preemptions: int
    promotion: Promotion | None = None
    computed: int = 0  # the engine's own hit when tokens were offered
    offered: float = 0.0  # when tokens were first offered, in monotonic seconds
    saved: list[int] = field(default_factory=list)  # per group: blocks that are saved or need not be
    load: int | None = None  # job that is going on
    refused: bool = False
    store_tokens_max: int | None = None


class Scheduler:
    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any, *, hash_tokens: int):
        self._settings, self._vllm_config = settings, vllm_config
        groups = identity.groups_of(vllm_config, kv_cache_config)
        self.shapes = [Shape(group.block_tokens, group.window_tokens) for group in groups]
        self._hash_tokens = hash_tokens
        self._link = Link(settings, "vllm scheduler", settings.model or identity.model_name(vllm_config))
        hold_s = (settings.load_deadline_ms + settings.promote_wait_ms_max) / 1000 + OFFER_S_MAX
        view_ttl_s = min(limits.view_ttl_s_max, max(limits.view_ttl_s_default, 2 * hold_s))
        self.promoter = Promoter(self._link, self.shapes, hash_tokens, view_ttl_s)
        self._ranks = int(vllm_config.parallel_config.world_size)
        self._epoch = 0
        self._shards: dict[tuple[int, int], Shard] = {}
        self._weights = ""
        self._requests: dict[str, _Request] = {}
        self._loading: dict[int, tuple[_Request, Transfer]] = {}
        self._job = 0
        self._plan = Plan()
        self.counters: Counter[str] = Counter()
        self._prefill_rate = settings.prefill_tokens_per_s
        self._last_step: tuple[float, int] | None = None
        self._pool: Any = None

    def bind_pool(self, block_pool: Any) -> None:
        """vLLM's pool: says what the engine has itself."""
        self._pool = block_pool

    # --- a request comes, asks, and gets its blocks
    def on_new_request(self, request: Any) -> None:
        state = self._state(request)
        if not request.skip_reading_prefix_cache:
            self._start(state, self._local_tokens(request))

    def _state(self, request: Any) -> _Request:
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            state = _Request(request, self._epoch, request.num_preemptions, saved=[0] * len(self.shapes))
            wanted = (request.kv_transfer_params or {}).get("max_store_tokens")
            if isinstance(wanted, int) and wanted >= 0:
                state.store_tokens_max = wanted
            self._requests[request.request_id] = state
        return state

    def _local_tokens(self, request: Any) -> int:
        """About how much the engine has itself: prefixes are evicted from their end, so their length is bisected."""
        pool, hashes = self._pool, request.block_hashes
        if pool is None or len(self.shapes) > 1 or not hashes:
            return 0
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if pool.get_cached_block(hashes[middle], [0]) is None:
                high = middle
            else:
                low = middle + 1
        step = self.promoter.step_tokens
        return int(low * self._hash_tokens // step * step)

    def _limit(self, request: Any) -> int:
        step = self.promoter.step_tokens
        confirmed = min(request.num_tokens - 1, len(request.block_hashes) * self._hash_tokens)
        return int(max(0, confirmed // step * step))

    def _start(self, state: _Request, first: int) -> None:
        if state.promotion is not None:
            self.promoter.release(state.promotion)
        request, weights = state.request, self._weights
        limit = self._limit(request)
        if not weights or not self._link.up:
            state.promotion = None
            return
        lora = self._lora(request)
        state.promotion = self.promoter.start(
            request.block_hashes[: limit // self._hash_tokens], first, limit, lambda: self._spaces(weights, lora),
            self._settings.mode == "on", self._settings.promote_wait_ms_max / 1000,
        )  # fmt: skip

    def _lora(self, request: Any) -> str:
        return ""

    def _spaces(self, weights: str, lora: str) -> Spaces:
        spaces: Spaces = []
        for group in range(len(self.shapes)):
            layouts = dict.fromkeys(shard.layouts[group] for shard in self._shards.values())
            spaces.append([self._link.space(weights, lora, layout) for layout in layouts])
        return spaces

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind the `computed` ones, None for "ask again"."""
        state = self._state(request)
        if state.load is not None:  # under this id an earlier load is still going on
            return None, False
        if request.num_preemptions != state.preemptions or state.epoch != self._epoch:
            self._again(state)
        if state.refused or request.skip_reading_prefix_cache or computed % self.promoter.step_tokens:
            return 0, False
        promotion = state.promotion
        if promotion is None or (promotion.done and computed < promotion.first):
            if promotion is not None or not self._weights:
                return 0, False
            self._start(state, computed)
            promotion = state.promotion
            if promotion is None:
                return 0, False
        now = time.monotonic()
        if not promotion.done and not self._late(promotion, now):
            return None, False
        tokens = min(promotion.usable, self._limit(request)) - computed
        if tokens <= 0 or computed < promotion.first or self._settings.mode != "on":
            return 0, False
        state.offered = state.offered or now
        if now - state.offered > OFFER_S_MAX:
            state.refused = True
            self._let_go(state)
            return 0, False
        state.computed = computed
        return tokens, True

    def _late(self, promotion: Promotion, now: float) -> bool:
        waited_ms = (now - promotion.asked) * 1000
        if waited_ms < self._settings.lookup_wait_ms_max:
            return False
        if promotion.rate(now) > self._prefill_rate and waited_ms < self._settings.promote_wait_ms_max:
            return False
        promotion.wanted = False
        return True

    def _again(self, state: _Request) -> None:
        """The request lost its blocks: it starts anew."""
        state.preemptions, state.epoch = state.request.num_preemptions, self._epoch
        state.offered = 0.0
        self._let_go(state)

    def _let_go(self, state: _Request) -> None:
        promotion, state.promotion = state.promotion, None
        if promotion is not None:
            self.promoter.release(promotion)

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """The engine has given the request its blocks, `tokens` of them to be loaded."""
        state = self._state(request)
        self._note_fresh(state, blocks, tokens)
        if not tokens:
            self._skip_stored(state)
            if state.load is None:
                self._let_go(state)
            return
        end = state.computed + tokens
        parts = []
        for group, shape in enumerate(self.shapes):
            low, high = state.computed // shape.block_tokens, end // shape.block_tokens
            chosen = [
                at for at in range(low, high)
                if not blocks.blocks[group][at].is_null and blocks.blocks[group][at].block_hash is None
            ]  # fmt: skip
            per_block = shape.block_tokens // self._hash_tokens
            parts.append(
                Part(
                    group, [blocks.blocks[group][at].block_id for at in chosen],
                    [request.block_hashes[(at + 1) * per_block - 1] for at in chosen],
                )
            )  # fmt: skip
            state.saved[group] = max(state.saved[group], high)
        transfer = Transfer(self._next_job(), request.request_id, self._epoch, self._lora(request), parts)
        state.load = transfer.job
        self._loading[transfer.job] = (state, transfer)
        self._plan.loads.append(transfer)
        self.counters.update(hits=1, hit_tokens=tokens)

    def fail_load(self, request: Any, blocks: Any) -> None:
        """After `allocated` raised: vLLM waits for the load all the same, so one is planned that brings nothing."""
        parts = [
            Part(group, [one.block_id for one in ids if not one.is_null], []) for group, ids in enumerate(blocks.blocks)
        ]
        transfer = Transfer(self._next_job(), request.request_id, -1, "", parts)
        self._requests[request.request_id].refused = True
        self._requests[request.request_id].load = transfer.job
        self._loading[transfer.job] = (self._requests[request.request_id], transfer)
        self._plan.loads.append(transfer)

    def bare_plan(self) -> Plan:
        """A plan that only has what vLLM waits for; nothing is saved in its step or after it from before."""
        plan, self._plan = self._plan, Plan()
        return Plan(epoch=self._epoch, loads=plan.loads, cancel_saves=True)

    def _note_fresh(self, state: _Request, blocks: Any, tokens: int) -> None:
        if tokens:
            for group in blocks.blocks:
                self._plan.overwritten += [
                    one.block_id for one in group if one.block_hash is None and not one.is_null
                ]  # fmt: skip

    def _skip_stored(self, state: _Request) -> None:
        """What the service has already need not be saved."""
        promotion = state.promotion
        if promotion is not None and promotion.done:
            for group, shape in enumerate(self.shapes):
                state.saved[group] = max(state.saved[group], promotion.stored // shape.block_tokens)

    def _next_job(self) -> int:
        self._job += 1
        return self._job

    # --- each step
    def plan(self, output: Any) -> Plan:
        plan, self._plan = self._plan, Plan()
        plan.epoch, plan.weights = self._epoch, self._weights
        self._note_overwritten(plan, output)
        self._measure(output.total_num_scheduled_tokens)
        if self._weights and self._link.up and self._settings.mode != "off":
            for request_id, scheduled in output.num_scheduled_tokens.items():
                state = self._requests.get(request_id)
                if state is not None:
                    request = state.request
                    parts = self._full_blocks(
                        state, request.num_computed_tokens + scheduled,
                        lambda one=request_id: output.kv_connector_block_state.resolve_block_ids(one),
                    )  # fmt: skip
                    if parts:
                        plan.saves.append(self._transfer(request, parts))
        return plan

    def _transfer(self, request: Any, parts: list[Part]) -> Transfer:
        return Transfer(self._next_job(), request.request_id, self._epoch, self._lora(request), parts)

    def _note_overwritten(self, plan: Plan, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            for shape, ids in zip(self.shapes, new.block_ids, strict=True):
                plan.overwritten += ids[new.num_computed_tokens // shape.block_tokens :]
        cached = output.scheduled_cached_reqs
        for request_id, new_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if new_ids:
                resumed = request_id in cached.resumed_req_ids
                for shape, ids in zip(self.shapes, new_ids, strict=True):
                    plan.overwritten += ids[computed // shape.block_tokens :] if resumed else ids
        for copy in output.kv_cache_block_copies or ():
            plan.overwritten.append(copy.dst_block_id)

    def _full_blocks(self, state: _Request, computed: int, block_ids: Any) -> list[Part]:
        """Blocks that are full of confirmed tokens now and were not saved. block_ids: gives the table, when needed."""
        request = state.request
        if state.epoch != self._epoch or request.num_preemptions != state.preemptions:
            return []
        end = min(computed, len(request.block_hashes) * self._hash_tokens)
        if state.store_tokens_max is not None:
            end = min(end, state.store_tokens_max)
        if self._settings.generated == "never":
            end = min(end, request.num_prompt_tokens)
        parts: list[Part] = []
        table = None
        for group, shape in enumerate(self.shapes):
            low, high = state.saved[group], end // shape.block_tokens
            if high <= low:
                continue
            table = table or block_ids()
            per_block = shape.block_tokens // self._hash_tokens
            chosen = [at for at in range(low, min(high, len(table[group]))) if table[group][at]]
            state.saved[group] = high
            if chosen:
                parts.append(
                    Part(
                        group, [table[group][at] for at in chosen],
                        [request.block_hashes[(at + 1) * per_block - 1] for at in chosen],
                    )
                )  # fmt: skip
        return parts

    def _measure(self, tokens: int) -> None:
        """How fast the engine prefills: tokens of a step by the time until the next one is planned."""
        now = time.monotonic()
        if self._last_step is not None and self._last_step[1] >= _RATE_TOKENS_MIN:
            rate = self._last_step[1] / max(now - self._last_step[0], 1e-6)
            self._prefill_rate += _RATE_WEIGHT * (rate - self._prefill_rate)
        self._last_step = (now, tokens)

    # --- what the workers say, and the end of a request
    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """The request is over; its blocks may be overwritten from the next step on."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return
        if self._weights and self._link.up and self._settings.mode != "off":
            confirmed = max(request.num_prompt_tokens, request.num_tokens - 1)
            parts = self._full_blocks(state, min(request.num_computed_tokens, confirmed), lambda: block_ids)
            if parts and state.load is None:
                self._plan.finished.append(self._transfer(request, parts))
        if state.load is None:
            self._let_go(state)

    def told(self, finished: Iterable[str], failed: Iterable[str], bad_blocks: Iterable[int], outcome: Any) -> None:
        ended, bad, wrong = set(finished), set(bad_blocks), set(failed)
        for job, (state, transfer) in list(self._loading.items()):
            if bad and any(not bad.isdisjoint(part.block_ids) for part in transfer.parts):
                state.refused = True
            if transfer.request in ended:
                del self._loading[job]
                state.load = None
                state.refused = state.refused or transfer.request in wrong
                self._let_go(state)
        if isinstance(outcome, Outcome):
            self._learn(outcome)

    def _learn(self, outcome: Outcome) -> None:
        for rank, (epoch, shard) in outcome.shards.items():
            if epoch == self._epoch:
                self._shards[rank] = shard
        self._know_weights()
        if outcome.problem:
            _LOG.error("perdure: a worker is off: %s", outcome.problem)

    def handshake(self, shards: dict[tuple[int, int], Any]) -> None:
        """What the workers hold, when the engine starts."""
        self._shards = {rank: shard for rank, shard in shards.items() if isinstance(shard, Shard)}
        self._know_weights()

    def _know_weights(self) -> None:
        if len(self._shards) < self._ranks or self._weights:
            return
        weights = identity.combined_weights({rank: one.weights for rank, one in self._shards.items()})
        self._weights = weights
        self.promoter.later(lambda: warm_up(self._spaces(weights, "")))  # connecting takes longer than a request waits

    def new_epoch(self) -> None:
        """The weights may be others from now on: nothing of before is offered, nothing of after stored as of before."""
        self._epoch += 1
        self._shards, self._weights = {}, ""
        for state in self._requests.values():
            if state.load is None:
                self._let_go(state)

    def close(self) -> None:
        for state in self._requests.values():
            self._let_go(state)
        self.promoter.close()
        self._link.close()
