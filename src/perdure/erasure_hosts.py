"""What other hosts that share the store still have of a tenant that is being erased, beyond what `epochs` makes them
forget: segments that they are writing.

Contract: a host that hears that a tenant's epoch has ended seals what it was writing of it; the segments of one that
does not hear are taken over once its lease has ended. Segments of the epoch that stays are left alone.
"""

from __future__ import annotations

from perdure.catalog.api import SegmentState
from perdure.core import Core


def left_open(core: Core, tenant: bytes, epoch: int) -> bool:
    """Whether others have open segments with records older than `epoch`, or that nobody can tell not to be. Those of
    dead writers are noted, for `keeper.settle_unsealed`. Raises CatalogError, OSError."""
    core.sharing.refresh()
    for segment in core.sharing.orphans():
        core.space.note_unsealed(segment)
    return any(
        one.state is SegmentState.OPEN
        and one.tenant == tenant
        and one.owner != core.sharing.owner
        and not _stays(core, one.segment, epoch)
        for one in core.table.all()
    )


def _stays(core: Core, segment: bytes, epoch: int) -> bool:
    """A segment has records of one epoch only."""
    try:
        found, _ = core.recovery.scan(segment)
    except FileNotFoundError:
        return False
    return bool(len(found)) and int(found["record"]["tenant_epoch"].max()) >= epoch
