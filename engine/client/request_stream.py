"""Events of one request, buffered between the connection and a reader of any speed.

The connection pushes, a coroutine reads; this module knows no socket. A slow reader is safe: tokens
of one sample are joined while they wait, so a stream holds no more than its request's output and
delays no other stream. `engine.client.client` makes streams, the gateway reads them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from itertools import chain
from typing import Final, Protocol

from msgspec.structs import replace

from engine.api import (
    Cancel,
    Command,
    Ending,
    EndSample,
    Event,
    Finished,
    PromptLogprobs,
    Request,
    SampledToken,
    SampleEnded,
    Started,
    Tokens,
    Usage,
)

MOVE_LOST: Final = ("engine_died", "answer_lost")
"""Codes of ends whose usage is what the stream has seen."""


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

    A stream that may move keeps its output, and goes on over another connection: its reader sees
    one answer, with the usage of the first `Started` and all output once.
    """

    def __init__(
        self, request_id: str, connection: StreamTransport, *, may_move: bool = False
    ) -> None:
        self.request_id = request_id
        self.epoch = ""
        """Of the engine that computes it now."""
        self.hold_epoch = ""
        """The epoch that its hold in the ledger names, set by who submits it; "" without a hold."""
        self.moves = 0
        """How often it went on over another connection."""
        self._output_ids: list[int] | None = [] if may_move else None
        self._began_s = time.monotonic() if may_move else 0.0
        self._first_s: float | None = None
        self._has_started = self._has_ended = False
        self._resumed_tokens = 0  # output that the present engine was given
        self._started_here: Started | None = None  # on the present engine
        self.join: Callable[[Started], Started] | None = None
        """Returns how the request began at all, by how it began at the engine that answers: another
        one has computed its prompt."""
        self._ended_at: EndSample | None = None
        self._connection = connection
        self._events: list[Event] = []
        # the token events among them, by sample
        self._tokens_by_sample: dict[int, list[Tokens]] = {}
        self._batch: list[Event] = []
        self.wakeup = Wakeup()
        self._is_over = self._is_abandoned = False
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._prompt_entries: list[SampledToken] = []  # the pieces of prompt logprobs so far

    def push(self, event: Event) -> None:
        """Add an event; called by the connection, in order.

        At most the request's output, its prompt logprobs and two events per sample are held. A
        request that is done although a part of its output has not come fails instead.
        """
        if self._output_ids is not None:
            again = self._note(event)
            if again is None:
                return
            event = again
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

    def _note(self, event: Event) -> Event | None:
        """Keep what another engine would need of an event; return it as the reader may see it, None
        if it has seen it."""
        if isinstance(event, Tokens):
            assert self._output_ids is not None
            if self._first_s is None:
                self._first_s = time.monotonic() - self._began_s
            self._output_ids += [token.token_id for token in event.tokens]
        elif isinstance(event, Started):
            self._started_here = event
            if self._has_started:
                return None
            self._has_started = True
            return event if self.join is None else self.join(event)
        elif isinstance(event, SampleEnded):
            if self._has_ended:
                return None
            self._has_ended = True
        elif isinstance(event, Finished) and self._is_of_several and event.code not in MOVE_LOST:
            usage = event.usage
            if self._has_started:
                prompt, cached = self._prompt_tokens, self._cached_tokens
                usage = replace(
                    usage,
                    prompt_tokens=prompt,
                    cached_tokens=cached,
                    computed_tokens=prompt - cached,
                    first_token_s=self._first_s,
                )
            return replace(event, usage=usage)
        return event

    @property
    def _is_of_several(self) -> bool:
        return self.moves > 0 or self.join is not None

    def continuation(self, request: Request) -> Request | None:
        """Return the request that goes on where this stream is, on another engine; None if it may
        not. `request`: the one that was submitted last."""
        if self._output_ids is None or self._is_over:
            return None
        prompt = request.tokens[: request.prompt_tokens]
        found = tuple(self._output_ids)
        return replace(
            request,
            tokens=prompt + found,
            resumed_tokens=len(found),
            expected_cached_tokens=0,
            peer=None,
        )

    def move(self, connection: StreamTransport) -> None:
        """Go on over a connection to which the continuation was submitted."""
        self._connection = connection
        self.moves += bool(self.epoch)  # else it had none
        self._resumed_tokens = len(self._output_ids or ())
        self._started_here = None
        if self._ended_at is not None:  # the engine before was lost before it knew
            connection.post(self._ended_at)

    @property
    def has_moved_in_vain(self) -> bool:
        """Whether nothing has come since it moved last."""
        return self.moves > 0 and self._output_tokens <= self._resumed_tokens

    @property
    def correction(self) -> tuple[int, int, int]:
        """Return what its entry has more of prompt, cached and output tokens than the present
        engine has counted, or less, below 0: the part of engines before it, what it fetched of a
        prompt that another one computed, or all of a request that the engine counts as abandoned.
        Zeros for any other stream that never moved."""
        if self._is_abandoned:
            return self._prompt_tokens, self._cached_tokens, self._output_tokens
        if not self._has_started:
            return 0, 0, 0
        here = self._started_here
        prompt, cached = (0, 0) if here is None else (here.prompt_tokens, here.cached_tokens)
        return self._prompt_tokens - prompt, self._cached_tokens - cached, self._resumed_tokens

    def _lacks_output(self, end: Finished) -> bool:
        return bool(self._prompt_entries) or self._output_tokens < end.usage.output_tokens

    def fail(
        self,
        code: str,
        message: str,
        *,
        is_abandoned: bool = False,
        ending: Ending = "failed",
    ) -> None:
        """End the stream, with the usage seen so far: the engine's own is not known.

        `is_abandoned`: an engine that lives on counts the request apart.
        """
        self._is_abandoned = is_abandoned
        seen = Usage(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            computed_tokens=self._prompt_tokens - self._cached_tokens,
            output_tokens=self._output_tokens,
        )
        self.push(Finished(self.request_id, ending, seen, code, message))

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
            command = EndSample(self.request_id, index, output_tokens)
            if self._output_ids is not None:
                self._ended_at = command
            self._connection.post(command)

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
