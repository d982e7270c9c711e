"""`perdure audit-isolation`: the timing test between two tenants, against a live service or endpoint.

Exit status as in `cli`: 0 isolated; 1 not isolated, or nothing could be told; 2 the command could not be carried out.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import click


@click.command("audit-isolation")
@click.argument("addresses", metavar="ADDRESS [ADDRESS]", nargs=-1)
@click.option("--tenant", "tenants", multiple=True, metavar="NAME", help="Of A, then of B; empty: the principal's own.")
@click.option("--samples", default=250, show_default=True, metavar="NUMBER", help="Prefixes per kind.")
@click.option("--blocks", default=32, show_default=True, metavar="NUMBER", help="Blocks (or 16 words) of a prefix.")
@click.option("--block-bytes", default=65_536, show_default=True, metavar="BYTES", help="Bytes of a block.")
@click.option("--endpoint", metavar="URL", help="Test an inference endpoint instead: http://HOST:PORT/v1/completions.")
@click.option("--model", default="", metavar="NAME", help="Model to ask the endpoint for.")
@click.option("--header", "headers", multiple=True, metavar="TEXT", help="'Name: value' of A, then of B.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def audit_isolation(as_json: bool, **options: Any) -> None:
    """Can tenant B tell by time what tenant A has asked for? ADDRESSes are the sockets of a principal of each, or one
    address of a service without a policy (then --tenant names both)."""
    from dataclasses import asdict

    from perdure.observe import isolation

    with contextlib.ExitStack() as stack:
        verdict = isolation.audit(_probe(stack, **options), options["samples"])
    if as_json:
        click.echo(json.dumps(asdict(verdict) | {"isolated": verdict.isolated}, indent=2))
    else:
        for kind, what in (("same", "A, its own"), ("other", "B, A's"), ("fresh", "B, nobody's")):
            told = "" if verdict.hits[kind] is None else f", {verdict.hits[kind]} of {verdict.samples} hit"
            click.echo(f"{what:12} {1e3 * verdict.median_s[kind]:9.3f} ms (median){told}")
        click.echo(f"B tells A's from nobody's by time: AUC {verdict.auc:.3f}, KS p {verdict.p_other:.2g}")
        for problem in (*verdict.problems, verdict.inconclusive):
            if problem:
                click.echo(problem)
        word = "isolated" if verdict.isolated else "NOT ISOLATED" if verdict.problems else "inconclusive"
        click.echo(f"verdict: {word}")
    sys.exit(0 if verdict.isolated else 1)


def _probe(
    stack: contextlib.ExitStack, *, addresses: tuple[str, ...], tenants: tuple[str, ...], samples: int, blocks: int,
    block_bytes: int, endpoint: str | None, model: str, headers: tuple[str, ...],
) -> Any:  # fmt: skip
    from perdure.errors import InvalidArgument
    from perdure.observe.isolation import EndpointProbe, StoreProbe
    from perdure.service.client import connect

    if endpoint:
        if len(headers) != 2:
            raise InvalidArgument("--header must be given twice: what tells the endpoint who asks, of A and of B")
        pairs = [one.partition(":") for one in headers]
        given = [{name.strip(): value.strip()} for name, _, value in pairs]
        return EndpointProbe(endpoint, model, given, words=16 * blocks)
    if not 1 <= len(addresses) <= 2:
        raise InvalidArgument("name the socket of a principal of each tenant, or --endpoint URL")
    if len(tenants) not in ((0, 2) if len(addresses) == 2 else (2,)):
        raise InvalidArgument("--tenant must be given twice: of A and of B")
    mine, theirs = (stack.enter_context(connect(one)) for one in (addresses[0], addresses[-1]))
    both = (tenants[0], tenants[1]) if tenants else ("", "")
    return StoreProbe(mine, theirs, both, blocks=blocks, block_bytes=block_bytes)
