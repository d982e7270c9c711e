"""Whether blocks of generated tokens are worth storing: learnt from whether any is ever asked for.

A prompt of a later turn contains what was generated before; elsewhere generated text is never seen again. Hints only:
a wrong answer costs a write or a miss. Not thread-safe; `asked` may run beside the other methods.
"""

from __future__ import annotations

from collections.abc import Iterable

REMEMBERED_BLOCKS = 4096
JUDGED_BLOCKS_MIN = 512
READ_RATIO_MIN = 0.01
_SAMPLED = 16  # after a verdict against it every so many-th block is stored and watched all the same


class Generated:
    """mode: "auto", "always" or "never"."""

    def __init__(self, mode: str):
        self._mode = mode
        self._stored: dict[bytes, None] = {}
        self.stored_blocks = self.read_blocks = 0

    @property
    def worth_it(self) -> bool:
        return self.stored_blocks < JUDGED_BLOCKS_MIN or self.read_blocks >= READ_RATIO_MIN * self.stored_blocks

    def wanted(self, name: bytes) -> bool:
        """Whether to store this block of generated tokens."""
        if self._mode != "auto":
            return self._mode == "always"
        if not self.worth_it and name[0] % _SAMPLED:
            return False
        self.stored_blocks += 1
        self._stored[name] = None
        if len(self._stored) > REMEMBERED_BLOCKS:
            del self._stored[next(iter(self._stored))]
        return True

    def asked(self, names: Iterable[bytes]) -> None:
        """A prompt came that consists of these blocks."""
        if self._mode == "auto" and self._stored:
            for name in names:
                if name in self._stored:
                    self._stored.pop(name, None)
                    self.read_blocks += 1
