"""One request's events on their way to whoever reads them, at whatever speed.

It knows nothing of sockets: a connection pushes, a coroutine reads. Reading slowly is safe: tokens
of one sample are joined while they wait, so a stream never holds more than its request's own
output, and never holds another's up. `engine.client.client` makes them, the gateway reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import chain
from typing import Protocol

from engine.api import (
    Cancel,
    Command,
    EndSample,
    Event,
    Finished,
    Started,
    Tokens,
    Usage,
)


class StreamTransport(Protocol):
    """What a stream needs of its connection."""

    def post(self, command: Command) -> None:
        """Send a command on its way."""

    def forget(self, request_id: str) -> None:
        """A reader has gone: cancel, and drop what still comes for it."""


class Wakeup:
    """Wakes one reader of any number of streams. `idle_s`: also when nothing came for so long.

    It costs one future a wait, and one timer for as long as it is used, not one for each wait.
    """

    __slots__ = ("_idle_s", "_since_s", "_timer", "_waiter")

    def __init__(self, idle_s: float | None = None) -> None:
        self._idle_s = idle_s
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[bool] | None = None

    def ring(self) -> None:
        """Something has come. Without anybody waiting it is forgotten."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(True)

    async def wait(self) -> bool:
        """Until something comes: True; or nothing has for `idle_s`: False. Look before waiting."""
        assert self._waiter is None, "one reader at a time"
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        if self._idle_s is not None:
            self._since_s = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(self._idle_s, self._look, loop, self._idle_s)
        try:
            return await waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop, idle_s: float) -> None:
        """The timer: has the wait that goes on now been long enough? The next one begins anew."""
        self._timer = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        left_s = self._since_s + idle_s - loop.time()
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._look, loop, idle_s)
        else:
            waiter.set_result(False)


class RequestStream(AsyncIterator[Event]):
    """One request's events, ending after `Finished`. `aclose` before that cancels the request.

    `bell` rings when something comes. Whoever reads several streams gives them one of its own.
    """

    def __init__(self, request_id: str, connection: StreamTransport) -> None:
        self.request_id = request_id
        self._connection = connection
        self._events: list[Event] = []
        self._rows: dict[int, list[Tokens]] = {}  # of those events that are tokens, by sample
        self._taken: list[Event] = []
        self.bell = Wakeup()
        self._is_over = False
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0

    def push(self, event: Event) -> None:
        """Called by the connection, in order. A stream holds at most its own output and two events
        per sample."""
        events = self._events
        if not events:
            self.bell.ring()  # for what waits already it has rung
        if isinstance(event, Tokens):
            self._output_tokens += len(event.tokens)
            row = self._rows.get(event.index)
            if row is not None:
                row.append(event)
                return
            self._rows[event.index] = [event]
        elif isinstance(event, Started):
            self._prompt_tokens, self._cached_tokens = event.prompt_tokens, event.cached_tokens
        events.append(event)

    def fail(self, code: str, message: str) -> None:
        """The engine is gone: end with the usage that was seen to arrive."""
        seen = Usage(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            computed_tokens=self._prompt_tokens - self._cached_tokens,
            output_tokens=self._output_tokens,
        )
        self.push(Finished(self.request_id, "failed", seen, code, message))

    @property
    def is_over(self) -> bool:
        """Has its end been read, or its reader gone?"""
        return self._is_over

    async def __anext__(self) -> Event:
        if not self._taken:
            self._taken = (await self.next_batch())[::-1]
            if not self._taken:
                raise StopAsyncIteration
        return self._taken.pop()

    async def next_batch(self) -> list[Event]:
        """Everything there is, at least one event; [] when it is over."""
        while not self._events and not self._is_over:
            await self.bell.wait()
        return self.take()

    def take(self) -> list[Event]:
        """Everything there is now, perhaps nothing. Tokens of one sample are one event, where the
        first stood: samples may overtake each other, one sample's events never."""
        events = self._events
        if not events or self._is_over:
            return []
        for row in self._rows.values():
            if len(row) > 1:
                first = row[0]
                tokens = tuple(chain.from_iterable([event.tokens for event in row]))
                events[events.index(first)] = Tokens(self.request_id, first.index, tokens)
        self._events, self._rows = [], {}
        self._is_over = isinstance(events[-1], Finished)
        return events

    def end_sample(self, index: int, output_tokens: int) -> None:
        """A stop string was found in sample `index`."""
        if not self._is_over:
            self._connection.post(EndSample(self.request_id, index, output_tokens))

    async def cancel(self) -> Finished | None:
        """Nobody wants the rest: cancel, and wait for the end and its usage, which the engine tells
        after the step it is in; without an engine it comes at once."""
        if self._is_over:
            return None
        self._connection.post(Cancel(self.request_id))
        async for event in self:
            if isinstance(event, Finished):
                return event
        return None

    async def aclose(self) -> None:
        """Nobody reads on: cancel unless it is over. Safe to call twice."""
        if not self._is_over:
            self._is_over = True
            self._connection.forget(self.request_id)
