"""The store as its users see it: the public conformance suite, and what is only true of an embedded store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import perdure
from perdure import Store
from perdure.testing.store import StoreConformance


class TestEmbedded(StoreConformance):
    def make_store(self, directory: Path, **options: Any) -> Store:
        return perdure.open(directory, **options)
