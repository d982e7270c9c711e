"""What is installed with this package: pinned, as pinned, and under licences that are known. All of it offline.

Not here: known vulnerabilities, for which somebody has to ask a server (CONTRIBUTING.md says how)."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+]+)")
USED = (
    "cluster",
    "cold",
    "events",
    "governance",
    "pkcs11",
    "transformers",
    "vault",
)  # extras of who serves, not of who develops
PERMISSIVE = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
    "CNRI-Python", "ISC", "MIT", "MIT-0", "OLDAP-2.8", "PSF-2.0", "Zlib",
}  # fmt: skip
FILE_LEVEL = {"MPL-2.0"}  # asks for the source of its own changed files, and of nothing else; changed here is none
CLASSIFIED = {  # classifiers and free texts -> SPDX
    "Apache Software License": "Apache-2.0", "Apache 2.0": "Apache-2.0", "Apache 2.0 License": "Apache-2.0",
    "Apache": "Apache-2.0", "BSD License": "BSD-3-Clause", "BSD": "BSD-3-Clause", "MIT License": "MIT",
    "The MIT License (MIT)": "MIT", "ISC License (ISCL)": "ISC", "ISC License": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}  # fmt: skip
UNSTATED = {"cedarpy": "Apache-2.0"}  # its metadata says nothing; the licence file that it installs does
PLACES = {"constraints.txt": "dev", "constraints-vllm.txt": "dev-vllm"}


def pins(name: str) -> dict[str, str]:
    """Canonical name -> version."""
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
    wrong = [line for line in lines if line and not line.startswith("#") and not PIN.fullmatch(line)]
    assert not wrong, f"{name}: not NAME==VERSION: {wrong}"
    found = [PIN.fullmatch(line) for line in lines if line and not line.startswith("#")]
    return {str(canonicalize_name(one[1])): one[2] for one in found if one}


def asked(extra: str) -> Iterator[Requirement]:
    """What an extra asks for, those that it names included."""
    for text in PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]:
        one = Requirement(text)
        if one.name == "perdure":
            for other in one.extras:
                yield from asked(other)
        else:
            yield one


def needed() -> set[str]:
    """Canonical names of what the package and its extras bring along, as far as it is installed here."""
    todo = [one for extra in ("", *USED) for one in asked(extra)]
    found: set[str] = set()
    while todo:
        one = todo.pop()
        name = str(canonicalize_name(one.name))
        if name in found or not installed(name):
            continue
        found.add(name)
        for text in metadata.requires(name) or []:
            other = Requirement(text)
            wanted = [""] if not one.extras else one.extras
            if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in wanted):
                todo.append(other)
    return found


def installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize(("name", "extra"), PLACES.items())
def test_what_is_asked_for_is_pinned_and_fits(name: str, extra: str) -> None:
    pinned = pins(name)
    wrong = [
        f"{one}: {pinned.get(str(canonicalize_name(one.name)), 'not pinned')}"
        for one in [*asked(""), *asked(extra)]
        if str(canonicalize_name(one.name)) not in pinned
        or not one.specifier.contains(pinned[str(canonicalize_name(one.name))], prereleases=True)
    ]
    assert not wrong, f"{name}: {wrong}; run `make constraints`"


def test_nothing_comes_along_that_is_not_pinned() -> None:
    known = pins("constraints.txt")
    beyond = {str(canonicalize_name(one.name)) for extra in ("events", "vault") for one in asked(extra)}  # not in `dev`
    extra = {name for name in needed() if name not in known and name not in beyond}
    assert not extra, f"{sorted(extra)}: in no constraints.txt; run `make constraints`, and look at what is new"


def test_installed_is_what_is_pinned() -> None:
    if not (Path(sys.prefix) / ".ready").exists():
        pytest.skip("this environment was not made by `make setup`")
    other = {
        name: metadata.version(name)
        for name, version in pins("constraints.txt").items()
        if installed(name) and Version(Version(metadata.version(name)).public) != Version(version)
    }
    assert not other, f"other versions than in constraints.txt: {other}"


def licences(name: str) -> set[str]:
    """SPDX names; what a distribution says in a way that is not known comes out as it is."""
    about = metadata.distribution(name).metadata
    stated = about.get("License-Expression") or ""
    classified = [
        one.rpartition(" :: ")[2] for one in about.get_all("Classifier") or [] if one.startswith("License ::")
    ]
    free = (about.get("License") or "").strip().split("\n")[0]
    if name in UNSTATED and not (stated or free or classified):
        return {UNSTATED[name]}
    texts = re.split(r" (?:AND|OR) ", stated or (free if free in PERMISSIVE | FILE_LEVEL else "") or "") or []
    texts = [one.strip("()") for one in texts if one] or [one for one in classified if one != "DFSG approved"] or [free]
    return {CLASSIFIED.get(one, one) for text in texts for one in re.split(r" (?:AND|OR) ", text)}


def test_licences_are_known_and_permissive() -> None:
    found = {name: licences(name) for name in needed()}
    assert len(found) > 20
    wrong = {name: sorted(one) for name, one in found.items() if not one <= PERMISSIVE | FILE_LEVEL}
    assert not wrong, f"look at these before you use them: {wrong}"
    lasting = {name for name, one in found.items() if one & FILE_LEVEL}
    assert lasting <= {"certifi", "tqdm"}, lasting


def test_a_licence_that_is_not_known_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "odd-1.0.dist-info"
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for stated, wanted in (
        ("License-Expression: MIT OR GPL-3.0-only", {"MIT", "GPL-3.0-only"}),
        ("License: Our own", {"Our own"}),
        ("Classifier: License :: OSI Approved :: MIT License", {"MIT"}),
        ("Summary: nothing", {""}),
    ):
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: odd\nVersion: 1.0\n{stated}\n")
        assert licences("odd") == wanted
