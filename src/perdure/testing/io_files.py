"""What every namespace of files must do, as a test class to inherit (see `perdure.testing.io`)."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from perdure import limits
from perdure.errors import InvalidArgument
from perdure.io.api import Files
from perdure.io.memory import aligned_buffer

PAGE = limits.page_bytes


@cache
def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Bytes that look random and differ for every seed, so that no misplaced piece looks right."""
    return random.Random(seed).randbytes(nbytes)


def filled(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    """`pattern` in page-aligned memory."""
    memory = aligned_buffer(nbytes)
    memory[:] = np.frombuffer(pattern(nbytes, seed), dtype=np.uint8)
    return memory


class FilesConformance:
    """Inherit, and define `make`. `direct` is what files are asked to be opened with; `keeps_data` says whether bytes
    written can be read back."""

    direct = True
    keeps_data = True

    def make(self, directory: Path) -> Files:
        raise NotImplementedError

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    def files(self, directory: Path) -> Files:
        return self.make(directory)

    def test_created_file_is_empty_and_its_directories_exist(self, files: Files) -> None:
        file = files.create("segments/a0/one.seg", direct=self.direct)
        assert file.size() == 0
        assert file.path == "segments/a0/one.seg"
        assert files.list("segments/a0") == ["one.seg"]
        file.close()

    def test_create_never_opens_what_exists(self, files: Files) -> None:
        files.create("one", direct=self.direct).close()
        with pytest.raises(FileExistsError):
            files.create("one", direct=self.direct)

    def test_open_of_a_missing_file_says_so(self, files: Files) -> None:
        with pytest.raises(FileNotFoundError):
            files.open("nothing", direct=self.direct)
        with pytest.raises(FileNotFoundError):
            files.unlink("nothing")

    def test_vectored_transfers(self, files: Files) -> None:
        data = pattern(4 * PAGE)
        memory = filled(4 * PAGE)
        file = files.create("one", direct=self.direct)
        assert file.pwritev([memory.data[:PAGE], memory.data[PAGE:]], 2 * PAGE) == 4 * PAGE
        file.datasync()
        assert file.size() == 6 * PAGE
        file.close()
        memory[:] = 7
        file = files.open("one", direct=self.direct)
        assert file.preadv([memory.data[: 3 * PAGE], memory.data[3 * PAGE :]], 2 * PAGE) == 4 * PAGE
        assert memory.tobytes() == (data if self.keeps_data else bytes(4 * PAGE))
        assert file.preadv([memory.data], 6 * PAGE) == 0
        assert file.preadv([memory.data], 5 * PAGE) == PAGE
        file.close()

    def test_memory_and_offsets_need_no_alignment(self, files: Files) -> None:
        data = pattern(3 * PAGE)
        source, target = bytearray(b"x" + data), bytearray(1 + 2 * PAGE)
        file = files.create("one", direct=self.direct)
        assert file.pwritev([memoryview(source)[1:]], 0) == 3 * PAGE
        assert file.preadv([memoryview(target)[1:78], memoryview(target)[78:]], 33) == 2 * PAGE
        assert target[1:] == (data[33 : 33 + 2 * PAGE] if self.keeps_data else bytes(2 * PAGE))
        assert file.preadv([memoryview(target)[1:]], 3 * PAGE - 100) == 100
        assert file.preadv([memoryview(target)[1:]], 3 * PAGE + 1) == 0
        assert file.pwritev([memoryview(source)[1:100]], 3 * PAGE) == 99  # neither offset nor length of a sector
        assert file.size() == 3 * PAGE + 99
        assert file.preadv([memoryview(target)], 3 * PAGE) == 99
        assert target[:99] == (data[:99] if self.keeps_data else bytes(99))
        file.close()

    def test_allocate_and_truncate_set_the_size(self, files: Files) -> None:
        file = files.create("one", direct=self.direct)
        file.allocate(0, 8 * PAGE)
        assert file.size() == 8 * PAGE
        file.allocate(PAGE, PAGE)
        assert file.size() == 8 * PAGE
        memory = aligned_buffer(PAGE)
        memory[:] = 1
        assert file.preadv([memory.data], 7 * PAGE) == PAGE
        assert not memory.any()
        file.truncate(PAGE)
        assert file.size() == PAGE
        file.close()

    def test_write_once_first_wins(self, files: Files) -> None:
        assert files.write_once("a/b/index", b"first")
        assert not files.write_once("a/b/index", b"second")
        assert files.read("a/b/index") == b"first"
        assert files.list("a/b") == ["index"]  # no temporary is left
        assert files.write_once("a/empty", b"")
        assert files.read("a/empty") == b""

    def test_write_once_race_has_one_winner(self, files: Files) -> None:
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda number: files.write_once("index", b"%d" % number * 1000), range(8)))
        assert won.count(True) == 1
        assert files.read("index") == b"%d" % won.index(True) * 1000
        assert files.list("") == ["index"]

    def test_list_is_sorted_and_empty_for_nothing(self, files: Files) -> None:
        for name in ("b", "a", "c/d"):
            files.create(name, direct=self.direct).close()
        assert files.list("") == ["a", "b", "c"]
        assert files.list("c") == ["d"]
        assert files.list("nothing") == []

    def test_unlinked_file_is_gone_by_name(self, files: Files) -> None:
        files.create("one", direct=self.direct).close()
        files.unlink("one")
        files.sync_directory("")
        assert files.list("") == []
        with pytest.raises(FileNotFoundError):
            files.open("one", direct=self.direct)

    @pytest.mark.parametrize("path", ["../one", "/one", "a/../../one", "a//b", "", ".", "a/.", "a\0b"])
    def test_paths_stay_below_the_root(self, files: Files, directory: Path, path: str) -> None:
        with pytest.raises(InvalidArgument):
            files.create(path, direct=self.direct)
        with pytest.raises(InvalidArgument):
            files.write_once(path, b"")
        with pytest.raises(InvalidArgument):
            files.open(path, direct=self.direct)
        assert not os.path.lexists(directory.parent / "one")

    def test_free_bytes_is_a_number_of_bytes(self, files: Files) -> None:
        assert files.free_bytes() > 0
