"""Objects of a bucket, and the engine that reads them beside a disk. A real S3 server: tests/test_cold_s3.py."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.cold import (
    Bucket,
)

from perdure.io.api import IOClass, IOState, Request
from perdure.io.engine import ThreadEngine
from perdure.io.files import PosixFiles
from perdure.io.objects import FaultyObjects, ObjectFile, ObjectStoreError, ObstoreObjects
from perdure.io.split import SplitEngine


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


def test_objects_are_made_once_read_in_ranges_and_deleted(bucket: Bucket) -> None:
    objects = ObstoreObjects(bucket.url)
    assert objects.create("a/b.seg", memoryview(bytes(range(100))))
    assert not objects.create("a/b.seg", memoryview(b"other"))
    assert objects.size("a/b.seg") == 100
    parts = [memoryview(bytearray(3)), memoryview(bytearray(4))]
    assert objects.read_into("a/b.seg", parts, 10) == 7
    assert b"".join(parts) == bytes(range(10, 17))
    assert objects.read_into("a/b.seg", parts, 96) == 4
    assert objects.read_into("a/b.seg", parts, 100) == objects.read_into("a/b.seg", parts, 5000) == 0
    objects.delete("a/b.seg")
    objects.delete("a/b.seg")
    for call in (lambda: objects.size("a/b.seg"), lambda: objects.read_into("a/b.seg", parts, 0)):
        with pytest.raises(FileNotFoundError):
            call()


def test_a_batch_for_disk_and_objects_is_under_way_together(bucket: Bucket, tmp_path: Path) -> None:
    """The object's request hangs until the disk's has ended; if one came after the other, neither would."""
    objects = ObstoreObjects(bucket.url)
    objects.create("o", memoryview(b"o" * 4096))
    file = PosixFiles(tmp_path).create("f")
    file.pwritev([memoryview(b"f" * 4096)], 0)
    disk_ended = threading.Event()

    class Waits(FaultyObjects):
        def read_into(self, name: str, buffers: Any, offset: int) -> int:
            assert disk_ended.wait(30.0)
            return self.inner.read_into(name, buffers, offset)

    far = Request(ObjectFile(Waits(objects, bucket), "o", 4096), 0, [memoryview(bytearray(4096))])
    near = Request(file, 0, [memoryview(bytearray(4096))])
    engine = SplitEngine(ThreadEngine(), ThreadEngine())
    ended: list[Request] = []

    def done(request: Request) -> None:
        ended.append(request)
        if request is near:
            disk_ended.set()

    with closing(engine):
        engine.run([far, near], io_class=IOClass.RESTORE, deadline=time.monotonic() + 60.0, done=done)
    assert ended == [near, far]
    assert [request.state for request in (far, near)] == [IOState.DONE] * 2
    assert bytes(far.buffers[0]) == b"o" * 4096


def test_an_object_file_is_for_reading(bucket: Bucket) -> None:
    objects = ObstoreObjects(bucket.url)
    objects.create("o", memoryview(b"o" * 10))
    file = ObjectFile(objects, "o", 10)
    assert file.size() == 10
    assert file.preadv([memoryview(bytearray(5))], 10) == 0
    for call in (
        lambda: file.pwritev([memoryview(b"x")], 0), lambda: file.truncate(1), lambda: file.allocate(0, 1), file.fileno,
    ):  # fmt: skip
        with pytest.raises(OSError, match="object"):
            call()


def test_an_object_store_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "the-key", "SECRET_ACCESS_KEY": "the-secret", "REGION": "us-east-1",
                        "ENDPOINT_URL": "http://127.0.0.1:9", "ALLOW_HTTP": "true"}.items():  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    objects = ObstoreObjects("s3://bucket/prefix", call_s=2.0)
    with pytest.raises(ObjectStoreError, match="s3://bucket/prefix") as raised:
        objects.size("name")
    assert "the-" not in str(raised.value)
