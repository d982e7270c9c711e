"""Signed statements about a log: C2SP signed notes (Ed25519) and the checkpoints in them.

    origin line ‖ tree size ‖ base64(root)  [‖ more lines]  ‖ empty line ‖ "— name base64(key id ‖ signature)"

Formats: c2sp.org/signed-note and c2sp.org/tlog-checkpoint, so that other programs can check what is signed here. A
verifier key is `name+hex(key id)+base64(0x01 ‖ public key)`, key id the first four bytes of
SHA-256(name ‖ "\\n" ‖ 0x01 ‖ public key).

Contract: `Verifier.open` returns the text of a note only if one of its signatures is by this key and right; it raises
AuditDamaged for anything else. Signatures by other keys (witnesses) may stand beside it and are not looked at.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from perdure.errors import AuditDamaged, InvalidArgument
from perdure.governance.merkle import HASH_BYTES

_ED25519: Final = b"\x01"
_KEY_ID_BYTES: Final = 4
_SIGNATURE_BYTES: Final = 64
SEED_BYTES: Final = 32


def _key_id(name: str, public: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + _ED25519 + public).digest()[:_KEY_ID_BYTES]


def _check_name(name: str) -> None:
    if not name or "+" in name or any(one.isspace() for one in name):
        raise InvalidArgument(f"key name {name!r}: must be text without spaces and without '+'")


class Verifier:
    """A public key with a name. `str` of it is the verifier key."""

    def __init__(self, name: str, public: bytes):
        _check_name(name)
        self.name, self.public, self.key_id = name, public, _key_id(name, public)
        self._key = Ed25519PublicKey.from_public_bytes(public)

    @classmethod
    def parse(cls, text: str) -> Verifier:
        """From `name+key id+base64`. Raises InvalidArgument."""
        try:
            name, key_id, encoded = text.strip().split("+", 2)
            raw = base64.b64decode(encoded, validate=True)
            if raw[:1] != _ED25519:
                raise ValueError("not an Ed25519 key")
            found = cls(name, raw[1:])
            if found.key_id != bytes.fromhex(key_id):
                raise ValueError("its id is not the one of the key")
        except ValueError as error:
            raise InvalidArgument(f"verifier key {text.strip()!r}: {error}; write name+id+base64") from None
        return found

    def __str__(self) -> str:
        return f"{self.name}+{self.key_id.hex()}+{base64.b64encode(_ED25519 + self.public).decode()}"

    def open(self, note: bytes) -> str:
        """The signed text, with its last newline. Raises AuditDamaged."""
        try:
            text, _, signatures = note.decode().rpartition("\n\n")
        except UnicodeDecodeError:
            raise AuditDamaged("not a signed note: not UTF-8") from None
        text += "\n"
        if not signatures.endswith("\n") or len(text) < 2:
            raise AuditDamaged("not a signed note")
        for line in signatures[:-1].split("\n"):
            mark, _, rest = line.partition(" ")
            name, _, encoded = rest.partition(" ")
            if mark != "—" or name != self.name:
                continue
            try:
                raw = base64.b64decode(encoded, validate=True)
            except binascii.Error:
                continue
            if raw[:_KEY_ID_BYTES] != self.key_id or len(raw) != _KEY_ID_BYTES + _SIGNATURE_BYTES:
                continue
            try:
                self._key.verify(raw[_KEY_ID_BYTES:], text.encode())
            except InvalidSignature:
                raise AuditDamaged(f"the signature of {self.name} does not fit the text") from None
            return text
        raise AuditDamaged(f"no signature of {self.name} with key {self.key_id.hex()}")


class Signer:
    """A private key with a name."""

    def __init__(self, name: str, seed: bytes):
        if len(seed) != SEED_BYTES:
            raise InvalidArgument(f"a seed of {len(seed)} bytes: {SEED_BYTES} are needed")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.verifier = Verifier(name, self._key.public_key().public_bytes_raw())

    def sign(self, text: str) -> bytes:
        """A note: `text`, which ends with a newline, and the signature."""
        if not text.endswith("\n") or "\n\n" in text:
            raise InvalidArgument("the text of a note ends with a newline and has no empty line")
        raw = self.verifier.key_id + self._key.sign(text.encode())
        return f"{text}\n— {self.verifier.name} {base64.b64encode(raw).decode()}\n".encode()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a log: `size` records, whose tree has the root `root`. `extra`: further lines, if any."""

    origin: str
    size: int
    root: bytes
    extra: tuple[str, ...] = ()

    def text(self) -> str:
        lines = (self.origin, str(self.size), base64.b64encode(self.root).decode(), *self.extra)
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        """Raises AuditDamaged."""
        try:
            origin, size, encoded, *extra = text.removesuffix("\n").split("\n")
            found = cls(origin, int(size), base64.b64decode(encoded, validate=True), tuple(extra))
        except ValueError as error:
            raise AuditDamaged(f"not a checkpoint: {error}") from None
        if len(found.root) != HASH_BYTES or found.size < 0 or str(found.size) != size or not origin:
            raise AuditDamaged("not a checkpoint")
        return found


def open_checkpoint(note: bytes, verifier: Verifier, origin: str) -> Checkpoint:
    """The checkpoint in a note, if it is signed by this key and about this log. Raises AuditDamaged."""
    found = Checkpoint.parse(verifier.open(note))
    if found.origin != origin:
        raise AuditDamaged(f"a checkpoint of another log: {found.origin!r}, not {origin!r}")
    return found
