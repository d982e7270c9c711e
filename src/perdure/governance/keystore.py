"""The keys of one store: KEK -> tenant key -> segment key, each random, each kept wrapped by the one before.

    DIR/keystore/encryption                as the store was last opened: on, off, tenants:NAME,NAME
    DIR/keystore/kek.json                  the file provider's default place
    DIR/keystore/tenants/<tenant>          wrapped by the KEK; <tenant>.gone: destroyed
    DIR/keystore/segments/<xx>/<segment>   wrapped by the tenant's key; .gone: destroyed
    DIR/keystore/names/<tenant>            secret of the names of its blocks, not wrapped: as the root secret

A "tenant" here is a key domain: one epoch of a tenant (`keys.key_domain`).

Contract
- A key is durable before the first byte that it protects is written, and is written once. The folder is small, and is
  to be left out of snapshots and backups that outlive an erasure.
- Random keys, never derived: a destroyed one is gone for everybody. Destroying leaves a mark, overwrites, syncs and
  unlinks; cut off, it is finished by the next `tidy`. On flash the old bytes may survive the overwriting, wrapped.
- `key id` = HMAC of the key: a file with another key in it is found, and a ciphertext is bound to one key.
- Unwrapped tenant keys are trusted for `limits.key_lease_s`; from its half on `renew` asks for them again, beside
  serving. So a KEK that is gone denies everything soon, and one that is slow is waited for at the first use of a tenant
  only: until the caller's deadline, `limits.key_service_s` at most, once in `limits.key_retry_s`.
- Processes that share the folder may all make keys: of a tenant's the first one counts. Rotating and destroying are for
  one process alone.
- Nobody waits for another tenant's key. Raises KeyUnavailable, KeyDestroyed; thread-safe.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from perdure import limits
from perdure.errors import InvalidArgument, KeyDestroyed, KeyUnavailable
from perdure.governance.audit import AuditLog, Event
from perdure.governance.audit_files import lasting, sync_folder, write_new
from perdure.governance.kek import KEY_BYTES, Kek, agree, kek_of, overwrite, seal, unseal
from perdure.io.files import PosixFiles
from perdure.keys import derive, tenant_id, tenant_secret

Tell = Callable[[str, bytes, str], None]
"""An event about a tenant's key: "key-create" may raise, and then there is none; "key-refused" never does."""
_GONE: Final = ".gone"
_MODE: Final = "encryption"
_NAMES: Final = "names"
_TENANT: Final = b"perdure/1/tenant-key\0"
_SEGMENT: Final = b"perdure/1/segment-key\0"
_DATA: Final = b"perdure/1/tenant-data\0"


@dataclass(frozen=True, slots=True)
class SegmentKey:
    """key_id: 16 bytes, in every header that it protects."""

    key_id: bytes
    cipher: AESGCM


def key_id(key: bytes) -> bytes:
    return derive(key, "perdure/1/key-id")[: limits.id_bytes]


class Keystore:
    """`kek` is called when the first key is needed: a store without encrypted segments asks nobody."""

    def __init__(
        self,
        folder: Path,
        kek: Callable[[], Kek],
        encrypts: Callable[[bytes], bool] = lambda tenant: True,
        monotonic: Callable[[], float] = time.monotonic,
        mode: str = "on",
    ):
        """encrypts: whether new segments of a tenant (by its id) are encrypted. mode: the setting that says so."""
        self.encrypts, self.mode = encrypts, mode
        self.tell: Tell = lambda op, tenant, why: None  # set by the store that has an audit log
        self._folder, self._make_kek, self._monotonic = folder, kek, monotonic
        self._kek: Kek | None = None
        self._tenants: dict[bytes, tuple[bytes, float]] = {}  # key, trusted until
        self._segments: dict[bytes, tuple[bytes, SegmentKey]] = {}  # tenant, key
        self._refused: dict[bytes, tuple[KeyUnavailable, float]] = {}  # until when nobody is asked again
        self._asked: dict[tuple[bytes, bool], Future[bytes]] = {}  # on their way
        self._lock, self._kek_lock = threading.RLock(), threading.Lock()

    # --- use
    def create(self, tenant: bytes, segment: bytes) -> SegmentKey:
        """The key of a new segment. Raises KeyUnavailable."""
        parent = self._tenant(tenant, create=True)
        path, key = self._of_segment(segment), secrets.token_bytes(KEY_BYTES)
        with self._lock:
            if _gone(self._of_tenant(tenant)).exists():
                raise KeyDestroyed(f"{tenant.hex()}: the key was destroyed")
            try:
                self._write(path, seal(parent, key, _SEGMENT + tenant + segment))
            except OSError as error:
                raise KeyUnavailable(f"{path}: cannot be written ({error})") from error
            return self._keep(tenant, segment, key)

    def key(self, tenant: bytes, segment: bytes, until: float | None = None) -> SegmentKey:
        """The key of a segment. Raises KeyUnavailable, KeyDestroyed; TimeoutError, at `until` (monotonic seconds)."""
        known = self._segments.get(segment)
        trusted = self._tenants.get(tenant)
        if known is not None and known[0] == tenant and trusted is not None and self._monotonic() < trusted[1]:
            return known[1]
        parent = self._tenant(tenant, until=until)
        with self._lock:
            known = self._segments.get(segment)
            if known is not None and known[0] == tenant:
                return known[1]
            if _gone(self._of_tenant(tenant)).exists():
                raise KeyDestroyed(f"{tenant.hex()}: the key was destroyed")
            sealed = self._read(self._of_segment(segment))
            return self._keep(tenant, segment, unseal(parent, sealed, _SEGMENT + tenant + segment))

    def _keep(self, tenant: bytes, segment: bytes, key: bytes) -> SegmentKey:
        made = SegmentKey(key_id(key), AESGCM(key))
        self._segments[segment] = (tenant, made)
        return made

    def _tenant(self, tenant: bytes, *, create: bool = False, until: float | None = None) -> bytes:
        with self._lock:
            known = self._tenants.get(tenant)
            if known is not None and self._monotonic() < known[1]:
                return known[0]
            self._forget(tenant)
            refusal = self._refused.get(tenant)
            if refusal is not None and self._monotonic() < refusal[1]:
                raise KeyUnavailable(str(refusal[0]))
            asked = self._ask(tenant, create)
        return asked.result(None if until is None else max(0.0, until - time.monotonic()))

    def renew(self) -> None:
        """Ask again for the keys that are used, without waiting; until they are trusted no more, the old ones serve."""
        with self._lock:
            soon = self._monotonic() + limits.key_lease_s / 2
            for tenant in [tenant for tenant, (_, until) in self._tenants.items() if until < soon]:
                self._ask(tenant, create=False)

    def _ask(self, tenant: bytes, create: bool) -> Future[bytes]:
        """With the lock held. In a thread of its own, once for all who want to know."""
        asked = self._asked.get((tenant, create))
        if asked is None:
            asked = self._asked[tenant, create] = Future()
            threading.Thread(target=self._answer, args=(tenant, create, asked), name="perdure-kek", daemon=True).start()
        return asked

    def _answer(self, tenant: bytes, create: bool, asked: Future[bytes]) -> None:
        try:
            key = self._unwrapped(tenant, create)
        except Exception as error:  # noqa: BLE001 (whoever waits is told)
            with self._lock:
                del self._asked[tenant, create]
                if not isinstance(error, KeyDestroyed):
                    refusal = KeyUnavailable(str(error))
                    self._refused[tenant] = (refusal, self._monotonic() + limits.key_retry_s)
            self.tell("key-refused", tenant, str(error))
            asked.set_exception(error if isinstance(error, KeyUnavailable) else KeyUnavailable(repr(error)))
            return
        with self._lock:
            del self._asked[tenant, create]
            destroyed = _gone(self._of_tenant(tenant)).exists()
            if not destroyed:
                self._tenants[tenant] = (key, self._monotonic() + limits.key_lease_s)
        if destroyed:
            asked.set_exception(KeyDestroyed(f"{tenant.hex()}: the key was destroyed"))
        else:
            asked.set_result(key)

    def _unwrapped(self, tenant: bytes, create: bool) -> bytes:
        path = self._of_tenant(tenant)
        with self._kek_lock:
            kek = self._kek = self._kek or self._make_kek()
        with self._lock:
            new = create and not path.exists() and not _gone(path).exists()
            sealed = b"" if new else self._read(path)
        if not new:
            try:
                return kek.unwrap(sealed, _TENANT + tenant)
            except KeyUnavailable:
                again = self._read(path)
                if again == sealed:
                    raise
                return kek.unwrap(again, _TENANT + tenant)  # a rotation was faster
        key = secrets.token_bytes(KEY_BYTES)
        wrapped = kek.wrap(key, _TENANT + tenant)
        self.tell("key-create", tenant, "")
        try:
            with self._lock:
                first = PosixFiles(str(self._folder)).write_once(f"tenants/{path.name}", wrapped)
        except OSError as error:
            raise KeyUnavailable(f"{path}: cannot be written ({error})") from error
        return key if first else kek.unwrap(self._read(path), _TENANT + tenant)

    def forget(self, tenant: bytes) -> None:
        """Another process has destroyed its key: let go of it here."""
        with self._lock:
            self._forget(tenant)

    def _forget(self, tenant: bytes) -> None:
        self._tenants.pop(tenant, None)
        self._segments = {name: one for name, one in self._segments.items() if one[0] != tenant}

    def names(self, tenant: bytes, *, create: bool) -> bytes | None:
        """What the names of a tenant's blocks are made from; None: it has none, or it was destroyed.

        Raises KeyUnavailable."""
        path = self._folder / _NAMES / tenant.hex()
        try:
            with self._lock:
                if not path.exists():
                    if not create or _gone(self._of_tenant(tenant)).exists():
                        return None
                    # of several processes that share the folder the first one wins
                    PosixFiles(str(self._folder)).write_once(f"{_NAMES}/{path.name}", secrets.token_bytes(KEY_BYTES))
                found = path.read_bytes()
        except OSError as error:
            raise KeyUnavailable(f"{path}: {error}; restore the keystore from its backup") from error
        if len(found) != KEY_BYTES:
            raise KeyUnavailable(f"{path}: {len(found)} bytes, {KEY_BYTES} expected; restore it from a backup")
        return found

    def has(self, segment: bytes) -> bool:
        """Whether there is a key of this segment."""
        return self._of_segment(segment).exists()

    # --- small data of a tenant's, kept elsewhere
    def seal(self, tenant: bytes, data: bytes) -> bytes:
        """Raises KeyUnavailable."""
        return seal(self._tenant(tenant, create=True), data, _DATA + tenant)

    def unseal(self, tenant: bytes, sealed: bytes) -> bytes:
        """Raises KeyUnavailable, KeyDestroyed."""
        return unseal(self._tenant(tenant), sealed, _DATA + tenant)

    # --- end of keys
    def gone(self, tenant: bytes, segment: bytes) -> bool:
        """Whether a segment's key, or its tenant's, was destroyed on purpose."""
        return _gone(self._of_tenant(tenant)).exists() or _gone(self._of_segment(segment)).exists()

    def destroy_tenant(self, tenant: bytes) -> None:
        """Nothing that the tenant has stored can be read or named again, and nothing new be encrypted. Idempotent."""
        with self._lock:
            self._forget(tenant)
            _destroy(self._of_tenant(tenant), mark=True)
            _destroy(self._folder / _NAMES / tenant.hex(), mark=False)

    def destroy_segment(self, segment: bytes) -> None:
        """Nothing in the segment can be read again. Idempotent."""
        with self._lock:
            self._segments.pop(segment, None)
            _destroy(self._of_segment(segment), mark=True)

    def drop(self, segment: bytes) -> None:
        """The segment has been deleted: neither its key nor a mark is needed."""
        with self._lock:
            self._segments.pop(segment, None)
            path = self._of_segment(segment)
            _destroy(path, mark=False)
            _gone(path).unlink(missing_ok=True)

    def tidy(self, alive: Callable[[bytes], bool]) -> int:
        """What a process that died left behind: half-written files, destructions that were cut off, and keys of
        segments that are not `alive`; how many of the last. Raises KeyUnavailable."""
        try:
            with self._lock:
                for path in self._folder.glob("**/*.tmp"):
                    _wipe(path)
                for mark in self._folder.glob(f"**/*{_GONE}"):
                    _wipe(mark.with_suffix(""))
                    _wipe(self._folder / _NAMES / mark.stem)
                stems = {one.stem for one in self._folder.glob("segments/*/*") if len(one.stem) == 2 * limits.id_bytes}
                orphans = [segment for segment in map(bytes.fromhex, stems) if not alive(segment)]
                for segment in orphans:
                    self.drop(segment)
                return len(orphans)
        except OSError as error:
            raise KeyUnavailable(f"{self._folder}: cannot be tidied ({error}); check owner, mode, mount") from error

    # --- the KEK
    def rotate(self) -> int:
        """A new KEK: wraps every tenant's key anew, then destroys the old one. No data is rewritten. How many tenants.

        Cut off anywhere, it can be done again: until its end both versions open what they have wrapped."""
        with self._lock, self._kek_lock:
            kek = self._kek = self._kek or self._make_kek()
            kek.rotate()
            count = 0
            for path in sorted((self._folder / "tenants").glob("*")):
                if len(path.name) != 2 * limits.id_bytes or _gone(path).exists():
                    continue
                context = _TENANT + bytes.fromhex(path.name)
                wrapped = self._read(path)
                if not kek.is_newest(wrapped):
                    self._write(path, kek.wrap(kek.unwrap(wrapped, context), context))
                count += 1
            kek.retire()
            return count

    # --- files
    def _of_tenant(self, tenant: bytes) -> Path:
        return self._folder / "tenants" / tenant.hex()

    def _of_segment(self, segment: bytes) -> Path:
        name = segment.hex()
        return self._folder / "segments" / name[-2:] / name

    def _write(self, path: Path, data: bytes) -> None:
        for folder in (path.parent.parent, path.parent):
            if not folder.is_dir():
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                sync_folder(folder.parent)
        write_new(path, data)

    def _read(self, path: Path) -> bytes:
        if _gone(path).exists():
            raise KeyDestroyed(f"{path.name}: the key was destroyed")
        try:
            return path.read_bytes()
        except OSError as error:
            raise KeyUnavailable(f"{path}: {error.strerror}; restore the keystore from its backup") from None


def _gone(path: Path) -> Path:
    return path.with_name(path.name + _GONE)


def _destroy(path: Path, *, mark: bool) -> None:
    """The mark first: a crash must not leave a key that is neither there nor known to be gone."""
    if mark:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_new(_gone(path), b"")
    for unfinished in path.parent.glob(f"{path.name}.*.tmp"):
        _wipe(unfinished)
    _wipe(path)


def _wipe(path: Path) -> None:
    """Overwrite, sync and unlink, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        overwrite(path)
        path.unlink()
        sync_folder(path.parent)


def rotate(keys: Keystore, audit: AuditLog | None) -> int:
    """`keys.rotate`, recorded. Raises KeyUnavailable, AuditUnavailable."""
    if audit is not None:
        audit.guard()
    count = keys.rotate()
    if audit is not None:
        audit.append(Event("key-rotate", counts={"tenants": count}), durable=True)
    return count


def open_keystore(
    directory: Path, root_secret: bytes, read_only: bool, shared: bool, *, encryption: str = "auto", kek: str = ""
) -> Keystore:
    """The keys of a store. encryption: "on", "off", "tenants:NAME,NAME" or "auto" (as last time, at first off).

    shared: other processes may use the store, on other hosts too. kek: see `kek_of`. Raises InvalidArgument,
    ConfigError, KeyUnavailable."""
    folder = directory / "keystore"
    check_encryption(encryption)
    try:
        encryption = lasting(folder / _MODE, "auto" if read_only else encryption, "off")
    except OSError as error:
        raise KeyUnavailable(f"{folder}: {error}; check owner, mode, mount") from error
    if shared and encryption != "off" and not read_only:
        agree(kek, folder)
    everyone = encryption == "on"
    ids = {tenant_id(tenant_secret(root_secret, name)) for name in check_encryption(encryption)}
    return Keystore(folder, lambda: kek_of(kek, folder), lambda tenant: everyone or tenant in ids, mode=encryption)


def check_encryption(encryption: str) -> list[str]:
    """The tenants that are named. Raises InvalidArgument."""
    names = [one for one in encryption.removeprefix("tenants:").split(",") if one]
    if encryption in ("auto", "on", "off"):
        return []
    if not (encryption.startswith("tenants:") and names):
        raise InvalidArgument(f"encryption={encryption!r}: must be auto, on, off or tenants:NAME,NAME")
    return names
