"""The writing verb: check, admit, encode, append, sync, publish; every block reported by itself.

Contract
- Order: data is in its file (and fsynced, where the durability class asks for it) before the catalog says so. What was
  not published is invisible garbage; a failed or late write can be repeated at once.
- "Exists" never acknowledges less than asked: a present copy counts only if its durability, retention and expiry are at
  least those asked for; else the caller's copy is stored and replaces it.
- Capacity is checked before the write; a full store makes room first (`segments.reclaim`), or rejects the block.
- Where there is an audit log, nothing is written that cannot be recorded, and nothing acknowledged that was not.
- With a lease, publishing is fenced: if the lease was lost, StaleFence is raised and nothing becomes visible.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.admission import AdmissionRequest
from perdure.buffers import Parts, copy_parts
from perdure.catalog.api import (
    RECORD,
    Durability,
    KeyArray,
    Lease,
    RecordArray,
    fingerprints,
)
from perdure.catalog.codec import satisfies
from perdure.core import Core
from perdure.errors import CatalogError, CatalogUnavailable, StaleFence
from perdure.governance.audit import AuditLog
from perdure.keys import key_list
from perdure.publishing import Publication, commit, flush_pending, show
from perdure.reports import WriteReport, WriteStatus
from perdure.segments.format import record_bytes, record_bytes_array
from perdure.segments.table import NO_TTL
from perdure.segments.writer import Appended, Batch, NoSpace
from perdure.tenants import UNHEARD

if TYPE_CHECKING:
    from perdure.keyspace import Keyspace

_CHUNK_BYTES = 64 * limits.MIB  # bounds the memory of one write for staging and encoding
_FULL = {errno.ENOSPC, errno.EDQUOT}
_ATTEMPTS_MAX = 3
ERASED = "the tenant was erased since this keyspace was opened; open it again"


@dataclass(frozen=True, slots=True)
class Terms:
    """What the caller asked for, the same for all blocks of one write."""

    durability: Durability
    retention: int
    created_s: int
    expires_s: int
    lease: Lease | None
    deadline: float | None


def retention(ttl_s: float | None, now_s: float) -> tuple[int, int]:
    """(retention class, expiry in seconds since 1970) for a TTL.

    Class: the power of two of minutes the TTL fits into, so that the blocks of one segment expire at about one time;
    NO_TTL without one. The expiry is rounded up to a sixteenth of the TTL: writing a block again a little later is not
    asking for more.
    """
    if ttl_s is None:
        return NO_TTL, 0
    step = max(1, int(ttl_s / 16))
    return max(0, math.ceil(math.log2(max(ttl_s / 60, 1)))), -(-math.ceil(now_s + ttl_s) // step) * step


def write(core: Core, space: Keyspace, keys: KeyArray, blocks: Sequence[Parts], terms: Terms) -> WriteReport:
    turn = core.tenants.begin()
    try:
        return _write(core, space, keys, blocks, terms)
    finally:
        core.tenants.end(turn)


def _write(core: Core, space: Keyspace, keys: KeyArray, blocks: Sequence[Parts], terms: Terms) -> WriteReport:
    started = time.monotonic()
    count = len(keys)
    report = WriteReport(np.full(count, WriteStatus.FAILED, np.uint8), 0, 0, 0, 0.0)
    audit = core.audit if space.audited and count else None
    if audit is not None:
        audit.guard()
    if terms.lease is not None and not core.control.check(terms.lease):
        raise StaleFence(f"lease {terms.lease.token} was lost before the write; nothing was written")
    todo = np.zeros(0, np.intp)
    if not core.tenants.is_current():
        _refuse(report, np.arange(count), WriteStatus.FAILED, UNHEARD)
    elif space.erased:
        _refuse(report, np.arange(count), WriteStatus.REJECTED, ERASED)
    elif count:
        todo, terms = _new_blocks(core, keys, terms, report)
    todo = _admitted(core, space, keys, todo, terms, report)
    step = max(1, _CHUNK_BYTES // space.layout.block_bytes)
    for at in range(0, len(todo), step):
        _store(core, space, keys, blocks, todo[at : at + step], terms, report)
    _settle_duplicates(keys, report)
    report.stored = report.count(WriteStatus.STORED)
    report.bytes = report.stored * space.layout.block_bytes
    report.seconds = time.monotonic() - started
    if report.stored:
        core.rates.disk_write.add(report.bytes, report.seconds)
    core.counters.add(
        writes=1, blocks_stored=report.stored, blocks_existing=report.count(WriteStatus.EXISTS),
        blocks_rejected=report.count(WriteStatus.REJECTED), blocks_write_late=report.count(WriteStatus.LATE),
        blocks_write_failed=report.count(WriteStatus.FAILED), bytes_written=report.bytes,
        bytes_on_disk_written=report.stored_bytes,
    )  # fmt: skip
    if audit is not None:
        _record(audit, space, keys, terms, report)
    return report


def _record(audit: AuditLog, space: Keyspace, keys: KeyArray, terms: Terms, report: WriteReport) -> None:
    """Before anyone is told that the blocks are stored. Raises AuditUnavailable: then nobody is."""
    amounts = np.bincount(report.statuses, minlength=len(WriteStatus)).tolist()
    counts = {status.name.lower(): amount for status, amount in zip(WriteStatus, amounts, strict=False) if amount}
    audit.append(
        audit.message("put", space, keys, bytes=report.bytes, counts=counts, detail=terms.durability.name.lower())
    )


def _new_blocks(core: Core, keys: KeyArray, terms: Terms, report: WriteReport) -> tuple[NDArray[np.intp], Terms]:
    """Positions to store: the first occurrence of every key that is not there (well enough) already.

    The terms returned are at least those of every copy that will be replaced: a new copy never weakens a promise.
    """
    prints = fingerprints(keys)
    complete = core.presence.complete  # before the probe: the fill may end meanwhile
    maybe = core.presence.probe(prints) >= 0
    unreadable = core.unreadable.among(keys)  # counts as missing; what was promised for it is in its record
    if complete and core.presence.complete and not maybe.any() and not unreadable.any():
        enough = np.zeros(len(keys), bool)
    else:
        try:
            present, records = core.locate(keys)
        except CatalogUnavailable as error:
            core.counters.add(catalog_errors=1)
            _refuse(report, np.arange(len(keys)), WriteStatus.FAILED, str(error))
            return np.zeros(0, np.intp), terms
        wanted = np.zeros(len(keys), RECORD)
        wanted["durability"], wanted["retention"] = terms.durability, terms.retention
        wanted["expires_s"] = terms.expires_s
        draining = np.zeros(len(keys), bool)
        draining[present] = [core.table.is_draining(segment) for segment in records["segment"][present].tolist()]
        enough = present & ~draining & satisfies(records, wanted, core.expiry_now())
        enough &= ~unreadable
        terms = _strengthened(terms, records[core.alive(present, records) & ~enough])
        unseen = enough & ~maybe  # published by another thread, which has not shown them yet
        show(core, keys[unseen], records[unseen], only_absent=True)
    report.statuses[enough] = WriteStatus.EXISTS
    buried = core.tenants.buried(keys)
    if buried.any():
        _refuse(report, np.flatnonzero(buried), WriteStatus.REJECTED, "it is being erased; store it again afterwards")
    if enough.any():
        core.touches.add(keys[enough], core.tick())
    first = np.zeros(len(keys), bool)
    first[np.unique(prints, return_index=True)[1]] = True  # equal fingerprints of different keys: never seen
    return np.flatnonzero(first & ~enough & ~buried), terms


def _strengthened(terms: Terms, replaced: RecordArray) -> Terms:
    """Terms that keep what was promised for the copies to be replaced."""
    if not len(replaced):
        return terms
    durability = Durability(max(int(replaced["durability"].max()), terms.durability))
    if terms.expires_s == 0 or (replaced["expires_s"] == 0).any():
        return dataclasses.replace(terms, durability=durability, retention=NO_TTL, expires_s=0)
    return dataclasses.replace(
        terms,
        durability=durability,
        retention=max(int(replaced["retention"].max()), terms.retention),
        expires_s=max(int(replaced["expires_s"].max()), terms.expires_s),
    )


def _settle_duplicates(keys: KeyArray, report: WriteReport) -> None:
    """Later occurrences of a key in one call share the outcome of the first; stored there means exists here."""
    names, first, inverse = np.unique(fingerprints(keys), return_index=True, return_inverse=True)
    if len(names) == len(keys):
        return
    outcome = report.statuses[first][inverse]
    later = np.ones(len(keys), bool)
    later[first] = False
    report.statuses[later] = np.where(outcome == WriteStatus.STORED, WriteStatus.EXISTS, outcome)[later]


def _admitted(
    core: Core, space: Keyspace, keys: KeyArray, todo: NDArray[np.intp], terms: Terms, report: WriteReport
) -> NDArray[np.intp]:
    if not len(todo):
        return todo
    request = AdmissionRequest(
        space.tenant, space.identity.model, keys[todo], space.layout.block_bytes, todo, terms.durability
    )
    admitted = np.ones(len(todo), bool)
    for places, why in space.admission.refusals(request):
        _refuse(report, todo[places], WriteStatus.REJECTED, why)
        admitted[places] = False
    return todo[admitted]


def _refuse(report: WriteReport, positions: NDArray[np.intp], status: WriteStatus, why: str) -> None:
    report.statuses[positions] = status
    report.reasons |= dict.fromkeys(positions.tolist(), why)


def _store(
    core: Core,
    space: Keyspace,
    keys: KeyArray,
    blocks: Sequence[Parts],
    todo: NDArray[np.intp],
    terms: Terms,
    report: WriteReport,
) -> None:
    """Encode and append one chunk, making room as often as that helps."""
    payloads, used = space.codec.encode(core, [blocks[position] for position in todo.tolist()])
    for _ in range(_ATTEMPTS_MAX):
        if terms.deadline is not None and time.monotonic() > terms.deadline:
            _refuse(report, todo, WriteStatus.LATE, "deadline passed before the write began")
            return
        batch = Batch(
            space.digest, np.ascontiguousarray(keys[todo]), payloads, space.layout.block_bytes, used, space.tenant_id,
            space.epoch, terms.durability, terms.retention, terms.created_s, terms.expires_s,
            terms.lease.token if terms.lease is not None else 0,
        )  # fmt: skip
        problem: OSError | None = None
        try:
            appended = core.writer.append(batch, deadline=terms.deadline)
        except OSError as error:
            left, problem = np.arange(len(todo)), error
        except CatalogError as error:
            _refuse(report, todo, WriteStatus.FAILED, str(error))
            return
        else:
            left = _finish(core, space, keys, blocks, todo, batch, appended, terms, report)
            problem = appended.errors[int(left[0])] if len(left) else None
        if problem is None:
            return
        need = sum(record_bytes(sum(part.nbytes for part in payloads[place])) for place in left.tolist())
        with core.pins.held(keys):
            made = _made_room(core, problem, need, space.tenant_id)
        if not made:
            status = WriteStatus.REJECTED if problem.errno in _FULL else WriteStatus.FAILED
            _refuse(report, todo[left], status, str(problem))
            return
        todo, used = todo[left], used[left]
        payloads = [payloads[place] for place in left.tolist()]
    _refuse(report, todo, WriteStatus.REJECTED, "no room could be made; blocks of other sessions came first")


def _made_room(core: Core, problem: OSError, need: int, tenant: bytes) -> bool:
    if isinstance(problem, NoSpace):
        wanted = max(problem.need, min(need, core.writer.segment_bytes))
        if core.reclaimer.make_room(wanted, tenant=tenant):
            return True
        flush_pending(core)  # a segment with publishes on their way cannot be given up before
        return core.reclaimer.make_room(wanted, tenant=tenant)
    if problem.errno in _FULL:  # the file system is full although the capacity is not: give some of ours back
        core.counters.add(file_system_full=1)
        made = core.reclaimer.make_room(min(need, core.writer.segment_bytes), tenant=tenant, force=True)
        core.reserve_catalog_space()
        return made
    return False


def _finish(
    core: Core,
    space: Keyspace,
    keys: KeyArray,
    blocks: Sequence[Parts],
    todo: NDArray[np.intp],
    batch: Batch,
    appended: Appended,
    terms: Terms,
    report: WriteReport,
) -> NDArray[np.intp]:
    """Sync and publish what was appended. Returns the places (in `todo`) that failed for want of space."""
    deferred = False
    try:
        written = appended.written.copy()
        late = np.flatnonzero(appended.late)
        _refuse(report, todo[late], WriteStatus.LATE, "not written by the deadline")
        full = [place for place, error in appended.errors.items() if error.errno in _FULL]
        for place, error in appended.errors.items():
            _refuse(report, todo[place : place + 1], WriteStatus.FAILED, f"write failed: {error}")
        if terms.durability >= Durability.SESSION:
            _sync(appended, written, todo, terms, report)
        if terms.deadline is not None and time.monotonic() > terms.deadline:
            _refuse(report, todo[written], WriteStatus.LATE, "not durable by the deadline")
            written[:] = False
        done = np.flatnonzero(written)
        if len(done):
            deferred = _publish(core, space, keys, todo, batch, appended, done, terms, report)
            _remember(core, space, keys, blocks, todo[done], terms.expires_s, report)
    finally:
        if not deferred:
            for opened in appended.segments:
                core.writer.finish(opened)
    return np.array(sorted(full), np.intp)


def _sync(
    appended: Appended, written: NDArray[np.bool_], todo: NDArray[np.intp], terms: Terms, report: WriteReport
) -> None:
    for opened in appended.segments:
        try:
            if opened.sync(terms.deadline):
                continue
            status, why = WriteStatus.LATE, "not durable by the deadline"
        except OSError as error:
            status, why = WriteStatus.FAILED, f"fdatasync failed: {error}"
        lost = written & (appended.records["segment"] == np.void(opened.segment))
        _refuse(report, todo[lost], status, why)
        written &= ~lost


def _publish(
    core: Core,
    space: Keyspace,
    keys: KeyArray,
    todo: NDArray[np.intp],
    batch: Batch,
    appended: Appended,
    done: NDArray[np.intp],
    terms: Terms,
    report: WriteReport,
) -> bool:
    """Make records visible; True if finishing their segments is left to the deferred commit."""
    records, names = appended.records[done], np.ascontiguousarray(keys[todo[done]])
    deferred = terms.durability == Durability.EPHEMERAL and not core.sharing.shared
    lease = None if deferred else terms.lease  # else checked here: what is acknowledged stays when the lease ends
    publication = Publication(space.digest, names, records, appended.segments, lease)
    if core.unreadable:
        try:
            core.unreadable.give_way(names, core.index)
        except CatalogError as error:
            _refuse(report, todo[done], WriteStatus.FAILED, str(error))
            return False
    if deferred:
        if terms.lease is not None and not core.control.check(terms.lease):
            raise StaleFence(f"lease {terms.lease.token} was lost during the write; nothing was published")
        core.pending.add(publication, key_list(names), records)
        visible = np.ones(len(done), bool)
    else:
        try:
            visible = commit(core, publication)
        except CatalogError as error:
            _refuse(report, todo[done], WriteStatus.FAILED, str(error))
            return False
    show(core, names[visible], records[visible])
    if not visible.all():  # published by another thread, which may not have shown them yet
        present, theirs = core.locate(names[~visible])
        show(core, names[~visible][present], theirs[present], only_absent=True)
    report.statuses[todo[done]] = np.where(visible, WriteStatus.STORED, WriteStatus.EXISTS)
    if report.reasons:  # of an attempt before room was made
        for position in todo[done].tolist():
            report.reasons.pop(position, None)
    report.stored_bytes += int(record_bytes_array(records["stored_bytes"])[visible].sum())
    return deferred


def _remember(
    core: Core,
    space: Keyspace,
    keys: KeyArray,
    blocks: Sequence[Parts],
    positions: NDArray[np.intp],
    expires_s: int,
    report: WriteReport,
) -> None:
    """What was just written is likely to be read next: keep it in the DRAM tier while the budget allows."""
    if not core.pool.budget_bytes:
        return
    size = space.layout.block_bytes
    for position in positions.tolist():
        if report.statuses[position] != WriteStatus.STORED:
            continue
        slot = core.pool.reserve(size, space.tenant_id)
        if slot is None:
            return
        copy_parts(blocks[position], [slot.view])
        core.pool.publish(slot, keys[position].tobytes(), space.digest, expires_s=expires_s)
