"""What `bench cluster` compares with: the same lookups by MGET on one blocking socket per primary, and nothing around.

Contract: no deadline, no redirection, no failover: what is measured is the servers, the protocol and its parser.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import libvalkey

from perdure import limits
from perdure.benchmarks.target import WrongResult
from perdure.catalog.api import RECORD
from perdure.catalog.valkey_names import GROUPS, tags
from perdure.testing.valkey import SLOTS, Cluster

_CHUNK_BYTES = 1 << 16


class Bare:
    """As many records as the benchmark has, by names that lie in the same hash slots."""

    def __init__(self, servers: Cluster, records: int):
        self._sockets = [socket.create_connection(seed) for seed in servers.seeds]
        self._readers = [libvalkey.Reader() for _ in self._sockets]
        self._names = [b"bare{%b}%d" % (tags(GROUPS)[number % GROUPS], number) for number in range(records)]
        value = bytes(RECORD.itemsize)
        for number, name in enumerate(self._names):
            self._send(number, ("SET", name, value))
            self._receive(number)

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            one.close()

    def _place(self, number: int) -> int:
        """Which primary has a record: tags lie evenly in the slots, and slots evenly on primaries."""
        slot = (2 * (number % GROUPS) + 1) * SLOTS // (2 * GROUPS)
        return min(int(slot * len(self._sockets) / SLOTS), len(self._sockets) - 1)

    def _send(self, number: int, *commands: tuple[Any, ...]) -> None:
        self._sockets[self._place(number)].sendall(b"".join(map(libvalkey.pack_command, commands)))

    def _receive(self, number: int) -> Any:
        place = self._place(number)
        while (answer := self._readers[place].gets()) is False:
            got = self._sockets[place].recv(_CHUNK_BYTES)
            if not got:
                raise WrongResult("a server hung up")
            self._readers[place].feed(got)
        if isinstance(answer, Exception):
            raise WrongResult(f"a server says: {answer}")
        return answer

    def lookup(self, batch: int, batches: int) -> int:
        """Records found. One MGET per slot and at most `limits.cluster_script_keys_max` keys, all sent at once."""
        found, size = 0, limits.cluster_script_keys_max
        for at in range(batches):
            first = at * batch % (len(self._names) - batch + 1)
            groups: dict[int, list[bytes]] = {}
            for number in range(first, first + batch):
                groups.setdefault(number % GROUPS, []).append(self._names[number])
            sent = []
            for group, names in groups.items():
                for start in range(0, len(names), size):
                    self._send(group, ("MGET", *names[start : start + size]))
                    sent.append(group)
            for group in sent:
                found += sum(value is not None for value in self._receive(group))
        return found


def cpu_of(pid: int) -> float:
    """Seconds that the threads of a process have run so far; `stat` counts in ticks, which is too coarse."""
    return sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
