"""The folder of a store: whether it can be one, and the lock that makes one process its owner.

What lies there is what prompts said, so only its owner may read it. The gateway checks the folder
with the same functions before a server starts; the storage process checks again and takes the lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from engine.errors import EngineError

LOCK_NAME = "lock"
LOCK_PAUSE_S = 0.05
FOLDER_MODE = 0o700
NETWORK_TYPES = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "fuse.sshfs"}
)
"""File systems over a network: their locks and syncs promise less than a disk's."""
DOUBTFUL_TYPES = {
    "tmpfs": "its content is gone after a restart of the machine, and takes memory until then",
    "ramfs": "its content is gone after a restart of the machine, and takes memory until then",
    "overlay": "a container's own layer is slow to write and gone with the container",
}


class FolderRefused(EngineError):
    """The folder cannot hold a store. The message says what would be right."""

    def __init__(self, message: str) -> None:
        super().__init__("storage", message)


class FolderInUse(FolderRefused):
    """Another process has the lock."""

    def __init__(self, folder: Path, pid: int) -> None:
        """`pid`: its id, 0 if it is not known."""
        owner = f"process {pid}" if pid else "another process"
        super().__init__(f"{folder} is in use by {owner}; expected a folder of this server alone.")


def check_folder(folder: Path) -> str:
    """Return why the folder cannot hold a store, or "" if it can. Changes nothing.

    A folder that does not exist is right if it can be made.
    """
    if folder.is_symlink():
        return f"{folder} is a link; expected a folder."
    try:
        found = folder.stat()
    except FileNotFoundError:
        return _check_parent(folder)
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}."
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is a file; expected a folder."
    if found.st_uid != os.geteuid():
        return f"{folder} belongs to user {found.st_uid}; expected user {os.geteuid()}."
    if mode & 0o077:
        return (
            f"{folder} has mode {mode:04o}, so others may read what prompts said; expected 0700:"
            f" `chmod 700 {folder}`."
        )
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return f"{folder} is not writable; expected a folder that this user may write to."
    return _check_type(folder)


def doubt_about(folder: Path) -> str:
    """Return why the folder's file system is a poor place for a store, or ""."""
    kind = type_of_file_system(folder)
    return f"{folder} is on {kind}: {DOUBTFUL_TYPES[kind]}." if kind in DOUBTFUL_TYPES else ""


def _check_parent(folder: Path) -> str:
    parent = next((one for one in folder.absolute().parents if one.exists()), Path("/"))
    if not parent.is_dir():
        return f"{folder} cannot be made: {parent} is a file."
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{folder} cannot be made: {parent} is not writable."
    return _check_type(parent)


def _check_type(folder: Path) -> str:
    kind = type_of_file_system(folder)
    if kind in NETWORK_TYPES:
        return f"{folder} is on a network ({kind}); expected a disk of this machine."
    return ""


def type_of_file_system(path: Path, mounts: str | None = None) -> str:
    """Return the type of the file system that holds a path; "" if the system does not say.

    `mounts`: the text of /proc/self/mountinfo.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
        except OSError:
            return ""
    target = os.path.realpath(path)
    best, kind = "", ""
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])
        is_above = target == point or target.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(best):
            best, kind = point, source.split(" ", 1)[0]
    return kind


def prepare_folder(folder: Path) -> None:
    """Make the folder only for its owner if it is missing. Raises FolderRefused."""
    if problem := check_folder(folder):
        raise FolderRefused(problem)
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise FolderRefused(f"{folder} cannot be made: {error.strerror}.") from error


class FolderLock:
    """The lock of a folder, held until `close` or until the process ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises FolderInUse, FolderRefused."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(folder / LOCK_NAME, flags, 0o600)
        except OSError as error:
            raise FolderRefused(f"{folder} cannot be locked: {error.strerror}.") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)
        except BlockingIOError as error:
            pid = _pid_in(os.pread(self._fd, 32, 0))
            os.close(self._fd)
            raise FolderInUse(folder, pid) from error
        except OSError as error:
            os.close(self._fd)
            raise FolderRefused(f"{folder} cannot be locked: {error.strerror}.") from error

    def close(self) -> None:
        """Give the lock back. Safe to repeat."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def wait_for_lock(folder: Path, wait_s: float, pause: Callable[[float], None]) -> FolderLock:
    """Take the lock, and wait so long for the process that has it. Raises as `FolderLock`."""
    tries = max(1, int(wait_s / LOCK_PAUSE_S))
    for _ in range(tries - 1):
        try:
            return FolderLock(folder)
        except FolderInUse:
            pause(LOCK_PAUSE_S)
    return FolderLock(folder)


def _pid_in(data: bytes) -> int:
    text = data.strip()
    return int(text) if text.isdigit() and len(text) < 12 else 0
