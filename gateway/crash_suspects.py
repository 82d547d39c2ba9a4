"""Requests that may have ended the engine's process: suspected, tried alone, cleared or refused.

A request is suspected if its tokens were in a step at two deaths in a row. Chance is enough for
that, so its next tries run isolated: in steps without any other request, for a few output tokens,
and for more after each further death. If the engine dies in such a step, the request is the cause,
and is refused for ten minutes. If a try is done, the request is cleared. The module knows no
process. `gateway.engine_supervisor` has one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
import xxhash

from engine.api import Clock, Request
from engine.client.client import LostRequest
from engine.errors import RequestRefused

REMEMBER_S = 600.0
"""Seconds for which a request is suspected, and for which it is refused."""
REQUESTS_MAX = 1_024
"""Requests that are suspected, and refused; the oldest are forgotten."""
TRY_TOKENS, TRY_GROWTH = 16, 4
"""Output tokens for which a request is isolated after two deaths, and how many times as many after
each further one. Most causes show in the prompt; a full batch, suspected by chance, is soon whole
again."""
MORE_TOKENS = 8
"""Output tokens beyond those seen at the deaths, which are enough: the engine was a bit ahead."""


class CrashSuspects:
    """Suspected and refused requests, by a digest of namespace and tokens."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # for each request in a step at the latest death: deaths in a row, output tokens of a sample
        self._latest: dict[str, tuple[int, int]] = {}
        # by digest, (forgotten at, isolated tokens)
        self._suspected: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._refused: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def record_death(self, in_step: Sequence[LostRequest]) -> list[str]:
        """Record a death of the engine, in a step of these requests.

        Returns the ids of those that it proves to be the cause.
        """
        if not in_step:
            return []  # no request was computed: says nothing about those of the death before
        if len(in_step) == 1 and _is_isolated(in_step[0]):
            digest = _digest(in_step[0].request)
            self._suspected.pop(digest, None)
            self._remember(self._refused, digest, 0)
            return [in_step[0].request.request_id]
        before, self._latest = self._latest, {}
        for lost in in_step:
            digest = _digest(lost.request)
            deaths, reached = before.get(digest, (0, 0))
            reached = max(reached, -(-lost.output_tokens // lost.request.samples))
            self._latest[digest] = deaths + 1, reached
            if deaths:
                tokens = TRY_TOKENS * TRY_GROWTH ** (deaths - 1)
                self._remember(self._suspected, digest, min(tokens, reached + MORE_TOKENS))
        return []

    def clear(self, done: Iterable[Request]) -> None:
        """Clear requests that were done in isolation."""
        for request in done:
            digest = _digest(request)
            self._suspected.pop(digest, None)
            self._latest.pop(digest, None)

    def isolate(self, request: Request) -> Request:
        """Return the request, isolated if it is suspected. O(1) without suspects, else O(tokens).

        Raises RequestRefused if it has been proven to be the cause of a death.
        """
        if not self._suspected and not self._refused:
            return request
        digest = _digest(request)
        if self._find(self._refused, digest) is not None:
            message = (
                "This request is refused for ten minutes: the engine died twice while computing it"
                " among others, and then while computing it alone."
            )
            raise RequestRefused("poison_request", message)
        tokens = self._find(self._suspected, digest)
        if tokens is None:
            return request
        return msgspec.structs.replace(request, isolated_tokens=tokens)

    def _remember(
        self, known: OrderedDict[str, tuple[float, int]], digest: str, tokens: int
    ) -> None:
        known[digest] = (self._clock() + REMEMBER_S, tokens)
        known.move_to_end(digest)
        if len(known) > REQUESTS_MAX:
            known.popitem(last=False)

    def _find(self, known: OrderedDict[str, tuple[float, int]], digest: str) -> int | None:
        """Return the tokens of a known request. Forgets all that are past their time."""
        now_s = self._clock()
        while known and next(iter(known.values()))[0] <= now_s:
            known.popitem(last=False)
        found = known.get(digest)
        return None if found is None else found[1]


def _is_isolated(lost: LostRequest) -> bool:
    """Return whether the request's step can have contained no other."""
    return lost.output_tokens < lost.request.isolated_tokens * lost.request.samples


def _digest(request: Request) -> str:
    """Return a digest of a request's namespace and tokens: equal for two tries of one request."""
    data = msgspec.msgpack.encode((request.grant.namespace, request.tokens))
    return xxhash.xxh3_128_hexdigest(data)
