"""Policy directories for tests: two tenants, an engine of each, a gateway for both, an operator and an auditor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

EMBEDDED = ("engine-a", "engine-a2", "engine-b", "operator")
MATRIX = """
# principal   tenant   actions      conditions     decision [by rule]
engine-a      acme     read,write               -> allow by base:engines
engine-a      globex   *                        -> deny by principal:tenants
engine-b      globex   read                     -> allow
operator      acme     erase        held        -> deny by base:held
operator      -        status                   -> allow
auditor       -        audit                    -> allow
auditor       -        administer               -> deny
"""


def policy_directory(
    path: Path,
    *,
    acme: str = "",
    globex: str = "",
    version: int = 1,
    jwt: str = "",
    sockets: Path = Path("/run/p"),
    group_of: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """acme, globex: further lines of their terms. jwt: content of the [jwt] table. Written anew if it exists."""
    for folder in ("tenants", "rules"):
        (path / folder).mkdir(parents=True, exist_ok=True)
    listed = [
        _principal("engine-a", ["acme"], "engine", sockets),
        _principal("engine-a2", ["acme"], "engine", sockets),
        _principal("engine-b", ["globex"], "engine", sockets),
        _principal("gateway", ["acme", "globex"], "engine", sockets),
        _principal("proxy", ["acme"], "engine", sockets) + "tokens = true\n",
        _principal("operator", ["acme", "globex"], "operator", sockets),
        _principal("auditor", [], "auditor", sockets),
    ]
    for name, group in group_of.items():
        listed = [one.replace(f'name = "{name}"\n', f'name = "{name}"\ngroup = "{group}"\n') for one in listed]
    (path / "principals.toml").write_text("\n".join(listed) + (f"\n[jwt]\n{jwt}\n" if jwt else ""))
    for tenant, lines in (("acme", acme), ("globex", globex)):
        (path / "tenants" / f"{tenant}.toml").write_text(f'tenant = "{tenant}"\nversion = {version}\n{lines}\n')
    (path / "matrix.txt").write_text(MATRIX)
    return path


def _principal(name: str, tenants: list[str], role: str, sockets: Path) -> str:
    return (
        f'[[principal]]\nname = "{name}"\ntenants = {tenants}\nroles = ["{role}"]\n'
        f'socket = "{sockets}/{name}.sock"\nspiffe = "spiffe://test/{name}"\n'
        f"embedded = {str(name in EMBEDDED).lower()}\n"
    )
