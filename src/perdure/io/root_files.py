"""Files of a root, and the engine that moves their data: what fails on the way counts against the root.

Contract: nothing is swallowed, repeated or reordered; all else is as the file and the engine inside do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from perdure.io.api import Engine, File, IOClass, Request
from perdure.io.wrappers import FileAround


@contextmanager
def noting(note: Callable[[OSError], None]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        note(error)
        raise


class RootFile(FileAround):
    """A file that knows its root. Engines may go past it to the descriptor, as with the file inside."""

    def __init__(self, inner: File, note: Callable[[OSError], None]) -> None:
        super().__init__(inner)
        self.native = inner.native
        self.note = note

    def allocate(self, offset: int, length: int) -> None:
        with noting(self.note):
            self.inner.allocate(offset, length)

    def truncate(self, length: int) -> None:
        with noting(self.note):
            self.inner.truncate(length)

    def datasync(self) -> None:
        with noting(self.note):
            self.inner.datasync()


class NotingEngine:
    """`inner`; failed transfers count against the root of their file."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    def run(
        self,
        requests: Sequence[Request],
        *,
        io_class: IOClass,
        deadline: float | None = None,
        done: Callable[[Request], None] | None = None,
    ) -> None:
        self._inner.run(requests, io_class=io_class, deadline=deadline, done=done)
        for request in requests:
            if request.error is not None and isinstance(request.file, RootFile):
                request.file.note(request.error)

    def unsettled(self) -> int:
        return self._inner.unsettled()

    def close(self) -> None:
        self._inner.close()
