"""Messages that no client of ours sends, for the parsers and for a live service. Fails with the seed of the round that
found something.

    PYTHONPATH=src:tests python -m support.fuzz_messages 600         # seconds; a seed may follow

A finding is: a parser that raises anything but a PerdureError; a service that answers with an error that is not typed,
stops answering, serves other bytes, or keeps a descriptor, pin, lease, view or lent byte of a client that is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import perdure
from perdure import limits
from perdure.errors import PerdureError
from perdure.io.shared import SharedMemory
from perdure.limits import MIB
from perdure.service import messages as m
from perdure.service import sockets
from perdure.service.fields import (
    extents_of,
    identity_of,
    keys_of,
    layout_fields,
    lease_of,
    pack_extents,
    pack_lease,
    raise_failure,
)
from perdure.testing.store import FOUND, STORED, blocks_of, chain, keyspace, layout_of, write
from support.served import serving

FOREVER_S = 600.0
SETTLE_S = 60.0
ROUNDS_BETWEEN_LOOKS = 100
LAYOUT = layout_fields(layout_of(4096))
NUMBERS = (0, 1, -1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e300, 5e-324, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "x", "session", "retained", "client", "landing", "staging", "auto", "on", "\0", "ä" * 300, "x" * 70_000)
GOVERNING = ("erase", "erasure", "hold", "unhold", "lifecycle", "x")
VERBS = ("open", "keys", "extend", "branch", "handoff", "adopt", "pin", "release", "expire", "next_use", "history",
         "prefetch", "list", "show", "eat")  # fmt: skip
HUGE = tuple(kind + b"\xff\xff\xff\xff" for kind in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"))  # with no content
Value = Any


def questions(rng: random.Random, client: bytes = b"t" * 16) -> list[m.Message]:
    """One of each kind, as a client of ours could send it."""
    until, keys = time.monotonic() + FOREVER_S, rng.randbytes(32 * rng.randrange(4))
    extents, parts = pack_extents([[(4096 * at, 4096)] for at in range(len(keys) // 32)])
    lease = m.LeaseData(rng.randbytes(32), rng.randbytes(16), rng.randrange(5), until)
    number, space, soon = rng.randrange(1, 2**40), rng.choice((0, 0, 0, 1)), time.monotonic() + 0.02
    return [
        m.Hello(number, limits.wire_version, "fuzz"), m.Join(number, client),
        m.OpenSpace(number, "fuzz", "model", "sha256:" + "ab" * 32, "", "", dict(LAYOUT), rng.choice(TEXTS[7:9])),
        m.Attach(number, space, [0, 0], []), m.Lookup(number, space, keys), m.Present(number, space, keys),
        m.Fetch(number, space, keys, until, rng.randrange(4), rng.choice((0.0, 60.0))),
        m.Release(number, [rng.randrange(4)], rng.random() < 0.8),
        m.Read(number, space, keys, rng.randrange(1, 4), extents, parts, until, rng.random() < 0.5),
        m.Settled(number, 1, 0.01), m.Region(number, rng.choice(TEXTS[4:7]), 4096 * rng.randrange(1, 64)),
        m.Unregister(number, rng.randrange(6)),
        m.Write(number, space, keys, rng.randrange(1, 4), extents, parts, "session", 60.0, None, until),
        m.Write(number, space, keys, rng.randrange(1, 4), extents, parts, "ephemeral", None, lease, until),
        m.Reserve(number, space, keys, 5.0, rng.choice((0.0, soon)), 0.0), m.Follow(number, space, keys, 1, soon, 0.0),
        m.EndLease(number, lease), m.Pin(number, space, keys, 5.0),
        m.Unpin(number, rng.randrange(6)), m.Hint(number, space, keys),
        m.Advise(number, space, keys, 1000.0, rng.choice((None, 0.1))),
        m.Status(number), m.Explain(number, keys[:32]), m.ExplainPrefix(number, space, rng.randbytes(64)),
        m.Publication(number, rng.choice(("publish", "unpublish", "published", "x")), {
            "keyspace": keys[:32], "tokens": rng.randbytes(64), "name": rng.choice(TEXTS), "readers": ["*"],
            "ttl_s": rng.choice(FLOATS), "hashes": None,
        }),
        m.Reload(number), m.Sync(number), m.Exchange(number, rng.choice(TEXTS), rng.choice(TEXTS), ["read"]),
        m.Govern(number, rng.choice(GOVERNING), {
            "tenant": rng.choice(("nobody", "", 7)), "blocks": rng.choice((None, [], [bytes(32)], [b"x"], "x")),
            "session": rng.choice((None, "none", 5)), "id": rng.choice(("", "0" * 16, 3)),
        }),
        m.SessionAsk(number, rng.choice((space, -1)), rng.choice(VERBS), {
            "name": rng.choice(TEXTS), "keys": keys, "at": rng.randrange(3), "ttl_s": rng.choice(FLOATS), "in_s": 0.0,
            "start": rng.choice(NUMBERS), "new_name": "y", "token": rng.randbytes(72), "create": True, "after": b"",
        }),
    ]  # fmt: skip


def answers(rng: random.Random) -> list[m.Message]:
    lease = m.LeaseData(b"s", b"h", 1, 1.0)
    return [
        m.Welcome(1, limits.wire_version, b"c" * 16, b"b" * 16, MIB, 1), m.Joined(2),
        m.SpaceOpened(3, 0, b"d" * 32, b"d" * 32, b"t" * 16, True),
        m.Attached(4, [("chunk", 1, 4096, 0), ("version", 1, 0, 0)], [1], False), m.Count(5, 3), m.Mask(6, b"\1\0"),
        m.Fetched(7, b"\0", rng.randbytes(8), 1, {0: "x"}, [1]), m.Delivered(8, b"\0", 1, {3: "y"}, 0),
        m.Written(9, b"\0", 1, 4096, {0: "z"}), m.Made(10, 1, 4096), m.Leased(11, lease), m.Leased(12, None),
        m.Granted(17, rng.randbytes(40), "t", ["read"], 1.0), m.Answered(13, True),
        m.Advised(14, 1, 0.1, 0.2, "r", 2, 1), m.Document(15, {"a": [1, {"b": None}]}),
        m.Failed(16, rng.choice(("InvalidArgument", "KeyError", "__doc__", "PerdureError", "annotations", "")), "no"),
        m.Retired(17, b"t" * 16),
    ]  # fmt: skip


# --- mutation
def any_value(rng: random.Random, depth: int = 0) -> Value:
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(FLOATS)
    if kind == 2:
        return rng.choice(TEXTS)
    if kind == 3:
        return rng.randbytes(rng.choice((0, 1, 4, 8, 16, 31, 32, 33, 64, 32 * 2048, 32 * 2049)))
    if kind == 4:
        return rng.choice((None, True, False))
    if kind == 5:
        return rng.randrange(-2, 200)
    if kind == 6:
        return [any_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice([*LAYOUT, "other"]): any_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def same_kind(rng: random.Random, value: Value) -> Value:
    """Another value that the decoder takes in its place."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((rng.choice(NUMBERS), rng.randrange(8), min(value + rng.randrange(3), 2**63)))
    if isinstance(value, float):
        return rng.choice((rng.choice(FLOATS), value * rng.choice((0.0, -1.0, 0.5, 1e9))))
    if isinstance(value, str):
        return rng.choice(TEXTS)
    if isinstance(value, bytes):
        keys = rng.randbytes(32 * rng.choice((0, 1, 2, limits.message_keys_max)))
        return rng.choice((keys, rng.randbytes(rng.randrange(80)), value[: rng.randrange(len(value) + 1)], value * 2))
    if isinstance(value, list):
        return [same_kind(rng, one) for one in value] * rng.randrange(3)
    return any_value(rng)


def same_kinds(rng: random.Random, data: bytes) -> bytes:
    """What the decoder lets through, with one or two values that no client of ours sends."""
    fields: list[Value] = msgspec.msgpack.decode(data)
    for _ in range(rng.randrange(1, 3)):
        at = rng.randrange(1, len(fields))
        fields[at] = same_kind(rng, fields[at])
    return msgspec.msgpack.encode(fields)


def other_fields(rng: random.Random, data: bytes) -> bytes:
    """Well-formed msgpack, but with other values in some places."""
    fields: list[Value] = msgspec.msgpack.decode(data)
    for _ in range(rng.randrange(1, 3)):
        at = rng.randrange(len(fields))
        inner = fields[at]
        if isinstance(inner, dict) and inner and rng.random() < 0.9:
            inner[rng.choice([*inner, "new"])] = any_value(rng)
        elif isinstance(inner, list) and inner and rng.random() < 0.7:
            inner[rng.randrange(len(inner))] = any_value(rng)
        elif at or rng.random() < 0.1:
            fields[at] = any_value(rng)
    if rng.random() < 0.1:
        fields = fields[: rng.randrange(len(fields) + 1)]
    if rng.random() < 0.1:
        fields.append(any_value(rng))
    return msgspec.msgpack.encode(fields)


def other_bytes(rng: random.Random, data: bytes) -> bytes:
    raw = bytearray(data)
    for _ in range(rng.randrange(1, 8)):
        at = rng.randrange(len(raw) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(raw):
            raw[at] = rng.randrange(256)
        elif kind == 1 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            raw[at:at] = rng.choice(HUGE)
        elif kind == 3:
            raw[at : at + 5] = rng.choice(HUGE)
        elif kind == 4:
            raw[at:at] = rng.randbytes(rng.randrange(40))
        else:
            end = rng.randrange(at, len(raw) + 1)
            raw[at:at] = raw[at:end]
    if rng.random() < 0.3:
        raw = raw[: rng.randrange(len(raw) + 1)]
    return bytes(raw)


def mutated(rng: random.Random, data: bytes, well_formed: float) -> bytes:
    """`well_formed`: share of those that the decoder is to let through."""
    if rng.random() < well_formed:
        return same_kinds(rng, data)
    kind = rng.random()
    if kind < 0.5:
        return other_fields(rng, data)
    if kind < 0.9:
        return other_bytes(rng, data)
    if kind < 0.95:
        return rng.randbytes(rng.choice((1, 10, 1000, limits.message_bytes_max)))
    return rng.choice((b"\x91", b"\x81\xa1a", b"\x93")) * rng.randrange(1, 30_000)


# --- parsers
def fuzz_parsers(rng: random.Random, tally: Counter[str]) -> None:
    """One message through every function that reads what the other side sent."""
    asks = rng.random() < 0.6
    data = mutated(rng, m.encode(rng.choice(questions(rng) if asks else answers(rng))), 0.2)
    for decode in (m.decode_question, m.decode_answer):
        tally["decoded"] += 1
        with _typed(tally):
            message = decode(data)
            tally["well-formed"] += 1
            m.encode(message)
            _look_inside(rng, message, tally)
    blocks, block_bytes = rng.randrange(5), rng.choice((1, 4096, limits.block_bytes_max))
    region_bytes = rng.choice((0, 1, 4096, 5 * 4096, limits.region_bytes_max))
    good, parts = pack_extents([[(block_bytes * at, block_bytes)] for at in range(blocks)])
    if rng.random() < 0.7:
        good, parts = other_bytes(rng, good + b"\0"), other_bytes(rng, parts + b"\1\0\0\0")
    tally["extents"] += 1
    with _typed(tally):
        _check_extents(extents_of(good, parts, blocks, block_bytes, region_bytes), blocks, block_bytes, region_bytes)


def _look_inside(rng: random.Random, message: Any, tally: Counter[str]) -> None:
    if isinstance(getattr(message, "keys", None), bytes):
        with _typed(tally):
            keys = keys_of(message.keys)
            assert keys.nbytes == len(message.keys) <= limits.message_keys_max * limits.key_bytes
    if isinstance(message, m.Read | m.Write):
        blocks, nbytes = len(message.keys) // 32, rng.choice((4096, 65_536))
        with _typed(tally):
            _check_extents(extents_of(message.extents, message.parts, blocks, 4096, nbytes), blocks, 4096, nbytes)
    if isinstance(message, m.OpenSpace):
        with _typed(tally):
            identity = identity_of(message)
            assert identity.fields()
    if isinstance(message, m.Failed):
        with _typed(tally):
            raise_failure(message)
    if isinstance(message, m.EndLease):
        assert pack_lease(lease_of(message.lease)) == message.lease


def _check_extents(found: list[list[tuple[int, int]]], blocks: int, block_bytes: int, region_bytes: int) -> None:
    assert len(found) == blocks
    for pieces in found:
        assert sum(nbytes for _, nbytes in pieces) == block_bytes
        assert all(0 <= offset <= offset + nbytes <= region_bytes for offset, nbytes in pieces)


@contextlib.contextmanager
def _typed(tally: Counter[str]) -> Iterator[None]:
    try:
        yield
    except PerdureError:
        tally["refused"] += 1


# --- a live service
class _Failures(logging.Handler):
    """What the service reports as its own failure."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(logging.Formatter().format(record))


class LiveService:
    """A service, a well-behaved client, and hostile ones. Used as a context."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._failures = _Failures()
        self._last_client = b"t" * 16

    def __enter__(self) -> LiveService:
        log = logging.getLogger("perdure.service")
        log.addHandler(self._failures)
        self._stack.callback(log.removeHandler, self._failures)
        self._store, self._server = self._stack.enter_context(serving(self._directory, memory=64 * MIB))
        while self._store.core.pool.prefault():
            pass
        self._good = self._stack.enter_context(perdure.connect(self._directory))
        self._space = keyspace(self._good, tenant="good")
        self._keys = chain(self._space, 1, 4)
        assert write(self._space, self._keys) == [STORED] * 4
        self._memory = SharedMemory("fuzz", 64 * 4096)
        self._sealed = SharedMemory("fuzz", 64 * 4096)
        self._sealed.seal_size()
        for memory in (self._memory, self._sealed):
            self._stack.callback(memory.close)
        self._null = os.open("/dev/null", os.O_RDWR)
        self._folder = os.open(self._directory, os.O_RDONLY)
        for fd in (self._null, self._folder):
            self._stack.callback(os.close, fd)
        self.look()
        self._before = self._held()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def attack(self, rng: random.Random, tally: Counter[str]) -> None:
        """One hostile client: some valid calls, some that are not, read or not."""
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            main = stack.enter_context(_connected(self._server.path))
            if rng.random() < 0.9:
                welcome = _call(main, m.Hello(1, limits.wire_version, "fuzz"), tally)
                if isinstance(welcome, m.Welcome):
                    self._last_client = welcome.client
            if rng.random() < 0.8:
                opened = m.OpenSpace(2, "fuzz", "model", "sha256:" + "ab" * 32, "", "", dict(LAYOUT), "off")
                _call(main, opened, tally)
                _call(main, m.Region(3, "landing", 64 * 4096), tally)
                _call(main, m.Region(4, "client", 64 * 4096), tally, [self._any_memory(rng).fd])
            chosen = [main]
            if rng.random() < 0.3:
                chosen.append(stack.enter_context(_connected(self._server.path)))
                _call(chosen[1], m.Join(5, self._last_client), tally)
            for _ in range(rng.randrange(1, 20)):
                good = m.encode(rng.choice(questions(rng, self._last_client)))
                data = mutated(rng, good, 0.95) if rng.random() < 0.6 else good
                tally["sent"] += 1
                sock = rng.choice(chosen)
                sockets.send(sock, data, self._any_descriptors(rng, sock), socket.MSG_DONTWAIT)
                if rng.random() < 0.8:
                    _receive(sock, tally)
                elif rng.random() < 0.2:
                    os.ftruncate(self._memory.fd, rng.choice((0, 4096, 64 * 4096)))

    def _any_memory(self, rng: random.Random) -> SharedMemory:
        return rng.choice((self._memory, self._sealed))

    def _any_descriptors(self, rng: random.Random, sock: socket.socket) -> list[int]:
        if rng.random() < 0.8:
            return []
        some = (self._memory.fd, self._sealed.fd, self._null, self._folder, sock.fileno())
        return [rng.choice(some) for _ in range(rng.choice((1, 1, 2, 64, 100)))]

    def look(self) -> None:
        """Whether the service is as it was."""
        report = self._space.read(self._keys, into=(got := bytearray(len(self._keys) * self._space.layout.block_bytes)))
        assert report.statuses.tolist() == [FOUND] * len(self._keys)
        assert bytes(got) == blocks_of(self._keys).tobytes()
        assert not self._failures.seen, self._failures.seen[0]
        status = self._good.service_status()
        _until(lambda: len(self._server.status()["clients"]) == 1)
        assert status["store"]["healthy"]
        if hasattr(self, "_before"):
            _until(lambda: self._held() == self._before, lambda: f"{self._held()}, before {self._before}")

    def _held(self) -> dict[str, int]:
        """What ended clients must not leave behind."""
        pool = self._store.core.pool.stats()
        return {
            "descriptors": len(_descriptors_of_clients()),
            "pinned": pool.pinned,
            "lent": pool.lent_bytes,
            "stranded": pool.stranded_bytes,
            "pins": len(self._store.core.control.pins()),
            "reserved": self._store.core.pool._reserved,
        }


def _descriptors_of_clients() -> list[str]:
    """What lives as long as a client does: not the segments of a tenant, and not its tables."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    others = ("pool", "presence", "slots", "directory")
    return [
        name
        for name in found
        if name.startswith(("socket:", "anon_inode:", "pipe:", "/memfd:", "/dev/null"))
        and not name.startswith(tuple(f"/memfd:perdure-{one}" for one in others))
    ]


def _connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(SETTLE_S)
    sock.connect(str(path))
    return sock


def _call(sock: socket.socket, question: m.Message, tally: Counter[str], fds: list[int] | None = None) -> Any:
    sockets.send(sock, m.encode(question), fds or [])
    return _receive(sock, tally)


def _receive(sock: socket.socket, tally: Counter[str]) -> Any:
    """The answer, or None: a Release may have none."""
    sock.settimeout(0.2)
    try:
        data, fds = sockets.receive(sock)
    except TimeoutError:
        tally["unanswered"] += 1
        return None
    finally:
        sock.settimeout(SETTLE_S)
    for fd in fds:
        os.close(fd)
    if not data:
        tally["cut off"] += 1
        raise ConnectionResetError
    answer = m.decode_answer(data)
    tally[f"answer {type(answer).__name__}"] += 1
    if isinstance(answer, m.Failed):
        tally[f"failed {answer.kind}"] += 1
        assert answer.kind != "PerdureError", answer.message
    return answer


def _until(condition: Callable[[], bool], what: Callable[[], str] = lambda: "clients stay") -> None:
    give_up = time.monotonic() + SETTLE_S
    while not condition():
        assert time.monotonic() < give_up, what()
        time.sleep(0.01)


# --- by itself
def run(directory: Path, seconds: float, seed: int) -> Counter[str]:
    """Parsers and a live service in turn, until the time is over. Raises what it finds, with the seed in a note."""
    tally: Counter[str] = Counter()
    end = time.monotonic() + seconds
    with LiveService(directory) as service:
        for number in itertools.count(seed):
            try:
                rng = random.Random(number)
                for _ in range(ROUNDS_BETWEEN_LOOKS):
                    for _ in range(30):
                        fuzz_parsers(rng, tally)
                    service.attack(rng, tally)
                    tally["clients"] += 1
                service.look()
            except BaseException as error:
                error.add_note(f"seed {number}; {dict(tally)}")
                raise
            if time.monotonic() > end:
                return tally
    raise AssertionError("unreachable")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        logging.getLogger("perdure").addHandler(logging.NullHandler())
        found = run(Path(folder) / "s", float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    print(json.dumps(dict(sorted(found.items())), indent=2))
