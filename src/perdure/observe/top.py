"""`perdure top`: what a running service does, from two of its status answers and the time between them.

Everything is taken from `Server.status()`; a rate is the difference of two counters over the seconds between them. What
a status does not say is shown as absent, never as zero. Counters that went back (the service was restarted) give none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perdure.observe.metrics import at, number_at

Fetch = Callable[[], Mapping[str, Any]]
PERIOD_S = 1.0
_READ = ("found_memory", "found_disk", "missing", "corrupt", "denied", "late")  # what becomes of a block asked for


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float  # monotonic
    status: Mapping[str, Any]


def sample(fetch: Fetch) -> Sample:
    return Sample(time.monotonic(), fetch())


def derive(before: Sample, now: Sample) -> dict[str, Any]:
    """What is shown: JSON-able; None for what is not known."""
    status = now.status
    clients, latencies = status.get("clients"), status.get("latencies")
    asked, found = (_delta(before, now, f"store.counters.{name}") for name in ("lookup_blocks", "lookup_found"))
    read = {name: _delta(before, now, f"store.counters.blocks_{name}") for name in _READ}
    known = [amount for amount in read.values() if amount is not None]
    wanted = sum(known) if len(known) == len(read) else None
    return {
        "boot": status.get("boot"),
        "clients": len(clients) if isinstance(clients, list) else None,
        "sessions": number_at(status, "store.sessions"),
        "memory": {
            name: number_at(status, f"memory.{name}")
            if number_at(status, f"memory.{name}") is not None
            else number_at(status, f"store.memory.{name}")
            for name in ("budget_bytes", "mapped_bytes", "bytes", "stranded_bytes", "pinned")
        },
        "disk": {name: number_at(status, f"store.{name}") for name in ("capacity_bytes", "used_bytes", "blocks")},
        "calls_per_s": {name: _rate(before, now, f"store.counters.{name}") for name in ("lookups", "reads", "writes")},
        "read_bytes_per_s": _rate(before, now, "store.counters.bytes_read"),
        "written_bytes_per_s": _rate(before, now, "store.counters.bytes_written"),
        "hit_ratio": {
            "lookup": _ratio(found, asked),
            "memory": _ratio(read["found_memory"], wanted),
            "disk": _ratio(read["found_disk"], wanted),
        },
        "latencies_s": latencies if isinstance(latencies, Mapping) else {},
        "healthy": at(status, "store.healthy"),
    }


def _delta(before: Sample, now: Sample, path: str) -> float | None:
    """How much a counter grew; the store leaves out counters that are zero."""
    if before.status.get("boot") != now.status.get("boot"):
        return None
    parent = path.rpartition(".")[0]
    if not isinstance(at(now.status, parent), Mapping) or not isinstance(at(before.status, parent), Mapping):
        return None
    new, old = number_at(now.status, path), number_at(before.status, path)
    if new is None and old is None and not parent.endswith("counters"):
        return None
    grown = (new or 0.0) - (old or 0.0)
    return grown if grown >= 0 else None


def _rate(before: Sample, now: Sample, path: str) -> float | None:
    grown, seconds = _delta(before, now, path), now.at_s - before.at_s
    return None if grown is None or seconds <= 0 else round(grown / seconds, 3)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else round(part / whole, 4)


def rows(view: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The view as lines of a table."""
    memory, disk, calls, ratio = view["memory"], view["disk"], view["calls_per_s"], view["hit_ratio"]
    lines = [
        ("service", f"boot {view['boot']}" + ("" if view["healthy"] in (True, None) else "  UNHEALTHY: see the disk")),
        ("clients", _number(view["clients"])),
        ("sessions", _number(view["sessions"])),
        ("memory", ", ".join(f"{name} {_size(memory[f'{name}_bytes'])}" for name in ("mapped", "stranded", "budget"))),
        ("disk", f"{_size(disk['used_bytes'])} of {_size(disk['capacity_bytes'])}, {_number(disk['blocks'])} blocks"),
        ("calls/s", ", ".join(f"{name} {_number(value)}" for name, value in calls.items())),
        ("read", f"{_size(view['read_bytes_per_s'])}/s"),
        ("written", f"{_size(view['written_bytes_per_s'])}/s"),
        ("hit ratio", ", ".join(f"{name} {_percent(value)}" for name, value in ratio.items())),
    ]  # fmt: skip
    lines += [(f"latency {name}", str(value)) for name, value in view["latencies_s"].items()]
    return lines


def show(fetch: Fetch, stop: Callable[[float], bool]) -> None:
    """Refresh on the terminal until `stop(seconds)`, which waits that long, says so."""
    from rich.live import Live

    before = sample(fetch)
    with Live(_table(derive(before, before)), auto_refresh=False, screen=False) as live:
        while not stop(PERIOD_S):
            now = sample(fetch)
            live.update(_table(derive(before, now)), refresh=True)
            before = now


def _table(view: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(show_header=False, title="Perdure service", title_justify="left")
    for name, value in rows(view):
        table.add_row(name, value)
    return table


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:.1f} %"


def _size(value: float | None) -> str:
    if value is None:
        return "?"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
