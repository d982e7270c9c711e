"""What became of a store's segments since the last look, so that looking costs what has changed, not what there is.

Contract
- Every change of a segment's record is written, in the same script, to a log beside it: one per group, of bounded
  length. An entry has a number of its own, which no other entry ever has.
- Who has read as far as an entry asks for what follows it. If the entry is not there any more, or another one has its
  place (the log was cut, or a failover took back what had been seen), all segments of the group are listed instead.
- One round, whatever has changed. Not thread-safe: its user looks from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.catalog import codec
from perdure.catalog.api import SegmentRecord
from perdure.catalog.valkey_link import Command
from perdure.catalog.valkey_names import SEGMENT_LOG, SEGMENT_NEWS, SEGMENTS, Names


@dataclass(slots=True)
class _Group:
    entry: bytes = b""  # the last one read
    number: bytes = b""
    known: set[bytes] = field(default_factory=set)


class SegmentNews:
    """ask_all: one command per group, their answers."""

    def __init__(self, names: Names, ask_all: Callable[[Sequence[Command], str], list[Any]]):
        self._names, self._ask_all = names, ask_all
        self._groups = [_Group() for _ in range(names.count)]

    def look(self, also: Collection[bytes] = ()) -> dict[bytes, SegmentRecord | None]:
        """Segments that were changed since the last look, at first all, and those of `also`, as they are now; None:
        there is none (any more). Raises CatalogError; then the next look tells it."""
        named: list[list[bytes]] = [[] for _ in self._groups]
        for segment in also:
            named[self._names.group_of(segment)].append(segment)
        commands = [
            SEGMENT_NEWS.call(
                [self._names.key(number, SEGMENTS), self._names.key(number, SEGMENT_LOG)],
                *(group.entry, group.number, *named[number]),
            )
            for number, group in enumerate(self._groups)
        ]
        answers = self._ask_all(commands, "asking for news of the segments")
        changed: dict[bytes, SegmentRecord | None] = dict.fromkeys(also)
        for group, (entry, number, whole, flat) in zip(self._groups, answers, strict=True):
            told = dict(zip(flat[::2], flat[1::2], strict=True))
            if whole:
                changed.update(dict.fromkeys(group.known - told.keys()))
                group.known.clear()
            for segment, raw in told.items():
                changed[segment] = codec.unpack_segment(segment, raw) if raw else None
            group.known.update(segment for segment, raw in told.items() if raw)
            group.known.difference_update(segment for segment, raw in told.items() if not raw)
            group.entry, group.number = entry, number
        return changed
