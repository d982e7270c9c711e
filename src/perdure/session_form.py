"""How sessions are written down and asked about: the head in the control store, and the fields of a question.

Format of a head: a msgpack array of the fields of `Head` in their order, 1 KiB at most. Questions are dictionaries,
because they come from other processes and hosts as they come from this one; every field is checked here.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from perdure import limits
from perdure.catalog.api import KeyArray, as_keys
from perdure.errors import CatalogError, InvalidArgument
from perdure.keys import derive

Fields = dict[str, Any]


class Head(msgspec.Struct, array_like=True):
    version: int
    name: str
    keyspace: bytes
    created_s: int
    used_s: int
    expires_s: int
    ttl_s: int  # idle time after which it is over
    blocks: int = 0
    root: bytes = b""
    pages_expire_s: int = 0
    owner: int = 1
    shared: int = 0  # leading blocks that another session has or had in common with it
    origin: str = ""  # name of the session that it branched off
    pinned_until_s: int = 0
    next_use_s: int = 0
    tokens: list[tuple[bytes, int]] = []
    events: list[tuple[int, str, int]] = []
    subject: bytes = b""  # whose it is, if that was told: see `subject_id`


def decode_head(raw: bytes) -> Head:
    try:
        return _heads.decode(raw)
    except msgspec.MsgspecError as error:
        raise CatalogError(f"the head of a session is damaged: {error}") from None


def encode_head(head: Head) -> bytes:
    raw = _encoder.encode(head)
    if len(raw) > limits.session_head_bytes_max:
        raise AssertionError(f"a head of {len(raw)} bytes")
    return raw


_heads: Final = msgspec.msgpack.Decoder(Head)
_encoder: Final = msgspec.msgpack.Encoder()


def subject_id(secret: bytes, subject: str) -> bytes:
    """What the head of a session says of whose it is: never the name."""
    return derive(secret, "perdure/1/subject", subject.encode())[: limits.id_bytes]


def subject(f: Fields, secret: bytes) -> bytes:
    return subject_id(secret, text(f, "subject")) if f.get("subject") else b""


def text(f: Fields, field: str) -> str:
    value = f.get(field)
    if not isinstance(value, str) or not 0 < len(value.encode()) <= limits.session_name_bytes_max:
        raise InvalidArgument(
            f"session {field} {value!r}: must be text of 1 to {limits.session_name_bytes_max} bytes in UTF-8"
        )
    return value


def number(f: Fields, field: str, least: int, most: int) -> int:
    value = f.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidArgument(f"{field}={value!r}: must be a whole number from {least} to {most}")
    return value


def seconds(f: Fields, field: str) -> float:
    value = f.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise InvalidArgument(f"{field}={value!r}: must be seconds from now, 0 or more")
    return float(value)


def ttl(f: Fields, field: str, default_s: int, most_s: int = limits.session_ttl_s_max) -> tuple[int, str]:
    """(whole seconds, why it is less than asked for)."""
    value = default_s if f.get(field) is None else seconds(f, field)
    return (most_s, f"{most_s} s at most") if value > most_s else (int(value), "")


def key_array(f: Fields) -> KeyArray:
    raw = f.get("keys")
    if (
        not isinstance(raw, bytes)
        or len(raw) % limits.key_bytes
        or len(raw) > limits.message_keys_max * limits.key_bytes
    ):
        raise InvalidArgument(
            f"keys of a session: a multiple of 32 bytes is needed, for {limits.message_keys_max} at most"
        )
    return as_keys([raw])
