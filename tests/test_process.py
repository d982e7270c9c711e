"""The process of the service: start, readiness, signals, exit. The server is a stand-in; the store is real."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import limits
from perdure import store as stores
from perdure.errors import ConfigError
from perdure.io.engine import ThreadEngine
from perdure.io.faulty import FaultWhile, FaultyFiles
from perdure.io.files import PosixFiles
from perdure.observe.metrics import Metrics
from perdure.service import process
from perdure.service.process import PROBE_TENANT, Readiness
from perdure.service.settings import load

STAND_IN = """
import os, pathlib, sys, threading
from perdure.service import process, settings

class Server:
    metrics = None
    def __init__(self, store, path):
        self.store, self.path = store, path
    def start(self):
        assert self.metrics is not None
        pathlib.Path(self.path).write_text("bound")
    def stop(self, drain_s=10.0):
        print(f"stop {drain_s}", flush=True)
        if HANG:
            threading.Event().wait()
        pathlib.Path(self.path).unlink()
    def reload(self):
        print("reload", flush=True)
    def status(self):
        return {"boot": "ab" * 16, "clients": [], "memory": {}, "store": self.store.status()}

HANG = os.environ.pop("HANG", "") == "1"
flags = dict(item.split("=", 1) for item in sys.argv[1:])
loaded = settings.load(flags, None, {})
made = []

def build(store, chosen):
    made.append(Server(store, chosen.socket_path()))
    return made[0]

status = process.run(loaded.settings, build)
print("store open" if made[0].store._closed is None else "store closed", flush=True)  # before atexit would do it
sys.exit(status)
"""


class Service:
    """A service in a process of its own, with the lines it has logged."""

    def __init__(self, data: Path, env: dict[str, str] | None = None, **flags: str):
        chosen = {"data": str(data), "capacity": "64MiB", "memory": "8MiB", "metrics": "127.0.0.1:0"} | flags
        self.child = subprocess.Popen(
            [sys.executable, "-c", STAND_IN, *(f"{key}={value}" for key, value in chosen.items())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, event: str) -> dict[str, Any]:
        assert self.child.stderr is not None
        seen = []
        for line in self.child.stderr:
            seen.append(line)
            if line.startswith("{") and json.loads(line)["event"] == event:
                found: dict[str, Any] = json.loads(line)
                return found
        pytest.fail(f"no {event!r} in: {''.join(seen)}")

    def end(self, number: int = signal.SIGTERM) -> int:
        self.child.send_signal(number)
        return self.child.wait(120)


@pytest.fixture
def services() -> Iterator[list[Service]]:
    made: list[Service] = []
    yield made
    for service in made:
        service.child.kill()
        service.child.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_a_signal_and_seals(tmp_path: Path, services: list[Service], number: signal.Signals) -> None:
    service = Service(tmp_path / "data", drain_s="3")
    services.append(service)
    ready = service.until("ready")
    assert ready["pid"] == service.child.pid
    assert ready["boot"] == "ab" * 16
    assert ready["socket"] == str(tmp_path / "data" / "perdure.sock")
    for path, wanted in (("healthz", "alive"), ("readyz", "ready"), ("metrics", "perdure_ready 1.0")):
        with urllib.request.urlopen(f"http://{ready['metrics']}/{path}", timeout=60) as answer:
            assert wanted in answer.read().decode()
    assert service.end(number) == 0
    assert service.child.stdout is not None
    assert service.child.stdout.read() == "stop 3.0\nstore closed\n"
    assert service.until("stopped")["status"] == 0
    with perdure.open(tmp_path / "data", read_only=True, memory=0) as store:
        status = store.status()
    assert status["writer"] is None
    assert status["segments"]["open"]["count"] == 0
    assert PROBE_TENANT in status["tenants"], "readiness put a real block"


def test_a_second_signal_ends_it_at_once(tmp_path: Path, services: list[Service]) -> None:
    service = Service(tmp_path / "data", {"HANG": "1"})
    services.append(service)
    service.until("ready")
    service.child.send_signal(signal.SIGTERM)
    service.until("draining")
    assert service.child.stdout is not None
    assert service.child.stdout.readline() == "stop 10.0\n"
    assert service.end() == 128 + signal.SIGTERM
    with perdure.open(tmp_path / "data", memory=0) as store:
        assert store.status()["healthy"]


def test_systemd_is_told(tmp_path: Path, services: list[Service]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(120)
        service = Service(tmp_path / "data", {"NOTIFY_SOCKET": str(tmp_path / "notify")}, metrics="")
        services.append(service)
        assert manager.recv(4096).decode().splitlines()[0] == "READY=1"
        assert service.until("ready")["metrics"] == "off"
        assert service.end() == 0
        assert manager.recv(4096) == b"STOPPING=1"


def test_what_cannot_start_leaves_nothing_open(tmp_path: Path) -> None:
    def failing(store: stores.Store, _: Any) -> Any:
        raise ConfigError("socket: taken")

    before = signal.getsignal(signal.SIGTERM), sys.getswitchinterval()
    chosen = load({"data": str(tmp_path / "data"), "capacity": "64MiB", "memory": "0", "metrics": ""}, None, {})
    try:
        with pytest.raises(ConfigError, match="taken"):
            process.run(chosen.settings, failing)
        assert sys.getswitchinterval() < before[1] or before[1] <= 0.0005
    finally:
        sys.setswitchinterval(before[1])
    assert signal.getsignal(signal.SIGTERM) is before[0]
    with perdure.open(tmp_path / "data", memory=0):
        pass  # nobody holds it


@pytest.mark.parametrize("limit", ["machine", "memory.max", "memory.limit_in_bytes"])
def test_a_pool_larger_than_the_memory_is_refused_at_the_start(tmp_path: Path, limit: str) -> None:
    """FAULTS 21: not when the kernel ends the service. Nothing is created."""
    cgroup = {"memory.max": "0::/a\n", "memory.limit_in_bytes": "3:memory:/a\n"}.get(limit, "0::/\n")
    files = {"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 16777216 kB\n", "proc/self/cgroup": cgroup}
    if limit != "machine":
        base = "sys/fs/cgroup/a" if limit == "memory.max" else "sys/fs/cgroup/memory/a"
        files[f"{base}/{limit}"] = f"{4 * limits.GIB}\n"
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    has = (16 if limit == "machine" else 4) * limits.GIB
    chosen = load({"data": str(tmp_path / "data"), "memory": str(has + 1)}, None, {}).settings
    before = sys.getswitchinterval()
    try:
        with pytest.raises(ConfigError) as caught:
            process.run(chosen, system=tmp_path)
    finally:
        sys.setswitchinterval(before)
    message = str(caught.value)
    assert f"memory={has + 1}:" in message
    assert f"{has} bytes" in message
    assert not (tmp_path / "data").exists()
    advised = message.partition("write memory=")[2].partition(" ")[0]
    process.check_memory(load({"data": "/d", "memory": advised}, None, {}).settings, tmp_path)


def test_memory_that_cannot_be_looked_at_is_no_reason_not_to_start(tmp_path: Path) -> None:
    chosen = load({"data": str(tmp_path / "data"), "memory": "900TiB"}, None, {}).settings
    process.check_memory(chosen, tmp_path)
    with pytest.raises(ConfigError, match="this machine has"):
        process.check_memory(chosen)


def test_cpus_and_nice(tmp_path: Path, services: list[Service]) -> None:
    cpu = max(os.sched_getaffinity(0))
    nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 1)
    service = Service(tmp_path / "data", cpus=str(cpu), nice=str(nice), metrics="")
    services.append(service)
    service.until("ready")
    for task in Path(f"/proc/{service.child.pid}/task").iterdir():
        assert os.sched_getaffinity(int(task.name)) == {cpu}, "every thread, also of libraries"
    assert os.getpriority(os.PRIO_PROCESS, service.child.pid) == nice
    assert service.end() == 0


def test_cpus_that_do_not_exist_are_named() -> None:
    with pytest.raises(ConfigError, match=r"cpus='60000'.*may use"):
        process.place(load({"cpus": "60000"}, None, {}).settings)


def test_readiness_follows_the_disk(tmp_path: Path) -> None:
    plan = FaultWhile("eio", ["pwritev"])
    plan.armed = False
    seams = stores.Seams(files=lambda root: FaultyFiles(PosixFiles(root), plan), engine=ThreadEngine)
    metrics = Metrics()
    with stores.open(tmp_path / "data", capacity="64MiB", memory=0, seams=seams) as store:
        probe = Readiness(store, metrics)
        assert probe.not_ready() is not None, "not before the first probe"
        assert probe.probe() is None
        assert probe.not_ready() is None
        assert metrics.registry.get_sample_value("perdure_ready") == 1
        plan.armed = True
        assert "could not be put" in (probe.probe() or "")
        assert probe.not_ready() is not None
        assert metrics.registry.get_sample_value("perdure_ready") == 0
        plan.armed = False
        assert probe.probe() is None
        assert probe.not_ready() is None
    assert "closed" in (probe.probe() or "")


def test_a_probe_that_cannot_get_its_block_is_not_ready(tmp_path: Path) -> None:
    plan = FaultWhile("eio", ["preadv"])
    plan.armed = False
    seams = stores.Seams(files=lambda root: FaultyFiles(PosixFiles(root), plan), engine=ThreadEngine)
    with stores.open(tmp_path / "data", capacity="64MiB", memory=0, seams=seams) as store:
        probe = Readiness(store)
        assert probe.probe() is None
        plan.armed = True
        assert "a block just put is " in (probe.probe() or "")
        plan.armed = False
