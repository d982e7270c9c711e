"""Legal holds: what is on hold outlives its time, eviction and erasure, and goes when the hold is off."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support import blocks as data
from support.blocks import FOUND, MISSING
from support.policies import policy_directory
from support.served import serving

import perdure
from perdure import Seams, Store
from perdure.cli import main
from perdure.clock import FakeClock
from perdure.errors import AccessDenied, AuditUnavailable, InvalidArgument, ReadOnlyStore
from perdure.governance import audit_look
from perdure.testing.store import STORED, write
from perdure.testing.store import chain as client_chain
from perdure.testing.store import keyspace as client_keyspace

WAIT_S = 60.0
TTL_S = 600
WHY = "case 4711"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def reopen(tmp_path: Path, clock: FakeClock) -> Iterator[Callable[..., Store]]:
    """Opens the store, the one before closed."""
    with contextlib.ExitStack() as stack:

        def again(**options: Any) -> Store:
            stack.close()
            given = {"capacity": "32MiB", "memory": 0, "seams": Seams(clock=clock)} | options
            store = stack.enter_context(perdure.open(tmp_path / "s", **given))
            assert store.wait_ready(WAIT_S)
            return store

        yield again


def session_of(store: Store, name: str, number: int, *, blocks: int = 4, tenant: str = "acme", **options: Any) -> Any:
    """Keys of a new session's blocks, which have a time to live."""
    space = data.keyspace(store, tenant=tenant)
    keys = data.chain(space, number, blocks)
    assert data.write(space, keys, ttl_s=TTL_S).durable
    assert space.session(name, ttl_s=TTL_S, **options).extend(keys)
    return keys


def on_disk(store: Store, keys: Any) -> list[bool]:
    """Whether there is a whole record of each, whatever its time to live."""
    present, records = store.core.index.lookup(keys)
    known = {one.segment for one in store.core.table.all()}
    return [
        bool(there) and record["segment"].tobytes() in known for there, record in zip(present, records, strict=True)
    ]


def pass_time(store: Store, clock: FakeClock, seconds: float) -> None:
    clock.advance(seconds)
    store.core.sessions.sweep()
    store.core.reclaimer.sweep()


# --- times to live
@pytest.mark.parametrize("what", [{}, {"session": "a"}, {"subject": "user-7"}], ids=["tenant", "session", "subject"])
def test_a_hold_outlives_the_time_to_live(reopen: Callable[..., Store], clock: FakeClock, what: dict[str, str]) -> None:
    store = reopen(encryption="on")
    held = session_of(store, "a", 1, subject="user-7")
    other = session_of(store, "b", 2, tenant="globex")
    hold = store.hold(tenant="acme", reason=WHY, **what)
    for _ in range(3):
        store = reopen()  # it is sealed, and the hold is still on
        pass_time(store, clock, 3 * TTL_S)
        assert on_disk(store, held) == [True] * 4
        assert on_disk(store, other) == [False] * 4
        assert data.read_back(data.keyspace(store), held).tolist() == [MISSING] * 4, "kept, not served"
        assert len(dict(store.core.control.items("session"))) == 1
        assert store.status()["reclaim"]["blocks_copied"] == 0, "a segment that is on hold as a whole stays as it is"
    assert store.unhold(tenant="acme", hold=hold["id"])["id"] == hold["id"]
    pass_time(store, clock, TTL_S)
    assert on_disk(store, held) == [False] * 4
    assert list(store.core.control.items("session")) == []


def test_neighbours_of_what_is_held_go(reopen: Callable[..., Store], clock: FakeClock) -> None:
    store = reopen()
    held, other = session_of(store, "a", 1), session_of(store, "b", 2)
    store.hold(tenant="acme", session="a", reason=WHY)
    store = reopen()
    pass_time(store, clock, 3 * TTL_S)
    assert on_disk(store, held) == [True] * 4
    assert on_disk(store, other) == [False] * 4


# --- room
@pytest.mark.parametrize("whole", [True, False], ids=["tenant", "session"])
def test_a_hold_is_not_evicted(reopen: Callable[..., Store], clock: FakeClock, whole: bool) -> None:
    store = reopen()
    space, other = data.keyspace(store), data.keyspace(store, tenant="globex")
    held = data.chain(space, 1, 400)  # more than fits a segment: small ones are not given up first
    assert data.write(space, held).durable
    session = space.session("a")
    assert session.extend(held[:100])
    store.hold(tenant="acme", reason=WHY, session=None if whole else "a")
    assert session.extend(held[100:])  # what it gains is on hold too
    room = store.status()["capacity_bytes"]
    for number in range(2, 4 * room // (20 * data.BLOCK_BYTES)):
        clock.advance(60)  # so that it is the coldest of all
        assert data.write(other, data.chain(other, number, 20)).durable
    assert store.status()["reclaim"]["segments_dropped"] > 2
    assert data.read_back(space, held).tolist() == [FOUND] * 400
    assert len(session.keys()) == 400


# --- sessions
def test_a_session_on_hold_stays(reopen: Callable[..., Store], clock: FakeClock) -> None:
    store = reopen()
    keys = session_of(store, "a", 1)
    hold = store.hold(tenant="acme", session="a", reason=WHY)
    space = data.keyspace(store)
    session = space.find_session("a")
    assert session is not None
    for told in (session.release(), session.expire(0)):
        assert (told.outcome, hold["id"] in told.why) == ("rejected", True)
    assert session.extend(data.chain(space, 3, 1)), "it can be used"
    clock.advance(3 * TTL_S)
    assert space.find_session("a") is None
    head = list(store.core.control.items("session"))
    told = data.keyspace(store).session_ask("open", {"name": "a", "create": True})
    assert (told["outcome"], "on hold" in told["why"]) == ("rejected", True)
    assert session_of(store, "b", 4) is not None
    other = space.find_session("b")
    assert other is not None
    assert space.session_ask("branch", {"name": "b", "new_name": "a"})["outcome"] != "accepted"
    assert head[0] in list(store.core.control.items("session"))
    assert on_disk(store, keys) == [True] * 4


# --- erasure
@pytest.mark.parametrize("held", [{}, {"session": "a"}, {"subject": "user-7"}, {"blocks": 1}], ids=str)
@pytest.mark.parametrize("erased", [{}, {"session": "a"}, {"subject": "user-7"}, {"blocks": 1}], ids=str)
def test_an_erasure_waits_for_the_hold(reopen: Callable[..., Store], held: Any, erased: Any) -> None:
    store = reopen(encryption="on", audit="on")
    keys = session_of(store, "a", 1, subject="user-7")
    named = {"blocks": [key.tobytes() for key in keys]}
    hold = store.hold(tenant="acme", reason=WHY, **(named if held == {"blocks": 1} else held))
    told = store.erase(tenant="acme", **(named if erased == {"blocks": 1} else erased))
    assert told["state"] == "held"
    assert (hold["id"] in told["why"], WHY in told["why"]) == (True, True)
    store = reopen()
    assert store.erasure(told["id"])["state"] == "held"
    assert data.read_back(data.keyspace(store), keys).tolist() == [FOUND] * 4
    more = store.hold(tenant="acme", reason="another")
    store.unhold(tenant="acme", hold=hold["id"])
    assert store.erasure(told["id"])["state"] == "held"
    assert data.read_back(data.keyspace(store), keys).tolist() == [FOUND] * 4
    store.unhold(tenant="acme", hold=more["id"])
    done = finished(store, told["id"])
    assert done["state"] == "erased"
    lines = done["receipt"]["statement"].splitlines()
    assert "done keys destroyed" in lines
    assert f"blocks {5 if not erased else 4}" in lines  # with the page of the manifest
    assert on_disk(store, keys) == [False] * 4
    assert [one.name for one in (store.path / "control/erasures").iterdir()] == [f"{told['id']}.receipt"]
    ops = [event.op for _, event in audit_look.records(audit_look.folder_of(store.path))]
    assert [op for op in ops if op in ("hold", "unhold", "erase", "erased")] == [
        "hold", "erase", "hold", "unhold", "unhold", "erased",
    ]  # fmt: skip
    assert b"user-7" not in b"".join(path.read_bytes() for path in store.path.rglob("*") if path.is_file())


def finished(store: Store, order: str) -> dict[str, Any]:
    """The state of an erasure that has begun, or will in a moment."""
    until = time.monotonic() + WAIT_S
    told: dict[str, Any] = store.erasure(order)
    while told["state"] in ("held", "unreadable") and time.monotonic() < until:
        time.sleep(0.01)
        told = store.core.erasures.wait(order, 1.0)
    return told


def test_what_shares_a_block_with_a_hold_waits_and_other_things_do_not(reopen: Callable[..., Store]) -> None:
    store = reopen()
    session_of(store, "a", 1)
    space = data.keyspace(store)
    first = space.find_session("a")
    assert first is not None
    assert first.branch("a/tool")
    other = session_of(store, "b", 2)
    store.hold(tenant="acme", session="a", reason=WHY)
    assert store.erase(tenant="acme", session="a/tool")["state"] == "held"
    assert store.erase(tenant="acme", session="b", wait_s=WAIT_S)["state"] == "erased"
    assert on_disk(store, other) == [False] * 4
    assert store.erase(tenant="globex", wait_s=WAIT_S)["state"] == "erased"


def test_a_hold_that_comes_too_late_says_so(reopen: Callable[..., Store], monkeypatch: pytest.MonkeyPatch) -> None:
    store = reopen()
    keys = session_of(store, "a", 1)
    turn = store.core.tenants.begin()  # a call that began before: the erasure waits for its end
    order = store.erase(tenant="acme", blocks=[key.tobytes() for key in keys[:1]])
    told = store.hold(tenant="acme", reason=WHY)
    assert told["erasing"] == [order["id"]]
    store.core.tenants.end(turn)
    assert store.core.erasures.wait(order["id"], WAIT_S)["state"] == "erased"


def test_holding_and_erasing_at_once_either_waits_or_says_so(reopen: Callable[..., Store]) -> None:
    store = reopen()
    space = data.keyspace(store)
    for number in range(1, 9):
        keys = data.chain(space, number, 2)
        assert data.write(space, keys).durable
        start, told = threading.Barrier(2), {}

        def hold(start: Any = start, told: Any = told) -> None:
            start.wait()
            told["hold"] = store.hold(tenant="acme", reason=WHY)

        def erase(start: Any = start, told: Any = told, keys: Any = keys) -> None:
            start.wait()
            told["erase"] = store.erase(tenant="acme", blocks=[key.tobytes() for key in keys])

        threads = [threading.Thread(target=work) for work in (hold, erase)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        order = told["erase"]["id"]
        if told["erase"]["state"] == "held":
            assert data.read_back(space, keys).tolist() == [FOUND] * 2
        else:
            assert told["hold"]["erasing"] == [order] or store.erasure(order)["state"] == "erased"
        store.unhold(tenant="acme", hold=told["hold"]["id"])
        assert finished(store, order)["state"] == "erased"
        assert data.read_back(space, keys).tolist() == [MISSING] * 2


# --- what is not known, what cannot be recorded, what is wrong
def test_where_it_cannot_be_told_what_is_held_nothing_goes(reopen: Callable[..., Store], clock: FakeClock) -> None:
    store = reopen()
    keys = session_of(store, "a", 1)
    store.hold(tenant="acme", session="a", reason=WHY)
    store = reopen()
    head = store.core.sessions.all()[0][1]
    store.core.index.remove(store.core.sessions.manifests.pages("acme", head.root, head.blocks))
    pass_time(store, clock, 3 * TTL_S)
    assert on_disk(store, keys) == [True] * 4
    assert store.lifecycle()["tenants"]["acme"]["held"]


def test_nothing_is_held_or_released_that_cannot_be_recorded(reopen: Callable[..., Store]) -> None:
    store = reopen(audit="on")
    session_of(store, "a", 1)
    hold = store.hold(tenant="acme", reason=WHY)
    audit = store.core.audit
    assert audit is not None
    real, audit._pwrite = audit._pwrite, _full  # type: ignore[method-assign]
    for refused in (
        lambda: store.hold(tenant="globex", reason=WHY), lambda: store.unhold(tenant="acme", hold=hold["id"])
    ):  # fmt: skip
        with pytest.raises(AuditUnavailable):
            refused()
    audit._pwrite = real  # type: ignore[method-assign]
    assert [one["id"] for one in store.lifecycle()["holds"]] == [hold["id"]]


def _full(view: memoryview, at: int) -> int:
    raise OSError(28, "no space left on device")


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ({"tenant": "acme", "reason": ""}, "reason"),
        ({"tenant": "acme", "reason": WHY, "session": "no"}, "no such session"),
        ({"tenant": "acme", "reason": WHY, "subject": "no"}, "no such subject"),
        ({"tenant": "acme", "reason": WHY, "blocks": [b"x"]}, "32 bytes"),
        ({"tenant": "acme", "reason": WHY, "blocks": [bytes(32)], "session": "s"}, "one hold is about one thing"),
        ({"tenant": "a" * 300, "reason": WHY}, "tenant"),
    ],
)
def test_bad_input_says_what(reopen: Callable[..., Store], what: dict[str, Any], problem: str) -> None:
    store = reopen()
    with pytest.raises(InvalidArgument, match=problem):
        store.hold(**what)
    with pytest.raises(InvalidArgument, match="perdure lifecycle"):
        store.unhold(tenant="acme", hold="0" * 16)
    hold = store.hold(tenant="acme", reason=WHY)
    with pytest.raises(InvalidArgument, match="'globex' has no hold"):
        store.unhold(tenant="globex", hold=hold["id"])


def test_who_only_looks_changes_nothing(reopen: Callable[..., Store], tmp_path: Path) -> None:
    store = reopen()
    hold = store.hold(tenant="acme", reason=WHY)
    with closing(perdure.open(tmp_path / "s", read_only=True, memory=0)) as reader:
        assert [one["id"] for one in reader.lifecycle()["holds"]] == [hold["id"]]
        with pytest.raises(ReadOnlyStore):
            reader.unhold(tenant="acme", hold=hold["id"])


# --- what will happen
def test_lifecycle_says_what_will_happen_when(reopen: Callable[..., Store], clock: FakeClock) -> None:
    store = reopen()
    session_of(store, "a", 1)
    space = data.keyspace(store)
    assert data.write(space, data.chain(space, 5, 2)).durable
    pinned = space.find_session("a")
    assert pinned is not None
    assert pinned.pin(60)
    assert store.lifecycle()["tenants"]["acme"]["open"] >= 2
    store = reopen()
    now = int(clock.wall())
    hold = store.hold(tenant="acme", session="a", reason=WHY)
    order = store.erase(tenant="acme")
    told = store.lifecycle("acme")
    assert [one["id"] for one in told["erasures"]] == [order["id"]]
    assert [one["id"] for one in told["holds"]] == [hold["id"]]
    acme = told["tenants"]["acme"]
    ends = acme["expiring"]
    assert (acme["until_evicted"], ends["segments"] >= 1) == (1, True)
    assert now + TTL_S <= ends["first_s"] <= now + TTL_S + 60  # times to live are rounded up
    (session,) = told["sessions"]["next"]
    assert (session["name"], session["ends_s"], session["hold"]) == ("a", now + TTL_S, hold["id"])
    assert session["pinned_until_s"] == now + 60
    assert store.lifecycle("globex") == told | {
        "erasures": [], "holds": [], "tenants": {}, "sessions": {"count": 0, "next": []}
    }  # fmt: skip


def test_the_commands(tmp_path: Path) -> None:
    with closing(perdure.open(tmp_path / "s", capacity="32MiB", memory=0)) as store:
        session_of(store, "a", 1)
    told = json.loads(run("hold", tmp_path / "s", "--tenant", "acme", "--session", "a", "--reason", WHY, "--json"))
    order = json.loads(run("erase", tmp_path / "s", "--tenant", "acme", "--json"))
    assert order["state"] == "held"
    text = run("lifecycle", tmp_path / "s")
    for line in (
        f"erasure {order['id']} of acme (tenant): held; hold {told['id']} ({WHY})",
        f"hold {told['id']} of acme (session a): 5 blocks; {WHY}",
        "session a of acme: over at",
    ):
        assert line in text
    assert json.loads(run("lifecycle", tmp_path / "s", "--tenant", "acme", "--json"))["tenants"].keys() == {"acme"}
    assert "is off" in run("unhold", tmp_path / "s", told["id"], "--tenant", "acme")
    assert "no hold" not in run("erase", tmp_path / "s", "--state", order["id"])
    with closing(perdure.open(tmp_path / "s", memory=0)) as store:
        assert finished(store, order["id"])["state"] == "erased"


def run(*arguments: Any) -> str:
    done = CliRunner().invoke(main, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output
    return done.output


# --- through a service
def test_operators_of_the_tenant_hold(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    terms = "retention_max_s = 86400\nidle_ttl_s = 3600"
    policy = policy_directory(tmp_path / "p", sockets=tmp_path / "r", acme=terms)
    with serving(tmp_path / "s", policy=policy) as _, contextlib.ExitStack() as stack:
        engine, operator = (
            stack.enter_context(perdure.connect(tmp_path / "r" / f"{name}.sock")) for name in ("engine-a", "operator")
        )
        space = client_keyspace(engine, tenant="acme")
        assert write(space, client_chain(space, 1, 2)) == [STORED] * 2
        for refused in (
            lambda: engine.hold(tenant="acme", reason=WHY),
            lambda: engine.lifecycle("acme"),
            lambda: engine.lifecycle(),
            lambda: operator.hold(tenant="initech", reason=WHY),
        ):
            with pytest.raises(AccessDenied):
                refused()
        hold = operator.hold(tenant="acme", reason=WHY)
        with pytest.raises(AccessDenied):
            engine.unhold(tenant="acme", hold=hold["id"])
        assert operator.erase(tenant="acme")["state"] == "held"
        told = operator.lifecycle("acme")
        assert told["tenants"]["acme"]["terms"] == {
            "name": "acme@1", "idle_ttl_s": 3600.0, "retention_min_s": 0.0, "retention_max_s": 86400.0,
        }  # fmt: skip
        assert "reason" in told["holds"][0]
        operator.unhold(tenant="acme", hold=hold["id"])
        order = told["erasures"][0]["id"]
        while operator.erasure(order)["state"] != "erased":
            threading.Event().wait(0.05)
        assert not np.any(space.present(client_chain(space, 1, 2)))
