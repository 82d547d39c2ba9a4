"""Requests that may have ended the engine's process: suspected, tried alone, cleared or refused.

A request whose tokens were in a step at two deaths in a row is suspected. Chance is enough for
that, so its next tries run isolated: in steps without any other request, for a few output tokens,
and for more after each further death. If the engine dies in such a step, the request is the cause,
and is refused for ten minutes. If a try is done, the request is cleared. The module knows no
process. `gateway.engines.replicas` has one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import msgspec
import xxhash

from engine.api import Clock, Request
from engine.client.client import LostRequest
from engine.errors import RequestRefused

REMEMBER_S = 600.0
"""Seconds for which a request's deaths are known: it is suspected or refused for so long."""
REQUESTS_MAX = 1_024
"""Requests whose deaths are known; the oldest are forgotten."""
TRY_TOKENS, TRY_GROWTH = 16, 4
"""Output tokens for which a request is isolated after two deaths, and how many times as many after
each further one. Most causes show in the prompt; a full batch, suspected by chance, is soon whole
again."""


class CrashSuspects:
    """Requests that were in a step at the latest deaths, by a digest of namespace and tokens."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, float]] = {}
        """By digest, oldest first: deaths in a row, infinite once proven, and when that ends."""

    def record_death(self, in_step: Sequence[LostRequest]) -> list[str]:
        """Record a death of the engine, in a step of these requests.

        Returns the ids of those that it proves to be the cause.
        """
        if not in_step:
            return []  # no request was computed: says nothing about those of the death before
        end_s = self._clock() + REMEMBER_S
        is_proof = len(in_step) == 1 and _is_isolated(in_step[0])
        known = {digest: one for digest, one in self._known.items() if one[0] > 1}
        for digest in [_digest(lost.request) for lost in in_step]:
            known.pop(digest, None)
            known[digest] = self._deaths(digest) + (inf if is_proof else 1), end_s
        for digest in list(known)[:-REQUESTS_MAX]:
            del known[digest]
        self._known = known
        return [in_step[0].request.request_id] if is_proof else []

    def clear(self, done: Iterable[Request]) -> None:
        """Clear requests that were done in isolation."""
        for request in done:
            self._known.pop(_digest(request), None)

    def isolate(self, request: Request) -> Request:
        """Return the request, isolated if it is suspected. O(1) ten minutes after a death, before
        that O(tokens).

        Raises RequestRefused if it has been proven to be the cause of a death.
        """
        while self._known and next(iter(self._known.values()))[1] <= self._clock():
            del self._known[next(iter(self._known))]
        deaths = self._deaths(_digest(request)) if self._known else 0
        if deaths < 2:
            return request
        if deaths == inf:
            message = (
                "This request is refused for ten minutes: the engine died twice while computing it"
                " among others, and then while computing it alone."
            )
            raise RequestRefused("poison_request", message)
        tokens = request.resumed_tokens + TRY_TOKENS * TRY_GROWTH ** int(deaths - 2)
        tokens = min(tokens, request.max_tokens + 1)
        return msgspec.structs.replace(request, isolated_tokens=tokens)

    def _deaths(self, digest: str) -> float:
        deaths, end_s = self._known.get(digest, (0, inf))
        return deaths if end_s > self._clock() else 0


def _is_isolated(lost: LostRequest) -> bool:
    """Return whether the request's step can have contained no other."""
    return lost.output_tokens < lost.request.isolated_tokens * lost.request.samples


def _digest(request: Request) -> str:
    """Return a digest of a request's namespace and tokens: equal for two tries of one request."""
    prompt = request.tokens[: request.prompt_tokens]
    data = msgspec.msgpack.encode((request.grant.namespace, prompt))
    return xxhash.xxh3_128_hexdigest(data)
