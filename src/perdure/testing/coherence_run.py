"""A coherence run on hosts: processes on three, a Valkey Cluster on three others, and one nemesis after the other.

    outcome = run(folder, seed=7, seconds=60)
    assert outcome.violations == [] and outcome.packets == 0

As a program: `python -m perdure.testing.coherence_run DIR [--seconds S] [--seed N]`; exit status 1 after a violation.

Contract
- Needs root and what `testing.hosts` needs. One nemesis at a time, from a shuffled deck, each of `NEMESES` at least
  once; after each all is mended before the next. The same seed gives the same nemeses, not the same interleaving.
- Every server machine has a primary and the replica of another one's.
- What passes between hosts is counted (`packets`); that the counters see it is shown before (`control`).
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perdure.testing.coherence import Event, check, load, summary
from perdure.testing.coherence_faults import FULL, SLOW, STALE, WELL
from perdure.testing.coherence_worker import Processes, Setup, processes
from perdure.testing.hosts import Network, Proof, network
from perdure.testing.valkey import Cluster, Node, cluster

HOSTS: Final = ("host1", "host2", "host3")
SERVERS: Final = ("valkey1", "valkey2", "valkey3")
_PRIMARIES_ON, _REPLICAS_ON = (0, 1, 2), (1, 2, 0)
_PATIENCE: Final = "?read_s=2&write_s=3&lease_s=1"  # all of it shares this machine's cores
_PAUSE_S: Final = 0.002
_CALM_S: Final = (0.3, 1.0)
_TROUBLE_S: Final = (0.5, 3.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """packets: from host to host; control: how many of `proof` datagrams were counted before. nemeses: in order."""

    seed: int
    violations: list[str]
    events: list[Event]
    nemeses: list[str]
    packets: int
    control: Proof

    @property
    def told(self) -> dict[str, int]:
        return summary(self.events)


class _World:
    """What the nemeses act on. A nemesis returns when it has undone what it did."""

    def __init__(self, net: Network, servers: Cluster, workers: Processes, chance: random.Random):
        self.net, self.servers, self.workers, self._chance = net, servers, workers, chance
        self.lossy: list[tuple[float, float]] = []

    def _wait(self, span: tuple[float, float] = _TROUBLE_S) -> None:
        time.sleep(self._chance.uniform(*span))

    def _host(self) -> int:
        return self._chance.randrange(len(HOSTS))

    def calm(self) -> None:
        self._wait(_CALM_S)

    # --- services
    def kill_service(self) -> None:
        host = self._host()
        self.workers.kill(host)
        self._wait(_CALM_S)
        self.workers.start(host)
        self.workers.wait_ready()

    def stop_service(self) -> None:
        process = self.workers.running[self._host()]
        process.send_signal(signal.SIGSTOP)
        self._wait()  # mostly for longer than its lease
        process.send_signal(signal.SIGCONT)

    # --- servers: these are failovers, which may lose what was published
    def _failover(self, begin: Callable[[], object]) -> None:
        began = time.monotonic()
        begin()
        self._wait()
        self.net.mend()
        self.servers.heal()
        self.lossy.append((began, time.monotonic()))

    def _primary(self) -> Node:
        return self._chance.choice([node for node in self.servers.nodes if node.is_primary()])

    def kill_primary(self) -> None:
        self._failover(self._primary().kill)

    def stop_primary(self) -> None:
        self._failover(self._primary().pause)

    def cut_servers(self) -> None:
        """A server machine from the others, both ways or one; all hosts still reach it."""
        one, ways = self._chance.choice(SERVERS), self._ways()
        self._failover(lambda: self._cut([(one, other) for other in SERVERS if other != one], ways))

    # --- the network between hosts and servers
    def cut_host(self) -> None:
        """A host from one server machine or from all, both ways or one."""
        host = HOSTS[self._host()]
        servers = self._chance.choice([SERVERS, (self._chance.choice(SERVERS),)])
        self._cut([(host, server) for server in servers], self._ways())
        self._wait()
        self.net.mend()

    def _ways(self) -> tuple[bool, bool]:
        return self._chance.choice([(True, True), (True, False), (False, True)])

    def _cut(self, pairs: Sequence[tuple[str, str]], ways: tuple[bool, bool]) -> None:
        for one, other in pairs:
            if ways[0]:
                self.net.cut(one, other)
            if ways[1]:
                self.net.cut(other, one)

    # --- what a host has of its own
    def _weather(self, kind: str) -> None:
        host = self._host()
        self.workers.order(host, weather=kind)
        self._wait()
        self.workers.order(host, weather=WELL)

    def slow_store(self) -> None:
        self._weather(SLOW)

    def stale_store(self) -> None:
        self._weather(STALE)

    def full_store(self) -> None:
        self._weather(FULL)

    def step_clock(self) -> None:
        self.workers.order(self._host(), step_s=self._chance.uniform(-3600, 3600))
        self._wait(_CALM_S)


NEMESES: Final[dict[str, Callable[[_World], None]]] = {
    name: getattr(_World, name)
    for name in (
        "kill_service", "stop_service", "kill_primary", "stop_primary", "cut_servers", "cut_host", "slow_store",
        "stale_store", "full_store", "step_clock",
    )
}  # fmt: skip


def run(
    folder: Path,
    *,
    seed: int,
    seconds: float,
    nemeses: Sequence[str] = tuple(NEMESES),
    options: str = "",
    note: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """folder: for all that it makes. options: more of the catalog's, such as "&replicas=0". note: is told each nemesis.

    Raises HostsUnavailable, AssertionError if a process or a server does not come up or ends badly."""
    chance = random.Random(seed)
    with ExitStack() as ends:
        net = ends.enter_context(network([*HOSTS, *SERVERS]))
        control = net.prove(HOSTS)
        places = [net[SERVERS[place]] for place in (*_PRIMARIES_ON, *_REPLICAS_ON)]
        # nothing but the hosts reaches its addresses, so it needs no password
        servers = ends.enter_context(cluster(folder / "valkey", hosts=places, protected_mode="no"))
        before = net.packets_among(HOSTS)
        setup = Setup(str(folder / "data"), servers.url + _PATIENCE + options, str(folder), seed, pause_s=_PAUSE_S)
        workers = ends.enter_context(processes(setup, len(HOSTS), [net[name] for name in HOSTS]))
        world, played = _World(net, servers, workers, chance), list[str]()
        workers.wait_ready()
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(played) < len(nemeses):
            deck = list(nemeses)
            chance.shuffle(deck)
            for name in deck:
                note(name)
                NEMESES[name](world)
                played.append(name)
                world.calm()
                if len(played) >= len(nemeses) and time.monotonic() >= until:
                    break
        events = load(workers.end())
        packets = net.packets_among(HOSTS) - before
    return Outcome(seed, check(events, world.lossy), events, played, packets, control)


def _main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m perdure.testing.coherence_run", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    chosen = parser.parse_args(arguments)
    chosen.folder.mkdir(parents=True)

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    say(f"seed {chosen.seed}")
    outcome = run(chosen.folder, seed=chosen.seed, seconds=chosen.seconds, note=say)
    for line in (*outcome.violations, f"{outcome.told}", f"packets from host to host: {outcome.packets}"):
        say(line)
    say(f"{len(outcome.violations)} violations, {len(outcome.nemeses)} nemeses, seed {chosen.seed}")
    return 1 if outcome.violations or outcome.packets else 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
