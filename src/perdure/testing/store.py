"""What every store must do as its users see it, as a test class to inherit.

    class TestMyStore(StoreConformance):
        def make_store(self, directory, **options):
            return perdure.open(directory, **options)

Contract
- Only the public verbs are called, so a client of a store in another process can inherit the suite.
- The content of a block follows from its key (`block_of`): a wrong byte anywhere is seen, whoever wrote the block.
- Nothing is asserted about durations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from perdure.catalog.api import Durability, KeyArray
from perdure.errors import BufferMismatch, InvalidArgument, StoreClosed
from perdure.io.memory import aligned_buffer
from perdure.keys import KVLayout
from perdure.keyspace import Keyspace
from perdure.reports import WriteStatus
from perdure.segments.landing import BlockStatus
from perdure.store import Store

BLOCK_TOKENS = 16
BLOCK_BYTES = 8192
UNTOUCHED = 0xEE
WEIGHTS = "sha256:" + "ab" * 32

STORED, EXISTS, REJECTED, WRITE_LATE, FAILED = map(int, WriteStatus)
FOUND, MISSING, CORRUPT, DENIED, LATE = map(int, BlockStatus)

Source = Callable[[NDArray[np.uint8]], tuple[Any, Callable[[], bytes]]]
"""Blocks (n, block_bytes) -> memory of some form with these bytes in it, and a way to look at it."""


def layout_of(block_bytes: int = BLOCK_BYTES, **fields: Any) -> KVLayout:
    chosen: dict[str, Any] = {"dtype": "bfloat16", "order": "layer,kv,head,token,dim"} | fields
    return KVLayout(BLOCK_TOKENS, block_bytes, **chosen)


def keyspace(store: Any, *, tenant: str = "acme", block_bytes: int = BLOCK_BYTES, **identity: Any) -> Keyspace:
    chosen: dict[str, Any] = {"model": "model", "weights": WEIGHTS, "layout": layout_of(block_bytes), "codec": "off"}
    made: Keyspace = store.keyspace(tenant=tenant, **(chosen | identity))  # or a client's, which has the same verbs
    return made


def tokens(number: int, blocks: int) -> NDArray[np.uint32]:
    """Token ids of chain `number`; two chains share no block."""
    return np.arange(blocks * BLOCK_TOKENS, dtype=np.uint32) + np.uint32(number << 16)


def chain(space: Keyspace, number: int, blocks: int) -> KeyArray:
    return space.chain(tokens(number, blocks))


def block_of(key: bytes, nbytes: int) -> bytes:
    """The only right content of a block."""
    return hashlib.shake_128(key).digest(nbytes)


def blocks_of(keys: KeyArray, nbytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    """Right contents, (n, nbytes), in page-aligned memory."""
    memory = aligned_buffer(len(keys) * nbytes)
    for place, key in enumerate(keys):
        memory[place * nbytes : (place + 1) * nbytes] = np.frombuffer(block_of(key.tobytes(), nbytes), np.uint8)
    return memory.reshape(len(keys), nbytes)


def write(space: Keyspace, keys: KeyArray, **options: Any) -> list[int]:
    """Write right contents; the statuses."""
    report = space.write(keys, blocks_of(keys, space.layout.block_bytes), **options)
    return [int(status) for status in report.statuses]


def read(space: Keyspace, keys: KeyArray, **options: Any) -> list[int]:
    """Statuses of reading `keys`. Fails if a delivered block has a wrong byte, if the memory of one that was not found
    was touched (without `direct`), or if the report does not add up."""
    size = space.layout.block_bytes
    memory = np.full((len(keys), size), UNTOUCHED, np.uint8)
    report = space.read(keys, into=memory, **options)
    assert report.wait_settled(30.0)
    for place, (key, status) in enumerate(zip(keys, report.statuses, strict=True)):
        if status == FOUND:
            assert memory[place].tobytes() == block_of(key.tobytes(), size), f"block {place} has wrong bytes"
        elif options.get("deadline_s") is not None and not options.get("direct"):  # else reads may be direct
            assert (memory[place] == UNTOUCHED).all(), f"block {place} was not found but its memory was written"
    statuses = [int(status) for status in report.statuses]
    holes = [place for place, status in enumerate(statuses) if status != FOUND]
    assert report.usable == (holes[0] if holes else len(keys))
    assert report.bytes == statuses.count(FOUND) * size
    assert 0 <= report.from_memory <= statuses.count(FOUND)
    return statuses


# --- forms of memory
def _contiguous(data: NDArray[np.uint8]) -> tuple[Any, Callable[[], bytes]]:
    memory = aligned_buffer(data.size)
    memory[:] = data.ravel()
    return memory, memory.tobytes


def _two_dimensional(data: NDArray[np.uint8]) -> tuple[Any, Callable[[], bytes]]:
    memory = data.copy().view("<u2") if data.shape[1] % 2 == 0 else data.copy()
    return memory, memory.tobytes


def _unaligned(data: NDArray[np.uint8]) -> tuple[Any, Callable[[], bytes]]:
    memory = aligned_buffer(data.size + 1)[1:]
    memory[:] = data.ravel()
    return memory, memory.tobytes


def _list(data: NDArray[np.uint8]) -> tuple[Any, Callable[[], bytes]]:
    buffers = [bytearray(block.tobytes()) for block in data]
    return buffers, lambda: b"".join(buffers)


def _odd_parts(data: NDArray[np.uint8]) -> tuple[Any, Callable[[], bytes]]:
    cuts = (0, 1, 1, 700, data.shape[1] - 3, data.shape[1])
    blocks = [[bytearray(block[start:end].tobytes()) for start, end in pairwise(cuts)] for block in data]
    return blocks, lambda: b"".join(bytes(part) for parts in blocks for part in parts)


def _page_parts(data: NDArray[np.uint8]) -> tuple[Any, Callable[[], bytes]]:
    """As a paged cache has it: the pages of a block far apart, in an order of their own."""
    count, size = data.shape
    pages = range(0, size, 4096)
    memory = aligned_buffer(len(pages) * count * 4096).reshape(len(pages), count, 4096)
    blocks = [[memory[-1 - page, block][: size - at] for page, at in enumerate(pages)] for block in range(count)]
    for block, parts in enumerate(blocks):
        for at, part in zip(pages, parts, strict=True):
            part[:] = data[block, at : at + 4096]
    return blocks, lambda: b"".join(part.tobytes() for parts in blocks for part in parts)


FORMS: dict[str, Source] = {
    "contiguous": _contiguous,
    "elements": _two_dimensional,
    "unaligned": _unaligned,
    "list": _list,
    "odd parts": _odd_parts,
    "page parts": _page_parts,
}


class StoreConformance:
    """Inherit, and define `make_store`; `options` are those of `perdure.open`."""

    def make_store(self, directory: Path, **options: Any) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with closing(self.make_store(tmp_path / "store", capacity="64MiB", memory="8MiB")) as store:
            yield store

    @pytest.fixture
    def space(self, store: Store) -> Keyspace:
        return keyspace(store)

    # --- bytes
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, 5001, 1 << 20])
    @pytest.mark.parametrize("codec", ["off", "on"])
    def test_round_trip(self, tmp_path: Path, form: str, block_bytes: int, codec: str) -> None:
        """What is written in one form is read in every way: from memory and from the disk, copied and direct."""
        count = 2 if block_bytes > BLOCK_BYTES else 5
        for memory in ("4MiB", 0):
            with closing(self.make_store(tmp_path / f"{memory}", capacity="64MiB", memory=memory)) as store:
                space = keyspace(store, block_bytes=block_bytes, codec=codec)
                keys = chain(space, 1, count)
                data = blocks_of(keys, block_bytes)
                data[0, : block_bytes // 2] = 7  # one block that compresses
                report = space.write(keys, FORMS[form](data)[0])
                assert report.statuses.tolist() == [STORED] * count
                assert (report.stored, report.bytes, report.durable) == (count, count * block_bytes, True)
                for direct in (False, True, False):
                    into, look = FORMS[form](np.zeros_like(data))
                    answer = space.read(keys, into=into, direct=direct, deadline_s=60.0)
                    assert answer.statuses.tolist() == [FOUND] * count
                    assert look() == data.tobytes()

    def test_empty_batch(self, space: Keyspace) -> None:
        keys = space.chain([])
        assert (space.lookup(keys), read(space, keys), write(space, keys)) == (0, [], [])

    def test_keys_may_be_a_list_of_bytes(self, space: Keyspace) -> None:
        keys = chain(space, 1, 3)
        names = [key.tobytes() for key in keys]
        space.write(names, blocks_of(keys))
        assert space.lookup(names) == 3
        assert space.present(names).tolist() == [True] * 3

    @pytest.mark.parametrize("verb", ["read", "write"])
    def test_memory_of_another_size_moves_nothing(self, space: Keyspace, verb: str) -> None:
        keys = chain(space, 1, 2)
        for memory in (
            bytearray(2 * BLOCK_BYTES - 1),
            [bytearray(BLOCK_BYTES)],
            [bytearray(BLOCK_BYTES), bytearray(1)],
        ):
            with pytest.raises(BufferMismatch):
                getattr(space, verb)(keys, memory)
        assert space.lookup(keys) == 0

    # --- statuses
    def test_never_stored_is_missing(self, space: Keyspace) -> None:
        keys = chain(space, 1, 3)
        assert read(space, keys) == [MISSING] * 3
        assert space.lookup(keys) == 0

    def test_usable_prefix_ends_at_the_first_hole(self, space: Keyspace) -> None:
        keys = chain(space, 1, 6)
        write(space, keys[[0, 1, 3, 5]])
        assert read(space, keys) == [FOUND, FOUND, MISSING, FOUND, MISSING, FOUND]
        assert space.lookup(keys) == 2
        assert space.lookup(keys[3:]) == 1
        assert space.present(keys).tolist() == [True, True, False, True, False, True]

    def test_any_order_and_repeated_keys(self, space: Keyspace) -> None:
        keys = chain(space, 1, 4)
        write(space, keys[::-1])
        assert read(space, keys[[2, 0, 2, 3, 1, 1]]) == [FOUND] * 6

    def test_duplicates_in_one_write_are_stored_once(self, store: Store, space: Keyspace) -> None:
        keys = chain(space, 1, 3)
        assert write(space, keys[[0, 1, 0, 2, 1, 0]]) == [STORED, STORED, EXISTS, STORED, EXISTS, EXISTS]
        assert store.status()["blocks"] == 3
        assert read(space, keys) == [FOUND] * 3

    def test_second_write_exists_and_first_content_stays(self, space: Keyspace) -> None:
        keys = chain(space, 1, 2)
        write(space, keys)
        report = space.write(keys, np.zeros(2 * BLOCK_BYTES, np.uint8))
        assert report.statuses.tolist() == [EXISTS] * 2
        assert (report.stored, report.bytes, report.stored_bytes, report.durable) == (0, 0, 0, True)
        assert read(space, keys) == [FOUND] * 2

    def test_unaccepted_durability_and_ttl(self, space: Keyspace) -> None:
        keys = chain(space, 1, 1)
        for options in ({"durability": "forever"}, {"ttl_s": 0}, {"ttl_s": -1.0}, {"deadline_s": -1.0}):
            with pytest.raises(InvalidArgument):
                write(space, keys, **options)
        assert space.lookup(keys) == 0

    # --- "exists" never acknowledges less than asked
    @pytest.mark.parametrize("commit", [True, False])
    @pytest.mark.parametrize("present", list(Durability))
    @pytest.mark.parametrize("asked", list(Durability))
    def test_durability_is_as_asked(
        self, store: Store, space: Keyspace, present: Durability, asked: Durability, commit: bool
    ) -> None:
        """FAULTS 40."""
        keys = chain(space, 1, 3)
        assert write(space, keys, durability=present) == [STORED] * 3
        if commit:
            store.sync()
        assert write(space, keys, durability=asked.name.lower()) == [STORED if asked > present else EXISTS] * 3
        assert write(space, keys, durability=asked) == [EXISTS] * 3
        store.sync()
        assert read(space, keys) == [FOUND] * 3
        assert store.status()["blocks"] == 3
        record = store.explain(keys[0].tobytes())["record"]
        assert record["durability"] == max(asked, present).name.lower()

    def test_longer_life_is_stored_again(self, store: Store, space: Keyspace) -> None:
        keys = chain(space, 1, 2)
        assert write(space, keys, ttl_s=600.0) == [STORED] * 2
        assert write(space, keys, ttl_s=600.0) == [EXISTS] * 2
        assert write(space, keys, ttl_s=60.0) == [EXISTS] * 2
        assert write(space, keys, ttl_s=86_400.0) == [STORED] * 2
        assert write(space, keys) == [STORED] * 2
        assert write(space, keys, ttl_s=600.0) == [EXISTS] * 2
        assert store.explain(keys[0].tobytes())["record"]["expires_s"] == 0

    # --- one tenant's blocks are nobody else's
    def test_tenants_share_no_block(self, store: Store) -> None:
        one, two = keyspace(store, tenant="a"), keyspace(store, tenant="b")
        keys = chain(one, 1, 2)
        write(one, keys)
        assert two.lookup(chain(two, 1, 2)) == 0
        assert read(two, keys) == [DENIED] * 2
        assert read(one, keys) == [FOUND] * 2

    # --- lifetimes
    def test_lease_is_for_one(self, space: Keyspace) -> None:
        keys = chain(space, 1, 2)
        lease = space.reserve(keys)
        assert lease is not None
        assert space.reserve(keys) is None
        assert space.reserve(chain(space, 2, 2)) is not None
        assert write(space, keys, lease=lease) == [STORED] * 2
        assert space.end_lease(lease)
        assert not space.end_lease(lease)
        following = space.reserve(keys)
        assert following is not None
        assert following.token > lease.token

    def test_pin_ends_once(self, store: Store, space: Keyspace) -> None:
        pin = space.pin(chain(space, 1, 2), ttl_s=60.0)
        assert store.status()["pins"] == 1
        assert pin.release()
        assert not pin.release()
        with space.pin(chain(space, 1, 2), ttl_s=60.0):
            assert store.status()["pins"] == 1
        assert store.status()["pins"] == 0

    def test_release_is_only_a_hint(self, space: Keyspace) -> None:
        keys = chain(space, 1, 3)
        write(space, keys)
        space.release(keys)
        space.release(chain(space, 2, 3))
        assert space.lookup(keys) == 3
        assert read(space, keys) == [FOUND] * 3

    # --- in the background, and many at once
    def test_submitted_calls(self, space: Keyspace) -> None:
        keys = chain(space, 1, 4)
        written = space.submit_write(keys, blocks_of(keys), durability="ephemeral", deadline_s=60.0).result(30.0)
        assert written.statuses.tolist() == [STORED] * 4
        memory = np.zeros((4, BLOCK_BYTES), np.uint8)
        assert space.submit_read(keys, memory, deadline_s=60.0).result(30.0).usable == 4
        assert np.array_equal(memory, blocks_of(keys))
        with pytest.raises(BufferMismatch):
            space.submit_read(keys, bytearray(1)).result(30.0)

    def test_threads(self, store: Store) -> None:
        """Eight threads write, read, look up and submit over the same chains of two tenants."""
        spaces = [keyspace(store, tenant=name) for name in ("a", "b")]

        def work(number: int) -> None:
            rng = np.random.default_rng(number)
            for step in range(12):
                space = spaces[int(rng.integers(2))]
                keys = chain(space, int(rng.integers(6)), int(rng.integers(1, 7)))
                durability = Durability(int(rng.integers(3)))
                if step % 3 == 0:
                    future = space.submit_write(keys, blocks_of(keys), durability=durability)
                    assert future.result(60.0).durable
                elif step % 3 == 1:
                    assert set(write(space, keys, durability=durability)) <= {STORED, EXISTS}
                else:
                    assert set(read(space, keys, direct=bool(rng.integers(2)))) <= {FOUND, MISSING}
                assert space.lookup(keys) == len(keys) or step % 3 == 2

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        store.sync()
        for space in spaces:
            for number in range(6):
                keys = chain(space, number, 6)
                assert read(space, keys).count(FOUND) == space.present(keys).sum()
        assert store.verify()["ok"]

    # --- ends
    def test_everything_is_there_after_reopening(self, tmp_path: Path) -> None:
        expected: dict[int, list[int]] = {}
        for round_number in range(3):
            with closing(self.make_store(tmp_path / "store", capacity="64MiB")) as store:
                space = keyspace(store)
                for number, durability in enumerate(Durability):
                    keys = chain(space, number, 2 + round_number)
                    assert read(space, keys[:-1]) == expected.get(number, [MISSING] * (len(keys) - 1))
                    write(space, keys, durability=durability)
                    expected[number] = [FOUND] * len(keys)

    def test_closed(self, store: Store, space: Keyspace) -> None:
        keys = chain(space, 1, 1)
        store.close()
        store.close()
        for call in (lambda: space.lookup(keys), lambda: read(space, keys), lambda: write(space, keys), store.status):
            with pytest.raises(StoreClosed):
                call()
