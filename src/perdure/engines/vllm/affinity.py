"""Which CPUs the connector's threads run on.

vLLM for CPUs binds each of its threads to a CPU of its own, and a new thread inherits the binding of the one that makes
it: all of the connector's would share one CPU with the engine's main thread.
"""

from __future__ import annotations

import os
from contextlib import suppress


def unbind() -> None:
    """Let the calling thread run on every CPU that some thread of this process may run on: not on those of others."""
    allowed: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has just ended
            allowed |= os.sched_getaffinity(int(task))
    with suppress(OSError):  # a sandbox that forbids it: the thread stays where it is
        os.sched_setaffinity(0, allowed)
