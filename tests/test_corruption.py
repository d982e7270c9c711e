"""Bytes on the disk that are not what was written: always noticed, never delivered, never in the way for good.

FAULTS 1 to 4, 8, 17, 26: flips, truncations, swaps, forged headers, damaged indexes. Damage is done to the files behind
the store's back; what a read may then say is `corrupt` or `missing`, and its neighbours are as they were.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.blocks import BLOCK_BYTES, CORRUPT, FOUND, MISSING, chain, contents, keyspace, read_back

import perdure
from perdure import Keyspace, Seams, Store, WriteStatus, limits
from perdure.catalog.api import KeyArray
from perdure.io.files import PosixFiles
from perdure.io.siblings import FaultyFiles, NthFault
from perdure.segments import format as fmt

DAMAGES = 10_000
BLOCKS = 24
RECORD = fmt.record_bytes(BLOCK_BYTES)


class Sealed:
    """A store whose blocks lie in one sealed segment, opened read-only: nothing is quarantined between damages."""

    def __init__(self, path: Path, codec: str = "off"):
        self.path = path
        with perdure.open(path, capacity="64MiB", memory=0) as store:
            space = keyspace(store, codec=codec)
            self.keys = chain(space, 1, BLOCKS)
            assert space.write(self.keys, contents(self.keys)).stored == BLOCKS
        (self.file,) = path.glob("segments/*/*.seg")
        self.size = self.file.stat().st_size
        self.fd = os.open(self.file, os.O_RDWR)

    def close(self) -> None:
        os.close(self.fd)


@pytest.fixture(params=["off", "on"])
def sealed(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sealed]:
    one = Sealed(tmp_path / "store", request.param)
    yield one
    one.close()


def places(store: Store, keys: KeyArray) -> np.ndarray:
    """(offset, stored bytes) of each block."""
    _, records = store._core.index.lookup(keys)
    return np.stack([records["offset"].astype(np.int64), records["stored_bytes"].astype(np.int64)], axis=1)


def test_ten_thousand_damages_are_all_noticed(sealed: Sealed) -> None:
    """Flips of one bit, runs of garbage, zeroed pages, records that swap places; at random, each undone afterwards."""
    random = np.random.default_rng(20_261_202)
    with perdure.open(sealed.path, read_only=True, memory=0) as store:
        space = keyspace(store)
        where = places(store, sealed.keys)
        meaningful = touched_nothing = 0
        for _ in range(DAMAGES // 2):  # each parameter does half
            block = int(random.integers(BLOCKS))
            offset, stored = where[block]
            kind = int(random.integers(4))
            at, new = _damage(sealed, random, kind, int(offset), int(stored), where)
            old = os.pread(sealed.fd, len(new), at)
            os.pwrite(sealed.fd, new, at)
            hit = [
                number
                for number, (start, size) in enumerate(where.tolist())
                if _differs(old, new, at, start, start + limits.header_bytes)
                or _differs(old, new, at, start + limits.page_bytes, start + limits.page_bytes + size)
            ]
            first, last = max(0, block - 1), min(BLOCKS, block + 2)
            statuses = read_back(space, sealed.keys[first:last])
            for number in range(first, last):
                if number in hit:
                    assert statuses[number - first] in (CORRUPT, MISSING), f"kind {kind} at {at}: block {number}"
                else:
                    assert statuses[number - first] == FOUND, f"kind {kind} at {at}: neighbour {number}"
            meaningful += bool(hit)
            touched_nothing += not hit
            os.pwrite(sealed.fd, old, at)
        assert meaningful > 0.85 * DAMAGES / 2, "most damages must hit something that matters"
        assert (read_back(space, sealed.keys) == FOUND).all()


def _damage(
    sealed: Sealed, random: np.random.Generator, kind: int, offset: int, stored: int, where: np.ndarray
) -> tuple[int, bytes]:
    """Where to write what."""
    if kind == 0:  # one bit of header or payload
        at = offset + int(random.integers(limits.header_bytes))
        if random.integers(2):
            at = offset + limits.page_bytes + int(random.integers(stored))
        byte = os.pread(sealed.fd, 1, at)[0] ^ (1 << int(random.integers(8)))
        return at, bytes([byte])
    if kind == 1:  # a run of garbage
        length = int(random.integers(1, 64))
        return offset + int(random.integers(limits.page_bytes + stored - length)), random.bytes(length)
    if kind == 2:  # a page that was never written
        page = int(random.integers((stored + limits.page_bytes - 1) // limits.page_bytes + 1))
        return offset + page * limits.page_bytes, bytes(limits.page_bytes)
    other = int(where[int(random.integers(len(where)))][0])  # another record's bytes, header and all
    length = limits.page_bytes * int(random.integers(1, 3))
    return offset, os.pread(sealed.fd, length, other)


def _differs(old: bytes, new: bytes, at: int, start: int, end: int) -> bool:
    low, high = max(at, start), min(at + len(new), end)
    return low < high and old[low - at : high - at] != new[low - at : high - at]


def test_files_cut_short_or_grown_or_swapped(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with perdure.open(path, capacity="64MiB", memory=0) as store:
        one, other = keyspace(store), keyspace(store, tenant="other")
        keys, others = chain(one, 1, BLOCKS), chain(other, 1, BLOCKS)
        one.write(keys, contents(keys))
        other.write(others, contents(others))
    first, second = sorted(path.glob("segments/*/*.seg"), key=lambda file: file.name)
    whole = first.read_bytes()

    def statuses() -> list[int]:
        with perdure.open(path, read_only=True, memory=0) as store:
            return [int(status) for status in read_back(keyspace(store), keys)]

    random = np.random.default_rng(5)
    for _ in range(40):
        length = int(random.integers(len(whole)))
        os.truncate(first, length)
        kept = sum((number + 1) * RECORD <= length for number in range(BLOCKS))
        found = statuses()
        assert found[:kept] == [FOUND] * kept
        assert set(found[kept:]) <= {MISSING, CORRUPT}
        first.write_bytes(whole)
    first.write_bytes(whole + random.bytes(12_345))
    assert statuses() == [FOUND] * BLOCKS
    first.write_bytes(second.read_bytes())  # a valid file of equal length: another segment's
    assert first.stat().st_size == len(whole)
    assert set(statuses()) <= {CORRUPT, MISSING}
    first.unlink()
    assert statuses() == [MISSING] * BLOCKS


# --- what becomes of a damaged block
def flip(store: Store, key: bytes, byte: int = 0) -> None:
    """Change one byte of a stored block's payload."""
    place = store.explain(key)
    descriptor = os.open(store.path / place["file"], os.O_RDWR)
    at = place["record"]["offset"] + limits.page_bytes + byte
    os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 0x40]), at)
    os.close(descriptor)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with perdure.open(tmp_path / "store", capacity="64MiB", memory=0) as one:
        yield one


@pytest.fixture
def space(store: Store) -> Keyspace:
    return keyspace(store)


def test_one_bad_block_ends_the_prefix_and_hurts_nobody_else(store: Store, space: Keyspace) -> None:
    keys = chain(space, 1, 9)
    space.write(keys, contents(keys))
    flip(store, keys[4].tobytes())
    memory = np.zeros(9 * BLOCK_BYTES, np.uint8)
    report = space.read(keys, into=memory)
    assert report.usable == 4
    assert report.statuses.tolist() == [FOUND] * 4 + [CORRUPT] + [FOUND] * 4
    assert report.problems == {4: "payload checksum does not match"}
    assert space.lookup(keys) == 4, "the record is gone"
    answer = store.explain(keys[4].tobytes())
    assert answer["incidents"][-1]["kind"] == "corrupt"
    assert "payload checksum" in answer["verdict"]
    assert store.status()["incidents"][-1]["key"] == keys[4].tobytes().hex()
    again = space.write(keys, contents(keys))
    assert again.statuses.tolist() == [WriteStatus.EXISTS] * 4 + [WriteStatus.STORED] + [WriteStatus.EXISTS] * 4
    assert (read_back(space, keys) == FOUND).all()
    assert store.verify()["ok"]


def test_verify_names_what_is_bad(store: Store, space: Keyspace) -> None:
    keys = chain(space, 1, 9)
    space.write(keys, contents(keys))
    flip(store, keys[2].tobytes(), byte=777)
    report = store.verify()
    assert not report["ok"]
    assert [bad["key"] for bad in report["bad"]] == [keys[2].tobytes().hex()]
    assert report["blocks"] == 9


def test_a_passing_fault_is_read_again_and_removes_nothing(tmp_path: Path) -> None:
    """The first read of a block comes back torn; the second look, through a new descriptor, is right."""
    with perdure.open(tmp_path / "store", memory=0) as store:
        keys = chain(keyspace(store), 1, 1)
        keyspace(store).write(keys, contents(keys))
    plan = NthFault(1, "eio", once=True, ops=("preadv",))
    seams = Seams(files=lambda root: FaultyFiles(PosixFiles(root), plan))
    with perdure.open(tmp_path / "store", memory=0, seams=seams) as store:
        assert store.wait_ready(60)
        assert (read_back(keyspace(store), keys) == FOUND).all()
        assert plan.fired
        assert not store.status()["incidents"]


def test_a_sick_host_removes_nothing(store: Store, space: Keyspace) -> None:
    count = 2 * limits.corrupt_removals_per_window_max
    keys = chain(space, 1, count)
    space.write(keys, contents(keys))
    for key in keys:
        flip(store, key.tobytes())
    assert (read_back(space, keys) == CORRUPT).all()
    status = store.status()
    assert not status["healthy"]
    assert status["counters"]["quarantine_withheld"] > 0
    kept = int(space.present(keys).sum())
    assert kept >= count - limits.corrupt_removals_per_window_max
    assert (read_back(space, keys) != FOUND).all()


# --- indexes
def test_a_lost_index_comes_back_by_itself(tmp_path: Path) -> None:
    sealed = Sealed(tmp_path / "store")
    sealed.close()
    with perdure.open(sealed.path, memory=0) as store:
        before = store.status()["tenants"]
    shutil.rmtree(sealed.path / "index")
    with perdure.open(sealed.path, memory=0) as store:
        assert store.wait_ready(60)
        assert (read_back(keyspace(store), sealed.keys) == FOUND).all()
        assert store.status()["tenants"] == before


@pytest.mark.parametrize("damage", ["missing", "flipped", "empty"])
def test_rebuild_without_a_segments_index_reads_its_headers(tmp_path: Path, damage: str) -> None:
    sealed = Sealed(tmp_path / "store")
    sealed.close()
    (index,) = sealed.path.glob("segments/*/*.idx")
    raw = bytearray(index.read_bytes())
    raw[len(raw) // 2] ^= 1
    {"missing": index.unlink, "flipped": lambda: index.write_bytes(raw), "empty": lambda: index.write_bytes(b"")}[
        damage
    ]()
    status = perdure.rebuild(sealed.path)
    assert status["blocks"] == BLOCKS
    with perdure.open(sealed.path, memory=0) as store:
        assert (read_back(keyspace(store), sealed.keys) == FOUND).all()


def test_a_damaged_catalog_says_what_to_do_and_that_works(tmp_path: Path) -> None:
    sealed = Sealed(tmp_path / "store")
    sealed.close()
    (sealed.path / "index" / "data.mdb").write_bytes(b"not a database" * 1000)
    with pytest.raises(perdure.PerdureError, match="perdure rebuild"):
        perdure.open(sealed.path)
    assert perdure.rebuild(sealed.path)["blocks"] == BLOCKS
    with perdure.open(sealed.path, memory=0) as store:
        assert (read_back(keyspace(store), sealed.keys) == FOUND).all()


def test_a_payload_that_looks_like_a_record_is_not_one(tmp_path: Path) -> None:
    """A client stores a byte-perfect copy of another block's record; a rebuild from headers must not believe it."""
    path = tmp_path / "store"
    with perdure.open(path, capacity="64MiB", memory=0) as store:
        space = keyspace(store, block_bytes=4 * limits.page_bytes)
        victim = chain(space, 1, 1)
        space.write(victim, contents(victim, 4 * limits.page_bytes))
        place = store.explain(victim[0].tobytes())
        copy = (path / place["file"]).read_bytes()[place["record"]["offset"] :][: 4 * limits.page_bytes]
        forged = bytearray(copy)
        offset = place["record"]["offset"] + 5 * limits.page_bytes + limits.page_bytes  # where its page will stand
        forged[112:120] = offset.to_bytes(8, "little")  # says that it stands there; its MAC does not know
        liar = chain(space, 2, 2)
        space.write(liar, bytes(forged) + copy)
    for index in path.glob("segments/*/*.idx"):
        index.unlink()
    assert perdure.rebuild(path)["blocks"] == 3
    with perdure.open(path, memory=0) as store:
        space = keyspace(store, block_bytes=4 * limits.page_bytes)
        _, records = store._core.index.lookup(victim)
        assert int(records["offset"][0]) == place["record"]["offset"]
        assert (read_back(space, victim) == FOUND).all()
        found = bytearray(8 * limits.page_bytes)
        assert space.read(liar, into=found).usable == 2
        assert bytes(found) == bytes(forged) + copy
