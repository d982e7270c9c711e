"""Catalogs that fail on purpose: wrap any block index or control store, and let a plan choose which calls fail how.

Contract
- Before each changing call the plan is asked with the call's name: None lets it through, "error" raises `CatalogError`
  with nothing done, "unknown" carries it out and then raises `CatalogError`, as when the answer to a commit is lost.
- Reading calls always go through. The wrapped catalog is never asked to do what its own contract excludes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from perdure.catalog.api import BlockIndex, ControlStore, KeyArray, Lease, Pin, RecordArray, SegmentRecord, Usage
from perdure.errors import CatalogError, InvalidArgument

Result = TypeVar("Result")


class FaultPlan(Protocol):
    def next(self, op: str) -> str | None:
        """What happens to the call `op` that comes now: None, "error" or "unknown"."""
        ...


class FailCalls:
    """Plan: the changing calls `first`, `first + 1`, ... (`times` of them, counted from 1) fail; `op` limits it to one
    kind of call. `seen` counts all calls that would have been candidates, so a dry run tells how far to sweep."""

    def __init__(self, first: int, mode: str = "error", *, times: int = 1, op: str | None = None):
        self._first, self._mode, self._times, self._op = first, mode, times, op
        self._lock = threading.Lock()
        self.seen = 0

    def next(self, op: str) -> str | None:
        if self._op not in (None, op):
            return None
        with self._lock:
            self.seen += 1
            return self._mode if self._first <= self.seen < self._first + self._times else None


def _call(plan: FaultPlan, op: str, work: Callable[[], Result]) -> Result:
    mode = plan.next(op)
    if mode is None:
        return work()
    if mode == "error":
        raise CatalogError(f"{op}: failed as planned; nothing was changed")
    if mode == "unknown":
        work()
        raise CatalogError(f"{op}: failed as planned; whether it happened is unknown")
    raise InvalidArgument(f'fault plan: "error" or "unknown" are possible, got {mode!r}')


class FaultyIndex:
    """`BlockIndex` around `inner`."""

    def __init__(self, inner: BlockIndex, plan: FaultPlan):
        self.inner, self.plan = inner, plan

    def lookup(self, keys: KeyArray) -> tuple[NDArray[np.bool_], RecordArray]:
        return self.inner.lookup(keys)

    def prefix(self, keys: KeyArray) -> int:
        return self.inner.prefix(keys)

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
        def work() -> NDArray[np.uint8]:
            return self.inner.publish(keys, records, now_s=now_s, is_draining=is_draining, admit=admit, sync=sync)

        return _call(self.plan, "publish", work)

    def replace(self, keys: KeyArray, old: RecordArray, new: RecordArray) -> NDArray[np.bool_]:
        return _call(self.plan, "replace", lambda: self.inner.replace(keys, old, new))

    def remove(self, keys: KeyArray, old: RecordArray | None = None) -> NDArray[np.bool_]:
        return _call(self.plan, "remove", lambda: self.inner.remove(keys, old))

    def scan(self, start: bytes, limit: int) -> tuple[KeyArray, RecordArray]:
        return self.inner.scan(start, limit)

    def load(self, entries: Iterator[tuple[KeyArray, RecordArray]]) -> int:
        return _call(self.plan, "load", lambda: self.inner.load(entries))

    def usage(self) -> dict[bytes, Usage]:
        return self.inner.usage()

    def count(self) -> int:
        return self.inner.count()

    def touch(self, fingerprints: NDArray[np.uint64], minutes: NDArray[np.uint32]) -> None:
        _call(self.plan, "touch", lambda: self.inner.touch(fingerprints, minutes))

    def recency(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        return self.inner.recency()

    def forget_recency(self, fingerprints: NDArray[np.uint64]) -> None:
        _call(self.plan, "forget_recency", lambda: self.inner.forget_recency(fingerprints))

    def sync(self) -> None:
        _call(self.plan, "sync", self.inner.sync)

    def close(self) -> None:
        self.inner.close()


class FaultyControl:
    """`ControlStore` around `inner`."""

    def __init__(self, inner: ControlStore, plan: FaultPlan):
        self.inner, self.plan = inner, plan

    def get(self, namespace: str, key: bytes) -> bytes | None:
        return self.inner.get(namespace, key)

    def compare_and_set(self, namespace: str, key: bytes, expected: bytes | None, new: bytes | None) -> bool:
        return _call(self.plan, "compare_and_set", lambda: self.inner.compare_and_set(namespace, key, expected, new))

    def items(self, namespace: str, after: bytes = b"", limit: int | None = None) -> list[tuple[bytes, bytes]]:
        return self.inner.items(namespace, after, limit)

    def put_segment(self, record: SegmentRecord) -> None:
        _call(self.plan, "put_segment", lambda: self.inner.put_segment(record))

    def swap_segment(self, old: SegmentRecord | None, new: SegmentRecord) -> bool:
        return _call(self.plan, "swap_segment", lambda: self.inner.swap_segment(old, new))

    def get_segment(self, segment: bytes) -> SegmentRecord | None:
        return self.inner.get_segment(segment)

    def delete_segment(self, segment: bytes) -> None:
        _call(self.plan, "delete_segment", lambda: self.inner.delete_segment(segment))

    def segments(self) -> list[SegmentRecord]:
        return self.inner.segments()

    def acquire(self, scope: bytes, holder: bytes, now_s: float, ttl_s: float) -> Lease | None:
        return _call(self.plan, "acquire", lambda: self.inner.acquire(scope, holder, now_s, ttl_s))

    def renew(self, lease: Lease, now_s: float, ttl_s: float) -> Lease | None:
        return _call(self.plan, "renew", lambda: self.inner.renew(lease, now_s, ttl_s))

    def release(self, lease: Lease) -> bool:
        return _call(self.plan, "release", lambda: self.inner.release(lease))

    def check(self, lease: Lease) -> bool:
        return self.inner.check(lease)

    def pin(self, owner: bytes, keys: KeyArray, deadline_s: float) -> int:
        return _call(self.plan, "pin", lambda: self.inner.pin(owner, keys, deadline_s))

    def unpin(self, pin_id: int) -> bool:
        return _call(self.plan, "unpin", lambda: self.inner.unpin(pin_id))

    def pins(self) -> list[Pin]:
        return self.inner.pins()

    def end_owner(self, owner: bytes) -> int:
        return _call(self.plan, "end_owner", lambda: self.inner.end_owner(owner))

    def expire(self, now_s: float) -> int:
        return _call(self.plan, "expire", lambda: self.inner.expire(now_s))

    def close(self) -> None:
        self.inner.close()
