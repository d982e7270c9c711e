"""What a reader's own names of published blocks stand for. Pure: tables in, positions out.

Contract: a name counts only if all its bytes are equal. Thread-safe, since nothing here ever changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perdure.catalog.api import KeyArray, fingerprints

NOWHERE = -1


class Part(NamedTuple):
    """One publication: its number, and of its blocks the names that one reader gives them, and those it is stored
    under. Both (n, 32)."""

    number: int
    asked: KeyArray
    stored: KeyArray


class Aliases:
    """Of one reader's keyspace. `stored`: (n, 32), `numbers`: (n,), by row."""

    def __init__(self, parts: Sequence[Part]):
        """At least one part."""
        asked = np.concatenate([part.asked for part in parts])
        order = np.argsort(fingerprints(asked), kind="stable")  # of equal names the first part's counts
        self._asked, self._prints = asked[order], fingerprints(asked[order])
        self.stored = np.concatenate([part.stored for part in parts])[order]
        self.numbers = np.repeat([part.number for part in parts], [len(part.asked) for part in parts])[order]

    def rows(self, keys: KeyArray) -> NDArray[np.intp]:
        """Per key the row that it is the name of, NOWHERE if of none."""
        found = np.minimum(np.searchsorted(self._prints, fingerprints(keys)), len(self._prints) - 1)
        same = (self._asked[found] == keys).all(axis=1)
        return np.where(same, found, NOWHERE)
