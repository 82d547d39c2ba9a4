"""Garbage collector settings for the engine process, which has about five objects per cached block.

This module does not know what the objects are. `engine.server.server` calls it once the engine has
loaded.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from typing import Any, Final, Literal

YOUNG_OBJECTS_MAX: Final = 2_000
YOUNG_SURVIVALS_MAX: Final = 1
"""A young collection begins after so many new objects; its survivors are scanned a last time
together with those of the next one. Scanning an object takes 0.2 microseconds, five times that in
memory that was used before."""

NEVER: Final = 2**31 - 1

GROWTH_FACTOR: Final = 2
"""Growth of the process's memory, as a factor, after which all objects are scanned again."""


def peak_bytes() -> int:
    """Return the peak memory use of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class FrozenHeap:
    """Exempts old objects from garbage collection.

    Python's full collection scans every object: a second for a million blocks, each time that a
    quarter of them was replaced. Here an object that was scanned twice is frozen: scanned no more.
    Reference counting still frees it at once, as it frees all objects of a request or a block,
    which form no cycles.

    A cycle that was still in use at its second scan leaks. If many leak, the process grows: at
    GROWTH_FACTOR times its size at the last full scan, all objects are scanned again.
    """

    def __init__(self, bytes_in_use: Callable[[], int] = peak_bytes) -> None:
        self._bytes_in_use = bytes_in_use
        self._bytes_max = 0
        self._is_outgrown = False
        self._thresholds = gc.get_threshold()

    def settle(self) -> None:
        """Freeze all present objects, and limit collections from now on. Takes as long as a full
        collection."""
        self._bytes_max = GROWTH_FACTOR * self._bytes_in_use()
        gc.collect()
        gc.freeze()
        gc.collect()  # of nothing: a large last result would delay the next full collection
        gc.set_threshold(YOUNG_OBJECTS_MAX, YOUNG_SURVIVALS_MAX, NEVER)
        gc.callbacks.append(self._on_collection)

    def restore(self) -> None:
        """Restore Python's own settings."""
        gc.callbacks.remove(self._on_collection)
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def _on_collection(self, phase: Literal["start", "stop"], facts: dict[str, Any]) -> None:
        """Callback of the collector, before and after each collection."""
        generation: int = facts["generation"]
        if phase == "start" or generation == 0:
            return
        if generation == 2:
            self._is_outgrown = False
            self._bytes_max = GROWTH_FACTOR * self._bytes_in_use()
        elif self._bytes_in_use() > self._bytes_max and not self._is_outgrown:
            self._is_outgrown = True
            gc.unfreeze()
        if not self._is_outgrown:
            gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS_MAX, YOUNG_SURVIVALS_MAX, 0 if self._is_outgrown else NEVER)
