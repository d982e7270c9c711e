"""A service as an engine's adapter sees it: connected when first needed, never waited for longer than agreed.

Contract
- `ask` never raises and comes back within its time: an error or a call that is not answered in time gives the answer
  that stands for "nothing is cached", and for `off_s` seconds after it nothing is asked. The log says so.
- A service that is not there when the engine starts is connected to later. Settings that can never work raise at once.
- Not guaranteed: that a call that was given up has had no effect.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, TypeVar

from perdure.errors import InvalidArgument
from perdure.keys import KeyspaceIdentity, KVLayout, check_text
from perdure.service.client import RemoteStore, connect

T = TypeVar("T")
OFF_S = 5.0
_THREADS = 8  # a call that is given up holds one of them until the client's own deadline
_GIVE_UP_S = 0.05  # how much longer than its deadline a call that keeps deadlines itself may take

log = logging.getLogger("perdure.engines")


class Link:
    """A connection that is made when first used. Thread-safe."""

    def __init__(self, url: str, name: str, *, off_s: float = OFF_S):
        self.url = check_text(url, "url").decode()
        if not url:
            raise InvalidArgument("url is empty: pass the service's address, for example 'unix:///run/perdure.sock'")
        self._name, self._off_s = name, off_s
        self._store: RemoteStore | None = None
        self._spaces: dict[tuple[str, KeyspaceIdentity], Any] = {}
        self._making = threading.Lock()
        self._off_until = 0.0
        self._first: set[Hashable] = set()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="perdure-ask")
        self.failures = 0

    def store(self) -> RemoteStore:
        """Raises what `perdure.connect` raises."""
        with self._making:
            if self._store is None:
                self._store = connect(self.url, name=self._name)
            return self._store

    def space(self, tenant: str, identity: KeyspaceIdentity, codec: str | None = None) -> Any:
        """The keyspace; made once. Raises as `RemoteStore.keyspace`."""
        made = self._spaces.get((tenant, identity))
        if made is None:
            one, store = identity, self.store()
            made = store.keyspace(
                model=one.model, weights=one.weights, layout=one.layout, tenant=tenant, lora=one.lora, codec=codec
            )
            made = self._spaces.setdefault((tenant, identity), made)
        return made

    @property
    def off(self) -> bool:
        """Whether nothing is asked at present, because a call has failed."""
        return time.monotonic() < self._off_until

    def trip(self, why: object) -> None:
        """Ask nothing for a while."""
        self.failures += 1
        if not self.off:
            log.warning("%s at %s: %s; nothing is cached for %g s", self._name, self.url, why, self._off_s)
        self._off_until = time.monotonic() + self._off_s

    def ask(self, verb: Callable[[], T], otherwise: T, within_s: float) -> T:
        """What `verb` says, or `otherwise`."""
        if self.off:
            return otherwise
        try:
            return self._threads.submit(verb).result(within_s)
        except NotInTime:
            self.trip(f"no answer in {within_s:g} s")
        except Exception as error:  # noqa: BLE001 - whatever fails here must not fail the engine
            self.trip(f"{type(error).__name__}: {error}")
        return otherwise

    def first(self, what: Hashable, verb: Callable[[], Any], within_s: float) -> bool:
        """Have `verb` done once for `what`, as `ask`: what a transfer needs that keeps no deadline. Whether it is."""
        if what not in self._first and self.ask(lambda: (verb(), True)[1], False, within_s):
            self._first.add(what)
        return what in self._first

    def move(self, verb: Callable[[], T], otherwise: T, within_s: float) -> T:
        """As `ask`, in the calling thread: for a verb that keeps the deadline by itself."""
        if self.off:
            return otherwise
        started = time.monotonic()
        try:
            answer = verb()
        except Exception as error:  # noqa: BLE001 - as above
            self.trip(f"{type(error).__name__}: {error}")
            return otherwise
        if time.monotonic() - started >= within_s + _GIVE_UP_S:
            self.trip(f"a transfer took longer than {within_s:g} s")
        return answer

    def close(self) -> None:
        """Idempotent. Calls that are under way end first."""
        self._threads.shutdown(wait=True)
        with self._making:
            if self._store is not None:
                self._store.close()
                self._store = None


def seconds(value: Any, what: str) -> float:
    """A setting in seconds, above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InvalidArgument(f"{what}={value!r}: must be seconds, above 0")
    return float(value)


def check_identity(model: str, weights: str, layout: KVLayout) -> KeyspaceIdentity:
    """KeyspaceIdentity, with where a digest of the weights comes from if there is none."""
    if not weights:
        raise InvalidArgument(
            "weights is missing: pass a digest of the weights that the engine loads, as 'algorithm:value', for example "
            "what `cat MODEL/*.safetensors | sha256sum` prints behind 'sha256:'; it is part of every block's name"
        )
    return KeyspaceIdentity(model, weights, layout)
