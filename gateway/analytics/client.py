"""Analytics' process, seen from the gateway's loop: told of finished requests, and asked.

Adding up needs nothing that the loop has, and was the largest part of what the ledger and analytics
took of it. Facts leave some at a time. A process that dies is replaced a second later and begins
anew, since nothing of it is kept; facts that come meanwhile are not counted, nor those that a full
socket would not take. It sees no text and no HTTP; `app.serve` opens it. Belongs to one loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import structs

from gateway.analytics.aggregates import Facts
from gateway.analytics.protocol import (
    CompletedAnswers,
    MissedTokensQuestion,
    OverviewQuestion,
    Question,
    StartAnalytics,
    TenantQuestion,
    read_said,
)
from gateway.child_process import ChildProcess, FrameWire, Report, RestartPolicy
from gateway.dialects.canonical import Rendered
from gateway.errors import Kind, Refusal
from tenancy.ledger.child_process import packed
from tenancy.pricing.charges import RateCard

COMMAND = (sys.executable, "-m", "gateway.analytics.process")
PAUSE_S = 1.0
RESTARTS = RestartPolicy((PAUSE_S,))
ANSWERS_MAX = 32
TOKENS_MAX = 16_384
"""Of the facts that wait to leave together: encoding a frame stays below a millisecond."""

UNSENT_MAX = 2**24
"""Bytes. A process that is so far behind is told no more until it has read some."""

CLOSE_S = 5.0


class AnalyticsProcessClient:
    """An `AnalyticsClient` of analytics in a process of their own. `open` makes one."""

    def __init__(
        self,
        begin: StartAnalytics,
        clock: Callable[[], float],
        wall: Callable[[], int],
        report: Report,
        command: tuple[str, ...] = COMMAND,
        restarts: RestartPolicy = RESTARTS,
    ) -> None:
        """`clock`: monotonic seconds, for each answer; `wall`: Unix milliseconds."""
        self._begin = begin
        self._clock, self._wall = clock, wall
        self._child = ChildProcess("analytics", command, restarts, report, self._live)
        self._wire: FrameWire | None = None
        self._waiting: list[tuple[float, Facts]] = []
        self._tokens = 0  # of those
        self._asked: deque[asyncio.Future[Any]] = deque()
        self._lost = asyncio.Event()
        self._tried = asyncio.Event()  # the first start is over

    @classmethod
    async def open(
        cls,
        begin: StartAnalytics,
        clock: Callable[[], float],
        wall: Callable[[], int],
        report: Report,
        command: tuple[str, ...] = COMMAND,
        restarts: RestartPolicy = RESTARTS,
    ) -> AnalyticsProcessClient:
        """Start the process. One that cannot be started is tried again every second; questions
        are refused meanwhile."""
        client = cls(begin, clock, wall, report, command, restarts)
        client._child.start()
        await client._tried.wait()
        return client

    @property
    def pid(self) -> int:
        """The id of the living process; 0 while there is none."""
        return self._child.pid

    def note(self, facts: Facts) -> None:
        """See `AnalyticsClient`."""
        prompt = facts.prompt
        if prompt.grammar is not None:
            facts = structs.replace(facts, prompt=Rendered(prompt.token_ids, prompt.boundaries))
        self._waiting.append((self._clock(), facts))
        self._tokens += len(prompt.token_ids)
        if len(self._waiting) >= ANSWERS_MAX or self._tokens >= TOKENS_MAX:
            self._flush()

    async def overview(self) -> dict[str, Any]:
        """See `AnalyticsClient`."""
        answer: dict[str, Any] = await self._ask(OverviewQuestion())
        return answer

    async def tenant(self, name: str, card: RateCard, blocks: int) -> dict[str, Any] | None:
        """See `AnalyticsClient`."""
        answer: dict[str, Any] | None = await self._ask(TenantQuestion(name, card, blocks))
        return answer

    async def missed_tokens(self, name: str, cause: str) -> int:
        """See `AnalyticsClient`."""
        return int(await self._ask(MissedTokensQuestion(name, cause)))

    async def close(self) -> None:
        """See `AnalyticsClient`."""
        await self._child.stop()
        if self._wire is not None:
            self._wire.end()
        await self._child.end(CLOSE_S)
        self._lose()

    def _flush(self) -> None:
        waiting, self._waiting, self._tokens = self._waiting, [], 0
        if waiting and self._wire is not None and self._wire.unsent <= UNSENT_MAX:
            self._wire.send(packed(CompletedAnswers(self._wall() - 1_000 * self._clock(), waiting)))

    async def _ask(self, question: Question) -> Any:
        self._flush()
        if self._wire is None:
            raise _away()
        asked: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._wire.send(packed(question))
        return await asked

    def _hear(self, frame: bytes) -> None:
        asked = self._asked.popleft()
        if not asked.done():  # the asking request may be gone
            asked.set_result(read_said(frame).answer)

    def _lose(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        while self._asked:
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_exception(_away())
        self._lost.set()

    async def _live(self) -> str:
        """See `ChildProcess`: from the start until the wire ends."""
        self._lost.clear()
        try:
            self._wire = FrameWire(await self._child.spawn(), self._hear, self._lose)
        except OSError as error:
            return str(error.strerror)
        finally:
            self._tried.set()
        self._wire.send(packed(self._begin))
        self._child.set_ready()
        await self._lost.wait()
        return "connection lost"


def _away() -> Refusal:
    message = "Analytics are being started again; try again in a moment."
    return Refusal(Kind.BUSY, "analytics_away", message, retry_after_s=PAUSE_S)
