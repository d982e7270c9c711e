"""Epochs of the engine's weights: what all ranks have loaded, from when they have told it until it may have changed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from perdure.engines.vllm.identity import combined_weights
from perdure.engines.vllm.transfers import Shard
from perdure.keys import KVLayout

DIGEST_S_MAX = 60.0  # after an epoch's start it is worth waiting for the digest


@dataclass(frozen=True, slots=True)
class Weights:
    """digest: of the weights of all ranks. layouts: per KV-cache group those of all ranks, each once."""

    digest: str
    layouts: list[list[KVLayout]]


class Epochs:
    """known: None until every rank has told its shard in this epoch."""

    def __init__(self, ranks: int):
        self._ranks = ranks
        self.number = 0
        self.known: Weights | None = None
        self._shards: dict[tuple[int, int], Shard] = {}
        self._hopeful_until = time.monotonic() + DIGEST_S_MAX

    @property
    def digest(self) -> str:
        """Empty while it is not known."""
        return "" if self.known is None else self.known.digest

    def told(self, rank: tuple[int, int], epoch: int, shard: Shard) -> bool:
        """Whether this completes what has to be known."""
        if epoch != self.number or self.known is not None:
            return False
        self._shards[rank] = shard
        if len(self._shards) < self._ranks:
            return False
        shards = list(self._shards.values())
        layouts = [list(dict.fromkeys(alike)) for alike in zip(*(shard.layouts for shard in shards), strict=True)]
        self.known = Weights(combined_weights({at: one.weights for at, one in self._shards.items()}), layouts)
        return True

    def failed(self) -> None:
        """A rank cannot tell."""
        self._hopeful_until = 0.0

    def hopeful(self, now: float) -> bool:
        """Whether it is not known, but may be soon."""
        return self.known is None and now < self._hopeful_until

    def end(self) -> None:
        self.number += 1
        self.known = None
        self._shards = {}
        self._hopeful_until = time.monotonic() + DIGEST_S_MAX
