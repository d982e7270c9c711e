"""How likely a block is asked for again, per class, learned from a bounded sample of keys.

Contract
- A key is sampled by its own bits, so an offer and a later question agree without a table. When the sample is full,
  half of the keys leave it (fixed-size spatial sampling: Waldspurger et al., SHARDS, FAST 2015).
- The probability is the product-limit estimate over ages (Kaplan-Meier): keys that are still waiting count for as long
  as they have waited. What happened longer ago counts less, by half each `limits.admission_half_life_s`.
- A question within `limits.admission_own_request_s` of the offer is the same request's, and tells nothing.
- Thread-safe. A question that concerns no sampled key takes no lock.
- Never: more than `limits.admission_sample_keys_max` keys, an error for a key it does not know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.catalog.api import KeyArray

_AGES: Final = (limits.admission_age_s_max - 1).bit_length()  # bucket b > 0 holds ages of 2^b to 2^(b+1) seconds
_WORD: Final = 3  # of a key, as four 64-bit words: not the one that is its fingerprint
_RATE_ONE: Final = 1 << 64
Floats = NDArray[np.float64]


class Reuse:
    """`classes`: how many there are. now_s: a clock that goes on while the machine sleeps."""

    def __init__(self, classes: int, now_s: Callable[[], float], keys_max: int = limits.admission_sample_keys_max):
        self._classes, self._now_s, self._keys_max = classes, now_s, keys_max
        self._rate = _RATE_ONE // limits.admission_sample_factor
        self._below = np.uint64(self._rate)
        self._lock = threading.Lock()
        self._places: dict[bytes, int] = {}  # the keys that wait to be asked for, oldest first
        self._free = list(range(keys_max))
        self._born, self._kind = np.zeros(keys_max), np.full(keys_max, -1, np.intp)
        self._ended = np.zeros((classes, _AGES + 1))  # weight by age when asked for; the last column: never was
        self._weighed_s = now_s()
        self._estimate: tuple[float, float, Floats, Floats] | None = None  # when, kept_s, chances, survivors
        self._samples: Floats = np.zeros(classes)

    # --- what happens
    def _sampled(self, keys: KeyArray) -> NDArray[np.bool_]:
        sampled: NDArray[np.bool_] = keys.view("<u8")[:, _WORD] < self._below
        return sampled

    def asked(self, keys: KeyArray) -> None:
        """Someone wants these blocks."""
        sampled = self._sampled(keys)
        if np.count_nonzero(sampled) and self._places:
            names = [keys[place].tobytes() for place in sampled.nonzero()[0].tolist()]
            with self._lock:
                self._ask(names, self._now_s())

    def _ask(self, names: list[bytes], now: float) -> None:
        for name in names:
            place = self._places.get(name)
            if place is None or now - self._born[place] < limits.admission_own_request_s:
                continue
            self._end(name, now, asked=True)

    def offered(self, keys: KeyArray, kinds: NDArray[np.intp]) -> None:
        """These blocks are to be written; whether they are makes no difference. One that waits already is wanted."""
        chosen = self._sampled(keys).nonzero()[0].tolist()
        if not chosen:
            return
        with self._lock:
            now = self._now_s()
            self._ask([keys[place].tobytes() for place in chosen], now)
            for place in chosen:
                name = keys[place].tobytes()
                if name in self._places or not self._room(name):
                    continue
                slot = self._places[name] = self._free.pop()
                self._born[slot], self._kind[slot] = now, kinds[place]

    def _room(self, name: bytes) -> bool:
        """Whether the key is (still) sampled, and there is a place for it."""
        while not self._free:
            self._rate //= 2
            self._below = np.uint64(self._rate)
            self._ended /= 2  # stands for keys sampled twice as often
            for other in [one for one in self._places if not self._is_sampled(one)]:
                self._forget(other)
        return self._is_sampled(name)

    def _is_sampled(self, name: bytes) -> bool:
        return int.from_bytes(name[8 * _WORD : 8 * _WORD + 8], "little") < self._rate

    def _forget(self, name: bytes) -> int:
        slot = self._places.pop(name)
        self._free.append(slot)
        kind, self._kind[slot] = int(self._kind[slot]), -1
        return kind

    def _end(self, name: bytes, now: float, *, asked: bool) -> None:
        self._weigh(now)
        age = max(0.0, now - float(self._born[self._places[name]]))
        column = int(_bucket(np.array([age]))[0]) if asked else _AGES
        self._ended[self._forget(name), column] += _weight(np.array([age]))[0]

    def _weigh(self, now: float) -> None:
        """Let what has ended fade up to now."""
        if now > self._weighed_s:
            self._ended *= _weight(np.array([now - self._weighed_s]))[0]
            self._weighed_s = now

    # --- what is known
    def chances(self, kept_s: float, survivors_min: float) -> tuple[Floats, NDArray[np.bool_]]:
        """(P, known) per class: the chance to be asked for within `kept_s`; known where at least `survivors_min`
        keys have waited for `limits.admission_patience_s` in vain. Where nearly all are asked for it never is, nor need
        be. Made anew once a second."""
        with self._lock:
            now = self._now_s()
            made = self._estimate
            if made is None or now - made[0] >= 1.0 or now < made[0] or kept_s < 0.5 * made[1] or kept_s > 2 * made[1]:
                made = self._estimate = (now, kept_s, *self._made(now, kept_s))
            return made[2], made[3] >= survivors_min

    def samples(self) -> Floats:
        """Effective number per class, as of the last estimate."""
        return self._samples

    def _made(self, now: float, kept_s: float) -> tuple[Floats, Floats]:
        self._weigh(now)
        for name in [
            name for name, slot in self._places.items() if now - self._born[slot] >= 2.0**_AGES
        ]:  # the oldest come first, but a clock may be a test's
            self._end(name, now, asked=False)
        if len(self._places) < self._keys_max // 8:
            self._rate = min(2 * self._rate, _RATE_ONE // limits.admission_sample_factor)
            self._below = np.uint64(self._rate)
        live = self._kind >= 0
        age = np.maximum(now - self._born[live], 0.0)
        cell = self._kind[live] * (_AGES + 1) + _bucket(age)
        waiting: Floats = np.bincount(cell, _weight(age), self._ended.size).reshape(self._ended.shape).astype(float)
        ended, waited = _from_here(self._ended), _from_here(waiting)
        at_risk = ended + waited - waiting / 2  # who waits inside a bucket has been through half of it
        hazard = np.divide(self._ended, at_risk, out=np.zeros_like(at_risk), where=at_risk > 0)[:, :_AGES]
        within = int(_bucket(np.array([min(kept_s, 2.0**_AGES)]))[0])
        chances: Floats = 1 - np.prod(1 - np.minimum(hazard[:, : within + 1], 1.0), axis=1)
        self._samples = ended[:, 0] + waited[:, 0]
        patience = int(_bucket(np.array([limits.admission_patience_s]))[0])
        return chances, ended[:, patience] + waited[:, patience]


def _bucket(age_s: Floats) -> NDArray[np.intp]:
    return np.clip(np.log2(np.maximum(age_s, 1.0)), 0, _AGES - 1).astype(np.intp)


def _weight(age_s: Floats) -> Floats:
    weight: Floats = np.exp2(-age_s / limits.admission_half_life_s)
    return weight


def _from_here(cells: NDArray[Any]) -> Floats:
    """Sum over a column and all after it."""
    sums: Floats = cells[:, ::-1].cumsum(axis=1)[:, ::-1]
    return sums
