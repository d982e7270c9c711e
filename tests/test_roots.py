"""Several roots: their namespace, where segments go, roots that fail or are away, second copies and their repair."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.blocks import CORRUPT, FOUND, MISSING, chain, keyspace, read_back, write

import perdure
from perdure import Keyspace, Seams, Store, limits
from perdure.catalog.api import KeyArray
from perdure.cli import main
from perdure.clock import FakeClock
from perdure.errors import FormatError, InvalidArgument, RootUnavailable, StorePathError
from perdure.io.api import Files
from perdure.io.faulty import FaultPlan
from perdure.io.files import PosixFiles
from perdure.io.roots import Root, Roots
from perdure.io.siblings import FaultWhile, FaultyFiles, NthFault
from perdure.io.wrappers import FilesAround
from perdure.observe.doctor import Subject, examine
from perdure.roots import LIST, MARK, absence
from perdure.testing.io import FilesConformance

BLOCKS = 6


def roots_at(directory: Path, count: int = 3, **options: Any) -> Roots:
    """Roots without a store: the first is `directory` itself, the others lie beside it."""
    places = [directory, *(directory.with_name(f"{directory.name}-root{number}") for number in range(1, count))]
    for place in places:
        place.mkdir(exist_ok=True)

    def absent(place: Path) -> Callable[[], str]:
        return lambda: "" if place.exists() else f"{place} is not there"

    def make(place: Path) -> Callable[[], Files]:
        return lambda: PosixFiles(place)

    return Roots(
        [Root(number, str(place), absent(place), make(place)) for number, place in enumerate(places)], **options
    )


class TestRoots(FilesConformance):
    def make(self, directory: Path) -> Files:
        return roots_at(directory)


class _InSegments(FilesAround):
    """Everything under `segments/`: the conformance of what is spread."""

    def wrap(self, file: Any) -> Any:
        file.path = file.path.removeprefix("segments/")
        return file

    def create(self, path: str, *, direct: bool = True) -> Any:
        return super().create(f"segments/{path}", direct=direct)

    def open(self, path: str, *, direct: bool = True, write: bool = False) -> Any:
        return super().open(f"segments/{path}", direct=direct, write=write)

    def write_once(self, path: str, data: bytes) -> bool:
        return super().write_once(f"segments/{path}", data)

    def read(self, path: str) -> bytes:
        return super().read(f"segments/{path}")

    def unlink(self, path: str) -> None:
        super().unlink(f"segments/{path}")

    def sync_directory(self, path: str) -> None:
        super().sync_directory(f"segments/{path}".rstrip("/"))

    def list(self, path: str) -> Any:
        return super().list(f"segments/{path}".rstrip("/"))


class TestSpread(FilesConformance):
    def make(self, directory: Path) -> Files:
        return _InSegments(roots_at(directory))

    @pytest.mark.parametrize("path", ["../one", "a/../../one", "a//b", "", ".", "a/.", "a\0b"])
    def test_paths_stay_below_the_root(self, files: Files, directory: Path, path: str) -> None:
        super().test_paths_stay_below_the_root(files, directory, path)


class TestSecondCopies(FilesConformance):
    def make(self, directory: Path) -> Files:
        return _InSegments(roots_at(directory).second)  # type: ignore[arg-type]

    @pytest.mark.parametrize("path", ["../one", "a/../../one", "a//b", "", ".", "a/.", "a\0b"])
    def test_paths_stay_below_the_root(self, files: Files, directory: Path, path: str) -> None:
        super().test_paths_stay_below_the_root(files, directory, path)


# --- stores over roots


class _Free(FilesAround):
    """A namespace that says how much is free."""

    def __init__(self, inner: Files, free: Callable[[], int]):
        super().__init__(inner)
        self._free = free

    def wrap(self, file: Any) -> Any:
        return file

    def free_bytes(self) -> int:
        return self._free()


class Place:
    """A store under `at` with two more roots; each root's faults and free space can be set."""

    def __init__(self, at: Path):
        self.at, self.clock = at, FakeClock()
        self.paths = [at / "store", at / "a", at / "b"]
        self.free = [3 * limits.GIB, 2 * limits.GIB, limits.GIB]
        self.plans: dict[int, FaultPlan] = {}
        self.store: Store | None = None

    def _files(self, root: str) -> Files:
        number = [str(path) for path in self.paths].index(root)
        files: Files = _Free(PosixFiles(root), lambda: self.free[number])
        return FaultyFiles(files, self.plans[number]) if number in self.plans else files

    def open(self, **options: Any) -> Store:
        self.close()
        chosen: dict[str, Any] = {"memory": 0, "roots": self.paths[1:]} | options
        self.store = perdure.open(self.paths[0], seams=Seams(files=self._files, clock=self.clock), **chosen)
        assert self.store.wait_ready(20)
        return self.store

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        self.store = None

    def tend(self) -> None:
        """What the background thread does every `limits.root_look_s`."""
        assert self.store is not None
        self.store._keeper.tend_roots()

    def states(self) -> list[str]:
        assert self.store is not None
        return [one["state"] for one in self.store.status()["roots"]["list"]]

    def segments(self, number: int, folder: str = "segments") -> list[Path]:
        return sorted(self.paths[number].glob(f"{folder}/*/*.seg"))

    def unmount(self, number: int) -> None:
        """The device is gone; what is under its mount point shows."""
        self.paths[number].rename(self.at / f"unmounted{number}")
        self.paths[number].mkdir()

    def mount(self, number: int) -> None:
        self.paths[number].rmdir()
        (self.at / f"unmounted{number}").rename(self.paths[number])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(limits, "root_look_s", 3600.0)  # the tests look themselves
    one = Place(tmp_path)
    yield one
    one.plans.clear()
    one.close()


def stored(
    place: Place, number: int, *, tenant: str = "acme", durability: str = "session"
) -> tuple[Keyspace, KeyArray]:
    """BLOCKS blocks of a chain, written to a segment that is sealed afterwards."""
    assert place.store is not None
    space = keyspace(place.store, tenant=tenant)
    keys = chain(space, number, BLOCKS)
    assert write(space, keys, durability).stored == BLOCKS
    for one in place.store.core.writer.open_segments():
        place.store.core.writer.retire(one)
    return space, keys


def test_a_segment_goes_where_most_is_free(place: Place) -> None:
    place.open()
    for number, free in enumerate(([9, 1, 1], [1, 9, 1], [1, 1, 9], [1, 9, 2])):
        place.free = [one * limits.GIB for one in free]
        stored(place, number)
    assert [len(place.segments(number)) for number in range(3)] == [1, 2, 1]
    assert place.store is not None
    assert place.store.core.space.used == sum(
        path.stat().st_size for number in range(3) for path in place.segments(number)
    )
    for number in range(4):
        space = keyspace(place.store)
        assert (read_back(space, chain(space, number, BLOCKS)) == FOUND).all()


def test_a_full_root_sends_the_writer_to_another(place: Place) -> None:
    place.plans[0] = FaultWhile("enospc", ops=["allocate"])
    place.plans[0].armed = False  # type: ignore[attr-defined]
    store = place.open(capacity="64MiB")
    space = keyspace(store)
    assert write(space, chain(space, 1, BLOCKS)).stored == BLOCKS
    place.plans[0].armed = True  # type: ignore[attr-defined]
    place.free[0] = 0
    keys = chain(space, 2, 400)  # more than the open segment has allocated
    assert write(space, keys).stored == 400
    assert len(place.segments(0)) == 1
    assert place.segments(1)
    assert store.status()["reclaim"]["segments_dropped"] == 0
    assert (read_back(space, keys) == FOUND).all()


def test_a_failing_root_gets_nothing_new_until_it_is_well(place: Place) -> None:
    sick = FaultWhile("eio", path=".seg", ops=["create", "preadv", "pwritev", "datasync"])
    sick.armed = False
    place.plans[0] = sick
    store = place.open()
    space, old = stored(place, 1)
    sick.armed = True
    assert (read_back(space, old) == CORRUPT).all()  # as ever: an I/O error is reported, its record stays
    for number in range(2, 2 + limits.root_errors_entries_max):
        write(space, chain(space, number, BLOCKS))
    assert place.states() == ["failing", "ok", "ok"]
    assert write(space, chain(space, 20, BLOCKS)).stored == BLOCKS
    assert place.segments(1)
    place.tend()
    assert place.states()[0] == "failing", "it was not quiet"
    place.clock.advance(limits.root_quiet_s + 1)
    place.plans[0].ops = frozenset({"write_once", *sick.ops})  # type: ignore[attr-defined]
    sick._path = ""
    place.tend()
    assert place.states()[0] == "failing", "its probe does not work"
    sick.armed = False
    place.clock.advance(limits.root_quiet_s + 1)
    place.tend()
    assert place.states() == ["ok", "ok", "ok"]
    assert (read_back(space, old) == FOUND).all()
    assert store.core.index.count() >= 2 * BLOCKS


def test_an_unmounted_root_loses_nothing_and_is_not_filled(place: Place) -> None:
    place.free = [limits.GIB, 9 * limits.GIB, 2 * limits.GIB]
    store = place.open()
    space, keys = stored(place, 1)
    assert place.segments(1)
    place.unmount(1)
    store = place.open()
    space = keyspace(store)
    blocks = store.core.index.count()
    assert place.states() == ["ok", "away", "ok"]
    assert MARK in store.status()["roots"]["list"][1]["why"]
    assert (read_back(space, keys) == MISSING).all()
    assert space.lookup(keys) == 0
    assert store.core.index.count() == blocks, "its records stay"
    assert store.status()["healthy"]
    stored(place, 2)
    assert not list(place.paths[1].iterdir()), "nothing is made on the file system underneath"
    place.tend()
    assert place.states()[1] == "away"
    place.mount(1)
    place.tend()
    assert place.states() == ["ok", "ok", "ok"]
    assert space.lookup(keys) == BLOCKS
    assert (read_back(space, keys) == FOUND).all()


def test_a_reader_sees_that_a_root_is_there_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """And writes nothing, not even to find out whether one that fails is well."""
    place.free = [limits.GIB, 9 * limits.GIB, 2 * limits.GIB]
    place.open()
    _, keys = stored(place, 1)
    place.close()
    place.unmount(1)
    monkeypatch.setattr(limits, "root_look_s", 0.01)
    place.plans = dict.fromkeys(range(3), log := NthFault(0, "eio", ops=["create", "pwritev", "write_once", "unlink"]))
    store = place.open(read_only=True, roots=None)
    space = keyspace(store)
    assert (read_back(space, keys) != FOUND).all()
    assert place.states() == ["ok", "away", "ok"]
    store.core.copies.roots.roots[2].failing = True  # type: ignore[union-attr]
    place.clock.advance(limits.root_quiet_s + 1)
    place.mount(1)
    until = time.monotonic() + 20.0
    while place.states()[1] == "away" and time.monotonic() < until:
        time.sleep(0.01)
    assert place.states() == ["ok", "ok", "failing"]
    assert (read_back(space, keys) == FOUND).all()
    assert log.log == []


def test_unmounted_while_in_use(place: Place) -> None:
    place.free = [limits.GIB, 9 * limits.GIB, 2 * limits.GIB]
    store = place.open()
    space, first = stored(place, 1)
    place.unmount(1)
    assert write(space, chain(space, 2, BLOCKS)).stored == BLOCKS
    assert place.states()[1] == "away"
    assert not list(place.paths[1].iterdir())
    assert (read_back(space, first) == MISSING).all()
    assert write(space, first).stored == BLOCKS, "what is away gives way to a new copy"
    assert (read_back(space, first) == FOUND).all()
    assert not list(place.paths[1].iterdir())
    assert store.status()["counters"]["blocks_away"] == BLOCKS


def test_a_root_that_is_away_is_not_evicted_from(place: Place) -> None:
    place.free = [limits.GIB, 9 * limits.GIB, 2 * limits.GIB]
    store = place.open()
    stored(place, 1)
    place.free[1] = 0
    _, here = stored(place, 2)
    place.unmount(1)
    core = store.core
    assert core.reclaimer.make_room(1, force=True)
    assert core.index.lookup(here)[0].sum() == 0
    assert core.index.count() == BLOCKS
    assert not core.reclaimer.make_room(limits.GIB, force=True)
    assert core.index.count() == BLOCKS
    place.mount(1)


def test_the_wrong_device_is_refused(place: Place, tmp_path: Path) -> None:
    place.open()
    place.close()
    with pytest.raises(FormatError, match=r"root 1 of another store .*; mount the right device"):
        perdure.open(tmp_path / "other", memory=0, roots=[place.paths[1]])
    a, b, parked = *place.paths[1:], tmp_path / "parked"
    a.rename(parked)
    b.rename(a)
    parked.rename(b)
    with pytest.raises(FormatError, match="root 2 is there, where root 1 was"):
        place.open()
    store = perdure.open(place.paths[0], memory=0)  # not named: it is served without them
    assert [one["state"] for one in store.status()["roots"]["list"]] == ["ok", "away", "away"]
    store.close()
    shutil.copytree(a, tmp_path / "copy")
    with pytest.raises(FormatError, match=r"where root|both say that they are root 2"):
        place.open(roots=[b, tmp_path / "copy", a])


def test_what_cannot_become_a_root(place: Place, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "something").touch()
    with pytest.raises(FormatError, match="not empty"):
        place.open(roots=[full])
    with pytest.raises(InvalidArgument, match="lies inside"):
        place.open(roots=[place.paths[0] / "sub"])
    with pytest.raises(InvalidArgument, match="leave it out"):
        place.open(mirror=tmp_path / "mirror")
    with pytest.raises(InvalidArgument, match="roots"):
        perdure.open(tmp_path / "shared", catalog="valkey://127.0.0.1:1", roots=[tmp_path / "r"])
    place.open()
    place.close()
    with pytest.raises(StorePathError, match="not a root of this store yet"):
        perdure.open(place.paths[0], memory=0, read_only=True, roots=[tmp_path / "new"])
    (place.paths[0] / LIST).write_text("{")
    with pytest.raises(FormatError, match="remove it and open the store with all its roots"):
        place.open()
    (place.paths[0] / LIST).unlink()
    place.open()
    assert place.states() == ["ok", "ok", "ok"]


def test_a_root_may_move_and_need_not_be_named(place: Place) -> None:
    place.free[1] = 9 * limits.GIB
    place.open()
    _, keys = stored(place, 1)
    place.close()
    moved = place.at / "moved"
    place.paths[1].rename(moved)
    place.paths[1] = moved
    place.open()
    place.close()
    store = place.open(roots=None)
    assert [one["path"] for one in store.status()["roots"]["list"]] == [str(path) for path in place.paths]
    assert (read_back(keyspace(store), keys) == FOUND).all()


# --- second copies


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as target:
        target.seek(at)
        byte = target.read(1)
        target.seek(at)
        target.write(bytes([byte[0] ^ 1]))


def both(place: Place) -> tuple[Path, Path]:
    """First and second copy of the only retained segment."""
    (first,) = [path for number in range(3) for path in place.segments(number)]
    (second,) = [path for number in range(3) for path in place.segments(number, "mirrors")]
    return first, second


def test_retained_blocks_are_in_two_roots(place: Place) -> None:
    place.open()
    stored(place, 1, durability="retained")
    first, second = both(place)
    assert first.is_relative_to(place.paths[0])
    assert second.is_relative_to(place.paths[1])
    assert first.read_bytes() == second.read_bytes()
    assert first.with_suffix(".idx").read_bytes() == second.with_suffix(".idx").read_bytes()
    place.plans[1] = place.plans[2] = FaultWhile("eio", ops=["create", "pwritev"])
    store = place.open()
    space = keyspace(store)
    report = write(space, chain(space, 2, BLOCKS), "retained")
    assert not report.durable, "one copy is not what was asked for"


@pytest.mark.parametrize("side", [0, 1])
def test_a_flipped_bit_is_read_from_the_other_copy_and_repaired(place: Place, side: int) -> None:
    store = place.open()
    space, keys = stored(place, 1, durability="retained")
    files = both(place)
    good = files[side].read_bytes()
    flip(files[side], 4096 + 100)
    assert (read_back(space, keys) == FOUND).all()
    if side == 1:  # nobody looks there: as if a read had
        store.core.segments.note_suspects({bytes.fromhex(files[side].stem)})
    place.tend()
    assert files[side].read_bytes() == good
    counters = store.status()["counters"]
    assert counters["mirror_records_repaired"] == 1
    assert "mirror_copies_made" not in counters
    assert store.status()["incidents"] == []


def test_bits_flipped_in_both_copies_at_other_places(place: Place) -> None:
    store = place.open()
    space, keys = stored(place, 1, durability="retained")
    first, second = both(place)
    good = first.read_bytes()
    flip(first, 4096 + 100)
    flip(second, len(good) - 4096 - 5000)
    assert (read_back(space, keys) == FOUND).all()
    place.tend()
    assert first.read_bytes() == second.read_bytes() == good
    assert store.status()["counters"]["mirror_records_repaired"] == 2


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_copy_is_made_again(place: Place, lost: int) -> None:
    store = place.open()
    space, keys = stored(place, 1, durability="retained")
    files = both(place)
    good = files[lost].read_bytes(), files[lost].with_suffix(".idx").read_bytes()
    place.close()
    files[lost].unlink()
    files[lost].with_suffix(".idx").unlink()
    store = place.open()
    space = keyspace(store)
    assert store.status()["roots"]["single_copies"] == 1
    assert (read_back(space, keys) == FOUND).all()
    place.tend()
    assert store.status()["roots"]["single_copies"] == 0
    again = both(place)
    assert (again[lost].read_bytes(), again[lost].with_suffix(".idx").read_bytes()) == good
    assert store.status()["counters"]["mirror_copies_made"] == 1
    assert (read_back(space, keys) == FOUND).all()


def test_blocks_from_before_the_roots_get_their_second_copy(place: Place) -> None:
    place.open(roots=None)
    _, keys = stored(place, 1, durability="retained")
    store = place.open()
    assert store.status()["roots"]["single_copies"] == 1
    place.tend()
    first, second = both(place)
    assert first.read_bytes() == second.read_bytes()
    place.close()
    first.unlink()
    store = place.open()
    assert (read_back(keyspace(store), keys) == FOUND).all()


def test_a_lost_root_takes_only_what_has_one_copy(place: Place) -> None:
    """Its device is gone for good: away, then replaced."""
    place.free = [limits.GIB, 9 * limits.GIB, 2 * limits.GIB]
    store = place.open()
    _, kept = stored(place, 1, durability="retained")
    _, gone = stored(place, 2)
    place.close()
    shutil.rmtree(place.paths[1])
    store = place.open()
    space = keyspace(store)
    assert (read_back(space, kept) == FOUND).all()
    assert (read_back(space, gone) == MISSING).all()
    place.tend()
    assert store.core.index.count() == 2 * BLOCKS
    assert store.status()["roots"]["single_copies"] == 1
    place.close()
    place.paths[1] = place.at / "new"
    result = CliRunner().invoke(main, ["replace-root", str(place.paths[0]), "1", str(place.paths[1])])
    assert result.exit_code == 0, result.output
    store = place.open()
    space = keyspace(store)
    assert (read_back(space, gone) == MISSING).all()
    assert store.core.index.count() == BLOCKS, "what is gone is forgotten"
    place.tend()
    assert store.status()["roots"]["single_copies"] == 0
    assert len(place.segments(1)) == 1
    assert (read_back(space, kept) == FOUND).all()
    place.close()
    result = CliRunner().invoke(main, ["replace-root", str(place.paths[0]), "1", str(place.at / "newer")])
    assert "nothing to replace" in result.output
    result = CliRunner().invoke(main, ["replace-root", str(place.paths[0]), "7", str(place.at / "newer")])
    assert "has no root 7" in result.output


def test_a_bad_copy_is_kept_while_the_other_is_away(place: Place) -> None:
    store = place.open()
    space, keys = stored(place, 1, durability="retained")
    first, _ = both(place)
    flip(first, 4096 + 100)
    place.unmount(1)
    assert read_back(space, keys).tolist() == [MISSING] + [FOUND] * (BLOCKS - 1)
    assert store.core.index.count() == BLOCKS
    place.tend()
    place.mount(1)
    place.tend()
    assert (read_back(space, keys) == FOUND).all()


def test_reclaim_removes_both_copies(place: Place) -> None:
    store = place.open()
    _, keys = stored(place, 1, durability="retained")
    place.unmount(1)
    assert not store.core.reclaimer.make_room(1, force=True), "a copy could not be removed"
    assert store.core.index.count() == BLOCKS
    place.mount(1)
    place.tend()
    assert store.core.reclaimer.make_room(1, force=True)
    for number in range(3):
        assert not [*place.paths[number].rglob("*.seg"), *place.paths[number].rglob("*.idx")]
    assert store.core.index.lookup(keys)[0].sum() == 0
    assert store.core.space.used == 0


def test_a_rebuild_finds_one_block_of_two_copies(place: Place) -> None:
    place.open()
    _, kept = stored(place, 1, durability="retained")
    _, other = stored(place, 2)
    place.close()
    status = perdure.rebuild(place.paths[0])
    assert status["blocks"] == 2 * BLOCKS
    assert status["segments"]["sealed"]["count"] == 2
    first = next(path for path in place.segments(0) if (place.paths[1] / "mirrors" / path.parent.name).exists())
    for suffix in (".seg", ".idx"):
        first.with_suffix(suffix).unlink(missing_ok=True)
    assert perdure.rebuild(place.paths[0])["blocks"] == 2 * BLOCKS
    store = place.open()
    space = keyspace(store)
    assert (read_back(space, kept) == FOUND).all()
    assert (read_back(space, other) == FOUND).all()


@pytest.mark.parametrize("kind", ["eio", "enospc", "torn"])
@pytest.mark.parametrize("lost", [0, 1])
def test_copying_cut_off_at_every_step(place: Place, kind: Any, lost: int) -> None:
    """The n-th operation on the new copy's root fails, and all after it: as if the process had died there."""
    place.open()
    _, keys = stored(place, 1, durability="retained")
    place.close()
    files = both(place)
    good = files[lost].read_bytes(), files[lost].with_suffix(".idx").read_bytes()
    steps = 0
    for n in range(1, 200):
        for suffix in (".seg", ".idx"):
            for one in place.at.rglob(f"{'segments' if lost == 0 else 'mirrors'}/*/*{suffix}"):
                one.unlink()
        plan = NthFault(0, kind, once=False, ops=["pwritev", "write_once"] if kind == "torn" else None)
        place.plans = dict.fromkeys(range(3), plan)
        store = place.open()
        plan._n, plan.count = n, 0
        try:
            assert store.core.copies is not None
            store.core.copies.tend()
        except (OSError, RootUnavailable):
            steps += 1
        plan._n = 0
        fired = plan.fired
        assert (read_back(keyspace(store), keys) == FOUND).all()
        place.plans = {}
        store = place.open()
        for record in store.core.table.all():
            store.core.segments.note_suspects({record.segment})
        place.tend()
        again = both(place)
        assert (again[lost].read_bytes(), again[lost].with_suffix(".idx").read_bytes()) == good
        assert store.status()["roots"]["single_copies"] == 0
        place.close()
        if not fired:
            break
    else:
        pytest.fail("it never ended")
    assert steps > 5 or kind == "torn"


class Meanwhile:
    """Does something once, before the n-th operation of a kind on a path; nothing fails."""

    def __init__(self, op: str, path: str, act: Callable[[], None]):
        self._op, self._path, self._act = op, path, act
        self.left = 0

    def next(self, op: str, path: str, nbytes: int) -> None:
        if op == self._op and self._path in path:
            self.left -= 1
            if self.left == 0:
                self._act()

    def wait(self) -> None:
        raise AssertionError("nothing hangs")


@pytest.mark.parametrize(("op", "number"), [("open", 4), ("pwritev", 1)])  # looked for in three roots; and again
def test_a_copy_of_what_is_erased_meanwhile_is_not_made(place: Place, op: str, number: int) -> None:
    """When its receipt says that it is gone, nothing is left in any root, nor made any more."""
    place.open()
    stored(place, 1, durability="retained")
    place.close()
    _, second = both(place)
    second.unlink()
    second.with_suffix(".idx").unlink()
    told: list[str] = []

    def erase() -> None:
        assert place.store is not None
        told.append(place.store.erase(tenant="acme", wait_s=30.0)["state"])

    plan = Meanwhile(op, "mirrors/", erase)
    place.plans = dict.fromkeys(range(3), plan)
    store = place.open()
    plan.left = number
    assert store.core.copies is not None
    store.core.copies.tend()
    assert told == ["erased"]
    assert not [*place.at.rglob("*.seg"), *place.at.rglob("*.idx")]
    assert store.core.space.used == 0


# --- what is said about them


def test_status_doctor_and_the_commands_name_them(place: Place) -> None:
    place.open()
    stored(place, 1, durability="retained")
    place.close()
    run = CliRunner().invoke
    assert f"{place.paths[2]}: ok" in run(main, ["status", str(place.paths[0])]).output
    place.unmount(2)
    answer = json.loads(run(main, ["status", "--json", str(place.paths[0])]).output)
    assert answer["roots"]["out"] == 1
    checks = {check.name: check for check in examine(Subject(place.paths[0], limits.GIB))}
    assert checks["root 1"].verdict == "ok"
    assert checks["root 2"].verdict == "bad"
    assert "replace-root" in checks["root 2"].todo
    assert absence(place.paths[2], answer["store"], 2).endswith("mount the root's device there")
    assert np.count_nonzero([one["state"] == "away" for one in answer["roots"]["list"]]) == 1
