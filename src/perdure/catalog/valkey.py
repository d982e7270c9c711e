"""The block index in a Valkey Cluster: for many hosts.

Contract
- Implements `BlockIndex`; see `catalog.api` for the promises. Keys that share their first bits are a group, in one
  hash slot; a call is atomic per group, not over the whole batch, and so is the usage that is counted with it.
- A call ends by its deadline. What could not be asked raises `CatalogUnavailable`: callers that only want a hint take
  it for a miss. A change that raises may have been made in some groups: read again; repeating it is harmless.
- Publish is one script per group that inserts what is absent: one round. Where something is present it is looked at,
  compared and swapped: two more, and more only where others publish the same blocks at that moment. `admit` runs
  before each script, in this process: a lease that is lost after it is not noticed (the same block is published twice,
  the first stays). A record of an epoch of its tenant that is over, or in a segment that was taken over, is refused by
  the script itself (`raise_epoch`, `close_segment`).
- Tolerates failovers that lose acknowledged publishes: those are misses. Never a wrong block: readers verify records.
- Not fsynced before it answers (`sync` does nothing): the index can be rebuilt from the segments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.catalog import codec, valkey_names
from perdure.catalog.api import RECORD, KeyArray, PublishResult, RecordArray, Usage
from perdure.catalog.valkey_cluster import Cluster, Unit, replies_of
from perdure.catalog.valkey_link import Command
from perdure.catalog.valkey_names import (
    BLOCK,
    CHANGE,
    CLOSED,
    EPOCHS,
    GROUPS,
    PUBLISHED,
    RECENCY,
    TOUCH,
    USAGE,
    WHOLE,
    Names,
)
from perdure.catalog.valkey_scan import Listing, everything
from perdure.errors import CatalogError, CatalogUnavailable, OwnershipLost, ReadOnlyStore, StaleFence, StoreClosed

_EXISTS: Final = int(PublishResult.EXISTS)
_ABSENT, _ANYTHING = b"", b"*"
_FIELDS = b"123"  # of a tenant's usage: blocks, block bytes, record bytes


class ValkeyIndex:
    """`BlockIndex` of the store `store` (a short name without braces), in a cluster that others use too."""

    def __init__(
        self,
        cluster: Cluster,
        store: bytes,
        *,
        read_s: float = limits.cluster_read_s_default,
        write_s: float = limits.cluster_write_s_default,
        read_only: bool = False,
    ):
        """`cluster` is closed with it."""
        self._cluster, self._names = cluster, Names(store, GROUPS)
        self._read_s, self._write_s, self._read_only = read_s, write_s, read_only
        self._listing = Listing(self._list)
        self._closed = False
        cluster.know(*valkey_names.INDEX_SCRIPTS)

    @property
    def rounds(self) -> int:
        """Sequential questions to the cluster so far."""
        return self._cluster.rounds

    # --- reading

    def lookup(self, keys: KeyArray) -> tuple[NDArray[np.bool_], RecordArray]:
        values = self._values(keys, codec.key_list(keys), time.monotonic() + self._read_s)
        present = np.fromiter((value is not None for value in values), np.bool_, len(values))
        empty = bytes(RECORD.itemsize)
        return present, codec.records_from([empty if value is None else value for value in values])

    def prefix(self, keys: KeyArray) -> int:
        wanted = codec.key_list(keys)
        deadline = time.monotonic() + self._read_s
        known, step = 0, limits.lookup_gallop_first_blocks * limits.lookup_gallop_factor
        while known < len(wanted):
            values = self._values(keys[known : known + step], wanted[known : known + step], deadline)
            for value in values:
                if value is None:
                    return known
                known += 1
            step = limits.publish_batch_blocks_max
        return known

    def _values(self, keys: KeyArray, wanted: list[bytes], deadline: float) -> list[bytes | None]:
        """The record of each key, None where there is none."""
        units, places = [], []
        for group, members in self._shares(keys, len(wanted)):
            prefix = self._names.prefixes[group] + BLOCK
            command: Command = ("MGET", *[prefix + wanted[at] for at in members])
            units.append(Unit(self._names.slots[group], [command], divisible=True))
            places.append(members)
        self._run(units, deadline)
        for unit in units:
            if unit.divided:
                self._one_by_one(unit, deadline)
        out: list[bytes | None] = [None] * len(wanted)
        for members, found in zip(places, replies_of(units, "looking up blocks"), strict=True):
            for at, value in zip(members, found, strict=True):
                out[at] = value
        return out

    def _one_by_one(self, unit: Unit, deadline: float) -> None:
        """Ask an MGET's keys singly: while a slot is being moved each is on one of two nodes."""
        single = [Unit(unit.slot, [("GET", key)]) for key in unit.commands[0][1:]]
        self._run(single, deadline)
        unit.replies = [replies_of(single, "looking up blocks of a slot that is being moved")]

    def _shares(self, keys: KeyArray, count: int) -> Iterator[tuple[int, list[int]]]:
        """(group, places in the batch) of what is asked together, in the order of the batch."""
        if count == 0:
            return
        numbers = valkey_names.groups(keys)
        order = np.argsort(numbers, kind="stable")
        cuts = np.flatnonzero(np.diff(numbers[order])) + 1
        for members in np.split(order, cuts):
            group = int(numbers[members[0]])
            for at in range(0, len(members), limits.cluster_script_keys_max):
                yield group, members[at : at + limits.cluster_script_keys_max].tolist()

    def _run(self, units: list[Unit], deadline: float) -> None:
        self._check_open()
        self._cluster.run(units, deadline)

    def _run_change(self, units: list[Unit], deadline: float, action: str) -> list[Any]:
        if self._read_only:
            raise ReadOnlyStore(f"block index: {action}: opened read-only")
        self._run(units, deadline)
        return replies_of(units, action, changing=True)

    def scan(self, start: bytes, limit: int) -> tuple[KeyArray, RecordArray]:
        """As `BlockIndex.scan`. Goes on with the keys that the last call has listed, if it follows it within
        `limits.cluster_listing_s`: blocks published meanwhile may be left out. Lists a group at a time, in memory."""
        keys: list[bytes] = []
        values: list[bytes] = []
        while limit > len(keys):
            piece = self._listing.take(start, limit - len(keys))
            if not piece:
                break
            listed = np.frombuffer(b"".join(piece), np.uint8).reshape(-1, limits.key_bytes)
            for key, value in zip(piece, self._values(listed, piece, time.monotonic() + self._write_s), strict=True):
                if value is not None:
                    keys.append(key)
                    values.append(value)
            start = piece[-1] + b"\0"
        return codec.keys_from(keys), codec.records_from(values)

    def _list(self, some: range) -> list[bytes]:
        """All keys of these groups, sorted."""
        patterns: dict[int, Command] = {group: ("SCAN", self._names.key(group, BLOCK) + b"*") for group in some}
        found = everything(self._cluster, self._names, patterns, self._write_s)
        return sorted({name[-limits.key_bytes :] for names in found.values() for name in names})

    def usage(self) -> dict[bytes, Usage]:
        totals: dict[bytes, list[int]] = {}
        for fields in self._of_all("HGETALL", USAGE, "reading usage"):
            for name, value in zip(fields[::2], fields[1::2], strict=True):
                totals.setdefault(name[:-1], [0, 0, 0])[_FIELDS.index(name[-1])] += int(value)
        return {tenant: Usage(*total) for tenant, total in totals.items() if total[0]}

    def count(self) -> int:
        return sum(one.blocks for one in self.usage().values())

    def _of_all(self, verb: str, kind: bytes, action: str) -> list[Any]:
        """The reply of each group."""
        units = [Unit(slot, [(verb, self._names.key(group, kind))]) for group, slot in enumerate(self._names.slots)]
        self._run(units, time.monotonic() + self._write_s)
        return replies_of(units, action)

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
        """As `BlockIndex.publish`, per group; `admit` runs once per attempt. Raises StaleFence also where a record's
        epoch is over. Whoever listens is told (`valkey_wake`)."""
        wanted = codec.key_list(keys)
        values = codec.record_list(records, len(wanted))
        deadline = time.monotonic() + self._write_s
        out = np.full(len(wanted), _EXISTS, np.uint8)
        firsts = {key: at for at, key in reversed(list(enumerate(wanted)))}
        left = np.array(sorted(firsts.values()), np.intp)  # of equal keys the first decides
        expected, results = [_ABSENT] * len(left), np.full(len(left), PublishResult.INSERTED, np.uint8)
        for _ in range(limits.cluster_rounds_attempts_max):
            if admit is not None:
                admit()
            new = [values[at] for at in left.tolist()]
            done = self._change(keys[left], expected, new, deadline, tell=True, exact=True) > 0
            out[left[done]] = results[done]
            left = left[~done]
            if len(left):
                some = [wanted[at] for at in left.tolist()]
                present = self._values(keys[left], some, deadline)
                results, _replaced = codec.decide(some, present, records[left], now_s, is_draining)
                writing = np.flatnonzero(results != _EXISTS)
                expected = [present[at] or _ABSENT for at in writing.tolist()]
                left, results = left[writing], results[writing]
            if not len(left):
                return out
        raise CatalogUnavailable("catalog: publishing: others kept changing the same blocks; read it again")

    def replace(self, keys: KeyArray, old: RecordArray, new: RecordArray) -> NDArray[np.bool_]:
        count = len(codec.key_list(keys))
        expected, values = codec.record_list(old, count), codec.record_list(new, count)
        deadline = time.monotonic() + self._write_s
        return self._change(keys, expected, values, deadline, exact=True) > 0

    def remove(self, keys: KeyArray, old: RecordArray | None = None) -> NDArray[np.bool_]:
        count = len(codec.key_list(keys))
        expected = [_ANYTHING] * count if old is None else codec.record_list(old, count)
        return self._change(keys, expected, [b""] * count, time.monotonic() + self._write_s) > 0

    def load(self, entries: Iterator[tuple[KeyArray, RecordArray]]) -> int:
        """As `BlockIndex.load`, in any order. If it raises, what was loaded so far stays; loading it again is harmless.
        Counts too few where an answer was lost."""
        inserted = 0
        for keys, records in entries:
            values = codec.record_list(records, len(codec.key_list(keys)))
            for at in range(0, len(values), limits.publish_batch_blocks_max):
                part = slice(at, at + limits.publish_batch_blocks_max)
                some = values[part]
                deadline = time.monotonic() + self._write_s
                done = self._change(keys[part], [_ABSENT] * len(some), some, deadline, fenced=False)
                inserted += int((done == 1).sum())
        return inserted

    def _change(
        self,
        keys: KeyArray,
        expected: Sequence[bytes],
        new: Sequence[bytes],
        deadline: float,
        *,
        tell: bool = False,
        exact: bool = False,
        fenced: bool = True,
    ) -> NDArray[np.uint8]:
        """Per key 0 changed meanwhile, 1 done, 2 it was so already. `exact`: 2 only counts after a lost answer.
        `fenced`: segments that were closed take no more."""
        wanted = codec.key_list(keys)
        units, places = [], []
        for group, members in self._shares(keys, len(wanted)):
            prefix = self._names.prefixes[group]
            names = [prefix + kind for kind in (USAGE, EPOCHS, CLOSED)]
            names += [prefix + BLOCK + wanted[at] for at in members]
            pairs = [one for at in members for one in (expected[at], new[at])]
            channel = prefix + PUBLISHED if tell else b""
            units.append(Unit(self._names.slots[group], [CHANGE.call(names, channel, b"1" if fenced else b"", *pairs)]))
            places.append(members)
        answers = self._run_change(units, deadline, "changing blocks")
        out = np.zeros(len(wanted), np.uint8)
        for unit, members, answer in zip(units, places, answers, strict=True):
            if answer == b"E":
                raise StaleFence("a block is of an epoch of its tenant that is over; it was not published")
            if answer == b"S":
                raise OwnershipLost("a segment was taken over while this process was silent; nothing more goes into it")
            if len(answer) != len(members):
                raise CatalogError(f"catalog: a script answered {answer!r}: the cluster is not ours")
            codes = np.frombuffer(answer, np.uint8) - ord("0")
            out[members] = np.where((codes == 2) & (exact and not unit.doubtful), 0, codes)
        return out

    def raise_epoch(self, tenant: bytes, epoch: int) -> None:
        """From now on no record of an earlier epoch of this tenant is published, in any group. Replicated before it
        returns; may be repeated."""
        units = [
            Unit(slot, [valkey_names.RAISE_EPOCH.call([self._names.key(group, EPOCHS)], tenant, epoch)], 1)
            for group, slot in enumerate(self._names.slots)
        ]
        self._run_change(units, time.monotonic() + self._write_s, "raising a tenant's epoch")

    def close_segment(self, segment: bytes, now_s: float) -> None:
        """From now on nothing more is published in this segment, whoever thinks it is his. Replicated before it
        returns; may be repeated. `load` still takes what lies in it."""
        times = (b"%d" % now_s, limits.cluster_closed_s)
        units = [
            Unit(slot, [valkey_names.CLOSE.call([self._names.key(group, CLOSED)], segment, *times)], 1)
            for group, slot in enumerate(self._names.slots)
        ]
        self._run_change(units, time.monotonic() + self._write_s, "closing a segment")

    # --- recency

    def touch(self, fingerprints: NDArray[np.uint64], minutes: NDArray[np.uint32]) -> None:
        pairs = codec.recency_pairs(fingerprints, minutes)
        for at in range(0, len(pairs), limits.publish_batch_blocks_max):
            self._recency_units(pairs[at : at + limits.publish_batch_blocks_max], forget=False)
        self._check_open()

    def forget_recency(self, fingerprints: NDArray[np.uint64]) -> None:
        gone = codec.recency_pairs(fingerprints, np.zeros(len(fingerprints), np.uint32))
        for at in range(0, len(gone), limits.publish_batch_blocks_max):
            self._recency_units(gone[at : at + limits.publish_batch_blocks_max], forget=True)

    def _recency_units(self, pairs: NDArray[np.void], *, forget: bool) -> None:
        prints = np.ascontiguousarray(pairs["fingerprint"])
        numbers = valkey_names.groups_of_prints(prints)
        units = []
        for group in np.unique(numbers).tolist():
            mine = np.flatnonzero(numbers == group)
            key = self._names.key(group, RECENCY)
            fields = prints[mine].astype("<u8").view("V8").tolist()
            command: Command
            if forget:
                command = ("HDEL", key, *fields)
            else:
                uses = zip(fields, pairs["minute"][mine].tolist(), strict=True)
                command = TOUCH.call([key], *[one for use in uses for one in use])
            units.append(Unit(self._names.slots[group], [command]))
        self._run_change(units, time.monotonic() + self._write_s, "remembering recency")

    def recency(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        self._check_open()
        questions: dict[int, Command] = {
            group: ("HSCAN", self._names.key(group, RECENCY)) for group in range(GROUPS)
        }  # fmt: skip
        found = everything(self._cluster, self._names, questions, self._write_s)
        flat = [one for fields in found.values() for one in fields]
        prints = np.frombuffer(b"".join(flat[::2]), "<u8")
        pairs = codec.recency_pairs(prints, np.array(list(map(int, flat[1::2])), np.uint32))
        return np.ascontiguousarray(pairs["fingerprint"]), np.ascontiguousarray(pairs["minute"])

    # --- life

    def is_whole(self) -> bool:
        """Whether no group was lost since `mark_whole`. A new index is not whole."""
        return all(mark is not None for mark in self._of_all("GET", WHOLE, "looking for what was lost"))

    def mark_whole(self) -> None:
        """Everything that is to be found has been published or loaded."""
        units = [Unit(slot, [("SET", self._names.key(group, WHOLE), "1")], 1)
                 for group, slot in enumerate(self._names.slots)]  # fmt: skip
        self._run_change(units, time.monotonic() + self._write_s, "marking the block index")

    def clear(self) -> None:
        """Forget every record, use and mark; the epochs of tenants stay."""
        for group, slot in enumerate(self._names.slots):
            gone = [self._names.key(group, kind) for kind in (WHOLE, USAGE, RECENCY)]
            gone += [self._names.key(group, BLOCK, key) for key in self._list(range(group, group + 1))]
            for at in range(0, len(gone), limits.publish_batch_blocks_max):
                unit = Unit(slot, [("UNLINK", *gone[at : at + limits.publish_batch_blocks_max])])
                self._run_change([unit], time.monotonic() + self._write_s, "clearing the block index")

    def channels(self) -> dict[bytes, tuple[int, bool]]:
        """Where publishes are told; see `valkey_wake.Channels`."""
        return {self._names.key(group, PUBLISHED): (slot, True) for group, slot in enumerate(self._names.slots)}

    def sync(self) -> None:
        """Nothing is done: the servers write their logs once a second by themselves."""
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the catalog was closed")
        self._cluster.check_open()

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._cluster.close()
