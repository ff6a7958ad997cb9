"""Which folders lie on a disk that other machines see, too: there a lock may hold on one machine only,
and a store is slow.

Used by `daemon_folder`, which must not let two daemons have one store, and by `jigsaw doctor`.
"""

from __future__ import annotations

from pathlib import Path

NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "lustre", "beegfs")
"""As the kernel names them."""

MOUNTS = Path("/proc/self/mounts")


def network_file_system(folder: Path, *, mounts: Path = MOUNTS) -> str | None:
    """Its kind; None on a disk of this machine, or where nothing is known."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    folder = folder.resolve()
    inside = [
        (len(point), kind)
        for _, point, kind, *_ in lines
        if folder.is_relative_to(point.replace("\\040", " "))
    ]
    kind = max(inside)[1] if inside else None
    return kind if kind in NETWORK else None
