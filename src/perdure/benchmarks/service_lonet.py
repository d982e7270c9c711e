"""Run a command in a network namespace that has nothing but its own loopback: `service_lonet.py COMMAND ...`.

Contract
- Stands alone (standard library only): the environments of peers have no perdure in them.
- Some peers bind all interfaces and offer no choice; here nothing outside can reach them. Without the right to make a
  namespace the command is not started: exit status 77 and one line that says why.
- A loopback is all that is up there. Tunnel devices that the kernel puts into every namespace are down, and stay so.
- The namespace ends with the last process in it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

NO_NAMESPACE = 77
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP = 1


def _flags(control: socket.socket, name: str) -> int:
    request = struct.pack("16sh14x", name.encode(), 0)
    (flags,) = struct.unpack("16xh14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))
    return int(flags)


def reachable() -> set[str]:
    """Names of the network interfaces besides the loopback that are up: empty where nothing outside can reach us."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    names = {line.split(":")[0].strip() for line in lines if ":" in line} - {"lo"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        return {name for name in names if _flags(control, name) & _IFF_UP}


def enter() -> None:
    """Move this process into a namespace of its own, and bring its loopback up. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"no network namespace: {os.strerror(number)} (root is needed)")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        up = struct.pack("16sh14x", b"lo", _flags(control, "lo") | _IFF_UP)
        fcntl.ioctl(control, _SIOCSIFFLAGS, up)
    if reachable():
        raise OSError(f"the namespace has more than a loopback: {sorted(reachable())}")


def main(argv: list[str]) -> int:
    """Becomes the command, unless that cannot be done: then the exit status."""
    if len(argv) < 2:
        sys.stderr.write(f"usage: {Path(argv[0]).name} COMMAND ...\n")
        return 2
    try:
        enter()
    except OSError as error:
        sys.stderr.write(f"{error}\n")
    else:
        os.execvp(argv[1], argv[1:])
    return NO_NAMESPACE


if __name__ == "__main__":
    sys.exit(main(sys.argv))
