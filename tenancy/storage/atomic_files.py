"""Files that are whole or not there: written beside their place, and on the disk when they take it.

Each writer has a file of its own there, locked for as long as it lives, so that two at once are not
in each other's way, and what a process left that was killed is known for that. It knows no database
and no format; `sqlite_store`, `backups`, `exports` and the command line write by it.
"""

from __future__ import annotations

import fcntl
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

PART = ".trunkline-part"
"""Ends the names of files that are not whole yet. Nobody else's end so."""


@contextmanager
def written_whole(target: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """An empty file for the caller alone, which takes the target's place when the block has ended.

    Where the block raises there is nothing of it, nor of what was put beside it under names that
    begin with its own. Removes what dead writers have left in the folder. Raises OSError.
    """
    _sweep(target.parent)
    part, file = _begun(target, mode)
    try:
        yield part
        os.fsync(file)
        part.replace(target)
        synced(target.parent)
    finally:
        _remove(part)
        os.close(file)


def synced(path: Path) -> None:
    """Have a file, or a folder's names, on the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _begun(target: Path, mode: int) -> tuple[Path, int]:
    """A new file under a name that is free, locked."""
    for number in count():
        part = target.with_name(f"{target.name}.{number}{PART}")
        try:
            file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            continue
        except OSError as error:
            error.filename = str(target)  # what was asked for, and not what we call it meanwhile
            raise
        if _is_locked(file, part):
            return part, file
        os.close(file)  # somebody took it for what a dead one left
    raise AssertionError("numbers do not end")


def _sweep(folder: Path) -> None:
    """Files of writers that have died: the kernel let go of their locks."""
    for part in folder.glob(f"*{PART}"):
        with suppress(OSError):  # another removes it, or it is another user's
            file = os.open(part, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if _is_locked(file, part):
                    _remove(part)
            finally:
                os.close(file)


def _is_locked(file: int, path: Path) -> bool:
    """Is it ours now, and still what the name means?"""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove(part: Path) -> None:
    """It, after what lies beside it: who finds it knows that there may be more."""
    for left in sorted(part.parent.glob(f"{glob.escape(part.name)}*"), reverse=True):
        left.unlink(missing_ok=True)
