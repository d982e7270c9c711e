"""What other hosts that share the store still have of a tenant that is being erased, beyond what `epochs` makes them
forget: segments that they are writing.

Contract: a host that hears that a tenant's epoch has ended seals what it was writing of it; the segments of one that
does not hear are taken over once its lease has ended. Segments of the epoch that stays are left alone.
"""

from __future__ import annotations

import errno

from perdure.catalog.api import SegmentState
from perdure.core import Core
from perdure.errors import InvalidArgument


def check_possible(core: Core, kind: str) -> None:
    """Raises InvalidArgument where it is not built."""
    if not core.sharing.shared:
        return
    if kind != "tenant":
        why = "not built for stores that several processes share (`catalog`); a whole tenant can be erased there"
        raise InvalidArgument(f"erase: of a {kind} it is {why}")
    if core.cold is not None:
        raise InvalidArgument("erase: not built for stores that several processes share and that have a cold tier")


def let_moves_end(core: Core) -> None:
    """Copies that a host was making of older blocks, to make room, are there: who begins later knows that they are
    nobody's. Raises OSError, CatalogError."""
    with core.reclaimer.turn() as mine:
        if not mine:
            raise OSError(errno.EAGAIN, "another host is making room; tried again")


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
