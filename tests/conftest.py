"""Fixtures every test may use, and what no test may leave behind.

- `traces_dir`: the folder of the public traces (environment variable PERDURE_TRACES), else the test is skipped.
- `small_trace`: a made-up agent trace in the format of the public one; the same in every run.
- After each test: no thread of Perdure's, no descriptor of a store's file or memory, nothing of ours in /dev/shm.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("perdure.testing", "support")  # before anything imports them

GRACE_S = 5.0  # for threads that were told to stop, and descriptors that a dying child still holds
SHM = Path("/dev/shm")

# The same examples in every run; PERDURE_FUZZ=1 draws new ones, and more. No deadline: the machine is shared.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", settings.get_profile("repeatable"), derandomize=False, max_examples=2000)
settings.load_profile("fuzz" if os.environ.get("PERDURE_FUZZ") == "1" else "repeatable")


TraceRequest = TypedDict(  # in this form because "in" is a keyword
    "TraceRequest",
    {
        "t": float,  # seconds since the session began
        "model": str,
        "in": int,  # tokens
        "out": int,
        "think": float,  # seconds
        "runs": list[list[int]],  # the prefix's blocks as [first id, count]; ids are local to the session
    },
)


class TraceSession(TypedDict):
    session: str
    block_size: int  # tokens
    tool_tokens: int
    system_tokens: int
    requests: list[TraceRequest]


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """The folder with the public traces; they are too large to ship with the tests."""
    folder = os.environ.get("PERDURE_TRACES")
    if not folder:
        pytest.skip("PERDURE_TRACES does not name the folder of the public traces")
    return Path(folder)


@pytest.fixture
def small_trace() -> list[TraceSession]:
    """Four agent sessions of eight requests: each extends the last one's prefix, every fourth rewrites its tail."""
    return [_session(number) for number in range(4)]


def _session(number: int) -> TraceSession:
    rng = random.Random(1000 + number)  # not the global generator: pytest-randomly reseeds that one
    block_tokens, next_id, at_s = 64, 1, 0.0
    prefix: list[int] = []
    requests: list[TraceRequest] = []
    for turn in range(8):
        if turn % 4 == 3:  # the agent compacts or edits its history: what follows the cut is new
            prefix = prefix[: len(prefix) - rng.randint(1, len(prefix) // 4)]
            next_id += 1  # ids are never used again, as in the public trace
        grown = rng.randint(24, 48) if turn == 0 else rng.randint(1, 8)
        prefix = [*prefix, *range(next_id, next_id + grown)]
        next_id += grown
        think_s = round(rng.uniform(1.0, 30.0), 1)
        requests.append(
            {
                "t": round(at_s, 1),
                "model": "small",
                "in": len(prefix) * block_tokens + rng.randrange(block_tokens),
                "out": rng.randint(16, 400),
                "think": think_s,
                "runs": _runs(prefix),
            }
        )
        at_s += think_s + rng.uniform(1.0, 10.0)
    return {
        "session": f"small_{number:04}",
        "block_size": block_tokens,
        "tool_tokens": 8 * block_tokens,
        "system_tokens": 4 * block_tokens,
        "requests": requests,
    }


def _runs(ids: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for block in ids:
        if runs and block == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    return runs


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set up before the test's own fixtures (not before those of a wider scope), so it looks after they are gone."""
    base = str(tmp_path_factory.getbasetemp())
    threads, files, shared = _threads(), _store_files(base), _shared_memory()
    yield
    give_up = time.monotonic() + GRACE_S
    while True:
        left = [
            *(f"thread {thread.name}" for thread in _threads() - threads),
            *(f"open {target}" for target in _store_files(base) - files),
            *(f"shared memory {name}" for name in _shared_memory() - shared),
        ]
        if not left:
            return
        if time.monotonic() > give_up:
            pytest.fail("the test left behind: " + ", ".join(sorted(left)))
        gc.collect()  # a cycle may keep a closed store's buffers a little longer; that is no leak
        time.sleep(0.02)


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("perdure-")}


def _store_files(base: str) -> Counter[str]:
    """Descriptors on files under pytest's temporary folder and on anonymous memory, by what they point to."""
    open_files: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the one that listed the folder
            continue
        if target.startswith((base, "/memfd:", str(SHM))):
            open_files[target] += 1
    return open_files


def _shared_memory() -> set[str]:
    """Names in /dev/shm that are ours: by their name, or because this process has them mapped."""
    names = {path.name for path in SHM.iterdir()} if SHM.is_dir() else set()
    if not names:
        return names
    maps = Path("/proc/self/maps").read_text()
    return {name for name in names if "perdure" in name or f"{SHM}/{name}" in maps}
