"""Rows of `bench sessions` about sessions that nobody uses: memory of the service, and how fast all are listed.

Contract
- Idle memory: sessions are opened through the service, one by one; what its memory has grown by meanwhile, per session
  (PSS: its own and its share of mapped files, the catalog's pages among them). A first lot of them is opened before
  that, so that what the service needs once is not counted.
- Listing: the heads of the sessions are put into the control store of a closed store in one transaction, because
  opening them through the API takes a synced commit each. They are encoded by the code that reads them, and some are
  then found by their names through the API. Raises WrongResult where one is not.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import lmdb

import perdure
from perdure import keys as naming
from perdure import limits
from perdure.benchmarks import target
from perdure.benchmarks.harness import Row, limit_row
from perdure.benchmarks.sessions_child import CAPACITY_BYTES, Child, cpus
from perdure.catalog.codec import document_key
from perdure.session_form import Head, encode_head
from perdure.session_heads import NAMESPACE

IDLE_BYTES_MAX: Final = limits.KIB
LIST_S_MAX: Final = 1.0
BLOCK_BYTES: Final = 64 * limits.KIB
LIST_REPETITIONS: Final = 5
WARM_SESSIONS: Final = 500
SETTLE_S: Final = 1.0


def rows(base: Path, idle: int, listed: int, step: Callable[[str], None]) -> list[Row]:
    """`idle` sessions opened for the memory, `listed` put there to be listed."""
    root = base / "idle"
    place = Path(tempfile.mkdtemp(prefix="perdure-bench-"))
    socket = place / "s"
    try:
        step(f"opening {idle:,} sessions")
        with Child("perdure.benchmarks.sessions_service", root, socket, 0, cpus()[1]) as service:
            made = [_idle_row(service, socket, idle)]
        shutil.rmtree(root)
        step(f"listing {listed:,} sessions")
        with target.opened(root, BLOCK_BYTES, capacity=CAPACITY_BYTES) as (store, space):
            secret, _ = store.core.tenants.secret(space.tenant)
        put_heads(root, space, secret, listed)
        with target.opened(root, BLOCK_BYTES, capacity=CAPACITY_BYTES) as (store, space):
            made.append(_list_row("in this process", store, space, listed))
        with (
            Child("perdure.benchmarks.sessions_service", root, socket, 0, cpus()[1]),
            perdure.connect(socket, name="bench") as client,
        ):
            made.append(_list_row("through a service", client, target.keyspace(client, BLOCK_BYTES), listed))
        return made
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)


def _idle_row(service: Child, socket: Path, count: int) -> Row:
    with perdure.connect(socket, name="bench") as client:
        space = target.keyspace(client, BLOCK_BYTES)
        for number in range(WARM_SESSIONS):
            space.session(f"warm-{number}")
        time.sleep(SETTLE_S)
        before = _memory(service.pid)
        for number in range(count):
            space.session(f"idle-{number}")
        time.sleep(SETTLE_S)
        after = _memory(service.pid)
    grown, own = ((after[field] - before[field]) / count for field in ("Pss", "Pss_Anon"))
    return limit_row(
        "memory of the service per idle session", "bytes", [max(grown, 1.0)], IDLE_BYTES_MAX,
        note=f"PSS, {count:,} sessions opened through it; {max(own, 0.0):.0f} of them its own, the rest pages of files",
    )  # fmt: skip


def _memory(pid: int) -> dict[str, int]:
    """Of a process, in bytes, as /proc/PID/smaps_rollup names it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) * limits.KIB for name, value in (line.split(":") for line in lines)}


def put_heads(root: Path, space: Any, secret: bytes, count: int) -> None:
    """Sessions "listed-0" and on, of a store that is closed."""
    now = int(time.time())
    ttl_s = limits.session_ttl_s_default
    with lmdb.open(str(root / "control"), max_dbs=16, map_size=limits.control_map_bytes) as environment:
        documents = environment.open_db(b"documents", create=False)
        with environment.begin(write=True, db=documents) as transaction:
            for number in range(count):
                name = f"listed-{number}"
                head = Head(1, name, space.digest, now, now, now + ttl_s, ttl_s, events=[(now, "opened", 0)])
                key = space.tenant_id + naming.derive(secret, "perdure/1/session", space.digest + name.encode())
                transaction.put(document_key(NAMESPACE, key), encode_head(head))


def _list_row(where: str, store: Any, space: Any, count: int) -> Row:
    seconds = []
    for _ in range(LIST_REPETITIONS):
        began = time.perf_counter()
        found = store.sessions()
        seconds.append(time.perf_counter() - began)
        if len({one["name"] for one in found}) != count:
            raise target.WrongResult(f"{len(found)} of {count} sessions were listed {where}")
    for number in (0, count // 2, count - 1):
        if space.find_session(f"listed-{number}") is None:
            raise target.WrongResult(f"session listed-{number} is not found by its name {where}")
    return limit_row(f"{count:,} sessions listed {where}", "s", seconds, LIST_S_MAX)
