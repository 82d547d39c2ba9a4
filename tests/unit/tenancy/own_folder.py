"""A temporary folder that goes with the process that made it, however that ends.

Who ends in order removes its folder. Who is killed leaves it, and the next one to come sweeps it
up: a folder of that name which is ours, is not brand-new, and whose lock nobody holds. The system
lets go of a lock when its holder dies, so that a living one is never taken for dead.
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
"""Between making a folder and locking it a process may stand still, for less than this."""


@contextmanager
def own_folder(prefix: str, place: Path | None = None) -> Iterator[Path]:
    """A new folder that its owner alone can enter, in the system's place for such where none is
    given. Sweeps up before. O(entries of the place). Raises OSError."""
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
    """Remove what the dead have left beside our own folder, whose age all others are told by."""
    now_s = own.stat().st_mtime
    for other in own.parent.glob(f"{prefix}*"):
        with suppress(OSError):
            held = _open(other)
            try:
                found = os.fstat(held)
                if found.st_uid == os.geteuid() and now_s - found.st_mtime > YOUNG_S:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is alive
                    shutil.rmtree(other, ignore_errors=True)
            finally:
                os.close(held)


def _open(folder: Path) -> int:
    """Never what a link points at."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
