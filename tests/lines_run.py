"""The cost of a call in lines of Python that run. A few depend on the machine and on what ran
before, so tests compare how it grows, with a margin."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(work: Callable[[], object]) -> int:
    """Return how many lines of Python run in `work`; a loop counts each of its turns."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before, is_collecting = sys.gettrace(), gc.isenabled()
    gc.disable()  # its callbacks and the finalizers of others are lines, too
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if is_collecting:
            gc.enable()
    return count
