"""Hosts on one machine: network namespaces on a bridge of their own, with packet counters and one-way cuts.

    with network(["one", "two", "valkey"]) as net:
        subprocess.Popen(net["one"].command(["perdure", "serve", ...]))
        net.cut("one", "valkey")                  # what one sends to valkey is lost on arrival; not the other way round
        net.packets("one", "two")                 # IP packets that came from one and arrived at two so far

Contract
- Needs root, `ip`, `nft` and `nsenter`; `lacking` says what is not there. The machine's own network is not touched:
  bridge and cables lie in namespaces too. Files and Unix sockets are shared by all hosts, as by one machine.
- Every IP packet between two hosts is counted where it arrives, before it may be dropped. IPv6 is off, so that nothing
  passes unseen.
- `kill` is SIGKILL to every process of a host. At the end all hosts are killed and their namespaces removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Final, Protocol

from perdure.errors import PerdureError

_TOOLS: Final = ("ip", "nft", "nsenter")
_PACKAGES: Final = "iproute2 nftables util-linux"
_CLONE_NEWNET: Final = 0x40000000
_NETWORK: Final = "10.209.0"
_END_S: Final = 10.0
_PROOF_DATAGRAMS: Final = 5
_PROOF_PORT: Final = 5000
_PROOF_S: Final = 3.0
_TABLE: Final = "perdure"
_SBIN: Final = "/usr/sbin:/sbin"


class HostsUnavailable(PerdureError):
    """Hosts cannot be made here; the message says what is lacking."""


class Host(Protocol):
    """Where a process runs and a server listens."""

    @property
    def address(self) -> str: ...

    def command(self, words: Sequence[str]) -> list[str]:
        """What starts `words` there: the same process, by the same id."""
        ...

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Sockets that this thread makes until the exit are of that host."""
        ...


class Loopback:
    """This machine, as seen by itself."""

    address = "127.0.0.1"

    def command(self, words: Sequence[str]) -> list[str]:
        return list(words)

    def inside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Namespace:
    """One host of a network."""

    def __init__(self, namespace: str, address: str):
        self.namespace, self.address = namespace, address

    def command(self, words: Sequence[str]) -> list[str]:
        return [_path("nsenter"), f"--net={self._file}", "--", *words]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            there = os.open(self._file, os.O_RDONLY)
            try:
                _enter(there)
            finally:
                os.close(there)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)

    def pids(self) -> list[int]:
        return [int(word) for word in _run("ip", "netns", "pids", self.namespace).split()]

    def kill(self) -> int:
        """SIGKILL to all processes of this host, and wait until none is left. Returns how many there were."""
        killed: set[int] = set()
        give_up = time.monotonic() + _END_S
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            if time.monotonic() > give_up:
                raise HostsUnavailable(f"processes {pids} of {self.namespace} outlive SIGKILL")
            time.sleep(0.01)
        return len(killed)

    @property
    def _file(self) -> str:
        return f"/run/netns/{self.namespace}"


@dataclass(frozen=True, slots=True)
class Proof:
    """Datagrams that were sent and received, and how many packets were counted meanwhile."""

    sent: int
    counted: int


class Network:
    """Hosts by name. Made by `network`."""

    def __init__(self, names: Sequence[str]):
        self._prefix = f"pd{secrets.token_hex(3)}"
        self._switch = f"{self._prefix}switch"
        self.hosts = {
            name: Namespace(f"{self._prefix}{number}", f"{_NETWORK}.{number}") for number, name in enumerate(names, 1)
        }

    def __getitem__(self, name: str) -> Namespace:
        return self.hosts[name]

    def up(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for number, (name, host) in enumerate(self.hosts.items()):
            port = f"port{number}"
            _run("ip", "netns", "add", host.namespace)
            with host.inside():
                for switch in Path("/proc/sys/net/ipv6/conf").glob("*/disable_ipv6"):
                    switch.write_text("1")
            _run("ip", "-n", self._switch, "link", "add", port, "type", "veth", "peer", "eth0", "netns", host.namespace)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("ip", "-n", host.namespace, "link", "set", link, "up")
            self._in(host, "nft", self._rules(name))

    def _rules(self, name: str) -> str:
        others = {other: host.address for other, host in self.hosts.items() if other != name}
        counters = "".join(f"counter from_{other} {{ }}\n" for other in others)
        counting = "".join(f'ip saddr {address} counter name "from_{other}"\n' for other, address in others.items())
        chain = f"chain arriving {{ type filter hook prerouting priority -300\n{counting}ip saddr @cut drop\n}}"
        return f"table ip {_TABLE} {{\nset cut {{ type ipv4_addr\n}}\n{counters}{chain}\n}}"

    def packets(self, sender: str, receiver: str) -> int:
        """IP packets from one host that arrived at the other so far, dropped ones too."""
        told = self._in(self.hosts[receiver], "nft", "-j", f"list counter ip {_TABLE} from_{sender}")
        return sum(int(one["counter"]["packets"]) for one in json.loads(told)["nftables"] if "counter" in one)

    def packets_among(self, names: Sequence[str]) -> int:
        """From each of these hosts to each other one, so far."""
        return sum(self.packets(one, other) for one, other in permutations(names, 2))

    def prove(self, names: Sequence[str]) -> Proof:
        """Send some datagrams from each of these hosts to each other one: do the counters see them?"""
        before, sent = self.packets_among(names), 0
        for sender, receiver in permutations(names, 2):
            with self._datagrams(receiver) as into, self._datagrams(sender) as out:
                for number in range(_PROOF_DATAGRAMS):
                    out.sendto(bytes([number]), into.getsockname())
                    into.recv(1)
                    sent += 1
        return Proof(sent, self.packets_among(names) - before)

    @contextlib.contextmanager
    def _datagrams(self, name: str) -> Iterator[socket.socket]:
        with self[name].inside():
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with made:
            made.settimeout(_PROOF_S)
            made.bind((self[name].address, _PROOF_PORT))
            yield made

    def cut(self, sender: str, receiver: str) -> None:
        """From now on nothing of `sender` reaches `receiver`."""
        self._in(self.hosts[receiver], "nft", f"add element ip {_TABLE} cut {{ {self.hosts[sender].address} }}")

    def mend(self) -> None:
        """Undo all cuts."""
        for host in self.hosts.values():
            self._in(host, "nft", f"flush set ip {_TABLE} cut")

    def down(self) -> None:
        for host in self.hosts.values():
            if Path(f"/run/netns/{host.namespace}").exists():
                host.kill()
                _run("ip", "netns", "delete", host.namespace)
        if Path(f"/run/netns/{self._switch}").exists():
            _run("ip", "netns", "delete", self._switch)

    def _in(self, host: Namespace, tool: str, *words: str) -> str:
        return _run(*host.command([_path(tool), *words]))


def lacking() -> str:
    """What is missing to make hosts here, and what to do; empty: nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root: run it as root"
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_search()) is None]
    return f"not installed: {' '.join(missing)} (Debian packages {_PACKAGES})" if missing else ""


@contextlib.contextmanager
def network(names: Sequence[str]) -> Iterator[Network]:
    """Hosts of these names (letters and digits), removed at the end. Raises HostsUnavailable."""
    if problem := lacking():
        raise HostsUnavailable(problem)
    made = Network(names)
    try:
        made.up()
        yield made
    finally:
        made.down()


def _search() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{_SBIN}"


def _path(tool: str) -> str:
    return shutil.which(tool, path=_search()) or tool


def _run(tool: str, *words: str) -> str:
    done = subprocess.run([_path(tool), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostsUnavailable(f"`{tool} {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
