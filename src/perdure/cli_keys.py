"""`perdure keys`: rotate what wraps the keys of a store. The store must not be open for writing.

Exit status as in `cli`: 0 fine, 2 the command could not be carried out.
"""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def keys() -> None:
    """The keys of encrypted segments."""


@keys.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--kek", metavar="WHERE", default="", help="As the store is opened with: file:PATH, vault:URL#KEY or pkcs11:URI."
)
def rotate(directory: Path, kek: str) -> None:
    """Wrap every tenant's key by a new key, and destroy the old one. No data is rewritten."""
    from perdure import store

    with store.open(directory, memory=0, kek=kek) as opened:
        count = opened.rotate_kek()
    click.echo(f"{count} tenants' keys are wrapped by a new key; the old one is destroyed")
