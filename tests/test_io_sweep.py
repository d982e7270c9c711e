"""The N-th I/O fails, once or from then on, for every N, under every verb; and the same for every change of a catalog.

Expected after each fault: a status per block, or an error of the documented kind from the verbs that may raise one; no
hang; no descriptor, thread or temporary file left; never wrong bytes. With the disk mended, everything that was
acknowledged is found and equal (also in this process), the books are exact, and the store can be written to.

Errors of the disk never leave a verb as an exception, save `open`, where the store's own files are read: read, write,
lookup, verify, explain, sync and close report. Errors of a catalog are CatalogError, from open, keyspace, pin, reserve,
release of a pin, lookup, verify, explain and close; read and write report them too.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import blocks, sweep
from support.sweep import BLOCK_BYTES, CHAINS, Armed, bounded, space_of

import perdure
from perdure import BlockStatus, CatalogError, Keyspace, Seams, Store, StorePathError, WriteStatus, limits
from perdure.catalog.api import KeyArray
from perdure.catalog.faulty import FailCalls, FaultyControl, FaultyIndex
from perdure.io.engine import ThreadEngine
from perdure.io.faulty import FaultWhile, FaultyFiles, NthFault
from perdure.io.files import PosixFiles

FOUND, MISSING = BlockStatus.FOUND, BlockStatus.MISSING

# Every second N for I/O errors and every fifth for the other kinds; the same process goes on, or not, in turn.
# PERDURE_SWEEP_SEED=n picks others, and PERDURE_SWEEP_ALL=1 (`make test-long`) takes all of them (about ten minutes).
SEED = int(os.environ.get("PERDURE_SWEEP_SEED", "20261202"))
EVERY = os.environ.get("PERDURE_SWEEP_ALL") == "1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With two stores to start from: "closed" and "died"."""
    with sweep.quick_folder(tmp_path_factory.mktemp("sweep")) as at:
        sweep.make_store(at, died=False)
        sweep.make_store(at, died=True)
        yield at


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Background work is tried again at once, not after a second."""
    monkeypatch.setattr(limits, "background_retry_s", 0.002)


OPENING = (CatalogError, StorePathError)
"""A store does not open without knowing what was erased."""


@dataclass
class Life:
    """One run of a scenario on a store whose disk or catalog fails."""

    path: Path
    seams: Seams
    lying: bool = False  # torn: what reports success may not have happened
    acknowledged: dict[int, int] = field(default_factory=lambda: {chain: count for chain, count, _ in CHAINS})
    doubtful: set[int] = field(default_factory=set)  # chains acknowledged while the disk lied, or as ephemeral
    kept: list[KeyArray] = field(default_factory=list)  # more that must be there, because it was pinned
    raised: set[str] = field(default_factory=set)
    store: Store | None = None
    rebuild: bool = False  # the index is lost before the store is opened again

    def open(self, **options: Any) -> Store:
        mirror = self.path.with_name(f"{self.path.name}-mirror")
        self.store = perdure.open(self.path, memory=0, mirror=mirror, seams=self.seams, **options)
        return self.store

    def may_raise(self, name: str, work: Callable[[], Any], kinds: Any = CatalogError) -> Any:
        try:
            return work()
        except kinds:
            self.raised.add(name)
            return None

    def write(self, space: Keyspace, chain: int, count: int, durability: str, **options: Any) -> None:
        report = blocks.write(space, blocks.chain(space, chain, count), durability, **options)
        assert report.statuses.max() <= WriteStatus.FAILED
        refused = np.flatnonzero(report.statuses > WriteStatus.EXISTS).tolist()
        assert set(report.reasons) == set(refused), "a refused block without a reason, or the other way round"
        done = int(refused[0]) if refused else count
        if durability == "ephemeral" or self.lying:
            self.doubtful.add(chain)
        if done:
            self.acknowledged[chain] = max(done, self.acknowledged.get(chain, 0))

    def check(self, space: Keyspace, *, mended: bool) -> None:
        """Every acknowledged chain: right, and all there if the disk is well."""
        for chain, count in self.acknowledged.items():
            statuses = sweep.assert_right(space, blocks.chain(space, chain, count))
            if mended and chain not in self.doubtful:
                assert (statuses == FOUND).all(), f"chain {chain}: {statuses}"
        for keys in self.kept if mended else ():
            assert (blocks.read_back(space, keys) == FOUND).all(), "pinned blocks are gone"


def _verbs(life: Life) -> None:
    """Every public verb once, on a store whose writer died."""
    store = life.may_raise("open", life.open, OPENING)
    if store is None:
        return
    space = life.may_raise("keyspace", lambda: space_of(store, "acme"))
    if space is not None:
        _use(life, store, space)
    life.may_raise("close", store.close)


def _use(life: Life, store: Store, space: Keyspace) -> None:
    life.check(space, mended=False)
    assert 0 <= (life.may_raise("lookup", lambda: space.lookup(blocks.chain(space, 1, 4))) or 0) <= 4
    mine = {11: 3, 12: 3, 13: 2, 14: 18}
    wanted = np.concatenate([blocks.chain(space, *one) for one in (life.acknowledged | mine).items()])
    pin = life.may_raise("pin", lambda: space.pin(wanted, ttl_s=60.0))  # lest a full disk evicts it
    lease = life.may_raise("reserve", lambda: space.reserve(blocks.chain(space, 11, 3), ttl_s=60.0))
    life.write(space, 11, 3, "session")
    life.write(space, 12, 3, "ephemeral")
    life.may_raise("sync", store.sync)
    life.write(space, 13, 2, "retained")
    life.write(space, 2, 3, "session")  # asks for more than is there
    life.write(space, 14, 18, "session", ttl_s=3600.0)  # more than one segment
    space.release(blocks.chain(space, 5, 20))
    sweep.assert_right(space, blocks.chain(space, 5, 20), direct=True)
    sweep.assert_right(space, blocks.chain(space, 14, 18), deadline_s=sweep.BOUND_S)
    report = life.may_raise("verify", store.verify)
    assert report is None or set(report) >= {"blocks", "bad", "unreadable_segments", "ok"}
    explained = life.may_raise("explain", lambda: store.explain(blocks.chain(space, 1, 1)[0].tobytes()))
    assert explained is None or explained["verdict"]
    if lease is not None:
        life.may_raise("end_lease", lambda: space.end_lease(lease))
    if pin is not None:
        life.may_raise("unpin", pin.release)
    assert store.status()["counters"]


def _reclaiming(life: Life) -> None:
    """More than the capacity is written: segments are dropped, and what is pinned in them is copied forward."""
    store = life.may_raise("open", lambda: life.open(capacity=6 << 20), OPENING)
    if store is None:
        return
    space = life.may_raise("keyspace", lambda: space_of(store))
    if space is None:
        return
    pinned = []
    for chain in (1, 5):
        keys = blocks.chain(space, chain, life.acknowledged[chain])
        if life.may_raise("pin", lambda keys=keys: space.pin(keys, ttl_s=600.0)) is not None:
            pinned.append(chain)
        space.release(keys)  # without the pin they would be the first to go
    life.doubtful = set(life.acknowledged) - set(pinned)
    for chain in range(31, 36):
        life.write(space, chain, 20, "session")
        life.doubtful.add(chain)
        some = blocks.chain(space, chain, life.acknowledged.get(chain, 0))[::5]  # no segment can go without a copy
        if life.may_raise("pin", lambda some=some: space.pin(some, ttl_s=600.0)) is not None:
            life.kept.append(some[space.present(some)])
    life.check(space, mended=False)
    for chain in pinned:
        keys = blocks.chain(space, chain, life.acknowledged[chain])
        assert space.present(keys).all(), "pinned blocks were dropped"


def _growing(life: Life) -> None:
    """Segments start small and grow twice."""
    store = life.may_raise("open", lambda: life.open(capacity=64 << 20), OPENING)
    if store is None:
        return
    space = space_of(store)
    everything = life.acknowledged | dict.fromkeys(range(41, 45), 15)
    space.pin(np.concatenate([blocks.chain(space, *one) for one in everything.items()]), ttl_s=600.0)
    for chain in range(41, 45):
        life.write(space, chain, 15, "session")
    assert not blocks.wrong_books(store, settled=False)


def _rebuilding(life: Life) -> None:
    """The block index is gone, and comes back while the store is used."""
    shutil.rmtree(life.path / "index")
    store = life.may_raise("open", life.open, OPENING)
    space = None if store is None else life.may_raise("keyspace", lambda: space_of(store))
    if space is None:
        return
    life.check(space, mended=False)
    life.write(space, 11, 3, "session")
    while not store._keeper.ready.is_set() and store._keeper.last_error is None:
        time.sleep(0.001)
    life.check(space, mended=False)


def _mended(life: Life, store: Store) -> None:
    """Nothing fails any more: the same process goes on as if nothing had happened."""
    assert store.wait_ready(sweep.BOUND_S), store.status()["background"]
    store.sync()
    store._keeper.chores()
    space = space_of(store)
    life.check(space, mended=True)
    assert blocks.wrong_books(store) == []
    keys = blocks.chain(space, 21, 6)
    assert blocks.write(space, keys).durable
    assert (blocks.read_back(space, keys) == FOUND).all()
    life.acknowledged[21] = 6


def _reopened(life: Life) -> None:
    """A new process on the mended disk."""
    life.seams = Seams(engine=ThreadEngine)
    with life.open() as store:
        assert store.wait_ready(sweep.BOUND_S), store.status()["background"]
        space = space_of(store)
        life.check(space, mended=True)
        assert blocks.wrong_books(store) == []
        unknown = store.verify()
        assert unknown["ok"] or life.lying, unknown
        keys = blocks.chain(space, 22, 4)
        assert blocks.write(space, keys).durable
        assert (blocks.read_back(space, keys) == FOUND).all()
        for chain in sorted(life.doubtful):  # nothing is blocked by what is left of it
            keys = blocks.chain(space, chain, life.acknowledged.get(chain, 1))
            assert blocks.write(space, keys).durable
            assert (blocks.read_back(space, keys) == FOUND).all()


def _coin(n: int) -> bool:
    return random.Random(SEED * 1000 + n).random() < 0.5


class Twice(NthFault):
    """The n-th operation and the next one fail: a second look, too."""

    def strikes(self, path: str) -> bool:
        return self._n <= self.count <= self._n + 1


def _case(at: Path, start: str, kind: Any, once: bool, n: int, scenario: Callable[[Life], None], mend: bool) -> bool:
    """The N-th operation of the disk fails; False when the scenario has fewer."""
    # A disk whose every read lies is a sick host (test_corruption); here it is one read, or writes from some time on.
    ops = ("pwritev", "write_once") if kind == "torn" and not once else None
    plan = Twice(n, "eio") if kind == "eio-twice" else NthFault(n, kind, once=once, ops=ops)
    armed = Armed(plan)
    path = sweep.copy_store(at, start, "run")
    # Without kernel AIO, which siblings do not go through, and whose contexts take 17 ms each to close.
    seams = Seams(files=lambda root: FaultyFiles(PosixFiles(root), armed), engine=ThreadEngine)
    life = Life(path, seams, lying=kind == "torn", rebuild=_coin(-n))
    armed.on = True

    def over() -> None:
        armed.on = False

    try:
        bounded(lambda: _run(life, scenario, over, mend), f"{kind}, {'once' if once else 'for good'}, operation {n}")
    except pytest.fail.Exception as failure:
        raise pytest.fail.Exception(f"{failure}\n{plan.log[n - 1 :][:1]}") from None
    assert life.raised <= {"open"}, f"raised instead of reported: {life.raised}"
    return plan.count >= n


def _run(life: Life, scenario: Callable[[Life], None], over: Callable[[], None], mend: bool) -> None:
    """The scenario under faults; `over` ends them. Then this process goes on (`mend`), and a new one looks."""
    try:
        scenario(life)
        over()
        if mend and life.store is not None and life.store._closed is None:
            _mended(life, life.store)
        if life.store is not None:
            life.store.close()
        sweep.assert_nothing_left(life.path)
        if life.rebuild:  # what the segments say of themselves is all that was acknowledged
            shutil.rmtree(life.path / "index")
        _reopened(life)
        sweep.assert_nothing_left(life.path)
    finally:
        over()
        if life.store is not None:
            life.store.close()


def _sweep(case: Callable[[int], bool], step: int) -> int:
    """Every `step`-th N (every one in CI) until the scenario has fewer operations; how many operations it has."""
    print(f"PERDURE_SWEEP_SEED={SEED}")
    step = 1 if EVERY else step
    n = 1 + SEED % step
    while case(n):
        n += step
    return n


KINDS = ["eio", "enospc", "edquot", "estale", "short", "torn"]


ONCE = pytest.mark.parametrize("once", [True, False], ids=["once", "for-good"])


@pytest.mark.slow
@ONCE
@pytest.mark.parametrize("kind", KINDS)
def test_every_verb(folder: Path, kind: str, once: bool) -> None:
    operations = _sweep(
        lambda n: _case(folder, "died", kind, once, n, _verbs, mend=_coin(n)), 2 if kind == "eio" else 5
    )
    assert operations > (15 if kind == "torn" and not once else 100)


@pytest.mark.slow
@ONCE
@pytest.mark.parametrize("kind", ["eio", "enospc", "short"])
def test_reclaim(folder: Path, kind: str, once: bool) -> None:
    assert _sweep(lambda n: _case(folder, "closed", kind, once, n, _reclaiming, mend=_coin(n)), 7) > 80


@pytest.mark.slow
@ONCE
@pytest.mark.parametrize("kind", ["eio", "short", "estale"])
def test_rebuild(folder: Path, kind: str, once: bool) -> None:
    assert _sweep(lambda n: _case(folder, "died", kind, once, n, _rebuilding, mend=_coin(n)), 3) > 50


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [_verbs, _rebuilding])
def test_two_operations_in_a_row(folder: Path, scenario: Callable[[Life], None]) -> None:
    """Also the second look at a block fails, and nothing after it: that is no verdict either."""
    step = 1 if scenario is _rebuilding else 3
    assert _sweep(lambda n: _case(folder, "died", "eio-twice", True, n, scenario, mend=_coin(n)), step) > 50


@pytest.mark.slow
@ONCE
@pytest.mark.parametrize("kind", ["eio", "enospc"])
def test_growing_segments(folder: Path, kind: str, once: bool) -> None:
    assert _sweep(lambda n: _case(folder, "closed", kind, once, n, _growing, mend=True), 1) > 15


# --- catalogs -----------------------------------------------------------------------------------------------------


class ArmedCalls:
    def __init__(self, plan: FailCalls):
        self.plan, self.on = plan, True

    def next(self, op: str) -> str | None:
        return self.plan.next(op) if self.on else None


DOCUMENTED = {"open", "keyspace", "pin", "unpin", "reserve", "end_lease", "close"}
"""Verbs that raise CatalogError when a catalog refuses a change; all others report."""


def _catalog_case(
    at: Path, start: str, which: str, mode: str, once: bool, n: int, scenario: Callable[[Life], None]
) -> bool:
    """The N-th change of one of the catalogs fails, or only says so ("unknown"); False when there are fewer."""
    mends = (True, False) if EVERY else (n // 4 % 2 == 0,)  # by turns, with every step that is used
    reached = [_one_catalog_case(at, start, which, mode, once, n, scenario, mend) for mend in mends]
    return all(reached)


def _one_catalog_case(
    at: Path, start: str, which: str, mode: str, once: bool, n: int, scenario: Callable[[Life], None], mend: bool
) -> bool:
    plan = FailCalls(n, mode, times=1 if once else 1 << 30)
    armed = ArmedCalls(plan)
    if which == "index":
        seams = Seams(engine=ThreadEngine, index=lambda index: FaultyIndex(index, armed))
    else:
        seams = Seams(engine=ThreadEngine, control=lambda control: FaultyControl(control, armed))
    life = Life(sweep.copy_store(at, start, "run"), seams, rebuild=mend != (which == "index"))

    def over() -> None:
        armed.on = False

    name = f"{which} {mode}, {'once' if once else 'for good'}, change {n}"
    bounded(lambda: _run(life, scenario, over, mend), name)
    assert life.raised <= DOCUMENTED, f"{name}: raised by {life.raised}"
    return plan.seen >= n


@pytest.mark.slow
@ONCE
@pytest.mark.parametrize("mode", ["error", "unknown"])
@pytest.mark.parametrize("which", ["index", "control"])
def test_every_verb_with_a_failing_catalog(folder: Path, which: str, mode: str, once: bool) -> None:
    assert _sweep(lambda n: _catalog_case(folder, "died", which, mode, once, n, _verbs), 2) > 5


@pytest.mark.slow
@ONCE
@pytest.mark.parametrize("mode", ["error", "unknown"])
@pytest.mark.parametrize("which", ["index", "control"])
@pytest.mark.parametrize("scenario", [_reclaiming, _rebuilding])
def test_reclaim_and_rebuild_with_a_failing_catalog(
    folder: Path, scenario: Callable[[Life], None], which: str, mode: str, once: bool
) -> None:
    start, step = "closed" if scenario is _reclaiming else "died", 2 if which == "index" else 4
    assert _sweep(lambda n: _catalog_case(folder, start, which, mode, once, n, scenario), step) > 5


# --- what a sweep does not reach ----------------------------------------------------------------------------------


class Deaf(FaultyIndex):
    """A catalog whose answers get lost, those to questions as well."""

    def lookup(self, keys: Any) -> Any:
        if self.plan.next("lookup") is not None:
            raise CatalogError("lookup: failed as planned")
        return super().lookup(keys)


def test_a_publish_of_unknown_outcome_is_not_deleted(folder: Path) -> None:
    """It has happened, and nobody could tell: the segment must not be given up as one in which nothing was stored."""
    path, armed = sweep.copy_store(folder, "closed", "run"), ArmedCalls(FailCalls(1, "unknown", times=1 << 30))
    armed.on = False
    with perdure.open(path, memory=0, seams=Seams(index=lambda index: Deaf(index, armed))) as store:
        assert store.wait_ready(sweep.BOUND_S)
        space = space_of(store)
        keys = blocks.chain(space, 61, 3)
        armed.on = True
        report = blocks.write(space, keys, "retained")  # in a segment of its own
        armed.on = False
        assert (report.statuses == WriteStatus.FAILED).all()
    with perdure.open(path, memory=0) as store:
        assert store.wait_ready(sweep.BOUND_S)
        space = space_of(store)
        assert (blocks.read_back(space, keys) == FOUND).all()
        assert (blocks.write(space, keys).statuses == WriteStatus.EXISTS).all()
        assert blocks.wrong_books(store) == []


class Slow(FaultyIndex):
    """Publishing waits until it is let through."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner, FailCalls(0))
        self.began, self.go_on = threading.Event(), threading.Event()

    def publish(self, *arguments: Any, **options: Any) -> Any:
        self.began.set()
        assert self.go_on.wait(sweep.BOUND_S)
        return super().publish(*arguments, **options)


def test_sync_waits_for_the_commit_in_progress(tmp_path: Path) -> None:
    """The background has taken the publishes and not committed them yet: they are not synced."""
    made: list[Slow] = []
    with perdure.open(
        tmp_path / "store", memory=0, seams=Seams(index=lambda index: made.append(Slow(index)) or made[0])
    ) as store:
        space = space_of(store)
        keys = blocks.chain(space, 1, 2)
        assert blocks.write(space, keys, "ephemeral").durable
        assert made[0].began.wait(sweep.BOUND_S)
        syncing = threading.Thread(target=store.sync)
        syncing.start()
        syncing.join(0.2)
        waiting = syncing.is_alive()
        made[0].go_on.set()
        assert waiting, "sync came back while its blocks were being committed"
        syncing.join(sweep.BOUND_S)
        assert not syncing.is_alive()
        assert store._core.index.lookup(keys)[0].all()


def test_a_second_look_that_comes_too_late_is_no_verdict(tmp_path: Path) -> None:
    """One look failed, and there was no time for another: the block is late, and stays."""
    slow = FaultWhile("hang", ops=["preadv"])
    slow.armed = False

    class Once(NthFault):
        def strikes(self, path: str) -> bool:
            struck = super().strikes(path)
            slow.armed = slow.armed or struck
            return struck

    broken = Once(1, "eio", ops=["preadv"])
    seams = Seams(files=lambda root: FaultyFiles(FaultyFiles(PosixFiles(root), broken), slow), engine=ThreadEngine)
    with perdure.open(tmp_path / "store", memory=0, seams=seams) as store:
        space = space_of(store)
        keys = blocks.chain(space, 1, 1)
        assert blocks.write(space, keys).durable
        report = space.read(keys, into=perdure.aligned_buffer(BLOCK_BYTES), deadline_s=0.1)
        slow.resume()
        assert report.statuses.tolist() == [BlockStatus.LATE]
        assert broken.fired == slow.fired == 1
        assert (blocks.read_back(space, keys) == FOUND).all()
        assert "quarantined" not in store.status()["counters"]


def test_an_unreadable_block_gives_way_to_a_new_copy(tmp_path: Path) -> None:
    """The disk gives no bytes to judge: the block is a miss, its record stays for a mended disk, a new copy wins."""
    plan = FaultWhile("eio", ops=["preadv"])
    plan.armed = False
    path = tmp_path / "store"
    seams = Seams(files=lambda root: FaultyFiles(PosixFiles(root), plan), engine=ThreadEngine)
    with perdure.open(path, memory=0, seams=seams) as store:
        assert store.wait_ready(sweep.BOUND_S)
        space = space_of(store)
        kept, renewed = blocks.chain(space, 1, 3), blocks.chain(space, 2, 3)
        for keys in (kept, renewed):
            assert blocks.write(space, keys).durable
        plan.armed = True
        for keys in (kept, renewed):
            assert (blocks.read_back(space, keys) == BlockStatus.CORRUPT).all()
            assert space.lookup(keys) == 0
        assert store.status()["incidents"][-1]["kind"] == "unreadable"
        report = blocks.write(space, renewed)
        assert (report.statuses == WriteStatus.STORED).all(), report.reasons
        assert space.lookup(renewed) == 3
        plan.armed = False
        for keys in (kept, renewed):
            assert (blocks.read_back(space, keys) == FOUND).all()
        assert blocks.wrong_books(store) == []
    with perdure.open(path, memory=0) as store:
        assert store.wait_ready(sweep.BOUND_S)
        for keys in (kept, renewed):
            assert space_of(store).lookup(keys) == 3
            assert (blocks.read_back(space_of(store), keys) == FOUND).all()


@pytest.mark.parametrize("asked", ["ephemeral", "session", "retained"])
def test_a_new_copy_of_an_unreadable_block_keeps_what_was_promised(tmp_path: Path, asked: str) -> None:
    """40. An ephemeral copy that takes the place of a session's block is as durable as that, and lives as long."""
    plan = FaultWhile("eio", ops=["preadv"])
    plan.armed = False
    seams = Seams(files=lambda root: FaultyFiles(PosixFiles(root), plan), engine=ThreadEngine)
    with perdure.open(tmp_path / "store", memory=0, seams=seams) as store:
        assert store.wait_ready(sweep.BOUND_S)
        space = space_of(store)
        keys = blocks.chain(space, 1, 3)
        assert blocks.write(space, keys, "session").durable
        plan.armed = True
        assert (blocks.read_back(space, keys) == BlockStatus.CORRUPT).all()
        plan.armed = False
        report = blocks.write(space, keys, asked, ttl_s=60.0)
        assert (report.statuses == WriteStatus.STORED).all(), report.reasons
        store.sync()
        present, records = store.core.index.lookup(keys)
        assert present.all()
        assert set(records["durability"].tolist()) == {
            max(perdure.Durability.SESSION, perdure.Durability[asked.upper()])
        }
        assert set(records["expires_s"].tolist()) == {0}


def test_failed_copies_do_not_use_up_the_reserve(folder: Path) -> None:
    """Moves fail for a while; each attempt to make room leaves copies nobody knows of. Later there is room again."""
    path, armed = sweep.copy_store(folder, "closed", "run"), ArmedCalls(FailCalls(1, times=1 << 30, op="replace"))
    armed.on = False
    seams = Seams(index=lambda index: FaultyIndex(index, armed), engine=ThreadEngine)
    with perdure.open(path, memory=0, capacity=6 << 20, seams=seams) as store:
        space = space_of(store)
        kept: list[KeyArray] = []
        for number in range(30):
            armed.on = number < 25
            keys = blocks.chain(space, 100 + number, 16)
            if number < 4:  # every segment has something to copy
                space.pin(keys[::4], ttl_s=600.0)
                kept.append(keys[::4])
            report = blocks.write(space, keys)
            assert report.statuses.max() <= WriteStatus.REJECTED
            if number >= 25:
                assert report.durable, report.reasons
        for keys in kept:
            assert (blocks.read_back(space, keys[space.present(keys)]) == FOUND).all()
        assert blocks.wrong_books(store) == []
