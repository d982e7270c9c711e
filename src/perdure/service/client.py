"""`perdure.connect`: the verbs of a store, carried out by the service beside this process, or by a data node.

    with perdure.connect("DIR") as store:            # or the socket's path, or "unix:///run/perdure.sock"
        space = store.keyspace(model=..., weights=..., layout=..., tenant=...)
        with space.view(keys) as view: ...           # blocks where they lie, without a copy

Contract
- The verbs, their arguments and reports are those of `perdure.open`. A cache failure never fails a request: without a
  service `lookup` finds nothing, `read` reports MISSING, `write` FAILED; what it does not answer in time is LATE.
- Calls without a deadline wait `limits.call_s_default` for a service that does not answer.
- Thread-safe. After fork() the child must connect by itself, and is told so.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import ArrayLike

from perdure import limits
from perdure.errors import InvalidArgument, ServiceUnavailable, UnknownOption
from perdure.governance.verbs import GovernanceVerbs
from perdure.io.memory import address
from perdure.io.shared import map_fd
from perdure.keys import KeyspaceIdentity, KVLayout, token_bytes
from perdure.publication_verbs import PublicationVerbs
from perdure.service import messages as m
from perdure.service import sockets
from perdure.service.maps import DomainMaps
from perdure.service.sockets import is_loopback, parse_address
from perdure.service.staging import Staging
from perdure.service.streams import TlsFiles, connect_tcp
from perdure.service.transport import Channel, Late, Run, Transport
from perdure.session import listed

TCP, NIXL = "tcp://", "nixl://"


class Region:
    """Memory that the service reads and writes directly. `view`: its bytes, writable; buffers made of parts of it
    can be passed to `read` and `write`. `fd`: for registering it with a GPU driver."""

    def __init__(self, fd: int, nbytes: int):
        self.fd, self.nbytes = fd, nbytes
        self.view: memoryview = map_fd(fd, nbytes, writable=True).data
        self.start = address(self.view)
        self.numbers: dict[bytes, int] = {}  # our token in a run of the service -> its number there

    @classmethod
    def received(cls, fd: int, nbytes: int, run: Run, number: int) -> Region:
        """Memory that the service made in answer to a question of this run."""
        region = cls(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3), nbytes)
        region.numbers[run.welcome.client] = number
        return region

    def offset(self, part: memoryview) -> int | None:
        at = address(part) - self.start
        return at if at >= 0 and at + part.nbytes <= self.nbytes else None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Permit(NamedTuple):
    """A capability and what it is good for. until: monotonic seconds; then exchange a token and open keyspaces anew."""

    capability: bytes
    tenant: str
    actions: tuple[str, ...]
    until: float


class RemoteStore(GovernanceVerbs, PublicationVerbs):
    """A connection to a service. Made by `perdure.connect`."""

    def __init__(
        self, address: str | os.PathLike[str], *, name: str, wait_s: float, tls: TlsFiles | None = None
    ):  # fmt: skip
        self.where = os.fspath(address)
        self.shared = not self.where.startswith((TCP, NIXL))  # whether this client and the service can share memory
        connect = _unix(address) if self.shared else _tcp(self.where, tls)
        self.transport = Transport(connect, self.where, name, wait_s)
        self.transport.on_retired = self._retired
        self._maps: dict[tuple[bytes, bytes], DomainMaps] = {}
        self._regions: list[Region] = []
        self.staging = Staging(self.transport)
        self._attaching = threading.Lock()
        self._grants = itertools.count(1)
        self._spaces: list[Any] = []
        self.landings: Any = None
        if self.where.startswith(NIXL):
            from perdure.service.nixl import Landings

            try:
                self.landings = Landings(self.transport)
                self.landings.check(*self.current())
            except BaseException:
                self.close()
                raise

    # --- use
    def keyspace(
        self,
        *,
        model: str,
        weights: str,
        layout: KVLayout,
        tenant: str,
        lora: str = "",
        draft: str = "",
        salt: str = "",
        codec: str | None = None,
        capability: bytes = b"",
    ) -> Any:
        """As `Store.keyspace`; the digest is derived by the service, which alone knows the secret.

        capability: from `exchange`, for a service with a policy. Raises AccessDenied there."""
        from perdure.service.distant import DistantKeyspace
        from perdure.service.nixl import NixlKeyspace
        from perdure.service.remote import RemoteKeyspace

        kind: Any = RemoteKeyspace if self.shared else DistantKeyspace if self.landings is None else NixlKeyspace
        identity = KeyspaceIdentity(model, weights, layout, lora, draft, salt)
        space = kind(self, tenant, identity, codec or "", capability)
        self._spaces.append(space)
        return space

    def exchange(self, token: str, *, session: str = "", actions: Sequence[str] = ()) -> Permit:
        """A capability for a JWT, from a service with a policy: for keyspaces of the token's tenant, with names of
        sessions that begin with `session`, and these actions (none: all that the token allows). Raises AccessDenied."""
        run, deadline = self.current()
        got = self.ask(run, lambda i: m.Exchange(i, token, session, list(actions)), deadline)
        return Permit(got.capability, got.tenant, tuple(got.actions), time.monotonic() + got.left_s)

    def landing(self, nbytes: int) -> Region:
        """Memory of the node's budget that the service delivers into: where a GPU copies from, for example."""
        self._need_shared("landing")
        made: list[Region] = []
        run, deadline = self.current()

        def receive(answer: Any, fds: list[int]) -> None:
            made.append(Region.received(fds[0], nbytes, run, answer.number))

        self.ask(run, lambda i: m.Region(i, "landing", nbytes), deadline, receive=receive)
        self._regions.append(made[0])
        return made[0]

    def register(self, fd: int, nbytes: int | None = None) -> Region:
        """Let the service read and write memory of yours: a memfd sealed with F_SEAL_SHRINK is mapped there; a file in
        /dev/shm, which cannot be sealed, is copied by the service instead."""
        self._need_shared("register")
        size = os.fstat(fd).st_size
        region = Region(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3), size if nbytes is None else nbytes)
        try:
            run, deadline = self.current()
            self.region_number(run, region, deadline)
        except BaseException:
            region.close()
            raise
        self._regions.append(region)
        return region

    def unregister(self, region: Region) -> None:
        """Take memory back. The service touches it no more after this, but for late direct reads still going on."""
        if region in self._regions:
            self._regions.remove(region)
            run, deadline = self.current()
            number = region.numbers.pop(run.welcome.client, None)
            if number is not None:
                self.ask(run, lambda i: m.Unregister(i, number), deadline)
            region.close()

    def status(self) -> dict[str, Any]:
        """As `Store.status`."""
        content: dict[str, Any] = self.service_status()["store"]
        return content

    def service_status(self) -> dict[str, Any]:
        """Of the service: its clients, its memory, and under "store" the store's own status."""
        return self._document(m.Status)

    def sessions(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """As `Store.sessions`."""
        return listed(self.session_admin, tenant)

    def session_admin(self, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        """As `Store.session_admin`."""
        return self._document(lambda i: m.SessionAsk(i, -1, verb, fields))

    def govern(self, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        return self._document(lambda i: m.Govern(i, verb, fields))

    def reload_policy(self) -> dict[str, Any]:
        """Have the service read its policy anew. Raises PolicyError: the one before stays in force."""
        return self._document(m.Reload)

    def publication_ask(self, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        return self._document(lambda i: m.Publication(i, verb, fields))

    def explain(self, key: bytes) -> dict[str, Any]:
        return self._document(lambda i: m.Explain(i, key))

    def explain_prefix(self, space: Any, token_ids: ArrayLike) -> dict[str, Any]:
        raw = token_bytes(token_ids)
        if len(raw) > 4 * limits.message_tokens_max:
            raise InvalidArgument(f"{len(raw) // 4} tokens: explain at most {limits.message_tokens_max} at a time")
        number = space.begin().space
        return self._document(lambda i: m.ExplainPrefix(i, number, raw))

    def sync(self) -> None:
        run, deadline = self.current()
        self.ask(run, lambda i: m.Sync(i), deadline)

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Until the service has finished what follows opening the store."""
        give_up = time.monotonic() + (limits.deadline_s_max if timeout_s is None else timeout_s)
        while not self.status()["background"]["ready"]:
            if time.monotonic() > give_up:
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        """Disconnect: the service ends what this client held. Idempotent."""
        for space in self._spaces:
            space.end()
        self.transport.close()
        if self.landings is not None:
            self.landings.close()
        self._maps.clear()
        self.staging.close()
        for region in self._regions:
            region.close()
        self._regions.clear()

    def __enter__(self) -> RemoteStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _need_shared(self, verb: str) -> None:
        if not self.shared:
            raise InvalidArgument(f"{verb}: {self.where} shares no memory with this process; use read and write")

    def _document(self, question: Any) -> dict[str, Any]:
        run, deadline = self.current()
        content: dict[str, Any] = self.ask(run, question, deadline).content
        return content

    # --- for keyspaces
    def grant_number(self) -> int:
        """Unlike any other of this client."""
        return next(self._grants)

    def current(self, deadline: float | None = None) -> tuple[Run, float]:
        """The run of the service and when to stop waiting for it."""
        if deadline is not None:
            return self.transport.run(deadline), deadline
        now = time.monotonic()
        return self.transport.run(now + limits.reconnect_s_default), now + limits.call_s_default

    def ask(self, run: Run, question: Any, deadline: float, **options: Any) -> Any:
        """As `transport.ask`, with lateness as an error: for calls whose outcome is not a status."""
        try:
            return self.transport.ask(run, question, deadline, **options)
        except Late:
            raise ServiceUnavailable(f"{self.where}: the service did not answer in time") from None

    def maps(self, run: Run, tenant_id: bytes, number: int, deadline: float) -> DomainMaps:
        """The maps of a tenant, brought up to date if the service has changed them."""
        name = (run.welcome.client, tenant_id)
        maps = self._maps.get(name)
        if maps is None or maps.stale:
            with self._attaching:
                for old in [one for one in self._maps if one[0] != run.welcome.client]:
                    self._maps.pop(old, None)
                maps = self._maps.setdefault(name, DomainMaps())
                for _ in range(limits.message_descriptors_max):
                    if not maps.stale:
                        break
                    self._attach(run, maps, number, deadline)
        return maps

    def _attach(self, run: Run, maps: DomainMaps, number: int, deadline: float) -> None:
        versions, chunks = maps.versions, list(maps.chunks)
        self.transport.ask(run, lambda i: m.Attach(i, number, versions, chunks), deadline, receive=maps.update)

    def _retired(self, tenant_id: bytes) -> None:
        """The service has given up chunks: let go of them, so that their memory is free again."""
        for space in list(self._spaces):
            if space.tenant_id == tenant_id:
                threading.Thread(target=space.refresh, name="perdure-unmap", daemon=True).start()
                return

    def region_of(self, blocks: list[list[memoryview]]) -> tuple[Region, list[list[tuple[int, int]]]] | None:
        """The registered region that all parts of all blocks lie in, and where."""
        for region in list(self._regions):
            extents = [[(region.offset(part), part.nbytes) for part in parts] for parts in blocks]
            if all(offset is not None for parts in extents for offset, _ in parts):
                return region, extents  # type: ignore[return-value]
        return None

    def region_number(self, run: Run, region: Region, deadline: float) -> int:
        """A region's number in this run; registered anew after the service was replaced."""
        number = region.numbers.get(run.welcome.client)
        if number is None:
            answer = self.ask(run, lambda i: m.Region(i, "client", region.nbytes), deadline, send_fds=[region.fd])
            number = region.numbers[run.welcome.client] = int(answer.number)
        return number


def _unix(address: str | os.PathLike[str]) -> Callable[[float], Channel]:
    path = sockets.socket_path(address)
    return lambda until: sockets.UnixChannel(path, until)


def _tcp(address: str, tls: TlsFiles | None) -> Callable[[float], Channel]:
    try:
        host, port = parse_address(address.removeprefix(TCP).removeprefix(NIXL))
    except ValueError as error:
        raise InvalidArgument(f"{address!r}: {error}; write tcp://HOST:PORT or nixl://HOST:PORT") from None
    if tls is None and not is_loopback(host):
        raise InvalidArgument(f"{address!r}: blocks leave this machine only by TLS; pass tls_cert, tls_key and tls_ca")
    context = None if tls is None else tls.context(server=False)
    return lambda until: connect_tcp(host, port, context, until)


def connect(address: str | os.PathLike[str], **options: Any) -> RemoteStore:
    """Connect to the service of this host (`perdure serve --data DIR`), or to a data node (`--listen HOST:PORT`).

    address: the store's directory, the path of the service's socket, "unix:///path", "tcp://host:port", or, for payload
    by NIXL, "nixl://host:port". wait_s: how long to wait for a service that is not up yet (0). name: shown by `perdure
    top` (default: the program's). tls_cert, tls_key, tls_ca: PEM files for the latter two; needed unless the host is
    this one (NIXL's own traffic is not encrypted).

    Raises ServiceUnavailable, ServiceBusy (it has --clients-max already), InvalidArgument, UnknownOption, ConfigError,
    ProtocolError (another version).
    """
    import sys

    chosen: dict[str, Any] = {"wait_s": 0.0, "name": os.path.basename(sys.argv[0] or "python")}
    known = {*chosen, *(f"tls_{field}" for field in TlsFiles._fields)}
    for unknown in set(options) - known:
        raise UnknownOption(f"perdure.connect: unknown option {unknown!r}; known: {', '.join(sorted(known))}")
    files = [options.pop(f"tls_{field}", None) for field in TlsFiles._fields]
    if any(files) and not all(files):
        raise InvalidArgument("perdure.connect: TLS needs all of tls_cert, tls_key and tls_ca")
    tls = TlsFiles(*map(Path, files)) if all(files) else None
    return RemoteStore(address, **(chosen | options), tls=tls)
