"""Can one tenant tell from the time it takes what another has asked for? The audit of arXiv 2502.07776, paired.

For each sample a prefix that nobody has used is stored by tenant A. Then, in an order drawn anew each time, it is asked
for by A again (`same`), by tenant B (`other`), and B asks for one that nobody has stored (`fresh`).

Contract
- Isolated means all of: A hits every prefix, B none (paired: a cache that is off would pass a test of B alone); times
  of `other` and `fresh` look drawn alike (two-sample Kolmogorov-Smirnov, p at least `P_MIN`); and times of `same` and
  `fresh` do not, or the test could not have seen a hit and is inconclusive.
- It works on a live service or endpoint and leaves nothing but blocks that expire (`ttl_s`).
"""

from __future__ import annotations

import http.client
import json
import math
import secrets
import ssl
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import ArrayLike

from perdure.errors import InvalidArgument, ServiceUnavailable
from perdure.keys import KVLayout

P_MIN: Final = 1e-8  # of the paper: far below what chance gives, so that a finding is one
SAMPLES_DEFAULT: Final = 250
KINDS: Final = ("same", "other", "fresh")
_TTL_S: Final = 600.0
_ENDPOINT_S: Final = 120.0


class Probe(Protocol):
    """Asks as two tenants. A sample is a number; equal numbers are equal prefixes."""

    def store(self, sample: int) -> None:
        """As tenant A, the first time."""
        ...

    def ask(self, kind: str, sample: int) -> tuple[float, bool | None]:
        """Seconds, and whether it hit (None: cannot be told). kind: of KINDS."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """auc: how well `other` can be told from `fresh` by time, 0.5 is not at all. p_*: of the KS tests. hits: of `same`,
    `other` and `fresh`, where they could be told."""

    samples: int
    auc: float
    p_other: float
    p_same: float
    hits: dict[str, int | None]
    median_s: dict[str, float]
    problems: tuple[str, ...]
    inconclusive: str

    @property
    def isolated(self) -> bool:
        return not self.problems and not self.inconclusive


def audit(probe: Probe, samples: int = SAMPLES_DEFAULT, progress: Callable[[int, int], None] | None = None) -> Verdict:
    """Raises InvalidArgument, ServiceUnavailable."""
    if samples < 20:
        raise InvalidArgument(f"samples={samples}: at least 20 are needed to tell anything")
    rng = secrets.SystemRandom()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    hits: dict[str, list[bool | None]] = {kind: [] for kind in KINDS}
    for number in range(-3, samples):  # the first ones warm up
        sample, unseen = rng.getrandbits(48), rng.getrandbits(48)
        probe.store(sample)
        for kind in rng.sample(KINDS, len(KINDS)):
            seconds, hit = probe.ask(kind, unseen if kind == "fresh" else sample)
            if number >= 0:
                times[kind].append(seconds)
                hits[kind].append(hit)
        if progress is not None:
            progress(max(0, number + 1), samples)
    return _judge(samples, times, hits)


def _judge(samples: int, times: dict[str, list[float]], hits: dict[str, list[bool | None]]) -> Verdict:
    p_other, p_same = ks_p(times["other"], times["fresh"]), ks_p(times["same"], times["fresh"])
    counted = {kind: None if None in seen else sum(map(bool, seen)) for kind, seen in hits.items()}
    problems: list[str] = []
    if counted["other"]:
        problems.append(f"tenant B hit {counted['other']} of {samples} prefixes that only tenant A has used")
    if p_other < P_MIN:
        problems.append(f"by time, tenant B can tell what tenant A has used (KS p = {p_other:.1e} < {P_MIN:g})")
    inconclusive = ""
    if counted["same"] is not None and counted["same"] < samples:
        inconclusive = (
            f"tenant A hit {counted['same']} of {samples} of its own prefixes: the cache does not work for it"
        )
    elif p_same >= P_MIN:
        inconclusive = (
            f"a hit takes as long as a miss (KS p = {p_same:.1e}), so none could be seen: use longer prefixes"
        )
    return Verdict(
        samples, auc(times["other"], times["fresh"]), p_other, p_same, counted,
        {kind: float(np.median(one)) for kind, one in times.items()}, tuple(problems), inconclusive,
    )  # fmt: skip


def ks_p(one: ArrayLike, other: ArrayLike) -> float:
    """p value of the two-sample Kolmogorov-Smirnov test (asymptotic; Numerical Recipes 14.3.3)."""
    a, b = np.sort(np.asarray(one, float)), np.sort(np.asarray(other, float))
    every = np.concatenate([a, b])
    gaps = np.searchsorted(a, every, "right") / len(a) - np.searchsorted(b, every, "right") / len(b)
    n = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    x = (n + 0.12 + 0.11 / n) * float(np.abs(gaps).max())
    if x < 0.2:  # the series does not converge there, and p is 1
        return 1.0
    p = 2 * sum((1 if k % 2 else -1) * math.exp(-2 * k * k * x * x) for k in range(1, 101))
    return min(1.0, max(0.0, p))


def auc(positive: ArrayLike, negative: ArrayLike) -> float:
    """Area under the ROC curve of telling `positive` by smaller values; folded, so that 0.5 is the least."""
    p, n = np.asarray(positive, float), np.sort(np.asarray(negative, float))
    above = len(n) - (np.searchsorted(n, p, "left") + np.searchsorted(n, p, "right")) / 2
    area = float(above.mean() / len(n))
    return max(area, 1 - area)


class StoreProbe:
    """Of a Perdure service: look up and read, as an engine does before it computes. mine, theirs: clients (or stores)
    of tenant A and of tenant B."""

    def __init__(self, mine: Any, theirs: Any, tenants: tuple[str, str], *, blocks: int, block_bytes: int):
        layout = KVLayout(block_tokens=16, block_bytes=block_bytes, dtype="float16", order="audit")
        self._spaces = [
            store.keyspace(model="audit-isolation", weights="audit:1", layout=layout, tenant=tenant, codec="off")
            for store, tenant in ((mine, tenants[0]), (theirs, tenants[1]))
        ]
        self._tokens, self._size = blocks * layout.block_tokens, block_bytes
        self._memory = np.empty((blocks, block_bytes), np.uint8)

    def store(self, sample: int) -> None:
        keys = self._keys(0, sample)
        report = self._spaces[0].write(keys, np.zeros_like(self._memory), durability="ephemeral", ttl_s=_TTL_S)
        if report.stored < len(keys):
            why = next(iter(report.reasons.values()), "late")
            raise ServiceUnavailable(f"tenant A's blocks could not be stored ({why}); give it room, or fewer blocks")

    def ask(self, kind: str, sample: int) -> tuple[float, bool | None]:
        who = 0 if kind == "same" else 1
        space, keys = self._spaces[who], self._keys(who, sample)
        began = time.perf_counter()
        found = space.lookup(keys)
        usable = space.read(keys[:found], self._memory[:found]).usable if found else 0
        return time.perf_counter() - began, usable > 0

    def _keys(self, who: int, sample: int) -> Any:
        head = np.array([sample & 0xFFFFFF, sample >> 24], np.uint32)
        return self._spaces[who].chain(np.resize(head, self._tokens))


class EndpointProbe:
    """Of an inference endpoint that speaks OpenAI's completions: the time to one token, as the callers whose headers
    are given. It sees what a stranger sees, whatever engine and cache lie behind it."""

    def __init__(self, url: str, model: str, headers: Sequence[dict[str, str]], *, words: int):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or len(headers) != 2:
            raise InvalidArgument(f"endpoint {url!r}: write http://HOST:PORT/v1/completions")
        self._parts, self._model, self._headers, self._words = parts, model, headers, words

    def store(self, sample: int) -> None:
        self._post(0, sample)

    def ask(self, kind: str, sample: int) -> tuple[float, bool | None]:
        return self._post(0 if kind == "same" else 1, sample)

    def _post(self, who: int, sample: int) -> tuple[float, bool | None]:
        prompt = f"{sample} " + " ".join(str((sample >> (at % 40)) % 9973) for at in range(self._words))
        body = json.dumps({"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0})
        host, port = self._parts.hostname or "", self._parts.port
        secure = self._parts.scheme == "https"
        connection: http.client.HTTPConnection = (
            http.client.HTTPSConnection(host, port, timeout=_ENDPOINT_S, context=ssl.create_default_context())
            if secure else http.client.HTTPConnection(host, port, timeout=_ENDPOINT_S)
        )  # fmt: skip
        try:
            connection.connect()
            began = time.perf_counter()
            headers = {"Content-Type": "application/json"} | self._headers[who]
            connection.request("POST", self._parts.path or "/v1/completions", body, headers)
            response = connection.getresponse()
            answer = response.read()
            seconds = time.perf_counter() - began
        except OSError as error:
            raise ServiceUnavailable(f"{self._parts.geturl()}: {error}; is it up?") from error
        finally:
            connection.close()
        if response.status != 200:
            raise ServiceUnavailable(f"{self._parts.geturl()}: status {response.status}; check path, model and headers")
        return seconds, _cached(answer)


def _cached(answer: bytes) -> bool | None:
    """Whether the endpoint says that it used its cache, where it says anything."""
    try:
        details = json.loads(answer)["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"]) > 0
    except (ValueError, KeyError, TypeError):
        return None
