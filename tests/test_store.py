"""The store as its users see it: the public conformance suite and state machine, and what is only true of an embedded
store. Numbers in docstrings are the kinds of fault of the design's table."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

import perdure
from perdure import Durability, Keyspace, Seams, StaleFence, Store, limits
from perdure.advice import advise
from perdure.catalog.faulty import FailCalls, FaultyIndex
from perdure.clock import FakeClock
from perdure.io.api import Files
from perdure.io.engine import ThreadEngine
from perdure.io.files import PosixFiles
from perdure.io.siblings import FaultWhile, FaultyFiles, NthFault, ThrottledFiles
from perdure.rates import Rates
from perdure.segments.format import record_bytes
from perdure.testing.flight import FlightConformance
from perdure.testing.model import StoreMachine, tally
from perdure.testing.store import (
    BLOCK_BYTES,
    DENIED,
    EXISTS,
    FAILED,
    FOUND,
    LATE,
    MISSING,
    STORED,
    UNTOUCHED,
    WRITE_LATE,
    StoreConformance,
    blocks_of,
    chain,
    keyspace,
    layout_of,
    read,
    tokens,
    write,
)

PATIENCE_S = 60.0  # for what must happen; never measured


class TestEmbedded(StoreConformance, FlightConformance):
    def make_store(self, directory: Path, **options: Any) -> Store:
        return perdure.open(directory, **options)


class Machine(StoreMachine):
    def make_store(self, directory: Path, **options: Any) -> Store:
        return perdure.open(directory, **options)

    def keep_house(self, store: Store) -> None:
        store._keeper.chores()
        assert store._keeper.last_error is None

    def recount(self, store: Store) -> dict[str, dict[str, int]]:
        _, records = store._core.index.scan(bytes(limits.key_bytes), 1 << 20)
        names = {space.tenant_id: space.tenant for space in self.spaces}
        return tally(
            (names[row["tenant"].tobytes()], int(row["block_bytes"]), record_bytes(int(row["stored_bytes"])))
            for row in records
        )


FUZZ = os.environ.get("PERDURE_FUZZ") == "1"
Machine.TestCase.settings = settings(
    max_examples=1000 if FUZZ else 40,
    stateful_step_count=50,
    derandomize=not FUZZ,
    phases=list(Phase) if FUZZ else [Phase.explicit, Phase.generate],  # shrinking takes longer than the test may
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestMachine = Machine.TestCase


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def reopen(tmp_path: Path, clock: FakeClock) -> Iterator[Callable[..., Store]]:
    """Opens the store of this test, closing the one that was open before."""
    stores: list[Store] = []

    def open_again(**options: Any) -> Store:
        for store in stores:
            store.close()
        chosen: dict[str, Any] = {"capacity": "64MiB", "memory": 0, "seams": Seams(clock=clock)} | options
        stores.append(perdure.open(tmp_path / "store", **chosen))
        assert stores[-1].wait_ready(PATIENCE_S)
        return stores[-1]

    yield open_again
    for store in stores:
        store.close()


def file_of(store: Store, key: bytes) -> tuple[Path, int]:
    """Segment file of a block and the offset of its record."""
    answer = store.explain(key)
    return store.path / answer["file"], answer["record"]["offset"]


# --- 3, 4, 5, 7: other meaning, other tenant


FIELDS: dict[str, tuple[str, Any]] = {
    "model": ("model", "other"),
    "weights": ("weights", "sha256:" + "cd" * 32),
    "lora": ("lora", "adapter"),
    "draft": ("draft", "draft"),
    "kv_dtype": ("layout", layout_of(kv_dtype="float8_e4m3")),
    "order": ("layout", layout_of(order="layer,kv,token,head,dim")),
    "layers": ("layout", layout_of(layers=(0, 15))),
    "kv_heads": ("layout", layout_of(kv_heads=(0, 3))),
    "replicated": ("layout", layout_of(replicated=True)),
    "group": ("layout", layout_of(group="sliding")),
    "scales": ("layout", layout_of(scales="sha256:00")),
    "isa": ("layout", layout_of(isa="avx512")),
    "block_bytes": ("layout", layout_of(2 * BLOCK_BYTES)),
}


@pytest.mark.parametrize("field", FIELDS)
def test_other_meaning_is_a_miss_that_is_explained(reopen: Callable[..., Store], field: str) -> None:
    """5, 27, 34: nothing of one keyspace is visible in another, and `explain_prefix` names the difference."""
    store = reopen()
    name, value = FIELDS[field]
    one, other = keyspace(store), keyspace(store, **{name: value})
    write(one, chain(one, 1, 3))
    keys = chain(other, 1, 3)
    assert other.lookup(keys) == 0
    assert read(other, keys) == [MISSING] * 3
    answer = store.explain_prefix(other, tokens(1, 3))
    assert answer["usable"] == 0
    assert answer["first_hole"]["present"] is False
    (elsewhere,) = answer["elsewhere"]
    assert elsewhere["differs"] == [field]
    assert elsewhere["usable"] == 3
    assert store.explain_prefix(one, tokens(1, 3))["usable"] == 3


def test_another_tenant_is_not_even_named(reopen: Callable[..., Store]) -> None:
    """7. Names are not concatenated, and `explain_prefix` says nothing about others' blocks."""
    store = reopen()
    one, other = keyspace(store, tenant="ab", model="c"), keyspace(store, tenant="a", model="bc")
    write(one, chain(one, 1, 2))
    assert other.lookup(chain(other, 1, 2)) == 0
    assert store.explain_prefix(other, tokens(1, 2))["elsewhere"] == []
    with pytest.raises(TypeError, match="tenant"):
        store.keyspace(model="m", weights="sha256:00", layout=layout_of())  # type: ignore[call-arg]


@pytest.mark.parametrize("memory", [0, "8MiB"])
@pytest.mark.parametrize("encryption", ["off", "on"])
@pytest.mark.parametrize(("foreign", "status"), [({"tenant": "eve"}, DENIED), ({"model": "other"}, MISSING)])
def test_foreign_keys_are_not_found_and_do_no_harm(
    reopen: Callable[..., Store], memory: Any, encryption: str, foreign: dict[str, str], status: int
) -> None:
    store = reopen(memory=memory, encryption=encryption)
    owner, other = keyspace(store), keyspace(store, **foreign)
    keys = chain(owner, 1, 3)
    write(owner, keys)
    for _ in range(2):
        assert read(other, keys) == [status] * 3
        assert read(owner, keys) == [FOUND] * 3
    assert store.status()["incidents"] == []
    assert "quarantined" not in store.status()["counters"]


# --- 8, 10, 11: restart


def test_usage_and_recency_outlive_the_process(reopen: Callable[..., Store], clock: FakeClock) -> None:
    """8."""
    store = reopen()
    spaces = [keyspace(store, tenant=name) for name in ("a", "b")]
    chains = [chain(space, 1, 4) for space in spaces]
    for space, keys, durability in zip(spaces, chains, ("ephemeral", "session"), strict=True):
        write(space, keys, durability=durability)
        clock.advance(600)
    assert read(spaces[0], chains[0]) == [FOUND] * 4
    used_at = clock.wall()
    store.sync()
    before = store.status()
    clock.advance(3600)
    after = reopen().status()
    for name in ("tenants", "blocks", "capacity_bytes"):
        assert after[name] == before[name]
    assert after["tenants"]["a"] == {"blocks": 4, "kv_bytes": 4 * BLOCK_BYTES, "stored_bytes": 4 * (BLOCK_BYTES + 4096)}
    files = (reopen().path / "segments").rglob("*.seg")
    assert after["used_bytes"] == sum(path.stat().st_size for path in files)
    core = reopen()._core
    expected = (used_at, used_at - 600)
    for keys, wanted in zip(chains, expected, strict=True):
        minutes = core.minutes(core.presence.recency_of(perdure.catalog.api.fingerprints(keys)))
        assert np.abs(minutes * 60.0 - wanted).max() <= 60


def test_pins_and_leases_end_with_their_process(reopen: Callable[..., Store]) -> None:
    """10, 11: whoever opens the store next need not wait for what a dead writer held."""
    space = keyspace(reopen())
    keys = chain(space, 1, 2)
    space.pin(keys, ttl_s=3600.0)
    lost = space.reserve(keys, ttl_s=600.0)
    assert lost is not None
    store = reopen()
    assert store.status()["pins"] == 0
    space = keyspace(store)
    lease = space.reserve(keys, ttl_s=600.0)
    assert lease is not None
    assert lease.token > lost.token
    with pytest.raises(StaleFence):
        write(space, keys, lease=lost)
    assert write(space, keys, lease=lease) == [STORED] * 2


def test_pins_and_leases_end_at_their_deadline(reopen: Callable[..., Store], clock: FakeClock) -> None:
    """10."""
    store = reopen()
    space = keyspace(store)
    keys = chain(space, 1, 2)
    space.pin(keys, ttl_s=60.0)
    assert space.reserve(keys, ttl_s=60.0) is not None
    assert len(store._core.pins.alive()) == 2
    clock.advance(60.5)
    assert len(store._core.pins.alive()) == 0
    assert space.reserve(keys, ttl_s=60.0) is not None
    store._keeper.chores()
    assert store.status()["pins"] == 0


@pytest.mark.parametrize("durability", list(Durability))
def test_unpublished_blocks_are_invisible_and_can_be_stored_at_once(
    reopen: Callable[..., Store], clock: FakeClock, durability: Durability
) -> None:
    """11, 2: the bytes are on the disk, the publish failed."""
    plan = FailCalls(1, times=3, op="publish")
    store = reopen(seams=Seams(clock=clock, index=lambda index: FaultyIndex(index, plan)))
    space = keyspace(store)
    keys = chain(space, 1, 2)
    if durability > Durability.EPHEMERAL:
        for _ in range(3):
            assert write(space, keys, durability=durability) == [FAILED] * 2
            assert space.lookup(keys) == 0
            assert read(space, keys) == [MISSING] * 2
    else:  # acknowledged before the commit, which is tried again until it is given up
        write(space, keys, durability=durability)
        for _ in range(3):
            store.sync()
        assert space.lookup(keys) == 0
    assert write(space, keys, durability=durability) == [STORED] * 2
    store.sync()
    assert read(space, keys) == [FOUND] * 2
    assert reopen().status()["blocks"] == 2


# --- 12: a hung disk


@contextmanager
def hanging(path: Path, *ops: str) -> Iterator[tuple[Store, FaultWhile]]:
    plan = FaultWhile("hang", ops=ops)
    plan.armed = False
    store = perdure.open(
        path, capacity="64MiB", memory=0, seams=Seams(files=lambda root: FaultyFiles(PosixFiles(root), plan))
    )
    try:
        yield store, plan
    finally:
        plan.resume()
        store.close()


@pytest.mark.parametrize("direct", [False, True])
def test_hung_read_is_late_and_settles(tmp_path: Path, direct: bool) -> None:
    """12, 4."""
    with hanging(tmp_path, "preadv") as (store, plan):
        space = keyspace(store)
        keys = chain(space, 1, 3)
        write(space, keys)
        plan.armed = True
        memory = perdure.aligned_buffer(3 * BLOCK_BYTES)
        memory[:] = UNTOUCHED
        report = space.read(keys, memory, deadline_s=0.2, direct=direct)
        assert report.statuses.tolist() == [LATE] * 3
        assert (report.usable, report.bytes) == (0, 0)
        assert not report.wait_settled(0.05)
        assert space.lookup(keys) == 3  # nothing is known against them
        plan.resume()
        assert report.wait_settled(PATIENCE_S)
        if not direct:
            assert (memory == UNTOUCHED).all()
        assert read(space, keys, deadline_s=PATIENCE_S) == [FOUND] * 3
        assert "quarantined" not in store.status()["counters"]


def test_hung_write_is_late_and_invisible(tmp_path: Path) -> None:
    """12."""
    with hanging(tmp_path, "pwritev") as (store, plan):
        space = keyspace(store)
        keys = chain(space, 1, 3)
        write(space, keys[:1])
        plan.armed = True
        assert write(space, keys, deadline_s=0.2) == [EXISTS, WRITE_LATE, WRITE_LATE]
        assert space.lookup(keys) == 1
        plan.resume()
        assert write(space, keys, deadline_s=PATIENCE_S) == [EXISTS, STORED, STORED]
        assert read(space, keys) == [FOUND] * 3
        assert store.verify()["ok"]


# --- 15: loading or recomputing


def test_advice_follows_what_was_measured(reopen: Callable[..., Store]) -> None:
    space = keyspace(reopen())
    keys = chain(space, 1, 8)
    write(space, keys[:6])
    assert space.advise(keys, prefill_tokens_per_s=1e12).blocks == 6  # nothing is known yet
    read(space, keys[:6])
    slow, fast = (space.advise(keys, prefill_tokens_per_s=rate) for rate in (1e-3, 1e12))
    assert (slow.blocks, fast.blocks) == (6, 0)
    assert slow.load_s < slow.recompute_s
    assert fast.load_s > fast.recompute_s
    assert "6 blocks" in fast.reason
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(perdure.InvalidArgument):
            space.advise(keys, prefill_tokens_per_s=wrong)


def advice_on(in_memory: str, rates: Rates, tokens_per_s: float, deadline_s: float | None = None) -> int:
    """`in_memory`: "m" or "d" per block of 1 MB and 100 tokens."""
    held = np.array([one == "m" for one in in_memory], bool)
    return advise(
        held, rates, block_bytes=10**6, block_tokens=100, prefill_tokens_per_s=tokens_per_s, deadline_s=deadline_s
    ).blocks


def test_advice_by_tier_queue_and_deadline() -> None:
    rates = Rates()
    assert advice_on("mmdd", rates, 1e9) == 4  # nothing is known
    rates.memory_read.add(10**9, 1.0)  # 1 ms a block
    assert advice_on("mmdd", rates, 1e4) == 4  # 10 ms to compute a block; the disk is not known
    rates.disk_read.add(10**8, 1.0)  # 10 ms a block
    assert advice_on("mmdd", rates, 0.9e4) == 4
    assert advice_on("mmdd", rates, 1.1e4) == 2  # what is in memory, the disk is slower than computing
    assert advice_on("dmmm", rates, 1.1e4) == 4  # over one slow block to three fast ones
    assert advice_on("dmmm", rates, 1e9) == 0
    rates.reading(5 * 10**6)  # 50 ms of the disk's time are promised
    assert advice_on("mmdd", rates, 0.9e4) == 2
    assert advice_on("mm" + "d" * 98, rates, 0.5e4) == 100  # worth the wait: it is long
    assert advice_on("mm" + "d" * 98, rates, 0.5e4, deadline_s=0.2) == 16  # 2 + 50 + 14 x 10 ms
    assert advice_on("mm" + "d" * 98, rates, 0.5e4, deadline_s=0.0015) == 1
    assert advice_on("mm" + "d" * 98, rates, 0.5e4, deadline_s=0.0) == 0
    assert advice_on("", rates, 1.0) == 0


def test_the_disk_is_measured_over_all_who_read() -> None:
    rates = Rates()
    for _ in range(3):
        rates.reading(100)
    assert rates.reading_bytes == 300
    rates.read(100, 100)
    rates.read(100, 50)
    assert not rates.disk_read.calls  # others still read: no sample yet
    rates.read(100, 0)
    assert (rates.reading_bytes, rates.disk_read.calls) == (0, 1)
    rates.reading(100)
    rates.read(100, 0)  # nothing came: nothing is learned
    assert rates.disk_read.calls == 1


# --- 19: fences


@pytest.mark.parametrize("durability", list(Durability))
@pytest.mark.parametrize("when", ["before the write", "during the write"])
def test_stale_fence(tmp_path: Path, clock: FakeClock, durability: Durability, when: str) -> None:
    """19: the lease ran out and someone else has it: nothing of the late one becomes visible."""
    steal = when == "during the write"
    taken: list[object] = []

    def admit(request: perdure.AdmissionRequest) -> Any:
        if steal and not taken:
            take()
        return np.ones(len(request.keys), bool)

    def take() -> None:
        clock.advance(11.0)
        taken.append(space.reserve(keys, ttl_s=60.0))

    with closing(perdure.open(tmp_path, capacity="64MiB", seams=Seams(clock=clock), admission=admit)) as store:
        space = keyspace(store)
        keys = chain(space, 1, 3)
        lease = space.reserve(keys, ttl_s=10.0)
        assert lease is not None
        if not steal:
            take()
        with pytest.raises(StaleFence):
            write(space, keys, durability=durability, lease=lease)
        assert taken[0] is not None
        store.sync()
        assert space.lookup(keys) == 0
        assert read(space, keys) == [MISSING] * 3
        assert not space.end_lease(lease)
        assert write(space, keys, durability=durability, lease=taken[0]) == [STORED] * 3
        assert read(space, keys) == [FOUND] * 3
        assert store.status()["blocks"] in (0, 3)  # ephemeral ones may not be committed yet


# --- retained


def test_retained_is_served_from_the_mirror(reopen: Callable[..., Store], tmp_path: Path) -> None:
    store = reopen(mirror=tmp_path / "mirror")
    space = keyspace(store)
    keys = chain(space, 1, 4)
    write(space, keys, durability="retained")
    path, offset = file_of(store, keys[1].tobytes())
    assert (tmp_path / "mirror" / path.relative_to(store.path)).read_bytes() == path.read_bytes()
    with path.open("r+b") as file:
        file.seek(offset + 4096 + 77)
        file.write(b"\0\1\2\3")
    assert read(space, keys) == [FOUND] * 4
    shutil.rmtree(store.path / "segments")
    assert read(space, keys, deadline_s=PATIENCE_S) == [FOUND] * 4
    store = reopen(mirror=tmp_path / "mirror")
    assert read(keyspace(store), keys) == [FOUND] * 4
    assert store.status()["incidents"] == []


def test_the_mirror_is_needed_for_retained_only(tmp_path: Path) -> None:
    plan = FaultWhile("eio", ops=["create", "pwritev", "datasync"])
    mirror = tmp_path / "mirror"

    def files(root: str) -> Files:
        return FaultyFiles(PosixFiles(root), plan) if root == str(mirror) else PosixFiles(root)

    with closing(perdure.open(tmp_path / "s", capacity="64MiB", mirror=mirror, seams=Seams(files=files))) as store:
        space = keyspace(store)
        keys = chain(space, 1, 2)
        assert write(space, keys, durability="retained") == [FAILED] * 2
        assert space.lookup(keys) == 0
        assert write(space, keys, durability="session") == [STORED] * 2
        plan.armed = False
        assert write(space, keys, durability="retained") == [STORED] * 2
        assert read(space, keys) == [FOUND] * 2


# --- DRAM tier


def test_hit_in_memory_asks_no_disk(tmp_path: Path) -> None:
    plan = NthFault(0, "eio", ops=["open", "preadv", "read"])
    seams = Seams(files=lambda root: FaultyFiles(PosixFiles(root), plan))
    keys = None
    for expected in ("written here", "read before"):
        with closing(perdure.open(tmp_path, capacity="64MiB", memory="8MiB", seams=seams)) as store:
            assert store.wait_ready(PATIENCE_S)
            space = keyspace(store)
            keys = chain(space, 1, 4)
            if expected == "written here":
                write(space, keys)
            else:
                assert space.read(keys, bytearray(4 * BLOCK_BYTES), deadline_s=PATIENCE_S).from_memory == 0
            count = plan.count
            memory = bytearray(4 * BLOCK_BYTES)
            report = space.read(keys, memory)
            assert (report.from_memory, report.usable) == (4, 4)
            assert memory == blocks_of(keys).tobytes()
            assert plan.count == count
            assert store.status()["counters"]["blocks_found_memory"] == 4


def test_memory_holds_nothing_that_is_gone(reopen: Callable[..., Store], clock: FakeClock) -> None:
    """Expired blocks are not delivered from memory either."""
    store = reopen(memory="8MiB")
    space = keyspace(store)
    keys = chain(space, 1, 4)
    write(space, keys[:2], ttl_s=60.0)
    write(space, keys[2:])
    clock.advance(70.0)
    assert read(space, keys) == [MISSING, MISSING, FOUND, FOUND]
    assert store.status()["memory"]["slots"] == 4


# --- codec


@pytest.mark.parametrize(
    ("policy", "device_bytes_per_s", "compressible", "reason"),
    [
        ("on", None, False, "on, as configured"),
        ("off", None, True, "off, as configured"),
        ("auto", 64e6, True, "on: the device is the bottleneck"),
        ("auto", 64e6, False, "off: the data hardly compresses"),
    ],
)
def test_codec_is_chosen_and_says_why(
    tmp_path: Path, policy: str, device_bytes_per_s: float | None, compressible: bool, reason: str
) -> None:
    def files(root: str) -> Files:
        inner = PosixFiles(root)
        return inner if device_bytes_per_s is None else ThrottledFiles(inner, device_bytes_per_s, 1e9)

    with closing(perdure.open(tmp_path, capacity="64MiB", memory=0, seams=Seams(files=files))) as store:
        space = keyspace(store, codec=policy)
        keys = chain(space, 1, 2)
        data = blocks_of(keys)
        if compressible:
            data[:, 1::2], data[:, 2::4] = 0x3F, 0
        report = space.write(keys, data)
        assert store.status()["codecs"][space.digest.hex()].startswith(reason)
        packed = compressible and policy != "off"
        assert (report.stored_bytes < 2 * (BLOCK_BYTES + 4096)) == packed
        codec = store.explain(keys[0].tobytes())["record"]["codec"]
        assert (codec != "none") == packed
        memory = np.zeros_like(data)
        assert space.read(keys, memory).usable == 2
        assert np.array_equal(memory, data)


# --- who may open it, and how


def test_readers_beside_the_writer(reopen: Callable[..., Store]) -> None:
    store = reopen()
    space = keyspace(store)
    keys = chain(space, 1, 3)
    write(space, keys)
    with pytest.raises(perdure.StoreLocked, match=str(os.getpid())):
        perdure.open(store.path)
    with closing(perdure.open(store.path, read_only=True, memory=0)) as reader:
        seen: Keyspace = keyspace(reader)
        assert read(seen, keys) == [FOUND] * 3
        assert seen.lookup(keys) == 3
        for call in (
            lambda: write(seen, keys),
            lambda: seen.pin(keys, ttl_s=1.0),
            lambda: seen.reserve(keys),
        ):
            with pytest.raises(perdure.ReadOnlyStore):
                call()
    assert read(space, keys) == [FOUND] * 3


def test_unknown_options_name_the_nearest(tmp_path: Path) -> None:
    """22."""
    with pytest.raises(perdure.UnknownOption, match="'capacity'"):
        perdure.open(tmp_path / "s", capcity="1GiB")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("what", ["pool", "thread"])
def test_an_opening_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """No engine, no thread, no descriptor, no lock: it can be tried again."""
    engines: list[str] = []

    class Engine(ThreadEngine):
        def __init__(self) -> None:
            super().__init__()
            engines.append("opened")

        def close(self) -> None:
            super().close()
            engines.append("closed")

    perdure.open(tmp_path / "s", memory=0).close()
    before = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    start = threading.Thread.start

    def pool(nbytes: int) -> Any:
        raise MemoryError(f"{nbytes} bytes")

    def refused(thread: threading.Thread) -> None:
        if thread.name == "perdure-keeper":  # not the first one
            raise RuntimeError("can't start new thread")
        start(thread)

    seams = Seams(engine=Engine)
    if what == "pool":
        seams.pool = pool
    else:
        monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises((MemoryError, RuntimeError)):
        perdure.open(tmp_path / "s", memory="16MiB", seams=seams)
    assert engines == ["opened", "closed"]
    assert (set(threading.enumerate()), set(os.listdir("/proc/self/fd"))) == before
    monkeypatch.undo()
    perdure.open(tmp_path / "s", memory=0).close()
