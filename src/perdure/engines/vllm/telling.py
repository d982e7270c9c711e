"""What routers are told of the blocks this engine's requests have in the service: KV events (`perdure.engines.events`).

Contract
- A request that ended is looked up a moment later by a thread of this module: blocks that are stored for every rank are
  told as stored, those that were told once and are gone, as removed. So no event comes before its block. Blocks that
  another engine stores or the store forgets are told when the next request of theirs ends here.
- They go into vLLM's own stream where it publishes one (`--kv-events-config`), else to the address `events` of the
  connector's settings; a new epoch of the weights removes all that was told.
- A request with an adapter is told under vLLM's own hashes and the adapter's name, as vLLM does; it is looked up by the
  adapter's content. Requests with media or prompt embeds are not told: their tokens do not name what is stored.
  `WAITING_MAX` requests wait at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perdure.engines.events import Event, EventPublisher, StorageEvents, as_vllm
from perdure.engines.vllm.affinity import unbind
from perdure.engines.vllm.promote import Shape, Spaces
from perdure.engines.vllm.settings import Settings
from perdure.keys import adopt_hashes

_LOG = logging.getLogger("perdure.vllm")
LOOKS_S = (0.5, 5.0)  # after the request's end: saves are behind it
WAITING_MAX = 1024
_CLOSE_S = 2.0
HashesOf = Callable[[Sequence[bytes], int, int, int], list[bytes]]


@dataclass(slots=True)
class _Ended:
    """A request that is over, and when to look for its blocks. hashes: by which they are told. names: in the store."""

    hashes: list[bytes]
    names: Callable[[], list[bytes]]
    tokens: list[int]
    limit: int
    salt: str | None
    lora: str | None
    spaces: Callable[[], Spaces]
    epoch: int
    due: float
    looks: int = 0


class Teller:
    """publisher: None if vLLM publishes what `take` returns. hashes_of: as of `Promoter`."""

    def __init__(self, shapes: Sequence[Shape], hashes_of: HashesOf, publisher: EventPublisher | None, *, ints: bool):
        self._shapes, self._hashes_of, self._publisher = list(shapes), hashes_of, publisher
        self._events = [StorageEvents(shape.block_tokens, int_hashes=ints) for shape in shapes]
        self._changed = threading.Condition()
        self._waiting: deque[_Ended] = deque()
        self._epoch = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="perdure-tell", daemon=True)
        self._thread.start()

    def ended(
        self, request: Any, limit: int, spaces: Callable[[], Spaces], names: Callable[[], list[bytes]] | None = None
    ) -> None:
        """limit: tokens up to which its blocks are full and confirmed. names: of its blocks in the store, if they are
        not the request's hashes."""
        if not limit or request.mm_features or request.prompt_embeds is not None:
            return
        tokens, hashes, adapter = list(request.all_token_ids[:limit]), request.block_hashes[:], request.lora_request
        lora = None if adapter is None else str(adapter.lora_name)
        with self._changed:
            if len(self._waiting) < WAITING_MAX:
                due = time.monotonic() + LOOKS_S[0]
                self._waiting.append(_Ended(
                    hashes, names or (lambda: hashes), tokens, limit, request.cache_salt, lora, spaces, self._epoch, due
                ))  # fmt: skip
                self._changed.notify_all()

    def new_epoch(self) -> None:
        with self._changed:
            self._epoch += 1
            self._waiting.clear()
            for events in self._events:
                events.cleared()
        self._publish()

    def take(self) -> list[Any]:
        """For vLLM's own stream."""
        return as_vllm(self._taken()) if self._publisher is None else []

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        if self._publisher is not None:
            self._publisher.close()

    def _taken(self) -> list[Event]:
        return [event for events in self._events for event in events.take()]

    def _publish(self) -> None:
        if self._publisher is not None:
            self._publisher.publish(self._taken())

    # --- the thread
    def _next(self) -> _Ended | None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                first = min(self._waiting, key=lambda one: one.due, default=None)
                if first is not None and first.due <= now:
                    self._waiting.remove(first)
                    return first
                self._changed.wait(None if first is None else first.due - now)
        return None

    def _work(self) -> None:
        unbind()
        while (one := self._next()) is not None:
            try:
                complete = self._look(one)
            except Exception as error:  # noqa: BLE001 - whatever it is, routers are told less
                _LOG.warning("perdure: KV events are missing: %s", error)
                complete = False
            self._publish()
            one.looks += 1
            with self._changed:
                if not complete and one.looks < len(LOOKS_S) and one.epoch == self._epoch:
                    one.due = time.monotonic() + LOOKS_S[one.looks]
                    self._waiting.append(one)

    def _look(self, one: _Ended) -> bool:
        """Whether all of its blocks are stored."""
        complete = True
        for group, (shape, spaces) in enumerate(zip(self._shapes, one.spaces(), strict=True)):
            names, told = (self._hashes_of(hashes, group, 0, one.limit) for hashes in (one.names(), one.hashes))
            there = np.ones(len(names), bool)
            for space in spaces:
                there &= space.present(adopt_hashes(space.digest, names))
            with self._changed:
                if one.epoch != self._epoch:
                    return True
                self._tell(one, group if len(self._shapes) > 1 else None, self._events[group], told, there)
            needed = 0 if shape.window_tokens is None else shape.first_needed(one.limit)
            complete = complete and bool(there[needed:].all())
        return complete

    def _tell(self, one: _Ended, group: int | None, events: StorageEvents, told: list[bytes], there: Any) -> None:
        size = len(one.tokens) // max(1, len(told))
        events.missing([name for name, present in zip(told, there, strict=True) if not present], group=group)
        edges = np.flatnonzero(np.diff(np.concatenate(([False], there, [False])).astype(np.int8)))
        for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            events.stored(
                told[low:high], one.tokens[low * size : high * size], parent=told[low - 1] if low else None,
                lora=one.lora, salt=one.salt, group=group,
            )  # fmt: skip


def teller_of(settings: Settings, vllm_config: Any, shapes: Sequence[Shape], hashes_of: HashesOf) -> Teller | None:
    """None if nobody wants events. Raises EventsUnavailable if `events` cannot be bound."""
    from vllm import envs

    config = vllm_config.kv_events_config
    publisher = None
    if config is None or not config.enable_kv_cache_events:
        if not settings.events:
            return None
        publisher = EventPublisher(
            settings.events, replay_endpoint=settings.events_replay or None,
            rank=vllm_config.parallel_config.data_parallel_rank,
        )  # fmt: skip
    return Teller(shapes, hashes_of, publisher, ints=bool(envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES))
