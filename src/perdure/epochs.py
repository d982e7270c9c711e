"""How every host that shares a store hears in time that a tenant was erased.

    document "heard"/b"number"       grows with every epoch that ends
    documents "epoch"/<tenant id>    the first epoch that stays
    documents "hearing"/<host>       the number that a host has heard, and acted upon, for receipts

Contract
- What was heard counts for `limits.tenant_lease_s` from the moment it was asked for. A host that could not ask since
  finds nothing, delivers nothing and publishes nothing (`is_current`), until it hears again.
- So whoever has ended an epoch, told the catalog (`tell`) and waited that long (`wait`) knows that no host delivers or
  publishes what is of an earlier one, whether it answers or not.
- To tell is a change that a replica acknowledges; to hear is to read, so that hosts go on where no replica is left. A
  primary that slept until its replica took over may answer with what it knew until it notices, a tenth of a second.
- Files are the truth (`tenants.FOLDER`): a catalog that knows less is told again.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from perdure import limits
from perdure.catalog.api import ControlStore
from perdure.errors import CatalogError, CatalogUnavailable
from perdure.pool.wiping import wipe, withdraw
from perdure.tenants import KEYSPACES

if TYPE_CHECKING:
    from perdure.core import Core

_HEARD: Final = "heard"
_NUMBER: Final = b"number"
_EPOCHS: Final = "epoch"
_HEARING: Final = "hearing"
_ATTEMPTS_MAX: Final = 10
_SLOWEST: Final = 1.05  # clocks of two hosts run so differently at most


class Epochs:
    """Of one store that many share. Thread-safe."""

    def __init__(
        self, control: ControlStore, core: Core, boottime_s: Callable[[], float], hosts: Callable[[], set[bytes]]
    ):
        """boottime_s: a clock of this host alone that goes on while it sleeps. hosts: names of those that registered.

        Raises CatalogError."""
        self._control, self._core, self._tenants = control, core, core.tenants
        self._boottime_s, self._hosts = boottime_s, hosts
        self._turn = threading.Lock()
        self._number, self._untold = -1, True
        self._let_go: list[bytes] = []  # tenants erased elsewhere, of which calls may still be under way
        self._acknowledged: tuple[bytes, int] = b"", -1
        self.until_s = -math.inf
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="perdure-epochs", daemon=True)
        self.refresh()
        self._tenants.is_current = self.is_current

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(CatalogError):
            self._unregister()

    def _unregister(self) -> None:
        name, _ = self._acknowledged
        if name:
            self._control.compare_and_set(_HEARING, name, self._control.get(_HEARING, name), None)

    def is_current(self) -> bool:
        """Whether what this host knows of epochs still counts; counted where it does not."""
        if self._boottime_s() < self.until_s:
            return True
        self._core.counters.add(catalog_errors=1)
        return False

    def _run(self) -> None:
        while not self._stop.wait(limits.tenant_beat_s):
            try:
                self.refresh()
                self._acknowledge()
            except (CatalogError, OSError):  # whatever it is: what nobody hears in time is the end of all reads
                self._core.counters.add(catalog_errors=1)

    # --- hearing
    def refresh(self, *, untold: bool = False) -> None:
        """Hear what has ended. untold: something has ended here. Raises CatalogError: then what was heard before counts
        until its time ends."""
        with self._turn:
            self._untold |= untold
            asked_s = self._boottime_s()
            for _ in range(_ATTEMPTS_MAX):
                if not self._untold and self._is_newest():
                    self.until_s = asked_s + limits.tenant_lease_s
                    return
                self._hear()
        raise CatalogUnavailable("catalog: tenants' epochs change faster than they can be heard; tried again")

    def _is_newest(self) -> bool:
        return int(self._control.get(_HEARD, _NUMBER) or -1) == self._number

    def _hear(self) -> None:
        """All epochs, and tell those that the catalog does not know."""
        present = self._control.get(_HEARD, _NUMBER)
        found = {tenant: int(raw) for tenant, raw in self._control.items(_EPOCHS)}
        number = -1 if present is None else int(present)
        if not self._core.read_only:
            missing = {
                tenant: epoch for tenant, epoch in self._tenants.epochs().items() if epoch > found.get(tenant, 0)
            }
            for tenant, epoch in missing.items():
                before = found.get(tenant)
                expected = None if before is None else str(before).encode()
                if not self._control.compare_and_set(_EPOCHS, tenant, expected, str(epoch).encode()):
                    return  # somebody else did it: look again
            if missing or number < self._number or present is None:  # or the catalog is older than it was
                number = max(number, self._number) + 1
                if not self._control.compare_and_set(_HEARD, _NUMBER, present, str(number).encode()):
                    return
        later = self._tenants.learn(found)
        self._let_go += later
        let_go(self._core, later)
        self._number, self._untold = number, False

    def _acknowledge(self) -> None:
        """This host has nothing in memory or under way any more of what has ended."""
        mine = self._core.sharing.owner, self._number
        if self._core.read_only or mine == self._acknowledged or not self._tenants.settled():
            return
        gone, self._let_go = self._let_go, []
        let_go(self._core, gone)
        for tenant in gone:
            wipe(self._core.pool, tenant)
        name, number = mine
        if name != self._acknowledged[0]:
            self._unregister()
        present = self._control.get(_HEARING, name)
        if self._control.compare_and_set(_HEARING, name, present, str(number).encode()):
            self._acknowledged = mine

    # --- telling
    def tell(self) -> None:
        """Let the others hear of what has ended here. Raises CatalogError: they may hear of it all the same."""
        self.refresh(untold=True)

    def wait(self, stop: threading.Event) -> tuple[int, int]:
        """Until nobody can have missed what was told: (hosts that have heard it, hosts whose time has ended instead).

        Raises OSError if `stop` comes first, CatalogError."""
        number = self._number
        if stop.wait(limits.tenant_lease_s * _SLOWEST):
            raise OSError("the store is being closed; another host goes on, or the next that opens it")
        heard = {name for name, raw in self._control.items(_HEARING) if int(raw) >= number}
        hosts = self._hosts()
        return len(hosts & heard), len(hosts - heard)


def let_go(core: Core, erased: Iterable[bytes]) -> None:
    """Nothing of an earlier epoch of these tenants is in memory any more, and their segments reach their end."""
    for tenant in erased:
        stays = core.tenants.epoch(tenant)
        for one in core.writer.open_segments():
            if one.kind[0] == tenant and one.kind[1] < stays:
                core.writer.retire(one)
        withdraw_tenant(core, tenant)


def withdraw_tenant(core: Core, tenant: bytes) -> None:
    """From memory. What is not known to be another tenant's goes with it: it is read again."""
    try:
        known = core.control.items(KEYSPACES)
    except CatalogError:
        known = []
    others = {digest for digest, raw in known if msgspec.json.decode(raw)["tenant_id"] != tenant.hex()}
    withdraw(core.pool, lambda slot: slot.keyspace not in others)
