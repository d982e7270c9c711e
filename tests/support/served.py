"""A service in this process, and clients of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import perdure
from perdure import RemoteStore, Seams, Store, limits
from perdure.governance.policy import load
from perdure.limits import MIB
from perdure.service.guard import Guard
from perdure.service.server import Server, shared_pool


@contextlib.contextmanager
def serving(
    directory: Path,
    *,
    listen: tuple[str, int] | None = None,
    tls: Any = None,
    policy: Path | None = None,
    **options: Any,
) -> Iterator[tuple[Store, Server]]:
    """A store of `directory` and a server of it on DIR/perdure.sock, and on a port if asked."""
    options = {"memory": 192 * MIB, "capacity": "256MiB", "seams": Seams(pool=shared_pool)} | options
    clients_max = options.pop("clients_max", limits.connections_max)
    with perdure.open(directory, **options) as store:
        guard = None if policy is None else Guard(store, load(policy), roots=[directory])
        server = Server(
            store, socket=directory / "perdure.sock", clients_max=clients_max, listen=listen, tls=tls, guard=guard
        )
        server.start()
        try:
            yield store, server
        finally:
            server.stop()


def tcp_address(server: Server) -> str:
    assert server.node is not None
    return "tcp://{}:{}".format(*server.node.address)


class ServedStore:
    """A store in another guise: its service and one client, ended together. What only an embedded store has is its."""

    def __init__(self, directory: Path, *, tcp: bool = False, **options: Any):
        self._stack = contextlib.ExitStack()
        listen = ("127.0.0.1", 0) if tcp else None
        self.store, self.server = self._stack.enter_context(serving(directory, listen=listen, **options))
        self.client: RemoteStore = self._stack.enter_context(
            perdure.connect(tcp_address(self.server) if tcp else directory)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def verify(self) -> dict[str, Any]:
        return self.store.verify()

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> ServedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
