"""`perdure doctor`: each verdict on a machine made up for it. `perdure top`: what it derives from two answers."""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import perdure
from perdure import limits
from perdure.catalog.lmdb_control import LmdbControl
from perdure.cli import main
from perdure.observe import doctor, top
from perdure.observe.doctor import Check, Subject

GIB = limits.GIB
MEMINFO = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:   8388608 kB\n"


def made_up(tmp_path: Path, **files: str) -> Path:
    """A root with /proc and /sys of a healthy machine; files: path with __ for / -> content."""
    healthy = {
        "proc__meminfo": MEMINFO,
        "proc__self__cgroup": "0::/a/b\n",
        "proc__self__mountinfo": "1 0 8:1 / / rw,noatime - ext4 /dev/a rw\n"
        f"2 1 8:2 / {tmp_path} rw,noatime - xfs /dev/b rw\n",
        "proc__sys__fs__aio-nr": "0\n",
        "proc__sys__fs__aio-max-nr": "1048576\n",
        "sys__kernel__mm__transparent_hugepage__shmem_enabled": "always within_size [advise] never deny force\n",
    }
    root = tmp_path / "system"
    for name, content in (healthy | files).items():
        path = root.joinpath(*name.split("__"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def verdicts(subject: Subject) -> dict[str, Check]:
    return {check.name: check for check in doctor.examine(subject)}


def test_a_healthy_machine_is_ok(tmp_path: Path) -> None:
    found = verdicts(Subject(tmp_path / "data", GIB, 1 << 20, made_up(tmp_path)))
    for name in ("file system", "mount options", "disk space", "memory", "cgroup memory", "huge pages", "async I/O"):
        assert found[name].verdict == "ok", found[name]
    assert found["file system"].found.startswith(f"xfs at {tmp_path}"), "the innermost mount counts"
    assert list(tmp_path.glob(".perdure-doctor*")) == []


def test_what_is_wrong_says_what_to_do(tmp_path: Path) -> None:
    root = made_up(tmp_path, **{"proc__sys__fs__aio-nr": "1048000\n"})
    subject = Subject(tmp_path, 64 * GIB, 1 << 60, root)
    for check in doctor.examine(subject):
        assert (check.verdict == "ok") == (check.todo == ""), check
    assert verdicts(subject)["async I/O"].verdict == "warn"
    assert verdicts(subject)["disk space"].verdict == "bad"


@pytest.mark.parametrize(
    ("kind", "options", "name", "verdict"),
    [
        ("nfs4", "rw,noatime", "file system", "bad"),
        ("fuse.sshfs", "rw", "file system", "bad"),
        ("tmpfs", "rw", "file system", "warn"),
        ("ext4", "rw", "file system", "ok"),
        ("ext4", "rw,relatime", "mount options", "ok"),
        ("ext4", "rw", "mount options", "warn"),
        ("ext4", "ro,noatime", "mount options", "bad"),
    ],
)
def test_mounts(tmp_path: Path, kind: str, options: str, name: str, verdict: str) -> None:
    line = f"1 0 8:1 / / {options} shared:1 - {kind} /dev/a rw\n"
    assert (
        verdicts(Subject(tmp_path, GIB, None, made_up(tmp_path, proc__self__mountinfo=line)))[name].verdict == verdict
    )


@pytest.mark.parametrize(("memory", "verdict"), [(GIB, "ok"), (12 * GIB, "warn"), (16 * GIB, "bad"), (32 * GIB, "bad")])
def test_memory_of_the_machine(tmp_path: Path, memory: int, verdict: str) -> None:
    assert verdicts(Subject(tmp_path, memory, None, made_up(tmp_path)))["memory"].verdict == verdict


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("limit", "verdict"), [(4 * GIB, "ok"), (2 * GIB + 1, "warn"), (2 * GIB - 1, "bad")])
def test_cgroup_memory(tmp_path: Path, version: int, limit: int, verdict: str) -> None:
    """The limit is on the parent; the innermost group has none."""
    files = {
        2: {"sys__fs__cgroup__a__memory.max": f"{limit}\n", "sys__fs__cgroup__a__b__memory.max": "max\n"},
        1: {
            "proc__self__cgroup": "4:cpu,cpuacct:/x\n3:memory:/a/b\n",
            "sys__fs__cgroup__memory__a__memory.limit_in_bytes": f"{limit}\n",
            "sys__fs__cgroup__memory__a__b__memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
        },
    }[version]
    subject = Subject(tmp_path, 2 * GIB, None, made_up(tmp_path, **files))
    assert doctor.cgroup_limit(subject) == limit
    assert verdicts(subject)["cgroup memory"].verdict == verdict


def test_no_cgroup_limit(tmp_path: Path) -> None:
    root = made_up(tmp_path, **{"sys__fs__cgroup__memory.max": "max\n"})
    assert doctor.cgroup_limit(Subject(tmp_path, GIB, None, root)) is None


@pytest.mark.parametrize(("limit", "most"), [(None, 16 * GIB - GIB // 4), (4 * GIB, 4 * GIB), (32 * GIB, None)])
def test_the_largest_pool_possible(tmp_path: Path, limit: int | None, most: int | None) -> None:
    files = {} if limit is None else {"sys__fs__cgroup__a__b__memory.max": f"{limit}\n"}
    root = made_up(tmp_path, **files)
    found, why = doctor.pool_bytes_max(Subject(tmp_path, GIB, None, root))
    assert found == (16 * GIB - GIB // 4 if most is None else most)
    assert ("cgroup" in why) == (most == limit)
    for memory, bad in ((found, False), (found + 1, True)):
        checks = verdicts(Subject(tmp_path, memory, None, root))
        assert ("bad" in (checks["memory"].verdict, checks["cgroup memory"].verdict)) == bad
    assert 0 < doctor.pool_bytes_advised(found) < found


def test_huge_pages(tmp_path: Path) -> None:
    name = "sys__kernel__mm__transparent_hugepage__shmem_enabled"
    root = made_up(tmp_path, **{name: "always within_size advise [never]\n"})
    assert verdicts(Subject(tmp_path, GIB, None, root))["huge pages"].verdict == "warn"


def test_disk_space(tmp_path: Path) -> None:
    free, total = (getattr(__import__("shutil").disk_usage(tmp_path), name) for name in ("free", "total"))
    root = made_up(tmp_path)
    for capacity, verdict in ((1 << 20, "ok"), ((free + total) // 2, "warn"), (total + 1, "bad")):
        assert verdicts(Subject(tmp_path, GIB, capacity, root))["disk space"].verdict == verdict


def test_a_check_that_cannot_be_made_does_not_end_the_others(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    found = doctor.examine(Subject(tmp_path, GIB, None, empty))
    failed = [check for check in found if "could not be checked" in check.found]
    assert {check.name for check in failed} >= {"memory", "file system", "async io"}
    assert all(check.verdict == "warn" and check.todo for check in failed)
    assert "direct I/O" in {check.name for check in found}


@contextmanager
def open_files(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_open_files(tmp_path: Path) -> None:
    root = made_up(tmp_path)
    for soft, verdict in ((1000, "bad"), (1024, "warn")):
        with open_files(soft):
            assert verdicts(Subject(tmp_path, GIB, None, root))["open files"].verdict == verdict


def test_direct_io_is_really_tried(tmp_path: Path) -> None:
    if os.geteuid() == 0:  # root may write anywhere but into /proc
        where = Path("/proc/sys")
    else:
        where = tmp_path / "closed"
        where.mkdir(mode=0o500)
    assert verdicts(Subject(where, GIB, None, made_up(tmp_path)))["direct I/O"].verdict in ("bad", "warn")
    assert verdicts(Subject(tmp_path, GIB, None, made_up(tmp_path)))["direct I/O"].found.startswith(str(tmp_path))


def test_the_clock_is_compared_with_what_the_store_saw(tmp_path: Path) -> None:
    data, root = tmp_path / "data", made_up(tmp_path)
    with perdure.open(data, capacity="16MiB", memory=0):
        pass
    assert verdicts(Subject(data, GIB, None, root))["wall clock"].verdict == "ok"
    control = LmdbControl(data / "control")
    seen = control.get("store", b"clock")
    assert seen is not None
    control.compare_and_set("store", b"clock", seen, struct.pack("<d", time.time() + 86_400))
    control.close()
    assert verdicts(Subject(data, GIB, None, root))["wall clock"].verdict == "bad"


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["doctor", str(tmp_path), "--memory", "900TiB", "--json"])
    assert run.exit_code == 1, run.output
    found = {check["name"]: check for check in json.loads(run.output)}
    assert found["memory"]["verdict"] == "bad"
    shown = CliRunner().invoke(main, ["doctor", str(tmp_path), "--memory", "900TiB"])
    assert shown.exit_code == 1
    assert "-> lower --memory" in shown.output
    assert CliRunner().invoke(main, ["doctor", str(tmp_path), "--memory", "much"]).exit_code == 2


def test_the_command_is_content_with_a_fit_machine(tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["doctor", str(tmp_path), "--memory", "1MiB", "--json"])
    bad = [check for check in json.loads(run.output) if check["verdict"] == "bad"]
    assert run.exit_code == (1 if bad else 0)


# --- top


def answer(boot: str = "aa", **counters: int) -> dict[str, Any]:
    return {
        "boot": boot,
        "clients": [{}, {}],
        "memory": {"budget_bytes": 100, "mapped_bytes": 64, "stranded_bytes": 0},
        "store": {"capacity_bytes": 1000, "used_bytes": 10, "blocks": 3, "healthy": True, "counters": counters},
    }


def test_rates_and_ratios_are_differences() -> None:
    before = top.Sample(10.0, answer(reads=10, blocks_found_memory=100, bytes_read=1000, lookup_blocks=5))
    now = top.Sample(
        12.0,
        answer(reads=30, blocks_found_memory=130, blocks_found_disk=15, blocks_missing=15, bytes_read=5000,
               lookup_blocks=25, lookup_found=10),
    )  # fmt: skip
    view = top.derive(before, now)
    assert view["calls_per_s"] == {"lookups": 0, "reads": 10, "writes": 0}
    assert view["read_bytes_per_s"] == 2000
    assert view["hit_ratio"] == {"lookup": 0.5, "memory": 0.5, "disk": 0.25}
    assert view["clients"] == 2
    assert view["memory"]["mapped_bytes"] == 64
    assert json.loads(json.dumps(view)) == view


def test_what_is_not_known_is_not_shown_as_zero() -> None:
    view = top.derive(top.Sample(0.0, {"boot": "a"}), top.Sample(1.0, {"boot": "a"}))
    assert view["clients"] is None
    assert view["calls_per_s"]["reads"] is None
    assert view["memory"]["mapped_bytes"] is None
    assert all("0" not in value for name, value in top.rows(view) if name != "service")


def test_a_restarted_service_gives_no_rates() -> None:
    view = top.derive(top.Sample(0.0, answer("aa", reads=100)), top.Sample(1.0, answer("bb", reads=300)))
    assert view["calls_per_s"]["reads"] is None
    view = top.derive(top.Sample(0.0, answer(reads=100)), top.Sample(1.0, answer(reads=3)))
    assert view["calls_per_s"]["reads"] is None


def test_an_unhealthy_store_is_shown() -> None:
    status = answer()
    status["store"]["healthy"] = False
    assert "UNHEALTHY" in dict(top.rows(top.derive(top.Sample(0, status), top.Sample(1, status))))["service"]


def test_the_live_view_refreshes_until_told(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[float] = []

    def stop(seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) > 3

    top.show(lambda: answer(reads=len(asked)), stop)
    assert asked == [top.PERIOD_S] * 4
    assert "hit ratio" in capsys.readouterr().out


def test_the_top_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed: list[Path] = []

    class Connection:
        def __init__(self, path: Path):
            self.path = path

        def service_status(self) -> dict[str, Any]:
            return answer()

        def close(self) -> None:
            closed.append(self.path)

    client = types.ModuleType("perdure.service.client")
    client.connect = Connection  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "perdure.service.client", client)
    monkeypatch.setattr(top, "PERIOD_S", 0.01)
    run = CliRunner().invoke(main, ["top", "--socket", str(tmp_path / "s"), "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.output)["clients"] == 2
    run = CliRunner().invoke(main, ["top", "--once"], env={"PERDURE_DATA": str(tmp_path)})
    assert "hit ratio" in run.output
    assert closed == [tmp_path / "s", tmp_path / "perdure.sock"]
