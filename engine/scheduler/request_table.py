"""Who is here: the requests that have no final event yet, and their sequences, by their ids.

It knows no block, no event and no clock. Only `engine.core.core` changes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from engine.api import Namespace, Request
from engine.errors import InvariantViolation
from engine.scheduler.sequence import ActiveRequest, Sequence


class RequestTable:
    """`tally` counts the requests. `waiting_tokens`: prompt tokens of those that have not started.
    Every call is O(1), or O(samples)."""

    def __init__(self) -> None:
        self._works: dict[str, ActiveRequest] = {}
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = 0
        self._next_sequence_id = 0
        self.tally = RequestTotals()
        self.waiting_tokens = 0

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(self._works.values())

    def __len__(self) -> int:
        return len(self._works)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._works

    def get(self, request_id: str) -> ActiveRequest | None:
        """The request of this id, if it is here."""
        return self._works.get(request_id)

    def sequence(self, sequence_id: int) -> Sequence | None:
        """The sequence of this id, if its request is here."""
        return self._sequences.get(sequence_id)

    def enter(self, request: Request, now_s: float) -> ActiveRequest:
        """A request has come. The caller has seen to it that its id is new."""
        assert request.request_id not in self._works, "a request is here once"
        work = self._works[request.request_id] = ActiveRequest(request, self._arrivals, now_s)
        self._arrivals += 1
        self.tally.add(request)
        self.waiting_tokens += len(request.tokens)
        return work

    def add_sequence(self, work: ActiveRequest) -> Sequence:
        """One more sample of a request that is here."""
        sequence = Sequence(work, len(work.sequences), self._next_sequence_id)
        self._next_sequence_id += 1
        work.sequences.append(sequence)
        self._sequences[sequence.sequence_id] = sequence
        return sequence

    def started(self, work: ActiveRequest, now_s: float) -> None:
        """It waits no more; that happens once."""
        work.started_at_s = now_s
        self.waiting_tokens -= len(work.request.tokens)

    def leave(self, work: ActiveRequest) -> None:
        """It has ended. Steps in flight may still look at its sequences, and from these at it; it
        lets go of them, so that no collector has to find out that nobody needs them."""
        del self._works[work.request.request_id]
        self.tally.remove(work.request)
        if work.started_at_s is None:
            self.waiting_tokens -= len(work.request.tokens)
        for sequence in work.sequences:
            del self._sequences[sequence.sequence_id]
        work.sequences = []

    def check(self) -> None:
        """Recount. Raises InvariantViolation. O(sequences)."""
        waiting = sum(len(work.request.tokens) for work in self if work.started_at_s is None)
        if waiting != self.waiting_tokens:
            raise InvariantViolation(f"{self.waiting_tokens} tokens wait, recounted: {waiting}")
        self.tally.check(work.request for work in self)
        found = {s.sequence_id: s for work in self for s in work.sequences}
        if found != self._sequences:
            raise InvariantViolation(f"sequences {list(self._sequences)}, recounted: {list(found)}")


class RequestTotals:
    """`requests` in all, `tokens` of their prompts. Every call is O(1) unless it says otherwise."""

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self._moved: set[Namespace] = set()
        self._by_namespace: Counter[Namespace] = Counter()

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_namespace)

    def of(self, namespace: Namespace) -> int:
        """Requests of one namespace."""
        return self._by_namespace[namespace]

    def add(self, request: Request) -> None:
        """One more."""
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        """One that was added."""
        self._count(request, -1)

    def take_moved(self) -> set[Namespace]:
        """Namespaces whose number may not be what it was at the last call. O(these)."""
        moved, self._moved = self._moved, set()
        return moved

    def check(self, requests: Iterable[Request]) -> None:
        """These should be counted. Raises InvariantViolation. O(requests)."""
        again = RequestTotals()
        for request in requests:
            again.add(request)
        has = (self.requests, self.tokens, self._by_namespace)
        found = (again.requests, again.tokens, again._by_namespace)
        if has != found:
            raise InvariantViolation(f"requests, tokens, by namespace {has}, recounted: {found}")

    def _count(self, request: Request, sign: int) -> None:
        namespace = request.grant.namespace
        self.requests += sign
        self.tokens += sign * len(request.tokens)
        self._by_namespace[namespace] += sign
        if not self._by_namespace[namespace]:
            del self._by_namespace[namespace]
        self._moved.add(namespace)
