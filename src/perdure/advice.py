"""Load or recompute: how much of a prefix that is stored is worth bringing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure.rates import Rates


@dataclass(frozen=True, slots=True)
class Advice:
    """blocks: leading blocks worth loading. load_s, recompute_s: for all that are there; reason: the numbers behind it.
    stored: leading blocks that are there, in_memory: how many of these are in this host's memory (`placement.prefer`).

    An estimate from what was measured, not a promise."""

    blocks: int
    load_s: float
    recompute_s: float
    reason: str
    stored: int = 0
    in_memory: int = 0


def advise(
    in_memory: NDArray[np.bool_],
    rates: Rates,
    *,
    block_bytes: int,
    block_tokens: int,
    prefill_tokens_per_s: float,
    deadline_s: float | None,
) -> Advice:
    """in_memory: of the leading blocks that are there, which are in the DRAM tier, bool (n,).

    For every number of leading blocks, the time to load them and to compute the rest is added up; the least is best.
    The first block from the disk waits for what is being read already. A tier without a measured rate counts as free.
    """
    count = len(in_memory)
    recompute_s = count * block_tokens / prefill_tokens_per_s
    disk, memory = rates.disk_read, rates.memory_read
    if not disk.calls and not memory.calls:
        return Advice(count, 0.0, recompute_s, "no read has been measured yet", count, int(in_memory.sum()))
    on_disk = np.concatenate([[0], np.cumsum(~in_memory)])
    per_disk, per_memory = (block_bytes / rate.bytes_per_s if rate.calls else 0.0 for rate in (disk, memory))
    queue_s = rates.reading_bytes / disk.bytes_per_s if disk.calls else 0.0
    load = on_disk * per_disk + (np.arange(count + 1) - on_disk) * per_memory + (on_disk > 0) * queue_s
    total = load + np.arange(count, -1, -1) * (block_tokens / prefill_tokens_per_s)
    if deadline_s is not None:
        total[load > deadline_s] = np.inf  # loading nothing takes no time, so something is left
    best = int(np.argmin(total))
    limit = "" if deadline_s is None else f", and {deadline_s:.3f} s may be waited"
    reason = (
        f"loading {count} blocks, {int(on_disk[-1])} of them from the disk at {disk.bytes_per_s / 1e6:.0f} MB/s behind "
        f"{rates.reading_bytes / 1e6:.0f} MB, takes {load[-1]:.3f} s, computing them at {prefill_tokens_per_s:.0f} "
        f"tokens/s {recompute_s:.3f} s{limit}: load {best}"
    )
    return Advice(best, float(load[-1]), recompute_s, reason, count, int(in_memory.sum()))
