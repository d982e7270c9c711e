"""The demo with vLLM: its parts without an engine; the whole of it runs in `make demo-vllm`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import perdure
from perdure.cli import main
from perdure.demo import vllm_flip, vllm_report, vllm_scenes, vllm_talk
from perdure.demo.process import DemoError
from perdure.testing.store import STORED, chain, keyspace, write
from perdure.testing.transport import ServiceProcess, until

BLOCK_TOKENS = vllm_flip.BLOCK_TOKENS


def row(name: str, prompt: int, cached: int, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "server": "B", "prompt_tokens": prompt, "cached_tokens": cached, "first_token_s": 0.5,
        "cold_first_token_s": 2.0, "cold_cached_tokens": 0, "tokens_identical": True, "text": "yes", **more,
    }  # fmt: skip


@pytest.fixture
def told() -> dict[str, Any]:
    agents = [row(f"sub-agent {at}", 2800, 2304 if at == 1 else 2688) for at in (1, 2, 3)]
    rows = [row("turn 3", 2240, 2176), row("turn 4", 2300, 2176), row("turn 5", 2360, 2304), *agents]
    flip = {
        "key": "00" * 32, "position": 5, "blocks": 11, "file": "f", "offset": 9, "verdict": "corrupt: checksum",
        "verdict_after": "hit", "incidents": [{"kind": "corrupt"}],
    }  # fmt: skip
    return {"rows": [*rows, row("byte flipped", 1480, 640)], "killed": 4, "flip": flip}


def test_a_demo_that_went_well_passes_every_check(told: dict[str, Any]) -> None:
    assert all(vllm_scenes._checks(told).values())


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (lambda told: told["rows"][1].update(tokens_identical=False), "all answers are identical to the cold ones"),
        (lambda told: told["rows"][1].update(cold_cached_tokens=128), "the cold ones found nothing"),
        (lambda told: told.update(killed=1), "A was killed with all its processes"),
        (lambda told: told["rows"][1].update(cached_tokens=128), "B went on from what A had stored"),
        (lambda told: told["rows"][4].update(cached_tokens=0), "the sub-agents' common prefix was computed once"),
        (lambda told: told["flip"].update(verdict="hit"), "explain names the flipped block as corrupt"),
        (lambda told: told["rows"][-1].update(cached_tokens=1408), "B computed the flipped block and what follows"),
        (lambda told: told["flip"].update(incidents=[]), "explain remembers the incident"),
    ],
)
def test_each_check_can_fail(told: dict[str, Any], change: Callable[[Any], None], failed: str) -> None:
    change(told)
    assert [name for name, passed in vllm_scenes._checks(told).items() if not passed] == [failed]


def test_the_report_shows_both_flips_and_every_phase(told: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    fs = {
        "identical": False,
        "cached_tokens": 1408,
        "blocks": 11,
        "offset": 3,
        "file": "x",
        "text_before": "a",
        "text": "b",
    }
    outcome = told | {
        "checks": vllm_scenes._checks(told), "killed_processes": 4, "fs": fs, "store": "DIR", "block_tokens": 128,
        "scenes_s": {"servers": 30.0, "fs": 20.0},
    }  # fmt: skip
    vllm_report.show(outcome, 70.0)
    shown = capsys.readouterr().out
    assert "ANOTHER ANSWER" in shown
    assert "corrupt: checksum" in shown
    assert "120.0 s  in all" in shown
    assert "4.0 x" in shown


def test_the_conversation_is_longer_than_a_few_blocks_and_branches_late() -> None:
    talk = vllm_talk.opening()
    assert len(talk[0]["content"]) > 20 * BLOCK_TOKENS
    branches = vllm_talk.branch(talk)
    assert len({str(one) for one in branches}) == len(vllm_talk.SUBTASKS)
    first = [one[-1]["content"] for one in branches]
    assert first[0][: 8 * BLOCK_TOKENS] == first[1][: 8 * BLOCK_TOKENS]
    assert vllm_talk.audit()[: 2 * BLOCK_TOKENS] not in talk[0]["content"]


def test_a_flipped_byte_is_named(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "store") as service:
        with perdure.connect(service.address("unix")) as client:
            space = keyspace(client)
            assert write(space, chain(space, 1, 2)) == [STORED] * 2
            client.sync()
            until(lambda: len(vllm_flip.seen(service.data)) == 2)
            before = vllm_flip.seen(service.data)
            assert write(space, chain(space, 2, 5)) == [STORED] * 5
            client.sync()
        until(lambda: len(vllm_flip.seen(service.data)) == 7)
        prefix = {key: place for key, place in vllm_flip.seen(service.data).items() if key not in before}
        flip = vllm_flip.in_store(service.data, prefix)
        assert bytes.fromhex(flip["key"]) in prefix
        assert (flip["position"], flip["blocks"]) == (2, 5)
        assert flip["verdict"].startswith("corrupt")
        assert vllm_flip.explained(service.data, flip["key"])["verdict"].startswith("corrupt")
        with pytest.raises(DemoError, match="only 2 blocks"):
            vllm_flip.in_store(service.data, before)


def test_waiting_for_saves_ends_when_they_do() -> None:
    counts = iter([0, 3, 5, 5])
    assert vllm_flip.settled(lambda: next(counts)) == 5


@pytest.mark.skipif(find_spec("cbor2") is None, reason="cbor2 is not installed: vLLM brings it")
def test_blocks_are_named_as_vllm_names_them() -> None:
    import cbor2

    tokens = list(range(2 * BLOCK_TOKENS + 5))
    names = vllm_flip._hashes(tokens)
    root = hashlib.sha256(cbor2.dumps("vllm-none-hash")).digest()
    assert len(names) == 2
    assert names[0] == hashlib.sha256(cbor2.dumps((root, tuple(tokens[:BLOCK_TOKENS]), None), canonical=True)).digest()


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed here")
def test_without_vllm_the_command_says_what_to_do(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["demo-vllm", str(tmp_path / "store")])
    assert done.exit_code == 2
    assert "make demo-vllm" in done.output
