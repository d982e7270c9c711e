"""The service of `bench sessions`: the real one, in a process of its own, on a device that reads at a given rate.

    python -m perdure.benchmarks.sessions_service DIR SOCKET BYTES_PER_S CPUS

Contract
- The store and the server are those of `perdure serve`; only the files are behind a seam. BYTES_PER_S bounds the
  reads of all data together (0: no bound); writes are the disk's own. There is no DRAM tier,
  so whatever is restored is read.
- Prints one line when it serves. Ends when its stdin does, so also when whoever started it was killed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import perdure
from perdure import Seams
from perdure.benchmarks.sessions_child import CAPACITY_BYTES, pin
from perdure.io.api import Files
from perdure.io.files import PosixFiles
from perdure.io.siblings import ThrottledFiles
from perdure.service.server import Server, shared_pool

_UNBOUND: Final = 1e15  # bytes per second
_SWITCH_INTERVAL_S: Final = 0.0005  # as `perdure serve`


def serve(directory: Path, socket: Path, read_bytes_per_s: float) -> None:
    """Until stdin ends."""

    def files(root: str) -> Files:
        real: Files = PosixFiles(root)
        return ThrottledFiles(real, read_bytes_per_s, _UNBOUND) if read_bytes_per_s else real

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with perdure.open(
        directory, capacity=CAPACITY_BYTES, memory=0, codec="off", seams=Seams(files=files, pool=shared_pool)
    ) as store:
        store.wait_ready()
        server = Server(store, socket=socket)
        server.start()
        try:
            os.write(1, b"{}\n")
            while os.read(0, 4096):
                pass
        finally:
            server.stop()


if __name__ == "__main__":
    _, _directory, _socket, _rate, _cpus = sys.argv
    pin(_cpus)
    serve(Path(_directory), Path(_socket), float(_rate))
