"""Bounds of the queue, and who leaves it when it is full.

The bounds are shared: while there is room, any payer may use it. When there is none, the payer that
has most waiting for its weight makes room: its newest waiting request is refused, or the request
that arrives, if that is its own. So no payer with little waiting is refused because of another. The
module changes nothing. Only core calls it.
"""

from __future__ import annotations

from collections import Counter

from engine.api import Payer, Request
from engine.scheduler.request_table import RequestTable
from engine.scheduler.sequence import ActiveRequest


class QueueBounds:
    """At most `requests_max` requests and `tokens_max` prompt tokens wait to start.

    A single prompt may always wait, however long it is.
    """

    def __init__(self, requests_max: int, tokens_max: int) -> None:
        self._requests_max, self._tokens_max = requests_max, tokens_max

    def choose_refused(self, table: RequestTable, request: Request) -> list[ActiveRequest] | None:
        """Return the waiting requests to refuse so that `request` finds room; None if it is itself
        the one to refuse. O(1) where there is room, else O(payers) for each refused request.
        """
        tokens, own = len(request.tokens), request.turn_payer
        requests_over = table.waiting_requests + 1 - self._requests_max
        tokens_over = table.waiting_tokens + tokens - self._tokens_max if table.waiting else 0
        refused: list[ActiveRequest] = []
        gone: Counter[Payer] = Counter()
        gone_tokens: Counter[Payer] = Counter()
        while requests_over > 0 or tokens_over > 0:
            by_requests = requests_over > 0
            load = 1 if by_requests else tokens
            heaviest, highest = own, 0.0
            for payer, waiting in table.waiting.items():
                if by_requests:
                    waits = len(waiting.requests) - gone[payer]
                else:
                    waits = waiting.tokens - gone_tokens[payer]
                if payer == own:
                    load += waits
                elif waits / waiting.weight > highest:
                    heaviest, highest = payer, waits / waiting.weight
            if load / request.weight >= highest:
                return None
            leaver = table.waiting[heaviest].newest(gone[heaviest])
            refused.append(leaver)
            gone[heaviest] += 1
            gone_tokens[heaviest] += len(leaver.request.tokens)
            requests_over -= 1
            tokens_over -= len(leaver.request.tokens)
        return refused
