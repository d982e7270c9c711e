"""Blocks whose content follows from their key, so that any process can tell a right block from a wrong one.

Also the questions every fault test ends with: is what was stored still there and equal, and are the books right.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import perdure
from perdure import BlockStatus, Keyspace, KVLayout, Store
from perdure.catalog.api import KeyArray, SegmentState
from perdure.segments.format import record_bytes_array

BLOCK_TOKENS = 4
BLOCK_BYTES = 20_000  # not whole pages: records end in padding
MODEL, WEIGHTS = "fault-model", "sha256:" + "5a" * 32
FOUND, MISSING, CORRUPT = BlockStatus.FOUND, BlockStatus.MISSING, BlockStatus.CORRUPT
WRONG = 9  # found with other bytes than were written: what must never happen


def keyspace(store: Store, *, tenant: str = "acme", block_bytes: int = BLOCK_BYTES, codec: str = "off") -> Keyspace:
    layout = KVLayout(BLOCK_TOKENS, block_bytes, "bfloat16", "layer,kv,head,token,dim")
    return store.keyspace(model=MODEL, weights=WEIGHTS, layout=layout, tenant=tenant, codec=codec)


def chain(space: Keyspace, number: int, blocks: int) -> KeyArray:
    """Keys of the first `blocks` blocks of chain `number`; chains share no block."""
    tokens = np.arange(blocks * BLOCK_TOKENS, dtype=np.uint32)
    tokens[:1] = number
    return space.chain(tokens)


@lru_cache(512)
def content(key: bytes, nbytes: int) -> NDArray[np.uint8]:
    """Bytes of the block `key`: half of them compress, no two pages are alike."""
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    raw = np.random.Generator(np.random.SFC64(seed)).integers(0, 256, nbytes, np.uint8)
    raw[1::2] &= 3
    raw.flags.writeable = False
    return raw


def contents(keys: KeyArray, nbytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    """The blocks of `keys` back to back, in page-aligned memory."""
    memory = perdure.aligned_buffer(len(keys) * nbytes)
    for place, key in enumerate(keys):
        memory[place * nbytes : (place + 1) * nbytes] = content(key.tobytes(), nbytes)
    return memory


def read_back(space: Keyspace, keys: KeyArray, **options: Any) -> NDArray[np.uint8]:
    """Statuses of reading `keys`, WRONG where a block was delivered that is not the one that was written."""
    nbytes = space.layout.block_bytes
    memory = perdure.aligned_buffer(len(keys) * nbytes)
    memory[:] = 0xEE
    report = space.read(keys, into=memory, **options)
    statuses = report.statuses.copy()
    for place in np.flatnonzero(statuses == FOUND).tolist():
        if not np.array_equal(memory[place * nbytes : (place + 1) * nbytes], content(keys[place].tobytes(), nbytes)):
            statuses[place] = WRONG
    holes = np.flatnonzero(report.statuses != FOUND)
    assert report.usable == (int(holes[0]) if len(holes) else len(keys)), "the usable prefix goes beyond a hole"
    return statuses


def write(space: Keyspace, keys: KeyArray, durability: str = "session", **options: Any) -> perdure.WriteReport:
    return space.write(keys, contents(keys, space.layout.block_bytes), durability=durability, **options)


def files_of(store: Store, suffix: str) -> dict[str, int]:
    """Segment files under the store's root: name without suffix -> size."""
    found = Path(store.path).glob(f"segments/*/*{suffix}")
    return {path.name.removesuffix(suffix): path.stat().st_size for path in found}


def recount(store: Store) -> dict[str, tuple[int, int, int]]:
    """(blocks, KV bytes, stored bytes) per tenant id, counted over the whole index."""
    totals: dict[str, list[int]] = {}
    start = bytes(32)
    while True:
        keys, records = store._core.index.scan(start, 4096)
        for record, stored in zip(records, record_bytes_array(records["stored_bytes"]).tolist(), strict=True):
            total = totals.setdefault(record["tenant"].tobytes().hex(), [0, 0, 0])
            total[0] += 1
            total[1] += int(record["block_bytes"])
            total[2] += stored
        if len(keys) < 4096:
            return {tenant: tuple(total) for tenant, total in totals.items()}  # type: ignore[misc]
        start = (int.from_bytes(keys[-1].tobytes(), "big") + 1).to_bytes(33, "big")[1:]


def wrong_books(store: Store, *, settled: bool = True) -> list[str]:
    """What does not add up: usage against the index, space against the files, files against the control store.

    `settled`: nothing is being written and every dead writer's segment was recovered."""
    core, wrong = store._core, []
    usage = {
        tenant.hex(): (one.blocks, one.block_bytes, one.record_bytes) for tenant, one in core.index.usage().items()
    }
    if usage != recount(store):
        wrong.append(f"usage {usage}, recount {recount(store)}")
    if sum(one[0] for one in usage.values()) != core.index.count():
        wrong.append(f"usage has {usage}, the index {core.index.count()} blocks")
    files, indexes = files_of(store, ".seg"), files_of(store, ".idx")
    segments = {record.segment.hex(): record for record in core.table.all()}
    if settled and core.space.used != sum(files.values()):
        wrong.append(f"{core.space.used} bytes are accounted for, the segment files have {sum(files.values())}")
    if settled:
        mine = {one.segment.hex() for one in core.writer.open_segments()}
        opened = {name for name, one in segments.items() if one.state is SegmentState.OPEN and one.owner == core.owner}
        if opened != mine:
            wrong.append(f"open in the control store {sorted(opened)}, in the writer {sorted(mine)}")
        if used := [one.segment.hex() for one in core.writer.open_segments() if one.users]:
            wrong.append(f"segments whose users never end: {used}")
    if orphans := files.keys() - segments.keys():
        wrong.append(f"segment files that nobody knows: {sorted(orphans)}")
    if strays := indexes.keys() - segments.keys():
        wrong.append(f"segment indexes that nobody knows: {sorted(strays)}")
    sealed = {name for name, record in segments.items() if record.state is SegmentState.SEALED}
    cold = {name for name, record in segments.items() if record.cold}
    if settled and (double := cold & files.keys()):
        wrong.append(f"cold segments with a file: {sorted(double)}")
    if lacking := sealed - files.keys() - cold:
        wrong.append(f"sealed segments without a file: {sorted(lacking)}")
    if lacking := sealed - indexes.keys():
        wrong.append(f"sealed segments without an index: {sorted(lacking)}")
    if settled and (temporary := [*Path(store.path).glob("segments/*/*.tmp"), *Path(store.path).glob("*.tmp")]):
        wrong.append(f"temporary files were left: {[path.name for path in temporary]}")
    return wrong
