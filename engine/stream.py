"""One request's events on their way to whoever reads them, at whatever speed.

It knows nothing of sockets: a connection pushes, a coroutine reads. Reading slowly is safe: tokens
of one sample are joined while they wait, so a stream never holds more than its request's own
output, and never holds another's up. `engine.client` makes them, the gateway reads them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from engine.api import (
    Cancel,
    Command,
    EndSample,
    Event,
    Finished,
    SampledToken,
    Started,
    Tokens,
    Usage,
)


class Way(Protocol):
    """What a stream needs of its connection."""

    def post(self, command: Command) -> None:
        """Send a command on its way."""

    def forget(self, request_id: str) -> None:
        """A reader has gone: cancel, and drop what still comes for it."""


class _Joined:
    """Tokens of one sample that wait to be read."""

    __slots__ = ("index", "tokens")

    def __init__(self, index: int) -> None:
        self.index = index
        self.tokens: list[SampledToken] = []


class RequestStream(AsyncIterator[Event]):
    """One request's events, ending after `Finished`. `aclose` before that cancels the request."""

    def __init__(self, request_id: str, connection: Way) -> None:
        self.request_id = request_id
        self._connection = connection
        self._events: deque[Event | _Joined] = deque()
        self._joined: dict[int, _Joined] = {}
        self._arrived = asyncio.Event()
        self._is_over = False
        self._seen = Usage()

    def push(self, event: Event) -> None:
        """Called by the connection, in order.

        Waiting tokens of one sample are one event, so a stream holds at most its own output and
        two events per sample. Samples may overtake each other; one sample's events never.
        """
        match event:
            case Tokens(index=index, tokens=tokens):
                self._saw(output_tokens=self._seen.output_tokens + len(tokens))
                joined = self._joined.get(index)
                if joined is None:
                    joined = self._joined[index] = _Joined(index)
                    self._events.append(joined)
                joined.tokens.extend(tokens)
            case Started(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens):
                self._saw(
                    prompt_tokens=prompt_tokens,
                    cached_tokens=cached_tokens,
                    computed_tokens=prompt_tokens - cached_tokens,
                )
                self._events.append(event)
            case _:
                self._events.append(event)
        self._arrived.set()

    def fail(self, code: str, message: str) -> None:
        """The engine is gone: end with the usage that was seen to arrive."""
        self.push(Finished(self.request_id, "failed", self._seen, code, message))

    def _saw(self, **counts: int) -> None:
        self._seen = msgspec.structs.replace(self._seen, **counts)

    async def __anext__(self) -> Event:
        if self._is_over:
            raise StopAsyncIteration
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._take()

    def _take(self) -> Event:
        event = self._events.popleft()
        if isinstance(event, _Joined):
            del self._joined[event.index]
            event = Tokens(self.request_id, event.index, tuple(event.tokens))
        self._is_over = isinstance(event, Finished)
        return event

    async def next_batch(self) -> list[Event]:
        """Everything there is, at least one event; [] when it is over."""
        if self._is_over:
            return []
        batch = [await anext(self)]
        while self._events and not self._is_over:
            batch.append(self._take())
        return batch

    def end_sample(self, index: int, output_tokens: int) -> None:
        """A stop string was found in sample `index`."""
        if not self._is_over:
            self._connection.post(EndSample(self.request_id, index, output_tokens))

    async def cancel(self, patience_s: float = 2.0) -> Finished | None:
        """Nobody wants the rest: cancel, and wait a moment for the end and its usage."""
        if self._is_over:
            return None
        self._connection.post(Cancel(self.request_id))
        try:
            async with asyncio.timeout(patience_s):
                async for event in self:
                    if isinstance(event, Finished):
                        return event
        except TimeoutError:
            await self.aclose()
        return None

    async def aclose(self) -> None:
        """Nobody reads on: cancel unless it is over. Safe to call twice."""
        if not self._is_over:
            self._is_over = True
            self._connection.forget(self.request_id)
