"""Which host a router should prefer: the same order for all, little moves, memory before anything else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.served import serving

import perdure
from perdure import Advice, prefer, rendezvous
from perdure.errors import InvalidArgument
from perdure.testing.store import FOUND, STORED, chain, keyspace, read, write

HOSTS = [f"host{number}" for number in range(8)]
NAMES = [f"session {number}" for number in range(4000)]


def test_order_is_the_same_for_everybody_and_even() -> None:
    assert all(rendezvous(name, HOSTS) == rendezvous(name.encode(), HOSTS[::-1]) for name in NAMES[:100])
    first = Counter(rendezvous(name, HOSTS)[0] for name in NAMES)
    assert set(first) == set(HOSTS)
    assert max(first.values()) < 1.2 * len(NAMES) / len(HOSTS)
    assert rendezvous("x", []) == []
    # changes here send every session of every installation elsewhere
    assert rendezvous("session 0", HOSTS[:4]) == ["host2", "host3", "host0", "host1"]


def test_a_host_that_goes_moves_only_what_it_had() -> None:
    for name in NAMES[:500]:
        before = rendezvous(name, HOSTS)
        assert rendezvous(name, set(HOSTS) - {"host3"}) == [host for host in before if host != "host3"]


def test_weights_are_shares() -> None:
    first = Counter(rendezvous(name, {"small": 1.0, "large": 3.0})[0] for name in NAMES)
    assert first["large"] / len(NAMES) == pytest.approx(0.75, abs=0.03)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match="small"):
            rendezvous("x", {"small": wrong})


def test_memory_comes_first() -> None:
    order = rendezvous("x", HOSTS)
    reports = {host: Advice(8, 0.1, 1.0, "", 8, 0) for host in HOSTS}
    assert prefer("x", reports) == order
    reports[order[5]] = Advice(8, 0.1, 1.0, "", 8, 3)
    assert prefer("x", reports) == [order[5], *(host for host in order if host != order[5])]


def test_advice_says_what_is_in_memory(tmp_path: Path) -> None:
    """Through a service: what was read is in its memory, what was only written before its start is not."""
    with perdure.open(tmp_path / "s", capacity="256MiB") as store:
        keys = chain(keyspace(store), 1, 6)
        assert write(keyspace(store), keys) == [STORED] * 6
    with serving(tmp_path / "s"), perdure.connect(tmp_path / "s") as client:
        space = keyspace(client)
        asked = np.concatenate([keys, chain(space, 2, 1)])
        advice = space.advise(asked, prefill_tokens_per_s=1e3)
        assert (advice.stored, advice.in_memory) == (6, 0)
        assert read(space, keys[:4]) == [FOUND] * 4
        advice = space.advise(asked, prefill_tokens_per_s=1e3)
        assert (advice.stored, advice.in_memory) == (6, 4)
