"""Write-behind saves of one rank: blocks are copied out of the engine's cache, then stored, by threads of their own.

Contract
- `submit` returns at once. A save that was not copied out when its blocks are overwritten is cancelled: `flush` waits
  `flush_ms_max` for those, and for the copy that is going on, and nothing reads a block any more when it returns.
- What is stored under a name is what the block held when it was full: copied before it was overwritten, or not at all.
- Memory is bounded: saves on their way by `staging_bytes`, waiting ones by `BACKLOG_BLOCKS`; more are dropped and
  counted. What is stored already is not copied.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from perdure.engines.vllm.affinity import unbind
from perdure.engines.vllm.link import Link
from perdure.engines.vllm.pages import Bytes, Pages
from perdure.engines.vllm.settings import Settings
from perdure.engines.vllm.transfers import Part, Transfer
from perdure.io.memory import aligned_buffer
from perdure.io.shared import SharedMemory
from perdure.keys import adopt_hashes
from perdure.reports import WriteStatus

BACKLOG_BLOCKS = 8192
_BUFFERS = 4
_WRITE_S = 30.0
Counters = Callable[..., None]
"""Adds to named counters: counters(saved_blocks=3)."""


@dataclass(slots=True)
class _Job:
    transfer: Transfer
    part: Part
    weights: str
    after: Any
    reading: bool = False
    cancelled: bool = False


class Saver:
    """space: the keyspace of (weights, lora, group). count: of what became of blocks."""

    def __init__(
        self, settings: Settings, pages: Pages, link: Link, space: Callable[[str, str, int], Any], count: Counters
    ):
        self._settings, self._pages, self._link, self._space, self._count = settings, pages, link, space, count
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._copying: _Job | None = None
        self._pending_blocks = 0
        self._writing = 0
        self._closed = False
        self._staging: SharedMemory | None = None
        self._free: list[Bytes] = []
        self._made = False
        self._writers = ThreadPoolExecutor(_BUFFERS, thread_name_prefix="perdure-save", initializer=unbind)
        self._thread = threading.Thread(target=self._work, name="perdure-copy", daemon=True)
        self._thread.start()

    # --- called by the engine's thread
    def submit(self, transfer: Transfer, weights: str) -> None:
        after = self._pages.mark()
        with self._changed:
            for part in transfer.parts:
                if self._closed or self._pending_blocks + len(part.block_ids) > BACKLOG_BLOCKS or not self._link.up:
                    self._count(dropped_blocks=len(part.block_ids))
                    continue
                self._pending_blocks += len(part.block_ids)
                self._waiting.append(_Job(transfer, part, weights, after))
            self._changed.notify_all()

    def flush(self, overwritten: Iterable[int]) -> None:
        """Nothing reads these blocks any more when this returns."""
        with self._changed:
            if not self._waiting and self._copying is None:
                return
            blocks = set(overwritten)
            victims = [job for job in self._waiting if not blocks.isdisjoint(job.part.block_ids)]
            if not victims and (self._copying is None or blocks.isdisjoint(self._copying.part.block_ids)):
                return
            for job in reversed(victims):  # next in turn
                self._waiting.remove(job)
                self._waiting.appendleft(job)
            until = time.monotonic() + self._settings.flush_ms_max / 1000

            def unread() -> bool:
                """Whether a job that is not over has still to read one of the blocks."""
                current = self._copying
                return (current is not None and not blocks.isdisjoint(current.part.block_ids)) or any(
                    job in self._waiting for job in victims
                )

            while unread() and time.monotonic() < until:
                self._changed.wait(max(0.0, until - time.monotonic()))
            self._cancel(job for job in victims if job in self._waiting)
            current = self._copying
            if current is not None and not blocks.isdisjoint(current.part.block_ids):
                current.cancelled = True
                self._changed.notify_all()
                while current.reading:  # one block's copy
                    self._changed.wait()

    def drop(self) -> None:
        """Cancel what was not copied out yet: the engine's weights have changed."""
        with self._changed:
            self._cancel(list(self._waiting))
            if self._copying is not None:
                self._copying.cancelled = True
                self._changed.notify_all()

    def _cancel(self, jobs: Iterable[_Job]) -> None:
        for job in list(jobs):
            self._waiting.remove(job)
            self._pending_blocks -= len(job.part.block_ids)
            self._count(dropped_blocks=len(job.part.block_ids))

    def close(self, wait_s: float) -> None:
        """Give what waits a moment to be stored."""
        until = time.monotonic() + wait_s
        with self._changed:
            while (self._waiting or self._copying or self._writing) and self._link.up and time.monotonic() < until:
                self._changed.wait(max(0.0, until - time.monotonic()))
            self._closed = True
            self._cancel(list(self._waiting))
            self._changed.notify_all()
        self._thread.join(wait_s)
        self._writers.shutdown(wait=False, cancel_futures=True)
        if self._staging is not None:
            self._staging.close()

    # --- its own threads
    def _work(self) -> None:
        unbind()
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = self._copying = self._waiting.popleft()
            try:
                self._save(job)
                self._link.worked()
            except Exception as error:  # noqa: BLE001 - a lost save is a later miss
                self._link.failed(error)
                self._count(dropped_blocks=len(job.part.block_ids))
            with self._changed:
                self._copying = None
                self._pending_blocks -= len(job.part.block_ids)
                self._changed.notify_all()

    def _save(self, job: _Job) -> None:
        """Copy out what is not stored yet, one buffer after the other."""
        space = self._space(job.weights, job.transfer.lora, job.part.group)
        keys = adopt_hashes(space.digest, job.part.hashes)
        missing = np.flatnonzero(~space.present(keys)).tolist()
        self._count(known_blocks=len(keys) - len(missing))
        size = self._pages.block_bytes[job.part.group]
        while missing and not job.cancelled:
            buffer = self._take(job)
            if buffer is None:
                break
            rows = buffer[: len(buffer) // size * size].reshape(-1, size)
            batch, missing = missing[: len(rows)], missing[len(rows) :]
            copied = 0
            for position in batch:
                if not self._copy(job, position, rows[copied : copied + 1]):
                    break
                copied += 1
            self._writers.submit(self._write, space, keys[batch[:copied]], rows[:copied], buffer)
            missing = batch[copied:] + missing
        if missing:
            self._count(dropped_blocks=len(missing))

    def _copy(self, job: _Job, position: int, row: Bytes) -> bool:
        with self._changed:
            if job.cancelled:
                return False
            job.reading = True
        try:
            self._pages.gather(job.part.group, [job.part.block_ids[position]], row, job.after)
        finally:
            with self._changed:
                job.reading = False
                self._changed.notify_all()
        return True

    def _take(self, job: _Job) -> Bytes | None:
        """A buffer for one block at least; None if the job or everything is over."""
        if not self._made:
            self._make_buffers()
        with self._changed:
            while not self._free and not self._closed and not job.cancelled:
                self._changed.wait()
            if self._closed or job.cancelled:
                return None
            self._writing += 1
            return self._free.pop()

    def _make_buffers(self) -> None:
        """Memory that the service reads directly, where it shares memory with us."""
        largest = max(self._pages.block_bytes)
        each = max(self._settings.staging_bytes // _BUFFERS // largest, 1) * largest
        if self._link.shares_memory:
            self._staging = SharedMemory("vllm-saves", _BUFFERS * each)
            self._staging.seal_size()
            whole = np.frombuffer(self._link.store().register(self._staging.fd).view, np.uint8)
        else:
            whole = aligned_buffer(_BUFFERS * each)
        with self._changed:
            self._free = [whole[at : at + each] for at in range(0, _BUFFERS * each, each)]
        self._made = True

    def _write(self, space: Any, keys: Any, rows: Bytes, buffer: Bytes) -> None:
        try:
            if len(keys):
                report = space.write(
                    keys, rows.reshape(-1), durability=self._settings.durability, ttl_s=self._settings.ttl_s,
                    deadline_s=_WRITE_S,
                )  # fmt: skip
                stored = report.count(WriteStatus.STORED)
                there = report.count(WriteStatus.EXISTS)
                self._count(saved_blocks=stored, known_blocks=there, dropped_blocks=len(keys) - stored - there,
                            saved_bytes=report.bytes)  # fmt: skip
        except Exception as error:  # noqa: BLE001 - a lost save is a later miss
            self._link.failed(error)
            self._count(dropped_blocks=len(keys))
        finally:
            with self._changed:
                self._free.append(buffer)
                self._writing -= 1
                self._changed.notify_all()
