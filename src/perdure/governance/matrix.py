"""Golden decisions: a file of what policy must answer, compared with what it answers; and what another policy changes.

    # principal   tenant   actions      conditions     decision [by rule]
    engine-a      acme     read,write               -> allow by base:engines
    engine-a      globex   *                        -> deny
    operator      acme     erase        held        -> deny by base:held
    operator      -        status                   -> allow

A tenant `-` is for actions on the service. Conditions are `encrypted`, `held`, `retained`, `volatile` (the store is in
memory) and `root=PATH`. `*` stands for all actions on a tenant's blocks (or, with `-`, on the service).

Contract: a line that is not understood, or that names what does not exist, is a PolicyError with its place: a golden
file never passes by testing nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from perdure.errors import PolicyError
from perdure.governance.policy import ACTIONS, SERVICE_ACTIONS, SPACE_ACTIONS, Policies, Where
from perdure.governance.principals import Principal
from perdure.governance.terms import read_text

FILE: Final = "matrix.txt"
_FLAGS: Final = ("encrypted", "held", "retained", "volatile")


@dataclass(frozen=True, slots=True)
class Expectation:
    place: str
    principal: Principal
    tenant: str
    action: str
    at: Where
    allowed: bool
    rule: str

    @property
    def what(self) -> str:
        return f"{self.principal.name} {self.tenant or '-'} {self.action}"


@dataclass(frozen=True, slots=True)
class Failure:
    """A decision that is not the golden one."""

    place: str
    what: str
    expected: str
    got: str


def read(path: Path, policies: Policies) -> list[Expectation]:
    """Raises PolicyError, also for a file that expects nothing."""
    expected: list[Expectation] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        asked = line.partition("#")[0].strip()
        if asked:
            expected += _expectations(asked, f"{path}:{number}", policies)
    if not expected:
        raise PolicyError(f"{path}: expects nothing; write lines such as: engine-a acme read,write -> allow")
    return expected


def _expectations(line: str, place: str, policies: Policies) -> Iterator[Expectation]:
    asked, arrow, decided = line.partition("->")
    words, answer = asked.split(), decided.split()
    if not arrow or len(words) < 3 or len(answer) not in (1, 3) or answer[1:2] not in ([], ["by"]):
        raise PolicyError(f"{place}: write: PRINCIPAL TENANT ACTIONS [CONDITIONS] -> allow|deny [by RULE]")
    name, tenant, actions, *conditions = words
    if name not in policies.principals:
        raise PolicyError(f"{place}: there is no principal {name!r}; there are {', '.join(policies.principals)}")
    if answer[0] not in ("allow", "deny"):
        raise PolicyError(f"{place}: {answer[0]!r}: write allow or deny")
    mine = SERVICE_ACTIONS if tenant == "-" else SPACE_ACTIONS
    chosen = mine if actions == "*" else tuple(actions.split(","))
    for action in chosen:
        if action not in mine:
            other = "on the service; write - for the tenant" if action in ACTIONS else "unknown"
            raise PolicyError(f"{place}: action {action!r} is {other}; for {tenant!r} there are {', '.join(mine)}")
    at, rule = conditions_of(conditions, place), answer[2] if len(answer) == 3 else ""
    whose = "" if tenant == "-" else tenant
    for action in chosen:
        yield Expectation(place, policies.principals[name], whose, action, at, answer[0] == "allow", rule)


def conditions_of(words: list[str], place: str) -> Where:
    """Raises PolicyError."""
    roots = tuple(word.removeprefix("root=") for word in words if word.startswith("root="))
    flags = {word for word in words if not word.startswith("root=")}
    for word in flags - set(_FLAGS):
        raise PolicyError(f"{place}: condition {word!r} does not exist; there are root=PATH, {', '.join(_FLAGS)}")
    return Where(
        roots, persistent="volatile" not in flags, encrypted="encrypted" in flags, held="held" in flags,
        retained="retained" in flags,
    )  # fmt: skip


def compare(policies: Policies, expected: list[Expectation]) -> list[Failure]:
    """What is decided otherwise, or by other rules, than expected."""
    failures: list[Failure] = []
    for one in expected:
        decision = policies.decide(one.principal, one.tenant, one.action, one.at)
        if decision.allowed != one.allowed or (one.rule and one.rule not in decision.rules):
            wanted = ("allow" if one.allowed else "deny") + (f" by {one.rule}" if one.rule else "")
            failures.append(Failure(one.place, one.what, wanted, f"{decision.word} ({decision.why})"))
    return failures


def difference(old: Policies, new: Policies, at: Where) -> dict[str, Any]:
    """What changes from one policy to another: JSON-able. `unversioned`: documents that differ under one version."""
    terms: list[dict[str, Any]] = []
    unversioned: list[str] = []
    for tenant in sorted({*old.documents, *new.documents}):
        before, after = old.documents.get(tenant), new.documents.get(tenant)
        if before is None or after is None:
            terms.append({"tenant": tenant, "field": "", "old": before and before.name, "new": after and after.name})
            continue
        changed = before.differences(after)
        terms += [{"tenant": tenant, "field": name, "old": was, "new": is_} for name, was, is_ in changed]
        if changed and after.version <= before.version:
            unversioned.append(after.name)
    decisions: list[dict[str, Any]] = []
    for name in sorted({*old.principals, *new.principals}):
        tenants = {tenant for one in (old, new) if name in one.principals for tenant in one.principals[name].tenants}
        for tenant, actions in [*((tenant, SPACE_ACTIONS) for tenant in sorted(tenants)), ("", SERVICE_ACTIONS)]:
            was, is_ = (_words(one, name, tenant, actions, at) for one in (old, new))
            decisions += [
                {"principal": name, "tenant": tenant, "action": action, "old": was[action], "new": is_[action]}
                for action in actions
                if was[action] != is_[action]
            ]
    return {"terms": terms, "decisions": decisions, "unversioned": unversioned}


def _words(policies: Policies, name: str, tenant: str, actions: tuple[str, ...], at: Where) -> dict[str, str]:
    principal = policies.principals.get(name)
    if principal is None:
        return dict.fromkeys(actions, "deny")
    decided = policies.decide_all(principal, tenant, actions, at)
    return {action: one.word for action, one in decided.items()}
