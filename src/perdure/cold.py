"""The cold tier of one store, put together: which bucket, what is there, what goes there and comes back.

Contract
- The bucket is remembered in the control store: whoever opens the store finds its cold segments. It cannot be changed
  while any are there, or objects of segments that are gone; `cold="off"` needs there to be none, `cold="drop"` gives up
  those there are.
- `cold_capacity` is remembered too. Credentials and endpoint are not: they come from the environment of each process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from perdure import limits
from perdure.catalog.api import ControlStore
from perdure.core import STORE_NAMESPACE, Core
from perdure.errors import InvalidArgument
from perdure.io.api import Engine
from perdure.io.engine import ThreadEngine
from perdure.io.gate import DeviceGate
from perdure.io.objects import Objects, check_url
from perdure.io.split import SplitEngine
from perdure.options import parse_size
from perdure.segments.cold import LEDGER, ColdTier
from perdure.segments.demotion import Demoter
from perdure.segments.moving import Mover
from perdure.segments.promotion import Promoter
from perdure.segments.table import SegmentTable

_URL, _CAPACITY = b"cold", b"cold capacity"
_CAPACITY_DEFAULT = "1TiB"
_OFF, _DROP = "off", "drop"


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Where cold segments go; url empty: nowhere."""

    url: str
    capacity: int


def choice_of(
    control: ControlStore, table: SegmentTable, cold: str | None, capacity: int | str | None, read_only: bool,
    pending: Callable[[], list[str]],
) -> Choice:  # fmt: skip
    """What was asked for, else as last time; remembered. pending: see `governing.pending`. Raises InvalidArgument,
    StorePathError."""
    known = (control.get(STORE_NAMESPACE, _URL) or b"").decode()
    stored = control.get(STORE_NAMESPACE, _CAPACITY)
    nbytes = parse_size(_CAPACITY_DEFAULT if stored is None else int(stored), "cold_capacity")
    if capacity is not None:
        nbytes = parse_size(capacity, "cold_capacity")
    url = known if cold is None else "" if cold in (_OFF, _DROP) else check_url(cold)
    if capacity is not None and not url:
        raise InvalidArgument(f"cold_capacity={capacity!r}: there is no cold tier; pass cold='s3://BUCKET/PREFIX' too")
    there = {record.segment for record in table.all() if record.cold} if url != known or cold == _DROP else set()
    if url != known:  # objects that are to be deleted, too: in another bucket nobody would find them
        there |= {segment for segment, _ in control.items(LEDGER)}
    if there and url != known and cold != _DROP:
        raise InvalidArgument(
            f"cold={cold!r}: {len(there)} segments lie in {known}; leave `cold` out to go on using them (what nobody "
            "needs any more is deleted there within minutes), or pass cold='drop' to give them up"
        )
    if there and cold == _DROP and (waiting := pending()):
        raise InvalidArgument(
            f"cold='drop': {', '.join(waiting)}: what holds keep and erasures are about may lie there; take the holds "
            "off and let the erasures end first"
        )
    if not read_only:
        _remember(control, _URL, url.encode() or None)
        if capacity is not None:
            _remember(control, _CAPACITY, str(nbytes).encode())
    return Choice(url, nbytes)


def _remember(control: ControlStore, name: bytes, value: bytes | None) -> None:
    before = control.get(STORE_NAMESPACE, name)
    if before != value:
        control.compare_and_set(STORE_NAMESPACE, name, before, value)


def engine_for(choice: Choice, disk: Engine) -> Engine:
    """`disk`, and beside it one for the object store."""
    if not choice.url:
        return disk
    return SplitEngine(disk, ThreadEngine(DeviceGate(limits.object_threads), limits.object_threads))


@dataclasses.dataclass(slots=True, eq=False)
class Cold:
    tier: ColdTier
    demoter: Demoter
    promoter: Promoter
    sole: Callable[[], AbstractContextManager[bool]]

    def demote(self, stopped: Callable[[], bool] = lambda: False, need: int = 0) -> int:
        """As `Demoter.run`, if it is this process's turn."""
        if self.demoter.is_idle(need):
            return 0
        with self.sole() as mine:
            return self.demoter.run(stopped, need) if mine else 0

    def collect(self) -> None:
        """Delete what nobody can ask for any more. Raises OSError, CatalogError."""
        with self.sole() as mine:
            if mine:
                self.demoter.drop_empty()
                self.tier.collect()

    def status(self) -> dict[str, Any]:
        """JSON-able; sizes in bytes."""
        there, tier = self.tier.segments(), self.tier
        return {
            "url": tier.objects.where,
            "answers": tier.objects.last_error is None,
            "last_error": tier.objects.last_error,
            "capacity_bytes": tier.capacity,
            "segments": len(there),
            "bytes": sum(record.sealed_bytes for record in there),
            **dataclasses.asdict(tier.counters),
            **dataclasses.asdict(self.promoter.counters),
        }

    def close(self) -> None:
        self.promoter.close()


def attach(core: Core, choice: Choice, mover: Mover, objects: Callable[[str], Objects]) -> None:
    """Let an opened store read its cold segments and, with `keeper`, make new ones; without a tier, give up those that
    there are."""
    if choice.url:
        core.cold = _tier(core, choice, mover, objects(choice.url))
    elif not core.read_only:
        _drop_unreachable(core)


def _tier(core: Core, choice: Choice, mover: Mover, objects: Objects) -> Cold:
    tier = ColdTier(
        objects, core.identity.store, core.control, core.table, core.segments, core.space, core.clock, choice.capacity
    )
    demoter = Demoter(
        tier, core.reclaimer, core.table, core.space, core.index, core.presence, core.recovery.entries,
        core.expiry_now, core.sharing.used_elsewhere,
    )  # fmt: skip
    promoter = Promoter(mover, core.scratch, lambda need: cold.demote(need=need) > 0)
    core.segments.cold, core.reclaimer.erase_far = tier, tier.erase
    if not core.read_only:
        core.reader.used_far = promoter.offer
    cold = Cold(tier, demoter, promoter, lambda: core.sharing.sole(b"cold"))
    return cold


def _drop_unreachable(core: Core) -> None:
    """`cold="drop"`: forget cold segments, and their objects, which are not deleted."""
    for record in core.table.all():
        if record.cold:
            core.reclaimer.drop(record, None)
    for segment, note in core.control.items(LEDGER):
        core.control.compare_and_set(LEDGER, segment, note, None)
