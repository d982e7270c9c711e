"""A tenant's terms: one versioned document (TOML) that says how its blocks may be shared, placed, kept and how many.

Contract
- A document is taken whole or refused whole: PolicyError names the file, the line where it can be told, what is wrong
  and what to write. A key that does not exist is an error that names the nearest one that does.
- Sizes come out as bytes, times are seconds. A field that is left out does not bind, except those that say otherwise.
- `version` is the operator's: whoever changes a document raises it. `Document.name` goes into grants and the audit log.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from perdure import limits
from perdure.errors import InvalidArgument, PolicyError
from perdure.keys import tenant_secret
from perdure.options import parse_size

Scope = Literal["private", "group", "tenant", "published"]
NARROW: Final = ("private", "group")  # less than the tenant: no memory is mapped, for that is one tenant's as a whole
T = TypeVar("T")


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At most so much; None: no bound."""

    stored_bytes: int | None = None
    requests_per_s: float | None = None
    inflight: int | None = None
    pins: int | None = None


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Against others. weight: turns where they wait for each other. guaranteed_bytes: what others never evict of it."""

    weight: int = 1
    guaranteed_bytes: int = 0


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """scope: who may use a block beside its writer: nobody ("private"), the principal's session group, the tenant, and
    published prefixes of others too. roots: directories that may hold its bytes; empty: any. tiers: without "disk",
    only a store in memory (tmpfs) may have them. map: engines may read memory without a message, so that what they read
    is known by their own account only. idle_ttl_s: of sessions nobody uses. retention_*_s: of blocks and sessions."""

    tenant: str
    version: int
    scope: Scope = "tenant"
    roots: tuple[str, ...] = ()
    tiers: tuple[Literal["memory", "disk"], ...] = ("memory", "disk")
    encryption: Literal["optional", "required"] = "optional"
    publication: bool = False
    map: bool = True
    idle_ttl_s: float | None = None
    retention_min_s: float = 0.0
    retention_max_s: float | None = None
    quota: Quota = Quota()
    share: Share = Share()

    @property
    def name(self) -> str:
        return f"{self.tenant}@{self.version}"

    def differences(self, other: Document) -> list[tuple[str, Any, Any]]:
        """(field, here, there) of what differs, `version` left out."""
        mine, theirs = _flat(self), _flat(other)
        return [(key, mine[key], theirs[key]) for key in mine if mine[key] != theirs[key] and key != "version"]

    def place_problem(self, roots: Iterable[str], *, persistent: bool, encrypted: bool) -> str | None:
        """Why a store with these roots may not take the tenant's blocks, and what to do; None: it may."""
        for root in roots:
            if self.roots and not any(_inside(root, allowed) for allowed in self.roots):
                return f"roots: its bytes may not lie in {root}; serve it from one of {', '.join(self.roots)}"
        if persistent and "disk" not in self.tiers:
            return "tiers: its bytes may lie in memory only; serve it from a store on a tmpfs"
        if self.encryption == "required" and not encrypted:
            return "encryption: required, and this store does not encrypt its blocks; turn encryption on for the tenant"
        return None

    def ttl(self, asked_s: float | None) -> float | None:
        """How long a block is kept that was to be kept for `asked_s` (None: until evicted)."""
        longest = self.retention_max_s
        if asked_s is None:
            return longest
        kept = max(asked_s, self.retention_min_s)
        return kept if longest is None else min(kept, longest)

    def session_ttl(self, asked_s: float | None) -> float | None:
        """As `ttl`, of a session nobody uses."""
        if self.idle_ttl_s is not None:
            asked_s = self.idle_ttl_s if asked_s is None else min(asked_s, self.idle_ttl_s)
        return self.ttl(asked_s)


def lifetimes(document: Document | None) -> dict[str, Any]:
    """What terms say about how long things are kept."""
    names = ("name", "idle_ttl_s", "retention_min_s", "retention_max_s")
    return {} if document is None else {name: getattr(document, name) for name in names}


def _flat(document: Document) -> dict[str, Any]:
    """Field -> value, those of tables as "quota.pins"."""
    flat: dict[str, Any] = {}
    for key, value in msgspec.structs.asdict(document).items():
        if isinstance(value, msgspec.Struct):
            flat |= {f"{key}.{inner}": one for inner, one in msgspec.structs.asdict(value).items()}
        else:
            flat[key] = value
    return flat


def _inside(root: str, allowed: str) -> bool:
    inner, outer = os.path.realpath(root), os.path.realpath(allowed)
    return os.path.commonpath([inner, outer]) == outer


# --- reading them ---------------------------------------------------------------------------------------------
_SIZES: Final = {"quota": ("stored_bytes",), "share": ("guaranteed_bytes",)}


def read(path: Path) -> Document:
    """The document in a file. Raises PolicyError."""
    text = read_text(path)
    content = parse_toml(path, text)
    for table, fields in _SIZES.items():
        inner: Any = content.get(table)
        for field in fields if isinstance(inner, dict) else ():
            if isinstance(inner.get(field), str):
                try:
                    inner[field] = parse_size(inner[field], f"{table}.{field}")
                except InvalidArgument as error:
                    raise PolicyError(f"{where(path, text, field)}: {error}") from None
    made = convert(path, text, content, Document)
    problem = _problem(made)
    if problem is not None:
        field, why = problem
        raise PolicyError(f"{where(path, text, field)}: {field}: {why}")
    return made


def _problem(d: Document) -> tuple[str, str] | None:
    """(field, what is wrong and what to write) of the first thing that makes no sense."""
    try:
        tenant_secret(b"", d.tenant)  # checks the name
    except InvalidArgument as error:
        return "tenant", str(error)
    numbers = {key: value for key, value in _flat(d).items() if isinstance(value, int | float) and value is not True}
    for key, value in numbers.items():
        if not 0 <= value < 2**63:
            return key.rpartition(".")[2], f"{value} must be 0 or more, and finite"
    longest = d.retention_max_s
    checks = [
        (d.version < 1, "version", "must be 1 or more; raise it with each change"),
        ("memory" not in d.tiers, "tiers", 'memory cannot be left out; write ["memory"] or ["memory", "disk"]'),
        (any(not os.path.isabs(root) for root in d.roots), "roots", "must be absolute paths of directories"),
        (longest is not None and not 0 < longest <= limits.ttl_s_max, "retention_max_s",
         f"must be above 0 and at most {limits.ttl_s_max}"),
        (longest is not None and longest < d.retention_min_s, "retention_min_s",
         f"is longer than retention_max_s ({longest}); what must be kept so long may not be kept so long"),
        (d.idle_ttl_s is not None and d.idle_ttl_s < max(1.0, d.retention_min_s), "idle_ttl_s",
         "must be at least 1, and at least retention_min_s"),
        (d.publication and d.scope in NARROW, "publication",
         f'is allowed while scope is "{d.scope}"; write scope = "tenant" or publication = false'),
        (not 1 <= d.share.weight <= limits.share_weight_ratio_max, "weight",
         f"must be 1 to {limits.share_weight_ratio_max}"),
    ]  # fmt: skip
    return next(((field, why) for wrong, field, why in checks if wrong), None)


def read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(limits.policy_file_bytes_max + 1)
        if len(raw) > limits.policy_file_bytes_max:
            raise PolicyError(f"{path}: more than {limits.policy_file_bytes_max} bytes; split it")
        return raw.decode()
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read ({error.strerror}); check path, owner and mode") from error
    except UnicodeDecodeError:
        raise PolicyError(f"{path}: not UTF-8; save it as UTF-8") from None


def parse_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PolicyError(f"{path}: not TOML ({error}); correct that line") from None


def convert(path: Path, text: str, content: Any, kind: type[T]) -> T:
    """Content of a TOML file as a struct. Raises PolicyError with place and remedy."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        unknown = re.search(r"unknown field `([^`]*)`", message)
        if unknown:
            near = difflib.get_close_matches(unknown[1], sorted(_fields(kind)), n=1, cutoff=0.0)[0]
            hint = f"the nearest key that exists is {near!r}"
            raise PolicyError(f"{where(path, text, unknown[1])}: {unknown[1]!r} does not exist; {hint}") from None
        field = re.search(r"`\$(?:\[[^]]*\]|\.)*([\w.]*)", message)
        name = field[1].rpartition(".")[2] if field else ""
        missing = re.search(r"missing required field `([^`]*)`", message)
        hint = f"write {missing[1]} = ..." if missing else "correct its value"
        raise PolicyError(f"{where(path, text, name)}: {message}; {hint}") from None


def _fields(kind: Any) -> set[str]:
    """Names of all fields, those of inner structs too."""
    names: set[str] = set()
    for field in msgspec.structs.fields(kind):
        names.add(field.name)
        for inner in (field.type, *getattr(field.type, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                names |= _fields(inner)
    return names


def where(path: Path, text: str, key: str) -> str:
    """`path:line` of the first line that sets `key`; the path alone if there is none."""
    pattern = re.compile(rf"^\s*\[*\s*[\"']?{re.escape(key.rpartition('.')[2])}[\"']?\s*[\]=]") if key else None
    for number, line in enumerate(text.splitlines(), 1):
        if pattern and pattern.search(line):
            return f"{path}:{number}"
    return str(path)
