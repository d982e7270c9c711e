"""What one can see of a store that many processes share: the cluster's servers, who registered, segments, blocks.

Contract
- Looks only: nothing is changed, no lease is taken, no service is asked. Nothing depends on who registered.
- What cannot be asked is named under "problems"; the rest is told all the same. Raises CatalogError if nothing answers.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from perdure import directory
from perdure.catalog.api import SegmentRecord, SegmentState
from perdure.catalogs import InCluster, open_catalogs
from perdure.clock import SystemClock
from perdure.core import INDEX_LOST_KEY, STORE_NAMESPACE
from perdure.errors import CatalogUnavailable, InvalidArgument
from perdure.sharing import HOSTS, scope_of


def status(path: Path, catalog: str) -> dict[str, Any]:
    """JSON-able; sizes in bytes, times in seconds. "problems" is empty if all is well. Raises PerdureError."""
    identity = directory.prepare(path, create=False, clock=SystemClock(), catalog="valkey")
    catalogs = open_catalogs(catalog, path, identity, read_only=True)
    if not isinstance(catalogs, InCluster):
        raise InvalidArgument(f"catalog={catalog!r}: is not a cluster")
    try:
        servers = catalogs.servers()
        problems = _of_servers(servers)
        segments = catalogs.control().segments()
        answer = {
            "store": identity.store,
            "servers": servers,
            "hosts": _hosts(catalogs, segments),
            "segments": dict(Counter(record.state.name.lower() for record in segments)),
            "used_bytes": sum(record.allocated_bytes for record in segments),
            "capacity_bytes": int(catalogs.control().get(STORE_NAMESPACE, b"capacity") or 0),
        }
        try:
            answer["blocks"] = catalogs.index(0).count()
            if catalogs.control().get(STORE_NAMESPACE, INDEX_LOST_KEY) is not None:
                problems.append("the block index is being rebuilt: some blocks are not found yet")
            elif not catalogs.index_is_whole():
                problems.append("part of the block index was lost: `perdure rebuild` loads it again from the segments")
        except CatalogUnavailable as error:
            problems.append(f"part of the block index does not answer, its blocks are misses: {error}")
        return answer | {"problems": problems}
    finally:
        catalogs.close()


def _of_servers(servers: list[dict[str, Any]]) -> list[str]:
    problems = [f"{one['address']} ({one['role']}) does not answer" for one in servers if not one["answers"]]
    served = sum(one["slots"] for one in servers if one["role"] == "primary" and one["answers"])
    total = sum(one["slots"] for one in servers if one["role"] == "primary")
    if served < total:
        problems.append(f"{total - served} of {total} slots are not served until a replica takes over")
    return problems + [
        f"{one['address']} has no replica: changes of the control store there are not acknowledged"
        for one in servers
        if one["role"] == "primary" and not one["replicas"]
    ]


def _hosts(catalogs: InCluster, segments: list[SegmentRecord]) -> list[dict[str, Any]]:
    """Who registered and has not left; `silent_s`: since when its lease has ended, None while it lasts."""
    writing = Counter(record.owner for record in segments if record.state is SegmentState.OPEN)
    now_s = catalogs.server_time_s()
    found = []
    for owner, raw in catalogs.control().items(HOSTS):
        lease = catalogs.lease_of(scope_of(owner))
        ended_s = None if lease is None or lease.holder != owner else lease.deadline_s
        silent_s = None if ended_s is not None and ended_s > now_s else round(now_s - (ended_s or now_s), 1)
        entry = json.loads(raw)
        entry |= {"owner": owner.hex(), "silent_s": silent_s, "open_segments": writing.pop(owner, 0)}
        found.append(entry | {"up_s": int(time.time() - entry["since_s"])})
    if writing:
        found.append({"host": "", "owner": "", "open_segments": sum(writing.values()), "silent_s": None})
    return found
