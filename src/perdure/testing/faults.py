"""Files that remember what a power cut would take, so that one can be had at any moment, without root or a device.

Contract
- `PowerCutFiles` passes every operation on, and calls `before(op, path)` ahead of each that changes something: there a
  test copies the directory and calls `lose` on the copy, which takes from it what was not synced at that moment.
- What may be lost: bytes of transfers that no completed `datasync` covers (sector by sector), sizes set since then, and
  deletions since the directory was synced (deleted files come back). What `create` and `write_once` promise is kept.
- Only files created through the namespace are known; a catalog beside them is copied as it is, all its commits kept,
  which is the hardest case: metadata that promises data the disk does not have.
- Never: a change to the directory itself.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from perdure.io.api import Buffer, File, Files
from perdure.io.wrappers import FileAround, FilesAround, total_bytes

_SECTOR_BYTES: Final = 512


@dataclass(slots=True, eq=False)
class _Fate:
    """What is not safe of one file: its size at the last sync, and where transfers went since."""

    synced_bytes: int = 0
    unsynced: list[tuple[int, int]] = field(default_factory=list)  # (offset, length)


class PowerCutFiles(FilesAround):
    """`inner` with a memory. `grave`: an empty folder on the same file system, for what was deleted."""

    def __init__(self, inner: Files, grave: Path, before: Callable[[str, str], None]) -> None:
        super().__init__(inner)
        self._before, self._grave = before, grave
        self._fates: dict[str, _Fate] = {}
        self._deleted: dict[str, Path] = {}
        self._lock = threading.Lock()

    def wrap(self, file: File) -> File:
        return _PowerCutFile(self, file)

    def create(self, path: str, *, direct: bool = True) -> File:
        self.about_to("create", path)
        file = super().create(path, direct=direct)
        self._fates[path] = _Fate()
        return file

    def write_once(self, path: str, data: bytes) -> bool:
        self.about_to("write_once", path)
        return super().write_once(path, data)

    def unlink(self, path: str) -> None:
        self.about_to("unlink", path)
        with self._lock:
            if path in self._fates or os.path.exists(os.path.join(self.root, path)):
                self._deleted[path] = self._grave / str(len(self._deleted))
                os.link(os.path.join(self.root, path), self._deleted[path])
        super().unlink(path)

    def sync_directory(self, path: str) -> None:
        self.about_to("sync_directory", path)
        super().sync_directory(path)
        with self._lock:
            for name in [name for name in self._deleted if os.path.dirname(name) == path]:
                self._deleted[name] = self._grave / "safe"

    def about_to(self, op: str, path: str) -> None:
        self._before(op, path)

    # --- what the files tell
    def writing(self, path: str, offset: int, length: int) -> None:
        with self._lock:
            self._fate(path).unsynced.append((offset, length))

    def syncing(self, path: str) -> list[tuple[int, int]]:
        with self._lock:
            return list(self._fate(path).unsynced)

    def synced(self, path: str, covered: list[tuple[int, int]], nbytes: int) -> None:
        with self._lock:
            fate = self._fate(path)
            fate.synced_bytes = nbytes
            for one in covered:
                fate.unsynced.remove(one)

    def _fate(self, path: str) -> _Fate:
        return self._fates.setdefault(path, _Fate())

    # --- the cut
    def lose(self, copy: Path, rng: random.Random) -> None:
        """Take from `copy`, a copy of the root made in `before`, what a power cut at this moment might have taken."""
        with self._lock:
            for path, grave in self._deleted.items():
                if grave.name != "safe" and not (copy / path).exists() and rng.random() < 0.5:
                    (copy / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(grave, copy / path)
            for path, fate in self._fates.items():
                if (copy / path).exists():
                    _damage(copy / path, fate, rng)


def _damage(path: Path, fate: _Fate, rng: random.Random) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        for offset, length in fate.unsynced:
            kept = rng.choice((0.0, 0.0, 0.5, 0.9))
            for at in range(offset, min(offset + length, size), _SECTOR_BYTES):
                if rng.random() >= kept:
                    file.seek(at)
                    file.write(bytes(min(_SECTOR_BYTES, size - at)))
        if rng.random() < 0.5:
            file.truncate(fate.synced_bytes)


class _PowerCutFile(FileAround):
    def __init__(self, files: PowerCutFiles, inner: File) -> None:
        super().__init__(inner)
        self._files = files

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        self._files.about_to("pwritev", self.path)
        self._files.writing(self.path, offset, total_bytes(buffers))
        return super().pwritev(buffers, offset)

    def allocate(self, offset: int, length: int) -> None:
        self._files.about_to("allocate", self.path)
        super().allocate(offset, length)

    def truncate(self, length: int) -> None:
        self._files.about_to("truncate", self.path)
        super().truncate(length)

    def datasync(self) -> None:
        self._files.about_to("datasync", self.path)
        covered, nbytes = self._files.syncing(self.path), self.size()
        super().datasync()
        self._files.synced(self.path, covered, nbytes)
