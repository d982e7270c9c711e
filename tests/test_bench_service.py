"""The benchmark of the service measures what it says: a tiny run of each section, and how its processes end."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from perdure.benchmarks import harness, peer_protocol, peers, service, service_lonet, service_restore, service_tcp
from perdure.benchmarks.service_host import Host, Plan, ServiceFailed
from perdure.benchmarks.target import WrongResult
from perdure.limits import KIB, MIB

TINY = Plan(
    block_bytes=64 * KIB,
    batch=4,
    warm_bytes=4 * MIB,
    range_bytes=512 * KIB,
    pool_bytes=8 * MIB,
    tcp_bytes=MIB,
    looks=8,
    idle=8,
    processes=2,
    threads=2,
    calls=10,
    repetitions=5,
)
SERVERS_END_S = 60


def ends(pid: int) -> bool:
    """Wait for the end of a process that is not our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], SERVERS_END_S)[0])
    finally:
        os.close(fd)


def namespace() -> subprocess.CompletedProcess[str]:
    look = (
        "import socket, service_lonet; socket.create_server(('127.0.0.1', 0)); print(sorted(service_lonet.reachable()))"
    )
    command = [sys.executable, service_lonet.__file__, sys.executable, "-c", look]
    beside = {**os.environ, "PYTHONPATH": str(Path(service_lonet.__file__).parent)}
    return subprocess.run(command, env=beside, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("section", service.SECTIONS)
def test_a_tiny_run_of_the_service_gives_a_valid_report_and_leaves_nothing(tmp_path: Path, section: str) -> None:
    report = service.run(tmp_path, json=True, sections=[section], plan=TINY)
    made = json.loads(report.to_json())
    harness.validate(made)
    assert list(tmp_path.iterdir()) == []
    judged = [entry for entry in made["rows"] if entry["target"] is not None]
    assert bool(judged) == (section != "clients")
    assert all(entry["met"] for entry in made["rows"] if entry["unit"] == "messages")
    for entry in made["rows"]:
        if entry["ours"] is None:
            assert "environment was not asked for" in entry["note"], entry
        elif entry["unit"] != "messages":
            assert len(entry["ours_all"]) == TINY.repetitions, entry["name"]


class Told:
    """A reader that always gives the same answer."""

    def __init__(self, **answer: float):
        self.answer = answer

    def ask(self, verb: str, **arguments: object) -> dict[str, Any]:
        return {"seconds": 1.0, "cpu_seconds": 0.25, "server_cpu_seconds": 0.5} | self.answer


@pytest.mark.parametrize("wrong", [{"found": 7}, {"wrong": 1}, {"from_memory": 1}])
def test_a_restore_that_was_not_cold_or_not_whole_is_no_figure(wrong: dict[str, float]) -> None:
    cold = {"found": 8.0, "wrong": 0.0, "from_memory": 0.0}
    good, bad = Told(**cold), Told(**(cold | wrong))
    restores = service_restore.Restores(TINY, cast(Any, good), cast(Any, bad))
    assert restores.next("client", "view", 2).cpu_s_per_gib == 0.25 * 2**30 / TINY.range_bytes
    assert restores.together["client", "view"] == [0.75 * 2**30 / TINY.range_bytes]
    with pytest.raises(WrongResult, match="8 cold blocks"):
        restores.next("embedded", "direct", 0)


def test_no_range_is_read_twice() -> None:
    seen: list[int] = []

    class Noting(Told):
        def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
            seen.extend(block for batch in arguments["batches"] for block in batch)
            return super().ask(verb)

    worker = cast(Any, Noting(found=8, wrong=0, from_memory=0))
    restores = service_restore.Restores(TINY, worker, worker)
    for group, way in enumerate(("registered", "private", "view")):
        for _ in range(TINY.repetitions):
            restores.next("client", way, group)
    assert len(set(seen)) == len(seen) == 8 * 3 * TINY.repetitions
    assert max(seen) < restores.chain


def test_two_stores_that_do_not_fit_the_disk_are_rows_that_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    rows = service_restore.rows(TINY, tmp_path, lambda what: None)
    assert all(row.ours is None and "do not fit" in row.note for row in rows)
    harness.validate(json.loads(harness.Report("t", {}, rows).to_json()))


def no_environment(cache_dir: Path) -> Path:
    raise peers.PeerFailed("no such requirement")


def test_a_peer_without_environment_or_namespace_costs_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_tcp, "_no_namespace", lambda: "no network namespace: not permitted")
    monkeypatch.setitem(service_tcp.INSTALLS, "lmcache", no_environment)
    rows = service_tcp.rows(TINY, tmp_path, lambda what: None, tmp_path / "environments")
    harness.validate(json.loads(harness.Report("t", {}, rows).to_json()))
    assert [row.reference_name for row in rows] == list(service_tcp.NAMES.values()) * 2
    assert [row.target for row in rows] == list(service_tcp.TARGETS.values()) * 2
    assert [row.ours is None for row in rows] == [False, True, True] * 2
    assert "it binds all interfaces, and no network namespace" in rows[1].note
    assert "no such requirement" in rows[2].note


def test_the_service_ends_with_the_block_that_failed(tmp_path: Path) -> None:
    seen: list[Host] = []

    def fail() -> None:
        with Host(tmp_path / "data", memory=8 * MIB) as host:
            assert host.socket.exists()
            seen.append(host)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert ends(seen[0].pid)
    assert not seen[0].socket.parent.exists()


def test_the_service_ends_with_a_killed_benchmark(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\n"
        "from perdure.benchmarks.service_host import Host\n"
        "host = Host(pathlib.Path(sys.argv[1]), memory=1 << 23)\n"
        "print(host.pid, host.socket.parent, flush=True)\n"
        "input()\n"
    )
    beside = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path / "data")]
    with subprocess.Popen(command, env=beside, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as bench:
        assert bench.stdout is not None
        pid, place = bench.stdout.readline().split()
        bench.kill()
        assert ends(int(pid))
    shutil.rmtree(place)


def test_a_service_that_cannot_start_says_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(ServiceFailed, match="data"):
        Host(tmp_path / "data", memory=8 * MIB)


def test_settings_of_the_environment_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_CODEC", "no such codec")
    with Host(tmp_path / "data", memory=8 * MIB) as host, host.connect() as store:
        assert store.service_status()["pid"] == host.pid


def test_a_server_ends_with_its_killed_worker() -> None:
    code = (
        "import subprocess, sys, peer_protocol\n"
        "command = [sys.executable, '-c', 'input()']\n"
        "server = subprocess.Popen(command, stdin=subprocess.PIPE, preexec_fn=peer_protocol.end_with_parent)\n"
        "print(server.pid, flush=True)\n"
        "input()\n"
    )
    beside = {**os.environ, "PYTHONPATH": str(Path(peer_protocol.__file__).parent)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=beside, text=True, **pipes) as worker:  # type: ignore[call-overload]
        pid = int(worker.stdout.readline())
        worker.send_signal(signal.SIGKILL)
        assert ends(pid)


def test_a_namespace_has_a_loopback_and_nothing_else_that_is_up() -> None:
    done = namespace()
    if done.returncode == service_lonet.NO_NAMESPACE:
        assert "namespace" in done.stderr
        pytest.skip(done.stderr.strip())
    assert done.stdout == "[]\n", done.stderr


def test_mooncake_is_not_run_where_others_could_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from perdure.benchmarks import service_mooncake

    monkeypatch.setattr(service_lonet, "reachable", lambda: {"eth0"})
    with pytest.raises(PermissionError, match="binds all interfaces"):
        service_mooncake.Mooncake().open(str(tmp_path), 64 * KIB, True)


def test_a_peer_that_cannot_be_opened_is_a_row(tmp_path: Path) -> None:
    plan = peers.Plan((64 * KIB,), (2,), 256 * KIB, 5)
    ours = peers.Worker(peers.OURS, [sys.executable, "-m", "perdure.benchmarks.peer_files"], own=True)
    other = peers.Worker("files", [sys.executable, "-c", "raise SystemExit('not today')"])
    try:
        one = peers.Round(plan, tmp_path, 64 * KIB, 2)
        one.run_in_memory([ours, other])
    finally:
        for worker in (ours, other):
            worker.end()
    assert "not today" in one.failed["files"]
    assert len(one.series[peers.WARM, peers.OURS]) == plan.repetitions
