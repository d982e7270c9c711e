"""`bench engines`: its rows from made-up times, and what it says without an engine."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from perdure.benchmarks import engines, engines_connector, engines_replay, harness
from perdure.benchmarks.engines_connector import BLOCK_TOKENS
from perdure.cli import main
from perdure.limits import MIB


def times(**more: list[float]) -> dict[str, list[float]]:
    return {
        "memory": [0.11, 0.12, 0.3], "hit": [0.1, 0.1, 0.1], "node": [0.12, 0.12, 0.13], "disk": [0.2, 0.2, 0.2],
        "disk hit": [0.1, 0.1, 0.1], "bound": [0.15, 0.25, 0.25],
    } | more  # fmt: skip


def report(rows: list[harness.Row]) -> dict[str, harness.Row]:
    made = harness.Report("test", {}, rows)
    harness.validate(made.as_dict())
    return {row.name.split(", ", 2)[2]: row for row in rows}


def test_restores_are_judged_by_their_bounds() -> None:
    rows = report(engines_connector._restore_rows(times(), 4800, 100 * MIB))
    memory, node, disk = rows.values()
    assert (memory.ours, memory.reference, memory.met) == (0.12, 0.1, True)
    assert "p99 0.300 s" in memory.note
    assert (node.reference_name, node.met) == ("same host, from memory", True)
    assert (disk.reference, disk.met) == (0.25, True)
    slow = report(
        engines_connector._restore_rows(times(memory=[0.126] * 3, node=[0.2] * 3, bound=[0.19] * 3), 4800, MIB)
    )
    assert [row.met for row in slow.values()] == [False, False, False]


def test_without_fio_the_disk_is_not_judged() -> None:
    *_, disk = report(engines_connector._restore_rows(times(bound=[]), 4800, MIB)).values()
    assert disk.met is None
    assert "fio" in disk.note


def test_the_replay_is_the_same_every_time_and_grows() -> None:
    first, second = (list(engines_replay.requests(4, 5)) for _ in range(2))
    assert first == second
    assert len(first) == 20
    of_one = [tokens for number, tokens in first if number == 2]
    common = [
        next((at for at, (a, b) in enumerate(zip(*two, strict=False)) if a != b), len(two[0]))
        for two in pairwise(of_one)
    ]
    grown = [len(before) == same for before, same in zip(of_one, common, strict=False)]
    assert grown == [True, True, False, True]  # the fourth turn rewrites the end of its context
    assert all(tokens[:BLOCK_TOKENS] == first[0][1][:BLOCK_TOKENS] for _, tokens in first)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed here")
def test_without_vllm_the_report_says_why(tmp_path: Path) -> None:
    made = engines.run(tmp_path, model_cache=tmp_path, json=True)
    harness.validate(made.as_dict())
    assert [row.met for row in made.rows] == [None]
    assert "make bench-engines" in made.rows[0].note
    assert not list(tmp_path.iterdir())


def test_an_unknown_section_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["bench", "engines", "--dir", str(tmp_path), "--section", "nonsense"])
    assert done.exit_code == 2
    assert "connector" in done.output
