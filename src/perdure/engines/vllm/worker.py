"""The worker's half: copies stored blocks into the engine's KV cache and full blocks out of it, beside the model.

Contract
- Called by the engine's thread between steps; it never waits there, but for blocks that a save still reads and that
  this step overwrites (`saving.Saver.flush`).
- Each load is reported finished once, whatever became of it, at the latest `load_deadline_ms` and a grace after its
  start; its blocks that did not come are reported with it (one KV-cache group) or the request as failed (several).
- A block is in the cache only if its bytes were verified; what is left in the blocks of a failed load has no meaning.
- Of ranks that hold the same blocks (MLA; more ranks than KV heads) the first saves them.
- The digest of the loaded weights is taken by a thread, at the start and whenever the scheduler's epoch has changed;
  until it is known nothing is loaded or saved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perdure.engines.vllm import identity, weights
from perdure.engines.vllm.affinity import unbind
from perdure.engines.vllm.link import Link
from perdure.engines.vllm.pages import Pages
from perdure.engines.vllm.promote import warm_up
from perdure.engines.vllm.saving import Saver
from perdure.engines.vllm.settings import Settings
from perdure.engines.vllm.stats import Tally
from perdure.engines.vllm.transfers import Outcome, Part, Plan, Shard, Transfer
from perdure.errors import PerdureError
from perdure.io.memory import aligned_buffer
from perdure.keys import KVLayout, adopt_hashes
from perdure.segments.landing import BlockStatus

_LOG = logging.getLogger("perdure.vllm")
_LOADS = 2
_CLOSE_S = 2.0
FIRST_DIGEST_S = 60.0  # how long the engine's start waits for it
_FOUND = int(BlockStatus.FOUND)


class Worker:
    """rank: (pipeline rank, tensor rank)."""

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any, rank: tuple[int, int]):
        self._settings, self._vllm_config, self._kv_cache_config = settings, vllm_config, kv_cache_config
        self._rank = rank
        model = settings.model or identity.model_name(vllm_config)
        self._link = Link(settings, f"vllm worker {rank[0]}.{rank[1]}", model)
        self._loads = ThreadPoolExecutor(_LOADS, thread_name_prefix="perdure-load", initializer=unbind)
        self._digests = ThreadPoolExecutor(1, thread_name_prefix="perdure-weights", initializer=unbind)
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self.tally = Tally()
        self._outcome = Outcome()
        self._epoch = 0
        self._warm = ""  # the weights whose keyspaces are open and mapped, or soon will be
        self._layouts: list[KVLayout] = []
        self._saved_groups: set[int] = set()
        self._pages: Pages | None = None
        self._saver: Saver | None = None
        self._first_digest: Future[None] | None = None

    # --- called by the engine's thread
    def register(self, kv_caches: Mapping[str, torch.Tensor], backend: str, scales: str) -> None:
        groups = identity.groups_of(
            self._vllm_config, self._kv_cache_config, tp_rank=self._rank[1], backend=backend, scales=scales
        )
        self._layouts = [group.layout for group in groups]
        self._saved_groups = {group.number for group in groups if not group.copy}
        self._pages = Pages(kv_caches, self._kv_cache_config)
        self._saver = Saver(self._settings, self._pages, self._link, self._space, self.tally.add)
        self._first_digest = self._digests.submit(self._digest, self._epoch)

    def shard(self) -> Shard | None:
        """What this rank holds, as soon as it is known at the start; None if it takes too long."""
        if self._first_digest is None:
            return None
        wait([self._first_digest], FIRST_DIGEST_S)
        with self._lock:
            told = self._outcome.shards.get(self._rank)
        return None if told is None else told[1]

    def before_step(self, plan: Plan) -> None:
        """Before the step writes to any block."""
        if plan.epoch != self._epoch:
            self._epoch = plan.epoch
            if self._saver is not None:
                self._saver.drop()
            self._digests.submit(self._digest, plan.epoch)
        if plan.weights and plan.weights != self._warm:
            self._warm = plan.weights
            self._loads.submit(self._warm_up, plan.weights)
        if plan.cancel_saves and self._saver is not None:
            self._saver.drop()
        self._save(plan.finished, plan)
        if self._saver is not None and plan.overwritten:
            self._saver.flush(plan.overwritten)

    def start_loads(self, plan: Plan) -> None:
        for transfer in plan.loads:
            try:
                after = None if self._pages is None else self._pages.mark()
                self._loads.submit(self._load, transfer, plan.weights, after)
            except Exception as error:  # noqa: BLE001 - reported as a load that brought nothing
                self._give_up(transfer, error)

    def after_step(self, plan: Plan) -> None:
        """After the step's blocks were written."""
        for transfer in plan.checks:
            self._check(transfer, plan.weights)
        self._save(plan.saves, plan)

    def _save(self, transfers: list[Transfer], plan: Plan) -> None:
        if self._saver is None or not plan.weights:
            return
        for transfer in transfers:
            parts = [part for part in transfer.parts if part.group in self._saved_groups]
            if parts and transfer.epoch == self._epoch:
                self._saver.submit(replace(transfer, parts=parts), plan.weights)

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended, and those of them that failed as a whole; each once."""
        with self._lock:
            finished, self._finished = self._finished, set()
            failed, self._failed = self._failed, set()
        return finished, failed

    def bad_blocks(self) -> set[int]:
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def outcome(self) -> Outcome | None:
        with self._lock:
            outcome, self._outcome = self._outcome, Outcome()
        return None if outcome == Outcome() else outcome

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close(_CLOSE_S)
        for threads in (self._loads, self._digests):
            threads.shutdown(wait=False, cancel_futures=True)
        self._link.close()

    # --- its own threads
    def _space(self, digest: str, lora: str, group: int) -> Any:
        return self._link.space(digest, lora, self._layouts[group])

    def _warm_up(self, digest: str) -> None:
        """The first load is to find the service's memory mapped: that took 0.1 s of it."""
        try:
            warm_up([[self._space(digest, "", group)] for group in range(len(self._layouts))])
        except Exception as error:  # noqa: BLE001 - a cache failure never fails a request
            self._link.failed(error)

    def _digest(self, epoch: int) -> None:
        try:
            digest = self._settings.weights or self._loaded_digest()
        except Exception as error:  # noqa: BLE001 - without a digest nothing is stored or loaded
            _LOG.exception("perdure: the loaded weights have no digest, so nothing is stored or loaded")
            with self._lock:
                self._outcome.problem = str(error)
            return
        with self._lock:
            self._outcome.shards[self._rank] = (epoch, Shard(digest, self._layouts))

    def _loaded_digest(self) -> str:
        started = time.monotonic()
        names = [name for group in self._kv_cache_config.kv_cache_groups for name in group.layer_names]
        model_config = self._vllm_config.model_config
        digest = weights.shard_digest(weights.loaded_model(names), model_config.hf_config, model_config.model)
        _LOG.info("perdure: digest of the loaded weights %s in %.1f s", digest[:23], time.monotonic() - started)
        return digest

    def _load(self, transfer: Transfer, digest: str, after: Any) -> None:
        started = time.monotonic()
        until = started + self._settings.load_deadline_ms / 1000
        bad: list[int] = []
        size = 0
        try:
            for part in transfer.parts:
                found = self._read(part, digest, transfer.lora, until, after)
                bad += [block for block, there in zip(part.block_ids, found, strict=True) if not there]
                size += int(found.sum()) * self._layouts[part.group].block_bytes
            self._link.worked()
        except Exception as error:  # noqa: BLE001 - reported as blocks that did not come
            self._link.failed(error)
            bad = [block for part in transfer.parts for block in part.block_ids]
        if not bad:
            self.tally.add(loads=1, loaded_bytes=size, load_seconds=time.monotonic() - started)
        self._report(transfer, bad)

    def _read(self, part: Part, digest: str, lora: str, until: float, after: Any) -> NDArray[np.bool_]:
        """Which of the blocks were brought."""
        if self._pages is None or not digest or len(part.hashes) != len(part.block_ids):
            raise PerdureError("the engine's KV cache is not registered yet")
        space = self._space(digest, lora, part.group)
        keys = adopt_hashes(space.digest, part.hashes)
        left_s = max(0.0, until - time.monotonic())
        if self._pages.in_host_memory:
            return np.asarray(
                space.read(keys, self._pages.parts(part.group, part.block_ids), deadline_s=left_s).statuses == _FOUND
            )
        rows = aligned_buffer(len(keys) * space.layout.block_bytes).reshape(len(keys), -1)
        found = np.asarray(space.read(keys, rows.reshape(-1), deadline_s=left_s).statuses == _FOUND)
        which = np.flatnonzero(found)
        if len(which):
            self._pages.scatter(part.group, [part.block_ids[at] for at in which], rows[which], after)
        return found

    def _check(self, transfer: Transfer, digest: str) -> None:
        """Compare blocks that were computed in this step with what is stored under their names."""
        if self._pages is None or transfer.epoch != self._epoch:
            return
        for part in transfer.parts:
            size = self._layouts[part.group].block_bytes
            computed = np.zeros((len(part.block_ids), size), np.uint8)
            self._pages.gather(part.group, part.block_ids, computed, self._pages.mark())
            self._loads.submit(self._compare, part, digest, transfer.lora, computed)

    def _compare(self, part: Part, digest: str, lora: str, computed: NDArray[np.uint8]) -> None:
        try:
            space = self._space(digest, lora, part.group)
            stored = np.zeros_like(computed)
            keys = adopt_hashes(space.digest, part.hashes)
            report = space.read(keys, stored.reshape(-1), deadline_s=self._settings.load_deadline_ms / 1000)
            if report.usable < len(keys):
                return
        except PerdureError as error:
            self._link.failed(error)
            return
        difference = _difference(computed, stored, space.layout)
        self.tally.add(canaries=1)
        if difference > self._settings.canary_tolerance:
            self.tally.add(canaries_tripped=1)
            with self._lock:
                self._outcome.tripped = (
                    f"a stored block differs by {difference:.3g} from what was computed (canary_tolerance is "
                    f"{self._settings.canary_tolerance:g}): key {keys[0].tobytes().hex()}"
                )

    def _report(self, transfer: Transfer, bad: list[int]) -> None:
        with self._lock:
            self._finished.add(transfer.request)
            if bad:
                self.tally.add(failed_loads=1, failed_blocks=len(bad))
                if len(self._layouts) > 1:
                    self._failed.add(transfer.request)
                else:
                    self._bad_blocks.update(bad)

    def _give_up(self, transfer: Transfer, error: Exception) -> None:
        self._link.failed(error)
        self._report(transfer, [block for part in transfer.parts for block in part.block_ids])


def _difference(one: NDArray[np.uint8], other: NDArray[np.uint8], layout: KVLayout) -> float:
    """Of two sets of blocks, relative to their size; in any layout of elements, as long as both have the same."""
    name = {"float8_e4m3": "float8_e4m3fn"}.get(layout.kv_dtype or layout.dtype, layout.kv_dtype or layout.dtype)
    first, second = (torch.from_numpy(bits.reshape(-1)).view(getattr(torch, name)).float() for bits in (one, other))
    scale = float(torch.linalg.vector_norm(second))
    return float(torch.linalg.vector_norm(first - second)) / max(scale, 1e-12)
