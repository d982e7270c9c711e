"""Power cuts and full disks.

A power cut takes what had not reached the device. Expected: all blocks acknowledged as `session` or `retained` before
the cut are found and equal after it, nothing torn is served, an `ephemeral` block is found and equal or missing (and
counted as lost, not as corrupt), the store opens, its books are exact and what is missing can be stored again. It is
tried in two ways: at every single I/O of a workload, with files that remember what a cut would take (`PowerCutFiles`;
catalogs are kept whole, which is harder than reality), and on a real file system on a loop device, whose image is
copied while a process writes (needs root).

A full disk is survived: writes are rejected with a reason, reads go on, and with space back writing works again.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import blocks, disk
from support.ledger import Known, Ledger
from support.victim import Victims, victims

import perdure
from perdure import BlockStatus, Keyspace, Seams, WriteStatus
from perdure.catalog.api import KeyArray, SegmentState
from perdure.clock import FakeClock
from perdure.io.files import PosixFiles
from perdure.testing.faults import PowerCutFiles

SEED = int(os.environ.get("PERDURE_CUT_SEED", "0")) or random.SystemRandom().randrange(1 << 30)
OTHER_BOOT = FakeClock(boot_id=b"\2" * 16, wall=1_800_000_600.0)
BLOCK_BYTES = 60_000


# --- at every I/O -------------------------------------------------------------------------------------------------


@dataclass
class Cut:
    """A copy of the store's directory as a power cut would have left it, and what had been acknowledged by then."""

    root: Path
    op: str
    durable: dict[tuple[int, int], bytes]  # (chain, position) -> segment it was acknowledged in
    fleeting: set[tuple[int, int]]


@dataclass
class Workload:
    """One thread's work on a small store: batches of every durability, upgrades, sealed segments, evictions."""

    space: Keyspace
    durable: dict[tuple[int, int], bytes] = field(default_factory=dict)
    fleeting: set[tuple[int, int]] = field(default_factory=set)

    def write(self, chain: int, count: int, durability: str, **options: Any) -> None:
        keys = blocks.chain(self.space, chain, count)
        report = blocks.write(self.space, keys, durability, **options)
        segments = self.space._core.locate(keys)[1]["segment"]
        for position, status in enumerate(report.statuses.tolist()):
            assert status in (WriteStatus.STORED, WriteStatus.EXISTS)
            if durability == "ephemeral":
                self.fleeting.add((chain, position))
            else:
                self.durable[chain, position] = segments[position].tobytes()
                self.fleeting.discard((chain, position))

    def run(self) -> None:
        self.write(1, 3, "session")
        self.write(2, 4, "ephemeral")
        self.space._core.pending and self._sync()
        self.write(2, 2, "session")  # two of them are asked for better than they are
        self.write(3, 2, "retained")
        self.write(4, 2, "session", ttl_s=86_400.0)
        for chain in range(5, 13):
            self.write(chain, 6, "session" if chain % 2 else "ephemeral")
            self._sync()
        self.write(1, 4, "session")

    def _sync(self) -> None:
        """The background commit is not to race with the cuts: what it would do is done here."""
        from perdure.publishing import flush_pending

        flush_pending(self.space._core)


def _cuts(tmp_path: Path, rng: random.Random) -> list[Cut]:
    """Run the workload; a cut before each of its operations."""
    cuts: list[Cut] = []
    made: list[PowerCutFiles] = []
    (tmp_path / "grave").mkdir()
    store_path, state = tmp_path / "store", Workload.__new__(Workload)
    armed = False

    def before(op: str, path: str) -> None:
        if not armed:
            return
        root = tmp_path / f"cut-{len(cuts)}"
        shutil.copytree(store_path, root)
        made[0].lose(root, rng)
        cuts.append(Cut(root, f"{op} {path}", dict(state.durable), set(state.fleeting)))

    def files(root: str) -> PowerCutFiles:
        made.append(PowerCutFiles(PosixFiles(root), tmp_path / "grave", before))
        return made[-1]

    seams = Seams(clock=FakeClock(), files=files)
    store = perdure.open(store_path, capacity=str(6 << 20), memory=0, seams=seams)
    assert store.wait_ready(30)
    state.__init__(blocks.keyspace(store, block_bytes=BLOCK_BYTES))  # type: ignore[misc]
    armed = True
    state.run()
    store.close()
    return cuts


def _after(cut: Cut) -> None:
    with perdure.open(cut.root, memory=0, seams=Seams(clock=OTHER_BOOT)) as store:
        space = blocks.keyspace(store, block_bytes=BLOCK_BYTES)
        missing: list[KeyArray] = []
        for ready in (False, True):
            if ready:
                assert store.wait_ready(30), store.status()["background"]
            alive = {one.segment for one in store._core.table.all() if one.state is not SegmentState.DRAINING}
            for chain in range(1, 13):
                keys = blocks.chain(space, chain, 6)
                statuses = blocks.read_back(space, keys)
                assert np.isin(statuses, (BlockStatus.FOUND, BlockStatus.MISSING)).all(), (cut.op, chain, statuses)
                for position in np.flatnonzero(statuses == BlockStatus.MISSING).tolist():
                    name = (chain, position)
                    assert cut.durable.get(name) not in alive, f"{name} was acknowledged before {cut.op}, and is gone"
                    missing.append(keys[position : position + 1])
        assert blocks.wrong_books(store) == []
        status = store.status()
        assert status["healthy"]
        assert {one["kind"] for one in status["incidents"]} <= {"lost"}
        assert status["background"]["last_error"] is None
        again = np.concatenate(missing[-6:]) if missing else blocks.chain(space, 99, 2)
        assert blocks.write(space, again).durable
        assert (blocks.read_back(space, again) == BlockStatus.FOUND).all()


@pytest.mark.slow
@pytest.mark.parametrize("half", range(2))
def test_cut_at_every_operation(tmp_path: Path, half: int) -> None:
    print(f"PERDURE_CUT_SEED={SEED}")
    cuts = _cuts(tmp_path, random.Random(SEED + half))
    assert len(cuts) > 50
    assert {one.op.split()[0] for one in cuts} >= {"create", "allocate", "pwritev", "datasync", "write_once", "unlink"}
    for cut in cuts[half::2]:
        _after(cut)


# --- on a real file system ----------------------------------------------------------------------------------------

SPACES: list[dict[str, Any]] = [{"tenant": "acme"}, {"tenant": "acme", "block_bytes": 65_536}]


@pytest.fixture
def loops(tmp_path: Path) -> Path:
    """A folder in which loop mounts work."""
    if why := disk.missing(tmp_path):
        pytest.skip(why)
    return tmp_path


def _check_copy(server: Victims, image: disk.Image, at: Path, ledger: Ledger, evicting: bool) -> None:
    """Mount what a cut left, on another boot, and compare."""
    with image.mounted(at) as mount:
        everything = [[*name, known.count] for name, known in ledger.chains.items()][-150:]
        victim = server.start(
            kind="work", path=str(mount.path / "store"), seed=1, first_chain=90_000_000, options={"memory": 0},
            check=everything, pins=[], spaces=SPACES, close_after=0, again=not evicting, seams={"boot_id": "02" * 16},
        )  # fmt: skip
        status = victim.end()
        ledger.compare(victim.heard, evicting)
        ledger.take(victim.heard)
        assert status == 0, victim.heard[-1]
        assert victim.heard[-1] == ["closed"]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("capacity", ["100MiB", "24MiB"])
def test_cut_on_a_real_file_system(loops: Path, capacity: str) -> None:
    """With 100 MiB nothing may be evicted: the writer rests, so that it stays far below that on any machine."""
    rng, ledger, heard, evicting = random.Random(SEED), Ledger(power=True), 0, capacity != "100MiB"
    print(f"PERDURE_CUT_SEED={SEED}")
    pins = [[0, 1 + chain, 4] for chain in range(3)]
    for place, chain, count in pins:
        ledger.chains[place, chain] = Known(count)
    image = disk.Image.made(loops / "disk.img", 160 << 20)
    with victims() as server, image as whole, whole.mounted(loops / "disk") as mount:
        victim = server.start(
            kind="work", path=str(mount.path / "store"), seed=SEED, first_chain=100, check=[], pins=pins, spaces=SPACES,
            options={"memory": 0, "capacity": capacity}, rest_s=0.02 if evicting else 0.1,
        )  # fmt: skip
        try:
            victim.hear("checked")
            for _ in range(5):
                time.sleep(rng.uniform(0.05, 0.5))
                with contextlib.ExitStack() as stack:
                    with victim.stopped():
                        left = stack.enter_context(mount.copied(loops / "copy.img"))
                        said = len(victim.heard)
                    ledger.take(victim.heard[heard:said])
                    heard, known = said, copy.deepcopy(ledger)
                    _check_copy(server, left, loops / "copy", known, evicting)
                    assert known.checks == 1
        finally:
            victim.kill()
    assert ledger.acknowledged > 100


# --- a full disk --------------------------------------------------------------------------------------------------


def test_a_write_larger_than_the_store(tmp_path: Path) -> None:
    """What cannot be stored is rejected; room is not made of what the same call has stored, and reports as stored."""
    with perdure.open(tmp_path / "store", capacity=6 << 20, memory=0) as store:
        space = blocks.keyspace(store, block_bytes=BLOCK_BYTES)
        for chain in range(4):
            keys = blocks.chain(space, chain, 150)
            report = blocks.write(space, keys)
            stored = report.statuses == WriteStatus.STORED
            assert 20 < stored.sum() < 150
            assert (report.statuses[~stored] == WriteStatus.REJECTED).all()
            assert stored[: int(stored.sum())].all(), "the tail was stored rather than the head"
            assert (blocks.read_back(space, keys[stored]) == BlockStatus.FOUND).all()
            assert blocks.wrong_books(store) == []


@pytest.mark.root
def test_full_disk(loops: Path) -> None:
    """The file system is smaller than the capacity: own cold blocks go; when that is not allowed, writes are rejected,
    reads go on, and with space back writing works again."""
    image = disk.Image.made(loops / "disk.img", 64 << 20)
    with image as whole, whole.mounted(loops / "disk") as mount:
        with perdure.open(mount.path / "store", capacity="1GiB", memory=0) as store:
            space = blocks.keyspace(store, block_bytes=BLOCK_BYTES)
            for chain in range(40):  # 40 x 2.5 MB into 64 MiB
                keys = blocks.chain(space, chain, 40)
                report = blocks.write(space, keys)
                assert report.durable, report.reasons
                assert (blocks.read_back(space, keys) == BlockStatus.FOUND).all()
            status = store.status()
            assert status["counters"]["file_system_full"] > 0
            assert status["reclaim"]["segments_dropped"] > 0
            assert blocks.wrong_books(store) == []
            kept = [chain for chain in range(40) if space.lookup(blocks.chain(space, chain, 40)) == 40]
            assert 39 in kept

            with space.pin(np.concatenate([blocks.chain(space, chain, 40) for chain in kept]), ttl_s=600.0):
                ballast = mount.fill()
                rejected = 0
                for chain in range(100, 110):
                    report = blocks.write(space, blocks.chain(space, chain, 20))
                    rejected += report.count(WriteStatus.REJECTED)
                    assert np.isin(report.statuses, (WriteStatus.STORED, WriteStatus.REJECTED)).all(), report.reasons
                    bad = np.flatnonzero(report.statuses == WriteStatus.REJECTED).tolist()
                    assert sorted(report.reasons) == bad
                    assert all("space" in report.reasons[place].lower() for place in bad)
                assert rejected
                for chain in kept:
                    assert (blocks.read_back(space, blocks.chain(space, chain, 40)) == BlockStatus.FOUND).all(), chain
                ballast.unlink()
                assert blocks.write(space, blocks.chain(space, 200, 20)).durable

            ballast = mount.fill()  # nothing is pinned any more: room is made of what is cold
            for chain in range(300, 310):
                assert blocks.write(space, blocks.chain(space, chain, 20)).durable
            ballast.unlink()
            assert blocks.wrong_books(store) == []
        with perdure.open(mount.path / "store", memory=0) as store:
            assert store.wait_ready(30)
            assert blocks.wrong_books(store) == []
            assert store.verify()["ok"]


@pytest.mark.root
@pytest.mark.parametrize("reserve", [True, False])
def test_full_disk_under_the_catalog(loops: Path, reserve: bool) -> None:
    """The catalogs go on with what is kept for them. Without it nothing that was stored is lost, and nothing is
    acknowledged that is not stored."""
    image = disk.Image.made(loops / "disk.img", 64 << 20)
    with image as whole, whole.mounted(loops / "disk") as mount:
        stored: list[KeyArray] = []
        with perdure.open(mount.path / "store", capacity="1GiB", memory=0) as store:
            assert store.wait_ready(30)
            space = blocks.keyspace(store, block_bytes=4096)
            with space.pin(blocks.chain(space, 0, 2000), ttl_s=600.0):
                assert blocks.write(space, blocks.chain(space, 0, 2000)).durable
                stored.append(blocks.chain(space, 0, 2000))
                for catalog in () if reserve else ("index", "control"):  # give it back
                    os.truncate(
                        catalog_file := mount.path / "store" / catalog / "data.mdb", catalog_file.stat().st_size
                    )
                mount.fill()
                failed, why = 0, set()
                for chain in range(1, 80):  # the open segment has room, the index grows
                    keys = blocks.chain(space, chain, 50)
                    report = blocks.write(space, keys, "session" if chain % 2 else "ephemeral")
                    assert np.isin(report.statuses, list(WriteStatus)).all()
                    done = report.statuses <= WriteStatus.EXISTS
                    failed += int((~done).sum())
                    why |= {reason.split(" ")[0] for reason in report.reasons.values()}
                    if chain % 2:
                        stored.append(keys[done])
                    assert (blocks.read_back(space, keys[done]) == BlockStatus.FOUND).all()
                assert failed, "the disk never was full"
                assert ("block" in why) != reserve, f"reasons that began with {why}"  # "block index: ..."
                store.sync()
                for keys in stored:
                    assert (blocks.read_back(space, keys) == BlockStatus.FOUND).all()
        (mount.path / "ballast").unlink()
        with perdure.open(mount.path / "store", memory=0) as store:
            assert store.wait_ready(30)
            assert blocks.wrong_books(store) == []
            space = blocks.keyspace(store, block_bytes=4096)
            for keys in stored:
                assert (blocks.read_back(space, keys) == BlockStatus.FOUND).all()
            assert blocks.write(space, blocks.chain(space, 500, 50)).durable
