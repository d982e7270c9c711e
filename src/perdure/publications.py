"""Published prefixes: blocks of one tenant that other tenants may read, by an explicit, recorded, revocable decision.

Contract
- Published is an exact range, the first blocks of one token sequence of one keyspace, and it is a copy: under a tenant
  of its own, `published/ID`, with names and keys of its own, encrypted where the publisher's blocks are. Nobody gets a
  key, secret or name of the publisher, and nothing else of it is reachable.
- A reader asks under its own names, in a keyspace of the same identity (model, weights, layout, adapters, salt). What
  it has stored itself comes first. A published block is never mapped: every read of it is a call of this process.
- Nothing is readable before its record is in the audit log. `unpublish` takes effect at once, then destroys the key and
  removes the blocks. What a process left half done is ended by the next one that opens the store.
- The tokens are kept, to work out the readers' names from: under the publication's key where it has one.
- One process per directory: where several share one, the others would not see the end of a publication in time.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from perdure import keys as naming
from perdure import limits, reading
from perdure.admission import Admissions
from perdure.aliases import NOWHERE, Aliases, Part
from perdure.buffers import Parts
from perdure.catalog.api import KeyArray, SegmentState, fingerprints
from perdure.core import Core
from perdure.errors import CatalogError, InvalidArgument, KeyUnavailable, PerdureError, ReadOnlyStore
from perdure.governance import actor
from perdure.governance.audit import Event
from perdure.inspect import keyspaces, register
from perdure.keyspace import Keyspace, check_seconds
from perdure.publication_form import (
    COPYING,
    ENDED,
    PUBLISHED,
    Fields,
    Publication,
    digest_of,
    hashes_in,
    identity_of,
    readers_of,
    seed_of,
    text_of,
)
from perdure.publication_verbs import EVERYONE, PublicationVerbs
from perdure.reports import ReadReport
from perdure.segments.landing import BlockStatus
from perdure.tenants import KEYSPACES

_LOG = logging.getLogger("perdure.publications")
_NAMESPACE: Final = "publication"
_TENANT: Final = "published/"
_COPY_BYTES: Final = 16 * limits.MIB
_SHOWN: Final = ("name", "tenant", "model", "readers", "blocks", "tokens", "created_s", "expires_s", "by", "encrypted")


class Publications:
    """Of one store. Thread-safe. permits: whether a tenant may have published prefixes now (policy's say)."""

    def __init__(self, core: Core, check: Callable[[], None]):
        self._core, self._check = core, check
        self._permits: Callable[[str], bool] = lambda tenant: True
        self._admissions = Admissions("always", core.clock.boottime, core.kept_s)
        self._all: dict[bytes, Publication] = {}
        self._numbers = 0
        self._tables: dict[bytes, Aliases | None] = {}
        self._lock = self.beginning = threading.RLock()  # who holds it sees all that will ever be published of before
        self._encrypted: set[bytes] = set()
        if core.segments.keys is not None:
            others = core.segments.keys.encrypts
            core.segments.keys.encrypts = lambda tenant: tenant in self._encrypted or others(tenant)
        for name, raw in core.control.items(_NAMESPACE):
            self._know(name, json.loads(raw), raw)
        for one in list(self._all.values()) if not core.read_only else ():
            if one.entry["state"] != PUBLISHED:
                with self._later(one):
                    self._end(one)

    def _know(self, name: bytes, entry: Fields, raw: bytes) -> Publication:
        core, identity = self._core, identity_of(entry["fields"])
        space = Keyspace(core, self._check, _TENANT + name.hex(), identity, "auto", self._admissions)
        space.audited = False  # recorded as what its readers read
        if entry["encrypted"]:
            self._encrypted.add(space.tenant_id)
        self._numbers += 1
        made = self._all[name] = Publication(self._numbers, name, entry, raw, space)
        return made

    def __bool__(self) -> bool:
        return bool(self._all)

    def names_of(self, tenant: str) -> list[str]:
        """What is published of a tenant, or about to be."""
        return [one.entry["name"] for one in list(self._all.values()) if one.entry["tenant"] == tenant]

    def permit(self, permits: Callable[[str], bool]) -> None:
        """From now on only what is published of tenants that `permits` names can be read."""
        with self._lock:
            self._permits = permits
            self._tables = {}

    # --- verbs
    def ask(self, verb: str, fields: Fields) -> Fields:
        """verb "publish" {"keyspace", "tokens" or "hashes", "name", "readers", "ttl_s"}, "unpublish" {"name"},
        "published" {}, or {"tenants"}: only what concerns these. Fields may come from anywhere, and are checked."""
        if verb == "publish":
            return self._publish(fields)
        if verb == "unpublish":
            return self._unpublish(text_of(fields, "name"))
        if verb != "published":
            raise InvalidArgument(f"{verb!r}: must be publish, unpublish or published")
        told = [self._shown(one) for one in list(self._all.values()) if one.entry["state"] == PUBLISHED]
        tenants = fields.get("tenants")
        if isinstance(tenants, list):
            told = [one for one in told if one["tenant"] in tenants or {*one["readers"]} & {EVERYONE, *tenants}]
        return {"publications": told}

    def tenant_of(self, verb: str, fields: Fields) -> str:
        """Whose prefix a verb is about; "": nobody's."""
        if verb == "publish":
            raw = self._core.control.get(KEYSPACES, digest_of(fields))
            return "" if raw is None else str(json.loads(raw)["tenant"])
        one = self._named(text_of(fields, "name"))
        return "" if one is None else str(one.entry["tenant"])

    def _shown(self, one: Publication) -> Fields:
        core, present = self._core, 0
        self._load(one)
        if one.names is not None:
            present = int(np.count_nonzero(reading.present_mask(core, one.names)))
        return {"id": one.id.hex(), "present": present} | {name: one.entry[name] for name in _SHOWN}

    def _named(self, name: str) -> Publication | None:
        with self._lock:
            fit = (one for one in self._all.values() if name in (one.entry["name"], one.id.hex()))
            return next(fit, None)

    # --- publish
    def _publish(self, f: Fields) -> Fields:
        self._writable()
        core, name, readers = self._core, text_of(f, "name"), readers_of(f)
        ttl_s = f.get("ttl_s")
        if ttl_s is not None:
            check_seconds(ttl_s, "ttl_s", limits.ttl_s_max)
        known = keyspaces(core).get(digest_of(f))
        if known is None or known["tenant"].startswith(_TENANT):
            raise InvalidArgument(f"publish: no tenant has a keyspace {digest_of(f).hex()}; see `perdure status`")
        source = Keyspace(core, self._check, known["tenant"], identity_of(known["fields"]), "auto", self._admissions)
        if source.digest != digest_of(f):
            raise InvalidArgument("publish: the names of this keyspace are not in use any more; store the prefix again")
        source.audited = False
        hashed, seed = f.get("hashes") is not None, seed_of(f, source.layout.block_tokens)
        blocks = len(seed) // (4 * source.layout.block_tokens) if not hashed else len(hashes_in(seed))
        keys = core.segments.keys
        now = core.steady.now()
        entry = {
            "state": COPYING, "name": name, "tenant": source.tenant, "tenant_id": source.tenant_id.hex(),
            "model": source.identity.model, "fields": known["fields"], "readers": readers, "blocks": blocks,
            "tokens": blocks * source.layout.block_tokens, "hashed": hashed, "seed": "", "created_s": int(now),
            "expires_s": int(now + ttl_s) if ttl_s else 0, "by": actor.current().who or "local",
            "encrypted": keys is not None and keys.encrypts(source.tenant_id),
        }  # fmt: skip
        if core.audit is not None:
            core.audit.guard()
        one = self._begin(entry)
        try:
            one.seed = seed
            one.names = one.names_in(one.space)
            nbytes = self._copy(source, one, ttl_s)
            self._publish_now(source, one, nbytes)
        except BaseException:
            with self._later(one):
                self._end(one)
            raise
        return self._shown(one)

    def _begin(self, entry: Fields) -> Publication:
        """Remembered before anything is copied, so that nothing is left behind by who dies meanwhile."""
        with self._lock:
            if self._named(entry["name"]) is not None:
                raise InvalidArgument(f"{entry['name']!r} is published already; unpublish it first, or choose a name")
            if len(self._all) >= limits.publications_entries_max:
                raise InvalidArgument(f"{limits.publications_entries_max} prefixes are published; unpublish some")
            made, raw = secrets.token_bytes(limits.id_bytes), json.dumps(entry).encode()
            if not self._core.control.compare_and_set(_NAMESPACE, made, None, raw):
                raise CatalogError("the publication could not be remembered; try again")
            one = self._know(made, entry, raw)
        register(self._core, one.space)
        return one

    def _copy(self, source: Keyspace, one: Publication, ttl_s: float | None) -> int:
        """Bytes. Raises InvalidArgument if a block cannot be read."""
        assert one.names is not None
        names, size = one.names_in(source), source.layout.block_bytes
        step = max(1, min(limits.batch_blocks_max, _COPY_BYTES // size))
        for at in range(0, len(names), step):
            part = names[at : at + step]
            memory = bytearray(len(part) * size)
            found = source.read(part, memory)
            if found.usable < len(part):
                place = at + found.usable
                status = BlockStatus(found.statuses[found.usable]).name.lower()
                raise InvalidArgument(f"publish: block {place} of {len(names)} is {status}; store the prefix first")
            written = one.space.write(one.names[at : at + step], memory, ttl_s=ttl_s)
            if not written.durable:
                why = next(iter(written.reasons.values()), "not stored")
                raise CatalogError(f"publish: block {at} and following could not be copied: {why}")
        return len(names) * size

    def _publish_now(self, source: Keyspace, one: Publication, nbytes: int) -> None:
        """Recorded, then readable. Raises AuditUnavailable, KeyUnavailable, CatalogError."""
        core = self._core
        assert one.seed is not None
        seed = one.seed
        if one.entry["encrypted"]:
            assert core.segments.keys is not None
            seed = core.segments.keys.seal(one.space.tenant_id, seed)
        if core.audit is not None:
            event = core.audit.message("publish", source, one.names_in(source), bytes=nbytes)
            event.object, event.detail = one.id.hex(), f"for {', '.join(one.entry['readers'])}"
            core.audit.append(event, durable=True)
        self._set(one, state=PUBLISHED, seed=seed.hex())

    def _set(self, one: Publication, **changes: Any) -> None:
        """Raises CatalogError if it has changed meanwhile."""
        entry = one.entry | changes
        raw = json.dumps(entry).encode()
        with self._lock:
            if not self._core.control.compare_and_set(_NAMESPACE, one.id, one.raw, raw):
                raise CatalogError(f"publication {one.id.hex()} was changed meanwhile; look, and try again")
            one.entry, one.raw, self._tables = entry, raw, {}

    # --- end
    def _unpublish(self, name: str) -> Fields:
        self._writable()
        if self._core.audit is not None:
            self._core.audit.guard()
        with self._lock:
            one = self._named(name)
            if one is None:
                raise InvalidArgument(f"unpublish: nothing is published as {name!r}; see `perdure published`")
            if one.entry["state"] == COPYING:
                raise InvalidArgument(f"unpublish: {name!r} is not published yet; wait for that")
            told = self._shown(one)
            self._set(one, state=ENDED)
        self._end(one)
        return told

    def _end(self, one: Publication) -> None:
        """Records first: without the seed, which ends with the key, nobody knows their names. Idempotent.

        Raises AuditUnavailable, KeyUnavailable, CatalogError: then it goes on when the store is opened again."""
        core, tenant_id = self._core, one.space.tenant_id
        self._load(one)
        if one.names is not None:
            core.pending.remove(naming.key_list(one.names))
            core.index.remove(one.names)
            core.presence.remove(fingerprints(one.names))
            core.pool.drop(one.names)
        self._shred(one)
        if one.entry["encrypted"] and core.segments.keys is not None:
            try:
                core.segments.keys.destroy_tenant(tenant_id)
            except OSError as error:
                raise KeyUnavailable(
                    f"the key of publication {one.id.hex()} could not be destroyed: {error}"
                ) from error
        known = core.control.get(KEYSPACES, one.space.digest)
        if known is not None:
            core.control.compare_and_set(KEYSPACES, one.space.digest, known, None)
        if core.audit is not None:
            outcome = "never completed" if one.entry["state"] == COPYING else ""
            event = Event("unpublish", tenant=one.entry["tenant"], object=one.id.hex(), outcome=outcome)
            event.blocks = one.entry["blocks"]
            core.audit.append(event, durable=True)
        core.control.compare_and_set(_NAMESPACE, one.id, one.raw, None)
        with self._lock:
            self._all.pop(one.id, None)
            self._tables = {}

    def _shred(self, one: Publication) -> None:
        """The copies themselves. Raises CatalogError."""
        core, tenant_id = self._core, one.space.tenant_id
        for opened in core.writer.open_segments():
            if opened.kind[0] == tenant_id:
                core.writer.retire(opened)
        try:
            for record in core.table.all():
                if record.tenant == tenant_id and record.state is not SegmentState.OPEN:
                    core.reclaimer.shred(record)
        except OSError as error:
            raise CatalogError(f"the copies of publication {one.id.hex()} could not be removed: {error}") from error

    def _later(self, one: Publication) -> suppress:
        _LOG.info("publication %s is being ended", one.id.hex())
        return suppress(PerdureError)

    # --- reading
    def prepare(self, space: Keyspace) -> None:
        """Before a keyspace is used: so that nothing it asks for waits for a key service. What has no key now is not
        found until a keyspace is opened again."""
        if space.reads_published and not space.tenant.startswith(_TENANT):
            for one in list(self._all.values()):
                self._load(one)
            with self._lock:
                self._tables.pop(space.digest, None)

    def _load(self, one: Publication) -> None:
        if one.seed is not None or not one.entry["seed"]:
            return
        seed = bytes.fromhex(one.entry["seed"])
        if one.entry["encrypted"]:
            keys = self._core.segments.keys
            if keys is None:
                return
            try:
                seed = keys.unseal(one.space.tenant_id, seed)
            except KeyUnavailable as error:
                _LOG.warning("publication %s cannot be used: %s", one.id.hex(), error)
                return
        one.seed = seed
        one.names = one.names_in(one.space)

    def _table(self, space: Keyspace) -> Aliases | None:
        if not space.reads_published:
            return None
        try:
            return self._tables[space.digest]
        except KeyError:
            pass
        with self._lock:
            parts = [
                Part(one.number, one.names_in(space), one.names)
                for one in self._all.values() if one.names is not None and self._readable(one, space)
            ]  # fmt: skip
            table = self._tables[space.digest] = Aliases(parts) if parts else None
            return table

    def _readable(self, one: Publication, space: Keyspace) -> bool:
        entry, expired = one.entry, 0 < one.entry["expires_s"] <= self._core.expiry_now()
        return (
            entry["state"] == PUBLISHED and not expired and self._permits(entry["tenant"])
            and bool({EVERYONE, space.tenant} & {*entry["readers"]})
            and space.identity.fields() == one.space.identity.fields()
        )  # fmt: skip

    def resolved(self, space: Keyspace, keys: KeyArray) -> KeyArray:
        """What to look up for `keys`: of published blocks the copies, where the tenant has none of its own."""
        table = self._table(space)
        if table is None or not len(keys):
            return keys
        rows = self._rows(table, keys)
        chosen = rows != NOWHERE
        if not chosen.any():
            return keys
        found = keys.copy()
        found[chosen] = table.stored[rows[chosen]]
        return found

    def elsewhere(self, space: Keyspace, keys: KeyArray) -> list[int]:
        """Positions of the blocks that can only be had as published."""
        table = self._table(space)
        return [] if table is None or not len(keys) else np.flatnonzero(self._rows(table, keys) != NOWHERE).tolist()

    def _rows(self, table: Aliases, keys: KeyArray) -> NDArray[np.intp]:
        rows = table.rows(keys)
        chosen = np.flatnonzero(rows != NOWHERE)
        if len(chosen):
            core, asked = self._core, keys[chosen]
            known = (
                core.presence.visible(fingerprints(asked), core.expiry_now())
                if core.presence.complete
                else (reading.present_mask(core, asked))
            )
            rows[chosen[known]] = NOWHERE
        return rows

    def deliver(
        self, space: Keyspace, keys: KeyArray, destinations: Sequence[Parts], positions: list[int],
        deadline: float | None, direct: bool, report: ReadReport,
    ) -> None:  # fmt: skip
        """Read the blocks at `positions` as published, into the report. deadline: monotonic seconds."""
        table = self._table(space)
        if table is None:
            return
        rows = table.rows(keys[positions])
        for number, part in _groups(table, rows):
            one = next((one for one in list(self._all.values()) if one.number == number), None)
            if one is None or one.entry["state"] != PUBLISHED:
                continue
            places = [positions[at] for at in part]
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            got = reading.read(
                self._core, one.space, table.stored[rows[part]], [destinations[at] for at in places],
                deadline_s=left_s, direct=direct,
            )  # fmt: skip
            report.statuses[places] = got.statuses
            report.from_memory += got.from_memory
            report.problems |= {places[at]: why for at, why in got.problems.items()}
            report.settle_by(got.wait_settled)
            if self._core.audit is not None:
                event = self._core.audit.message("read-published", space, keys[places], bytes=got.bytes)
                event.object = one.id.hex()
                self._core.audit.note(event)

    def _writable(self) -> None:
        self._check()
        if self._core.read_only:
            raise ReadOnlyStore(f"{self._core.path} was opened read-only; open it without read_only=True")
        if self._core.sharing.shared:
            raise InvalidArgument("publish: not built for stores that several processes share; leave `catalog` out")


def _groups(table: Aliases, rows: NDArray[np.intp]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """(number of a publication, places of its rows)."""
    numbers = np.where(rows == NOWHERE, 0, table.numbers[rows])
    for number in np.unique(numbers[numbers > 0]).tolist():
        yield number, np.flatnonzero(numbers == number)


class Publishing(PublicationVerbs):
    """The part of `Store` that publishes."""

    _core: Core
    _check: Callable[[], None]

    def publication_ask(self, verb: str, fields: Fields) -> Fields:
        self._check()
        told: Fields = self._core.publications.ask(verb, fields)
        return told
