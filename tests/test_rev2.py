from __future__ import annotations
import errno, time, threading, sys, os, shutil
import numpy as np
import pytest
sys.path.insert(0, os.path.dirname(__file__))
from test_valkey_shared import *  # noqa
from test_valkey_shared import Flipping, FlippingFile, hosts, running, fall_silent
from perdure.clock import SystemClock
for _n in [n for n in list(globals()) if n.startswith("test_")]:
    del globals()[_n]


class OtherBoot(SystemClock):
    def boot_id(self):
        return b"\7" * 16


def test_t1_bad_memory_other_boot(hosts):
    good, other = hosts.add(), hosts.add()
    chains = [chain(keyspace(good), number, 20) for number in range(3)]
    for number, durability in enumerate(("ephemeral", "session", "retained")):
        assert write(keyspace(good), chains[number], durability=durability) == [STORED] * 20
    good.sync()
    bad = hosts.add(seams=Seams(clock=OtherBoot(), files=lambda root: Flipping(PosixFiles(root))))
    for keys in chains:
        assert FOUND not in read(keyspace(bad), keys)
    for store in (good, other):
        got = [read(keyspace(store), keys) for keys in chains]
        assert [g.count(FOUND) for g in got] == [20, 20, 20], [g.count(FOUND) for g in got]


def test_t2_found_gone_never_settled(hosts):
    one, two = hosts.add(), hosts.add()
    keys = chain(keyspace(one), 1, 20)
    assert write(keyspace(one), keys, durability="session") == [STORED] * 20
    # seal it
    for o in list(one.core.writer.open_segments()):
        one.core.writer.retire(o)
    eventually(lambda: not one.core.table.unsealed(), "sealed")
    two.core.sharing.refresh()
    assert two.core.space.used > 0
    (rec,) = two.core.table.all()
    used = two.core.space.used
    assert read(keyspace(two), keys[:5]) == [FOUND] * 5
    # one drops it; two learns of it by `find(fresh)` as `_quarantine` asks, before its next beat
    two.core.sharing._stop.set(); two.core.sharing._thread.join()
    from perdure.segments.reclaim import Outcome
    assert one.core.reclaimer.drop(one.core.table.get(rec.segment), None) is Outcome.GONE
    two.core.segments.forget(rec.segment)   # an LRU eviction of the handle, or never opened
    read(keyspace(two), keys)
    print("known", two.core.table.get(rec.segment))
    two.core.table.find(rec.segment, fresh=True)
    for _ in range(3):
        two.core.sharing.refresh()
    print("used before", used, "after", two.core.space.used, "one", one.core.space.used)
    assert two.core.space.used == 0


class Stale(FilesAround):
    on = False
    def wrap(self, file):
        return StaleFile(file)

class StaleFile(FileAround):
    def size(self):
        if Stale.on:
            raise OSError(errno.ESTALE, "stale")
        return super().size()

def test_t3_estale_on_size(hosts):
    one = hosts.add()
    two = hosts.add(seams=Seams(files=lambda root: Stale(PosixFiles(root))))
    keys = chain(keyspace(one), 1, 20)
    assert write(keyspace(one), keys, durability="session") == [STORED] * 20
    Stale.on = True
    time.sleep(1.5)
    Stale.on = False
    alive = two.core.sharing._thread.is_alive()
    time.sleep(LEASE_S + 1)
    other = chain(keyspace(two), 2, 5)
    got = write(keyspace(two), other)
    assert alive and got == [STORED] * 5, (alive, got)


class Lost(FilesAround):
    on = False
    def _no(self, path):
        if Lost.on:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
    def wrap(self, file):
        return FileAround(file)
    def open(self, path, **k):
        self._no(path); return super().open(path, **k)
    def create(self, path, **k):
        if Lost.on: raise PermissionError(errno.EACCES, "mount is lost")
        return super().create(path, **k)
    def read(self, path):
        self._no(path); return super().read(path)
    def unlink(self, path):
        self._no(path); return super().unlink(path)
    def list(self, path):
        return [] if Lost.on else super().list(path)
    def sync_directory(self, path):
        self._no(path); return super().sync_directory(path)
    def write_once(self, path, data):
        if Lost.on: raise PermissionError(errno.EACCES, "mount is lost")
        return super().write_once(path, data)


def test_t4a_lost_mount_reclaim(hosts):
    Lost.on = False
    one = hosts.add()
    two = hosts.add(seams=Seams(files=lambda root: Lost(PosixFiles(root))))
    n, chains = 0, []
    while one.core.reclaimer.counters.segments_dropped < 2 and n < 200:
        keys = chain(keyspace(one), n, 200)
        write(keyspace(one), keys, durability="session")
        chains.append(keys); n += 1
    while one.core.space.capacity - one.core.space.kept_back - one.core.space.used > (1 << 18) and n < 300:
        keys = chain(keyspace(one), n, 10); write(keyspace(one), keys, durability='session'); chains.append(keys); n += 1
    before = sum(int(keyspace(one).present(k).sum()) for k in chains)
    segs = len(one.core.table.all())
    time.sleep(1)
    Lost.on = True
    two.core.reclaimer.make_room(1 << 20)  # as a write does where the store is full
    print("status", set(write(keyspace(two), chain(keyspace(two), 1000, 200), durability="session")))
    Lost.on = False
    time.sleep(1)
    after = sum(int(keyspace(one).present(k).sum()) for k in chains)
    print("segments", segs, "->", len(one.core.table.all()), "blocks", before, "->", after)
    files = len(list((hosts.folder / "data" / "segments").glob("*/*.seg")))
    print("files", files)
    assert after == before


def test_t4b_lost_mount_dead_writer(hosts):
    Lost.on = False
    one = hosts.add()
    two = hosts.add(seams=Seams(files=lambda root: Lost(PosixFiles(root))))
    keys = chain(keyspace(one), 1, 20)
    assert write(keyspace(one), keys, durability="session") == [STORED] * 20
    Lost.on = True
    fall_silent(one)
    two._keeper.attempt(two._keeper.recover)
    Lost.on = False
    three = hosts.add()
    got = read(keyspace(three), keys)
    assert got == [FOUND] * 20, got


def test_t5_a_slow_quota_document_does_not_stop_reads(hosts):
    from types import SimpleNamespace
    from perdure.governance.terms import Document, Quota
    from perdure.service import messages as m
    from perdure.service.quotas import Quotas
    from perdure.errors import CatalogUnavailable
    one = hosts.add()
    space = keyspace(one)
    quotas = Quotas(one.core)
    doc = Document(tenant="acme", version=1, quota=Quota(stored_bytes=1 << 24))
    peer = SimpleNamespace(space=lambda number: space)
    class Slow:
        def __getattr__(self, name): return getattr(inner, name)
        def get(self, namespace, key):
            if namespace == "quota":
                time.sleep(1.0); raise CatalogUnavailable("no answer")
            return inner.get(namespace, key)
    inner, one.core.control = one.core.control, Slow()
    def ask(n):
        q = m.Write(n, 0, chain(space, n, 1).tobytes(), 1, b"", b"", "session", None, None, 0.0)
        try: quotas.problem(peer, doc, q)
        except CatalogUnavailable: pass
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(3)]
    for one_ in threads: one_.start()
    time.sleep(0.1)
    began = time.monotonic()
    with quotas.entered("another tenant", object()): pass
    took = time.monotonic() - began
    for one_ in threads: one_.join()
    one.core.control = inner
    assert took < 0.5, took
