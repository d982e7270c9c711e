"""What the demo shows: progress while it runs (stderr), a table at the end (stdout)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

from perdure.demo.process import Child, Progress, perform

T = TypeVar("T")

_TITLES = {
    "model": "model and prompts",
    "service": "the service",
    "cold": "1 prefill, answer, be killed",
    "restored": "2 adopt, restore; kill service; restore",
    "agents": "3 three agents at once; a storm",
    "compare": "4 cold answers to compare",
    "flip": "5 flip a byte; kill service",
    "flipped": "6 ask again",
}


_CAPTION = (
    "first token: from token ids to the first token of the answer, with the\n"
    "model loaded and warmed up; cold: the same prompt without a store, alone\n"
    "on the machine, while the agents run all at once. read: from the service's\n"
    "memory, or from the disk, past the page cache where the file system allows it."
)


class Stage:
    """Shows which process runs and how far it is: bars on a terminal, one line per scene elsewhere."""

    def __init__(self, titles: Mapping[str, str] = _TITLES):
        self._titles = titles

    def __enter__(self) -> Stage:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.seconds: dict[str, float] = {}  # per scene
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=16), TextColumn("{task.fields[what]}"),
            TimeElapsedColumn(), console=self._console, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def scene(self, name: str, job: dict[str, Any]) -> dict[str, Any]:
        """Run one job in a process of its own."""
        note = self._begin(name)
        answer = perform(job, note)
        self._end(name)
        return answer

    def killed(self, name: str, job: dict[str, Any]) -> dict[str, Any]:
        """Run a job, and kill its process with SIGKILL as soon as it has given its result."""
        note = self._begin(name)
        with Child(job, note) as child:
            answer = child.result()
            child.kill()
            answer["signal"] = -child.process.returncode
        self._end(name)
        return answer

    def interrupted(
        self, name: str, job: dict[str, Any], between: Callable[[Progress], None]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run a job in two halves in one process, and something else between them."""
        note = self._begin(name)
        with Child(job, note) as child:
            first = child.result()
            between(note)
            child.go_on()
            second = child.result()
        self._end(name)
        return first, second

    def during(self, name: str, work: Callable[[Progress], T]) -> T:
        """What the demo does itself."""
        note = self._begin(name)
        answer = work(note)
        self._end(name)
        return answer

    def _begin(self, name: str) -> Any:
        self._started = time.monotonic()
        self._task = task = self._bars.add_task(self._titles[name], total=None, what="starting")
        if not self._console.is_terminal:
            self._console.print(self._titles[name], highlight=False)

        def note(what: str, done: int, total: int | None) -> None:
            shown = f"{what} {100 * done // total} %" if total else what
            self._bars.update(task, completed=done, total=total, what=shown)

        return note

    def _end(self, name: str) -> None:
        self.seconds[name] = round(time.monotonic() - self._started, 1)
        self._bars.update(self._task, total=1, completed=1, what="done")


def show(outcome: dict[str, Any]) -> None:
    """The outcome for people, on stdout."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(table(outcome))
    for row in outcome["rows"]:
        console.print(Text(f"{row['name']}: {row['question']}\n    {' '.join(row['text'].split())}"), highlight=False)
    stored, flip = outcome["stored"], outcome["flip"]
    lines = f"""
stored: {stored["stored_blocks"]} of {stored["present_blocks"]} blocks were new, \
{stored["stored_bytes"] / 1e6:.0f} MB of KV in {stored["store_s"]:.2f} s
session: handed from "cold", killed with SIGKILL, to "shared"; "restored" is the same process and client, after the
service was killed with SIGKILL and started again. The agents are branches of it, asked at the same moment; so is
the storm, right after the service was killed again: agent {outcome["storm"]["number"] + 1} was killed in its prefill, \
when {outcome["storm"]["stored_tokens"]:,} tokens were stored
flipped: byte {flip["offset"]} of {flip["file"]}: block {flip["position"]}
perdure explain {outcome["store"]} {flip["key"]}
    then: {flip["verdict"]}
    now:  {flip["verdict_after"]}; {len(flip["incidents"])} incident(s)
{outcome["seconds"]} s, and {outcome["setup_s"]} s to get the model ready
look at what is left: perdure status {outcome["store"]}
"""
    console.print(Text(lines), highlight=False, soft_wrap=True)
    show_checks(outcome["checks"])


def show_checks(checks: Mapping[str, bool]) -> None:
    from rich.console import Console
    from rich.text import Text

    for check, passed in checks.items():
        Console().print(
            Text(f"{'yes' if passed else 'NO '}  {check}", style="" if passed else "bold red"), highlight=False
        )


def _source(row: dict[str, Any]) -> str:
    if not row["restored_blocks"]:
        return ""
    return {0: "disk", row["restored_blocks"]: "memory"}.get(row["from_memory_blocks"], "both")


def table(outcome: dict[str, Any], caption: str = _CAPTION) -> Any:
    """What each process read and computed, for rich. Rows of cold answers have names that begin so."""
    from rich import box
    from rich.table import Table

    shown = Table(
        title=f"{outcome['context_tokens']:,} tokens of context, SmolLM2-135M in fp32, "
        f"blocks of {outcome['block_tokens']} tokens",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )
    headings = ("", "first\ntoken", "\ncold", "\nfaster", "tokens\nprefilled", "\nread", "\nfrom", "\nGB/s",
                "tokens\nequal", "logits\ndiffer")  # fmt: skip
    for heading in headings:
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in outcome["rows"]:
        cold = row["name"].startswith("cold")
        shown.add_row(
            row["name"],
            f"{row['first_token_s']:.2f} s",
            "" if cold else f"{row['cold_first_token_s']:.2f} s",
            "" if cold else f"{row['cold_first_token_s'] / row['first_token_s']:.0f} x",
            f"{row['prefilled_tokens']:,}",
            f"{row['restored_bytes'] / 1e6:.0f} MB" if row["restored_bytes"] else "",
            _source(row),
            f"{row['restored_bytes_per_s'] / 1e9:.2f}" if row["restored_bytes"] else "",
            "" if cold else "yes" if row["tokens_identical"] else "[bold red]NO[/]",
            "" if cold else f"{row['logits_differ_max']:.1g}",
        )
    return shown
