"""Threads that parse, render and tokenize, with a turn for each tenant.

Work of one request that takes long must neither hold the event loop nor the work of other tenants.
Tenants take turns, a tenant never holds the last thread, and its waiting work is bounded. If its
client has left, work is dropped before it begins; begun work can ask whether it still matters. The
pool knows no prompts; `gateway.generation.preparation` submits to it, and answers with the logprobs
of whole prompts are rendered in it.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from gateway.errors import Kind, Refusal

T = TypeVar("T")

WAITING_PER_TENANT_MAX = 512
"""Maximum number of a tenant's waiting pieces of work."""

Work = Callable[[Callable[[], bool]], T]
"""Work for a thread. Its argument returns whether the result is not needed any more."""


def threads_default() -> int:
    """Return the number of threads for this machine: half of its processors, 2 to 8."""
    return max(2, min(8, (os.cpu_count() or 2) // 2))


class _QueuedWork(Generic[T]):
    """One piece of a tenant's work and the future that its caller awaits."""

    def __init__(self, tenant_id: int, work: Work[T], future: asyncio.Future[T]) -> None:
        self.tenant_id = tenant_id
        self.future = future
        self._work = work

    def run(self) -> T:
        """Run in a thread."""
        return self._work(self.future.cancelled)

    def finish(self, done: asyncio.Future[T]) -> None:
        """Pass the result on to a caller that still waits.

        The frames of an error's traceback lead back to the future that has the error: left so, a
        refused prompt would stay in memory until garbage is collected.
        """
        error = done.exception()
        if error is not None:
            traceback.clear_frames(error.__traceback__)
        if self.future.done():
            return
        if error is None:
            self.future.set_result(done.result())
        else:
            self.future.set_exception(error)


class PreparationPool:
    """Runs work of tenants in `threads` threads. All calls come from one event loop's thread."""

    def __init__(self, threads: int = 0) -> None:
        self._threads_max = threads or threads_default()
        self._threads = ThreadPoolExecutor(self._threads_max, "prepare")
        self._waiting: OrderedDict[int, deque[_QueuedWork[Any]]] = OrderedDict()
        """Waiting work by tenant; the tenants in the order of their turns."""
        self._running: Counter[int] = Counter()

    async def run(self, tenant_id: int, work: Work[T], *, is_admitted: bool = False) -> T:
        """Run `work` when it is the tenant's turn, and return its result.

        `is_admitted`: the work is of a running request, whose answer is not refused any more. A
        cancelled caller leaves at once: waiting work is dropped, running work is asked to stop.
        Raises what `work` raises, and Refusal if too much of the tenant's work is waiting.
        """
        queue = self._waiting.setdefault(tenant_id, deque())
        if len(queue) >= WAITING_PER_TENANT_MAX and not is_admitted:
            message = (
                f"Too many requests wait to be prepared: limit {WAITING_PER_TENANT_MAX}; wait for"
                " answers before you send more."
            )
            raise Refusal(Kind.RATE, "rate_limit_exceeded", message, retry_after_s=1.0)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        queued = _QueuedWork(tenant_id, work, future)
        queue.append(queued)
        self._start_waiting()
        try:
            return await future
        except asyncio.CancelledError:
            if queued in queue:
                queue.remove(queued)
            raise
        finally:
            del future, queued  # of this frame, which an error's traceback keeps

    async def run_admitted(self, tenant_id: int, work: Callable[[], T]) -> T:
        """Run work of a running request, which is not refused any more."""
        return await self.run(tenant_id, lambda _: work(), is_admitted=True)

    def _start_waiting(self) -> None:
        while self._running.total() < self._threads_max:
            queued = self._take_next()
            if queued is None:
                return
            self._running[queued.tenant_id] += 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, queued.run)
            running.add_done_callback(partial(self._finish, queued))

    def _take_next(self) -> _QueuedWork[Any] | None:
        """Take the next work from the tenants that have the turn; None if no tenant may start."""
        most = max(1, self._threads_max - 1)
        for tenant_id in list(self._waiting):
            queue = self._waiting[tenant_id]
            while queue and queue[0].future.cancelled():
                queue.popleft()
            if not queue:
                del self._waiting[tenant_id]
            elif self._running[tenant_id] < most:
                self._waiting.move_to_end(tenant_id)
                return queue.popleft()
        return None

    def _finish(self, queued: _QueuedWork[Any], done: asyncio.Future[Any]) -> None:
        self._running[queued.tenant_id] -= 1
        if not self._running[queued.tenant_id]:
            del self._running[queued.tenant_id]
        queued.finish(done)
        self._start_waiting()

    async def close(self) -> None:
        """Wait for the running work; waiting work is cancelled."""
        for queue in self._waiting.values():
            for queued in queue:
                queued.future.cancel()
        self._waiting.clear()
        await asyncio.to_thread(self._threads.shutdown)
