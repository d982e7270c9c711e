"""The in-flight cap per device, with restores before write-back.

Contract
- At most `inflight_max` places of a device are taken at any time, by whatever engines share the gate. A freed place
  goes to the first waiting RESTORE, else to the first waiting WRITE_BACK; within a class the order is that of arrival.
- Every operation is O(1). The lock is never held across I/O or the caller's code.
- Tolerated: waiters that give up, at any number (nothing of them stays).
- Not guaranteed: progress of WRITE_BACK while RESTOREs saturate the device.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from perdure import limits
from perdure.errors import InvalidArgument
from perdure.io.api import IOClass


def remaining_s(deadline: float | None) -> float:
    """As `Lock.acquire` wants it: -1 waits for good."""
    if deadline is None:
        return -1
    return min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)


class Ticket:
    """A wish for one place of a device."""

    __slots__ = ("device", "io_class", "waiting")

    def __init__(self, device: int, io_class: IOClass) -> None:
        self.device = device
        self.io_class = io_class
        self.waiting = False

    def granted(self) -> bool:
        """Called once, outside the gate's lock, with the place held. False refuses it: it goes to the next ticket."""
        raise NotImplementedError


class _Waiter(Ticket):
    __slots__ = ("latch",)

    def __init__(self, device: int, io_class: IOClass) -> None:
        super().__init__(device, io_class)
        self.latch = threading.Lock()
        self.latch.acquire()

    def granted(self) -> bool:
        self.latch.release()
        return True


class _Device:
    __slots__ = ("inflight", "peak", "queues")

    def __init__(self) -> None:
        self.inflight = 0
        self.peak = 0
        self.queues: tuple[OrderedDict[Ticket, None], ...] = tuple(OrderedDict() for _ in IOClass)


class DeviceGate:
    """Places for transfers, counted per `st_dev`. Tickets wait only while all places are taken."""

    def __init__(self, inflight_max: int = limits.inflight_per_device_max) -> None:
        if inflight_max < 1:
            raise InvalidArgument(f"inflight_max must be >= 1, not {inflight_max}")
        self.inflight_max = inflight_max
        self._lock = threading.Lock()
        self._devices: dict[int, _Device] = {}

    def submit(self, ticket: Ticket) -> None:
        """Ask for a place; `ticket.granted` is called now or when its turn comes."""
        with self._lock:
            device = self._device(ticket.device)
            if device.inflight >= self.inflight_max:
                ticket.waiting = True
                device.queues[ticket.io_class][ticket] = None
                return
            self._take(device)
        if not ticket.granted():
            self.release(ticket.device)

    def withdraw(self, ticket: Ticket) -> bool:
        """Take a wish back. True: it was waiting and will never be granted. False: it has been granted already."""
        with self._lock:
            if not ticket.waiting:
                return False
            ticket.waiting = False
            del self._devices[ticket.device].queues[ticket.io_class][ticket]
            return True

    def try_acquire(self, device: int) -> bool:
        """A place, if one is free now (then nobody waits for one)."""
        with self._lock:
            state = self._device(device)
            if state.inflight >= self.inflight_max:
                return False
            self._take(state)
            return True

    def acquire(self, device: int, io_class: IOClass, deadline: float | None = None) -> bool:
        """Wait for a place until `deadline` (a `time.monotonic()` reading); False if it did not come in time."""
        ticket = _Waiter(device, io_class)
        self.submit(ticket)
        try:
            came = ticket.latch.acquire(timeout=remaining_s(deadline))
        except BaseException:
            if not self.withdraw(ticket):
                self.release(device)
            raise
        return came or not self.withdraw(ticket)

    def release(self, device: int) -> None:
        """Give a place back: to the first waiting RESTORE, else to the first waiting WRITE_BACK, else to nobody."""
        state = self._devices[device]
        while True:
            with self._lock:
                queue = next((queue for queue in state.queues if queue), None)
                if queue is None:
                    state.inflight -= 1
                    return
                ticket, _ = queue.popitem(last=False)
                ticket.waiting = False
            if ticket.granted():
                return

    def must_pass_on(self, device: int, io_class: IOClass) -> bool:
        """Whether someone of this class or a better one waits: then a place that could be used again is released."""
        queues = self._devices[device].queues
        return bool(queues[0] or (io_class and queues[1]))

    def inflight(self, device: int) -> int:
        return self._devices[device].inflight if device in self._devices else 0

    def peak(self, device: int) -> int:
        """The most places ever taken at once."""
        return self._devices[device].peak if device in self._devices else 0

    def waiting(self, device: int) -> int:
        with self._lock:
            return sum(map(len, self._device(device).queues))

    def _device(self, device: int) -> _Device:
        state = self._devices.get(device)
        if state is None:
            state = self._devices[device] = _Device()
        return state

    def _take(self, state: _Device) -> None:
        state.inflight += 1
        if state.inflight > state.peak:
            state.peak = state.inflight
