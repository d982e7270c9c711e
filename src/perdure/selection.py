"""Which sessions and blocks an erasure or a hold is about.

Contract: answers are of now, from the control store and the sessions' manifests; nothing is changed. A subject is known
by its keyed id, never by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from perdure import limits
from perdure.catalog.api import KeyArray, as_keys
from perdure.core import Core
from perdure.errors import InvalidArgument
from perdure.inspect import keyspaces
from perdure.manifest import ManifestMissing
from perdure.session_form import Head, decode_head
from perdure.session_heads import NAMESPACE


class About(Protocol):
    """kind: "tenant", "session", "subject" or "block". target: a session's name. subject: hex of its id. keys: hex."""

    kind: str
    tenant: str
    tenant_id: str
    target: str
    subject: str
    keys: list[str]


def is_of(about: About, head: Head) -> bool:
    """Whether a session of the tenant is one of those that it is about, by name or subject."""
    if about.kind == "session":
        return head.name == about.target
    return about.kind == "subject" and head.subject.hex() == about.subject


def sessions_of(core: Core, about: About, *, before_epoch: int = 0) -> Iterator[tuple[bytes, bytes, Head]]:
    """(key, value, head) of its sessions, those that are over included. Of a tenant: of epochs before that one."""
    tenant_id = bytes.fromhex(about.tenant_id)
    known = keyspaces(core) if about.kind == "tenant" else {}
    for key, raw in core.control.items(NAMESPACE, tenant_id):
        if key[: limits.id_bytes] != tenant_id:
            return
        head = decode_head(raw)
        old = about.kind == "tenant" and known.get(head.keyspace, {}).get("epoch", 0) < before_epoch
        if old or is_of(about, head):
            yield key, raw, head


def blocks_of(core: Core, about: About, *, pages: bool = False) -> KeyArray:
    """Its blocks, of anything but a tenant. pages: those of the manifests too.

    Raises InvalidArgument if it is not known (any more) which they are."""
    if about.kind == "block":
        return as_keys(bytes.fromhex(key) for key in about.keys)
    found: list[KeyArray] = [np.zeros((0, limits.key_bytes), np.uint8)]
    manifests = core.sessions.manifests
    for _, _, head in sessions_of(core, about):
        try:
            found.append(manifests.keys(about.tenant, head.root, head.blocks, 0, head.blocks))
            if pages:
                found.append(manifests.pages(about.tenant, head.root, head.blocks))
        except ManifestMissing as error:
            raise InvalidArgument(
                f"which blocks session {head.name!r} consists of is not known any more ({error}); "
                "name them by their keys, or the tenant"
            ) from None
    return np.unique(np.concatenate(found), axis=0)
