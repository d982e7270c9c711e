"""Parsing of user-visible settings: sizes, names of options. Bad input is named together with what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from perdure.errors import InvalidArgument, UnknownOption


def parse_size(value: int | str, what: str) -> int:
    """Bytes from an int or text such as "20GiB", "500MB", "1.5TiB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise InvalidArgument(f"{what}={value}: must not be negative")
        return value
    units = {"": 1, "B": 1} | {
        f"{p}{b}B": (1024 if b else 1000) ** i for i, p in enumerate("KMGTP", 1) for b in ("i", "")
    }
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise InvalidArgument(f"{what}={value!r}: pass bytes as an integer, or text like '20GiB', '500MB'")
    return int(float(match[1]) * units[match[2]])


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """UnknownOption for the first name in `given` that is not in `known`, naming the nearest one."""
    names = sorted(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
            raise UnknownOption(f"{where}: unknown option {name!r}; {hint}")
