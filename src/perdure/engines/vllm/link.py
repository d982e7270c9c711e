"""A connector's link to the service: connected when first needed, given up for a while after an error.

Contract
- Never used by the threads that vLLM calls: every method may wait for the service.
- While the service is away `spaces` raises LinkDown at once, until the time of the next attempt: attempts are
  `retry_s_min` apart at first and `retry_s_max` in the end.
- Thread-safe.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from perdure.engines.vllm.settings import Settings
from perdure.errors import PerdureError
from perdure.keys import KVLayout

_LOG = logging.getLogger("perdure.vllm")


class NotNow(PerdureError):
    """Something that is no fault of the service's: there is no reason to leave it alone."""


class LinkDown(NotNow):
    """The service could not be reached a moment ago."""


class Link:
    """name: shown by `perdure top`. model: the keyspaces' model."""

    def __init__(self, settings: Settings, name: str, model: str):
        self._settings, self._name, self._model = settings, name, model
        self._lock = threading.Lock()
        self._store: Any = None
        self._spaces: dict[tuple[str, str, KVLayout], Any] = {}
        self._retry_s = settings.retry_s_min
        self._closed_until = 0.0
        self._closed = False

    @property
    def shares_memory(self) -> bool:
        """Whether the service is on this host."""
        return not self._settings.url.startswith(("tcp://", "nixl://"))

    @property
    def up(self) -> bool:
        return time.monotonic() >= self._closed_until

    def store(self) -> Any:
        """The connection. Raises LinkDown, or what `perdure.connect` raises."""
        with self._lock:
            if self._store is None:
                self._attempt()
                import perdure

                self._store = perdure.connect(self._settings.url, name=self._name)
                self._retry_s = self._settings.retry_s_min
            return self._store

    def space(self, weights: str, lora: str, layout: KVLayout) -> Any:
        """The keyspace of one KV-cache group. Raises LinkDown, or what the service answers."""
        name = (weights, lora, layout)
        space = self._spaces.get(name)
        if space is None:
            store = self.store()
            with self._lock:
                self._attempt()
                space = store.keyspace(
                    model=self._model, weights=weights, layout=layout, tenant=self._settings.tenant, lora=lora
                )
                self._spaces[name] = space
        elif not self.up:
            raise LinkDown(f"{self._settings.url}: no service answered a moment ago")
        return space

    def _attempt(self) -> None:
        if self._closed or not self.up:
            raise LinkDown(f"{self._settings.url}: no service answered a moment ago")

    def failed(self, error: Exception) -> None:
        """Something that used the link failed: leave the service alone for a while."""
        if isinstance(error, NotNow):
            return
        with self._lock:
            self._closed_until = time.monotonic() + self._retry_s
            wait_s, self._retry_s = self._retry_s, min(2 * self._retry_s, self._settings.retry_s_max)
        _LOG.warning("perdure: %s: %s; not used for %.0f s", self._settings.url, error, wait_s)

    def worked(self) -> None:
        self._retry_s = self._settings.retry_s_min

    def close(self) -> None:
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
            self._spaces.clear()
        if store is not None:
            store.close()
