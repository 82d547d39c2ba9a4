"""How much processor time a process has used, all its threads together.

Reads /proc; elsewhere it knows nothing and says so by 0.
"""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")


def processor_s(pid: int, proc: Path = PROC) -> float:
    """Seconds on a processor so far, to the nanosecond. O(threads). Raises nothing."""
    total_ns = 0
    for file in (proc / str(pid) / "task").glob("*/schedstat"):
        try:
            total_ns += int(file.read_text().split()[0])
        except (OSError, ValueError, IndexError):
            continue  # it ended while we looked
    return total_ns / 1e9
