"""The heap of the engine's process, which holds some five objects for each cached block: what the
garbage collector looks at, and when.

It knows nothing of what the objects are. `engine.server.server` calls it once the engine has
loaded.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from typing import Any, Final, Literal

YOUNG_OBJECTS_MAX: Final = 2_000
YOUNG_LOOKS_MAX: Final = 1
"""So many objects more than there were are looked at; and what stays of these, a last time together
with the next ones. An object takes 0.2 microseconds, and five times that where memory has been in
use before."""

NEVER: Final = 2**31 - 1

GROWTH: Final = 2
"""How large the process may become, in what it was, before all there is is looked at again."""


def peak_bytes() -> int:
    """The most memory that this process has had in use at any time."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class FrozenHeap:
    """Python's full collection looks at every object there is: a second for a million blocks, each
    time that a quarter of them has been exchanged. Here whatever has been looked at twice is looked
    at no more. It still goes as soon as nothing refers to it, as all that belongs to a request or a
    block does: these make no cycles.

    What is lost is a cycle that was in use at its second look. Should there be many of these the
    process grows: at `GROWTH` times what it was when all was looked at last, all is once more.
    """

    def __init__(self, bytes_in_use: Callable[[], int] = peak_bytes) -> None:
        self._bytes_in_use = bytes_in_use
        self._bytes_max = 0
        self._is_outgrown = False
        self._thresholds = gc.get_threshold()

    def settle(self) -> None:
        """From now on, once. Takes as long as one full collection."""
        self._bytes_max = GROWTH * self._bytes_in_use()
        gc.collect()
        gc.freeze()
        gc.collect()  # Of nothing: how much it was last time would put the next one off.
        gc.set_threshold(YOUNG_OBJECTS_MAX, YOUNG_LOOKS_MAX, NEVER)
        gc.callbacks.append(self._looked)

    def leave(self) -> None:
        """Python's own way again."""
        gc.callbacks.remove(self._looked)
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def _looked(self, phase: Literal["start", "stop"], facts: dict[str, Any]) -> None:
        """The collector comes by, before and after each look."""
        generation: int = facts["generation"]
        if phase == "start" or generation == 0:
            return
        if generation == 2:
            self._is_outgrown = False
            self._bytes_max = GROWTH * self._bytes_in_use()
        elif self._bytes_in_use() > self._bytes_max and not self._is_outgrown:
            self._is_outgrown = True
            gc.unfreeze()
        if not self._is_outgrown:
            gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS_MAX, YOUNG_LOOKS_MAX, 0 if self._is_outgrown else NEVER)
