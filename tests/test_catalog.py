"""The catalogs against the public suites and random sequences; and what is LMDB's own: kills, growth, files, forks."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import settings

from perdure import limits
from perdure.catalog import environment
from perdure.catalog.api import BlockIndex, ControlStore, PublishResult
from perdure.catalog.lmdb import LmdbControl, LmdbIndex
from perdure.catalog.memory import MemoryControl, MemoryIndex
from perdure.errors import CatalogError, FormatError, InvalidArgument, ReadOnlyStore, StaleFence, StoreClosed
from perdure.testing.catalog import (
    NOW_S,
    BlockIndexConformance,
    BlockIndexMachine,
    ControlStoreConformance,
    ControlStoreMachine,
    FailCalls,
    FaultyControl,
    FaultyIndex,
    assert_holds,
    content,
    make_keys,
    make_records,
    publish,
    usage_of,
)
from perdure.testing.catalog_control import acquire, make_segment

MAP = 16 * limits.MIB
INSERTED, EXISTS = PublishResult.INSERTED, PublishResult.EXISTS


class TestMemoryIndex(BlockIndexConformance):
    def make(self, directory: Path) -> BlockIndex:
        return MemoryIndex()


class TestLmdbIndex(BlockIndexConformance):
    def make(self, directory: Path) -> BlockIndex:
        return LmdbIndex(directory / "index", map_bytes=MAP)

    def reopen(self, index: BlockIndex, directory: Path) -> BlockIndex:
        index.close()
        return self.make(directory)


class TestFaultyIndex(BlockIndexConformance):
    """With a plan that lets everything through it is as good as what it wraps."""

    def make(self, directory: Path) -> BlockIndex:
        return FaultyIndex(MemoryIndex(), FailCalls(0, times=0))


class TestMemoryControl(ControlStoreConformance):
    def make(self, directory: Path) -> ControlStore:
        return MemoryControl()


class TestLmdbControl(ControlStoreConformance):
    def make(self, directory: Path) -> ControlStore:
        return LmdbControl(directory / "control")

    def reopen(self, control: ControlStore, directory: Path) -> ControlStore:
        control.close()
        return self.make(directory)


class TestFaultyControl(ControlStoreConformance):
    def make(self, directory: Path) -> ControlStore:
        return FaultyControl(MemoryControl(), FailCalls(0, times=0))


class LmdbIndexMachine(BlockIndexMachine):
    def make(self, directory: Path) -> BlockIndex:
        return LmdbIndex(directory / "index", map_bytes=MAP)

    def reopen(self, index: BlockIndex, directory: Path) -> BlockIndex:
        index.close()
        return self.make(directory)


class LmdbControlMachine(ControlStoreMachine):
    def make(self, directory: Path) -> ControlStore:
        return LmdbControl(directory / "control")

    def reopen(self, control: ControlStore, directory: Path) -> ControlStore:
        control.close()
        return self.make(directory)


# Most of a step is the fsync of its commit.
steps = settings(max_examples=max(20, settings().max_examples // 5), stateful_step_count=25)
LmdbIndexMachine.TestCase.settings = LmdbControlMachine.TestCase.settings = steps
TestLmdbIndexMachine = LmdbIndexMachine.TestCase
TestLmdbControlMachine = LmdbControlMachine.TestCase


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LmdbIndex]:
    index = LmdbIndex(tmp_path / "index", map_bytes=MAP)
    yield index
    index.close()


def in_child(work: Callable[[], object]) -> str:
    """Run `work` in a forked child; what it returned or raised, as text."""
    inlet, outlet = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = repr(work())
        except BaseException as problem:
            answer = repr(problem)
        os.write(outlet, answer.encode())
        os._exit(0)
    os.close(outlet)
    with os.fdopen(inlet, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer


# --- kill -----------------------------------------------------------------------------------------------------

BATCH = 64

WRITER = """
import sys
from perdure.catalog.lmdb import LmdbIndex
from perdure.testing.catalog_samples import make_keys, make_records, publish

path, first = sys.argv[1], int(sys.argv[2])
index = LmdbIndex(path, map_bytes=1 << 20)  # so small that it also grows meanwhile
for number in range(first, first + 100_000):
    publish(index, make_keys(64, seed=number), make_records(64, stored_bytes=number))
    print(number, flush=True)
"""


def test_kill_keeps_every_acknowledged_batch_and_tears_none(tmp_path: Path) -> None:
    path = tmp_path / "index"
    acknowledged: set[int] = set()
    for turn in range(4):
        first = turn * 100_000
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(first)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for line in writer.stdout:
                acknowledged.add(int(line))
                if int(line) == first + 5 + 3 * turn:
                    time.sleep(0.001 * turn)  # into another phase of the next publish
                    writer.send_signal(signal.SIGKILL)  # what was printed before the kill is still read
        assert writer.returncode == -signal.SIGKILL
        index = LmdbIndex(path, map_bytes=1 << 20)
        try:
            last = max(acknowledged)
            for number in sorted({*acknowledged, last + 1}):
                present, found = index.lookup(make_keys(BATCH, seed=number))
                assert present.all() or (number > last and not present.any())
                assert found[present].tobytes() == make_records(BATCH, stored_bytes=number)[present].tobytes()
                if number > last and present.all():
                    acknowledged.add(number)  # committed, only its answer was lost
            assert index.count() == BATCH * len(acknowledged)
            assert index.usage() == usage_of(index.scan(b"", 10**6)[1])
        finally:
            index.close()
    assert len(acknowledged) > 20


def test_kill_between_control_changes(tmp_path: Path) -> None:
    """Tokens and pin ids that were given out are never given out again, and what was set stays set."""

    def give(pipe: int) -> None:
        control = LmdbControl(tmp_path / "control")
        while True:
            lease = acquire(control, b"scope", b"h")
            control.release(lease)
            pin = control.pin(b"h", make_keys(1), 1.0)
            control.unpin(pin)
            os.write(pipe, b"%d %d\n" % (lease.token, pin))

    given: list[list[int]] = []
    for turn in range(4):
        inlet, outlet = os.pipe()
        child = os.fork()
        if child == 0:
            give(outlet)
        os.close(outlet)
        with os.fdopen(inlet) as pipe:
            for number, line in enumerate(pipe):
                given.append([int(part) for part in line.split()])
                if number == 3 + turn:
                    os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for numbers in zip(*given, strict=True):
        assert list(numbers) == sorted(set(numbers))
    assert len(given) >= 4 * 4


# --- growth ---------------------------------------------------------------------------------------------------


def test_a_full_map_grows(tmp_path: Path) -> None:
    index = LmdbIndex(tmp_path / "index", map_bytes=limits.index_map_bytes_min)
    try:
        keys, records = make_keys(20_000), make_records(20_000)
        for at in range(0, 10_000, 2000):
            assert set(publish(index, keys[at : at + 2000], records[at : at + 2000])) == {INSERTED}
        assert index.load(iter([(keys, records)])) == 10_000
        assert (tmp_path / "index" / "data.mdb").stat().st_size > 2 * limits.index_map_bytes_min
        assert index.prefix(keys) == index.count() == 20_000
        assert index.usage() == usage_of(records)
    finally:
        index.close()


@pytest.mark.timeout(60, method="thread")  # a wait inside the binding cannot be interrupted
def test_readers_that_never_pause_do_not_stop_a_writer(tmp_path: Path) -> None:
    """Growth and refused publishes abort a transaction, and the binding's abort waits until nobody reads."""
    index = LmdbIndex(tmp_path / "index", map_bytes=limits.index_map_bytes_min)
    keys, records = make_keys(12_000), make_records(12_000)
    publish(index, keys[:100], records[:100])
    done = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not done.is_set():
            present, found = index.lookup(keys[:100])
            if not present.all() or found.tobytes() != records[:100].tobytes():
                wrong.append(found)

    def refuse() -> None:
        raise StaleFence("as planned")

    readers = [threading.Thread(target=read) for _ in range(3)]
    try:
        for reader in readers:
            reader.start()
        for at in range(0, 12_000, 1500):
            for _ in range(20):
                with pytest.raises(StaleFence):
                    publish(index, keys[at : at + 1500], records[at : at + 1500], admit=refuse)
            publish(index, keys[at : at + 1500], records[at : at + 1500])
        assert index.count() == 12_000
    finally:
        done.set()
        for reader in readers:
            reader.join()
        index.close()
    assert not wrong


def test_admit_is_asked_again_after_growth(tmp_path: Path) -> None:
    index = LmdbIndex(tmp_path / "index", map_bytes=limits.index_map_bytes_min)
    asked: list[int] = []
    try:
        results = publish(index, make_keys(12_000), make_records(12_000), admit=lambda: asked.append(index.count()))
        assert set(results) == {INSERTED}
        assert asked == [0, 0]  # the first attempt left nothing behind
    finally:
        index.close()


def test_a_reader_in_another_process_follows_growth(tmp_path: Path) -> None:
    path = tmp_path / "index"
    LmdbIndex(path, map_bytes=limits.index_map_bytes_min).close()
    code = """
import sys
from perdure.catalog.lmdb import LmdbIndex
from perdure.testing.catalog_samples import assert_holds, make_keys, make_records
index = LmdbIndex(sys.argv[1], map_bytes=1 << 20, read_only=True)
print(index.count(), flush=True)
sys.stdin.readline()
assert_holds(index, make_keys(9000), make_records(9000))
print(index.count(), flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == "0\n"
        index = LmdbIndex(path, map_bytes=limits.index_map_bytes_min)
        try:
            for at in range(0, 9000, 3000):
                publish(index, make_keys(9000)[at : at + 3000], make_records(9000)[at : at + 3000])
            reader.stdin.write("\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == "9000\n"
        finally:
            index.close()


# --- files ----------------------------------------------------------------------------------------------------


def test_directories_are_private(tmp_path: Path) -> None:
    LmdbIndex(tmp_path / "a" / "index", map_bytes=MAP).close()
    LmdbControl(str(tmp_path / "control")).close()
    for folder in (tmp_path / "a" / "index", tmp_path / "control"):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o077 for path in folder.iterdir()} == {0}


@pytest.mark.parametrize("map_bytes", [0, -1, limits.index_map_bytes_min - 1, 1 << 60, "1GiB"])
def test_map_size_is_checked(tmp_path: Path, map_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match="map_bytes"):
        LmdbIndex(tmp_path / "index", map_bytes=map_bytes)
    assert not (tmp_path / "index").exists()


def test_read_only_needs_an_index(tmp_path: Path) -> None:
    for attempt in range(2):
        with pytest.raises(CatalogError, match="does not exist"):
            LmdbIndex(tmp_path / "index", map_bytes=MAP, read_only=True)
        with pytest.raises(CatalogError, match="does not exist"):
            LmdbControl(tmp_path / "control", read_only=True)
        if attempt == 0:
            (tmp_path / "index").mkdir()
            (tmp_path / "control").mkdir()
    assert list((tmp_path / "index").iterdir()) == []


def test_read_only_beside_a_writer(tmp_path: Path, index: LmdbIndex) -> None:
    keys, records = make_keys(30), make_records(30)
    publish(index, keys[:10], records[:10])
    reader = LmdbIndex(tmp_path / "index", map_bytes=MAP, read_only=True)
    try:
        publish(index, keys[10:], records[10:])
        assert_holds(reader, keys, records)
        for change in (
            lambda: publish(reader, keys, records),
            lambda: reader.remove(keys),
            lambda: reader.load(iter([(keys, records)])),
            lambda: reader.touch(np.array([1], np.uint64), np.array([1], np.uint32)),
        ):
            with pytest.raises(ReadOnlyStore):
                change()
    finally:
        reader.close()
    with pytest.raises(StoreClosed):
        reader.count()
    assert_holds(index, keys, records)


def test_a_reader_outlives_the_writer_it_shares_with(tmp_path: Path) -> None:
    control = LmdbControl(tmp_path / "control")
    reader = LmdbControl(tmp_path / "control", read_only=True)
    control.put_segment(make_segment(1))
    control.close()
    try:
        assert reader.segments() == [make_segment(1)]
        with pytest.raises(ReadOnlyStore):
            reader.delete_segment(make_segment(1).segment)
    finally:
        reader.close()
    reader = LmdbControl(tmp_path / "control", read_only=True)
    try:
        assert reader.segments() == [make_segment(1)]
        with pytest.raises(CatalogError, match="read-only"):
            LmdbControl(tmp_path / "control")
    finally:
        reader.close()


def test_an_index_made_anew_is_another_one(tmp_path: Path, index: LmdbIndex) -> None:
    """`perdure rebuild` may delete the directory while a reader still has the old files."""
    publish(index, make_keys(5), make_records(5))
    (tmp_path / "index").rename(tmp_path / "old")
    fresh = LmdbIndex(tmp_path / "index", map_bytes=MAP)
    try:
        assert fresh.count() == 0
        publish(fresh, make_keys(2), make_records(2))
        assert index.count() == 5
    finally:
        fresh.close()
    assert index.count() == 5


def filled(path: Path) -> Path:
    index = LmdbIndex(path, map_bytes=MAP)
    for at in range(0, 9000, 3000):
        publish(index, make_keys(9000)[at : at + 3000], make_records(9000)[at : at + 3000])
    index.close()
    return path / "data.mdb"


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("damage", ["text", "short header", "cut", "zeroed", "scrambled"])
def test_a_damaged_index_says_how_to_rebuild(tmp_path: Path, damage: str, read_only: bool) -> None:
    data = filled(tmp_path / "index")
    size = data.stat().st_size
    match damage:
        case "text":
            data.write_bytes(b"not a database\n" * 10_000)
        case "short header":
            os.truncate(data, 100)
        case "cut":
            os.truncate(data, 2 * limits.page_bytes)
        case "zeroed" | "scrambled":
            with data.open("r+b") as file:
                file.seek(2 * limits.page_bytes)
                file.write(bytes([0xFF if damage == "scrambled" else 0]) * (size - 2 * limits.page_bytes))
    with pytest.raises(CatalogError, match="perdure rebuild DIR"):
        LmdbIndex(tmp_path / "index", map_bytes=MAP, read_only=read_only)
    (tmp_path / "index" / "data.mdb").unlink()
    index = LmdbIndex(tmp_path / "index", map_bytes=MAP)
    index.close()


def test_damage_found_later_is_an_error_of_the_call(tmp_path: Path) -> None:
    data = filled(tmp_path / "index")
    with data.open("r+b") as file:
        pages = data.stat().st_size // limits.page_bytes
        for number in range(2, pages):
            file.seek(number * limits.page_bytes + 10)  # the page's flags; 2: leaf
            if file.read(2) == b"\2\0":
                file.seek(number * limits.page_bytes)
                page = file.read(limits.page_bytes)
                if make_keys(9000)[4000].tobytes() in page:
                    file.seek(number * limits.page_bytes)
                    file.write(bytes(limits.page_bytes))
    index = LmdbIndex(tmp_path / "index", map_bytes=MAP)
    try:
        with pytest.raises(CatalogError, match="perdure rebuild DIR"):
            index.lookup(make_keys(9000))
        with pytest.raises(CatalogError, match="perdure rebuild DIR"):
            publish(index, make_keys(9000)[3990:4010], make_records(20))
    finally:
        index.close()


def test_a_damaged_control_store_says_not_to_delete_it(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "data.mdb").write_bytes(b"x" * 100_000)
    with pytest.raises(CatalogError, match="backup"):
        LmdbControl(tmp_path / "control")


def test_foreign_and_newer_databases_are_refused(tmp_path: Path) -> None:
    LmdbControl(tmp_path / "control").close()
    with pytest.raises((FormatError, CatalogError), match="control"):
        LmdbIndex(tmp_path / "control", map_bytes=MAP)
    (tmp_path / "foreign").mkdir()
    with lmdb.open(str(tmp_path / "foreign")) as environment, environment.begin(write=True) as txn:
        txn.put(b"theirs", b"1")
    with pytest.raises(CatalogError, match="not ours"):
        LmdbControl(tmp_path / "foreign")
    with lmdb.open(str(tmp_path / "foreign")) as environment, environment.begin() as txn:
        assert list(txn.cursor()) == [(b"theirs", b"1")]
    LmdbIndex(tmp_path / "newer", map_bytes=MAP).close()
    with lmdb.open(str(tmp_path / "newer"), max_dbs=8) as environment:
        about = environment.open_db(b"about", create=False)
        with environment.begin(write=True, db=about) as txn:
            txn.put(b"format", b"block index 2")
    with pytest.raises(FormatError, match="block index 2"):
        LmdbIndex(tmp_path / "newer", map_bytes=MAP)


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "index"):
        with pytest.raises(CatalogError, match="file"):
            LmdbIndex(path, map_bytes=MAP)


def test_a_disk_that_takes_no_more_changes_nothing(index: LmdbIndex, tmp_path: Path) -> None:
    """EFBIG stands for ENOSPC and EIO here: all come back from the same writes of a commit."""
    keys, records = make_keys(4000), make_records(4000)
    publish(index, keys[:1000], records[:1000])
    size = (tmp_path / "index" / "data.mdb").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4 * limits.page_bytes, before[1]))
    try:
        with pytest.raises(CatalogError, match="publishing"):
            publish(index, keys, records)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_holds(index, keys[:1000], records[:1000])
    assert set(publish(index, keys[1000:], records[1000:])) == {INSERTED}
    assert_holds(index, keys, records)


def test_a_load_that_breaks_off_leaves_a_whole_index(index: LmdbIndex) -> None:
    def entries() -> Iterator[tuple[object, object]]:
        yield make_keys(50), make_records(50)
        raise OSError("segment unreadable")

    with pytest.raises(OSError, match="unreadable"):
        index.load(entries())  # type: ignore[arg-type]
    assert index.usage() == usage_of(index.scan(b"", 100)[1])
    assert index.load(iter([(make_keys(90), make_records(90))])) == 90 - (index.count() - 90)


def test_a_load_of_several_transactions(index: LmdbIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "index_load_txn_records_max", 100)
    monkeypatch.setattr(limits, "index_load_sort_records_max", 450)
    keys, records = make_keys(1000), make_records(1000)
    publish(index, keys[500:510], records[500:510])
    assert index.load((keys[at : at + 64], records[at : at + 64]) for at in range(0, 1000, 50)) == 990
    assert_holds(index, keys, records)


def test_a_sorted_load_fills_its_pages(tmp_path: Path) -> None:
    index = LmdbIndex(tmp_path / "index", map_bytes=MAP)
    index.load(iter([(make_keys(20_000), make_records(20_000))]))
    index.close()
    assert (tmp_path / "index" / "data.mdb").stat().st_size < 20_000 * 120  # 104 with keys and node headers


# --- processes ------------------------------------------------------------------------------------------------


def test_a_forked_child_is_refused(index: LmdbIndex, tmp_path: Path) -> None:
    control = LmdbControl(tmp_path / "control")
    try:
        lease = acquire(control, b"scope", b"holder")
        publish(index, make_keys(5), make_records(5))
        for call in (
            lambda: index.lookup(make_keys(1)),
            lambda: publish(index, make_keys(9), make_records(9)),
            lambda: index.sync(),
            lambda: control.check(lease),
            lambda: control.release(lease),
        ):
            assert in_child(call).startswith("StoreClosed")
        assert in_child(index.close) == in_child(control.close) == "None"
        assert_holds(index, make_keys(5), make_records(5))
        assert control.check(lease)
        publish(index, make_keys(6), make_records(6))
        assert control.release(lease)
    finally:
        control.close()


def test_a_forked_child_may_open_others(index: LmdbIndex, tmp_path: Path) -> None:
    def open_other() -> bool:
        signal.alarm(60)  # instead of waiting forever
        other = LmdbIndex(tmp_path / "other", map_bytes=MAP)
        publish(other, make_keys(3), make_records(3))
        other.close()
        return True

    with environment._environments_lock:  # as if another thread of the parent were just opening
        assert in_child(open_other) == "True"
    assert "spawn" in in_child(lambda: LmdbIndex(tmp_path / "index", map_bytes=MAP))
    other = LmdbIndex(tmp_path / "other", map_bytes=MAP)
    assert other.count() == 3
    other.close()


FORKING = """
import os, sys
from perdure.catalog.lmdb import LmdbIndex
from perdure.errors import StoreClosed
from perdure.testing.catalog_samples import make_keys, make_records, publish

index = LmdbIndex(sys.argv[1], map_bytes=1 << 20)
keys, records = make_keys(8), make_records(8)
publish(index, keys[:4], records[:4])
index.lookup(keys)

def fork_and_end():
    if os.fork() == 0:
        sys.exit(3)  # unlike os._exit: every object is freed
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)

def fork_and_go_on():
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)

fork_and_end()
index.lookup(keys)
publish(index, keys[:6], records[:6], admit=fork_and_end)
try:
    publish(index, keys, records, admit=fork_and_go_on)
except StoreClosed:
    sys.exit(4)
print(index.count())
index.close()
"""


def test_a_forked_child_that_ends_does_not_touch_its_parent(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path / "index")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["3", "3", "4", "8"], done.stderr


def test_a_fork_while_another_thread_writes(index: LmdbIndex) -> None:
    """The child must not wait for locks that the fork copied in a locked state."""
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        go_on.wait(60)

    writer = threading.Thread(target=publish, args=(index, make_keys(2), make_records(2)), kwargs={"admit": hold})
    writer.start()
    try:
        entered.wait(60)
        assert in_child(lambda: publish(index, make_keys(1), make_records(1))).startswith("StoreClosed")
        assert in_child(index.close) == "None"
    finally:
        go_on.set()
        writer.join()
    assert index.count() == 2


def test_readers_do_not_wait_for_a_writer(index: LmdbIndex) -> None:
    keys, records = make_keys(4), make_records(4)
    publish(index, keys[:2], records[:2])
    seen: list[object] = []
    publish(index, keys, records, admit=lambda: seen.extend([index.count(), index.prefix(keys)]))
    assert seen == [2, 2]
    assert index.prefix(keys) == 4


def test_a_callback_must_not_write_or_close(index: LmdbIndex) -> None:
    keys, records = make_keys(4), make_records(4)
    for call in (lambda: publish(index, keys, records), index.close):
        with pytest.raises(CatalogError, match="callback"):
            publish(index, keys, records, admit=call)  # type: ignore[arg-type]
    assert publish(index, keys, records) == [INSERTED] * 4


def test_close_waits_for_calls_in_progress(tmp_path: Path) -> None:
    index = LmdbIndex(tmp_path / "index", map_bytes=MAP)
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        go_on.wait(60)

    writer = threading.Thread(target=publish, args=(index, make_keys(3), make_records(3)), kwargs={"admit": hold})
    writer.start()
    entered.wait(60)
    closer = threading.Thread(target=index.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    go_on.set()
    writer.join()
    closer.join()
    index = LmdbIndex(tmp_path / "index", map_bytes=MAP)
    assert_holds(index, make_keys(3), make_records(3))
    index.close()


# --- planned faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["error", "unknown"])
def test_faulty_index_fails_as_planned(mode: str) -> None:
    keys, records = make_keys(6), make_records(6)
    index = FaultyIndex(MemoryIndex(), FailCalls(2, mode, times=2))
    publish(index, keys[:2], records[:2])
    for part in (slice(2, 4), slice(4, 6)):
        with pytest.raises(CatalogError, match="planned"):
            publish(index, keys[part], records[part])
    assert index.count() == (2 if mode == "error" else 6)
    assert set(publish(index, keys, records)) == ({INSERTED, EXISTS} if mode == "error" else {EXISTS})
    assert_holds(index, keys, records)


CHANGES: dict[str, Callable[[BlockIndex], object]] = {
    "publish": lambda index: publish(index, make_keys(1), make_records(1)),
    "replace": lambda index: index.replace(make_keys(1), make_records(1), make_records(1)),
    "remove": lambda index: index.remove(make_keys(1)),
    "load": lambda index: index.load(iter([])),
    "touch": lambda index: index.touch(np.array([1], np.uint64), np.array([1], np.uint32)),
    "forget_recency": lambda index: index.forget_recency(np.array([1], np.uint64)),
    "sync": lambda index: index.sync(),
}


@pytest.mark.parametrize("op", list(CHANGES))
def test_every_change_of_an_index_can_fail(op: str) -> None:
    plan = FailCalls(1, op=op)
    index = FaultyIndex(MemoryIndex(), plan)
    with pytest.raises(CatalogError, match=op):
        CHANGES[op](index)
    for change in CHANGES.values():
        change(index)
    assert plan.seen == 2


CONTROL_CHANGES: dict[str, Callable[[ControlStore], object]] = {
    "compare_and_set": lambda control: control.compare_and_set("n", b"k", None, b"v"),
    "put_segment": lambda control: control.put_segment(make_segment(1)),
    "swap_segment": lambda control: control.swap_segment(None, make_segment(2)),
    "delete_segment": lambda control: control.delete_segment(make_segment(1).segment),
    "acquire": lambda control: control.acquire(b"scope", b"h", 0.0, 1.0),
    "renew": lambda control: control.renew(acquire(MemoryControl(), b"scope", b"h"), 0.0, 1.0),
    "release": lambda control: control.release(acquire(MemoryControl(), b"scope", b"h")),
    "pin": lambda control: control.pin(b"h", make_keys(1), 1.0),
    "unpin": lambda control: control.unpin(1),
    "end_owner": lambda control: control.end_owner(b"h"),
    "expire": lambda control: control.expire(0.0),
}


@pytest.mark.parametrize("op", list(CONTROL_CHANGES))
def test_every_change_of_a_control_store_can_fail(op: str) -> None:
    plan = FailCalls(1, "unknown", op=op)
    control = FaultyControl(MemoryControl(), plan)
    with pytest.raises(CatalogError, match=op):
        CONTROL_CHANGES[op](control)
    for change in CONTROL_CHANGES.values():
        change(control)
    assert plan.seen == 2


def test_a_misspelt_fault_mode_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="unkown"):
        FaultyIndex(MemoryIndex(), FailCalls(1, "unkown")).sync()


def test_samples_are_checked_for_real() -> None:
    """The suite's own check notices a lost, a changed and an extra record."""
    keys, records = make_keys(3), make_records(3)
    for wrong_keys, wrong_records in ((keys[:2], records[:2]), (keys, make_records(3, codec=[0, 1, 0]))):
        index = MemoryIndex()
        publish(index, wrong_keys, wrong_records)
        with pytest.raises(AssertionError):
            assert_holds(index, keys, records)
    assert content(MemoryIndex()) == {}
    assert NOW_S > 0
