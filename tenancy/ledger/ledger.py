"""The ledger in a thread: one durable entry per request id, forever.

A hold is written when a request is admitted and settled into an entry when it ends, however it
ends. Totals are sums of entries, never counters. `LedgerWriter` runs in a thread of this process;
items that arrive while it waits for the disk share the next transaction and one fsync (group
commit). The module knows no event loop: futures complete on the writer's thread. Embedders,
commands and tests use it; `trunkline serve` runs the writer in a process (`ledger.process`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future

from tenancy.errors import LedgerUnavailable
from tenancy.ledger.engine_counts import EngineTotals
from tenancy.ledger.holds import ProgressNote
from tenancy.ledger.transactions import (
    Hold,
    Item,
    NamedEntry,
    StorageReading,
    StorageReadings,
)
from tenancy.ledger.writer import BATCH_MAX, LedgerWriter, is_written
from tenancy.storage.interface import Store
from tenancy.types import TokenCounts, UsageEntry, WallClock

__all__ = [
    "EngineTotals",
    "Hold",
    "Ledger",
    "NamedEntry",
    "StorageReading",
    "StorageReadings",
]

Batch = list[tuple[Item, Future[None]]]
"""Items with the futures of their results."""


class Ledger:
    """The only writer of a store, in a thread. Thread-safe."""

    def __init__(self, store: Store, clock: WallClock, gateway: str = "") -> None:
        """Close the holds of dead processes, then accept items of this start of a `gateway`.

        `found_epoch` and `interrupted` are those of `LedgerWriter`. `is_well`: whether the last
        batch was written. Raises StoreError if another process writes the store or it cannot be
        written.
        """
        self._writer = LedgerWriter(store, clock, gateway=gateway)
        self.found_epoch, self.interrupted = self._writer.found_epoch, self._writer.interrupted
        self._inbox: queue.SimpleQueue[tuple[Item, Future[None]] | None] = queue.SimpleQueue()
        self._inbox_lock = threading.Lock()
        self._is_closed = False  # no item is accepted any more
        self._inbox_ended = False  # the thread has seen the end of its inbox
        self.is_well = True
        self._thread = threading.Thread(target=self._main, name="ledger", daemon=True)
        self._thread.start()

    def write(self, item: Item) -> Future[None]:
        """Make an item durable. The future raises the writer's refusal, if any.

        LedgerUnavailable means that the item is not durable. The future cannot be cancelled.
        """
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._inbox_lock:
            if not self._is_closed:
                self._inbox.put((item, future))
                return future
        future.set_exception(LedgerUnavailable("closed", "The ledger is closed."))
        return future

    def hold(self, hold: Hold) -> Future[None]:
        """Write a hold and reserve its maximum cost.

        The future raises BudgetExceeded if a budget does not cover it, IdempotencyConflict if its
        name is taken, and LedgerUnavailable if it is not durable or the request id was used before;
        nothing is written then.
        """
        return self.write(hold)

    def settle(self, entry: UsageEntry | NamedEntry) -> Future[None]:
        """Settle a hold into its entry, at the prices of the hold.

        Settling a request id again changes nothing. The future raises LedgerUnavailable if the
        entry is not durable.
        """
        return self.write(entry)

    def note_progress(self, reached: Mapping[str, TokenCounts]) -> None:
        """Note the progress of requests by id, in case this process dies before they settle.

        There is no result: a note that could not be written is replaced by a later one, or lost.
        """
        self.write(ProgressNote(reached))

    def close(self) -> None:
        """Write what was handed in, then stop. Safe to call twice."""
        with self._inbox_lock:
            was_closed, self._is_closed = self._is_closed, True
            if not was_closed:
                self._inbox.put(None)
        self._thread.join()
        if not was_closed:
            self._writer.close()

    # -- the thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._inbox_ended:
                self._write(self._next_batch())
                self._writer.run_maintenance()
        finally:
            self._refuse_rest()

    def _next_batch(self) -> Batch:
        """Wait for one item and take all that are queued.

        Waiting longer would only add latency: while a commit waits for the disk, the next batch
        gathers.
        """
        batch: Batch = []
        item = self._inbox.get()
        while item is not None:
            batch.append(item)
            if len(batch) == BATCH_MAX or self._inbox.empty():
                return batch
            item = self._inbox.get()
        self._inbox_ended = True
        return batch

    def _write(self, batch: Batch) -> None:
        """Write a batch and complete each future exactly once."""
        if not batch:
            return
        try:
            answers = self._writer.write([item for item, _ in batch])
        except BaseException:
            _fail(batch, "failed")
            raise
        self.is_well = all(map(is_written, answers))
        for (_, future), refusal in zip(batch, answers, strict=True):
            if refusal is None:
                future.set_result(None)
            else:
                future.set_exception(refusal)

    def _refuse_rest(self) -> None:
        """Fail the queued items after the thread has ended, and accept no more."""
        with self._inbox_lock:
            self._is_closed = True
            while not self._inbox.empty():
                item = self._inbox.get()
                if item is not None:
                    _fail([item], "closed")


def _fail(batch: Batch, code: str) -> None:
    message = "The ledger could not be written: the writer has stopped."
    for _, future in batch:
        future.set_exception(LedgerUnavailable(code, message))
