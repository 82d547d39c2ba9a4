"""Resident memory of a server: of its process and of all child processes.

Reads /proc; on a system without it, the values are 0.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

INTERVAL_S = 0.25
PROC = Path("/proc")


class MemoryWatch:
    """Peak resident memory of a process tree, sampled four times a second by `watch`.

    Pages shared by two processes count twice.
    """

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self.pid = pid
        self.peak_bytes = 0
        self._proc = proc

    async def watch(self) -> None:
        """Sample until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(INTERVAL_S)

    def sample(self) -> int:
        """Return resident bytes now, and raise the peak. O(processes)."""
        total = sum(self._resident(pid) for pid in self._tree())
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def _tree(self) -> list[int]:
        children: dict[int, list[int]] = {}
        for folder in self._proc.glob("[0-9]*"):
            parent = self._parent(folder)
            children.setdefault(parent, []).append(int(folder.name))
        tree = [self.pid]
        for pid in tree:
            tree.extend(children.get(pid, []))
        return tree

    def _parent(self, folder: Path) -> int:
        try:
            # The command name, in parentheses, may contain spaces and parentheses itself.
            return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return -1  # the process has ended

    def _resident(self, pid: int) -> int:
        try:
            for line in (self._proc / str(pid) / "status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError):
            pass  # the process has ended
        return 0
