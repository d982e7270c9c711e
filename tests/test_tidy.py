"""The style rules that matter, as tests: a rule that no test checks is a wish.

Each test names the file and line that breaks its rule. Add an exception only with its reason beside it.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 450

BANNED = {
    "pickle": "bytes from a disk or a peer must never become code",
    "cPickle": "as pickle",
    "cloudpickle": "as pickle",
    "dill": "as pickle",
    "shelve": "pickle inside",
    "marshal": "not a safe or stable format",
}

# Slow to import: only inside the function that needs them, so that `import perdure` and the CLI start at once.
HEAVY = {"torch", "transformers", "vllm", "blosc2", "rich", "prometheus_client"}
HEAVY_ALLOWED = ("perdure.engines.", "perdure.benchmarks.", "perdure.demo")

# Imports point down this list, or sideways without a cycle; never up (ARCHITECTURE, folders).
LAYERS = [
    {"errors", "limits", "keys", "options", "clock"},
    {"io", "buffers"},
    {"catalog", "segments", "pool", "governance", "codecs", "presence", "presence_table"},
    {  # the store and the parts it is put together from
        "store",
        "session",
        "session_heads",
        "session_form",
        "session_admin",
        "manifest",
        "prefetch",
        "admission",
        "catalogs",
        "cluster",
        "cold",
        "sharing",
        "tenants",
        "advice",
        "aliases",
        "placement",
        "core",
        "directory",
        "encoding",
        "epochs",
        "erasure",
        "erasure_hosts",
        "erasure_orders",
        "holds",
        "lifecycle",
        "selection",
        "flight",
        "governing",
        "inspect",
        "keeper",
        "keyspace",
        "opening",
        "viewing",
        "waiting",
        "rates",
        "reading",
        "reports",
        "roots",
        "reuse",
        "publication_form",
        "publication_verbs",
        "publications",
        "publishing",
        "writing",
    },
    {"service", "embedded", "observe", "engines", "planner"},
    {"testing", "benchmarks", "demo"},
    {
        "cli",
        "cli_audit",
        "cli_cluster",
        "cli_engine",
        "cli_erase",
        "cli_isolation",
        "cli_keys",
        "cli_output",
        "cli_policy",
        "cli_publish",
        "cli_service",
        "cli_sessions",
        "__main__",
    },
]
FACADE_LAYER_MIN = 4  # what lies below must not import `perdure` itself, which imports the store

# Modules that nothing in src imports because users do: entry points, public API, siblings to plug into a seam.
PUBLIC = (
    "perdure.cli",
    "perdure.__main__",
    "perdure.engines.",
    "perdure.testing.",
    "perdure.benchmarks.engines_lmcache",
    "perdure.catalog.memory",
    "perdure.catalog.faulty",
    "perdure.io.faulty",
    "perdure.io.siblings",
)

# A limit's name ends in its unit; a state, what it is counted per, and a bound or default may follow.
LIMIT_UNITS = (
    "bytes s ms blocks tokens records segments removals vectors threads parts keys entries slots pages requests "
    "extents descriptors regions spaces connections views clients "
    "inflight contexts readers attempts retries factor ratio load version"
)
LIMIT_NAME = re.compile(rf"_({'|'.join(LIMIT_UNITS.split())})(_(open|idle))?(_per_[a-z]+)?(_(min|max|default))?$")

# Put together here so that this file does not break its own rule.
UNFINISHED = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")
LOCAL_PATHS = re.compile(r"(?<![\w.])/(" + "work|farm|root|home/[a-z]|tmp/w|opt/(wheels|pypi)" + r")(/|\b)")
REGISTRIES = re.compile(
    "|".join(map(re.escape, ["py" + "pi.org", "python" + "hosted", "debian" + ".org", "npm" + "js"]))
)


# --- reading the tree -----------------------------------------------------------------------------------------


@cache
def tracked() -> list[Path]:
    """Files in git or about to be: whatever .gitignore does not exclude."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return sorted(path for path in files if path.is_file())


def text_files() -> Iterator[tuple[str, list[str]]]:
    for path in tracked():
        raw = path.read_bytes()
        if b"\0" not in raw:
            yield str(path.relative_to(ROOT)), raw.decode().splitlines()


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name -> syntax tree, packages by the name of the package."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(), str(path))
    return found


def path_of(module: str) -> Path:
    base = SRC.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(tree: ast.AST, *, lazy: bool) -> Iterator[tuple[int, str, str | None]]:
    """(line, module, imported name or None); imports inside functions only if `lazy`, never those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; this project writes them out"
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)
        elif is_type_checking(node):
            yield from (found for other in node.orelse for found in imports(other, lazy=lazy))  # type: ignore[attr-defined]
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, lazy=lazy)


def own_imports(module: str, *, lazy: bool = True) -> Iterator[tuple[int, str]]:
    """(line, Perdure's module) that `module` imports; `from perdure import limits` is `perdure.limits`."""
    for line, base, name in imports(modules()[module], lazy=lazy):
        if base.split(".")[0] == "perdure":
            inner = f"{base}.{name}"
            yield line, inner if inner in modules() else base


def layer(module: str) -> int:
    room = module.split(".")[1]
    found = [number for number, rooms in enumerate(LAYERS) if room in rooms]
    assert found, f"{module}: put `{room}` into LAYERS of {Path(__file__).name}, where the architecture wants it"
    return found[0]


def report(broken: list[str]) -> None:
    assert not broken, "\n" + "\n".join(broken)


# --- imports --------------------------------------------------------------------------------------------------


def test_no_banned_imports() -> None:
    report(
        [
            f"{path_of(module)}:{line}: import of {name}: {BANNED[name.split('.')[0]]}"
            for module, tree in modules().items()
            for line, name, _ in imports(tree, lazy=True)
            if name.split(".")[0] in BANNED
        ]
    )


def test_heavy_imports_are_lazy() -> None:
    report(
        [
            f"{path_of(module)}:{line}: {name} at the top of a module; import it in the function that needs it"
            for module, tree in modules().items()
            if not module.startswith(HEAVY_ALLOWED)
            for line, name, _ in imports(tree, lazy=False)
            if name.split(".")[0] in HEAVY
        ]
    )


def test_dependencies_point_down() -> None:
    broken = []
    for module in modules():
        if module == "perdure":
            continue
        here = layer(module)
        for line, target in own_imports(module):
            if (FACADE_LAYER_MIN if target == "perdure" else layer(target)) > here:
                facade = " (or one of its modules that does not exist)" if target == "perdure" else ""
                broken.append(f"{path_of(module)}:{line}: imports {target}{facade}, which lies above it")
    report(broken)


def test_no_import_cycles() -> None:
    graph = {module: {target for _, target in own_imports(module, lazy=False)} - {module} for module in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        pytest.fail(" -> ".join(cycle.args[1]))


def test_no_dead_modules() -> None:
    used = {target for module in modules() for _, target in own_imports(module) if target != module}
    for module, tree in modules().items():  # names to import later, and scripts to start in another process
        beside = module if path_of(module).name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value.removesuffix(".py")
                used |= {name, f"{beside}.{name}", f"perdure.{name}"} & modules().keys()
    report(
        [
            f"{path_of(module)}: nothing imports it, and it is not in PUBLIC"
            for module in modules()
            if module not in used and not module.startswith(PUBLIC) and path_of(module).name != "__init__.py"
        ]
    )


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import perdure", ["torch", "transformers", "vllm", "blosc2", "numexpr", "rich", "asyncio"]),
        (
            "import sys, perdure.cli; sys.argv = ['perdure', '--help']; perdure.cli.main()",
            ["numpy", "torch", "transformers", "vllm", "blosc2", "lmdb", "rich", "pydantic", "prometheus_client"],
        ),
    ],
    ids=["import", "help"],
)
def test_start_is_light(code: str, absent: list[str]) -> None:
    check = f"import atexit, sys; atexit.register(lambda: print(sorted({set(absent)!r} & set(sys.modules))))\n{code}"
    here = {**os.environ, "PYTHONPATH": str(SRC)}  # this checkout, wherever the environment's own install points
    command = [sys.executable, "-c", check]
    done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]", f"`{code}` loads {done.stdout.splitlines()[-1]}"


# --- size and shape -------------------------------------------------------------------------------------------


def test_functions_fit_a_screen_or_two() -> None:
    report(
        [
            f"{path_of(module)}:{node.lineno}: {node.name} has {lines} lines (at most {FUNCTION_LINES_MAX})"
            for module, tree in modules().items()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
        ]
    )


def test_files_are_one_room() -> None:
    report(
        [
            f"{path_of(module)}: {lines} lines (at most {FILE_LINES_MAX})"
            for module in modules()
            if (lines := len(path_of(module).read_text().splitlines())) > FILE_LINES_MAX
        ]
    )


def test_modules_open_with_their_contract() -> None:
    report(
        [
            f"{path_of(module)}: no docstring"
            for module, tree in modules().items()
            if tree.body and not ast.get_docstring(tree)  # an empty __init__.py only marks its folder
        ]
    )


def test_limits_name_their_unit() -> None:
    names = [
        node.target.id
        for node in modules()["perdure.limits"].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.isupper()
    ]
    assert len(names) > 20
    report([f"perdure.limits.{name}: no unit at its end" for name in names if not LIMIT_NAME.search(f"_{name}")])


# --- text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [UNFINISHED, LOCAL_PATHS, REGISTRIES], ids=["unfinished", "paths", "registries"])
def test_text_is_free_of(pattern: re.Pattern[str]) -> None:
    report(
        [
            f"{name}:{number}: {line.strip()[:120]}"
            for name, lines in text_files()
            for number, line in enumerate(lines, 1)
            if pattern.search(line)
        ]
    )


LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)


def documents() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


def anchors(text: str) -> set[str]:
    """Of headings, by GitHub's rule: lower case, punctuation dropped, spaces to hyphens."""
    titles = re.findall(r"^#+\s+(.*?)\s*#*$", without_fences(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def without_fences(text: str) -> str:
    return re.sub(r"^(```|~~~).*?^\1\s*?$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_relative_links_lead_somewhere() -> None:
    broken = []
    for path in documents():
        for match in LINK.finditer(without_fences(path.read_text())):
            target = match[1] or match[2]
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.exists() or not file.is_relative_to(ROOT):
                broken.append(f"{path.name}: {target}: no such file")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
                broken.append(f"{path.name}: {target}: no such heading")
    report(broken)


def names_in(group: click.Group) -> list[str]:
    return group.list_commands(click.Context(group))


def commands() -> dict[str, click.Command | None]:
    from perdure.cli import main

    assert isinstance(main, click.Group)
    return {name: main.get_command(click.Context(main), name) for name in names_in(main)}


def test_documents_name_existing_commands_only() -> None:
    known = commands()
    broken = []
    for path in documents():
        text = path.read_text()
        code = re.findall(r"^(?:```|~~~)(?!python).*?^(?:```|~~~)", text, re.MULTILINE | re.DOTALL)
        code += re.findall(r"`([^`\n]+)`", without_fences(text))
        for first, second in re.findall(r"(?:^|[\s$`/])perdure +([a-z][a-z-]*)(?: +([a-z][a-z-]*))?", "\n".join(code)):
            if first not in known:
                broken.append(f"{path.name}: perdure {first}")
            elif second and isinstance(group := known[first], click.Group) and second not in names_in(group):
                broken.append(f"{path.name}: perdure {first} {second}")
    report(broken)


def test_documents_name_existing_make_targets_only() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    report(
        [
            f"{path.name}: make {target}"
            for path in documents()
            for target in re.findall(r"`make ([a-z][a-z-]*)", path.read_text())
            if target not in targets
        ]
    )
