"""Which blocks a session consists of, written down: pages of keys, immutable, stored like blocks.

Format: a page is 256 keys of 32 bytes (8 KiB, the last page of a session padded with zeros). It is a block of a
keyspace of its own, under the tenant of the session; its name is SHA-256(digest of that keyspace ‖ content), so equal
pages are one, and branches share the pages of what they have in common. Up to 256 blocks the root is the page; beyond,
it is a page of the names of the pages, in order: 65,536 blocks at most.

Contract
- Token ids are never stored: keys are, from which tokens cannot be computed.
- A page is as durable as `session`, and lives as long as it was asked to; writing it again prolongs its life.
- A page that cannot be read makes its session missing: never wrong, for what is read is compared with its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.admission import Admissions
from perdure.catalog.api import Durability, KeyArray, as_keys
from perdure.core import Core
from perdure.errors import PerdureError
from perdure.keys import KeyspaceIdentity, KVLayout, key_list
from perdure.keyspace import Keyspace

PAGE_KEYS: Final = 256
_PAGE_BYTES: Final = PAGE_KEYS * limits.key_bytes
BLOCKS_MAX: Final = PAGE_KEYS * PAGE_KEYS
_IDENTITY: Final = KeyspaceIdentity(
    model="perdure/session-manifest",
    weights="manifest:1",
    layout=KVLayout(block_tokens=PAGE_KEYS, block_bytes=_PAGE_BYTES, dtype="uint8", order="key,byte"),
)


class ManifestMissing(PerdureError):
    """A page cannot be read: evicted, expired or damaged. What the session consisted of is not known any more."""


class ManifestRefused(PerdureError):
    """A page could not be stored; the message says why."""


class Manifests:
    """Reads and writes pages. Thread-safe. Roots are 32 bytes; b"" is the root of no blocks."""

    def __init__(self, core: Core, check: Callable[[], None]):
        self._core, self._check = core, check
        self._spaces: dict[str, Keyspace] = {}  # anew for a tenant that was erased
        self._admissions = Admissions("always", core.clock.boottime, core.kept_s)  # whatever the blocks' own is

    def extend(self, tenant: str, root: bytes, blocks: int, keys: KeyArray, ttl_s: float) -> bytes:
        """The root of `blocks` blocks and then `keys`. Raises ManifestMissing, ManifestRefused."""
        if not len(keys):
            return root
        space = self._space(tenant)
        names = self._names(space, root, blocks)
        whole, rest = divmod(blocks, PAGE_KEYS)
        if rest:
            keys = np.concatenate([self._read(space, names[whole : whole + 1])[:rest], keys])
        pages = [_page(keys[at : at + PAGE_KEYS]) for at in range(0, len(keys), PAGE_KEYS)]
        names = names[:whole] + [_name(space, page) for page in pages]
        if len(names) > 1:
            pages.append(_page(as_keys(names)))
        self._write(space, pages, ttl_s)
        return _name(space, pages[-1])

    def keys(self, tenant: str, root: bytes, blocks: int, start: int, stop: int) -> KeyArray:
        """Keys of the blocks from `start` to `stop`. Raises ManifestMissing."""
        stop = min(stop, blocks)
        if start >= stop:
            return np.zeros((0, limits.key_bytes), np.uint8)
        space = self._space(tenant)
        names = self._names(space, root, blocks)
        first = start // PAGE_KEYS
        found = self._read(space, names[first : -(-stop // PAGE_KEYS)])
        return found[start - first * PAGE_KEYS : stop - first * PAGE_KEYS]

    def pages(self, tenant: str, root: bytes, blocks: int) -> KeyArray:
        """Names of all pages, the root's included, for pinning them. Raises ManifestMissing."""
        names = self._names(self._space(tenant), root, blocks)
        return as_keys(names if len(names) <= 1 else [*names, root])

    def prolong(self, tenant: str, root: bytes, blocks: int, ttl_s: float) -> None:
        """Let all pages live for `ttl_s` from now. Raises ManifestMissing, ManifestRefused."""
        space = self._space(tenant)
        names = self._names(space, root, blocks)
        if names:
            content = self._read(space, names)
            pages = [_page(content[at : at + PAGE_KEYS]) for at in range(0, len(content), PAGE_KEYS)]
            self._write(space, pages + ([_page(as_keys(names))] if len(names) > 1 else []), ttl_s)

    def cut(self, tenant: str, root: bytes, blocks: int, at: int, ttl_s: float) -> bytes:
        """The root of the first `at` of `blocks` blocks. Raises ManifestMissing, ManifestRefused."""
        return self.extend(tenant, b"", 0, self.keys(tenant, root, blocks, 0, at), ttl_s)

    # --- inside
    def _space(self, tenant: str) -> Keyspace:
        space = self._spaces.get(tenant)
        if space is None or space.erased:
            space = self._spaces[tenant] = Keyspace(
                self._core,
                self._check,
                tenant,
                _IDENTITY,
                "off",
                Admissions("always", self._core.clock.boottime, self._core.kept_s),
            )
            space.audited = False  # the session's verb is recorded
        return space

    def _names(self, space: Keyspace, root: bytes, blocks: int) -> list[bytes]:
        if blocks <= PAGE_KEYS:
            return [root] if blocks else []
        return key_list(self._read(space, [root]))[: -(-blocks // PAGE_KEYS)]

    def _read(self, space: Keyspace, names: list[bytes]) -> KeyArray:
        memory = np.empty((len(names), _PAGE_BYTES), np.uint8)
        report = space.read(as_keys(names), memory)
        if report.usable < len(names):
            why = report.problems.get(report.usable, "it is not stored any more")
            raise ManifestMissing(f"page {names[report.usable].hex()[:16]} of a session's manifest: {why}")
        for name, page in zip(names, memory, strict=True):
            if _name(space, page) != name:
                raise ManifestMissing(f"page {name.hex()[:16]} of a session's manifest holds something else")
        return memory.reshape(-1, limits.key_bytes)

    def _write(self, space: Keyspace, pages: list[NDArray[np.uint8]], ttl_s: float) -> None:
        keys = as_keys(_name(space, page) for page in pages)
        report = space.write(keys, list(pages), durability=Durability.SESSION, ttl_s=min(ttl_s, limits.ttl_s_max))
        if not report.durable:
            raise ManifestRefused(f"the session's manifest could not be stored: {next(iter(report.reasons.values()))}")


def _page(keys: KeyArray) -> NDArray[np.uint8]:
    page = np.zeros(_PAGE_BYTES, np.uint8)
    page[: keys.size] = keys.ravel()
    return page


def _name(space: Keyspace, page: NDArray[np.uint8]) -> bytes:
    return hashlib.sha256(space.digest + page.tobytes()).digest()
