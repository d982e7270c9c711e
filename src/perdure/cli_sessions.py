"""`perdure sessions`: list, show, release, expire. Asks the service of a store if one runs, else opens the store.

Exit status as in `cli`: 0 fine, 1 there is no such session or it could not be changed, 2 the command could not be
carried out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from perdure.cli_output import console

_DIRECTORY = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
_NAME = click.argument("name", metavar="NAME")
_TENANT = click.option("--tenant", metavar="NAME", help="Only of this tenant.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group()
def sessions() -> None:
    """Agents' contexts by name. DIR is a store, or the socket of its service."""


@sessions.command("list")
@_DIRECTORY
@_TENANT
@_JSON
def list_(directory: Path, tenant: str | None, as_json: bool) -> None:
    """All sessions that are not over."""
    found = with_store(directory, lambda store: store.sessions(tenant), read_only=True)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    from rich.table import Table

    now, table = time.time(), Table("tenant", "session", "blocks", "used", "over in", "pinned for", "branch of")
    for one in sorted(found, key=lambda one: -one["used_s"]):
        table.add_row(
            one["tenant"], one["name"], str(one["blocks"]), f"{_span(now - one['used_s'])} ago",
            _span(one["expires_s"] - now), _span(one["pinned_until_s"] - now), one["origin"],
        )  # fmt: skip
    console().print(table)


@sessions.command()
@_DIRECTORY
@_NAME
@_TENANT
@_JSON
def show(directory: Path, name: str, tenant: str | None, as_json: bool) -> None:
    """What the session NAME consists of, and what happened to it."""
    told = _admin(directory, "show", {"name": name, "tenant": tenant}, as_json, read_only=True)
    for one in told if not as_json else ():
        click.echo(f"{one['name']} of {one['tenant']}, {one['model']}: {one['blocks']} blocks, {one['shared']} shared")
        for event in one.get("events", []):
            at = time.strftime("%F %T", time.localtime(event["at_s"]))
            click.echo(f"  {at}  {event['event']}  {event['blocks']}")


@sessions.command()
@_DIRECTORY
@_NAME
@_TENANT
@_JSON
def release(directory: Path, name: str, tenant: str | None, as_json: bool) -> None:
    """Forget the session NAME; its blocks are evicted first."""
    _admin(directory, "release", {"name": name, "tenant": tenant}, as_json)


@sessions.command()
@_DIRECTORY
@_NAME
@click.option("--ttl", "ttl_s", type=float, metavar="SECONDS", required=True, help="Idle time; 0: it is over now.")
@_TENANT
@_JSON
def expire(directory: Path, name: str, ttl_s: float, tenant: str | None, as_json: bool) -> None:
    """Let the session NAME be over when nobody used it for a while."""
    _admin(directory, "expire", {"name": name, "tenant": tenant, "ttl_s": ttl_s}, as_json)


def _admin(
    directory: Path, verb: str, fields: dict[str, Any], as_json: bool, *, read_only: bool = False
) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = with_store(
        directory, lambda store: store.session_admin(verb, fields)["sessions"], read_only=read_only
    )
    if as_json:
        click.echo(json.dumps(told, indent=2))
    elif not told:
        click.echo(f"no session {fields['name']!r}; see `perdure sessions list {directory}`", err=True)
    for one in told if not as_json and verb != "show" else ():
        click.echo(f"{one['name']} of {one['tenant']}: {one['outcome']}{': ' if one['why'] else ''}{one['why']}")
    if not told or any(one["outcome"] == "rejected" for one in told):
        sys.exit(1)
    return told


def with_store(directory: Path, ask: Callable[[Any], Any], *, read_only: bool, **options: Any) -> Any:
    """The answer of the store's service, or of the store itself where none runs."""
    from perdure import store
    from perdure.errors import ServiceUnavailable
    from perdure.service.client import connect

    try:
        client = connect(directory)
    except ServiceUnavailable:
        if not directory.is_dir():
            raise
        opened = store.open(directory, read_only=read_only, memory=0, **options)
        with opened:
            return ask(opened)
    with client:
        return ask(client)


def _span(seconds: float) -> str:
    if seconds <= 0:
        return "-"
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
