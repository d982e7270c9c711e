"""Publishing a prefix to other tenants, as a user asks for it: of a store in this process, or of a service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike

from perdure.errors import InvalidArgument
from perdure.keys import token_bytes

EVERYONE = "*"


class PublicationVerbs:
    """What every store has, wherever it is."""

    def publication_ask(self, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Carry out a verb of `publications.Publications.ask`."""
        raise NotImplementedError

    def publish(
        self,
        keyspace: bytes,
        token_ids: ArrayLike | None = None,
        *,
        name: str,
        hashes: Sequence[bytes] | None = None,
        readers: Sequence[str] = (EVERYONE,),
        ttl_s: float | None = None,
    ) -> dict[str, Any]:
        """Let other tenants read a stored prefix: the full blocks of `token_ids`, or those with an engine's own
        `hashes`, of one keyspace, named by its digest.

        All of its blocks must be stored. They are copied, so that what becomes of the originals does not matter, and
        the copies have keys of their own. readers: tenants, or ("*",) for all that policy allows. ttl_s: forget it
        after so many seconds. Returns what `published` tells of it. Raises InvalidArgument, AccessDenied,
        AuditUnavailable, KeyUnavailable, CatalogError, ReadOnlyStore.

        Not guaranteed: that it stays. Copies are evicted as any block that nobody reads.
        """
        if (token_ids is None) == (hashes is None):
            raise InvalidArgument("publish: pass the tokens of the prefix, or an engine's hashes of its blocks")
        seed = {"tokens": token_bytes(token_ids)} if token_ids is not None else {"hashes": list(hashes or ())}
        fields = {"keyspace": keyspace, "name": name, "readers": list(readers), "ttl_s": ttl_s}
        return self.publication_ask("publish", fields | seed)

    def unpublish(self, name: str) -> dict[str, Any]:
        """From now on nobody finds it; when this returns its key is destroyed and its blocks are forgotten. Reads that
        were under way may still end. name: or its id. Raises InvalidArgument if there is none."""
        return self.publication_ask("unpublish", {"name": name})

    def published(self) -> list[dict[str, Any]]:
        """All publications: id, name, tenant, model, readers, blocks, how many of them are `present`, tokens, times."""
        told: list[dict[str, Any]] = self.publication_ask("published", {})["publications"]
        return told
