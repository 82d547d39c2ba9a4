"""Outcomes that are reported when the index's log is synced: those of promises and leases (rule 1).

One sync serves all that wait for it. The main thread uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.moves import Renewed, Stored
from engine.storage.io_threads import IoThreads
from engine.storage.store import DiskStore

Promised = Stored | Renewed


class LogSync:
    """The outcomes of one service that wait for a sync."""

    def __init__(self, io: IoThreads, send: Callable[[Promised], None]) -> None:
        self._io, self._send = io, send
        self._waiting: list[Promised] = []
        self._is_syncing = False

    def tell(self, store: DiskStore, outcomes: list[Promised]) -> None:
        """Tell outcomes once what the store has committed until now survives a power cut."""
        self._waiting += outcomes
        if not self._is_syncing:
            self._begin(store)

    def _begin(self, store: DiskStore) -> None:
        told, self._waiting = self._waiting, []
        failures: list[OSError] = []

        def sync() -> None:
            try:
                store.sync_log()
            except OSError as error:
                failures.append(error)

        self._is_syncing = True
        self._io.order(sync, partial(self._end, store, told, failures))

    def _end(self, store: DiskStore, told: list[Promised], failures: list[OSError]) -> None:
        self._is_syncing = False
        for outcome in told:
            self._send(_failed(outcome) if failures else outcome)
        if self._waiting:
            self._begin(store)
        if failures:
            raise failures[0]


def _failed(outcome: Promised) -> Promised:
    if isinstance(outcome, Stored):
        return Stored(outcome.call_id, (), "write_failed")
    return Renewed(outcome.call_id, code="write_failed")
