"""An open segment: what its writer knows of it between creation and seal, and the group commit of its appends.

Contract
- `sync` is a group commit: threads that wait together share one fdatasync. After a failed fdatasync the segment takes
  no more appends and nothing that was not synced before is acknowledged (the kernel may have dropped the pages).
- All fields but those of the group commit are guarded by the writer's lock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from perdure.catalog.api import Durability
from perdure.io.api import File

SegmentClass = tuple[bytes, Durability, int]  # tenant, durability, retention class


@dataclass(slots=True, eq=False)
class OpenSegment:
    segment: bytes
    kind: SegmentClass
    files: list[File]
    limit_bytes: int
    created_s: int
    boot_id: bytes
    last_used: float
    allocated_bytes: int = 0
    tail: int = 0
    users: int = 0  # appends between reservation and publish
    retired: bool = False  # no more appends
    sealed: bool = False
    expires_s: int = 0
    lasting: bool = False  # some record never expires
    entries: list[NDArray[np.void]] = field(default_factory=list)
    written: int = 0  # generation counters of the group commit
    synced: int = 0
    syncing: bool = False
    failed: OSError | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def sync(self) -> None:
        """Make every append that has returned durable. Raises OSError if the disk refuses, now or earlier."""
        with self.changed:
            mine = self.written
            while True:
                if self.failed is not None:
                    raise OSError(self.failed.errno, f"segment {self.segment.hex()}: an earlier fdatasync failed")
                if self.synced >= mine:
                    return
                if not self.syncing:
                    break
                self.changed.wait()
            self.syncing, target = True, self.written
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
        if problem is not None:
            raise problem
