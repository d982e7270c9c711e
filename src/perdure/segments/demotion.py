"""Making room ahead of writes: the coldest segments go to the cold tier, the coldest there go for good.

Contract
- A segment is chosen as reclaim chooses its victims; what is hot or pinned in it is copied forward first. One that is
  mostly released, or expires soon, is not worth an object: it is dropped.
- Writes never wait for the object store. They find the room that was made ahead, or evict as without a cold tier.
- The tier's capacity is kept by dropping the segments there that were used longest ago. Pinned blocks stay.
- If anything fails nothing is lost: the segment stays where it is and is tried again. One that the disk cannot read is
  left where it is until the store is opened again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.catalog.api import BlockIndex, SegmentRecord, SegmentState, fingerprints
from perdure.io.objects import ObjectStoreError
from perdure.presence import PresenceIndex
from perdure.segments.cold import ColdTier
from perdure.segments.format import record_bytes_array
from perdure.segments.reclaim import Outcome, Reclaimer
from perdure.segments.recovery import entry_keys
from perdure.segments.space import SpaceBudget
from perdure.segments.table import SegmentTable


class Demoter:
    """Thread-safe."""

    def __init__(
        self,
        tier: ColdTier,
        reclaimer: Reclaimer,
        table: SegmentTable,
        space: SpaceBudget,
        index: BlockIndex,
        presence: PresenceIndex,
        entries: Callable[[bytes], NDArray[np.void]],
        now_s: Callable[[], int],
        used_elsewhere: Callable[[Sequence[SegmentRecord]], NDArray[np.uint32]],
    ):
        """entries, now_s, used_elsewhere: as of `Reclaimer`."""
        self._tier, self._reclaimer, self._table, self._space = tier, reclaimer, table, space
        self._index, self._presence = index, presence
        self._entries, self._now_s, self._used_elsewhere = entries, now_s, used_elsewhere
        self._refused: set[bytes] = set()
        self._running = threading.Lock()

    def goal_bytes(self, need: int = 0) -> int:
        """What segments on the disk should take at most, so that the next writes, and `need` bytes, find room."""
        usable = self._space.capacity - self._space.kept_back
        return min(int(usable * (1 - limits.cold_ahead_ratio)), usable - need)

    def is_idle(self, need: int = 0) -> bool:
        """Nothing to do, or nobody to do it with."""
        return self._space.used <= self.goal_bytes(need) or not self._tier.objects.answers

    def run(self, stopped: Callable[[], bool] = lambda: False, need: int = 0) -> int:
        """Until there is room again, or nothing more can be done; how many segments went there.

        Raises OSError, CatalogError."""
        with self._running:
            return self._run(stopped, need)

    def _run(self, stopped: Callable[[], bool], need: int) -> int:
        left = self._refused.copy()  # and those that were looked at
        went = 0
        try:
            while not self.is_idle(need) and not stopped():
                chosen = self._prepare(left, self._space.used - self.goal_bytes(need))
                if chosen is None:
                    break
                victim, upload = chosen
                left.add(victim.segment)
                if upload and self._room_for(victim) and self._uploaded(victim):
                    with self._reclaimer.turn() as mine:
                        went += mine and self._tier.settle(victim)
        except ObjectStoreError:  # counted; it is left alone for a while
            pass
        return went

    def _uploaded(self, victim: SegmentRecord) -> bool:
        try:
            self._tier.upload(victim)
        except FileNotFoundError:  # dropped meanwhile
            return False
        except ObjectStoreError:
            raise
        except OSError:
            self._refused.add(victim.segment)
            self._tier.counters.segments_refused += 1
            return False
        return True

    def _prepare(self, left: set[bytes], nbytes: int) -> tuple[SegmentRecord, bool] | None:
        """The next segment to go, freed of what is kept on the disk, and whether to upload it; None: there is none."""
        with self._reclaimer.turn() as mine:
            if not mine:
                return None
            self._reclaimer.before()
            chosen = self._reclaimer.choose(nbytes, left, None, note=False)
            if chosen is None:
                return None
            victim, hotter_than = chosen
            if self._reclaimer.spared(victim):  # an erasure is at it
                return victim, False
            entries = self._entries(victim.segment)
            if victim.state is SegmentState.SEALED and self._is_worth(victim, entries):
                return victim, self._reclaimer.keep(victim, entries, hotter_than)
            self._reclaimer.drop(victim, hotter_than)
            return victim, False

    def _is_worth(self, record: SegmentRecord, entries: NDArray[np.void]) -> bool:
        """Whether enough of a segment may be asked for again."""
        now = self._now_s()
        if record.expires_s and record.expires_s - now < limits.cold_ttl_s_min:
            return False
        keys = entry_keys(entries)
        present, records = self._index.lookup(keys)
        prints = fingerprints(keys)
        released = (self._presence.probe(prints) >= 0) & (self._presence.recency_of(prints) == 0)
        expires = entries["record"]["expires_s"]
        live = present & (records == entries["record"]) & ~released & ((expires == 0) | (expires > now))
        nbytes = int(record_bytes_array(np.ascontiguousarray(entries["record"]["stored_bytes"])[live]).sum())
        return nbytes >= limits.cold_worth_ratio_min * record.sealed_bytes

    def _room_for(self, victim: SegmentRecord) -> bool:
        """Keep the tier's capacity. False if what is there is pinned, or cannot be deleted now."""
        given_up: set[bytes] = set()
        while True:
            ledger = self._tier.ledger()
            ledger.pop(victim.segment, None)
            if sum(ledger.values()) + victim.sealed_bytes <= self._tier.capacity:
                return True
            with self._reclaimer.turn() as mine:
                coldest = self._coldest(given_up) if mine else None
                if coldest is None:
                    return False
                if self._reclaimer.drop(coldest, None) is not Outcome.GONE:
                    given_up.add(coldest.segment)
                    continue
            self._tier.collect()

    def drop_empty(self) -> int:
        """Give up segments of the tier all of whose blocks have moved or gone; how many. Raises CatalogError."""
        dropped = 0
        with self._reclaimer.turn() as mine:
            if not mine or not self._presence.complete:  # who else uses the store may know of blocks there
                return 0
            held, frozen = set(np.unique(self._presence.columns().segment).tolist()), self._reclaimer.frozen()
            for record in self._tier.segments():
                if record.tenant not in frozen and self._table.ordinal(record.segment) not in held:
                    dropped += self._reclaimer.drop(record, None) is Outcome.GONE
        return dropped

    def _coldest(self, given_up: set[bytes]) -> SegmentRecord | None:
        pinned = set(self._presence.segments_of(self._reclaimer.staying()).tolist())
        frozen = self._reclaimer.frozen()
        candidates = [
            record
            for record in self._tier.segments()
            if record.segment not in given_up and record.tenant not in frozen
            and self._table.ordinal(record.segment) not in pinned
        ]  # fmt: skip
        if not candidates:
            return None
        every = self._presence.columns()
        numbers = np.array([self._table.ordinal(record.segment) for record in candidates])
        latest = np.zeros(max(int(every.segment.max(initial=0)), int(numbers.max())) + 1, np.uint32)
        np.maximum.at(latest, every.segment, every.recency)
        used = np.maximum(latest[numbers], self._used_elsewhere(candidates))
        return candidates[int(used.argmin())]
