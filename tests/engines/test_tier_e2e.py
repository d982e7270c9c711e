"""The tier in engine processes: a context outlives its engine, a damaged block and a dead service change no output.

vLLM's `fs` tier is asked the same questions in the same engine; what it does with a damaged block is told, not
asserted.
Few engines are started for all of it, because starting one takes half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import tiny_models
from support.engines import needs_vllm

import perdure
from perdure.benchmarks.engines_tier import prompt, stored
from perdure.benchmarks.engines_tier_process import EngineProcess
from perdure.testing.transport import ServiceProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    needs_vllm,
]

TOKENS = 1500
CACHED = TOKENS // 128 * 128
TEXT = 16


def damage(path: Path) -> None:
    """Flip one bit in the middle of a file: of a float's exponent, so that it becomes huge, where there are floats."""
    raw = path.read_bytes()
    at = len(raw) // 2 // 4096 * 4096 + 3
    at += next((step for step in range(0, 4096, 4) if 0x38 <= raw[at + step] & 0x7F < 0x40), 0)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([raw[at] ^ 0x40]))


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

    def files(self) -> set[Path]:
        """Of the fs tier."""
        return set((self.folder / "fs").rglob("*.bin"))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, smollm: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("tier"), smollm)
    yield scene
    scene.service.end()


def said(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    return answer["ids"], answer["logprobs"]


def test_a_context_outlives_its_engine_and_nothing_changes_the_output(scene: Scene) -> None:
    context = prompt(1, TOKENS)
    with scene.engine("first") as engine:
        stored(engine, 2)
        others = scene.files()
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
        _damaged(scene, engine, context, local, min(scene.files() - others))
        _without_service(scene, engine, context, local)


def _damaged(scene: Scene, engine: EngineProcess, context: list[int], local: dict[str, Any], file: Path) -> None:
    damage(file)
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


@pytest.mark.parametrize("kind", ["gemma3", "gpt-oss", "qwen3-next"])
def test_models_of_several_kinds_of_attention(kind: str, models: Path, service: ServiceProcess, tmp_path: Path) -> None:
    """Sliding windows beside full attention, and linear attention's states: groups of their own, and all come back."""
    given = tiny_models.llm(kind, models)
    if kind == "qwen3-next":
        given |= {"enable_prefix_caching": True, "mamba_cache_mode": "align"}
    options: dict[str, Any] = {
        "model": given.pop("model"), "dtype": given.pop("dtype"), "length": given.pop("max_model_len"),
        "cpu_bytes": 1 << 28, "engine": given,
    }  # fmt: skip
    url = service.address("unix")
    tier = {"type": "perdure", "module_path": "perdure.engines.vllm.tier", "weights": "files", "url": url}
    context = tiny_models.prompt(TOKENS)
    with EngineProcess(tmp_path, "first", tiers=[tier], **options) as engine:
        engine.generate(context, max_tokens=TEXT)
        local = engine.generate(context, max_tokens=TEXT)
        stored(engine)
        engine.end()
    with EngineProcess(tmp_path, "second", tiers=[tier], **options) as engine:
        restored = engine.generate(context, max_tokens=TEXT)
        assert restored["cached"] > TOKENS // 2
        assert said(restored) == said(local)
        engine.end()
    if kind == "gemma3":  # the same files, computed with differently
        given["hf_overrides"] = {"rms_norm_eps": 0.01}
        with EngineProcess(tmp_path, "third", tiers=[tier], **options) as engine:
            assert engine.generate(context, max_tokens=TEXT)["cached"] == 0
