"""The block index in LMDB: for one machine, on a local file system.

Contract
- Implements `BlockIndex`; see `catalog.api` for the promises and `catalog.environment` for what LMDB adds to them.
- A publish is one transaction: records and usage change together, fsynced before it returns. `sync=False` is accepted
  and means the same: LMDB cannot leave out the fsync of one commit, and without it anywhere a power cut may destroy the
  index. Callers who can wait collect their ephemeral blocks and publish them together (one fsync: about 4 ms here).
- Tolerates a kill or power cut at any point: every batch is whole or absent, usage always matches the records.
- Never scans to open. Lookups run beside a writer, on the snapshot of their beginning.
- Disposable: delete the directory, and `perdure rebuild` makes it anew from the segments.

Databases: `blocks` key -> RECORD; `usage` tenant -> 3 u64; `recency` top 16 bits of a fingerprint's value (big-endian)
-> that bucket's RECENCY pairs, sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, repeat, takewhile
from operator import is_not
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.catalog import codec
from perdure.catalog.api import RECORD, KeyArray, PublishResult, RecordArray, Usage
from perdure.catalog.environment import Connection, Kind, Transaction
from perdure.catalog.lmdb_control import LmdbControl as LmdbControl
from perdure.errors import CatalogError

_KIND: Final = Kind(
    name="block index",
    databases=("blocks", "usage", "recency"),
    format_version=1,
    when_damaged="delete it and run `perdure rebuild DIR`: it holds nothing that the segments don't",
)
_ABSENT: Final = bytes(RECORD.itemsize)
_SCAN_PIECE_BLOCKS: Final = 4096  # larger lists of pairs cost twice the time in the garbage collector
_EXISTS: Final = int(PublishResult.EXISTS)


class LmdbIndex:
    """`BlockIndex` in the directory `path`, created with mode 0700 if missing.

    `map_bytes` is address space, not disk: give about 300 bytes per block that the store can hold; when it runs out it
    is enlarged. Raises `CatalogError` if directory or file cannot be used, `FormatError` if it is not a block index.
    """

    def __init__(self, path: str | Path, *, map_bytes: int, read_only: bool = False):
        self._connection = Connection(path, _KIND, map_bytes=map_bytes, read_only=read_only)
        self._blocks = self._connection.database("blocks")
        self._usage = self._connection.database("usage")
        self._recency = self._connection.database("recency")

    # --- reading

    def lookup(self, keys: KeyArray) -> tuple[NDArray[np.bool_], RecordArray]:
        wanted = codec.key_list(keys)

        def find(txn: Transaction) -> list[bytes]:
            return list(map(txn.get, wanted, repeat(_ABSENT)))

        values = self._connection.read(self._blocks, find)
        present = np.fromiter(map(is_not, values, repeat(_ABSENT)), np.bool_, len(values))
        return present, codec.records_from(values)

    def prefix(self, keys: KeyArray) -> int:
        # No galloping: without round trips, asking one by one stops exactly at the hole.
        wanted = codec.key_list(keys)
        return self._connection.read(self._blocks, lambda txn: len(list(takewhile(txn.cursor().set_key, wanted))))

    def scan(self, start: bytes, limit: int) -> tuple[KeyArray, RecordArray]:
        def collect(txn: Transaction) -> tuple[list[bytes], list[bytes]]:
            keys: list[bytes] = []
            values: list[bytes] = []
            cursor = txn.cursor()
            if cursor.set_range(start) if start else cursor.first():
                entries = cursor.iternext()
                while piece := list(islice(entries, min(_SCAN_PIECE_BLOCKS, limit - len(keys)))):
                    found, records = zip(*piece, strict=True)
                    keys += found
                    values += records
            return keys, values

        keys, values = self._connection.read(self._blocks, collect) if limit > 0 else ([], [])
        return codec.keys_from(keys), codec.records_from(values)

    def usage(self) -> dict[bytes, Usage]:
        entries: list[tuple[bytes, bytes]] = self._connection.read(self._usage, lambda txn: list(txn.cursor()))
        return {tenant: codec.unpack_usage(raw) for tenant, raw in entries}

    def count(self) -> int:
        entries: int = self._connection.read(self._blocks, lambda txn: txn.stat(self._blocks)["entries"])
        return entries

    # --- changing records

    def publish(
        self,
        keys: KeyArray,
        records: RecordArray,
        *,
        now_s: int,
        is_draining: Callable[[bytes], bool],
        admit: Callable[[], None] | None = None,
        sync: bool = True,
    ) -> NDArray[np.uint8]:
        """As `BlockIndex.publish`. `admit` runs once per attempt, also when nothing turns out to change; neither it nor
        `is_draining` may write to this index."""
        wanted = codec.key_list(keys)
        values = codec.record_list(records, len(wanted))

        def change(txn: Transaction) -> NDArray[np.uint8]:
            if admit is not None:
                admit()
            present: list[bytes | None] = list(map(txn.get, wanted))
            results, replaced = codec.decide(wanted, present, records, now_s, is_draining)
            writing = np.flatnonzero(results != _EXISTS)
            if len(writing) == 0:
                return results
            _put(txn, [(wanted[at], values[at]) for at in writing.tolist()])
            self._account(txn, records[writing], replaced)
            return results

        return self._connection.write("publishing", self._blocks, change)

    def replace(self, keys: KeyArray, old: RecordArray, new: RecordArray) -> NDArray[np.bool_]:
        wanted = codec.key_list(keys)
        expected, values = codec.record_list(old, len(wanted)), codec.record_list(new, len(wanted))

        def change(txn: Transaction) -> NDArray[np.bool_]:
            swapped = np.zeros(len(wanted), np.bool_)
            for at, (key, before, after) in enumerate(zip(wanted, expected, values, strict=True)):
                if txn.get(key) == before:
                    swapped[at] = True
                    txn.put(key, after)
            self._account(txn, new[swapped], old[swapped])
            return swapped

        return self._connection.write("replacing records", self._blocks, change)

    def remove(self, keys: KeyArray, old: RecordArray | None = None) -> NDArray[np.bool_]:
        wanted = codec.key_list(keys)
        expected = [None] * len(wanted) if old is None else codec.record_list(old, len(wanted))

        def change(txn: Transaction) -> NDArray[np.bool_]:
            removed = np.zeros(len(wanted), np.bool_)
            gone: list[bytes] = []
            for at, (key, before) in enumerate(zip(wanted, expected, strict=True)):
                present = txn.get(key)
                if present is not None and (before is None or present == before):
                    removed[at] = True
                    gone.append(present)
                    txn.delete(key)
            self._account(txn, codec.records_from([]), codec.records_from(gone))
            return removed

        return self._connection.write("removing records", self._blocks, change)

    def load(self, entries: Iterator[tuple[KeyArray, RecordArray]]) -> int:
        """As `BlockIndex.load`, in any order: sorted here, up to `limits.index_load_sort_records_max` at a time. If it
        raises, what was committed so far stays; loading the same entries again is harmless."""
        inserted = 0
        for keys, records in _sorted_shares(entries):
            inserted += self._connection.write("loading", self._blocks, partial(self._load_share, keys, records))
        return inserted

    def _load_share(self, keys: list[bytes], records: RecordArray, txn: Transaction) -> int:
        """`keys` sorted, each once."""
        absent = [at for at, value in enumerate(map(txn.get, keys)) if value is None]
        _put(txn, list(zip([keys[at] for at in absent], codec.record_list(records[absent], len(absent)), strict=True)))
        self._account(txn, records[absent], codec.records_from([]))
        return len(absent)

    def _account(self, txn: Transaction, added: RecordArray, removed: RecordArray) -> None:
        """Usage follows the records in their own transaction, so it is exact whatever is killed when."""
        change: dict[bytes, NDArray[np.int64]] = {}
        for records, sign in ((added, 1), (removed, -1)):
            for tenant, sums in codec.totals(records):
                change[tenant] = change.get(tenant, np.zeros(3, np.int64)) + sign * np.array(sums, np.int64)
        for tenant, delta in change.items():
            before = codec.unpack_usage(txn.get(tenant, codec.NO_USAGE, db=self._usage))
            blocks, block_bytes, record_bytes = (
                np.array([before.blocks, before.block_bytes, before.record_bytes], np.int64) + delta
            ).tolist()
            if min(blocks, block_bytes, record_bytes) < 0:
                raise CatalogError(f"usage of tenant {tenant.hex()} would fall below 0: {_KIND.when_damaged}")
            if blocks == 0:
                txn.delete(tenant, db=self._usage)
            else:
                txn.put(tenant, codec.pack_usage(Usage(blocks, block_bytes, record_bytes)), db=self._usage)

    # --- recency

    def touch(self, fingerprints: NDArray[np.uint64], minutes: NDArray[np.uint32]) -> None:
        pairs = codec.recency_pairs(fingerprints, minutes)
        if len(pairs) == 0:
            return

        def change(txn: Transaction) -> None:
            names = _bucket_names(pairs)
            before = b"".join(map(txn.get, names, repeat(b"")))
            merged = codec.latest(np.concatenate([codec.recency_from(before), pairs]))
            if merged.tobytes() != before:
                _put(txn, _buckets(merged))

        self._connection.write("remembering recency", self._recency, change)

    def recency(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        raw: bytes = self._connection.read(
            self._recency, lambda txn: b"".join(txn.cursor().iternext(keys=False, values=True))
        )
        pairs = codec.recency_from(raw)
        return np.ascontiguousarray(pairs["fingerprint"]), np.ascontiguousarray(pairs["minute"])

    def forget_recency(self, fingerprints: NDArray[np.uint64]) -> None:
        gone = codec.recency_pairs(fingerprints, np.zeros(len(fingerprints), np.uint32))
        if len(gone) == 0:
            return

        def change(txn: Transaction) -> None:
            names = _bucket_names(gone)
            before = codec.recency_from(b"".join(map(txn.get, names, repeat(b""))))
            kept = before[~np.isin(before["fingerprint"], gone["fingerprint"])]
            if len(kept) < len(before):
                remaining = dict(_buckets(kept))
                for name in names:
                    if name not in remaining:
                        txn.delete(name)
                _put(txn, list(remaining.items()))

        self._connection.write("forgetting recency", self._recency, change)

    # --- life

    def sync(self) -> None:
        """Nothing is left to do: every commit was fsynced before its call returned."""
        self._connection.check_open()

    def close(self) -> None:
        self._connection.close()


def _put(txn: Transaction, items: list[tuple[bytes, bytes]]) -> None:
    consumed, _ = txn.cursor().putmulti(sorted(items))
    if consumed != len(items):
        raise CatalogError(f"{consumed} of {len(items)} entries were written; nothing was changed")


def _sorted_shares(entries: Iterator[tuple[KeyArray, RecordArray]]) -> Iterator[tuple[list[bytes], RecordArray]]:
    """Sorted distinct keys with their records, each small enough for one transaction; of equal keys the first stays."""
    keys: list[KeyArray] = []
    records: list[RecordArray] = []
    count = 0
    for some_keys, some_records in entries:
        codec.record_list(some_records, len(codec.key_list(some_keys)))
        keys.append(some_keys)
        records.append(some_records)
        count += len(some_keys)
        if count >= limits.index_load_sort_records_max:
            yield from _sort(np.concatenate(keys), np.concatenate(records))
            keys, records, count = [], [], 0
    if count:
        yield from _sort(np.concatenate(keys), np.concatenate(records))


def _sort(keys: KeyArray, records: RecordArray) -> Iterator[tuple[list[bytes], RecordArray]]:
    order = np.argsort(keys.view(f"S{limits.key_bytes}").ravel(), kind="stable")  # all equally long: as memcmp orders
    ordered = keys[order]
    order = order[np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))]
    size = limits.index_load_txn_records_max
    for at in range(0, len(order), size):
        share = order[at : at + size]
        yield codec.key_list(keys[share]), records[share]


def _bucket_names(pairs: NDArray[np.void]) -> list[bytes]:
    """Of the buckets that these pairs belong to, each once, in order."""
    return [number.to_bytes(2, "big") for number in np.unique(pairs["fingerprint"] >> np.uint64(48)).tolist()]


def _buckets(pairs: NDArray[np.void]) -> list[tuple[bytes, bytes]]:
    """(name, pairs) of each bucket; `pairs` sorted by fingerprint."""
    numbers, starts = np.unique(pairs["fingerprint"] >> np.uint64(48), return_index=True)
    raw = pairs.tobytes()
    edges = [*(starts * codec.RECENCY.itemsize).tolist(), len(raw)]
    return [(number.to_bytes(2, "big"), raw[edges[at] : edges[at + 1]]) for at, number in enumerate(numbers.tolist())]
