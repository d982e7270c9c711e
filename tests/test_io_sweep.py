"""The N-th I/O fails, once or from then on, for every N, under every verb; and the same for every change of a catalog.

Expected after each fault: a status per block, or an error of the documented kind from the verbs that may raise one; no
hang; no descriptor, thread or temporary file left; never wrong bytes. With the disk mended, everything that was
acknowledged is found and equal (also in this process), the books are exact, and the store can be written to.

Errors of the disk never leave a verb as an exception, save where the store's own files are opened: open, read, write,
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
from perdure import BlockStatus, CatalogError, Keyspace, Seams, Store, WriteStatus, limits
from perdure.catalog.faulty import FailCalls, FaultyControl, FaultyIndex
from perdure.io.engine import ThreadEngine
from perdure.io.faulty import FaultyFiles, NthFault
from perdure.io.files import PosixFiles

FOUND, MISSING = BlockStatus.FOUND, BlockStatus.MISSING

# All N for I/O errors; of the other kinds every third, another third in every run. PERDURE_SWEEP_ALL=1: all of all.
SEED = int(os.environ.get("PERDURE_SWEEP_SEED", "0")) or random.SystemRandom().randrange(1 << 30)
STEP = 1 if os.environ.get("PERDURE_SWEEP_ALL") == "1" else 3


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


@dataclass
class Life:
    """One run of a scenario on a store whose disk or catalog fails."""

    path: Path
    seams: Seams
    lying: bool = False  # torn: what reports success may not have happened
    acknowledged: dict[int, int] = field(default_factory=lambda: {chain: count for chain, count, _ in CHAINS})
    doubtful: set[int] = field(default_factory=set)  # chains acknowledged while the disk lied, or as ephemeral
    raised: set[str] = field(default_factory=set)
    store: Store | None = None

    def open(self, **options: Any) -> Store:
        mirror = self.path.with_name(f"{self.path.name}-mirror")
        self.store = perdure.open(self.path, memory=0, mirror=mirror, seams=self.seams, **options)
        return self.store

    def may_raise(self, name: str, work: Callable[[], Any], kinds: type[Exception] = CatalogError) -> Any:
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


def _verbs(life: Life) -> None:
    """Every public verb once, on a store whose writer died."""
    store = life.may_raise("open", life.open)
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
    """Four times the capacity is written: segments are dropped, and what is pinned in them is copied forward."""
    store = life.open(capacity=6 << 20)
    space = space_of(store)
    for chain in (1, 5):
        space.pin(blocks.chain(space, chain, life.acknowledged[chain]), ttl_s=600.0)
        space.release(blocks.chain(space, chain, life.acknowledged[chain]))
    life.doubtful = set(life.acknowledged) - {1, 5}
    for chain in range(31, 51):
        life.write(space, chain, 20, "session")
        life.doubtful.add(chain)
    life.check(space, mended=False)
    for chain in (1, 5):
        keys = blocks.chain(space, chain, life.acknowledged[chain])
        assert space.present(keys).all(), "pinned blocks were dropped"


def _rebuilding(life: Life) -> None:
    """The block index is gone, and comes back while the store is used."""
    shutil.rmtree(life.path / "index")
    store = life.open()
    space = space_of(store)
    life.check(space, mended=False)
    life.write(space, 11, 3, "session")
    while not store._keeper.ready.is_set() and store._keeper.rebuild_error is None:
        time.sleep(0.001)
    life.check(space, mended=False)


def _mended(life: Life, store: Store) -> None:
    """Nothing fails any more: the same process goes on as if nothing had happened."""
    assert store.wait_ready(sweep.BOUND_S), store.status()["background"]
    store._keeper.settle_unsealed()
    store.sync()
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


def _case(at: Path, start: str, kind: Any, once: bool, n: int, scenario: Callable[[Life], None], mend: bool) -> bool:
    """One N; False when the scenario has fewer operations."""
    # A disk whose every read lies is a sick host (test_corruption); here it is one read, or writes from some time on.
    ops = ("pwritev", "write_once") if kind == "torn" and not once else None
    plan = NthFault(n, kind, once=once, ops=ops)
    armed = Armed(plan)
    path = sweep.copy_store(at, start, "run")
    # Without kernel AIO, which siblings do not go through, and whose contexts take 17 ms each to close.
    seams = Seams(files=lambda root: FaultyFiles(PosixFiles(root), armed), engine=ThreadEngine)
    life = Life(path, seams, lying=kind == "torn")
    armed.on = True

    def run() -> None:
        try:
            attempt()
        finally:
            armed.on = False
            if life.store is not None:
                life.store.close()

    def attempt() -> None:
        scenario(life)
        armed.on = False
        if mend and life.store is not None and life.store._closed is None:
            _mended(life, life.store)
            life.store.close()
        sweep.assert_nothing_left(path)
        _reopened(life)
        sweep.assert_nothing_left(path)
        assert not life.raised, f"raised instead of reported: {life.raised}"

    try:
        bounded(run, f"{kind}, {'once' if once else 'for good'}, operation {n}")
    except pytest.fail.Exception as failure:
        where = plan.log[n - 1 :][:1]
        raise pytest.fail.Exception(f"{failure}\n{where}") from None
    return plan.count >= n


def _sweep(at: Path, start: str, kind: Any, once: bool, scenario: Callable[[Life], None], mend: Callable[[int], bool],
           step: int = 1) -> int:  # fmt: skip
    """Every `step`-th N until the scenario has fewer operations; how many operations it has."""
    n = 1 + SEED % step
    while _case(at, start, kind, once, n, scenario, mend(n)):
        n += step
    return n


KINDS = ["eio", "enospc", "edquot", "estale", "short", "torn"]


@pytest.mark.slow
@pytest.mark.parametrize("once", [True, False], ids=["once", "for-good"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_verb(folder: Path, kind: str, once: bool) -> None:
    print(f"PERDURE_SWEEP_SEED={SEED}")
    operations = _sweep(folder, "died", kind, once, _verbs, lambda n: n % 2 == 0, 1 if kind == "eio" else STEP)
    assert operations > (15 if kind == "torn" else 100)
