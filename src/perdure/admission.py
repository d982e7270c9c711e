"""Which blocks are worth writing: always, never, by a function of the caller's, or by expected value.

Contract
- By value, a block is admitted if P(it is asked for again) x the time to compute it exceeds the price of writing it.
  P is learned per keyspace and class of block, from a sample of the keys offered (`perdure.reuse`). A class is admitted
  as long as too little is known of it.
- A refused block refuses what follows it in the call: without it they are of no use.
- Only a choice of what to store: never the contents, name or visibility of a block. A wrong guess costs a miss or a
  write.
- Thread-safe. Deterministic for the same keys, calls and clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from perdure import limits
from perdure.catalog.api import Durability, KeyArray, fingerprints
from perdure.errors import InvalidArgument, PerdureError
from perdure.reuse import Reuse

if TYPE_CHECKING:
    from perdure.keyspace import Keyspace

_GB: Final = 1e9
_DEPTH_TOKENS: Final = (2_048, 8_192, 32_768)  # bounds of depth classes, each 4 times the last
_FRONT: Final = ("new", "short", "medium", "long", "again")  # stored in front; "again": the block was offered before
_BEHIND: Final = ("near", "middle", "far", "deep")  # how far a block lies behind the first new one
CLASSES: Final = tuple(f"{front}/{behind}" for front in _FRONT for behind in _BEHIND)


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """What an admission hook is asked about: the blocks of one write that are not stored yet."""

    tenant: str
    model: str
    keys: KeyArray
    block_bytes: int
    positions: NDArray[np.intp]  # in the write call: deeper blocks of a chain are reused less
    durability: Durability


AdmissionHook = Callable[[AdmissionRequest], NDArray[np.bool_]]
"""Returns a mask: which of the blocks are worth storing."""

Refusals = list[tuple[NDArray[np.intp], str]]
"""Places in the request that are refused, and why."""


@dataclass(frozen=True, slots=True)
class AdmissionPrices:
    """What computing and writing cost, in time of one GPU. Prices change: these are of early 2026, for one H100.

    - gpu_usd_per_h: rental of an H100, upper end of $1.49-2.50.
    - flash_usd_per_gb, life_s: enterprise NVMe at $0.25/GB, written off in 5 years.
    - flash_cycles: how often the capacity can be written. 1,825 is 1 drive write per day for 5 years; data sheets give
      4 times that for large sequential writes, which segments are (Micron 9650 PRO: 7,600).
    - device_gb, device_write_gb_per_s: for the share of the device that a write keeps busy; assumed, as a common size.
      It is about a fourteenth of the wear.
    - recompute_gb_per_s: KV a GPU computes while nobody has told its speed (`prefill_tokens_per_s`): the median of
      Llama-8B, Llama-70B, Qwen3-32B, DeepSeek-V3 and gpt-oss-120b on an H100 at 8k tokens (0.37 to 3.56 GB/s).
    """

    gpu_usd_per_h: float = 2.5
    flash_usd_per_gb: float = 0.25
    flash_cycles: float = 7_600
    life_s: float = 5 * 365 * 86_400
    device_gb: float = 7_680
    device_write_gb_per_s: float = 5.0
    recompute_gb_per_s: float = 1.59

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidArgument(f"AdmissionPrices.{name}={getattr(self, name)!r}: must be a number above 0")

    def write_s(self, nbytes: int) -> float:
        """Price of writing so many bytes, in GPU seconds: wear, and the time the device is busy."""
        wear_usd = self.flash_usd_per_gb / self.flash_cycles
        busy_usd = self.flash_usd_per_gb * self.device_gb / self.life_s / self.device_write_gb_per_s
        return nbytes / _GB * (wear_usd + busy_usd) / (self.gpu_usd_per_h / 3600)

    def recompute_s(self, tokens: int, nbytes: int, prefill_tokens_per_s: float | None) -> float:
        """GPU seconds to compute a block."""
        return tokens / prefill_tokens_per_s if prefill_tokens_per_s else nbytes / _GB / self.recompute_gb_per_s


@dataclass(frozen=True, slots=True)
class ValueAdmission:
    """Admission by expected value. prefill_tokens_per_s: what the engine computes; else as `advise` was told last.
    survivors_min: a class is admitted until so many of its sampled blocks have waited in vain."""

    prices: AdmissionPrices = field(default_factory=AdmissionPrices)
    prefill_tokens_per_s: float | None = None
    survivors_min: int = limits.admission_survivors_keys_min

    def __post_init__(self) -> None:
        rate = self.prefill_tokens_per_s
        if rate is not None and not 0 < rate < float("inf"):
            raise InvalidArgument(f"ValueAdmission.prefill_tokens_per_s={rate!r}: must be a number above 0, or None")
        if not isinstance(self.survivors_min, int) or self.survivors_min < 1:
            raise InvalidArgument(f"ValueAdmission.survivors_min={self.survivors_min!r}: must be 1 or more")


AdmissionName = Literal["always", "never", "value"]
Admission = AdmissionName | AdmissionHook | ValueAdmission


class Gate:
    """What stands before the writes of one keyspace. This one admits all."""

    policy: str = "always"

    def refusals(self, request: AdmissionRequest) -> Refusals:
        return []

    def asked(self, keys: KeyArray, found: int = 0) -> None:
        """A lookup or read asked for these keys; a lookup: of which the first `found` are stored."""

    def advised(self, prefill_tokens_per_s: float) -> None:
        """What the engine computes, as far as it has said."""

    def status(self) -> dict[str, Any]:
        return {}


class _Never(Gate):
    policy = "never"

    def refusals(self, request: AdmissionRequest) -> Refusals:
        return [(np.arange(len(request.keys)), "never: the store was opened with admission='never'")]


class _Hooked(Gate):
    policy = "hook"

    def __init__(self, hook: AdmissionHook):
        self._hook = hook

    def refusals(self, request: AdmissionRequest) -> Refusals:
        mask: NDArray[np.bool_] = np.asarray(self._hook(request), bool)
        if mask.shape != (len(request.keys),):
            raise PerdureError(f"admission hook returned {mask.shape}, a mask of ({len(request.keys)},) is needed")
        return [(np.flatnonzero(~mask), "not admitted by the admission hook")]


class ValueGate(Gate):
    """now_s: a clock that goes on while the machine sleeps. kept_s: how long a block stays that nobody uses."""

    policy = "value"

    def __init__(
        self,
        how: ValueAdmission,
        block_tokens: int,
        block_bytes: int,
        now_s: Callable[[], float],
        kept_s: Callable[[], float],
    ):
        self._how, self._block_tokens, self._block_bytes = how, block_tokens, block_bytes
        self._prefill_tokens_per_s = how.prefill_tokens_per_s
        self._kept_s = kept_s
        self._reuse = Reuse(len(CLASSES), now_s)
        self._heads: dict[bytes, int] = {}  # the block after a prefix that was found -> blocks of the prefix
        self._seen: NDArray[np.uint64] | None = None  # fingerprints offered lately, each at its place by its value
        self._lock = threading.Lock()
        self._admitted, self._refused = (np.zeros(len(CLASSES), np.int64) for _ in range(2))

    def asked(self, keys: KeyArray, found: int = 0) -> None:
        self._reuse.asked(keys)
        if 0 < found < len(keys):
            with self._lock:
                self._heads[keys[found].tobytes()] = found
                if len(self._heads) > limits.admission_heads_entries_max:
                    del self._heads[next(iter(self._heads))]

    def advised(self, prefill_tokens_per_s: float) -> None:
        if self._how.prefill_tokens_per_s is None:
            self._prefill_tokens_per_s = prefill_tokens_per_s

    def refusals(self, request: AdmissionRequest) -> Refusals:
        classes = self.classes(request)
        self._reuse.offered(request.keys, classes)
        chances, known = self._reuse.chances(self._kept_s(), self._how.survivors_min)
        write_s, recompute_s = self._costs()
        refused = known & (chances * recompute_s <= write_s)
        places = np.flatnonzero(refused[classes])
        first = int(places[0]) if len(places) else len(classes)
        with self._lock:
            self._admitted += np.bincount(classes[:first], minlength=len(CLASSES))
            self._refused += np.bincount(classes[first:], minlength=len(CLASSES))
        if not len(places):
            return []
        kind = int(classes[first])
        samples = self._reuse.samples()[kind]
        why = (
            f"value: reuse {chances[kind]:.2f} of class {CLASSES[kind]} over {samples:.0f} samples, "
            f"worth {chances[kind] * recompute_s * 1e3:.3g} ms, costs {write_s * 1e3:.3g} ms"
        )
        behind = np.arange(first, len(classes))
        same = behind[classes[first:] == kind]
        return [(same, why), (np.setdiff1d(behind, same), f"behind a refused block ({why})")]

    def classes(self, request: AdmissionRequest) -> NDArray[np.intp]:
        """Class of each block: by how much is stored in front of the first new one, or whether the block was offered
        before (and refused or evicted), and by how far behind the first one it lies. Remembers that it was offered."""
        positions, prints = request.positions, fingerprints(request.keys)
        slots = prints % np.uint64(limits.admission_seen_entries)
        with self._lock:
            if self._seen is None:
                self._seen = np.zeros(limits.admission_seen_entries, np.uint64)
            stored = self._heads.get(request.keys[0].tobytes(), 0)
            again = self._seen[slots] == prints
            self._seen[slots] = prints
        tokens = max(stored, int(positions[0])) * self._block_tokens
        front = int(np.searchsorted(_DEPTH_TOKENS, tokens, side="right"))
        behind = np.searchsorted(_DEPTH_TOKENS, (positions - positions[0]) * self._block_tokens, side="right")
        classes: NDArray[np.intp] = np.where(again, _FRONT.index("again"), front) * len(_BEHIND) + behind
        return classes

    def _costs(self) -> tuple[float, float]:
        """(write, recompute) of one block in GPU seconds."""
        prices, nbytes = self._how.prices, self._block_bytes
        return prices.write_s(nbytes), prices.recompute_s(self._block_tokens, nbytes, self._prefill_tokens_per_s)

    def status(self) -> dict[str, Any]:
        """Of the classes that were offered: samples, probability (None: not known yet), blocks admitted, refused."""
        chances, known = self._reuse.chances(self._kept_s(), self._how.survivors_min)
        samples = self._reuse.samples()
        with self._lock:
            admitted, refused = self._admitted.tolist(), self._refused.tolist()
        write_s, recompute_s = self._costs()
        return {
            "write_s": write_s,
            "recompute_s": recompute_s,
            "classes": {
                name: {
                    "samples": round(float(samples[kind]), 1),
                    "probability": round(float(chances[kind]), 4) if known[kind] else None,
                    "admitted": admitted[kind],
                    "refused": refused[kind],
                }
                for kind, name in enumerate(CLASSES)
                if admitted[kind] or refused[kind]
            },
        }


class Admissions:
    """The gates of one store: keyspaces with the same digest share one, and what it has learned."""

    def __init__(self, how: Admission, now_s: Callable[[], float], kept_s: Callable[[], float]):
        self._how, self._now_s, self._kept_s = check(how), now_s, kept_s
        self._gates: dict[bytes, Gate] = {}
        self._lock = threading.Lock()

    def of(self, space: Keyspace) -> Gate:
        with self._lock:
            if space.digest not in self._gates:
                self._gates[space.digest] = self._gate(space.layout.block_tokens, space.layout.block_bytes)
            return self._gates[space.digest]

    def _gate(self, block_tokens: int, block_bytes: int) -> Gate:
        how = self._how
        if isinstance(how, ValueAdmission):
            return ValueGate(how, block_tokens, block_bytes, self._now_s, self._kept_s)
        if isinstance(how, str):
            return _Never() if how == "never" else Gate()
        return _Hooked(how)

    def status(self) -> dict[str, Any]:
        with self._lock:
            gates = dict(self._gates)
        policy = self._how if isinstance(self._how, str) else self._gate(1, 1).policy
        return {"policy": policy, "keyspaces": {digest.hex(): gate.status() for digest, gate in gates.items()}}


def check(how: object) -> Admission:
    """What `perdure.open(admission=...)` was given, or InvalidArgument."""
    if how is None:
        return "always"
    if isinstance(how, str) and how in get_args(AdmissionName):
        return ValueAdmission() if how == "value" else how  # type: ignore[return-value]  # one of the names
    if isinstance(how, ValueAdmission) or callable(how):
        return how
    known = ", ".join(map(repr, get_args(AdmissionName)))
    raise InvalidArgument(f"admission={how!r}: pass {known}, a ValueAdmission, or a function (see AdmissionHook)")
