"""What a request says about its context's future, carried out when it is over: pins, release, its session.

`kv_hints` of vLLM (actions "pin", "retain", "release", "prefetch") and `kv_transfer_params` ("pin_s", "release",
"max_store_tokens") say the same things. A prefetch needs nothing more: a request's prefix is promoted when it comes.
Hints that make no sense are passed over: they must not fail a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perdure import limits
from perdure.engines.vllm.promote import Spaces
from perdure.keys import KeyArray


@dataclass(frozen=True, slots=True)
class Hints:
    """pin_s: keep its blocks so long. release: they are the first to go. session: name of the session they belong to.
    store_tokens_max: store no more than so many of its tokens."""

    pin_s: float = 0.0
    release: bool = False
    session: str = ""
    store_tokens_max: int | None = None

    @property
    def any(self) -> bool:
        return bool(self.pin_s or self.release or self.session)


def hints_of(request: Any) -> Hints:
    params = request.kv_transfer_params or {}
    pin_s, release = _seconds(params.get("pin_s")), params.get("release") is True
    for action in getattr(request.kv_hints, "actions", None) or ():
        if action.action_type in ("pin", "retain"):
            pin_s = max(pin_s, _seconds(action.payload.get("ttl_s")))
        elif action.action_type == "release":
            release = True
    tokens = params.get("max_store_tokens")
    session = request.session_id or ""
    return Hints(
        pin_s, release, session if len(session.encode()) <= limits.session_name_bytes_max else "",
        tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0 else None,
    )  # fmt: skip


def _seconds(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return min(float(value), limits.pin_ttl_s_max)
    return 0.0


def carry_out(hints: Hints, spaces: Spaces, keys_of: Callable[[Any, int], KeyArray]) -> None:
    """keys_of: of a keyspace of a group, of all the request's full blocks."""
    for group, group_spaces in enumerate(spaces):
        for space in group_spaces:
            keys = keys_of(space, group)
            for part in _cut(keys):
                if hints.pin_s:
                    space.pin(part, ttl_s=hints.pin_s)
            if hints.session and not group:
                _extend(space, hints.session, keys)
            if hints.release:
                space.release(keys)


def _extend(space: Any, name: str, keys: KeyArray) -> None:
    """A session is one sequence: what does not go on with it belongs to another one, and is left out."""
    session = space.session(name)
    known = session.keys() if session.blocks else keys[:0]
    if len(known) < len(keys) and np.array_equal(known, keys[: len(known)]):
        session.extend(keys[len(known) :])


def _cut(keys: KeyArray) -> Sequence[KeyArray]:
    step = limits.message_keys_max
    return [keys[at : at + step] for at in range(0, len(keys), step)]
