"""What tests of engines share. All of them are collected without vLLM, and skipped where it is needed.

- `needs_vllm` marks a test (`pytestmark = needs_vllm` a file); `make test-engines` has vLLM.
- `smollm`: the directory of SmolLM2 in fp32. `models`: a folder for `support.tiny_models`, kept for the whole run.
- `service`: `perdure serve` in a process of its own; `serve` makes more of them.
- `served`: a service in this process; `engine`: engines on it that run vLLM's scheduler and no model.
- `offline`, `server`: start vLLM in processes of their own (`perdure.testing.vllm_offline`, `vllm_server`), which are
  killed at the end of the test; what they wrote is shown if the test fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.engines import Served, needs_vllm

from perdure.testing.transport import ServiceProcess
from perdure.testing.vllm_offline import OfflineEngine
from perdure.testing.vllm_server import VllmServer

__all__ = ["needs_vllm"]

TEST_S = 900  # a test may start several engines, of 20 to 60 s each


def pytest_configure(config: pytest.Config) -> None:
    if find_spec("vllm") is not None:  # it warns about itself, and so do what it imports
        config.addinivalue_line("filterwarnings", "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S))


@pytest.fixture(scope="session")
def smollm() -> Path:
    from perdure.demo.scenes import default_model_cache
    from perdure.engines.smollm import ModelUnavailable, model_path

    try:
        return model_path(default_model_cache())
    except ModelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ServiceProcess]]:
    """serve(name="store", **flags of `perdure serve`); ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(name: str = "store", **flags: str) -> ServiceProcess:
            chosen = {"capacity": "2GiB", "memory": "512MiB"} | flags
            return stack.enter_context(ServiceProcess(tmp_path / name, **chosen))

        yield start


@pytest.fixture
def service(serve: Callable[..., ServiceProcess]) -> ServiceProcess:
    return serve()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    one = Served(tmp_path)
    one.start()
    yield one
    one.stop()


@pytest.fixture
def engine(served: Served) -> Iterator[Callable[..., Any]]:
    """engine(**arguments of SimEngine)."""
    from support.engine_sim import SimEngine

    with contextlib.ExitStack() as stack:
        yield lambda **arguments: stack.enter_context(SimEngine(served.folder, served.url, **arguments))


@pytest.fixture
def offline(tmp_path: Path) -> Iterator[Callable[..., OfflineEngine]]:
    """offline({arguments of vllm.LLM}, transfer=...) as OfflineEngine takes them, without the log."""
    yield from _started(tmp_path, lambda log, arguments, named: OfflineEngine(*arguments, log, **named))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., VllmServer]]:
    """server(model, transfer=...) as VllmServer takes them, without the log. Not yet ready: call `wait_ready`."""
    yield from _started(tmp_path, lambda log, arguments, named: VllmServer(*arguments, log, **named))


def _started(tmp_path: Path, make: Callable[[Path, Any, Any], Any]) -> Iterator[Callable[..., Any]]:
    started: list[Any] = []

    def start(*arguments: Any, **named: Any) -> Any:
        made = make(tmp_path / f"vllm-{len(started)}.log", arguments, named)
        started.append(made)
        return made

    try:
        yield start
    finally:
        for one in started:
            one.kill()
            print(f"--- {one.log.name}\n{one.output()[-8000:]}")
