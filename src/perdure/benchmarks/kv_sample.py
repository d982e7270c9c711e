"""A sample of KV-cache bytes for the codec rows: real bf16 KV where it can be had, else synthetic and named so.

Contract
- A sample is a whole number of blocks of `BLOCK_BYTES` bytes: 16 tokens of SmolLM2-135M in bfloat16, elements in the
  order layer, K/V, head, token, dim: the bytes that `engines.transformers` stores for that model.
- Real KV is what the demo's model computes for the text of this package's own source, taken out of a store it was
  stored in. It is made once, by a process of its own, and kept in the cache directory. Needs torch and transformers.
- Synthetic KV is Gaussian per channel with scales that differ between channels, heads and layers, as real KV's do. It
  says something about speed; how far real KV compresses only real KV says.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import perdure
from perdure.errors import InvalidArgument, PerdureError

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 30, 3, 64, 16
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * BLOCK_TOKENS * HEAD_DIM * 2
SAMPLE_TOKENS = 4096
MAKE_TIMEOUT_S = 900

Bytes = NDArray[np.uint8]


def load(path: os.PathLike[str] | str) -> Bytes:
    """The whole blocks of a raw file; raises InvalidArgument if it holds none."""
    raw = np.fromfile(path, np.uint8)
    blocks = len(raw) // BLOCK_BYTES
    if not blocks:
        raise InvalidArgument(f"{path}: {len(raw)} bytes are less than one block of {BLOCK_BYTES}")
    return raw[: blocks * BLOCK_BYTES]


def synthetic(blocks: int, seed: int = 5) -> Bytes:
    """KV-like bfloat16: see the module's contract."""
    generator = np.random.default_rng(seed)
    shape = (LAYERS, 2, KV_HEADS, 1, HEAD_DIM)
    scale = np.exp(generator.normal(0.0, 1.0, shape)).astype(np.float32)
    offset = (generator.normal(0.0, 1.0, shape) * scale).astype(np.float32)
    made = np.empty((blocks, BLOCK_BYTES), np.uint8)
    for block in range(blocks):
        noise = generator.standard_normal((LAYERS, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM), np.float32)
        bits = np.ascontiguousarray(noise * scale + offset).view(np.uint32)
        made[block] = (bits >> 16).astype("<u2").reshape(-1).view(np.uint8)  # bfloat16 is the upper half of float32
    return made.reshape(-1)


class NoSample(PerdureError):
    """Real KV cannot be had on this machine; the message says why."""


def kv_sample(cache_dir: os.PathLike[str] | str) -> Path:
    """File of real bf16 KV of `SAMPLE_TOKENS` tokens under `cache_dir`, made on the first call. Raises NoSample."""
    path = Path(cache_dir) / f"smollm2-135m-bf16-{SAMPLE_TOKENS}-tokens.kv"
    if path.is_file():
        return path
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise NoSample(f"{' and '.join(missing)} not installed")
    command = [sys.executable, "-m", "perdure.benchmarks.kv_sample", str(cache_dir), str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoSample(str(error)) from error
    if done.returncode or not path.is_file():
        lines = done.stderr.strip().splitlines()
        raise NoSample(lines[-1] if lines else f"exit status {done.returncode}")
    return path


def _make(cache_dir: Path, path: Path) -> None:
    """Prefill with the model, store, read the stored blocks back, write them to `path`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from perdure.engines import smollm
    from perdure.engines.transformers import PrefixCache, keyspace_for

    directory = smollm.model_path(cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True)
    sources = sorted(Path(perdure.__file__).parent.rglob("*.py"))
    text = "\n".join(source.read_text() for source in sources)
    ids = tokenizer(text[: 16 * SAMPLE_TOKENS], return_tensors="pt").input_ids[:, :SAMPLE_TOKENS]
    with torch.no_grad():
        answer = model(ids, use_cache=True)
    computed = answer.cache if "cache" in answer else answer.past_key_values  # its name since transformers 5.24, before
    with tempfile.TemporaryDirectory(dir=cache_dir) as name, perdure.open(Path(name) / "store", memory=0) as store:
        space = keyspace_for(store, model, tenant="benchmark", block_tokens=BLOCK_TOKENS, codec="off")
        PrefixCache(space, model).store(ids[0], computed)
        keys = space.chain(ids[0].numpy())
        made = perdure.aligned_buffer(len(keys) * BLOCK_BYTES)
        if space.read(keys, into=made).usable != SAMPLE_TOKENS // BLOCK_TOKENS:
            raise NoSample(f"not all of {len(keys)} blocks could be read back")
    part = path.with_suffix(".part")
    made.tofile(part)
    part.rename(path)


def sample(
    path: os.PathLike[str] | str | None, blocks: int, cache_dir: os.PathLike[str] | str | None = None
) -> tuple[Bytes, str]:
    """(bytes of at most `blocks` blocks, what they are): the file's, else the model's, else synthetic.

    cache_dir: where the model and its sample are kept; None: no model is used."""
    if path is not None:
        return load(path)[: blocks * BLOCK_BYTES], f"real bf16 KV ({Path(path).name})"
    try:
        if cache_dir is None:
            raise NoSample("not asked for")
        return load(kv_sample(cache_dir))[: blocks * BLOCK_BYTES], "real bf16 KV of SmolLM2-135M"
    except NoSample as why:
        return synthetic(blocks), f"synthetic bf16 KV (no real one: {why})"


if __name__ == "__main__":
    _make(Path(sys.argv[1]), Path(sys.argv[2]))
