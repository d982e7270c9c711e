"""The command: how it is started, and what `explain` says with and without a service."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.served import serving

import perdure
from perdure import limits
from perdure.cli import main
from perdure.service import sockets
from perdure.testing.store import STORED, chain, keyspace, write


def test_python_m_perdure_is_the_command() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "perdure"]
    shown = subprocess.run([*command, "--help"], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("Usage: perdure [OPTIONS]")
    assert all(f"\n  {name} " in shown.stdout for name in main.commands)
    wrong = subprocess.run([*command, "statsu"], env=environment, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "did you mean 'status'" in wrong.stderr


def explained(directory: Path, key: bytes) -> dict[str, Any]:
    run = CliRunner().invoke(main, ["explain", str(directory), key.hex(), "--json"])
    assert run.exit_code == 0, run.output
    answer: dict[str, Any] = json.loads(run.output)
    return answer


def test_explain_asks_the_service_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(path) as (store, server):
        with perdure.connect(path) as client:
            space = keyspace(client)
            keys = chain(space, 1, 2)
            assert write(space, keys) == [STORED] * 2
            key = keys[0].tobytes()
            before = store.core.pool.stats()
            answer = explained(path, key)
            assert answer["answered_by"] == "service"
            assert answer["memory"] == {"held": True, "pins": 0}
            assert answer["verdict"].startswith("hit")
            with space.view(keys):
                assert explained(path, key)["memory"] == {"held": True, "pins": 1}
                shown = CliRunner().invoke(main, ["explain", str(path), key.hex()]).output.splitlines()
                assert shown[0].startswith("hit")
                assert "in memory: yes, in use by 1 views or copies" in shown
            store.core.pool.drop_all()
            store.core.incidents.add(key, kind="corrupt", why="made up", segment="00", offset=0)
            answer = explained(path, key)
            assert answer["memory"] == {"held": False, "pins": 0}
            assert answer["incidents"][-1]["why"] == "made up"
            shown = CliRunner().invoke(main, ["explain", str(path), key.hex()]).output.splitlines()
            assert "in memory: no, in use by 0 views or copies" in shown
            assert store.core.pool.stats().misses == before.misses, "looking is not using"
        wrong = CliRunner().invoke(main, ["explain", str(path), "00"])
        assert wrong.exit_code == 2
        assert "64 hex digits" in wrong.output
        server.stop()
        answer = explained(path, key)
        assert (answer["answered_by"], answer["memory"]) == ("store", None)
        assert "in memory" not in CliRunner().invoke(main, ["explain", str(path), key.hex()]).output


def test_explain_looks_by_itself_where_no_service_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "hello_wait_s", 0.1)
    monkeypatch.setattr(limits, "reconnect_s_default", 0.1)
    with perdure.open(tmp_path, capacity="64MiB") as store:
        space = keyspace(store)
        keys = chain(space, 1, 1)
        write(space, keys, durability="session")
        stale = sockets.listen_unix(tmp_path / "perdure.sock")
        stale.close()
        assert explained(tmp_path, keys[0].tobytes())["answered_by"] == "store"
        other = sockets.listen_unix(tmp_path / "perdure.sock")  # takes connections, and says nothing
        try:
            assert explained(tmp_path, keys[0].tobytes())["answered_by"] == "store"
        finally:
            other.close()
        (tmp_path / "perdure.sock").unlink()
        with socket.socket(socket.AF_UNIX) as another_kind:
            another_kind.bind(str(tmp_path / "perdure.sock"))
            another_kind.listen()
            assert explained(tmp_path, keys[0].tobytes())["answered_by"] == "store"
