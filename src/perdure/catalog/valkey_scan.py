"""Going through everything in a group of the cluster: SCAN and HSCAN from their beginning to their end, in key order.

Contract
- What is there all the time is found. What comes or goes meanwhile may or may not be, and while keys of a slot are
  being moved one by one to another node, some may be missed: who lists takes what it gets for a hint.
- A cursor is never carried from one node to another: if the slot moves meanwhile, its listing begins anew.
- SCAN names no key, so a node that has given the slot away answers it, with nothing. EXISTS before it is refused there.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable

from perdure import limits
from perdure.catalog.valkey_cluster import Cluster, Unit, replies_of
from perdure.catalog.valkey_link import Command, Node
from perdure.catalog.valkey_names import GROUPS, Names, first_key


def everything(cluster: Cluster, names: Names, questions: dict[int, Command], wait_s: float) -> dict[int, list[bytes]]:
    """All that SCAN (with its pattern) or HSCAN (with its key) gives for each group. Each step may take `wait_s`."""
    out: dict[int, list[bytes]] = {group: [] for group in questions}
    cursors = dict.fromkeys(questions, b"0")
    asked: dict[int, Node | None] = {}
    while cursors:
        units = {group: Unit(names.slots[group], _step(questions[group], cursors[group])) for group in cursors}
        cluster.run(list(units.values()), time.monotonic() + wait_s)
        replies_of(list(units.values()), "listing")
        for group, unit in units.items():
            if asked.setdefault(group, unit.by) is not unit.by:
                del asked[group]
                cursors[group], out[group] = b"0", []
                continue
            cursors[group], found = unit.replies[-1]
            out[group] += found
            if cursors[group] == b"0":
                del cursors[group]
    return out


def _step(question: Command, cursor: bytes) -> list[Command]:
    """SCAN cursor MATCH pattern, or HSCAN key cursor; both are sent on by a node that does not have the slot."""
    count = ("COUNT", limits.cluster_listing_keys)
    if question[0] == "SCAN":
        return [("EXISTS", question[1]), ("SCAN", cursor, "MATCH", question[1], *count)]
    return [(*question, cursor, *count)]


class Listing:
    """Keys in order, listed a few groups at a time, and kept for the call that goes on where the last one ended."""

    def __init__(self, listed: Callable[[range], list[bytes]]):
        """listed: all keys of some groups, sorted."""
        self._listed = listed
        self._lock = threading.Lock()
        self._rest: list[bytes] = []
        self._next_group = 0
        self._last = b""
        self._at_s = -limits.cluster_listing_s

    def take(self, start: bytes, count: int) -> list[bytes]:
        """Up to `count` keys from `start` on; none only at the end."""
        with self._lock:
            goes_on = self._last < start and (not self._rest or start <= self._rest[0])
            if not goes_on or time.monotonic() - self._at_s > limits.cluster_listing_s:
                self._rest, self._next_group = [], _group_of(start)
            width = 1
            while len(self._rest) < count and self._next_group < GROUPS:
                some = range(self._next_group, min(self._next_group + width, GROUPS))
                found = self._listed(some)
                self._rest += found[bisect_left(found, start) :]
                self._next_group, width = some.stop, 2 * width
            taken, self._rest = self._rest[:count], self._rest[count:]
            self._last = taken[-1] if taken else b"\xff" * (limits.key_bytes + 1)
            self._at_s = time.monotonic()
            return taken


def _group_of(start: bytes) -> int:
    return max(group for group in range(GROUPS) if group == 0 or first_key(group) <= start)
