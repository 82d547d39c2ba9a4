"""How much memory a server takes: the resident pages of its process and of all it started.

Reads /proc; elsewhere it knows nothing and says so by 0.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

INTERVAL_S = 0.25
PROC = Path("/proc")


class MemoryWatch:
    """The peak of a process tree's resident memory, sampled four times a second while `watch` runs.

    Pages that two processes share count twice.
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
        """Resident bytes now; raises the peak. O(processes)."""
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
            # The command, in parentheses, may hold anything; what follows it may not.
            return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return -1  # it ended while we looked

    def _resident(self, pid: int) -> int:
        try:
            for line in (self._proc / str(pid) / "status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError):
            pass  # it ended while we looked
        return 0
