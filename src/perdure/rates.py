"""Measured rates of the tiers: what load-or-recompute and the choice of a codec are based on.

A rate is bytes per second of whole calls, smoothed over the last ones; nothing is assumed before it was measured. Reads
from the disk share it: theirs is what all of them got together while any was under way.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from perdure import limits
from perdure.io.api import Engine, Files, IOClass, Request
from perdure.io.memory import Scratch

_SMOOTHING = 0.2
_SAMPLE_S = 0.05
PROBE_PATH = "probe.tmp"
_PROBE_BYTES = 16 * limits.MIB
_PROBE_IO_BYTES = 2 * limits.MIB


@dataclass(slots=True)
class Rate:
    """Exponentially smoothed bytes per second and seconds per call."""

    bytes_per_s: float = 0.0
    calls: int = 0

    def add(self, nbytes: int, seconds: float) -> None:
        value = nbytes / max(seconds, 1e-9)
        self.bytes_per_s = value if not self.calls else (1 - _SMOOTHING) * self.bytes_per_s + _SMOOTHING * value
        self.calls += 1


class Rates:
    """Thread-safe enough: a lost update costs one sample."""

    def __init__(self) -> None:
        self.disk_read, self.memory_read, self.disk_write = Rate(), Rate(), Rate()
        self.device_read_bytes_per_s: float | None = None
        self.reading_bytes = 0  # asked of the disk, not there yet
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._busy_since = 0.0
        self._delivered = 0

    def reading(self, nbytes: int) -> None:
        """A read from the disk begins; `read` ends it."""
        with self._reading:
            if not self.reading_bytes:
                self._busy_since, self._delivered = time.monotonic(), 0
            self.reading_bytes += nbytes

    def read(self, nbytes: int, delivered: int) -> None:
        with self._reading:
            self.reading_bytes -= nbytes
            self._delivered += delivered
            now = time.monotonic()
            if self._delivered and (not self.reading_bytes or now - self._busy_since >= _SAMPLE_S):
                self.disk_read.add(self._delivered, now - self._busy_since)
                self._busy_since, self._delivered = now, 0

    def device_rate(self, files: Files, engine: Engine, scratch: Scratch) -> float | None:
        """Bytes per second the device reads at full depth, measured once per opened store (about 16 MiB); None if it
        cannot be measured (disk full, I/O error)."""
        with self._lock:
            if self.device_read_bytes_per_s is None:
                try:
                    self.device_read_bytes_per_s = _probe(files, engine, scratch)
                except OSError:
                    return None
            return self.device_read_bytes_per_s


def _probe(files: Files, engine: Engine, scratch: Scratch) -> float:
    file = files.create(PROBE_PATH)
    try:
        leases = [scratch.take(_PROBE_IO_BYTES) for _ in range(_PROBE_BYTES // _PROBE_IO_BYTES)]
        try:
            places = [at * _PROBE_IO_BYTES for at in range(len(leases))]
            for write in (True, False):
                requests = [
                    Request(file, at, [lease.view], write=write) for at, lease in zip(places, leases, strict=True)
                ]
                started = time.perf_counter()
                engine.run(requests, io_class=IOClass.RESTORE)
                seconds = time.perf_counter() - started
                for request in requests:
                    if request.error is not None:
                        raise request.error
                if write:
                    file.datasync()
            return _PROBE_BYTES / seconds
        finally:
            for lease in leases:
                lease.give_back()
    finally:
        file.close()
        files.unlink(PROBE_PATH)
