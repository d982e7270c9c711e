"""Whether the blocks of one keyspace are compressed, decided from measurements and said in `status`.

A lossless codec saves disk bytes and costs decoding on every restore. `auto` compresses only where the device delivers
compressed bytes slower than the cores decode them; it measures the ratio and the speed on the first block written and
the device once per opened store.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perdure import codecs
from perdure.buffers import Parts, copy_parts
from perdure.errors import InvalidArgument

if TYPE_CHECKING:
    from perdure.core import Core

POLICIES = ("auto", "on", "off")


class Encoder:
    """Codec of one keyspace. Thread-safe."""

    def __init__(self, policy: str, element_bytes: int):
        if policy not in POLICIES:
            raise InvalidArgument(f"codec={policy!r}: must be one of {', '.join(POLICIES)}")
        self.policy, self._element_bytes = policy, element_bytes
        self.codec: int | None = None  # not decided yet
        self.reason = "decided when the first block is written"
        self._lock = threading.Lock()

    def encode(self, core: Core, blocks: Sequence[Parts]) -> tuple[list[Parts], NDArray[np.uint8]]:
        """Stored form of each block and the codec that was used for it; incompressible blocks stay as they are."""
        used = np.full(len(blocks), codecs.NONE, np.uint8)
        if not blocks:
            return [], used
        codec = self._decide(core, blocks[0])
        if codec == codecs.NONE:
            return list(blocks), used

        def one(parts: Parts) -> memoryview | None:
            encoded = codecs.encode(codec, parts, self._element_bytes)
            return None if encoded is None else memoryview(encoded).cast("B")

        results = list(core.workers.map(one, blocks)) if len(blocks) > 1 else [one(blocks[0])]
        payloads: list[Parts] = []
        for place, (result, parts) in enumerate(zip(results, blocks, strict=True)):
            if result is None:
                payloads.append(parts)
            else:
                payloads.append([result])
                used[place] = codec
        return payloads, used

    def _decide(self, core: Core, sample: Parts) -> int:
        if self.codec is not None:
            return self.codec
        with self._lock:
            if self.codec is None:
                self.codec, self.reason = self._measure(core, sample)
        return self.codec

    def _measure(self, core: Core, sample: Parts) -> tuple[int, str]:
        cores = len(os.sched_getaffinity(0))
        if self.policy != "auto":
            return codecs.choose(self.policy, None, None, None, cores)
        flat = memoryview(bytearray(sum(part.nbytes for part in sample)))
        copy_parts(sample, [flat])
        measured = codecs.measure(flat, self._element_bytes)
        device = core.rates.device_rate(core.files, core.engine, core.scratch)
        return codecs.choose("auto", device, measured.ratio, measured.decode_bytes_per_s, cores)
