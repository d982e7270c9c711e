"""Tenants' epochs and the secrets of their names. What was erased is of an epoch that has passed: it is served to
nobody, published by nobody and brought back by no rebuild.

    DIR/control/tenants/<tenant id>.<epoch>   write-once: nothing of an earlier epoch is the tenant's any more
    DIR/keystore/names/<key domain>           what the names of one epoch are made from (`Keystore.names`)

Contract
- An epoch that has passed never comes back: its file is durable before anybody is told, and is read before anything
  else of a store is served.
- Keys of blocks under erasure (`bury`) count as absent, whatever the index says, until they are `dug_up`.
- A tenant that stored something before names had secrets of their own keeps the names that the root secret gives it,
  until it is erased.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perdure import keys as naming
from perdure import limits
from perdure.catalog.api import ControlStore, KeyArray, RecordArray
from perdure.errors import CatalogUnavailable, Erased, StorePathError
from perdure.governance.keystore import Keystore
from perdure.io.api import Files
from perdure.keys import key_list

FOLDER: Final = "control/tenants"
KEYSPACES: Final = "keyspace"
"""Namespace of the identities of keyspaces, by their digest."""
UNHEARD: Final = (
    f"this host could not ask the cluster for {limits.tenant_lease_s:g} s which tenants were erased; nothing is "
    "read or stored until it can"
)


def cannot_be_read(store: object, folder: str, error: OSError) -> StorePathError:
    return StorePathError(
        f"{store}: {folder} cannot be read ({error}); it says what was erased, so nothing is served: mend the disk"
    )


class Tenants:
    """Of one store. Raises StorePathError. Thread-safe."""

    def __init__(self, files: Files, keys: Keystore, control: ControlStore, root_secret: bytes, *, read_only: bool):
        self._files, self._keys, self._control, self._root_secret = files, keys, control, root_secret
        self._read_only = read_only
        self._lock = threading.Lock()
        self._epochs: dict[bytes, int] = {}
        self._turn, self._calls = 0, Counter[int]()  # of erasures; calls under way by the turn they began in
        self._buried: dict[bytes, int] = {}  # key -> by how many erasures
        self._names: dict[tuple[bytes, int], bytes] = {}
        self.is_current: Callable[[], bool] = lambda: True  # whether no host can have erased more without our knowing
        try:
            self.refresh()
        except OSError as error:
            raise cannot_be_read(files.root, FOLDER, error) from error

    def refresh(self) -> list[bytes]:
        """Look at the epochs again; tenants that were erased since. Raises OSError."""
        self._looked, found = self._stamp(), dict[bytes, int]()
        for name in self._files.list(FOLDER):
            stem, _, epoch = name.partition(".")
            if len(stem) == 2 * limits.id_bytes and epoch.isdecimal():
                tenant = bytes.fromhex(stem)
                found[tenant] = max(found.get(tenant, 0), int(epoch))
        return self.learn(found)

    def epochs(self) -> dict[bytes, int]:
        """By tenant id, of those that were erased."""
        with self._lock:
            return dict(self._epochs)

    def learn(self, found: Mapping[bytes, int]) -> list[bytes]:
        """Epochs that others have ended; tenants that are new among them."""
        with self._lock:
            later = [tenant for tenant, epoch in found.items() if epoch > self._epochs.get(tenant, 0)]
            self._turn += bool(later)
            self._epochs |= {tenant: found[tenant] for tenant in later}
        for tenant in later:
            for passed in range(found[tenant]):
                self._keys.forget(naming.key_domain(tenant, passed))
        return later

    # --- calls that are under way
    def begin(self) -> int:
        """A call that may still store or deliver what was read, or allowed, before an erasure; ended by `end`."""
        with self._lock:
            self._calls[self._turn] += 1
            return self._turn

    def end(self, turn: int) -> None:
        with self._lock:
            self._calls[turn] -= 1
            if not self._calls[turn]:
                del self._calls[turn]

    def settled(self) -> bool:
        """Whether all calls have ended that began before the newest erasure."""
        with self._lock:
            return not any(turn < self._turn for turn in self._calls)

    # --- epochs
    def id_of(self, tenant: str) -> bytes:
        """Raises InvalidArgument."""
        return naming.tenant_id(naming.tenant_secret(self._root_secret, tenant))

    def epoch(self, tenant: bytes) -> int:
        """By tenant id."""
        if self._read_only and self._stamp() != self._looked:
            self.refresh()
        return self._epochs.get(tenant, 0)

    def _stamp(self) -> int:
        """Changes whenever another process has ended an epoch."""
        try:
            return os.stat(os.path.join(self._files.root, FOLDER)).st_mtime_ns
        except OSError:
            return 0

    def end_epoch(self, tenant: bytes, epoch: int, order: str) -> None:
        """From now on what is older than `epoch` is nobody's. Here at once; everywhere when it returns. Idempotent.

        Raises OSError: then it holds in this process only."""
        with self._lock:
            self._turn += 1
            self._epochs[tenant] = max(epoch, self._epochs.get(tenant, 0))
        self._files.write_once(f"{FOLDER}/{tenant.hex()}.{epoch}", json.dumps({"erasure": order}).encode())

    # --- names
    def secret(self, tenant: str) -> tuple[bytes, int]:
        """What the tenant's names are made from now, and of which epoch that is. Raises InvalidArgument,
        KeyUnavailable."""
        derived = naming.tenant_secret(self._root_secret, tenant)
        name = naming.tenant_id(derived)
        epoch = self.epoch(name)
        known = self._names.get((name, epoch))
        if known is None:
            domain = naming.key_domain(name, epoch)
            known = self._keys.names(domain, create=False)
            if known is None and (epoch or not self._has_derived_names(name)):
                known = self._keys.names(domain, create=not self._read_only)
            known = self._names[name, epoch] = known or derived
        return known, epoch

    def _has_derived_names(self, tenant: bytes) -> bool:
        return any(json.loads(raw)["tenant_id"] == tenant.hex() for _, raw in self._control.items(KEYSPACES))

    # --- what counts
    @property
    def filtering(self) -> bool:
        """Whether a record in the index may be nobody's."""
        return bool(self._epochs or self._buried)

    def bury(self, keys: KeyArray) -> None:
        with self._lock:
            self._turn += 1
            for key in key_list(keys):
                self._buried[key] = self._buried.get(key, 0) + 1

    def dig_up(self, keys: KeyArray) -> None:
        """No record of them is left: whoever stores them again may."""
        with self._lock:
            for key in key_list(keys):
                left = self._buried.pop(key, 1) - 1
                if left:
                    self._buried[key] = left

    def buried(self, keys: KeyArray) -> NDArray[np.bool_]:
        if not self._buried:
            return np.zeros(len(keys), bool)
        return np.fromiter((key in self._buried for key in key_list(keys)), bool, len(keys))

    def passed(self, records: RecordArray) -> NDArray[np.bool_]:
        """Which records are of an epoch that has passed."""
        passed = np.zeros(len(records), bool)
        for tenant in set(records["tenant"].tolist()) & self._epochs.keys() if self._epochs else ():
            passed |= (records["tenant"] == np.void(tenant)) & (records["tenant_epoch"] < self._epochs[tenant])
        return passed

    def live(self, keys: KeyArray, present: NDArray[np.bool_], records: RecordArray) -> NDArray[np.bool_]:
        """`present` without what was erased."""
        if not self.filtering or not present.any():
            return present
        return present & ~self.passed(records) & ~self.buried(keys)

    def check(self, keys: KeyArray, records: RecordArray) -> None:
        """Before records are published. Raises Erased, CatalogUnavailable."""
        if not self.is_current():
            raise CatalogUnavailable(UNHEARD)
        if self.filtering and (self.passed(records) | self.buried(keys)).any():
            raise Erased("erased while it was being written; nothing of it was published")
