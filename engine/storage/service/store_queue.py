"""Stores that wait, and the batch of them that is planned, written and committed: one at a time.

The main thread uses it. Each store has one outcome, also where the disk is lost meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from engine.api import Namespace
from engine.moves import Stored, StoreRuns
from engine.storage.io_threads import IoThreads
from engine.storage.plans import WriteBatch
from engine.storage.service.log_sync import LogSync
from engine.storage.store import DiskError, DiskStore

BATCH_RECORDS = 64
"""Records that one sync makes durable, if so many wait."""


class StoreQueue:
    """The stores of one service. `send` tells an outcome, after what it has changed."""

    def __init__(self, io: IoThreads, log: LogSync, send: Callable[[Stored], None]) -> None:
        self._io, self._log, self._send = io, log, send
        self._waiting: deque[StoreRuns] = deque()
        self._is_writing = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, command: StoreRuns) -> None:
        """Take a store, for the next batch."""
        self._waiting.append(command)

    def fail_all(self, code: str, namespace: Namespace | None = None) -> None:
        """Fail what waits, all of it or that of a namespace."""
        waiting, self._waiting = self._waiting, deque()
        for command in waiting:
            if namespace in (None, command.namespace):
                self._send(Stored(command.call_id, (), code))
            else:
                self._waiting.append(command)

    def start(self, store: DiskStore, is_lost: Callable[[], bool]) -> None:
        """Begin the next batch if none is under way; `is_lost`: the store is, when asked later."""
        if self._is_writing or not self._waiting:
            return
        commands, records = [], 0
        while self._waiting and records < BATCH_RECORDS:
            commands.append(self._waiting.popleft())
            records += len(commands[-1].runs)
        try:
            batch = store.writer.plan(commands)
        except DiskError:
            self._fail(commands, "write_failed")
            raise
        self._is_writing = True
        self._io.order(
            partial(store.writer.write, batch, self._io.run_all),
            partial(self._commit, store, batch, is_lost),
        )

    def _commit(self, store: DiskStore, batch: WriteBatch, is_lost: Callable[[], bool]) -> None:
        self._is_writing = False
        commands = [one.command for one in batch.stores]
        if is_lost():
            self._fail(commands, "closed")
            return
        try:
            outcomes = store.writer.commit(batch)
        except DiskError:
            self._fail(commands, "write_failed")
            raise
        if batch.is_promised:
            self._log.tell(store, [*outcomes])
            return
        for outcome in outcomes:
            self._send(outcome)

    def _fail(self, commands: list[StoreRuns], code: str) -> None:
        for command in commands:
            self._send(Stored(command.call_id, (), code))
