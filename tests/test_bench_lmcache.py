"""The benchmark of LMCache on Perdure: what it says without LMCache, and a tiny run where LMCache's environment is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import perdure
from perdure.benchmarks import engines_lmcache
from perdure.benchmarks.engines_lmcache import BUFFERED, DIRECT, Plan, Sides
from perdure.benchmarks.engines_lmcache_worker import CONTENTS_SEED
from perdure.benchmarks.harness import Report, validate
from perdure.benchmarks.peer_protocol import Contents
from perdure.benchmarks.peers import LMCACHE, OURS, PeerFailed
from perdure.limits import KIB, MIB
from perdure.testing.transport import ServiceProcess

TINY = Plan((256 * KIB,), 4, 5, 256 * MIB)
ENVIRONMENTS = os.environ.get("PERDURE_ENVIRONMENTS", "")  # where `perdure bench` has put those of peers
THERE = bool(ENVIRONMENTS) and (Path(ENVIRONMENTS) / f"lmcache-{LMCACHE}" / "complete").exists()


def test_without_its_environment_lmcache_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cache_dir: Path) -> Path:
        raise PeerFailed("there is no package index")

    monkeypatch.setattr(engines_lmcache, "install", fail)
    for cache_dir, why in ((None, "not asked for"), (tmp_path, "no package index")):
        report = Report("", {}, engines_lmcache.rows(TINY, tmp_path, lambda what: None, cache_dir))
        validate(json.loads(report.to_json()))
        assert len(report.rows) == 2
        assert all(row.ours is None and why in row.note for row in report.rows)


def test_adapters_are_as_lmcache_reads_them(tmp_path: Path) -> None:
    specs = {
        key: json.loads(engines_lmcache.adapter(key, tmp_path, tmp_path / "s")) for key in (OURS, BUFFERED, DIRECT)
    }
    assert specs[OURS]["type"] == "native_plugin"
    assert specs[OURS]["adapter_params"]["url"] == f"unix://{tmp_path}/s"
    assert [specs[key].get("use_odirect", False) for key in (BUFFERED, DIRECT)] == [False, True]


def test_the_worker_says_how_it_is_used() -> None:
    pytest.importorskip("torch", reason="LMCache's worker imports torch")
    script = Path(engines_lmcache.__file__).with_name("engines_lmcache_worker.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "l2|manager" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not THERE, reason="PERDURE_ENVIRONMENTS names no folder with LMCache's environment")
def test_a_tiny_run_with_lmcache_itself(tmp_path: Path) -> None:
    steps: list[str] = []
    made = Report("", {}, engines_lmcache.rows(TINY, tmp_path, steps.append, Path(ENVIRONMENTS)))
    validate(json.loads(made.to_json()))
    assert list(tmp_path.iterdir()) == []
    assert len(steps) == 3
    assert len(made.rows) == 13
    assert all(row.ours is not None and len(row.ours_all) == TINY.repetitions for row in made.rows), made.rows


def flip(directory: Path, needle: bytes) -> None:
    """One bit of the only place below directory that has these bytes."""
    found = [(path, path.read_bytes().find(needle)) for path in directory.rglob("*") if path.is_file()]
    ((path, at),) = [(path, at) for path, at in found if at >= 0]
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([needle[0] ^ 1]))


@pytest.mark.slow
@pytest.mark.skipif(not THERE, reason="PERDURE_ENVIRONMENTS names no folder with LMCache's environment")
def test_a_flipped_byte_is_a_miss_in_lmcache_itself(tmp_path: Path) -> None:
    """And a hit with its own file adapters, which is why this is worth a test."""
    size, count = TINY.object_bytes[0], TINY.batch
    sides = Sides(engines_lmcache.install(Path(ENVIRONMENTS)), "l2", tmp_path, TINY)
    try:
        sides.open(block_bytes=size, batch=count)
        for worker in sides.workers.values():
            assert worker.ask("store", first=0)["done"] == count
        sides.workers[OURS].ask("close")
        sides.stop()
        for key in sides.workers:
            mark = Contents(size, CONTENTS_SEED).mark(2)
            flip(sides.base / ("service" if key == OURS else key.replace(" ", "-")), mark)
        sides.cool()
        told = {key: worker.ask("load", first=0) for key, worker in sides.workers.items()}
        # of ours the third object is not delivered: its memory, zeroed before, is untouched and so not what was stored
        assert {key: (one["done"], one["wrong"]) for key, one in told.items()} == {
            OURS: (count - 1, 1), BUFFERED: (count, 1), DIRECT: (count, 1)
        }  # fmt: skip
        assert sides.workers[OURS].ask("store", first=0)["done"] == count  # and can be stored again
        assert sides.workers[OURS].ask("load", first=0) | {"seconds": 0} == {"seconds": 0, "done": count, "wrong": 0}
    finally:
        sides.end()


@pytest.mark.slow
@pytest.mark.skipif(not THERE, reason="PERDURE_ENVIRONMENTS names no folder with LMCache's environment")
def test_lmcaches_own_benchmark_verifies_what_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that docs/engines/lmcache.md names."""
    monkeypatch.delenv("PERDURE_ENVIRONMENTS")  # services refuse names they do not know
    monkeypatch.setenv("PYTHONPATH", str(Path(perdure.__file__).parents[1]))
    python = engines_lmcache.install(Path(ENVIRONMENTS))
    with ServiceProcess(tmp_path / "store") as service:
        command = [
            str(python.with_name("lmcache")), "bench", "l2", "--no-skip-verify", "--num-keys", "8",
            "--l2-adapter", engines_lmcache.adapter(OURS, tmp_path, Path(service.address("unix").removeprefix("unix://"))),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "success_keys=8/8" in done.stdout
    assert "loaded=8/8" in done.stdout
    assert "All 8 keys data verified OK" in done.stdout
