"""What clients and services say to each other: typed messages, the same over the Unix socket and over TCP.

Format: msgpack arrays (msgspec), the first element names the kind. Key arrays, statuses and tables are raw
little-endian bytes. A question is answered by exactly one answer with the same `id`; a `Release` that does not ask is
not answered.

Contract
- `decode_*` raises ProtocolError for whatever is not a well-formed message of the right direction, and allocates no
  more than the bytes it was given; nobody's bytes become code.
- What the fields of a message hold is checked by who uses them, with `fields`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.errors import ProtocolError
from perdure.governance import actor


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all. `id` pairs an answer with its question."""

    id: int


class LeaseData(msgspec.Struct, array_like=True):
    scope: bytes
    holder: bytes
    token: int
    deadline_s: float


# --- questions ------------------------------------------------------------------------------------------------
class Hello(Message):
    """The first message of a client. The connection that says it owns all that the client holds."""

    version: int
    name: str


class Join(Message):
    """The first message of a further connection of a client that has said hello."""

    client: bytes  # the token of its Welcome


class OpenSpace(Message):
    """trace, here and below: of the caller's, for the audit log."""

    tenant: str
    model: str
    weights: str
    lora: str
    draft: str
    layout: dict[str, Any]
    codec: str
    salt: str = ""
    capability: bytes = b""  # from Granted; empty: what the connection's principal may do
    trace: str = ""


class Exchange(Message):
    """A capability for a JWT. session: names of sessions will begin with it; actions: only these, if any."""

    token: str
    session: str
    actions: list[str]
    trace: str = ""


class Attach(Message):
    """Descriptors of what this client may map: tables whose version it does not have, chunks it does not know."""

    space: int
    versions: list[int]  # of the presence and the slot table, as mapped; 0: none
    chunks: list[int]  # numbers of the chunks it has mapped
    trace: str = ""


class Lookup(Message):
    space: int
    keys: bytes


class Present(Message):
    space: int
    keys: bytes


class Fetch(Message):
    """Bring blocks into memory and pin them as `grant`, a number of the client's choice. `view_s`: for how long the
    client may look at them; 0: only until it has copied them. `until_s`, here and below: the deadline on this host's
    CLOCK_MONOTONIC; a question that is read later than that touches no memory of the client's."""

    space: int
    keys: bytes
    until_s: float
    grant: int
    view_s: float
    trace: str = ""


class Release(Message):
    """End grants. Not answered unless `tell`: then whether all of them were valid until now."""

    grants: list[int]
    tell: bool


class Read(Message):
    """Deliver blocks into registered memory. `extents`: (offset u64, bytes u64) per part; `parts`: u32 per block, how
    many of them it has; empty: one each."""

    space: int
    keys: bytes
    region: int
    extents: bytes
    parts: bytes
    until_s: float
    direct: bool
    trace: str = ""


class Settled(Message):
    """Wait until nothing can touch the memory of an earlier late read any more."""

    late: int
    wait_s: float


class Region(Message):
    """Memory that client and service share. kind: "staging" and "landing" are made by the service and its descriptor
    is in the answer; "client" is the client's own, its descriptor comes with this message; "nixl" is at `start` on
    another host, and `about` is the metadata of the agent there."""

    kind: str
    nbytes: int
    about: bytes = b""
    start: int = 0


class Unregister(Message):
    region: int


class Write(Message):
    """Store blocks that lie in a region; extents and parts as in `Read`."""

    space: int
    keys: bytes
    region: int
    extents: bytes
    parts: bytes
    durability: str
    ttl_s: float | None
    lease: LeaseData | None
    until_s: float
    trace: str = ""


class Get(Message):
    """To a data node: send these blocks. `left_s`, here and below: from now on, for hosts share no clock. `region`:
    payload goes there, in `Put` comes from there, instead of in a frame; 0: it does not."""

    space: int
    keys: bytes
    left_s: float
    region: int = 0
    trace: str = ""


class Put(Message):
    """To a data node: store the blocks that follow as payload, one after the other."""

    space: int
    keys: bytes
    durability: str
    ttl_s: float | None
    lease: LeaseData | None
    left_s: float
    region: int = 0
    trace: str = ""


class Reserve(Message):
    """Without a wait only the last key counts. until_s and left_s: how long the answer may take, as in `Fetch` (on this
    host) and as in `Get` (to a data node); 0 and 0: not at all."""

    space: int
    keys: bytes
    ttl_s: float
    until_s: float
    left_s: float


class Follow(Message):
    """Answered as soon as more than `known` leading blocks can be used, or all, and at the end of its time."""

    space: int
    keys: bytes
    known: int
    until_s: float
    left_s: float


class EndLease(Message):
    lease: LeaseData


class Pin(Message):
    space: int
    keys: bytes
    ttl_s: float
    trace: str = ""


class Unpin(Message):
    pin: int


class Hint(Message):
    """These blocks will not be asked for again."""

    space: int
    keys: bytes


class Advise(Message):
    space: int
    keys: bytes
    prefill_tokens_per_s: float
    deadline_s: float | None


class Status(Message):
    pass


class Explain(Message):
    key: bytes
    trace: str = ""


class ExplainPrefix(Message):
    space: int
    tokens: bytes  # u32 each
    trace: str = ""


class SessionAsk(Message):
    """A verb of `session_heads.Sessions`; without a keyspace (-1) one of `session_admin`. Answered by a Document."""

    space: int
    verb: str
    fields: dict[str, Any]
    trace: str = ""


class Govern(Message):
    """A verb of `governing.administer`. Answered by a Document."""

    verb: str
    fields: dict[str, Any]
    trace: str = ""


class Reload(Message):
    """Read the policy anew. Answered by a Document."""

    trace: str = ""


class Publication(Message):
    """A verb of `publications.Publications.ask`. Answered by a Document."""

    verb: str
    fields: dict[str, Any]
    trace: str = ""


class Sync(Message):
    pass


# --- answers --------------------------------------------------------------------------------------------------
class Welcome(Message):
    version: int
    client: bytes
    boot: bytes  # of this run of the service; another one has another memory
    fetch_bytes: int  # one Fetch brings at most so much
    pid: int


class Joined(Message):
    pass


class Granted(Message):
    capability: bytes
    tenant: str
    actions: list[str]
    left_s: float


class SpaceOpened(Message):
    space: int
    digest: bytes
    shared_digest: bytes
    tenant_id: bytes
    mapped: bool  # whether there is memory to map
    published: bool = False  # what is not in that memory may be published by another tenant


class Attached(Message):
    """One descriptor per entry of `items`, in this order: (what, number or version, bytes, buckets). `live`: numbers of
    all chunks; the others are to be unmapped. `more`: ask again, not all fitted."""

    items: list[tuple[str, int, int, int]]
    live: list[int]
    more: bool


class Count(Message):
    count: int


class Mask(Message):
    mask: bytes  # one byte per key


class Fetched(Message):
    """slots: u64 per block, see `fields.pack_slot`; NO_SLOT where there is none. no_room: positions."""

    statuses: bytes
    slots: bytes
    from_memory: int
    problems: dict[int, str]
    no_room: list[int]


class Delivered(Message):
    statuses: bytes
    from_memory: int
    problems: dict[int, str]
    late: int  # 0: settled


class Sent(Message):
    """The next `len(statuses)` blocks of a Get; those that were found follow as payload, as they are stored. codecs:
    one byte per block, empty if none is encoded; stored: bytes of each (u32) where there are codecs."""

    statuses: bytes
    codecs: bytes
    stored: bytes
    from_memory: int
    problems: dict[int, str]
    last: bool


class Written(Message):
    statuses: bytes
    stored: int
    stored_bytes: int
    reasons: dict[int, str]


class Made(Message):
    """A region or pin."""

    number: int
    nbytes: int


class Leased(Message):
    lease: LeaseData | None


class Answered(Message):
    yes: bool


class Advised(Message):
    blocks: int
    load_s: float
    recompute_s: float
    reason: str
    stored: int = 0
    in_memory: int = 0


class Document(Message):
    content: dict[str, Any]


class Failed(Message):
    kind: str
    message: str


class Retired(Message):
    """Not an answer: chunks of this tenant were given up; unmap them. Sent on the connection of the hello."""

    tenant_id: bytes


Question = (
    Hello | Join | OpenSpace | Attach | Lookup | Present | Fetch | Release | Read | Settled | Region | Unregister
    | Write | Get | Put | Reserve | Follow | EndLease | Pin | Unpin | Hint | Advise | Status | Explain | ExplainPrefix
    | Sync | SessionAsk | Publication | Exchange | Govern | Reload
)  # fmt: skip
Answer = (
    Welcome | Joined | SpaceOpened | Attached | Count | Mask | Fetched | Delivered | Sent | Written | Made | Leased
    | Answered | Advised | Document | Failed | Retired | Granted
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def encode_question(question: Message) -> bytes:
    """With the trace that this thread works under."""
    trace = actor.current().trace
    if trace and hasattr(question, "trace"):
        question.trace = trace
    return _encoder.encode(question)


def decode_question(data: bytes | bytearray | memoryview) -> Any:
    try:
        return _questions.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message a client may send: {error}") from None


def decode_answer(data: bytes | bytearray | memoryview) -> Any:
    try:
        return _answers.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not an answer of a Perdure service: {error}") from None
