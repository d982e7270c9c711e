"""The connector for LMCache's `native_plugin`, driven as LMCache drives it, against a service process."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from perdure import limits
from perdure.engines.lmcache import SIZES_MAX, PerdureConnector
from perdure.errors import InvalidArgument, UnknownOption
from perdure.testing.transport import ServiceProcess, until

SIZE = 64 * 1024
WEIGHTS = "sha256:" + "1" * 64
UNTOUCHED = 0xEE


def key(number: int, *, model: str = "m/one", rank: int = 0x01000100, salt: str = "") -> str:
    """As LMCache's native_connector_l2_adapter writes an ObjectKey."""
    base = f"{model}@{rank:08x}@0@{number:032x}"
    return f"{base}@{salt}" if salt else base


def content(number: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


class Driver:
    """Waits for each submit, as LMCache's demultiplexing thread does."""

    def __init__(self, connector: PerdureConnector):
        self.connector = connector

    def done(self, number: int) -> tuple[bool, str, list[bool]]:
        poller = select.poll()
        poller.register(self.connector.event_fd(), select.POLLIN)
        assert poller.poll(60_000), "nothing completed"
        [(found, ok, why, answer)] = self.connector.drain_completions()
        assert found == number
        assert answer is not None
        return ok, why, answer

    def exists(self, keys: list[str]) -> list[bool]:
        return self.done(self.connector.submit_batch_exists(keys))[2]

    def set(self, keys: list[str], blocks: list[Any]) -> list[bool]:
        return self.done(self.connector.submit_batch_set(keys, [memoryview(b) for b in blocks]))[2]

    def get(self, keys: list[str], size: int = SIZE) -> tuple[list[bool], np.ndarray]:
        into = np.full((len(keys), size), UNTOUCHED, np.uint8)
        return self.done(self.connector.submit_batch_get(keys, [memoryview(row) for row in into]))[2], into


@contextlib.contextmanager
def driving(service: ServiceProcess, **settings: Any) -> Iterator[Driver]:
    settings = {"url": service.address("unix"), "tenant": "acme", "weights": WEIGHTS, "off_s": 0.05} | settings
    connector = PerdureConnector(**settings)
    try:
        yield Driver(connector)
    finally:
        connector.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path / "store") as service:
        yield service


def test_objects_come_back_in_another_process_of_lmcache(service: ServiceProcess) -> None:
    keys = [key(number) for number in range(9)]
    with driving(service) as one:
        assert one.exists(keys) == [False] * 9
        assert one.set(keys, [content(n) for n in range(9)]) == [True] * 9
        assert one.set(keys[:3], [content(n) for n in range(3)]) == [True] * 3
        assert one.exists([*keys, key(99)]) == [True] * 9 + [False]
    with driving(service) as other:  # it has never seen an object of this size
        assert other.exists([key(99), *keys]) == [False] + [True] * 9
        found, into = other.get([*keys, key(99)])
        assert found == [True] * 9 + [False]
        for number in range(9):
            assert np.array_equal(into[number], content(number))
        assert (into[9] == UNTOUCHED).all()
        assert other.connector.counts["found"] == 9
        assert other.connector.counts["missed"] == 1


def test_objects_of_several_sizes_and_models(service: ServiceProcess) -> None:
    sizes = [4096 * (1 + number) for number in range(4)]
    with driving(service) as one:
        for number, size in enumerate(sizes):
            assert one.set([key(number)], [content(number, size)]) == [True]
        assert one.exists([key(n) for n in range(4)]) == [True] * 4
        assert one.exists([key(0, model="other")]) == [False]
        assert one.exists([key(0, rank=2)]) == [False]
        assert one.get([key(1)], sizes[2])[0] == [False]  # that object has another size
    with driving(service) as other:
        assert other.exists([key(n) for n in range(4)]) == [True] * 4


def test_more_sizes_than_are_kept_are_refused(service: ServiceProcess) -> None:
    with driving(service) as one:
        for number in range(SIZES_MAX):
            assert one.set([key(number)], [content(number, 512 + number)]) == [True]
        assert one.set([key(99)], [content(99, 10_000)]) == [False]
    with driving(service) as other:
        assert other.exists([key(n) for n in range(SIZES_MAX)]) == [True] * SIZES_MAX


def test_weights_layout_tenant_and_salt_separate(service: ServiceProcess) -> None:
    with driving(service) as one:
        assert one.set([key(1), key(1, salt="a")], [content(1), content(2)]) == [True, True]
        assert one.exists([key(1), key(1, salt="a"), key(1, salt="b")]) == [True, True, False]
    for other in ({"weights": "sha256:" + "2" * 64}, {"layout": "float16"}, {"tenant": "other"}):
        with driving(service, **other) as two:
            assert two.exists([key(1)]) == [False]
            assert two.get([key(1)])[0] == [False]
    with driving(service, salt_required=True) as strict:
        assert strict.exists([key(1), key(1, salt="a")]) == [False, True]
        assert strict.set([key(3)], [content(3)]) == [False]
        assert strict.get([key(1), key(1, salt="a")])[0] == [False, True]
    with driving(service, weights={"m/one": WEIGHTS}) as named:
        assert named.exists([key(1), key(1, model="unnamed")]) == [True, False]
        assert named.set([key(1, model="unnamed")], [content(1)]) == [False]


def test_what_is_not_a_key_is_a_miss(service: ServiceProcess) -> None:
    with driving(service) as one:
        assert one.exists(["", "nonsense", key(1)]) == [False] * 3
        assert one.set(["nonsense"], [content(1)]) == [False]
        assert one.exists([]) == []


def test_a_flipped_byte_is_a_miss_and_can_be_stored_again(tmp_path: Path) -> None:
    keys = [key(number) for number in range(4)]
    settings: dict[str, Any] = {"durability": "session"}
    with ServiceProcess(tmp_path / "store") as service, driving(service, **settings) as one:
        assert one.set(keys, [content(n) for n in range(4)]) == [True] * 4
        space = one.connector._space("m/one", SIZE)
        with perdure.connect(service.address("unix")) as client:
            where = client.explain(space.adopt_hashes([keys[2].encode()])[0].tobytes())
    with (tmp_path / "store" / where["file"]).open("r+b") as file:
        file.seek(where["record"]["offset"] + limits.page_bytes + 100)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    with ServiceProcess(tmp_path / "store") as service, driving(service) as one:
        until(lambda: one.exists(keys) == [True] * 4)
        found, into = one.get(keys)
        assert found == [True, True, False, True]
        assert (into[2] == UNTOUCHED).all()
        assert one.connector.counts["corrupt"] == 1
        assert one.set(keys[2:3], [content(2)]) == [True]
        assert one.get(keys)[0] == [True] * 4


def test_without_a_service_everything_is_a_miss_until_it_is_back(tmp_path: Path) -> None:
    keys = [key(number) for number in range(4)]
    short: dict[str, Any] = {"lookup_s": 0.3, "read_s": 0.3, "write_s": 0.5}
    with ServiceProcess(tmp_path / "store") as first, driving(first, **short) as one:
        until(lambda: one.set(keys, [content(n) for n in range(4)]) == [True] * 4)
        first.stop()
        assert one.get([key(77)])[0] == [False]
        assert one.exists([key(77)]) == [False]
        first.go_on()
        until(lambda: one.get(keys)[0] == [True] * 4)
        first.kill()
        assert one.exists([key(78)]) == [False]
        found, into = one.get([key(78), key(79)])
        assert found == [False, False]
        assert (into == UNTOUCHED).all()
        assert one.set([key(80)], [content(80)]) == [False]
        with ServiceProcess(tmp_path / "store"):
            until(lambda: one.exists([key(81)]) == [False] and one.set([key(81)], [content(81)]) == [True])
    connector = PerdureConnector(url=f"unix://{tmp_path}/nobody.sock", tenant="acme", weights=WEIGHTS)
    nobody = Driver(connector)
    assert nobody.exists(keys) == [False] * 4
    assert nobody.set(keys, [content(n) for n in range(4)]) == [False] * 4
    assert connector._link.off
    connector.close()
    connector.close()


@pytest.mark.parametrize(
    ("settings", "error", "why"),
    [
        ({"url": ""}, InvalidArgument, "url is empty"),
        ({"tenant": ""}, InvalidArgument, "tenant"),
        ({"weights": ""}, InvalidArgument, "sha256sum"),
        ({"weights": "latest"}, InvalidArgument, "algorithm:value"),
        ({"weights": {"m": ""}}, InvalidArgument, "sha256sum"),
        ({"read_s": 0}, InvalidArgument, "read_s"),
        ({"durability": "for ever"}, InvalidArgument, "durability"),
        ({"tenent": "acme"}, UnknownOption, "did you mean 'tenant'"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        PerdureConnector(**({"url": "unix:///nowhere", "tenant": "acme", "weights": WEIGHTS} | settings))
