"""Key-encryption keys: what wraps the tenants' keys, and is kept by someone else where it matters.

`FileKek` keeps them in a file (0600); put it on another device than the store. `VaultKek` leaves them in HashiCorp
Vault's transit engine (`pip install perdure[vault]`), `kek_pkcs11` in a hardware security module: neither gives them
away.

Contract
- What was wrapped says which version of the key it needs; old versions stay until `retire`, so a rotation may be cut
  off anywhere and be repeated.
- A file that is not in the keystore has a name, and the keystore knows it: of hosts that share the store and have a
  file each, all but the first one are refused, before anything is wrapped.
- Raises KeyUnavailable: missing, slow (bounded by `limits.key_service_s`), refused, or another key than before.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
from pathlib import Path
from typing import Any, Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from perdure import limits
from perdure.errors import ConfigError, KeyUnavailable
from perdure.governance.audit_files import write_new
from perdure.io.files import PosixFiles

KEY_BYTES: Final = 32
_FILE: Final = "kek.file"
"""In the keystore: name of the file outside that wraps its keys."""
NONCE_BYTES: Final = 12


def seal(key: bytes, data: bytes, context: bytes) -> bytes:
    """AES-256-GCM with a random nonce in front."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, data, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes:
    """Raises KeyUnavailable: another key or context, or damaged."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], context)
    except (InvalidTag, ValueError):
        raise KeyUnavailable("a wrapped key does not open: it is damaged, or was wrapped by another key") from None


def overwrite(path: Path, keep: bytes | None = None) -> None:
    """Put random bytes over a file's; with `keep`, over the old ones after that has replaced them. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        if keep is not None:
            write_new(path, keep)
        os.pwrite(descriptor, secrets.token_bytes(os.fstat(descriptor).st_size), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Kek(Protocol):
    def wrap(self, key: bytes, context: bytes) -> bytes:
        """By the newest version."""
        ...

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes: ...

    def is_newest(self, wrapped: bytes) -> bool: ...

    def rotate(self) -> None:
        """A new version, from now on the newest."""
        ...

    def retire(self) -> None:
        """Destroy all versions but the newest."""
        ...


class FileKek:
    """A JSON file: {"newest": id, "keys": {id: hex}, "name": id}; made at the first time if `create`."""

    def __init__(self, path: Path, *, create: bool):
        self._path = path
        if not path.exists():
            if not create:
                raise KeyUnavailable(f"{path}: missing; restore it, without it no encrypted block can be read")
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:  # of several processes that share it the first one's counts
                PosixFiles(str(path.parent)).write_once(path.name, _content(*_added({}), secrets.token_hex(8)))
            except OSError as error:
                raise KeyUnavailable(f"{path}: cannot be written ({error})") from error
        self.name = ""  # of files that were made before they had names
        self._read()

    def _read(self) -> tuple[dict[str, str], str]:
        try:
            content = json.loads(self._path.read_text())
            keys, newest, self.name = dict(content["keys"]), str(content["newest"]), str(content.get("name", ""))
            if any(len(bytes.fromhex(key)) != KEY_BYTES for key in keys.values()) or newest not in keys:
                raise ValueError("not 32 bytes each, or the newest is missing")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KeyUnavailable(f"{self._path}: cannot be used ({error}); restore it from a backup") from None
        return keys, newest

    def _write(self, keys: dict[str, str], newest: str) -> None:
        try:
            overwrite(self._path, keep=_content(keys, newest, self.name))
        except OSError as error:
            raise KeyUnavailable(f"{self._path}: cannot be written ({error})") from error

    def wrap(self, key: bytes, context: bytes) -> bytes:
        keys, newest = self._read()
        return newest.encode() + b":" + seal(bytes.fromhex(keys[newest]), key, context)

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        name, _, sealed = wrapped.partition(b":")
        key = self._read()[0].get(name.decode(errors="replace"))
        if key is None:
            raise KeyUnavailable(f"{self._path}: has no key {name!r}; restore the file that had it")
        return unseal(bytes.fromhex(key), sealed, context)

    def is_newest(self, wrapped: bytes) -> bool:
        return wrapped.partition(b":")[0].decode(errors="replace") == self._read()[1]

    def rotate(self) -> None:
        self._write(*_added(self._read()[0]))

    def retire(self) -> None:
        keys, newest = self._read()
        if len(keys) > 1:
            self._write({newest: keys[newest]}, newest)


def _added(keys: dict[str, str]) -> tuple[dict[str, str], str]:
    """With a new one, and its name."""
    name = secrets.token_hex(8)
    return keys | {name: secrets.token_hex(KEY_BYTES)}, name


def _content(keys: dict[str, str], newest: str, name: str) -> bytes:
    return json.dumps({"newest": newest, "keys": keys} | ({"name": name} if name else {})).encode()


class VaultKek:
    """A key of Vault's transit engine. `client`: a seam for tests; else made with VAULT_TOKEN of the environment."""

    def __init__(self, url: str, name: str, *, mount: str = "transit", client: Any = None):
        self._name, self._mount = name, mount
        if client is None:
            try:
                import hvac
            except ImportError:
                raise ConfigError("kek=vault: install it with `pip install perdure[vault]`") from None
            client = hvac.Client(url=url, timeout=limits.key_service_s)
        self._transit = client.secrets.transit

    def _ask(self, verb: str, **fields: Any) -> Any:
        try:
            return getattr(self._transit, verb)(name=self._name, mount_point=self._mount, **fields)
        except Exception as error:  # those of its HTTP library too
            raise KeyUnavailable(f"key service: {verb} of {self._name}: {type(error).__name__}: {error}") from error

    def wrap(self, key: bytes, context: bytes) -> bytes:
        text = base64.b64encode(context + key).decode()  # the context inside: bound, whatever the kind of the key
        return str(self._ask("encrypt_data", plaintext=text)["data"]["ciphertext"]).encode()

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        told = self._ask("decrypt_data", ciphertext=wrapped.decode(errors="replace"))
        raw = base64.b64decode(told["data"]["plaintext"])
        if not raw.startswith(context) or len(raw) != len(context) + KEY_BYTES:
            raise KeyUnavailable("the key service answered with another key")
        return raw[len(context) :]

    def _newest(self) -> int:
        return int(self._ask("read_key")["data"]["latest_version"])

    def is_newest(self, wrapped: bytes) -> bool:
        return wrapped.startswith(b"vault:v%d:" % self._newest())

    def rotate(self) -> None:
        self._ask("rotate_key")

    def retire(self) -> None:
        newest = self._newest()
        self._ask("update_key_configuration", min_decryption_version=newest, min_encryption_version=newest)


def kek_of(text: str, folder: Path) -> Kek:
    """From a setting: "" (a file in the keystore's folder), "file:PATH", "vault:URL#KEY", "pkcs11:..." (RFC 7512). A
    file, or a key in a module, is made only for a keystore that has no keys yet. Raises ConfigError, KeyUnavailable."""
    create = _is_new(folder)
    kind, _, rest = text.partition(":")
    if not text:
        return FileKek(folder / "kek.json", create=create)
    if kind == "file" and rest:
        made = FileKek(Path(rest), create=create)
        _check_name(made, Path(rest), folder, create)
        return made
    url, _, name = rest.rpartition("#")
    if kind == "vault" and url and name:
        return VaultKek(url, name)
    if kind == "pkcs11":
        from perdure.governance.kek_pkcs11 import Pkcs11Kek

        return Pkcs11Kek(text, create=create)
    raise ConfigError(f"kek={text!r}: write file:PATH, vault:https://HOST:8200#KEY or pkcs11:URI")


def agree(text: str, folder: Path) -> None:
    """Of a keystore that other processes share: find out before it is used whether all have the same key.

    A file that is missing is no disagreement. Raises ConfigError, KeyUnavailable."""
    kind, _, rest = text.partition(":")
    if kind == "file" and rest and (_is_new(folder) or Path(rest).exists()):
        kek_of(text, folder)


def _is_new(folder: Path) -> bool:
    """Whether the keystore has no keys yet."""
    return not any((folder / name).exists() for name in ("tenants", "segments"))


def _check_name(kek: FileKek, path: Path, folder: Path, create: bool) -> None:
    """create: nothing was wrapped yet, so this file's name counts if no other one does."""
    files = PosixFiles(str(folder))
    try:
        if create and kek.name:
            files.write_once(_FILE, kek.name.encode())
        known = files.read(_FILE).decode()
    except FileNotFoundError:
        return
    except OSError as error:
        raise KeyUnavailable(f"{folder / _FILE}: {error}; check owner, mode, mount") from error
    if kek.name and kek.name != known:
        raise KeyUnavailable(
            f"{path}: is another key file ({kek.name}) than the one that wraps this store's keys ({known}): put a copy "
            "of that one here (the host that opened the store first has it), or use vault:... or pkcs11:... everywhere"
        )
