"""SGLang's HiCache on Perdure, for `--hicache-storage-backend dynamic`; see `hicache` for what is kept and when.

    --hicache-storage-backend-extra-config '{"backend_name": "perdure", "module_path": "perdure.engines.sglang",
        "class_name": "PerdureHiCache", "interface_v1": 1,
        "perdure": {"url": "unix:///run/perdure.sock", "tenant": "acme", "weights": "sha256:..."}}'

Importing this needs SGLang, and an interface that has what the adapter answers: ImportError says what is missing.
"""

from __future__ import annotations

import importlib
from typing import Any

from perdure.engines.hicache import HiCacheAdapter
from perdure.engines.hicache_interface import refuse_interface

try:
    _interface: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    _utils: Any = importlib.import_module("sglang.srt.mem_cache.utils")
except ImportError as missing:
    raise ImportError(
        f"perdure.engines.sglang needs SGLang in this environment, and importing it failed: {missing}"
    ) from missing
refuse_interface(_interface)


class PerdureHiCache(HiCacheAdapter, _interface.HiCacheStorage):  # type: ignore[misc]  # there is no SGLang where it is checked
    """What SGLang makes by `class_name`."""

    result_type = _interface.PoolTransferResult
    salted_names = hasattr(_utils, "storage_namespace_seed")
