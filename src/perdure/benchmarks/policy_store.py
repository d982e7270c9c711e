"""Replay of a trace through a real store: its lookups, recency, hints, reclaim and admission, with small blocks.

Contract
- A block of 512 tokens is stood in for by 4 KiB of payload (8 KiB on the disk). Its price is that of the real one: see
  `by_value`.
- The clock is the trace's, so recency and admission see the times of the trace.
- Without a DRAM tier nothing is read: what a lookup found is noted as used, as the service's clients do. With one,
  every found block is read, so that both tiers do what they do.
- Bytes are counted in blocks: those written, and those that reclaim copied.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

import numpy as np

import perdure
from perdure import limits
from perdure.benchmarks.policy_sim import Hits
from perdure.benchmarks.policy_traces import BLOCK_TOKENS, Trace
from perdure.benchmarks.target import WEIGHTS, WrongResult
from perdure.clock import FakeClock
from perdure.segments.format import record_bytes

BLOCK_BYTES: Final = 4 * limits.KIB
RECORD_BYTES: Final = record_bytes(BLOCK_BYTES)
_KEYS_SEED: Final = 11


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """What a block of the stand-in is taken for: KV bytes per token in bf16, and what an H100 computes at 8k tokens."""

    name: str
    token_bytes: int
    prefill_tokens_per_s: float


LLAMA_8B: Final = Model("Llama-3.1-8B", 2 * 32 * 8 * 128 * 2, 27_159)
QWEN_32B: Final = Model("Qwen3-32B", 2 * 64 * 8 * 128 * 2, 6_665)
LLAMA_70B: Final = Model("Llama-3.1-70B", 2 * 80 * 8 * 128 * 2, 3_255)


def by_value(model: Model, *, flash_cycles: float | None = None) -> perdure.ValueAdmission:
    """Admission with the prices of the model's blocks: the stand-in is smaller, so each of its bytes costs more."""
    prices = perdure.AdmissionPrices()
    return perdure.ValueAdmission(
        dataclasses.replace(
            prices,
            flash_usd_per_gb=prices.flash_usd_per_gb * BLOCK_TOKENS * model.token_bytes / BLOCK_BYTES,
            flash_cycles=flash_cycles or prices.flash_cycles,
        ),
        prefill_tokens_per_s=model.prefill_tokens_per_s,
    )


def capacity_bytes(blocks: int) -> int:
    """Of a store for so many blocks, headers included; at least the smallest store there is."""
    return max(blocks * RECORD_BYTES, limits.capacity_bytes_min)


def replay(
    root: Path,
    trace: Trace,
    blocks: int,
    *,
    memory_blocks: int = 0,
    release: bool = False,
    admission: str | perdure.ValueAdmission = "always",
) -> Hits:
    """Each request looks up, uses what is found, and writes the rest. Raises WrongResult if a found block is not there.

    blocks: capacity. memory_blocks: of the DRAM tier; 0: none. release: tell the store when a session has ended."""
    random = np.random.default_rng(_KEYS_SEED)
    names = random.integers(0, 256, (trace.unique, limits.key_bytes), np.uint8)
    longest = max((len(one.blocks) for one in trace.requests), default=0)
    payload = random.integers(0, 256, longest * BLOCK_BYTES, np.uint8)
    into = perdure.aligned_buffer(max(longest, 1) * BLOCK_BYTES)
    clock, hits, at_s = FakeClock(), Hits(), 0.0
    layout = perdure.KVLayout(block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, dtype="uint8", order="stand-in")
    with perdure.open(
        root, capacity=capacity_bytes(blocks), memory=memory_blocks * BLOCK_BYTES, admission=admission, codec="off",
        seams=perdure.Seams(clock=clock),
    ) as store:  # fmt: skip
        space = store.keyspace(model="replay", weights=WEIGHTS, layout=layout, tenant="replay")
        for request in trace.requests:
            clock.advance(request.at_s - at_s)
            at_s = request.at_s
            keys = names[request.blocks]
            found = space.lookup(keys)
            if found and memory_blocks:
                report = space.read(keys[:found], into[: found * BLOCK_BYTES])
                if report.usable != found:
                    why = list(report.problems.values())[:1]
                    raise WrongResult(f"{report.usable} of {found} blocks delivered: {why}")
                hits.memory_blocks += report.from_memory
            elif found:
                store.core.touches.add(keys[:found], store.core.tick())
            hits.add(request.tokens, found)
            if found < len(keys):
                space.write(keys[found:], payload[: (len(keys) - found) * BLOCK_BYTES], durability="ephemeral")
            if release and request.ends is not None:
                space.release(names[request.ends])
        status = store.status()
    hits.written_blocks = status["counters"].get("blocks_stored", 0) + status["reclaim"]["blocks_copied"]
    return hits
