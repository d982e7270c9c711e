"""Sessions: embedded, through a service, through a data node; restarts, clocks, memory, damage, the command."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.served import ServedStore

import perdure
from perdure import Seams, limits, session_heads
from perdure.cli import main
from perdure.clock import FakeClock
from perdure.errors import ReadOnlyStore
from perdure.session import SessionVerbs
from perdure.session_form import Head, encode_head
from perdure.testing.sessions import SessionConformance
from perdure.testing.store import FOUND, chain, keyspace, read, write
from perdure.testing.transport import ServiceProcess


class TestEmbedded(SessionConformance):
    def make_store(self, directory: Path, **options: Any) -> Any:
        return perdure.open(directory, memory="32MiB", **options)

    def forget_memory(self, store: Any) -> None:
        store.core.pool.drop_all()


class TestServed(SessionConformance):
    def make_store(self, directory: Path, **options: Any) -> Any:
        return ServedStore(directory, **options)

    def forget_memory(self, store: Any) -> None:
        store.store.core.pool.drop_all()


class TestServedByTcp(TestServed):
    def make_store(self, directory: Path, **options: Any) -> Any:
        return ServedStore(directory, tcp=True, **options)


class Room(SessionVerbs):
    """Has everything, and memory for so many blocks."""

    def __init__(self, blocks: int):
        self.left, self.asked = blocks, []

    def wall(self) -> float:
        return 1000.0

    def lookup(self, keys: Any) -> int:
        return len(keys)

    def prefetch(self, keys: Any, *, needed_by: float | None = None) -> int:
        self.asked.append((len(keys), needed_by))
        taken = min(len(keys), self.left)
        self.left -= taken
        return taken


def test_looking_ahead_ends_where_memory_ends_and_knows_when_each_request_starts() -> None:
    keys = np.zeros((5, 32), np.uint8)
    room = Room(12)
    assert room.look_ahead([keys, keys, keys, keys], request_s=0.5) == 2
    assert room.asked == [(5, 1000.0), (5, 1000.5), (5, 1001.0)], "the fourth would be brought before all of the third"


def test_a_session_survives_the_death_of_its_service(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "s") as service, perdure.connect(service.address("unix")) as client:
        space = keyspace(client)
        keys = chain(space, 1, 30)
        write(space, keys)
        session = space.session("agent")
        assert session.extend(keys)
        assert session.pin(600)
        token = session.handoff().token
        service.kill()
        with ServiceProcess(tmp_path / "s"):
            taken = space.adopt(token).session
            assert taken is not None
            assert np.array_equal(taken.keys(), keys)
            assert read(space, taken.keys()) == [FOUND] * 30
            client.wait_ready()
            assert client.status()["pins"] == 2, "blocks and manifest are pinned again"


def test_sessions_are_over_by_the_steady_clock(tmp_path: Path) -> None:
    clock = FakeClock()
    with closing(perdure.open(tmp_path / "s", capacity="64MiB", memory=0, seams=Seams(clock=clock))) as store:
        space = keyspace(store)
        session = space.session("agent", ttl_s=100)
        assert session.extend(chain(space, 1, 3))
        clock.advance(99)
        assert session.extend(chain(space, 1, 4)[3:]), "used again"
        clock.advance(99)
        clock.step(10_000)  # nothing is over while the clock is in doubt
        assert space.find_session("agent") is not None
        clock.step(-10_000)
        assert space.find_session("agent") is not None, "looking is not using, but it is not over yet"
        clock.advance(2)
        assert space.find_session("agent") is None
        assert store.sessions() == []
        assert store.status()["sessions"] == 0
        assert len(store.core.control.items("session")) == 1
        store.core.sessions.sweep()
        assert store.core.control.items("session") == []


def test_pages_live_as_long_as_their_session(tmp_path: Path) -> None:
    clock = FakeClock()
    with closing(perdure.open(tmp_path / "s", capacity="64MiB", memory=0, seams=Seams(clock=clock))) as store:
        space = keyspace(store)
        keys = chain(space, 1, 400)
        session = space.session("agent", ttl_s=1000)
        assert session.extend(keys[:300])
        for turn in range(300, 400):  # 20 idle times: ten lives of a page
            clock.advance(200)
            assert session.extend(keys[turn : turn + 1])
        assert np.array_equal(session.keys(), keys)


def test_a_lost_manifest_makes_a_session_missing_and_nothing_worse(tmp_path: Path) -> None:
    with closing(perdure.open(tmp_path / "s", capacity="64MiB", memory=0)) as store:
        space = keyspace(store)
        keys = chain(space, 1, 300)
        session = space.session("agent")
        assert session.extend(keys)
        sessions = store.core.sessions
        pages = sessions.manifests.pages("acme", sessions.all()[0][1].root, 300)
        store.core.index.remove(pages[:1])
        store.core.presence.remove(perdure.catalog.api.fingerprints(pages[:1]))
        assert len(session.keys()) == 0
        answer = session.branch("child", at=10)
        assert answer.outcome == "missing"
        assert "manifest" in answer.why
        assert session.release()


def test_an_idle_session_takes_no_memory(tmp_path: Path) -> None:
    with closing(perdure.open(tmp_path / "s", capacity="64MiB", memory=0)) as store:
        space = keyspace(store)
        keys = chain(space, 1, 4)

        def some(first: int) -> None:
            for number in range(first, first + 100):
                assert space.session(f"agent-{number}").extend(keys)

        some(0)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        some(1000)
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert grown / 100 <= limits.KIB


def test_the_largest_head_fits() -> None:
    head = Head(
        1, "x" * limits.session_name_bytes_max, bytes(32), *[2**40] * 4, blocks=65_536, root=bytes(32),
        pages_expire_s=2**40, owner=2**40, shared=65_536, origin="y" * limits.session_name_bytes_max,
        pinned_until_s=2**40, next_use_s=2**40, tokens=[(bytes(16), 2**40)] * session_heads._TOKENS_MAX,
        events=[(2**40, "branched off", 65_536)] * session_heads._EVENTS_MAX,
    )  # fmt: skip
    assert len(encode_head(head)) <= limits.session_head_bytes_max


def test_a_read_only_store_lists_and_changes_nothing(tmp_path: Path) -> None:
    with closing(perdure.open(tmp_path / "s", capacity="64MiB", memory=0)) as store:
        keyspace(store).session("agent")
    with closing(perdure.open(tmp_path / "s", read_only=True, memory=0)) as store:
        assert [one["name"] for one in store.sessions()] == ["agent"]
        with pytest.raises(ReadOnlyStore):
            keyspace(store).session("agent")
        with pytest.raises(ReadOnlyStore):
            store.session_admin("release", {"name": "agent"})


@pytest.mark.parametrize("served", [False, True])
def test_the_command(tmp_path: Path, served: bool) -> None:
    def run(*arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(main, ["sessions", *arguments])
        assert result.exit_code == status, result.output
        return result.output

    path = tmp_path / "s"
    made = ServedStore(path) if served else perdure.open(path, capacity="64MiB", memory=0)
    space = keyspace(made)
    write(space, chain(space, 1, 5))
    assert space.session("agent").extend(chain(space, 1, 5))
    if not served:
        made.close()
    assert "agent" in run("list", str(path))
    (one,) = json.loads(run("list", str(path), "--json"))
    assert (one["name"], one["blocks"], one["tenant"]) == ("agent", 5, "acme")
    assert "extended" in run("show", str(path), "agent")
    assert "accepted" in run("expire", str(path), "agent", "--ttl", "3600")
    assert "no session" in run("show", str(path), "nobody", status=1)
    assert "accepted" in run("release", str(path), "agent", "--tenant", "acme")
    assert json.loads(run("list", str(path), "--json")) == []
    if served:
        made.close()
    run("list", str(tmp_path / "nothing"), status=2)
