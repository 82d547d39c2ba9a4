"""A task that repeats its work until it is closed; no failure of the work ends it.

The owner says what the work is and how long it pauses. An expected failure, such as a store that is
away, is the work's own to handle; one that it lets through is a fault of ours, which is logged with
its place and tried again. The module knows no work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from engine.api import Clock
from gateway.errors import error_location

FAILED_AGAIN_S = 60.0
"""Seconds between two log lines of one task that fails all the time."""

CLOSE_WAIT_S = 15.0
"""Longest wait for a round that runs at the close."""


class PeriodicTask:
    """One piece of work, repeated. Belongs to one event loop."""

    def __init__(
        self,
        name: str,
        work: Callable[[], Awaitable[object]],
        interval_s: float,
        log: Callable[[str, dict[str, object]], None],
        clock: Clock,
        *,
        begins_at_once: bool = False,
    ) -> None:
        """`name`: of the task in the log. `interval_s`: the pause after each round.
        `begins_at_once`: without a pause before the first round."""
        self._name, self._work, self._interval_s = name, work, interval_s
        self._log, self._clock = log, clock
        self._begins_at_once = begins_at_once
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._logged_s: float | None = None
        self._is_closing = False

    def start(self) -> None:
        """Start the task on the running event loop."""
        assert self._task is None, "started once"
        self._task = asyncio.create_task(self._repeat())

    def wake(self) -> None:
        """End the pause: the next round begins at once, or after the one that runs."""
        self._wake.set()

    async def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """End the task after the round that runs. Safe to repeat, and without `start`.

        A thread of a round cannot be cancelled and would go on beside what the owner does next, so
        a round has `wait_s` to end before it is cancelled.
        """
        if self._task is None:
            return
        self._is_closing = True
        self._wake.set()
        if wait_s:
            await asyncio.wait((self._task,), timeout=wait_s)
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._task, self._is_closing = None, False

    async def _repeat(self) -> None:
        if not self._begins_at_once:
            await self._pause()
        while not self._is_closing:
            try:
                await self._work()
            except Exception as error:  # a fault of one round must not end all later ones
                self._tell(error)
            else:
                self._logged_s = None
            await self._pause()

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s):
                await self._wake.wait()
        self._wake.clear()

    def _tell(self, error: Exception) -> None:
        """Log a failure: the first of a row, then one a minute."""
        now_s = self._clock()
        if self._logged_s is None or now_s - self._logged_s >= FAILED_AGAIN_S:
            self._logged_s = now_s
            self._log("background_failed", {"task": self._name, **error_location(error)})
