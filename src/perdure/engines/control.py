"""What an operator tells the engines of a service while they run: off, on, and "the weights have changed".

Contract
- A small file beside the service's socket, written in one rename; engines look at it once every `POLL_S`, from a thread
  of their own. It stays when the service or an engine is replaced: off is off until somebody says on.
- Only who may write to the socket's directory can tell. A service on another host has no such file: what is told is
  told on the engine's host, in the directory named by `control` in its settings.
- A file that cannot be read or says nothing sensible changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from perdure.errors import InvalidArgument, StorePathError

POLL_S = 0.5
_BYTES_MAX = 4096
_LOG = logging.getLogger("perdure.engines")


@dataclass(frozen=True, slots=True)
class Switch:
    """off: engines use no cache. on: how often they were told to go on. weights: how often weights have changed."""

    off: bool = False
    on: int = 0
    weights: int = 0


def file_of(url: str) -> Path:
    """Where engines that use this service look. Raises InvalidArgument for a service on another host."""
    if url.startswith(("tcp://", "nixl://")):
        raise InvalidArgument(f"{url}: tell the engines on their own host, by the path of their `control` setting")
    from perdure.service.sockets import socket_path

    path = socket_path(url)
    return path.with_name(path.name + ".engines")


def watched(url: str, chosen: str = "") -> Path | None:
    """Where an engine looks: a file of its settings, else beside the service; nowhere if that is on another host."""
    if chosen:
        return Path(chosen)
    return None if url.startswith(("tcp://", "nixl://")) else file_of(url)


def read(path: Path) -> Switch | None:
    """What was told last; None if that cannot be known."""
    try:
        with path.open("rb") as file:
            told = json.loads(file.read(_BYTES_MAX))
        return Switch(bool(told["off"]), int(told["on"]), int(told["weights"]))
    except FileNotFoundError:
        return Switch()
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("perdure: %s: %r", path, error)
        return None


def tell(path: Path, *, off: bool | None = None, weights: bool = False) -> Switch:
    """Change what was told. off: True, False, or as it is. Raises StorePathError."""
    known = read(path) or Switch()
    told = Switch(
        known.off if off is None else off, known.on + (off is False), known.weights + weights
    )  # fmt: skip
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_text(json.dumps(asdict(told)))
        new.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise StorePathError(f"{path}: {error}; name the socket or directory of the engines' service") from None
    return told


class Watch:
    """`switch`: what was told last; another object whenever that has changed."""

    def __init__(self, path: Path | None):
        self._path = path
        self._over = threading.Event()
        self.switch = (read(path) if path is not None else None) or Switch()
        if path is not None:
            threading.Thread(target=self._look, name="perdure-control", daemon=True).start()

    def look(self) -> None:
        """Now."""
        if self._path is not None:
            told = read(self._path)
            if told is not None and told != self.switch:
                self.switch = told

    def _look(self) -> None:
        while not self._over.wait(POLL_S):
            self.look()

    def close(self) -> None:
        self._over.set()
