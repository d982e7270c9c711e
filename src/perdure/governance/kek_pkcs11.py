"""A key-encryption key that never leaves a hardware security module: PKCS#11, through `python-pkcs11`.

Named by a URI as in RFC 7512: `pkcs11:token=LABEL;object=LABEL?module-path=/LIBRARY.so&pin-source=file:/PATH`. Each
version of the key is an AES-256 object of that label that cannot leave the module; its number is in CKA_ID (8 bytes,
big-endian). What is wrapped is AES-GCM by CKM_AES_GCM: number in hex, ":", nonce (12 bytes, random), ciphertext, tag.

Contract: as `kek.Kek`. A module that hangs is waited for `limits.key_service_s`, by each call; one call at a time, for
login belongs to a process and not to a session.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from perdure import limits
from perdure.errors import ConfigError, KeyUnavailable
from perdure.governance.kek import KEY_BYTES, NONCE_BYTES

_T = TypeVar("_T")
_ID_BYTES: Final = 8
_TAG_BYTES: Final = 16
_NEEDED: Final = frozenset({"token", "object", "module-path", "pin-source"})
_ONE_AT_A_TIME: Final = threading.Lock()


def fields_of(uri: str) -> dict[str, str]:
    """The attributes of a PKCS#11 URI that are used here, all of which are needed. Raises ConfigError."""
    path, _, query = uri.removeprefix("pkcs11:").partition("?")
    told = dict[str, str]()
    for field in (*filter(None, path.split(";")), *filter(None, query.split("&"))):
        name, equals, value = field.partition("=")
        if not equals or name not in _NEEDED or name in told:
            raise ConfigError(
                f"kek: a PKCS#11 URI has {field!r}: of {', '.join(sorted(_NEEDED))} each once, as NAME=VALUE"
            )
        told[name] = unquote(value)
    lacking = sorted(name for name in _NEEDED if not told.get(name))
    if lacking or not told["pin-source"].removeprefix("file:").startswith("/"):
        raise ConfigError(
            f"kek={uri!r}: lacks {', '.join(lacking) or 'an absolute path in pin-source'}; write pkcs11:token=LABEL;"
            "object=LABEL?module-path=/PATH/TO/LIBRARY.so&pin-source=file:/PATH"
        )
    return told


class Pkcs11Kek:
    """`create`: make the first version if the token has none."""

    def __init__(self, uri: str, *, create: bool):
        fields = fields_of(uri)
        try:
            import pkcs11
        except ImportError:
            raise ConfigError("kek=pkcs11: install it with `pip install perdure[pkcs11]`") from None
        self._api: Any = pkcs11
        self._token, self._label, self._module = fields["token"], fields["object"], fields["module-path"]
        self._pin_file = Path(fields["pin-source"].removeprefix("file:"))
        if not self._ask(lambda session: bool(self._versions(session))):
            if not create:
                raise KeyUnavailable(f"{self._name}: missing; without it no encrypted block can be read")
            self._ask(lambda session: self._add(session), write=True)

    @property
    def _name(self) -> str:
        return f"key {self._label} of PKCS#11 token {self._token}"

    def wrap(self, key: bytes, context: bytes) -> bytes:
        def sealed(session: Any) -> bytes:
            newest, nonce = self._newest(session), secrets.token_bytes(NONCE_BYTES)
            made = newest.encrypt(
                key, mechanism=self._api.Mechanism.AES_GCM,
                mechanism_param=self._api.GCMParams(nonce, context, _TAG_BYTES * 8),
            )  # fmt: skip
            return bytes(newest.id).hex().encode() + b":" + nonce + bytes(made)

        return self._ask(sealed)

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        name, _, rest = wrapped.partition(b":")
        nonce, sealed = rest[:NONCE_BYTES], rest[NONCE_BYTES:]
        if len(sealed) != KEY_BYTES + _TAG_BYTES:
            raise KeyUnavailable("a wrapped key does not open: it is damaged, or was wrapped by another key")

        def opened(session: Any) -> bytes:
            version = self._versions(session).get(name.decode(errors="replace"))
            if version is None:
                raise KeyUnavailable(f"{self._name}: has no version {name!r}; restore the token that had it")
            return bytes(
                version.decrypt(
                    sealed, mechanism=self._api.Mechanism.AES_GCM,
                    mechanism_param=self._api.GCMParams(nonce, context, _TAG_BYTES * 8),
                )
            )  # fmt: skip

        return self._ask(opened)

    def is_newest(self, wrapped: bytes) -> bool:
        newest = self._ask(lambda session: bytes(self._newest(session).id).hex())
        return wrapped.partition(b":")[0] == newest.encode()

    def rotate(self) -> None:
        self._ask(self._add, write=True)

    def retire(self) -> None:
        def destroy(session: Any) -> None:
            versions = self._versions(session)
            for name in sorted(versions)[:-1]:
                versions[name].destroy()

        self._ask(destroy, write=True)

    # --- in a session
    def _versions(self, session: Any) -> dict[str, Any]:
        """By number, in hex of equal length: they sort as the numbers do."""
        attributes = {
            self._api.Attribute.CLASS: self._api.ObjectClass.SECRET_KEY,
            self._api.Attribute.LABEL: self._label,
        }
        found = {bytes(one.id).hex(): one for one in session.get_objects(attributes)}
        return {name: one for name, one in found.items() if len(name) == 2 * _ID_BYTES}

    def _newest(self, session: Any) -> Any:
        versions = self._versions(session)
        if not versions:
            raise KeyUnavailable(f"{self._name}: missing; without it no encrypted block can be read")
        return versions[max(versions)]

    def _add(self, session: Any) -> None:
        number = 1 + max((int(name, 16) for name in self._versions(session)), default=0)
        attribute = self._api.Attribute
        session.generate_key(
            self._api.KeyType.AES, KEY_BYTES * 8, label=self._label, id=number.to_bytes(_ID_BYTES, "big"), store=True,
            template={attribute.SENSITIVE: True, attribute.EXTRACTABLE: False},
        )  # fmt: skip

    def _ask(self, call: Callable[[Any], _T], *, write: bool = False) -> _T:
        """`call` with a session of its own, in a thread of its own: a module that hangs does not keep the caller."""
        answer = Future[_T]()

        def run() -> None:
            try:
                with _ONE_AT_A_TIME:
                    token = self._api.lib(self._module).get_token(token_label=self._token)
                    with token.open(rw=write, user_pin=self._pin_file.read_text().strip()) as session:
                        made = call(session)
                answer.set_result(made)
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                answer.set_exception(error)

        threading.Thread(target=run, name="perdure-pkcs11", daemon=True).start()
        try:
            return answer.result(limits.key_service_s)
        except KeyUnavailable:
            raise
        except TimeoutError:
            raise KeyUnavailable(f"{self._name}: no answer in {limits.key_service_s:.0f} s") from None
        except Exception as error:  # of the library, and of files
            raise KeyUnavailable(f"{self._name}: {type(error).__name__}: {error}") from error
