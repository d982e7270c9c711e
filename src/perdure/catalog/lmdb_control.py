"""The control store in LMDB: documents, segments, leases and pins of one machine's stores.

Contract
- Implements `ControlStore`; see `catalog.api` for the promises and `catalog.environment` for what LMDB adds to them.
- Every change is fsynced before the call returns; a call that changes nothing does not commit.
- Tolerates a kill or power cut at any point: each call happened entirely or not at all.
- Never gives a lease token or pin id twice: one counter for all scopes, and one for pins, only ever grow. So what is
  released can be deleted, and scopes that are used once leave nothing behind.
- The truth: nothing rebuilds it. A damaged file is refused, never repaired by guessing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from perdure import limits
from perdure.catalog import codec
from perdure.catalog.api import KeyArray, Lease, Pin, SegmentRecord
from perdure.catalog.environment import Connection, Kind, Transaction
from perdure.errors import InvalidArgument

_KIND: Final = Kind(
    name="control store",
    databases=("documents", "segments", "leases", "pins", "counters"),
    format_version=1,
    when_damaged="restore the directory from a backup; don't delete it, it cannot be rebuilt from the segments",
)
_U64: Final = 8


class LmdbControl:
    """`ControlStore` in the directory `path`, created with mode 0700 if missing.

    Raises `CatalogError` if the directory or file cannot be used, `FormatError` if it is another program's.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False):
        self._connection = Connection(path, _KIND, map_bytes=limits.control_map_bytes, read_only=read_only)
        self._documents, self._segments, self._leases, self._pins, self._counters = map(
            self._connection.database, _KIND.databases
        )

    # --- documents

    def get(self, namespace: str, key: bytes) -> bytes | None:
        name = codec.document_key(namespace, key)
        value: bytes | None = self._connection.read(self._documents, lambda txn: txn.get(name))
        return value

    def compare_and_set(self, namespace: str, key: bytes, expected: bytes | None, new: bytes | None) -> bool:
        name = codec.document_key(namespace, key)
        if new is not None and len(new) > limits.document_bytes_max:
            raise InvalidArgument(f"document of {len(new)} bytes: {limits.document_bytes_max} are possible")

        def change(txn: Transaction) -> bool:
            present = txn.get(name)
            if present != expected:
                return False
            if new is None:
                txn.delete(name)
            elif new != present:
                txn.put(name, new)
            return True

        return self._connection.write("setting a document", self._documents, change)

    def items(self, namespace: str, after: bytes = b"", limit: int | None = None) -> list[tuple[bytes, bytes]]:
        prefix = codec.document_prefix(namespace)
        first = prefix + after + b"\0" if after else prefix  # no key lies between a key and itself with a zero

        def collect(txn: Transaction) -> list[tuple[bytes, bytes]]:
            found: list[tuple[bytes, bytes]] = []
            cursor = txn.cursor()
            if cursor.set_range(first):
                for name, value in cursor.iternext():
                    if not name.startswith(prefix) or len(found) == limit:
                        break
                    found.append((name[len(prefix) :], value))
            return found

        return self._connection.read(self._documents, collect)

    # --- segments

    def put_segment(self, record: SegmentRecord) -> None:
        value = codec.pack_segment(codec.check_segment(record))

        def change(txn: Transaction) -> None:
            if txn.get(record.segment) != value:
                txn.put(record.segment, value)

        self._connection.write("recording a segment", self._segments, change)

    def swap_segment(self, old: SegmentRecord | None, new: SegmentRecord) -> bool:
        expected = None if old is None else codec.pack_segment(old)
        value = codec.pack_segment(codec.check_segment(new))

        def change(txn: Transaction) -> bool:
            if txn.get(new.segment) != expected:
                return False
            txn.put(new.segment, value)
            return True

        return self._connection.write("changing a segment record", self._segments, change)

    def get_segment(self, segment: bytes) -> SegmentRecord | None:
        name = codec.check_name("segment", segment)
        raw: bytes | None = self._connection.read(self._segments, lambda txn: txn.get(name))
        return None if raw is None else codec.unpack_segment(segment, raw)

    def delete_segment(self, segment: bytes) -> None:
        name = codec.check_name("segment", segment)
        self._connection.write("deleting a segment record", self._segments, lambda txn: txn.delete(name))

    def segments(self) -> list[SegmentRecord]:
        entries: list[tuple[bytes, bytes]] = self._connection.read(self._segments, lambda txn: list(txn.cursor()))
        return [codec.unpack_segment(segment, raw) for segment, raw in entries]

    # --- leases

    def acquire(self, scope: bytes, holder: bytes, now_s: float, ttl_s: float) -> Lease | None:
        codec.check_name("lease scope", scope)
        codec.check_name("lease holder", holder)
        deadline_s = codec.check_time("now_s", now_s) + codec.check_ttl(ttl_s)

        def change(txn: Transaction) -> Lease | None:
            raw = txn.get(scope)
            present = None if raw is None else codec.unpack_lease(scope, raw)
            if present is None or present.deadline_s <= now_s:
                lease = Lease(scope, holder, self._count(txn, b"lease token"), deadline_s)
            elif present.holder == holder:
                lease = replace(present, deadline_s=deadline_s)
            else:
                return None
            txn.put(scope, codec.pack_lease(lease))
            return lease

        return self._connection.write("acquiring a lease", self._leases, change)

    def renew(self, lease: Lease, now_s: float, ttl_s: float) -> Lease | None:
        renewed = replace(lease, deadline_s=codec.check_time("now_s", now_s) + codec.check_ttl(ttl_s))

        def change(txn: Transaction) -> Lease | None:
            if not _is_held(txn, lease):
                return None
            txn.put(lease.scope, codec.pack_lease(renewed))
            return renewed

        return self._connection.write("renewing a lease", self._leases, change)

    def release(self, lease: Lease) -> bool:
        def change(txn: Transaction) -> bool:
            held = _is_held(txn, lease)
            if held:
                txn.delete(lease.scope)
            return held

        return self._connection.write("releasing a lease", self._leases, change)

    def check(self, lease: Lease) -> bool:
        return self._connection.read(self._leases, lambda txn: _is_held(txn, lease))

    # --- pins

    def pin(self, owner: bytes, keys: KeyArray, deadline_s: float) -> int:
        codec.check_name("pin owner", owner)
        codec.check_time("deadline_s", deadline_s)
        listed = tuple(codec.key_list(keys))
        if len(listed) > limits.pin_blocks_max:
            raise InvalidArgument(f"pin of {len(listed)} keys: {limits.pin_blocks_max} are possible")

        def change(txn: Transaction) -> int:
            pin_id = self._count(txn, b"pin id")
            txn.put(pin_id.to_bytes(_U64, "big"), codec.pack_pin(Pin(pin_id, owner, deadline_s, listed)))
            return pin_id

        return self._connection.write("pinning", self._pins, change)

    def unpin(self, pin_id: int) -> bool:
        if not 0 <= pin_id < 1 << 64:
            return False

        def change(txn: Transaction) -> bool:
            return bool(txn.delete(pin_id.to_bytes(_U64, "big")))

        return self._connection.write("unpinning", self._pins, change)

    def pins(self) -> list[Pin]:
        entries: list[tuple[bytes, bytes]] = self._connection.read(self._pins, lambda txn: list(txn.cursor()))
        return [codec.unpack_pin(int.from_bytes(name, "big"), raw) for name, raw in entries]

    def end_owner(self, owner: bytes) -> int:
        def is_owners_pin(name: bytes, raw: bytes) -> bool:
            return codec.unpack_pin(int.from_bytes(name, "big"), raw).owner == owner

        def is_owners_lease(name: bytes, raw: bytes) -> bool:
            return codec.unpack_lease(name, raw).holder.startswith(owner)

        def change(txn: Transaction) -> int:
            return _delete_where(txn, self._pins, is_owners_pin) + _delete_where(txn, self._leases, is_owners_lease)

        return self._connection.write("ending an owner", self._pins, change)

    def expire(self, now_s: float) -> int:
        codec.check_time("now_s", now_s)

        def is_past(name: bytes, raw: bytes) -> bool:
            return codec.unpack_pin(int.from_bytes(name, "big"), raw).deadline_s <= now_s

        def change(txn: Transaction) -> int:
            return _delete_where(txn, self._pins, is_past)

        return self._connection.write("expiring pins", self._pins, change)

    def close(self) -> None:
        self._connection.close()

    def _count(self, txn: Transaction, name: bytes) -> int:
        """The next number of a counter, from 1."""
        number = int.from_bytes(txn.get(name, b"", db=self._counters), "little") + 1
        txn.put(name, number.to_bytes(_U64, "little"), db=self._counters)
        return number


def _is_held(txn: Transaction, lease: Lease) -> bool:
    raw = txn.get(lease.scope)
    return raw is not None and codec.unpack_lease(lease.scope, raw).token == lease.token


def _delete_where(txn: Transaction, database: object, condition: Callable[[bytes, bytes], bool]) -> int:
    gone = [name for name, raw in txn.cursor(db=database) if condition(name, raw)]
    for name in gone:
        txn.delete(name, db=database)
    return len(gone)
