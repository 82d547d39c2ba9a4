"""The request table: live requests and sequences by id, and who leaves a full queue.

A request is live until its final event. The table knows no block, no event and no clock. Only
`engine.core.core` changes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from engine.api import Namespace, Payer, Request
from engine.errors import InvariantViolation
from engine.scheduler.sequence import ActiveRequest, Sequence


class PayerWaiting:
    """One payer's requests that have not started, in order of arrival.

    `tokens`: of their prompts and predictions. `weight`: the payer's, by its latest request.
    """

    __slots__ = ("requests", "tokens", "weight")

    def __init__(self) -> None:
        self.requests: dict[str, ActiveRequest] = {}
        self.tokens = 0
        self.weight = 1.0

    def newest(self, skipped: int) -> ActiveRequest:
        """Return the request that came last, or the one before `skipped` later ones. O(skipped)."""
        return next(islice(reversed(self.requests.values()), skipped, None))


class RequestTable:
    """Live requests by id, sequences by id, and totals.

    `totals`: counts of the live requests. `waiting`: the requests that have not started, by the
    payer whose turn they take; `waiting_requests` and `waiting_tokens`: their number and the tokens
    of their prompts. Every call is O(1), or O(samples), unless it says otherwise.
    """

    def __init__(self) -> None:
        self._requests: dict[str, ActiveRequest] = {}
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = 0
        self._next_sequence_id = 0
        self.totals = RequestTotals()
        self.waiting: dict[Payer, PayerWaiting] = {}
        self.waiting_requests = 0
        self.waiting_tokens = 0

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> ActiveRequest | None:
        """Return the live request with this id, or None."""
        return self._requests.get(request_id)

    def sequence(self, sequence_id: int) -> Sequence | None:
        """Return the sequence with this id while its request is live, or None."""
        return self._sequences.get(sequence_id)

    def add(self, request: Request, now_s: float) -> ActiveRequest:
        """Add a new request. The caller has checked that its id is new."""
        assert request.request_id not in self._requests, "a request id is live only once"
        active = self._requests[request.request_id] = ActiveRequest(request, self._arrivals, now_s)
        self._arrivals += 1
        self.totals.add(request)
        waiting = self.waiting.setdefault(active.turn, PayerWaiting())
        waiting.requests[request.request_id] = active
        waiting.tokens += request.sent_tokens
        waiting.weight = request.weight
        self.waiting_requests += 1
        self.waiting_tokens += request.sent_tokens
        return active

    def add_sequence(self, active: ActiveRequest) -> Sequence:
        """Add one more sample to a live request."""
        sequence = Sequence(active, len(active.sequences), self._next_sequence_id)
        self._next_sequence_id += 1
        active.sequences.append(sequence)
        self._sequences[sequence.sequence_id] = sequence
        return sequence

    def mark_started(self, active: ActiveRequest, now_s: float) -> None:
        """Record that a request has started; called once per request."""
        active.started_at_s = now_s
        self._leave_waiting(active)

    def remove(self, active: ActiveRequest) -> None:
        """Remove a request that has ended.

        Steps in flight may still refer to its sequences, and they to it. The request drops its
        references to them, so that no reference cycle is left for the garbage collector.
        """
        del self._requests[active.request.request_id]
        self.totals.remove(active.request)
        if active.started_at_s is None:
            self._leave_waiting(active)
        for sequence in active.sequences:
            del self._sequences[sequence.sequence_id]
        active.sequences = []

    def choose_refused(
        self, request: Request, requests_max: int, tokens_max: int
    ) -> list[ActiveRequest] | None:
        """Return the waiting requests to refuse so that `request` may wait, too; None if it is
        itself the one to refuse.

        At most `requests_max` requests and `tokens_max` prompt tokens wait; a single prompt may
        always wait. In a full queue the payer that has most waiting for its weight makes room: so
        no payer with little waiting is refused because of another. Changes nothing. O(1) if
        there is room, else O(payers) for each refused request.
        """
        tokens, own = request.sent_tokens, request.turn_payer
        requests_over = self.waiting_requests + 1 - requests_max
        tokens_over = self.waiting_tokens + tokens - tokens_max if self.waiting else 0
        refused: list[ActiveRequest] = []
        gone: Counter[Payer] = Counter()
        gone_tokens: Counter[Payer] = Counter()
        while requests_over > 0 or tokens_over > 0:
            by_requests = requests_over > 0
            load = 1 if by_requests else tokens
            heaviest, highest = own, 0.0
            for payer, waiting in self.waiting.items():
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
            leaver = self.waiting[heaviest].newest(gone[heaviest])
            refused.append(leaver)
            gone[heaviest] += 1
            gone_tokens[heaviest] += leaver.request.sent_tokens
            requests_over -= 1
            tokens_over -= leaver.request.sent_tokens
        return refused

    def check(self) -> None:
        """Recount the table. Raises InvariantViolation on a mismatch. O(sequences)."""
        unstarted = [active for active in self if active.started_at_s is None]
        counts: Counter[Payer] = Counter(active.turn for active in unstarted)
        tokens: Counter[Payer] = Counter()
        for active in unstarted:
            tokens[active.turn] += active.request.sent_tokens
        has = {payer: len(waiting.requests) for payer, waiting in self.waiting.items()}
        if has != counts or self.waiting_requests != len(unstarted):
            raise InvariantViolation(f"waiting requests {has}, recounted: {counts}")
        has = {payer: waiting.tokens for payer, waiting in self.waiting.items()}
        if has != tokens or self.waiting_tokens != tokens.total():
            raise InvariantViolation(f"waiting tokens {has}, recounted: {tokens}")
        self.totals.check(active.request for active in self)
        found = {s.sequence_id: s for active in self for s in active.sequences}
        if found != self._sequences:
            raise InvariantViolation(f"sequences {list(self._sequences)}, recounted: {list(found)}")

    def _leave_waiting(self, active: ActiveRequest) -> None:
        waiting, tokens = self.waiting[active.turn], active.request.sent_tokens
        del waiting.requests[active.request.request_id]
        waiting.tokens -= tokens
        if not waiting.requests:
            del self.waiting[active.turn]
        self.waiting_requests -= 1
        self.waiting_tokens -= tokens


class RequestTotals:
    """Totals over a set of requests: `requests`, `tokens` of their prompts, and `missing_tokens`,
    those of them that are not expected to be cached.

    Every call is O(1) unless it says otherwise.
    """

    def __init__(self) -> None:
        self.requests = self.tokens = self.missing_tokens = 0
        self._changed: set[Namespace] = set()
        self._by_namespace: Counter[Namespace] = Counter()

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_namespace)

    def requests_of(self, namespace: Namespace) -> int:
        """Return the number of requests of one namespace."""
        return self._by_namespace[namespace]

    def add(self, request: Request) -> None:
        """Add a request."""
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        """Remove a request that was added."""
        self._count(request, -1)

    def take_changed(self) -> set[Namespace]:
        """Return the namespaces with a count that changed since the last call. O(changed)."""
        changed, self._changed = self._changed, set()
        return changed

    def check(self, requests: Iterable[Request]) -> None:
        """Compare with a recount over `requests`. Raises InvariantViolation on a mismatch.
        O(requests).
        """
        recounted = RequestTotals()
        for request in requests:
            recounted.add(request)
        has = (self.requests, self.tokens, self.missing_tokens, self._by_namespace)
        found = (
            recounted.requests,
            recounted.tokens,
            recounted.missing_tokens,
            recounted._by_namespace,
        )
        if has != found:
            counts = "requests, tokens, missing tokens, by namespace"
            raise InvariantViolation(f"{counts} {has}, recounted: {found}")

    def _count(self, request: Request, sign: int) -> None:
        namespace = request.grant.namespace
        self.requests += sign
        tokens = len(request.tokens)
        self.tokens += sign * tokens
        self.missing_tokens += sign * max(1, tokens - request.expected_cached_tokens)
        self._by_namespace[namespace] += sign
        if not self._by_namespace[namespace]:
            del self._by_namespace[namespace]
        self._changed.add(namespace)
