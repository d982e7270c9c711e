"""`perdure engine` and `perdure engine-check`: what engines that use a service do, while they run and before."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from perdure.cli_output import console

_URL = click.argument("url", metavar="DIR")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def engine() -> None:
    """Tell the running engines of a service. DIR is the service's directory or socket, as in the engine's settings."""


def _tell(url: str, said: str, **told: Any) -> None:
    from perdure.engines import control

    control.tell(control.file_of(url), **told)
    click.echo(f"{said}; engines notice within {control.POLL_S:g} s")


@engine.command()
@_URL
def off(url: str) -> None:
    """Engines load and store nothing from now on."""
    _tell(url, "engines use the cache no more", off=True)


@engine.command()
@_URL
def on(url: str) -> None:
    """Engines use the cache again, also after a canary turned it off."""
    _tell(url, "engines use the cache", off=False)


@engine.command("weights-changed")
@_URL
def weights_changed(url: str) -> None:
    """The weights of running engines were changed by a call that does not reset their cache: look at them again."""
    _tell(url, "engines look at their weights again before they load or store anything", weights=True)


@engine.command()
@_URL
@_JSON
def state(url: str, as_json: bool) -> None:
    """What engines were told last."""
    from perdure.engines import control

    told = control.read(control.file_of(url)) or control.Switch()
    if as_json:
        click.echo(json.dumps(asdict(told)))
    else:
        click.echo(f"engines {'do not use' if told.off else 'use'} the cache; weights changed {told.weights} times")


@click.command("engine-check")
@click.argument("kind", type=click.Choice(["vllm"]))
@click.option("--model", metavar="PATH", help="Also say whether this model is supported; needs vLLM.")
@_JSON
def engine_check(kind: str, model: str | None, as_json: bool) -> None:
    """What an engine's connector supports, and what to use instead where it does not. Exit status 1: not this model."""
    from perdure.engines.vllm import identity

    rows = identity.support_table(None if model is None else identity.config_of(model))
    refused = any(name.startswith("this model") and answer.startswith("refused") for name, answer in rows)
    if as_json:
        click.echo(json.dumps([{"feature": name, "answer": answer} for name, answer in rows], indent=2))
    else:
        from rich.table import Table

        table = Table("feature", "PerdureConnector", title=f"{kind} {', '.join(identity.VLLM_VERSIONS)}.x")
        for row in rows:
            table.add_row(*row)
        console().print(table)
    sys.exit(1 if refused else 0)
