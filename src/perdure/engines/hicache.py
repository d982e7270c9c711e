"""SGLang's HiCache keeps its third level in Perdure: everything of `perdure.engines.sglang` that needs no SGLang.

Contract
- A page is True only if its bytes were verified and are in the pool. Missing, corrupt and late pages, and all while
  the service is away, are False, and their memory is untouched. Answers are as long as the questions. Nothing raises
  into SGLang's storage threads, which it never restarts.
- A page exists only if every tensor-parallel rank's part of it does, and every pool's that is needed: ranks that share
  a service answer alike whatever one of them has lost. Other hosts' and pipeline stages' parts SGLang compares itself.
- What a page means is part of its name: model, `weights`, the pools' layout, the rank's part, tenant and `salt`.
- `clear()` deletes nothing. It begins a new epoch of the weights: pages stored before are not found any more by this
  engine, on any rank of its host. With `weights_file` the epoch is what that file says then, so the pages of weights
  that return are found again. Multi-node ranks of one engine need `weights_file`.
- Not guaranteed: that two requests with other salts or adapters have other pages. SGLang names pages; from the version
  on that has `storage_namespace_seed` it puts both into the names.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perdure.engines.hicache_pages import KV, Pages, Shard, flat_bytes
from perdure.engines.link import OFF_S, Link, check_identity, seconds
from perdure.errors import ConfigError, InvalidArgument, StorePathError
from perdure.keys import KVLayout, check_text, encode_fields, tenant_secret
from perdure.keyspace import durability_of
from perdure.options import refuse_unknown
from perdure.reports import WriteStatus
from perdure.segments.landing import BlockStatus

log = logging.getLogger("perdure.engines")


@dataclass(frozen=True, slots=True)
class Settings:
    """The object "perdure" in SGLang's --hicache-storage-backend-extra-config.

    url, tenant: where and whose. weights: digest of the loaded weights, or weights_file: a file that holds it, read
    again by `clear()`. salt: part of every name. require_salt: the tenant's pages must have one. scales: digest of
    static KV scales that are not in the weights. tp_per_host: tensor-parallel ranks that share this service, if not all
    do. durability: "ephemeral" survives the process, "session" a power cut.
    lookup_s, read_s, write_s: how long a batch may take. off_s: how long nothing is asked after a failure."""

    url: str = ""
    tenant: str = ""
    weights: str = ""
    weights_file: str = ""
    salt: str = ""
    require_salt: bool = False
    scales: str = ""
    tp_per_host: int = 0
    codec: str = "auto"
    durability: str = "ephemeral"
    lookup_s: float = 0.5
    read_s: float = 2.0
    write_s: float = 10.0
    off_s: float = OFF_S

    @classmethod
    def of(cls, extra_config: Any) -> Settings:
        """Raises ConfigError, UnknownOption, InvalidArgument."""
        given = (extra_config or {}).get("perdure")
        if not isinstance(given, dict):
            raise ConfigError(
                '--hicache-storage-backend-extra-config has no object "perdure"; pass for example '
                '{"backend_name": "perdure", "module_path": "perdure.engines.sglang", "class_name": "PerdureHiCache", '
                '"interface_v1": 1, "perdure": {"url": "unix:///run/perdure.sock", "tenant": "acme", '
                '"weights": "sha256:..."}}'
            )
        refuse_unknown(given, [field.name for field in fields(cls)], "perdure")
        made = cls(**given)
        tenant_secret(b"", made.tenant)  # checks the name
        for name in ("salt", "scales", "weights", "weights_file"):
            check_text(getattr(made, name), name)
        for name in ("lookup_s", "read_s", "write_s", "off_s"):
            seconds(getattr(made, name), name)
        durability_of(made.durability)
        if isinstance(made.tp_per_host, bool) or not isinstance(made.tp_per_host, int) or made.tp_per_host < 0:
            raise InvalidArgument(f"tp_per_host={made.tp_per_host!r}: must be a number of ranks, 0 for all")
        if made.weights and made.weights_file:
            raise InvalidArgument("weights and weights_file: give one of them")
        return made


class HiCacheAdapter:
    """SGLang's HiCacheStorage, but for the base class. Built as cls(storage_config, kwargs)."""

    result_type: Any = None
    """SGLang's PoolTransferResult."""
    salted_names = True
    """Whether this SGLang's page names say a request's salt and adapter."""

    def __init__(self, storage_config: Any, kwargs: Any = None):
        self.settings = Settings.of(storage_config.extra_config)
        _refuse(storage_config, self.settings, self.salted_names)
        one = storage_config
        self.shard = Shard(
            one.tp_rank, one.tp_size, one.pp_rank, one.pp_size, one.attn_cp_rank, one.attn_cp_size, one.is_mla_model,
            self.settings.tp_per_host or one.tp_size,
        )  # fmt: skip
        self._model = one.model_name or "unnamed"
        self._in_place = bool((one.extra_config or {}).get("interface_v1", 0))
        self._epoch, self._weights = 0, _weights(self.settings)
        check_identity(self._model, self._weights, KVLayout(1, 1, "uint8", "any"))
        self._link = Link(self.settings.url, "sglang", off_s=self.settings.off_s)
        self._pages: dict[str, Pages] = {}
        self.counts = {"found": 0, "missed": 0, "corrupt": 0, "late": 0, "stored": 0, "there": 0, "not stored": 0}

    # --- pools
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self._know(KV, mem_pool_host, in_place=self._in_place)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        name = str(getattr(host_pool_name, "value", host_pool_name))
        if name != KV or KV not in self._pages:
            self._know(name, host_pool, in_place=True)

    def _know(self, name: str, pool: Any, *, in_place: bool) -> None:
        """Raises InvalidArgument for a pool whose pages cannot be blocks."""
        pages = Pages(name, pool, in_place=in_place, scales=self.settings.scales)
        if not pages.logical:
            pages.layout(self.shard, self.shard.tp_rank)
        self._pages[name] = pages

    # --- which pages are there
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        pages = self._pages.get(KV)
        return 0 if pages is None else self._prefix(pages, keys)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        main = self._pages.get(KV)
        count = len(keys) if main is not None and main.logical else self.batch_exists(keys)
        hits = {KV: count} if count else {}
        stops = set(range(1, count + 1))
        for transfer in pool_transfers or []:
            name, usable = _pool_of(transfer), set[int]()
            pages = self._pages.get(name)
            if pages is not None and stops:
                usable = set(self._stops(pages, keys[:count], transfer))
            if usable:
                hits[transfer.name] = max(usable)
            stops &= usable
        return self._result(max(stops, default=0), hits, sorted(stops))

    def _stops(self, pages: Pages, keys: list[str], transfer: Any) -> Sequence[int]:
        """Lengths of the prefixes that this pool can restore."""
        if str(getattr(transfer.hit_policy, "value", transfer.hit_policy)) != "trailing_pages":
            return range(1, self._prefix(pages, keys) + 1)
        window = max(1, len(transfer.keys or ()))
        there = self._ask(lambda: self._present(pages, keys), np.zeros(len(keys), bool))
        missing = np.concatenate([[0], np.cumsum(~there)])
        return [end for end in range(1, len(keys) + 1) if missing[end] == missing[max(0, end - window)]]

    def _result(self, count: int, hits: dict[Any, int], stops: list[int]) -> Any:
        kind = self.result_type
        whole = is_dataclass(kind) and len(fields(kind)) > 2  # later versions also want every length that can be used
        return kind(count, hits, stops) if whole else kind(count, hits)

    def _prefix(self, pages: Pages, keys: list[str]) -> int:
        """Leading pages whose parts are all there."""

        def look() -> int:
            count = len(keys)
            for space in self._spaces(pages):
                count = min(count, space.lookup(space.adopt_hashes(self._names(keys[:count])))) if count else 0
            return count

        answer: int = self._ask(look, 0)
        return answer

    def _present(self, pages: Pages, keys: list[str]) -> Any:
        there = np.ones(len(keys), bool)
        for space in self._spaces(pages):
            there &= space.present(space.adopt_hashes(self._names(keys)))
        return there

    # --- moving pages
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._get(self._pages.get(KV), keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._set(self._pages.get(KV), keys, host_indices)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Pools of the same pages that are all needed end at the same page: what one lacks, none has."""
        answers = {
            one.name: self._get(self._pages.get(_pool_of(one)), list(one.keys or []), one.host_indices)
            for one in transfers
        }
        for one in transfers:
            if str(getattr(one.hit_policy, "value", one.hit_policy)) == "trailing_pages":
                continue
            alike = [answers[other.name] for other in transfers if other.keys == one.keys]
            usable = min(_leading(answer) for answer in alike)
            answers[one.name] = [found and at < usable for at, found in enumerate(answers[one.name])]
        return answers

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {
            one.name: self._set(self._pages.get(_pool_of(one)), list(one.keys or []), one.host_indices)
            for one in transfers
        }

    def _get(self, pages: Pages | None, keys: list[str], indices: Any) -> list[bool]:
        if pages is None or not pages.fits(keys, indices):
            return [False] * len(keys)
        if pages.logical:
            return [True] * len(keys)

        def get() -> list[bool]:
            if pages.in_place:
                return self._read(pages, keys, pages.parts(indices))
            memory = np.empty((len(keys), pages.block_bytes), np.uint8)
            found = self._read(pages, keys, list(memory))
            for at, slot in enumerate(pages.first_slots(indices)):
                if found[at]:
                    pages.scatter(slot, memory[at])
            return found

        return self._move(get, pages, keys, self.settings.read_s)

    def _set(self, pages: Pages | None, keys: list[str], indices: Any) -> list[bool]:
        if pages is None or not pages.fits(keys, indices):
            return [False] * len(keys)
        if pages.logical:
            return [True] * len(keys)

        def put() -> list[bool]:
            return self._write(pages, keys, pages.parts(indices) if pages.in_place else pages.gather(indices))

        return self._move(put, pages, keys, self.settings.write_s)

    def _read(self, pages: Pages, keys: list[str], into: list[Any]) -> list[bool]:
        space, limit = self._spaces(pages, own=True)[0], self.settings.read_s
        report = space.read(space.adopt_hashes(self._names(keys)), into, deadline_s=limit)
        found = report.statuses == BlockStatus.FOUND
        if (report.statuses == BlockStatus.LATE).all():
            self._link.trip(f"no page in {limit:g} s")
        self.counts["found"] += int(found.sum())
        self.counts["missed"] += int((~found).sum())
        self.counts["corrupt"] += report.count(BlockStatus.CORRUPT)
        self.counts["late"] += report.count(BlockStatus.LATE)
        answer: list[bool] = found.tolist()
        return answer

    def _write(self, pages: Pages, keys: list[str], source: list[Any]) -> list[bool]:
        space, one = self._spaces(pages, own=True)[0], self.settings
        names = space.adopt_hashes(self._names(keys))
        report = space.write(names, source, durability=one.durability, deadline_s=one.write_s)
        stored = report.statuses <= WriteStatus.EXISTS
        self.counts["stored"] += report.stored
        self.counts["there"] += report.count(WriteStatus.EXISTS)
        self.counts["not stored"] += int((~stored).sum())
        answer: list[bool] = stored.tolist()
        return answer

    # --- SGLang's older calls: one tensor per page, copied by SGLang
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """The given tensors, None where a page is not delivered. Tensors must be contiguous, in host memory."""
        pages, targets = self._flat(), list(target_locations or [])
        if pages is None or len(targets) != len(keys):
            return [None] * len(keys)
        found = self._move(lambda: self._read(pages, keys, targets), pages, keys, self.settings.read_s)
        return [target if ok else None for target, ok in zip(targets, found, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        pages, given = self._flat(), list(values or [])
        if pages is None or len(given) != len(keys) or any(value is None for value in given):
            return False
        put = lambda: self._write(pages, keys, [flat_bytes(value) for value in given])  # noqa: E731
        return all(self._move(put, pages, keys, self.settings.write_s))

    def _flat(self) -> Pages | None:
        main = self._pages.get(KV)
        if main is None or main.logical or not main.in_place:
            return None if main is None or main.logical else main
        if "kv flat" not in self._pages:
            self._pages["kv flat"] = Pages(KV, main.pool, in_place=False, scales=self.settings.scales)
        return self._pages["kv flat"]

    # --- names
    def _names(self, keys: list[str]) -> list[bytes]:
        salt = self.settings.salt.encode()
        return [encode_fields([("salt", salt), ("page", key.encode())]) for key in keys]

    def _spaces(self, pages: Pages, *, own: bool = False) -> list[Any]:
        """Keyspaces of the ranks' parts, this rank's first."""
        weights, ranks = self._weights, self.shard.ranks(pages.name)
        return [
            self._link.space(
                self.settings.tenant,
                check_identity(self._model, weights, pages.layout(self.shard, rank)),
                self.settings.codec,
            )
            for rank in (ranks[:1] if own else ranks)
        ]

    def block_of(self, key: str, pool: str = KV) -> bytes:
        """Name of this rank's part of a page, for `explain`. Raises KeyError, and what connecting raises."""
        space = self._spaces(self._pages[pool], own=True)[0]
        name: bytes = space.adopt_hashes(self._names([key]))[0].tobytes()
        return name

    # --- life
    def clear(self) -> None:
        """Begin a new epoch of the weights; see the module."""
        self._epoch += 1
        try:
            self._weights = _weights(self.settings, self._epoch)
        except StorePathError as error:
            log.warning("sglang: %s; pages of this epoch will not be found again", error)
            self._weights = f"epoch:{_engine()}.{self._epoch}"

    def get_stats(self) -> Any:
        return None

    def close(self) -> None:
        """Idempotent."""
        self._link.close()

    def _ask(self, verb: Any, otherwise: Any) -> Any:
        return self._link.ask(verb, otherwise, self.settings.lookup_s)

    def _move(self, verb: Any, pages: Pages, keys: list[str], within_s: float) -> list[bool]:
        nothing, what = [False] * len(keys), (self._weights, pages.name, pages.in_place)
        if not keys or not self._link.first(what, lambda: self._spaces(pages, own=True), self.settings.lookup_s):
            return nothing
        return self._link.move(verb, nothing, within_s)


def _pool_of(transfer: Any) -> str:
    return str(getattr(transfer.name, "value", transfer.name))


def _leading(answer: list[bool]) -> int:
    return answer.index(False) if False in answer else len(answer)


def _refuse(config: Any, settings: Settings, salted_names: bool) -> None:
    """InvalidArgument for what cannot be served, with what to do instead."""
    if getattr(config, "should_split_heads", False):
        raise InvalidArgument("tp_lcm_size splits pages by heads, which is not supported; leave it out")
    if getattr(config, "dcp_size", 1) > 1:
        raise InvalidArgument("decode context parallelism is not supported: its ranks hold slices of a page; use TP")
    if settings.require_salt and not settings.salt:
        raise InvalidArgument("require_salt: the tenant's pages must have a salt; set salt")
    if not salted_names:
        if settings.require_salt:
            raise InvalidArgument(
                "require_salt: this SGLang names pages by tokens alone, so requests with other salts would share them; "
                "use a version with storage_namespace_seed in sglang.srt.mem_cache.utils"
            )
        log.warning(
            "sglang: this version names pages by tokens alone: requests with other salts or LoRA adapters share them. "
            "Serve one tenant and no adapters, or use a newer version"
        )


def _weights(settings: Settings, epoch: int = 0) -> str:
    """The digest that names the loaded weights. Raises StorePathError."""
    if settings.weights_file:
        try:
            return Path(settings.weights_file).read_text().strip()
        except OSError as error:
            raise StorePathError(f"weights_file {settings.weights_file}: {error}") from error
    return f"{settings.weights}+{_engine()}.{epoch}" if epoch else settings.weights


def _engine() -> str:
    """Names this run of the engine, alike on all its ranks on this host: they are children of one process."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, IndexError):
        started, boot = "", os.urandom(16).hex()
    return hashlib.sha256(f"{boot} {parent} {started}".encode()).hexdigest()[:32]
