"""The keys of one store: KEK -> tenant key -> segment key, each random, each kept wrapped by the one before.

    DIR/keystore/kek.json                  the file provider's default place
    DIR/keystore/tenants/<tenant>          wrapped by the KEK; <tenant>.gone: destroyed
    DIR/keystore/segments/<xx>/<segment>   wrapped by the tenant's key; .gone: destroyed

Contract
- A key is durable before the first byte that it protects is written, and is written once. The folder is small, and is
  to be left out of snapshots and backups that outlive an erasure.
- Random keys, never derived: a destroyed one is gone for everybody. Destroying overwrites, syncs, unlinks and leaves a
  mark, first; on flash the old bytes may survive the overwriting, wrapped.
- `key id` = HMAC of the key: a file with another key in it is found, and a ciphertext is bound to one key.
- Unwrapped tenant keys are trusted for `limits.key_lease_s`, then asked for again: a KEK that is gone denies everything
  soon, one that is slow costs `limits.key_service_s`, once in `limits.key_retry_s`.
- Raises KeyUnavailable, KeyDestroyed; thread-safe.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from perdure import limits
from perdure.errors import InvalidArgument, KeyDestroyed, KeyUnavailable
from perdure.governance.audit import AuditLog, Event
from perdure.governance.audit_files import sync_folder, write_new
from perdure.governance.kek import KEY_BYTES, Kek, kek_of, seal, unseal
from perdure.keys import derive, tenant_id, tenant_secret

_GONE: Final = ".gone"
_TENANT: Final = b"perdure/1/tenant-key\0"
_SEGMENT: Final = b"perdure/1/segment-key\0"


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
    ):
        """encrypts: whether new segments of a tenant (by its id) are encrypted."""
        self.encrypts = encrypts
        self._folder, self._make_kek, self._monotonic = folder, kek, monotonic
        self._kek: Kek | None = None
        self._tenants: dict[bytes, tuple[bytes, float]] = {}  # key, trusted until
        self._segments: dict[bytes, tuple[bytes, SegmentKey]] = {}  # tenant, key
        self._refused: dict[bytes, tuple[KeyUnavailable, float]] = {}  # until when nobody is asked again
        self._lock = threading.RLock()

    # --- use
    def create(self, tenant: bytes, segment: bytes) -> SegmentKey:
        """The key of a new segment. Raises KeyUnavailable."""
        with self._lock:
            parent, path, key = (
                self._tenant(tenant, create=True),
                self._of_segment(segment),
                secrets.token_bytes(KEY_BYTES),
            )
            try:
                self._write(path, seal(parent, key, _SEGMENT + tenant + segment))
            except OSError as error:
                raise KeyUnavailable(f"{path}: cannot be written ({error})") from error
            return self._keep(tenant, segment, key)

    def key(self, tenant: bytes, segment: bytes) -> SegmentKey:
        """The key of a segment. Raises KeyUnavailable, KeyDestroyed."""
        known = self._segments.get(segment)
        trusted = self._tenants.get(tenant)
        if known is not None and known[0] == tenant and trusted is not None and self._monotonic() < trusted[1]:
            return known[1]
        with self._lock:
            parent = self._tenant(tenant)
            known = self._segments.get(segment)
            if known is not None and known[0] == tenant:
                return known[1]
            sealed = self._read(self._of_segment(segment))
            return self._keep(tenant, segment, unseal(parent, sealed, _SEGMENT + tenant + segment))

    def _keep(self, tenant: bytes, segment: bytes, key: bytes) -> SegmentKey:
        made = SegmentKey(key_id(key), AESGCM(key))
        self._segments[segment] = (tenant, made)
        return made

    def _tenant(self, tenant: bytes, *, create: bool = False) -> bytes:
        """With the lock held."""
        known = self._tenants.get(tenant)
        if known is not None and self._monotonic() < known[1]:
            return known[0]
        self._forget(tenant)
        refusal = self._refused.get(tenant)
        if refusal is not None and self._monotonic() < refusal[1]:
            raise KeyUnavailable(str(refusal[0]))
        try:
            key = self._asked(tenant, create)
        except KeyDestroyed:
            raise
        except KeyUnavailable as error:
            self._refused[tenant] = (error, self._monotonic() + limits.key_retry_s)
            raise
        self._tenants[tenant] = (key, self._monotonic() + limits.key_lease_s)
        return key

    def _asked(self, tenant: bytes, create: bool) -> bytes:
        path = self._of_tenant(tenant)
        kek = self._kek = self._kek or self._make_kek()
        if create and not path.exists() and not _gone(path).exists():
            key = secrets.token_bytes(KEY_BYTES)
            try:
                self._write(path, kek.wrap(key, _TENANT + tenant))
            except OSError as error:
                raise KeyUnavailable(f"{path}: cannot be written ({error})") from error
            return key
        return kek.unwrap(self._read(path), _TENANT + tenant)

    def _forget(self, tenant: bytes) -> None:
        self._tenants.pop(tenant, None)
        self._segments = {name: one for name, one in self._segments.items() if one[0] != tenant}

    # --- end of keys
    def gone(self, tenant: bytes, segment: bytes) -> bool:
        """Whether a segment's key, or its tenant's, was destroyed on purpose."""
        return _gone(self._of_tenant(tenant)).exists() or _gone(self._of_segment(segment)).exists()

    def destroy_tenant(self, tenant: bytes) -> None:
        """Nothing that the tenant has stored can be read again, and nothing new be encrypted. Idempotent."""
        with self._lock:
            self._forget(tenant)
            _destroy(self._of_tenant(tenant), mark=True)

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

    def sweep(self, alive: Callable[[bytes], bool]) -> int:
        """Drop the keys of segments that do not exist (a process died between the two); how many."""
        stems = {path.stem for path in self._folder.glob("segments/*/*") if len(path.stem) == 2 * limits.id_bytes}
        orphans = [segment for segment in map(bytes.fromhex, stems) if not alive(segment)]
        for segment in orphans:
            self.drop(segment)
        return len(orphans)

    # --- the KEK
    def rotate(self) -> int:
        """A new KEK: wraps every tenant's key anew, then destroys the old one. No data is rewritten. How many tenants.

        Cut off anywhere, it can be done again: until its end both versions open what they have wrapped."""
        with self._lock:
            kek = self._kek = self._kek or self._make_kek()
            kek.rotate()
            count = 0
            for path in sorted((self._folder / "tenants").glob("*")):
                if path.suffix or len(path.name) != 2 * limits.id_bytes:
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
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, secrets.token_bytes(os.fstat(descriptor).st_size), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
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


def open_keystore(directory: Path, root_secret: bytes, encryption: str = "off", kek: str = "") -> Keystore:
    """The keys of a store. encryption: "on", "off" or "tenants:NAME,NAME"; kek: see `kek_of`.

    Raises InvalidArgument."""
    names = [one for one in encryption.removeprefix("tenants:").split(",") if one]
    if encryption not in ("on", "off") and not (encryption.startswith("tenants:") and names):
        raise InvalidArgument(f"encryption={encryption!r}: must be on, off or tenants:NAME,NAME")
    everyone = encryption == "on"
    ids = set() if encryption in ("on", "off") else {tenant_id(tenant_secret(root_secret, name)) for name in names}
    folder = directory / "keystore"
    return Keystore(folder, lambda: kek_of(kek, folder), lambda tenant: everyone or tenant in ids)
