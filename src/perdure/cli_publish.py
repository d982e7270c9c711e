"""`perdure publish`, `unpublish`, `published`: prefixes of one tenant that others may read. Asks the service of a store
if one runs, else opens the store.

Exit status as in `cli`: 0 fine, 2 the command could not be carried out.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from perdure.cli_sessions import with_store

_DIRECTORY = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command()
@_DIRECTORY
@click.argument("keyspace", metavar="KEYSPACE")
@click.option("--name", required=True, metavar="NAME", help="What it is called from now on.")
@click.option("--tokens", type=_FILE, metavar="FILE", help="Token ids of the prefix, as JSON or between spaces.")
@click.option("--hashes", type=_FILE, metavar="FILE", help="An engine's own hashes of its blocks, hex, one a line.")
@click.option("--reader", "readers", multiple=True, metavar="TENANT", help="Only for this tenant; may be repeated.")
@click.option("--ttl", "ttl_s", type=float, metavar="SECONDS", help="Forget it after so long.")
@_JSON
def publish(
    directory: Path, keyspace: str, name: str, tokens: Path | None, hashes: Path | None, readers: tuple[str, ...],
    ttl_s: float | None, as_json: bool,
) -> None:  # fmt: skip
    """Let other tenants read a stored prefix. DIR is a store, or the socket of its service; KEYSPACE the digest of the
    keyspace that has it (its first digits are enough), as `perdure status DIR --json` shows it."""
    token_ids = None if tokens is None else _tokens(tokens)
    names = None if hashes is None else _hashes(hashes)

    def ask(store: Any) -> Any:
        digest = _digest(store.status()["keyspaces"], keyspace)
        return store.publish(digest, token_ids, name=name, hashes=names, readers=readers or ("*",), ttl_s=ttl_s)

    told = with_store(directory, ask, read_only=False)
    click.echo(json.dumps(told, indent=2) if as_json else _line(told))


@click.command()
@_DIRECTORY
@click.argument("name", metavar="NAME")
@_JSON
def unpublish(directory: Path, name: str, as_json: bool) -> None:
    """End a publication, by its name or id: from now on nobody finds it, and its key is destroyed."""
    told = with_store(directory, lambda store: store.unpublish(name), read_only=False)
    click.echo(json.dumps(told, indent=2) if as_json else f"no more: {_line(told)}")


@click.command()
@_DIRECTORY
@_JSON
def published(directory: Path, as_json: bool) -> None:
    """What is published, by whom, and for whom."""
    told = with_store(directory, lambda store: store.published(), read_only=True)
    if as_json:
        click.echo(json.dumps(told, indent=2))
    for one in told if not as_json else ():
        click.echo(_line(one))


def _line(one: dict[str, Any]) -> str:
    since = time.strftime("%F %T", time.localtime(one["created_s"]))
    readers = "everyone" if one["readers"] == ["*"] else ", ".join(one["readers"])
    return (
        f"{one['name']} ({one['id']}): {one['tokens']} tokens of {one['tenant']}, {one['model']}, for {readers}; "
        f"{one['present']} of {one['blocks']} blocks stored; since {since} by {one['by']}"
    )


def _digest(known: list[dict[str, Any]], asked: str) -> bytes:
    from perdure.errors import InvalidArgument

    fit = [one["digest"] for one in known if one["digest"].startswith(asked.lower()) and asked]
    if len(fit) != 1:
        raise InvalidArgument(f"{asked!r} begins the digest of {len(fit)} keyspaces; see `perdure status DIR --json`")
    return bytes.fromhex(fit[0])


def _tokens(path: Path) -> list[int]:
    from perdure.errors import InvalidArgument

    try:
        return [
            int(one) for one in path.read_text().strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
        ]
    except ValueError as error:
        raise InvalidArgument(f"{path}: not token ids ({error}); write numbers with spaces between") from None


def _hashes(path: Path) -> list[bytes]:
    from perdure.errors import InvalidArgument

    try:
        return [bytes.fromhex(line) for line in path.read_text().split()]
    except ValueError as error:
        raise InvalidArgument(f"{path}: not hashes ({error}); write one a line, in hex") from None


COMMANDS: tuple[click.Command, ...] = (publish, unpublish, published)
