"""Check whether a folder can hold copies of KV: what prompts say, readable by this user alone."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

NETWORK_KINDS = frozenset(
    (
        *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.cephfs", "fuse.glusterfs", "fuse.s3fs"),
        *("fuse.sshfs", "gfs2", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs"),
        *("smb3", "smbfs", "virtiofs"),
    )
)
"""File systems of another machine, where a write may hang and a lock may not hold."""
MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")
"""A space or another special character in the table of mounts."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check_folder(path: Path, mounts: Path = MOUNTS) -> str:
    """Return what keeps a folder from being used and what would be right; "" for a good one.

    A missing folder is good if it can be made. `mounts`: the system's table of mounts.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return _check_missing(path, mounts)
    except OSError as error:
        return f"{error.strerror}; expected a folder that this user can write to"
    if stat.S_ISLNK(status.st_mode):
        return f"it is a link to {path.readlink()}; expected the folder itself"
    if not stat.S_ISDIR(status.st_mode):
        return "it is a file; expected a folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}; expected user {os.geteuid()}: chown it"
    if status.st_mode & OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        return f"others may use it (mode {mode:04o}); expected mode 0700: chmod 700 {path}"
    return _check_place(path, mounts)


def file_system_of(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the kind of file system that a path is on, such as "ext4"; "" if it cannot be told."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    where = os.path.realpath(path)
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or not kinds:
            continue
        point = _ESCAPE.sub(lambda found: chr(int(found[1], 8)), fields[4])
        is_above = where == point or where.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(best):  # a later mount hides an earlier one
            best, kind = point, kinds[0]
    return kind


def existing_parent(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _check_missing(path: Path, mounts: Path) -> str:
    above = existing_parent(path)
    if not above.is_dir():
        return f"{above} is a file; expected a folder"
    return _check_place(above, mounts)


def _check_place(path: Path, mounts: Path) -> str:
    if not os.access(path, os.W_OK | os.X_OK):
        return f"{path} is not writable by this user; expected a folder that is"
    kind = file_system_of(path, mounts)
    if kind in NETWORK_KINDS:
        return f"it is on a network mount ({kind}); expected a disk of this machine"
    return ""
