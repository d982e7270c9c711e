"""Admission by expected value: what is learned from what is asked again, what is refused and why, and what is not."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.served import serving

import perdure
from perdure import limits
from perdure.admission import CLASSES, Admissions, Gate, ValueGate, check
from perdure.catalog.api import Durability, KeyArray
from perdure.clock import FakeClock
from perdure.errors import ConfigError, InvalidArgument, PerdureError
from perdure.reports import WriteStatus
from perdure.reuse import Reuse
from perdure.service import settings
from perdure.service.process import Readiness
from perdure.service.server import shared_pool
from perdure.store import Seams, Store
from perdure.testing.transport import until

TOKENS, BYTES = 16, 4096
LONG_S = 2 * limits.admission_patience_s
DEAR = perdure.AdmissionPrices(flash_usd_per_gb=1e6)  # nothing is worth writing, once something is known


def keys(count: int, seed: int = 1, *, sampled: bool | None = True) -> KeyArray:
    """sampled True, False: all in the sample, or none of them; None: as it happens."""
    made = np.random.default_rng(seed).integers(0, 256, (count, limits.key_bytes), np.uint8)
    if sampled is not None:
        made[:, -1] = 0 if sampled else 255  # the last byte is the highest of the word that decides
    return made


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


def request(names: KeyArray, first: int = 0) -> perdure.AdmissionRequest:
    return perdure.AdmissionRequest("t", "m", names, BYTES, np.arange(first, first + len(names)), Durability.SESSION)


def gate(time: Time, kept_s: float = math.inf, **how: Any) -> ValueGate:
    return ValueGate(perdure.ValueAdmission(**how), TOKENS, BYTES, time, lambda: kept_s)


def learn(reuse: Reuse, time: Time, count: int, asked: int, *, seed: int = 1, after_s: float = 10.0) -> None:
    """`count` blocks of class 0 are offered, the first `asked` of them asked for a little later; then time passes."""
    names = keys(count, seed)
    reuse.offered(names, np.zeros(count, np.intp))
    time.now += after_s
    reuse.asked(names[:asked])
    time.now += LONG_S


# --- learning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [0, 25, 100, 190])
def test_the_share_that_is_asked_for_is_the_probability(time: Time, asked: int) -> None:
    reuse = Reuse(1, time)
    learn(reuse, time, 200, asked)
    chances, _ = reuse.chances(math.inf, 1)
    assert chances[0] == pytest.approx(asked / 200, abs=0.02)


def test_those_that_still_wait_are_not_taken_for_those_that_never_come(time: Time) -> None:
    """Half of each batch is asked for after 300 s: with batches of all ages the estimate is still a half."""
    reuse = Reuse(1, time)
    for batch in range(40):
        reuse.offered(keys(50, 100 + batch), np.zeros(50, np.intp))
        if batch >= 10:
            reuse.asked(keys(50, 90 + batch)[:25])
        time.now += 30.0
    chances, known = reuse.chances(math.inf, 64)
    assert known[0]
    assert chances[0] == pytest.approx(0.5, abs=0.1)


def test_a_chance_is_one_within_the_time_a_block_is_kept(time: Time) -> None:
    reuse = Reuse(1, time)
    learn(reuse, time, 200, 100, after_s=200.0)
    assert reuse.chances(math.inf, 1)[0][0] == pytest.approx(0.5, abs=0.05)
    time.now += 1.0
    assert reuse.chances(20.0, 1)[0][0] == 0.0


def test_classes_are_apart(time: Time) -> None:
    reuse = Reuse(2, time)
    names = keys(200)
    reuse.offered(names, np.arange(200) % 2)
    time.now += 5.0
    reuse.asked(names[::2])
    time.now += LONG_S
    assert reuse.chances(math.inf, 1)[0] == pytest.approx([1.0, 0.0], abs=0.01)


def test_what_happened_long_ago_counts_less(time: Time) -> None:
    reuse = Reuse(1, time)
    learn(reuse, time, 200, 200)
    time.now += 3 * limits.admission_half_life_s
    learn(reuse, time, 200, 0, seed=2)
    assert reuse.chances(math.inf, 1)[0][0] == pytest.approx(1 / 9, abs=0.03)


def test_nothing_is_known_before_enough_have_waited_in_vain(time: Time) -> None:
    reuse = Reuse(1, time)
    reuse.offered(keys(100), np.zeros(100, np.intp))
    time.now += limits.admission_patience_s - 1
    assert not reuse.chances(math.inf, 64)[1].any()
    time.now += 2.0
    assert reuse.chances(math.inf, 64)[1].all()
    assert not reuse.chances(math.inf, 128)[1].any()


def test_the_requests_own_questions_tell_nothing(time: Time) -> None:
    reuse = Reuse(1, time)
    learn(reuse, time, 100, 100, after_s=limits.admission_own_request_s / 2)
    assert reuse.chances(math.inf, 1)[0][0] == 0.0


def test_being_offered_again_is_being_asked_for(time: Time) -> None:
    """Engines that look up in mapped memory send no question; they compute the block, and offer it, again."""
    reuse = Reuse(1, time)
    names = keys(100)
    for _ in range(2):
        reuse.offered(names, np.zeros(100, np.intp))
        time.now += 10.0
    time.now += LONG_S
    assert reuse.chances(math.inf, 1)[0][0] == pytest.approx(0.5, abs=0.02)  # asked for once, of two times


def test_keys_outside_the_sample_leave_no_trace(time: Time) -> None:
    reuse = Reuse(1, time)
    reuse.offered(keys(100, sampled=False), np.zeros(100, np.intp))
    reuse.asked(keys(100, sampled=False))
    reuse.chances(math.inf, 1)
    assert reuse.samples()[0] == 0


def test_a_full_sample_halves_itself_and_the_estimate_stays(time: Time) -> None:
    reuse = Reuse(1, time, keys_max=128)
    for batch in range(60):
        names = keys(100, batch, sampled=None)
        reuse.offered(names, np.zeros(100, np.intp))
        time.now += 5.0
        reuse.asked(names[:30])
        time.now += 5.0
    time.now += LONG_S
    chances, _ = reuse.chances(math.inf, 1)
    assert chances[0] == pytest.approx(0.3, abs=0.12)
    assert len(reuse._places) <= 128
    assert len(reuse._places) + len(reuse._free) == 128


def test_the_sample_grows_again_when_it_is_nearly_empty(time: Time) -> None:
    reuse = Reuse(1, time, keys_max=64)
    reuse.offered(keys(400, sampled=None), np.zeros(400, np.intp))
    reuse.offered(keys(400, 2, sampled=None), np.zeros(400, np.intp))
    small = reuse._rate
    time.now += limits.admission_age_s_max + 1
    reuse.chances(math.inf, 1)
    assert reuse._rate == 2 * small
    assert not reuse._places


def test_threads_lose_no_key(time: Time) -> None:
    reuse = Reuse(4, time)

    def work(number: int) -> None:
        for turn in range(20):
            names = keys(16, 1000 * number + turn)
            reuse.offered(names, np.full(16, number))
            reuse.asked(keys(16, 1000 * ((number + 1) % 4) + turn))
            reuse.chances(math.inf, 1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.now += 1.0  # the estimate is made anew
    reuse.chances(math.inf, 1)
    assert len(reuse._places) == 4 * 20 * 16
    assert reuse.samples() == pytest.approx([320.0] * 4, rel=0.01)


# --- deciding -------------------------------------------------------------------------------------------------


def test_a_block_that_nobody_asks_for_is_refused_with_the_figures(time: Time) -> None:
    value = gate(time)
    assert value.refusals(request(keys(100))) == []
    time.now += LONG_S
    ((places, why), behind) = value.refusals(request(keys(10, 2)))
    assert places.tolist() == list(range(10))
    assert not len(behind[0])
    assert why.startswith("value: reuse 0.00 of class new/near over ")
    assert " samples, worth 0 ms, costs " in why
    assert value.status()["classes"]["new/near"] == {
        "samples": pytest.approx(100, rel=0.15), "probability": 0.0, "admitted": 100, "refused": 10
    }  # fmt: skip


def test_a_block_that_is_asked_for_is_admitted(time: Time) -> None:
    value = gate(time, survivors_min=8)
    names = keys(100)
    value.refusals(request(names))
    time.now += 10.0
    value.asked(names[:30])
    time.now += LONG_S
    assert value.refusals(request(keys(10, 2))) == []
    assert value.status()["classes"]["new/near"]["probability"] == pytest.approx(0.3, abs=0.02)


def test_the_price_decides_and_what_the_engine_computes(time: Time) -> None:
    """At 2 tokens/s a block of 16 is worth 8 s; told 1e9 tokens/s it is not worth writing."""
    value = gate(time, survivors_min=8)
    names = keys(100)
    value.refusals(request(names))
    time.now += 10.0
    value.asked(names[:30])
    time.now += LONG_S
    value.advised(1e9)
    assert len(value.refusals(request(keys(10, 2)))[0][0]) == 10
    value.advised(2.0)
    assert value.refusals(request(keys(10, 3))) == []
    assert value.status()["recompute_s"] == TOKENS / 2.0
    fixed = gate(time, prefill_tokens_per_s=4.0)
    fixed.advised(2.0)
    assert fixed.status()["recompute_s"] == TOKENS / 4.0


def test_a_refused_block_refuses_what_follows_it(time: Time) -> None:
    """The deep class is good, the near one is not: without the near blocks the deep ones cannot be used."""
    value = gate(time)
    deep = 600
    names = keys(deep)
    value.refusals(request(names))
    time.now += 10.0
    value.asked(names[200:])
    time.now += LONG_S
    (same, why), (behind, because) = value.refusals(request(keys(deep, 2)))
    assert same.tolist() == list(range(128))  # 2,048 tokens
    assert behind.tolist() == list(range(128, deep))
    assert because == f"behind a refused block ({why})"


def test_what_is_stored_in_front_makes_the_class(time: Time) -> None:
    names = keys(600)

    def classes(question: perdure.AdmissionRequest, found: int = 0) -> list[str]:
        value = gate(time)
        value.asked(names, found)
        return [CLASSES[kind] for kind in value.classes(question)]

    assert set(classes(request(names[500:]), found=500)) == {"short/near"}  # behind 8,000 tokens
    assert classes(request(names[512:], first=512))[0] == "medium/near"
    assert classes(request(names))[-1] == "new/far"
    assert classes(request(names[1:], first=1))[-1] == "new/far"
    assert classes(request(names[1:], first=1), found=500)[-1] == "new/far"  # found behind another prefix


def test_what_was_offered_before_has_a_class_of_its_own(time: Time) -> None:
    value = gate(time)
    names = keys(10)
    value.refusals(request(names[:4]))
    assert [CLASSES[kind] for kind in value.classes(request(names))] == ["again/near"] * 4 + ["new/near"] * 6
    assert {CLASSES[kind] for kind in value.classes(request(names))} == {"again/near"}


def test_prefixes_are_remembered_up_to_a_bound(time: Time) -> None:
    value = gate(time)
    for number in range(limits.admission_heads_entries_max + 10):
        value.asked(keys(2, number, sampled=False), found=1)
    assert len(value._heads) == limits.admission_heads_entries_max


def test_what_is_evicted_before_it_is_asked_for_is_worth_nothing(time: Time) -> None:
    for kept_s, refused in ((math.inf, False), (30.0, True)):
        value = gate(time, kept_s, survivors_min=8)
        names = keys(100)
        value.refusals(request(names))
        time.now += 200.0
        value.asked(names[:50])
        time.now += LONG_S
        assert bool(value.refusals(request(keys(1, 2)))) is refused


def test_threads_count_every_block(time: Time) -> None:
    value = gate(time)

    def work(number: int) -> None:
        for turn in range(50):
            names = keys(8, 1000 * number + turn, sampled=None)
            value.refusals(request(names))
            value.asked(names, 4)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value.status()["classes"]["new/near"]["admitted"] == 4 * 50 * 8


def test_the_same_calls_give_the_same_answers() -> None:
    def run() -> list[Any]:
        time, answers = Time(), []
        value = gate(time, prices=DEAR)
        for turn in range(60):
            names = keys(40, turn, sampled=None)
            answers.append([(places.tolist(), why) for places, why in value.refusals(request(names))])
            time.now += 20.0
            value.asked(names[: turn % 5])
        return answers

    assert run() == run()
    assert run()[-1]


# --- prices ---------------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_sources() -> None:
    """An 8B chat block: wear of random writes is about 70 % of recomputing it, of sequential ones about 17 %."""
    nbytes, recompute_s = 131_072, 1 / 27_159  # Llama-3.1-8B, per token, on an H100
    random = perdure.AdmissionPrices(flash_cycles=1_825, device_gb=1e-9).write_s(nbytes)
    assert random / recompute_s == pytest.approx(0.70, abs=0.01)
    assert perdure.AdmissionPrices().write_s(nbytes) / recompute_s == pytest.approx(0.18, abs=0.01)


@pytest.mark.parametrize("wrong", [0, -1, math.inf, math.nan])
def test_prices_are_positive(wrong: float) -> None:
    with pytest.raises(InvalidArgument, match="gpu_usd_per_h"):
        perdure.AdmissionPrices(gpu_usd_per_h=wrong)
    with pytest.raises(InvalidArgument, match="prefill_tokens_per_s"):
        perdure.ValueAdmission(prefill_tokens_per_s=wrong)


# --- in a store -----------------------------------------------------------------------------------------------


def opened(path: Path, clock: FakeClock, **options: Any) -> closing[Store]:
    return closing(perdure.open(path, capacity="64MiB", memory=0, seams=Seams(clock=clock), **options))


def clocked(clock: FakeClock) -> Seams:
    return Seams(clock=clock, pool=shared_pool)


def keyspace(store: Any, tenant: str = "t") -> Any:
    layout = perdure.KVLayout(block_tokens=TOKENS, block_bytes=BYTES, dtype="bfloat16", order="layer,kv,head,token,dim")
    return store.keyspace(model="m", weights="sha256:00", layout=layout, tenant=tenant)


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    return FakeClock()


def write(space: Any, names: KeyArray) -> perdure.WriteReport:
    return space.write(names, np.zeros(len(names) * BYTES, np.uint8), durability="ephemeral")


def test_a_store_learns_refuses_and_tells(tmp_path: Path, clock: FakeClock) -> None:
    with opened(tmp_path, clock, admission=perdure.ValueAdmission(survivors_min=8)) as store:
        space = keyspace(store)
        first, second = keys(100), keys(100, 2)
        assert write(space, first).stored == 100
        clock.advance(LONG_S)
        report = write(space, second)
        assert (report.statuses == WriteStatus.REJECTED).all()
        assert report.reasons[0].startswith("value: reuse 0.00 of class new/near")
        assert space.lookup(second) == 0
        assert space.lookup(first) == 100
        assert write(space, first).count(WriteStatus.EXISTS) == 100  # what is stored is never refused
        told = store.status()["admission"]
        assert told["policy"] == "value"
        assert told["keyspaces"][space.digest.hex()]["classes"]["new/near"]["refused"] == 100


def test_reading_is_asking(tmp_path: Path, clock: FakeClock) -> None:
    """A third of the blocks is read, which is enough; `present` asks for none."""
    for asked, stored in ((40, 20), (0, 0)):
        with opened(tmp_path / str(asked), clock, admission=perdure.ValueAdmission(survivors_min=8)) as store:
            space = keyspace(store)
            names = keys(120)
            write(space, names)
            clock.advance(10.0)
            space.read(names[:asked], np.zeros(asked * BYTES, np.uint8))
            space.present(names)
            clock.advance(LONG_S)
            assert write(space, keys(20, 2)).stored == stored


def test_keyspaces_of_one_name_learn_together_and_others_apart(tmp_path: Path, clock: FakeClock) -> None:
    with opened(tmp_path, clock, admission="value") as store:
        assert keyspace(store).admission is keyspace(store).admission
        assert keyspace(store).admission is not keyspace(store, "other").admission


def test_always_and_never(tmp_path: Path, clock: FakeClock) -> None:
    for how, status in (("always", WriteStatus.STORED), ("never", WriteStatus.REJECTED), (None, WriteStatus.EXISTS)):
        with opened(tmp_path, clock, admission=how) as store:
            space = keyspace(store)
            names = space.chain(np.arange(TOKENS * 3, dtype=np.uint32) + (how == "never"))
            if how is None:
                names = space.chain(np.arange(TOKENS * 3, dtype=np.uint32))
            report = write(space, names)
            assert report.statuses.tolist() == [status] * 3
            assert all("never" in why for why in report.reasons.values())
            assert store.status()["admission"]["policy"] == (how or "always")


def test_a_hook_has_its_say(tmp_path: Path, clock: FakeClock) -> None:
    asked: list[perdure.AdmissionRequest] = []

    def hook(question: perdure.AdmissionRequest) -> Any:
        asked.append(question)
        return question.positions % 2 == 0

    with opened(tmp_path, clock, admission=hook) as store:
        space = keyspace(store)
        names = space.chain(np.arange(TOKENS * 4, dtype=np.uint32))
        report = write(space, names)
        assert report.statuses.tolist() == [WriteStatus.STORED, WriteStatus.REJECTED] * 2
        assert report.reasons == dict.fromkeys((1, 3), "not admitted by the admission hook")
        assert (asked[0].tenant, asked[0].model, asked[0].block_bytes) == ("t", "m", BYTES)
        assert store.status()["admission"]["policy"] == "hook"


def test_a_hook_with_a_wrong_mask(tmp_path: Path, clock: FakeClock) -> None:
    with opened(tmp_path, clock, admission=lambda question: np.ones(1, bool)) as store:
        space = keyspace(store)
        with pytest.raises(PerdureError, match="mask"):
            write(space, space.chain(np.arange(TOKENS * 4, dtype=np.uint32)))


@pytest.mark.parametrize("wrong", [3, "sometimes", "", b"value", ("value",)])
def test_other_admissions_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidArgument, match="'always', 'never', 'value'"):
        check(wrong)


def test_the_gate_of_always_keeps_nothing() -> None:
    admitting = Gate()
    admitting.asked(keys(3), 1)
    admitting.advised(1.0)
    assert (admitting.refusals(request(keys(3))), admitting.status()) == ([], {})
    assert Admissions("always", Time(), lambda: math.inf).status() == {"policy": "always", "keyspaces": {}}


# --- in the service -------------------------------------------------------------------------------------------


def test_reads_without_a_message_are_learned_from(tmp_path: Path, clock: FakeClock) -> None:
    with (
        serving(tmp_path / "s", admission=perdure.ValueAdmission(survivors_min=8), seams=clocked(clock)) as (store, _),
        perdure.connect(tmp_path / "s") as client,
    ):
        space, names = keyspace(client), keys(100)
        assert write(space, names).stored == 100
        space.read(names[:1], np.zeros(BYTES, np.uint8))  # maps are brought up to date
        clock.advance(10.0)
        before = client.transport.messages
        space.read(names[:40], np.zeros(40 * BYTES, np.uint8))
        assert client.transport.messages == before
        until(lambda: store.status()["counters"].get("blocks_read_unasked", 0) >= 40)
        clock.advance(LONG_S)
        assert write(space, keys(20, 2)).stored == 20
        told = client.status()["admission"]["keyspaces"][space.digest.hex()]["classes"]["new/near"]
        assert told["probability"] == pytest.approx(0.4, abs=0.02)


def test_a_service_that_stores_nothing_is_ready_all_the_same(tmp_path: Path) -> None:
    with closing(perdure.open(tmp_path, capacity="64MiB", memory=0, admission="never")) as store:
        assert Readiness(store).probe() is None


# --- the service's setting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["always", "never", "value"])
def test_the_setting(how: str) -> None:
    assert settings.load({"admission": how}, None, {}).settings.admission == how
    assert settings.load({}, None, {"PERDURE_ADMISSION": how}).settings.admission == how
    assert settings.load({}, None, {}).settings.admission == "always"


def test_a_wrong_setting_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match="write always, never or value"):
        settings.load({"admission": "sometimes"}, None, {})
