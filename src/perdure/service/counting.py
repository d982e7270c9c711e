"""What a question becomes in the metrics, whatever transport it came by."""

from __future__ import annotations

from typing import Any

import numpy as np

from perdure import limits
from perdure.observe.metrics import Metrics
from perdure.reports import WriteStatus
from perdure.segments.landing import BlockStatus
from perdure.service import messages as m
from perdure.service.peers import Peer

_READ_NAMES = tuple(status.name.lower() for status in BlockStatus)
_WRITE_NAMES = tuple(status.name.lower() for status in WriteStatus)


def count(metrics: Metrics, peer: Peer, question: Any, answer: m.Message, seconds: float) -> None:
    """Metrics of one question, at its completion."""
    verb = type(question).__name__.lower()
    metrics.call(verb, "error" if isinstance(answer, m.Failed) else "ok", seconds)
    if isinstance(answer, m.Count) and isinstance(question, m.Lookup):
        space = peer.space(question.space)
        metrics.lookups(space.tenant, len(question.keys) // limits.key_bytes, answer.count)
    if not isinstance(answer, m.Fetched | m.Delivered | m.Written):
        return
    space = peer.space(question.space)
    names = _WRITE_NAMES if isinstance(answer, m.Written) else _READ_NAMES
    memory = 0 if isinstance(answer, m.Written) else answer.from_memory
    amounts = np.bincount(np.frombuffer(answer.statuses, np.uint8), minlength=len(names))
    for name, blocks in zip(names, amounts.tolist(), strict=False):
        in_memory = memory if name == "found" else 0
        for tier, amount in (("memory", in_memory), ("none" if name == "missing" else "disk", blocks - in_memory)):
            if amount > 0:
                metrics.blocks(verb, space.tenant, tier, name, amount, amount * space.layout.block_bytes)
