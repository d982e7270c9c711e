"""What an adapter for SGLang's HiCache must do, as a test class to inherit.

    class TestMine(HiCacheConformance):
        adapter = MyStorage          # a subclass of HiCacheStorage: of `sglang_interface`, or of SGLang itself

Contract
- Host pools are real memory: pages come back as bytes, from other slots than they were written from.
- Ranks are adapters of their own with pools of their own; what they answer is reduced as SGLang reduces it.
- The service is a process of its own, which the tests stop and kill.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from perdure import limits
from perdure.errors import ConfigError, InvalidArgument, UnknownOption
from perdure.service.client import connect
from perdure.testing.sglang_interface import (
    PAGE_TOKENS,
    HiCacheStorageConfig,
    HostPool,
    LogicalPool,
    PoolHitPolicy,
    PoolTransfer,
)
from perdure.testing.transport import ServiceProcess, until

WEIGHTS = "sha256:" + "1" * 64


def keys_of(first: int, count: int) -> list[str]:
    return [f"{number:064x}" for number in range(first, first + count)]


@dataclass
class Rank:
    """One scheduler process of SGLang: its storage, its pools."""

    storage: Any
    pool: HostPool
    sides: dict[str, HostPool] = field(default_factory=dict)

    def put(self, keys: list[str], *, seed: int = 100) -> list[bool]:
        """Fill pages 0.. of every pool and store them under the keys."""
        pages = range(len(keys))
        for number, pool in enumerate([self.pool, *self.sides.values()]):
            for page in pages:
                pool.fill(page, seed + 1000 * number + page)
        answer: list[bool] = self.storage.batch_set_v1(keys, self.pool.indices(*pages))
        sides = [PoolTransfer(name, pool.indices(*pages), keys=keys) for name, pool in self.sides.items()]
        for stored in (self.storage.batch_set_v2(sides) if sides else {}).values():
            answer = [a and b for a, b in zip(answer, stored, strict=True)]
        return answer

    def take(self, keys: list[str]) -> list[bool]:
        """Read them into the pages from 8 on."""
        answer: list[bool] = self.storage.batch_get_v1(keys, self.pool.indices(*range(8, 8 + len(keys))))
        return answer


class HiCacheConformance:
    """Override `adapter`."""

    adapter: ClassVar[Any] = None
    layouts: ClassVar[tuple[str, ...]] = ("page_first", "page_first_direct", "layer_first")

    @contextlib.contextmanager
    def rank(
        self, service: ServiceProcess, *, pool: HostPool | None = None, sides: dict[str, HostPool] | None = None,
        interface_v1: int = 1, perdure: dict[str, Any] | None = None, **config: Any,
    ) -> Iterator[Rank]:  # fmt: skip
        """A storage as SGLang makes it, with its pools registered."""
        pool = pool or HostPool(mla=config.get("is_mla_model", False))
        chosen = {"url": service.address("unix"), "tenant": "acme", "weights": WEIGHTS, "off_s": 0.05, "lookup_s": 5.0}
        extra = {
            "backend_name": "perdure", "module_path": "m", "class_name": "c", "interface_v1": interface_v1,
            "perdure": chosen | (perdure or {}),
        }  # fmt: skip
        storage = self.adapter(HiCacheStorageConfig(**config, extra_config=extra), {})
        storage.register_mem_pool_host(pool)
        for name, side in (sides or {}).items():
            storage.register_mem_host_pool_v2(side, name)
        try:
            yield Rank(storage, pool, sides or {})
        finally:
            storage.close()

    @pytest.fixture
    def service(self, tmp_path: Path) -> Iterator[ServiceProcess]:
        pytest.importorskip("torch", reason="SGLang's host pools are torch tensors")
        with ServiceProcess(tmp_path / "store") as service:
            yield service

    # --- bytes
    @pytest.mark.parametrize("mla", [False, True])
    @pytest.mark.parametrize("addresses", [True, False], ids=["in place", "copied"])
    def test_pages_come_back(self, service: ServiceProcess, mla: bool, addresses: bool) -> None:
        keys = keys_of(1, 5)
        for number, layout in enumerate(self.layouts):
            made = [HostPool(layout, mla=mla, addresses=addresses) for _ in range(2)]
            with self.rank(service, pool=made[0], is_mla_model=mla) as one:
                assert one.storage.batch_exists(keys) == 0, "pages of another layout are other pages"
                assert one.put(keys, seed=10 * number) == [True] * 5
                assert one.put(keys[:2], seed=10 * number) == [True] * 2
                assert one.storage.batch_exists([*keys, "f" * 64]) == 5
                assert one.storage.exists(keys[4])
            with self.rank(service, pool=made[1], is_mla_model=mla) as other:
                assert other.storage.batch_exists(keys[3:]) == 2
                assert other.take([*keys, "f" * 64]) == [True] * 5 + [False]
                assert all(other.pool.holds(8 + page, 10 * number + page) for page in range(5))
                assert other.pool.untouched(13)

    def test_the_older_calls_move_tensors(self, service: ServiceProcess) -> None:
        keys = keys_of(1, 3)
        for layout in ("page_first", "layer_first"):
            with self.rank(service, pool=HostPool(layout), interface_v1=0) as one:
                for page in range(3):
                    one.pool.fill(page, page)
                pages = [one.pool.get_data_page(page * PAGE_TOKENS) for page in range(3)]
                assert one.storage.batch_set(keys, pages) is True
                assert one.storage.set(keys[0], pages[0]) is True
                assert one.storage.batch_exists(keys) == 3
                into = [one.pool.get_dummy_flat_data_page() for _ in range(4)]
                got = one.storage.batch_get([*keys, "f" * 64], into)
                assert got[3] is None
                assert not into[3].any()
                for page in range(3):
                    one.pool.set_from_flat_data_page((8 + page) * PAGE_TOKENS, got[page])
                    assert one.pool.holds(8 + page, page)
                assert one.storage.get("f" * 64, into[0]) is None
                assert one.storage.get(keys[0]) is None

    def test_answers_are_as_long_as_questions(self, service: ServiceProcess) -> None:
        with self.rank(service, sides={"indexer": HostPool()}) as one:
            for keys, indices in ((keys_of(1, 3), one.pool.indices(0, 1)), (keys_of(1, 2), None)):
                assert one.storage.batch_get_v1(keys, indices) == [False] * len(keys)
                assert one.storage.batch_set_v1(keys, indices) == [False] * len(keys)
                for name in ("indexer", "unknown"):
                    transfer = PoolTransfer(name, indices, keys=keys)
                    assert one.storage.batch_get_v2([transfer]) == {name: [False] * len(keys)}
                    assert one.storage.batch_set_v2([transfer]) == {name: [False] * len(keys)}
            assert one.storage.batch_get_v1([], one.pool.indices(0)[:0]) == []
            assert one.storage.batch_exists([]) == 0

    # --- pools
    def test_a_prefix_ends_where_one_pool_ends(self, service: ServiceProcess) -> None:
        keys = keys_of(1, 6)
        sides = {"indexer": HostPool(head_dim=4), "mamba": HostPool(head_dim=2)}
        with self.rank(service, sides=sides) as one:
            assert one.put(keys[:5]) == [True] * 5
            one.storage.batch_set_v1(keys[5:], one.pool.indices(5))
            everything = [PoolTransfer("indexer"), PoolTransfer("mamba", keys=["x", "y"])]
            everything[1].hit_policy = PoolHitPolicy.TRAILING_PAGES
            assert one.storage.batch_exists(keys) == 6
            found = one.storage.batch_exists_v2(keys, everything)
            assert found.kv_hit_pages == 5
            assert found.extra_pool_hit_pages["indexer"] == 5
            assert found.restorable_prefix_pages in (None, [1, 2, 3, 4, 5])
            kv = PoolTransfer("kv", one.pool.indices(*range(8, 14)), keys=keys)
            indexer = PoolTransfer("indexer", sides["indexer"].indices(*range(8, 14)), keys=keys)
            assert one.storage.batch_get_v2([kv, indexer]) == {
                "kv": [True] * 5 + [False],
                "indexer": [True] * 5 + [False],
            }
            assert one.storage.batch_exists_v2(keys, [PoolTransfer("unknown")]).kv_hit_pages == 0

    def test_a_window_of_states_is_enough_where_it_is_whole(self, service: ServiceProcess) -> None:
        keys = keys_of(1, 6)
        states = HostPool(head_dim=2)
        with self.rank(service, sides={"swa": states}) as one:
            one.storage.batch_set_v1(keys, one.pool.indices(*range(6)))
            at = [2, 3, 5]
            one.storage.batch_set_v2([PoolTransfer("swa", states.indices(*at), keys=[keys[page] for page in at])])
            wanted = PoolTransfer("swa", keys=["x", "y"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
            found = one.storage.batch_exists_v2(keys, [wanted])
            assert found.kv_hit_pages == 4
            assert found.restorable_prefix_pages in (None, [4])

    def test_an_anchor_without_bytes_follows_its_pools(self, service: ServiceProcess) -> None:
        keys = keys_of(1, 4)
        side = HostPool()
        with self.rank(service, pool=LogicalPool(), sides={"deepseek_v4_c4": side}) as one:  # type: ignore[arg-type]
            indices = side.indices(*range(4))
            assert one.storage.batch_set_v1(keys, indices) == [True] * 4
            one.storage.batch_set_v2([PoolTransfer("deepseek_v4_c4", side.indices(0, 1), keys=keys[:2])])
            assert one.storage.batch_exists_v2(keys, [PoolTransfer("deepseek_v4_c4")]).kv_hit_pages == 2

    # --- ranks
    def test_a_page_is_there_when_every_rank_has_its_part(self, service: ServiceProcess) -> None:
        keys = keys_of(1, 5)
        with self.rank(service, tp_size=2) as first, self.rank(service, tp_size=2, tp_rank=1) as second:
            assert first.put(keys, seed=1) == [True] * 5
            assert [one.storage.batch_exists(keys) for one in (first, second)] == [0, 0]
            assert second.put(keys[:3], seed=50) == [True] * 3
            assert [one.storage.batch_exists(keys) for one in (first, second)] == [3, 3]
            assert first.take(keys[:3]) == second.take(keys[:3]) == [True] * 3
            assert all(first.pool.holds(8 + page, 1 + page) for page in range(3))
            assert all(second.pool.holds(8 + page, 50 + page) for page in range(3))
        with self.rank(service) as alone:
            assert alone.storage.batch_exists(keys) == 0, "another tensor-parallel size has other parts"

    def test_ranks_of_another_host_are_left_to_sglang(self, service: ServiceProcess) -> None:
        keys, halves = keys_of(1, 2), {"tp_per_host": 2}
        with (
            self.rank(service, tp_size=4, perdure=halves) as first,
            self.rank(service, tp_size=4, tp_rank=1, perdure=halves) as second,
            self.rank(service, tp_size=4, tp_rank=2, perdure=halves) as third,
        ):
            assert [first.put(keys), second.put(keys), third.put(keys)] == [[True] * 2] * 3
            assert [one.storage.batch_exists(keys) for one in (first, second, third)] == [2, 2, 0]

    def test_latents_are_stored_once_for_all_ranks(self, service: ServiceProcess) -> None:
        keys = keys_of(1, 4)
        with (
            self.rank(service, is_mla_model=True, tp_size=4) as first,
            self.rank(service, is_mla_model=True, tp_size=4, tp_rank=3) as last,
        ):
            assert first.put(keys) == [True] * 4
            assert last.storage.batch_exists(keys) == 4
            assert last.take(keys) == [True] * 4
            assert last.put(keys) == [True] * 4
            assert (first.storage.counts["stored"], last.storage.counts["stored"]) == (4, 0)
        with self.rank(service, is_mla_model=True, pp_size=2) as stage:
            assert stage.storage.batch_exists(keys) == 0

    def test_a_part_that_was_damaged_ends_the_prefix_on_every_rank(self, tmp_path: Path) -> None:
        pytest.importorskip("torch", reason="SGLang's host pools are torch tensors")
        keys = keys_of(1, 4)
        kept = {"durability": "session", "codec": "off"}
        with (
            ServiceProcess(tmp_path / "store") as service,
            self.rank(service, tp_size=2, perdure=kept) as first,
            self.rank(service, tp_size=2, tp_rank=1, perdure=kept) as second,
        ):
            first.put(keys, seed=1)
            second.put(keys, seed=50)
            with connect(service.address("unix")) as client:
                where = client.explain(second.storage.block_of(keys[2]))
        with (tmp_path / "store" / where["file"]).open("r+b") as file:
            file.seek(where["record"]["offset"] + limits.page_bytes + 20)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        with (
            ServiceProcess(tmp_path / "store") as service,
            self.rank(service, tp_size=2, perdure=kept) as first,
            self.rank(service, tp_size=2, tp_rank=1, perdure=kept) as second,
        ):
            until(lambda: second.storage.batch_exists(keys) == 4)
            taken = [first.take(keys), second.take(keys)]
            assert taken == [[True] * 4, [True, True, False, True]]
            assert min(answer.index(False) if False in answer else 4 for answer in taken) == 2
            assert second.pool.untouched(10)
            assert [one.storage.batch_exists(keys) for one in (first, second)] == [2, 2]
            assert second.put(keys, seed=50) == [True] * 4
            assert [one.storage.batch_exists(keys) for one in (first, second)] == [4, 4]

    # --- what pages mean
    def test_tenant_salt_model_weights_and_scales_separate(self, service: ServiceProcess) -> None:
        keys = keys_of(1, 2)
        with self.rank(service) as one:
            one.put(keys)
            assert one.storage.batch_exists(keys) == 2
        for other in ({"tenant": "other"}, {"salt": "s"}, {"weights": "sha256:" + "2" * 64}, {"scales": "sha256:3"}):
            with self.rank(service, perdure=other) as two:
                assert two.storage.batch_exists(keys) == 0
                assert two.take(keys) == [False, False]
                assert two.pool.untouched(8)
        with self.rank(service, model_name="another") as three:
            assert three.storage.batch_exists(keys) == 0

    def test_clear_begins_an_epoch_on_every_rank_and_deletes_nothing(self, service: ServiceProcess) -> None:
        keys = keys_of(1, 3)
        with self.rank(service, tp_size=2) as first, self.rank(service, tp_size=2, tp_rank=1) as second:
            ranks = (first, second)
            assert [one.put(keys) for one in ranks] == [[True] * 3] * 2
            first.storage.clear()
            assert [one.storage.batch_exists(keys) for one in ranks] == [0, 3]
            second.storage.clear()
            assert [one.storage.batch_exists(keys) for one in ranks] == [0, 0]
            assert first.take(keys) == [False] * 3
            assert [one.put(keys, seed=7) for one in ranks] == [[True] * 3] * 2
            assert [one.storage.batch_exists(keys) for one in ranks] == [3, 3]
            assert second.take(keys) == [True] * 3
            assert second.pool.holds(8, 7)
        with self.rank(service, tp_size=2) as again:  # the engine was started anew, with the weights it is told
            assert again.storage.batch_exists(keys) == 3
            assert again.take(keys) == [True] * 3
            assert again.pool.holds(8, 100)

    def test_weights_that_return_find_their_pages(self, service: ServiceProcess, tmp_path: Path) -> None:
        keys, digest = keys_of(1, 2), tmp_path / "digest"
        digest.write_text(WEIGHTS + "\n")
        with self.rank(service, perdure={"weights": "", "weights_file": str(digest)}) as one:
            one.put(keys)
            for text, there in (("sha256:" + "9" * 64, 0), (WEIGHTS, 2)):
                digest.write_text(text)
                one.storage.clear()
                assert one.storage.batch_exists(keys) == there
            digest.unlink()
            one.storage.clear()
            assert one.storage.batch_exists(keys) == 0

    # --- ends
    def test_without_the_service_pages_are_missed_until_it_is_back(self, tmp_path: Path) -> None:
        pytest.importorskip("torch", reason="SGLang's host pools are torch tensors")
        keys, unknown = keys_of(1, 3), keys_of(50, 2)
        short = {"lookup_s": 0.3, "read_s": 0.3, "write_s": 0.5}
        with ServiceProcess(tmp_path / "store") as first, self.rank(first, perdure=short) as one:
            until(lambda: one.put(keys) == [True] * 3)
            first.stop()
            assert one.storage.batch_exists(unknown) == 0
            assert one.take(unknown) == [False, False]
            assert one.pool.untouched(8)
            first.go_on()
            until(lambda: one.take(keys) == [True] * 3)
            first.kill()
            assert one.storage.batch_exists_v2(unknown, []).kv_hit_pages == 0
            assert one.put(unknown) == [False, False]
            assert one.storage.batch_get(unknown, [one.pool.get_dummy_flat_data_page()] * 2) == [None, None]
            with ServiceProcess(tmp_path / "store"):
                until(lambda: one.put(unknown) == [True, True])
                assert one.storage.batch_exists(unknown) == 2

    @pytest.mark.parametrize(
        ("given", "config", "error", "why"),
        [
            ({"tenant": ""}, {}, InvalidArgument, "tenant"),
            ({"url": ""}, {}, InvalidArgument, "url is empty"),
            ({"weights": ""}, {}, InvalidArgument, "sha256sum"),
            ({"weights_file": "/nowhere"}, {}, InvalidArgument, "give one of them"),
            ({"require_salt": True}, {}, InvalidArgument, "set salt"),
            ({"tp_per_host": -1}, {}, InvalidArgument, "tp_per_host"),
            ({"read_s": -1}, {}, InvalidArgument, "read_s"),
            ({"tenent": "a"}, {}, UnknownOption, "did you mean 'tenant'"),
            ({}, {"should_split_heads": True}, InvalidArgument, "tp_lcm_size"),
            ({}, {"dcp_size": 2}, InvalidArgument, "decode context parallelism"),
        ],
    )
    def test_what_cannot_be_served_is_refused(
        self, given: dict[str, Any], config: dict[str, Any], error: type[Exception], why: str
    ) -> None:
        extra = {"perdure": {"url": "unix:///nowhere", "tenant": "acme", "weights": WEIGHTS} | given}
        with pytest.raises(error, match=why):
            self.adapter(HiCacheStorageConfig(**config, extra_config=extra), {})

    def test_settings_that_are_missing_are_shown(self) -> None:
        for extra in (None, {}, {"perdure": "x"}):
            with pytest.raises(ConfigError, match="PerdureHiCache"):
                self.adapter(HiCacheStorageConfig(extra_config=extra), {})
