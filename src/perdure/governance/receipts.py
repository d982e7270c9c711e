"""Receipts of erasures: a signed statement, and the proof that the log has a record of it.

    {"statement": a signed note (c2sp.org/signed-note), "record": the log's line, "proof": c2sp.org/tlog-proof,
     "key": the verifier key, which whoever checks has from somewhere else}

The statement, a line each: origin, id, kind, tenant, what was done, blocks, bytes, segments, keys, copied, in
a cluster the hosts, time (UTC),
SHA-256 of the record. Without an audit log record and proof are empty, and the statement says so.

Contract: signed with the key of the audit log. A receipt says what this software did; it cannot know of copies that
were taken from the directory before.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from perdure.governance.checkpoint import Signer


@dataclass(frozen=True, slots=True)
class Statement:
    """how: "keys destroyed" where all that was given up was encrypted with keys of its own, else "records removed".
    block_bytes: as engines see them."""

    id: str
    kind: str
    tenant: str
    how: str
    at_s: float
    blocks: int
    block_bytes: int
    segments: int
    keys: int
    copied: int
    hosts: Sequence[
        int
    ] = ()  # of a store that many share: how many had heard of it, how many could not deliver any more

    def text(self, origin: str, record: bytes) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.at_s))
        digest = hashlib.sha256(record).hexdigest() if record else "none: there is no audit log"
        tenant = self.tenant.encode("unicode_escape").decode("ascii")  # a name has no say in the lines of a statement
        lines = (
            f"{origin}/erasure", f"id {self.id}", f"kind {self.kind}", f"tenant {tenant}", f"done {self.how}",
            f"blocks {self.blocks}", f"bytes {self.block_bytes}", f"segments {self.segments}", f"keys {self.keys}",
            f"copied {self.copied}", *self._of_hosts(), f"at {at}", f"record {digest}",
        )  # fmt: skip
        return "".join(f"{line}\n" for line in lines)

    def _of_hosts(self) -> list[str]:
        return ["hosts {} had heard, leases of {} had ended".format(*self.hosts)] if self.hosts else []


def make(signer: Signer, statement: Statement, record: bytes, proof: str) -> dict[str, str]:
    note = signer.sign(statement.text(signer.verifier.name, record))
    return {"statement": note.decode(), "record": record.decode(), "proof": proof, "key": str(signer.verifier)}
