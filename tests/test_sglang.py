"""The adapter for SGLang's HiCache, on SGLang's interface as `perdure.testing.sglang` has it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from perdure.engines.hicache import HiCacheAdapter
from perdure.engines.hicache_interface import METHODS, differences, refuse_interface
from perdure.errors import InvalidArgument
from perdure.testing import sglang_interface as stub
from perdure.testing.sglang import WEIGHTS, HiCacheConformance


class Storage(HiCacheAdapter, stub.HiCacheStorage):
    result_type = stub.PoolTransferResult


class TestStorage(HiCacheConformance):
    adapter = Storage


def test_the_interface_is_the_one_the_adapter_knows() -> None:
    assert differences(stub) == []
    refuse_interface(stub)


def test_another_interface_is_refused() -> None:
    class Base:
        __abstractmethods__ = frozenset({"get", "flush_all"})

        def batch_get_v1(self, keys: Any, host_indices: Any, stream: Any) -> None: ...

    other = SimpleNamespace(HiCacheStorage=Base)
    found = differences(other)
    assert "no PoolTransferResult" in found
    assert "flush_all must be written" in found
    assert any(text.startswith("batch_get_v1 takes") for text in found)
    assert sum(text.startswith("no ") for text in found) == len(METHODS)  # all but batch_get_v1, and the type
    with pytest.raises(ImportError, match="another HiCacheStorage"):
        refuse_interface(other)
    assert differences(SimpleNamespace()) == ["no HiCacheStorage", "no PoolTransferResult"]


def test_older_results_have_two_fields() -> None:
    from dataclasses import make_dataclass

    old = make_dataclass("PoolTransferResult", ["kv_hit_pages", "extra_pool_hit_pages"])

    class Older(Storage):
        result_type = old

    extra = {"perdure": {"url": "unix:///nowhere", "tenant": "acme", "weights": WEIGHTS}}
    storage = Older(stub.HiCacheStorageConfig(extra_config=extra), {})
    assert storage.batch_exists_v2(["a"]) == old(0, {})
    storage.close()


def test_a_salt_is_no_use_where_pages_are_named_by_tokens_alone() -> None:
    class Unsalted(Storage):
        salted_names = False

    settings = {"url": "unix:///nowhere", "tenant": "acme", "weights": WEIGHTS, "salt": "s", "require_salt": True}
    with pytest.raises(InvalidArgument, match="storage_namespace_seed"):
        Unsalted(stub.HiCacheStorageConfig(extra_config={"perdure": settings}), {})
    Storage(stub.HiCacheStorageConfig(extra_config={"perdure": settings}), {}).close()


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed")
def test_without_sglang_the_class_says_what_is_missing() -> None:
    sys.modules.pop("perdure.engines.sglang", None)
    with pytest.raises(ImportError, match="needs SGLang in this environment"):
        import perdure.engines.sglang  # noqa: F401
