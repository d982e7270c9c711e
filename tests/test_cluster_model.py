"""The model of larger clusters: costs from a report, what follows from them, and queues against theory."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from perdure import limits
from perdure.benchmarks import cluster_costs as measured
from perdure.benchmarks import cluster_model as model
from perdure.benchmarks.cluster_model import Costs, Load, commands, derive, simulate
from perdure.cli import main
from perdure.errors import InvalidArgument
from perdure.limits import GIB, MIB

US = 1e-6
COSTS = Costs(
    command_s=5 * US, key_s=0.5 * US, host_call_s=200 * US, host_key_s=1 * US, publish_s=30 * US, record_bytes=200.0,
    beat_s=300 * US, news_s=0.2 * US, host_beat_s=500 * US, host_news_s=5 * US, host_segment_bytes=1000.0,
    change_s=60 * US,
)  # fmt: skip


def report(costs: Costs) -> dict[str, Any]:
    small, large = measured.SMALL_BATCH, measured.LARGE_BATCH
    rows = {
        measured.SERVER_SMALL: costs.server_s(small) / US,
        measured.SERVER_LARGE: costs.server_s(large) / US,
        measured.HOST_SMALL: costs.host_s(small) / US,
        measured.HOST_LARGE: costs.host_s(large) / US,
        measured.SERVER_PUBLISH: costs.publish_s / US,
        measured.RECORD_BYTES: costs.record_bytes,
        measured.SERVER_BEAT: costs.beat_s / US,
        measured.SERVER_NEWS: costs.news_s / US,
        measured.HOST_BEAT: costs.host_beat_s / US,
        measured.HOST_NEWS: costs.host_news_s / US,
        measured.SEGMENT_BYTES: costs.host_segment_bytes,
        measured.SERVER_CHANGE: costs.change_s / US,
    }
    return {"rows": [{"name": name, "ours": ours} for name, ours in rows.items()]}


def test_costs_are_found_again_in_what_lookups_of_two_sizes_cost() -> None:
    found = model.costs_of(report(COSTS))
    for name in Costs.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name)), name


def test_a_report_without_the_rows_is_refused() -> None:
    lacking = report(COSTS)
    lacking["rows"].pop()
    with pytest.raises(InvalidArgument, match=measured.SERVER_CHANGE):
        model.costs_of(lacking)


def test_the_command_prints_tables_or_says_what_it_was_given(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(report(COSTS)))
    done = CliRunner().invoke(main, ["cluster", "scale", str(file)])
    assert done.exit_code == 0
    assert "| 512 | 62,500 |" in done.output
    for wrong in ("no json", "[]", "{}"):
        file.write_text(wrong)
        done = CliRunner().invoke(main, ["cluster", "scale", str(file)])
        assert done.exit_code == 2
        assert "bench cluster --json" in done.output


def test_a_lookup_meets_as_many_slots_as_its_keys_fall_into() -> None:
    random = np.random.default_rng(1)
    seen = np.mean([len(set(random.integers(model.GROUPS, size=16).tolist())) for _ in range(5000)])
    assert commands(16) == pytest.approx(seen, rel=0.01)
    assert commands(1) == pytest.approx(1)


def test_what_a_load_needs() -> None:
    need = derive(COSTS, Load(512, 1e9, 1e5, 16, block_bytes=2 * MIB, published_share=0.1, changes_per_s=1000))
    assert need.cpu["lookups"] == pytest.approx(1e5 * (commands(16) * 5 * US + 16 * 0.5 * US))
    assert need.cpu["publishes"] == pytest.approx(1e5 * 16 * 0.1 * 30 * US)
    assert need.cpu["sessions"] == pytest.approx(0.06)
    assert need.cpu["beats"] == pytest.approx(1024 * 300 * US)
    changes = 4 * 1e5 * 16 * 0.1 * 2 * MIB / limits.segment_bytes_max
    assert need.cpu["news"] == pytest.approx(512 * changes * 0.2 * US)
    assert need.primaries == need.primaries_for_cpu == math.ceil(2 * sum(need.cpu.values()))
    assert need.primaries_for_memory == math.ceil(200e9 / (64 * GIB * 0.7))
    of_lookups = 1e5 / 512 * (200 * US + 16 * US)
    assert need.host_cores == pytest.approx(of_lookups + 2 * 500 * US + changes * 5 * US)
    assert need.host_bytes == pytest.approx(1e9 * 2 * MIB / limits.segment_bytes_max * 1000, rel=1e-3)


def test_what_does_not_fit_is_told() -> None:
    assert derive(COSTS, Load(8, 1e6, 1000, 16)).problems == ()
    (slots,) = derive(COSTS, Load(512, 1e6, 1e6, 16)).problems
    assert "64 slots" in slots
    (memory,) = derive(COSTS, Load(512, 1e9, 1000, 16, block_bytes=2 * MIB)).problems
    assert "7.3 GiB in each host for 7,812,500 segments" in memory


def test_a_queue_serves_in_order_of_arrival() -> None:
    random = np.random.default_rng(2)
    arrived, service = random.uniform(0, 10, 200), random.exponential(0.04, 200)
    ended, free_at = {}, 0.0
    for number in np.argsort(arrived).tolist():
        ended[number] = free_at = max(free_at, float(arrived[number])) + float(service[number])
    assert model._queue(arrived, service).tolist() == pytest.approx([ended[number] for number in range(200)])


def test_an_idle_cluster_answers_within_what_the_work_takes() -> None:
    costs = replace(COSTS, beat_s=0.0)
    seen = simulate(costs, Load(8, 0, 1.0, 1, published_share=0.0), 3, calls=2000)
    alone_ms = (costs.host_s(1) + costs.server_s(1)) * 1e3
    assert seen.p50_ms == pytest.approx(alone_ms)
    assert seen.cpu_us_per_lookup == pytest.approx(costs.server_s(1) / US)


def test_waiting_is_that_of_one_server_with_random_arrivals() -> None:
    """M/D/1: at half load one call in two finds the server idle, and the mean wait is half a service time."""
    costs = replace(COSTS, command_s=100 * US, key_s=0.0, host_call_s=0.0, host_key_s=0.0, beat_s=0.0)
    seen = simulate(costs, Load(512, 0, 5000.0, 1), 1, calls=100_000)
    assert seen.busiest == pytest.approx(0.5, rel=0.02)
    assert 0.1 <= seen.p50_ms < 0.11
    assert 0.3 < seen.p99_ms < 0.5
    over = simulate(costs, Load(512, 0, 20_000.0, 1), 1, calls=20_000)
    assert over.busiest > 1.9
    assert over.p99_ms > 100


def test_cost_per_lookup_grows_with_hosts_only_by_the_news_that_each_reads() -> None:
    def seen(hosts: int, published_share: float) -> float:
        load = Load(hosts, 0, 100.0 * hosts, 16, published_share=published_share)
        return simulate(replace(COSTS, beat_s=0.0), load, 16, calls=20_000).cpu_us_per_lookup

    assert seen(8, 0.0) == pytest.approx(seen(512, 0.0), rel=0.01)
    changes = Load(512, 0, 100.0 * 512, 16, published_share=0.5).segment_changes_per_s
    news_us = 512 * changes * 0.2 / (100 * 512)
    assert seen(512, 0.5) - seen(512, 0.0) == pytest.approx(news_us, rel=0.1)
