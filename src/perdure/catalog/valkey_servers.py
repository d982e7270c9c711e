"""The servers of a Valkey Cluster as people want to see them: who is what, and who answers."""

from __future__ import annotations

from typing import Any

from perdure.catalog.valkey_cluster import Cluster, address_of
from perdure.catalog.valkey_link import Address, exchange
from perdure.errors import CatalogUnavailable


def servers(cluster: Cluster, deadline: float) -> list[dict[str, Any]]:
    """Each server: address, role, slots, replicas (of a primary), and whether it answers. By the word of one of them.
    Raises CatalogUnavailable if none answers."""
    known = cluster.nodes()
    answers = exchange({node: [("CLUSTER", "SLOTS")] for node in known}, deadline, enough=1)
    maps = [(node, replies[0]) for node, replies in answers.items() if replies and isinstance(replies[0], list)]
    if not maps:
        raise CatalogUnavailable(f"catalog: none of {', '.join(map(str, known))} answers")
    asked, ranges = maps[0]
    found: dict[Address, dict[str, Any]] = {}
    for first, last, *nodes in ranges:
        primary, *replicas = [address_of(one, asked.address[0]) for one in nodes]
        mine = found.setdefault(primary, {"role": "primary", "slots": 0})
        mine["slots"] += last + 1 - first
        mine["replicas"] = ["{}:{}".format(*one) for one in replicas]
        for one in replicas:
            found.setdefault(one, {"role": "replica", "slots": 0, "replicas": []})
    pings = exchange({cluster.node(address): [("PING",)] for address in found}, deadline)
    heard = {node.address for node, replies in pings.items() if replies}
    return [{"address": "{}:{}".format(*address), **one, "answers": address in heard} for address, one in found.items()]
