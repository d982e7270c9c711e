"""`perdure erase`, `hold`, `unhold`: a tenant, a session, a subject or blocks; `perdure lifecycle`: what will happen
when. They ask the service of a store if one runs, else open the store.

Exit status as in `cli`: 0 done, or waiting for a hold's end or for the disk, as it says; 2 the command could not be
carried out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from perdure.cli_sessions import with_store

_PATH = click.Path(path_type=Path)


_DIRECTORY = click.argument("directory", metavar="DIR", type=_PATH)
_TENANT = "Whose; without a further option, all of the tenant's."
_SESSION = click.option("--session", metavar="NAME", help="The blocks of this session.")
_SUBJECT = click.option("--subject", metavar="NAME", help="The blocks of all sessions of this subject.")
_BLOCKS = click.option("--block", "blocks", metavar="KEY", multiple=True,
                       help="This block (64 hex digits); may be repeated.")  # fmt: skip
_KEK = click.option("--kek", metavar="WHERE", default="", help="Without a service: as the store is opened with.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


@click.command()
@_DIRECTORY
@click.option("--tenant", metavar="NAME", help=_TENANT)
@_SESSION
@_SUBJECT
@_BLOCKS
@click.option("--state", "order", metavar="ID", help="Only tell how far an erasure has come.")
@click.option("--wait", "wait_s", type=float, metavar="SECONDS", default=600.0, show_default=True,
              help="For what is on the disk to be given up; it is unreadable before. 0: not at all.")  # fmt: skip
@click.option("--receipt", "target", type=_PATH, metavar="FILE", help="Where to put the receipt.")
@_KEK
@_JSON
def erase(
    directory: Path,
    tenant: str | None,
    session: str | None,
    subject: str | None,
    blocks: tuple[str, ...],
    order: str | None,
    wait_s: float,
    target: Path | None,
    kek: str,
    as_json: bool,
) -> None:
    """Make blocks unreadable for good, and give up what is on the disk. DIR is a store, or the socket of its service.

    The receipt is signed with the key of the audit log; docs/erasure.md says how to verify it."""
    from perdure.errors import InvalidArgument

    if (order is None) == (tenant is None):
        raise InvalidArgument("say whose blocks: --tenant NAME, or --state ID of an erasure")

    def ask(store: Any) -> Any:
        if order is not None:
            return store.erasure(order)
        return store.erase(tenant=tenant, session=session, subject=subject, blocks=_keys(blocks), wait_s=wait_s)

    told: dict[str, Any] = with_store(directory, ask, read_only=False, kek=kek)
    if target is not None and told["state"] == "erased":
        target.write_text(json.dumps(told["receipt"], indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(told, indent=2))
        return
    click.echo(f"erasure {told['id']}: {told['state']}{': ' if told.get('why') else ''}{told.get('why', '')}")
    if told["state"] == "erased":
        click.echo(told["receipt"]["statement"], nl=False)
    elif told["state"] == "unreadable":
        click.echo(f"what is on the disk is being given up: perdure erase {directory} --state {told['id']}")


@click.command()
@_DIRECTORY
@click.option("--tenant", metavar="NAME", required=True, help=_TENANT)
@_SESSION
@_SUBJECT
@_BLOCKS
@click.option("--reason", metavar="TEXT", required=True, help="Why; shown by `perdure lifecycle`.")
@_KEK
@_JSON
def hold(
    directory: Path,
    tenant: str,
    session: str | None,
    subject: str | None,
    blocks: tuple[str, ...],
    reason: str,
    kek: str,
    as_json: bool,
) -> None:
    """Keep blocks and sessions, whatever their time to live and whoever erases them, until `perdure unhold`."""
    told: dict[str, Any] = with_store(
        directory,
        lambda store: store.hold(tenant=tenant, session=session, subject=subject, blocks=_keys(blocks), reason=reason),
        read_only=False, kek=kek,
    )  # fmt: skip
    if as_json:
        click.echo(json.dumps(told, indent=2))
        return
    much = "all of" if told["blocks"] is None else f"{told['blocks']} blocks of"
    click.echo(f"hold {told['id']}: {much} {tenant}")
    if told["erasing"]:
        click.echo(f"erasures that had begun before go on: {', '.join(told['erasing'])}")


@click.command()
@_DIRECTORY
@click.argument("name", metavar="ID")
@click.option("--tenant", metavar="NAME", required=True, help="Whose hold it is.")
@_KEK
def unhold(directory: Path, name: str, tenant: str, kek: str) -> None:
    """Take the hold ID off. Erasures that waited for it begin."""
    with_store(directory, lambda store: store.unhold(tenant=tenant, hold=name), read_only=False, kek=kek)
    click.echo(f"hold {name} of {tenant} is off")


@click.command()
@_DIRECTORY
@click.option("--tenant", metavar="NAME", help="Only of this tenant.")
@_JSON
def lifecycle(directory: Path, tenant: str | None, as_json: bool) -> None:
    """What will happen when: erasures under way, holds, times to live, sessions."""
    told: dict[str, Any] = with_store(directory, lambda store: store.lifecycle(tenant), read_only=True)
    if as_json:
        click.echo(json.dumps(told, indent=2))
        return
    for line in _lines(told):
        click.echo(line)


def _lines(told: dict[str, Any]) -> Iterator[str]:
    if told["expiry_paused"]:
        yield "nothing expires now: the wall clock is in doubt"
    for one in told["erasures"]:
        yield f"erasure {one['id']} of {one['tenant']} ({one['kind']}): {one['state']}; {one['why'] or 'it goes on'}"
    for one in told["holds"]:
        much = "all" if one["blocks"] is None else f"{one['blocks']} blocks"
        yield f"hold {one['id']} of {one['tenant']} ({one['kind']} {one['target']}): {much}; {one['reason']}"
    for name, one in told["tenants"].items():
        ends = one["expiring"]
        when = (
            f", {ends['segments']} expire, {_at(ends['first_s'])} to {_at(ends['last_s'])}" if ends["segments"] else ""
        )
        kept = f", {one['until_evicted']} stay until evicted" if one["until_evicted"] else ""
        held = ", nothing is given up: on hold" if one["held"] else ""
        much = f"{one['blocks']} blocks, {one['stored_bytes']} bytes"
        yield f"{name}: {much}; {one['open']} segments open{when}{kept}{held}"
    for one in told["sessions"]["next"]:
        pinned = f", pinned until {_at(one['pinned_until_s'])}" if one["pinned_until_s"] else ""
        held = f", kept by hold {one['hold']}" if one["hold"] else ""
        yield f"session {one['name']} of {one['tenant']}: over at {_at(one['ends_s'])} unless it is used{pinned}{held}"


def _at(seconds: int) -> str:
    return time.strftime("%F %T", time.localtime(seconds))


def _keys(blocks: tuple[str, ...]) -> list[bytes] | None:
    return [_key(one) for one in blocks] if blocks else None


def _key(text: str) -> bytes:
    from perdure.errors import InvalidArgument

    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidArgument(f"--block {text!r}: must be 64 hex digits, as `perdure verify` prints them") from None
