"""The control store in a Valkey Cluster: documents, segments, leases and pins that many hosts share.

Contract
- Implements `ControlStore`; see `catalog.api` for the promises. Each change is one script or command in one slot.
- A change is acknowledged when a replica has it too (WAIT). Else it raises `CatalogUnavailable`, and whether it
  happened has to be read. A change that was sent again after its answer was lost says what happened, or raises.
- Survives a failover to the replica that acknowledged. Documents, leases and pins can be rolled back only where a
  replica without them is promoted, or all copies lose power within a second of the write (the servers sync their logs
  once a second). Tokens and pin ids are not given twice even then, while the servers' clocks differ by less than a
  failover takes.
- Reads are answered by primaries. One that is cut off from the others may answer with old values until it notices
  (`cluster-node-timeout`); its writes are never acknowledged.
- Time is what the caller says it is: hosts that share leases must pass readings of one clock
  (`perdure.catalogs.SharedClock`).
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from perdure import limits
from perdure.catalog import codec, valkey_names
from perdure.catalog.api import KeyArray, Lease, Pin, SegmentRecord
from perdure.catalog.valkey_cluster import Cluster, Unit, replies_of
from perdure.catalog.valkey_link import Command
from perdure.catalog.valkey_names import (
    ACQUIRE,
    DOCUMENT_ORDER,
    DOCUMENTS,
    END_OWNER,
    EXPIRE,
    LAST_TOKEN,
    LEASES,
    PINS,
    RELEASE,
    RELEASED,
    RENEW,
    SEGMENT_LOG,
    SEGMENTS,
    SET_DOCUMENT,
    SET_SEGMENT,
    Names,
)
from perdure.catalog.valkey_news import SegmentNews
from perdure.errors import CatalogUnavailable, InvalidArgument, ReadOnlyStore, StoreClosed

_ANYTHING: Final = b"*"
_NUMBER_BYTES: Final = 16  # of a change: before each document that was stored, beside each segment in the log
_U64: Final = 8
_PIN_RANDOM_BITS: Final = 12


class ValkeyControl:
    """`ControlStore` of the store `store` (a short name without braces). `replicas`: how many must have a change."""

    def __init__(
        self,
        cluster: Cluster,
        store: bytes,
        *,
        replicas: int = 1,
        wait_s: float = limits.cluster_write_s_default,
        read_only: bool = False,
    ):
        """`cluster` is closed with it."""
        self._cluster, self._names = cluster, Names(b"c" + store, limits.cluster_control_slots)
        self._replicas, self._wait_s, self._read_only = replicas, wait_s, read_only
        self._closed = False
        cluster.know(*valkey_names.CONTROL_SCRIPTS)

    @property
    def rounds(self) -> int:
        """Sequential questions to the cluster so far."""
        return self._cluster.rounds

    # --- documents

    def get(self, namespace: str, key: bytes) -> bytes | None:
        group, fields, _ = self._document(namespace, key)
        raw = self._ask(group, ("HGET", fields, key), "reading a document")
        return None if raw is None else raw[_NUMBER_BYTES:]

    def compare_and_set(self, namespace: str, key: bytes, expected: bytes | None, new: bytes | None) -> bool:
        group, fields, order = self._document(namespace, key)
        if new is not None and len(new) > limits.document_bytes_max:
            raise InvalidArgument(f"document of {len(new)} bytes: {limits.document_bytes_max} are possible")
        number = secrets.token_bytes(_NUMBER_BYTES)
        values = [b"" if value is None else b"=" + bytes(value) for value in (expected, new)]
        command = SET_DOCUMENT.call([fields, order], key, number, *values)
        return self._decide(group, command, "setting a document")

    def items(self, namespace: str, after: bytes = b"", limit: int | None = None) -> list[tuple[bytes, bytes]]:
        prefix = codec.document_prefix(namespace)
        found: list[tuple[bytes, bytes]] = []
        while limit is None or len(found) < limit:
            missing = -1 if limit is None else limit - len(found)
            listed = self._listed(prefix, after, missing)
            found += self._documents(prefix, listed)
            if limit is None or len(listed) < missing:
                break
            after = listed[-1]  # what was deleted between the two questions is made up for
        return found

    def _listed(self, prefix: bytes, after: bytes, limit: int) -> list[bytes]:
        first = b"(" + after if after else b"-"
        commands: list[Command] = [
            ("ZRANGEBYLEX", self._names.key(group, DOCUMENT_ORDER, prefix), first, "+", "LIMIT", 0, limit)
            for group in range(self._names.count)
        ]
        names = sorted(name for part in self._ask_all(commands, "listing documents") for name in part)
        return names if limit < 0 else names[:limit]

    def _documents(self, prefix: bytes, names: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """Those that are (still) there, in the order asked."""
        shares: dict[int, list[bytes]] = {}
        for name in names:
            shares.setdefault(self._names.group_of(prefix + name), []).append(name)
        units = [
            Unit(self._names.slots[group], [("HMGET", self._names.key(group, DOCUMENTS, prefix), *mine)])
            for group, mine in shares.items()
        ]
        self._run(units)
        values: dict[bytes, bytes | None] = {}
        for mine, part in zip(shares.values(), replies_of(units, "reading documents"), strict=True):
            values.update(zip(mine, part, strict=True))
        return [(name, raw[_NUMBER_BYTES:]) for name in names if (raw := values[name]) is not None]

    def _document(self, namespace: str, key: bytes) -> tuple[int, bytes, bytes]:
        """Group of a document, and the names of its namespace's documents and of their order there."""
        group = self._names.group_of(codec.document_key(namespace, key))
        prefix = codec.document_prefix(namespace)
        return group, self._names.key(group, DOCUMENTS, prefix), self._names.key(group, DOCUMENT_ORDER, prefix)

    # --- segments

    def put_segment(self, record: SegmentRecord) -> None:
        self._set_segment(
            record.segment, _ANYTHING, codec.pack_segment(codec.check_segment(record)), "recording a segment"
        )

    def swap_segment(self, old: SegmentRecord | None, new: SegmentRecord) -> bool:
        """As `ControlStore.swap_segment`; True also where the present record equals `new` already."""
        expected = b"" if old is None else codec.pack_segment(old)
        value = codec.pack_segment(codec.check_segment(new))
        return self._set_segment(new.segment, expected, value, "changing a segment record")

    def _set_segment(self, segment: bytes, expected: bytes, value: bytes, action: str) -> bool:
        group, key = self._segment(segment)
        names = [key, self._names.key(group, SEGMENT_LOG)]
        number = secrets.token_bytes(_NUMBER_BYTES)
        command = SET_SEGMENT.call(names, segment, expected, value, number, limits.cluster_log_records_max)
        return bool(self._ask(group, command, action, changing=True))

    def get_segment(self, segment: bytes) -> SegmentRecord | None:
        codec.check_name("segment", segment)
        group, key = self._segment(segment)
        raw = self._ask(group, ("HGET", key, segment), "reading a segment record")
        return None if raw is None else codec.unpack_segment(segment, raw)

    def delete_segment(self, segment: bytes) -> None:
        codec.check_name("segment", segment)
        self._set_segment(segment, _ANYTHING, b"", "deleting a segment record")

    def segments(self) -> list[SegmentRecord]:
        entries = self._all_fields(SEGMENTS, "reading the segments")
        return [codec.unpack_segment(segment, raw) for segment, raw in sorted(entries)]

    def news(self) -> SegmentNews:
        """Of the segments, for one who looks again and again."""
        return SegmentNews(self._names, self._ask_all)

    def _segment(self, segment: bytes) -> tuple[int, bytes]:
        group = self._names.group_of(segment)
        return group, self._names.key(group, SEGMENTS)

    # --- leases

    def acquire(self, scope: bytes, holder: bytes, now_s: float, ttl_s: float) -> Lease | None:
        codec.check_name("lease scope", scope)
        codec.check_name("lease holder", holder)
        deadline_s = codec.check_time("now_s", now_s) + codec.check_ttl(ttl_s)
        group, key = self._lease(scope)
        names = [key, self._names.key(group, LAST_TOKEN)]
        command = ACQUIRE.call(names, scope, holder, _f64(now_s), _f64(deadline_s))
        raw = self._ask(group, command, "acquiring a lease", changing=True)
        return codec.unpack_lease(scope, raw) if raw else None

    def renew(self, lease: Lease, now_s: float, ttl_s: float) -> Lease | None:
        deadline_s = codec.check_time("now_s", now_s) + codec.check_ttl(ttl_s)
        group, key = self._lease(lease.scope)
        command = RENEW.call([key], lease.scope, _token(lease), _f64(deadline_s))
        done = self._ask(group, command, "renewing a lease", changing=True)
        return replace(lease, deadline_s=deadline_s) if done else None

    def release(self, lease: Lease) -> bool:
        group, key = self._lease(lease.scope)
        channel = self._names.key(group, RELEASED)
        return self._decide(group, RELEASE.call([key], lease.scope, _token(lease), channel), "releasing a lease")

    def check(self, lease: Lease) -> bool:
        group, key = self._lease(lease.scope)
        raw = self._ask(group, ("HGET", key, lease.scope), "checking a lease")
        return raw is not None and codec.unpack_lease(lease.scope, raw).token == lease.token

    def lease_of(self, scope: bytes) -> Lease | None:
        """The lease as it stands, whether it has ended or not: for people who look."""
        group, key = self._lease(scope)
        raw = self._ask(group, ("HGET", key, scope), "reading a lease")
        return None if raw is None else codec.unpack_lease(scope, raw)

    def _lease(self, scope: bytes) -> tuple[int, bytes]:
        group = self._names.group_of(scope)
        return group, self._names.key(group, LEASES)

    # --- pins

    def pin(self, owner: bytes, keys: KeyArray, deadline_s: float) -> int:
        codec.check_name("pin owner", owner)
        codec.check_time("deadline_s", deadline_s)
        listed = tuple(codec.key_list(keys))
        if len(listed) > limits.pin_blocks_max:
            raise InvalidArgument(f"pin of {len(listed)} keys: {limits.pin_blocks_max} are possible")
        value = codec.pack_pin(Pin(0, owner, deadline_s, listed))
        while True:
            pin_id = _new_pin_id()
            group, key, field = self._pin(pin_id)
            unit = Unit(self._names.slots[group], [("HSETNX", key, field, value)], self._replicas)
            self._run([unit], changing=True)
            if replies_of([unit], "pinning", changing=True)[0] or unit.doubtful:
                return pin_id

    def unpin(self, pin_id: int) -> bool:
        if not 0 <= pin_id < 1 << 64:
            return False
        group, key, field = self._pin(pin_id)
        return self._decide(group, ("HDEL", key, field), "unpinning")

    def pins(self) -> list[Pin]:
        entries = [(int.from_bytes(field, "big"), raw) for field, raw in self._all_fields(PINS, "reading the pins")]
        return [codec.unpack_pin(pin_id, raw) for pin_id, raw in sorted(entries)]

    def end_owner(self, owner: bytes) -> int:
        """As `ControlStore.end_owner`; counts too few where an answer was lost."""
        commands = [
            END_OWNER.call([self._names.key(group, LEASES), self._names.key(group, PINS)], owner)
            for group in range(self._names.count)
        ]
        return sum(self._ask_all(commands, "ending an owner", changing=True))

    def expire(self, now_s: float) -> int:
        """As `ControlStore.expire`; counts too few where an answer was lost."""
        codec.check_time("now_s", now_s)
        commands = [EXPIRE.call([self._names.key(group, PINS)], _f64(now_s)) for group in range(self._names.count)]
        return sum(self._ask_all(commands, "expiring pins", changing=True))

    def _pin(self, pin_id: int) -> tuple[int, bytes, bytes]:
        group = pin_id % self._names.count
        return group, self._names.key(group, PINS), pin_id.to_bytes(_U64, "big")

    # --- asking

    def clock_s(self) -> float:
        """Seconds since 1970 by one of the cluster's nodes."""
        seconds, micros = self._ask(0, ("TIME",), "asking for the time")
        return int(seconds) + int(micros) / 1e6

    def channels(self) -> dict[bytes, tuple[int, bool]]:
        """Where releases are told; see `valkey_wake.Channels`."""
        return {self._names.key(group, RELEASED): (slot, False) for group, slot in enumerate(self._names.slots)}

    def _ask(self, group: int, command: Command, action: str, *, changing: bool = False) -> Any:
        unit = Unit(self._names.slots[group], [command], self._replicas if changing else 0)
        self._run([unit], changing=changing)
        return replies_of([unit], action, changing=changing)[0]

    def _decide(self, group: int, command: Command, action: str) -> bool:
        """Of a change that answers whether it happened. No after a lost answer may mean: it did, and more since."""
        unit = Unit(self._names.slots[group], [command], self._replicas)
        self._run([unit], changing=True)
        done = bool(replies_of([unit], action, changing=True)[0])
        if not done and unit.doubtful:
            raise CatalogUnavailable(f"catalog: {action}: an answer was lost; read it again: it may have happened")
        return done

    def _ask_all(self, commands: Sequence[Command], action: str, *, changing: bool = False) -> list[Any]:
        """One command per group."""
        replicas = self._replicas if changing else 0
        units = [
            Unit(slot, [command], replicas) for slot, command in zip(self._names.slots, commands, strict=True)
        ]  # fmt: skip
        self._run(units, changing=changing)
        return replies_of(units, action, changing=changing)

    def _all_fields(self, kind: bytes, action: str) -> list[tuple[bytes, bytes]]:
        commands: list[Command] = [("HGETALL", self._names.key(group, kind)) for group in range(self._names.count)]
        flat = [one for fields in self._ask_all(commands, action) for one in fields]
        return list(zip(flat[::2], flat[1::2], strict=True))

    def _run(self, units: Sequence[Unit], *, changing: bool = False) -> None:
        if self._closed:
            raise StoreClosed("the catalog was closed")
        if changing and self._read_only:
            raise ReadOnlyStore("control store: opened read-only")
        self._cluster.run(units, time.monotonic() + self._wait_s)

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._cluster.close()


def _new_pin_id() -> int:
    """Microseconds since 1970 and a random part: later ones are greater, and other hosts' are others."""
    return time.time_ns() // 1000 << _PIN_RANDOM_BITS | secrets.randbits(_PIN_RANDOM_BITS)


def _f64(value: float) -> bytes:
    return struct.pack("<d", value)


def _token(lease: Lease) -> bytes:
    return struct.pack("<Q", lease.token)
