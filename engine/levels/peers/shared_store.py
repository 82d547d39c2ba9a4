"""A store that replicas share, as fetches see it: one more peer, behind the storage process.

A look says how far it goes behind what is here; then a request's fetch is as one from another
engine. Only namespaces whose copies may leave the machine are looked up there.
"""

from __future__ import annotations

from engine.moves import FetchedRun, FetchRuns, StopFetch, Storage


class SharedStore:
    """Implements `engine.moves.Peers` over the storage. One thread uses it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._outcomes: list[FetchedRun] = []

    def fetch(self, command: FetchRuns) -> None:
        """See `Peers`."""
        self._storage.send(command)

    def stop(self, call_id: int) -> None:
        """See `Peers`."""
        self._storage.send(StopFetch(call_id))

    def take(self, outcome: FetchedRun) -> None:
        """Take an outcome that the storage has told."""
        self._outcomes.append(outcome)

    def poll(self) -> list[FetchedRun]:
        """See `Peers`."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        """See `Peers`: the storage is closed next, and fills no slot after that."""
