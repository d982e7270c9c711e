"""A report as a table for people. Imports rich, so only `Report.table` imports this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from perdure.benchmarks.harness import Report, Row


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    if value == 0 or 0.01 <= abs(value) < 100_000:
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:.2e}"


def _spread(values: tuple[float, ...]) -> str:
    return f" [{_figure(min(values))}–{_figure(max(values))}]" if len(values) > 1 else ""


def _verdict(row: Row) -> Text:
    if row.met is None:
        return Text("" if row.ours is not None else "not measured", style="dim")
    return Text("met", style="green") if row.met else Text("missed", style="bold red")


def _cpu(row: Row) -> str:
    if row.ours_cpu_s_per_gib is None:
        return ""
    return f"{_figure(row.ours_cpu_s_per_gib)} / {_figure(row.reference_cpu_s_per_gib)}"


def render(report: Report) -> Table:
    """One line per row: medians with [min–max], the ratio (more is better), the target and the verdict."""
    table = Table(title=Text(report.title), caption=Text(_caption(report)), caption_justify="left", expand=False)
    for heading in ("what", "unit", "ours", "reference", "CPU-s/GiB", "ratio", "target", ""):
        table.add_column(heading, justify="left" if heading in ("what", "unit", "reference", "") else "right")
    for row in report.rows:
        reference = f"{_figure(row.reference)}{_spread(row.reference_all)} {row.reference_name}".strip()
        what = row.name + (f"\n  {row.note}" if row.note else "")
        table.add_row(
            Text(what),
            row.unit,
            Text(_figure(row.ours) + _spread(row.ours_all)),
            Text(reference if row.reference is not None else row.reference_name),
            _cpu(row),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.target is None else f"{row.target:g}",
            _verdict(row),
        )
    return table


def _caption(report: Report) -> str:
    m = report.machine
    judged = [r for r in report.rows if r.met is not None]
    met = sum(r.met is True for r in judged)
    disk = m.get("disk")
    name = f" ({disk.get('name', '')})" if isinstance(disk, dict) and disk else ""
    return (
        f"{met} of {len(judged)} targets met. {m.get('cpu')}, {m.get('cores')} cores, {m.get('memory_gib')} GiB, "
        f"{m.get('kernel')}, {m.get('filesystem')} on {m.get('device')}{name}, Python {m.get('python')}. "
        "Medians [min–max]; ratio: more is better."
    )
