"""Requests whose prompt is computed by one replica, and whose answer by another, which fetches it.

The prompt runs as a request that is no client's (`Request.adopts`); then the client's request goes
to the replica that answers, with the other one as its peer. Whatever becomes of the prompt, the
answer is computed: late, refused or lost, and that replica computes the prompt itself.

**Money.** A client's request counts as if one engine had done all of it. What the first engine
computed for this very request is no cache hit: cached tokens are those that were cached before, on
the better of the two (`as_one_engine`). The first engine counts the prompt as abandoned, which no
entry has; what the entry has less than the second one has counted is its stream's `correction`. A
request that ends before the second engine had it is wholly the entry's.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from math import inf
from typing import Final, Literal, get_args

from msgspec.structs import replace

from engine.api import (
    Cancel,
    Clock,
    Command,
    Ending,
    Finished,
    Namespace,
    Request,
    Sampling,
    Started,
)
from engine.client.client import EngineConnection
from engine.client.request_stream import RequestStream
from gateway.routing.pairs import PairCost

ApartOutcome = Literal["apart", "late", "busy", "lost", "failed", "not_fetched", "cancelled"]
"""`apart`: fetched and answered. `late`: what the first engine had by then was fetched. `busy`: it
had no place for the prompt. `not_fetched`: it was computed in time, and did not come over.
`cancelled`: by the client before the second engine had it."""
OUTCOMES: Final[tuple[ApartOutcome, ...]] = get_args(ApartOutcome)
LATE_FACTOR: Final = 2.0
"""A prompt is late after so many times its predicted seconds."""
LATE_S_MIN: Final = 0.5
ERASED_S: Final = 120.0
"""For so long after an erasure nothing is fetched into its namespace: engines refuse it."""
BUSY: Final = ("queue_full", "draining", "not_ready", "timeout", "quota_exceeded")

GoOn = Callable[[Request, RequestStream, bool], None]
"""Submits the client's request to a replica that answers: with its stream, and whether the replica
that was to compute its prompt has something of it."""


class PromptsApart:
    """The requests of one model whose prompts are being computed apart. Belongs to the event
    loop."""

    def __init__(self, clock: Clock, *, is_on: bool = False) -> None:
        self.is_on = is_on
        self.outcomes = Counter[ApartOutcome]()
        self._clock = clock
        self._open = set[ApartRequest]()
        self._erased_at_s = OrderedDict[Namespace, float]()

    def may_part(self, request: Request) -> bool:
        """Return whether another replica may compute a request's prompt."""
        grant = request.grant
        if not self.is_on or request.attention is not None or request.isolated_tokens:
            return False
        erased_at_s = self._erased_at_s.get(grant.namespace, -inf)
        return grant.read and grant.write and self._clock() - erased_at_s >= ERASED_S

    def note_erasure(self, namespace: Namespace) -> None:
        """Part nothing of a namespace in which something is erased, for a while."""
        if not self.is_on:
            return
        now_s = self._clock()
        self._erased_at_s[namespace] = now_s
        self._erased_at_s.move_to_end(namespace)
        while next(iter(self._erased_at_s.values())) < now_s - ERASED_S:
            self._erased_at_s.popitem(last=False)

    def begin(
        self,
        request: Request,
        pair: PairCost,
        prompt: RequestStream,
        engine: EngineConnection,
        go_on: GoOn,
    ) -> RequestStream:
        """Return the stream of a client's request whose `prompt` was submitted to `engine`."""
        late_s = max(LATE_S_MIN, LATE_FACTOR * pair.prompt_s)
        one = ApartRequest(request, prompt, engine, late_s, go_on, self)
        self._open.add(one)
        return one.stream

    def close(self) -> None:
        """End all that wait for their prompts."""
        for one in list(self._open):
            one.stop("engine_died", "The gateway closes.")

    def leave(self, one: ApartRequest) -> None:
        """Forget a request that waits for its prompt no more."""
        self._open.discard(one)


class ApartRequest:
    """One client's request while its prompt is computed elsewhere: its stream's transport until an
    engine has it."""

    def __init__(
        self,
        request: Request,
        prompt: RequestStream,
        engine: EngineConnection,
        late_s: float,
        go_on: GoOn,
        owner: PromptsApart,
    ) -> None:
        self.stream = RequestStream(request.request_id, self, may_move=True)
        self._request, self._prompt, self._engine = request, prompt, engine
        self._late_s, self._go_on, self._owner = late_s, go_on, owner
        self._there: Started | None = None
        self._outcome: ApartOutcome = "cancelled"
        self._task = asyncio.create_task(self._run())

    def post(self, command: Command) -> None:
        """See `StreamTransport`: the client's end ends both; no sample ends before it began."""
        if isinstance(command, Cancel):
            self.stop("", "", is_cancelled=True)

    def forget(self, request_id: str) -> None:
        """See `StreamTransport`."""
        self._leave("cancelled")

    def stop(self, code: str, message: str, *, is_cancelled: bool = False) -> None:
        """End the client's request now, with what is known of its prompt."""
        self._leave("cancelled" if is_cancelled else "failed")
        if self._there is not None:
            self.stream.push(replace(self._there, request_id=self.stream.request_id))
        ending: Ending = "cancelled" if is_cancelled else "failed"
        self.stream.fail(code, message, is_abandoned=True, ending=ending)

    def _leave(self, outcome: ApartOutcome) -> None:
        self._task.cancel()
        self._engine.forget(self._prompt.request_id)
        self._owner.leave(self)
        self._owner.outcomes[outcome] += 1

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self._late_s):
                self._outcome = await self._computed()
        except TimeoutError:
            self._outcome = "late"
            self._engine.forget(self._prompt.request_id)
        self._owner.leave(self)
        if not self._is_there:
            self._owner.outcomes[self._outcome] += 1
        self.stream.join = self._join
        self._go_on(self._request, self.stream, self._is_there)

    @property
    def _is_there(self) -> bool:
        """Whether the first engine has the prompt, or a part of it."""
        return self._outcome in ("apart", "late") and self._there is not None

    async def _computed(self) -> ApartOutcome:
        async for event in self._prompt:
            if isinstance(event, Started):
                self._there = event
            elif isinstance(event, Finished) and event.ending != "done":
                if event.code == "engine_died":
                    return "lost"
                return "busy" if event.code in BUSY else "failed"
        return "apart"

    def _join(self, here: Started) -> Started:
        """Return how the client's request began: an engine that answers has begun it."""
        is_same = self.stream.epoch == self._prompt.epoch
        if self._is_there:
            is_used = is_same or fetched_tokens(here) > 0
            self._owner.outcomes[self._outcome if is_used else "not_fetched"] += 1
        return as_one_engine(self._there, here, is_same=is_same)


def prompt_request(request: Request, expected_tokens: int) -> Request:
    """Return the request that computes a prompt for another engine: no output, no promise."""
    return replace(
        request,
        request_id=f"{request.request_id}/prompt",
        max_tokens=0,
        grant=replace(request.grant, leases=()),
        sampling=Sampling(),
        stop_token_ids=(),
        min_tokens=0,
        grammar=None,
        drafts=False,
        prediction=(),
        expected_cached_tokens=expected_tokens,
        adopts=True,
    )


def fetched_tokens(here: Started) -> int:
    """Return the tokens that an engine has fetched from another one for a request."""
    return sum(tokens for level, tokens in here.loaded_tokens if level == "peer")


def as_one_engine(there: Started | None, here: Started, *, is_same: bool) -> Started:
    """Return how a request began, as if one engine had done all of it.

    `there`: how its prompt began where it was computed, None if it did not; `here`: how it began
    where it is answered; `is_same`: that is the same engine, which has the prompt from itself.
    Leases are those of `here`. What was cached before counts, on the better of the two.
    """
    if there is None:
        return here
    fetched = fetched_tokens(here)
    own = 0 if is_same else here.cached_tokens - fetched
    if own <= there.cached_tokens:
        return replace(there, request_id=here.request_id, leases=here.leases)
    kept = tuple((level, tokens) for level, tokens in here.loaded_tokens if level != "peer")
    return replace(here, cached_tokens=own, loaded_tokens=kept)
