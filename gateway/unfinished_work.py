"""What a gateway must finish before it closes: admitted requests, and work that no caller may stop.

It knows no HTTP and no engine. `gateway.app` waits for both.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class RunningRequests(Counter[int]):
    """Admitted, unfinished requests by tenant id; each prompt is one. Belongs to one event loop."""

    is_draining = False
    """Whether no further request is accepted."""

    def __init__(self) -> None:
        super().__init__()
        self._idle = asyncio.Event()

    def enter(self, tenant_id: int, requests: int = 1) -> None:
        """Count admitted requests of this tenant."""
        self[tenant_id] += requests
        self._idle.clear()

    def leave(self, tenant_id: int, requests: int = 1) -> None:
        """Count finished requests of this tenant."""
        self[tenant_id] -= requests
        if not self[tenant_id]:
            del self[tenant_id]
        if not self:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no admitted request is left; False if `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                while self:
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True


class BackgroundWork:
    """Tasks that must finish even if their caller is cancelled. Belongs to one event loop."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Run `work` beside the caller, who may leave the task alone."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def shield(self, work: Coroutine[None, None, T]) -> T:
        """Run `work` to completion and return its result; a caller that is cancelled leaves at
        once, and the work goes on."""
        return await asyncio.shield(self.start(work))

    async def run_to_completion(self, work: Coroutine[None, None, T]) -> T:
        """Run `work` to completion and return its result.

        A cancelled caller waits for the end, however often it is cancelled, and then raises
        CancelledError. Raises what `work` raises.
        """
        task = self.start(work)
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None and task.exception() is None:
            raise cancelled
        return task.result()

    async def finish(self) -> None:
        """Wait until no task is left."""
        while self.tasks:
            await asyncio.wait(set(self.tasks))
