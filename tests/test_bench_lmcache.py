"""The benchmark of LMCache on Perdure: what it says without LMCache, and a tiny run where LMCache's environment is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.benchmarks import engines_lmcache
from perdure.benchmarks.engines_lmcache import BUFFERED, DIRECT, Plan
from perdure.benchmarks.harness import Report, validate
from perdure.benchmarks.peers import LMCACHE, OURS, PeerFailed
from perdure.limits import KIB, MIB

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
