"""Shares of one store: who evicts whom, in the rules and through a service, by what is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policies import policy_directory
from support.served import serving

import perdure
from perdure import keys as naming
from perdure.governance.shares import Shares
from perdure.governance.terms import Document, Share
from perdure.limits import MIB
from perdure.store import Store
from perdure.testing.store import REJECTED, STORED, chain, keyspace, write

SECRET = b"s" * 32


def id_of(tenant: str) -> bytes:
    return naming.tenant_id(naming.tenant_secret(SECRET, tenant))


def shares(**of: tuple[int, int]) -> Shares:
    """tenant -> (weight, guaranteed bytes)."""
    return Shares(SECRET, {name: Document(tenant=name, version=1, share=Share(*share)) for name, share in of.items()})


def victims(made: Shares, asking: str, room: int, **used: int) -> set[str]:
    names = {id_of(name): name for name in ({*used} | {asking})}
    return {names[one] for one in made.victims(id_of(asking), {id_of(n): b for n, b in used.items()}, room)}


def test_who_has_its_share_evicts_its_own() -> None:
    made = shares(a=(1, 0), b=(1, 0))
    assert victims(made, "a", 100, a=90, b=10) == {"a"}
    assert victims(made, "b", 100, a=90, b=10) == {"a", "b"}
    assert victims(made, "a", 100, a=50, b=50) == {"a"}
    heavy = shares(a=(3, 0), b=(1, 0))
    assert victims(heavy, "a", 100, a=60, b=40) == {"a", "b"}
    assert victims(heavy, "b", 100, a=60, b=40) == {"b"}


def test_what_is_guaranteed_stays() -> None:
    made = shares(a=(1, 0), b=(1, 60), c=(1, 0))
    assert victims(made, "a", 100, a=10, b=60, c=30) == {"a", "c"}
    assert victims(made, "c", 100, a=10, b=60, c=40) == {"c"}


def test_tenants_without_terms_have_no_share() -> None:
    made = shares(a=(1, 0))
    assert victims(made, "stranger", 100, a=50) == {"stranger", "a"}
    assert victims(made, "stranger", 100, a=101) == {"stranger", "a"}
    assert victims(made, "a", 100, a=90, stranger=10) == {"a", "stranger"}


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 9), st.integers(0, 50)), min_size=1),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 100)),
    st.sampled_from("abcd"),
    st.integers(1, 200),
)
def test_nobody_is_evicted_below_what_was_guaranteed(
    of: dict[str, tuple[int, int]], used: dict[str, int], asking: str, room: int
) -> None:
    made = shares(**of)
    for one in victims(made, asking, room, **used) - {asking}:
        assert used[one] > of.get(one, (0, 0))[1]


# --- through a service
@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Store, Path]]:
    """Room for 28 MiB of segments; the victim is guaranteed 8 MiB."""
    directory = policy_directory(tmp_path / "p", sockets=tmp_path, globex='[share]\nguaranteed_bytes = "8MiB"')
    with serving(tmp_path / "s", policy=directory, capacity=32 * MIB, memory=8 * MIB) as (store, _):
        yield store, tmp_path


def fill(space: perdure.Keyspace, first: int, nbytes: int) -> list[int]:
    """Statuses of one chain after another, of 512 KiB each."""
    statuses: list[int] = []
    for number in range(first, first + nbytes // (512 << 10)):
        statuses += write(space, chain(space, number, 64))
    return statuses


def test_a_noisy_neighbour_evicts_its_own(small: tuple[Store, Path]) -> None:
    """Ten times the room written by one tenant: the other keeps every block, on the disk."""
    store, folder = small
    with (
        perdure.connect(folder / "engine-a.sock") as loud,
        perdure.connect(folder / "engine-b.sock") as quiet,
    ):
        noisy, victim = keyspace(loud), keyspace(quiet, tenant="globex")
        keys = chain(victim, 1, 256)
        for at in range(0, 256, 64):
            assert write(victim, keys[at : at + 64]) == [STORED] * 64
        assert set(fill(noisy, 10, 280 * MIB)) <= {STORED, REJECTED}
        assert victim.present(keys).all()
        usage = store.core.index.usage()
        assert usage[victim.tenant_id].blocks == 256
        assert usage[noisy.tenant_id].record_bytes > 4 * MIB  # it still has its share
        assert noisy.present(chain(noisy, 10 + 559, 64)).all()  # of the newest
        assert store.core.reclaimer.counters.segments_dropped > 100


def test_without_shares_the_coldest_go_whoever_has_them(tmp_path: Path) -> None:
    """What the test above would see, were eviction not isolated."""
    with serving(tmp_path / "s", capacity=32 * MIB, memory=8 * MIB), perdure.connect(tmp_path / "s") as client:
        noisy, victim = keyspace(client), keyspace(client, tenant="globex")
        keys = chain(victim, 1, 256)
        assert write(victim, keys) == [STORED] * 256
        fill(noisy, 10, 60 * MIB)
        assert not victim.present(keys).all()


def test_who_is_below_its_share_takes_from_who_is_above(small: tuple[Store, Path]) -> None:
    _, folder = small
    with perdure.connect(folder / "engine-a.sock") as loud, perdure.connect(folder / "engine-b.sock") as quiet:
        noisy, late = keyspace(loud), keyspace(quiet, tenant="globex")
        fill(noisy, 10, 60 * MIB)
        assert set(fill(late, 1, 8 * MIB)) == {STORED}
        assert late.present(chain(late, 1, 64)).all()


def test_a_full_quota_gives_up_the_tenants_own_coldest(tmp_path: Path) -> None:
    directory = policy_directory(tmp_path / "p", sockets=tmp_path, acme='[quota]\nstored_bytes = "6MiB"')
    with (
        serving(tmp_path / "s", policy=directory, capacity=64 * MIB) as (store, _),
        perdure.connect(tmp_path / "engine-a.sock") as one,
        perdure.connect(tmp_path / "engine-b.sock") as other,
    ):
        space, theirs = keyspace(one), keyspace(other, tenant="globex")
        keys = chain(theirs, 1, 64)
        write(theirs, keys)
        for durability in ("session", "ephemeral"):
            for number in range(40):
                mine = chain(space, number + (100 if durability == "session" else 200), 32)
                assert set(write(space, mine, durability=durability)) == {STORED}
                assert store.core.index.usage()[space.tenant_id].record_bytes <= 6 * MIB
            assert space.present(mine).all()
        assert not space.present(chain(space, 100, 32)).any()
        assert theirs.present(keys).all()


def test_memory_of_others_is_taken_by_who_has_less_only(tmp_path: Path) -> None:
    """The DRAM tier: chunks of 64 MiB, four of them."""
    directory = policy_directory(tmp_path / "p", sockets=tmp_path)
    size = 4 * MIB
    with (
        serving(tmp_path / "s", policy=directory, capacity=2048 * MIB, memory=256 * MIB) as (store, _),
        perdure.connect(tmp_path / "engine-a.sock") as loud,
        perdure.connect(tmp_path / "engine-b.sock") as quiet,
    ):
        noisy = keyspace(loud, block_bytes=size)
        victim = keyspace(quiet, tenant="globex", block_bytes=size)
        pool = store.core.pool
        keys = chain(victim, 1, 8)
        zeros = np.zeros((8, size), np.uint8)
        victim.write(keys, zeros, durability="ephemeral")
        for number in range(10, 22):
            noisy.write(chain(noisy, number, 8), zeros, durability="ephemeral")
        assert all(pool.holds(keys))
        held = {chunk.owner.domain for chunk in pool._chunks}
        assert held == {victim.tenant_id, noisy.tenant_id}
