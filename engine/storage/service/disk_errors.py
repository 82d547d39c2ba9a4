"""What counts as a disk that cannot be used, and how that is told."""

from __future__ import annotations

import errno
import os

import apsw

from engine.errors import EngineError

DiskError = (apsw.Error, OSError, EngineError)


def reason_of(error: BaseException) -> str:
    """Return why the disk cannot be used, in words that quote no content."""
    if isinstance(error, EngineError):
        return error.message
    if isinstance(error, OSError):
        return f"the disk failed: {os.strerror(error.errno or errno.EIO)}"
    return f"the index failed: {type(error).__name__}"
