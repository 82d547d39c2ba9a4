"""Ids of requests: `X-Request-Id`, and what the ledger knows an answer by."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from tenancy.types import WallClock

RANDOM_BYTES, IDS_AT_ONCE = 10, 128


class RequestIds:
    """The millisecond and 80 random bits each: nobody guesses another's, and the ledger's index of
    ids grows at its end, instead of in as many places as there are ids. The kernel is asked for
    many at once: a question costs as much as the rest of a request's head. Belongs to one thread.
    """

    def __init__(
        self, wall: WallClock, random_bytes: Callable[[int], bytes] = secrets.token_bytes
    ) -> None:
        self._wall = wall
        self._random_bytes = random_bytes
        self._rests: list[str] = []

    def __call__(self) -> str:
        """A new one. O(1)."""
        if not self._rests:
            data = self._random_bytes(RANDOM_BYTES * IDS_AT_ONCE).hex()
            size = 2 * RANDOM_BYTES
            self._rests = [data[at : at + size] for at in range(0, len(data), size)]
        return f"{self._wall():012x}{self._rests.pop()}"
