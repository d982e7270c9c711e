"""What the fields of messages hold: keys, extents, slots, leases, identities and errors, packed and unpacked.

Contract
- Every array's length is checked against what it describes before it is used: ProtocolError says what is wrong.
- Errors cross as (class name, message) and come out as the same class of `perdure.errors` again.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import numpy as np

from perdure import errors, limits
from perdure.catalog.api import KeyArray, Lease
from perdure.errors import PerdureError, ProtocolError
from perdure.keys import KeyspaceIdentity, KVLayout
from perdure.reports import WriteStatus
from perdure.segments.landing import BlockStatus
from perdure.service import messages as m
from perdure.service.messages import Failed, LeaseData, OpenSpace

NO_SLOT: Final = 0xFFFF_FFFF_FFFF_FFFF
SLOT_INDEX_BITS: Final = 16  # a chunk has at most 2^14 slots
SLOT_INDEX_MASK: Final = (1 << SLOT_INDEX_BITS) - 1
_EXTENT = np.dtype([("offset", "<u8"), ("nbytes", "<u8")])


def keys_of(raw: bytes) -> KeyArray:
    """Keys of a message, uint8 (n, 32)."""
    if len(raw) % limits.key_bytes or len(raw) > limits.message_keys_max * limits.key_bytes:
        raise ProtocolError(f"{len(raw)} bytes of keys: must be a multiple of 32, {limits.message_keys_max} at most")
    return np.frombuffer(raw, np.uint8).reshape(-1, limits.key_bytes)


def extents_of(
    extents: bytes, parts: bytes, blocks: int, block_bytes: int, region_bytes: int
) -> list[list[tuple[int, int]]]:
    """Per block its parts as (offset, bytes), each inside the region and together one block."""
    if len(extents) % _EXTENT.itemsize or len(parts) % 4:
        raise ProtocolError("extents are pairs of 8 bytes each, parts are 4 bytes each")
    table = np.frombuffer(extents, _EXTENT)
    counts = np.frombuffer(parts, "<u4").astype(np.int64) if parts else np.ones(blocks, np.int64)
    if len(counts) != blocks or counts.sum() != len(table) or (blocks and counts.min() < 1):
        raise ProtocolError(f"{len(table)} extents in {len(counts)} groups do not describe {blocks} blocks")
    if (table["nbytes"] > region_bytes).any() or (table["offset"] > region_bytes - table["nbytes"]).any():
        raise ProtocolError(f"an extent lies outside its region of {region_bytes} bytes")
    ends = np.cumsum(counts)
    sums = np.add.reduceat(table["nbytes"].astype(np.int64), ends - counts) if blocks else np.zeros(0, np.int64)
    if (sums != block_bytes).any():
        raise ProtocolError(f"the parts of a block add up to {int(sums[sums != block_bytes][0])}, not {block_bytes}")
    pairs = list(zip(table["offset"].tolist(), table["nbytes"].tolist(), strict=True))
    return [pairs[end - count : end] for end, count in zip(ends.tolist(), counts.tolist(), strict=True)]


def pack_extents(blocks: list[list[tuple[int, int]]]) -> tuple[bytes, bytes]:
    """The two arrays of a message: extents, and parts (empty if each block has one)."""
    table = np.array([pair for parts in blocks for pair in parts], np.uint64).reshape(-1, 2)
    counts = [len(parts) for parts in blocks]
    return table.tobytes(), b"" if set(counts) <= {1} else np.array(counts, "<u4").tobytes()


def pack_slot(chunk: int, index: int) -> int:
    return chunk << SLOT_INDEX_BITS | index


def unpack_slot(packed: int) -> tuple[int, int]:
    """(number of the chunk, index of the slot)."""
    return packed >> SLOT_INDEX_BITS, packed & SLOT_INDEX_MASK


def layout_fields(layout: KVLayout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in KVLayout.__slots__}


def identity_of(question: OpenSpace) -> KeyspaceIdentity:
    """The checked identity; InvalidArgument or ProtocolError for what no client of ours sends."""
    fields = dict(question.layout)
    for name in ("layers", "kv_heads"):
        if isinstance(fields.get(name), list):
            fields[name] = tuple(fields[name])
    try:
        layout = KVLayout(**fields)
    except TypeError as error:
        raise ProtocolError(f"layout: {error}") from None
    return KeyspaceIdentity(question.model, question.weights, layout, question.lora, question.draft, question.salt)


def pack_lease(lease: Lease) -> LeaseData:
    return LeaseData(lease.scope, lease.holder, lease.token, lease.deadline_s)


def lease_of(data: LeaseData) -> Lease:
    return Lease(data.scope, data.holder, data.token, data.deadline_s)


def failure(question_id: int, error: Exception) -> Failed:
    """An error as it crosses the wire. What is not ours is named, without its inside."""
    if isinstance(error, PerdureError) and hasattr(errors, type(error).__name__):
        return Failed(question_id, type(error).__name__, str(error))
    return Failed(question_id, "PerdureError", f"the service failed: {type(error).__name__}: {error}")


def raise_failure(failed: Failed) -> NoReturn:
    kind = getattr(errors, failed.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, PerdureError)):
        kind = PerdureError
    raise kind(failed.message)


def too_late(question: m.Fetch | m.Read | m.Write) -> m.Message:
    """The answer to what was read after its deadline: nobody waits for it, and its memory may be in other use."""
    count = len(keys_of(question.keys))
    if isinstance(question, m.Write):
        return m.Written(question.id, bytes([WriteStatus.LATE]) * count, 0, 0, {})
    late = bytes([BlockStatus.LATE]) * count
    if isinstance(question, m.Read):
        return m.Delivered(question.id, late, 0, {}, 0)
    return m.Fetched(question.id, late, np.full(count, NO_SLOT, np.uint64).tobytes(), 0, {}, [])
