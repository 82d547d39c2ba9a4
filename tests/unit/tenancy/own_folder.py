"""A temporary folder that is removed with the process that made it.

A process that ends in order removes its folder. A killed process leaves it, and the next call
removes it: a folder with the prefix, of the same owner, not new, and not locked. The kernel
releases a lock when its holder dies, so the folder of a living process is never removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

YOUNG_S = 60.0
"""Seconds for which an unlocked folder is kept, as its process may not have locked it yet."""


@contextmanager
def own_folder(prefix: str, place: Path | None = None) -> Iterator[Path]:
    """Yield a new folder that only its owner can enter, in `place` or the system's temporary
    folder.

    Removes abandoned folders first. O(entries of the place). Raises OSError.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    held = _open(folder)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sweep(prefix, folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _sweep(prefix: str, own: Path) -> None:
    """Remove abandoned folders that are older than our own folder."""
    now_s = own.stat().st_mtime
    for other in own.parent.glob(f"{prefix}*"):
        with suppress(OSError):
            held = _open(other)
            try:
                found = os.fstat(held)
                if found.st_uid == os.geteuid() and now_s - found.st_mtime > YOUNG_S:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its process lives
                    shutil.rmtree(other, ignore_errors=True)
            finally:
                os.close(held)


def _open(folder: Path) -> int:
    """Open a folder without following a link."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
