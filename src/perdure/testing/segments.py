"""What every segment store must do, as a test class to inherit.

    class TestMySegments(SegmentStoreConformance):
        def make_segments(self, roots):
            return MySegmentStore(roots, SECRET)

Contract
- Names are used once: nothing is overwritten, and what is deleted is gone for whoever comes later, while those who were
  reading go on to read the same bytes.
- Indexes are write-once, and never trusted: damaged, foreign, misplaced or newer ones are refused.
- Everything is done through the store itself; only `damage` and `stray` touch the files behind its back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from perdure import limits
from perdure.errors import FormatError
from perdure.io.api import File
from perdure.io.memory import aligned_buffer
from perdure.segments import format as fmt
from perdure.segments.store import SegmentStore, index_path, segment_path

SECRET = b"\x07" * 32
TENANT = b"tenant-000000001"
SIZE = 2 * limits.page_bytes

Making = Callable[[Sequence[Path]], SegmentStore]


def segment_id(number: int) -> bytes:
    """Ids in the order of their numbers, in different directories."""
    return number.to_bytes(8, "big") + bytes([number % 251]) * 8


def content(segment: bytes) -> NDArray[np.uint8]:
    """What a test writes into a segment: a function of its name."""
    memory = aligned_buffer(SIZE)
    memory[:] = np.resize(np.frombuffer(segment, np.uint8), SIZE)
    return memory


def fill(files: Sequence[File], segment: bytes) -> None:
    for file in files:
        assert file.pwritev([content(segment).data], 0) == SIZE
        file.datasync()
        file.close()


def bytes_of(file: File, nbytes: int = SIZE) -> bytes:
    memory = aligned_buffer(nbytes)
    got = file.preadv([memory.data], 0)
    return memory[:got].tobytes()


def entries(segment: bytes, count: int = 3) -> NDArray[np.void]:
    made = np.zeros(count, fmt.INDEX_ENTRY)
    for place in range(count):
        made[place]["key"] = np.void((place + 1).to_bytes(limits.key_bytes, "big"))
        made[place]["record"]["segment"] = np.void(segment)
        made[place]["record"]["offset"] = place * SIZE
    return made


def packed(segments: SegmentStore, segment: bytes, count: int = 3) -> bytes:
    return fmt.pack_index(segment, TENANT, count * SIZE, entries(segment, count), segments.secret(segment))


class SegmentStoreConformance:
    """Inherit, and define `make_segments`: a store over these directories, keyed with `SECRET`."""

    def make_segments(self, roots: Sequence[Path]) -> SegmentStore:
        raise NotImplementedError

    def damage(self, root: Path, path: str, at: int) -> None:
        """Flip one byte of an object."""
        raw = bytearray((root / path).read_bytes())
        raw[at] ^= 0x40
        (root / path).write_bytes(raw)

    def stray(self, root: Path, path: str, data: bytes = b"") -> None:
        """An object that the store did not write."""
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)

    @pytest.fixture
    def roots(self, tmp_path: Path) -> list[Path]:
        made = [tmp_path / "one", tmp_path / "two"]
        for root in made:
            root.mkdir()
        return made

    @pytest.fixture
    def making(self, roots: list[Path]) -> Iterator[Making]:
        """Stores that are closed at the end."""
        with ExitStack() as stack:

            def make(chosen: Sequence[Path]) -> SegmentStore:
                segments = self.make_segments(chosen)
                stack.callback(segments.close)
                return segments

            yield make

    @pytest.fixture
    def segments(self, making: Making, roots: list[Path]) -> SegmentStore:
        return making(roots)

    # --- names
    def test_create_read_delete(self, segments: SegmentStore) -> None:
        segment = segment_id(1)
        files = segments.create(segment)
        assert [file.size() for file in files] == [0]
        fill(files, segment)
        file = segments.acquire(segment)
        assert file.size() == SIZE
        assert bytes_of(file) == content(segment).tobytes()
        segments.release(segment, file)
        segments.delete(segment)
        with pytest.raises(FileNotFoundError):
            segments.acquire(segment)

    @pytest.mark.parametrize("count", [1, 2])
    def test_create_in_so_many_roots(self, making: Making, roots: list[Path], count: int) -> None:
        segment = segment_id(1)
        segments = making(roots)
        fill(segments.create(segment, roots=count), segment)
        assert [making([root]).list() for root in roots] == [[segment], [segment] if count == 2 else []]
        for root in range(count):
            file = segments.reopen(segment, root=root)
            assert bytes_of(file) == content(segment).tobytes()
            file.close()

    def test_a_name_is_used_once(self, making: Making, segments: SegmentStore, roots: list[Path]) -> None:
        segment = segment_id(1)
        fill(segments.create(segment), segment)
        for other in (segments, making(roots)):
            with pytest.raises(FileExistsError):
                other.create(segment)
        file = segments.acquire(segment)
        assert bytes_of(file) == content(segment).tobytes()
        segments.release(segment, file)

    def test_create_in_all_roots_or_none(self, making: Making, segments: SegmentStore, roots: list[Path]) -> None:
        segment = segment_id(1)
        fill(making(roots[1:]).create(segment), segment)
        with pytest.raises(FileExistsError):
            segments.create(segment, roots=2)
        assert making(roots[:1]).list() == []
        file = segments.reopen(segment, root=1)
        assert bytes_of(file) == content(segment).tobytes()
        file.close()

    def test_list_is_in_order_of_time(self, segments: SegmentStore) -> None:
        names = [segment_id(number) for number in (7, 300, 2, 41)]
        for name in names:
            fill(segments.create(name), name)
            segments.write_index(name, packed(segments, name))
        assert segments.list() == sorted(names)
        segments.delete(names[1])
        assert segments.list() == sorted({*names} - {names[1]})

    def test_list_leaves_out_what_is_not_a_segment(self, segments: SegmentStore, roots: list[Path]) -> None:
        segment = segment_id(1)
        fill(segments.create(segment), segment)
        for path in (
            "segments/ab/readme.seg",
            f"segments/ab/{'z' * 32}.seg",
            f"segments/ab/{segment.hex()[:-2]}.seg",
            segment_path(segment_id(2)) + ".bak",
            index_path(segment_id(3)),
        ):
            self.stray(roots[0], path)
        assert segments.list() == [segment]

    def test_nothing_there(self, segments: SegmentStore) -> None:
        assert segments.list() == []
        assert list(segments.temporaries()) == []
        segments.delete(segment_id(1))
        for ask in (segments.acquire, segments.reopen, segments.read_index):
            with pytest.raises(FileNotFoundError):
                ask(segment_id(1))

    # --- readers and deletion
    def test_deleted_while_it_is_read(self, segments: SegmentStore) -> None:
        """Who reads goes on to; who comes later gets nothing, never other bytes."""
        segment = segment_id(1)
        fill(segments.create(segment, roots=2), segment)
        held = [segments.acquire(segment), segments.acquire(segment), segments.reopen(segment, root=1)]
        segments.delete(segment)
        for root in (0, 1):
            with pytest.raises(FileNotFoundError):
                segments.reopen(segment, root=root)
        with pytest.raises(FileNotFoundError):
            segments.acquire(segment)
        segments.release(segment, held[0])
        for file in held[1:]:
            assert bytes_of(file) == content(segment).tobytes()
        segments.release(segment, held[1])
        held[2].close()
        segments.delete(segment)

    def test_delete_takes_everything_in_every_root(
        self, making: Making, segments: SegmentStore, roots: list[Path]
    ) -> None:
        segment, other = segment_id(1), segment_id(2)
        for name in (segment, other):
            fill(segments.create(name, roots=2), name)
            segments.write_index(name, packed(segments, name), roots=2)
        segments.delete(segment)
        for root in roots:
            alone = making([root])
            assert alone.list() == [other]
            assert len(alone.read_index(other).entries) == 3
            with pytest.raises(FileNotFoundError):
                alone.read_index(segment)

    def test_any_number_of_segments_can_be_read(self, segments: SegmentStore) -> None:
        """More than a process should keep open, half of them held at once."""
        names = [segment_id(number) for number in range(600)]
        for name in names[::6]:
            fill(segments.create(name), name)
        held = [(name, segments.acquire(name)) for name in names[::12]]
        for _ in range(2):
            for name in names[::6]:
                file = segments.acquire(name)
                assert bytes_of(file) == content(name).tobytes()
                segments.release(name, file)
        for name, file in held:
            assert bytes_of(file) == content(name).tobytes()
            segments.release(name, file)

    def test_threads_read_while_others_delete(self, segments: SegmentStore) -> None:
        names = [segment_id(number) for number in range(24)]
        for name in names:
            fill(segments.create(name, roots=2), name)
        left = iter(names)
        lock = threading.Lock()

        def read(number: int) -> int:
            rng, misses = np.random.default_rng(number), 0
            for _ in range(60):
                name = names[int(rng.integers(len(names)))]
                try:
                    file = segments.acquire(name)
                except FileNotFoundError:
                    misses += 1
                    continue
                assert bytes_of(file) == content(name).tobytes()
                segments.release(name, file)
            return misses

        def delete(_: int) -> int:
            for _ in range(8):
                with lock:
                    name = next(left)
                segments.delete(name)
            return 0

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: (read if number % 4 else delete)(number), range(12)))
        assert segments.list() == []

    # --- indexes
    @pytest.mark.parametrize("count", [0, 1, 500])
    def test_index_round_trip(self, segments: SegmentStore, count: int) -> None:
        segment = segment_id(1)
        segments.write_index(segment, packed(segments, segment, count))
        index = segments.read_index(segment)
        assert (index.segment, index.tenant, index.sealed_bytes) == (segment, TENANT, count * SIZE)
        assert index.entries.tobytes() == entries(segment, count).tobytes()

    def test_index_is_write_once(self, making: Making, segments: SegmentStore, roots: list[Path]) -> None:
        segment = segment_id(1)
        segments.write_index(segment, packed(segments, segment, 1))
        for other in (segments, making(roots)):
            other.write_index(segment, packed(segments, segment, 2), roots=2)
            assert len(other.read_index(segment).entries) == 1
        assert len(making(roots[1:]).read_index(segment).entries) == 2, "the second root had none"

    def test_a_damaged_index_is_read_from_the_other_root(self, segments: SegmentStore, roots: list[Path]) -> None:
        segment = segment_id(1)
        segments.write_index(segment, packed(segments, segment), roots=2)
        self.damage(roots[0], index_path(segment), 100)
        assert len(segments.read_index(segment).entries) == 3
        self.damage(roots[1], index_path(segment), 100)
        with pytest.raises(FormatError, match=segment.hex()):
            segments.read_index(segment)

    def test_a_lost_index_is_read_from_the_other_root(
        self, making: Making, segments: SegmentStore, roots: list[Path]
    ) -> None:
        segment = segment_id(1)
        making(roots[1:]).write_index(segment, packed(segments, segment))
        assert len(segments.read_index(segment).entries) == 3

    def test_an_index_of_another_segment_is_refused(self, segments: SegmentStore) -> None:
        mine, other = segment_id(1), segment_id(2)
        segments.write_index(mine, packed(segments, other))
        segments.write_index(other, fmt.pack_index(other, TENANT, 0, entries(other), segments.secret(mine)))
        for name in (mine, other):
            with pytest.raises(FormatError):
                segments.read_index(name)

    def test_half_written_indexes_are_found(self, segments: SegmentStore, roots: list[Path]) -> None:
        """What a process leaves that is killed while it writes one."""
        segment = segment_id(1)
        for root in roots:
            self.stray(root, index_path(segment) + ".0123456789ab.tmp", b"half")
        found = list(segments.temporaries())
        assert [one[2] for one in found] == [segment, segment]
        for files, path, _ in found:
            files.unlink(path)
        assert list(segments.temporaries()) == []
        assert segments.list() == []
