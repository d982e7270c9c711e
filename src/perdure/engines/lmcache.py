"""LMCache keeps its L2 in Perdure: a connector for its `native_plugin` adapter.

    lmcache server --l2-adapter '{"type": "native_plugin", "module_path": "perdure.engines.lmcache",
        "class_name": "PerdureConnector", "adapter_params": {"url": "unix:///run/perdure.sock", "tenant": "acme",
        "weights": "sha256:..."}}'

Contract
- The six calls of LMCache 0.5's native connectors: `submit_*` return a number at once, `event_fd` becomes readable when
  something is done, `drain_completions` says what: (number, all went well, first reason, one bool per key).
- An object is True only if its bytes were verified and are in the caller's memory. Missing, corrupt and late ones, and
  all while the service is away, are False; their memory is untouched. Nothing raises into LMCache after construction.
- LMCache's key says model, rank, group, chunk and salt, not what the bytes are. So `weights` is part of every name, and
  `layout` (any text: dtype, attention backend) may be. Object sizes are, by themselves.
- LMCache's salts separate tenants' objects as LMCache's own adapters do; with `salt_required` what has none is refused.
- LMCache asks whether an object is there without its size. The sizes of a model are therefore kept in the store, up to
  SIZES_MAX of them; if that entry is lost, objects are missed until the next one is stored.
- Nothing is deleted by LMCache: the service's capacity decides.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.engines.link import OFF_S, Link, check_identity, seconds
from perdure.errors import InvalidArgument, ServiceUnavailable
from perdure.keys import KVLayout, check_text, tenant_secret
from perdure.keyspace import durability_of
from perdure.limits import MIB
from perdure.options import refuse_unknown
from perdure.reports import WriteStatus
from perdure.segments.landing import BlockStatus

SIZES_MAX = 16
CHUNK_TOKENS = 256
_SIZE_BLOCK_BYTES = 64
_SIZES_AGE_S = 30.0  # another process may have stored objects of another size
_THREADS = 4
_ASKING_THREADS = 2  # questions do not wait behind transfers

_PART_BYTES_MIN = 4 * MIB  # below this a part's calls cost more than doing it beside another one saves

Job = Callable[[], tuple[list[bool], str]]
Completion = tuple[int, bool, str, list[bool] | None]


class PerdureConnector:
    """What LMCache makes by `class_name`, with `adapter_params` as keywords.

    url, tenant, weights: where, whose, and a digest of what is loaded (text, or {model: digest}). layout: text that is
    part of every name. chunk_tokens: LMCache's --chunk-size. dtype: of the elements, for compression. durability:
    "ephemeral" survives the process, as LMCache's own adapters do, "session" a power cut. lookup_s, read_s, write_s:
    how long a batch may take. off_s: how long nothing is asked after the service did not answer.

    Raises InvalidArgument, UnknownOption.
    """

    def __init__(
        self,
        *,
        url: str = "",
        tenant: str = "",
        weights: str | dict[str, str] = "",
        layout: str = "",
        salt_required: bool = False,
        chunk_tokens: int = CHUNK_TOKENS,
        dtype: str = "uint8",
        codec: str = "off",
        durability: str = "ephemeral",
        lookup_s: float = 1.0,
        read_s: float = 5.0,
        write_s: float = 30.0,
        off_s: float = OFF_S,
        **unknown: Any,
    ):
        refuse_unknown(unknown, _SETTINGS, "adapter_params")
        self._lookup_s, self._read_s = seconds(lookup_s, "lookup_s"), seconds(read_s, "read_s")
        self._write_s = seconds(write_s, "write_s")
        tenant_secret(b"", tenant)  # checks the name
        self._tenant, self._weights, self._codec = tenant, weights, codec
        self._salt_required, self._durability = bool(salt_required), durability_of(durability)
        self._order = "lmcache/1 " + check_text(layout, "layout").decode()
        self._base = KVLayout(chunk_tokens, 1, dtype, self._order)
        for digest in weights.values() if isinstance(weights, dict) else [weights]:
            check_identity("any", digest, self._base)
        self._link = Link(url, "lmcache", off_s=seconds(off_s, "off_s"))
        self._sizes: dict[str, list[int]] = {}
        self._sizes_read: dict[str, float] = {}
        self._lock = threading.Lock()
        self._number, self._done = 0, list[Completion]()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asking = ThreadPoolExecutor(_ASKING_THREADS, thread_name_prefix="perdure-lmcache-ask")
        self._moving = ThreadPoolExecutor(_THREADS, thread_name_prefix="perdure-lmcache")
        self.counts = {"found": 0, "missed": 0, "corrupt": 0, "late": 0, "stored": 0, "refused": 0}

    # --- LMCache's interface
    def event_fd(self) -> int:
        return self._event

    def submit_batch_exists(self, keys: list[str]) -> int:
        return self._submit(self._asking, [len(keys)], [lambda: self._exists(keys)])

    def submit_batch_get(self, keys: list[str], memoryviews: Sequence[Any]) -> int:
        return self._submit_parts(self._get, keys, memoryviews)

    def submit_batch_set(self, keys: list[str], memoryviews: Sequence[Any]) -> int:
        return self._submit_parts(self._set, keys, memoryviews)

    def drain_completions(self) -> list[Completion]:
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """What is under way ends first. Idempotent."""
        for threads in (self._moving, self._asking):
            threads.shutdown(wait=True, cancel_futures=True)
        self._link.close()
        if self._event >= 0:
            os.close(self._event)
            self._event = -1

    # --- jobs
    def _submit(self, threads: ThreadPoolExecutor, counts: list[int], jobs: list[Job]) -> int:
        """Do the parts of one batch side by side; it is done when the last one is."""
        with self._lock:
            self._number += 1
            number = self._number
        answers: list[list[bool]] = [[False] * count for count in counts]
        reasons: list[str] = [""] * len(jobs)
        left = len(jobs)

        def run(part: int) -> None:
            nonlocal left
            try:
                answers[part], reasons[part] = jobs[part]()
            except Exception as error:  # noqa: BLE001 - LMCache waits for an answer, whatever it is
                reasons[part] = f"{type(error).__name__}: {error}"
            with self._lock:
                left -= 1
                if not left:
                    answer = [one for part in answers for one in part]
                    self._done.append((number, all(answer), next(filter(None, reasons), ""), answer))
                    os.eventfd_write(self._event, 1)

        for part in range(len(jobs)):
            threads.submit(run, part)
        return number

    def _submit_parts(
        self, verb: Callable[[list[str], list[Any]], tuple[list[bool], str]], keys: list[str], views: Sequence[Any]
    ) -> int:
        blocks = [np.frombuffer(view, np.uint8) for view in views]
        total = sum(block.nbytes for block in blocks)
        parts = max(1, min(_THREADS, len(keys), total // _PART_BYTES_MIN)) if len(keys) == len(blocks) else 1
        cuts = [len(keys) * part // parts for part in range(parts + 1)]
        jobs: list[Job] = [
            lambda first=first, end=end: verb(keys[first:end], blocks[first:end])  # type: ignore[misc]
            for first, end in pairwise(cuts)
        ]
        return self._submit(self._moving, [end - first for first, end in pairwise(cuts)], jobs)

    def _exists(self, keys: list[str]) -> tuple[list[bool], str]:
        answer = np.zeros(len(keys), bool)
        for model, places in self._by_model(keys).items():
            names = [keys[at].encode() for at in places]
            found = self._link.ask(lambda m=model, n=names: self._present(m, n), None, self._lookup_s)  # type: ignore[misc]
            if found is not None:
                answer[places] = found
        return answer.tolist(), ""

    def _present(self, model: str, names: list[bytes]) -> NDArray[np.bool_]:
        found = np.zeros(len(names), bool)
        for size in self._known_sizes(model):
            space = self._space(model, size)
            array = space.adopt_hashes(names)
            count = space.lookup(array)
            mask = np.ones(len(names), bool) if count == len(names) else space.present(array)
            found |= mask
            if found.all():
                break
        return found

    def _get(self, keys: list[str], blocks: list[Any]) -> tuple[list[bool], str]:
        answer, why = np.zeros(len(keys), bool), ""
        for (model, size), places in self._by_size(keys, blocks).items():
            into = [blocks[at] for at in places]
            names = [keys[at].encode() for at in places]
            if not self._open(model, size):
                continue
            report = self._link.move(
                lambda m=model, s=size, n=names, i=into: self._read(m, s, n, i), None, self._read_s  # type: ignore[misc]
            )  # fmt: skip
            if report is None:
                continue
            answer[places] = report.statuses == BlockStatus.FOUND
            why = why or next(iter(report.problems.values()), "")
            self._count(corrupt=report.count(BlockStatus.CORRUPT), late=report.count(BlockStatus.LATE))
        found = int(answer.sum())
        self._count(found=found, missed=len(keys) - found)
        return answer.tolist(), why

    def _read(self, model: str, size: int, names: list[bytes], into: list[Any]) -> Any:
        space = self._space(model, size)
        report = space.read(space.adopt_hashes(names), into, deadline_s=self._read_s)
        if (report.statuses == BlockStatus.LATE).all():
            self._link.trip(f"no object in {self._read_s:g} s")
        return report

    def _set(self, keys: list[str], blocks: list[Any]) -> tuple[list[bool], str]:
        answer, why = np.zeros(len(keys), bool), ""
        for (model, size), places in self._by_size(keys, blocks).items():
            source = [blocks[at] for at in places]
            names = [keys[at].encode() for at in places]
            if not self._open(model, size):
                continue
            report = self._link.move(
                lambda m=model, s=size, n=names, b=source: self._write(m, s, n, b), None, self._write_s  # type: ignore[misc]
            )  # fmt: skip
            if report is None:
                continue
            answer[places] = report.statuses <= WriteStatus.EXISTS
            why = why or next(iter(report.reasons.values()), "")
        stored = int(answer.sum())
        self._count(stored=stored, refused=len(keys) - stored)
        return answer.tolist(), why if stored < len(keys) else ""

    def _write(self, model: str, size: int, names: list[bytes], source: list[Any]) -> Any:
        space = self._space(model, size)
        if size not in self._sizes.get(model, ()):
            self._remember(model, size)
        return space.write(
            space.adopt_hashes(names), source, durability=self._durability, deadline_s=self._write_s
        )  # fmt: skip

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self.counts[name] += count

    # --- names
    def _space(self, model: str, size: int) -> Any:
        layout = KVLayout(self._base.block_tokens, size, self._base.dtype, self._order)
        return self._link.space(self._tenant, check_identity(model, self._digest(model), layout), self._codec)

    def _open(self, model: str, size: int) -> bool:
        """Whether the keyspaces that a transfer needs are open."""
        return self._link.first(
            (model, size), lambda: (self._space(model, size), self._slots(model)), self._lookup_s
        )  # fmt: skip

    def _digest(self, model: str) -> str:
        return self._weights.get(model, "") if isinstance(self._weights, dict) else self._weights

    def _by_model(self, keys: list[str]) -> dict[str, list[int]]:
        """Positions of the keys that may be used, by model; the others are left out."""
        groups: dict[str, list[int]] = {}
        for at, key in enumerate(keys):
            model, *rest = key.split("@")
            salted = len(rest) >= 4 and rest[3] != ""
            if len(rest) >= 3 and self._digest(model) and (salted or not self._salt_required):
                groups.setdefault(model, []).append(at)
        return groups

    def _by_size(self, keys: list[str], blocks: list[Any]) -> dict[tuple[str, int], list[int]]:
        if len(keys) != len(blocks):
            raise InvalidArgument(f"{len(keys)} keys and {len(blocks)} buffers")
        groups: dict[tuple[str, int], list[int]] = {}
        for model, places in self._by_model(keys).items():
            for at in places:
                groups.setdefault((model, blocks[at].nbytes), []).append(at)
        return groups

    # --- sizes of a model's objects
    def _known_sizes(self, model: str) -> list[int]:
        age = time.monotonic() - self._sizes_read.get(model, -_SIZES_AGE_S)
        if age >= _SIZES_AGE_S or not self._sizes.get(model):
            self._read_sizes(model)
        return self._sizes.get(model, [])

    def _slots(self, model: str) -> tuple[Any, Any]:
        layout = KVLayout(1, _SIZE_BLOCK_BYTES, "uint8", "sizes of " + self._order)
        space = self._link.space(self._tenant, check_identity(model, self._digest(model), layout), "off")
        return space, space.adopt_hashes([b"size %d" % number for number in range(SIZES_MAX)])

    def _read_sizes(self, model: str) -> list[int | None]:
        """What the slots hold, None where nothing; remembers the sizes."""
        space, keys = self._slots(model)
        memory = np.zeros((SIZES_MAX, _SIZE_BLOCK_BYTES), np.uint8)
        report = space.read(keys, memory, deadline_s=self._lookup_s)
        held = [
            struct.unpack_from("<Q", memory[at])[0] if status == BlockStatus.FOUND else None
            for at, status in enumerate(report.statuses.tolist())
        ]
        with self._lock:
            known = self._sizes.setdefault(model, [])
            known += [size for size in dict.fromkeys(held) if size is not None and size not in known]
        self._sizes_read[model] = time.monotonic()
        return held

    def _remember(self, model: str, size: int) -> None:
        """Put a size into the first free slot. Of two who take the same one, the later finds the other's there."""
        space, keys = self._slots(model)
        block = np.zeros((1, _SIZE_BLOCK_BYTES), np.uint8)
        struct.pack_into("<Q", block[0], 0, size)
        for _ in range(SIZES_MAX):
            held = self._read_sizes(model)
            if size in held:
                break
            if None not in held:
                raise InvalidArgument(f"{model}: objects of more than {SIZES_MAX} sizes")
            free = held.index(None)
            report = space.write(keys[free : free + 1], block, durability="session", deadline_s=self._write_s)
            if not report.durable:
                raise ServiceUnavailable(f"the size of an object could not be stored: {report.reasons.get(0, 'late')}")
        with self._lock:
            known = self._sizes.setdefault(model, [])
            if size not in known:
                known.append(size)


_SETTINGS = (
    "url", "tenant", "weights", "layout", "salt_required", "chunk_tokens", "dtype", "codec", "durability", "lookup_s",
    "read_s", "write_s", "off_s",
)  # fmt: skip
