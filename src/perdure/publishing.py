"""Making records visible: one catalog transaction per append, at once or collected, and the presence index after it.

Contract
- A record is published after its data is as durable as was asked for, insert-if-absent, fenced by the lease, and never
  if its tenant or the block was erased since.
- An unknown outcome is looked up: what stands in the catalog decides.
- Ephemeral publishes wait in `Core.pending`, visible in this process, until the keeper commits them together.
- Whoever was told that a block exists finds it in the presence index; whoever waits for it is woken after that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure.catalog.api import KeyArray, Lease, PublishResult, RecordArray, fingerprints
from perdure.core import Core, ticks_of
from perdure.errors import CatalogError, Erased, StaleFence
from perdure.keys import key_list
from perdure.segments.writer import OpenSegment

_ATTEMPTS_MAX = 3


@dataclass(slots=True, eq=False)
class Publication:
    """Records of one append on their way to the catalog."""

    keyspace: bytes
    keys: KeyArray
    records: RecordArray
    segments: list[OpenSegment]
    lease: Lease | None = None
    attempts: int = 0


def commit(core: Core, publication: Publication) -> NDArray[np.bool_]:
    """Publish in one transaction; which records are now the visible ones. Raises CatalogError, StaleFence."""
    keys, records, lease = publication.keys, publication.records, publication.lease

    def admit() -> None:
        if lease is not None and not core.control.check(lease):
            raise StaleFence(f"lease {lease.token} was lost during the write; nothing was published")
        core.sharing.check()
        core.tenants.check(keys, records)

    try:
        results = core.index.publish(
            keys, records, now_s=core.expiry_now(), is_draining=core.table.is_draining, admit=admit
        )
        visible: NDArray[np.bool_] = results != PublishResult.EXISTS
    except CatalogError as problem:  # the outcome is unknown: what stands in the catalog decides
        try:
            present, current = core.index.lookup(keys)
        except CatalogError:
            _list(core, publication, np.ones(len(keys), bool))  # maybe: a segment that looks empty would be deleted
            raise problem from None
        visible = present & (current == records)
        if not visible.any():
            raise
    _list(core, publication, visible)
    return visible


def _list(core: Core, publication: Publication, visible: NDArray[np.bool_]) -> None:
    """Let the writer know what its segments' index objects must list."""
    records = publication.records
    for opened in publication.segments:
        mine = np.flatnonzero(visible & (records["segment"] == np.void(opened.segment)))
        if len(mine):
            core.writer.published(opened, publication.keyspace, publication.keys[mine], records[mine])


def show(core: Core, keys: KeyArray, records: RecordArray, *, only_absent: bool = False) -> None:
    """Put published blocks into the presence index: whoever was told that a block exists must find it."""
    if len(keys):
        ordinals = np.fromiter(map(core.table.ordinal, records["segment"].tolist()), np.uint32, len(records))
        core.presence.insert(
            fingerprints(keys),
            segment=ordinals,
            recency=ticks_of(core.tick(), len(keys)),
            expires_s=np.ascontiguousarray(records["expires_s"]),
            only_absent=only_absent,
        )
        core.waiters.published(keys)


def flush_pending(core: Core, *, last: bool = False) -> None:
    """Commit the ephemeral publishes collected so far in one go per append; called by the keeper, by `sync` and (the
    `last` time) by `close`. What cannot be committed is tried again, a few times; CatalogError if it is the last."""
    problem: CatalogError | None = None
    with core.pending.committing:  # who waits for a commit must not overtake the one in progress
        for publication in core.pending.take():
            assert isinstance(publication, Publication)
            problem = _flush(core, publication, last) or problem
    if last and problem is not None:
        raise problem


def _flush(core: Core, publication: Publication, last: bool) -> CatalogError | None:
    problem = None
    try:
        visible = commit(core, publication)
        lost = ~visible
    except CatalogError as error:
        problem = error
        core.counters.add(catalog_errors=1)
        publication.attempts += 1
        if publication.attempts < _ATTEMPTS_MAX and not last and not isinstance(error, Erased):
            core.pending.put_back(publication)
            return problem
        lost = np.ones(len(publication.keys), bool)
    if lost.any():  # another copy won, or the commit failed: the presence entry must not outlive the record
        present, _ = _present_or_none(core, publication.keys)
        core.presence.remove(fingerprints(publication.keys)[lost & ~present])
    core.pending.remove(key_list(publication.keys))
    for opened in publication.segments:
        core.writer.finish(opened)
    return problem


def _present_or_none(core: Core, keys: KeyArray) -> tuple[NDArray[np.bool_], RecordArray | None]:
    try:
        return core.index.lookup(keys)
    except CatalogError:
        return np.zeros(len(keys), bool), None
