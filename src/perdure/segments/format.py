"""On-storage format: record headers, segment indexes, segment ids. Pure functions over bytes, no I/O.

Segment file: records back to back on 4 KiB boundaries. Record: one header page (256 bytes used, the rest zero), then
the stored payload padded with zeros to whole pages. All integers little-endian. The header says whose block it is,
where it stands and what its payload's checksum is, and carries a MAC under the segment's secret: a payload that looks
like a header (payloads are chosen by clients) is not one.

    0  magic "PERDUREB"        8 version u16     10 header_bytes u16    12 codec u8  13 durability u8  14 retention u8
   15 cipher u8               16 keyspace 32    48 key 32               80 tenant 16  96 segment 16     112 offset u64
  120 block_bytes u32        124 stored_bytes u32                      128 tenant_epoch u32   132 created_s u32
  136 expires_s u32          140 reserved u32  144 fence u64           152 key_id 16 168 nonce 12       180 reserved 12
  192 payload_tag 16 (see below)      208 reserved 32                  240 mac 16

MAC: BLAKE2b-128 keyed with the segment secret over bytes 0..239. A reader compares bytes 0..127, all of which it knows
beforehand, then the MAC, then the payload tag: any difference means the block is not delivered.

Payload tag: xxh3-128 of the stored payload, big-endian; where cipher is 1 the stored payload is AES-256-GCM ciphertext
and the tag is GCM's. The nonce is random per attempt to write; what is authenticated with it are bytes 0..167: tenant,
keyspace, key, segment, position, sizes, key id, version.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from perdure import limits
from perdure.catalog.api import RECORD, RecordArray
from perdure.errors import FormatError
from perdure.keys import derive

RECORD_MAGIC = b"PERDUREB"
INDEX_MAGIC = b"PERDUREI"
MAC_AT = limits.header_bytes - 16
AAD_BYTES = 168
NO_CIPHER, AES_256_GCM = 0, 1
GCM_TAG_BYTES, NONCE_BYTES = 16, 12
OTHER_KEYSPACE = "the key belongs to another keyspace"
_IDENTITY = struct.Struct("<8sHHBBBB32s32s16s16sQII")
IDENTITY_BYTES = _IDENTITY.size

HEADER = np.dtype(
    {
        "names": ["magic", "version", "header_bytes", "codec", "durability", "retention", "cipher", "keyspace", "key",
                  "tenant", "segment", "offset", "block_bytes", "stored_bytes", "tenant_epoch", "created_s",
                  "expires_s", "fence", "key_id", "nonce", "payload_tag", "mac"],
        "formats": ["V8", "<u2", "<u2", "u1", "u1", "u1", "u1", "V32", "V32", "V16", "V16", "<u8", "<u4", "<u4", "<u4",
                    "<u4", "<u4", "<u8", "V16", "V12", "V16", "V16"],
        "offsets": [0, 8, 10, 12, 13, 14, 15, 16, 48, 80, 96, 112, 120, 124, 128, 132, 136, 144, 152, 168, 192, 240],
        "itemsize": limits.header_bytes,
    }
)  # fmt: skip
"""The header as a numpy structure (see the table above), for building and scanning many at once."""

INDEX_ENTRY = np.dtype([("key", "V32"), ("keyspace", "V32"), ("record", RECORD)])
_INDEX_HEAD = struct.Struct("<8sHHI16s16sQQ")  # magic, version, reserved, entry bytes, segment, tenant, count, sealed
_INDEX_MAC_BYTES = 32

if IDENTITY_BYTES != 128 or INDEX_ENTRY.itemsize != 128:
    raise AssertionError("perdure.segments.format: the structures do not have the documented sizes")


def new_segment_id() -> bytes:
    """16 bytes: 48-bit milliseconds since 1970, then 80 random bits. Time-ordered, used once, ever."""
    return int(time.time() * 1000).to_bytes(6, "big") + os.urandom(10)


def segment_secret(root_secret: bytes, segment: bytes) -> bytes:
    return derive(root_secret, "perdure/1/segment", segment)


def record_bytes(stored_bytes: int) -> int:
    """Bytes a record occupies: header page + payload in whole pages."""
    page = limits.page_bytes
    return page + -(-stored_bytes // page) * page


def record_bytes_array(stored_bytes: NDArray[np.uint32]) -> NDArray[np.int64]:
    page = limits.page_bytes
    return (page + -(-stored_bytes.astype(np.int64) // page) * page).astype(np.int64)


def payload_tag(parts: Sequence[memoryview]) -> bytes:
    """xxh3-128 of the concatenated parts, big-endian (canonical) form; releases the GIL."""
    if len(parts) == 1:
        return xxhash.xxh3_128_digest(parts[0])
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def header_tag(page: memoryview) -> bytes:
    """Checksum that the payload of this record must have."""
    return bytes(page[192:208])


def header_nonce(page: memoryview) -> memoryview:
    return page[AAD_BYTES : AAD_BYTES + NONCE_BYTES]


def header_key_id(page: memoryview) -> bytes:
    return bytes(page[152:AAD_BYTES])


def header_mac(secret: bytes, header: bytes | memoryview) -> bytes:
    return hashlib.blake2b(header[:MAC_AT], digest_size=16, key=secret).digest()


@dataclass(frozen=True, slots=True)
class HeaderFields:
    """What is the same for all records of one append."""

    keyspace: bytes
    fence: int = 0
    key_id: bytes = b""


def write_headers(
    pages: NDArray[np.uint8],
    keys: NDArray[np.uint8],
    records: RecordArray,
    fields: HeaderFields,
    tags: Sequence[bytes] | Callable[[int, bytes, bytes], bytes],
    secret: bytes,
) -> None:
    """Fill header pages: `pages` (n, page_bytes) zeroed, one per record.

    tags: payload checksums; or what encrypts: (number, nonce, authenticated bytes) -> tag, with `fields.key_id` set."""
    headers = pages[:, : limits.header_bytes].view(HEADER)[:, 0]  # a view: ravel() would copy
    headers["magic"] = np.void(RECORD_MAGIC)
    headers["version"] = limits.format_version
    headers["header_bytes"] = limits.header_bytes
    headers["keyspace"] = np.void(fields.keyspace)
    headers["key"] = keys.view("V32").ravel()
    headers["fence"] = fields.fence
    for name in ("codec", "durability", "retention", "cipher", "tenant", "segment", "offset", "block_bytes",
                 "stored_bytes", "tenant_epoch", "created_s", "expires_s"):  # fmt: skip
        headers[name] = records[name]
    if callable(tags):
        headers["key_id"] = np.void(fields.key_id)
        nonces = os.urandom(NONCE_BYTES * len(headers))
        headers["nonce"] = np.frombuffer(nonces, "V12")
        tags = [
            tags(number, nonces[number * NONCE_BYTES : (number + 1) * NONCE_BYTES], pages[number, :AAD_BYTES].tobytes())
            for number in range(len(headers))
        ]
    headers["payload_tag"] = np.frombuffer(b"".join(tags), "V16")
    blake2b = hashlib.blake2b
    raw = pages[:, :MAC_AT].tobytes()
    macs = [blake2b(raw[at : at + MAC_AT], digest_size=16, key=secret).digest() for at in range(0, len(raw), MAC_AT)]
    headers["mac"] = np.frombuffer(b"".join(macs), "V16")


def expected_identity(keyspace: bytes, key: bytes, row: tuple[Any, ...]) -> bytes:
    """The first 128 header bytes that a block's header must have; `row` is its catalog record as a tuple."""
    segment, tenant, offset, stored, block, _created, _expires, _epoch, codec, durability, retention, cipher = row
    return _IDENTITY.pack(
        RECORD_MAGIC, limits.format_version, limits.header_bytes, codec, durability, retention, cipher,
        keyspace, key, tenant, segment, offset, block, stored,
    )  # fmt: skip


def header_problem(page: memoryview, identity: bytes, secret: bytes) -> str | None:
    """None if the header is the expected one, else what is wrong with it (for `explain` and incidents)."""
    header = bytes(page[: limits.header_bytes])
    if header[:IDENTITY_BYTES] == identity and header_mac(secret, header) == header[MAC_AT:]:
        return None
    if not any(header):
        return "header is all zeros (never written, or lost in a power cut)"
    if header[:8] != RECORD_MAGIC:
        return "header magic is wrong"
    if header_mac(secret, header) != header[MAC_AT:]:
        return "header MAC does not verify"
    if header[:16] == identity[:16] and header[48:IDENTITY_BYTES] == identity[48:]:  # the caller mixed up keyspaces
        return OTHER_KEYSPACE
    return "header belongs to another block, place, tenant or keyspace"


def scan_headers(pages: NDArray[np.uint8], secret: bytes, segment: bytes, first_offset: int) -> NDArray[np.int64]:
    """Page numbers in `pages` (n, page_bytes) with a valid header of `segment` that stands where it says."""
    headers = np.ascontiguousarray(pages[:, : limits.header_bytes]).view(HEADER).ravel()
    offsets = first_offset + np.arange(len(headers), dtype=np.uint64) * limits.page_bytes
    likely = np.flatnonzero(
        (headers["magic"] == np.void(RECORD_MAGIC))
        & (headers["segment"] == np.void(segment))
        & (headers["offset"] == offsets)
    )
    good = [i for i in likely if header_mac(secret, headers[i].tobytes()) == headers["mac"][i].tobytes()]
    return np.array(good, dtype=np.int64)


def records_of(headers: NDArray[np.void]) -> RecordArray:
    """Catalog records for headers read from a segment."""
    records = np.zeros(len(headers), RECORD)
    for name in RECORD.names or ():
        records[name] = headers[name]
    return records


def pack_index(segment: bytes, tenant: bytes, sealed_bytes: int, entries: NDArray[np.void], secret: bytes) -> bytes:
    """The `.idx` object of a sealed segment: head, entries (INDEX_ENTRY) and a BLAKE2b-256 MAC over both."""
    head = _INDEX_HEAD.pack(
        INDEX_MAGIC, limits.format_version, 0, INDEX_ENTRY.itemsize, segment, tenant, len(entries), sealed_bytes
    )
    body = head + entries.tobytes()
    return body + hashlib.blake2b(body, digest_size=_INDEX_MAC_BYTES, key=secret).digest()


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    segment: bytes
    tenant: bytes
    sealed_bytes: int
    entries: NDArray[np.void]


def unpack_index(data: bytes, segment: bytes, secret: bytes) -> SegmentIndex:
    """Raises FormatError if the index is damaged, foreign, newer, or of another segment."""
    name = segment.hex()
    if len(data) < _INDEX_HEAD.size + _INDEX_MAC_BYTES:
        raise FormatError(f"segment index {name}: {len(data)} bytes, too short")
    magic, version, _, entry_bytes, owner, tenant, count, sealed = _INDEX_HEAD.unpack_from(data)
    if magic != INDEX_MAGIC:
        raise FormatError(f"segment index {name}: not a Perdure segment index")
    if version > limits.format_version:
        raise FormatError(
            f"segment index {name}: format version {version}, this Perdure reads up to {limits.format_version}; upgrade"
        )
    body, mac = data[:-_INDEX_MAC_BYTES], data[-_INDEX_MAC_BYTES:]
    if entry_bytes != INDEX_ENTRY.itemsize or len(body) != _INDEX_HEAD.size + count * entry_bytes or owner != segment:
        raise FormatError(f"segment index {name}: wrong size or wrong segment")
    if hashlib.blake2b(body, digest_size=_INDEX_MAC_BYTES, key=secret).digest() != mac:
        raise FormatError(f"segment index {name}: MAC does not verify")
    entries = np.frombuffer(body, INDEX_ENTRY, count, _INDEX_HEAD.size)
    return SegmentIndex(segment, tenant, sealed, entries)
