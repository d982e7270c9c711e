"""Asking a Valkey Cluster: each question goes to the primary of its slot, and every call ends by its deadline.

Contract
- `Cluster.run` sends one batch to each primary concerned, all at once, and follows MOVED, ASK, TRYAGAIN, CLUSTERDOWN
  and failovers until the deadline. What then has no answer says so (`Unit.problem`); a primary that is stopped costs
  at most the deadline, and later calls not even that (`valkey_link.Node`).
- A unit may be carried out more than once, and one without an answer may have been carried out: `doubtful` says
  which. Scripts are written so that they can tell.
- The map of slots is a hint: nodes correct it. Of two answers the one with the higher epoch counts, if it sees a
  majority.
- Thread-safe. Never used in a forked child.

Written because the `valkey` package's own cluster client does not keep deadlines (`tests/test_valkey.py` measures
it).
"""

from __future__ import annotations

import os
import threading
import time
from binascii import crc_hqx
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from perdure import limits
from perdure.catalog.valkey_link import Address, Command, Node, ReplyError, Script, exchange
from perdure.errors import CatalogError, CatalogUnavailable, StoreClosed

SLOTS: Final = 16384
_LATER = ("TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "UNBLOCKED", "BUSY", "NOREPLICAS")
_MAP_QUESTION: Final[list[Command]] = [("CLUSTER", "INFO"), ("CLUSTER", "SLOTS")]
_ROUNDS_AT_ONCE = 3  # a redirection, a script in full; more is a cluster that has not made up its mind
_MAP_ANSWERS = 2  # so many nodes are believed, the one with the higher epoch first


def key_slot(tag: bytes) -> int:
    """Hash slot of keys with the hash tag `tag`."""
    return crc_hqx(tag, 0) % SLOTS


@dataclass(slots=True, eq=False)
class Unit:
    """Commands for one slot, sent together. acknowledged: so many replicas are waited for (`replies` ends with how many
    have it). divisible: if the slot is just being moved and its keys are on two nodes, say so (`divided`) instead of
    waiting for the end of it."""

    slot: int
    commands: list[Command]
    acknowledged: int = 0
    divisible: bool = False
    replies: list[Any] = field(default_factory=list)
    problem: str = ""  # why there are no replies
    doubtful: bool = False  # it was sent before without an answer
    by: Node | None = None  # who answered
    _asking: Node | None = None
    _sources: frozenset[str] = frozenset()  # scripts the node does not know

    @property
    def divided(self) -> bool:
        return self.divisible and "TRYAGAIN" in self.problem

    @property
    def reply(self) -> Any:
        """Of its only command."""
        return self.replies[0]


class Cluster:
    """The nodes of one cluster, found from any of them. Nothing is asked before the first call."""

    def __init__(self, seeds: Sequence[Address], *, user: str = "", password: str = ""):
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._greeting: list[Command] = [("AUTH", *filter(None, (user, password)))] if password else []
        self._nodes: dict[Address, Node] = {}
        self._seeds = [self.node(address) for address in seeds]
        self._slots: list[Node | None] = [None] * SLOTS
        self._scripts: dict[str, str] = {}
        self.version = 0  # of the map
        self.rounds = 0  # asked so far: to each primary concerned at most one send
        self._refreshed_at = 0.0
        self._refreshing = threading.Lock()
        self._closed = False

    def node(self, address: Address) -> Node:
        with self._lock:
            return self._nodes.setdefault(address, Node(address, self._greeting))

    def know(self, *scripts: Script) -> None:
        """Scripts are sent by digest, and in full to a node that does not know them."""
        self._scripts.update((script.digest, script.source) for script in scripts)

    def check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the catalog was closed")
        if os.getpid() != self._pid:
            raise StoreClosed(f"the catalog was opened by process {self._pid}; a forked child must open its own")

    # --- asking

    def run(self, units: Sequence[Unit], deadline: float) -> None:
        """Fill in each unit's `replies`, or its `problem`. `deadline` on the monotonic clock."""
        self.check_open()
        pending, pause_s, rounds = list(units), limits.cluster_pause_s_min, 0
        while pending:
            rounds += 1
            again = self._round(pending, deadline)
            now = time.monotonic()
            pending = [
                unit for unit in again if now < deadline and self._wait_for(unit) < deadline and not unit.divided
            ]
            if rounds > _ROUNDS_AT_ONCE or any(unit.problem for unit in pending):
                if now + pause_s >= deadline:
                    return
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, limits.cluster_pause_s_max)

    def _wait_for(self, unit: Unit) -> float:
        """When it makes sense to ask for this unit's slot again."""
        node = self._slots[unit.slot]
        return 0.0 if node is None else node.retry_at

    def _round(self, units: list[Unit], deadline: float) -> list[Unit]:
        """Ask once; the units that have to be asked again."""
        self.rounds += 1
        now = time.monotonic()
        if self._map_is_doubtful(units, now):
            self._refresh(deadline)
            now = time.monotonic()
        routed: dict[Node, list[Unit]] = {}
        for unit in units:
            node = unit._asking or self._slots[unit.slot]  # noqa: SLF001 (same module)
            if node is None:
                unit.problem = f"nobody serves slot {unit.slot}"
            else:
                routed.setdefault(node, []).append(unit)
        for node in [node for node in routed if not node.usable(now)]:
            for unit in routed.pop(node):
                unit.problem = f"{node} does not answer"
        answers = exchange({node: self._commands(batch, deadline) for node, batch in routed.items()}, deadline)
        for node, batch in routed.items():
            self._take(node, batch, answers[node])
        return [unit for unit in units if not unit.replies]

    def _commands(self, batch: list[Unit], deadline: float) -> list[Command]:
        out: list[Command] = []
        for unit in batch:
            if unit._asking:  # noqa: SLF001
                out.append(("ASKING",))
            for command in unit.commands:
                if command[0] == "EVALSHA" and command[1] in unit._sources:  # noqa: SLF001
                    command = ("EVAL", self._scripts[str(command[1])], *command[2:])
                out.append(command)
        wanted = max(unit.acknowledged for unit in batch)
        if wanted:  # one WAIT for all of them: it covers what the connection has sent before
            left_s = (deadline - time.monotonic()) * limits.cluster_wait_ratio
            out.append(("WAIT", wanted, max(1, int(left_s * 1000))))
        return out

    def _take(self, node: Node, batch: list[Unit], replies: list[Any] | None) -> None:
        """Give each unit what belongs to it."""
        if replies is None:
            for unit in batch:
                unit.problem, unit.doubtful, unit._asking = f"{node} does not answer", True, None  # noqa: SLF001
            return
        at = 0
        for unit in batch:
            at += unit._asking is not None  # noqa: SLF001
            mine = replies[at : at + len(unit.commands)]
            at += len(mine)
            self._settle(node, unit, mine + replies[-1:] if unit.acknowledged else mine)

    def _settle(self, node: Node, unit: Unit, replies: list[Any]) -> None:
        unit._asking, unit.problem = None, ""  # noqa: SLF001
        for place, reply in enumerate(replies):
            if not isinstance(reply, ReplyError):
                continue
            unit.doubtful |= place > 0  # what came before was done
            kind, _, rest = str(reply).partition(" ")
            if kind in ("MOVED", "ASK"):
                target = self.node(_address(rest.split(" ")[1], node.address[0]))
                if kind == "ASK":
                    unit._asking = target  # noqa: SLF001
                else:
                    self._slots[unit.slot] = target
                    self._refreshed_at = 0.0
                return
            if kind == "NOSCRIPT":
                unit._sources |= {str(unit.commands[place][1])}  # noqa: SLF001
                return
            if kind in _LATER:
                unit.problem = f"{node}: {reply}"
                self._refreshed_at = 0.0
                return
            raise CatalogError(f"catalog: {node}: {reply}")
        unit.replies, unit.by = replies, node

    # --- the map of slots

    def _map_is_doubtful(self, units: list[Unit], now: float) -> bool:
        if now - self._refreshed_at < limits.cluster_refresh_s:
            return False
        owners = {self._slots[unit.slot] for unit in units}
        return self._refreshed_at == 0.0 or any(node is None or node.in_doubt for node in owners)

    def _refresh(self, deadline: float) -> None:
        """Ask for the map, unless somebody just did."""
        if not self._refreshing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return
        try:
            now = time.monotonic()
            if self._refreshed_at and now - self._refreshed_at < limits.cluster_refresh_s:
                return
            with self._lock:
                known = list(self._nodes.values())
            asked = [node for node in known if node.retry_at <= now] or self._seeds
            answers = exchange(dict.fromkeys(asked, _MAP_QUESTION), deadline, enough=min(_MAP_ANSWERS, len(asked)))
            self._refreshed_at = time.monotonic()
            maps: list[tuple[bool, int, Node, list[Any]]] = []
            problem = ""
            for node, replies in answers.items():
                errors = [reply for reply in replies or [] if isinstance(reply, ReplyError)]
                if errors:
                    problem = f"catalog: {node}: {errors[0]}"
                elif replies is not None:
                    info, slots = replies
                    epoch = int(_field(info, b"cluster_current_epoch"))
                    maps.append((_field(info, b"cluster_state") == b"ok", epoch, node, slots))
            if maps:
                self._adopt(*max(maps, key=lambda one: one[:2])[2:])
            elif problem:
                raise CatalogError(problem)
        finally:
            self._refreshing.release()

    def _adopt(self, asked: Node, ranges: list[Any]) -> None:
        slots: list[Node | None] = [None] * SLOTS
        known: dict[Address, Node] = {node.address: node for node in self._seeds}
        for first, last, *nodes in ranges:
            found = [self.node(address_of(one, asked.address[0])) for one in nodes]
            known.update((node.address, node) for node in found)
            slots[first : last + 1] = [found[0]] * (last + 1 - first)
        with self._lock:
            if slots != self._slots:
                self.version += 1
            left = [node for address, node in self._nodes.items() if address not in known]
            self._slots, self._nodes = slots, known
        for node in left:
            node.retire()

    def owners(self, slots: Sequence[int], deadline: float) -> list[Node | None]:
        """Who serves each slot, as far as known."""
        self.check_open()
        if self._map_is_doubtful([Unit(slot, []) for slot in slots], time.monotonic()):
            self._refresh(deadline)
        return [self._slots[slot] for slot in slots]

    def nodes(self) -> list[Node]:
        """Those known, the seeds among them."""
        self.check_open()
        with self._lock:
            return list(self._nodes.values())

    def doubt(self) -> None:
        """The map may be wrong."""
        self._refreshed_at = 0.0

    def close(self) -> None:
        """Idempotent. In a forked child nothing happens."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        with self._lock:
            known = list(self._nodes.values())
        for node in known:
            node.retire()


def replies_of(units: Sequence[Unit], action: str, *, changing: bool = False) -> list[Any]:
    """The reply of each unit's only command. Raises CatalogUnavailable if one has none, or fewer replicas have it than
    were asked for."""
    for unit in units:
        if not unit.replies:
            outcome = "; read it again: it may have happened" if changing else ""
            raise CatalogUnavailable(f"catalog: {action}: {unit.problem or 'no answer in time'}{outcome}")
        if unit.acknowledged and unit.replies[-1] < unit.acknowledged:
            raise CatalogUnavailable(
                f"catalog: {action}: {unit.replies[-1]} of {unit.acknowledged} replicas have it; a failover may lose it"
            )
    return [unit.reply for unit in units]


def _address(text: str, host: str) -> Address:
    """Of "host:port", the host left out where it is the one that said so."""
    name, _, port = text.rpartition(":")
    return name.strip("[]") or host, int(port)


def address_of(node: list[Any], host: str) -> Address:
    name = node[0].decode() if node[0] else ""
    return (name if name not in ("", "?") else host), int(node[1])


def _field(info: bytes, name: bytes) -> bytes:
    for line in info.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key == name:
            return value
    return b"0"
