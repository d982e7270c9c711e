"""`perdure doctor`: is this machine fit to serve a store from a directory? Each check tries or reads the real thing.

Contract
- Verdicts: ok; warn (works, but slower, or with less room than it seems); bad (will fail, or lose what it promises).
  Anything but ok says what to do.
- Changes nothing: the one file it makes in the directory, to try direct I/O, is gone afterwards.
- A check that cannot be carried out is a warning that says why; it never ends the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import platform
import resource
import secrets
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from perdure import limits
from perdure.io.mounts import NETWORK, mount_of

Verdict = Literal["ok", "warn", "bad"]

_SO_PEERPIDFD: Final = 77
_F_SEAL_FUTURE_WRITE: Final = 0x10
_NOFILE_MIN: Final = 1024
_NOFILE_GOOD: Final = 16_384
_OVERHEAD_BYTES: Final = limits.GIB  # the process, its indexes and buffers, beside the pool
_PROCESS_BYTES_MIN: Final = _OVERHEAD_BYTES // 4
_AIO_SLOTS: Final = 4 * limits.aio_contexts_idle_max * limits.aio_inflight_per_call_max
_YEAR_2025_S: Final = 1_735_689_600
_UNLIMITED_BYTES: Final = 1 << 60  # cgroup v1 shows no limit as a number near 2^63
_VOLATILE: Final = frozenset({"tmpfs", "ramfs", "overlay"})


@dataclass(frozen=True, slots=True)
class Check:
    """name: what was looked at; found: what is there; todo: what to do about it, empty if it is ok."""

    name: str
    verdict: Verdict
    found: str
    todo: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked. memory, capacity: bytes that the service is to have; capacity None: not looked at. system: where
    /proc and /sys are."""

    directory: Path
    memory: int
    capacity: int | None = None
    system: Path = Path("/")

    def existing(self) -> Path:
        """The directory, or the nearest one above it that exists."""
        path = self.directory.absolute()
        while not path.is_dir() and path != path.parent:
            path = path.parent
        return path.resolve()

    def read(self, name: str) -> str:
        return (self.system / name).read_text()


def examine(subject: Subject) -> list[Check]:
    """All checks, in the order in which trouble is likely."""
    return [check for look in CHECKS for check in _guarded(look, subject)]


def _guarded(look: Callable[[Subject], Iterator[Check]], subject: Subject) -> list[Check]:
    try:
        return list(look(subject))
    except (OSError, ValueError, LookupError) as error:
        name = look.__name__.removeprefix("_").replace("_", " ")
        return [Check(name, "warn", f"could not be checked: {error}", "check it by hand")]


# --- the directory


def _direct_io(subject: Subject) -> Iterator[Check]:
    where = subject.existing()
    file = where / f".perdure-doctor-{secrets.token_hex(6)}"
    page = limits.page_bytes
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError as error:
        if file.exists():  # made, but not opened: the file system refuses the flag
            file.unlink()
        if os.access(where, os.W_OK | os.X_OK):
            yield Check("direct I/O", "warn", f"{where}: refused ({error.strerror})",
                        "works buffered: slower, and everything is held twice; use ext4 or XFS")  # fmt: skip
        else:
            yield Check("direct I/O", "bad", f"{where}: cannot be written ({error.strerror})",
                        "give the service's user the directory, mode 0700")  # fmt: skip
        return
    try:
        with mmap.mmap(-1, 2 * page) as memory, memoryview(memory) as view, view[:page] as out, view[page:] as back:
            out[:] = secrets.token_bytes(page)
            os.pwritev(descriptor, [out], 0)
            os.preadv(descriptor, [back], 0)
            same = out == back
    except OSError as error:
        yield Check("direct I/O", "bad", f"{where}: {error.strerror}", "look at the disk and at free space")
        return
    finally:
        os.close(descriptor)
        file.unlink()
    if same:
        yield Check("direct I/O", "ok", f"{where}: a page came back as it was written")
    else:
        yield Check("direct I/O", "bad", f"{where}: a page came back changed", "do not use this disk")


def _file_system(subject: Subject) -> Iterator[Check]:
    mount = mount_of(subject.directory, subject.system / "proc/self/mountinfo")
    kind, options = mount.kind, mount.options
    found = f"{kind} at {mount.point} ({options})"
    if kind in NETWORK:
        yield Check(
            "file system", "bad", found,
            "put the store on a local disk, whose catalog (LMDB) and lock need one, or name a cluster with --catalog",
        )  # fmt: skip
    elif kind in _VOLATILE:
        yield Check("file system", "warn", found, "what is stored may not survive a reboot; use a disk or a volume")
    else:
        yield Check("file system", "ok", found)
    given = options.split(",")
    if "ro" in given:
        yield Check("mount options", "bad", options, "mount it read-write")
    elif {"noatime", "relatime"} & set(given):
        yield Check("mount options", "ok", options)
    else:
        yield Check("mount options", "warn", options, "mount it with noatime: every read writes an access time")


def _free_disk(subject: Subject) -> Iterator[Check]:
    if subject.capacity is None:
        return
    usage = shutil.disk_usage(subject.existing())
    segments = subject.directory / "segments"
    own = sum(file.stat().st_blocks * 512 for file in segments.rglob("*.seg")) if segments.is_dir() else 0
    found = f"capacity {_size(subject.capacity)}; free {_size(usage.free)}, and {_size(own)} in segments already"
    if subject.capacity > usage.total:
        yield Check("disk space", "bad", found, f"the disk has {_size(usage.total)} in all: lower the capacity")
    elif subject.capacity > usage.free + own:
        yield Check("disk space", "warn", found, "older blocks will be evicted before the capacity is used: free space")
    else:
        yield Check("disk space", "ok", found)


def _clock(subject: Subject) -> Iterator[Check]:
    now, saved = time.time(), _saved_clock(subject.directory)
    if now < _YEAR_2025_S:
        yield Check("wall clock", "bad", time.strftime("%Y-%m-%d", time.gmtime(now)), "set it: run NTP or chrony")
    elif saved is not None and saved - now > limits.clock_step_s_max:
        yield Check("wall clock", "bad", f"{saved - now:.0f} s behind what the store saw last",
                    "set it; until then nothing expires")  # fmt: skip
    else:
        yield Check("wall clock", "ok", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)))


def _saved_clock(directory: Path) -> float | None:
    if not (directory / "control").is_dir():
        return None
    from perdure.catalog.lmdb_control import LmdbControl
    from perdure.core import STORE_NAMESPACE
    from perdure.keeper import CLOCK_KEY

    control = LmdbControl(directory / "control", read_only=True)
    try:
        seen = control.get(STORE_NAMESPACE, CLOCK_KEY)
    finally:
        control.close()
    return float(struct.unpack("<d", seen)[0]) if seen else None


def _roots(subject: Subject) -> Iterator[Check]:
    from perdure.directory import MARK
    from perdure.roots import absence, known

    numbers = known(subject.directory)
    store = json.loads((subject.directory / MARK).read_text())["store"] if numbers else ""
    for number, where in sorted(numbers.items()):
        why = absence(where, store, number)
        if why:
            todo = f"if its device is lost for good: perdure replace-root {subject.directory} {number} EMPTY_DIR"
            yield Check(f"root {number}", "bad", why, todo)
        elif not os.access(where, os.W_OK | os.X_OK):
            yield Check(f"root {number}", "bad", f"{where}: cannot be written", "give it to the service's user")
        else:
            yield Check(f"root {number}", "ok", f"{where}: {_size(shutil.disk_usage(where).free)} free")


# --- limits of the process


def _open_files(_: Subject) -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} open files (hard limit {_limit(hard)})"
    todo = f"LimitNOFILE={4 * _NOFILE_GOOD} in the unit, or ulimit -n: a client takes several descriptors"
    if soft != resource.RLIM_INFINITY and soft < _NOFILE_MIN:
        yield Check("open files", "bad", found, todo)
    elif soft != resource.RLIM_INFINITY and soft < _NOFILE_GOOD:
        yield Check("open files", "warn", found, todo)
    else:
        yield Check("open files", "ok", found)


def _locked_memory(subject: Subject) -> Iterator[Check]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= subject.memory:
        yield Check("locked memory", "ok", _limit(soft))
    else:
        yield Check("locked memory", "warn", f"{_size(soft)}, the pool has {_size(subject.memory)}",
                    "LimitMEMLOCK=infinity in the unit, if the pool is to be registered with a device")  # fmt: skip


# --- memory


def _cgroup_memory(subject: Subject) -> Iterator[Check]:
    limit = cgroup_limit(subject)
    if limit is None:
        yield Check("cgroup memory", "ok", "no limit")
    elif limit < subject.memory:
        yield Check("cgroup memory", "bad", f"limit {_size(limit)}, the pool has {_size(subject.memory)}",
                    "the kernel would kill the service: raise the limit, or lower --memory")  # fmt: skip
    elif limit < subject.memory + _OVERHEAD_BYTES:
        yield Check("cgroup memory", "warn", f"limit {_size(limit)}, the pool has {_size(subject.memory)}",
                    f"leave {_size(_OVERHEAD_BYTES)} beside the pool")  # fmt: skip
    else:
        yield Check("cgroup memory", "ok", f"limit {_size(limit)}")


def cgroup_limit(subject: Subject) -> int | None:
    """The smallest limit on the way from this process's cgroup to the root, version 1 or 2; None: no limit."""
    found: list[int] = []
    for line in subject.read("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = subject.system / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = subject.system / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        here = base / path.lstrip("/")
        while here.is_relative_to(base):
            with contextlib.suppress(OSError, ValueError):  # "max", or a level that is not mounted here
                found.append(int((here / name).read_text()))
            here = here.parent
    real = [limit for limit in found if limit < _UNLIMITED_BYTES]
    return min(real) if real else None


def pool_bytes_max(subject: Subject) -> tuple[int, str]:
    """The largest pool that can ever be used here, and what bounds it. Raises OSError, ValueError or LookupError if the
    system does not say."""
    total, _ = _machine_memory(subject)
    least, why = total - _PROCESS_BYTES_MIN, f"this machine has {total} bytes ({_size(total)})"
    limit = cgroup_limit(subject)
    if limit is not None and limit < least:
        least, why = limit, f"the cgroup allows {limit} bytes ({_size(limit)})"
    return max(0, least), why


def pool_bytes_advised(pool_bytes: int) -> int:
    """What to take of the largest pool possible, in whole MiB: the process needs memory too."""
    return max(pool_bytes - _OVERHEAD_BYTES, pool_bytes // 2) // limits.MIB * limits.MIB


def _machine_memory(subject: Subject) -> tuple[int, int]:
    """(total, available) bytes."""
    rows = {line.split(":")[0]: line.split()[1] for line in subject.read("proc/meminfo").splitlines()}
    return 1024 * int(rows["MemTotal"]), 1024 * int(rows["MemAvailable"])


def _memory(subject: Subject) -> Iterator[Check]:
    total, available = _machine_memory(subject)
    found = f"pool {_size(subject.memory)}; {_size(available)} available of {_size(total)}"
    if subject.memory + _PROCESS_BYTES_MIN > total:
        yield Check("memory", "bad", found, "lower --memory: the pool does not fit this machine")
    elif subject.memory > available:
        yield Check("memory", "warn", found, "lower --memory, or stop what takes the rest (a running service counts)")
    else:
        yield Check("memory", "ok", found)


def _huge_pages(subject: Subject) -> Iterator[Check]:
    base = "sys/kernel/mm/transparent_hugepage"
    chosen = subject.read(f"{base}/shmem_enabled").partition("[")[2].partition("]")[0]
    if chosen in ("always", "within_size", "advise", "force"):
        yield Check("huge pages", "ok", f"for shared memory: {chosen}")
    else:
        yield Check("huge pages", "warn", f"for shared memory: {chosen or 'unknown'}",
                    f"only for --hugepages: echo advise > /{base}/shmem_enabled")  # fmt: skip


# --- kernel and machine


def _kernel(subject: Subject) -> Iterator[Check]:
    lacking = []
    try:
        descriptor = os.memfd_create("perdure-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        lacking.append("memfd_create")
    else:
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError:
            lacking.append("F_SEAL_FUTURE_WRITE (Linux 5.1)")
        finally:
            os.close(descriptor)
    release = platform.release()
    if lacking:
        yield Check(
            "kernel", "bad", f"{release} lacks {', '.join(lacking)}", "use a newer kernel, or allow it (seccomp)"
        )
    else:
        yield Check("kernel", "ok", f"{release}: sealed shared memory works")
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        try:
            os.close(left.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
            yield Check("peer pidfd", "ok", "the kernel says who is at the other end")
        except OSError as error:
            yield Check("peer pidfd", "warn", f"{release}: {error.strerror}",
                        "Linux 6.5 recognizes dead clients with certainty; here EOF has to do")  # fmt: skip


def _async_io(subject: Subject) -> Iterator[Check]:
    used, most = (int(subject.read(f"proc/sys/fs/{name}")) for name in ("aio-nr", "aio-max-nr"))
    if most - used < _AIO_SLOTS:
        yield Check("async I/O", "warn", f"{used} of {most} slots in use", "sysctl fs.aio-max-nr=1048576")
    else:
        yield Check("async I/O", "ok", f"{used} of {most} slots in use")


def _machine(_: Subject) -> Iterator[Check]:
    machine = platform.machine()
    if machine == "x86_64":
        yield Check("processor", "ok", machine)
    else:
        yield Check("processor", "warn", machine,
                    "message-free reads need x86-64's memory order; here reads ask the service")  # fmt: skip


CHECKS: Final = (
    _direct_io, _file_system, _free_disk, _roots, _memory, _cgroup_memory, _open_files, _locked_memory, _huge_pages,
    _kernel, _async_io, _clock, _machine,
)  # fmt: skip


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
