"""Staging memory of one client: made by the service, lent to one call at a time, for blocks on their way through.

Contract: a region is lent to nobody else before `give`, which its call's end, or its late answer, brings about. At most
`limits.staging_bytes_max` together (one block more, if a single one is larger). Regions of a run that has ended go.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from perdure import limits
from perdure.service import messages as m
from perdure.service.transport import Late, Run, Transport

if TYPE_CHECKING:
    from perdure.service.client import Region

STAGED_BYTES = 16 * limits.MIB  # in one call
_WAIT_S_MAX = 3600.0


class Staging:
    def __init__(self, transport: Transport):
        self._transport = transport
        self._free: list[tuple[Run, Region]] = []
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = False

    def take(self, run: Run, nbytes: int, deadline: float) -> Region:
        """Memory of at least `nbytes`. Raises Late if all of it is in use until the deadline, and what `ask` raises."""
        size = max(STAGED_BYTES, -(-nbytes // limits.page_bytes) * limits.page_bytes)
        useless: list[tuple[Run, Region]] = []
        try:
            with self._changed:
                while True:
                    for one in self._free:
                        if one[0] is run and one[1].nbytes >= size:
                            self._free.remove(one)
                            return one[1]
                    self._bytes -= sum(region.nbytes for _, region in self._free)  # of an ended run, or too small
                    useless += self._free
                    self._free = []
                    if self._bytes + size <= limits.staging_bytes_max or not self._bytes:
                        self._bytes += size
                        break
                    if not self._changed.wait(max(0.0, min(deadline - time.monotonic(), _WAIT_S_MAX))):
                        raise Late
        finally:
            for one in useless:
                self._end(*one)
        try:
            return self._make(run, size, deadline)
        except BaseException:
            with self._changed:
                self._bytes -= size
                self._changed.notify_all()
            raise

    def give(self, run: Run, region: Region) -> None:
        with self._changed:
            kept = not run.ended.is_set() and not self._closed
            if kept:
                self._free.append((run, region))
            else:
                self._bytes -= region.nbytes
            self._changed.notify_all()
        if not kept:
            region.close()

    def _make(self, run: Run, size: int, deadline: float) -> Region:
        from perdure.service.client import Region

        made: list[Region] = []

        def receive(answer: Any, fds: list[int]) -> None:
            made.append(Region.received(fds[0], size, run, answer.number))

        def settle(answer: Any) -> None:
            if isinstance(answer, m.Made):  # it came too late to be used
                self._transport.tell(run, m.Unregister(0, answer.number))

        self._transport.ask(run, lambda i: m.Region(i, "staging", size), deadline, receive=receive, settle=settle)
        return made[0]

    def _end(self, run: Run, region: Region) -> None:
        number = region.numbers.get(run.welcome.client)
        if number is not None and not run.ended.is_set():
            self._transport.tell(run, m.Unregister(0, number))
        region.close()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            free, self._free = self._free, []
        for _, region in free:
            region.close()
