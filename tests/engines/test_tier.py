"""The vLLM tier: against vLLM's own tiering manager and shared region, and (marked slow) in engine processes.

Expected: a chunk arrives with the bytes that were stored or is a failed key; what is corrupt, of other weights or of
another epoch is a miss; without a service, with one that hangs or is killed at any moment, every job ends and nothing
is raised; the scheduler's thread waits for nobody; a shutdown leaves nothing mapped.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.served import serving

from perdure.errors import InvalidArgument, ServiceUnavailable, UnknownOption
from perdure.testing.transport import ServiceProcess, until

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here (make test-engines has it)", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from perdure.engines.vllm.tier import PerdureTier
    from perdure.engines.vllm.tier_engine import check, engine_config, meaning
    from perdure.engines.vllm.tier_identity import TierSettings, Weights, draft_of, files_digest
    from perdure.engines.vllm.tier_jobs import BACK_OFF_S, Sealed
    from perdure.engines.vllm.tier_lookup import Lookups

HIT, MISS, RETRY, PENDING = (
    LookupResult.HIT,
    LookupResult.MISS,
    LookupResult.RETRY,
    LookupResult.HIT_PENDING,
)
CHUNK_BYTES = 1 << 16
TOKENS = 16
WEIGHTS = "test:1"
NO_STEP = ScheduleEndContext((), ())
_names = itertools.count()


class Engine:
    """vLLM's scheduler side of offloading without a scheduler: its spec, its manager, and our tier in it."""

    def __init__(self, url: str, *, layers: int = 2, dtype: str = "float32", groups: int = 1, **tier: Any):
        self.name = f"test-{time.monotonic_ns()}-{next(_names)}"
        entry = {"type": "perdure", "module_path": "perdure.engines.vllm.tier", "url": url, "weights": WEIGHTS} | tier
        if "weights_file" in tier:
            del entry["weights"]
        self.spec = TieringOffloadingSpec(
            OffloadingConfig(
                groups=tuple(
                    OffloadingGroupConfig(TOKENS, tuple(f"layer.{group}.{n}" for n in range(layers)), group)
                    for group in range(groups)
                ),
                worker_kv_bytes_per_block=CHUNK_BYTES,
                enable_kv_cache_events=True,
                extra_config={"cpu_bytes_to_use": 64 * CHUNK_BYTES, "secondary_tiers": [entry]},
                engine_id=self.name,
                model=OffloadingModelConfig("tiny", dtype),
                cache=OffloadingCacheConfig(TOKENS, 1),
                parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
                kv_cache_layout="LBHNC",
            )
        )
        self.manager = self.spec.get_manager()
        self.tier: PerdureTier = self.manager.secondary_tiers[0]
        self._request = self.request()

    def request(self) -> ReqContext:
        made = ReqContext(f"request-{next(_names)}")
        self.manager.on_new_request(made)
        return made

    def rows(self) -> np.ndarray:
        return np.frombuffer(self.spec._scheduler_mmap.mmap_obj, np.uint8).reshape(-1, CHUNK_BYTES)

    def step(self) -> None:
        self.manager.on_schedule_end(NO_STEP)

    def idle(self) -> None:
        def done() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        until(done)

    def store(self, keys: list[bytes]) -> None:
        """As if a worker had copied the chunks from the cache, and until they are in the service, or not."""
        made = self.manager.prepare_store(keys, self._request)
        if not made.keys_to_store:
            return
        rows = self.rows()
        for key, place in zip(made.keys_to_store, made.store_spec.chunk_ids, strict=True):
            rows[int(place)] = content(key)
        del rows
        self.manager.complete_store(made.keys_to_store, self._request)
        self.idle()

    def lookup(self, keys: list[bytes], request: ReqContext) -> list[LookupResult]:
        """As the scheduler asks, step after step, until there is an answer for each."""
        while True:
            found = [self.manager.lookup(key, request) for key in keys]
            self.step()
            if not {RETRY, PENDING} & set(found):
                return found
            time.sleep(0.002)

    def fetch(self, keys: list[bytes]) -> list[bool]:
        """Which chunks can be loaded now; those that can have the right bytes."""
        request = self.request()
        found = [one is HIT for one in self.lookup(keys, request)]
        hits = [key for key, yes in zip(keys, found, strict=True) if yes]
        if hits:
            spec = self.manager.prepare_load(hits, request)
            rows = self.rows()
            for key, place in zip(hits, spec.chunk_ids, strict=True):
                assert (rows[int(place)] == content(key)).all(), "wrong bytes"
            del rows
            self.manager.complete_load(hits, request)
        self.manager.on_request_finished(request)
        return found

    def counts(self) -> dict[str, int]:
        stats = self.tier.get_stats()
        values = next(iter(v for k, v in stats.data.items() if str(k) == "data"))
        found = values.get("vllm:kv_offload_perdure_blocks", {}).items()
        return {":".join(labels): int(n) for labels, n in found if labels[0] != "held"}

    def close(self) -> None:
        self.manager.shutdown()
        assert self.spec._scheduler_mmap.mmap_obj is None
        assert not Path(self.spec._scheduler_mmap.mmap_path).exists()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def content(key: bytes) -> np.ndarray:
    return np.random.default_rng(list(key)).integers(0, 256, CHUNK_BYTES, np.uint8)


def some_keys(count: int, seed: int = 0, group: int = 0) -> list[bytes]:
    rng = np.random.default_rng([seed, 7])
    return [make_offload_key(rng.bytes(32), group) for _ in range(count)]


def flip(store: Path, key: bytes) -> None:
    """One byte of a block where it lies on the disk."""
    sign = content(key)[1000:1064].tobytes()
    for path in store.glob("segments/*/*.seg"):
        at = path.read_bytes().find(sign)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([sign[0] ^ 1]))
            return
    pytest.fail("the block is not on the disk")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path / "store") as service:
        yield service


# --- what is stored comes back
@pytest.mark.parametrize("share", [True, False], ids=["region", "staging"])
@pytest.mark.parametrize("memory", ["192MiB", "0"], ids=["dram", "disk"])
def test_what_one_engine_stored_another_loads(tmp_path: Path, memory: str, share: bool) -> None:
    keys = some_keys(20)
    with ServiceProcess(tmp_path / "store", memory=memory) as service:
        with Engine(service.address("unix"), share_region=share) as first:
            first.store(keys)
            assert first.counts() == {"stored:exists": 0, "stored:stored": 20}
            assert first.tier._service.shares_region is share
            first.manager.primary_tier.reset_cache()
            first.store(keys)
            assert first.counts() == {"stored:exists": 20}
        with Engine(service.address("unix"), share_region=share) as second:
            assert second.fetch(keys + some_keys(3, seed=1)) == [True] * 20 + [False] * 3
            assert second.counts() == {"loaded:held" if memory != "0" else "loaded:read": 20}
            assert second.fetch(keys) == [True] * 20  # from vLLM's primary tier
            assert not second.counts()


def test_groups_do_not_share_blocks(service: ServiceProcess) -> None:
    keys = some_keys(4)
    others = some_keys(4, group=1)  # the same hashes
    with Engine(service.address("unix"), groups=2) as one:
        one.store(keys)
        one.store(others[:2])
    with Engine(service.address("unix"), groups=2) as two:
        assert two.fetch(keys) == [True] * 4
        assert two.fetch(others) == [True, True, False, False]


@pytest.mark.parametrize(
    "other", [{"weights": "test:2"}, {"tenant": "someone"}, {"layers": 3}, {"dtype": "bfloat16"}], ids=str
)
def test_other_weights_tenants_and_layouts_are_misses(service: ServiceProcess, other: dict[str, Any]) -> None:
    keys = some_keys(3)
    with Engine(service.address("unix")) as one:
        one.store(keys)
    with Engine(service.address("unix"), **other) as two:
        assert two.fetch(keys) == [False] * 3


def test_events_name_what_was_stored(service: ServiceProcess) -> None:
    keys = some_keys(3)
    with Engine(service.address("unix"), enable_kv_events=True, locality="REMOTE") as engine:
        engine.store(keys)
        (event,) = engine.tier.take_events()
        assert sorted(event.keys) == sorted(keys)
        assert (event.medium, event.locality, event.removed) == (PerdureTier.medium, engine.tier.locality, False)
        assert not list(engine.tier.take_events())


# --- damage
def test_corrupt_block_is_a_miss_before_anything_is_allocated(tmp_path: Path) -> None:
    keys = some_keys(8)
    with ServiceProcess(tmp_path / "store") as service, Engine(service.address("unix")) as engine:
        engine.store(keys)
    flip(tmp_path / "store", keys[5])
    with ServiceProcess(tmp_path / "store") as service, Engine(service.address("unix")) as engine:
        assert engine.fetch(keys) == [True] * 5 + [False] + [True] * 2
        assert engine.counts() == {"loaded:held": 7}
        engine.store(keys[5:6])  # recomputed
    with ServiceProcess(tmp_path / "store") as service, Engine(service.address("unix")) as engine:
        assert engine.fetch(keys) == [True] * 8


def test_corrupt_block_of_a_load_is_exactly_the_failed_key(tmp_path: Path) -> None:
    """A service without memory verifies when it reads."""
    keys = some_keys(8)
    with ServiceProcess(tmp_path / "store", memory="0") as service, Engine(service.address("unix")) as engine:
        engine.store(keys)
    flip(tmp_path / "store", keys[2])
    with ServiceProcess(tmp_path / "store", memory="0") as service, Engine(service.address("unix")) as engine:
        request = engine.request()
        assert engine.lookup(keys, request) == [HIT] * 2 + [MISS] + [HIT] * 5
        counts = engine.counts()
        assert counts == {"loaded:read": 7, "failed:corrupt": 1}
        assert engine.lookup(keys, request)[2] is MISS  # nobody asks for it again and again
        engine.store(keys[2:3])
        engine.manager.on_request_finished(request)


# --- no service, or a bad one
def test_without_a_service_everything_is_a_miss_until_it_comes(tmp_path: Path) -> None:
    keys = some_keys(4)
    with Engine(f"unix://{tmp_path}/store/perdure.sock") as engine:
        engine.store(keys)
        assert engine.counts() == {"failed:ServiceUnavailable": 4}
        engine.manager.primary_tier.reset_cache()
        assert engine.fetch(keys) == [False] * 4
        with ServiceProcess(tmp_path / "store"):

            def comes() -> bool:
                time.sleep(BACK_OFF_S / 4)
                engine.store(some_keys(1, seed=time.monotonic_ns() % 1000 + 10))
                return "stored:stored" in engine.counts()

            until(comes)
            engine.store(keys)
            engine.manager.primary_tier.reset_cache()
            assert engine.fetch(keys) == [True] * 4


def test_service_killed_between_lookup_and_load(service: ServiceProcess) -> None:
    keys = some_keys(6)
    with Engine(service.address("unix")) as engine:
        engine.store(keys)
        engine.manager.primary_tier.reset_cache()
        request = engine.request()
        until(
            lambda: all(engine.tier.lookup(key, request) is HIT for key in keys) or bool(engine.tier._lookups.flush())
        )
        service.kill()
        assert engine.lookup(keys, request) == [MISS] * 6  # through promotions that fail
        assert sum(n for name, n in engine.counts().items() if name.startswith("failed:")) in (0, 6)
        engine.manager.on_request_finished(request)


def test_service_killed_during_stores_and_loads(service: ServiceProcess) -> None:
    keys = some_keys(40)
    with Engine(service.address("unix")) as engine:
        engine.store(keys[:20])
        engine.manager.primary_tier.reset_cache()
        killer = threading.Timer(0.01, service.kill)
        killer.start()
        for _ in range(20):
            found = engine.fetch(keys[:20])  # whose bytes it compares
            engine.manager.primary_tier.reset_cache()
            if not any(found):
                break
        engine.store(keys[20:])
        killer.join()


def test_service_that_hangs_delays_a_lookup_once(service: ServiceProcess) -> None:
    keys = some_keys(4)
    with Engine(service.address("unix"), lookup_s=0.05) as engine:
        engine.store(keys)
        engine.manager.primary_tier.reset_cache()
        service.stop()
        assert engine.fetch(keys) == [False] * 4
        assert engine.lookup(some_keys(1, seed=5), engine.request()) == [MISS]
        service.go_on()
        until(lambda: all(engine.fetch(keys)))


def test_store_into_a_service_that_hangs_keeps_the_chunks_until_it_cannot_read_them(service: ServiceProcess) -> None:
    keys = some_keys(4)
    with Engine(service.address("unix")) as engine:
        engine.store(some_keys(1, seed=3))
        space = engine.tier._service.space(0)
        chunks = engine.tier._primary.shared_chunks(range(4))
        service.stop()
        report = space.write(space.adopt_hashes([key[:-4] for key in keys]), chunks, deadline_s=0.05)
        assert not report.durable
        assert not report.wait_settled(0.05)
        service.go_on()
        assert report.wait_settled(60.0)
        del chunks


# --- epochs
def test_reset_seals_the_epoch(service: ServiceProcess) -> None:
    keys = some_keys(4)
    with Engine(service.address("unix")) as engine:
        engine.store(keys)
        engine.manager.reset_cache()
        assert engine.fetch(keys) == [False] * 4
        engine.store(keys)
        assert engine.counts()["stored:stored"] == 8
        engine.manager.primary_tier.reset_cache()
        assert engine.fetch(keys) == [True] * 4  # of this epoch
        engine.manager.reset_cache()
        assert engine.fetch(keys) == [False] * 4
    with Engine(service.address("unix")) as other:
        assert other.fetch(keys) == [True] * 4  # what was stored before the first reset


def test_reset_that_changes_nothing(service: ServiceProcess) -> None:
    keys = some_keys(4)
    with Engine(service.address("unix"), after_reset="same") as engine:
        engine.store(keys)
        engine.manager.reset_cache()
        assert engine.fetch(keys) == [True] * 4


def test_weights_named_by_a_file_are_read_after_each_reset(service: ServiceProcess, tmp_path: Path) -> None:
    keys, file = some_keys(2), tmp_path / "weights"
    file.write_text("step:1\n")
    with Engine(service.address("unix"), weights_file=str(file)) as engine:
        engine.store(keys)
        engine.manager.reset_cache()
        assert engine.fetch(keys) == [True] * 2
        file.write_text("step:2\n")
        engine.manager.primary_tier.reset_cache()
        assert engine.fetch(keys) == [True] * 2  # not before the reset
        engine.manager.reset_cache()
        assert engine.fetch(keys) == [False] * 2
    with Engine(service.address("unix"), weights="step:1") as other:
        assert other.fetch(keys) == [True] * 2


def test_job_of_a_sealed_epoch_stores_nothing_under_the_new_one(service: ServiceProcess) -> None:
    with Engine(service.address("unix")) as engine:
        known = engine.tier._service
        known.space(0, known.epoch)
        known.seal()
        with pytest.raises(Sealed):
            known.space(0, known.epoch - 1)
        known.space(0, known.epoch)  # at once: a sealed epoch is no failure of the service


# --- the scheduler's thread
class _Slow:
    """A keyspace that answers when it is told to."""

    def __init__(self) -> None:
        self.go, self.asked = threading.Event(), threading.Event()

    def __call__(self, group: int) -> Any:
        self.asked.set()
        self.go.wait(60)
        raise ServiceUnavailable("no")


def test_lookups_wait_for_nobody_and_old_answers_are_dropped() -> None:
    slow = _Slow()
    lookups = Lookups(slow, lookup_s=60, hold_s=1, fetch_s=1)
    (key,) = some_keys(1)
    assert lookups.lookup(key, "a") is None
    lookups.flush()
    assert slow.asked.wait(60)
    assert lookups.lookup(key, "b") is None
    lookups.forget("a")
    lookups.forget("b")
    assert lookups.lookup(key, "c") is None  # asked anew
    lookups.flush()
    slow.go.set()

    def answered() -> bool:
        lookups.flush()
        return lookups.lookup(key, "c") is False

    until(answered)
    lookups.stop()


class _View:
    """A view of blocks that are valid for as long as it is told."""

    def __init__(self, count: int):
        self.blocks: list[memoryview | None] = [memoryview(bytes(1))] * count
        self.report = SimpleNamespace(problems={}, from_memory=count)
        self.valid, self.released = True, False

    def release(self) -> bool:
        self.released = True
        return self.valid


class _Space:
    """A keyspace that has everything."""

    layout = SimpleNamespace(block_bytes=CHUNK_BYTES)

    def __init__(self) -> None:
        self.views: list[_View] = []

    def adopt_hashes(self, hashes: list[bytes]) -> np.ndarray:
        return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)

    def present(self, names: np.ndarray) -> np.ndarray:
        return np.ones(len(names), bool)

    def view(self, names: np.ndarray, **_: Any) -> _View:
        self.views.append(_View(len(names)))
        return self.views[-1]


def _answered(lookups: Lookups, keys: list[bytes], request: str) -> None:
    def answered() -> bool:
        found = [lookups.lookup(key, request) for key in keys]
        lookups.flush()
        return found == [True] * len(keys)

    until(answered)


def test_holds_end_with_their_loads_or_their_requests_and_are_renewed_when_they_expire() -> None:
    space, keys = _Space(), some_keys(2)
    lookups = Lookups(lambda group: space, lookup_s=60, hold_s=30, fetch_s=1)
    _answered(lookups, keys, "a")
    space.views[0].valid = False  # its time is over
    _answered(lookups, keys, "a")
    assert len(space.views) >= 2
    until(lambda: space.views[0].released)
    held = lookups.take(keys[:1])
    lookups.forget("a")
    assert not space.views[-1].released  # one of its blocks is being loaded
    assert held[0].hold is not None
    held[0].hold.drop()
    until(lambda: space.views[-1].released)
    lookups.loaded(keys[:1], frozenset(keys[:1]))  # failed, and nobody asks for it any more
    assert not lookups._asked
    assert not lookups._of_request
    lookups.stop()


# --- settings
def test_settings_are_checked() -> None:
    good = {"url": "unix:///x", "weights": WEIGHTS}
    assert TierSettings.of(good).tenant == "default"
    with pytest.raises(UnknownOption, match="did you mean 'tenant'"):
        TierSettings.of(good | {"tennant": "a"})
    for bad in (
        {"weights": WEIGHTS},
        {"url": "unix:///x"},
        good | {"weights_file": "x"},
        good | {"after_reset": "?"},
        good | {"durability": "?"},
        good | {"load_s": 0},
        good | {"share_region": 1},
        good | {"tenant": 3},
        good | {"adapters": "?"},
        good | {"codec": "?"},
    ):
        with pytest.raises(InvalidArgument):
            TierSettings.of(bad)


def test_weights_of_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no directory with weights"):
        files_digest("org/model")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    first = files_digest(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert files_digest(str(tmp_path)) == first
    (tmp_path / "model.safetensors").write_bytes(b"2")
    assert files_digest(str(tmp_path)) != first
    weights = Weights(TierSettings(url="x", weights="files"), str(tmp_path))
    named = weights.name()
    weights.seal()
    assert weights.name() != named
    assert weights.name() == weights.name()
    with pytest.raises(InvalidArgument):
        Weights(TierSettings(url="x", weights_file=str(tmp_path / "none")), "tiny")


def test_unusable_configuration_leaves_nothing_behind() -> None:
    with pytest.raises(InvalidArgument, match="dtype"):
        Engine("unix:///nowhere", dtype="nvfp4")
    with pytest.raises(UnknownOption):
        Engine("unix:///nowhere", tenat="a")
    with pytest.raises(InvalidArgument, match="algorithm:value"):
        Engine("unix:///nowhere", weights="something")


def test_served_in_this_process(tmp_path: Path) -> None:
    """Also where vLLM's region cannot be passed on."""
    keys = some_keys(3)
    with serving(tmp_path / "store"), Engine(f"unix://{tmp_path}/store/perdure.sock") as engine:
        engine.tier._primary._fd = None
        engine.store(keys)
        assert not engine.tier._service.shares_region
        engine.manager.primary_tier.reset_cache()
        assert engine.fetch(keys) == [True] * 3


# --- what the engine's settings say
class VllmConfig(SimpleNamespace):
    """In place of vLLM's: found by its name and its engine's id."""


VllmConfig.__module__ = "vllm.config"


def engine_settings(engine_id: str = "x", **changed: Any) -> Any:
    given: dict[str, Any] = {
        "kv_transfer_config": SimpleNamespace(engine_id=engine_id),
        "lora_config": None,
        "cache_config": SimpleNamespace(
            prefix_caching_hash_algo="sha256", cache_dtype="auto", kv_cache_layout="LBHNC", calculate_kv_scales=False,
            enable_prefix_caching=False,
        ),
        "scheduler_config": SimpleNamespace(enable_chunked_prefill=False),
        "model_config": SimpleNamespace(
            dtype="torch.bfloat16", revision=None, quantization=None, model="m",
            hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1.0}),
        ),
        "load_config": SimpleNamespace(load_format="auto"),
        "speculative_config": None,
    }  # fmt: skip
    return VllmConfig(**(given | changed))


def test_settings_of_the_engine_are_found_and_part_of_the_name(tmp_path: Path) -> None:
    one = engine_settings("engine-of-this-test")
    assert engine_config("engine-of-this-test") is one
    assert engine_config("engine-of-another-test") is None
    base = meaning(engine_settings())
    assert base == meaning(engine_settings())
    others = []
    for field, name, value in (
        ("model_config", "revision", "abc"),
        ("model_config", "quantization", "fp8"),
        ("model_config", "dtype", "torch.float16"),
        ("model_config", "hf_config", SimpleNamespace(to_dict=lambda: {"rope_theta": 2.0})),
        ("cache_config", "prefix_caching_hash_algo", "sha256_cbor"),
        ("load_config", "load_format", "dummy"),
    ):
        changed = engine_settings()
        setattr(getattr(changed, field), name, value)
        others.append(meaning(changed))
    draft = SimpleNamespace(method="eagle", model=str(tmp_path), revision=None)
    others.append(meaning(engine_settings(speculative_config=draft)))
    assert len({base, *others}) == len(others) + 1
    assert draft_of(engine_settings()) == ""
    (tmp_path / "model.safetensors").write_bytes(b"1")
    assert draft_of(engine_settings(speculative_config=draft)).startswith("files:")


def test_what_a_tier_cannot_tell_apart_is_refused() -> None:
    check(engine_settings(), "")
    with pytest.raises(InvalidArgument, match="LoRA"):
        check(engine_settings(lora_config=object()), "")
    check(engine_settings(lora_config=object()), "by-name")
    scaled = engine_settings()
    scaled.cache_config.calculate_kv_scales = True
    with pytest.raises(InvalidArgument, match="scales"):
        check(scaled, "")
    if "PYTHONHASHSEED" not in os.environ:
        weak = engine_settings()
        weak.cache_config.prefix_caching_hash_algo = "xxhash"
        with pytest.raises(InvalidArgument, match="sha256_cbor"):
            check(weak, "")
