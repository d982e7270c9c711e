"""Lossless to the byte for every length, width and cut into parts; hostile chunks are errors and write nowhere else."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure import codecs
from perdure.codecs import BLOSC2_SHUFFLE_ZSTD1, NONE, CodecError
from perdure.errors import InvalidArgument, PerdureError, UnknownOption

CODEC = BLOSC2_SHUFFLE_ZSTD1
GUARD = 64


def kv_like(nbytes: int, seed: int = 1) -> bytes:
    """bf16 with a scale per channel, as keys and values have: exponents compress, mantissas are noise."""
    rng = np.random.default_rng(seed)
    channels = 192
    values = rng.normal(0, 1, (nbytes // 2 // channels + 1, channels)) * np.exp(rng.normal(0, 1, channels))
    bf16 = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bf16.tobytes()[:nbytes]


def cut(buffer: bytearray, at: list[int]) -> list[memoryview]:
    edges = sorted({0, len(buffer), *(a % (len(buffer) + 1) for a in at)})
    view = memoryview(buffer)
    return [view[a:b] for a, b in pairwise(edges)]


def decoded(stored: bytes, nbytes: int, width: int, codec: int = CODEC) -> bytes:
    """Decode between guard bytes, which must survive whatever `stored` is."""
    memory = bytearray(b"\xaa" * (nbytes + 2 * GUARD))
    try:
        codecs.decode(codec, memoryview(stored), [memoryview(memory)[GUARD : GUARD + nbytes]], width)
    finally:
        assert memory[:GUARD] == memory[GUARD + nbytes :] == b"\xaa" * GUARD
    return bytes(memory[GUARD : GUARD + nbytes])


def encoded(data: bytes, width: int = 2) -> bytes:
    chunk = codecs.encode(CODEC, [memoryview(data)], width)
    assert chunk is not None
    return chunk


WIDTH = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=200, deadline=None)
@given(
    nbytes=st.one_of(st.integers(1, 600), st.integers(600, 300_000)),
    width=WIDTH,
    kind=st.sampled_from(["zeros", "constant", "few", "planes", "noise"]),
    seed=st.integers(0, 1000),
    cuts_in=st.lists(st.integers(0, 300_000), max_size=4),
    cuts_out=st.lists(st.integers(0, 300_000), max_size=4),
)
def test_round_trip(nbytes: int, width: int, kind: str, seed: int, cuts_in: list[int], cuts_out: list[int]) -> None:
    rng = np.random.default_rng(seed)
    if kind == "zeros":
        array = np.zeros(nbytes, np.uint8)
    elif kind == "constant":
        array = np.resize(rng.integers(0, 256, width, dtype=np.uint8), nbytes)
    else:
        array = rng.integers(0, 256 if kind == "noise" else 4, nbytes, dtype=np.uint8)
        if kind == "planes":
            array[:: max(2, width)] = rng.integers(0, 256, len(array[:: max(2, width)]), dtype=np.uint8)
    source = bytearray(array.tobytes())
    chunk = codecs.encode(CODEC, cut(source, cuts_in), width)
    if chunk is None:
        assert kind == "noise" or nbytes < 2500
        return
    assert len(chunk) <= 0.97 * nbytes
    out = bytearray(b"\xaa" * nbytes)
    codecs.decode(CODEC, memoryview(chunk), cut(out, cuts_out), width)
    assert out == source
    assert decoded(chunk, nbytes, width) == source


def test_bf16_is_split_into_planes() -> None:
    chunk = encoded(kv_like(1 << 20))
    assert (1 << 20) / len(chunk) > 1.35  # one stream for both planes gives 1.23
    assert decoded(chunk, 1 << 20, 2) == kv_like(1 << 20)


def test_what_does_not_compress_is_stored_as_it_is() -> None:
    noise = np.random.default_rng(0).bytes(1 << 16)
    assert codecs.encode(CODEC, [memoryview(noise)], 2) is None
    assert codecs.encode(CODEC, [], 2) is None
    assert codecs.encode(NONE, [memoryview(bytes(100))], 2) is None
    assert decoded(noise, len(noise), 2, codec=NONE) == noise
    out = bytearray(len(noise))
    codecs.decode(NONE, memoryview(noise), cut(out, [1, 1000]), 2)
    assert out == noise
    for size in (len(noise) - 1, len(noise) + 1, 0):
        with pytest.raises(CodecError):
            decoded(noise, size, 2, codec=NONE)


def test_sizes_must_match_exactly() -> None:
    data = kv_like(100_000)
    chunk = encoded(data)
    for size in (0, 1, 99_998, 100_002):
        with pytest.raises(CodecError, match="claims to decode"):
            decoded(chunk, size, 2)
    for stored in (b"", chunk[:31], chunk[:32], chunk[:-1], chunk + b"\0"):
        with pytest.raises(CodecError):
            decoded(stored, len(data), 2)
    assert issubclass(CodecError, PerdureError)


@pytest.mark.parametrize("position", range(32))
def test_every_flipped_bit_of_the_header_is_noticed(position: int) -> None:
    data = kv_like(100_000)
    chunk = encoded(data)
    for bit in range(8):
        wrong = bytearray(chunk)
        wrong[position] ^= 1 << bit
        if position == 1 or (position == 0 and wrong[0] > chunk[0]):  # format versions: the library's business
            with suppress(CodecError):
                assert decoded(bytes(wrong), len(data), 2) == data
            continue
        if position == 2 and wrong[2] in (0x85, 0x95):  # split or not is a free choice; then the data does not fit
            with pytest.raises(CodecError):
                decoded(bytes(wrong), len(data), 2)
            continue
        if 8 <= position < 12 and int.from_bytes(wrong[8:12], "little") <= len(data):
            with pytest.raises(CodecError):
                decoded(bytes(wrong), len(data), 2)
            continue
        assert codecs._problem(memoryview(bytes(wrong)), len(data), 2)  # before the library sees it
        with pytest.raises(CodecError):
            decoded(bytes(wrong), len(data), 2)


@settings(max_examples=300, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), min_size=1, max_size=8),
    keep=st.integers(0, 40_000),
)
def test_damaged_data_never_writes_elsewhere(edits: list[tuple[int, int]], keep: int) -> None:
    data = kv_like(40_000)
    chunk = bytearray(encoded(data))
    for at, value in edits:
        chunk[32 + at % (len(chunk) - 32)] = value
    if keep < len(chunk):  # cut, and claiming to be whole
        del chunk[max(32, keep) :]
        chunk[12:16] = len(chunk).to_bytes(4, "little")
    with suppress(CodecError):
        decoded(bytes(chunk), len(data), 2)  # may be other bytes: the record's checksum is checked before


@settings(max_examples=200, deadline=None)
@given(stored=st.binary(max_size=200), nbytes=st.integers(0, 500), width=WIDTH)
def test_arbitrary_bytes_are_refused(stored: bytes, nbytes: int, width: int) -> None:
    with pytest.raises(CodecError):
        decoded(stored, nbytes, width)


def test_memory_is_never_left_unwritten() -> None:
    """The format has chunks that say 'uninitialised' and decode to whatever was there."""
    header = bytearray(encoded(bytes(4096)))
    assert len(header) == 32
    header[31] = 0x40
    with pytest.raises(CodecError):
        decoded(bytes(header), 4096, 2)


def test_read_only_memory_is_not_written() -> None:
    data = bytes(4096)
    target = b"\xaa" * 4096
    with pytest.raises(CodecError, match="read-only"):
        codecs.decode(CODEC, memoryview(encoded(data)), [memoryview(target)], 2)
    assert target == b"\xaa" * 4096


def test_unknown_codecs_and_widths() -> None:
    for codec in (2, 255):
        with pytest.raises(CodecError, match="not known"):
            codecs.encode(codec, [memoryview(bytes(100))], 2)
        with pytest.raises(CodecError, match="not known"):
            codecs.decode(codec, memoryview(bytes(100)), [memoryview(bytearray(100))], 2)
    with pytest.raises(InvalidArgument):
        codecs.encode(CODEC, [memoryview(bytes(100))], 3)
    with pytest.raises(CodecError, match="shuffled by 4"):
        decoded(encoded(bytes(range(200)) * 20, 4), 4000, 2)


def test_threads_do_not_disturb_each_other() -> None:
    wrong: list[str] = []

    def work(seed: int) -> None:
        try:
            width = (1, 2, 4, 8)[seed % 4]
            for step in range(12):
                data = kv_like(150_000 + 8 * seed, seed=100 * seed + step)
                if decoded(encoded(data, 2), len(data), 2) != data:
                    wrong.append(f"thread {seed}, step {step}, width 2")
                few = np.random.default_rng(seed + step).integers(0, 9, 99_999 + seed, dtype=np.uint8).tobytes()
                if decoded(encoded(few, width), len(few), width) != few:
                    wrong.append(f"thread {seed}, step {step}, width {width}")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_measure() -> None:
    measured = codecs.measure(memoryview(kv_like(1 << 18)), 2)
    assert 1.3 < measured.ratio < 1.6
    assert measured.encode_bytes_per_s > 0
    assert measured.decode_bytes_per_s > 0
    noise = codecs.measure(memoryview(np.random.default_rng(0).bytes(1 << 16)), 2)
    assert 0.99 < noise.ratio <= 1.0


@pytest.mark.parametrize(
    ("policy", "device", "ratio", "decode", "cores", "codec", "says"),
    [
        ("on", None, None, None, 1, CODEC, "on, as configured"),
        ("off", 1e8, 2.0, 1e10, 8, NONE, "off, as configured"),
        ("auto", 0.8e9, 1.47, 1.7e9, 2, CODEC, "worth 1.18 GB/s of KV; 2 cores decode 3.40 GB/s"),
        ("auto", 7e9, 1.47, 1.7e9, 2, NONE, "decoding would be the bottleneck"),
        ("auto", 1.0e9, 1.7, 1.7e9, 1, CODEC, "1 core decodes 1.70 GB/s"),
        ("auto", 1.01e9, 1.7, 1.7e9, 1, NONE, "bottleneck"),
        ("auto", 0.1e9, 1.09, 1.7e9, 2, NONE, "hardly compresses (ratio 1.09"),
        ("auto", 0.1e9, 1.1, 1.7e9, 2, CODEC, "on: "),
        ("auto", None, 1.47, 1.7e9, 2, NONE, "not measured"),
        ("auto", 1e9, None, 1.7e9, 2, NONE, "not measured"),
        ("auto", 1e9, 1.47, None, 2, NONE, "not measured"),
    ],
)
def test_choose(
    policy: str, device: float | None, ratio: float | None, decode: float | None, cores: int, codec: int, says: str
) -> None:
    chosen, reason = codecs.choose(policy, device, ratio, decode, cores)
    assert chosen == codec
    assert says in reason


def test_a_misspelt_policy_names_the_nearest() -> None:
    with pytest.raises(UnknownOption, match="did you mean 'auto'"):
        codecs.choose("atuo", None, None, None, 1)


def test_the_library_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, perdure.codecs as c; c.encode(0, [], 2); sys.exit('blosc2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
