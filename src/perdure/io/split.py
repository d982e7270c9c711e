"""An engine for disks and one for objects, as one: a slow object store takes no thread and no place from a disk.

Contract: that of `io.api.Engine`; requests to objects and to files of one batch are under way at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perdure.io.api import Engine, IOClass, Request
from perdure.io.engine import ThreadEngine, check_requests
from perdure.io.objects import ObjectFile


class SplitEngine:
    def __init__(self, disk: Engine, objects: ThreadEngine):
        self._disk, self._objects = disk, objects

    def run(
        self,
        requests: Sequence[Request],
        *,
        io_class: IOClass,
        deadline: float | None = None,
        done: Callable[[Request], None] | None = None,
    ) -> None:
        far = [request for request in requests if isinstance(request.file, ObjectFile)]
        if not far:
            self._disk.run(requests, io_class=io_class, deadline=deadline, done=done)
            return
        check_requests(requests)
        near = [request for request in requests if not isinstance(request.file, ObjectFile)]
        batch = self._objects.begin(far, io_class=io_class, deadline=deadline, done=done)
        try:
            if near:
                self._disk.run(near, io_class=io_class, deadline=deadline, done=done)
        finally:
            self._objects.finish(batch)

    def unsettled(self) -> int:
        return self._disk.unsettled() + self._objects.unsettled()

    def close(self) -> None:
        self._disk.close()
        self._objects.close()
