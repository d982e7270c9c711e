"""Settings of `perdure serve`: flags over environment (PERDURE_*) over a TOML file over defaults.

Contract
- Every value knows where it came from (`Loaded.origins`), and every error names the key, its source, what is wrong and
  what to write. Errors are ConfigError.
- A key that does not exist is an error that names the nearest one that does, in the file and in the environment alike:
  a misspelt setting that is silently ignored is found out months later.
- Nothing is reachable from other machines by accident: `listen` beyond loopback needs TLS with client certificates,
  `metrics` beyond loopback needs `metrics_public`.
- Never: a look at anything but the three sources; no file is searched for, and nothing is created.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from perdure import limits
from perdure.catalogs import kind_of, masked
from perdure.errors import ConfigError, InvalidArgument
from perdure.io.objects import check_url
from perdure.options import parse_size
from perdure.service.sockets import is_loopback, parse_address
from perdure.service.streams import TlsFiles

PREFIX: Final = "PERDURE_"
FOREIGN: Final = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "MODEL_CACHE",
        "TRACES",
        "FUZZ",
        "CI_FAST",
        "SWEEP_ALL",
        "CORRUPTION_SEED",
        "CUT_SEED",
        "KILL_SEED",
        "SWEEP_SEED",
    )
)  # not ours: of the demo and the tests
_CPUS: Final = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*")
_CPUS_MAX: Final = 65_536


def parse_cpus(text: str) -> frozenset[int]:
    """CPU numbers of "0-3,7"; empty: no restriction. ValueError says what is wrong."""
    if not text:
        return frozenset()
    if not _CPUS.fullmatch(text):
        raise ValueError("not a list of CPUs")
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high < low or high >= _CPUS_MAX:
            raise ValueError(f"{part!r} is not a range of CPUs")
        found.update(range(low, high + 1))
    return frozenset(found)


def _optional_size(value: Any) -> Any:
    return None if value is None or value == "" else _size(value)


def _size(value: Any) -> Any:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    try:
        return parse_size(value, "size")
    except InvalidArgument:
        raise ValueError("not a size") from None


def _address(value: Any) -> Any:
    if isinstance(value, str) and value:
        parse_address(value)
    return value


def _catalog(value: Any) -> Any:
    if isinstance(value, str) and value:
        kind_of(value)
    return value


def _cpus(value: Any) -> Any:
    if isinstance(value, str):
        value = value.replace(" ", "")
        parse_cpus(value)
    return value


def _path(value: Any) -> Any:
    """An empty path switches the setting off; Path("") would be the working directory."""
    if isinstance(value, str) and "\0" in value:
        raise ValueError("contains a NUL character")
    return None if value == "" else value


def _paths(value: Any) -> Any:
    """One text from the environment, a list from a file or from flags."""
    given = value.split(os.pathsep) if isinstance(value, str) else value
    if any(one == "" or (isinstance(one, str) and "\0" in one) for one in given):
        if not isinstance(value, str) or value:
            raise ValueError("an empty path")
        return ()
    return given


def _cold(value: Any) -> Any:
    if value in ("off", "drop", "", None):
        return value or None
    return check_url(value)


_Size = Annotated[int | None, BeforeValidator(_optional_size)]
_Memory = Annotated[int, BeforeValidator(_size)]
_Address = Annotated[str, BeforeValidator(_address)]
_File = Annotated[Path | None, BeforeValidator(_path)]
_Paths = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_paths)]
_Cold = Annotated[str | None, BeforeValidator(_cold)]
_Catalog = Annotated[str, BeforeValidator(_catalog)]
_Cpus = Annotated[str, BeforeValidator(_cpus)]


class Settings(BaseSettings):
    """What `perdure serve` runs with. Made by `load`; sizes are bytes, times seconds."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, env_ignore_empty=False)

    data: _File = Field(None, description="directory of the store; write a path")
    catalog: _Catalog = Field(
        "", description="cluster that holds the catalog of a shared data (empty: LMDB in data); write valkey://h1,h2,h3"
    )
    state_dir: _File = Field(
        None, description="with catalog: local directory of this service alone (none: data); write a path"
    )
    capacity: _Size = Field(
        None, description="what the segments may occupy (none: as last time, or 20GiB); write a size such as 200GiB"
    )
    memory: _Memory = Field(limits.GIB, ge=0, description="DRAM of the whole node; write a size such as 8GiB")
    socket: _File = Field(
        None, description="Unix socket of the engines (none: perdure.sock in state_dir or data); write a path"
    )
    listen: _Address = Field("", description="address for other hosts (empty: none); write HOST:PORT or [IPV6]:PORT")
    tls_cert: _File = Field(None, description="certificate chain of this node (PEM); write a path")
    tls_key: _File = Field(None, description="private key of tls_cert (PEM); write a path")
    tls_ca: _File = Field(None, description="authority that signs the clients' certificates (PEM); write a path")
    metrics: _Address = Field(
        "127.0.0.1:9464", description="address of /metrics, /healthz and /readyz (empty: off); write HOST:PORT"
    )
    metrics_public: bool = Field(
        default=False, description="metrics may be reachable from other machines; write true or false"
    )
    mirror: _File = Field(None, description="second directory, for retained blocks; write a path")
    roots: _Paths = Field(
        (), description="more directories for segments, one per device (none: as last time); write paths, in the "
        f"environment with {os.pathsep!r} between them",
    )  # fmt: skip
    cold: _Cold = Field(
        None, description="bucket for segments that the disk has no room for (none: as last time, at first off); "
        "write s3://BUCKET/PREFIX, off or drop",
    )  # fmt: skip
    cold_capacity: _Size = Field(
        None, description="what objects there may take (none: as last time, or 1TiB); write a size such as 10TiB"
    )
    policy: _File = Field(
        None, description="directory of principals, terms and rules (none: whoever connects may ask for any tenant); "
        "write a path",
    )  # fmt: skip
    codec: Literal["auto", "on", "off"] = Field("auto", description="lossless compression; write auto, on or off")
    admission: Literal["always", "never", "value"] = Field(
        "always", description="which blocks are stored: value weighs reuse against wear; write always, never or value"
    )
    audit: Literal["auto", "off", "on", "reads"] = Field(
        "auto", description="audit log; auto: as last time, at first off; reads: without memory that engines read "
        "unseen; write auto, off, on or reads",
    )  # fmt: skip
    encryption: str = Field(
        "auto", pattern=r"^(auto|on|off|tenants:.+)$",
        description="AES-256-GCM for new segments; auto: as last time, at first off; write auto, on, off or "
        "tenants:NAME,NAME",
    )  # fmt: skip
    kek: str = Field(
        "", pattern=r"^(|file:.+|vault:.+#.+|pkcs11:.+)$",
        description="what wraps the keys (empty: a file in the keystore); write file:PATH, vault:URL#KEY or pkcs11:URI",
    )  # fmt: skip
    cpus: _Cpus = Field("", description="CPUs the service may use (empty: all); write a list such as 0-3,7")
    nice: int = Field(0, ge=-20, le=19, description="scheduling priority; write a number from -20 to 19")
    hugepages: bool = Field(default=False, description="put the pool into huge pages; write true or false")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="what is logged; write debug, info, warning or error"
    )
    log_format: Literal["json", "text"] = Field("json", description="form of a log line; write json or text")
    drain_s: float = Field(
        10.0, ge=0, le=limits.drain_s_max, allow_inf_nan=False,
        description=f"how long running calls may take after SIGTERM; write seconds from 0 to {limits.drain_s_max:.0f}",
    )  # fmt: skip
    clients_max: int = Field(
        1024, ge=1, le=limits.service_clients_entries_max,
        description=f"clients at one time; write a number from 1 to {limits.service_clients_entries_max}",
    )  # fmt: skip

    def store_path(self) -> Path:
        """`data`, which a service cannot do without. Raises ConfigError."""
        if self.data is None:
            raise ConfigError(
                "data is not set: say where the store is with --data DIR, PERDURE_DATA=DIR or `data = ...` in the file"
            )
        return self.data

    def socket_path(self) -> Path:
        return self.socket or (self.state_dir or self.store_path()) / "perdure.sock"

    def tls_files(self) -> TlsFiles | None:
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)

    def cpu_set(self) -> frozenset[int]:
        return parse_cpus(self.cpus)


@dataclass(frozen=True, slots=True)
class Loaded:
    """origins: key -> "flag" | "env PERDURE_KEY" | "file PATH" | "default"."""

    settings: Settings
    origins: dict[str, str]


class _Environment(EnvSettingsSource):
    """The environment that `load` was given, instead of the process's own."""

    def __init__(self, settings_cls: type[BaseSettings], values: Mapping[str, str]):
        self._values = {name.lower(): value for name, value in values.items()}
        super().__init__(settings_cls)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return self._values


def keys() -> list[str]:
    return list(Settings.model_fields)


def load(flags: Mapping[str, Any], config: Path | None, environ: Mapping[str, str]) -> Loaded:
    """Settings from their sources. flags: key -> value, None where a flag was not given. Raises ConfigError."""
    given = {key: value for key, value in flags.items() if value is not None}
    _refuse_unknown(given, "flag", keys())
    ours = {name: value for name, value in environ.items() if name.startswith(PREFIX) and name not in FOREIGN}
    _refuse_unknown(ours, "environment variable", [f"{PREFIX}{key.upper()}" for key in keys()])
    file = {} if config is None else _read_file(config)
    origins = dict.fromkeys(keys(), "default")
    origins |= dict.fromkeys(file, f"file {config}")
    origins |= {name.removeprefix(PREFIX).lower(): f"env {name}" for name in ours}
    origins |= dict.fromkeys(given, "flag")

    class Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, _Environment(settings_cls, ours), InitSettingsSource(settings_cls, file)

    try:
        settings = Layered(**given)
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(one, origins) for one in error.errors())) from None
    _check_reach(settings, origins)
    return Loaded(settings, origins)


def _read_file(config: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(config.read_text())
    except OSError as error:
        raise ConfigError(f"{config}: cannot be read ({error.strerror}); check the path given with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f'{config}: not TOML ({error}); write lines such as: memory = "8GiB"') from None
    _refuse_unknown(content, f"{config}: key", keys())
    return content


def _refuse_unknown(given: Mapping[str, Any], what: str, known: list[str]) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(f"{what} {name!r} does not exist; the nearest is {near[0]!r}")


def _describe(error: Any, origins: dict[str, str]) -> str:
    key = str(error["loc"][0])
    problem = error["msg"].removeprefix("Value error, ")
    hint = (Settings.model_fields[key].description or "").rpartition("; ")[2]
    value = masked(str(error["input"])) if key == "catalog" else error["input"]
    return f"{key}={value!r} (from {origins[key]}): {problem}; {hint}"


def _check_reach(settings: Settings, origins: dict[str, str]) -> None:
    """What other machines can reach is asked for on purpose, and authenticated where it gives access to blocks."""

    def refuse(key: str, problem: str, hint: str) -> None:
        raise ConfigError(f"{key}={str(getattr(settings, key))!r} (from {origins[key]}): {problem}; {hint}")

    files = {key: getattr(settings, key) for key in ("tls_cert", "tls_key", "tls_ca")}
    missing = [key for key, value in files.items() if value is None]
    if missing and len(missing) < len(files):
        present = next(key for key in files if key not in missing)
        refuse(present, f"TLS needs {' and '.join(missing)} too", "write all of tls_cert, tls_key and tls_ca, or none")
    if settings.listen and missing and settings.policy is not None:
        refuse("listen", "with a policy, hosts are known by their certificates",
               "write tls_cert, tls_key and tls_ca")  # fmt: skip
    if settings.listen and missing and not is_loopback(parse_address(settings.listen)[0]):
        refuse("listen", "other machines could reach the store without TLS",
               "write tls_cert, tls_key and tls_ca, or a loopback address such as 127.0.0.1:9463")  # fmt: skip
    if settings.metrics and not settings.metrics_public and not is_loopback(parse_address(settings.metrics)[0]):
        refuse("metrics", "other machines could read the metrics, which name tenants and have no access control",
               "write metrics_public = true, or a loopback address such as 127.0.0.1:9464")  # fmt: skip
