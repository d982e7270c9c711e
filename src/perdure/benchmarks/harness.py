"""Rows, repetition and the description of the machine: what every benchmark here has in common.

Contract
- A row holds both sides' repetitions (`ours_all`, `reference_all`) and their medians (`ours`, `reference`).
- `ratio` is normalised so that more is better: ours / reference where a higher figure is better (`better` "higher"),
  reference / ours where a lower one is (`better` "lower": latencies, CPU seconds). For an absolute limit the reference
  is the limit itself. A row is met when ratio >= target. Counts (wrong blocks served) have no ratio: they are met
  when ours <= target. Without a target `met` is null. A row that could not be measured has null figures and says why
  in `note`; it is never left out.
- Not guaranteed: that a ratio holds on another machine, or on this one under other load (`load` is in the report).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

from perdure.errors import InvalidArgument
from perdure.limits import KIB, MIB

T = TypeVar("T")
Better = Literal["higher", "lower"]

REPETITIONS_MIN = 5
PACKAGES = ("perdure", "numpy", "lmdb", "xxhash", "blosc2", "torch", "transformers")


def size_name(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


@dataclass(frozen=True, slots=True)
class Measured:
    """One timed piece of work: bytes moved, wall seconds, CPU seconds of the process that moved them."""

    nbytes: int
    seconds: float
    cpu_seconds: float = 0.0

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cpu_seconds / (self.nbytes / 2**30) if self.nbytes else 0.0


class Stopwatch:
    """Wall and CPU seconds of this process (all threads) from entry to exit; `of(nbytes)` makes a `Measured`."""

    __slots__ = ("_cpu", "_wall", "cpu_seconds", "seconds")

    def __enter__(self) -> Stopwatch:
        self._cpu = time.process_time()
        self._wall = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._wall
        self.cpu_seconds = time.process_time() - self._cpu

    def of(self, nbytes: int) -> Measured:
        return Measured(nbytes, self.seconds, self.cpu_seconds)


@dataclass(frozen=True, slots=True)
class Row:
    """One claim: ours beside a reference. Field order is the order in the JSON."""

    name: str
    unit: str
    ours: float | None
    reference: float | None
    reference_name: str
    ratio: float | None
    target: float | None
    met: bool | None
    better: Better = "higher"
    ours_all: tuple[float, ...] = ()
    reference_all: tuple[float, ...] = ()
    ours_cpu_s_per_gib: float | None = None
    reference_cpu_s_per_gib: float | None = None
    note: str = ""


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _ratio(ours: float | None, reference: float | None, better: Better) -> float | None:
    if ours is None or reference is None:
        return None
    over, under = (ours, reference) if better == "higher" else (reference, ours)
    return over / under if under > 0 else None


def row(
    name: str,
    unit: str,
    ours: Iterable[float],
    reference: Iterable[float] = (),
    reference_name: str = "",
    *,
    better: Better = "higher",
    target: float | None = None,
    note: str = "",
) -> Row:
    """A row of two series of repetitions. Without a reference it only informs, and must not have a target."""
    ours_all, reference_all = tuple(map(float, ours)), tuple(map(float, reference))
    if target is not None and not (ours_all and reference_all):
        raise InvalidArgument(f"row {name!r}: a target needs both figures; use `unmeasured` to say why there are none")
    mine, other = _median(ours_all), _median(reference_all)
    ratio = _ratio(mine, other, better)
    met = None if target is None else ratio is not None and ratio >= target
    return Row(name, unit, mine, other, reference_name, ratio, target, met, better, ours_all, reference_all, note=note)


def rate_row(
    name: str,
    ours: Sequence[Measured],
    reference: Sequence[Measured] = (),
    reference_name: str = "",
    *,
    target: float | None = None,
    note: str = "",
) -> Row:
    """A row in GB/s (10^9 bytes) with the CPU seconds per GiB of both sides beside it."""
    made = row(
        name,
        "GB/s",
        [m.gb_per_s for m in ours],
        [m.gb_per_s for m in reference],
        reference_name,
        target=target,
        note=note,
    )
    values = {f: getattr(made, f) for f in Row.__slots__}
    values["ours_cpu_s_per_gib"] = _median([m.cpu_s_per_gib for m in ours])
    values["reference_cpu_s_per_gib"] = _median([m.cpu_s_per_gib for m in reference])
    return Row(**values)


def limit_row(name: str, unit: str, ours: Iterable[float], limit: float, *, note: str = "") -> Row:
    """A figure that must not exceed an absolute limit: the limit is the reference, ratio = limit / ours, target 1."""
    return row(name, unit, ours, (limit,), "the limit itself", better="lower", target=1.0, note=note)


def count_row(
    name: str, unit: str, ours: int, reference: int | None, reference_name: str, *, allowed: int = 0, note: str = ""
) -> Row:
    """A count of bad events: no ratio; met when ours <= `allowed`."""
    other = () if reference is None else (float(reference),)
    reference_value = None if reference is None else float(reference)
    return Row(
        name,
        unit,
        float(ours),
        reference_value,
        reference_name,
        None,
        float(allowed),
        ours <= allowed,
        "lower",
        (float(ours),),
        other,
        note=note,
    )


def unmeasured(name: str, unit: str, reference_name: str, why: str, *, target: float | None = None) -> Row:
    """A claim that this machine could not measure: it stays in the report, with the reason."""
    return Row(name, unit, None, None, reference_name, None, target, None, note=why)


def interleave(arms: Sequence[Callable[[], T]], repetitions: int = REPETITIONS_MIN) -> list[list[T]]:
    """Run the arms one after the other, `repetitions` rounds, every second round backwards; results per arm.

    Taking turns spreads a machine's slow phases over all arms; turning round keeps one arm from always running in
    the wake of the same other one.
    """
    results: list[list[T]] = [[] for _ in arms]
    for repetition in range(repetitions):
        order = range(len(arms)) if repetition % 2 == 0 else range(len(arms) - 1, -1, -1)
        for index in order:
            results[index].append(arms[index]())
    return results


def _first(path: str, prefix: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(prefix)), "")


def _mount(directory: Path) -> tuple[str, str, str]:
    """(filesystem type, device, options) of the mount that holds `directory`."""
    best = ("", "unknown", "", "")
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return best[1:]
    for line in lines:
        left, _, right = line.partition(" - ")
        point, kind = left.split()[4], right.split()
        if directory.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind[0], kind[1], left.split()[5])
    return best[1:]


def _block_device(directory: Path) -> dict[str, str]:
    """What sysfs says about the disk below; empty where there is none (tmpfs, overlay, NFS)."""
    number = os.stat(directory).st_dev
    base = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not base.exists():
        return {}
    base = base.resolve()
    disk = base if (base / "queue").exists() else base.parent
    facts = {"name": disk.name}
    for key, where in (("model", "device/model"), ("rotational", "queue/rotational"), ("scheduler", "queue/scheduler")):
        path = disk / where
        if path.exists():
            facts[key] = path.read_text().strip()
    return facts


def machine(directory: os.PathLike[str] | str, **extra: object) -> dict[str, object]:
    """The machine as far as it explains the figures: processor, memory, kernel, file system, device, versions, load."""
    where = Path(directory).resolve()
    filesystem, device, options = _mount(where)
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    memory_kib = _first("/proc/meminfo", "MemTotal").split()
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory_kib[0]) / 2**20, 1) if memory_kib else None,
        "kernel": f"{platform.system()} {platform.release()}",
        "filesystem": filesystem,
        "mount_options": options,
        "device": device,
        "disk": _block_device(where),
        "python": platform.python_version(),
        "versions": versions,
        "load": [round(v, 2) for v in os.getloadavg()],
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **extra,
    }


@dataclass(slots=True)
class Report:
    """What a benchmark returns: the machine and one row per claim, missed rows included. failed: what went wrong, if a
    part of it did; the rest stands."""

    title: str
    machine: dict[str, object]
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def missed(self) -> list[Row]:
        return [r for r in self.rows if r.met is False]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: {"machine": {...}, "rows": [{...}]}."""
        return {"title": self.title, "machine": self.machine, "rows": [asdict(r) for r in self.rows]}

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)

    def table(self) -> Any:
        """A rich table for people; imports rich only here."""
        from perdure.benchmarks.table import render

        return render(self)


_REQUIRED = ("name", "unit", "ours", "reference", "reference_name", "ratio", "target", "met", "better")


def validate(report: Mapping[str, Any]) -> None:
    """Check a report in its JSON form against the contract above; raises InvalidArgument naming the row and field."""
    if not isinstance(report.get("machine"), Mapping) or not isinstance(report.get("rows"), Sequence):
        raise InvalidArgument("a report has 'machine' (object) and 'rows' (list)")
    names: set[str] = set()
    for entry in report["rows"]:
        name = entry.get("name")
        lacking = [key for key in _REQUIRED if key not in entry]
        if lacking:
            raise InvalidArgument(f"row {name!r} lacks {', '.join(lacking)}")
        if name in names:
            raise InvalidArgument(f"row {name!r} occurs twice")
        names.add(name)
        _validate_figures(entry)


def _validate_figures(entry: Mapping[str, Any]) -> None:
    name, ours, target = entry["name"], entry["ours"], entry["target"]
    if ours is None:
        if entry["met"] is not None or not entry.get("note"):
            raise InvalidArgument(f"row {name!r} was not measured: it cannot be met, and has to say why")
        return
    for side in ("ours", "reference"):
        series = entry.get(f"{side}_all") or []
        if series and statistics.median(series) != entry[side]:
            raise InvalidArgument(f"row {name!r}: {side} is not the median of its repetitions")
    ratio = _ratio(ours, entry["reference"], entry["better"])
    if entry["ratio"] is not None and entry["ratio"] != ratio:
        raise InvalidArgument(f"row {name!r}: ratio is not that of its two figures")
    if target is None:
        expected = None
    elif entry["ratio"] is None:
        expected = ours <= target
    else:
        expected = entry["ratio"] >= target
    if entry["met"] is not expected:
        raise InvalidArgument(f"row {name!r}: met should be {expected}")
