"""`perdure audit`: verify, prove, query, export. Offline: on the files, beside a running writer or without one.

Exit status as in `cli`: 0 fine, 1 the log is not what was signed, 2 the command could not be carried out.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

_DIRECTORY = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
_KEY = click.option("--key", metavar="KEY", help="Verifier key kept elsewhere; else the one beside the log.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group()
def audit() -> None:
    """The record of what was done. DIR is a store, or the folder of an exported log."""


@audit.command()
@_DIRECTORY
@_KEY
@click.option("--against", type=_FILE, metavar="FILE", help="A checkpoint kept elsewhere: the log must continue it.")
@_JSON
def verify(directory: Path, key: str | None, against: Path | None, as_json: bool) -> None:
    """Check every record, digest and signature. Exit status 1, and where, if something was changed."""
    from perdure.governance import audit_look as look

    folder = look.folder_of(directory)
    verdict = look.verify(folder, key, None if against is None else against.read_bytes())
    if as_json:
        shown = {name: getattr(verdict, name) for name in ("origin", "records", "signed", "files", "root", "problems")}
        click.echo(json.dumps(shown | {"ok": verdict.ok}, indent=2))
    else:
        for problem in verdict.problems:
            click.echo(problem)
        said = "all as signed" if verdict.ok else "NOT what was signed"
        click.echo(f"{verdict.records} records in {verdict.files} files, {verdict.signed} signed: {said}")
    sys.exit(0 if verdict.ok else 1)


@audit.command()
@_DIRECTORY
@click.argument("number", type=int, required=False)
@click.option("--since", type=_FILE, metavar="FILE", help="Older checkpoint: prove that the log only grew since.")
def prove(directory: Path, number: int | None, since: Path | None) -> None:
    """Print record NUMBER and the proof that it is in the log: index, hashes, signed checkpoint."""
    import base64

    from perdure.errors import InvalidArgument
    from perdure.governance import audit_look as look

    folder = look.folder_of(directory)
    if (number is None) == (since is None):
        raise InvalidArgument("say which record: NUMBER, or --since FILE for a proof of growth")
    if since is not None:
        for one in look.prove_growth(folder, since.read_bytes()):
            click.echo(base64.b64encode(one).decode())
        return
    assert number is not None
    line, proof = look.prove(folder, number)
    click.echo(line.decode())
    click.echo(proof, nl=False)


@audit.command()
@_DIRECTORY
@click.option("--op", metavar="NAME", help="Only these operations, for example read, put, handoff.")
@click.option("--tenant", metavar="NAME", help="Only of this tenant.")
@click.option("--who", metavar="TEXT", help="Only by whose name contains this.")
@click.option("--block", metavar="KEY", help="Only messages that begin or end with this block (64 hex digits).")
@click.option("--decision", type=click.Choice(["allow", "deny"]), help="Only what was allowed, or denied.")
@click.option("--trace", metavar="TEXT", help="Only under this trace.")
@click.option("--since-s", type=float, metavar="SECONDS", help="Only of the last so many seconds.")
@click.option(
    "--store",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="With --block, where the log lies elsewhere: the directory of the store.",
)
@_JSON
def query(
    directory: Path,
    op: str | None,
    tenant: str | None,
    who: str | None,
    block: str | None,
    decision: str | None,
    trace: str | None,
    since_s: float | None,
    store: Path | None,
    as_json: bool,
) -> None:
    """Print records, oldest first. What it prints is not verified: see `verify`."""
    from perdure.governance import audit_look as look

    named = None if block is None else _id_of(store or directory, block)
    after = 0.0 if since_s is None else time.time() - since_s
    for line, event in look.records(look.folder_of(directory)):
        if (
            (op is None or event.op == op)
            and (tenant is None or event.tenant == tenant)
            and (who is None or who in event.who)
            and (named is None or named in (event.first, event.last))
            and decision in (None, event.decision)
            and trace in (None, event.trace)
            and event.at >= after
        ):
            click.echo(line.decode() if as_json else _row(event))


def _row(event: Any) -> str:
    at = time.strftime("%F %T", time.localtime(event.at))
    counts = " ".join(f"{name}={count}" for name, count in event.counts.items())
    shown = (f"{event.blocks} blocks" if event.blocks else "", counts, event.outcome, event.detail)
    op = event.op if event.decision == "allow" else f"{event.op} ({event.decision})"
    head = f"{event.n:>8}  {at}  {op:16}  {event.tenant or '-':16}  {event.who}"
    return "  ".join(part for part in (head, *shown) if part)


def _id_of(directory: Path, block: str) -> str:
    """A block's name in the log: needs the store's secret, so an exported log cannot be asked this way."""
    from perdure.directory import root_secret
    from perdure.errors import InvalidArgument
    from perdure.governance.audit import block_id, id_key_of

    try:
        raw = bytes.fromhex(block)
    except ValueError:
        raise InvalidArgument(f"--block {block!r}: must be 64 hex digits, as `perdure verify` prints them") from None
    return block_id(id_key_of(root_secret(directory)), "block", raw)


@audit.command()
@_DIRECTORY
@click.argument("target", metavar="TARGET", type=click.Path(path_type=Path))
@_KEY
def export(directory: Path, target: Path, key: str | None) -> None:
    """Copy what is signed to TARGET, or what it lacks: another disk, another trust domain."""
    from perdure.governance import audit_look as look

    verdict = look.export(look.folder_of(directory), target, key)
    click.echo(f"{verdict.signed} records exported to {target}")
