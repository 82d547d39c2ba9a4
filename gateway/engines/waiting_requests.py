"""Requests that have been submitted and not started, by tenant, and the wait that follows.

The counts are the gateway's own, so that a refusal waits neither for a heartbeat nor for a step of
the engine. A tenant's wait comes from its own waiting tokens and its share of the prefill rate, and
tells nothing of others' tokens. The module knows no HTTP and no clock. Admission and quotes read
it, `gateway.generation.generation` changes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class WaitingBounds(Struct, frozen=True):
    """The most requests and prompt tokens that may wait in the engine."""

    requests_max: int
    tokens_max: int


class WaitingRequests:
    """The waiting requests of all tenants. A prompt is one request. Belongs to the event loop."""

    def __init__(self, bounds: WaitingBounds) -> None:
        self.bounds = bounds
        self._tenants: dict[int, _TenantWaiting] = {}
        self._requests = 0
        self._tokens = 0

    def enter(self, tenant_id: int, weight: float, prompt_tokens: Sequence[int]) -> WaitingPlace:
        """Count requests that are about to be submitted, by the tokens of their prompts."""
        tenant = self._tenants.setdefault(tenant_id, _TenantWaiting())
        tenant.weight = weight
        self.count(tenant_id, len(prompt_tokens), sum(prompt_tokens))
        return WaitingPlace(self, tenant_id, prompt_tokens)

    def requests_of(self, tenant_id: int) -> int:
        """Return how many requests of a tenant wait. O(1)."""
        tenant = self._tenants.get(tenant_id)
        return 0 if tenant is None else tenant.requests

    def wait_s(self, tenant_id: int, weight: float, rate: float, more: int = 0) -> float:
        """Return the seconds until a tenant's waiting tokens and `more` are computed.

        `rate`: prompt tokens a second of the engine, of which the tenant gets its part by weight;
        0 if none was measured yet, which gives 0. O(tenants that wait).
        """
        if rate <= 0:
            return 0.0
        own = self._tenants.get(tenant_id)
        tokens = more + (0 if own is None else own.tokens)
        others = sum(one.weight for number, one in self._tenants.items() if number != tenant_id)
        by_share_s = tokens * (weight + others) / (weight * rate)
        return min(by_share_s, (self._tokens + more) / rate)

    def is_full_for(self, tenant_id: int, weight: float, requests: int, tokens: int) -> bool:
        """Return whether the queue is full and this tenant would have most waiting for its weight.

        A tenant with less is not refused: the engine makes room for it. O(tenants that wait).
        """
        own = self._tenants.get(tenant_id, _NOTHING)
        others = [one for number, one in self._tenants.items() if number != tenant_id]
        if self._requests and self._requests + requests > self.bounds.requests_max:
            most = max((one.requests / one.weight for one in others), default=0.0)
            return (own.requests + requests) / weight >= most
        if self._tokens and self._tokens + tokens > self.bounds.tokens_max:
            most = max((one.tokens / one.weight for one in others), default=0.0)
            return (own.tokens + tokens) / weight >= most
        return False

    def count(self, tenant_id: int, requests: int, tokens: int) -> None:
        """Add requests and tokens (may be negative) to a tenant that waits. Only `WaitingPlace`
        calls it. O(1).
        """
        tenant = self._tenants[tenant_id]
        tenant.requests += requests
        tenant.tokens += tokens
        self._requests += requests
        self._tokens += tokens
        if not tenant.requests:
            del self._tenants[tenant_id]


class WaitingPlace:
    """The requests of one call among those that wait."""

    def __init__(self, waiting: WaitingRequests, tenant_id: int, tokens: Sequence[int]) -> None:
        self._waiting, self._tenant_id = waiting, tenant_id
        self._tokens = dict(enumerate(tokens))

    def start(self, prompt: int) -> None:
        """Count a prompt as started. Safe to repeat."""
        tokens = self._tokens.pop(prompt, None)
        if tokens is not None:
            self._waiting.count(self._tenant_id, -1, -tokens)

    def leave(self) -> None:
        """Count the prompts that never started as gone. Safe to repeat."""
        for prompt in list(self._tokens):
            self.start(prompt)


class _TenantWaiting:
    __slots__ = ("requests", "tokens", "weight")

    def __init__(self) -> None:
        self.requests = self.tokens = 0
        self.weight = 1.0


_NOTHING = _TenantWaiting()
