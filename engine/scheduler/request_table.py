"""The request table: live requests and sequences by id.

A request is live until its final event. The table knows no block, no event and no clock. Only
`engine.core.core` changes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from engine.api import Namespace, Request
from engine.errors import InvariantViolation
from engine.scheduler.sequence import ActiveRequest, Sequence


class RequestTable:
    """Live requests by id, sequences by id, and totals.

    `totals`: counts of the live requests. `waiting_tokens`: prompt tokens of requests that have not
    started. Every call is O(1), or O(samples).
    """

    def __init__(self) -> None:
        self._requests: dict[str, ActiveRequest] = {}
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = 0
        self._next_sequence_id = 0
        self.totals = RequestTotals()
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
        self.waiting_tokens += len(request.tokens)
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
        self.waiting_tokens -= len(active.request.tokens)

    def remove(self, active: ActiveRequest) -> None:
        """Remove a request that has ended.

        Steps in flight may still refer to its sequences, and they to it. The request drops its
        references to them, so that no reference cycle is left for the garbage collector.
        """
        del self._requests[active.request.request_id]
        self.totals.remove(active.request)
        if active.started_at_s is None:
            self.waiting_tokens -= len(active.request.tokens)
        for sequence in active.sequences:
            del self._sequences[sequence.sequence_id]
        active.sequences = []

    def check(self) -> None:
        """Recount the table. Raises InvariantViolation on a mismatch. O(sequences)."""
        waiting = sum(len(active.request.tokens) for active in self if active.started_at_s is None)
        if waiting != self.waiting_tokens:
            raise InvariantViolation(f"{self.waiting_tokens} waiting tokens, recounted: {waiting}")
        self.totals.check(active.request for active in self)
        found = {s.sequence_id: s for active in self for s in active.sequences}
        if found != self._sequences:
            raise InvariantViolation(f"sequences {list(self._sequences)}, recounted: {list(found)}")


class RequestTotals:
    """Totals over a set of requests: `requests`, and `tokens` of their prompts.

    Every call is O(1) unless it says otherwise.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
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
        """Return the namespaces whose count has changed since the last call. O(changed)."""
        changed, self._changed = self._changed, set()
        return changed

    def check(self, requests: Iterable[Request]) -> None:
        """Compare with a recount over `requests`. Raises InvariantViolation on a mismatch.
        O(requests).
        """
        recounted = RequestTotals()
        for request in requests:
            recounted.add(request)
        has = (self.requests, self.tokens, self._by_namespace)
        found = (recounted.requests, recounted.tokens, recounted._by_namespace)
        if has != found:
            raise InvariantViolation(f"requests, tokens, by namespace {has}, recounted: {found}")

    def _count(self, request: Request, sign: int) -> None:
        namespace = request.grant.namespace
        self.requests += sign
        self.tokens += sign * len(request.tokens)
        self._by_namespace[namespace] += sign
        if not self._by_namespace[namespace]:
            del self._by_namespace[namespace]
        self._changed.add(namespace)
