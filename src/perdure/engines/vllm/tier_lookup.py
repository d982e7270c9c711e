"""The tier's questions to the service: asked by a thread of their own, answered to the scheduler from what has come.

Contract
- `Lookups` belongs to the scheduler's thread, and nothing there waits: `lookup` looks at finished answers, `flush`
  hands this step's new questions over.
- A positive answer is a block that the service has verified and holds in its memory for us (`Hold`). Only where it has
  no memory to hold it, or no room, is it a block that is merely stored; its load reads and verifies it.
- A question that the service does not answer within `lookup_s` of the last sign of life is a miss: a stuck service
  delays a request by that much, once.
- A block whose load failed is a miss until its requests are over, so that nobody asks for it again and again; storing
  it anew ends that.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from perdure import limits
from perdure.engines.vllm.affinity import unbind
from perdure.errors import PerdureError, ServiceBusy, ServiceUnavailable

ROUND_BYTES: Final = 32 * limits.MIB  # held and answered at a time: loads begin while the rest is on its way
ROUNDS_AHEAD: Final = 3  # so that the disk does not wait for us, nor the copies for the disk
HOLD_MARGIN_S: Final = 1.0  # a hold that ends sooner is not worth a load
_log = logging.getLogger(__name__)


class Hold:
    """Blocks in the service's memory, in one view, until the last of them is dropped. Thread-safe."""

    def __init__(self, view: Any, count: int, until: float):
        self._view, self._left, self._until = view, count, until
        self._lock = threading.Lock()

    def block(self, position: int) -> memoryview | None:
        blocks = self._view.blocks
        return blocks[position] if position < len(blocks) else None

    def valid(self, margin_s: float = 0.0) -> bool:
        """Whether what was copied so far was what the service has verified."""
        return time.monotonic() + margin_s <= self._until and bool(self._view.valid)

    def drop(self) -> None:
        with self._lock:
            self._left -= 1
            over = not self._left
        if over:
            self._view.release()


@dataclass(frozen=True, slots=True)
class Held:
    """One block of a hold; `hold` None: stored, but not held."""

    hold: Hold | None
    position: int = 0

    def good(self) -> bool:
        return self.hold is None or self.hold.valid(HOLD_MARGIN_S)


STORED: Final = Held(None)


@dataclass(slots=True)
class _Asked:
    number: int
    since: float
    requests: set[str] = field(default_factory=set)
    answer: Held | bool | None = None  # None: none yet; False: not there; True: being loaded


_Question = tuple[bytes, int]  # the key, and which asking of it this is
_Answer = tuple[bytes, int, Held | bool]


class Lookups:
    """space_of: the keyspace of a group, for the asking thread; raises PerdureError. lookup_s: until an answer is late.
    hold_s: how long a block is held. fetch_s: until the service has to have brought it."""

    def __init__(self, space_of: Callable[[int], Any], *, lookup_s: float, hold_s: float, fetch_s: float):
        self._asked: dict[bytes, _Asked] = {}
        self._of_request: dict[str, set[bytes]] = {}
        self._batch: list[_Question] = []
        self._numbers = 0
        self._lookup_s = lookup_s
        self._now, self._stuck = time.monotonic(), False
        self._asker = _Asker(space_of, hold_s, fetch_s)

    def lookup(self, key: bytes, request: str) -> bool | None:
        """True: there; False: not there; None: not known yet."""
        asked = self._asked.get(key)
        if asked is None or (isinstance(asked.answer, Held) and not asked.answer.good()):
            if self._stuck:
                return False
            asked = self._ask(key, asked)
        if request not in asked.requests:
            asked.requests.add(request)
            self._of_request.setdefault(request, set()).add(key)
        answer = asked.answer
        if answer is None:
            if self._now - max(asked.since, self._asker.alive_at) <= self._lookup_s and not self._stuck:
                return None
            self._numbers += 1
            asked.number, asked.answer = self._numbers, False
            return False
        return answer is not False

    def _ask(self, key: bytes, old: _Asked | None) -> _Asked:
        self._numbers += 1
        asked = _Asked(self._numbers, self._now)
        if old is not None:
            asked.requests = old.requests
            self._drop(old)
        self._asked[key] = asked
        self._batch.append((key, asked.number))
        return asked

    def flush(self) -> None:
        """At the end of a step: hand over what is asked."""
        self.collect()
        batch, self._batch = self._batch, []
        live = [(key, number) for key, number in batch if (a := self._asked.get(key)) and a.number == number]
        if live:
            self._asker.ask(live)

    def collect(self) -> None:
        """Take in what was answered; once per step is enough, and it is when the clock is read."""
        self._now, self._stuck = time.monotonic(), self._asker.stuck(self._lookup_s)
        for key, number, answer in self._asker.answers():
            asked = self._asked.get(key)
            if asked is not None and asked.number == number:
                asked.answer = answer
            elif isinstance(answer, Held) and answer.hold is not None:
                self._asker.drop(answer.hold)

    # --- loads
    def take(self, keys: Sequence[bytes]) -> list[Held]:
        """The blocks' holds, which are the load's from here on."""
        taken = []
        for key in keys:
            asked = self._asked.get(key)
            held = asked.answer if asked is not None and isinstance(asked.answer, Held) else STORED
            if asked is not None:
                asked.answer = True
            taken.append(held)
        return taken

    def loaded(self, keys: Collection[bytes], failed: Collection[bytes]) -> None:
        """What was loaded may be asked for again; what failed is a miss."""
        for key in keys:
            asked = self._asked.get(key)
            if asked is None:
                continue
            if key in failed and asked.requests:
                self._numbers += 1
                asked.number, asked.answer = self._numbers, False
            else:
                del self._asked[key]

    def stored(self, keys: Collection[bytes]) -> None:
        for key in keys:
            asked = self._asked.get(key)
            if asked is not None and asked.answer is False:
                del self._asked[key]

    def found(self) -> dict[str, int]:
        """How many of the blocks held since the last call came from the service's memory, and from the disk."""
        with self._asker.counting:
            counted, self._asker.found = self._asker.found, Counter()
        return dict(counted)

    # --- ends
    def forget(self, request: str) -> None:
        """The request asks no more."""
        for key in self._of_request.pop(request, ()):
            asked = self._asked.get(key)
            if asked is None:
                continue
            asked.requests.discard(request)
            if not asked.requests and asked.answer is not True:
                del self._asked[key]
                self._drop(asked)

    def reset(self) -> None:
        """Forget everything; answers that are on their way are not taken in."""
        for asked in self._asked.values():
            self._drop(asked)
        self._asked.clear()
        self._of_request.clear()
        self._batch.clear()

    def _drop(self, asked: _Asked) -> None:
        if isinstance(asked.answer, Held) and asked.answer.hold is not None:
            self._asker.drop(asked.answer.hold)

    def stop(self) -> None:
        """After the connection was closed, so that nothing waits."""
        self.reset()
        self._asker.stop()
        self.collect()


class _Asker:
    """The thread that asks."""

    def __init__(self, space_of: Callable[[int], Any], hold_s: float, fetch_s: float):
        self._space_of, self._hold_s, self._fetch_s = space_of, hold_s, fetch_s
        self._work: queue.SimpleQueue[list[_Question] | Hold | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[_Answer]] = queue.SimpleQueue()
        self.alive_at = self.busy_since = 0.0
        self.found: Counter[str] = Counter()  # where the service had the blocks that it holds for us
        self.counting = threading.Lock()
        self._rounds = ThreadPoolExecutor(ROUNDS_AHEAD, thread_name_prefix="perdure-tier-hold", initializer=unbind)
        self._thread = threading.Thread(target=self._run, name="perdure-tier-ask", daemon=True)
        self._thread.start()

    def ask(self, questions: list[_Question]) -> None:
        self._work.put(questions)

    def stuck(self, limit_s: float) -> bool:
        since = self.busy_since
        return bool(since) and time.monotonic() - max(since, self.alive_at) > limit_s

    def drop(self, hold: Hold) -> None:
        """In this thread, for the scheduler's must not send anything."""
        self._work.put(hold)

    def answers(self) -> list[_Answer]:
        found: list[_Answer] = []
        while True:
            try:
                found += self._answers.get_nowait()
            except queue.Empty:
                return found

    def stop(self) -> None:
        self._work.put(None)
        self._thread.join()
        self._rounds.shutdown(wait=True)

    def _run(self) -> None:
        unbind()
        while (work := self._work.get()) is not None:
            if isinstance(work, Hold):
                work.drop()
                continue
            self.busy_since = time.monotonic()
            groups: dict[int, list[_Question]] = {}
            for question in work:
                groups.setdefault(int.from_bytes(question[0][-4:], "big"), []).append(question)
            for group, questions in groups.items():
                self._ask_group(group, questions)
            self.busy_since = 0.0

    def _ask_group(self, group: int, questions: list[_Question]) -> None:
        def answer(part: Sequence[_Question], found: Sequence[Held | bool]) -> None:
            self.alive_at = time.monotonic()
            self._answers.put([(key, number, one) for (key, number), one in zip(part, found, strict=True)])

        rest = questions
        try:
            space = self._space_of(group)
            names = space.adopt_hashes([key[:-4] for key, _ in questions])
            there = space.present(names)
            absent = [question for question, yes in zip(questions, there, strict=True) if not yes]
            answer(absent, [False] * len(absent))
            places, rest = np.flatnonzero(there).tolist(), []
            most = max(1, ROUND_BYTES // space.layout.block_bytes)
            parts = [places[at : at + most] for at in range(0, len(places), most)]
            for part, future in [(part, self._rounds.submit(self._hold, space, names[part])) for part in parts]:
                asked = [questions[place] for place in part]
                try:
                    answer(asked, future.result())
                except PerdureError:
                    answer(asked, [False] * len(asked))
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a miss, and this thread goes on)
            if not isinstance(error, PerdureError):
                _log.warning("perdure tier: a lookup failed", exc_info=True)
            answer(rest, [False] * len(rest))

    def _hold(self, space: Any, names: Any) -> list[Held | bool]:
        until = time.monotonic() + self._hold_s
        try:
            view = space.view(names, deadline_s=self._fetch_s, ttl_s=self._hold_s)
        except (ServiceBusy, ServiceUnavailable):  # it holds enough for us, or has no memory
            space.begin(time.monotonic() + limits.send_wait_s)  # unless it is gone
            return [STORED] * len(names)
        found = [block is not None for block in view.blocks]
        with self.counting:
            self.found["memory"] += view.report.from_memory
            self.found["disk"] += max(0, sum(found) - view.report.from_memory)
        hold = Hold(view, sum(found), until)
        if not any(found):
            view.release()
        no_room = [why.startswith("no room") for why in (view.report.problems.get(p, "") for p in range(len(found)))]
        return [
            Held(hold, place) if yes else STORED if full else False
            for place, (yes, full) in enumerate(zip(found, no_room, strict=True))
        ]
