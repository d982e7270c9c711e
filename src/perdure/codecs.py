"""Lossless codecs of stored blocks, by the id in the record header.

Contract
- `decode(encode(x)) == x`, to the byte, for every length and element width.
- Stored bytes are hostile until proven otherwise: every field of the chunk header is compared with what `encode` writes
  before the library sees it (other codecs, filters and flags would let it load plugins, or leave memory unwritten).
  Nothing is written beyond the destination. Anything inconsistent is a CodecError.
- Not detected here: a flip inside the compressed data that decompresses to other bytes. The record's checksum covers
  the stored bytes and is verified before they are decoded.
- One thread per call, with a context of its own and the GIL released; callers encode and decode blocks in parallel.
- Never: a codec that loses a bit, an import of the library before the first compressed block.

Codec 1 is a Blosc2 chunk (https://github.com/Blosc/c-blosc2/blob/main/README_CHUNK_FORMAT.rst): bytes shuffled by
element width, each plane compressed on its own with zstd level 1. In bf16 the plane of exponents shrinks to a fraction
and the plane of mantissas is noise that is stored as it is, which is why decoding is fast.
"""

from __future__ import annotations

import difflib
import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from perdure.buffers import copy_parts
from perdure.errors import InvalidArgument, PerdureError, UnknownOption

NONE: Final = 0
BLOSC2_SHUFFLE_ZSTD1: Final = 1

POLICIES: Final = ("auto", "on", "off")
ELEMENT_BYTES: Final = (1, 2, 4, 8)

_WORTH_RATIO_MAX: Final = 0.97  # encoded / source: above this the block is stored as it is
_RATIO_MIN: Final = 1.1  # source / encoded: below this `auto` does not compress
_MEASURE_S: Final = 0.02  # per direction; at least 3 rounds

# version, version of the codec's format, flags, element width, decoded bytes, blosc block bytes, chunk bytes,
# pipeline, special flags. Little-endian, 32 bytes.
_HEADER: Final = struct.Struct("<BBBBIII15sB")
_FORMAT_MIN: Final = 5
_FLAGS: Final = (0x85, 0x95)  # extended header, zstd, planes split or not; not "stored as it is" (0x02)
_PIPELINE: Final = bytes([1, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0])  # shuffle alone, zstd, no parameters
_SPECIAL: Final = (0x00, 0x10)  # data, or all bytes zero; not "uninitialised", lazy or with a dictionary


class CodecError(PerdureError):
    """Stored bytes do not decode to the block they claim to be, or with a codec this version does not know."""


@cache
def _library() -> Any:
    """blosc2, imported on first use (0.2 s)."""
    import blosc2

    blosc2.set_releasegil(True)
    return blosc2


def encode(codec: int, source_parts: Sequence[memoryview], dtype_bytes: int) -> bytes | None:
    """Encoded form of the concatenated parts (format 'B'), or None: store the block as it is, with codec NONE.

    `dtype_bytes`: width of an element, 1, 2, 4 or 8; a wrong one costs ratio, never correctness.
    """
    _check_codec(codec)
    nbytes = sum(part.nbytes for part in source_parts)
    if codec == NONE or not nbytes:
        return None
    chunk = _compress(_gathered(source_parts, nbytes), _element_bytes(nbytes, dtype_bytes))
    if len(chunk) > _WORTH_RATIO_MAX * nbytes or _problem(memoryview(chunk), nbytes, dtype_bytes):
        return None
    return chunk


def decode(codec: int, stored: memoryview, dest_parts: Sequence[memoryview], dtype_bytes: int) -> None:
    """Decode into the parts (format 'B', writable), which must add up to exactly the decoded size.

    `dtype_bytes` as at `encode`. Raises CodecError; the parts then hold undefined bytes.
    """
    _check_codec(codec)
    nbytes = sum(part.nbytes for part in dest_parts)
    if any(part.readonly for part in dest_parts):
        raise CodecError("the destination is read-only")  # the library would write all the same
    if codec == NONE:
        if stored.nbytes != nbytes:
            raise CodecError(f"{stored.nbytes} bytes are stored, the block has {nbytes}")
        if nbytes:
            copy_parts([stored], dest_parts)
        return
    problem = _problem(stored, nbytes, dtype_bytes)
    if problem:
        raise CodecError(problem)
    target = dest_parts[0] if len(dest_parts) == 1 else memoryview(np.empty(nbytes, np.uint8).data)
    try:
        _library().decompress2(stored, dst=target, nthreads=1)
    except Exception as error:  # which ones the library raises is not documented
        raise CodecError(f"damaged chunk: {error}") from error
    if len(dest_parts) != 1:
        copy_parts([target], dest_parts)


def _check_codec(codec: int) -> None:
    if codec not in (NONE, BLOSC2_SHUFFLE_ZSTD1):
        raise CodecError(f"codec {codec} is not known to this version")


def _element_bytes(nbytes: int, dtype_bytes: int) -> int:
    """What to shuffle by. Odd lengths are left alone: blosc2 4.14.1 with a set block size loses their last bytes."""
    if dtype_bytes not in ELEMENT_BYTES:
        raise InvalidArgument(f"dtype_bytes={dtype_bytes}: must be one of {ELEMENT_BYTES}")
    return 1 if nbytes % dtype_bytes else dtype_bytes


def _gathered(parts: Sequence[memoryview], nbytes: int) -> memoryview:
    if len(parts) == 1:
        return parts[0]
    whole = memoryview(np.empty(nbytes, np.uint8).data)
    copy_parts(parts, [whole])
    return whole


def _compress(source: memoryview, element_bytes: int) -> bytes:
    blosc2 = _library()
    chunk: bytes = blosc2.compress2(
        source,
        codec=blosc2.Codec.ZSTD,
        clevel=1,
        typesize=element_bytes,
        filters=[blosc2.Filter.SHUFFLE],
        filters_meta=[0],
        splitmode=blosc2.SplitMode.ALWAYS_SPLIT,  # both planes in one stream: ratio 1.23 for 1.41, a third of the speed
        nthreads=1,
    )
    return chunk


def _problem(chunk: memoryview, nbytes: int, dtype_bytes: int) -> str:
    """Why a chunk is not one that `encode` wrote for a block of `nbytes`; empty if nothing speaks against it."""
    if chunk.nbytes < _HEADER.size:
        return f"{chunk.nbytes} bytes are too short for a chunk"
    version, _, flags, width, decoded, block, size, pipeline, special = _HEADER.unpack_from(chunk)
    if size != chunk.nbytes:
        return f"the chunk claims {size} bytes, {chunk.nbytes} are stored"
    if decoded != nbytes:
        return f"the chunk claims to decode to {decoded} bytes, the block has {nbytes}"
    if not 1 <= block <= decoded:
        return f"the chunk's blocks of {block} bytes do not fit {decoded} bytes"
    if width != _element_bytes(nbytes, dtype_bytes):
        return f"the chunk is shuffled by {width} bytes"
    if version < _FORMAT_MIN or flags not in _FLAGS or pipeline != _PIPELINE or special not in _SPECIAL:
        return "the chunk was not made by this codec"
    if special and size != _HEADER.size:
        return "the chunk of zeros holds data"
    return ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Codec 1 on one core. `ratio`: source / encoded bytes; rates in source bytes."""

    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float


def measure(sample: memoryview, dtype_bytes: int) -> Measurement:
    """What the codec makes of a sample (a block) on one core here and now; takes some 0.05 s. Not for empty samples."""
    width = _element_bytes(sample.nbytes, dtype_bytes)
    blosc2 = _library()
    chunk = _compress(sample, width)
    target = memoryview(np.empty(sample.nbytes, np.uint8).data)
    encode_s = _fastest(lambda: _compress(sample, width))
    decode_s = _fastest(lambda: blosc2.decompress2(chunk, dst=target, nthreads=1))
    return Measurement(sample.nbytes / len(chunk), sample.nbytes / encode_s, sample.nbytes / decode_s)


def _fastest(work: Any) -> float:
    """Seconds of the fastest run: other runs tell what else the machine was doing."""
    best, started, rounds = math.inf, time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - started < _MEASURE_S:
        before = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - before)
        rounds += 1
    return max(best, 1e-9)


def choose(
    policy: str,
    device_bytes_per_s: float | None,
    ratio: float | None,
    decode_bytes_per_s: float | None,
    cores: int,
) -> tuple[int, str]:
    """(codec, reason for `status`). UnknownOption if `policy` is not one of POLICIES.

    `auto` compresses only where the device delivers slower than the cores decode: a device of D bytes/s delivers
    D * ratio decoded bytes/s, and decoding runs beside the reading. None: not measured.
    """
    if policy not in POLICIES:
        nearest = difflib.get_close_matches(policy, POLICIES, 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise UnknownOption(f"codec={policy!r}: must be one of {', '.join(POLICIES)}{hint}")
    if policy == "on":
        return BLOSC2_SHUFFLE_ZSTD1, "on, as configured"
    if policy == "off":
        return NONE, "off, as configured"
    if not device_bytes_per_s or not ratio or not decode_bytes_per_s:
        return NONE, "off: not measured"
    if ratio < _RATIO_MIN:
        return NONE, f"off: the data hardly compresses (ratio {ratio:.2f}, worth it from {_RATIO_MIN})"
    delivered, decoded = device_bytes_per_s * ratio, decode_bytes_per_s * cores
    numbers = (
        f"the device reads {device_bytes_per_s / 1e9:.2f} GB/s, at ratio {ratio:.2f} worth {delivered / 1e9:.2f} GB/s "
        f"of KV; {cores} {'core decodes' if cores == 1 else 'cores decode'} {decoded / 1e9:.2f} GB/s"
    )
    if delivered > decoded:
        return NONE, f"off: decoding would be the bottleneck ({numbers})"
    return BLOSC2_SHUFFLE_ZSTD1, f"on: the device is the bottleneck ({numbers})"
