"""A small store whose cold tier is a directory (`file://`) behind a plan of faults, on a clock of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import perdure
from perdure import Keyspace, Seams, Store
from perdure.catalog.api import KeyArray
from perdure.clock import FakeClock
from perdure.io.objects import FaultyObjects, Objects, ObstoreObjects
from perdure.io.siblings import FaultPlan, NthFault
from perdure.testing.store import STORED, chain, keyspace, write
from support.blocks import wrong_books

MIB = 1 << 20
BLOCK = 60_000  # 16 records fill a segment of 1 MiB
PER_SEGMENT = 16
Opening = Callable[..., Store]


class Bucket:
    """A directory as an object store, with a plan of faults that tests may change."""

    def __init__(self, folder: Path):
        self.url, self.folder = f"file://{folder}", folder
        self.deleted: Callable[[], None] = lambda: None  # called when an object has gone
        self.plan: FaultPlan = NthFault(0, "eio")

    def __call__(self, url: str) -> Objects:
        assert url == self.url
        bucket = self

        class Told(FaultyObjects):
            def delete(self, name: str) -> None:
                super().delete(name)
                bucket.deleted()

        return Told(ObstoreObjects(url), self)

    def next(self, op: str, path: str, nbytes: int) -> Any:
        return self.plan.next(op, path, nbytes)

    def wait(self) -> None:
        self.plan.wait()

    def objects(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*.seg"))

    def asked(self, *ops: str) -> NthFault:
        """From now on only counts."""
        self.plan = plan = NthFault(0, "eio", ops=ops)
        return plan


@contextlib.contextmanager
def opening(tmp_path: Path, clock: FakeClock, bucket: Bucket) -> Iterator[Opening]:
    """Opens the store of this test (8 MiB: seven segments and one kept back); at the end its books must be right."""
    stores: list[Store] = []

    def opened(**options: Any) -> Store:
        seams = {name: options.pop(name) for name in ("files", "index", "control") if name in options}
        chosen = {
            "capacity": 8 * MIB, "memory": 0, "cold": bucket.url,
            "seams": Seams(clock=clock, objects=bucket, **seams),
        } | options  # fmt: skip
        stores.append(perdure.open(tmp_path / "store", **chosen))
        assert stores[-1].wait_ready(30.0)
        return stores[-1]

    yield opened
    bucket.plan = NthFault(0, "eio")
    for store in stores:
        if store._closed is None:
            store.close()
    with closing(perdure.open(tmp_path / "store", memory=0, seams=Seams(clock=clock, objects=bucket))) as store:
        assert store.wait_ready(30.0)
        store._keeper.chores()
        assert not wrong_books(store)
        assert store.verify()["ok"]


def fill(store: Store, space: Keyspace, clock: FakeClock, numbers: range, **options: Any) -> list[KeyArray]:
    """Chains, one segment each, a minute apart; what the disk has no room for is demoted after each."""
    chains = [chain(space, number, PER_SEGMENT) for number in numbers]
    for keys in chains:
        clock.advance(60)
        assert write(space, keys, **options) == [STORED] * len(keys)
        if store.core.cold is not None:
            store.core.cold.demote()
    return chains


def cold_store(opened: Opening, clock: FakeClock, **options: Any) -> tuple[Store, Keyspace, list[KeyArray]]:
    """A store with twelve chains, the first ones in the cold tier; nothing is promoted by itself."""
    store = opened(**options)
    store.core.reader.used_far = None
    space = keyspace(store, block_bytes=BLOCK)
    chains = fill(store, space, clock, range(12))
    assert store.status()["cold"]["segments"] >= 5
    return store, space, chains


def told(store: Store, name: str) -> Any:
    return store.status()["cold"][name]


def cold_everything(store: Store) -> None:
    """Every segment goes to the cold tier."""
    core = store.core
    for one in core.writer.open_segments():
        core.writer.retire(one)
    for record in core.table.all():
        if not record.cold:
            core.cold.tier.upload(record)
            assert core.cold.tier.settle(record)


def flip(path: Path, offset: int) -> None:
    """One bit, in the first record's payload if the offset is beyond its header's page."""
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def segment_of(store: Store, keys: KeyArray) -> str:
    _, records = store.core.locate(keys[:1])
    return str(records["segment"][0].tobytes().hex())
