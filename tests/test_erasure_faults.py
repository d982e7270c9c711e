"""Erasing while the disk or the catalog fails, and crashes at every step of it.

Expected: what was ordered is done in the end, by this process or by the next one, and nothing else is; once `erase` has
returned, no crash brings a block back; blocks of others are found and equal throughout.
"""

from __future__ import annotations

import contextlib
import shutil
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import blocks as data
from support.blocks import FOUND, MISSING
from support.sweep import Armed, quick_folder

import perdure
from perdure import PerdureError, Seams, Store, limits
from perdure.catalog.faulty import FailCalls, FaultyControl, FaultyIndex
from perdure.io.engine import ThreadEngine
from perdure.io.faulty import FaultyFiles, NthFault
from perdure.io.files import PosixFiles
from perdure.testing.faults import PowerCutFiles

WAIT_S = 20.0
CAPACITY = 16 << 20


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "background_retry_s", 0.002)


@pytest.fixture(params=["tenant", "block"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass
class Scene:
    """A store with blocks to be erased (`doomed`), and others of the same tenant and of another one that stay."""

    path: Path
    kind: str
    doomed: Any = None
    near: Any = None
    far: Any = None
    digests: dict[str, bytes] = field(default_factory=dict)

    def fill(self) -> None:
        with closing(self.open()) as store:
            space, other = data.keyspace(store), data.keyspace(store, tenant="globex")
            self.doomed, self.near = data.chain(space, 1, 4), data.chain(space, 2, 3)
            self.far = data.chain(other, 1, 3)
            for one, keys in ((space, self.doomed), (space, self.near), (other, self.far)):
                assert data.write(one, keys).durable

    def open(self, **options: Any) -> Store:
        return perdure.open(self.path, **({"capacity": CAPACITY, "memory": 0, "encryption": "on"} | options))

    def erase(self, store: Store) -> str:
        blocks = [key.tobytes() for key in self.doomed] if self.kind == "block" else None
        return str(store.erase(tenant="acme", blocks=blocks)["id"])

    def check(self, store: Store, *, gone: bool) -> None:
        space, other = data.keyspace(store), data.keyspace(store, tenant="globex")
        assert data.read_back(other, self.far).tolist() == [FOUND] * 3
        stays = self.kind == "block" or not gone
        assert data.read_back(space, self.near).tolist() == [FOUND if stays else MISSING] * 3
        assert data.read_back(space, self.doomed).tolist() == [MISSING if gone else FOUND] * 4

    def check_done(self, store: Store) -> None:
        self.check(store, gone=True)
        present, _ = store.core.index.lookup(self.doomed)
        assert not present.any()
        kept = self.far if self.kind == "tenant" else np.concatenate([self.far, self.near])
        assert store.core.index.count() == len(kept)
        keystore = store.core.segments.keys
        assert keystore is not None
        known = {record.segment.hex() for record in store.core.table.all()}
        left = {path.stem for path in self.path.glob("keystore/segments/*/*")}
        assert left <= known, "keys of segments that are gone"
        assert {path.stem for path in self.path.glob("segments/*/*.seg")} == known


# --- crashes
class Camera:
    """A copy of the store before every step that changes something: what a kill at that moment leaves."""

    def __init__(self, source: Path, album: Path):
        self.source, self.album, self.on = source, album, False
        self.shots: list[tuple[Path, str]] = []

    def next(self, op: str) -> None:
        self.before(op, "")

    def before(self, op: str, path: str) -> None:
        if self.on:
            self.shots.append((self.album / str(len(self.shots)), f"{op} {path}"))
            shutil.copytree(self.source, self.shots[-1][0], ignore=shutil.ignore_patterns("*.tmp", "lock"))


def test_a_crash_at_every_step(tmp_path: Path, kind: str) -> None:
    with quick_folder(tmp_path) as folder:
        scene = Scene(folder / "s", kind)
        scene.fill()
        grave = folder / "grave"
        grave.mkdir()
        camera = Camera(scene.path, folder / "album")
        seams = Seams(
            files=lambda root: PowerCutFiles(PosixFiles(root), grave, camera.before), engine=ThreadEngine,
            control=lambda inner: FaultyControl(inner, camera), index=lambda inner: FaultyIndex(inner, camera),
        )  # fmt: skip
        with closing(scene.open(seams=seams, audit="on")) as store:
            assert store.wait_ready(WAIT_S)
            camera.on = True
            order = scene.erase(store)
            returned = len(camera.shots)
            assert store.core.erasures.wait(order, WAIT_S)["state"] == "erased"
            camera.on = False
            scene.check_done(store)
        assert len(camera.shots) > 8
        for number, (path, step) in enumerate(camera.shots):
            ordered = (path / f"control/erasures/{order}.order").exists() or (
                path / f"control/erasures/{order}.receipt"
            ).exists()
            assert ordered or number < returned, f"{step}: nothing on the disk says so"
            after = Scene(path, kind, scene.doomed, scene.near, scene.far)
            with closing(after.open()) as store:
                if ordered:
                    after_ordered(after, store, order, step)
                else:
                    after.check(store, gone=False)
            shutil.rmtree(path)


def after_ordered(scene: Scene, store: Store, order: str, step: str) -> None:
    """It was ordered when the process died: the next one does it, and serves nothing of it as soon as it is begun."""
    if (scene.path / "control/erasures" / f"{order}.keys").exists():
        scene.check(store, gone=True)
    assert store.wait_ready(WAIT_S), step
    told = store.core.erasures.wait(order, WAIT_S)
    while told["state"] == "held":  # not begun yet
        told = store.core.erasures.wait(order, WAIT_S)
    assert told["state"] == "erased", (step, told)
    scene.check_done(store)
    assert [one.name for one in (scene.path / "control/erasures").iterdir()] == [f"{order}.receipt"]


# --- errors
@pytest.mark.parametrize("once", [True, False], ids=["once", "for good"])
def test_the_disk_fails_at_the_nth_operation(tmp_path: Path, kind: str, once: bool) -> None:
    with quick_folder(tmp_path) as folder:
        source = Scene(folder / "source", kind)
        source.fill()
        for n in range(1, 400, 1 if once else 3):
            scene = Scene(folder / "s", kind, source.doomed, source.near, source.far)
            shutil.rmtree(scene.path, ignore_errors=True)
            shutil.copytree(source.path, scene.path)
            plan = Armed(NthFault(n, "eio", once=once))
            seams = Seams(files=lambda root, p=plan: FaultyFiles(PosixFiles(root), p), engine=ThreadEngine)
            with closing(scene.open(seams=seams)) as store:
                assert store.wait_ready(WAIT_S)
                plan.on = True
                finish(scene, store, plan)
            if not plan.plan.fired:
                return
        pytest.fail("more operations than expected")


@pytest.mark.parametrize("mode", ["error", "unknown"])
@pytest.mark.parametrize("half", ["control", "index"])
def test_the_catalog_fails_at_the_nth_change(tmp_path: Path, kind: str, half: str, mode: str) -> None:
    with quick_folder(tmp_path) as folder:
        source = Scene(folder / "source", kind)
        source.fill()
        for n in range(1, 200):
            scene = Scene(folder / "s", kind, source.doomed, source.near, source.far)
            shutil.rmtree(scene.path, ignore_errors=True)
            shutil.copytree(source.path, scene.path)
            plan = ArmedCalls(FailCalls(n, mode))
            seams = Seams(
                control=lambda inner, p=plan: FaultyControl(inner, p) if half == "control" else inner,
                index=lambda inner, p=plan: FaultyIndex(inner, p) if half == "index" else inner,
            )
            with closing(scene.open(seams=seams)) as store:
                assert store.wait_ready(WAIT_S)
                plan.on = True
                finish(scene, store, plan)
            if plan.plan.seen < n:
                return
        pytest.fail("more changes than expected")


@dataclass
class ArmedCalls:
    plan: FailCalls
    on: bool = False

    def next(self, op: str) -> str | None:
        return self.plan.next(op) if self.on else None


def finish(scene: Scene, store: Store, plan: Any) -> None:
    """Erase on a disk that fails; it is mended when the call has returned or raised."""
    order = None
    with contextlib.suppress(PerdureError, OSError):
        order = scene.erase(store)
        scene_gone(scene, store)
        store.core.erasures.wait(order, 0.05)
    plan.on = False
    waiting = [one["id"] for one in store.core.erasures.waiting()]
    if order is None and not waiting:
        scene.check(store, gone=False)
        order = scene.erase(store)
    for one in waiting or [order]:
        told = store.core.erasures.wait(str(one), WAIT_S)
        while told["state"] == "held":
            told = store.core.erasures.wait(str(one), WAIT_S)
        assert told["state"] == "erased", told
    scene.check_done(store)


def scene_gone(scene: Scene, store: Store) -> None:
    """It has returned: whatever fails, none of it is delivered."""
    assert FOUND not in data.read_back(data.keyspace(store), scene.doomed)
