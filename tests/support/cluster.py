"""The real Valkey Cluster of the tests, which is public; and stores that share a directory by it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import perdure
from perdure.testing.valkey import Cluster as Cluster
from perdure.testing.valkey import Node as Node
from perdure.testing.valkey import cluster as cluster
from perdure.testing.valkey import eventually as eventually


class Hosts:
    """Stores of this process on one directory, each as if it were on a host of its own; all are closed at the end."""

    def __init__(self, url: str, folder: Path):
        self.url, self.folder = url, folder
        self.stores: list[perdure.Store] = []
        self._ends = ExitStack()

    def add(self, **options: Any) -> perdure.Store:
        chosen = {"memory": 0, "capacity": "64MiB"} | options
        state = self.folder / f"host{len(self.stores)}"
        self.stores.append(perdure.open(self.folder / "data", catalog=self.url, state=state, **chosen))
        self._ends.callback(self.stores[-1].close)
        return self.stores[-1]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()
