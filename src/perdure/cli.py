"""The `perdure` command. Imports only click until a command runs, so that help appears at once.

Exit status: 0 fine; 1 the answer is bad news (blocks that do not verify, a token that differs, a target missed is not);
2 the command could not be carried out, with one line that says what, where and what to do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perdure import (
    cli_audit,
    cli_cluster,
    cli_engine,
    cli_erase,
    cli_isolation,
    cli_keys,
    cli_policy,
    cli_publish,
    cli_service,
    cli_sessions,
)
from perdure.cli_output import console

if TYPE_CHECKING:
    from perdure.benchmarks.harness import Report
    from perdure.store import Store

_DIRECTORY = click.Path(path_type=Path)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_CATALOG = click.option(
    "--catalog", envvar="PERDURE_CATALOG", metavar="URL", help="Cluster that holds the catalog of DIR."
)
Progress = Callable[[int, int], None]


class _Group(click.Group):
    """Turns typed errors into one line and exit status 2; names the nearest command for a misspelt one."""

    def invoke(self, ctx: click.Context) -> Any:
        from perdure.errors import PerdureError

        try:
            return super().invoke(ctx)
        except PerdureError as error:
            click.echo(f"perdure: {error}", err=True)
            sys.exit(2)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        import difflib

        near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
        if args[0] not in self.commands and near:
            ctx.fail(f"no such command {args[0]!r}; did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="perdure")
def main() -> None:
    """Durable KV cache for LLM inference. DIR is a store: the directory given to perdure.open()."""


@main.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@_CATALOG
@_JSON
def status(directory: Path, catalog: str | None, as_json: bool) -> None:
    """What is stored in DIR, what it takes, how it is. Works beside a running writer."""
    with _open(directory, catalog) as store:
        answer = store.status()
    if as_json:
        _print_json(answer)
        return
    out, table = _table(f"Perdure store {directory}")
    for name, value in _status_rows(answer):
        table.add_row(name, value)
    out.print(table)


@main.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@_CATALOG
@_JSON
def verify(directory: Path, catalog: str | None, as_json: bool) -> None:
    """Read and check every stored block. Exit status 1 if one does not verify."""
    with _open(directory, catalog) as store, _progress("verifying", as_json, bytes_=True) as note:
        report = store.verify(note)
    if as_json:
        _print_json(report)
    else:
        rate = report["bytes"] / max(report["seconds"], 1e-9)
        click.echo(f"{report['blocks']} blocks, {_size(report['bytes'])} checked at {_size(rate)}/s")
        for bad in report["bad"]:
            click.echo(f"{bad['status']}: block {bad['key']} in segment {bad['segment']} at {bad['offset']}")
        for bad in report["unreadable_segments"]:
            click.echo(f"unreadable: segment {bad['segment']}: {bad['why']}")
        click.echo(
            "all blocks verify" if report["ok"] else "not all blocks verify; a read will miss them, nothing else"
        )
    sys.exit(0 if report["ok"] else 1)


@main.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@_CATALOG
@click.option("--state-dir", type=_DIRECTORY, metavar="DIR", help="With --catalog: local directory for this command.")
@_JSON
def rebuild(directory: Path, catalog: str | None, state_dir: Path | None, as_json: bool) -> None:
    """Recreate the block index of DIR from its segments. The store must not be open; with --catalog it may be."""
    from perdure import store

    with _progress("rebuilding", as_json) as note:
        answer = store.rebuild(directory, note, catalog=catalog, state=state_dir)
    if as_json:
        _print_json(answer)
    else:
        click.echo(f"index rebuilt: {answer['blocks']} blocks in {answer['segments']['sealed']['count']} segments")


@main.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.argument("key", metavar="KEY")
@_CATALOG
@_JSON
def explain(directory: Path, key: str, catalog: str | None, as_json: bool) -> None:
    """Why the block with KEY (64 hex digits) is a hit or a miss: where it is, whose, whether it verifies, its past.

    A service that runs for DIR is asked, which knows its memory too; else the store is looked at beside its writer."""
    from perdure.errors import InvalidArgument

    try:
        raw = bytes.fromhex(key)
    except ValueError:
        raise InvalidArgument(f"KEY {key!r}: must be 64 hex digits, as `perdure verify` prints them") from None
    answer = cli_service.explained_by_service(directory, raw)
    if answer is None:
        with _open(directory, catalog) as store:
            answer = store.explain(raw) | {"answered_by": "store"}
    if as_json:
        _print_json(answer)
        return
    click.echo(f"{answer['verdict']}")
    space = answer.get("keyspace")
    if space:
        click.echo(f"tenant {space['tenant']}, model {space['model']}, {space['block_tokens']} tokens per block")
    record = answer.get("record")
    if record:
        click.echo(
            f"{record['block_bytes']} bytes ({record['stored_bytes']} stored, codec {record['codec']}, "
            f"{record['durability']}) in {answer['file']} at {record['offset']} ({answer['segment_state']})"
        )
    memory = answer.get("memory")
    if memory:
        click.echo(f"in memory: {'yes' if memory['held'] else 'no'}, in use by {memory['pins']} views or copies")
    for one in answer["incidents"]:
        click.echo(f"incident at {one['at_s']}: {one['kind']}: {one['why']} ({one['segment']} at {one['offset']})")


@main.group()
def bench() -> None:
    """Measure this machine: ratios against fio, memcpy and peers, taken in the same run."""


def _bench_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        _JSON,
        click.option("--quick", is_flag=True, help="Smaller data sets: about a minute."),
        click.option("--dir", "directory", type=_DIRECTORY, default=Path(".build/bench"), show_default=True,
                     help="Where to put the data: on the device to be measured."),
    ):  # fmt: skip
        command = option(command)
    return command


@bench.command("store")
@_bench_options
def bench_store(directory: Path, quick: bool, as_json: bool) -> None:
    """The embedded store against fio, memcpy and its own targets."""
    from perdure.benchmarks import store
    from perdure.demo.scenes import default_model_cache

    directory.mkdir(parents=True, exist_ok=True)
    report = store.run(directory, quick=quick, json=as_json, model_cache=None if quick else default_model_cache())
    _print_report(report, as_json)


@bench.command("peers")
@_bench_options
def bench_peers(directory: Path, quick: bool, as_json: bool) -> None:
    """The same work through LMCache and a file per block, each in its own environment."""
    from perdure.benchmarks import peers

    directory.mkdir(parents=True, exist_ok=True)
    _print_report(peers.run(directory, cache_dir=directory / "environments", quick=quick, json=as_json), as_json)


@bench.command("service")
@_bench_options
def bench_service(directory: Path, quick: bool, as_json: bool) -> None:
    """What the service costs: beside memcpy, the embedded store, a bare socket, Mooncake and LMCache."""
    from perdure.benchmarks import service

    directory.mkdir(parents=True, exist_ok=True)
    _print_report(service.run(directory, cache_dir=directory / "environments", quick=quick, json=as_json), as_json)


@bench.command("storm")
@_bench_options
def bench_storm(directory: Path, quick: bool, as_json: bool) -> None:
    """Many who want the same prefix at once, and a service that is killed under load."""
    from perdure.benchmarks import storm

    directory.mkdir(parents=True, exist_ok=True)
    _print_report(storm.run(directory, quick=quick, json=as_json), as_json)


@bench.command("policy")
@_bench_options
@click.option("--traces", type=_DIRECTORY, envvar="PERDURE_TRACES", metavar="DIR",
              help="Folder of the public traces (or PERDURE_TRACES); without it a made-up one.")  # fmt: skip
def bench_policy(directory: Path, quick: bool, as_json: bool, traces: Path | None) -> None:
    """What is kept against Belady's optimum, and what is written against writing everything: traces, replayed."""
    from perdure.benchmarks import policy

    directory.mkdir(parents=True, exist_ok=True)
    _print_report(policy.run(directory, traces=traces, quick=quick, json=as_json), as_json)


@bench.command("sessions")
@_bench_options
@click.option(
    "--traces", type=_DIRECTORY, envvar="PERDURE_TRACES", help="Folder of the public traces [PERDURE_TRACES]."
)
def bench_sessions(directory: Path, quick: bool, as_json: bool, traces: Path | None) -> None:
    """1 to 1,000 multi-turn sessions on one service: p99 beside an ideal queue, overload, idle sessions."""
    from perdure.benchmarks import sessions

    directory.mkdir(parents=True, exist_ok=True)
    _print_report(sessions.run(directory, quick=quick, json=as_json, traces=traces), as_json)


@bench.command("governance")
@_bench_options
def bench_governance(directory: Path, quick: bool, as_json: bool) -> None:
    """What encryption and the audit log cost, beside the same work without them."""
    from perdure.benchmarks import governance

    directory.mkdir(parents=True, exist_ok=True)
    _print_report(governance.run(directory, quick=quick, json=as_json), as_json)


@bench.command("cluster")
@_bench_options
def bench_cluster(directory: Path, quick: bool, as_json: bool) -> None:
    """1 to 8 services on one directory and a Valkey Cluster: lookups, restores, visibility, a prefix for 16 hosts."""
    from perdure.benchmarks import cluster

    directory.mkdir(parents=True, exist_ok=True)
    _print_report(cluster.run(directory, quick=quick, json=as_json), as_json)


@bench.command("engines")
@_bench_options
@click.option("--section", "sections", multiple=True, help="Only this section; may be repeated.")
def bench_engines(directory: Path, quick: bool, as_json: bool, sections: tuple[str, ...]) -> None:
    """Time to the first token through vLLM: restores beside its own prefix hit, what storing costs, its fs tier."""
    from perdure.benchmarks import engines
    from perdure.demo.scenes import default_model_cache
    from perdure.errors import InvalidArgument

    for name in sections:
        if name not in engines.SECTIONS:
            raise InvalidArgument(f"--section {name}: one of {', '.join(engines.SECTIONS)}")
    directory.mkdir(parents=True, exist_ok=True)
    report = engines.run(
        directory, model_cache=default_model_cache(), quick=quick, json=as_json, sections=sections or engines.SECTIONS,
        cache_dir=directory / "environments",
    )  # fmt: skip
    _print_report(report, as_json)
    for failure in report.failed:
        click.echo(f"perdure: {failure}", err=True)
    sys.exit(1 if report.failed else 0)


@main.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@_JSON
def demo(directory: Path, as_json: bool) -> None:
    """Prefill with a real model, kill -9 it and the service, restore, fork, survive a flipped byte; leaves a store."""
    from perdure import demo as demonstration

    sys.exit(demonstration.run(directory, json=as_json))


@main.command("demo-vllm")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("--setup-s", type=float, hidden=True, help="What making the environment took.")
@_JSON
def demo_vllm(directory: Path, setup_s: float | None, as_json: bool) -> None:
    """Two vLLM servers on one service: kill one in mid-conversation, go on with the other; leaves a store in DIR."""
    from perdure import demo as demonstration

    sys.exit(demonstration.run_vllm(directory, json=as_json, setup_s=setup_s))


@main.command("demo-cluster")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@_JSON
def demo_cluster(directory: Path, as_json: bool) -> None:
    """Three hosts, one directory: prefill on one, kill it, go on with its session on another, fork on the third."""
    from perdure import demo as demonstration

    sys.exit(demonstration.run_cluster(directory, json=as_json))


@main.command("demo-governance")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@_JSON
def demo_governance(directory: Path, as_json: bool) -> None:
    """Two tenants: publish a prompt, hold a session, erase with a receipt that a stranger verifies."""
    from perdure import demo as demonstration

    sys.exit(demonstration.run_governance(directory, json=as_json))


for _command in (
    *cli_service.COMMANDS,
    cli_sessions.sessions,
    *cli_publish.COMMANDS,
    cli_engine.engine,
    cli_engine.engine_check,
    cli_policy.policy,
    cli_isolation.audit_isolation,
    cli_audit.audit,
    cli_keys.keys,
    cli_erase.erase,
    cli_erase.hold,
    cli_erase.unhold,
    cli_erase.lifecycle,
    cli_cluster.cluster,
):
    main.add_command(_command)


# --- output
def _open(directory: Path, catalog: str | None) -> Store:
    from perdure import store

    return store.open(directory, read_only=True, memory=0, catalog=catalog)


def _print_json(answer: Any) -> None:
    click.echo(json.dumps(answer, indent=2))


def _print_report(report: Report, as_json: bool) -> None:
    if as_json:
        click.echo(report.to_json())
        return
    console(narrowest=150).print(report.table())


def _table(title: str) -> tuple[Any, Any]:
    from rich.table import Table

    return console(), Table(title=title, show_header=False, title_justify="left")


def _progress(what: str, quiet: bool, *, bytes_: bool = False) -> AbstractContextManager[Progress | None]:
    """A progress bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        return nullcontext(None)
    return _Bar(what, bytes_)


class _Bar(AbstractContextManager["Progress | None"]):
    def __init__(self, what: str, bytes_: bool):
        from rich import progress
        from rich.console import Console

        amount = progress.DownloadColumn() if bytes_ else progress.MofNCompleteColumn()
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"), progress.BarColumn(), amount, progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )  # fmt: skip
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> Progress:
        self._bar.start()
        return lambda done, total: self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _status_rows(answer: dict[str, Any]) -> list[tuple[str, str]]:
    segments, presence = answer["segments"], answer["presence"]
    rows = [
        ("writer", answer["writer"] or "none: not open for writing"),
        ("capacity", f"{_size(answer['used_bytes'])} of {_size(answer['capacity_bytes'])} in use"),
        ("blocks", f"{answer['blocks']}" + (" (index is being rebuilt)" if answer["index_rebuilding"] else "")),
        ("segments", ", ".join(f"{one['count']} {name}" for name, one in segments.items() if one["count"]) or "none"),
    ]
    if answer["cold"] is not None:
        one = answer["cold"]
        took = f"{_size(one['bytes'])} of {_size(one['capacity_bytes'])}"
        rows.append(("cold tier", f"{one['segments']} segments, {took} in {one['url']}"))
    rows += [
        (f"tenant {name}", f"{one['blocks']} blocks, {_size(one['kv_bytes'])} of KV in {_size(one['stored_bytes'])}")
        for name, one in answer["tenants"].items()
    ]
    for one in answer["keyspaces"]:
        block = f"{one['block_tokens']} tokens = {_size(one['block_bytes'])} per block"
        rows.append((f"model {one['model']}", f"tenant {one['tenant']}, {block}, keyspace {one['digest'][:16]}…"))
    rows.append(("pins", str(answer["pins"])))
    rows += cli_service.root_rows(answer["roots"])
    if not answer["healthy"]:
        rows.append(("UNHEALTHY", "many blocks fail to verify: look at the disk; nothing is removed meanwhile"))
    if answer["expiry_paused"]:
        rows.append(("CLOCK", f"wall clock is off by {answer['clock_step_s']} s: expiry is paused"))
    if presence["keys"]:
        rows.append(("presence index", f"{presence['keys']} keys, {_size(presence['bytes'])}"))
    rows += [("incident", f"{one['kind']}: block {one['key'][:16]}…: {one['why']}") for one in answer["incidents"]]
    return rows


if __name__ == "__main__":
    main()
