"""Measures how long one turn of the event loop takes, in processor time of its thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

PAUSE_MAX = 5
"""Longest turn of the event loop, as a multiple of `reference_s`: some 50 ms."""
ATTEMPTS = 3
"""A turn that is long by its work is long each time; a collection of garbage comes once."""


class LoopMonitor:
    """Measures the longest processor time between two turns of the event loop.

    Other load of the machine and other threads do not count.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now_s = time.thread_time()
            self.longest_s = max(self.longest_s, now_s - last_s)
            last_s = now_s

    async def stop(self) -> float:
        """Return the longest turn, in seconds."""
        self._task.cancel()
        await asyncio.wait([self._task])
        return self.longest_s


def reference_s() -> float:
    """Return four times the processor time of a fixed piece of work: about 10 ms.

    A busy machine's shared caches and clock slow everything alike, so tests bound the ratio.
    """
    began_s = time.thread_time()
    sum(number % 7 for number in range(75_000))
    return 4 * (time.thread_time() - began_s)


async def longest_turns(ask: Callable[[], Awaitable[None]]) -> list[float]:
    """Return the longest turn of the loop in each call of `ask`, in units of `reference_s`; it is
    called until one was below `PAUSE_MAX`, at most `ATTEMPTS` times."""
    turns: list[float] = []
    while len(turns) < ATTEMPTS and min(turns, default=PAUSE_MAX) >= PAUSE_MAX:
        yardstick = reference_s()
        watch = LoopMonitor()
        await ask()
        busy_s = await watch.stop()
        turns.append(busy_s / max(yardstick, reference_s()))
    return turns
