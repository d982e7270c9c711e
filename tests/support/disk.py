"""Small file systems of their own, on loop devices: to be copied while they are written (a power cut), or filled up.

Needs root, `losetup`, `mkfs.ext4` and a kernel that lends loop devices; `missing` says what is not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PATIENCE_S = 30.0


def _run(*command: str) -> str:
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


@cache
def missing(folder: Path) -> str | None:
    """Why there can be no loop mounts here, None if there can. `folder`: where to try."""
    if os.geteuid() != 0:
        return "loop mounts need root"
    try:
        with Image.made(folder / "probe.img", 8 << 20) as image, image.mounted(folder / "probe"):
            return None
    except OSError as error:
        return f"no loop mounts here: {error}"


class Image:
    """An ext4 file system in a file."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    @contextlib.contextmanager
    def made(cls, path: Path, nbytes: int) -> Iterator[Image]:
        with path.open("wb") as file:
            file.truncate(nbytes)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(path))
        try:
            yield cls(path)
        finally:
            path.unlink()

    @contextlib.contextmanager
    def mounted(self, at: Path) -> Iterator[Mount]:
        """Mounting replays the journal, as after a power cut."""
        device = _run("losetup", "--find", "--show", str(self.path))
        try:
            at.mkdir(exist_ok=True)
            _run("mount", "-t", "ext4", device, str(at))
            try:
                yield Mount(at, Path("/sys/block") / Path(device).name / "stat", self.path)
            finally:
                _unmount(at)
        finally:
            _run("losetup", "--detach", device)


def _unmount(at: Path) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while True:  # a process that was killed may still be going away
        try:
            _run("umount", str(at))
            return
        except OSError:
            if time.monotonic() > give_up:
                _run("umount", "--lazy", str(at))
                raise
            time.sleep(0.05)


class Mount:
    def __init__(self, path: Path, stat: Path, image: Path):
        self.path, self._stat, self._image = path, stat, image

    def _writes(self) -> tuple[int, ...]:
        """Write requests, sectors written, requests in flight, flushes: what must not change during a copy."""
        fields = [int(one) for one in self._stat.read_text().split()]
        return fields[4], fields[6], fields[8], *fields[15:16]

    @contextlib.contextmanager
    def copied(self, to: Path) -> Iterator[Image]:
        """What has reached the device so far, as one moment: the copy is made again if something was written meanwhile.

        Stop who writes first, or that may never end."""
        give_up = time.monotonic() + PATIENCE_S
        try:
            while True:
                before = self._writes()
                _run("cp", "--sparse=always", str(self._image), str(to))
                if before[2] == 0 and self._writes() == before:
                    break
                if time.monotonic() > give_up:
                    raise TimeoutError("the device never stopped writing")
            yield Image(to)
        finally:
            to.unlink(missing_ok=True)

    def fill(self, leave_bytes: int = 0) -> Path:
        """Take all free space but so much, with a file that can be deleted."""
        ballast = self.path / "ballast"
        with ballast.open("wb") as file:
            while (free := shutil.disk_usage(self.path).free - leave_bytes) > 0:
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, max(free // 2, 4096))
                except OSError:
                    if free <= 64 * 1024:
                        break
        return ballast
