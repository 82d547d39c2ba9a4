"""Host memory of an engine, kept by the gateway over the engine's death.

Two memory files: the arena with the copies, and the table that says what they are. Each engine gets
both when it is started (`Hello`), sizes them, and takes over what the engine before it has left, if
that had the same model and settings (`engine.storage.memory.kept_memory`). Empty files take no
memory. The gateway never looks into them.
"""

from __future__ import annotations

import os

SHORT_LIVES_MAX = 3
"""Engines in a row that may end soon over the same files; the next one gets empty ones."""
STEADY_S = 10.0
"""Seconds that an engine has to serve for its life not to be short."""


class HostMemoryFiles:
    """The files of one engine's host memory. `fds`: arena and table."""

    def __init__(self) -> None:
        """Make empty files. Raises OSError."""
        self.fds = self._make()
        self._short_lives = 0

    def begin_life(self) -> tuple[int, int]:
        """Return the descriptors for an engine that is about to be started, of new files if the
        engines before it ended soon: what lies there, or how much memory it takes, may be why.
        Raises OSError."""
        if self._short_lives >= SHORT_LIVES_MAX:
            self.close()
            self.fds = self._make()
            self._short_lives = 0
        self._short_lives += 1
        return self.fds

    def end_life(self, served_s: float) -> None:
        """Note that the engine that was started last has ended after it served so long."""
        if served_s >= STEADY_S:
            self._short_lives = 0

    def close(self) -> None:
        """Close the files: the memory goes with the last process that has them. Safe to repeat."""
        for fd in self.fds:
            if fd >= 0:
                os.close(fd)
        self.fds = (-1, -1)

    @staticmethod
    def _make() -> tuple[int, int]:
        arena = os.memfd_create("trunkline-kv", os.MFD_CLOEXEC)
        try:
            return arena, os.memfd_create("trunkline-slots", os.MFD_CLOEXEC)
        except BaseException:
            os.close(arena)
            raise
