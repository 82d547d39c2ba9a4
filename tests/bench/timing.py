"""Times of calls."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_of(
    call: Callable[[], object], times: int = 1, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Call a function so many times; return the seconds of each call."""
    found = []
    for _ in range(times):
        began_s = clock()
        call()
        found.append(clock() - began_s)
    return found
