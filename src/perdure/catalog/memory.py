"""Block index and control store in plain dictionaries: for tests, and the model of the truth for other catalogs.

Contract
- Implements `BlockIndex` and `ControlStore` with every promise but durability: nothing outlives the object.
- One lock around every call, callbacks included; they may read the same catalog but not change it.
- Written to be obviously right rather than fast, with its own copy of every rule: what is computed elsewhere (usage,
  order, "at least as good") is derived here from the dictionaries at each call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.catalog import codec
from perdure.catalog.api import RECORD, KeyArray, Lease, Pin, PublishResult, RecordArray, SegmentRecord, Usage
from perdure.errors import InvalidArgument, StoreClosed


class _Shared:
    """A reentrant lock that refuses callers after `close`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._closed = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._closed:
            self._lock.release()
            raise StoreClosed("the catalog was closed")

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True


class MemoryIndex:
    """`BlockIndex` without storage."""

    def __init__(self) -> None:
        self._shared = _Shared()
        self._blocks: dict[bytes, bytes] = {}
        self._recency: dict[int, int] = {}

    def lookup(self, keys: KeyArray) -> tuple[NDArray[np.bool_], RecordArray]:
        wanted = codec.key_list(keys)
        with self._shared:
            values = [self._blocks.get(key) for key in wanted]
        present = np.array([value is not None for value in values], np.bool_)
        return present, codec.records_from([bytes(RECORD.itemsize) if value is None else value for value in values])

    def prefix(self, keys: KeyArray) -> int:
        wanted = codec.key_list(keys)
        with self._shared:
            for number, key in enumerate(wanted):
                if key not in self._blocks:
                    return number
        return len(wanted)

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
        wanted = codec.key_list(keys)
        values = codec.record_list(records, len(wanted))
        results = np.zeros(len(wanted), np.uint8)
        with self._shared:
            if admit is not None:
                admit()
            after: dict[bytes, bytes] = {}  # applied at the end, so that a callback that raises changes nothing
            seen: set[bytes] = set()
            for number, (key, value) in enumerate(zip(wanted, values, strict=True)):
                present = self._blocks.get(key)
                if key in seen:
                    results[number] = PublishResult.EXISTS
                elif present is None:
                    results[number] = PublishResult.INSERTED
                    after[key] = value
                elif _at_least_as_good(_record(present), _record(value), now_s, is_draining):
                    results[number] = PublishResult.EXISTS
                else:
                    results[number] = PublishResult.REPLACED
                    after[key] = value
                seen.add(key)
            self._blocks.update(after)
        return results

    def replace(self, keys: KeyArray, old: RecordArray, new: RecordArray) -> NDArray[np.bool_]:
        wanted = codec.key_list(keys)
        before, after = codec.record_list(old, len(wanted)), codec.record_list(new, len(wanted))
        swapped = np.zeros(len(wanted), np.bool_)
        with self._shared:
            for number, key in enumerate(wanted):
                if self._blocks.get(key) == before[number]:
                    self._blocks[key] = after[number]
                    swapped[number] = True
        return swapped

    def remove(self, keys: KeyArray, old: RecordArray | None = None) -> NDArray[np.bool_]:
        wanted = codec.key_list(keys)
        before = None if old is None else codec.record_list(old, len(wanted))
        removed = np.zeros(len(wanted), np.bool_)
        with self._shared:
            for number, key in enumerate(wanted):
                if key in self._blocks and (before is None or self._blocks[key] == before[number]):
                    del self._blocks[key]
                    removed[number] = True
        return removed

    def scan(self, start: bytes, limit: int) -> tuple[KeyArray, RecordArray]:
        with self._shared:
            found = sorted(key for key in self._blocks if key >= start)[: max(limit, 0)]
            return codec.keys_from(found), codec.records_from([self._blocks[key] for key in found])

    def load(self, entries: Iterator[tuple[KeyArray, RecordArray]]) -> int:
        inserted = 0
        for keys, records in entries:
            wanted = codec.key_list(keys)
            values = codec.record_list(records, len(wanted))
            with self._shared:
                for key, value in zip(wanted, values, strict=True):
                    if key not in self._blocks:
                        self._blocks[key] = value
                        inserted += 1
        return inserted

    def usage(self) -> dict[bytes, Usage]:
        with self._shared:
            values = list(self._blocks.values())
        totals: dict[bytes, Usage] = {}
        for value in values:
            record = _record(value)
            pages = (int(record["stored_bytes"]) + limits.page_bytes - 1) // limits.page_bytes
            tenant = record["tenant"].tobytes()
            sofar = totals.get(tenant, Usage(0, 0, 0))
            totals[tenant] = Usage(
                blocks=sofar.blocks + 1,
                block_bytes=sofar.block_bytes + int(record["block_bytes"]),
                record_bytes=sofar.record_bytes + (1 + pages) * limits.page_bytes,
            )
        return totals

    def count(self) -> int:
        with self._shared:
            return len(self._blocks)

    def touch(self, fingerprints: NDArray[np.uint64], minutes: NDArray[np.uint32]) -> None:
        if fingerprints.shape != minutes.shape or fingerprints.ndim != 1:
            raise InvalidArgument("recency: two arrays (n,) are needed")
        with self._shared:
            for fingerprint, minute in zip(fingerprints.tolist(), minutes.tolist(), strict=True):
                self._recency[fingerprint] = max(minute, self._recency.get(fingerprint, 0))

    def recency(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        with self._shared:
            pairs = sorted(self._recency.items())
        fingerprints, minutes = [fingerprint for fingerprint, _ in pairs], [minute for _, minute in pairs]
        return np.array(fingerprints, np.uint64), np.array(minutes, np.uint32)

    def forget_recency(self, fingerprints: NDArray[np.uint64]) -> None:
        with self._shared:
            for fingerprint in fingerprints.tolist():
                self._recency.pop(fingerprint, None)

    def sync(self) -> None:
        with self._shared:
            pass

    def close(self) -> None:
        self._shared.close()


def _record(value: bytes) -> np.void:
    record: np.void = np.frombuffer(value, RECORD)[0]
    return record


def _at_least_as_good(present: np.void, new: np.void, now_s: int, is_draining: Callable[[bytes], bool]) -> bool:
    ends, needed = int(present["expires_s"]), int(new["expires_s"])  # 0: never
    return (
        present["durability"] >= new["durability"]
        and present["retention"] >= new["retention"]
        and present["tenant_epoch"] >= new["tenant_epoch"]
        and (ends == 0 or ends > now_s)
        and (ends == 0 or (needed != 0 and ends >= needed))
        and not is_draining(present["segment"].tobytes())
    )


class MemoryControl:
    """`ControlStore` without storage."""

    def __init__(self) -> None:
        self._shared = _Shared()
        self._documents: dict[tuple[str, bytes], bytes] = {}
        self._segments: dict[bytes, SegmentRecord] = {}
        self._leases: dict[bytes, Lease] = {}
        self._pins: dict[int, Pin] = {}
        self._last_token = 0
        self._last_pin = 0

    def get(self, namespace: str, key: bytes) -> bytes | None:
        codec.document_key(namespace, key)
        with self._shared:
            return self._documents.get((namespace, key))

    def compare_and_set(self, namespace: str, key: bytes, expected: bytes | None, new: bytes | None) -> bool:
        codec.document_key(namespace, key)
        if new is not None and len(new) > limits.document_bytes_max:
            raise InvalidArgument(f"document of {len(new)} bytes: {limits.document_bytes_max} are possible")
        with self._shared:
            if self._documents.get((namespace, key)) != expected:
                return False
            if new is None:
                self._documents.pop((namespace, key), None)
            else:
                self._documents[namespace, key] = bytes(new)
            return True

    def items(self, namespace: str, after: bytes = b"", limit: int | None = None) -> list[tuple[bytes, bytes]]:
        codec.document_prefix(namespace)
        with self._shared:
            found = sorted((key, value) for (space, key), value in self._documents.items() if space == namespace)
        return [one for one in found if not after or one[0] > after][:limit]

    def put_segment(self, record: SegmentRecord) -> None:
        codec.check_segment(record)
        with self._shared:
            self._segments[record.segment] = record

    def swap_segment(self, old: SegmentRecord | None, new: SegmentRecord) -> bool:
        codec.check_segment(new)
        with self._shared:
            if self._segments.get(new.segment) != old:
                return False
            self._segments[new.segment] = new
            return True

    def get_segment(self, segment: bytes) -> SegmentRecord | None:
        codec.check_name("segment", segment)
        with self._shared:
            return self._segments.get(segment)

    def delete_segment(self, segment: bytes) -> None:
        codec.check_name("segment", segment)
        with self._shared:
            self._segments.pop(segment, None)

    def segments(self) -> list[SegmentRecord]:
        with self._shared:
            return sorted(self._segments.values(), key=lambda record: record.segment)

    def acquire(self, scope: bytes, holder: bytes, now_s: float, ttl_s: float) -> Lease | None:
        codec.check_name("lease scope", scope)
        codec.check_name("lease holder", holder)
        deadline_s = codec.check_time("now_s", now_s) + codec.check_ttl(ttl_s)
        with self._shared:
            present = self._leases.get(scope)
            if present is None or present.deadline_s <= now_s:
                self._last_token += 1
                self._leases[scope] = Lease(scope, holder, self._last_token, deadline_s)
            elif present.holder == holder:
                self._leases[scope] = replace(present, deadline_s=deadline_s)
            else:
                return None
            return self._leases[scope]

    def renew(self, lease: Lease, now_s: float, ttl_s: float) -> Lease | None:
        deadline_s = codec.check_time("now_s", now_s) + codec.check_ttl(ttl_s)
        with self._shared:
            if not self.check(lease):
                return None
            self._leases[lease.scope] = replace(lease, deadline_s=deadline_s)
            return self._leases[lease.scope]

    def release(self, lease: Lease) -> bool:
        with self._shared:
            if not self.check(lease):
                return False
            del self._leases[lease.scope]
            return True

    def check(self, lease: Lease) -> bool:
        with self._shared:
            present = self._leases.get(lease.scope)
            return present is not None and present.token == lease.token

    def pin(self, owner: bytes, keys: KeyArray, deadline_s: float) -> int:
        codec.check_name("pin owner", owner)
        codec.check_time("deadline_s", deadline_s)
        listed = tuple(codec.key_list(keys))
        if len(listed) > limits.pin_blocks_max:
            raise InvalidArgument(f"pin of {len(listed)} keys: {limits.pin_blocks_max} are possible")
        with self._shared:
            self._last_pin += 1
            self._pins[self._last_pin] = Pin(self._last_pin, owner, deadline_s, listed)
            return self._last_pin

    def unpin(self, pin_id: int) -> bool:
        with self._shared:
            return self._pins.pop(pin_id, None) is not None

    def pins(self) -> list[Pin]:
        with self._shared:
            return sorted(self._pins.values(), key=lambda pin: pin.pin_id)

    def end_owner(self, owner: bytes) -> int:
        with self._shared:
            pins = [pin_id for pin_id, pin in self._pins.items() if pin.owner == owner]
            scopes = [scope for scope, lease in self._leases.items() if lease.holder.startswith(owner)]
            for pin_id in pins:
                del self._pins[pin_id]
            for scope in scopes:
                del self._leases[scope]
            return len(pins) + len(scopes)

    def expire(self, now_s: float) -> int:
        codec.check_time("now_s", now_s)
        with self._shared:
            past = [pin_id for pin_id, pin in self._pins.items() if pin.deadline_s <= now_s]
            for pin_id in past:
                del self._pins[pin_id]
            return len(past)

    def close(self) -> None:
        self._shared.close()
