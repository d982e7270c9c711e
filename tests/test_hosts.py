"""Hosts on one machine: what goes from one to another is counted, and can be cut one way."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.testing import hosts
from perdure.testing.hosts import HostsUnavailable, Network, lacking, network

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(lacking()), reason=lacking() or "hosts can be made")]
PORT = 5000
WAIT_S = 0.3


@pytest.fixture
def net() -> Iterator[Network]:
    with network(["one", "two", "three"]) as made:
        yield made


def arrives(net: Network, sender: str, receiver: str, datagrams: int = 3) -> int:
    """How many of some datagrams are delivered."""
    with net[receiver].inside(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as into:
        into.bind((net[receiver].address, PORT))
        into.settimeout(WAIT_S)
        with net[sender].inside(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            for _ in range(datagrams):
                out.sendto(b"x", into.getsockname())
        got = 0
        try:
            while got < datagrams:
                into.recv(10)
                got += 1
        except TimeoutError:
            pass
        return got


def test_packets_are_counted_where_they_arrive(net: Network) -> None:
    assert arrives(net, "one", "two") == 3
    assert net.packets("one", "two") == 3
    assert net.packets("two", "one") == net.packets("one", "three") == net.packets("three", "two") == 0


def test_the_counters_are_proved_by_datagrams_that_arrive(net: Network) -> None:
    proof = net.prove(["one", "two", "three"])
    assert proof.counted == proof.sent == net.packets_among(["one", "two", "three"]) == 6 * net.packets("one", "three")
    net.cut("one", "two")
    with pytest.raises(TimeoutError):
        net.prove(["one", "two"])


def test_a_cut_is_one_way_and_can_be_mended(net: Network) -> None:
    net.cut("one", "two")
    assert [arrives(net, "one", "two"), arrives(net, "two", "one"), arrives(net, "three", "two")] == [0, 3, 3]
    assert net.packets("one", "two") == 3  # counted, though dropped
    net.mend()
    assert arrives(net, "one", "two") == 3


def test_a_host_dies_as_a_whole_and_nothing_outlives_the_network(net: Network) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    first, second, other = (subprocess.Popen(net[name].command(command)) for name in ("one", "one", "two"))
    while {first.pid, second.pid} != set(net["one"].pids()) or net["two"].pids() != [other.pid]:
        pass
    assert net["one"].kill() == 2
    assert [first.wait(), second.wait(), other.poll()] == [-9, -9, None]
    net.down()
    assert other.wait() == -9
    assert not [name for name in Path("/run/netns").iterdir() if name.name.startswith(net._prefix)]


def test_what_is_lacking_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_SBIN", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostsUnavailable, match="nft"), network(["one"]):
        pass
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    assert "root" in lacking()
