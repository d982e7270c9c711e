"""What a publication is, what is kept of it, and the fields that users send.

Contract: fields may come from anywhere, and are checked here. Raises InvalidArgument.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from perdure import keys as naming
from perdure import limits
from perdure.catalog.api import KeyArray
from perdure.errors import InvalidArgument
from perdure.keys import KeyspaceIdentity, KVLayout
from perdure.keyspace import Keyspace

PUBLISHED: Final = "published"
COPYING: Final = "copying"
ENDED: Final = "ended"
Fields = dict[str, Any]


@dataclass(slots=True, eq=False)
class Publication:
    """number: of this process. entry: as kept. seed: tokens or hashes, and so names, once known here."""

    number: int
    id: bytes
    entry: Fields
    raw: bytes
    space: Keyspace
    seed: bytes | None = None
    names: KeyArray | None = None

    def names_in(self, space: Keyspace) -> KeyArray:
        """What its blocks are called in a keyspace. The seed must be known."""
        assert self.seed is not None
        if self.entry["hashed"]:
            return space.adopt_hashes(hashes_in(self.seed))
        return space.chain(np.frombuffer(self.seed, "<u4"))


# --- fields ---------------------------------------------------------------------------------------------------
def identity_of(fields: dict[str, str]) -> KeyspaceIdentity:
    """The identity that was registered with a keyspace (`inspect.register`)."""
    raw = {name: bytes.fromhex(value) for name, value in fields.items()}
    text = {name: value.decode() for name, value in raw.items() if name not in _NUMBERS}
    number = {name: struct.unpack(f"<{len(raw[name]) // 8}Q", raw[name]) for name in _NUMBERS}
    layers, kv_heads = (number[name] for name in ("layers", "kv_heads"))
    layout = KVLayout(
        block_tokens=number["block_tokens"][0], block_bytes=number["block_bytes"][0], dtype=text["dtype"],
        order=text["order"], kv_dtype=text["kv_dtype"], layers=(layers[0], layers[1]),
        kv_heads=(kv_heads[0], kv_heads[1]), replicated=text["replicated"] == "\1", group=text["group"],
        scales=text["scales"], isa=text["isa"],
    )  # fmt: skip
    return KeyspaceIdentity(text["model"], text["weights"], layout, text["lora"], text["draft"], text.get("salt", ""))


_NUMBERS: Final = ("block_tokens", "block_bytes", "layers", "kv_heads")


def digest_of(f: Fields) -> bytes:
    digest = f.get("keyspace")
    if not isinstance(digest, bytes) or len(digest) != limits.key_bytes:
        raise InvalidArgument(f"publish: keyspace={digest!r} must be the {limits.key_bytes} bytes of its digest")
    return digest


def text_of(f: Fields, name: str) -> str:
    value = f.get(name)
    if not isinstance(value, str) or not 0 < len(value.encode(errors="replace")) <= limits.session_name_bytes_max:
        raise InvalidArgument(f"{name}={value!r}: must be text of 1 to {limits.session_name_bytes_max} bytes")
    return value


def readers_of(f: Fields) -> list[str]:
    readers = f.get("readers")
    if not isinstance(readers, list) or not 0 < len(readers) <= limits.publication_readers_entries_max:
        raise InvalidArgument(
            f"readers={readers!r}: must be 1 to {limits.publication_readers_entries_max} tenants, or *"
        )
    for one in readers:
        naming.tenant_secret(b"", one)  # checks the name
    return sorted({*readers})


def seed_of(f: Fields, block_tokens: int) -> bytes:
    """What names are made from: whole blocks of tokens (u32 each), or hashes (each u8 length + bytes)."""
    tokens, hashes = f.get("tokens"), f.get("hashes")
    if isinstance(tokens, bytes) and hashes is None and len(tokens) % 4 == 0:
        seed = tokens[: len(tokens) // (4 * block_tokens) * 4 * block_tokens]
    elif isinstance(hashes, list) and tokens is None and all(isinstance(h, bytes) and 0 < len(h) < 256 for h in hashes):
        seed = b"".join(bytes([len(one)]) + one for one in hashes)
    else:
        raise InvalidArgument("publish: pass tokens, 4 bytes each, or hashes of at most 255 bytes each")
    if not seed or len(seed) > 4 * limits.message_tokens_max:
        raise InvalidArgument(
            f"publish: not one whole block, or more than {4 * limits.message_tokens_max} bytes of tokens or hashes; "
            f"a block has {block_tokens} tokens"
        )
    return seed


def hashes_in(seed: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(seed):
        found.append(seed[at + 1 : at + 1 + seed[at]])
        at += 1 + seed[at]
    return found
