"""Perdure inside vLLM: `kv_connector` "PerdureConnector", `kv_connector_module_path` "perdure.engines.vllm".

vLLM is imported when the connector is asked for: what needs no engine (`perdure engine-check vllm`) works without one.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PerdureConnector"]


def __getattr__(name: str) -> Any:
    if name == "PerdureConnector":
        from perdure.engines.vllm.connector import PerdureConnector

        return PerdureConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
