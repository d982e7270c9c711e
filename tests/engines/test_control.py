"""What an operator tells running engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from perdure.cli import main
from perdure.engines import control
from perdure.engines.control import Switch, Watch
from perdure.errors import InvalidArgument, StorePathError


def test_what_was_told_is_seen_and_stays(tmp_path: Path) -> None:
    path = control.file_of(str(tmp_path))
    watch = Watch(path)
    first = watch.switch
    assert first == Switch()
    control.tell(path, off=True)
    watch.look()
    assert watch.switch == Switch(off=True)
    known = watch.switch
    watch.look()
    assert watch.switch is known
    control.tell(path, weights=True)
    control.tell(path, off=False)
    watch.look()
    assert watch.switch == Switch(off=False, on=1, weights=1)
    watch.close()
    assert control.read(path) == watch.switch


@pytest.mark.parametrize("said", [b"", b"{}", b"[1]", b'{"off": true}', b"\xff\xfe", b'{"off":1,"on":"x","weights":0}'])
def test_a_file_that_says_nothing_sensible_changes_nothing(tmp_path: Path, said: bytes) -> None:
    path = control.file_of(str(tmp_path))
    control.tell(path, off=True)
    watch = Watch(path)
    path.write_bytes(said)
    watch.look()
    assert watch.switch == Switch(off=True)
    watch.close()


def test_where_there_is_no_service_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorePathError, match="socket"):
        control.tell(control.file_of(str(tmp_path / "nowhere" / "perdure.sock")), off=True)
    with pytest.raises(InvalidArgument, match="own host"):
        control.file_of("tcp://127.0.0.1:5")


def test_the_commands(tmp_path: Path) -> None:
    run = CliRunner()
    for command, state in (
        ("off", {"off": True, "on": 0, "weights": 0}),
        ("weights-changed", {"off": True, "on": 0, "weights": 1}),
        ("on", {"off": False, "on": 1, "weights": 1}),
    ):
        assert run.invoke(main, ["engine", command, str(tmp_path)]).exit_code == 0
        assert json.loads(run.invoke(main, ["engine", "state", str(tmp_path), "--json"]).output) == state
    assert "use the cache" in run.invoke(main, ["engine", "state", str(tmp_path)]).output


def test_the_table_of_what_is_supported() -> None:
    told = CliRunner().invoke(main, ["engine-check", "vllm", "--json"])
    assert told.exit_code == 0
    assert any("refused" in row["answer"] for row in json.loads(told.output))
    assert "PerdureConnector" in CliRunner().invoke(main, ["engine-check", "vllm"]).output
