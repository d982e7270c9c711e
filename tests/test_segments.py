"""Segments: the conformance of their store, their bytes byte by byte, and what writers make of them."""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import perdure
from perdure import BlockStatus, Durability, Seams, limits
from perdure.catalog.api import RECORD, SegmentState
from perdure.catalog.memory import MemoryControl
from perdure.clock import FakeClock
from perdure.errors import FormatError
from perdure.io.aio import default_engine
from perdure.io.api import File
from perdure.io.files import PosixFiles
from perdure.io.memory import Scratch, address, aligned_buffer
from perdure.io.siblings import FaultWhile, FaultyFiles
from perdure.io.wrappers import FileAround, FilesAround
from perdure.pool.dram import DramPool
from perdure.segments import format as fmt
from perdure.segments.landing import Area, Plan, cut
from perdure.segments.reader import SegmentReader
from perdure.segments.recovery import Recovery
from perdure.segments.store import SegmentStore, segment_path
from perdure.segments.table import SegmentTable
from perdure.testing.segments import SECRET, SegmentStoreConformance, bytes_of, content, entries, fill, segment_id
from perdure.testing.store import FOUND, STORED, blocks_of, chain, keyspace, read, write

PAGE = limits.page_bytes
SEGMENT, KEYSPACE, KEY, TENANT = b"segment-00000001", b"k" * 32, b"K" * 32, b"tenant-000000001"
# offset, length, what is wrong if that is changed: the table at the top of segments/format.py
FIELDS = {
    "magic": (0, 8), "version": (8, 2), "header_bytes": (10, 2), "codec": (12, 1), "durability": (13, 1),
    "retention": (14, 1), "keyspace": (16, 32), "key": (48, 32), "tenant": (80, 16), "segment": (96, 16),
    "offset": (112, 8), "block_bytes": (120, 4), "stored_bytes": (124, 4), "tenant_epoch": (128, 4),
    "created_s": (132, 4), "expires_s": (136, 4), "fence": (144, 8), "payload_tag": (192, 16), "mac": (240, 16),
}  # fmt: skip


class TestPosix(SegmentStoreConformance):
    def make_segments(self, roots: Sequence[Path]) -> SegmentStore:
        return SegmentStore([PosixFiles(str(root)) for root in roots], SECRET)


class _DeletedOnOpening(FilesAround):
    """Opens a file, and calls before it says so."""

    def __init__(self, root: Path, then: Callable[[str], None]):
        super().__init__(PosixFiles(str(root)))
        self._then = then

    def wrap(self, file: File) -> File:
        return FileAround(file)

    def open(self, path: str, *, direct: bool = True, write: bool = False) -> File:
        file = super().open(path, direct=direct, write=write)
        self._then(path)
        return file


def test_a_segment_deleted_while_it_is_opened_is_closed_again(tmp_path: Path) -> None:
    """Else its bytes would stay on the disk for as long as the process lives."""
    segment = segment_id(1)
    with closing(SegmentStore([_DeletedOnOpening(tmp_path, lambda _: segments.delete(segment))], SECRET)) as segments:
        fill(segments.create(segment), segment)
        file = segments.acquire(segment)
        assert bytes_of(file) == content(segment).tobytes()
        segments.release(segment, file)
        links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        assert not [link for link in links if segment.hex() in link]


def test_descriptors_are_bounded(tmp_path: Path) -> None:
    with closing(SegmentStore([PosixFiles(str(tmp_path))], SECRET)) as segments:
        for number in range(300):
            segment = segment_id(number)
            segments.create(segment)[0].close()
            segments.release(segment, segments.acquire(segment))
        assert len(segments._handles) == len(os.listdir("/proc/self/fd")) - _other_descriptors(tmp_path) == 256
        assert segment_id(299) in segments._handles
        assert segment_id(0) not in segments._handles, "the one used longest ago goes first"


def _other_descriptors(root: Path) -> int:
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sum(not link.startswith(str(root)) for link in links)


# --- the header, byte by byte
def record(**fields: Any) -> NDArray[np.void]:
    one = np.zeros(1, RECORD)
    values = {
        "segment": SEGMENT, "tenant": TENANT, "offset": 40 * PAGE, "stored_bytes": 5000, "block_bytes": 6000,
        "created_s": 11, "expires_s": 12, "tenant_epoch": 13, "codec": 1, "durability": 2, "retention": 3,
    } | fields  # fmt: skip
    for name, value in values.items():
        one[name] = np.void(value) if isinstance(value, bytes) else value
    return one


def header_page(one: NDArray[np.void], tag: bytes = b"T" * 16, secret: bytes = SECRET) -> NDArray[np.uint8]:
    page = np.zeros((1, PAGE), np.uint8)
    keys = np.frombuffer(KEY, np.uint8).reshape(1, -1)
    fmt.write_headers(page, keys, one, fmt.HeaderFields(KEYSPACE, 14), [tag], secret)
    return page


def identity(one: NDArray[np.void]) -> bytes:
    return fmt.expected_identity(KEYSPACE, KEY, one.tolist()[0])


def test_header_has_the_documented_bytes() -> None:
    page = header_page(record()).tobytes()
    body = struct.pack(
        "<8sHHBBBx32s32s16s16sQIIIII4xQ",
        b"PERDUREB", 1, 256, 1, 2, 3, KEYSPACE, KEY, TENANT, SEGMENT, 40 * PAGE, 6000, 5000, 13, 11, 12, 14,
    )  # fmt: skip
    expected = body + bytes(192 - len(body)) + b"T" * 16 + bytes(32)
    assert page[:240] == expected
    assert page[240:256] == hashlib.blake2b(expected, digest_size=16, key=SECRET).digest()
    assert page[256:] == bytes(PAGE - 256)
    assert fmt.header_problem(memoryview(page), identity(record()), SECRET) is None
    assert fmt.header_tag(memoryview(page)) == b"T" * 16


def test_every_changed_bit_of_a_header_is_noticed() -> None:
    page = header_page(record()).tobytes()[: limits.header_bytes]
    for place in range(limits.header_bytes):
        for bit in (0, 7):
            bad = bytearray(page)
            bad[place] ^= 1 << bit
            assert fmt.header_problem(memoryview(bad), identity(record()), SECRET) is not None, f"byte {place}"


@pytest.mark.parametrize("name", ["codec", "durability", "retention", "tenant", "segment", "offset", "block_bytes",
                                  "stored_bytes"])  # fmt: skip
def test_a_genuine_header_of_another_record_is_refused(name: str) -> None:
    """Its MAC verifies, but it is not what the catalog says."""
    other = {"tenant": b"tenant-000000002", "segment": b"segment-00000002"}.get(name, 4)
    page = header_page(record(**{name: other}))
    problem = fmt.header_problem(memoryview(page.tobytes()), identity(record()), SECRET)
    assert problem == "header belongs to another block, place, tenant or keyspace"


def test_what_is_wrong_with_a_header_is_said() -> None:
    page = header_page(record()).tobytes()
    problem = lambda raw: fmt.header_problem(memoryview(raw), identity(record()), SECRET)  # noqa: E731
    assert problem(bytes(PAGE)) == "header is all zeros (never written, or lost in a power cut)"
    assert problem(b"X" + page[1:]) == "header magic is wrong"
    assert problem(page[:200] + b"X" + page[201:]) == "header MAC does not verify"
    assert problem(header_page(record(), secret=b"other").tobytes()) == "header MAC does not verify"
    other = fmt.expected_identity(b"o" * 32, KEY, record().tolist()[0])
    assert fmt.header_problem(memoryview(page), other, SECRET) == fmt.OTHER_KEYSPACE


def test_headers_are_found_only_where_they_say_they_are() -> None:
    """A copy of a header elsewhere, one of another segment and one made without the secret are payload."""
    first = 8 * PAGE
    pages = np.zeros((9, PAGE), np.uint8)
    pages[1] = header_page(record(offset=first + PAGE))
    pages[3] = pages[1]
    pages[4] = header_page(record(offset=first + 4 * PAGE, segment=b"segment-00000002"))
    pages[5] = header_page(record(offset=first + 5 * PAGE), secret=b"guessed")
    pages[7] = header_page(record(offset=first + 7 * PAGE))
    pages[8] = 0xFF
    assert fmt.scan_headers(pages, SECRET, SEGMENT, first).tolist() == [1, 7]
    found = fmt.records_of(pages[[7], : limits.header_bytes].copy().view(fmt.HEADER).ravel())
    assert found.tobytes() == record(offset=first + 7 * PAGE).tobytes()


def test_segment_ids_are_in_order_of_time_and_never_the_same() -> None:
    made = []
    for _ in range(5):
        made += [fmt.new_segment_id() for _ in range(200)]
        time.sleep(0.002)
    assert len(set(made)) == 1000
    assert [one[:6] for one in made] == sorted(one[:6] for one in made)
    assert {len(one) for one in made} == {limits.id_bytes}


# --- the index, byte by byte
def test_index_has_the_documented_bytes() -> None:
    packed = fmt.pack_index(SEGMENT, TENANT, 3 * PAGE, entries(SEGMENT, 2), SECRET)
    head = struct.pack("<8sHHI16s16sQQ", b"PERDUREI", 1, 0, 128, SEGMENT, TENANT, 2, 3 * PAGE)
    body = head + entries(SEGMENT, 2).tobytes()
    assert packed == body + hashlib.blake2b(body, digest_size=32, key=SECRET).digest()


def test_every_changed_or_missing_byte_of_an_index_is_noticed() -> None:
    packed = fmt.pack_index(SEGMENT, TENANT, 3 * PAGE, entries(SEGMENT, 2), SECRET)
    for place in range(len(packed)):
        bad = bytearray(packed)
        bad[place] ^= 1 << (place % 8)
        with pytest.raises(FormatError, match=SEGMENT.hex()):
            fmt.unpack_index(bytes(bad), SEGMENT, SECRET)
        with pytest.raises(FormatError):
            fmt.unpack_index(packed[:place], SEGMENT, SECRET)
    with pytest.raises(FormatError):
        fmt.unpack_index(packed + b"\0", SEGMENT, SECRET)


def test_a_newer_index_is_refused_and_says_so() -> None:
    packed = bytearray(fmt.pack_index(SEGMENT, TENANT, 0, entries(SEGMENT), SECRET))
    packed[8:10] = struct.pack("<H", limits.format_version + 1)
    with pytest.raises(FormatError, match=r"format version 2.*upgrade"):
        fmt.unpack_index(bytes(packed), SEGMENT, SECRET)


# --- the pieces of a read
@given(
    sizes=st.lists(st.tuples(st.integers(1, 700), st.booleans()), min_size=1, max_size=6),
    tail=st.integers(0, PAGE - 1),
)
def test_pieces_cover_a_record_once_and_in_order(sizes: list[tuple[int, bool]], tail: int) -> None:
    """Sizes in pages; the last area's payload ends `tail` bytes early."""
    memory = memoryview(bytearray(sum(pages for pages, _ in sizes) * PAGE))
    areas, at, payload = [], 0, []
    for number, (pages, is_payload) in enumerate(sizes):
        end = at + pages * PAGE
        nbytes = (pages * PAGE - (tail if number == len(sizes) - 1 else 0)) if is_payload else 0
        areas.append(Area(memory[at:end], nbytes))
        payload += [(at, at + nbytes)] * is_payload
        at = end
    pieces = cut(areas, limits.read_io_bytes_max)
    place = lambda view: address(view) - address(memory)  # noqa: E731
    spans = [(place(view), place(view) + view.nbytes) for piece in pieces for view in piece.buffers]
    assert spans[0][0] == 0
    assert spans[-1][1] == memory.nbytes
    assert all(one[1] == two[0] for one, two in pairwise(spans))
    offsets = [piece.offset for piece in pieces]
    sums = np.cumsum([0] + [sum(view.nbytes for view in piece.buffers) for piece in pieces])
    assert offsets == sums[:-1].tolist()
    assert all(offset % PAGE == 0 for offset in offsets)
    assert (np.diff(sums) <= limits.read_io_bytes_max + PAGE).all()
    covered = [(place(view), place(view) + view.nbytes) for piece in pieces for view in piece.payload]
    marked = np.zeros(memory.nbytes, np.int8)
    for start, end in covered:
        marked[start:end] += 1
    expected = np.zeros(memory.nbytes, np.int8)
    for start, end in payload:
        expected[start:end] = 1
    assert np.array_equal(marked, expected)


# --- a dead writer's segment
@pytest.fixture
def scanning(tmp_path: Path) -> Iterator[tuple[SegmentStore, Recovery]]:
    segments = SegmentStore([PosixFiles(str(tmp_path))], SECRET)
    engine, scratch = default_engine(), Scratch()
    reader = SegmentReader(segments, engine, scratch, DramPool(0), decode_threads=1)
    with closing(segments), closing(engine), closing(reader):
        yield segments, Recovery(segments, SegmentTable(MemoryControl()), engine, scratch, reader)


def lay(segments: SegmentStore, segment: bytes, *records: tuple[int, bytes, bytes], pages: int) -> None:
    """A segment file with records (page, key, payload) in it."""
    raw = aligned_buffer(pages * PAGE).reshape(pages, PAGE)
    raw[:] = 0
    for at, key, payload in records:
        one = record(segment=segment, offset=at * PAGE, stored_bytes=len(payload), block_bytes=len(payload), codec=0)
        fmt.write_headers(
            raw[at : at + 1], np.frombuffer(key, np.uint8).reshape(1, -1), one, fmt.HeaderFields(KEYSPACE),
            [fmt.payload_tag([memoryview(payload)])], segments.secret(segment),
        )  # fmt: skip
        raw.reshape(-1)[(at + 1) * PAGE : (at + 1) * PAGE + len(payload)] = np.frombuffer(payload, np.uint8)
    file = segments.create(segment)[0]
    file.pwritev([raw.reshape(-1).data], 0)
    file.close()


def test_scan_jumps_over_holes_and_finds_no_header_in_a_payload(
    scanning: tuple[SegmentStore, Recovery], tmp_path: Path
) -> None:
    segments, recovery = scanning
    mine, other = segment_id(1), segment_id(2)
    lay(segments, other, (0, b"o" * 32, b"o" * PAGE), pages=2)
    genuine = (tmp_path / segment_path(other)).read_bytes()[:PAGE]
    lay(segments, mine, (0, b"a" * 32, genuine * 2), (5, b"b" * 32, b"b" * 100), (9, b"c" * 32, b"c" * 9000), pages=14)
    with (tmp_path / segment_path(mine)).open("r+b") as file:
        file.truncate(12 * PAGE)
    found, size = recovery.scan(mine)
    assert size == 12 * PAGE
    assert [entry["key"].tobytes()[:1] for entry in found] == [b"a", b"b"], "the last one is cut off by the file's end"
    assert recovery.verified(found).tolist() == [True, True]
    damaged = bytearray((tmp_path / segment_path(mine)).read_bytes())
    damaged[6 * PAGE + 50] ^= 1
    (tmp_path / segment_path(mine)).write_bytes(damaged)
    assert recovery.verified(recovery.scan(mine)[0]).tolist() == [True, False]


def test_scan_of_a_file_that_ends_inside_a_page(scanning: tuple[SegmentStore, Recovery], tmp_path: Path) -> None:
    segments, recovery = scanning
    segment = segment_id(1)
    lay(segments, segment, (0, b"a" * 32, b"a" * 10), (2, b"b" * 32, b"b" * 10), pages=4)
    path = tmp_path / segment_path(segment)
    for nbytes, count in ((3 * PAGE + 17, 1), (2 * PAGE, 1), (2 * PAGE - 1, 0), (100, 0), (0, 0)):
        with path.open("r+b") as file:
            file.truncate(nbytes)
        found, size = recovery.scan(segment)
        assert (len(found), size) == (count, nbytes)


def test_reading_raw_gives_stored_bytes(scanning: tuple[SegmentStore, Recovery]) -> None:
    segments, recovery = scanning
    segment = segment_id(1)
    lay(segments, segment, (0, b"a" * 32, b"a" * 10), (2, b"b" * 32, b"b" * 5000), pages=5)
    found, _ = recovery.scan(segment)
    into = [memoryview(bytearray(10)), memoryview(bytearray(5000))]
    plan = Plan(
        found["key"].tolist(), found["keyspace"].tolist(), found["record"].tolist(), [[view] for view in into], 1, None,
        raw=True,
    )  # fmt: skip
    recovery._reader.read(plan)
    assert plan.statuses.tolist() == [BlockStatus.FOUND] * 2
    assert [bytes(view) for view in into] == [b"a" * 10, b"b" * 5000]


# --- what the writer makes
def test_a_segment_holds_one_tenant_and_one_class(tmp_path: Path) -> None:
    with closing(perdure.open(tmp_path / "store", capacity="64MiB", memory=0)) as store:
        for tenant in ("a", "b"):
            space = keyspace(store, tenant=tenant)
            number = 0
            for durability in Durability:
                for ttl_s in (None, 600.0, 86_400.0):
                    number += 1
                    assert write(space, chain(space, number, 2), durability=durability, ttl_s=ttl_s) == [STORED] * 2
        store.sync()
        records = store._core.index.scan(bytes(32), 100)[1]
        classes: dict[bytes, set[tuple[Any, ...]]] = {}
        for one in records:
            kind = (one["tenant"].tobytes(), int(one["durability"]), int(one["retention"]))
            classes.setdefault(one["segment"].tobytes(), set()).add(kind)
        assert all(len(kinds) == 1 for kinds in classes.values())
        assert len({kind for kinds in classes.values() for kind in kinds}) == 18


def test_open_segments_are_bounded(tmp_path: Path) -> None:
    with closing(perdure.open(tmp_path / "store", capacity="1GiB", memory=0)) as store:
        tenants = limits.segments_open_max + 6
        for number in range(tenants):
            space = keyspace(store, tenant=f"tenant {number}")
            assert write(space, chain(space, 1, 1), durability="ephemeral") == [STORED]
        store.sync()
        assert len(store._core.writer.open_segments()) <= limits.segments_open_max
        assert store.status()["segments"]["sealed"]["count"] >= 6
        for number in range(tenants):
            space = keyspace(store, tenant=f"tenant {number}")
            assert read(space, chain(space, 1, 1)) == [FOUND]


def test_an_idle_segment_is_sealed_and_gives_back_what_it_does_not_use(tmp_path: Path) -> None:
    with closing(perdure.open(tmp_path / "store", capacity="64MiB", memory=0)) as store:
        space = keyspace(store)
        write(space, chain(space, 1, 2))
        assert store.status()["used_bytes"] == limits.segment_bytes_min
        store._core.writer.seal_idle(time.monotonic() - 3600.0)
        assert store.status()["segments"]["open"]["count"] == 1
        store._core.writer.seal_idle(time.monotonic() + 1.0)
        assert store.status()["segments"]["sealed"]["count"] == 1
        assert store.status()["used_bytes"] == 2 * (8192 + PAGE)
        assert read(space, chain(space, 1, 2)) == [FOUND] * 2


def test_a_segment_grows_to_its_limit_and_is_filled(tmp_path: Path) -> None:
    """From little, so that a small tenant stays small; no record crosses a segment's end."""
    with closing(perdure.open(tmp_path / "store", capacity="64MiB", memory=0)) as store:
        space = keyspace(store, block_bytes=60_000)
        sizes = []
        for number in range(5):
            write(space, chain(space, number, 16))
            sizes.append(store.status()["used_bytes"] >> 20)
        assert sizes[0] == 1
        assert sizes == sorted(sizes)
        assert sizes[3:] == [4, 5]
        one = next(record for record in store._core.table.all() if record.state is SegmentState.SEALED)
        assert (one.records, one.sealed_bytes) == (64, 4 << 20)


def test_a_damaged_index_object_costs_nothing(tmp_path: Path) -> None:
    """Blocks are found without it, and the segment can be evicted: its headers tell what it holds."""
    clock = FakeClock()
    seams = Seams(clock=clock)
    with closing(perdure.open(tmp_path / "store", capacity="8MiB", memory=0, seams=seams)) as store:
        space = keyspace(store, block_bytes=60_000)
        write(space, chain(space, 1, 16))
    damaged = next((tmp_path / "store").glob("segments/*/*.idx"))
    damaged.write_bytes(b"\0" * 100)
    with closing(perdure.open(tmp_path / "store", memory=0, seams=seams)) as store:
        space = keyspace(store, block_bytes=60_000)
        assert read(space, chain(space, 1, 16)) == [FOUND] * 16
        for number in range(2, 12):
            clock.advance(60)
            assert write(space, chain(space, number, 16)) == [STORED] * 16
        assert space.lookup(chain(space, 1, 16)) == 0
        assert not damaged.exists()
        assert not damaged.with_suffix(".seg").exists()


def test_both_roots_hold_the_same_bytes(tmp_path: Path) -> None:
    with closing(perdure.open(tmp_path / "store", capacity="64MiB", memory=0, mirror=tmp_path / "mirror")) as store:
        space = keyspace(store)
        write(space, chain(space, 1, 30), durability="retained")
        write(space, chain(space, 2, 30), durability="session")
    mirrored = sorted(path.relative_to(tmp_path / "mirror") for path in (tmp_path / "mirror").rglob("*.*"))
    assert [path.suffix for path in mirrored] == [".idx", ".seg"]
    for path in mirrored:
        assert (tmp_path / "mirror" / path).read_bytes() == (tmp_path / "store" / path).read_bytes()


def test_writers_that_wait_together_share_one_sync(tmp_path: Path) -> None:
    plan = FaultWhile("hang", {"datasync"}, ".seg")
    seams = Seams(files=lambda root: FaultyFiles(PosixFiles(root), plan))
    with closing(perdure.open(tmp_path / "store", capacity="64MiB", memory=0, seams=seams)) as store:
        space = keyspace(store)
        first = space.submit_write(chain(space, 0, 1), blocks_of(chain(space, 0, 1)))
        plan.wait_until_hanging()
        others = [space.submit_write(chain(space, n, 1), blocks_of(chain(space, n, 1))) for n in range(1, 4)]
        (opened,) = store._core.writer.open_segments()
        _until(lambda: opened.written == 4)
        plan.resume()
        for future in (first, *others):
            assert future.result(30.0).durable
        assert plan.count == 2, "one for the first, one for all the others"


def test_a_failed_sync_ends_the_segment(tmp_path: Path) -> None:
    """The kernel may have dropped the pages: what was not synced before is not acknowledged, ever."""
    plan = FaultWhile("eio", {"datasync"}, ".seg")
    plan.armed = False
    seams = Seams(files=lambda root: FaultyFiles(PosixFiles(root), plan))
    with closing(perdure.open(tmp_path / "store", capacity="64MiB", memory=0, seams=seams)) as store:
        space = keyspace(store)
        kept, lost = chain(space, 1, 2), chain(space, 2, 2)
        assert write(space, kept) == [STORED] * 2
        before = store.explain(kept[0].tobytes())["record"]["segment"]
        plan.armed = True
        report = space.write(lost, blocks_of(lost))
        assert report.statuses.tolist() == [perdure.WriteStatus.FAILED] * 2
        assert "fdatasync" in report.reasons[0]
        plan.armed = False
        assert space.lookup(lost) == 0
        assert write(space, lost) == [STORED] * 2
        assert store.explain(lost[0].tobytes())["record"]["segment"] != before
        assert read(space, np.concatenate([kept, lost])) == [FOUND] * 4


def _until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "it does not happen"
        time.sleep(0.005)
