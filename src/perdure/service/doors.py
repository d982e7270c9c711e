"""The service's listening Unix sockets: the main one, and one for each principal that has its own.

Contract
- Which socket a connection came by says whose it is. The credentials of the process at its other end must agree: uid
  and gid, where the principal names them; at the main socket, where there is a policy, the service's own user or root.
  Else it is closed at once. A user id alone says nothing: in a container platform every process may be uid 0.
- A socket file is removed at the end only if it is still the one that was bound.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perdure.errors import AccessDenied
from perdure.governance.principals import LOCAL, Principal
from perdure.service import sockets
from perdure.service.parking import Ticket
from perdure.service.peers import Peer

_ONCE: Final = select.EPOLLIN | select.EPOLLONESHOT


@dataclass(slots=True, eq=False)
class Door:
    path: Path
    principal: Principal | None
    sock: socket.socket
    inode: int

    def check(self, sock: socket.socket) -> None:
        """Raises AccessDenied for a process whose credentials do not agree."""
        who = self.principal
        if who is None:
            return
        uid, gid = sockets.credentials(sock)
        if who.name == LOCAL.name:
            if uid not in (0, os.geteuid()):
                raise AccessDenied(f"{self.path}: uid {uid} is not the service's; use the socket of a principal")
        elif who.uid not in (None, uid) or who.gid not in (None, gid):
            raise AccessDenied(f"{self.path}: uid {uid}, gid {gid} are not those of principal {who.name}")


class Connection:
    """One that came by a door. Kept by the server."""

    __slots__ = ("birth", "closed", "main", "parked", "peer", "pidfd", "principal", "sock")

    def __init__(self, sock: socket.socket, principal: Principal | None):
        self.sock, self.principal = sock, principal
        self.peer: Peer | None = None
        self.main = False
        self.closed = False
        self.parked: Ticket | None = None
        self.pidfd = -1
        self.birth = time.monotonic()


class Doors:
    """Binds at once; raises StorePathError."""

    def __init__(self, main: Path, principals: Iterable[Principal] | None):
        """principals: None: everybody may come in by the main socket, and there is no other."""
        self._doors: dict[int, Door] = {}
        try:
            everybody = [] if principals is None else list(principals)
            self._open(main, next((one for one in everybody if one.name == LOCAL.name), None))
            for one in everybody:
                if one.socket:
                    self._open(Path(one.socket), one)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, principal: Principal | None) -> None:
        door = _bound(path, principal)
        self._doors[door.sock.fileno()] = door

    # --- another policy
    def opened(self, principals: Iterable[Principal]) -> list[Door]:
        """Sockets that are not there yet, bound. Raises StorePathError, and then none is."""
        known, new = {str(door.path) for door in self._doors.values()}, list[Door]()
        try:
            for one in principals:
                if one.socket and one.socket not in known:
                    new.append(_bound(Path(one.socket), one))
        except BaseException:
            self.shut(new)
            raise
        return new

    @staticmethod
    def shut(doors: Iterable[Door]) -> None:
        for door in doors:
            _unlink(door)
            door.sock.close()

    def follow(self, principals: Iterable[Principal], new: list[Door], epoll: select.epoll) -> None:
        """From now on the sockets are these principals'; `new`: of those that had none."""
        of = {one.socket or LOCAL.name: one for one in principals if one.socket or one.name == LOCAL.name}
        gone = []
        for fd, door in list(self._doors.items()):
            main = door.principal is not None and door.principal.name == LOCAL.name
            door.principal = of.get(LOCAL.name if main else str(door.path))
            if door.principal is None:
                gone.append(self._doors.pop(fd))
            elif not main:
                os.chmod(door.path, int(door.principal.mode, 8))
        for door in gone:
            with suppress(OSError, ValueError):
                epoll.unregister(door.sock.fileno())
        self.shut(gone)
        for door in new:
            self._doors[door.sock.fileno()] = door
            epoll.register(door.sock.fileno(), _ONCE)

    def register(self, epoll: select.epoll) -> None:
        for fd in self._doors:
            epoll.register(fd, _ONCE)

    def arm(self, epoll: select.epoll, door: Door) -> None:
        with suppress(OSError, ValueError):
            epoll.modify(door.sock.fileno(), _ONCE)

    def get(self, fd: int) -> Door | None:
        return self._doors.get(fd)

    def unlink(self) -> None:
        for door in self._doors.values():
            _unlink(door)

    def close(self) -> None:
        for door in self._doors.values():
            door.sock.close()


def _bound(path: Path, principal: Principal | None) -> Door:
    sock = sockets.listen_unix(path)
    sock.setblocking(False)
    if principal is not None and principal.socket:
        os.chmod(path, int(principal.mode, 8))
    return Door(path, principal, sock, os.stat(path).st_ino)


def _unlink(door: Door) -> None:
    with suppress(OSError):  # the path may belong to a successor already
        if os.stat(door.path).st_ino == door.inode:
            door.path.unlink()
