"""Damage on the disk: every kind of it, thousands of times, and what is done about it.

Expected: damage to a record's header or payload is always noticed (corrupt, or missing where the file is cut short),
the wrong bytes are never delivered, and damage elsewhere does no harm; a block that does not verify twice is taken out
of the index, named by `explain` and can be stored again at once; its neighbours in the same read are delivered; a host
where much fails at once removes nothing; indexes are disposable, and nothing that only looks like a record is adopted.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import blocks, sweep
from support.blocks import WRONG

import perdure
from perdure import BlockStatus, CatalogError, FormatError, Keyspace, Seams, Store, WriteStatus, limits
from perdure.catalog.api import RECORD, KeyArray, RecordArray
from perdure.clock import FakeClock
from perdure.io.api import Buffer, File
from perdure.io.faulty import FaultyFiles, NthFault
from perdure.io.files import PosixFiles
from perdure.io.wrappers import FileAround, FilesAround
from perdure.publishing import show
from perdure.segments.format import record_bytes

FOUND, MISSING, CORRUPT = BlockStatus.FOUND, BlockStatus.MISSING, BlockStatus.CORRUPT
SEED = int(os.environ.get("PERDURE_CORRUPTION_SEED", "0")) or random.SystemRandom().randrange(1 << 30)
DAMAGES = 10_000
PAGE = limits.page_bytes


@dataclass
class Placed:
    """One keyspace's blocks in one segment, in the order they lie there."""

    space: Keyspace
    keys: KeyArray
    records: RecordArray
    path: Path
    original: bytes

    def spans(self, place: int) -> tuple[int, int, int]:
        """(start of the record, payload bytes, end of the record) in the file."""
        record = self.records[place]
        start, stored = int(record["offset"]), int(record["stored_bytes"])
        return start, stored, start + record_bytes(stored)


class Damaged:
    """A store whose files are damaged and mended again, with a clock that lets the host get well in between."""

    def __init__(self, path: Path, **options: Any):
        self.clock = FakeClock()
        self.store = perdure.open(path, capacity="1GiB", memory=0, seams=Seams(clock=self.clock), **options)
        assert self.store.wait_ready(sweep.BOUND_S)
        self.placed: list[Placed] = []

    def add(self, space: Keyspace, chain: int, count: int) -> None:
        """Write one segment of its own."""
        keys = blocks.chain(space, chain, count)
        assert blocks.write(space, keys).durable
        for opened in self.store._core.writer.open_segments():
            self.store._core.writer.retire(opened)
        present, records = self.store._core.index.lookup(keys)
        assert present.all()
        assert len(np.unique(records["segment"])) == 1
        name = records["segment"][0].tobytes().hex()
        path = Path(self.store.path) / "segments" / name[-2:] / f"{name}.seg"
        self.placed.append(Placed(space, keys, records, path, path.read_bytes()))

    def mend(self, one: Placed) -> None:
        """The file as it was, its records back in the index, the host well again."""
        one.path.write_bytes(one.original)
        core = self.store._core
        core.index.publish(one.keys, one.records, now_s=0, is_draining=lambda segment: False)
        show(core, one.keys, one.records)
        self.clock.advance(limits.corrupt_window_s + 1)

    def read(self, one: Placed, **options: Any) -> np.ndarray[Any, Any]:
        return blocks.read_back(one.space, one.keys, **options)


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Damaged]:
    """Small and large blocks, with and without padding, plain and compressed."""
    with sweep.quick_folder(tmp_path) as folder:
        made = Damaged(folder / "store")
        try:
            for number, (count, options) in enumerate(
                [(60, {}), (60, {}), (40, {"block_bytes": 16_384}), (40, {"block_bytes": 16_384}),
                 (30, {"block_bytes": 30_000, "codec": "on"}), (3, {"block_bytes": 5 << 20, "tenant": "large"})]
            ):  # fmt: skip
                made.add(blocks.keyspace(made.store, **options), 1 + number, count)
            yield made
        finally:
            made.store.close()


# --- thousands of damages -----------------------------------------------------------------------------------------

Damage = Callable[[random.Random, bytearray, Placed, int, Sequence[Placed]], bool]
"""Damages the record at a place; whether that must be noticed."""


def _flip(raw: bytearray, at: int, rng: random.Random) -> None:
    raw[at] ^= 1 << rng.randrange(8)


def flip_header(rng: random.Random, raw: bytearray, one: Placed, place: int, every: Sequence[Placed]) -> bool:
    _flip(raw, one.spans(place)[0] + rng.randrange(limits.header_bytes), rng)
    return True


def flip_payload(rng: random.Random, raw: bytearray, one: Placed, place: int, every: Sequence[Placed]) -> bool:
    start, stored, _ = one.spans(place)
    _flip(raw, start + PAGE + rng.randrange(stored), rng)
    return True


def flip_padding(rng: random.Random, raw: bytearray, one: Placed, place: int, every: Sequence[Placed]) -> bool:
    start, stored, end = one.spans(place)
    behind = end - (start + PAGE + stored)
    at = rng.randrange(PAGE - limits.header_bytes + behind)
    rest = start + limits.header_bytes
    _flip(raw, rest + at if at < PAGE - limits.header_bytes else end - behind + at - (PAGE - limits.header_bytes), rng)
    return False


def zero_page(rng: random.Random, raw: bytearray, one: Placed, place: int, every: Sequence[Placed]) -> bool:
    start, _, end = one.spans(place)
    at = start + rng.randrange((end - start) // PAGE) * PAGE
    raw[at : at + PAGE] = bytes(PAGE)
    return True


def garbage(rng: random.Random, raw: bytearray, one: Placed, place: int, every: Sequence[Placed]) -> bool:
    start, stored, _ = one.spans(place)
    at = start + PAGE + rng.randrange(stored)
    end = min(at + rng.randrange(1, 5000), start + PAGE + stored)
    before = bytes(raw[at:end])
    raw[at:end] = rng.randbytes(end - at)
    return bytes(raw[at:end]) != before


def other_record(rng: random.Random, raw: bytearray, one: Placed, place: int, every: Sequence[Placed]) -> bool:
    """A whole valid record of equal length, of another block: from this file, or from another one at the same place."""
    start, _, end = one.spans(place)
    same_size = [other for other in every if other.space is one.space]
    while True:
        donor = rng.choice(same_size)
        source = donor.spans(rng.randrange(len(donor.keys)))
        if source[2] - source[0] == end - start and (donor is not one or source[0] != start):
            raw[start:end] = donor.original[source[0] : source[2]]
            return True


def other_payload(rng: random.Random, raw: bytearray, one: Placed, place: int, every: Sequence[Placed]) -> bool:
    """Its own header with another block's payload."""
    start, _, _ = one.spans(place)
    header = bytes(raw[start : start + PAGE])
    other_record(rng, raw, one, place, every)
    raw[start : start + PAGE] = header
    return True


def other_sector(rng: random.Random, raw: bytearray, one: Placed, place: int, every: Sequence[Placed]) -> bool:
    """A sector of the payload of another record."""
    start, stored, _ = one.spans(place)
    at = start + PAGE + rng.randrange(stored // 512) * 512
    source = rng.randrange(len(one.original) // 512) * 512
    before = bytes(raw[at : at + 512])
    raw[at : at + 512] = one.original[source : source + 512]
    return bytes(raw[at : at + 512]) != before


KINDS: list[tuple[Damage, int]] = [
    (flip_header, 30), (flip_payload, 30), (flip_padding, 10), (zero_page, 10), (garbage, 8), (other_record, 5),
    (other_payload, 4), (other_sector, 3),
]  # fmt: skip


def _batch(rng: random.Random, damaged: Damaged, one: Placed) -> int:
    """Damage some records of one segment, read all of it, compare, mend. How many were damaged."""
    raw, most = bytearray(one.original), min(limits.corrupt_removals_per_window_max, len(one.keys) * 2 // 3)
    places = rng.sample(range(len(one.keys)), rng.randint(1, most))
    large = int(one.records["stored_bytes"][0]) > limits.read_io_bytes_max
    kinds = [(kind, weight) for kind, weight in KINDS if not (large and kind in (other_record, other_payload))]
    noticed: dict[int, str] = {}
    for place in places:
        kind = rng.choices([one for one, _ in kinds], [weight for _, weight in kinds])[0]
        if kind(rng, raw, one, place, damaged.placed):
            noticed[place] = kind.__name__
    if rng.random() < 0.1:
        raw += rng.randbytes(rng.randrange(1, 10_000))  # trailing garbage harms nobody
    one.path.write_bytes(raw)
    statuses = damaged.read(one, direct=rng.random() < 0.5)
    for place, status in enumerate(statuses.tolist()):
        what = f"{noticed.get(place, 'harmless')} at block {place} of {one.path.name}"
        assert status != WRONG, f"{what}: wrong bytes were delivered"
        assert (status in (CORRUPT, MISSING)) == (place in noticed), f"{what}: {BlockStatus(status).name}"
    assert damaged.store._core.index.lookup(one.keys)[0].sum() == len(one.keys) - len(noticed)
    damaged.mend(one)
    return len(places)


def test_every_damage_is_noticed(damaged: Damaged) -> None:
    print(f"PERDURE_CORRUPTION_SEED={SEED}")
    rng, done = random.Random(SEED), 0
    while done < DAMAGES:
        large = rng.random() < 0.02
        done += _batch(rng, damaged, damaged.placed[-1] if large else rng.choice(damaged.placed[:-1]))
    for one in damaged.placed:
        assert (damaged.read(one) == FOUND).all()
    assert blocks.wrong_books(damaged.store, settled=False) == []


def test_files_cut_short(damaged: Damaged) -> None:
    """Truncated at any byte: what lies before is delivered, the rest is missing, and the store goes on."""
    rng = random.Random(SEED)
    for _ in range(150):
        one = rng.choice(damaged.placed)
        length = rng.randrange(len(one.original))
        os.truncate(one.path, length)
        statuses = damaged.read(one)
        whole = np.array([one.spans(place)[2] <= length for place in range(len(one.keys))])
        assert (statuses == np.where(whole, FOUND, MISSING)).all(), (length, statuses)
        damaged.mend(one)


def test_files_of_equal_length_swapped(damaged: Damaged) -> None:
    first, second = damaged.placed[0], damaged.placed[1]
    assert len(first.original) == len(second.original)
    first.path.write_bytes(second.original)
    second.path.write_bytes(first.original)
    for one in (first, second):
        assert (damaged.read(one) == CORRUPT).all()
        damaged.clock.advance(limits.corrupt_window_s + 1)
    for one in (first, second):
        damaged.mend(one)
        assert (damaged.read(one) == FOUND).all()


# --- what is done about it ----------------------------------------------------------------------------------------


def _break(one: Placed, *places: int) -> None:
    """One flipped bit in the payload of each."""
    raw = bytearray(one.path.read_bytes())
    for place in places:
        raw[one.spans(place)[0] + PAGE + 1234] ^= 4
    one.path.write_bytes(raw)


def test_quarantine(damaged: Damaged) -> None:
    """Corrupt, counted, audited, removed, and stored again at once; the usable prefix ends before it."""
    store, one = damaged.store, damaged.placed[0]
    _break(one, 7)
    key = one.keys[7].tobytes()
    assert one.space.lookup(one.keys) == 60  # nothing is known yet
    assert store.explain(key)["verdict"] == "corrupt: payload checksum does not match"
    before = store.status()
    memory = perdure.aligned_buffer(60 * blocks.BLOCK_BYTES)
    report = one.space.read(one.keys, into=memory)
    assert report.usable == 7
    assert report.count(FOUND) == 59
    assert report.problems == {7: "payload checksum does not match"}
    status = store.status()
    assert status["blocks"] == before["blocks"] - 1
    assert status["counters"]["quarantined"] == status["counters"]["blocks_corrupt"] == 1
    assert status["healthy"]
    incident = status["incidents"][-1]
    assert (incident["key"], incident["kind"], incident["offset"]) == (key.hex(), "corrupt", one.spans(7)[0])
    assert incident["segment"] == one.path.stem
    explained = store.explain(key)
    assert not explained["present"]
    assert "last incident: corrupt (payload checksum does not match)" in explained["verdict"]
    assert one.space.lookup(one.keys) == 7
    assert damaged.read(one)[7] == MISSING  # not corrupt again: the record is gone
    assert blocks.write(one.space, one.keys).statuses.tolist() == [WriteStatus.EXISTS] * 7 + [
        WriteStatus.STORED
    ] + [WriteStatus.EXISTS] * 52  # fmt: skip
    assert one.space.lookup(one.keys) == 60
    assert (damaged.read(one) == FOUND).all()


def test_verify_names_what_is_bad(damaged: Damaged) -> None:
    _break(damaged.placed[0], 3, 11)
    report = damaged.store.verify()
    assert not report["ok"]
    assert {one["key"] for one in report["bad"]} == {damaged.placed[0].keys[place].tobytes().hex() for place in (3, 11)}
    assert {one["status"] for one in report["bad"]} == {"corrupt"}
    assert damaged.store.status()["blocks"] == sum(len(one.keys) for one in damaged.placed)  # verify only looks


@pytest.mark.parametrize("options", [{}, {"direct": True}, {"deadline_s": 60.0}], ids=["plain", "direct", "deadline"])
def test_a_bad_block_does_not_hurt_its_neighbours(damaged: Damaged, options: dict[str, Any]) -> None:
    """All 60 are one merged read."""
    one = damaged.placed[1]
    _break(one, 0, 30, 31, 59)
    statuses = damaged.read(one, **options)
    assert np.flatnonzero(statuses != FOUND).tolist() == [0, 30, 31, 59]
    assert (statuses[[0, 30, 31, 59]] == CORRUPT).all()


def test_nothing_corrupt_enters_memory(tmp_path: Path) -> None:
    """A block that fails to verify is not in the DRAM tier, and one that is there is not asked of the disk again."""
    made = Damaged.__new__(Damaged)
    made.clock, made.placed = FakeClock(), []
    with perdure.open(tmp_path / "store", memory="64MiB", seams=Seams(clock=made.clock)) as made.store:
        assert made.store.wait_ready(sweep.BOUND_S)
        made.add(blocks.keyspace(made.store), 1, 10)
        one = made.placed[0]
        made.store._core.pool.drop(one.keys)
        _break(one, 4)
        statuses = made.read(one)
        assert np.flatnonzero(statuses == CORRUPT).tolist() == [4]
        assert [slot is None for slot in _peek(made.store, one.keys)] == [place == 4 for place in range(10)]
        made.mend(one)
        assert (made.read(one) == FOUND).all()
        _break(one, *range(10))
        assert (made.read(one) == FOUND).all()


def _peek(store: Store, keys: KeyArray) -> list[Any]:
    slots = store._core.pool.get(keys)
    store._core.pool.release(slots)
    return slots


def test_sick_host_by_segments(damaged: Damaged) -> None:
    """Failures in several segments at once: the disk is bad, not the data. Nothing is removed any more."""
    for one in damaged.placed[:5]:
        _break(one, 2)
    removed = limits.corrupt_segments_per_window_max - 1
    for number, one in enumerate(damaged.placed[:5]):
        assert damaged.read(one)[2] == CORRUPT
        assert bool(damaged.store._core.index.lookup(one.keys[2:3])[0][0]) == (number >= removed)
    status = damaged.store.status()
    assert not status["healthy"]
    assert status["counters"]["quarantined"] == removed
    assert status["counters"]["quarantine_withheld"] == 5 - removed
    for one in damaged.placed[removed:5]:  # the trouble was the host's: with it gone the blocks are there
        one.path.write_bytes(one.original)
        assert damaged.read(one)[2] == FOUND
    damaged.clock.advance(limits.corrupt_window_s + 1)
    assert damaged.store.status()["healthy"]


def test_sick_host_by_number(damaged: Damaged) -> None:
    one = damaged.placed[0]
    _break(one, *range(60))
    assert (damaged.read(one) == CORRUPT).all()
    assert not damaged.store.status()["healthy"]
    assert damaged.store._core.index.lookup(one.keys)[0].sum() == 60 - limits.corrupt_removals_per_window_max


class _Flipping(FilesAround):
    """One bit of one read is wrong: a cable, a bus, memory; not the disk."""

    def __init__(self, inner: PosixFiles):
        super().__init__(inner)
        self.armed = False

    def wrap(self, file: File) -> File:
        return _FlippingFile(self, file)


class _FlippingFile(FileAround):
    def __init__(self, files: _Flipping, inner: File):
        super().__init__(inner)
        self._files = files

    def preadv(self, buffers: Sequence[Buffer], offset: int) -> int:
        moved = super().preadv(buffers, offset)
        if self._files.armed:
            self._files.armed = False
            buffers[-1][100] ^= 1
        return moved


def test_transient_corruption_is_read_again(tmp_path: Path) -> None:
    made: list[_Flipping] = []

    def files(root: str) -> _Flipping:
        made.append(_Flipping(PosixFiles(root)))
        return made[-1]

    with perdure.open(tmp_path / "store", memory=0, seams=Seams(files=files)) as store:
        space = blocks.keyspace(store)
        keys = blocks.chain(space, 1, 8)
        assert blocks.write(space, keys).durable
        for options in ({}, {"direct": True}, {"deadline_s": 60.0}):
            made[0].armed = True
            assert (blocks.read_back(space, keys, **options) == FOUND).all()
            assert not made[0].armed
        status = store.status()
        assert status["incidents"] == []
        assert "quarantined" not in status["counters"]


def test_torn_read_is_read_again(tmp_path: Path) -> None:
    """Half of the bytes arrive, and all are reported."""
    for n in range(1, 3):
        plan = NthFault(n, "torn", ops=["preadv"])
        seams = Seams(files=lambda root, plan=plan: FaultyFiles(PosixFiles(root), plan))
        with perdure.open(tmp_path / str(n), memory=0, seams=seams) as store:
            space = blocks.keyspace(store)
            keys = blocks.chain(space, 1, 8)
            assert blocks.write(space, keys).durable
            for _ in range(3):
                assert (blocks.read_back(space, keys) == FOUND).all()
            assert plan.fired == 1
            assert store.status()["incidents"] == []


# --- indexes ------------------------------------------------------------------------------------------------------


def _filled(path: Path) -> tuple[dict[str, Any], dict[int, str]]:
    """A closed store with several segments; what it said of itself, and its chains with their durability."""
    chains = {}
    with perdure.open(path, capacity="16MiB", memory=0) as store:
        assert store.wait_ready(sweep.BOUND_S)
        space = blocks.keyspace(store, block_bytes=60_000)
        for chain, durability in enumerate(["session", "ephemeral", "retained", "session", "session"], 1):
            assert blocks.write(space, blocks.chain(space, chain, 20), durability).durable
            chains[chain] = durability
        store.sync()
        report = blocks.write(space, blocks.chain(space, 2, 10), "session")  # better copies of some
        assert report.stored == 10
        return store.status(), chains


def _assert_rebuilt(path: Path, before: dict[str, Any], chains: dict[int, str]) -> None:
    with perdure.open(path, memory=0) as store:
        assert store.wait_ready(sweep.BOUND_S), store.status()["background"]
        status = store.status()
        assert not status["index_rebuilding"]
        assert status["tenants"] == before["tenants"], "usage is not what it was"
        assert blocks.wrong_books(store) == []
        space = blocks.keyspace(store, block_bytes=60_000)
        for chain in chains:
            assert space.lookup(blocks.chain(space, chain, 20)) == 20
            assert (blocks.read_back(space, blocks.chain(space, chain, 20)) == FOUND).all()
        for chain, durability in chains.items():  # what was promised is still promised
            report = blocks.write(space, blocks.chain(space, chain, 20), durability)
            assert (report.statuses == WriteStatus.EXISTS).all()
        assert (blocks.write(space, blocks.chain(space, 2, 10), "session").statuses == WriteStatus.EXISTS).all()


def test_deleted_index_comes_back(tmp_path: Path) -> None:
    before, chains = _filled(tmp_path / "store")
    shutil.rmtree(tmp_path / "store" / "index")
    _assert_rebuilt(tmp_path / "store", before, chains)


def test_deleted_index_of_a_dead_process_comes_back(tmp_path: Path) -> None:
    """Its open segments have no index objects: their records are found by their headers."""
    sweep.make_store(tmp_path, died=True)
    shutil.rmtree(tmp_path / "died" / "index")
    with perdure.open(tmp_path / "died", memory=0) as store:
        assert store.wait_ready(sweep.BOUND_S)
        assert blocks.wrong_books(store) == []
        sweep.assert_all_there(sweep.space_of(store), {chain: count for chain, count, _ in sweep.CHAINS})


def _damage_flip(raw: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]


INDEX_DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": _damage_flip,
    "cut": lambda raw, rng: raw[: rng.randrange(len(raw))],
    "empty": lambda raw, rng: b"",
    "zeros": lambda raw, rng: bytes(len(raw)),
    "garbage": lambda raw, rng: rng.randbytes(len(raw)),
    "longer": lambda raw, rng: raw + b"\0",
}


@pytest.mark.parametrize("damage", [*INDEX_DAMAGES, "swapped", "gone"])
def test_rebuild_without_segment_indexes(tmp_path: Path, damage: str) -> None:
    """Damaged index objects are not believed: the headers and payloads speak for themselves."""
    rng = random.Random(SEED)
    before, chains = _filled(tmp_path / "store")
    paths = sorted((tmp_path / "store").glob("segments/*/*.idx"))
    contents = [path.read_bytes() for path in paths]
    assert len(paths) > 3
    for number, path in enumerate(paths):
        if damage == "gone":
            path.unlink()
        elif damage == "swapped":
            path.write_bytes(contents[number - 1])
        else:
            path.write_bytes(INDEX_DAMAGES[damage](contents[number], rng))
    shutil.rmtree(tmp_path / "store" / "index")
    with perdure.open(tmp_path / "store", memory=0) as store:
        assert store.wait_ready(sweep.BOUND_S)
        assert store.status()["tenants"] == before["tenants"]
        space = blocks.keyspace(store, block_bytes=60_000)
        for chain in chains:
            assert (blocks.read_back(space, blocks.chain(space, chain, 20)) == FOUND).all()
        for chain in range(30, 50):  # segments without an index object can be evicted like others
            assert blocks.write(space, blocks.chain(space, chain, 20)).durable
        assert store.status()["reclaim"]["segments_dropped"] > 0
        assert store.status()["used_bytes"] <= 16 << 20


@pytest.mark.parametrize("damage", ["zeros", "garbage", "cut", "not-a-file"])
def test_damaged_index_is_rebuilt_by_command(tmp_path: Path, damage: str) -> None:
    """The error says how; afterwards all is as before."""
    path, rng = tmp_path / "store", random.Random(SEED)
    before, chains = _filled(path)
    data = path / "index" / "data.mdb"
    raw = data.read_bytes()
    if damage == "cut":
        data.write_bytes(raw[: len(raw) // 8])
    elif damage == "not-a-file":
        data.unlink()
        data.mkdir()
    else:
        data.write_bytes(INDEX_DAMAGES[damage](raw[: 2 * PAGE], rng) + raw[2 * PAGE :])
    for options in ({}, {"read_only": True}):
        with pytest.raises((CatalogError, FormatError), match="index") as raised:
            perdure.open(path, memory=0, **options)
        assert damage == "not-a-file" or "perdure rebuild" in str(raised.value)
    seen: list[tuple[int, int]] = []
    status = perdure.rebuild(path, lambda done, total: seen.append((done, total)))
    assert status["tenants"] == before["tenants"]
    _assert_rebuilt(path, before, chains)


def test_a_record_whose_segment_is_gone(damaged: Damaged) -> None:
    """It is a miss, it does not count as existing, and it is gone after the first read."""
    core, one = damaged.store._core, damaged.placed[0]
    for read_first in (False, True):
        records = one.records.copy()
        records["segment"] = np.void(os.urandom(16))
        core.index.remove(one.keys)
        core.index.publish(one.keys, records, now_s=0, is_draining=lambda segment: False)
        if read_first:
            assert (damaged.read(one) == MISSING).all()
            assert not core.index.lookup(one.keys)[0].any()
        assert (blocks.write(one.space, one.keys).statuses == WriteStatus.STORED).all()
        assert (damaged.read(one) == FOUND).all()
    assert damaged.store.status()["healthy"]


@pytest.mark.parametrize("name", RECORD.names or ())
def test_damaged_records_in_the_index(damaged: Damaged, name: str) -> None:
    """Every field of a record with other bytes, some of them absurd: never wrong bytes, never an exception, and
    nothing is allocated on a record's word."""
    rng, one, core = random.Random(SEED), damaged.placed[0], damaged.store._core
    for number in range(12):
        records = one.records.copy()
        raw = rng.randbytes(16) if number else b"\xff" * 16
        records[name] = np.frombuffer(raw, np.uint8)[: records[name].dtype.itemsize].view(records[name].dtype)[0]
        core.index.remove(one.keys)
        core.index.publish(one.keys, records, now_s=0, is_draining=lambda segment: False)
        statuses = damaged.read(one)
        assert WRONG not in statuses
        harmless = name in ("created_s", "expires_s", "tenant_epoch") or (records == one.records).all()
        if not harmless:
            assert FOUND not in statuses
        damaged.clock.advance(limits.corrupt_window_s + 1)
        core.index.remove(one.keys)
        damaged.mend(one)
    assert (damaged.read(one) == FOUND).all()


@pytest.mark.parametrize("damage", ["zeros", "garbage"])
def test_damaged_control_store_is_refused(tmp_path: Path, damage: str) -> None:
    """The truth is not guessed: the error says so, and nothing is deleted."""
    path, rng = tmp_path / "store", random.Random(SEED)
    _, chains = _filled(path)
    data = path / "control" / "data.mdb"
    raw = data.read_bytes()
    data.write_bytes(INDEX_DAMAGES[damage](raw[: 2 * PAGE], rng) + raw[2 * PAGE :])
    files = sorted(path.glob("segments/*/*"))
    for work in (lambda: perdure.open(path, memory=0), lambda: perdure.rebuild(path)):
        with pytest.raises((CatalogError, FormatError), match="backup"):
            work()
    assert sorted(path.glob("segments/*/*")) == files
    data.write_bytes(raw)
    with perdure.open(path, memory=0) as store:
        assert store.wait_ready(sweep.BOUND_S)
        space = blocks.keyspace(store, block_bytes=60_000)
        for chain in chains:
            assert (blocks.read_back(space, blocks.chain(space, chain, 20)) == FOUND).all()


# --- forgery ------------------------------------------------------------------------------------------------------


def _forge(header: bytes, **fields: bytes) -> bytes:
    """A header page with some fields changed, as a client could write it: it does not have the MAC's secret."""
    raw = bytearray(header)
    for name, value in fields.items():
        at = {"key": 48, "segment": 96, "offset": 112, "tenant": 80}[name]
        raw[at : at + len(value)] = value
    return bytes(raw)


@pytest.mark.parametrize("lost_index", [False, True], ids=["recovery", "rebuild"])
def test_headers_in_payloads_are_not_records(tmp_path: Path, lost_index: bool) -> None:
    """Payloads are chosen by clients. One that holds, at page boundaries, copies of another block's header (as it is,
    moved to where it lies now, under another key) adds nothing to what recovery and rebuild find."""
    path, died = tmp_path / "store", tmp_path / "died"
    with perdure.open(path, capacity="64MiB", memory=0) as store:
        assert store.wait_ready(sweep.BOUND_S)
        space = blocks.keyspace(store, block_bytes=16 * PAGE)
        honest, victim, evil = (blocks.chain(space, chain, 1) for chain in (1, 2, 3))
        stranger = blocks.chain(space, 4, 1)  # a key that was never stored
        for keys in (honest, victim):
            assert blocks.write(space, keys).durable
        record = store._core.index.lookup(victim)[1][0]
        name, offset = record["segment"].tobytes(), int(record["offset"])
        file = path / "segments" / name.hex()[-2:] / f"{name.hex()}.seg"
        header = file.read_bytes()[offset : offset + PAGE]
        here = offset + 17 * PAGE  # where the next record's header will lie, in the same open segment
        pages = [
            header,  # as it is: another offset than its own
            _forge(header, offset=(here + 2 * PAGE).to_bytes(8, "little")),  # the right place, so the MAC is wrong
            _forge(header, offset=(here + 3 * PAGE).to_bytes(8, "little"), key=stranger.tobytes()),
            _forge(header, key=stranger.tobytes()),
            *[header] * 12,
        ]
        payload = np.frombuffer(b"".join(pages), np.uint8)
        assert space.write(evil, payload).durable
        assert int(store._core.index.lookup(evil)[1][0]["offset"]) == here
        store._core.index.remove(victim)  # evicted, say
        shutil.copytree(path, died)  # killed: the segment is open
    if lost_index:
        shutil.rmtree(died / "index")
    with perdure.open(died, memory=0) as store:
        assert store.wait_ready(sweep.BOUND_S)
        space = blocks.keyspace(store, block_bytes=16 * PAGE)
        assert (blocks.read_back(space, honest) == FOUND).all()
        memory = perdure.aligned_buffer(16 * PAGE)
        assert space.read(evil, into=memory).usable == 1
        assert memory.tobytes() == payload.tobytes()
        assert space.lookup(stranger) == 0
        # Rebuilt from data, a removed record of an open segment is valid again: it is the victim's own, at its place.
        expected = 3 if lost_index else 2
        assert store.status()["blocks"] == expected
        assert blocks.read_back(space, victim).tolist() == [FOUND if lost_index else MISSING]
        entries, _ = store._core.recovery.scan(name)
        offsets = entries["record"]["offset"].tolist()
        assert offsets == [0, offset, here]
        listed = store._core.segments.read_index(name).entries
        assert listed["record"]["offset"].tolist() == ([0, offset, here] if lost_index else [0, here])
        assert blocks.wrong_books(store) == []
