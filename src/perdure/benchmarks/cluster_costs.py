"""What one operation costs the hosts and the servers of a cluster: the rows of `bench cluster` that a model of larger
ones is made from (`cluster_model`).

Contract
- CPU time, not wall time: of one service's process, and of the primaries, less what they use when nothing is asked.
- A store of its own beside the others', on the same servers. Its news of segments is of made-up ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final

from perdure.benchmarks.cluster_bare import cpu_of
from perdure.benchmarks.harness import Row, row
from perdure.benchmarks.sessions_child import Child
from perdure.testing.valkey import Cluster

SMALL_BATCH, LARGE_BATCH = 16, 1000
HOST_SMALL: Final = f"host CPU, lookup of {SMALL_BATCH}"
HOST_LARGE: Final = f"host CPU, lookup of {LARGE_BATCH}"
SERVER_SMALL: Final = f"server CPU, lookup of {SMALL_BATCH}"
SERVER_LARGE: Final = f"server CPU, lookup of {LARGE_BATCH}"
GROWTH: Final = f"server CPU, lookup of {SMALL_BATCH} among {{}} records"
SERVER_PUBLISH: Final = "server CPU, publish of one block in a batch"
RECORD_BYTES: Final = "server memory, one block record"
HOST_BEAT, SERVER_BEAT = "host CPU, one beat", "server CPU, one beat"
HOST_NEWS: Final = "host CPU, one changed segment in a beat"
SERVER_NEWS: Final = "server CPU, one changed segment in a beat"
SEGMENT_BYTES: Final = "host memory, one segment"
SERVER_CHANGE: Final = "server CPU, one change of a session"
CHANGE_GROWTH: Final = "server CPU, one change of a session among {}"

_SEED, _BLOCK_SEED = 40_000, 1
_IDLE_S: Final = 1.0
_NEWS: Final = 1000
_US: Final = 1e6
_BUFFERS = ("mem_total_replication_buffers", "mem_clients_normal", "mem_aof_buffer")


class Costs:
    """Measures on one service, which must be alone on its store. All in microseconds, or bytes."""

    def __init__(self, child: Child, servers: Cluster, blocks: int, repetitions: int):
        self._child, self._servers, self._blocks, self._repetitions = child, servers, blocks, repetitions
        self._idle_share = 0.0

    def rows(self) -> list[Row]:
        before = self._cpu_s()
        time.sleep(_IDLE_S)
        self._idle_share = (self._cpu_s() - before) / _IDLE_S
        return [*self._publishes(), *self._lookups(), *self._beats(), *self._changes()]

    def _primaries(self) -> list[Any]:
        return [node for node in self._servers.nodes if node.is_primary()]

    def _cpu_s(self) -> float:
        return sum(cpu_of(node.process.pid) for node in self._primaries())

    def _cost(self, verb: str, each: int, **how: Any) -> tuple[float, float]:
        """(host, server) microseconds of one of `each` operations that the verb does."""
        before, began = self._cpu_s(), time.perf_counter()
        told = self._child.ask(verb, **how)
        server_s = self._cpu_s() - before - self._idle_share * (time.perf_counter() - began)
        return told["cpu_s"] / each * _US, max(server_s, 0.0) / each * _US

    def _repeated(self, measure: Callable[[], tuple[float, float]]) -> tuple[list[float], list[float]]:
        both = [measure() for _ in range(self._repetitions)]
        return [host for host, _ in both], [server for _, server in both]

    # --- blocks
    def _used_bytes(self) -> int:
        """Without the buffers, which do not grow with the records."""
        total = 0
        for node in self._primaries():
            told = {name: int(value) for name, value in node.info("memory").items() if value.isdigit()}
            total += told["used_memory"] - sum(told[name] for name in _BUFFERS)
        return total

    def _publishes(self) -> list[Row]:
        """In four steps, so that what a lookup costs is seen as the records grow."""
        found, growth, before = [], [], self._used_bytes()
        step = self._blocks // 4
        for number in range(4):
            found.append(self._cost("fill_some", step, seed=_SEED + number, blocks=step)[1])
            cost = self._repeated(lambda: self._lookup(SMALL_BATCH, step, _SEED))[1]
            growth.append(row(GROWTH.format(f"{(number + 1) * step:,}"), "us", cost, better="lower"))
        nbytes = (self._used_bytes() - before) / (4 * step)
        return [
            row(SERVER_PUBLISH, "us", found, better="lower"),
            row(RECORD_BYTES, "bytes", [nbytes], better="lower", note=f"{4 * step} records; the replica's are as many"),
            *growth,
        ]

    def _lookup(self, batch: int, blocks: int, seed: int) -> tuple[float, float]:
        batches = max(1, 20_000 // batch)
        return self._cost("lookup", batches, seed=seed, blocks=blocks, batch=batch, batches=batches)

    def _lookups(self) -> list[Row]:
        rows = []
        for batch, host_name, server_name in (
            (SMALL_BATCH, HOST_SMALL, SERVER_SMALL),
            (LARGE_BATCH, HOST_LARGE, SERVER_LARGE),
        ):
            host, server = self._repeated(lambda batch=batch: self._lookup(batch, self._blocks // 4, _SEED))  # type: ignore[misc]
            rows += [row(host_name, "us", host, better="lower"), row(server_name, "us", server, better="lower")]
        return rows

    # --- the control store
    def _beats(self) -> list[Row]:
        """With nothing new, then with the news of many segments."""
        count = 20
        quiet = self._repeated(lambda: self._cost("beats", count, count=count))
        before = self._child.ask("resident")["bytes"]
        news = self._repeated(self._news)
        grown = self._child.ask("resident")["bytes"] - before
        rows = []
        names = ((HOST_BEAT, HOST_NEWS), (SERVER_BEAT, SERVER_NEWS))
        for (beat, segment), plain, many in zip(names, quiet, news, strict=True):
            each = [max(0.0, one - median(plain)) / _NEWS for one in many]
            rows += [row(beat, "us", plain, better="lower"), row(segment, "us", each, better="lower")]
        nbytes = max(0.0, grown / (self._repetitions * _NEWS))
        return [*rows, row(SEGMENT_BYTES, "bytes", [nbytes], better="lower", note="by what the process grew")]

    def _news(self) -> tuple[float, float]:
        self._child.ask("make_segments", count=_NEWS)
        return self._cost("beats", 1, count=1)

    def _changes(self) -> list[Row]:
        """Of a session's head, while there are more and more of them."""
        count, rows = 200, []
        for sessions in (1, 1000, 4000):
            self._child.ask("make_sessions", count=sessions)
            cost = self._repeated(lambda: self._cost("change", count, count=count))[1]
            name = SERVER_CHANGE if sessions == 1 else CHANGE_GROWTH.format(f"{sessions:,} sessions")
            rows.append(row(name, "us", cost, better="lower", note="acknowledged when its replica has it"))
        return rows
