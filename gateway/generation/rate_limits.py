"""Rate limits of a call: its estimated and its actual demand, and the headers that report limits.

`tenancy.limits` keeps the counters of one gateway. Where several share them (`gateway.shared`), the
shared ones decide, and those here follow them: for the headers, and for the time in which the
shared ones are away. This module estimates tokens (with a look into the cache if a limit is near)
and reports the remaining limits in the headers of the request's dialect. The middleware takes a
request's place by `take_place`; `gateway.generation.generation` calls the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from functools import lru_cache, partial
from typing import Literal

from engine.api import Request
from gateway.config import LimitsConfig
from gateway.dialects.canonical import GenerationParameters, UsageRecord
from gateway.engines.replicas import Replicas
from gateway.errors import Kind, Refusal
from gateway.http.request_context import RequestState
from gateway.shared.interface import (
    Account,
    AccountLimits,
    Change,
    SharedAway,
    SharedLimits,
    Standing,
)
from tenancy.errors import LimitExceeded
from tenancy.limits import (
    CONCURRENCY_RETRY_S,
    METERS,
    NO_DEMAND,
    Demand,
    Limiter,
    Reservation,
    limit_of,
)
from tenancy.types import Identity, Limits, WallClock


class RateLimits:
    """The rate limits of one gateway's requests."""

    def __init__(
        self,
        limiter: Limiter,
        settings: LimitsConfig,
        wall: WallClock,
        shared: SharedLimits | None = None,
    ) -> None:
        """`shared`: the limits of all gateways of the database, if there are several."""
        self._settings = settings
        self._shared = shared
        self.limiter = limiter
        self._wall = wall
        self.limited = Counter[int]()
        """Requests that a tenant's limits refused since the start, by tenant id."""

    def take_place(self, state: RequestState) -> Awaitable[None] | None:
        """Take a place for a tenant's request before anything is done for it: one request of its
        minute, one of its requests at once, and one of `limits.requests_per_tenant_max`. Returns
        what to wait for, if several gateways have the limits.

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
        if self._shared is not None and (accounts := accounts_of(identity)) is not None:
            return self._take_shared(self._shared, state, identity, accounts)
        self._take(state, identity)
        return None

    def _take(self, state: RequestState, identity: Identity, *, has_room: bool = False) -> None:
        try:
            state.place = self.limiter.reserve(identity, has_room=has_room)
        except LimitExceeded as error:
            self.limited[identity.tenant.tenant_id] += 1
            left = self.limiter.status(identity)
            state.headers.update(state.shape.limit_headers(left, self._wall()))
            raise refusal_of(error) from error

    async def _take_shared(
        self,
        shared: SharedLimits,
        state: RequestState,
        identity: Identity,
        accounts: tuple[Account, Account],
    ) -> None:
        """Take a place of the shared limits; while they are away, of this gateway's part."""
        change = Change("take", state.request_id, accounts, NO_DEMAND.counts)
        standing = await self._ask(shared, change)
        if standing is None:
            self._take(state, identity)
            return
        if not standing.fits:
            self.limiter.follow(identity, standing.owed, standing.running)
            self._take(state, identity)  # refuses, but for a millisecond that has passed
            standing = await self._ask(shared, change)
            if standing is not None and not standing.fits:
                place_of(state).settle(NO_DEMAND)
                state.place = None
                raise _refused_elsewhere()
        else:
            self._take(state, identity, has_room=True)
        place = place_of(state)
        if standing is not None:
            self.limiter.follow(identity, standing.owed, standing.running)
            place.on_change = partial(self._note, shared, change)

    async def reserve(self, state: RequestState, demand: Demand) -> Reservation:
        """Reserve the tokens of a request that has its place, and return the place. Raises Refusal;
        the headers report what is left."""
        place, shared, identity = place_of(state), self._shared, state.identity
        assert identity is not None, "a place belongs to a tenant"
        accounts = None if shared is None else accounts_of(identity)
        standing = None
        if shared is not None and accounts is not None:
            change = Change("extend", state.request_id, accounts, demand.counts)
            standing = await self._ask(shared, change)
        if standing is not None:
            place.follow(demand if standing.fits else NO_DEMAND, standing.owed)
            if standing.fits:
                return place
        try:
            place.extend(demand)
        except LimitExceeded as error:
            self.limited[identity.tenant.tenant_id] += 1
            self.report(state)
            raise refusal_of(error) from error
        if standing is not None:  # a millisecond has passed, in which room came here
            place.settle(NO_DEMAND)
            raise _refused_elsewhere()
        return place

    async def _ask(self, shared: SharedLimits, change: Change) -> Standing | None:
        """Return what the shared limits answer; None while they are away."""
        parts = 1
        try:
            standing: Standing | None = await shared.change(change)
        except SharedAway:
            standing, parts = None, shared.gateways
        if self.limiter.parts != parts:
            self.limiter.divide(parts)
        return standing

    @staticmethod
    def _note(shared: SharedLimits, taken: Change, demand: Demand, is_last: bool) -> None:
        kind: Literal["settle", "correct"] = "settle" if is_last else "correct"
        shared.note(Change(kind, taken.request_id, taken.accounts, demand.counts))

    def report(self, state: RequestState) -> None:
        """Set the headers that report what is left, as the clients of the request's dialect expect
        them."""
        left = place_of(state).status()
        state.headers.update(state.shape.limit_headers(left, self._wall()))


def accounts_of(identity: Identity) -> tuple[Account, Account] | None:
    """Return the accounts whose limits an identity's calls have; None without any limit."""
    tenant, key = limits_of(identity.limits), limits_of(identity.key_limits)
    if not any(tenant) and not any(key):
        return None
    return (
        Account(f"tenant:{identity.tenant.tenant_id}", tenant),
        Account(f"key:{identity.line_id}", key),
    )


@lru_cache(maxsize=1_024)
def limits_of(limits: Limits) -> AccountLimits:
    """Return limits as they are shared: by meter, and at once; 0 for none."""
    requests, tokens, inputs, outputs = (limit_of(limits, meter) or 0 for meter in METERS)
    return requests, tokens, inputs, outputs, limits.requests_at_once or 0


def _refused_elsewhere() -> Refusal:
    message = "Rate limit reached: other requests have taken what was free."
    return Refusal(Kind.RATE, "rate_limit_exceeded", message, retry_after_s=CONCURRENCY_RETRY_S)


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
    replicas: Replicas, namespace: bytes, prompts: Sequence[tuple[int, ...]]
) -> int:
    """Return how many tokens of the prompts are cached now. Raises EngineUnavailable."""
    if len(prompts) == 1:  # the usual case: no tasks
        return (await replicas.peek(namespace, prompts[0])).cached_tokens
    found = await asyncio.gather(*(replicas.peek(namespace, tokens) for tokens in prompts))
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
