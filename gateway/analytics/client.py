"""Analytics' process, seen from the gateway's loop: told of answers here, added up there.

Adding up needs nothing that the loop has, and was the most that ledger and analytics took of it.
Answers leave some at a time. A process that dies is replaced a second later and begins anew, since
nothing of it is kept; what comes meanwhile is not counted, nor what a socket would not take. It
knows no prompt's words and no HTTP; `app.serve` opens it. Belongs to one loop.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import structs

from gateway.analytics.aggregates import Facts
from gateway.analytics.protocol import (
    Begin,
    MissedTokens,
    Overview,
    Question,
    Tenant,
    Told,
    read_said,
)
from gateway.child_process import ChildWire, reaped, spawned
from gateway.dialects.canonical import Rendered
from gateway.errors import Kind, Refusal
from tenancy.ledger.protocol import packed
from tenancy.pricing.charges import RateCard

COMMAND = (sys.executable, "-m", "gateway.analytics.process")
ANSWERS_MAX = 32
TOKENS_MAX = 16_384
"""Of the answers that wait to leave together: what a frame takes to be made stays below a
millisecond."""

UNSENT_MAX = 2**24
"""Bytes. A process that is so far behind is told no more until it has read some."""

PAUSE_S = 1.0
CLOSE_S = 5.0

Report = Callable[[str, dict[str, object]], None]
"""Told of what happens to the process, for the log: an event's name and its facts."""


class AnalyticsLink:
    """An `AnalyticsDoor` to a process. `open` makes one."""

    def __init__(
        self,
        begin: Begin,
        clock: Callable[[], float],
        wall: Callable[[], int],
        report: Report,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        """`clock`, `wall`: of each answer, and where that lies in people's time."""
        self._begin = begin
        self._clock, self._wall = clock, wall
        self._report = report
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._wire: ChildWire | None = None
        self._waiting: list[tuple[float, Facts]] = []
        self._tokens = 0  # of those
        self._asked: deque[asyncio.Future[Any]] = deque()
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        begin: Begin,
        clock: Callable[[], float],
        wall: Callable[[], int],
        report: Report,
        command: tuple[str, ...] = COMMAND,
    ) -> AnalyticsLink:
        """Start the process. One that cannot be started is tried again every second."""
        link = cls(begin, clock, wall, report, command)
        await link._start()
        link._task = asyncio.create_task(link._keep())
        return link

    @property
    def pid(self) -> int:
        """Of the process that lives now; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def note(self, facts: Facts) -> None:
        """See `AnalyticsDoor`."""
        prompt = facts.prompt
        if prompt.grammar is not None:
            facts = structs.replace(facts, prompt=Rendered(prompt.token_ids, prompt.boundaries))
        self._waiting.append((self._clock(), facts))
        self._tokens += len(prompt.token_ids)
        if len(self._waiting) >= ANSWERS_MAX or self._tokens >= TOKENS_MAX:
            self._flush()

    async def overview(self) -> dict[str, Any]:
        """See `AnalyticsDoor`."""
        answer: dict[str, Any] = await self._ask(Overview())
        return answer

    async def tenant(self, name: str, card: RateCard, blocks: int) -> dict[str, Any] | None:
        """See `AnalyticsDoor`."""
        answer: dict[str, Any] | None = await self._ask(Tenant(name, card, blocks))
        return answer

    async def missed_tokens(self, name: str, cause: str) -> int:
        """See `AnalyticsDoor`."""
        return int(await self._ask(MissedTokens(name, cause)))

    async def close(self) -> None:
        """See `AnalyticsDoor`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        if self._wire is not None:
            self._wire.end()
        await self._reap(CLOSE_S)
        self._lose()

    def _flush(self) -> None:
        waiting, self._waiting, self._tokens = self._waiting, [], 0
        if waiting and self._wire is not None and self._wire.unsent <= UNSENT_MAX:
            self._wire.send(packed(Told(self._wall() - 1_000 * self._clock(), waiting)))

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
        if not asked.done():  # whoever asked may be gone
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

    # -- one process after another ------------------------------------------------------------

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._lost.clear()
        with theirs:
            self._wire = ChildWire(ours, self._hear, self._lose)
            self._wire.send(packed(self._begin))
            try:
                self._process = await spawned(self._command, theirs)
            except OSError as error:
                self._report("analytics_not_started", {"error": str(error.strerror)})
                self._lose()

    async def _keep(self) -> None:
        while True:
            await self._lost.wait()
            self._report("analytics_died", {"status": await self._reap(1.0)})
            await asyncio.sleep(PAUSE_S)
            await self._start()

    async def _reap(self, patience_s: float) -> int | None:
        if self._process is None:
            return None
        status = await reaped(self._process, patience_s)
        self._process = None
        return status


def _away() -> Refusal:
    message = "Analytics are being started again; try again in a moment."
    return Refusal(Kind.BUSY, "analytics_away", message, retry_after_s=PAUSE_S)
