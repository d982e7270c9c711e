"""Where to send a session, for routers: to a host that has its blocks in memory, else where all routers send it.

Contract: pure functions, hints only. Any host can serve any session; a poor choice, or a list of hosts that is out of
date, costs a read from the disk. No host is asked anything here, and none is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from perdure.advice import Advice
from perdure.errors import InvalidArgument


def rendezvous(name: str | bytes, hosts: Iterable[str] | Mapping[str, float]) -> list[str]:
    """The hosts, best first, for a session or a prefix: the same order for everybody who knows the same hosts. One that
    goes moves only what was on it, to the next in each order; one that comes takes its share and moves nothing else.

    hosts: names, or names with weights > 0 (a host of weight 2 is first for twice as many). name: of the session, or
    the key of a block that all share, such as the last of a system prompt. Highest random weight, Thaler and
    Ravishankar 1998; with weights, -weight / ln(u). Raises InvalidArgument.
    """
    weights = dict(hosts) if isinstance(hosts, Mapping) else dict.fromkeys(hosts, 1.0)
    raw = name.encode() if isinstance(name, str) else bytes(name)
    for host, weight in weights.items():
        if not 0 < weight < math.inf:
            raise InvalidArgument(f"rendezvous: host {host!r} has weight {weight!r}; it must be > 0 and finite")

    def score(host: str) -> tuple[float, str]:
        digest = blake2b(
            raw, key=blake2b(host.encode(), digest_size=32).digest(), digest_size=8, person=b"perdure.place"
        )
        return -weights[host] / math.log((int.from_bytes(digest.digest(), "big") + 0.5) / 2**64), host

    return sorted(weights, key=score, reverse=True)


def prefer(name: str | bytes, reports: Mapping[str, Advice]) -> list[str]:
    """The hosts, best first: who has most of the prefix in memory, then as `rendezvous` has them.

    reports: what `space.advise(keys, ...)` said on each host (`Advice.in_memory`); leave out a host that did not
    answer.
    """
    order = rendezvous(name, list(reports))
    return sorted(order, key=lambda host: -reports[host].in_memory)  # a stable sort: equals stay in their order
