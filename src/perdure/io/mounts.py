"""What kind of file system a path lies on, by the kernel's table of mounts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

NETWORK: Final = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "glusterfs", "beegfs", "afs", "gpfs", "ocfs2",
        "gfs2", "virtiofs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.rclone",
    }
)  # fmt: skip
"""Locks and shared memory maps cannot be relied on here, not even between processes of one host."""

_TABLE: Final = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    kind: str
    point: str
    options: str


def mount_of(path: Path, table: Path = _TABLE) -> Mount:
    """Of the nearest directory that exists. Raises OSError if the table cannot be read."""
    where = path.absolute()
    while not where.exists() and where != where.parent:
        where = where.parent
    where = where.resolve()
    best = Mount("", "", "")
    for line in table.read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        point = fields[4].replace(r"\040", " ")
        if where.is_relative_to(point) and len(point) >= len(best.point):
            best = Mount(right.split()[0], point, fields[5])
    return best
