"""Blocks brought into the DRAM tier before they are asked for, in the order of when they are needed.

Contract
- One thread, one batch of at most `limits.prefetch_batch_bytes` at a time: a restore that is waited for gets the disk's
  next free places. What is not there when it is needed is given up.
- At most half of the DRAM tier is promised at a time: what is brought must still be there when it is asked for.
- Nothing waits for it and nothing depends on it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
from typing import Final, NamedTuple

from perdure import limits
from perdure.catalog.api import KeyArray
from perdure.core import Core
from perdure.errors import PerdureError
from perdure.keyspace import Keyspace
from perdure.viewing import fetch

_LOG = logging.getLogger("perdure.prefetch")
_GRACE_S: Final = 5.0  # how long after its time a batch is still worth bringing
_RATE_BYTES_PER_S: Final = 200e6  # assumed of a disk before anything was read
_MARGIN: Final = 2.0


class _Job(NamedTuple):
    start_s: float  # monotonic
    number: int
    needed_s: float
    space: Keyspace
    keys: KeyArray


class Prefetcher:
    """Thread-safe."""

    def __init__(self, core: Core):
        self._core = core
        self._spaces: dict[bytes, Keyspace] = {}
        self._jobs: list[_Job] = []
        self._promised_bytes = 0
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def know(self, space: Keyspace) -> None:
        """A keyspace whose blocks may be brought."""
        self._spaces[space.digest] = space

    def blocks_of(self, keyspace: bytes) -> int:
        """How many blocks of a keyspace may be asked for at a time; 0 where nothing can be brought."""
        space = self._spaces.get(keyspace)
        return 0 if space is None else self._core.pool.budget_bytes // 4 // space.layout.block_bytes

    def add(self, keyspace: bytes, keys: KeyArray, in_s: float) -> int:
        """Bring blocks so that they are there in `in_s` seconds; how many of them, counted from the end, will be."""
        space = self._spaces.get(keyspace)
        if space is None or not len(keys):
            return 0
        size, now = space.layout.block_bytes, self._core.clock.monotonic()
        with self._changed:
            room = max(0, self._core.pool.budget_bytes // 2 - self._promised_bytes) // size
            taken = keys[max(0, len(keys) - room) :]
            if self._closed or not room or not len(taken):
                return 0
            rate = self._core.rates.disk_read.bytes_per_s or _RATE_BYTES_PER_S
            step = max(1, limits.prefetch_batch_bytes // size)
            for at in range(0, len(taken), step):
                part = taken[at : at + step]
                lead_s = _MARGIN * (len(taken) - at) * size / rate
                start_s = now + max(0.0, in_s - lead_s)
                heapq.heappush(self._jobs, _Job(start_s, next(self._numbers), now + in_s, space, part))
            self._promised_bytes += len(taken) * size
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="perdure-prefetch", daemon=True)
                self._thread.start()
            self._changed.notify()
        return len(taken)

    def _work(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            try:
                left_s = job.needed_s + _GRACE_S - self._core.clock.monotonic()
                if left_s > 0:
                    got = fetch(self._core, job.space, job.keys, deadline_s=left_s)
                    self._core.pool.release(got.slots)
                    brought = sum(slot is not None for slot in got.slots) - got.report.from_memory
                    self._core.counters.add(prefetches=1, blocks_prefetched=brought)
            except PerdureError as error:
                self._core.counters.add(prefetch_errors=1)
                _LOG.warning("blocks could not be brought: %s", error)
            with self._changed:
                self._promised_bytes -= len(job.keys) * job.space.layout.block_bytes

    def _next(self) -> _Job | None:
        with self._changed:
            while not self._closed:
                wait_s = self._jobs[0].start_s - self._core.clock.monotonic() if self._jobs else math.inf
                if wait_s <= 0:
                    return heapq.heappop(self._jobs)
                self._changed.wait(None if wait_s == math.inf else wait_s)
            return None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
