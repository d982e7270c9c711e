"""Identity: who a block belongs to, what its bytes mean, and its 32-byte name.

A block key is `SHA-256(parent key || tokens as little-endian u32 || extras)`; the first parent is the keyspace digest,
an HMAC over everything that changes the meaning of the bytes, keyed with a secret of the tenant. So a wrong tenant,
model, adapter, dtype or layout is a miss by construction, and names cannot be guessed from outside a tenant. The
encoding is language-neutral (no Python hash, no pickle) and has published vectors: `docs/keys.md`, `tests/vectors`.

Never: two keyspaces sharing a key; a key that depends on the process, the host, a path or a rank of data parallelism.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perdure import limits
from perdure.errors import InvalidArgument

KeyArray = NDArray[np.uint8]
"""Block keys: shape (n, 32), dtype uint8, C-contiguous."""

GROUP_BLOCKS = 256
GROUP_SUBTAG_BITS = 5  # without it one slot of a cluster would hold 23 % of a real trace's records

_DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
_WEIGHTS = re.compile(r"^[a-z0-9_]{2,32}:[0-9A-Za-z._+/=-]{1,512}$")


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What the bytes of one block are. Every field is part of the keyspace digest.

    block_tokens: tokens per block. block_bytes: bytes of one block in the caller's memory.
    dtype: element type of the model ("bfloat16", "float32", ...); kv_dtype: of the cache, if it differs.
    order: how the elements lie in the block, in the engine's words, for example "layer,kv,head,token,dim" or "LBHNC".
    layers, kv_heads: (first, count) held by this shard; equal slices have equal keys under any parallel size.
    replicated: this shard holds data that every rank holds alike (MLA latents).
    group: KV-cache group of hybrid models. scales: digest of static KV scales. isa: CPU instruction set, where the
    engine packs pages by it.
    """

    block_tokens: int
    block_bytes: int
    dtype: str
    order: str
    kv_dtype: str = ""
    layers: tuple[int, int] = (0, 0)
    kv_heads: tuple[int, int] = (0, 0)
    replicated: bool = False
    group: str = ""
    scales: str = ""
    isa: str = ""

    def __post_init__(self) -> None:
        for name in ("order", "group", "scales", "isa"):
            check_text(getattr(self, name), f"KVLayout.{name}")
        if not _is_whole(self.block_tokens) or not 1 <= self.block_tokens <= limits.block_tokens_max:
            raise InvalidArgument(f"KVLayout.block_tokens={self.block_tokens}: must be 1..{limits.block_tokens_max}")
        if not _is_whole(self.block_bytes) or not 1 <= self.block_bytes <= limits.block_bytes_max:
            raise InvalidArgument(
                f"KVLayout.block_bytes={self.block_bytes}: must be 1..{limits.block_bytes_max}; "
                "use fewer tokens per block, or split layers or heads into shards"
            )
        for name in ("dtype", "kv_dtype"):
            value = getattr(self, name)
            if value not in _DTYPE_BYTES and not (name == "kv_dtype" and value == ""):
                raise InvalidArgument(f"KVLayout.{name}={value!r}: must be one of {', '.join(_DTYPE_BYTES)}")
        if not self.order:
            raise InvalidArgument("KVLayout.order is empty: name how the elements lie, e.g. 'layer,kv,head,token,dim'")
        for name in ("layers", "kv_heads"):
            pair = getattr(self, name)
            if not isinstance(pair, tuple) or len(pair) != 2 or not all(_is_whole(v) and 0 <= v < 2**63 for v in pair):
                raise InvalidArgument(f"KVLayout.{name}={pair!r}: must be (first, count), both integers >= 0")
        if not isinstance(self.replicated, bool):
            raise InvalidArgument(f"KVLayout.replicated={self.replicated!r}: must be True or False")

    @property
    def element_bytes(self) -> int:
        return _DTYPE_BYTES[self.kv_dtype or self.dtype]


@dataclass(frozen=True, slots=True)
class KeyspaceIdentity:
    """Everything but the tenant that gives a block's bytes their meaning.

    weights: digest of the weights that are *loaded*, as "algorithm:value". lora: content digest of the adapter, or "".
    draft: digest of a draft model whose state is in the blocks, or "". salt: text that keeps apart what would be equal
    otherwise, or "".
    """

    model: str
    weights: str
    layout: KVLayout
    lora: str = ""
    draft: str = ""
    salt: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.layout, KVLayout):
            raise InvalidArgument(f"keyspace layout: pass a KVLayout, not {type(self.layout).__name__}")
        for name in ("model", "weights", "lora", "draft", "salt"):
            check_text(getattr(self, name), f"keyspace {name}")
        if not self.model:
            raise InvalidArgument("keyspace model is empty: pass the model's name")
        if not _WEIGHTS.match(self.weights):
            raise InvalidArgument(
                f"keyspace weights={self.weights!r}: pass a digest of the loaded weights as 'algorithm:value', "
                "for example 'sha256:9f86d0...'; without it KV of old weights would be reused after an update"
            )
        for name, value in self.fields():
            if len(value) > limits.identity_field_bytes_max:
                raise InvalidArgument(f"keyspace {name}: {len(value)} bytes, max {limits.identity_field_bytes_max}")

    def shared_fields(self) -> list[tuple[str, bytes]]:
        """Fields that are equal on every shard of one model instance."""
        lay = self.layout
        return [
            ("model", self.model.encode()),
            ("weights", self.weights.encode()),
            ("lora", self.lora.encode()),
            ("draft", self.draft.encode()),
            ("block_tokens", _u64(lay.block_tokens)),
            ("dtype", lay.dtype.encode()),
            ("kv_dtype", (lay.kv_dtype or lay.dtype).encode()),
            ("order", lay.order.encode()),
            ("scales", lay.scales.encode()),
            ("isa", lay.isa.encode()),
            *([("salt", self.salt.encode())] if self.salt else []),
        ]

    def shard_fields(self) -> list[tuple[str, bytes]]:
        lay = self.layout
        return [
            ("block_bytes", _u64(lay.block_bytes)),
            ("layers", _u64(lay.layers[0]) + _u64(lay.layers[1])),
            ("kv_heads", _u64(lay.kv_heads[0]) + _u64(lay.kv_heads[1])),
            ("replicated", bytes([lay.replicated])),
            ("group", lay.group.encode()),
        ]

    def fields(self) -> list[tuple[str, bytes]]:
        return self.shared_fields() + self.shard_fields()


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_text(value: object, what: str) -> bytes:
    """The value in UTF-8, or InvalidArgument."""
    try:
        if isinstance(value, str):
            return value.encode()
    except UnicodeEncodeError:
        pass
    raise InvalidArgument(f"{what}={value!r}: must be text that UTF-8 can encode")


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def encode_fields(fields: Iterable[tuple[str, bytes]]) -> bytes:
    """Canonical encoding: for each field in order, name and value, each as u32 little-endian length + bytes."""
    out = bytearray()
    for name, value in fields:
        raw = name.encode()
        out += struct.pack("<I", len(raw)) + raw + struct.pack("<I", len(value)) + value
    return bytes(out)


def derive(secret: bytes, purpose: str, data: bytes = b"") -> bytes:
    """HMAC-SHA256(secret, purpose || 0 || data), 32 bytes: the only key derivation in Perdure."""
    return hmac.digest(secret, purpose.encode() + b"\0" + data, "sha256")


def tenant_secret(root_secret: bytes, tenant: str) -> bytes:
    """Secret of one tenant. `tenant` is length-limited, non-empty text; equal bytes mean the same tenant."""
    raw = check_text(tenant, "tenant")
    if not raw or len(raw) > limits.tenant_name_bytes_max:
        raise InvalidArgument(f"tenant {tenant!r}: must be 1..{limits.tenant_name_bytes_max} bytes of UTF-8")
    return derive(root_secret, "perdure/1/tenant", raw)


def tenant_id(secret: bytes) -> bytes:
    """Public 16-byte name of a tenant, from its secret."""
    return derive(secret, "perdure/1/tenant-id")[: limits.id_bytes]


def key_domain(tenant: bytes, epoch: int) -> bytes:
    """Whose key it is: 16 bytes for one epoch of a tenant (by its id)."""
    return derive(tenant, "perdure/1/epoch", struct.pack("<I", epoch))[: limits.id_bytes] if epoch else tenant


@dataclass(frozen=True, slots=True)
class KeyspaceDigests:
    digest: bytes  # parent of the first block key; 32 bytes
    shared: bytes  # the same without shard identity: parent of the group chain


def keyspace_digests(secret: bytes, identity: KeyspaceIdentity) -> KeyspaceDigests:
    """Digest of a keyspace for the tenant whose secret is given."""
    version = struct.pack("<I", limits.format_version)
    shared = derive(secret, "perdure/1/keyspace", version + encode_fields(identity.shared_fields()))
    return KeyspaceDigests(derive(secret, "perdure/1/shard", shared + encode_fields(identity.shard_fields())), shared)


def token_bytes(token_ids: ArrayLike) -> bytes:
    """Token ids as little-endian u32. Raises InvalidArgument for anything but a flat sequence of ints in 0..2^32-1."""
    tokens = np.asarray(token_ids)
    if tokens.size == 0:
        return b""
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidArgument(f"token ids must be a flat sequence of integers, got {tokens.dtype} shape {tokens.shape}")
    if tokens.dtype != np.uint32:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= 2**32:
            raise InvalidArgument(f"token ids must be in 0..2^32-1, got {low}..{high}")
    return tokens.astype("<u4", copy=False).tobytes()


def chain(
    parent: bytes, token_ids: ArrayLike, block_tokens: int, extras: Mapping[int, bytes] | None = None
) -> KeyArray:
    """Keys of the full blocks of a token sequence, shape (len // block_tokens, 32); the partial tail has no key.

    parent: keyspace digest, or the key of the block before. extras: block position -> bytes that the tokens do not say
    (identity of an image, for example), appended as u32 length + bytes; a position behind the last (partial) block is
    refused, so that none gets lost.
    """
    if not isinstance(parent, bytes) or len(parent) != limits.key_bytes:
        raise InvalidArgument(
            f"parent must be the {limits.key_bytes} bytes of a key or keyspace digest, "
            f"got {len(parent) if isinstance(parent, bytes) else type(parent).__name__}"
        )
    raw = token_bytes(token_ids)
    step = 4 * block_tokens
    end = len(raw) - len(raw) % step
    if extras:
        _check_extras(extras, end // step)
    sha256, key, keys = hashlib.sha256, parent, []
    if not extras:
        for at in range(0, end, step):
            key = sha256(key + raw[at : at + step]).digest()
            keys.append(key)
    else:
        for position, at in enumerate(range(0, end, step)):
            extra = extras.get(position, b"")
            suffix = struct.pack("<I", len(extra)) + extra if extra else b""
            key = sha256(key + raw[at : at + step] + suffix).digest()
            keys.append(key)
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, limits.key_bytes)


def _check_extras(extras: Mapping[int, bytes], last: int) -> None:
    if not isinstance(extras, Mapping):
        raise InvalidArgument(f"extras must map block positions to bytes, got {type(extras).__name__}")
    for position, extra in extras.items():
        if not _is_whole(position) or not 0 <= position <= last:
            raise InvalidArgument(f"extras: there is no block {position!r} in this sequence, only 0..{last}")
        if not isinstance(extra, bytes):
            raise InvalidArgument(f"extras[{position}]: bytes are needed, got {type(extra).__name__}")


def chain_groups(shared: bytes, keys: KeyArray, token_ids: ArrayLike, block_tokens: int) -> list[bytes]:
    """Chain group of each block: what a distributed catalog keeps together (17 bytes each).

    16 bytes of a hash chained over 256-block groups of tokens from the shard-neutral digest (the group a block descends
    from), then one byte: the low GROUP_SUBTAG_BITS of the block's own key.
    """
    step = 4 * block_tokens * GROUP_BLOCKS
    raw = token_bytes(token_ids)
    group, out = shared, []
    mask = (1 << GROUP_SUBTAG_BITS) - 1
    for start in range(0, len(keys), GROUP_BLOCKS):
        out += [group[:16] + bytes([sub]) for sub in (keys[start : start + GROUP_BLOCKS, 0] & mask).tolist()]
        at = start // GROUP_BLOCKS * step
        group = hashlib.sha256(group + raw[at : at + step]).digest()
    return out


def adopt_hashes(digest: bytes, hashes: Sequence[bytes]) -> KeyArray:
    """Keys for an engine's own cryptographic chain hashes (vLLM sha256_cbor), keyed by the keyspace."""
    if not all(isinstance(h, bytes) and h for h in hashes):
        raise InvalidArgument("adopt_hashes: every hash must be bytes, and not empty")
    raw = b"".join(derive(digest, "perdure/1/adopt", h) for h in hashes)
    return np.frombuffer(raw, np.uint8).reshape(-1, limits.key_bytes)


def check_keys(keys: object) -> KeyArray:
    """The array as KeyArray, or InvalidArgument. Accepts (n, 32) uint8 arrays and sequences of 32-byte strings."""
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != limits.key_bytes:
            raise InvalidArgument(f"keys must have dtype uint8 and shape (n, 32), got {keys.dtype} {keys.shape}")
        array = keys if keys.flags.c_contiguous else np.ascontiguousarray(keys)
    elif isinstance(keys, Sequence) and all(isinstance(k, bytes) and len(k) == limits.key_bytes for k in keys):
        array = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, limits.key_bytes)
    else:
        raise InvalidArgument("keys must be the array returned by Keyspace.chain(), or a sequence of 32-byte strings")
    if len(array) > limits.batch_blocks_max:
        raise InvalidArgument(f"{len(array)} keys in one call: at most {limits.batch_blocks_max}; split the batch")
    return array


def key_list(keys: KeyArray) -> list[bytes]:
    """KeyArray -> list of 32-byte strings (0.01 us each)."""
    return keys.view("V32").ravel().tolist()
