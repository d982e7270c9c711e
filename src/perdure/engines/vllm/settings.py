"""Settings of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`.

An unknown key is an error that names the nearest one that exists; so is a value out of range. Raises InvalidArgument
and UnknownOption, at construction.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from perdure import limits
from perdure.errors import InvalidArgument, UnknownOption
from perdure.keys import check_text

GENERATED: Final = ("auto", "always", "never")
MODES: Final = ("on", "shadow", "off")
_RANGES: Final = {
    "lookup_wait_ms_max": (0.0, 60_000.0),
    "promote_wait_ms_max": (0.0, 600_000.0),
    "load_deadline_ms": (1.0, 600_000.0),
    "flush_ms_max": (0.0, 60_000.0),
    "canary_percent": (0.0, 100.0),
    "canary_tolerance": (0.0, 10.0),
    "prefill_tokens_per_s": (1.0, 1e9),
    "retry_s_min": (0.01, 600.0),
    "retry_s_max": (0.01, 3600.0),
    "ttl_s": (1.0, float(limits.ttl_s_max)),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Times say their unit. A default is meant for an engine and a service on one host.

    url: of the service: its socket ("unix:///run/perdure.sock"), its directory, or "tcp://host:port" of a data node.
    tenant: isolation domain; `cache_salt` separates requests inside it. mode: "shadow" loads nothing and reports what
    would have been hit, "off" does nothing. generated: whether blocks of generated tokens are stored; "auto" learns
    whether they are ever asked for. durability, ttl_s: of what is stored.

    lookup_wait_ms_max: how long a request waits for the service to say what it has. promote_wait_ms_max: and, while
    it brings blocks to memory faster than the engine would compute them (prefill_tokens_per_s until that is measured),
    how long for those. load_deadline_ms: for the copy into the engine's cache. flush_ms_max: how long a step that
    overwrites blocks waits for a save to have read them. staging_bytes: saves on their way. canary_percent: restored
    requests whose last block is computed all the same and compared; canary_tolerance: relative difference that turns
    the connector off. retry_s_min, retry_s_max: how long the connector stays off after an error. weights: digest to use
    instead of one of the loaded weights; model: name to use instead of the directory's. control: file by which
    `perdure engine` tells the engine something, default: beside the service's socket. events, events_replay: where KV
    events are published, "tcp://*:5557"; not used where vLLM publishes its own.
    """

    url: str
    tenant: str = "default"
    mode: str = "on"
    generated: str = "auto"
    durability: str = "ephemeral"
    ttl_s: float | None = None
    lookup_wait_ms_max: float = 50.0
    promote_wait_ms_max: float = 2000.0
    load_deadline_ms: float = 5000.0
    flush_ms_max: float = 10.0
    staging_bytes: int = 64 * limits.MIB
    canary_percent: float = 0.0
    canary_tolerance: float = 0.05
    prefill_tokens_per_s: float = 1000.0
    retry_s_min: float = 1.0
    retry_s_max: float = 60.0
    weights: str = ""
    model: str = ""
    events: str = ""
    events_replay: str = ""
    control: str = ""

    def __post_init__(self) -> None:
        for name in (
            "url",
            "tenant",
            "mode",
            "generated",
            "durability",
            "weights",
            "model",
            "control",
            "events",
            "events_replay",
        ):
            check_text(getattr(self, name), f"kv_connector_extra_config.{name}")
        if not self.url:
            raise InvalidArgument(
                'kv_connector_extra_config.url is missing: the service\'s socket, for example "unix:///run/perdure.sock"'
            )
        for name, choices in (
            ("mode", MODES), ("generated", GENERATED), ("durability", ("ephemeral", "session", "retained"))
        ):  # fmt: skip
            if getattr(self, name) not in choices:
                raise InvalidArgument(
                    f"kv_connector_extra_config.{name}={getattr(self, name)!r}: must be one of {', '.join(choices)}"
                )
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
                raise InvalidArgument(f"kv_connector_extra_config.{name}={value!r}: must be {low:g} to {high:g}")
        size = self.staging_bytes
        if not isinstance(size, int) or isinstance(size, bool) or not limits.MIB <= size <= limits.region_bytes_max:
            raise InvalidArgument(
                f"kv_connector_extra_config.staging_bytes={size!r}: must be a number of bytes, {limits.MIB} or more"
            )
        if self.retry_s_min > self.retry_s_max or math.isnan(self.retry_s_min):
            raise InvalidArgument("kv_connector_extra_config.retry_s_min is more than retry_s_max")


def settings_of(extra: Mapping[str, Any]) -> Settings:
    """From `kv_connector_extra_config`."""
    known = [field.name for field in fields(Settings)]
    for name in extra:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
            raise UnknownOption(f"kv_connector_extra_config.{name} does not exist; the nearest is {near[0]!r}")
    return Settings(**{"url": "", **extra})
