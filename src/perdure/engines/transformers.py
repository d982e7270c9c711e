"""KV prefixes of Hugging Face transformers models: restored into a DynamicCache, stored from one, block by block.

    space = keyspace_for(store, model, tenant="acme")
    prefixes = PrefixCache(space, model)
    restored = prefixes.restore(prompt_ids)                      # the longest stored prefix, at least one token short
    out = model(input_ids=prompt[:, restored.tokens :], cache=restored.cache)
    prefixes.store(prompt_ids, restored.cache, restored)         # what was not stored yet

Contract
- The bytes that come back are the bytes that were stored, in any dtype: what the model computes on them equals, bit
  for bit, what it would compute had the cache never left memory. A prefill that is split at other places differs in
  the last bits of its floats (up to 3e-5 in fp32 logits of SmolLM2-135M), with or without a store.
- Missing, corrupt and late blocks shorten the prefix; a few single ones inside it are computed again and the blocks
  behind them still used, because a block's key says every token before it. Nothing unverified reaches the cache.
- One sequence at a time, positions from 0, no padding, token ids only (no images). Anything else is InvalidArgument.
- Never: patching transformers, changing the model, storing a partial block, trusting bytes by name only.

Blocks are read into contiguous memory and scattered from there into per-layer tensors, the copy of one batch beside the
read of the next. Reading straight into the 180 pieces that a block of SmolLM2 has in those tensors was measured: 330 ms
against 145 + 30 ms for 4,192 tokens in fp32 at 16 tokens per block, 200 against 130 + 19 ms at 32.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from perdure import limits
from perdure.catalog.api import KeyArray, Lease
from perdure.engines.model_identity import (
    SUPPORTED,
    cache_argument,
    geometry_of,
    refuse_cache,
    weights_digest,
    weights_stamp,
)
from perdure.errors import InvalidArgument
from perdure.io.memory import aligned_buffer
from perdure.keyspace import Keyspace
from perdure.reports import ReadReport, WriteReport
from perdure.segments.landing import BlockStatus

if TYPE_CHECKING:
    from perdure.service.client import RemoteStore
    from perdure.service.remote import RemoteKeyspace
    from perdure.store import Store

BLOCK_TOKENS = 16
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Key and value tensor of each layer, [1, heads, tokens, dim]."""

HOLES_MAX = 4  # blocks computed again inside a prefix: each costs a forward of block_tokens and a copy of the cache


def keyspace_for(
    store: Store | RemoteStore,
    model: Any,
    *,
    tenant: str,
    model_id: str | None = None,
    block_tokens: int = BLOCK_TOKENS,
    weights: str | None = None,
    codec: str | None = None,
) -> Keyspace | RemoteKeyspace:
    """The keyspace of a loaded model's KV, in a store of this process or of a service (`perdure.connect`).

    model_id: default is the path or name it was loaded from, without directories. weights: digest of the loaded weights
    ("algorithm:value") if the caller knows it; else they are hashed. Raises InvalidArgument for models not supported.
    """
    layout = geometry_of(model).layout(block_tokens)  # first: it refuses what is not supported
    name = model_id or str(getattr(model.config, "_name_or_path", "")).rstrip("/").rpartition("/")[2]
    return store.keyspace(
        model=name or type(model).__name__,
        weights=weights or weights_digest(model),
        layout=layout,
        tenant=tenant,
        codec=codec,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """What `PrefixCache.restore` brought back.

    cache: holds the KV of the first `tokens` tokens; pass it to the model together with the tokens after them.
    keys, held: the prefix's blocks, and which of them are in the store, bool (n,). recomputed: positions of blocks that
    are in the cache but were computed, not read. report: of the read, over every block that was asked for.
    """

    cache: DynamicCache
    tokens: int
    keys: KeyArray
    held: NDArray[np.bool_]
    recomputed: tuple[int, ...]
    report: ReadReport

    def fork(self) -> DynamicCache:
        """Another cache of the first `tokens` tokens over the same memory, to continue them in another way.

        Costs nothing: DynamicCache never writes into the tensors it has, it replaces them by longer ones.
        """
        end = self.tokens
        return _cache_of([(layer.keys[:, :, :end], layer.values[:, :, :end]) for layer in self.cache.layers])


class PrefixCache:
    """Prefixes of one loaded model in one keyspace. Thread-safe as far as the model is.

    The keyspace must say what `model` has loaded, as `keyspace_for` makes it. After weights were changed in place every
    call raises InvalidArgument: make a new keyspace and a new PrefixCache (the old blocks stay and are found again
    when the old weights return).
    """

    def __init__(self, space: Keyspace | RemoteKeyspace, model: Any):
        self.space, self.model = space, model
        self.geometry = geometry_of(model)
        wanted = self.geometry.layout(space.layout.block_tokens)
        if space.layout != wanted:
            raise InvalidArgument(f"the keyspace's layout is {space.layout}, this model's cache is {wanted}")
        self._stamp = weights_stamp(model)

    def restore(
        self, token_ids: ArrayLike | torch.Tensor, *, deadline_s: float | None = None, holes_max: int = HOLES_MAX
    ) -> Restored:
        """The longest usable prefix of a prompt; at least its last token is left for the model to compute.

        token_ids: the whole prompt, shape (n,) or (1, n). deadline_s: seconds from now for reading; blocks that are not
        there by then shorten the prefix. holes_max: blocks inside the prefix that may be computed again.
        """
        self._refuse_changed_weights()
        tokens = token_array(token_ids)
        keys = self.space.chain(tokens[:-1])[: limits.batch_blocks_max]
        extent = self._extent(keys, holes_max)
        pairs = [self._empty(layer, extent) for layer in range(self.geometry.layers)]
        report = self._read(keys[:extent], pairs, deadline_s)
        found = report.statuses == BlockStatus.FOUND
        count = _usable(found, holes_max)
        holes = tuple(np.flatnonzero(~found[:count]).tolist())
        step = self.space.layout.block_tokens
        for hole in holes:
            self._compute(tokens, hole * step, (hole + 1) * step, pairs)
        length = count * step
        cache = _cache_of([(k[:, :, :length], v[:, :, :length]) for k, v in pairs] if count else [])
        return Restored(cache, length, keys[:count], found[:count], holes, report)

    def store(
        self,
        token_ids: ArrayLike | torch.Tensor,
        cache: DynamicCache,
        restored: Restored | None = None,
        *,
        durability: str = "session",
        ttl_s: float | None = None,
        deadline_s: float | None = None,
        lease: Lease | None = None,
    ) -> WriteReport:
        """Store the full blocks of a sequence whose KV is in `cache`; the partial tail is never stored.

        token_ids: the tokens that are confirmed, from the first one on. The cache may be shorter (the last token that
        was sampled has no KV yet) or longer (speculation): only what both have is stored. restored: what the sequence
        began with; its blocks that came from the store are not written again. lease: from `space.reserve`; if it was
        lost, StaleFence is raised. The report is about the blocks written.
        """
        self._refuse_changed_weights()
        tokens = token_array(token_ids)
        length = self._check_cache(cache)
        keys = self.space.chain(tokens[: min(length, len(tokens))])[: limits.batch_blocks_max]
        wanted = np.ones(len(keys), bool)
        if restored is not None:
            both = min(len(keys), len(restored.keys))
            wanted[:both] = ~restored.held[:both] | (keys[:both] != restored.keys[:both]).any(axis=1)
        return self._write(keys, cache, np.flatnonzero(wanted), durability, ttl_s, deadline_s, lease)

    # --- memory
    def _batches(self, positions: NDArray[np.intp]) -> list[NDArray[np.intp]]:
        step = max(1, limits.adapter_staging_bytes_max // self.space.layout.block_bytes)
        return [positions[at : at + step] for at in range(0, len(positions), step)]

    def _empty(self, layer: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value tensors of one layer for so many blocks, as DynamicCache has them: [1, heads, tokens, dim]."""
        geometry, length = self.geometry, blocks * self.space.layout.block_tokens
        keys, values = (
            torch.empty((1, geometry.kv_heads, length, dim), dtype=geometry.dtype, device=geometry.devices[layer])
            for dim in (geometry.key_dim, geometry.value_dim)
        )
        return keys, values

    def _views(self, staging: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values inside staged blocks: [heads, blocks, block_tokens, dim], not contiguous."""
        geometry, step = self.geometry, self.space.layout.block_tokens
        per_key, per_value = (geometry.kv_heads * step * dim for dim in (geometry.key_dim, geometry.value_dim))
        at = layer * (per_key + per_value)
        keys = staging[:, at : at + per_key].unflatten(1, (geometry.kv_heads, step, geometry.key_dim))
        values = staging[:, at + per_key : at + per_key + per_value].unflatten(
            1, (geometry.kv_heads, step, geometry.value_dim)
        )
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _staging(self, blocks: int) -> tuple[NDArray[np.uint8], torch.Tensor]:
        """Page-aligned memory for blocks, as bytes and as elements [blocks, elements per block]."""
        memory = aligned_buffer(blocks * self.space.layout.block_bytes)
        return memory, torch.from_numpy(memory).view(self.geometry.dtype).view(blocks, -1)

    def _gather(self, cache: DynamicCache, positions: NDArray[np.intp], staging: torch.Tensor) -> None:
        """Copy blocks of a cache into staged blocks."""
        step, first, end = self.space.layout.block_tokens, int(positions[0]), int(positions[-1]) + 1
        chosen = None if end - first == len(positions) else torch.from_numpy(positions)
        for number, layer in enumerate(cache.layers):
            for source, view in zip((layer.keys, layer.values), self._views(staging, number), strict=True):
                whole = source[0, :, : end * step].unflatten(1, (-1, step))
                view.copy_(whole[:, first:end] if chosen is None else whole[:, chosen.to(whole.device)])

    def _scatter(self, staging: torch.Tensor, positions: NDArray[np.intp], pairs: Pairs) -> None:
        """Copy staged blocks, neighbours in the sequence, into per-layer tensors."""
        first, end = int(positions[0]), int(positions[-1]) + 1
        for number, pair in enumerate(pairs):
            for tensor, view in zip(pair, self._views(staging, number), strict=True):
                tensor[0].unflatten(1, (-1, self.space.layout.block_tokens))[:, first:end].copy_(view)

    def _write(
        self,
        keys: KeyArray,
        cache: DynamicCache,
        positions: NDArray[np.intp],
        durability: str,
        ttl_s: float | None,
        deadline_s: float | None,
        lease: Lease | None,
    ) -> WriteReport:
        """Gather one batch while the last one is written."""
        report, started = WriteReport(np.zeros(0, np.uint8), 0, 0, 0, 0.0), time.monotonic()
        parts = self._batches(positions)
        staged = [self._staging(len(part)) for part in parts[:2]]
        writing: Future[WriteReport] | None = None
        for number, part in enumerate(parts):
            memory, staging = staged[number % 2]
            self._gather(cache, part, staging[: len(part)])
            if writing is not None:
                _join(report, writing.result())
            writing = self.space.submit_write(
                keys[part], memory[: len(part) * self.space.layout.block_bytes], durability=durability, ttl_s=ttl_s,
                deadline_s=_left(deadline_s, started), lease=lease,
            )  # fmt: skip
        if writing is not None:
            _join(report, writing.result())
        report.seconds = time.monotonic() - started
        return report

    # --- restoring
    def _extent(self, keys: KeyArray, holes_max: int) -> int:
        """How many leading blocks are worth asking for: past up to `holes_max` holes, if there is something behind."""
        extent = self.space.lookup(keys)
        for hole in range(extent + 1, extent + 1 + holes_max):
            behind = self.space.lookup(keys[hole:]) if hole < len(keys) else 0
            if behind:
                return hole + self._extent(keys[hole:], holes_max - (hole - extent))
        return extent

    def _read(self, keys: KeyArray, pairs: Pairs, deadline_s: float | None) -> ReadReport:
        """Scatter one batch while the next one is read. The report's seconds are those of both."""
        report, started = ReadReport(np.zeros(0, np.uint8), 0, 0, 0.0), time.monotonic()
        parts = self._batches(np.arange(len(keys)))
        staged = [self._staging(len(part)) for part in parts[:2]]

        def submit(number: int) -> Future[ReadReport]:
            part, memory = parts[number], staged[number % 2][0]
            into = memory[: len(part) * self.space.layout.block_bytes]
            return self.space.submit_read(keys[part], into, deadline_s=_left(deadline_s, started))

        reading = submit(0) if parts else None
        for number, part in enumerate(parts):
            following = submit(number + 1) if number + 1 < len(parts) else None
            assert reading is not None
            got, reading = reading.result(), following
            if got.bytes:
                self._scatter(staged[number % 2][1][: len(part)], part, pairs)
            _join(report, got)
        report.seconds = time.monotonic() - started
        return report

    def _compute(self, tokens: NDArray[np.uint32], first: int, end: int, pairs: Pairs) -> None:
        """Fill positions first..end of `pairs` by a forward over their tokens, on top of the positions before them."""
        with torch.inference_mode():
            cache = _cache_of([(k[:, :, :first], v[:, :, :first]) for k, v in pairs] if first else [])
            module = self.model.base_model
            ids = torch.from_numpy(tokens[first:end].astype(np.int64))[None].to(self.model.device)
            module(input_ids=ids, use_cache=True, **{cache_argument(module): cache})
            for layer, (keys, values) in zip(cache.layers, pairs, strict=True):
                keys[:, :, first:end] = layer.keys[:, :, first:end]
                values[:, :, first:end] = layer.values[:, :, first:end]

    # --- checks
    def _refuse_changed_weights(self) -> None:
        if weights_stamp(self.model) != self._stamp:
            raise InvalidArgument(
                "the model's weights were changed after this PrefixCache was made; make a new keyspace_for() and "
                "PrefixCache, or KV of other weights would be mixed"
            )

    def _check_cache(self, cache: DynamicCache) -> int:
        """Tokens in the cache. Raises InvalidArgument for what is not a full cache of this model for one sequence."""
        refuse_cache(cache)
        geometry = self.geometry
        if len(cache.layers) != geometry.layers or not all(layer.is_initialized for layer in cache.layers):
            raise InvalidArgument(
                f"the cache has {len(cache.layers)} layers, some maybe empty; {geometry.layers} needed"
            )
        length = int(cache.get_seq_length())
        for number, layer in enumerate(cache.layers):
            for tensor, dim in ((layer.keys, geometry.key_dim), (layer.values, geometry.value_dim)):
                if tensor.shape[0] != 1:
                    raise InvalidArgument(f"the cache holds {tensor.shape[0]} sequences; store them one at a time")
                if tuple(tensor.shape) != (1, geometry.kv_heads, length, dim) or tensor.dtype != geometry.dtype:
                    raise InvalidArgument(
                        f"layer {number} of the cache is {tuple(tensor.shape)} {tensor.dtype}, this model's is "
                        f"{(1, geometry.kv_heads, length, dim)} {geometry.dtype}; supported: {SUPPORTED}"
                    )
        return length


def token_array(token_ids: ArrayLike | torch.Tensor) -> NDArray[np.uint32]:
    """Token ids of one sequence, uint32 (n,). Raises InvalidArgument."""
    tokens = token_ids.detach().cpu().numpy() if isinstance(token_ids, torch.Tensor) else np.asarray(token_ids)
    if tokens.ndim == 2:
        if len(tokens) != 1:
            raise InvalidArgument(f"{len(tokens)} sequences in one call: one at a time, shape (n,) or (1, n)")
        tokens = tokens[0]
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise InvalidArgument(f"token ids must be integers of shape (n,) or (1, n), got {tokens.dtype} {tokens.shape}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= 2**32:
        raise InvalidArgument("token ids must be in 0..2^32-1")
    return tokens.astype(np.uint32)


def _left(deadline_s: float | None, started: float) -> float | None:
    """What is left of a deadline that was given at `started`."""
    return None if deadline_s is None else max(0.0, deadline_s - (time.monotonic() - started))


def _usable(found: NDArray[np.bool_], holes_max: int) -> int:
    """Blocks up to the last one that is reached over at most `holes_max` holes; a hole with nothing behind ends it."""
    reached = np.flatnonzero(found & (np.cumsum(~found) <= holes_max))
    return int(reached[-1]) + 1 if len(reached) else 0


def _cache_of(pairs: Pairs) -> DynamicCache:
    """A DynamicCache over tensors [1, heads, tokens, dim], without copying them."""
    cache = DynamicCache()
    for keys, values in pairs:
        layer = DynamicLayer()
        layer.update(keys[:, :, :0], values[:, :, :0])  # sets up device and dtype, copies nothing
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _join(report: Any, part: Any) -> None:
    """Append the report of the next batch of one call."""
    at = len(report.statuses)
    report.statuses = np.concatenate([report.statuses, part.statuses])
    report.bytes += part.bytes
    if isinstance(part, ReadReport):
        report.usable += part.usable if report.usable == at else 0
        report.from_memory += part.from_memory
        report.problems |= {at + position: why for position, why in part.problems.items()}
        return
    report.stored += part.stored
    report.stored_bytes += part.stored_bytes
    report.reasons |= {at + position: why for position, why in part.reasons.items()}
