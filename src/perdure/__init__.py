"""Perdure: KV cache blocks of LLM inference that survive the process that computed them.

    import perdure

    with perdure.open("DIR", capacity="20GiB") as store:
        space = store.keyspace(model="SmolLM2-135M", weights="sha256:...", layout=perdure.KVLayout(...), tenant="acme")
        keys = space.chain(token_ids)
        usable = space.lookup(keys)
        report = space.read(keys[:usable], into=buffer, deadline_s=0.5)
        report = space.write(keys, blocks, durability="session")

Importing this package imports nothing heavy; names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.admission import AdmissionPrices as AdmissionPrices
    from perdure.admission import AdmissionRequest as AdmissionRequest
    from perdure.admission import ValueAdmission as ValueAdmission
    from perdure.advice import Advice as Advice
    from perdure.catalog.api import Durability as Durability
    from perdure.catalog.api import Lease as Lease
    from perdure.embedded import open as open  # noqa: A004
    from perdure.errors import BufferMismatch as BufferMismatch
    from perdure.errors import CatalogError as CatalogError
    from perdure.errors import CatalogUnavailable as CatalogUnavailable
    from perdure.errors import FormatError as FormatError
    from perdure.errors import InvalidArgument as InvalidArgument
    from perdure.errors import PerdureError as PerdureError
    from perdure.errors import ProtocolError as ProtocolError
    from perdure.errors import ReadOnlyStore as ReadOnlyStore
    from perdure.errors import ServiceBusy as ServiceBusy
    from perdure.errors import ServiceUnavailable as ServiceUnavailable
    from perdure.errors import StaleFence as StaleFence
    from perdure.errors import StoreClosed as StoreClosed
    from perdure.errors import StoreLocked as StoreLocked
    from perdure.errors import StorePathError as StorePathError
    from perdure.errors import UnknownOption as UnknownOption
    from perdure.governance.actor import tracing as tracing
    from perdure.io.memory import aligned_buffer as aligned_buffer
    from perdure.keys import KVLayout as KVLayout
    from perdure.keyspace import Keyspace as Keyspace
    from perdure.placement import prefer as prefer
    from perdure.placement import rendezvous as rendezvous
    from perdure.reports import ReadReport as ReadReport
    from perdure.reports import WriteReport as WriteReport
    from perdure.reports import WriteStatus as WriteStatus
    from perdure.segments.landing import BlockStatus as BlockStatus
    from perdure.service.client import RemoteStore as RemoteStore
    from perdure.service.client import connect as connect
    from perdure.store import Seams as Seams
    from perdure.store import Store as Store
    from perdure.store import rebuild as rebuild

__version__ = "0.1.0"

_HOME = {
    "admission": ("AdmissionPrices", "AdmissionRequest", "ValueAdmission"),
    "catalog.api": ("Durability", "Lease"),
    "embedded": ("open",),
    "errors": (
        "BufferMismatch", "CatalogError", "CatalogUnavailable", "FormatError", "InvalidArgument", "PerdureError",
        "ProtocolError", "ReadOnlyStore", "ServiceBusy", "ServiceUnavailable", "StaleFence", "StoreClosed",
        "StoreLocked", "StorePathError", "UnknownOption",
    ),
    "governance.actor": ("tracing",),
    "io.memory": ("aligned_buffer",),
    "keys": ("KVLayout",),
    "advice": ("Advice",),
    "placement": ("prefer", "rendezvous"),
    "keyspace": ("Keyspace",),
    "reports": ("ReadReport", "WriteReport", "WriteStatus"),
    "service.client": ("RemoteStore", "connect"),
    "segments.landing": ("BlockStatus",),
    "store": ("Seams", "Store", "rebuild"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"perdure.{module}"), name)
    globals()[name] = value
    return value
