"""Files that are written completely or not at all: written beside their target, then renamed.

Each writer has a part file of its own, locked for as long as the writer lives: concurrent writers
do not interfere, and the part file of a killed process is recognised by its free lock. This module
knows no database and no format. SQLite's marker, backups, exports and the command line use it.
"""

from __future__ import annotations

import fcntl
import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

PART_SUFFIX = ".trunkline-part"
"""Suffix of files that are not complete. No other file has it."""


@contextmanager
def atomic_write(target: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """Yield the path of an empty part file, which replaces `target` when the block has ended.

    If the block raises, the part file is removed, and all files beside it whose names begin with
    its name. Removes the part files of dead writers in the folder. Raises OSError, which names
    `target`, also for a write in the block that names no file.
    """
    _remove_stale_parts(target.parent)
    part, file = _create_part(target, mode)
    try:
        yield part
        os.fsync(file)
        part.replace(target)
        fsync_path(target.parent)
    except OSError as error:
        names_none = error.filename is None and error.errno is not None  # a failed write or fsync
        if names_none or error.filename == str(part):
            error.filename = str(target)
        raise
    finally:
        _remove(part)
        os.close(file)


def write_chunks(target: Path, data: Iterable[bytes]) -> int:
    """Write the file completely, or not at all. Returns its size in bytes. Raises OSError."""
    with atomic_write(target) as part, part.open("wb") as file:
        return sum(map(file.write, data))


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _create_part(target: Path, mode: int) -> tuple[Path, int]:
    """Create and lock a part file under a free name."""
    for number in count():
        part = target.with_name(f"{target.name}.{number}{PART_SUFFIX}")
        try:
            file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            continue
        except OSError as error:
            error.filename = str(target)  # name the target in the error, not the part file
            raise
        if _try_lock(file, part):
            return part, file
        os.close(file)  # another writer removed it as stale
    raise AssertionError("numbers do not end")


def _remove_stale_parts(folder: Path) -> None:
    """Remove the part files of writers that have died: the kernel has released their locks."""
    for part in folder.glob(f"*{PART_SUFFIX}"):
        with suppress(OSError):  # another writer removes it, or it belongs to another user
            file = os.open(part, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if _try_lock(file, part):
                    _remove(part)
            finally:
                os.close(file)


def _try_lock(file: int, path: Path) -> bool:
    """Lock the file; return whether that succeeded and the path still names this file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove(part: Path) -> None:
    """Remove a part file, after the files beside it: while it exists, there may be more."""
    for left in sorted(part.parent.glob(f"{glob.escape(part.name)}*"), reverse=True):
        left.unlink(missing_ok=True)
