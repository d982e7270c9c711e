"""The tier in engine processes: a context outlives its engine, a damaged block and a dead service change no output.

vLLM's `fs` tier is asked the same questions in the same engine; what it does with a damaged block is told, not
asserted.
Two engines are started for all of it, because starting one takes half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.benchmarks.engines_tier import prompt, stored
from perdure.benchmarks.engines_tier_process import EngineProcess
from perdure.testing.transport import ServiceProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here (make test-engines has it)"),
]

TOKENS = 1500
CACHED = TOKENS // 128 * 128
TEXT = 16


@pytest.fixture(scope="module")
def model() -> Path:
    from perdure.demo.scenes import default_model_cache
    from perdure.engines.smollm import ModelUnavailable, model_path

    try:
        return model_path(default_model_cache())
    except ModelUnavailable as error:
        pytest.skip(str(error))


def damage(path: Path) -> None:
    """Flip one bit in the middle of a file: the exponent's of a float, where it holds floats."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // 4096 * 4096 + 3)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x40]))


class Scene:
    """One store and one folder of the fs tier; services and engines that come and go."""

    def __init__(self, folder: Path, model: Path):
        self.folder, self.model, self.data = folder, model, folder / "store"
        self.service = self.serve()

    def serve(self) -> ServiceProcess:
        return ServiceProcess(self.data, capacity="4GiB", memory="1GiB")

    def engine(self, name: str) -> EngineProcess:
        tiers = [
            {
                "type": "perdure", "module_path": "perdure.engines.vllm.tier", "locality": "REMOTE", "weights": "files",
                "url": f"unix://{self.data}/perdure.sock", "after_reset": "same", "load_s": 5.0,
            },
            {"type": "fs", "root_dir": str(self.folder / "fs"), "locality": "LOCAL"},
        ]  # fmt: skip
        engine = EngineProcess(self.folder, name, model=str(self.model), tiers=tiers, length=2048)
        engine.generate(prompt(99, 300))
        return engine

    def restart(self) -> None:
        self.service.end()
        self.service = self.serve()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("tier"), model)
    yield scene
    scene.service.end()


def said(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    return answer["ids"], answer["logprobs"]


def test_a_context_outlives_its_engine_and_nothing_changes_the_output(scene: Scene) -> None:
    context = prompt(1, TOKENS)
    with scene.engine("first") as engine:
        cold = engine.generate(context, max_tokens=TEXT)
        local = engine.generate(context, max_tokens=TEXT)
        assert (cold["cached"], local["cached"]) == (0, CACHED)
        stored(engine, 2)
        engine.end()
    with scene.engine("second") as engine:
        # a new process
        restored = engine.generate(context, max_tokens=TEXT, **{"from": "remote"})
        assert restored["cached"] == CACHED
        assert said(restored) == said(local) == said(cold)  # float32: a local hit computes the same as a cold prompt
        _damaged(scene, engine, context, local)
        _without_service(scene, engine, context, local)


def _damaged(scene: Scene, engine: EngineProcess, context: list[int], local: dict[str, Any]) -> None:
    damage(max((scene.folder / "fs").rglob("*.bin"), key=lambda path: path.stat().st_mtime_ns))
    engine.ask("forget")
    other = engine.generate(context, max_tokens=TEXT, **{"from": "local"})
    same = said(other) == said(local)
    print(f"fs tier, one bit flipped: {other['cached']} tokens from it, output {'the same' if same else 'CHANGED'}")

    scene.service.end()
    damage(max(scene.data.glob("segments/*/*.seg"), key=lambda path: path.stat().st_size))
    scene.service = scene.serve()
    engine.ask("forget")
    ours = engine.generate(context, max_tokens=TEXT, **{"from": "remote"})
    print(f"perdure, one bit flipped: {ours['cached']} tokens from it, output the same")
    assert said(ours) == said(local)
    assert ours["cached"] < CACHED
    with perdure.connect(scene.service.address("unix")) as store:
        assert "corrupt" in str(store.status())
    stored(engine)  # what was recomputed is there again
    engine.ask("forget")
    again = engine.generate(context, max_tokens=TEXT, **{"from": "remote"})
    assert (again["cached"], said(again)) == (CACHED, said(local))


def _without_service(scene: Scene, engine: EngineProcess, context: list[int], local: dict[str, Any]) -> None:
    scene.service.end()
    engine.ask("forget")
    alone = engine.generate(context, max_tokens=TEXT, **{"from": "remote"})
    assert (alone["cached"], said(alone)) == (0, said(local))

    scene.service = scene.serve()
    for delay_blocks in range(3):  # killed while it looks, brings or delivers; wherever it gets to
        engine.ask("forget")
        engine.send("generate", tokens=context, max_tokens=TEXT, **{"from": "remote"})
        scene.service.process.poll()
        for _ in range(delay_blocks * 20):
            scene.service.process.poll()
        scene.service.end()
        assert said(engine.receive()) == said(local)
        scene.service = scene.serve()
