"""LoRA adapters by content: KV belongs to an adapter's weights, not to its name or path.

Contract
- The digest is of the adapter's files as they were when an adapter of this number was first seen; vLLM gives an adapter
  that is loaded anew a new number. Files that have changed under a number they were seen with: the adapter is not
  cached any more, because nobody can tell which of the two is loaded. So is one that is loaded in place, or not local.
- `known` does no I/O; `find` does, and is for a thread of its own.
- vLLM's block hashes have the adapter's name and path in them; `Names` are the hashes of the same blocks without.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure import keys as naming
from perdure.engines.vllm.link import NotNow

_FILES = ("adapter_config.json", "adapter_model.*", "new_embeddings.*")


class AdapterUnknown(NotNow):
    """There is no telling what this adapter's weights are."""


class Adapters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[int, str], tuple[tuple[Any, ...], str]] = {}

    def known(self, adapter: Any | None) -> str | None:
        """The digest, "" without an adapter, None if it is not known (yet)."""
        if adapter is None:
            return ""
        found = self._found.get((adapter.lora_int_id, adapter.lora_path))
        return found[1] or None if found is not None else None

    def find(self, adapter: Any | None) -> str:
        """The digest, "" without an adapter. Raises AdapterUnknown."""
        if adapter is None:
            return ""
        if adapter.load_inplace:
            raise AdapterUnknown(f"adapter {adapter.lora_name!r} is loaded in place, so its number says nothing")
        name, path = (adapter.lora_int_id, adapter.lora_path), Path(adapter.lora_path)
        files = sorted({file for pattern in _FILES for file in path.glob(pattern)})
        if not files:
            raise AdapterUnknown(f"adapter {adapter.lora_name!r}: no files of it in {path}")
        stamp = tuple((file.name, *_stamp(file)) for file in files)
        with self._lock:
            found = self._found.get(name)
            if found is None:
                found = self._found[name] = (stamp, _digest(files))
            elif found[0] != stamp:
                found = self._found[name] = (stamp, "")
        if not found[1]:
            raise AdapterUnknown(f"adapter {adapter.lora_name!r}: its files have changed since it was loaded")
        return found[1]


class Names:
    """A request's block hashes as vLLM would make them without its adapter. Reads like the request otherwise."""

    lora_request = None

    def __init__(self, request: Any, hasher: Callable[[Any], list[bytes]]):
        self._request, self._hasher = request, hasher
        self._lock = threading.Lock()
        self.block_hashes: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def extend(self) -> None:
        """By what the request has got since the last time: some microseconds a block."""
        with self._lock:
            self.block_hashes += self._hasher(self)


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _digest(files: list[Path]) -> str:
    fields = []
    for file in files:
        with file.open("rb") as data:
            fields.append((file.name, hashlib.file_digest(data, "sha256").digest()))
    return "sha256:" + hashlib.sha256(naming.encode_fields(fields)).hexdigest()
