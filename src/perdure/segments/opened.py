"""An open segment: what its writer knows of it between creation and seal, and the group commit of its appends.

Contract
- `sync` is a group commit: threads that wait together share one fdatasync. After a failed fdatasync the segment takes
  no more appends and nothing that was not synced before is acknowledged (the kernel may have dropped the pages).
- All fields but those of the group commit are guarded by the writer's lock.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from perdure.catalog.api import Durability
from perdure.governance.keystore import SegmentKey
from perdure.io.api import File

SegmentClass = tuple[bytes, int, Durability, int]  # tenant, its epoch, durability, retention class


@dataclass(slots=True, eq=False)
class OpenSegment:
    segment: bytes
    kind: SegmentClass
    files: list[File]
    key: SegmentKey | None  # None: not encrypted
    limit_bytes: int
    created_s: int
    boot_id: bytes
    last_used: float
    allocated_bytes: int = 0
    tail: int = 0
    users: int = 0  # appends between reservation and publish
    retired: bool = False  # no more appends
    sealed: bool = False
    taken: bool = False  # another process has taken it over: it is left as it is
    expires_s: int = 0
    lasting: bool = False  # some record never expires
    entries: list[NDArray[np.void]] = field(default_factory=list)
    written: int = 0  # generation counters of the group commit
    synced: int = 0
    syncing: bool = False
    failed: OSError | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def sync(self, deadline: float | None = None) -> bool:
        """Make every append that has returned durable; False if that took longer than `deadline` (monotonic seconds).

        Raises OSError if the disk refuses, now or earlier.
        """
        with self.changed:
            mine = self.written
            while not (self.synced >= mine or self.failed is not None):
                if not self.syncing:
                    self.syncing = True
                    if deadline is None:
                        break
                    # a thread of its own: a device that hangs must not hang a call that has a deadline
                    threading.Thread(
                        target=self._commit, args=(self.written,), name="perdure-sync", daemon=True
                    ).start()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self.changed.wait(left)
            else:
                return self._outcome(mine)
            target = self.written
        self._commit(target)
        return self._outcome(mine)

    def _outcome(self, mine: int) -> bool:
        if self.synced < mine and self.failed is not None:
            raise OSError(self.failed.errno, f"segment {self.segment.hex()}: fdatasync failed: {self.failed}")
        return True

    def _commit(self, target: int) -> None:
        """One fdatasync for all who wait."""
        problem: OSError | None = None
        try:
            for file in self.files:
                file.datasync()
        except OSError as error:
            problem = error
        with self.changed:
            self.syncing = False
            if problem is None:
                self.synced = max(self.synced, target)
            else:
                self.failed, self.retired = problem, True
            self.changed.notify_all()
