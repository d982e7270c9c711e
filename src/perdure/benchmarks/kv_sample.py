"""A sample of KV-cache bytes for the codec rows: real bf16 KV where there is some, else synthetic and named so.

Contract
- A sample is a whole number of blocks of `BLOCK_BYTES` bytes: 16 tokens of SmolLM2-135M in bfloat16, elements in the
  order layer, K/V, head, token, dim.
- Synthetic KV is Gaussian per channel with scales that differ between channels, heads and layers, as real KV's do. It
  says something about speed; how far real KV compresses only real KV says.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perdure.errors import InvalidArgument

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 30, 3, 64, 16
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * BLOCK_TOKENS * HEAD_DIM * 2

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


def sample(path: os.PathLike[str] | str | None, blocks: int) -> tuple[Bytes, str]:
    """(bytes of at most `blocks` blocks, what they are): the file's if there is one, else synthetic."""
    if path is not None:
        return load(path)[: blocks * BLOCK_BYTES], f"real bf16 KV ({Path(path).name})"
    return synthetic(blocks), "synthetic bf16 KV"
