"""Client of the analytics process: the event loop sends finished requests and asks questions.

Aggregation needs nothing of the event loop, and was the largest part of the loop's time for ledger
and analytics. Requests leave in batches. A process that dies, or leaves a question unanswered, is
replaced a second later and begins empty, since analytics are not stored; requests that finish
meanwhile are not counted, nor requests that a full socket does not take. This module sees no text
and no HTTP. `app.serve` opens the client. The client belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec import structs

from engine.client.frame_wire import FrameWire
from engine.wire import encode_frame
from gateway.analytics.completed_prompt import CompletedPrompt
from gateway.analytics.interface import AnalyticsClient
from gateway.analytics.protocol import (
    CompletedRequests,
    Question,
    StartAnalytics,
    read_from_analytics,
)
from gateway.dialects.canonical import Rendered
from gateway.errors import Kind, Refusal
from gateway.processes.child_process import ChildProcess, Report, RestartPolicy

COMMAND = (sys.executable, "-m", "gateway.analytics.process")
PAUSE_S = 1.0
RESTARTS = RestartPolicy((PAUSE_S,))
REQUESTS_MAX = 32
TOKENS_MAX = 16_384
"""Limits of a batch: encoding its frame takes less than a millisecond."""

UNSENT_MAX = 2**24
"""Bytes. A process that is so far behind receives no requests until it catches up."""

ANSWER_S = 30.0
"""Longest wait for an answer. A process that takes longer is stuck and is replaced; it would hold
its readers, and the end of the gateway, which asks once more."""

WATCH_EVERY_S = 1.0
CLOSE_S = 5.0


class AnalyticsProcessClient(AnalyticsClient):
    """An `AnalyticsClient` over analytics in a separate process."""

    def __init__(
        self,
        begin: StartAnalytics,
        clock: Callable[[], float],
        wall: Callable[[], int],
        report: Report,
        command: tuple[str, ...] = COMMAND,
        restarts: RestartPolicy = RESTARTS,
    ) -> None:
        """`clock`: monotonic seconds, sent with each request; `wall`: Unix milliseconds."""
        self._begin = begin
        self._clock, self._wall = clock, wall
        self._child = ChildProcess("analytics", command, restarts, report, self._run_process)
        self._wire: FrameWire | None = None
        self._pending: list[tuple[float, CompletedPrompt]] = []
        self._pending_tokens = 0
        self._questions: deque[asyncio.Future[Any]] = deque()
        self._lost = asyncio.Event()
        self._first_start_done = asyncio.Event()  # set after the first start, successful or not

    async def open(self) -> None:
        """Start the process. A process that cannot be started is retried every second; questions
        are refused meanwhile."""
        self._child.start()
        await self._first_start_done.wait()

    @property
    def pid(self) -> int:
        """Id of the running process; 0 without a process."""
        return self._child.pid

    def note(self, completed: CompletedPrompt) -> None:
        """See `AnalyticsClient`."""
        prompt = completed.prompt
        if prompt.grammar is not None:
            completed = structs.replace(
                completed, prompt=Rendered(prompt.token_ids, prompt.boundaries)
            )
        self._pending.append((self._clock(), completed))
        self._pending_tokens += len(prompt.token_ids)
        if len(self._pending) >= REQUESTS_MAX or self._pending_tokens >= TOKENS_MAX:
            self._flush()

    async def ask(self, question: Question) -> Any:
        """See `AnalyticsClient`."""
        self._flush()
        if self._wire is None:
            raise _unavailable_error()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions.append(answer)
        self._wire.send(encode_frame(question))
        return await answer

    async def close(self) -> None:
        """See `AnalyticsClient`."""
        await self._child.stop()
        if self._wire is not None:
            self._wire.end()
        await self._child.end(CLOSE_S)
        self._on_wire_end()

    def _flush(self) -> None:
        pending, self._pending, self._pending_tokens = self._pending, [], 0
        if pending and self._wire is not None and self._wire.unsent <= UNSENT_MAX:
            self._wire.send(
                encode_frame(CompletedRequests(self._wall() - 1_000 * self._clock(), pending))
            )

    def _on_frame(self, frame: bytes) -> None:
        question = self._questions.popleft()
        if not question.done():  # the caller may have been cancelled
            question.set_result(read_from_analytics(frame).answer)

    def _on_wire_end(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        while self._questions:
            question = self._questions.popleft()
            if not question.done():
                question.set_exception(_unavailable_error())
        self._lost.set()

    async def _run_process(self) -> str:
        """Run one process from its start until its wire ends; see `ChildProcess`."""
        self._lost.clear()
        try:
            self._wire = FrameWire(await self._child.spawn(), self._on_frame, self._on_wire_end)
        except OSError as error:
            return str(error.strerror)
        finally:
            self._first_start_done.set()
        self._wire.send(encode_frame(self._begin))
        self._child.set_ready()
        return await self._watch()

    async def _watch(self) -> str:
        """Return why the process is lost: its wire ended, or it has not answered for `ANSWER_S`.

        Only time during which this process ran counts, as in `engines.keeper`.
        """
        silent_s, oldest = 0.0, None
        while not self._lost.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_EVERY_S):
                    await self._lost.wait()
            before, oldest = oldest, self._questions[0] if self._questions else None
            is_silent = oldest is not None and oldest is before
            silent_s = silent_s + WATCH_EVERY_S if is_silent else 0.0
            if silent_s >= ANSWER_S:
                self._on_wire_end()
                return "stuck"
        return "connection lost"


def _unavailable_error() -> Refusal:
    message = "Analytics do not answer, or are restarting; retry in a moment."
    return Refusal(Kind.BUSY, "analytics_away", message, retry_after_s=PAUSE_S)
