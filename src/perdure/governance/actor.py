"""Who this thread works for, for which request, and under which policy: what the audit log writes beside what was done.

Contract: kept per thread (and task); nothing is checked here, and nothing is decided by it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final, NamedTuple

from perdure import limits
from perdure.errors import InvalidArgument


class Actor(NamedTuple):
    """who "": this process itself. trace: an id of the caller's. policy: the version under which it was allowed."""

    who: str = ""
    trace: str = ""
    policy: str = ""


_NOBODY: Final = Actor()
_actor: ContextVar[Actor] = ContextVar("perdure_actor", default=_NOBODY)

current = _actor.get


@contextlib.contextmanager
def acting(who: str = "", trace: str = "", policy: str = "") -> Iterator[None]:
    """What is recorded inside was done for `who`. What is left out stays as it was outside."""
    outside = _actor.get()
    token = _actor.set(Actor(who or outside.who, _bounded(trace) or outside.trace, policy or outside.policy))
    try:
        yield
    finally:
        _actor.reset(token)


def tracing(trace: str) -> contextlib.AbstractContextManager[None]:
    """What this thread does inside carries `trace` in the audit log, of an embedded store and of a service: the id of a
    request, such as a W3C traceparent. Of a longer one the first `limits.trace_bytes_max` bytes are kept.

    Reads of mapped memory send no message: the log has them as touches without it."""
    if not isinstance(trace, str) or not trace:
        raise InvalidArgument(f"tracing({trace!r}): must be a text that is not empty, such as a traceparent")
    return acting(trace=trace)


def _bounded(trace: str) -> str:
    raw = trace.encode(errors="replace")
    return trace if len(raw) <= limits.trace_bytes_max else raw[: limits.trace_bytes_max].decode(errors="ignore")
