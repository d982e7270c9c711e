"""What every block index and control store must do, as test classes to inherit.

A catalog of your own is tested like this, in a file that pytest collects:

    import pytest
    pytest.register_assert_rewrite("perdure.testing")   # for readable failures; before the import
    from perdure.testing.catalog import BlockIndexConformance, BlockIndexMachine

    class TestMyIndex(BlockIndexConformance):
        def make(self, directory):               # an empty index; `directory` is a fresh folder it may use
            return MyIndex(directory / "index")

        def reopen(self, index, directory):      # leave out if nothing outlives the object
            index.close()
            return MyIndex(directory / "index")

    class Machine(BlockIndexMachine):            # random sequences of calls, compared with MemoryIndex
        make, reopen = TestMyIndex.make, TestMyIndex.reopen

    TestMachine = Machine.TestCase

`ControlStoreConformance` and `ControlStoreMachine` work the same way. The suites check what `catalog.api` promises,
nothing about speed, and no crash of the machine. `FaultyIndex` and `FaultyControl`, which fail as a plan says, are for
tests of what uses a catalog.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

from perdure import limits
from perdure.catalog.api import RECORD, BlockIndex, Durability, KeyArray, PublishResult, RecordArray, Usage, as_keys
from perdure.catalog.faulty import FailCalls as FailCalls
from perdure.catalog.faulty import FaultyControl as FaultyControl
from perdure.catalog.faulty import FaultyIndex as FaultyIndex
from perdure.errors import InvalidArgument, StaleFence, StoreClosed
from perdure.testing.catalog_control import ControlStoreConformance as ControlStoreConformance
from perdure.testing.catalog_machine import BlockIndexMachine as BlockIndexMachine
from perdure.testing.catalog_machine import ControlStoreMachine as ControlStoreMachine
from perdure.testing.catalog_samples import (
    NOW_S,
    OTHER_SEGMENT,
    OTHER_TENANT,
    PAGE,
    SEGMENT,
    TENANT,
    WORTH,
    assert_holds,
    content,
    make_keys,
    make_records,
    publish,
    usage_of,
)

INSERTED, EXISTS, REPLACED = PublishResult.INSERTED, PublishResult.EXISTS, PublishResult.REPLACED


class BlockIndexConformance:
    """Inherit and override `make`, and `reopen` if the index outlives its object."""

    def make(self, directory: Path) -> BlockIndex:
        raise NotImplementedError

    def reopen(self, index: BlockIndex, directory: Path) -> BlockIndex | None:
        """Close `index` and open what it left behind; None: nothing outlives the object."""
        return None

    looks_first = True
    """Whether a batch is looked at as a whole before anything of it is inserted."""

    def together(self, keys: KeyArray) -> KeyArray:
        """The keys of one batch, made such that the index changes them all at once; most change every batch so."""
        return keys

    @pytest.fixture
    def index(self, tmp_path: Path) -> Iterator[BlockIndex]:
        index = self.make(tmp_path)
        yield index
        index.close()

    # --- reading

    def test_empty(self, index: BlockIndex) -> None:
        nothing = make_keys(0)
        present, records = index.lookup(nothing)
        assert present.shape == records.shape == (0,)
        assert index.prefix(nothing) == index.prefix(make_keys(3)) == index.count() == 0
        assert publish(index, nothing, make_records(0)) == []
        assert index.replace(nothing, make_records(0), make_records(0)).shape == (0,)
        assert index.remove(nothing).shape == (0,)
        assert index.load(iter([])) == index.load(iter([(nothing, make_records(0))])) == 0
        assert index.usage() == {}
        assert content(index) == {}
        index.sync()

    def test_lookup_answers_in_the_order_asked(self, index: BlockIndex) -> None:
        keys, records = make_keys(40), make_records(40)
        publish(index, keys[::2], records[::2])
        order = np.random.default_rng(1).permutation(40)[[*range(40), 3, 4]]
        present, found = index.lookup(keys[order])
        assert (present == (order % 2 == 0)).all()
        assert found[present].tobytes() == records[order[order % 2 == 0]].tobytes()
        assert found[~present].tobytes() == bytes(RECORD.itemsize * int((~present).sum()))
        assert found.dtype == RECORD

    def test_answers_are_the_callers_own(self, index: BlockIndex) -> None:
        keys, records = make_keys(3), make_records(3)
        publish(index, keys, records)
        for answer in (index.lookup(keys)[1], index.scan(b"", 9)[1]):
            answer["offset"] = 1
        index.scan(b"", 9)[0][:] = 0
        assert_holds(index, keys, records)

    def test_keys_differ_in_every_byte(self, index: BlockIndex) -> None:
        """Nothing of a key is cut off, also not trailing or leading zeros."""
        one = bytes(range(1, 33))
        keys = as_keys([one, *(one[:at] + b"\0" + one[at + 1 :] for at in range(32)), bytes(32), b"\xff" * 32])
        records = make_records(len(keys))
        assert publish(index, keys, records) == [INSERTED] * 35
        assert_holds(index, keys, records)

    @pytest.mark.parametrize("hole", [0, 1, 15, 16, 17, 79, 80, 81, 335, 336, 1023, 1024, 1025, 1399])
    def test_prefix_ends_at_the_first_hole(self, index: BlockIndex, hole: int) -> None:
        keys, records = make_keys(1400), make_records(1400)
        publish(index, keys, records)
        assert index.prefix(keys) == 1400
        index.remove(keys[hole : hole + 1])
        assert index.prefix(keys) == hole
        assert index.prefix(keys[: hole + 1]) == hole
        assert index.prefix(keys[hole + 1 :]) == 1400 - hole - 1

    def test_scan_goes_on_where_it_ended(self, index: BlockIndex) -> None:
        keys, records = make_keys(50), make_records(50)
        publish(index, keys, records)
        order = sorted(range(50), key=lambda at: keys[at].tobytes())
        found, values = index.scan(keys[order[20]].tobytes(), 10)
        assert found.tobytes() == keys[order[20:30]].tobytes()
        assert values.tobytes() == records[order[20:30]].tobytes()
        assert len(index.scan(keys[order[-1]].tobytes() + b"\0", 10)[0]) == 0
        assert len(index.scan(b"", 0)[0]) == 0
        assert len(index.scan(b"\xff" * 32, 10)[0]) == 0
        assert len(index.scan(b"", 1000)[0]) == 50

    # --- publish

    @pytest.mark.parametrize(("present", "new", "is_draining", "expected"), WORTH)
    def test_exists_acknowledges_no_less_than_asked(
        self,
        index: BlockIndex,
        present: dict[str, int],
        new: dict[str, int],
        is_draining: bool,
        expected: PublishResult,
    ) -> None:
        keys = make_keys(3)
        first = make_records(3, **present)
        second = make_records(3, segment=OTHER_SEGMENT, **new)
        publish(index, keys[:2], first[:2])
        draining = (SEGMENT,) if is_draining else (OTHER_SEGMENT,)
        assert publish(index, keys[1:], second[1:], draining=draining) == [expected, INSERTED]
        kept = first if expected is EXISTS else second
        assert_holds(index, keys, np.concatenate([first[:1], kept[1:2], second[2:]]))

    def test_publishing_again_changes_nothing(self, index: BlockIndex) -> None:
        """As after an unknown outcome of a commit."""
        keys, records = make_keys(20), make_records(20)
        assert publish(index, keys, records) == [INSERTED] * 20
        assert publish(index, keys, records) == [EXISTS] * 20
        assert_holds(index, keys, records)

    def test_equal_keys_in_a_batch(self, index: BlockIndex) -> None:
        keys = make_keys(3)
        records = make_records(6, durability=[1, 2, 0, 1, 2, 2])
        publish(index, keys[:1], records[:1])
        batch = keys[[0, 1, 0, 1, 2]]
        # The first occurrence decides, also against a better one later.
        assert publish(index, batch, records[[1, 2, 3, 4, 5]]) == [REPLACED, INSERTED, EXISTS, EXISTS, INSERTED]
        assert_holds(index, keys, records[[1, 2, 5]])

    def test_a_refused_batch_changes_nothing(self, index: BlockIndex) -> None:
        keys, records = make_keys(4), make_records(4)
        publish(index, keys[:1], records[:1])

        def refuse(*_: object) -> NoReturn:
            raise StaleFence("as planned")

        stronger = make_records(4, durability=Durability.RETAINED)
        with pytest.raises(StaleFence, match="as planned"):
            publish(index, keys, stronger, admit=refuse)
        some = slice(None) if self.looks_first else slice(1)
        with pytest.raises(StaleFence, match="as planned"):
            index.publish(keys[some], records[some], now_s=NOW_S, is_draining=refuse)
        assert_holds(index, keys[:1], records[:1])
        admitted: list[int] = []
        publish(index, keys, stronger, admit=lambda: admitted.append(1))
        assert admitted
        assert_holds(index, keys, stronger)

    def test_is_draining_is_asked_by_segment_id(self, index: BlockIndex) -> None:
        keys = make_keys(4)
        publish(index, keys, make_records(4, segment=[np.void(SEGMENT)] * 2 + [np.void(OTHER_SEGMENT)] * 2))
        asked: set[bytes] = set()

        def is_draining(segment: bytes) -> bool:
            asked.add(segment)
            return segment == SEGMENT

        results = index.publish(keys, make_records(4), now_s=NOW_S, is_draining=is_draining)
        assert asked == {SEGMENT, OTHER_SEGMENT}
        assert results.tolist() == [REPLACED, REPLACED, EXISTS, EXISTS]

    @pytest.mark.parametrize(
        ("keys", "records"),
        [
            (make_keys(2), make_records(3)),
            (make_keys(2)[:, :31], make_records(2)),
            (make_keys(2).astype(np.int64), make_records(2)),
            (make_keys(2).ravel(), make_records(2)),
            (make_keys(2), np.zeros(2, np.uint64)),
            (make_keys(2), make_records(2).reshape(2, 1)),
            ([bytes(32)], make_records(1)),
        ],
    )
    def test_bad_batches_are_refused(self, index: BlockIndex, keys: KeyArray, records: RecordArray) -> None:
        with pytest.raises(InvalidArgument):
            publish(index, keys, records)
        with pytest.raises(InvalidArgument):
            index.replace(keys, records, records)
        with pytest.raises(InvalidArgument):
            index.remove(keys, records)
        with pytest.raises(InvalidArgument):
            index.load(iter([(keys, records)]))
        assert index.count() == 0

    def test_batches_need_not_be_contiguous(self, index: BlockIndex) -> None:
        keys, records = make_keys(60), make_records(60)
        publish(index, keys[::-3], records[::-3])
        assert_holds(index, keys[::-3], records[::-3])
        assert index.prefix(keys[::-3]) == 20

    def test_a_large_batch(self, index: BlockIndex) -> None:
        count = limits.publish_batch_blocks_max
        keys, records = make_keys(count), make_records(count)
        assert set(publish(index, keys, records)) == {INSERTED}
        assert index.prefix(keys) == index.count() == count
        assert index.usage() == usage_of(records)

    # --- replace, remove, load

    def test_replace_swaps_only_what_is_unchanged(self, index: BlockIndex) -> None:
        keys, records = make_keys(4), make_records(4)
        publish(index, keys[:3], records[:3])
        moved = make_records(4, segment=OTHER_SEGMENT, tenant=OTHER_TENANT, stored_bytes=9999)
        old = records.copy()
        old["offset"][1] += PAGE
        assert index.replace(keys, old, moved).tolist() == [True, False, True, False]
        assert_holds(index, keys[:3], np.concatenate([moved[:1], records[1:2], moved[2:3]]))

    def test_replace_of_equal_keys_goes_in_order(self, index: BlockIndex) -> None:
        keys, records = make_keys(1), make_records(4, stored_bytes=[1, 5000, 9000, 1])
        publish(index, keys, records[:1])
        swapped = index.replace(keys[[0, 0, 0]], records[[0, 1, 0]], records[[1, 2, 3]])
        assert swapped.tolist() == [True, True, False]
        assert_holds(index, keys, records[2:3])

    def test_remove(self, index: BlockIndex) -> None:
        keys, records = make_keys(5), make_records(5)
        publish(index, keys[:4], records[:4])
        old = records.copy()
        old["created_s"][1] += 1
        assert index.remove(keys[[0, 1, 4]], old[[0, 1, 4]]).tolist() == [True, False, False]
        assert_holds(index, keys[1:4], records[1:4])
        assert index.remove(keys[[1, 0, 1]]).tolist() == [True, False, False]
        assert_holds(index, keys[2:4], records[2:4])
        assert index.remove(keys).tolist() == [False, False, True, True, False]
        assert index.usage() == {}
        assert publish(index, keys, records) == [INSERTED] * 5

    def test_load_inserts_what_is_absent(self, index: BlockIndex) -> None:
        keys, records = make_keys(300), make_records(300)
        newer = make_records(300, segment=OTHER_SEGMENT, stored_bytes=1)
        publish(index, keys[:20], records[:20])
        batches = [(keys[:100], newer[:100]), (keys[100:250], records[100:250]), (keys[200:], newer[200:])]
        assert index.load(iter(batches)) == 280
        assert_holds(index, keys, np.concatenate([records[:20], newer[20:100], records[100:250], newer[250:]]))
        assert index.load(iter(batches)) == 0

    def test_load_takes_equal_keys_in_a_batch(self, index: BlockIndex) -> None:
        keys, records = make_keys(2), make_records(4)
        assert index.load(iter([(keys[[1, 0, 1, 0]], records)])) == 2
        assert_holds(index, keys[[1, 0]], records[:2])

    def test_load_behind_and_between(self, index: BlockIndex) -> None:
        keys, records = make_keys(90), make_records(90)
        order = np.array(sorted(range(90), key=lambda at: keys[at].tobytes()))
        keys = keys[order]
        for part in (slice(0, 60, 2), slice(60, 90), slice(1, 60, 2)):
            assert index.load(iter([(keys[part], records[part])])) == 30
        assert_holds(index, keys, records)

    # --- accounting

    def test_usage_counts_pages_of_each_tenant(self, index: BlockIndex) -> None:
        stored = np.array([0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2**32 - 1])
        tenants = [np.void(TENANT if at % 2 else OTHER_TENANT) for at in range(7)]
        keys, records = make_keys(7), make_records(7, stored_bytes=stored, tenant=tenants, block_bytes=2**32 - 1)
        publish(index, keys, records)
        assert index.usage() == {
            OTHER_TENANT: Usage(4, 4 * (2**32 - 1), (1 + 2 + 3 + 1 + 2**20) * PAGE),
            TENANT: Usage(3, 3 * (2**32 - 1), (2 + 2 + 3) * PAGE),
        }
        index.remove(keys[1::2])
        assert list(index.usage()) == [OTHER_TENANT]

    def test_usage_follows_replacement(self, index: BlockIndex) -> None:
        keys, records = make_keys(4), make_records(4, durability=0)
        publish(index, keys, records)
        stronger = make_records(4, durability=1, tenant=OTHER_TENANT, stored_bytes=[1, 5000, 9000, 13000])
        assert publish(index, keys[:3], stronger[:3]) == [REPLACED] * 3
        assert_holds(index, keys, np.concatenate([stronger[:3], records[3:]]))

    # --- recency

    def test_recency_keeps_the_latest_use(self, index: BlockIndex) -> None:
        prints = np.array([2**64 - 1, 1, 256, 2**63, 2**48, 2**48 + 1, 0], np.uint64)
        self.touch(index, prints, [5, 6, 7, 8, 9, 10, 11])
        self.touch(index, prints[:2], [4, 7])
        self.touch(index, prints[[2, 2, 2]], [1, 30, 20])
        self.touch(index, prints[:0], [])
        found, minutes = index.recency()
        assert found.dtype == np.uint64
        assert minutes.dtype == np.uint32
        assert found.tolist() == sorted(prints.tolist())
        expected = {2**64 - 1: 5, 1: 7, 256: 30, 2**63: 8, 2**48: 9, 2**48 + 1: 10, 0: 11}
        assert dict(zip(found.tolist(), minutes.tolist(), strict=True)) == expected

    def test_recency_can_be_forgotten(self, index: BlockIndex) -> None:
        prints = np.array([3, 2**48, 2**48 + 1, 2**60], np.uint64)
        self.touch(index, prints, [1, 2, 3, 4])
        index.forget_recency(np.array([2**48, 2**60, 77, 77], np.uint64))
        assert index.recency()[0].tolist() == [3, 2**48 + 1]
        self.touch(index, prints[1:2], [1])  # what was forgotten may start again, lower
        assert index.recency()[1].tolist() == [1, 1, 3]
        index.forget_recency(prints)
        assert len(index.recency()[0]) == len(index.recency()[1]) == 0

    @staticmethod
    def touch(index: BlockIndex, fingerprints: NDArray[np.uint64], minutes: list[int]) -> None:
        index.touch(fingerprints, np.array(minutes, np.uint32))

    # --- threads and life

    def test_one_thread_inserts_each_key(self, index: BlockIndex) -> None:
        keys = make_keys(64)

        def work(number: int) -> NDArray[np.bool_]:
            mine = make_records(64, offset=number)
            won = np.zeros(64, np.bool_)
            for at in np.random.default_rng(number).permutation(64).reshape(16, 4):
                won[at] = [result is INSERTED for result in publish(index, keys[at], mine[at])]
            return won

        with ThreadPoolExecutor(4) as pool:
            winners = np.array(list(pool.map(work, range(4))))
        assert (winners.sum(axis=0) == 1).all()
        assert_holds(index, keys, make_records(64, offset=winners.argmax(axis=0)))

    def test_readers_see_whole_batches(self, index: BlockIndex) -> None:
        batches = np.stack([self.together(make_keys(16, seed=number)) for number in range(20)])
        done = threading.Event()
        first_seen = threading.Barrier(3)  # the writer waits until both readers are at work

        def read() -> int:
            torn, waited = 0, False
            while not done.is_set():
                present, _ = index.lookup(batches.reshape(-1, limits.key_bytes))
                torn += int((~np.isin(present.reshape(20, 16).sum(axis=1), (0, 16))).sum())
                if not waited:
                    first_seen.wait(60)
                    waited = True
            return torn

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            first_seen.wait(60)
            for batch in batches:
                publish(index, batch, make_records(16))
            done.set()
            assert [reader.result() for reader in readers] == [0, 0]

    def test_closed(self, tmp_path: Path) -> None:
        index = self.make(tmp_path)
        index.close()
        index.close()
        for call in (
            lambda: index.lookup(make_keys(1)),
            lambda: publish(index, make_keys(1), make_records(1)),
            lambda: index.remove(make_keys(1)),
            index.usage,
            index.sync,
        ):
            with pytest.raises(StoreClosed):
                call()

    def test_everything_outlives_the_object(self, tmp_path: Path) -> None:
        index = self.make(tmp_path)
        keys, records = make_keys(100), make_records(100)
        try:
            publish(index, keys, records)
            index.remove(keys[90:])
            self.touch(index, np.array([9, 2**60], np.uint64), [3, 4])
            reopened = self.reopen(index, tmp_path)
            if reopened is None:
                pytest.skip("nothing outlives this index")
            index = reopened
            assert_holds(index, keys[:90], records[:90])
            assert [part.tolist() for part in index.recency()] == [[9, 2**60], [3, 4]]
            assert publish(index, keys, records) == [EXISTS] * 90 + [INSERTED] * 10
        finally:
            index.close()
