"""Encryption at rest: keys, their ends, and blocks that are tampered with, swapped or without their key."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import perdure
from perdure import Store, limits
from perdure.cli import main
from perdure.errors import CatalogError, ConfigError, InvalidArgument, KeyDestroyed, KeyUnavailable
from perdure.governance import audit_look, kek_pkcs11
from perdure.governance.kek import FileKek, Kek, VaultKek, kek_of
from perdure.governance.keystore import Keystore
from perdure.keys import tenant_id, tenant_secret
from perdure.segments import format as fmt
from perdure.testing.store import (
    BLOCK_BYTES,
    CORRUPT,
    DENIED,
    FOUND,
    MISSING,
    STORED,
    StoreConformance,
    block_of,
    blocks_of,
    chain,
    keyspace,
    read,
    write,
)

TENANT, OTHER = b"t" * 16, b"o" * 16
BAD_URIS = [
    "pkcs11:", "pkcs11:token=t;object=o", "pkcs11:token=t;object=o?module-path=/m&pin-source=relative",
    "pkcs11:token=t;object=o?module-path=/m&pin-value=1234",
    "pkcs11:token=t;token=u;object=o?module-path=/m&pin-source=/p",
]  # fmt: skip
SEGMENTS = [bytes([number]) * 16 for number in range(1, 4)]


class TestEncrypted(StoreConformance):
    def make_store(self, directory: Path, **options: Any) -> Store:
        return perdure.open(directory, encryption="on", **options)


# --- the keystore
class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def keystore(folder: Path, clock: Clock | None = None, kek: Callable[[], Kek] | None = None) -> Keystore:
    return Keystore(folder, kek or (lambda: kek_of("", folder)), monotonic=clock or Clock())


def test_keys_come_back_and_are_all_different(tmp_path: Path) -> None:
    keys = keystore(tmp_path)
    made = {segment: keys.create(TENANT, segment).key_id for segment in SEGMENTS}
    assert len(set(made.values())) == 3
    again = keystore(tmp_path)
    assert {segment: again.key(TENANT, segment).key_id for segment in SEGMENTS} == made
    with pytest.raises(KeyUnavailable):
        again.key(OTHER, SEGMENTS[0])
    assert all(path.stat().st_mode & 0o77 == 0 for path in tmp_path.rglob("*"))


def test_another_file_in_its_place_is_no_key(tmp_path: Path) -> None:
    keys = keystore(tmp_path)
    for segment in SEGMENTS[:2]:
        keys.create(TENANT, segment)
    one, other = sorted(path for path in tmp_path.glob("segments/*/*"))
    shutil.copy(one, other)
    with pytest.raises(KeyUnavailable):
        keystore(tmp_path).key(TENANT, SEGMENTS[1])
    for length in (0, 5, 30):
        one.write_bytes(other.read_bytes()[:length])
        with pytest.raises(KeyUnavailable):
            keystore(tmp_path).key(TENANT, SEGMENTS[0])


def test_what_is_destroyed_is_gone_and_says_so(tmp_path: Path) -> None:
    keys = keystore(tmp_path)
    for segment in SEGMENTS:
        keys.create(TENANT, segment)
    keys.destroy_segment(SEGMENTS[0])
    keys.destroy_segment(SEGMENTS[0])
    for one in (keys, keystore(tmp_path)):
        assert one.gone(TENANT, SEGMENTS[0])
        assert not one.gone(TENANT, SEGMENTS[1])
        with pytest.raises(KeyDestroyed):
            one.key(TENANT, SEGMENTS[0])
        one.key(TENANT, SEGMENTS[1])
    keys.destroy_tenant(TENANT)
    for one in (keys, keystore(tmp_path)):
        assert one.gone(TENANT, SEGMENTS[1])
        with pytest.raises(KeyDestroyed):
            one.key(TENANT, SEGMENTS[1])
        with pytest.raises(KeyDestroyed):
            one.create(TENANT, SEGMENTS[2])
    assert keys.tidy(lambda segment: segment == SEGMENTS[1]) == 2
    assert [path.stem for path in tmp_path.glob("segments/*/*")] == [SEGMENTS[1].hex()]


def test_a_destruction_that_was_cut_off_is_finished(tmp_path: Path) -> None:
    keys = keystore(tmp_path)
    for segment in SEGMENTS:
        keys.create(TENANT, segment)
    (tenant,) = (tmp_path / "tenants").iterdir()
    left = tenant.with_name(f"{tenant.name}.0011223344ff.tmp")  # of a rotation that was cut off before
    shutil.copy(tenant, left)
    tenant.with_name(tenant.name + ".gone").touch()
    again = keystore(tmp_path)
    with pytest.raises(KeyDestroyed):
        again.key(TENANT, SEGMENTS[0])
    assert again.rotate() == 0
    again.tidy(lambda segment: True)
    assert [path.suffix for path in (tmp_path / "tenants").iterdir()] == [".gone"]
    keys.create(OTHER, b"n" * 16)
    (other,) = (path for path in (tmp_path / "tenants").iterdir() if not path.suffix)
    shutil.copy(other, other.with_name(f"{other.name}.0011223344ff.tmp"))
    keys.destroy_tenant(OTHER)
    assert {path.suffix for path in (tmp_path / "tenants").iterdir()} == {".gone"}


class SlowKek(FileKek):
    """A key service that answers when it is let."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, create=True)
        self.let, self.asked = threading.Event(), 0
        self.let.set()

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        self.asked += 1
        assert self.let.wait(60)
        return super().unwrap(wrapped, context)


def test_a_slow_key_service_costs_only_who_needs_it_first(tmp_path: Path) -> None:
    kek, clock = SlowKek(tmp_path / "kek.json"), Clock()
    keystore(tmp_path, kek=lambda: kek).create(TENANT, SEGMENTS[0])
    keys = keystore(tmp_path, clock, lambda: kek)
    keys.create(OTHER, SEGMENTS[1])
    kek.let.clear()
    with pytest.raises(TimeoutError):
        keys.key(TENANT, SEGMENTS[0], time.monotonic() + 0.01)
    keys.key(OTHER, SEGMENTS[1])
    keys.create(OTHER, SEGMENTS[2])
    asked = kek.asked
    with pytest.raises(TimeoutError):
        keys.key(TENANT, SEGMENTS[0], time.monotonic())
    assert kek.asked == asked == 1
    clock.now += limits.key_lease_s * 0.75
    keys.renew()
    keys.key(OTHER, SEGMENTS[1], time.monotonic())  # trusted still
    kek.let.set()
    keys.key(TENANT, SEGMENTS[0])
    while keys._asked:
        time.sleep(0.001)
    clock.now += limits.key_lease_s * 0.75
    kek.let.clear()
    keys.key(OTHER, SEGMENTS[1], time.monotonic())  # renewed
    kek.let.set()


class _Cut(Exception):
    pass


class CutKek(FileKek):
    """Dies at its `left`-th change."""

    left = 1 << 30

    def _write(self, keys: dict[str, str], newest: str) -> None:
        self._step()
        super()._write(keys, newest)

    def wrap(self, key: bytes, context: bytes) -> bytes:
        self._step()
        return super().wrap(key, context)

    def _step(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise _Cut


def test_rotation_cut_off_at_every_step(tmp_path: Path) -> None:
    """No data and no segment's key is rewritten; at its end the old key opens nothing."""
    for step in range(1, 8):
        folder = tmp_path / str(step)
        kek = CutKek(folder / "kek.json", create=True)
        keys = keystore(folder, kek=lambda kek=kek: kek)
        ids = [keys.create(tenant, segment).key_id for tenant, segment in zip((TENANT, OTHER), SEGMENTS, strict=False)]
        files = {path: path.read_bytes() for path in folder.glob("segments/*/*")}
        old = (folder / "kek.json").read_bytes()
        os.link(folder / "kek.json", folder / "kept")
        kek.left = step
        try:
            assert keys.rotate() == 2
        except _Cut:
            again = keystore(folder)
            assert [again.key(*pair).key_id for pair in zip((TENANT, OTHER), SEGMENTS, strict=False)] == ids
            assert again.rotate() == 2
        kek.left = 1 << 30
        again = keystore(folder)
        assert [again.key(*pair).key_id for pair in zip((TENANT, OTHER), SEGMENTS, strict=False)] == ids
        assert {path: path.read_bytes() for path in folder.glob("segments/*/*")} == files
        assert (folder / "kept").read_bytes() != old  # overwritten, not only replaced
        (folder / "kek.json").write_bytes(old)
        with pytest.raises(KeyUnavailable):
            keystore(folder).key(TENANT, SEGMENTS[0])


def test_hosts_with_a_key_file_each_are_told_apart(tmp_path: Path) -> None:
    """At their first start each makes one; the first counts, a copy of it is as good, also after it was rotated."""
    folder, files = tmp_path / "keystore", [tmp_path / name / "kek.json" for name in ("one", "two", "three")]
    folder.mkdir()
    one = kek_of(f"file:{files[0]}", folder)
    with pytest.raises(KeyUnavailable, match=r"two/kek\.json: is another key file .*put a copy of that one here"):
        kek_of(f"file:{files[1]}", folder)
    keystore(folder, kek=lambda: one).create(TENANT, SEGMENTS[0])
    with pytest.raises(KeyUnavailable, match="another key file"):
        kek_of(f"file:{files[1]}", folder)
    with pytest.raises(KeyUnavailable, match="missing; restore it"):
        kek_of(f"file:{files[2]}", folder)
    keystore(folder, kek=lambda: one).rotate()
    shutil.copy(files[0], files[1])
    two = kek_of(f"file:{files[1]}", folder)
    assert keystore(folder, kek=lambda: two).key(TENANT, SEGMENTS[0])
    files[0].write_text(files[0].read_text().replace(', "name": "', ', "other": "'))  # as before files had names
    assert keystore(folder, kek=lambda: kek_of(f"file:{files[0]}", folder)).key(TENANT, SEGMENTS[0])


def test_a_kek_that_is_gone_denies_after_the_lease(tmp_path: Path) -> None:
    clock = Clock()
    keys = keystore(tmp_path, clock)
    keys.create(TENANT, SEGMENTS[0])
    kept = (tmp_path / "kek.json").read_bytes()
    (tmp_path / "kek.json").unlink()
    keys.key(TENANT, SEGMENTS[0])
    clock.now += limits.key_lease_s
    with pytest.raises(KeyUnavailable):
        keys.key(TENANT, SEGMENTS[0])
    (tmp_path / "kek.json").write_bytes(kept)
    with pytest.raises(KeyUnavailable):  # not asked again so soon
        keys.key(TENANT, SEGMENTS[0])
    clock.now += limits.key_retry_s
    keys.key(TENANT, SEGMENTS[0])
    (tmp_path / "kek.json").unlink()
    with pytest.raises(KeyUnavailable, match="missing"):  # not made anew where there are keys
        keystore(tmp_path).create(TENANT, SEGMENTS[1])


class Transit:
    """What of Vault's transit engine is used."""

    def __init__(self) -> None:
        self.version, self.least, self.down = 1, 1, False

    def _check(self, name: str, mount_point: str) -> None:
        assert (name, mount_point) == ("perdure", "transit")
        if self.down:
            raise TimeoutError("read timed out")

    def encrypt_data(self, name: str, plaintext: str, mount_point: str) -> Any:
        self._check(name, mount_point)
        hidden = base64.b64encode(bytes(byte ^ self.version for byte in plaintext.encode())).decode()
        return {"data": {"ciphertext": f"vault:v{self.version}:{hidden}"}}

    def decrypt_data(self, name: str, ciphertext: str, mount_point: str) -> Any:
        self._check(name, mount_point)
        _, version, hidden = ciphertext.split(":")
        if int(version[1:]) < self.least:
            raise ValueError("ciphertext version is disallowed by policy (too old)")
        return {"data": {"plaintext": bytes(byte ^ int(version[1:]) for byte in base64.b64decode(hidden)).decode()}}

    def read_key(self, name: str, mount_point: str) -> Any:
        self._check(name, mount_point)
        return {"data": {"latest_version": self.version}}

    def rotate_key(self, name: str, mount_point: str) -> None:
        self._check(name, mount_point)
        self.version += 1

    def update_key_configuration(
        self, name: str, mount_point: str, min_decryption_version: int, min_encryption_version: int
    ) -> None:
        self._check(name, mount_point)
        self.least = min_decryption_version


def test_vault_wraps_and_is_rotated(tmp_path: Path) -> None:
    transit = Transit()
    client = SimpleNamespace(secrets=SimpleNamespace(transit=transit))
    kek = VaultKek("https://vault.invalid:8200", "perdure", client=client)
    clock = Clock()
    keys = keystore(tmp_path, clock, lambda: kek)
    made = keys.create(TENANT, SEGMENTS[0]).key_id
    wrapped = kek.wrap(b"k" * 32, b"context")
    assert keys.rotate() == 1
    assert (transit.version, transit.least) == (2, 2)
    assert keystore(tmp_path, kek=lambda: kek).key(TENANT, SEGMENTS[0]).key_id == made
    for bad in (wrapped, kek.wrap(b"k" * 32, b"other")):
        with pytest.raises(KeyUnavailable):
            kek.unwrap(bad, b"context")
    transit.down = True
    clock.now += limits.key_lease_s
    with pytest.raises(KeyUnavailable, match="timed out"):
        keys.key(TENANT, SEGMENTS[0])


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Makes a token of SoftHSM 2 and says its URI. The library reads its configuration once in a process."""
    pkcs11 = pytest.importorskip("pkcs11")
    tool, library = shutil.which("softhsm2-util"), Path("/usr/lib/softhsm/libsofthsm2.so")
    if tool is None or not library.exists():
        pytest.skip("softhsm2 is not installed (make tools)")
    folder = tmp_path_factory.mktemp("softhsm")
    (folder / "tokens").mkdir()
    (folder / "conf").write_text(f"directories.tokendir = {folder / 'tokens'}\nlog.level = ERROR\n")
    (folder / "pin").write_text("1234\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTHSM2_CONF", str(folder / "conf"))

        def token(label: str) -> str:
            command = [tool, "--init-token", "--free", "--label", label, "--pin", "1234", "--so-pin", "5678"]
            subprocess.run(command, check=True, capture_output=True)
            pkcs11.lib(str(library)).reinitialize()  # a token made later is seen then
            return f"pkcs11:token={label};object=perdure?module-path={library}&pin-source=file:{folder / 'pin'}"

        yield token


def test_a_hardware_module_wraps_and_is_rotated(tmp_path: Path, module: Callable[[str], str]) -> None:
    uri = module("rotated")
    keys = keystore(tmp_path, kek=lambda: kek_of(uri, tmp_path))
    made = [keys.create(tenant, segment).key_id for tenant, segment in zip((TENANT, OTHER), SEGMENTS, strict=False)]
    assert not (tmp_path / "kek.json").exists()
    kek = kek_of(uri, tmp_path)
    wrapped = kek.wrap(b"k" * 32, b"context")
    assert b"k" * 32 not in wrapped
    assert kek.unwrap(wrapped, b"context") == b"k" * 32
    assert kek.is_newest(wrapped)
    for bad, context in ((wrapped, b"other"), (wrapped[:-1], b"context"), (wrapped[:-1] + b"?", b"context")):
        with pytest.raises(KeyUnavailable):
            kek.unwrap(bad, context)
    kek.rotate()
    assert not kek.is_newest(wrapped)
    assert kek.unwrap(wrapped, b"context") == b"k" * 32
    assert keys.rotate() == 2
    with pytest.raises(KeyUnavailable, match="has no version"):
        kek.unwrap(wrapped, b"context")
    again = keystore(tmp_path, kek=lambda: kek_of(uri, tmp_path))
    assert [again.key(*pair).key_id for pair in zip((TENANT, OTHER), SEGMENTS, strict=False)] == made
    with pytest.raises(KeyUnavailable, match="missing"):  # not made anew where there are keys
        kek_of(module("empty"), tmp_path)
    with pytest.raises(KeyUnavailable):
        kek_of(uri.replace("token=rotated", "token=absent"), tmp_path)


def test_a_hardware_module_that_hangs_is_waited_for_a_bounded_time(
    tmp_path: Path, module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kek = kek_of(module("slow"), tmp_path)
    monkeypatch.setattr(limits, "key_service_s", 0.05)
    with kek_pkcs11._ONE_AT_A_TIME, pytest.raises(KeyUnavailable, match="no answer"):
        kek.wrap(b"k" * 32, b"context")
    monkeypatch.setattr(limits, "key_service_s", 60.0)
    assert kek.unwrap(kek.wrap(b"k" * 32, b"context"), b"context") == b"k" * 32


def test_a_store_with_its_key_in_a_hardware_module(tmp_path: Path, module: Callable[[str], str]) -> None:
    uri = module("store")
    for _ in range(2):
        with perdure.open(tmp_path, encryption="on", kek=uri) as store:
            space = keyspace(store)
            keys = chain(space, 1, 3)
            write(space, keys)
            assert read(space, keys) == [FOUND] * 3


@pytest.mark.parametrize("text", ["file:", "vault:", "vault:https://h:1", "vault:#name", "hsm:x", *BAD_URIS])
def test_bad_settings(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        kek_of(text, tmp_path)
    with pytest.raises(InvalidArgument):
        perdure.open(tmp_path / "s", encryption=text)


# --- the store
def stored_bytes(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((directory / "segments").rglob("*.seg")))


def segment_file(directory: Path) -> Path:
    (path,) = (directory / "segments").rglob("*.seg")
    return path


@pytest.mark.parametrize("memory", [0, "64MiB"])
def test_blocks_are_encrypted_and_come_back(tmp_path: Path, memory: Any) -> None:
    with perdure.open(tmp_path, encryption="on", memory=memory) as store:
        space = keyspace(store)
        keys = chain(space, 1, 5)
        assert write(space, keys) == [STORED] * 5
        more = chain(space, 2, 2)
        parts = [[block[:100], block[100:]] for block in blocks_of(more)]
        assert space.write(more, parts).stored == 2
        assert read(space, keys) == [FOUND] * 5
        headers = [stored_bytes(tmp_path)[at : at + 256] for at in range(0, 7 * 12288, 12288)]
    assert len({header[168:180] for header in headers}) == 7
    assert len({header[152:168] for header in headers}) == 1
    raw = stored_bytes(tmp_path)
    assert not any(block_of(key.tobytes(), 64) in raw for key in (*keys, *more))
    with perdure.open(tmp_path, memory=memory, encryption="off") as store:  # what is encrypted stays readable
        space = keyspace(store)
        for direct in (False, True):
            assert read(space, keys, direct=direct) == [FOUND] * 5
        split = np.zeros((2, BLOCK_BYTES), np.uint8)
        report = space.read(more, [[row[:5000], row[5000:]] for row in split], direct=True)
        assert report.usable == 2
        assert bytes(split[1]) == block_of(more[1].tobytes(), BLOCK_BYTES)
        assert store.verify()["ok"]
        plain = chain(space, 3, 1)
        write(space, plain)
        assert block_of(plain[0].tobytes(), 64) in stored_bytes(tmp_path)


def test_encryption_stays_as_it_was_asked_for_last(tmp_path: Path) -> None:
    for mode, encrypted in (("auto", 0), ("on", 1), ("auto", 1), ("off", 0), ("auto", 0), ("tenants:acme", 1)):
        with perdure.open(tmp_path, encryption=mode, memory=0) as store:
            write(keyspace(store), chain(keyspace(store), 1 + len(store.core.table.all()), 1))
            (opened,) = store.core.writer.open_segments()
            assert (opened.key is not None) == encrypted


def test_nothing_is_lost_when_an_index_is_rebuilt_without_keys(tmp_path: Path) -> None:
    """Blocks that cannot be verified for want of a key stay, and come back with it."""
    with perdure.open(tmp_path, encryption="on", memory=0) as store:
        keys = chain(keyspace(store), 1, 3)
        write(keyspace(store), keys)
    next((tmp_path / "segments").rglob("*.idx")).unlink()
    (tmp_path / "keystore/kek.json").rename(tmp_path / "kept")
    with pytest.raises(CatalogError, match="decrypted"):
        perdure.rebuild(tmp_path)
    (tmp_path / "kept").rename(tmp_path / "keystore/kek.json")
    with perdure.open(tmp_path, memory=0) as store:
        assert store.wait_ready(60)
        assert read(keyspace(store), keys) == [FOUND] * 3


def test_an_older_control_store_costs_no_key(tmp_path: Path) -> None:
    with perdure.open(tmp_path, encryption="on", memory=0) as store:
        keys = chain(keyspace(store), 1, 3)
        write(keyspace(store), keys)
        (record,) = store.core.table.all()
    (path,) = (path for path in (tmp_path / "keystore/segments").rglob("*") if path.is_file())
    with perdure.open(tmp_path, memory=0) as store:
        store.core.control.delete_segment(record.segment)
    with perdure.open(tmp_path, memory=0):
        assert path.exists()


def test_only_the_tenants_asked_for(tmp_path: Path) -> None:
    with perdure.open(tmp_path, encryption="tenants:acme", memory=0, codec="on") as store:
        for tenant in ("acme", "globex"):
            space = keyspace(store, tenant=tenant)
            write(space, chain(space, 1, 2))
            assert read(space, chain(space, 1, 2)) == [FOUND] * 2
    assert len(list((tmp_path / "keystore/tenants").iterdir())) == 1
    raw = stored_bytes(tmp_path)
    held = {t: block_of(chain(keyspace_of(tmp_path, t), 1, 1)[0].tobytes(), 64) in raw for t in ("acme", "globex")}
    assert held == {"acme": False, "globex": True}


def keyspace_of(directory: Path, tenant: str) -> Any:
    with perdure.open(directory, read_only=True, memory=0) as store:
        return keyspace(store, tenant=tenant)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("at", [15, 152, 170, 195, limits.page_bytes, limits.page_bytes + BLOCK_BYTES - 1])
def test_a_flipped_byte_is_never_delivered(tmp_path: Path, at: int, direct: bool) -> None:
    with perdure.open(tmp_path, encryption="on", memory=0) as store:
        space = keyspace(store)
        keys = chain(space, 1, 2)
        write(space, keys)
    with segment_file(tmp_path).open("r+b") as raw:
        raw.seek(at)
        byte = raw.read(1)
        raw.seek(at)
        raw.write(bytes([byte[0] ^ 1]))
    with perdure.open(tmp_path, encryption="on", memory=0) as store:
        space = keyspace(store)
        into = np.full((2, BLOCK_BYTES), 0xEE, np.uint8)
        report = space.read(keys, into, deadline_s=60.0, direct=direct)
        assert report.statuses.tolist() == [CORRUPT, FOUND]
        assert set(into[0].tolist()) <= {0xEE, 0}  # untouched, or wiped
        assert write(space, keys) == [STORED, 1]
        assert read(space, keys) == [FOUND] * 2


def test_a_payload_of_another_block_does_not_verify(tmp_path: Path) -> None:
    """Ciphertext, nonce and tag of the same tenant, moved, with a header that is right in everything else."""
    with perdure.open(tmp_path, encryption="on", memory=0) as store:
        space = keyspace(store)
        keys = chain(space, 1, 2)
        write(space, keys)
    path, size = segment_file(tmp_path), 12288
    data = bytearray(path.read_bytes())
    data[168:180], data[192:208] = data[size + 168 : size + 180], data[size + 192 : size + 208]
    data[4096:size] = data[size + 4096 : 2 * size]
    secret = fmt.segment_secret((tmp_path / "keystore/root.key").read_bytes(), bytes(data[96:112]))
    data[240:256] = fmt.header_mac(secret, bytes(data[:256]))
    path.write_bytes(data)
    with perdure.open(tmp_path, encryption="on", memory=0) as store:
        assert read(keyspace(store), keys) == [CORRUPT, FOUND]


def test_without_keys_blocks_are_denied_and_come_back_with_them(tmp_path: Path) -> None:
    with perdure.open(tmp_path, encryption="on", memory=0) as store:
        space = keyspace(store)
        keys = chain(space, 1, 3)
        write(space, keys)
    for name in ("kek.json", "tenants", "segments"):
        (tmp_path / "keystore" / name).rename(tmp_path / "kept")
        with perdure.open(tmp_path, encryption="on", memory=0) as store:
            space = keyspace(store)
            assert read(space, keys) == [DENIED] * 3
            if name == "kek.json":
                more = chain(space, 2, 1)
                assert space.write(more, blocks_of(more)).stored == 0
        if (tmp_path / "keystore" / name).exists():
            shutil.rmtree(tmp_path / "keystore" / name)
        (tmp_path / "kept").rename(tmp_path / "keystore" / name)
        with perdure.open(tmp_path, encryption="on", memory=0) as store:
            assert read(keyspace(store), keys) == [FOUND] * 3


def test_a_destroyed_key_is_a_miss_and_the_block_can_be_stored_again(tmp_path: Path) -> None:
    with perdure.open(tmp_path, encryption="on", memory=0) as store:
        space = keyspace(store)
        keys = chain(space, 1, 40)
        write(space, keys)
        store.core.writer.retire(store.core.writer.open_segments()[0])
        (record,) = store.core.table.all()
        assert store.core.segments.keys is not None
        store.core.segments.keys.destroy_segment(record.segment)
        assert read(space, keys) == [MISSING] * 40
        assert not store.core.health.sick
        assert write(space, keys) == [STORED] * 40
        assert read(space, keys) == [FOUND] * 40
        secret = tenant_secret((tmp_path / "keystore/root.key").read_bytes(), "acme")
        store.core.segments.keys.destroy_tenant(tenant_id(secret))
        assert read(space, keys) == [MISSING] * 40


def test_copies_forward_are_encrypted_anew_and_dropped_segments_take_their_key_along(tmp_path: Path) -> None:
    with perdure.open(tmp_path, encryption="on", memory=0, capacity=8 * limits.MIB, codec="on") as store:
        space = keyspace(store)
        pinned = []
        for number in range(2, 30):
            keys = chain(space, number, 32)
            write(space, keys)
            space.pin(keys[:2], ttl_s=3600)
            pinned += list(keys[:2])
        assert store.core.reclaimer.counters.blocks_copied >= 4
        assert read(space, np.array(pinned)) == [FOUND] * len(pinned)
        names = {record.segment.hex() for record in store.core.table.all()}
        assert {path.name for path in (tmp_path / "keystore/segments").rglob("*") if path.is_file()} == names
        assert store.verify()["ok"]


def test_rotation_by_command_is_recorded(tmp_path: Path) -> None:
    with perdure.open(tmp_path, encryption="on", audit="on", memory=0) as store:
        keys = chain(keyspace(store), 1, 3)
        write(keyspace(store), keys)
    before = stored_bytes(tmp_path)
    done = CliRunner().invoke(main, ["keys", "rotate", str(tmp_path)])
    assert (done.exit_code, done.output) == (0, "1 tenants' keys are wrapped by a new key; the old one is destroyed\n")
    assert stored_bytes(tmp_path) == before
    assert "key-rotate" in [event.op for _, event in audit_look.records(tmp_path / "audit")]
    with perdure.open(tmp_path, memory=0) as store:
        assert read(keyspace(store), keys) == [FOUND] * 3


def test_the_index_can_be_rebuilt(tmp_path: Path) -> None:
    with perdure.open(tmp_path, encryption="on", memory=0) as store:
        keys = chain(keyspace(store), 1, 3)
        write(keyspace(store), keys)
    next((tmp_path / "segments").rglob("*.idx")).unlink()
    assert perdure.rebuild(tmp_path)["blocks"] == 3
    with perdure.open(tmp_path, memory=0) as store:
        assert read(keyspace(store), keys) == [FOUND] * 3
