"""Reopening a store of a million blocks after SIGKILL: time, lookups in a large catalog, memory.

Contract
- The blocks are records in the catalog (the store's own index, bulk-loaded while closed) that point into sparse segment
  files; they can be looked up, not read. Writing 64 GB to measure an index would take the disk's time, not the index's.
- The store is then opened by a process that stores some real blocks and is killed with SIGKILL while it has it open;
  a new process opens it, and reports the time until the first lookup is answered, and its memory.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from perdure import limits
from perdure.benchmarks import store_memory, target
from perdure.benchmarks.harness import Row, limit_row, row
from perdure.benchmarks.target import Bytes, Plan, WrongResult
from perdure.catalog.api import RECORD, Durability, RecordArray, SegmentRecord, SegmentState
from perdure.catalog.lmdb import LmdbIndex
from perdure.catalog.lmdb_control import LmdbControl
from perdure.limits import GIB, KIB
from perdure.segments.store import segment_path

REOPEN_LIMIT_S = 1.0
CAPACITY = 256 * GIB
RECORD_BYTES = 64 * KIB
BLOCK_BYTES = store_memory.LOOKUP_BLOCK_BYTES
SEED = 11
SETTLE_S = 60.0


def build(root: Path, blocks: int, **options: Any) -> Bytes:
    """A closed store whose catalog holds `blocks` records; returns the keys of the first 8,192 (one chain)."""
    with target.opened(root, BLOCK_BYTES, capacity=CAPACITY, **options) as (_, space):
        chain = space.chain(target.tokens(8_192, SEED))
        real = space.chain(target.tokens(16, SEED + 1))
        target.fill(space, real, BLOCK_BYTES, target.random_bytes(16 * BLOCK_BYTES))
    control = LmdbControl(root / "control")
    index = LmdbIndex(root / "index", map_bytes=blocks * 300)
    try:
        template = control.segments()[0]
        _, records = index.lookup(real)
        per_segment = limits.segment_bytes_max // RECORD_BYTES
        segments = _segments(root, control, template, -(-blocks // per_segment), per_segment)
        index.load(_entries(chain, records[0], segments, per_segment, blocks))
        if index.count() < blocks:
            raise WrongResult(f"{index.count()} of {blocks} records loaded")
    finally:
        index.close()
        control.close()
    keys: Bytes = chain
    return keys


def _segments(root: Path, control: LmdbControl, template: SegmentRecord, count: int, records: int) -> list[bytes]:
    """`count` sealed segments: records in the control store, sparse files on the disk."""
    made = []
    for number in range(count):
        segment = template.segment[:6] + number.to_bytes(4, "big") + template.segment[10:]
        record = SegmentRecord(
            segment=segment,
            state=SegmentState.SEALED,
            owner=template.owner,
            tenant=template.tenant,
            durability=Durability.SESSION,
            retention=0,
            boot_id=template.boot_id,
            created_s=template.created_s,
            allocated_bytes=limits.segment_bytes_max,
            sealed_bytes=limits.segment_bytes_max,
            records=records,
            expires_s=0,
        )
        control.put_segment(record)
        path = root / segment_path(segment)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.truncate(limits.segment_bytes_max)
        made.append(segment)
    return made


def _entries(
    chain: Bytes, like: np.void, segments: list[bytes], per_segment: int, blocks: int
) -> Iterator[tuple[Bytes, RecordArray]]:
    """Keys (the chain first, then random ones) with records spread over the segments."""
    generator = np.random.default_rng(SEED)
    done = 0
    for segment in segments:
        count = min(per_segment, blocks - done)
        keys = generator.integers(0, 256, (count, limits.key_bytes), np.uint8)
        taken = max(0, min(count, len(chain) - done))
        keys[:taken] = chain[done : done + taken]
        records = np.zeros(count, RECORD)
        records[:] = like
        records["segment"] = np.void(segment)
        records["offset"] = np.arange(count, dtype=np.uint64) * RECORD_BYTES
        records["stored_bytes"] = RECORD_BYTES - limits.page_bytes
        yield keys, records
        done += count


# --- the processes that are killed ----------------------------------------------------------------------------


def _hold(root: Path) -> None:
    """Open, look up, report, store some blocks, wait to be killed."""
    before = _memory_kib()
    chain_tokens = target.tokens(8_192, SEED)
    started = time.perf_counter()
    with target.opened(root, BLOCK_BYTES, capacity=CAPACITY) as (store, space):
        opened = time.perf_counter()
        keys = space.chain(chain_tokens[: 4_096 * target.BLOCK_TOKENS])
        asked = time.perf_counter()
        found = space.lookup(keys)
        answered = time.perf_counter()
        answer = {
            "open_s": opened - started,
            "lookup_ms": (answered - asked) * 1e3,
            "serving_s": opened - started + answered - asked,
            "found": found,
            "before_kib": before,
            "opened_kib": _memory_kib(),
        }
        answer["filled_s"] = wait_filled(store) if os.environ.get("BENCH_WAIT_FILLED") else None
        answer["filled_kib"] = _memory_kib()
        serial = int(time.time_ns() & 0x7FFFFFFF)
        target.fill(space, space.chain(target.tokens(64, serial)), BLOCK_BYTES, target.random_bytes(64 * BLOCK_BYTES))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        signal.pause()


def wait_filled(store: Any) -> float | None:
    """Seconds until the presence index is complete."""
    started = time.perf_counter()
    while time.perf_counter() - started < SETTLE_S:
        if store.status()["presence"]["complete"]:
            return time.perf_counter() - started
        time.sleep(0.05)
    return None


def _memory_kib() -> int:
    """Anonymous resident memory: LMDB's file pages are the page cache's, not ours."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _kill_and_measure(root: Path, *, wait_filled: bool) -> dict[str, Any]:
    """Start a holder, take its report, kill it with SIGKILL."""
    environment = dict(os.environ, BENCH_WAIT_FILLED="1" if wait_filled else "")
    command = [sys.executable, "-m", "perdure.benchmarks.store_reopen", str(root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if not line:
        raise WrongResult("the process that reopens the store ended without a report")
    answer: dict[str, Any] = json.loads(line)
    if answer["found"] != 4096:
        raise WrongResult(f"after reopening {answer['found']} of 4,096 blocks were found")
    return answer


def rows(plan: Plan, base: Path, step: Callable[[str], None]) -> list[Row]:
    """Reopen and memory rows, and the lookups with many blocks in the catalog."""
    root, blocks = base / "reopen", plan.catalog_blocks
    where = f"{blocks:,} in the catalog"
    step(f"catalog of {blocks:,} blocks")
    chain = build(root, blocks)
    step("reopen after SIGKILL")
    answers = [_kill_and_measure(root, wait_filled=False) for _ in range(plan.repetitions + 1)][1:]
    made = [
        limit_row(
            f"reopen after SIGKILL to first lookup answered, {where}",
            "s",
            [a["serving_s"] for a in answers],
            REOPEN_LIMIT_S,
        ),
        row(
            f"first lookup of 4,096 blocks after opening, while the presence index is filled, {where}",
            "ms",
            [a["lookup_ms"] for a in answers],
            better="lower",
        ),
    ]
    step("memory")
    filled = _kill_and_measure(root, wait_filled=True)
    per_million = 1e6 / blocks / 1024
    grown = (filled["filled_kib"] - filled["before_kib"]) * per_million
    made.append(row(f"anonymous memory per million blocks, {where}", "MiB", [grown], better="lower"))
    if filled["filled_s"] is not None:
        made.append(row(f"presence index filled in the background, {where}", "s", [filled["filled_s"]], better="lower"))
    step("lookups in the large catalog")
    with target.opened(root, BLOCK_BYTES, capacity=CAPACITY) as (store, space):
        wait_filled(store)
        absent = space.chain(target.tokens(8_192, SEED + 2))
        made += store_memory.lookup_rows(space, chain, absent, plan.repetitions, where)
    made.append(store_memory.catalog_row(root, chain, plan.repetitions, where))
    shutil.rmtree(root)
    return made


if __name__ == "__main__":
    _hold(Path(sys.argv[1]))
