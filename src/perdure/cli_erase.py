"""`perdure erase`: a tenant, a session, a subject or blocks. Asks the service of a store if one runs, else opens the
store.

Exit status as in `cli`: 0 done, or waiting for a hold's end or for the disk, as it says; 2 the command could not be
carried out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from perdure.cli_sessions import with_store

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("directory", metavar="DIR", type=_PATH)
@click.option("--tenant", metavar="NAME", help="Whose; without a further option, all of the tenant's.")
@click.option("--session", metavar="NAME", help="The blocks of this session.")
@click.option("--subject", metavar="NAME", help="The blocks of all sessions of this subject.")
@click.option("--block", "blocks", metavar="KEY", multiple=True, help="This block (64 hex digits); may be repeated.")
@click.option("--state", "order", metavar="ID", help="Only tell how far an erasure has come.")
@click.option("--wait", "wait_s", type=float, metavar="SECONDS", default=600.0, show_default=True,
              help="For what is on the disk to be given up; it is unreadable before. 0: not at all.")  # fmt: skip
@click.option("--receipt", "target", type=_PATH, metavar="FILE", help="Where to put the receipt.")
@click.option("--kek", metavar="WHERE", default="", help="Without a service: as the store is opened with.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
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
        keys = [_key(one) for one in blocks] if blocks else None
        return store.erase(tenant=tenant, session=session, subject=subject, blocks=keys, wait_s=wait_s)

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


def _key(text: str) -> bytes:
    from perdure.errors import InvalidArgument

    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidArgument(f"--block {text!r}: must be 64 hex digits, as `perdure verify` prints them") from None
