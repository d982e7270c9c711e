"""Where the commands print their tables: as wide as the terminal; never wrapped in a pipe or a file, for `grep`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_UNWRAPPED = 1000  # columns; a table is only as wide as its longest lines


def console(narrowest: int = 0) -> Console:
    """Standard output for tables; on a terminal at least `narrowest` columns wide."""
    from rich.console import Console

    plain = Console()
    return Console(width=max(plain.width, narrowest) if plain.is_terminal else _UNWRAPPED)
