"""Random sequences of calls on any catalog, compared with the in-memory one after each step (hypothesis).

How to use them is told in `perdure.testing.catalog`. Few keys, segments and values are drawn from, so that calls meet:
replaced records, equal keys in a batch, compare-and-swap against what changed, leases of two holders around a deadline.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from perdure.catalog.api import RECORD, BlockIndex, ControlStore, KeyArray, Lease, RecordArray, as_keys
from perdure.catalog.memory import MemoryControl, MemoryIndex
from perdure.testing.catalog_samples import NOW_S, content

KEYS = as_keys(bytes([number]) * 32 for number in (0, 1, 2, 127, 128, 255))
SEGMENTS = (b"segment-00000001", b"segment-00000002")
TENANTS = (b"tenant-000000001", b"tenant-000000002")
SCOPES = (b"scope", b"scope2")
HOLDERS = (b"holder", b"holder-2")
NAMES = (("a", b"bc"), ("ab", b"c"), ("a", b""))

key_numbers = st.integers(0, len(KEYS) - 1)
record_values = st.tuples(
    st.sampled_from(SEGMENTS),
    st.sampled_from(TENANTS),
    st.sampled_from([0, 4096, 2**40]),  # offset
    st.sampled_from([1, 4096, 4097]),  # stored_bytes
    st.sampled_from([1, 8192]),  # block_bytes
    st.just(NOW_S - 9),  # created_s
    st.sampled_from([0, NOW_S, NOW_S + 1, NOW_S + 2]),  # expires_s
    st.integers(0, 1),  # tenant_epoch
    st.integers(0, 1),  # codec
    st.integers(0, 2),  # durability
    st.integers(0, 1),  # retention
    st.just(0),
)
batches = st.lists(st.tuples(key_numbers, record_values), max_size=6)
prints = st.sampled_from([0, 1, 256, 2**48, 2**48 + 1, 2**64 - 1])


def arrays(batch: list[tuple[int, tuple[object, ...]]]) -> tuple[KeyArray, RecordArray]:
    return KEYS[[number for number, _ in batch]], np.array([values for _, values in batch], RECORD)


class BlockIndexMachine(RuleBasedStateMachine):
    """Override `make`, and `reopen` if the index outlives its object."""

    def make(self, directory: Path) -> BlockIndex:
        raise NotImplementedError

    def reopen(self, index: BlockIndex, directory: Path) -> BlockIndex | None:
        return None

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="perdure-machine-"))
        self.model = MemoryIndex()
        self.index: BlockIndex = self.make(self.directory)

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            if hasattr(self, "index"):
                self.index.close()
            shutil.rmtree(self.directory)

    def both(self, call: str, *arguments: object, **options: object) -> None:
        answers = [getattr(index, call)(*arguments, **options) for index in (self.model, self.index)]
        assert np.array_equal(answers[0], answers[1]), f"{call}: {answers[1]!r} instead of {answers[0]!r}"

    @rule(batch=batches, draining=st.sets(st.sampled_from(SEGMENTS)), sync=st.booleans())
    def publish(self, batch: list[tuple[int, tuple[object, ...]]], draining: set[bytes], sync: bool) -> None:
        keys, records = arrays(batch)
        self.both("publish", keys, records, now_s=NOW_S, is_draining=draining.__contains__, sync=sync)

    @rule(batch=batches, moved=record_values, stale=st.booleans())
    def replace(self, batch: list[tuple[int, tuple[object, ...]]], moved: tuple[object, ...], stale: bool) -> None:
        keys, old = arrays(batch)
        if not stale:
            old = self.model.lookup(keys)[1]
        self.both("replace", keys, old, np.array([moved] * len(batch), RECORD))

    @rule(batch=batches, stale=st.booleans(), any_record=st.booleans())
    def remove(self, batch: list[tuple[int, tuple[object, ...]]], stale: bool, any_record: bool) -> None:
        keys, old = arrays(batch)
        if any_record:
            self.both("remove", keys)
        else:
            self.both("remove", keys, old if stale else self.model.lookup(keys)[1])

    @rule(some=st.lists(batches, max_size=3))
    def load(self, some: list[list[tuple[int, tuple[object, ...]]]]) -> None:
        assert self.model.load(map(arrays, some)) == self.index.load(map(arrays, some))

    @rule(uses=st.dictionaries(prints, st.integers(0, 5), max_size=4))
    def touch(self, uses: dict[int, int]) -> None:
        self.both("touch", np.array(list(uses), np.uint64), np.array(list(uses.values()), np.uint32))

    @rule(some=st.lists(prints, max_size=3))
    def forget(self, some: list[int]) -> None:
        self.both("forget_recency", np.array(some, np.uint64))

    @rule(order=st.permutations(range(len(KEYS))))
    def ask(self, order: list[int]) -> None:
        keys = KEYS[order]
        assert self.index.prefix(keys) == self.model.prefix(keys)
        (present, found), (mask, records) = self.index.lookup(keys), self.model.lookup(keys)
        assert present.tolist() == mask.tolist()
        assert found.tobytes() == records.tobytes()

    @rule()
    def restart(self) -> None:
        self.index = self.reopen(self.index, self.directory) or self.index

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        assert content(self.index) == content(self.model)
        assert self.index.usage() == self.model.usage()
        assert self.index.count() == self.model.count()
        recency: list[tuple[NDArray[np.uint64], NDArray[np.uint32]]] = [self.index.recency(), self.model.recency()]
        assert np.array_equal(recency[0], recency[1])


class ControlStoreMachine(RuleBasedStateMachine):
    """Override `make`, and `reopen` if the store outlives its object."""

    def make(self, directory: Path) -> ControlStore:
        raise NotImplementedError

    def reopen(self, control: ControlStore, directory: Path) -> ControlStore | None:
        return None

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="perdure-machine-"))
        self.model = MemoryControl()
        self.control: ControlStore = self.make(self.directory)
        self.now_s = 0.0
        self.leases: list[tuple[Lease, Lease]] = []  # (the model's, the other's): tokens may be counted differently
        self.pin_ids: list[tuple[int, int]] = []

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            if hasattr(self, "control"):
                self.control.close()
            shutil.rmtree(self.directory)

    @rule(
        name=st.sampled_from(NAMES), expected=st.sampled_from([None, b"", b"1"]), new=st.sampled_from([None, b"", b"1"])
    )
    def compare_and_set(self, name: tuple[str, bytes], expected: bytes | None, new: bytes | None) -> None:
        assert self.control.compare_and_set(*name, expected, new) == self.model.compare_and_set(*name, expected, new)

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(scope=st.sampled_from(SCOPES), holder=st.sampled_from(HOLDERS), ttl_s=st.sampled_from([1.0, 5.0]))
    def acquire(self, scope: bytes, holder: bytes, ttl_s: float) -> None:
        model, real = (store.acquire(scope, holder, self.now_s, ttl_s) for store in (self.model, self.control))
        self.compare(model, real)

    @rule(ttl_s=st.sampled_from([1.0, 5.0]), which=st.integers(0, 9))
    def renew(self, ttl_s: float, which: int) -> None:
        if self.leases:
            model, real = self.leases[which % len(self.leases)]
            self.compare(self.model.renew(model, self.now_s, ttl_s), self.control.renew(real, self.now_s, ttl_s))

    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        if self.leases:
            model, real = self.leases[which % len(self.leases)]
            assert self.control.release(real) == self.model.release(model)

    def compare(self, model: Lease | None, real: Lease | None) -> None:
        assert (model is None) == (real is None)
        if model is None or real is None:
            return
        assert (real.scope, real.holder, real.deadline_s) == (model.scope, model.holder, model.deadline_s)
        for earlier, other in self.leases:
            if earlier.scope == model.scope:
                assert (other.token < real.token) == (earlier.token < model.token)
                assert (other.token == real.token) == (earlier.token == model.token)
        self.leases.append((model, real))

    @rule(owner=st.sampled_from(HOLDERS), count=st.integers(0, 2), ttl_s=st.sampled_from([1.0, 5.0]))
    def pin(self, owner: bytes, count: int, ttl_s: float) -> None:
        made = (
            self.model.pin(owner, KEYS[:count], self.now_s + ttl_s),
            self.control.pin(owner, KEYS[:count], self.now_s + ttl_s),
        )
        assert made[1] not in [real for _, real in self.pin_ids]
        self.pin_ids.append(made)

    @rule(which=st.integers(0, 9))
    def unpin(self, which: int) -> None:
        if self.pin_ids:
            model, real = self.pin_ids[which % len(self.pin_ids)]
            assert self.control.unpin(real) == self.model.unpin(model)

    @rule()
    def expire(self) -> None:
        assert self.control.expire(self.now_s) == self.model.expire(self.now_s)

    @rule(owner=st.sampled_from(HOLDERS))
    def end_owner(self, owner: bytes) -> None:
        assert self.control.end_owner(owner) == self.model.end_owner(owner)

    @rule()
    def restart(self) -> None:
        self.control = self.reopen(self.control, self.directory) or self.control

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "control"):
            return
        for namespace, key in NAMES:
            assert self.control.get(namespace, key) == self.model.get(namespace, key)
            assert self.control.items(namespace) == self.model.items(namespace)
        for model, real in self.leases:
            assert self.control.check(real) == self.model.check(model)
        ids = dict(self.pin_ids)
        expected = [(ids[pin.pin_id], pin.owner, pin.deadline_s, pin.keys) for pin in self.model.pins()]
        assert sorted((pin.pin_id, pin.owner, pin.deadline_s, pin.keys) for pin in self.control.pins()) == sorted(
            expected
        )
