"""The presence index against a dict, with keys aimed at single buckets, beside concurrent readers, and at full size."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from perdure import limits
from perdure.presence import PresenceIndex
from perdure.presence_table import EMPTY, NO_SEGMENT, TOMBSTONE

U64 = NDArray[np.uint64]


def array(values: list[int]) -> U64:
    return np.array(values, np.uint64)


def same_bucket(n: int, bucket: int = 5) -> U64:
    """Fingerprints whose low 32 bits are equal: one home bucket at every table size."""
    return (np.arange(1, n + 1, dtype=np.uint64) << np.uint64(32)) | np.uint64(bucket)


def random_keys(n: int, seed: int = 1) -> U64:
    return np.random.default_rng(seed).integers(0, 2**64, n, dtype=np.uint64)


def check_invariants(index: PresenceIndex) -> None:
    table = index._table
    occupied = table.fp > TOMBSTONE
    assert np.count_nonzero(occupied) == len(index)
    assert np.count_nonzero(table.fp == TOMBSTONE) == index._tombstones
    assert np.count_nonzero(table.fp) <= table.fp.size * limits.presence_load_max
    empty = table.fp == EMPTY
    assert (empty[:, :-1] <= empty[:, 1:]).all()  # buckets fill from the left and stay so


# few low bits and few high bits: most keys share buckets, some are reserved values, all repeat
FP = st.builds(lambda low, high: low | high << 40, st.integers(0, 3), st.integers(0, 30))
FPS = st.lists(FP, max_size=40)
U32 = st.integers(0, 12)
STEP = st.one_of(
    st.tuples(st.just("insert"), FPS, U32, U32, st.integers(0, 5)),
    st.tuples(st.just("fill"), FPS, U32, U32, st.integers(0, 5)),
    st.tuples(st.just("remove"), FPS, st.none() | U32),
    st.tuples(st.just("remove_segment"), U32),
    st.tuples(st.just("touch"), FPS, U32),
    st.tuples(st.just("release"), FPS),
)
Model = dict[int, tuple[int, int, int]]


def apply_step(index: PresenceIndex, model: Model, step: tuple[Any, ...]) -> None:
    verb, *args = step
    if verb == "remove_segment":
        gone = [k for k, entry in model.items() if entry[0] == args[0]]
        assert index.remove_segment(args[0]) == len(gone)
        for k in gone:
            del model[k]
        return
    keys = [max(k, 2) for k in args[0]]
    fp = array(args[0])
    if verb in ("insert", "fill"):
        segment, recency, expires = args[1:]
        columns = np.arange(len(keys), dtype=np.uint32) + segment  # which of two equal keys won is visible
        added = index.insert(fp, segment=columns, recency=recency, expires_s=expires, only_absent=verb == "fill")
        assert added == len(set(keys) - set(model))
        before = dict(model)
        for k, s in zip(keys, columns.tolist(), strict=True):
            if verb == "insert" or k not in before:
                old = before.get(k, (0, 0, 0))
                model[k] = (s, max(recency, old[1]), expires)
    elif verb == "remove":
        gone = [k for k in set(keys) if k in model and args[1] in (None, model[k][0])]
        assert index.remove(fp, segment=args[1]) == len(gone)
        for k in gone:
            del model[k]
    else:
        for k in set(keys) & set(model):
            s, r, e = model[k]
            model[k] = (s, max(r, args[1]), e) if verb == "touch" else (s, 0, e)
        if verb == "touch":
            index.touch(fp, args[1])
        else:
            index.release(fp)


def check_answers(index: PresenceIndex, model: Model, asked: list[int]) -> None:
    asked = asked + [low | high << 40 for low in range(4) for high in range(31)]
    fp = array(asked)
    mapped = [max(k, 2) for k in asked]
    slots = index.probe(fp)
    assert ((slots >= 0) == [k in model for k in mapped]).all()
    assert (index._table.fp.reshape(-1)[slots[slots >= 0]] == np.maximum(fp[slots >= 0], np.uint64(2))).all()
    assert index.segments_of(fp).tolist() == [model[k][0] if k in model else NO_SEGMENT for k in mapped]
    for now in (0, 2, 3):
        alive = [k in model and (model[k][2] == 0 or model[k][2] > now) for k in mapped]
        assert index.prefix(fp, now) == [*alive, False].index(False)
        assert index.visible(fp, now).tolist() == alive
    assert index.recency_of(fp).tolist() == [model[k][1] if k in model else 0 for k in mapped]
    columns = index.columns()
    got = zip(*(c.tolist() for c in columns), strict=True)
    assert {f: rest for f, *rest in got} == {k: list(entry) for k, entry in model.items()}
    fp, recency = index.changed_since(4)
    changed = dict(zip(fp.tolist(), recency.tolist(), strict=True))
    assert changed == {k: entry[1] for k, entry in model.items() if entry[1] > 4}


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEP, max_size=12), asked=FPS, capacity=st.sampled_from([0, 40, 1000]))
def test_behaves_like_a_dict(steps: list[tuple[Any, ...]], asked: list[int], capacity: int) -> None:
    index = PresenceIndex(capacity_keys=capacity)
    model: Model = {}
    for step in steps:
        apply_step(index, model, step)
        check_invariants(index)
    assert len(index) == len(model)
    check_answers(index, model, asked)


def test_keys_of_one_bucket_are_all_kept_and_removal_leaves_the_chain_intact() -> None:
    index = PresenceIndex(capacity_keys=1000)
    keys = same_bucket(300)
    index.insert(keys[:150], segment=0, recency=1)
    index.insert(keys[150:], segment=0, recency=1)
    assert (index.probe(keys) >= 0).all()
    assert index.prefix(keys, 0) == 300
    assert index.remove(keys[:200]) == 200
    assert (index.probe(keys[:200]) == -1).all()
    assert index.prefix(keys[200:], 0) == 100
    used = np.count_nonzero(index._table.fp)
    index.insert(keys[:50], segment=1, recency=1)
    assert np.count_nonzero(index._table.fp) == used  # tombstones are taken first
    assert (index.probe(keys[:50]) >= 0).all()
    check_invariants(index)


def test_a_chain_wraps_around_the_end_of_the_table() -> None:
    index = PresenceIndex(capacity_keys=100)
    keys = same_bucket(60, bucket=0xFFFF_FFFF)
    index.insert(keys, segment=0, recency=1)
    assert index.prefix(keys, 0) == 60
    assert (index.probe(same_bucket(61, bucket=0xFFFF_FFFF)[60:]) == -1).all()


def test_removal_and_insertion_without_end_stay_in_one_table() -> None:
    index = PresenceIndex(capacity_keys=2000)
    size = index.nbytes
    keys = random_keys(40_000)
    for start in range(0, len(keys), 500):
        index.insert(keys[start : start + 500], segment=0, recency=1)
        if start:
            assert index.remove(keys[start - 500 : start]) == 500
    assert index.nbytes == size
    check_invariants(index)


def test_reserved_values_are_keys_like_any_other() -> None:
    index = PresenceIndex()
    reserved = array([EMPTY, TOMBSTONE])
    assert index.prefix(reserved, 0) == 0
    assert (index.probe(reserved) == -1).all()
    index.insert(reserved, segment=3, recency=1)
    assert index.prefix(reserved, 0) == 2
    assert len(index) == 1
    assert index.remove(reserved) == 1
    assert index.prefix(reserved, 0) == 0


def test_expired_keys_end_the_prefix_but_are_still_found() -> None:
    index = PresenceIndex()
    keys = random_keys(200)
    index.insert(keys, segment=0, recency=1, expires_s=np.where(np.arange(200) == 150, 1000, 0))
    assert index.prefix(keys, 999) == 200
    assert index.prefix(keys, 1000) == 150
    assert (index.probe(keys) >= 0).all()
    index.insert(keys[150:151], segment=0, recency=1, expires_s=2000)
    assert index.prefix(keys, 1999) == 200
    index.insert(random_keys(100_000, seed=2), segment=0, recency=1)  # a rehash keeps expiry
    assert index.prefix(keys, 2000) == 150


def test_a_key_that_is_given_an_expiry_later_expires() -> None:
    index = PresenceIndex()
    keys = random_keys(3)
    index.insert(keys, segment=0, recency=1)
    index.insert(keys[1:2], segment=0, recency=1, expires_s=10)
    assert index.prefix(keys, 9) == 3
    assert index.prefix(keys, 10) == 1


def test_an_expired_key_outside_its_home_bucket_ends_the_prefix() -> None:
    index = PresenceIndex()
    keys = same_bucket(20)
    index.insert(keys, segment=0, recency=1, expires_s=np.where(np.arange(20) == 12, 10, 0))
    assert index.prefix(keys, 9) == 20
    assert index.prefix(keys, 10) == 12


@pytest.mark.parametrize("hole", [0, 1, 63, 64, 65, 575, 576, 577, 4671, 4672, 4673, 9999])
def test_the_prefix_ends_at_the_first_hole_wherever_batches_meet(hole: int) -> None:
    index = PresenceIndex()
    keys = random_keys(10_000)
    index.insert(np.delete(keys, hole), segment=0, recency=1)
    assert index.prefix(keys, 0) == hole
    index.insert(keys[hole : hole + 1], segment=0, recency=1)
    assert index.prefix(keys, 0) == 10_000


def test_empty_batches() -> None:
    index = PresenceIndex()
    none = array([])
    assert index.prefix(none, 0) == 0
    assert index.probe(none).shape == (0,)
    assert index.insert(none, segment=0, recency=0) == 0
    assert index.remove(none) == 0
    index.touch(none, 1)
    index.release(none)
    assert len(index.columns().fp) == 0


def test_signed_fingerprints_are_refused() -> None:
    with pytest.raises(TypeError):
        PresenceIndex().probe(np.array([3], np.int64))  # type: ignore[arg-type]


def test_a_million_keys_lose_none() -> None:
    index = PresenceIndex()
    keys = random_keys(1_000_000)
    for start in range(0, len(keys), 8192):
        part = keys[start : start + 8192]
        index.insert(part, segment=start // 8192, recency=7)
    assert len(index) == len(np.unique(keys))
    assert index.prefix(keys, 0) == len(keys)
    assert (index.segments_of(keys[:100_000]) == np.arange(100_000) // 8192).all()
    assert (index.probe(random_keys(100_000, seed=3)) == -1).all()
    check_invariants(index)
    assert index.nbytes < 50e6


def test_beyond_max_keys_the_coldest_go_and_misses_are_no_longer_final() -> None:
    index = PresenceIndex(max_keys=8000)
    keys = random_keys(20_000)
    index.insert(keys[:8000], segment=0, recency=np.arange(8000)[::-1])
    assert index.mark_complete()
    assert index.complete
    index.insert(keys[8000:8001], segment=0, recency=9000)
    assert not index.complete
    assert not index.mark_complete()
    assert len(index) == 7000
    assert index.prefix(keys[:6999], 0) == 6999
    assert (index.probe(keys[6999:8000]) == -1).all()
    assert index.probe(keys[8000:8001])[0] >= 0
    index.insert(keys, segment=0, recency=0)  # cold keys do not push out warm ones
    assert 7000 <= len(index) <= 8000
    assert index.prefix(keys[:6999], 0) == 6999
    check_invariants(index)
    index.clear()
    assert len(index) == 0
    assert index.mark_complete()


def test_a_small_bound_holds_for_a_batch_of_any_size() -> None:
    index = PresenceIndex(max_keys=3)
    index.insert(random_keys(100), segment=0, recency=np.arange(100))
    assert len(index) <= 3
    assert (index.probe(random_keys(100)[-1:]) >= 0).all()


def test_released_keys_go_first() -> None:
    index = PresenceIndex(max_keys=800)
    keys = random_keys(801)
    index.insert(keys[:800], segment=0, recency=np.arange(1, 801))
    index.release(keys[700:800])
    index.touch(keys[799:800], 5)  # used after all
    index.insert(keys[800:], segment=0, recency=900)
    assert (index.probe(keys[700:799]) == -1).all()
    assert (index.probe(keys[2:700]) >= 0).all()


def test_touch_takes_the_latest_tick_of_a_repeated_key() -> None:
    index = PresenceIndex()
    key = random_keys(1)
    index.insert(key, segment=0, recency=3)
    index.touch(np.repeat(key, 3), np.array([5, 9, 2], np.uint32))
    assert index.columns().recency.tolist() == [9]


def test_readers_beside_a_writer_that_inserts_removes_and_grows() -> None:
    index = PresenceIndex(capacity_keys=64)
    staying, never = random_keys(700, seed=4), random_keys(700, seed=5)
    staying = np.concatenate([staying, same_bucket(60)])
    churn = random_keys(60_000, seed=6)
    index.insert(staying, segment=0, recency=1)
    done = threading.Event()
    wrong: list[str] = []
    rounds = [0, 0]

    def read(reader: int) -> None:
        try:
            while not (done.is_set() and rounds[reader] > 20):
                rounds[reader] += 1
                if index.prefix(staying, 0) != len(staying):
                    wrong.append("a key that stays was missed")
                if (index.probe(staying) < 0).any():
                    wrong.append("a key that stays was missed by probe")
                if (index.probe(never) >= 0).any() or index.prefix(never, 0):
                    wrong.append("an absent key was found")
                columns = index.columns()
                if np.setdiff1d(staying, columns.fp).size:
                    wrong.append("a key that stays is not listed")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for start in range(0, len(churn), 1000):
        index.insert(churn[start : start + 1000], segment=1, recency=2)
        index.remove(churn[max(0, start - 2000) : start : 2])
        index.insert(same_bucket(120)[60:], segment=1, recency=2)
        index.remove(same_bucket(120)[60:])
    done.set()
    for t in threads:
        t.join()
    assert wrong == []
    check_invariants(index)
