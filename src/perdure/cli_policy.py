"""`perdure policy`: check, test, explain, diff, of policy directories; reload asks the service.

Exit status as in `cli`: 0 fine; 1 a golden decision is another one, or terms changed under the same version; 2 the
policy cannot be read, with the place and what to write.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from perdure.governance.policy import Policies

_PATH = click.Path(path_type=Path)
_POLICY = click.argument("directory", metavar="POLICY", type=_PATH)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
_IF = click.option(
    "--if", "conditions", multiple=True, metavar="CONDITION", help="encrypted, held, retained, volatile or root=PATH."
)


@click.group()
def policy() -> None:
    """Who may do what with whose blocks. POLICY is the directory that `perdure serve --policy` is given."""


@policy.command()
@_POLICY
@_JSON
def check(directory: Path, as_json: bool) -> None:
    """Is POLICY valid? Says what is in force, or where the first mistake is."""
    policies = _load(directory)
    documents = sorted(policies.documents.values(), key=lambda one: one.tenant)
    own = [rule for rule in policies.rules if not rule.name.startswith("base:")]
    if as_json:
        names = [one.name for one in documents]
        told = {"digest": policies.digest, "principals": sorted(policies.principals), "terms": names}
        click.echo(json.dumps(told | {"rules": [rule.name for rule in policies.rules]}, indent=2))
        return
    click.echo(f"valid: {len(policies.principals)} principals, {len(documents)} tenants, {len(own)} rules of its own")
    for one in documents:
        click.echo(f"  {one.name}: scope {one.scope}, tiers {'+'.join(one.tiers)}, encryption {one.encryption}")
    without = {tenant for one in policies.principals.values() for tenant in one.tenants} - policies.documents.keys()
    for tenant in sorted(without):
        click.echo(f"  {tenant}: no terms, so everything is denied; write them into {directory}/tenants")
    click.echo(f"digest {policies.digest}")


@policy.command("test")
@_POLICY
@click.argument("matrix", metavar="[MATRIX]", type=_PATH, required=False)
@_JSON
def test_(directory: Path, matrix: Path | None, as_json: bool) -> None:
    """Compare decisions with the golden ones in MATRIX (POLICY/matrix.txt if not given)."""
    from dataclasses import asdict

    from perdure.governance import matrix as golden

    policies = _load(directory)
    expected = golden.read(matrix or directory / golden.FILE, policies)
    failures = golden.compare(policies, expected)
    if as_json:
        told = {"decisions": len(expected), "failures": [asdict(one) for one in failures]}
        click.echo(json.dumps(told, indent=2))
    else:
        for one in failures:
            click.echo(f"{one.place}: {one.what}: expected {one.expected}, is {one.got}")
        click.echo(f"{len(expected)} decisions, {len(failures)} other than expected")
    sys.exit(1 if failures else 0)


@policy.command()
@_POLICY
@click.argument("principal")
@click.argument("tenant")
@click.argument("action", required=False)
@_IF
@_JSON
def explain(
    directory: Path, principal: str, tenant: str, action: str | None, conditions: tuple[str, ...], as_json: bool
) -> None:
    """What PRINCIPAL may do with TENANT's blocks (- for the service), by which rules, on which terms."""
    import msgspec

    from perdure.errors import PolicyError
    from perdure.governance.matrix import conditions_of
    from perdure.governance.policy import SERVICE_ACTIONS, SPACE_ACTIONS

    policies = _load(directory)
    who = policies.principals.get(principal)
    if who is None:
        raise PolicyError(f"there is no principal {principal!r}; there are {', '.join(sorted(policies.principals))}")
    whose = "" if tenant == "-" else tenant
    actions = (action,) if action else SPACE_ACTIONS if whose else SERVICE_ACTIONS
    decided = policies.decide_all(who, whose, actions, conditions_of(list(conditions), "--if"))
    places = {rule.name: rule.place for rule in policies.rules}
    document = policies.documents.get(whose)
    if as_json:
        told: dict[str, Any] = {
            name: {"decision": one.word, "rules": list(one.rules), "why": one.why} for name, one in decided.items()
        }
        terms = None if document is None else msgspec.to_builtins(document)
        click.echo(json.dumps({"decisions": told, "terms": terms}, indent=2))
        return
    width = max(map(len, decided))
    for name in actions:
        one = decided[name]
        at = ", ".join(f"{rule} ({places[rule]})" if rule in places else rule for rule in one.rules)
        click.echo(f"{name:{width}}  {one.word:5}  {one.why}{f'  [{at}]' if at else ''}")
    if document is not None:
        click.echo(f"terms {document.name}: {msgspec.json.encode(document).decode()}")


@policy.command()
@click.argument("old", type=_PATH)
@click.argument("new", type=_PATH)
@_IF
@_JSON
def diff(old: Path, new: Path, conditions: tuple[str, ...], as_json: bool) -> None:
    """Which terms and decisions change from one policy directory to another."""
    from perdure.governance.matrix import conditions_of, difference

    told = difference(_load(old), _load(new), conditions_of(list(conditions), "--if"))
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        for one in told["terms"]:
            click.echo(f"{one['tenant']}: {one['field'] or 'terms'}: {one['old']} -> {one['new']}")
        for one in told["decisions"]:
            click.echo(f"{one['principal']} {one['tenant'] or '-'} {one['action']}: {one['old']} -> {one['new']}")
        for name in told["unversioned"]:
            click.echo(f"{name}: changed under the same version; raise version")
        if not any(told.values()):
            click.echo("no difference")
    sys.exit(1 if told["unversioned"] else 0)


@policy.command()
@click.argument("service", metavar="SERVICE", type=_PATH)
@_JSON
def reload(service: Path, as_json: bool) -> None:
    """Have the service of a store, named by its directory or socket, read its policy anew. Exit status 2: it is not
    valid, or could not be recorded, and the one before stays in force."""
    from perdure.service.client import connect

    with connect(service, name="perdure policy reload") as client:
        told = client.reload_policy()
    if as_json:
        click.echo(json.dumps(told, indent=2))
        return
    click.echo(f"{'in force' if told['changed'] else 'nothing has changed'}: {', '.join(told['terms'])}")
    click.echo(f"digest {told['digest']}; {told['disconnected']} clients were disconnected")


def _load(directory: Path) -> Policies:
    from perdure.governance.policy import load

    return load(directory)
