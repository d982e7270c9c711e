"""Policy: may this principal do that with this tenant's blocks, and on which terms? Cedar rules over a fixed schema.

    DIR/principals.toml     who there is (`principals`)
    DIR/tenants/*.toml      one document of terms per tenant (`terms`); a tenant without one is refused everything
    DIR/rules/*.cedar       rules beside the ones below, each with an @id("...") of its own

Contract
- A directory is taken whole or refused whole (PolicyError: file, line, problem, remedy). Rules are validated against
  the schema: a misspelt action or attribute is an error, not a rule without effect.
- Deny beats permit, of rules as of terms; what nothing permits is denied, and what fails. No rule reaches beyond a
  principal's own tenants: those are checked first. A hold beats erasure, and so does a retention that was promised.
- `decide` costs as much as a small disk read: it is for sessions, whose outcome is kept as a capability, not for
  batches.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from perdure import limits
from perdure.errors import PolicyError
from perdure.governance import principals, terms
from perdure.governance.principals import Jwt, Principal
from perdure.governance.terms import NARROW, Document

SPACE_ACTIONS: Final = ("read", "map", "write", "pin", "release", "session", "handoff", "publish", "hold", "erase")
SERVICE_ACTIONS: Final = ("status", "explain", "audit", "administer")
ACTIONS: Final = SPACE_ACTIONS + SERVICE_ACTIONS
_WRITING: Final = ("write", "publish")
_STAMP_DIGITS: Final = 12

SCHEMA: Final = f"""
namespace Perdure {{
  entity Tenant;
  entity Role;
  entity Principal in [Role, Tenant] = {{ name: String, group: String }};
  entity Space = {{ tenant: Tenant, scope: String }};
  entity Service;
  action {", ".join(SPACE_ACTIONS)} appliesTo {{
    principal: [Principal], resource: [Space],
    context: {{ encrypted: Bool, persistent: Bool, held: Bool, retained: Bool }}
  }};
  action {", ".join(SERVICE_ACTIONS)} appliesTo {{ principal: [Principal], resource: [Service], context: {{}} }};
}}
"""

BASE: Final = """
@id("base:engines")
permit (
  principal in Perdure::Role::"engine",
  action in [Perdure::Action::"read", Perdure::Action::"map", Perdure::Action::"write", Perdure::Action::"pin",
             Perdure::Action::"release", Perdure::Action::"session", Perdure::Action::"handoff"],
  resource
) when { principal in resource.tenant };

@id("base:operators")
permit (
  principal in Perdure::Role::"operator",
  action in [Perdure::Action::"status", Perdure::Action::"explain", Perdure::Action::"administer"],
  resource
);

@id("base:operators-tenants")
permit (
  principal in Perdure::Role::"operator",
  action in [Perdure::Action::"publish", Perdure::Action::"hold", Perdure::Action::"erase"],
  resource
) when { principal in resource.tenant };

@id("base:auditors")
permit (
  principal in Perdure::Role::"auditor",
  action in [Perdure::Action::"status", Perdure::Action::"audit"],
  resource
);

@id("base:held")
forbid (principal, action == Perdure::Action::"erase", resource) when { context.held };

@id("base:retained")
forbid (principal, action == Perdure::Action::"erase", resource) when { context.retained };
"""


@dataclass(frozen=True, slots=True)
class Where:
    """What a decision may depend on beside who, whose and what. roots: of the store. persistent: it outlives the power.
    held: a legal hold is on what is to be erased. retained: it is younger than retention_min_s."""

    roots: tuple[str, ...] = ()
    persistent: bool = True
    encrypted: bool = False
    held: bool = False
    retained: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """rules: ids of the rules, or names of the terms, that decided."""

    allowed: bool
    rules: tuple[str, ...]
    why: str

    @property
    def word(self) -> str:
        return "allow" if self.allowed else "deny"


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    text: str
    place: str


@dataclass(eq=False)
class Policies:
    """Made by `load`. documents: by tenant; principals: by name."""

    path: Path
    principals: dict[str, Principal]
    jwt: Jwt | None
    documents: dict[str, Document]
    rules: list[Rule]
    _handles: tuple[Any, Any, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        cedar = _cedar()
        schema = cedar.Schema.from_str(SCHEMA)
        entities = cedar.Entities.from_json_str(json.dumps(self._entities()), schema)
        self._handles = cedar.PolicySet.from_str("\n".join(rule.text for rule in self.rules)), entities, schema

    @cached_property
    def digest(self) -> str:
        """Of everything that decides, 64 hex digits: changes with any of it."""
        told = [sorted((one.name, one.text) for one in self.rules)]
        told.append(sorted((name, msgspec.json.encode(one).decode()) for name, one in self.documents.items()))
        told.append(sorted((name, msgspec.json.encode(one).decode()) for name, one in self.principals.items()))
        told.append([("jwt", msgspec.json.encode(self.jwt).decode())])
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def stamp(self, tenant: str) -> str:
        """Id and version of what decides about a tenant's blocks, for the audit log; "": about the service."""
        document = self.documents.get(tenant)
        return f"{tenant if document is None else document.name}#{self.digest[:_STAMP_DIGITS]}"

    def _entities(self) -> list[dict[str, Any]]:
        made = [_entity("Tenant", name) for name in self._tenants()]
        made += [_entity("Role", name) for name in principals.ROLES]
        made.append(_entity("Service", "this"))
        for one in self.principals.values():
            parents = [*(_id("Role", role) for role in one.roles), *(_id("Tenant", name) for name in one.tenants)]
            made.append(_entity("Principal", one.name, {"name": one.name, "group": one.group}, parents))
        for name, document in self.documents.items():
            attributes = {"tenant": {"__entity": _id("Tenant", name)}, "scope": document.scope}
            made.append(_entity("Space", name, attributes))
        return made

    def _tenants(self) -> set[str]:
        return {*self.documents, *(tenant for one in self.principals.values() for tenant in one.tenants)}

    # --- deciding
    def decide(self, principal: Principal, tenant: str, action: str, at: Where = Where()) -> Decision:
        """tenant: "" for actions on the service."""
        return self.decide_all(principal, tenant, (action,), at)[action]

    def decide_all(
        self,
        principal: Principal,
        tenant: str,
        actions: Sequence[str],
        at: Where = Where(),
    ) -> dict[str, Decision]:
        """Each of `actions` by itself, at the price of about one."""
        decided: dict[str, Decision] = {}
        for action in actions:
            refused = self._refused(principal, tenant, action, at)
            if refused is not None:
                decided[action] = refused
        asked = [action for action in actions if action not in decided]
        requests = [_request(principal, tenant, action, at) for action in asked]
        policies, entities, schema = self._handles
        results = _cedar().is_authorized_batch(requests, policies, entities, schema) if requests else []
        for action, result in zip(asked, results, strict=True):
            names = result.diagnostics.id_annotations_by_reason
            rules = tuple(sorted(names.get(reason, reason) for reason in result.diagnostics.reasons))
            if result.diagnostics.errors:  # a rule that fails in the middle may be the one that forbids
                decided[action] = Decision(False, rules, f"a rule failed: {result.diagnostics.errors[0]}")
            elif result.allowed:
                decided[action] = Decision(True, rules, f"permitted by {', '.join(rules)}")
            else:
                why = f"forbidden by {', '.join(rules)}" if rules else "no rule permits it"
                decided[action] = Decision(False, rules, why)
        return decided

    def _refused(self, principal: Principal, tenant: str, action: str, at: Where) -> Decision | None:
        """What no rule can permit."""
        if action in SERVICE_ACTIONS:
            return None
        if action not in ACTIONS:
            return Decision(False, (), f"there is no action {action!r}; there are {', '.join(ACTIONS)}")
        if tenant not in principal.tenants:
            return Decision(False, ("principal:tenants",), f"{principal.name} is no principal of tenant {tenant!r}")
        document = self.documents.get(tenant)
        if document is None:
            return Decision(False, ("terms",), f"tenant {tenant!r} has no terms; write them into {self.path}/tenants")
        if action == "publish" and not document.publication:
            return Decision(False, ("terms:publication",), f"{document.name} allows no publication")
        if action == "map" and (not document.map or document.scope in NARROW):
            name = "terms:scope" if document.map else "terms:map"
            return Decision(False, (name,), f"{document.name} lets engines map no memory")
        problem = None
        if action in _WRITING:
            problem = document.place_problem(at.roots, persistent=at.persistent, encrypted=at.encrypted)
        if problem is not None:
            return Decision(False, (f"terms:{problem.partition(':')[0]}",), f"{document.name}: {problem}")
        return None


def _request(principal: Principal, tenant: str, action: str, at: Where) -> dict[str, Any]:
    space = action in SPACE_ACTIONS
    context = {
        "encrypted": at.encrypted, "persistent": at.persistent, "held": at.held, "retained": at.retained,
    }  # fmt: skip
    return {
        "principal": _id("Principal", principal.name),
        "action": _id("Action", action),
        "resource": _id("Space", tenant) if space else _id("Service", "this"),
        "context": context if space else {},
    }


def _id(kind: str, name: str) -> dict[str, str]:
    return {"type": f"Perdure::{kind}", "id": name}


def _entity(
    kind: str, name: str, attributes: dict[str, Any] | None = None, parents: Iterable[dict[str, str]] = ()
) -> dict[str, Any]:
    return {"uid": _id(kind, name), "attrs": attributes or {}, "parents": list(parents)}


# --- reading a directory --------------------------------------------------------------------------------------
def load(path: Path) -> Policies:
    """Everything in a policy directory. Raises PolicyError."""
    _cedar()
    if not path.is_dir():
        raise PolicyError(f"{path}: not a directory; it must hold {principals.FILE} and tenants/NAME.toml")
    listed = principals.read(path / principals.FILE)
    documents: dict[str, Document] = {}
    for file in sorted((path / "tenants").glob("*.toml")):
        document = terms.read(file)
        if document.tenant in documents:
            raise PolicyError(f"{file}: tenant {document.tenant!r} has another document there; keep one")
        documents[document.tenant] = document
    rules = _statements(BASE, "base")
    for file in sorted((path / "rules").glob("*.cedar")):
        rules += _statements(terms.read_text(file), str(file))
    places: dict[str, str] = {}
    for rule in rules:
        if rule.name in places:
            raise PolicyError(f"{rule.place}: rule {rule.name!r} is in {places[rule.name]} already; choose another @id")
        places[rule.name] = rule.place
    if len(rules) > limits.policy_rules_entries_max:
        raise PolicyError(f"{path}/rules: {len(rules)} rules, at most {limits.policy_rules_entries_max}; merge some")
    local = msgspec.structs.replace(principals.LOCAL, tenants=tuple(sorted(documents)))
    everybody = {one.name: one for one in (*listed.principal, local)}
    return Policies(path, everybody, listed.jwt, documents, rules)


_PIECE: Final = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|;|[^";/]+|.', re.DOTALL)


def _statements(text: str, place: str) -> list[Rule]:
    """The rules of one file, each validated by itself, so that an error has its place."""
    rules: list[Rule] = []
    begun, at = "", 0
    for piece in _PIECE.findall(text):
        if piece.startswith("//"):
            at += len(piece)
            continue
        if not begun.strip():
            begun = ""
            line = text.count("\n", 0, at + len(piece) - len(piece.lstrip())) + 1
        begun += piece
        at += len(piece)
        if piece == ";":
            rules.append(_checked(begun.strip(), f"{place}:{line}", own=place != "base"))
            begun = ""
    if begun.strip():
        raise PolicyError(f"{place}:{line}: the last rule has no end; write ; after it")
    return rules


def _checked(text: str, place: str, *, own: bool) -> Rule:
    cedar = _cedar()
    try:
        parsed = json.loads(cedar.policies_to_json_str(text))
    except ValueError as error:
        raise PolicyError(f"{place}: not a Cedar rule ({_one_line(error)}); see docs/policy.md") from None
    found = parsed.get("staticPolicies") or {}
    if len(found) != 1:
        raise PolicyError(f"{place}: not one rule without slots; write permit (...) or forbid (...)")
    name = next(iter(found.values())).get("annotations", {}).get("id")
    if not name or (own and name.startswith(("base:", "terms:", "principal:"))):
        raise PolicyError(f'{place}: a rule needs a name that is free: write @id("...") before it (base: is taken)')
    checked = cedar.validate_policies(text, SCHEMA)
    if not checked:
        problem = "; ".join(re.sub(r"for policy `policy\d+`, ", "", one.error) for one in checked.errors)
        known = f"actions are {', '.join(ACTIONS)}" if "action" in problem else "see the schema in docs/policy.md"
        raise PolicyError(f"{place}: rule {name!r}: {_one_line(problem)}; {known}")
    return Rule(name, text, place)


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())


def _cedar() -> Any:
    try:
        import cedarpy
    except ImportError:
        raise PolicyError("policies need Cedar: pip install 'perdure[governance]'") from None
    return cedarpy
