"""Events of one request, buffered between the connection and a reader of any speed.

The connection pushes, a coroutine reads; this module knows no socket. A slow reader is safe: tokens
of one sample are joined while they wait, so a stream holds no more than its request's output and
delays no other stream. `engine.client.client` makes streams, the gateway reads them.
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
    PromptLogprobs,
    SampledToken,
    Started,
    Tokens,
    Usage,
)


class StreamTransport(Protocol):
    """The part of a connection that a stream uses to send its commands."""

    def post(self, command: Command) -> None:
        """Send a command. Never blocks."""

    def forget(self, request_id: str) -> None:
        """Cancel a request after its reader has gone, and drop its further events."""


class Wakeup:
    """Wakes one reader of any number of streams when an event arrives or nothing came for `idle_s`.

    A wait costs one future. One timer serves all waits: it is set anew only when it fires.
    """

    __slots__ = ("_idle_s", "_timer", "_wait_began_s", "_waiter")

    def __init__(self, idle_s: float | None = None) -> None:
        self._idle_s = idle_s
        self._wait_began_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[bool] | None = None

    def notify(self) -> None:
        """Wake the reader. Without a waiting reader this does nothing."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(True)

    async def wait(self) -> bool:
        """Wait for an event: return True; return False if none came for `idle_s`. Check for events
        first."""
        assert self._waiter is None, "one reader at a time"
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        if self._idle_s is not None:
            self._wait_began_s = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(self._idle_s, self._on_timer, loop, self._idle_s)
        try:
            return await waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Cancel the timer. The reader waits no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self, loop: asyncio.AbstractEventLoop, idle_s: float) -> None:
        """End the present wait if it lasted for `idle_s`, or set the timer for its rest."""
        self._timer = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        left_s = self._wait_began_s + idle_s - loop.time()
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._on_timer, loop, idle_s)
        else:
            waiter.set_result(False)


class RequestStream(AsyncIterator[Event]):
    """Events of one request, ending after `Finished`. `aclose` before that cancels the request.

    `wakeup` is notified when an event arrives. A reader of several streams sets the same one for
    all.
    """

    def __init__(self, request_id: str, connection: StreamTransport) -> None:
        self.request_id = request_id
        self._connection = connection
        self._events: list[Event] = []
        # the token events among them, by sample
        self._tokens_by_sample: dict[int, list[Tokens]] = {}
        self._batch: list[Event] = []
        self.wakeup = Wakeup()
        self._is_over = False
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._prompt_entries: list[SampledToken] = []  # the pieces of prompt logprobs so far

    def push(self, event: Event) -> None:
        """Add an event; called by the connection, in order.

        At most the request's output, its prompt logprobs and two events per sample are held. A
        request that is done although a part of its output has not come fails instead.
        """
        if isinstance(event, PromptLogprobs):
            self._prompt_entries += event.tokens
            if len(self._prompt_entries) < self._prompt_tokens:
                return
            event = PromptLogprobs(self.request_id, tuple(self._prompt_entries))
            self._prompt_entries = []
        elif isinstance(event, Finished) and event.ending == "done" and self._lacks_output(event):
            self.fail("answer_lost", "A part of the answer was lost on its way from the engine.")
            return
        events = self._events
        if not events:
            self.wakeup.notify()  # the reader was notified of earlier events already
        if isinstance(event, Tokens):
            self._output_tokens += len(event.tokens)
            pieces = self._tokens_by_sample.get(event.index)
            if pieces is not None:
                pieces.append(event)
                return
            self._tokens_by_sample[event.index] = [event]
        elif isinstance(event, Started):
            self._prompt_tokens, self._cached_tokens = event.prompt_tokens, event.cached_tokens
        events.append(event)

    def _lacks_output(self, end: Finished) -> bool:
        return bool(self._prompt_entries) or self._output_tokens < end.usage.output_tokens

    def fail(self, code: str, message: str) -> None:
        """End the stream as failed, with the usage seen so far: the engine's own is not known."""
        seen = Usage(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            computed_tokens=self._prompt_tokens - self._cached_tokens,
            output_tokens=self._output_tokens,
        )
        self.push(Finished(self.request_id, "failed", seen, code, message))

    @property
    def output_tokens(self) -> int:
        """Output tokens received, of all samples."""
        return self._output_tokens

    @property
    def is_over(self) -> bool:
        """True once `Finished` was read or the reader has gone."""
        return self._is_over

    async def __anext__(self) -> Event:
        if not self._batch:
            self._batch = (await self.next_batch())[::-1]
            if not self._batch:
                raise StopAsyncIteration
        return self._batch.pop()

    async def next_batch(self) -> list[Event]:
        """Wait for events and return all of them; [] once the stream is over."""
        while not self._events and not self._is_over:
            await self.wakeup.wait()
        return self.take()

    def take(self) -> list[Event]:
        """Return all events that are here now, perhaps none.

        Tokens of one sample are joined into one event at the place of the first: events of
        different samples may overtake each other, events of one sample never do.
        """
        events = self._events
        if not events or self._is_over:
            return []
        for pieces in self._tokens_by_sample.values():
            if len(pieces) > 1:
                first = pieces[0]
                tokens = tuple(chain.from_iterable([event.tokens for event in pieces]))
                events[events.index(first)] = Tokens(self.request_id, first.index, tokens)
        self._events, self._tokens_by_sample = [], {}
        self._is_over = isinstance(events[-1], Finished)
        return events

    def end_sample(self, index: int, output_tokens: int) -> None:
        """End sample `index` after `output_tokens` tokens, because a stop string was found."""
        if not self._is_over:
            self._connection.post(EndSample(self.request_id, index, output_tokens))

    async def cancel(self) -> Finished | None:
        """Cancel the request; wait for its `Finished`, which has its usage, and return it.

        The engine answers after its present step; without an engine the stream ends at once.
        Returns None if the stream was over.
        """
        if self._is_over:
            return None
        self._connection.post(Cancel(self.request_id))
        async for event in self:
            if isinstance(event, Finished):
                return event
        return None

    async def aclose(self) -> None:
        """Stop reading: cancel the request unless it is over. Safe to repeat."""
        if not self._is_over:
            self._is_over = True
            self._connection.forget(self.request_id)
