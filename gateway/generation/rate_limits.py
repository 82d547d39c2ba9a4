"""Rate limits of a call: its estimated and its actual demand, and the headers that report limits.

`tenancy.limits` keeps the counters. This module estimates tokens (with a look into the cache if a
limit is near) and reports the remaining limits in the headers of the request's dialect. The
middleware takes a request's place by `take_place`; `gateway.generation.generation` calls the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from engine.api import Request
from engine.client.client import Engine
from gateway.config import LimitsConfig
from gateway.dialects.canonical import GenerationParameters, UsageRecord
from gateway.errors import Kind, Refusal
from gateway.http.request_context import RequestState
from tenancy.errors import LimitExceeded
from tenancy.limits import CONCURRENCY_RETRY_S, Demand, Limiter, Reservation
from tenancy.types import WallClock


class RateLimits:
    """The rate limits of one gateway's requests."""

    def __init__(self, limiter: Limiter, settings: LimitsConfig, wall: WallClock) -> None:
        self._settings = settings
        self.limiter = limiter
        self._wall = wall
        self.limited = Counter[int]()
        """Requests that a tenant's limits refused since the start, by tenant id."""

    def take_place(self, state: RequestState) -> None:
        """Take a place for a tenant's request before anything is done for it: one request of its
        minute, one of its requests at once, and one of `limits.requests_per_tenant_max`.

        The place is `state.place`, which the middleware settles at the latest. O(1). Raises
        Refusal; the headers report what is left.
        """
        identity, limiter = state.identity, self.limiter
        assert identity is not None, "a place belongs to a tenant"
        limit = self._settings.requests_per_tenant_max
        running = limiter.running_of(identity.tenant.tenant_id)
        if running >= limit:
            self.limited[identity.tenant.tenant_id] += 1
            message = f"Rate limit reached for requests at once: {running} running, limit {limit}."
            after_s = CONCURRENCY_RETRY_S
            raise Refusal(Kind.RATE, "rate_limit_exceeded", message, retry_after_s=after_s)
        try:
            state.place = limiter.reserve(identity)
        except LimitExceeded as error:
            self.limited[identity.tenant.tenant_id] += 1
            left = limiter.status(identity)
            state.headers.update(state.shape.limit_headers(left, self._wall()))
            raise refusal_of(error) from error

    def reserve(self, state: RequestState, demand: Demand) -> Reservation:
        """Reserve the tokens of a request that has its place, and return the place. Raises Refusal;
        the headers report what is left."""
        place = place_of(state)
        try:
            place.extend(demand)
        except LimitExceeded as error:
            assert state.identity is not None, "a place belongs to a tenant"
            self.limited[state.identity.tenant.tenant_id] += 1
            self.report(state)
            raise refusal_of(error) from error
        return place

    def report(self, state: RequestState) -> None:
        """Set the headers that report what is left, as the clients of the request's dialect expect
        them."""
        left = place_of(state).status()
        state.headers.update(state.shape.limit_headers(left, self._wall()))


def place_of(state: RequestState) -> Reservation:
    """Return the place that `take_place` has taken."""
    assert state.place is not None, "the middleware takes a place for each request of a tenant"
    return state.place


def upper_bound(
    prompt_tokens: int, generation: GenerationParameters, prompts: int, default: int
) -> Demand:
    """Return the most that a call may use, before anything is known about the cache. `default`: the
    output tokens of a call that sets no limit."""
    longest = default if generation.max_tokens is None else generation.max_tokens
    return Demand(prompt_tokens, longest * generation.samples * prompts)


async def cached_tokens(
    engine: Engine, namespace: bytes, prompts: Sequence[tuple[int, ...]]
) -> int:
    """Return how many tokens of the prompts are cached now. Raises EngineUnavailable."""
    if len(prompts) == 1:  # the usual case: no tasks
        return (await engine.peek(namespace, prompts[0])).cached_tokens
    found = await asyncio.gather(*(engine.peek(namespace, tokens) for tokens in prompts))
    return sum(peeked.cached_tokens for peeked in found)


def estimate(requests: Sequence[Request], cached: int) -> Demand:
    """Return the most that these requests may use if `cached` tokens stay cached."""
    computed = output = 0
    for request in requests:
        computed += len(request.tokens)
        output += request.max_tokens * request.samples
        if not request.grant.read or request.prompt_logprobs is not None:
            cached = 0
    return Demand(max(0, computed - cached), output)


def actual_usage(usage: UsageRecord) -> Demand:
    """Return the computed tokens of a finished call, by the engine's count."""
    return Demand(max(0, usage.total_in - usage.physical_cached), usage.out)


def refusal_of(error: LimitExceeded) -> Refusal:
    """Return the refusal of a limit; without a retry time the request can never fit."""
    code = "rate_limit_exceeded" if error.retry_after_s is not None else error.code
    return Refusal(Kind.RATE, code, error.message, retry_after_s=error.retry_after_s)
