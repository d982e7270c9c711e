"""A progress line for long benchmarks, on stderr so that stdout stays machine-readable; silent where asked."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any


class Progress:
    """`with Progress("store", total) as p: p.step("cold read, 2 MiB")` for each of `total` steps."""

    def __init__(self, title: str, total: int, *, silent: bool = False):
        self._title = title
        self._total = total
        self._bar: Any = None
        self._task: Any = None
        self._silent = silent
        self.started = time.monotonic()

    def __enter__(self) -> Progress:
        if not self._silent:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total)
        return self

    def step(self, what: str) -> None:
        """One step begins."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._title}: {what}", advance=1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
