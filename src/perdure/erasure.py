"""Erasing: a tenant, or blocks of one, so that nobody can read them again, and a signed receipt that says so.

Contract
- `erase` returns when what it concerns cannot be read any more, here and after any crash. A tenant's key and the secret
  of its names are destroyed, its epoch has passed; blocks are buried. What lies on the disk is given up behind serving,
  by one thread, tried again until it is done, also by whoever opens the store after a crash.
- Blocks that share a segment with others: those are copied to a segment with a key of its own, and the old key and file
  destroyed. Every copy of the blocks counts, those in the garbage of a segment too.
- Recorded before it begins, and when it is done; if that cannot be, nothing is erased (AuditUnavailable).
- Where many hosts share the store, a tenant's epoch has passed on all of them (`perdure.epochs`) before its keys are
  destroyed and `erase` returns. One host at a time goes on with it, under a lease; any other does if that one dies.
- A hold beats it: then the order waits, and is carried out when the hold is taken off.
- Never: a block that was not named; an order undone by a restart, a rebuild or a full disk.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import numpy as np

from perdure import limits
from perdure.catalog.api import KeyArray, SegmentRecord, SegmentState, as_keys, fingerprints
from perdure.core import Core
from perdure.epochs import withdraw_tenant
from perdure.erasure_hosts import check_possible, left_open, let_moves_end
from perdure.erasure_orders import FOLDER, Order, checked, load_orders
from perdure.errors import InvalidArgument, PerdureError
from perdure.governance import receipts
from perdure.governance.audit import Event
from perdure.governance.audit_files import signer_of
from perdure.governance.audit_look import prove
from perdure.keeper import settle_unsealed
from perdure.keys import key_domain, key_list
from perdure.pool.wiping import wipe, withdraw
from perdure.publishing import flush_pending
from perdure.segments.format import NO_CIPHER, record_bytes_array
from perdure.segments.reclaim import Shredded
from perdure.segments.recovery import entry_keys
from perdure.tenants import KEYSPACES, cannot_be_read

_SETTLE_S: Final = 0.02


class Erasures:
    """Of one store. Thread-safe."""

    def __init__(self, core: Core, resolve: Callable[[Order], KeyArray], end_sessions: Callable[[Order], None]):
        """resolve: the blocks that an order is about. end_sessions: those that it is about are over."""
        self._core = core
        self._lock = self.beginning = threading.RLock()  # nothing begins while somebody else holds it
        self._orders: dict[str, Order] = {}
        self._keys: dict[str, KeyArray] = {}  # of those that have begun, but for tenants
        self._begun: set[str] = set()
        self._ready = False
        self._done = threading.Condition()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.last_error: str | None = None
        self.resolve, self.end_sessions = resolve, end_sessions
        self.held: Callable[[Order], str] = lambda order: ""
        core.reclaimer.spared = self._rewriting

    # --- asking
    def erase(
        self, kind: str, tenant: str, *, target: str = "", subject: str = "", keys: Iterable[bytes] = ()
    ) -> dict[str, Any]:
        """Returns the order's state, see `state_of`. Raises InvalidArgument, AuditUnavailable, CatalogError, OSError,
        KeyUnavailable; after the last two it goes on by itself."""
        core, audit = self._core, self._core.audit
        check_possible(core, kind)
        with self._lock, core.publications.beginning:
            published = core.publications.names_of(tenant)
            if published:
                raise InvalidArgument(
                    f"erase: {tenant!r} has published {', '.join(published)}, which are copies; unpublish them first"
                )
            tenant_id = core.tenants.id_of(tenant)
            order = Order(
                secrets.token_hex(8), kind, tenant, tenant_id.hex(), core.steady.now(), target=target, subject=subject,
                keys=[key.hex() for key in keys],
                epoch=core.tenants.epoch(tenant_id) + 1 if kind == "tenant" else 0,
            )  # fmt: skip
            held = self.held(order)
            found = None if held or kind == "tenant" else self.resolve(order)  # before anything says that it is erased
            if found is not None and not len(found):
                raise InvalidArgument(f"erase: {tenant!r} has nothing of this {kind}; nothing was erased")
            if held:
                order.waited = True
            else:
                self._survey(order, found)
            if audit is not None:
                audit.guard()
                event = Event("erase", tenant=tenant, object=order.id, outcome="held" if held else "", detail=kind)
                event.blocks = order.blocks
                audit.append(event, durable=True)
                order.who = event.who
            core.files.write_once(f"{FOLDER}/{order.id}.order", msgspec.json.encode(order))
            self._orders[order.id] = order
            try:
                if not held:
                    self._begin(order, found)
            finally:  # what fails here is tried again, like everything that comes after it
                self._start()
        return self.state_of(order.id)

    def _survey(self, order: Order, keys: KeyArray | None) -> None:
        """What is there of it now."""
        core, tenant, keystore = self._core, bytes.fromhex(order.tenant_id), self._core.segments.keys
        if keys is not None:
            present, records = core.locate(keys)
            order.blocks, order.bytes = len(keys), int(records["block_bytes"][present].sum())
            order.keyed = bool(present.any()) and bool((records["cipher"][present] != NO_CIPHER).all())
        elif order.kind == "tenant":
            usage = core.index.usage().get(tenant)
            if usage is not None:
                order.blocks, order.bytes = usage.blocks, usage.block_bytes
            own = [one.segment for one in core.table.all() if one.tenant == tenant]
            order.keyed = bool(own) and keystore is not None and all(map(keystore.has, own))

    def state_of(self, order: str) -> dict[str, Any]:
        """{"id", "state"}: "held": it waits for a hold's end; "unreadable": what is on the disk is being given up;
        "erased", with "receipt"."""
        if checked(order) not in self._orders and self._core.sharing.shared:
            self.look()
        known = self._orders.get(order)
        if known is None or self._core.read_only:
            with contextlib.suppress(FileNotFoundError):
                receipt = self._core.files.read(f"{FOLDER}/{order}.receipt")
                return {"id": order, "state": "erased", "receipt": msgspec.json.decode(receipt)}
        if known is None:
            raise InvalidArgument(f"erasure {order!r}: there is none with this id; see `perdure lifecycle`")
        why = (self.last_error or "") if order in self._begun else self.why_waiting(known) or self.last_error or ""
        told = {"id": order, "state": "unreadable" if order in self._begun else "held", "kind": known.kind}
        return told | {"tenant": known.tenant, "at_s": known.at_s, "why": why}

    def waiting(self) -> list[dict[str, Any]]:
        """States of all that are not done."""
        return [self.state_of(order) for order in list(self._orders)]

    def why_waiting(self, order: Order) -> str:
        """Why an order must not begin yet; "": it may."""
        published = self._core.publications.names_of(order.tenant)
        return self.held(order) or (f"published: {', '.join(published)}; unpublish it" if published else "")

    def wait(self, order: str, timeout_s: float) -> dict[str, Any]:
        """The state once it is erased, or held, or after `timeout_s`."""
        until = time.monotonic() + timeout_s
        with self._done:
            while (told := self.state_of(order))["state"] == "unreadable" and time.monotonic() < until:
                self._done.wait(min(1.0, max(0.0, until - time.monotonic())))
        return told

    # --- after opening
    def load(self) -> None:
        """Before anything is served: what was begun is gone, and what a crash has cut off begins again.

        Raises StorePathError."""
        try:
            names = load_orders(self._core, self._orders, self._begun)
        except OSError as error:
            raise cannot_be_read(self._core.path, FOLDER, error) from error
        for order in () if self._core.sharing.shared else self._orders.values():  # there it waits for others
            known = f"{order.id}.keys" in names
            begun = self._core.tenants.epoch(bytes.fromhex(order.tenant_id)) >= order.epoch > 0
            if known or begun:
                with contextlib.suppress(OSError, PerdureError):  # tried again
                    keys = self._core.files.read(f"{FOLDER}/{order.id}.keys") if known else b""
                    self._begin(order, as_keys([keys]) if known else None)

    def look(self) -> None:
        """Where many share the store: what others were asked for, and what they have done. Raises OSError."""
        names = set(load_orders(self._core, self._orders, self._begun))
        for order in [one for one in self._orders.values() if f"{one.id}.receipt" in names]:
            self._forget(order)
        self._start()

    def go_on(self) -> None:
        """The store is ready: begin what may, and do the rest."""
        self._ready = True
        self._start()

    def look_again(self) -> None:
        """What an order has waited for has ended."""
        self._start()

    # --- beginning: what is unreadable at once
    def _begin(self, order: Order, keys: KeyArray | None) -> None:
        """Idempotent. Raises OSError, KeyUnavailable: it holds in this process all the same."""
        core, tenant = self._core, bytes.fromhex(order.tenant_id)
        if keys is not None:
            if order.id not in self._keys:
                self._keys[order.id] = keys
                core.tenants.bury(keys)
            self._hide(keys)
            if core.read_only:
                return
            core.files.write_once(f"{FOLDER}/{order.id}.keys", keys.tobytes())
            self.end_sessions(order)
        elif not core.read_only:  # a reader knows by the epoch
            old = [one.segment for one in core.table.all() if one.tenant == tenant]
            passed = core.tenants.epoch(tenant) >= order.epoch
            core.tenants.end_epoch(tenant, order.epoch, order.id)
            if core.sharing.epochs is not None:  # before its keys go, so that nobody makes new ones
                core.sharing.epochs.tell()
                order.hosts = list(core.sharing.epochs.wait(self._stop))
            self._destroy_keys(tenant, order)
            if core.sharing.shared:
                core.files.write_once(f"{FOLDER}/{order.id}.begun", msgspec.json.encode(order))
            if not passed:  # else segments of what came after are among them
                core.presence.remove_segments(list(map(core.table.ordinal, old)))
            withdraw_tenant(core, tenant)
        self._begun.add(order.id)

    def _destroy_keys(self, tenant: bytes, order: Order) -> None:
        keystore = self._core.segments.keys
        if keystore is not None:
            for epoch in range(order.epoch):
                keystore.destroy_tenant(key_domain(tenant, epoch))

    def _hide(self, keys: KeyArray) -> None:
        names = set(key_list(keys))
        self._core.presence.remove(fingerprints(keys))
        withdraw(self._core.pool, lambda slot: slot.key in names)

    # --- the rest, behind serving
    def _start(self) -> None:
        with self._lock:
            self._wake.set()
            if self._ready and self._orders and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._work, name="perdure-erase", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        wait_s = limits.background_retry_s
        while not self._stop.is_set():
            self._wake.clear()
            failed = False
            for order in list(self._orders.values()):
                try:
                    self._advance(order)
                except (PerdureError, OSError) as error:
                    failed, self.last_error = True, str(error)
                    self._core.counters.add(erasure_errors=1)
                if self._stop.is_set():
                    return
            with self._lock:
                if not failed and not self._wake.is_set():
                    self.last_error, self._thread = None, None
                    return
            self._wake.wait(wait_s)
            wait_s = min(2 * wait_s, limits.recency_flush_s) if failed else limits.background_retry_s

    def _advance(self, order: Order) -> None:
        with self._core.sharing.sole(b"erase" + bytes.fromhex(order.tenant_id)) as mine:
            if not mine:  # another host is at it; `look` comes back to it
                return
            if self._core.sharing.shared and f"{order.id}.receipt" in self._core.files.list(FOLDER):
                self._forget(order)
                return
            self._carry_out(order)

    def _carry_out(self, order: Order) -> None:
        with self._lock, self._core.publications.beginning:
            if order.id not in self._begun:
                if self.why_waiting(order):
                    return
                keys = self._keys.get(order.id)
                if keys is None and order.kind != "tenant":
                    keys = self.resolve(order)
                if order.waited:
                    self._survey(order, keys)
                    self._core.files.write_once(f"{FOLDER}/{order.id}.survey", msgspec.json.encode(order))
                self._begin(order, keys)
        self._finish(order)

    def _finish(self, order: Order) -> None:
        core, tenant, told = self._core, bytes.fromhex(order.tenant_id), Shredded()
        until = time.monotonic() + limits.erase_settle_s
        while not core.tenants.settled():  # calls that began before it did
            self._pause(until, "calls from before it are still running")
        if core.cold is not None and not core.cold.promoter.forget(tenant, limits.erase_settle_s):
            raise OSError("blocks are on their way from the object store to the disk; tried again")
        if core.sharing.shared:
            let_moves_end(core)
        self._seal(tenant, order, until)
        keys = self._keys.get(order.id)
        for record in [one for one in core.table.all() if one.tenant == tenant]:
            if self._stop.is_set():
                return
            done = self._give_up(record, order) if keys is None else self._rewrite(record, keys)
            if done is not None:
                told.add(done)
        if keys is None:
            self.end_sessions(order)
            self._forget_spaces(order)
            withdraw_tenant(core, tenant)
            if core.sharing.shared:  # a call that was under way elsewhere may have made one meanwhile
                self._destroy_keys(tenant, order)
        else:
            core.index.remove(keys)
            self._hide(keys)
        if core.cold is not None and not order.keyed:  # objects of segments that were given up before, or just now
            core.cold.tier.collect_all()
        wipe(core.pool, tenant)
        core.scratch.wipe()
        self._settle(order, told)

    def _rewriting(self, record: SegmentRecord) -> bool:
        """What is left in it is copied to another segment, not dropped."""
        return any(one.tenant_id == record.tenant.hex() and one.kind != "tenant" for one in list(self._orders.values()))

    def _pause(self, until: float, why: str) -> None:
        if self._stop.wait(_SETTLE_S) or time.monotonic() > until:
            raise OSError(f"{why}; tried again")

    def _seal(self, tenant: bytes, order: Order, until: float) -> None:
        """Segments that were being written reach their end. Raises OSError."""
        core = self._core
        flush_pending(core)
        mine = [one for one in core.writer.open_segments() if one.kind[0] == tenant]
        mine = [one for one in mine if not order.epoch or one.kind[1] < order.epoch]
        for one in mine:
            core.writer.retire(one)
        while any(one.users for one in mine) or self._left_open(tenant, order.epoch):
            self._pause(until, "segments are still being sealed")
            flush_pending(core)
            settle_unsealed(core)

    def _left_open(self, tenant: bytes, epoch: int) -> bool:
        """Whether segments of this process count as open that nothing is appended to: being sealed, or it failed; or
        others are writing some."""
        core = self._core
        if core.sharing.shared and left_open(core, tenant, epoch):
            return True
        open_now = {one.segment for one in core.writer.open_segments()}
        ours = [one for one in core.table.all() if one.tenant == tenant and one.owner == core.sharing.owner]
        return any(_is_open(one) and one.segment not in open_now for one in ours)

    def _give_up(self, record: SegmentRecord, order: Order) -> Shredded | None:
        """A whole segment, unless it is of an epoch that stays."""
        core = self._core
        if _is_open(record) and (core.sharing.shared or record.owner == core.sharing.owner):
            return None  # of an epoch that stays, for the others are sealed
        entries = core.recovery.entries(record.segment)
        if len(entries) and int(entries["record"]["tenant_epoch"].max()) >= order.epoch:
            return None
        return core.reclaimer.shred(record)

    def _rewrite(self, record: SegmentRecord, keys: KeyArray) -> Shredded | None:
        """A segment that has some of the blocks in it, or bytes that nobody can tell to be others."""
        core, names = self._core, set(key_list(keys))

        def doomed(those: KeyArray) -> Any:
            return np.fromiter((key in names for key in key_list(those)), bool, len(those))

        if _is_open(record) and record.owner == core.sharing.owner:
            return None  # made after the blocks were buried
        entries = core.recovery.entries(record.segment)
        listed = int(record_bytes_array(entries["record"]["stored_bytes"]).sum()) if len(entries) else 0
        whole = record.state is SegmentState.SEALED and listed == record.sealed_bytes
        if whole and not doomed(entry_keys(entries)).any():
            return None
        if not whole and not core.recovery.is_gone(record.segment):
            found, nbytes = core.recovery.scan(record.segment)
            covered = int(record_bytes_array(found["record"]["stored_bytes"]).sum()) == nbytes
            if covered and not doomed(entry_keys(found)).any() and record.state is SegmentState.SEALED:
                return None
        return core.reclaimer.rewrite(record, doomed)

    def _forget_spaces(self, order: Order) -> None:
        """What names the tenant's models, of the epochs that have passed."""
        for digest, raw in self._core.control.items(KEYSPACES):
            one = msgspec.json.decode(raw)
            if one["tenant_id"] == order.tenant_id and one.get("epoch", 0) < order.epoch:
                self._core.control.compare_and_set(KEYSPACES, digest, raw, None)

    def _settle(self, order: Order, told: Shredded) -> None:
        """Record it, sign it, and forget what was asked for."""
        core, files = self._core, self._core.files
        keys = self._keys.get(order.id)
        line, proof = b"", ""
        how = "keys destroyed" if order.keyed and told.keys == told.segments else "records removed"
        if core.audit is not None:
            counts = {"blocks": order.blocks, "segments": told.segments, "keys": told.keys, "copied": told.copied}
            event = Event("erased", tenant=order.tenant, object=order.id, bytes=order.bytes, counts=counts, outcome=how)
            event.detail = order.kind
            core.audit.append(event, durable=True)
            line, proof = prove(core.audit.folder, event.n)
        statement = receipts.Statement(
            order.id, order.kind, order.tenant, how, core.steady.now(), order.blocks, order.bytes, told.segments,
            told.keys, told.copied, order.hosts,
        )  # fmt: skip
        signer = signer_of(core.path, core.identity.store) if core.audit is None else core.audit.signer
        made = receipts.make(signer, statement, line, proof)
        files.write_once(f"{FOLDER}/{order.id}.receipt", msgspec.json.encode(made))
        if keys is not None:
            core.tenants.dig_up(keys)
        for kind in ("order", "survey", "begun", "keys"):
            with contextlib.suppress(FileNotFoundError):
                files.unlink(f"{FOLDER}/{order.id}.{kind}")
        self._forget(order)

    def _forget(self, order: Order) -> None:
        with self._lock, self._done:
            self._begun.discard(order.id)
            self._orders.pop(order.id, None)
            self._keys.pop(order.id, None)
            self._done.notify_all()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        with self._lock:  # whoever is just starting it has done so
            thread = self._thread
        if thread is not None:
            thread.join()


def _is_open(record: SegmentRecord | None) -> bool:
    return record is not None and record.state is SegmentState.OPEN
