"""Random sequences of calls on a small, crowded store, compared with a model of the truth (hypothesis).

    class Machine(StoreMachine):
        def make_store(self, directory, **options):
            return perdure.open(directory, **options)

    Machine.TestCase.settings = settings(...)
    TestMachine = Machine.TestCase

Contract
- The model knows which blocks were acknowledged, until when they live, which bytes on the disk it damaged itself, and
  what is pinned. A block that is found has its right content, always. A block that was acknowledged is found, unless it
  has expired, was damaged, or segments were dropped since and it was not pinned.
- Capacity is never exceeded, by the books or by the files, and the books equal a recount (`recount`).
- Time is a fake clock that is also set, forward and back: nothing expires meanwhile that should not. Nothing waits,
  nothing depends on how long a step takes.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from perdure import limits
from perdure.catalog.api import Durability, KeyArray
from perdure.clock import FakeClock
from perdure.keyspace import Keyspace, PinHandle
from perdure.store import Seams, Store
from perdure.testing.store import (
    CORRUPT,
    DENIED,
    EXISTS,
    FOUND,
    LATE,
    MISSING,
    REJECTED,
    STORED,
    blocks_of,
    chain,
    keyspace,
    read,
)

BLOCK_BYTES = 60_000  # 16 of them fill a segment
CHAINS, CHAIN_BLOCKS = 4, 8  # times three keyspaces: more than fits
CAPACITY = limits.capacity_bytes_min
SPACES = (("a", "one"), ("a", "two"), ("b", "one"))  # tenant, model
HEADER_BYTES_CHECKED = limits.header_bytes

spaces = st.integers(0, len(SPACES) - 1)
chains = st.integers(0, CHAINS - 1)
spans = st.tuples(st.integers(0, CHAIN_BLOCKS - 1), st.integers(1, CHAIN_BLOCKS))


@dataclass(slots=True)
class Truth:
    """What the model knows of one acknowledged block."""

    durability: Durability  # at most
    lives_until: float  # at least; wall seconds
    gone_from: float  # at the latest
    damaged: bool = False

    def must_be_found(self, now: float) -> bool:
        return not self.damaged and now < self.lives_until

    def may_be_found(self, now: float) -> bool:
        return now < self.gone_from


class StoreMachine(RuleBasedStateMachine):
    """Override `make_store`; `keep_house` and `recount` where the store's insides can be reached."""

    def make_store(self, directory: Path, **options: Any) -> Store:
        raise NotImplementedError

    def keep_house(self, store: Store) -> None:
        """Do now what the store does in the background from time to time."""

    def recount(self, store: Store) -> dict[str, dict[str, int]] | None:
        """What `status()["tenants"]` must say, counted block by block."""
        return None

    # --- life
    @initialize(memory=st.sampled_from(["0", "512KiB", "16MiB"]), codec=st.sampled_from(["off", "off", "on"]))
    def start(self, memory: str, codec: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="perdure-machine-"))
        self.clock = FakeClock()
        self.stepped_s = 0.0  # how far somebody has set the wall clock
        self.memory, self.codec = memory, codec
        self.truths: list[dict[bytes, Truth]] = [{} for _ in SPACES]
        self.pins: list[tuple[PinHandle, int, set[bytes], float]] = []
        self.open(wait=True)

    def open(self, wait: bool) -> None:
        self.store = self.make_store(
            self.directory / "store", capacity=CAPACITY, memory=self.memory, seams=Seams(clock=self.clock)
        )
        self.spaces = [
            keyspace(self.store, tenant=tenant, model=model, block_bytes=BLOCK_BYTES, codec=self.codec)
            for tenant, model in SPACES
        ]
        self.dropped = 0
        if wait:
            assert self.store.wait_ready(30.0)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            try:
                self.audit()
            finally:
                self.store.close()
                shutil.rmtree(self.directory)

    # --- what the model can tell
    def now(self) -> float:
        """Wall seconds, as a clock that nobody sets would show them."""
        return self.clock.wall() - self.stepped_s

    @property
    def paused(self) -> bool:
        return abs(self.stepped_s) > limits.clock_step_s_max

    def pick(self, place: int, number: int, span: tuple[int, int]) -> tuple[Keyspace, KeyArray]:
        space, (first, count) = self.spaces[place], span
        return space, chain(space, number, CHAIN_BLOCKS)[first : first + count]

    def allowed(self, place: int, key: bytes) -> set[int]:
        """Statuses that a read without a deadline may give."""
        truth, now = self.truths[place].get(key), self.now()
        if truth is None or not (truth.may_be_found(now) or self.paused):
            return {MISSING}
        if truth.must_be_found(now):
            return {FOUND}
        return {FOUND, MISSING, CORRUPT} if truth.damaged else {FOUND, MISSING}

    def is_pinned(self, place: int, key: bytes) -> bool:
        now = self.clock.boottime()
        return any(place == where and key in keys and now < until for _, where, keys, until in self.pins)

    def look_for_evicted(self) -> None:
        """Forget what is gone if segments were dropped since the last time; a pinned block must not be gone."""
        dropped = self.store.status()["reclaim"]["segments_dropped"]
        if dropped == self.dropped:
            return
        self.dropped = dropped
        now = self.now()
        for place, truths in enumerate(self.truths):
            names = list(truths)
            for key, there in zip(names, self.spaces[place].present(names).tolist(), strict=True):
                if not there:
                    pinned = self.is_pinned(place, key) and truths[key].must_be_found(now)
                    assert not pinned, f"{key.hex()} was evicted although it is pinned"
                    del truths[key]

    # --- rules
    @rule(
        place=spaces,
        number=chains,
        span=spans,
        durability=st.sampled_from(Durability),
        ttl_s=st.sampled_from([None, None, 60.0, 3600.0]),
        repeat=st.booleans(),
    )
    def write(
        self,
        place: int,
        number: int,
        span: tuple[int, int],
        durability: Durability,
        ttl_s: float | None,
        repeat: bool,
    ) -> None:
        space, keys = self.pick(place, number, span)
        if repeat:
            keys = np.concatenate([keys, keys[::-1]])
        report = space.write(keys, blocks_of(keys, BLOCK_BYTES), durability=durability, ttl_s=ttl_s)
        truths, now = self.truths[place], self.now()
        lives_until = math.inf if ttl_s is None else now + ttl_s
        gone_from = math.inf if ttl_s is None else now + ttl_s * 17 / 16 + 2
        # A copy is not replaced by one that promises less: the new copies of a write are as good as the best replaced.
        before = [truths[key] for key in {key.tobytes() for key in keys} if key in truths]
        most = max([durability, *(one.durability for one in before)])
        gone_from = max([gone_from, *(one.gone_from for one in before)])
        stored: set[bytes] = set()
        for key, status in zip((key.tobytes() for key in keys), report.statuses.tolist(), strict=True):
            assert status in (STORED, EXISTS, REJECTED), report.reasons
            if status == STORED:
                assert key not in stored
                stored.add(key)
                truths[key] = Truth(most, lives_until, gone_from)
            elif status == EXISTS:
                truth = truths.get(key)
                assert truth is not None, f"{key.hex()} was called present and never stored"
                assert truth.durability >= durability
                assert truth.gone_from >= lives_until
                assert truth.may_be_found(now) or self.paused
                truth.lives_until = max(truth.lives_until, lives_until)  # as this call was told
            else:
                assert self.pins or any(one.damaged for some in self.truths for one in some.values()), report.reasons
        self.look_for_evicted()

    @rule(
        place=spaces,
        number=chains,
        span=spans,
        direct=st.booleans(),
        deadline_s=st.sampled_from([None, 60.0, 0.0]),
    )
    def read(self, place: int, number: int, span: tuple[int, int], direct: bool, deadline_s: float | None) -> None:
        space, keys = self.pick(place, number, span)
        late = {LATE} if deadline_s == 0 else set()
        for key, status in zip(keys, read(space, keys, direct=direct, deadline_s=deadline_s), strict=True):
            allowed = self.allowed(place, key.tobytes())
            if FOUND in allowed:
                allowed |= late
            assert status in allowed, f"{key.tobytes().hex()}: {status} instead of {allowed}"

    @rule(place=spaces, other=spaces, number=chains, span=spans)
    def read_with_keys_of_another(self, place: int, other: int, number: int, span: tuple[int, int]) -> None:
        """Blocks of another tenant or model are never delivered, and not harmed by the attempt."""
        if place != other:
            _, keys = self.pick(other, number, span)
            assert set(read(self.spaces[place], keys)) <= {MISSING, DENIED, CORRUPT}

    @rule(place=spaces, number=chains, span=spans)
    def lookup(self, place: int, number: int, span: tuple[int, int]) -> None:
        space, keys = self.pick(place, number, span)
        answer = space.lookup(keys)
        allowed = [self.allowed(place, key.tobytes()) for key in keys]
        least = next((n for n, one in enumerate(allowed) if one != {FOUND}), len(keys))
        most = next((n for n, one in enumerate(allowed) if FOUND not in one), len(keys))
        assert least <= answer <= most

    @rule(place=spaces, number=chains, span=spans, ttl_s=st.sampled_from([20.0, 600.0]))
    def pin(self, place: int, number: int, span: tuple[int, int], ttl_s: float) -> None:
        space, keys = self.pick(place, number, span)
        names = {key.tobytes() for key in keys}
        self.pins.append((space.pin(keys, ttl_s=ttl_s), place, names, self.clock.boottime() + ttl_s))

    @precondition(lambda self: bool(getattr(self, "pins", None)))
    @rule(which=st.integers(0, 99))
    def unpin(self, which: int) -> None:
        handle, _, _, until = self.pins.pop(which % len(self.pins))
        assert handle.release() or self.clock.boottime() >= until

    @rule(place=spaces, number=chains, span=spans)
    def release(self, place: int, number: int, span: tuple[int, int]) -> None:
        space, keys = self.pick(place, number, span)
        space.release(keys)

    @rule(seconds=st.sampled_from([1.0, 30.0, 120.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([-86_400.0, -45.0, 45.0, 86_400.0]))
    def set_the_clock(self, seconds: float) -> None:
        """And back again, the next time."""
        to_s = 0.0 if self.stepped_s else seconds
        self.clock.step(to_s - self.stepped_s)
        self.stepped_s = to_s
        assert self.store.status()["expiry_paused"] == self.paused

    @rule()
    def background(self) -> None:
        self.keep_house(self.store)
        self.look_for_evicted()

    @rule(wait=st.booleans())
    def reopen(self, wait: bool) -> None:
        self.store.close()
        self.clock.step(-self.stepped_s)
        self.stepped_s = 0.0
        self.pins.clear()  # they end with the process
        self.open(wait)
        assert self.store.status()["pins"] == 0

    @rule(place=spaces, number=chains, position=st.integers(0, CHAIN_BLOCKS - 1), where=st.integers(0, 1 << 20))
    def flip_a_byte(self, place: int, number: int, position: int, where: int) -> None:
        """On the disk, in the header's checked bytes or in the payload of one block."""
        _, keys = self.pick(place, number, (position, 1))
        key = keys[0].tobytes()
        truth, answer = self.truths[place].get(key), self.store.explain(key)
        if truth is None or not answer["present"]:
            return
        record = answer["record"]
        where %= HEADER_BYTES_CHECKED + record["stored_bytes"]
        if where >= HEADER_BYTES_CHECKED:
            where += limits.page_bytes - HEADER_BYTES_CHECKED
        with (self.directory / "store" / answer["file"]).open("r+b", buffering=0) as file:
            file.seek(record["offset"] + where)
            before = file.read(1)[0]
            file.seek(record["offset"] + where)
            file.write(bytes([before ^ 0x10]))
        truth.damaged = True

    @rule()
    def audit(self) -> None:
        """All blocks, one by one, and the books."""
        for place, truths in enumerate(self.truths):
            names = list(truths)
            for key, found in zip(names, read(self.spaces[place], _array(names)), strict=True):
                assert found in self.allowed(place, key)
        self.store.sync()
        counted = self.recount(self.store)
        status = self.store.status()
        assert counted is None or counted == status["tenants"]
        assert sum(one["blocks"] for one in status["tenants"].values()) == status["blocks"]
        files = (self.directory / "store" / "segments").rglob("*.seg")
        assert sum(path.stat().st_size for path in files) <= status["used_bytes"]

    @invariant()
    def capacity_holds(self) -> None:
        if hasattr(self, "store"):
            assert self.store.status()["used_bytes"] <= CAPACITY


def _array(names: Iterable[bytes]) -> KeyArray:
    return np.frombuffer(b"".join(names), np.uint8).reshape(-1, limits.key_bytes)


def tally(entries: Iterable[tuple[str, int, int]]) -> dict[str, dict[str, int]]:
    """(tenant, KV bytes, stored bytes) of each block -> what `status()["tenants"]` says about them."""
    totals: dict[str, Counter[str]] = {}
    for tenant, kv_bytes, stored_bytes in entries:
        totals.setdefault(tenant, Counter()).update(blocks=1, kv_bytes=kv_bytes, stored_bytes=stored_bytes)
    return {tenant: dict(one) for tenant, one in totals.items()}
