"""The tier in engine processes: a context outlives its engine, a damaged block and a dead service change no output.

vLLM's `fs` tier is asked the same questions in the same engine; what it does with a damaged block is told, not
asserted.
Few engines are started for all of it, because starting one takes half a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import tiny_models
from support.engines import needs_vllm, same

import perdure
from perdure.benchmarks.engines_tier import forget, generate, prompt, stored
from perdure.testing.transport import ServiceProcess
from perdure.testing.vllm_offline import Generated, OfflineEngine
from perdure.testing.vllm_process import tiering

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

    def engine(self, name: str) -> OfflineEngine:
        tiers = [
            {
                "type": "perdure", "module_path": "perdure.engines.vllm.tier", "locality": "REMOTE", "weights": "files",
                "url": f"unix://{self.data}/perdure.sock", "after_reset": "same", "load_s": 5.0,
            },
            {"type": "fs", "root_dir": str(self.folder / "fs"), "locality": "LOCAL"},
        ]  # fmt: skip
        llm = {"model": self.model, "dtype": "float32", "max_model_len": 2048}
        engine = OfflineEngine(llm, self.folder / f"{name}.log", transfer=tiering(*tiers))
        generate(engine, prompt(99, 300))
        return engine

    def files(self) -> set[Path]:
        """Of the fs tier."""
        return set((self.folder / "fs").rglob("*.bin"))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, smollm: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("tier"), smollm)
    yield scene
    scene.service.end()


def test_a_context_outlives_its_engine_and_nothing_changes_the_output(scene: Scene) -> None:
    context = prompt(1, TOKENS)
    with scene.engine("first") as engine:
        stored(engine, 2)
        others = scene.files()
        cold = generate(engine, context, max_tokens=TEXT)
        local = generate(engine, context, max_tokens=TEXT)
        assert (cold.cached_tokens, local.cached_tokens) == (0, CACHED)
        stored(engine, 2)
        engine.end()
    with scene.engine("second") as engine:
        # a new process
        restored = generate(engine, context, "remote", TEXT)
        assert restored.cached_tokens == CACHED
        assert same(restored, local)
        assert same(local, cold)  # float32: a local hit computes the same as a cold prompt
        _damaged(scene, engine, context, local, min(scene.files() - others))
        _without_service(scene, engine, context, local)


def _damaged(scene: Scene, engine: OfflineEngine, context: list[int], local: Generated, file: Path) -> None:
    damage(file)
    forget(engine)
    other = generate(engine, context, "local", TEXT)
    told = "the same" if same(other, local) else "CHANGED"
    print(f"fs tier, one bit flipped: {other.cached_tokens} tokens from it, output {told}")

    scene.service.end()
    damage(max(scene.data.glob("segments/*/*.seg"), key=lambda path: path.stat().st_size))
    scene.service = scene.serve()
    forget(engine)
    ours = generate(engine, context, "remote", TEXT)
    print(f"perdure, one bit flipped: {ours.cached_tokens} tokens from it, output the same")
    assert same(ours, local)
    assert ours.cached_tokens is not None
    assert ours.cached_tokens < CACHED
    with perdure.connect(scene.service.address("unix")) as store:
        assert "corrupt" in str(store.status())
    stored(engine)  # what was recomputed is there again
    forget(engine)
    again = generate(engine, context, "remote", TEXT)
    assert again.cached_tokens == CACHED
    assert same(again, local)


def _without_service(scene: Scene, engine: OfflineEngine, context: list[int], local: Generated) -> None:
    scene.service.end()
    forget(engine)
    alone = generate(engine, context, "remote", TEXT)
    assert alone.cached_tokens == 0
    assert same(alone, local)

    scene.service = scene.serve()
    for delay_blocks in range(3):  # killed while it looks, brings or delivers; wherever it gets to
        forget(engine)
        params = {"kv_load_tiers": [{"locality": "remote"}]}
        engine.begin([context], max_tokens=TEXT, params=params, ignore_eos=True)
        scene.service.process.poll()
        for _ in range(delay_blocks * 20):
            scene.service.process.poll()
        scene.service.end()
        assert same(engine.finish()[0], local)
        scene.service = scene.serve()


@pytest.mark.parametrize("kind", ["gemma3", "gpt-oss", "qwen3-next"])
def test_models_of_several_kinds_of_attention(
    kind: str, models: Path, service: ServiceProcess, offline: Callable[..., OfflineEngine]
) -> None:
    """Sliding windows beside full attention, and linear attention's states: groups of their own, and all come back."""
    given = tiny_models.llm(kind, models)
    if kind == "qwen3-next":
        given |= {"enable_prefix_caching": True, "mamba_cache_mode": "align"}
    url = service.address("unix")
    tier = {"type": "perdure", "module_path": "perdure.engines.vllm.tier", "weights": "files", "url": url}
    transfer = tiering(tier, cpu_bytes=1 << 28)
    context = tiny_models.prompt(TOKENS)
    with offline(given, transfer=transfer) as engine:
        generate(engine, context, max_tokens=TEXT)
        local = generate(engine, context, max_tokens=TEXT)
        stored(engine)
        engine.end()
    with offline(given, transfer=transfer) as engine:
        restored = generate(engine, context, max_tokens=TEXT)
        assert restored.cached_tokens is not None
        assert restored.cached_tokens > TOKENS // 2
        assert same(restored, local)
        engine.end()
    if kind == "gemma3":  # the same files, computed with differently
        given["hf_overrides"] = {"rms_norm_eps": 0.01}
        with offline(given, transfer=transfer) as engine:
            assert generate(engine, context, max_tokens=TEXT).cached_tokens == 0
