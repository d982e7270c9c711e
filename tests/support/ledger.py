"""The outside record: what processes that are killed said they would write, and what was acknowledged to them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.blocks import FOUND, MISSING, WRONG


@dataclass
class Known:
    """What is known from outside about the blocks of one chain, by position."""

    count: int = 0
    durable: dict[int, str] = field(default_factory=dict)  # position -> segment it was acknowledged in
    fleeting: set[int] = field(default_factory=set)  # acknowledged as ephemeral, the commit maybe still to come


@dataclass
class Ledger:
    """The outside record of one store."""

    chains: dict[tuple[int, int], Known] = field(default_factory=dict)
    power: bool = False  # what dies is the machine: nothing ephemeral is durable, whatever was synced or found
    pinned: set[tuple[int, int, int]] = field(default_factory=set)  # (space, chain, position) found after the pin
    checks: int = 0
    acknowledged: int = 0  # blocks that were to last

    def take(self, heard: list[list[Any]]) -> None:
        """Enter what one victim said it was going to do, and what was acknowledged to it, all or the next part. A sync
        makes durable what was acknowledged before it in the same part."""
        fresh: set[tuple[tuple[int, int], int]] = set()  # a sync does not bring back what died with earlier victims
        syncing: dict[int, set[tuple[tuple[int, int], int]]] = {}
        for line in heard:
            match line:
                case ["begin", place, chain, count]:
                    known = self.chains.setdefault((place, chain), Known())
                    known.count = max(known.count, count)
                case ["ack", place, chain, durability, statuses, segments, lasting]:
                    known = self.chains[place, chain]
                    for position, status in enumerate(statuses):
                        assert status in (0, 1, 2), f"write status {status} on a healthy disk"
                        if status == 2:
                            continue
                        if durability != "ephemeral":
                            self.acknowledged += 1
                            known.durable[position] = segments[position]
                            known.fleeting.discard(position)
                        elif position not in known.durable:
                            known.fleeting.add(position)
                            fresh.add(((place, chain), position))
                        elif lasting[position]:  # as durable as before, maybe in another segment
                            known.durable[position] = segments[position]
                case ["sync", thread]:
                    syncing[thread] = set(fresh)
                case ["synced", thread]:
                    for name, position in syncing.pop(thread, ()):
                        self._survives(self.chains[name], position)
                case ["pinned", place, chain, statuses]:
                    found = {(place, chain, at) for at, status in enumerate(statuses) if status == FOUND}
                    self.pinned |= found
                case ["error", text]:
                    pytest.fail(text)

    def _survives(self, known: Known, position: int) -> None:
        if position in known.fleeting and not self.power:
            known.fleeting.discard(position)
            known.durable.setdefault(position, "")

    def compare(self, heard: list[list[Any]], evicting: bool) -> None:
        """What the next process found against what must be there."""
        if ["checked"] not in heard:
            return
        self.checks += 1
        said = {line[0]: line[1] for line in heard if len(line) == 2}
        assert not said["books"], "; ".join(said["books"])
        status, alive = said["status"], set(said["segments"])
        assert status["healthy"]
        assert status["background"] == {"ready": True, "last_error": None}
        kinds = {one["kind"] for one in status["incidents"]}
        assert kinds <= ({"lost"} if self.power else set()), status["incidents"]
        for line in heard:
            if line[0] != "found":
                continue
            _, place, chain, statuses = line
            known = self.chains[place, chain]
            assert WRONG not in statuses, f"chain {chain}: wrong bytes were delivered: {statuses}"
            assert set(statuses) <= {FOUND, MISSING}, f"chain {chain}: {statuses}"
            for position, found in enumerate(statuses):
                name = (place, chain, position)
                if found == FOUND:
                    self._survives(known, position)  # it has survived one death: it is in the catalog now
                    continue
                assert name not in self.pinned, f"{name} was pinned, and is gone"
                lost = position in known.durable and (not evicting or known.durable[position] in alive)
                assert not lost, f"{name} was acknowledged in segment {known.durable[position]!r}, and is gone"
                known.fleeting.discard(position)
                known.durable.pop(position, None)  # evicted

    def wanted(self, rng: random.Random, most: int = 60) -> list[list[Any]]:
        """Chains to ask for: the youngest, and some of the old ones."""
        names = list(self.chains)
        young, old = names[-most // 2 :], names[: -most // 2]
        chosen = young + rng.sample(old, min(len(old), most // 2))
        pinned = dict.fromkeys((place, chain) for place, chain, _ in self.pinned)
        chosen += [name for name in pinned if name not in chosen]
        return [[*name, self.chains[name].count] for name in chosen]
