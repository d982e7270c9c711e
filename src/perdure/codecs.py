"""Lossless codecs of stored blocks, by the id in the record header.

Contract: decode(encode(x)) == x, to the byte. Stored bytes are hostile until proven otherwise: `decode` checks what
they claim before it writes, never writes beyond the destination, and raises CodecError for anything inconsistent. One
thread per call, the GIL released for the bytes; blocks are encoded and decoded in parallel by their callers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from perdure.buffers import copy_parts
from perdure.errors import PerdureError

NONE: Final = 0
BLOSC2_SHUFFLE_ZSTD1: Final = 1

_WORTH_IT: Final = 0.97  # an encoded block must be at least this much smaller
_RATIO_MIN: Final = 1.1
_HEADER_BYTES: Final = 32
_loading = threading.Lock()
_blosc2: Any = None


class CodecError(PerdureError):
    """Stored bytes do not decode to the block they claim to be."""


def _library() -> Any:
    """blosc2, imported on first use (0.2 s)."""
    global _blosc2
    if _blosc2 is None:
        with _loading:
            import blosc2

            blosc2.set_releasegil(True)
            _blosc2 = blosc2
    return _blosc2


def _flat(parts: Sequence[memoryview]) -> memoryview:
    if len(parts) == 1:
        return parts[0]
    whole = memoryview(bytearray(sum(part.nbytes for part in parts)))
    copy_parts(parts, [whole])
    return whole


def encode(codec: int, source_parts: Sequence[memoryview], dtype_bytes: int) -> bytes | None:
    """Encoded form of the concatenated parts, or None where it would not be smaller."""
    if codec != BLOSC2_SHUFFLE_ZSTD1:
        raise CodecError(f"codec {codec} is not known to this version")
    blosc2 = _library()
    source = _flat(source_parts)
    encoded: bytes = blosc2.compress2(
        source,
        codec=blosc2.Codec.ZSTD,
        clevel=1,
        typesize=dtype_bytes,
        nthreads=1,
        filters=[blosc2.Filter.SHUFFLE],
        filters_meta=[0],
    )
    return encoded if len(encoded) < _WORTH_IT * source.nbytes else None


def decode(codec: int, stored: memoryview, dest_parts: Sequence[memoryview], dtype_bytes: int) -> None:
    """Decode into the parts, which must add up to exactly the decoded size. Raises CodecError."""
    if codec != BLOSC2_SHUFFLE_ZSTD1:
        raise CodecError(f"codec {codec} is not known to this version")
    blosc2 = _library()
    wanted = sum(part.nbytes for part in dest_parts)
    if stored.nbytes < _HEADER_BYTES:
        raise CodecError(f"{stored.nbytes} bytes are too short for a compressed block")
    try:
        decoded_bytes, stored_bytes, _ = blosc2.get_cbuffer_sizes(stored)
    except Exception as error:
        raise CodecError(f"not a compressed block: {error}") from error
    if decoded_bytes != wanted or stored_bytes != stored.nbytes:
        raise CodecError(f"claims {decoded_bytes} bytes in {stored_bytes}; the block has {wanted} in {stored.nbytes}")
    target = dest_parts[0] if len(dest_parts) == 1 else memoryview(bytearray(wanted))
    try:
        blosc2.decompress2(stored, dst=target, nthreads=1)
    except Exception as error:
        raise CodecError(f"damaged compressed block: {error}") from error
    if len(dest_parts) != 1:
        copy_parts([target], dest_parts)


@dataclass(frozen=True, slots=True)
class Measurement:
    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float


def measure(sample: memoryview, dtype_bytes: int) -> Measurement:
    """What the codec makes of a sample on one core here and now. Ratio 1.0: not compressible."""
    started = time.perf_counter()
    encoded = encode(BLOSC2_SHUFFLE_ZSTD1, [sample], dtype_bytes)
    encoded_s = time.perf_counter() - started
    if encoded is None:
        return Measurement(1.0, sample.nbytes / encoded_s, 0.0)
    target = memoryview(bytearray(sample.nbytes))
    decoded_s = min(_timed_decode(memoryview(encoded), target, dtype_bytes) for _ in range(3))
    return Measurement(sample.nbytes / len(encoded), sample.nbytes / encoded_s, sample.nbytes / decoded_s)


def _timed_decode(encoded: memoryview, target: memoryview, dtype_bytes: int) -> float:
    started = time.perf_counter()
    decode(BLOSC2_SHUFFLE_ZSTD1, encoded, [target], dtype_bytes)
    return time.perf_counter() - started


def choose(
    policy: str,
    device_bytes_per_s: float | None,
    ratio: float | None,
    decode_bytes_per_s: float | None,
    cores: int,
) -> tuple[int, str]:
    """(codec, reason). `auto` compresses only where the device delivers slower than the cores decode."""
    if policy == "on":
        return BLOSC2_SHUFFLE_ZSTD1, "on, as configured"
    if policy == "off":
        return NONE, "off, as configured"
    if not device_bytes_per_s or not ratio or not decode_bytes_per_s:
        return NONE, "off: nothing was measured, or the data does not compress"
    decoded = decode_bytes_per_s * cores
    numbers = (
        f"ratio {ratio:.2f}, device {device_bytes_per_s / 1e9:.2f} GB/s, {cores} cores decode {decoded / 1e9:.2f} GB/s"
    )
    if ratio < _RATIO_MIN:
        return NONE, f"off: the data hardly compresses ({numbers})"
    if device_bytes_per_s * ratio > decoded:
        return NONE, f"off: the device is faster than the decoders ({numbers})"
    return BLOSC2_SHUFFLE_ZSTD1, f"on: the device is the bottleneck ({numbers})"
