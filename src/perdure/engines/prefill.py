"""Prefill of a shared prefix with a transformers model, by one of all who want it at once.

    made = prefill_once(prefixes, prompt_ids, wait_s=60)
    out = model(input_ids=prompt[:, made.restored.tokens :], cache=made.restored.cache)

Contract
- Of all processes that ask for the same prefix one computes what is not stored, and stores it piece by piece; the
  others wait, at most `wait_s`, and restore it. If that one dies, another goes on from the last piece it stored.
- A cache failure never fails a request: without a service, or after `wait_s`, whoever asks computes by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from perdure import limits
from perdure.catalog.api import KeyArray, Lease
from perdure.engines.model_identity import cache_argument
from perdure.engines.transformers import PrefixCache, Restored, token_array
from perdure.errors import CatalogError, ServiceBusy, ServiceUnavailable, StaleFence

STEP_TOKENS = 512


class Prefilled(NamedTuple):
    """restored: the prefix's full blocks, in a cache. computed_tokens: how many of them this process computed."""

    restored: Restored
    computed_tokens: int


def prefill_once(
    prefixes: PrefixCache,
    token_ids: ArrayLike | torch.Tensor,
    *,
    wait_s: float,
    step_tokens: int = STEP_TOKENS,
    note: Callable[[int], None] | None = None,
) -> Prefilled:
    """All full blocks of `token_ids` but for the last token, restored or computed; at least that token is left.

    step_tokens: stored after so many (rounded to blocks). note: called with the length of the prefix after each piece
    that was computed and stored. Raises InvalidArgument as `PrefixCache.restore` does.
    """
    tokens = token_array(token_ids)
    lease = _reserved(prefixes, prefixes.space.chain(tokens[:-1]), wait_s)
    try:
        return _completed(prefixes, tokens, prefixes.restore(tokens), lease, step_tokens, note)
    finally:
        if lease is not None:
            _end(prefixes, lease)


def _reserved(prefixes: PrefixCache, keys: KeyArray, wait_s: float) -> Lease | None:
    """The right to compute what is missing; None: somebody else has done it, or it is not to be had in time."""
    if not len(keys):
        return None
    ttl_s = min(max(wait_s, limits.lease_ttl_s_default), limits.lease_ttl_s_max)
    try:
        return prefixes.space.reserve(keys, ttl_s=ttl_s, wait_s=wait_s)
    except (ServiceUnavailable, ServiceBusy, CatalogError):
        return None


def _end(prefixes: PrefixCache, lease: Lease) -> None:
    try:
        prefixes.space.end_lease(lease)
    except (ServiceUnavailable, CatalogError):
        return  # it ends with the connection, or by its time


def _completed(
    prefixes: PrefixCache,
    tokens: NDArray[np.uint32],
    restored: Restored,
    lease: Lease | None,
    step_tokens: int,
    note: Callable[[int], None] | None,
) -> Prefilled:
    """Compute what is missing at the end, in pieces, each stored before the next one."""
    block = prefixes.space.layout.block_tokens
    step = max(1, step_tokens // block) * block
    keys = prefixes.space.chain(tokens[:-1])
    computed = len(restored.recomputed) * block
    module = prefixes.model.base_model
    while restored.tokens < len(keys) * block:
        end = min(restored.tokens + step, len(keys) * block)
        ids = torch.from_numpy(tokens[restored.tokens : end].astype(np.int64))[None].to(prefixes.model.device)
        with torch.inference_mode():
            module(input_ids=ids, use_cache=True, **{cache_argument(module): restored.cache})
        computed += end - restored.tokens
        try:
            prefixes.store(tokens[:end], restored.cache, restored, lease=lease)
        except StaleFence:
            lease = None  # it was too slow, and somebody else does it now; for this answer it goes on
        held = np.concatenate([restored.held, np.ones(end // block - len(restored.held), bool)])
        restored = replace(restored, tokens=end, keys=keys[: end // block], held=held)
        if note is not None:
            note(end)
    return Prefilled(restored, computed)
