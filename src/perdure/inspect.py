"""Questions about a store and its blocks: status, verify, explain. Read-only, usable beside a running writer.

Every answer is made of what is on the disk or was measured; nothing is estimated.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from perdure import codecs, limits
from perdure import keys as naming
from perdure.catalog.api import Durability, SegmentState
from perdure.core import Core
from perdure.directory import lock_holder
from perdure.errors import FormatError, InvalidArgument
from perdure.keyspace import Keyspace
from perdure.segments import format as fmt
from perdure.segments.landing import BlockStatus
from perdure.segments.recovery import check_entries, entry_keys
from perdure.tenants import KEYSPACES

_VERIFY_BLOCKS = 64
_CODEC_NAMES = {codecs.NONE: "none", codecs.BLOSC2_SHUFFLE_ZSTD1: "blosc2-shuffle-zstd1"}


def register(core: Core, space: Keyspace) -> None:
    """Remember a keyspace's identity, so that `status` and `explain` can name it."""
    if core.read_only or core.control.get(KEYSPACES, space.digest) is not None:
        return
    fields = {name: value.hex() for name, value in space.identity.fields()}
    entry = {
        "tenant": space.tenant,
        "tenant_id": space.tenant_id.hex(),
        "epoch": space.epoch,
        "model": space.identity.model,
        "block_tokens": space.layout.block_tokens,
        "block_bytes": space.layout.block_bytes,
        "fields": fields,
    }
    core.control.compare_and_set(KEYSPACES, space.digest, None, json.dumps(entry, sort_keys=True).encode())


def keyspaces(core: Core) -> dict[bytes, dict[str, Any]]:
    return {digest: json.loads(value) for digest, value in core.control.items(KEYSPACES)}


def status(core: Core) -> dict[str, Any]:
    """What is stored, what it takes, how the store and its host are: JSON-able, sizes in bytes."""
    spaces = keyspaces(core)
    names = {entry["tenant_id"]: entry["tenant"] for entry in spaces.values()}
    segments = core.table.all()
    usage = core.index.usage()
    return {
        "path": str(core.path),
        "store": core.identity.store,
        "format": limits.format_version,
        "created_s": core.identity.created_s,
        "writer": lock_holder(core.path),
        "capacity_bytes": core.space.capacity,
        "used_bytes": core.space.used,
        "blocks": core.index.count(),
        "index_rebuilding": core.index_lost,
        "segments": {
            state.name.lower(): {
                "count": sum(record.state is state and not record.cold for record in segments),
                "bytes": sum(record.allocated_bytes for record in segments if record.state is state),
            }
            for state in SegmentState
        },
        "tenants": {
            names.get(tenant.hex(), tenant.hex()): {
                "blocks": one.blocks,
                "kv_bytes": one.block_bytes,
                "stored_bytes": one.record_bytes,
            }
            for tenant, one in sorted(usage.items())
        },
        "keyspaces": [
            {"digest": digest.hex(), "tenant": one["tenant"], "model": one["model"],
             "block_tokens": one["block_tokens"], "block_bytes": one["block_bytes"]}
            for digest, one in spaces.items()
        ],
        "presence": {
            "keys": len(core.presence), "bytes": core.presence.nbytes, "complete": core.presence.complete
        },
        "memory": dataclasses.asdict(core.pool.stats()),
        "pins": len(core.control.pins()),
        "sessions": core.sessions.count(),
        "healthy": not core.health.sick,
        "roots": {"list": [], "out": 0, "single_copies": 0} if core.copies is None else core.copies.status(),
        "clock_step_s": round(core.steady.step_s, 3),
        "expiry_paused": core.steady.paused,
        "rates_bytes_per_s": {
            "disk_read": round(core.rates.disk_read.bytes_per_s),
            "memory_read": round(core.rates.memory_read.bytes_per_s),
            "disk_write": round(core.rates.disk_write.bytes_per_s),
            "device_read": round(core.rates.device_read_bytes_per_s or 0),
        },
        "reclaim": {
            name: getattr(core.reclaimer.counters, name)
            for name in ("segments_dropped", "blocks_evicted", "blocks_copied", "bytes_copied")
        },
        "cold": None if core.cold is None else core.cold.status(),
        "counters": core.counters.snapshot(),
        "incidents": core.incidents.all()[-10:],
    }  # fmt: skip


def verify(core: Core, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Read and check every published record of every segment.

    progress: called with (bytes read, bytes in all). Returns counts, and one entry per block that does not verify."""
    started = time.monotonic()
    records = core.table.all()
    total = sum(record.allocated_bytes or record.sealed_bytes for record in records)
    checked = nbytes = stale = 0
    bad: list[dict[str, Any]] = []
    unreadable: list[dict[str, str]] = []
    for record in records:
        try:
            entries = _published(core, record.segment)
        except (OSError, FormatError) as error:
            unreadable.append({"segment": record.segment.hex(), "why": str(error)})
            entries = np.zeros(0, fmt.INDEX_ENTRY)
        for at in range(0, len(entries), _VERIFY_BLOCKS):
            part = entries[at : at + _VERIFY_BLOCKS]
            statuses = check_entries(core.reader, core.scratch, part)
            checked += len(part)
            nbytes += int(fmt.record_bytes_array(part["record"]["stored_bytes"]).sum())
            wrong = np.flatnonzero(statuses != BlockStatus.FOUND)
            if len(wrong):  # evicted while we looked, or really bad?
                present, current = core.index.lookup(entry_keys(part[wrong]))
                still = present & (current == part["record"][wrong])
                stale += int(np.count_nonzero(~still))
                bad.extend(_bad(part[place], BlockStatus(statuses[place])) for place in wrong[still].tolist())
            if progress is not None:
                progress(min(nbytes, total), total)
    return {
        "blocks": checked,
        "bytes": nbytes,
        "bad": bad,
        "unreadable_segments": unreadable,
        "evicted_meanwhile": stale,
        "seconds": round(time.monotonic() - started, 3),
        "ok": not bad and not unreadable,
    }


def _published(core: Core, segment: bytes) -> Any:
    """Entries of a segment that the catalog points at (open segments are scanned)."""
    try:
        entries = core.segments.read_index(segment).entries
    except FileNotFoundError:
        entries, _ = core.recovery.scan(segment)
    if not len(entries):
        return entries
    present, records = core.index.lookup(entry_keys(entries))
    return entries[present & (records == entries["record"])]


def _bad(entry: np.void, found: BlockStatus) -> dict[str, Any]:
    return {
        "key": entry["key"].tobytes().hex(),
        "status": found.name.lower(),
        "segment": entry["record"]["segment"].tobytes().hex(),
        "offset": int(entry["record"]["offset"]),
    }


def explain(core: Core, key: bytes) -> dict[str, Any]:
    """Everything known about one block: where it is, whose it is, whether it verifies, what happened to it.

    "memory": whether it is in the DRAM tier of this process, and how many look at it; None without such a tier."""
    if not isinstance(key, bytes) or len(key) != limits.key_bytes:
        raise InvalidArgument(f"a block key has {limits.key_bytes} bytes ({2 * limits.key_bytes} hex digits)")
    incidents = [one for one in core.incidents.all() if one["key"] == key.hex()]
    keys = np.frombuffer(key, np.uint8).reshape(1, -1)
    present, records = core.locate(keys)
    answer: dict[str, Any] = {
        "key": key.hex(), "present": bool(present[0]), "memory": _in_memory(core, key), "incidents": incidents
    }  # fmt: skip
    if not present[0]:
        last = f"; last incident: {incidents[-1]['kind']} ({incidents[-1]['why']})" if incidents else ""
        answer["verdict"] = f"miss: not in the catalog (never stored, evicted or removed){last}"
        return answer
    row = records[0]
    segment = row["segment"].tobytes()
    answer["record"] = {
        "segment": segment.hex(), "offset": int(row["offset"]), "stored_bytes": int(row["stored_bytes"]),
        "block_bytes": int(row["block_bytes"]), "codec": _CODEC_NAMES.get(int(row["codec"]), str(row["codec"])),
        "durability": Durability(int(row["durability"])).name.lower(), "created_s": int(row["created_s"]),
        "expires_s": int(row["expires_s"]), "tenant_id": row["tenant"].tobytes().hex(),
    }  # fmt: skip
    owner = core.table.get(segment)
    answer["segment_state"] = owner.state.name.lower() if owner is not None else "gone"
    if owner is not None and owner.cold and core.cold is not None:
        answer["file"] = f"{core.cold.tier.objects.where}/{core.cold.tier.name(segment)}"
    else:
        answer["file"] = f"segments/{segment.hex()[-2:]}/{segment.hex()}.seg"
    problem, keyspace = _look(core, key, records)
    spaces = keyspaces(core)
    if keyspace in spaces:
        answer["keyspace"] = spaces[keyspace] | {"digest": keyspace.hex()}
    expired = not bool(core.alive(present, records)[0])
    answer["verdict"] = (
        f"corrupt: {problem}" if problem else "miss: expired" if expired else "hit: present and verified"
    )
    return answer


def _in_memory(core: Core, key: bytes) -> dict[str, Any] | None:
    if not core.pool.budget_bytes:
        return None
    pins = core.pool.pins_of(key)
    return {"held": pins is not None, "pins": pins or 0}


def _look(core: Core, key: bytes, records: Any) -> tuple[str | None, bytes]:
    """Read one record now: what is wrong with it (None: nothing), and the keyspace its header names."""
    row = records[0]
    try:
        file = core.segments.reopen(row["segment"].tobytes())
    except OSError as error:
        return str(error), b""
    lease = core.scratch.take(limits.page_bytes)
    try:
        if file.preadv([lease.view], int(row["offset"])) < limits.header_bytes:
            return "record cut short", b""
        header = np.frombuffer(lease.view[: limits.header_bytes], np.uint8).copy().view(fmt.HEADER)[0]
    except OSError as error:
        return str(error), b""
    finally:
        lease.give_back()
        file.close()
    entry = np.zeros(1, fmt.INDEX_ENTRY)
    entry["key"], entry["keyspace"], entry["record"] = np.void(key), header["keyspace"], records
    found = BlockStatus(check_entries(core.reader, core.scratch, entry)[0])
    if found is BlockStatus.FOUND:
        return None, header["keyspace"].tobytes()
    identity = fmt.expected_identity(header["keyspace"].tobytes(), key, records.tolist()[0])
    problem = fmt.header_problem(memoryview(header.tobytes()), identity, core.segments.secret(row["segment"].tobytes()))
    return problem or "payload checksum does not match", header["keyspace"].tobytes()


def explain_prefix(core: Core, space: Keyspace, token_ids: ArrayLike) -> dict[str, Any]:
    """Why a prefix hits as far as it does: other keyspaces of the tenant that hold it, and which fields differ."""
    keys = space.chain(token_ids)
    present, records = core.locate(keys)
    alive = core.alive(present, records)
    holes = np.flatnonzero(~alive)
    usable = int(holes[0]) if len(holes) else len(keys)
    answer: dict[str, Any] = {"blocks": len(keys), "usable": usable, "elsewhere": []}
    if usable == len(keys):
        return answer
    answer["first_hole"] = explain(core, keys[usable].tobytes())
    mine = {name: value.hex() for name, value in space.identity.fields()}
    for digest, entry in keyspaces(core).items():
        if digest == space.digest or entry["tenant"] != space.tenant:
            continue
        other = naming.chain(digest, token_ids, entry["block_tokens"])
        found = core.index.prefix(other)
        if found:
            differs = [name for name, value in mine.items() if entry["fields"].get(name) != value]
            answer["elsewhere"].append({"digest": digest.hex(), "usable": found, "differs": differs})
    return answer
