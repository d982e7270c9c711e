from __future__ import annotations
import contextlib
from pathlib import Path
import pytest, perdure
from support.cold import *
from support.cold import cold_everything, segment_of
from support import blocks as data
from perdure.clock import FakeClock
from perdure.io.siblings import FaultWhile
from perdure.testing.store import FOUND, MISSING, chain, keyspace, read, write
from test_roots import Place, place, stored  # noqa
from test_erasure import on_disk, fill as efill, opened as eopened, erased

@pytest.fixture
def bucket(tmp_path): return Bucket(tmp_path / "bucket")
@pytest.fixture
def clock(): return FakeClock()
@pytest.fixture
def opened(tmp_path, clock, bucket):
    with opening(tmp_path, clock, bucket) as made: yield made

def test_a_stale_record(opened, clock, bucket):
    """demotion settles between the erasure's list of segments and its rewriting"""
    store = opened(); space = keyspace(store, block_bytes=BLOCK)
    (keys,) = fill(store, space, clock, range(1))
    core = store.core
    for one in core.writer.open_segments(): core.writer.retire(one)
    seg = bytes.fromhex(segment_of(store, keys))
    real = core.erasures._rewrite
    def late(record, names):
        if record.segment == seg and not core.table.get(seg).cold:
            core.cold.tier.upload(record)
            with core.reclaimer.turn(): assert core.cold.tier.settle(record)
        return real(record, names)
    core.erasures._rewrite = late
    store.erase(tenant="acme", blocks=[keys[4].tobytes()], wait_s=20.0)
    assert read(space, keys) == [FOUND]*4 + [MISSING] + [FOUND]*11

def test_orphan_object(opened, clock, bucket):
    """dropped from the tier, object not deleted yet; then erased"""
    store = opened(); space = keyspace(store, block_bytes=BLOCK)
    fill(store, space, clock, range(1)); cold_everything(store)
    bucket.plan = down = FaultWhile("eio", ops=("unlink",))
    for r in store.core.cold.tier.segments(): store.core.reclaimer.drop(r, None)
    assert len(bucket.objects()) == 1
    told = store.erase(tenant="acme", wait_s=2.0)
    objects = len(bucket.objects())
    down.armed = False; clock.advance(10000)
    assert told["state"] != "erased" or objects == 0

def test_drop_and_hold(opened, clock, bucket):
    store = opened(); space = keyspace(store, block_bytes=BLOCK)
    (keys,) = fill(store, space, clock, range(1)); cold_everything(store)
    store.hold(tenant="acme", reason="x"); store.close()
    with contextlib.suppress(perdure.errors.PerdureError):
        opened(cold="drop").close()
    store = opened()
    assert store.core.index.lookup(keys)[0].all()

@pytest.mark.parametrize("kind", ["tenant", "blocks"])
def test_pinned_moved(tmp_path, kind):
    """room is made while an erasure goes on"""
    with contextlib.closing(eopened(tmp_path / "s")) as store:
        store.wait_ready(20)
        (keys,) = efill(store, chains=1); space = data.keyspace(store)
        space.pin(keys, ttl_s=600)
        core, real = store.core, store.core.erasures._seal
        done = []
        def seal(*a):
            real(*a)
            for r in core.table.all():
                if not done: done.append(core.reclaimer.drop(r, None))
        core.erasures._seal = seal
        erased(store, tenant="acme", **({} if kind == "tenant" else {"blocks": [k.tobytes() for k in keys[:2]]}))
        assert done
        gone = keys if kind == "tenant" else keys[:2]
        left = on_disk(store, gone)
    back = []
    perdure.rebuild(tmp_path / "s")
    with contextlib.closing(eopened(tmp_path / "s")) as store:
        store.wait_ready(20)
        back = data.read_back(data.keyspace(store), gone).tolist()
    assert (left, back) == ([], [data.MISSING] * len(gone))

def test_unpublished_then_erased(tmp_path):
    with contextlib.closing(eopened(tmp_path / "s")) as store:
        store.wait_ready(20)
        from test_erasure import client_keyspace, client_chain, tokens
        space = client_keyspace(store, tenant="acme")
        keys = client_chain(space, 1, 3)
        size = space.layout.block_bytes
        space.write(keys, bytearray((b"SECRETSECRET" * (size * 3 // 12 + 1))[: size * 3]))
        store.sync()
        store.publish(space.digest, tokens(1, 3), name="p", readers=["globex"])
        store.unpublish("p")
        erased(store, tenant="acme")
        bad = [str(p) for p in Path(store.path).rglob("*.seg") if b"SECRETSECRET" in p.read_bytes()]
    assert not bad

def test_sealed_while_away(place):
    place.free = [1 << 30, 3 << 30, 2 << 30]
    place.open(); 
    space = data.keyspace(place.store); keys = data.chain(space, 1, 6)
    assert data.write(space, keys, "session").stored == 6
    assert len(place.segments(1)) == 1
    place.unmount(1)
    for one in place.store.core.writer.open_segments(): place.store.core.writer.retire(one)
    first = data.read_back(space, keys).tolist()
    told = place.store.erase(tenant="acme", wait_s=2.0)
    place.mount(1); place.tend()
    left = place.segments(1)
    assert told["state"] != "erased" or not left

def test_sealed_while_away_read(place):
    place.free = [1 << 30, 3 << 30, 2 << 30]
    place.open(); space = data.keyspace(place.store); keys = data.chain(space, 1, 6)
    assert data.write(space, keys, "session").stored == 6
    place.unmount(1)
    for one in place.store.core.writer.open_segments(): place.store.core.writer.retire(one)
    data.read_back(space, keys); place.mount(1); place.tend()
    assert data.read_back(space, keys).tolist() == [data.FOUND] * 6
