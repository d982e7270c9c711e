"""The tier's connection and its transfers between the service and vLLM's primary tier, on a few threads.

Contract
- A load fills a chunk with bytes that were verified, or names it as failed; a store that did not get through is
  forgotten by vLLM and costs a miss later. Nothing is raised to vLLM.
- A chunk's memory is vLLM's again as soon as its job is reported, so a job is reported only when nobody can touch that
  memory any more: not the service either, where it shares the region and did not answer in time (`wait_settled`).
- A job belongs to the epoch it was submitted in: one that has not begun when the epoch is sealed is not begun.
- Without a service the connection is tried again every `BACK_OFF_S`; until then everything is a miss at once.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from perdure import limits
from perdure.buffers import copy_parts
from perdure.engines.vllm.affinity import unbind
from perdure.engines.vllm.tier_identity import TierSettings, Weights, identity_of
from perdure.engines.vllm.tier_lookup import Held
from perdure.errors import InvalidArgument, PerdureError, ServiceUnavailable
from perdure.keys import KVLayout
from perdure.reports import WriteStatus
from perdure.segments.landing import BlockStatus
from perdure.service.client import RemoteStore, connect

BACK_OFF_S: Final = 1.0
BEGIN_S: Final = 0.25  # for finding out whether the service is there
ROUND_BYTES: Final = 16 * limits.MIB  # stored at a time: what the service copies out of the region before it writes
THREADS: Final = 2  # for loads, and as many for stores
_SETTLE_S: Final = 1.0
_log = logging.getLogger(__name__)
_FOUND = int(BlockStatus.FOUND)


class Primary:
    """vLLM's primary tier: chunks of `stride` bytes, in its own view or in the region shared with the service."""

    def __init__(self, view: memoryview, fd: int | None):
        self.stride = int(view.strides[0]) if view.strides else view.nbytes
        self._bytes = view.cast("B")
        self._fd = fd
        self._shared: memoryview | None = None

    def share(self, store: RemoteStore) -> bool:
        """Register the region with the service, which then reads it by itself. False where that cannot be."""
        if self._fd is None or os.fstat(self._fd).st_size < self._bytes.nbytes:
            return False
        try:
            self._shared = store.register(self._fd, self._bytes.nbytes).view
        except (PerdureError, OSError):
            return False
        return True

    def chunks(self, chunk_ids: Sequence[int]) -> list[memoryview]:
        return self._slices(self._bytes, chunk_ids)

    def shared_chunks(self, chunk_ids: Sequence[int]) -> list[memoryview]:
        """The same memory, such that the client finds it registered, if it is."""
        return self._slices(self._bytes if self._shared is None else self._shared, chunk_ids)

    def _slices(self, memory: memoryview, chunk_ids: Sequence[int]) -> list[memoryview]:
        return [memory[at * self.stride : (at + 1) * self.stride] for at in map(int, chunk_ids)]

    def release(self) -> None:
        self._shared = None
        self._bytes.release()


class Sealed(PerdureError):
    """The weights' epoch that a job belongs to is over."""


class Service:
    """The connection, made when it is first needed, and a keyspace for each group of the weights' epoch."""

    def __init__(
        self, settings: TierSettings, config: Any, layouts: dict[int, KVLayout], primary: Primary, draft: str = ""
    ):  # fmt: skip
        self.settings, self._config, self._layouts, self._primary = settings, config, layouts, primary
        self._draft = draft
        self.weights = Weights(settings, str(config.model.name))
        for layout in layouts.values():  # what is wrong with it is said now, not by misses
            identity_of(config, self.weights.name(), layout, draft)
        self._told = ""
        self._lock = threading.Lock()
        self._store: RemoteStore | None = None
        self._spaces: dict[int, Any] = {}
        self._retry_at = 0.0
        self._closed = False
        self.shares_region = False

    @property
    def epoch(self) -> int:
        return self.weights.epoch

    def space(self, group: int, epoch: int | None = None) -> Any:
        """Raises PerdureError: ServiceUnavailable while there is none, and for a while after one went away; and if the
        epoch was sealed."""
        if time.monotonic() < self._retry_at:
            raise ServiceUnavailable(f"{self.settings.url}: not there a moment ago")
        try:
            with self._lock:
                if epoch not in (None, self.epoch):
                    raise Sealed(f"epoch {epoch} was sealed")
                made = self._space(group)
            made.begin(time.monotonic() + BEGIN_S)
        except Sealed:
            raise
        except PerdureError as error:
            self._retry_at = time.monotonic() + BACK_OFF_S
            with self._lock:
                self._spaces.clear()  # another store may be served there next time
                if str(error) != self._told and not self._closed:
                    _log.warning("perdure tier: %s; until that is over every block is a miss", error)
                    self._told = str(error)
            raise
        if self._told:
            _log.warning("perdure tier: %s is there again", self.settings.url)
            self._told = ""
        return made

    def _space(self, group: int) -> Any:
        if self._closed:
            raise ServiceUnavailable("the tier was shut down")
        if self._store is None:
            self._store = connect(self.settings.url, name="vllm-tier")
            if self.settings.share_region and self._store.shared:
                self.shares_region = self._primary.share(self._store)
        if group not in self._spaces:
            if group not in self._layouts:
                raise InvalidArgument(f"KV-cache group {group} is not among vLLM's offloaded groups")
            one = identity_of(self._config, self.weights.name(), self._layouts[group], self._draft)
            self._spaces[group] = self._store.keyspace(
                model=one.model,
                weights=one.weights,
                layout=one.layout,
                tenant=self.settings.tenant,
                draft=one.draft,
                codec=self.settings.codec,
            )
        return self._spaces[group]

    def up(self) -> bool:
        return self._store is not None and time.monotonic() >= self._retry_at

    def seal(self) -> None:
        """What comes later belongs to other weights, unless it is known better."""
        with self._lock:
            self.weights.seal()
            self._spaces.clear()

    def close(self) -> None:
        """Whoever waits for an answer gets none."""
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
            self._spaces.clear()
        if store is not None:
            store.close()


@dataclass(frozen=True, slots=True)
class Done:
    """A job's end. ok: which keys are where they should be. nbytes: of KV moved."""

    job_id: int
    is_load: bool
    keys: Sequence[bytes]
    ok: frozenset[bytes]
    seconds: float
    nbytes: int
    counts: Counter[str]


class Jobs:
    """Submitted by the scheduler, done by threads, collected by the scheduler."""

    def __init__(self, service: Service, primary: Primary):
        self._service, self._primary = service, primary
        self._loads = ThreadPoolExecutor(THREADS, thread_name_prefix="perdure-tier-load", initializer=unbind)
        self._stores = ThreadPoolExecutor(THREADS, thread_name_prefix="perdure-tier-store", initializer=unbind)
        self._open: set[Future[None]] = set()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()

    def load(self, job_id: int, keys: Sequence[bytes], chunk_ids: Sequence[int], held: Sequence[Held]) -> None:
        work = _Load(self._service, self._primary, keys, chunk_ids, held)
        self._submit(self._loads, job_id, True, keys, work.run)

    def store(self, job_id: int, keys: Sequence[bytes], chunk_ids: Sequence[int]) -> None:
        work = _Store(self._service, self._primary, keys, chunk_ids)
        self._submit(self._stores, job_id, False, keys, work.run)

    def _submit(
        self, threads: ThreadPoolExecutor, job_id: int, is_load: bool, keys: Sequence[bytes],
        run: Callable[[set[bytes], Counter[str]], None],
    ) -> None:  # fmt: skip
        def job() -> None:
            started = time.monotonic()
            ok: set[bytes] = set()
            counts: Counter[str] = Counter()
            try:
                run(ok, counts)
            except Exception as error:  # noqa: BLE001 (a job always ends, whatever happens to it)
                counts[f"failed:{type(error).__name__}"] += len(keys) - len(ok)
            moved = counts.pop("bytes", 0)
            self._done.put(Done(job_id, is_load, keys, frozenset(ok), time.monotonic() - started, moved, counts))

        self._open = {one for one in self._open if not one.done()}
        self._open.add(threads.submit(job))

    def finished(self) -> list[Done]:
        found = []
        while True:
            try:
                found.append(self._done.get_nowait())
            except queue.Empty:
                return found

    def drain(self) -> None:
        wait(self._open)
        self._open.clear()

    def stop(self) -> None:
        self._loads.shutdown(wait=True)
        self._stores.shutdown(wait=True)


def _by_group(keys: Sequence[bytes]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault(int.from_bytes(key[-4:], "big"), []).append(place)
    return groups


def _rounds(places: list[int], block_bytes: int) -> list[list[int]]:
    most = max(1, ROUND_BYTES // block_bytes)
    return [places[at : at + most] for at in range(0, len(places), most)]


class _Load:
    def __init__(
        self, service: Service, primary: Primary, keys: Sequence[bytes], chunk_ids: Sequence[int], held: Sequence[Held]
    ):  # fmt: skip
        self._service, self._primary = service, primary
        self._keys, self._chunk_ids, self._held = keys, chunk_ids, held
        self._epoch = service.epoch

    def run(self, ok: set[bytes], counts: Counter[str]) -> None:
        targets = self._primary.chunks(self._chunk_ids)
        try:
            rest = self._copy(targets, ok, counts)
        finally:
            for held in self._held:
                if held.hold is not None:
                    held.hold.drop()
        for group, places in _by_group([self._keys[place] for place in rest]).items():
            self._read(group, [rest[place] for place in places], targets, ok, counts)

    def _copy(self, targets: list[memoryview], ok: set[bytes], counts: Counter[str]) -> list[int]:
        """From the service's memory; returns what has to be read."""
        rest: list[int] = []
        for place, held in enumerate(self._held):
            hold = held.hold
            block = None if hold is None else hold.block(held.position)
            if hold is None or block is None or self._epoch != self._service.epoch:
                rest.append(place)
                continue
            copy_parts([block], [targets[place]])
            if hold.valid():  # looked at after the copy: until now the bytes were what was verified
                ok.add(self._keys[place])
                counts["loaded:held"] += 1
                counts["bytes"] += self._primary.stride
            else:
                rest.append(place)
        return rest

    def _read(
        self, group: int, places: list[int], targets: list[memoryview], ok: set[bytes], counts: Counter[str]
    ) -> None:
        space = self._service.space(group, self._epoch)
        names = space.adopt_hashes([self._keys[place][:-4] for place in places])
        report = space.read(names, [targets[place] for place in places], deadline_s=self._service.settings.load_s)
        while not report.wait_settled(_SETTLE_S):
            continue
        for place, status in zip(places, report.statuses.tolist(), strict=True):
            if status == _FOUND:
                ok.add(self._keys[place])
                counts["loaded:read"] += 1
                counts["bytes"] += self._primary.stride
            else:
                counts[f"failed:{BlockStatus(status).name.lower()}"] += 1


class _Store:
    def __init__(self, service: Service, primary: Primary, keys: Sequence[bytes], chunk_ids: Sequence[int]):
        self._service, self._primary = service, primary
        self._keys, self._chunk_ids = keys, chunk_ids
        self._epoch = service.epoch

    def run(self, ok: set[bytes], counts: Counter[str]) -> None:
        for group, places in _by_group(self._keys).items():
            space = self._service.space(group, self._epoch)
            names = space.adopt_hashes([self._keys[place][:-4] for place in places])
            there = space.present(names)
            counts["stored:exists"] += int(np.count_nonzero(there))
            ok |= {self._keys[place] for place, yes in zip(places, there, strict=True) if yes}
            new = np.flatnonzero(~there).tolist()
            for part in _rounds(new, self._primary.stride):
                if self._epoch == self._service.epoch:
                    self._write(space, names[part], [places[one] for one in part], ok, counts)

    def _write(self, space: Any, names: Any, places: list[int], ok: set[bytes], counts: Counter[str]) -> None:
        settings = self._service.settings
        chunks = self._primary.shared_chunks([self._chunk_ids[place] for place in places])
        report = space.write(
            names, chunks, durability=settings.durability, ttl_s=settings.ttl_s, deadline_s=settings.store_s
        )
        while not report.wait_settled(_SETTLE_S):
            continue
        for place, status in zip(places, report.statuses.tolist(), strict=True):
            counts[f"stored:{WriteStatus(status).name.lower()}"] += 1
            if status <= WriteStatus.EXISTS:
                ok.add(self._keys[place])
            if status == WriteStatus.STORED:
                counts["bytes"] += self._primary.stride
