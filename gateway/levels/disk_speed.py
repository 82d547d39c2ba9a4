"""Measure how fast a folder's disk really writes and reads, within bounds of bytes and time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from engine.api import Clock

PIECE_BYTES = 2 * 2**20
"""Bytes of one write or read: about a block of a model of 8 billion parameters."""
BYTES_MAX = 64 * 2**20
SECONDS_MAX = 2.0


class DiskSpeed(Struct, frozen=True):
    """Rates in bytes per second."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    is_cached: bool
    """Reads may have come from memory, not the disk."""


def measure_disk(folder: Path, clock: Clock, *, bytes_max: int = BYTES_MAX) -> DiskSpeed:
    """Write pieces to a file without a name in `folder` and read them back; the file is removed.

    Takes at most about `SECONDS_MAX`, half of it for each direction, and one piece more. Raises
    OSError.
    """
    piece = os.urandom(PIECE_BYTES)  # a file system may compress zeros
    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor = file.fileno()
        pieces = max(1, bytes_max // PIECE_BYTES)

        def write(number: int) -> None:
            os.pwrite(descriptor, piece, number * PIECE_BYTES)

        written, seconds = _run(write, pieces, clock)
        began_s = clock()
        os.fdatasync(descriptor)
        seconds += clock() - began_s
        is_cached = not _drop_cache(descriptor)
        read, read_s = _run(
            lambda number: os.pread(descriptor, PIECE_BYTES, number * PIECE_BYTES),
            written,
            clock,
        )
    return DiskSpeed(
        written * PIECE_BYTES / max(seconds, 1e-9),
        read * PIECE_BYTES / max(read_s, 1e-9),
        is_cached,
    )


def _run(work: Callable[[int], object], pieces: int, clock: Clock) -> tuple[int, float]:
    """Call `work` for each piece until half of the time is over; return the calls and their
    seconds."""
    began_s = clock()
    for number in range(pieces):
        work(number)
        if (seconds := clock() - began_s) > SECONDS_MAX / 2:
            return number + 1, seconds
    return pieces, clock() - began_s


def _drop_cache(descriptor: int) -> bool:
    """Ask the system to forget a file's pages. Returns whether it was asked."""
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except (AttributeError, OSError):
        return False
    return True
