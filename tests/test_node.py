"""The data node."""
from __future__ import annotations
from pathlib import Path
from typing import Any
from support.served import ServedStore, serving, tcp_address
from perdure.testing.store import StoreConformance

class TestServedByTcp(StoreConformance):
    def make_store(self, directory: Path, **options: Any) -> Any:
        return ServedStore(directory, tcp=True, **options)
