"""Promotion: what the service has of a request's prefix is brought to its memory and held there, before it is a hit.

Contract
- `Promoter.start` returns at once; a thread asks the service. The scheduler only reads the promotion's numbers.
- `usable` counts only blocks that were verified and are held until `release`, the view's time or the end of the
  process; it may grow until `done`. It is a whole number of blocks of every KV-cache group.
- Several groups or ranks: the smallest prefix of all. A sliding window needs only the blocks it still looks at.
- An error or a service that is away is a promotion of nothing. Blocks are held at most once per promotion.
- A data node shares no memory with the engine: nothing can be held there, so what it says it has is taken for usable.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perdure import limits
from perdure.engines.vllm.affinity import unbind
from perdure.engines.vllm.link import Link
from perdure.errors import PerdureError
from perdure.keys import KeyArray, adopt_hashes

_LOG = logging.getLogger("perdure.vllm")
_THREADS = 2
_ROUND_BYTES = 32 * limits.MIB  # held between two looks at the clock
_ROUNDS_AT_ONCE = 2  # the disk does not wait for us between them
_CONNECT_S = 0.2
_ADOPTED_AT_A_TIME = 64  # 0.1 ms


@dataclass(frozen=True, slots=True)
class Shape:
    """A KV-cache group as the scheduler sees it. window_tokens: None for all of the sequence."""

    block_tokens: int
    window_tokens: int | None

    def first_needed(self, tokens: int) -> int:
        """The first block that a request with so many computed tokens still looks at."""
        if self.window_tokens is None:
            return 0
        return max(0, tokens - self.window_tokens + 1) // self.block_tokens


Spaces = list[list[Any]]
"""Per KV-cache group the keyspaces of all ranks, each once."""


@dataclass(slots=True)
class Promotion:
    """first: tokens that the engine has itself. stored: tokens up to which the service has the prefix.

    usable: tokens of the prefix that may be loaded now. from_memory: tokens of them that were in the service's memory
    already. asked: when it was started, in monotonic seconds. stopped: bring no more. wanted: hold what there is.
    """

    first: int
    limit: int
    asked: float
    stored: int = 0
    usable: int = 0
    from_memory: int = 0
    done: bool = False
    stopped: bool = False
    wanted: bool = True
    views: list[Any] = field(default_factory=list)

    def rate(self, now: float) -> float:
        """Tokens brought per second so far."""
        return max(0, self.usable - self.first) / max(now - self.asked, 1e-6)


class Promoter:
    """shapes: of the KV-cache groups. hash_tokens: tokens per hash in the list that `start` gets."""

    def __init__(self, link: Link, shapes: Sequence[Shape], hash_tokens: int, view_ttl_s: float):
        self._link, self._shapes, self._hash_tokens = link, list(shapes), hash_tokens
        self._view_ttl_s = view_ttl_s
        self.step_tokens = math.lcm(*(shape.block_tokens for shape in shapes))
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="perdure-promote", initializer=unbind)
        self._holds = ThreadPoolExecutor(
            _THREADS * _ROUNDS_AT_ONCE, thread_name_prefix="perdure-hold", initializer=unbind
        )

    def start(
        self, hashes: Callable[[], list[bytes]], first: int, limit: int, spaces: Callable[[], Spaces], hold: bool,
        within_s: float,
    ) -> Promotion:  # fmt: skip
        """hashes: gives those of the request. first, limit: tokens, whole steps. hold: not only count what there is."""
        promotion = Promotion(first, limit, time.monotonic(), stored=first, usable=first)
        if limit <= first:
            promotion.done = True
        else:
            self._threads.submit(self._run, promotion, hashes, spaces, hold, promotion.asked + within_s)
        return promotion

    def later(self, call: Callable[[], object]) -> None:
        """Have a thread do it. After `close` it is not done."""
        try:
            self._threads.submit(self._quietly, call)
        except RuntimeError:
            return

    def release(self, promotion: Promotion) -> None:
        promotion.wanted = False
        if promotion.done and promotion.views:
            self.later(lambda: _let_go(promotion))

    def close(self) -> None:
        for threads in (self._threads, self._holds):
            threads.shutdown(wait=False, cancel_futures=True)

    def _quietly(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a cache failure never fails a request
            self._link.failed(error)

    def _run(
        self, promotion: Promotion, hashes: Callable[[], list[bytes]], spaces: Callable[[], Spaces], hold: bool,
        until: float,
    ) -> None:  # fmt: skip
        try:
            if promotion.wanted:
                self._promote(promotion, hashes(), spaces(), hold, until)
                self._link.worked()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a miss
            self._link.failed(error)
        finally:
            promotion.done = True
            if not promotion.wanted:
                _let_go(promotion)

    def _promote(self, promotion: Promotion, hashes: list[bytes], spaces: Spaces, hold: bool, until: float) -> None:
        for space in spaces[0]:
            space.begin(time.monotonic() + _CONNECT_S)
        keys = [
            [adopted(space, self.hashes_of(hashes, group, 0, promotion.limit)) for space in group_spaces]
            for group, group_spaces in enumerate(spaces)
        ]
        end = self._stored(promotion, keys, spaces)
        promotion.stored = end
        if not hold or not self._link.shares_memory:
            promotion.usable = end
            return
        single = len(spaces) == 1 and len(spaces[0]) == 1 and self._shapes[0].window_tokens is None
        if single:
            self._hold_growing(promotion, keys[0][0], spaces[0][0], end, until)
        elif end > promotion.first:
            self._hold_all(promotion, keys, spaces, end, until)

    def hashes_of(self, hashes: Sequence[bytes], group: int, first: int, end: int) -> list[bytes]:
        """Hash of each of a group's blocks between two positions in tokens: of the last part of each."""
        per_block = self._shapes[group].block_tokens // self._hash_tokens
        low, high = first // self._hash_tokens, end // self._hash_tokens
        return list(hashes[low + per_block - 1 : high : per_block])

    def _stored(self, promotion: Promotion, keys: list[list[KeyArray]], spaces: Spaces) -> int:
        """Tokens up to which every group and rank has what it needs."""
        first, end = promotion.first, promotion.limit
        for shape, group_keys, group_spaces in zip(self._shapes, keys, spaces, strict=True):
            if shape.window_tokens is None:
                step = shape.block_tokens
                for named, space in zip(group_keys, group_spaces, strict=True):
                    end = min(end, first + step * int(space.lookup(named[first // step : end // step])))
        end -= (end - first) % self.step_tokens
        for shape, group_keys, group_spaces in zip(self._shapes, keys, spaces, strict=True):
            if shape.window_tokens is not None and end > first:
                low = first // shape.block_tokens
                there = np.ones(end // shape.block_tokens, bool)
                for named, space in zip(group_keys, group_spaces, strict=True):
                    there[low:] &= space.present(named[low : end // shape.block_tokens])
                end = self._windowed(shape, there, first, end)
        return end

    def _windowed(self, shape: Shape, there: Any, first: int, end: int) -> int:
        """The longest prefix whose window is all there."""
        while end > first:
            low = max(first // shape.block_tokens, shape.first_needed(end))
            if there[low : end // shape.block_tokens].all():
                return end
            end -= self.step_tokens
        return first

    def _hold_growing(self, promotion: Promotion, keys: KeyArray, space: Any, end: int, until: float) -> None:
        """One group, one rank: each round makes the prefix longer."""
        step, size = self._shapes[0].block_tokens, space.layout.block_bytes
        rounds = _rounds(promotion.first // step, end // step, size)
        asked: deque[Future[tuple[int, int]]] = deque()
        try:
            for number, (low, high) in enumerate(rounds):
                for first, behind in rounds[number + len(asked) : number + _ROUNDS_AT_ONCE]:
                    asked.append(self._holds.submit(self._hold, promotion, keys[first:behind], space, until))
                usable, memory = asked.popleft().result()
                promotion.from_memory += memory * step
                promotion.usable = (low + usable) * step
                if usable < high - low or promotion.stopped or not promotion.wanted:
                    return
        finally:  # what was asked for beyond that is let go with the rest
            for future in asked:
                if not future.cancel():
                    wait([future])

    def _hold_all(
        self, promotion: Promotion, keys: list[list[KeyArray]], spaces: Spaces, end: int, until: float
    ) -> None:
        """Several groups or ranks: all that the prefix of `end` tokens needs, or nothing."""
        memory = promotion.limit
        for shape, group_keys, group_spaces in zip(self._shapes, keys, spaces, strict=True):
            step = shape.block_tokens
            start = max(promotion.first // step, shape.first_needed(end))
            for named, space in zip(group_keys, group_spaces, strict=True):
                held = 0
                for low, high in _rounds(start, end // step, space.layout.block_bytes):
                    usable, from_memory = self._hold(promotion, named[low:high], space, until)
                    held += from_memory
                    if usable < high - low or promotion.stopped or not promotion.wanted:
                        return
                memory = min(memory, held * step)
        promotion.from_memory, promotion.usable = memory, end

    def _hold(self, promotion: Promotion, keys: KeyArray, space: Any, until: float) -> tuple[int, int]:
        """(leading blocks that are held now, how many of the blocks were in memory already)."""
        left_s = until - time.monotonic()
        if left_s <= 0:
            return 0, 0
        view = space.view(keys, deadline_s=left_s, ttl_s=self._view_ttl_s)
        promotion.views.append(view)
        view.blocks = []  # the worker reads them through maps of its own
        return view.report.usable, view.report.from_memory


def adopted(space: Any, hashes: Sequence[bytes]) -> KeyArray:
    """As `adopt_hashes`; lets the engine's thread go first every now and then."""
    parts = []
    for at in range(0, len(hashes), _ADOPTED_AT_A_TIME):
        parts.append(adopt_hashes(space.digest, hashes[at : at + _ADOPTED_AT_A_TIME]))
        time.sleep(0)
    return np.concatenate(parts)


def _rounds(low: int, high: int, block_bytes: int) -> list[tuple[int, int]]:
    step = max(1, min(limits.message_keys_max, _ROUND_BYTES // block_bytes))
    return [(at, min(at + step, high)) for at in range(low, high, step)]


def _let_go(promotion: Promotion) -> None:
    views, promotion.views = promotion.views, []
    for view in views:
        try:
            view.release()
        except PerdureError:
            continue


def warm_up(spaces: Spaces) -> None:
    """Ask for nothing, so that the first request finds the keyspaces open and the service's memory mapped."""
    nobody = np.zeros((1, limits.key_bytes), np.uint8)
    for group in spaces:
        for space in group:
            space.lookup(nobody)
