"""Which directories a store's segments lie in: a list in the store's directory, and a mark in each root.

    DIR/roots.json            numbers and paths of the roots; 0 is DIR itself, and not in it
    ROOT/perdure-root.json    the store it belongs to, and its number

Contract
- A root has its number for good; its path may change: it is known by its mark.
- A directory becomes a root only if it is new: empty, and not the place of a root that is known. So one whose device is
  not mounted, or another device in its place, is never taken for a root, and nothing is made there.
- A root that was not named at an opening is where it was the last time: leaving one out loses nothing.
- Never: forgetting a root. `replace` puts an empty directory in the place of one whose device is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from perdure import limits
from perdure.clock import SystemClock
from perdure.directory import Identity, WriterLock, prepare
from perdure.errors import FormatError, InvalidArgument, StorePathError
from perdure.io.api import Files
from perdure.io.files import PosixFiles
from perdure.io.roots import Root, Roots
from perdure.rates import PROBE_PATH

LIST: Final = "roots.json"
MARK: Final = "perdure-root.json"
_HARMLESS: Final = frozenset({"lost+found"})

PathLike = str | os.PathLike[str]


def known(path: Path) -> dict[int, Path]:
    """Number -> path of the roots of a store. Raises FormatError if the list is damaged."""
    file = path / LIST
    try:
        content = json.loads(file.read_text())
        return {int(number): Path(where) for number, where in content["roots"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"{file}: cannot be read ({error}); remove it and open the store with all its roots: roots=[...] or --root"
        ) from error


def arrange(
    path: Path,
    identity: Identity,
    given: Sequence[PathLike] | None,
    *,
    read_only: bool,
    files: Callable[[str], Files],
    clock: Callable[[], float],
) -> Roots | None:
    """The roots of a store, those in `given` included; None if it has no other than its directory.

    Raises InvalidArgument, FormatError (another store's, or twice the same), StorePathError."""
    numbers = before = known(path)
    for one in given or ():
        numbers = _admitted(path, identity, Path(one).resolve(), numbers, read_only=read_only)
    if not numbers:
        return None
    if len(numbers) >= limits.roots_entries_max:
        raise InvalidArgument(
            f"{len(numbers)} roots: {limits.roots_entries_max - 1} beside the store's directory, at most"
        )
    if numbers != before and not read_only:
        _remember(path, numbers)
    return Roots(
        [Root(0, str(path), lambda: "", partial(files, str(path)))]
        + [
            Root(number, str(where), partial(absence, where, identity.store, number), partial(files, str(where)))
            for number, where in sorted(numbers.items())
        ],
        clock=clock,
    )


def namespaces(
    path: Path,
    identity: Identity,
    *,
    mirror: PathLike | None,
    given: Sequence[PathLike] | None,
    read_only: bool,
    files: Callable[[str], Files],
    clock: Callable[[], float],
) -> tuple[Sequence[Files], Roots | None]:
    """Where a store's segments lie, and then the second copies of `retained` ones, if anywhere. Raises as `arrange`."""
    roots = arrange(path, identity, given, read_only=read_only, files=files, clock=clock)
    if roots is not None and mirror is not None:
        raise InvalidArgument(
            f"mirror={str(mirror)!r}: over several roots every retained block is in two of them already; leave it out"
        )
    places: list[Files] = [files(str(path))] if roots is None else [roots, roots.second]
    if not read_only:
        with contextlib.suppress(OSError):
            places[0].unlink(PROBE_PATH)  # left by a process that was killed while probing
    if mirror is not None:
        if not read_only:
            Path(mirror).mkdir(mode=0o700, parents=True, exist_ok=True)
        places.append(files(str(mirror)))
    return places, roots


def total_bytes(path: Path, roots: Roots | None) -> int:
    """Size of the file systems that segments may lie on."""
    places = [str(path)] if roots is None else [root.path for root in roots.roots if not root.away]
    return sum({os.stat(place).st_dev: shutil.disk_usage(place).total for place in places}.values())


def absence(where: Path, store: str, number: int) -> str:
    """Why a directory is not usable as that root right now; "" if it is."""
    try:
        mark = _mark(where)
    except (OSError, FormatError) as error:
        return str(error)
    if mark is None:
        return f"{where}: no {MARK} in it: mount the root's device there"
    if mark != (store, number):
        return f"{where}: root {mark[1]} of store {mark[0]} is there, not root {number} of {store}: mount the right one"
    return ""


def replace(path: Path, number: int, where: Path) -> None:
    """An empty directory in the place of a root whose device is lost: what lay there is gone, retained blocks are
    copied into it from their other root. The store must not be open. Raises as `arrange`, and StoreLocked."""
    where = where.resolve()
    identity = prepare(path, create=False, clock=SystemClock())
    lock = WriterLock(path, SystemClock())
    try:
        numbers = known(path)
        if number not in numbers:
            raise InvalidArgument(f"{path}: has no root {number}; its roots are {sorted(numbers) or 'none'}")
        if not absence(numbers[number], identity.store, number):
            raise InvalidArgument(f"root {number} is there, in {numbers[number]}: nothing to replace")
        _refuse_nested(path, where)
        _make(where, identity.store, number)
        _remember(path, numbers | {number: where})
    finally:
        lock.close()


def _admitted(
    path: Path, identity: Identity, where: Path, numbers: Mapping[int, Path], *, read_only: bool
) -> dict[int, Path]:
    """`numbers` with a directory that was named by the user."""
    mark = _mark(where)
    if mark is None:
        if where in numbers.values():  # away: not mounted
            return dict(numbers)
        if read_only:
            raise StorePathError(f"{where}: not a root of this store yet; it becomes one when it is opened for writing")
        _refuse_nested(path, where)
        number = max(numbers, default=0) + 1
        _make(where, identity.store, number)
        return {**numbers, number: where}
    store, number = mark
    if store != identity.store:
        raise FormatError(
            f"{where}: root {number} of another store ({store}; this one is {identity.store}); mount the right device "
            "there, or name another directory"
        )
    other = numbers.get(number)
    if other is not None and other != where and not absence(other, store, number):
        raise FormatError(f"{where} and {other} both say that they are root {number}; take the copy away")
    named = next((one for one, place in numbers.items() if place == where), number)
    if named != number:
        raise FormatError(f"{where}: root {number} is there, where root {named} was; mount the right device there")
    return {**numbers, number: where}


def _refuse_nested(path: Path, where: Path) -> None:
    store, root = Path(os.path.realpath(path)), Path(os.path.realpath(where))
    if root.is_relative_to(store) or store.is_relative_to(root):
        raise InvalidArgument(f"{where}: lies inside the store's directory {path} (or around it); use another one")


def _make(where: Path, store: str, number: int) -> None:
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        other = sorted({one.name for one in where.iterdir()} - _HARMLESS)
        if other:
            raise FormatError(f"{where}: not empty ({other[0]!r}) and not a root of this store; use an empty directory")
        content = {"format": limits.format_version, "store": store, "root": number}
        PosixFiles(where).write_once(MARK, json.dumps(content).encode())
    except StorePathError:
        raise
    except OSError as error:
        raise StorePathError(f"{where}: cannot become a root ({error}); check owner, mode, mount") from error


def _mark(where: Path) -> tuple[str, int] | None:
    """Store and number. None if there is no mark, or no directory. Raises FormatError, StorePathError."""
    try:
        content: Any = json.loads((where / MARK).read_text())
        return str(content["store"]), int(content["root"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorePathError(f"{where}: its mark cannot be read ({error}); look at the disk") from error
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{where / MARK}: damaged ({error}); write it again from another root's") from error


def _remember(path: Path, numbers: Mapping[int, Path]) -> None:
    content = {"roots": {str(number): str(where) for number, where in sorted(numbers.items())}}
    temporary = path / f"{LIST}.new"
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    files = PosixFiles(path)
    files.write_once(temporary.name, json.dumps(content, indent=2).encode())
    os.replace(temporary, path / LIST)
    files.sync_directory("")
