"""`perdure bench policy`: traces become requests, the simulators agree with published curves, a tiny run is valid."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from perdure.benchmarks import harness, policy, policy_sim, policy_store, policy_traces
from perdure.benchmarks.policy_traces import AGENT_FILE, CHAT_FILE, Request, Trace
from perdure.cli import main
from perdure.errors import InvalidArgument

TINY = policy.Plan(40, 2_000, (0.25,), 0.5, 0.05, (policy.Price(policy_store.LLAMA_8B),))


def trace_of(*requests: list[int], ends: dict[int, list[int]] | None = None) -> Trace:
    made = [
        Request(
            float(at),
            512 * len(blocks),
            np.array(blocks, np.int64),
            None if ends is None or at not in ends else np.array(ends[at], np.int64),
        )
        for at, blocks in enumerate(requests)
    ]
    return Trace("t", made, 1 + max(map(max, requests)))


# --- simulators


def test_a_block_behind_a_hole_does_not_hit() -> None:
    made = policy_sim.lru(trace_of([0, 1, 2], [3, 4], [0, 1, 2]), 4)
    assert made.hit_blocks == 2  # the tail went first, and so must the rest of the chain be computed
    assert policy_sim.lru(trace_of([0, 1, 2], [3, 4], [0, 1, 2]), 5).hit_blocks == 3


def test_released_blocks_go_first() -> None:
    requests = ([0, 1], [2, 3], [4, 5], [0, 1])
    assert policy_sim.lru(trace_of(*requests), 4).hit_blocks == 0
    assert policy_sim.lru(trace_of(*requests, ends={1: [2, 3]}), 4, release=True).hit_blocks == 2


def test_the_optimum_keeps_what_is_asked_for_soonest_and_writes_nothing_else() -> None:
    made = policy_sim.belady(trace_of([0], [1], [2], [0], [1], [3]), 1)
    assert (made.hit_blocks, made.written_blocks) == (1, 2)
    assert policy_sim.belady(trace_of([0], [1], [2], [0], [1], [3]), 2).hit_blocks == 2


def test_no_policy_beats_the_optimum() -> None:
    rng = np.random.default_rng(5)
    trace = trace_of(*([*range(rng.integers(1, 9)), 10 + int(rng.integers(40))] for _ in range(200)))
    for capacity in (1, 3, 8, 20):
        best = policy_sim.belady(trace, capacity).hit_blocks
        assert policy_sim.lru(trace, capacity).hit_blocks <= best <= policy_sim.lru(trace, trace.unique).hit_blocks


@pytest.mark.parametrize(("share", "lru", "best"), [(0.01, 5.4, 25.1), (0.05, 20.0, 37.4), (0.10, 28.4, 37.4)])
def test_the_simulators_give_the_published_curves(traces_dir: Path, share: float, lru: float, best: float) -> None:
    chat = next(trace for trace in policy_traces.load(traces_dir) if trace.name == "chat")
    blocks = int(share * chat.unique)
    assert policy_sim.lru(chat, blocks).percent == pytest.approx(lru, abs=0.1)
    assert policy_sim.belady(chat, blocks).percent == pytest.approx(best, abs=0.1)


# --- traces


def put(path: Path, *rows: Any) -> None:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))


def test_chat_rows_become_requests(tmp_path: Path) -> None:
    put(
        tmp_path / CHAT_FILE,
        {"timestamp": 3000, "input_length": 900, "output_length": 1, "hash_ids": [7, 9]},
        {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [7, 8]},
    )
    (trace,) = policy_traces.load(tmp_path)
    assert (trace.name, trace.unique, trace.uses, trace.made_up) == ("chat", 3, 4, False)
    assert [(one.at_s, one.tokens, one.ends) for one in trace.requests] == [(0.0, 600, None), (3.0, 900, None)]
    assert trace.requests[0].blocks[0] == trace.requests[1].blocks[0]


def test_eight_blocks_of_an_agent_are_one(tmp_path: Path) -> None:
    put(
        tmp_path / AGENT_FILE,
        {"requests": [{"t": 0.0, "in": 1100, "runs": [[1, 17]]}, {"t": 5.0, "in": 1600, "runs": [[1, 8], [30, 16]]}]},
        {"requests": [{"t": 0.0, "in": 600, "runs": [[1, 9]]}]},
    )
    (trace,) = policy_traces.load(tmp_path)
    assert trace.unique == 5
    first, second = (one for one in trace.requests if len(one.blocks) > 1)
    assert (first.blocks[0], len(first.blocks), len(second.blocks)) == (second.blocks[0], 2, 3)
    assert first.ends is None
    assert second.ends is not None
    assert sorted(second.ends) == sorted({*first.blocks, *second.blocks})
    assert second.at_s == pytest.approx(first.at_s + 5.0)


# mtime: the time would be in the tests' names, and those must be the same in each of pytest's processes.
@pytest.mark.parametrize("content", [b"not gzip", *(gzip.compress(text, mtime=0) for text in (b"{", b"[]", b"{}"))])
def test_what_is_no_trace_is_named(tmp_path: Path, content: bytes) -> None:
    for file in (CHAT_FILE, AGENT_FILE):
        (tmp_path / file).write_bytes(content)
        with pytest.raises(InvalidArgument, match=re.escape(str(tmp_path / file))):
            policy_traces.load(tmp_path)
        (tmp_path / file).unlink()


def test_a_folder_without_traces(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="holds neither"):
        policy_traces.load(tmp_path)


def test_the_made_up_trace_is_the_same_each_time() -> None:
    one, two = policy_traces.load(None)[0], policy_traces.load(None)[0]
    assert one.made_up
    assert one.unique == two.unique == 1 + max(int(request.blocks.max()) for request in one.requests)
    assert [request.at_s for request in one.requests] == [request.at_s for request in two.requests]
    short = one.head(50, 1 << 30)
    assert len(short.requests) == 50
    assert {block for request in short.requests for block in request.blocks.tolist()} == set(range(short.unique))
    assert one.head(1 << 30, 100).uses <= 100
    assert one.head(1 << 30, 1 << 30) is one


# --- runs


def test_a_store_that_holds_everything_hits_as_the_ideal(tmp_path: Path) -> None:
    trace = policy_traces.load(None)[0].head(60, 1 << 30)
    ideal = policy_sim.lru(trace, trace.unique)
    for memory in (0, trace.unique // 4):
        made = policy_store.replay(tmp_path / str(memory), trace, 8 * trace.unique + 4096, memory_blocks=memory)
        assert (made.hit_blocks, made.percent) == (ideal.hit_blocks, ideal.percent)
        assert made.written_blocks == trace.unique
        assert (made.memory_blocks > 0) is (memory > 0)


def test_the_stand_in_costs_what_the_real_block_does() -> None:
    """As in the unit test of the prices: 18 % of recomputing it at 7,600 cycles."""
    assert policy.Price(policy_store.LLAMA_8B).write_cost == pytest.approx(0.18, abs=0.01)
    assert policy.Price(policy_store.LLAMA_8B, 1_825).write_cost == pytest.approx(0.71, abs=0.01)


def test_a_tiny_run_gives_a_valid_report_and_leaves_nothing(tmp_path: Path) -> None:
    report = policy.run(tmp_path, json=True, plan=TINY)
    made = json.loads(report.to_json())
    harness.validate(made)
    assert list(tmp_path.iterdir()) == []
    assert made["machine"]["made_up"] is True
    assert len(made["rows"]) == 4 + 3
    assert all(entry["ours"] is not None for entry in made["rows"])


def test_the_command_takes_a_folder_of_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"timestamp": 1000 * at, "input_length": 1024, "output_length": 1, "hash_ids": [at % 5, 10 + at % 5]}
        for at in range(20)
    ]
    (tmp_path / "traces").mkdir()
    put(tmp_path / "traces" / CHAT_FILE, *rows)
    monkeypatch.setattr(policy, "QUICK", TINY)
    command = ["bench", "policy", "--quick", "--json", "--dir", str(tmp_path / "data")]
    told = CliRunner().invoke(main, command, env={"PERDURE_TRACES": str(tmp_path / "traces")})
    assert told.exit_code == 0, told.output
    made = json.loads(told.stdout)
    harness.validate(made)
    assert made["machine"]["traces"] == "chat"
    wrong = CliRunner().invoke(main, [*command, "--traces", str(tmp_path)])
    assert wrong.exit_code == 2
