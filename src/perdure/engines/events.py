"""KV events of the shared tier, in vLLM's format, for routers that send requests where their KV is.

    events = StorageEvents(block_tokens=128)
    with EventPublisher("tcp://*:5557", replay_endpoint="tcp://*:5558") as publisher:
        events.stored(request.block_hashes, request.all_token_ids)
        publisher.publish(events.take())

An engine may put what `take` returns into its own stream instead (vLLM: `take_events` of a connector, by `as_vllm`).

Contract
- The wire format is vLLM 0.32's: msgpack of EventBatch, BlockStored, BlockRemoved and AllBlocksCleared; frames of
  topic, sequence number (8 bytes, big-endian, from 0, no gaps) and payload; a ROUTER socket replays from a number on.
- A view built from the stream lacks blocks sometimes, and has too many only until they are looked up: what is no longer
  remembered here, found missing, or of a sealed epoch, is told as removed. A publisher begins with AllBlocksCleared,
  and says it again after it had to drop a batch.
- The salt never leaves, nor anything it could be guessed from: keys equal to it are replaced by SALTED, and the hashes
  of salted blocks are keyed with a secret of this object. Their tokens do leave, as in vLLM: routers match by them.
- Nothing here blocks its caller. `StorageEvents` may be used from several threads.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import msgspec

from perdure import limits
from perdure.errors import InvalidArgument, PerdureError

MEDIUM = "STORAGE"
SALTED = "salted"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_INT_HASH_MASK = (1 << 64) - 1  # vLLM's external form unless VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0
_BATCH_BLOCKS = 1024
_POLL_S = 0.05
_CLOSE_S = 5.0

ExternalHash = int | bytes
ExtraKeys = Sequence[tuple[Any, ...] | None]


class EventsUnavailable(PerdureError):
    """KV events cannot be published: a package is missing, or an address cannot be bound."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks one after the other; token_ids of all of them together."""

    block_hashes: list[ExternalHash]
    parent_block_hash: ExternalHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """In the order of their removal."""

    block_hashes: list[ExternalHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    """Nothing of what this publisher has told holds any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """ts: seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def as_vllm(events: Iterable[Event]) -> list[Any]:
    """The same events as objects of vLLM's classes, for its own publisher. Imports vllm."""
    from vllm.distributed import kv_events

    return [
        getattr(kv_events, type(event).__name__)(**{name: getattr(event, name) for name in event.__struct_fields__})
        for event in events
    ]


class StorageEvents:
    """What was told about the blocks of one engine's keyspace, and what is to be told next."""

    def __init__(self, block_tokens: int, *, int_hashes: bool = True, known_max: int = limits.events_known_entries_max):
        if block_tokens < 1 or known_max < 1:
            raise InvalidArgument(f"block_tokens={block_tokens}, known_max={known_max}: both must be at least 1")
        self._block_tokens = block_tokens
        self._int_hashes = int_hashes
        self._known_max = known_max
        self._secret = os.urandom(32)
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[bytes, int | None], ExternalHash] = OrderedDict()  # the coldest first
        self._waiting: list[Event] = []

    def stored(
        self,
        hashes: Sequence[bytes],
        tokens: Sequence[int],
        *,
        parent: bytes | None = None,
        lora: str | None = None,
        extra_keys: ExtraKeys | None = None,
        salt: str | None = None,
        group: int | None = None,
    ) -> None:
        """Full blocks of a sequence that are readable for others now; again is free. parent: hash of the block before.

        tokens: of these blocks, more are ignored. extra_keys: one entry per block, as vLLM hashes them. salt: the
        request's, if it has one; then also for its later blocks. Raises InvalidArgument."""
        size = self._block_tokens
        if len(tokens) < len(hashes) * size or (extra_keys is not None and len(extra_keys) < len(hashes)):
            raise InvalidArgument(f"{len(hashes)} blocks of {size} tokens need as many tokens and extra keys")
        with self._lock:
            at = 0
            while at < len(hashes):
                if self._seen(hashes[at], group):
                    at += 1
                    continue
                end = at + 1
                while end < len(hashes) and end - at < _BATCH_BLOCKS and (hashes[end], group) not in self._known:
                    end += 1
                before = hashes[at - 1] if at else parent
                told = [self._told(one, salt) for one in hashes[at:end]]
                keys = None if extra_keys is None else [without_salt(one, salt) for one in extra_keys[at:end]]
                if salt is not None and keys is None:
                    keys = [(SALTED,) for _ in told]
                self._waiting.append(BlockStored(
                    told, None if before is None else self._told(before, salt),
                    [int(token) for token in tokens[at * size : end * size]], size, None, MEDIUM, lora, keys, group,
                ))  # fmt: skip
                self._known.update(zip(((one, group) for one in hashes[at:end]), told, strict=True))
                at = end
            self._forget(len(self._known) - self._known_max)

    def missing(self, hashes: Iterable[bytes], *, group: int | None = None) -> None:
        """These were looked up and are not there. What was never told is not told now."""
        with self._lock:
            gone = [told for one in hashes if (told := self._known.pop((one, group), None)) is not None]
            if gone:
                self._waiting.append(BlockRemoved(gone, MEDIUM, group))

    def cleared(self) -> None:
        """None of the blocks is of use any more: the epoch of the weights was sealed."""
        with self._lock:
            self._forget(len(self._known))

    def take(self) -> list[Event]:
        """What is to be told, in order; it is the caller's to tell."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            return waiting

    def _seen(self, one: bytes, group: int | None) -> bool:
        if (one, group) not in self._known:
            return False
        self._known.move_to_end((one, group))
        return True

    def _forget(self, count: int) -> None:
        """The coldest `count` are removed from everybody's view."""
        groups: dict[int | None, list[ExternalHash]] = {}
        for _ in range(max(0, count)):
            (_, group), told = self._known.popitem(last=False)
            groups.setdefault(group, []).append(told)
        for group, gone in groups.items():
            self._waiting += [
                BlockRemoved(gone[at : at + _BATCH_BLOCKS], MEDIUM, group) for at in range(0, len(gone), _BATCH_BLOCKS)
            ]

    def _told(self, one: bytes, salt: str | None) -> ExternalHash:
        if salt is not None:  # the salt is in the hash, and with the tokens at hand it could be guessed from it
            one = hashlib.blake2b(one, key=self._secret, digest_size=32).digest()
        return int.from_bytes(one, "big") & _INT_HASH_MASK if self._int_hashes else one


def without_salt(keys: tuple[Any, ...] | None, salt: str | None) -> tuple[Any, ...] | None:
    """Extra keys of a block, with SALTED in the place of the salt, tagged as vLLM hashes them or not."""
    if keys is None or salt is None:
        return keys
    return tuple(SALTED if one == salt else without_salt(one, salt) if isinstance(one, tuple) else one for one in keys)


class EventPublisher:
    """Sends batches over ZeroMQ. endpoint: where subscribers connect to; replay_endpoint: where they ask for old ones.

    Raises EventsUnavailable when pyzmq is missing or an address cannot be bound."""

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        rank: int = 0,
        replay_max: int = limits.events_replay_entries_max,
        waiting_max: int = limits.events_waiting_entries_max,
    ):
        try:
            import zmq
        except ImportError as error:
            raise EventsUnavailable("KV events need pyzmq: pip install 'perdure[events]'") from error
        self._topic = topic.encode()
        self._rank = rank
        self._queue: queue.Queue[list[Event] | None] = queue.Queue(waiting_max)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=replay_max)
        self._lost = threading.Event()
        self._lost.set()  # a subscriber may remember what another process told it
        self._closed = threading.Event()
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._replay = None if replay_endpoint is None else self._context.socket(zmq.ROUTER)
        try:
            self.endpoint = _bound(self._publisher, endpoint)
            self.replay_endpoint = None if replay_endpoint is None else _bound(self._replay, replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise EventsUnavailable(f"KV events: {endpoint}, {replay_endpoint}: {error}") from error
        self._thread = threading.Thread(target=self._run, name="perdure-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[Event]) -> None:
        """Hand over; comes back at once. When too many wait, these are dropped, and AllBlocksCleared follows."""
        if not events or self._closed.is_set():
            return
        try:
            self._queue.put_nowait(events)
        except queue.Full:
            self._lost.set()

    def close(self) -> None:
        """Send what waits, then end. Repeatable."""
        self._closed.set()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._context.destroy(linger=0)

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the thread
    def _run(self) -> None:
        while True:
            if self._lost.is_set():
                self._lost.clear()
                self._send([AllBlocksCleared()])
            try:
                events = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                if self._closed.is_set():
                    return
            else:
                if events is not None:
                    self._send(events)
            if self._replay is not None and self._replay.poll(0):
                self._answer(self._replay)

    def _send(self, events: list[Event]) -> None:
        number = self._sent[-1][0] + 1 if self._sent else 0
        payload = msgspec.msgpack.encode(EventBatch(time.time(), events, self._rank))
        self._sent.append((number, payload))
        self._publisher.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer(self, replay: Any) -> None:
        """Everything from the asked number on, then END_OF_REPLAY. A question of another shape gets no answer."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, _, first = frames
        for number, payload in self._sent:
            if number >= int.from_bytes(first, "big"):
                replay.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
        replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _bound(socket: Any, endpoint: str) -> str:
    """Bind; the address with the port that port 0 became."""
    import zmq

    socket.bind(endpoint)
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
