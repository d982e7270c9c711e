"""The caller's memory: everything with the buffer protocol becomes flat byte views, checked before anything is moved.

A block's memory is a list of parts whose concatenation is the block (a paged KV cache keeps K, V and layers apart).
Never copies, never keeps a view longer than the call; bad memory is a BufferMismatch that says which block and why.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from perdure import limits
from perdure.errors import BufferMismatch
from perdure.io.memory import address, is_aligned

Parts = list[memoryview]
"""One block: parts of format 'B' that make up the block in order."""


def as_view(buffer: Any, *, writable: bool, what: str) -> memoryview:
    """Flat byte view of one buffer: numpy array, torch CPU tensor, bytearray, mmap, memoryview, ..."""
    if type(buffer).__module__ == "torch" or type(buffer).__module__.startswith("torch."):
        buffer = _torch_bytes(buffer, what)
    try:
        view = memoryview(buffer)
    except TypeError:
        raise BufferMismatch(
            f"{what}: {type(buffer).__name__} has no buffer protocol; pass numpy arrays or torch CPU tensors"
        ) from None
    if not view.c_contiguous:
        raise BufferMismatch(f"{what}: not C-contiguous (shape {view.shape}, strides {view.strides}); pass it in parts")
    if writable and view.readonly:
        raise BufferMismatch(f"{what}: read-only memory cannot be read into")
    if not view.nbytes:  # which Python cannot cast
        return memoryview(bytearray())
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _torch_bytes(tensor: Any, what: str) -> Any:
    """A torch CPU tensor of any dtype as a numpy uint8 view of the same memory (numpy has no bfloat16)."""
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise BufferMismatch(f"{what}: tensor is on {tensor.device}; copy it to host memory first")
    if not tensor.is_contiguous():
        raise BufferMismatch(f"{what}: tensor is not contiguous (shape {tuple(tensor.shape)}); pass it in parts")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def as_blocks(buffers: Any, count: int, block_bytes: int, *, writable: bool, what: str) -> list[Parts]:
    """`count` blocks from one buffer of count * block_bytes, a list of buffers, or a list of lists of parts."""
    if isinstance(buffers, (list, tuple)):
        return _from_list(buffers, count, block_bytes, writable, what)
    view = as_view(buffers, writable=writable, what=what)
    if view.nbytes != count * block_bytes:
        raise BufferMismatch(
            f"{what}: {view.nbytes} bytes for {count} blocks of {block_bytes} bytes; {count * block_bytes} are needed"
        )
    return [[view[at : at + block_bytes]] for at in range(0, view.nbytes, block_bytes)]


def _from_list(items: Sequence[Any], count: int, block_bytes: int, writable: bool, what: str) -> list[Parts]:
    if len(items) != count:
        raise BufferMismatch(f"{what}: {len(items)} buffers for {count} keys; pass one per key")
    blocks: list[Parts] = []
    for position, item in enumerate(items):
        name = f"{what}[{position}]"
        pieces = item if isinstance(item, (list, tuple)) else (item,)
        if len(pieces) > limits.block_parts_max:
            raise BufferMismatch(f"{name}: {len(pieces)} parts, at most {limits.block_parts_max}")
        parts = [as_view(piece, writable=writable, what=name) for piece in pieces]
        parts = [part for part in parts if part.nbytes]
        total = sum(part.nbytes for part in parts)
        if total != block_bytes:
            raise BufferMismatch(f"{name}: parts add up to {total} bytes, the layout's block has {block_bytes}")
        blocks.append(parts)
    if writable:
        _refuse_overlap(blocks, what)
    return blocks


def _refuse_overlap(blocks: list[Parts], what: str) -> None:
    spans = [(address(part), part.nbytes) for parts in blocks for part in parts]
    array = np.array(spans, dtype=np.uint64).reshape(-1, 2)
    array = array[np.argsort(array[:, 0], kind="stable")]
    if (array[:-1, 0] + array[:-1, 1] > array[1:, 0]).any():
        raise BufferMismatch(f"{what}: two of the buffers overlap; every block needs memory of its own")


def all_aligned(parts: Parts, alignment: int) -> bool:
    """Whether every part starts at and spans a multiple of `alignment` (direct I/O needs it)."""
    return all(is_aligned(part, alignment) for part in parts)


def copy_parts(source: Sequence[memoryview], destination: Sequence[memoryview]) -> None:
    """Copy between two lists of parts of equal total size; releases the GIL for the bytes."""
    if len(source) == 1 and len(destination) == 1:
        np.copyto(np.frombuffer(destination[0], np.uint8), np.frombuffer(source[0], np.uint8))
        return
    src, dst = iter(source), iter(destination)
    have, want = next(src), next(dst)
    while True:
        step = min(have.nbytes, want.nbytes)
        np.copyto(np.frombuffer(want[:step], np.uint8), np.frombuffer(have[:step], np.uint8))
        have, want = have[step:], want[step:]
        if not have.nbytes:
            following = next(src, None)
            if following is None:
                return
            have = following
        if not want.nbytes:
            following = next(dst, None)
            if following is None:
                return
            want = following
