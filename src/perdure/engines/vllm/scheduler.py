"""The scheduler's half: which tokens of a request can be loaded, and the plan of each step.

Contract
- Never waits: the service is asked by `promote.Promoter`, whose numbers are looked at here.
- A hit is offered only for blocks that were verified and are held in the service's memory, in whole blocks of every
  KV-cache group, behind the engine's own hit, with a token left to compute. Asking again changes nothing.
- A request waits `lookup_wait_ms_max` for an answer, and while blocks come faster than the engine computes them
  `promote_wait_ms_max`. A request whose load failed is offered nothing more; nor is one that finds no room while the
  engine stands still.
- Weights: what is stored and looked up belongs to one epoch. `new_epoch` ends it; until every worker has told the
  digest of its weights anew nothing is offered and nothing saved.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from perdure import limits
from perdure.engines.control import Watch, watched
from perdure.engines.vllm import identity
from perdure.engines.vllm.adapters import Adapters, Names
from perdure.engines.vllm.epochs import Epochs, Weights
from perdure.engines.vllm.generated import Generated
from perdure.engines.vllm.hints import carry_out, hints_of
from perdure.engines.vllm.link import Link
from perdure.engines.vllm.pace import Pace
from perdure.engines.vllm.promote import Promoter, Promotion, Shape, Spaces, adopted, warm_up
from perdure.engines.vllm.saves import RequestState, Saves
from perdure.engines.vllm.settings import Settings
from perdure.engines.vllm.stats import Tally
from perdure.engines.vllm.transfers import Outcome, Part, Plan, Shard, Transfer

_LOG = logging.getLogger("perdure.vllm")
STILL_S_MAX = 1.0  # so long nothing is computed and nothing loaded while tokens are offered: there is no room for them
SAVES_PER_STEP_MAX = 6  # about 0.1 ms; when a window slides on nothing can be put off


@dataclass(slots=True)
class _Load:
    state: RequestState
    transfer: Transfer
    tokens: int
    asked: float


class Scheduler:
    """hash_tokens: tokens per hash of a request's `block_hashes`. stores: whether anything is saved."""

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any, *, hash_tokens: int):
        self._settings = settings
        groups = identity.groups_of(vllm_config, kv_cache_config)
        self.shapes = [Shape(group.block_tokens, group.window_tokens) for group in groups]
        self._windowed = any(shape.window_tokens is not None for shape in self.shapes)
        self._hash_tokens = hash_tokens
        self._link = Link(settings, "vllm scheduler", settings.model or identity.model_name(vllm_config))
        wait_s = (settings.load_deadline_ms + settings.promote_wait_ms_max) / 1000
        view_ttl_s = min(limits.view_ttl_s_max, max(limits.view_ttl_s_default, 4 * wait_s))
        self._held_s = view_ttl_s / 2
        self._promoter = Promoter(self._link, self.shapes, hash_tokens, view_ttl_s)
        self.hashes_of = self._promoter.hashes_of
        self._generated = Generated(settings.generated)
        self._saves = Saves(self.shapes, hash_tokens, self._generated)
        self._adapters = Adapters()
        algorithm = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._hasher = get_request_block_hasher(hash_tokens, algorithm)
        self._epochs = Epochs(int(vllm_config.parallel_config.world_size))
        self.stores = True
        self.tripped = ""
        self._requests: dict[str, RequestState] = {}
        self._loading: dict[int, _Load] = {}
        self._job = 0
        self._plan = Plan()
        self.tally = Tally()
        self.saved_s: list[float] = []
        self._pace = Pace(settings.prefill_tokens_per_s)
        self._pool: Any = None
        self.epoch_ended: Callable[[], None] = lambda: None
        self._watch = Watch(watched(settings.url, settings.control))
        self._switch = self._watch.switch

    def bind_pool(self, block_pool: Any) -> None:
        """vLLM's pool: says what the engine has itself."""
        self._pool = block_pool

    @property
    def _working(self) -> bool:
        return self._epochs.known is not None and self._link.up and not self.tripped and not self._switch.off

    def _obey(self) -> None:
        """What an operator has told meanwhile."""
        told, known = self._watch.switch, self._switch
        if told is known:
            return
        self._switch = told
        if told.on != known.on:
            self.tripped = ""
        if told.weights != known.weights:
            self.new_epoch()

    # --- a request comes, asks, and gets its blocks
    def on_new_request(self, request: Any) -> None:
        self._obey()
        state = self._state(request)
        if request.skip_reading_prefix_cache:
            self.tally.add(prompt_logprobs=1)
        elif self._working:
            self._start(state, self._local_tokens(request), fresh=True)

    def _state(self, request: Any) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            state = RequestState(request, self._epochs.number, request.num_preemptions, [0] * len(self.shapes))
            state.hints = hints_of(request)
            if request.lora_request is not None:
                state.adapted = Names(request, self._hasher)
            self._requests[request.request_id] = state
        return state

    def _names(self, state: RequestState) -> list[bytes]:
        """Of all the request's full blocks. For threads of ours, while there may be many new ones."""
        if state.adapted is not None:
            state.adapted.extend()
        return state.names

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
        step = self._promoter.step_tokens
        return int(low * self._hash_tokens // step * step)

    def _limit(self, request: Any) -> int:
        step = self._promoter.step_tokens
        confirmed = min(request.num_tokens - 1, len(request.block_hashes) * self._hash_tokens)
        return int(max(0, confirmed // step * step))

    def _start(self, state: RequestState, first: int, *, fresh: bool = False) -> None:
        self._let_go(state)
        request, weights, adapter = state.request, self._epochs.known, state.request.lora_request
        limit = self._limit(request)
        if weights is None or not self._working:
            return
        self.tally.add(lookups=1)

        def names() -> list[bytes]:
            found = self._names(state)[: limit // self._hash_tokens]
            if fresh:  # here: a call of a thread costs a step 0.1 ms
                self._generated.asked(found)
            return found

        state.promotion = self._promoter.start(
            names, min(first, limit), limit, lambda: self._spaces(weights, self._adapters.find(adapter)),
            self._settings.mode == "on", self._settings.promote_wait_ms_max / 1000,
        )  # fmt: skip
        if fresh and limit <= first:  # there is nothing to promote
            self._promoter.later(names)

    def _spaces(self, weights: Weights, lora: str) -> Spaces:
        return [[self._link.space(weights.digest, lora, one) for one in alike] for alike in weights.layouts]

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind the `computed` ones, None for "ask again"."""
        state = self._state(request)
        if state.load is not None:  # under this id an earlier load is still going on
            return None, False
        if state.epoch != self._epochs.number:
            state.saved, state.due = [0] * len(self.shapes), 0
        if request.num_preemptions != state.preemptions or state.epoch != self._epochs.number:
            state.preemptions, state.epoch, state.offered = request.num_preemptions, self._epochs.number, 0.0
            self._let_go(state)
        now = time.monotonic()
        if state.refused or request.skip_reading_prefix_cache:
            return 0, False
        if self._epochs.hopeful(now):
            state.asked = state.asked or now
            if (now - state.asked) * 1000 < self._settings.lookup_wait_ms_max:
                return None, False
        if not self._working:
            return 0, False
        promotion = state.promotion
        if promotion is None or computed < promotion.first or (promotion.done and now - promotion.asked > self._held_s):
            self._start(state, computed)
            promotion = state.promotion
        if promotion is None:
            return 0, False
        if not promotion.done and not self._late(promotion, now):
            return None, False
        tokens = min(promotion.usable, self._limit(request)) - computed
        if tokens <= 0:
            return 0, False
        if self._settings.mode != "on":
            self._count_shadow(state, tokens)
            return 0, False
        state.offered = state.offered or now  # an engine that was idle before did not stand still
        if self._pace.still_s(now, state.offered) > STILL_S_MAX:
            self.tally.add(offers_declined=1)
            state.refused = True
            self._let_go(state)
            return 0, False
        state.computed = computed
        if self._is_canary(request) and tokens > self._promoter.step_tokens:
            state.canary = computed + tokens
            tokens -= self._promoter.step_tokens
        return tokens, True

    def _late(self, promotion: Promotion, now: float) -> bool:
        waited_ms = (now - promotion.asked) * 1000
        if waited_ms < self._settings.lookup_wait_ms_max:
            return False
        if promotion.rate(now) > self._pace.prefill_rate and waited_ms < self._settings.promote_wait_ms_max:
            return False
        if not promotion.stopped:
            self.tally.add(lookups_late=1)
        promotion.stopped = True
        return True

    def _count_shadow(self, state: RequestState, tokens: int) -> None:
        if not state.counted:
            state.counted = True
            saved_s = tokens / self._pace.prefill_rate
            self.tally.add(shadow_hits=1, shadow_hit_tokens=tokens, shadow_saved_seconds=saved_s)

    def _is_canary(self, request: Any) -> bool:
        return zlib.crc32(request.request_id.encode()) % 10_000 < 100 * self._settings.canary_percent

    def _let_go(self, state: RequestState) -> None:
        promotion, state.promotion = state.promotion, None
        if promotion is not None:
            self._promoter.release(promotion)

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """The engine has given the request its blocks, `tokens` of them to be loaded."""
        state = self._state(request)
        promotion = state.promotion
        if not tokens:  # another connector beside this one may load into them
            self._plan.overwritten += [
                one.block_id for table in blocks.blocks for one in table if one.block_hash is None and not one.is_null
            ]
            if promotion is not None and promotion.done:  # what the service has need not be saved
                for group, shape in enumerate(self.shapes):
                    state.saved[group] = max(state.saved[group], promotion.stored // shape.block_tokens)
            if state.load is None:
                self._let_go(state)
            return
        end = state.computed + tokens
        parts = []
        for group, (shape, table) in enumerate(zip(self.shapes, blocks.blocks, strict=True)):
            low, high = state.computed // shape.block_tokens, end // shape.block_tokens
            chosen = [at for at in range(low, high) if not table[at].is_null and table[at].block_hash is None]
            parts.append(self._saves.part(state, group, chosen, [table[at].block_id for at in chosen]))
            stored = max(high, state.canary // shape.block_tokens)
            state.saved[group] = max(state.saved[group], stored)
        for part in parts:
            self._plan.overwritten += part.block_ids
        memory = min(tokens, promotion.from_memory) if promotion is not None else 0
        state.sources = {True: memory, False: tokens - memory}
        self.tally.add(hits=1, hit_tokens_memory=memory, hit_tokens_storage=tokens - memory)
        self._add_load(state, self._transfer(request, parts), tokens)

    def _add_load(self, state: RequestState, transfer: Transfer, tokens: int) -> None:
        asked = time.monotonic() if state.promotion is None else state.promotion.asked
        state.load = transfer.job
        self._loading[transfer.job] = _Load(state, transfer, tokens, asked)
        self._plan.loads.append(transfer)

    def fail_load(self, request: Any, blocks: Any) -> None:
        """After `allocated` raised: vLLM waits for the load all the same, so one is planned that brings nothing."""
        parts = [
            Part(group, [one.block_id for one in ids if not one.is_null], []) for group, ids in enumerate(blocks.blocks)
        ]
        self._job += 1
        state = self._requests[request.request_id]
        state.refused = True
        self._add_load(state, Transfer(self._job, request.request_id, self._epochs.number, "", parts), 0)

    def sources(self, request: Any, tokens: int) -> dict[CacheHitSource, int]:
        """Which tier the tokens of the last offer came from."""
        known = self._requests[request.request_id].sources
        tiers = {CacheHitSource.HOST: known.get(True, 0), CacheHitSource.DISK: known.get(False, 0)}
        found = {tier: count for tier, count in tiers.items() if count}
        return found if sum(found.values()) == tokens else {CacheHitSource.EXTERNAL_UNSPECIFIED: tokens}

    def _transfer(self, request: Any, parts: list[Part]) -> Transfer:
        self._job += 1
        lora = self._adapters.known(request.lora_request)
        return Transfer(self._job, request.request_id, self._epochs.number, lora or "", parts)

    # --- each step
    def plan(self, output: Any) -> Plan:
        self._obey()
        plan, self._plan = self._plan, Plan()
        plan.epoch, plan.weights = self._epochs.number, self._epochs.digest
        self._saves.note_overwritten(plan, output)
        self._pace.step(output.total_num_scheduled_tokens, bool(self._loading))
        if self._working and output.num_scheduled_tokens:
            self._plan_saves(plan, output)
        return plan

    def _plan_saves(self, plan: Plan, output: Any) -> None:
        """Of SAVES_PER_STEP_MAX requests; what is left over is planned in the next steps, or when a request ends."""
        tables = output.kv_connector_block_state.resolve_block_ids
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            computed = state.request.num_computed_tokens + scheduled
            if computed < state.due or not self._may_save(state):
                continue
            if state.adapted is not None and len(state.names) < len(state.request.block_hashes):
                self._promoter.later(state.adapted.extend)
            if state.canary:
                self._check_canary(plan, state, computed, output)
            parts = self._saves.full(state, computed, partial(tables, request_id))
            if parts:
                plan.saves.append(self._transfer(state.request, parts))
                if len(plan.saves) >= SAVES_PER_STEP_MAX and not self._windowed:
                    return

    def _may_save(self, state: RequestState) -> bool:
        request = state.request
        return (
            self.stores
            and state.epoch == self._epochs.number
            and request.num_preemptions == state.preemptions
            and self._adapters.known(request.lora_request) is not None
        )

    def _check_canary(self, plan: Plan, state: RequestState, computed: int, output: Any) -> None:
        if computed >= state.canary:
            table = output.kv_connector_block_state.resolve_block_ids(state.request.request_id)
            parts = []
            for group, shape in enumerate(self.shapes):
                at = state.canary // shape.block_tokens - 1
                if at < len(table[group]) and table[group][at]:
                    parts.append(self._saves.part(state, group, [at], [table[group][at]]))
            state.canary = 0
            plan.checks.append(self._transfer(state.request, parts))

    def bare_plan(self) -> Plan:
        """A plan that only has what vLLM waits for. What else its step overwrites is not known, so saves end."""
        plan, self._plan = self._plan, Plan()
        return Plan(epoch=self._epochs.number, weights=self._epochs.digest, loads=plan.loads, cancel_saves=True)

    # --- what the workers say, and the end of a request
    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """The request is over; its blocks may be overwritten from the next step on."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return
        if self._working and self._may_save(state) and state.load is None:
            self._names(state)
            confirmed = max(request.num_prompt_tokens, request.num_tokens - 1)
            parts = self._saves.full(state, min(request.num_computed_tokens, confirmed), lambda: block_ids)
            if parts:
                self._plan.finished.append(self._transfer(request, parts))
        if state.load is None:
            self._let_go(state)
        weights = self._epochs.known
        if state.hints.any and weights is not None and self._working and state.epoch == self._epochs.number:
            self._promoter.later(partial(self._carry_out, state, weights))

    def _carry_out(self, state: RequestState, weights: Weights) -> None:
        hashes = self._names(state)[:]
        end = len(hashes) * self._hash_tokens
        carry_out(
            state.hints, self._spaces(weights, self._adapters.find(state.request.lora_request)),
            lambda space, group: adopted(space, self._promoter.hashes_of(hashes, group, 0, end)),
        )  # fmt: skip

    def told(self, finished: Iterable[str], failed: Iterable[str], bad_blocks: Iterable[int], outcome: Any) -> None:
        ended, bad, wrong = set(finished), set(bad_blocks), set(failed)
        for job, load in list(self._loading.items()):
            state = load.state
            if bad and any(not bad.isdisjoint(part.block_ids) for part in load.transfer.parts):
                state.refused = True
            if load.transfer.request in ended:
                del self._loading[job]
                state.load = None
                state.refused = state.refused or load.transfer.request in wrong
                self._let_go(state)
                if not state.refused:
                    saved_s = max(0.0, load.tokens / self._pace.prefill_rate - (time.monotonic() - load.asked))
                    self.tally.add(ttft_saved_seconds=saved_s)
                    self.saved_s.append(saved_s)
        if isinstance(outcome, Outcome):
            self._learn(outcome)

    def _learn(self, outcome: Outcome) -> None:
        for rank, (epoch, shard) in outcome.shards.items():
            self._told_weights(rank, epoch, shard)
        if outcome.problem:
            self._epochs.failed()
            _LOG.error("perdure: a worker is off: %s", outcome.problem)
        if outcome.tripped and not self.tripped:
            self.tripped = outcome.tripped
            _LOG.error("perdure: the connector is off: %s", outcome.tripped)

    def handshake(self, shards: dict[tuple[int, int], Any]) -> None:
        """What the workers hold, when the engine starts."""
        for rank, shard in shards.items():
            if isinstance(shard, Shard):
                self._told_weights(rank, 0, shard)

    def _told_weights(self, rank: tuple[int, int], epoch: int, shard: Shard) -> None:
        weights = self._epochs.known if self._epochs.told(rank, epoch, shard) else None
        if weights is not None:  # connecting takes longer than a request waits
            self._promoter.later(lambda: warm_up(self._spaces(weights, "")))

    def stored_in(self, request: Any) -> tuple[int, Callable[[], Spaces], Callable[[], list[bytes]]]:
        """Up to which token the request's blocks may be stored (0: none are), where, and by which names."""
        weights, state = self._epochs.known, self._requests.get(request.request_id)
        if weights is None or state is None or not self._working:
            return 0, list, list
        spaces = partial(lambda adapter: self._spaces(weights, self._adapters.find(adapter)), request.lora_request)
        return self._limit(request), spaces, lambda: self._names(state)[:]

    def new_epoch(self) -> None:
        """The weights may be others from now on: nothing of before is offered, nothing of after stored as of before."""
        self._epochs.end()
        self.epoch_ended()
        for state in self._requests.values():
            if state.load is None:
                self._let_go(state)

    def close(self) -> None:
        for state in self._requests.values():
            self._let_go(state)
        self._watch.close()
        self._promoter.close()
        self._link.close()
