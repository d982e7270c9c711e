"""Questions that wait: parked until someone publishes or gives up what they wait for, without a thread.

Contract
- A parked question costs its connection and some memory. Whoever wakes it only hands it over (`Waiters`); a few threads
  look again, and answer or park it again. Exactly one answer is given, at its deadline at the latest.
- What becomes of a connection that ends meanwhile is `drop`ped; an answer that can no longer be sent is the server's
  to undo.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from perdure import limits
from perdure.core import Core
from perdure.errors import PerdureError
from perdure.flight import arm
from perdure.service import messages as m
from perdure.service.fields import failure
from perdure.service.verbs import Waiting
from perdure.waiting import Waiter

_LOG = logging.getLogger("perdure.service")
_BATCH = 64  # handed to one thread at a time
_IDLE_S = 1.0

Reply = Callable[[m.Message], None]


class Ticket(Waiter):
    """A parked question. The lock is held while it is looked at, not while it is answered."""

    __slots__ = ("done", "lock", "number", "reply", "waiting")

    def __init__(self, parking: Parking, question_id: int, waiting: Waiting, reply: Reply):
        super().__init__(parking.wake)
        self.number, self.waiting, self.reply = question_id, waiting, reply
        self.lock = threading.Lock()
        self.done = False


class Parking:
    """All parked questions of a service. Thread-safe."""

    def __init__(self, core: Core):
        self._core = core
        self._woken: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._live: set[Ticket] = set()
        self._due: list[tuple[float, int, Ticket]] = []
        self._order = itertools.count()
        self._stop = False
        self._threads = [
            threading.Thread(target=self._run, name=f"perdure-wake-{number}", daemon=True)
            for number in range(limits.service_waking_threads)
        ]

    def __len__(self) -> int:
        return len(self._live)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No more answers."""
        self._stop = True
        for _ in self._threads:
            self._woken.put([])
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for ticket in list(self._live):
            self.drop(ticket)

    def park(self, ticket: Ticket) -> None:
        """Have the question answered, now or later, on this thread or another."""
        with self._lock:
            self._live.add(ticket)
        self._settle(ticket)
        if not ticket.done:
            with self._lock:
                heapq.heappush(self._due, (ticket.waiting.until, next(self._order), ticket))
                first = self._due[0][2] is ticket
                if len(self._due) > 2 * len(self._live) + _BATCH:
                    self._due = [entry for entry in self._due if not entry[2].done]
                    heapq.heapify(self._due)
            if first:
                self._woken.put([])  # so that a thread waits for this deadline

    def drop(self, ticket: Ticket) -> None:
        """Nobody waits for the answer any more."""
        ticket.done = True
        self._core.waiters.remove(ticket)
        with self._lock:
            self._live.discard(ticket)

    def wake(self, tickets: list[Waiter]) -> None:
        for first in range(0, len(tickets), _BATCH):
            self._woken.put(tickets[first : first + _BATCH])

    # --- threads
    def _run(self) -> None:
        while not self._stop:
            due = self._due[:1]
            left = min(_IDLE_S, due[0][0] - time.monotonic()) if due else _IDLE_S
            try:
                tickets = self._woken.get(timeout=max(0.0, left))
            except queue.Empty:
                tickets = []
            for ticket in (*tickets, *self._overdue()):
                self._settle(ticket)

    def _overdue(self) -> list[Ticket]:
        now, over = time.monotonic(), []
        with self._lock:
            while self._due and self._due[0][0] <= now:
                over.append(heapq.heappop(self._due)[2])
        return over

    def _settle(self, ticket: Ticket) -> None:
        """Look, and answer if it is decided or its time is over. Never raises."""
        try:
            answer = self._answer(ticket)
            if answer is not None:
                ticket.reply(answer)
        except Exception:  # noqa: BLE001 (the others are still to be answered)
            _LOG.exception("a question that waited could not be answered")

    def _answer(self, ticket: Ticket) -> m.Message | None:
        waiting = ticket.waiting
        with ticket.lock:
            if ticket.done:
                return None
            try:
                look = arm(self._core.waiters, ticket, waiting.wish)
                if not look.decided and time.monotonic() < waiting.until:
                    if ticket.done:  # dropped meanwhile
                        self._core.waiters.remove(ticket)
                    return None
                answer = waiting.answer_of(look.value)
            except Exception as error:  # noqa: BLE001 (which is the answer)
                if not isinstance(error, PerdureError):
                    _LOG.exception("a question failed")
                answer = failure(ticket.number, error)
            self.drop(ticket)
            return answer
