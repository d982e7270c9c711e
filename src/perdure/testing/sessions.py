"""What sessions must do wherever they are asked for, as a test class to inherit.

class TestMine(SessionConformance):
    def make_store(self, directory, **options):
        return perdure.open(directory, **options)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure import limits
from perdure.errors import InvalidArgument
from perdure.manifest import PAGE_KEYS
from perdure.testing import store as blocks
from perdure.testing.store import STORED, chain, write


def keyspace(store: Any, **identity: Any) -> Any:
    """As `testing.store.keyspace`; whoever tests sessions knows that there is one."""
    return blocks.keyspace(store, **identity)


class SessionConformance:
    """Override `make_store`."""

    def make_store(self, directory: Path, **options: Any) -> Any:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Any]:
        with closing(self.make_store(tmp_path / "store", capacity="64MiB")) as store:
            yield store

    # --- what a session consists of
    @pytest.mark.parametrize(
        "turns", [[0], [1], [5, 5, 5], [PAGE_KEYS], [PAGE_KEYS - 1, 1, 1], [100] * 9, [3 * PAGE_KEYS + 7, 1], [2500]]
    )
    def test_a_session_is_what_it_was_extended_by(self, store: Any, turns: list[int]) -> None:
        space = keyspace(store)
        keys = chain(space, 1, sum(turns))
        session = space.session("agent")
        at = 0
        for turn in turns:
            assert session.extend(keys[at : at + turn]).outcome == "accepted"
            at += turn
        assert session.blocks == len(keys)
        assert np.array_equal(session.keys(), keys)
        again = space.session("agent")
        assert again.blocks == len(keys)
        assert np.array_equal(again.keys(), keys)

    def test_it_is_found_again_after_the_store_was_closed(self, tmp_path: Path) -> None:
        for number in range(3):
            with closing(self.make_store(tmp_path / "store", capacity="64MiB")) as store:
                space = keyspace(store)
                keys = chain(space, 1, 40)
                session = space.session("agent")
                assert session.blocks == 10 * number
                assert session.extend(keys[session.blocks : session.blocks + 10])
                assert np.array_equal(session.keys(), keys[: session.blocks])

    def test_names_belong_to_a_tenant_and_a_keyspace(self, store: Any) -> None:
        space = keyspace(store)
        assert space.session("agent").extend(chain(space, 1, 3))
        for other in (keyspace(store, tenant="another"), keyspace(store, model="another")):
            assert other.find_session("agent") is None
            assert other.session("agent").blocks == 0
        assert space.session("agent").blocks == 3

    def test_what_is_not_there_is_missing(self, store: Any) -> None:
        space = keyspace(store)
        assert space.find_session("nobody") is None
        session = space.session("agent")
        assert session.extend(chain(space, 1, 3))
        assert session.expire(0)
        for answer in (
            session.extend(chain(space, 1, 4)[3:]), session.branch("child"), session.handoff(), session.pin(5),
            session.release(), session.expire(5), session.next_use(time.time() + 5),
        ):  # fmt: skip
            assert answer.outcome == "missing"
            assert not answer
            assert "agent" in answer.why
        assert session.history() == []
        assert len(session.keys()) == 0
        assert space.session("agent").blocks == 0, "it can be opened anew"

    def test_saying_it_twice_is_accepted_twice(self, store: Any) -> None:
        space = keyspace(store)
        keys = chain(space, 1, 20)
        one, other = space.session("agent"), space.session("agent")
        assert one.extend(keys[:12])
        assert other.extend(keys[:12]).outcome == "accepted"
        assert other.blocks == 12
        assert one.extend(keys[12:16])
        assert other.extend(keys[12:]).outcome == "accepted", "it begins with what is there"
        assert np.array_equal(one.keys(), keys)

    def test_of_two_workers_that_disagree_one_is_rejected(self, store: Any) -> None:
        space = keyspace(store)
        keys, others = chain(space, 1, 6), chain(space, 2, 6)
        one, other = space.session("agent"), space.session("agent")
        assert one.extend(keys)
        answer = other.extend(others)
        assert answer.outcome == "rejected"
        assert "from block 0 on" in answer.why
        assert np.array_equal(other.keys(), keys)
        assert space.session("gap").extend(keys[:0])

    def test_many_workers_extend_at_once_and_one_story_remains(self, store: Any) -> None:
        space = keyspace(store)
        stories = [chain(space, number, 5) for number in range(6)]
        sessions = [space.session("agent") for _ in stories]
        with ThreadPoolExecutor(len(stories)) as threads:
            answers = list(threads.map(lambda pair: pair[0].extend(pair[1]), zip(sessions, stories, strict=True)))
        assert [answer.outcome for answer in answers].count("accepted") == 1
        winner = next(number for number, answer in enumerate(answers) if answer)
        assert np.array_equal(space.session("agent").keys(), stories[winner])

    def test_bad_names_and_numbers_are_refused(self, store: Any) -> None:
        space = keyspace(store)
        for name in ("", "x" * (limits.session_name_bytes_max + 1)):
            with pytest.raises(InvalidArgument, match="session name"):
                space.session(name)
        session = space.session("x" * limits.session_name_bytes_max)
        for ttl_s in (-1, float("nan"), "soon", True):
            with pytest.raises(InvalidArgument, match="ttl_s"):
                session.pin(ttl_s)
        assert session.pin(1e12).outcome == "clipped"
        assert session.expire(1e12).outcome == "clipped"
        assert session.next_use(time.time() + 1e9).outcome == "clipped"

    # --- branches
    @pytest.mark.parametrize("at", [None, 0, 1, PAGE_KEYS, 290])
    def test_a_branch_shares_what_was_there(self, store: Any, at: int | None) -> None:
        space = keyspace(store)
        keys, more = chain(space, 1, 300), chain(space, 2, 10)
        session = space.session("agent")
        assert session.extend(keys)
        child = session.branch("agent/tool", at=at).session
        shared = 300 if at is None else at
        assert (child.blocks, child.shared, child.name) == (shared, shared, "agent/tool")
        assert child.extend(more)
        assert session.extend(chain(space, 1, 301)[300:])
        assert np.array_equal(child.keys(), np.concatenate([keys[:shared], more]))
        assert np.array_equal(session.keys(), chain(space, 1, 301))
        assert session.branch("agent/tool").outcome == "rejected"
        assert session.branch("further", at=302).outcome == "rejected"
        assert [event["event"] for event in child.history()] == ["branched off", "extended"]

    def test_a_branch_outlives_its_origin(self, store: Any) -> None:
        space = keyspace(store)
        keys = chain(space, 1, 300)
        session = space.session("agent")
        assert session.extend(keys)
        child = session.branch("child").session
        assert session.release()
        assert np.array_equal(child.keys(), keys)
        assert session.branch("late").outcome == "missing"

    # --- hand-over
    def test_a_token_hands_over_once(self, store: Any) -> None:
        space = keyspace(store)
        keys = chain(space, 1, 20)
        giver = space.session("agent")
        assert giver.extend(keys[:8])
        token = giver.handoff().token
        assert giver.extend(keys[8:10]), "until it is adopted"
        taker = space.adopt(token).session
        assert taker.blocks == 10
        assert taker.extend(keys[10:])
        for answer in (giver.extend(keys[10:]), giver.release(), giver.handoff(), giver.branch("x"), giver.pin(5)):
            assert answer.outcome == "rejected"
            assert "handed over" in answer.why
        again = space.adopt(token)
        assert again.outcome == "rejected"
        assert "used already" in again.why
        assert np.array_equal(taker.keys(), keys)

    def test_tokens_that_are_not_good_are_rejected(self, store: Any) -> None:
        space = keyspace(store)
        session = space.session("agent")
        token = session.handoff().token
        for at in range(0, len(token), 5):
            forged = bytearray(token)
            forged[at] ^= 1
            assert "forged" in space.adopt(bytes(forged)).why
        assert "no token" in space.adopt(token[:-1]).why
        assert "forged" in keyspace(store, tenant="another").adopt(token).why
        assert "forged" in keyspace(store, model="another").adopt(token).why
        assert "expired" in space.adopt(session.handoff(ttl_s=0).token).why
        second = session.handoff().token
        assert space.adopt(second)
        assert "used already" in space.adopt(token).why, "the session was taken over by another token"

    def test_of_many_that_adopt_at_once_one_succeeds(self, store: Any) -> None:
        space = keyspace(store)
        token = space.session("agent").handoff().token
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(space.adopt, [token] * 8))
        assert sum(bool(answer) for answer in answers) == 1

    # --- lifetimes
    def test_a_pinned_session_keeps_its_blocks_and_those_added_later(self, store: Any) -> None:
        space = keyspace(store)
        keys = chain(space, 1, 24)
        assert write(space, keys) == [STORED] * 24
        session = space.session("agent")
        assert session.extend(keys[:12])
        assert session.pin(600)
        assert session.extend(keys[12:])
        for number in range(10, 70):  # far more than the capacity
            write(space, chain(space, number, 64))
        assert space.lookup(keys) == 24
        assert np.array_equal(space.session("agent").keys(), keys)
        assert session.pin(0)
        assert store.status()["pins"] == 0

    def test_released_blocks_go_first_but_not_those_of_a_branch(self, store: Any) -> None:
        space = keyspace(store)
        keys, kept = chain(space, 1, 600), chain(space, 2, 300)
        for part in (keys, kept):
            write(space, part)
        session = space.session("agent")
        assert session.extend(keys[:300])
        child = session.branch("child").session
        assert session.extend(keys[300:])
        assert space.session("other").extend(kept)
        assert session.release()
        number = 10
        while space.lookup(kept) == 300 and number < 200:  # until something of the others has to go
            write(space, chain(space, number, 100))
            number += 1
            if not space.present(keys[300:]).any():
                break
        assert not space.present(keys[300:]).all()
        assert space.lookup(kept) == 300
        assert np.array_equal(child.keys(), keys[:300])

    def test_history_tells_what_happened(self, store: Any) -> None:
        space = keyspace(store)
        session = space.session("agent")
        session.extend(chain(space, 1, 3))
        session.pin(5)
        session.branch("child")
        events = session.history()
        assert [(one["event"], one["blocks"]) for one in events] == [
            ("opened", 0), ("extended", 3), ("pinned", 3), ("branched", 3)
        ]  # fmt: skip
        assert all(abs(one["at_s"] - time.time()) < 600 for one in events)
        for turn in range(4, 40):
            session.extend(chain(space, 1, turn)[turn - 1 :])
        assert session.history()[-1]["event"] == "extended"

    def test_sessions_are_listed_and_ended_by_an_operator(self, store: Any) -> None:
        space, other = keyspace(store), keyspace(store, tenant="another")
        for number in range(200):
            space.session(f"agent-{number}")
        other.session("agent-7").extend(chain(other, 1, 3))
        found = store.sessions()
        assert len(found) == 201
        assert {one["tenant"] for one in found} == {"acme", "another"}
        (mine,) = store.sessions("another")
        assert (mine["name"], mine["blocks"], mine["model"]) == ("agent-7", 3, "model")
        assert len(store.session_admin("show", {"name": "agent-7"})["sessions"]) == 2
        told = store.session_admin("release", {"name": "agent-7", "tenant": "another"})["sessions"]
        assert [(one["tenant"], one["outcome"]) for one in told] == [("another", "accepted")]
        assert store.sessions("another") == []
        assert store.session_admin("expire", {"name": "agent-7", "ttl_s": 0})["sessions"][0]["outcome"] == "accepted"
        assert len(store.sessions()) == 199
        with pytest.raises(InvalidArgument, match="must be list"):
            store.session_admin("eat", {"name": "agent-7"})

    def test_blocks_are_brought_to_memory_before_they_are_read(self, store: Any) -> None:
        space = keyspace(store)
        keys = chain(space, 1, 20)
        write(space, keys)
        self.forget_memory(store)
        assert space.prefetch(keys) == 20
        give_up = time.monotonic() + 60
        while store.status()["counters"].get("blocks_prefetched", 0) < 20:
            assert time.monotonic() < give_up, store.status()["counters"]
            time.sleep(0.01)
        memory = np.empty((20, 8192), np.uint8)
        assert space.read(keys, memory).from_memory == 20

    def test_what_waits_in_an_engine_is_brought_first_come_first(self, store: Any) -> None:
        space = keyspace(store)
        first, second, nowhere = (chain(space, number, 5) for number in (1, 2, 3))
        write(space, first)
        write(space, second[:3])
        self.forget_memory(store)
        assert space.look_ahead([first, second, nowhere], request_s=0.1) == 3, "what is not stored keeps nobody waiting"
        give_up = time.monotonic() + 60
        while store.status()["counters"].get("blocks_prefetched", 0) < 8:
            assert time.monotonic() < give_up, store.status()["counters"]
            time.sleep(0.01)
        for keys, there in ((first, 5), (second, 3)):
            assert space.read(keys[:there], np.empty((there, 8192), np.uint8)).from_memory == there
        assert space.look_ahead([], request_s=0.1) == 0
        for wrong in (-1.0, float("nan")):
            with pytest.raises(InvalidArgument, match="request_s"):
                space.look_ahead([first], request_s=wrong)

    def forget_memory(self, store: Any) -> None:
        """Empty the DRAM tier."""
        raise NotImplementedError
