"""`perdure cluster`: what can be seen of a store that many processes share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click


@click.group()
def cluster() -> None:
    """A store that many services share: its catalog is a Valkey Cluster."""


@cluster.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--catalog", envvar="PERDURE_CATALOG", metavar="URL", required=True, help="Cluster that holds the catalog of DIR."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(directory: Path, catalog: str, as_json: bool) -> None:
    """The cluster's servers, the services that registered, segments and blocks. Exit status 1 if something is wrong."""
    from perdure.cluster import status as look

    answer = look(directory, catalog)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        for line in _lines(answer):
            click.echo(line)
    sys.exit(1 if answer["problems"] else 0)


@cluster.command()
@click.argument("report", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def scale(report: Path) -> None:
    """What follows from a REPORT of `perdure bench cluster --json` for larger clusters: nodes, memory, waits."""
    from perdure.benchmarks import cluster_model

    click.echo(cluster_model.tables(cluster_model.read_report(report)), nl=False)


def _lines(answer: dict[str, Any]) -> list[str]:
    out = []
    for one in answer["servers"]:
        what = f"{one['slots']} slots, {len(one['replicas'])} replicas" if one["role"] == "primary" else ""
        out.append(f"server   {one['address']:22} {one['role']:8} {'up' if one['answers'] else 'silent':7} {what}")
    for one in answer["hosts"]:
        name = f"{one['host']} (pid {one['pid']})" if one["owner"] else "not registered"
        state = "up" if one["silent_s"] is None else f"silent for {one['silent_s']} s"
        out.append(f"service  {name:31} {state:20} {one['open_segments']} open segments")
    states = ", ".join(f"{count} {state}" for state, count in sorted(answer["segments"].items())) or "none"
    out.append(f"segments {states}; {answer['used_bytes']} of {answer['capacity_bytes']} bytes")
    out.append(f"blocks   {answer.get('blocks', 'unknown')}")
    return out + [f"problem  {one}" for one in answer["problems"]]
