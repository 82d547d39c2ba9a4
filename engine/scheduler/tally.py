"""How many requests there are, by namespace, and whose number has moved.

Plain counting; it knows no sequence and no block. The roster keeps one of all that are here, and
`running` one of those that run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from engine.api import Namespace, Request
from engine.errors import InvariantViolation


class Tally:
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
        again = Tally()
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
