"""Run a command in a network namespace that has nothing but its own loopback: `service_lonet.py COMMAND ...`.

Contract
- Stands alone (standard library only): the environments of peers have no perdure in them.
- Some peers bind all interfaces and offer no choice; here nothing outside can reach them. Without the right to make a
  namespace the command is not started: exit status 77 and one line that says why.
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


def interfaces() -> set[str]:
    """Names of the network interfaces that this process can use."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return {line.split(":")[0].strip() for line in lines if ":" in line}


def enter() -> None:
    """Move this process into a namespace of its own, and bring its loopback up. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"no network namespace: {os.strerror(number)} (root is needed)")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
    usable = {name for name in interfaces() if not name.startswith(("sit", "tunl", "ip6", "gre", "erspan"))}
    if usable != {"lo"}:
        raise OSError(f"the namespace has more than a loopback: {sorted(usable)}")


def main(argv: list[str]) -> int:
    if len(argv) < 2:
        sys.stderr.write(f"usage: {Path(argv[0]).name} COMMAND ...\n")
        return 2
    try:
        enter()
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return NO_NAMESPACE
    os.execvp(argv[1], argv[1:])  # noqa: S606


if __name__ == "__main__":
    sys.exit(main(sys.argv))
