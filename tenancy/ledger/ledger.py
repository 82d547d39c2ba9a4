"""The ledger: one entry per request id, for ever, durable before anybody is told.

A hold is written when a request is admitted and settled into an entry when it ends, however it
ends. Totals are sums of entries, never counters. Here `ledger_writer` runs in a thread of this
process: what arrives while it waits for the disk shares the next transaction and one fsync (group
commit). It knows no event loop: whoever brought an item is told on the writer's thread.
Embedders, commands and tests keep it; `trunkline serve` has the writer in a process of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future

from tenancy.errors import LedgerUnavailable
from tenancy.ledger.progress import Progress, ProgressNote
from tenancy.ledger.transactions import EngineTotals, Hold, Item, NamedEntry, StorageReading
from tenancy.ledger.writer import BATCH_MAX, LedgerWriter, is_written
from tenancy.storage.interface import Store
from tenancy.types import UsageEntry, WallClock

__all__ = ["EngineTotals", "Hold", "Ledger", "NamedEntry", "StorageReading"]

Batch = list[tuple[Item, Future[None]]]


class Ledger:
    """The one writer over a store, in a thread. Thread-safe."""

    def __init__(self, store: Store, clock: WallClock) -> None:
        """Close what a dead process left open, then take items. `found_epoch` and `interrupted`
        are the writer's. `is_well`: it could write what came last.

        Raises StoreError if another process is writing, whose open holds are not ours to close,
        and if the file cannot be written.
        """
        self._store = store
        self._writer = LedgerWriter(store, clock)
        self.found_epoch, self.interrupted = self._writer.found_epoch, self._writer.interrupted
        self._inbox: queue.SimpleQueue[tuple[Item, Future[None]] | None] = queue.SimpleQueue()
        self._door = threading.Lock()
        self._is_closed = False  # nothing more is taken
        self._is_over = False  # the thread has seen the end of its inbox
        self.is_well = True
        self._thread = threading.Thread(target=self._main, name="ledger", daemon=True)
        self._thread.start()

    def write(self, item: Item) -> Future[None]:
        """Make it durable. The future, which nobody can cancel, raises what the writer answers:
        LedgerUnavailable if it is not durable."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._door:
            if not self._is_closed:
                self._inbox.put((item, future))
                return future
        future.set_exception(LedgerUnavailable("closed", "The ledger is closed."))
        return future

    def hold(self, hold: Hold) -> Future[None]:
        """Write a hold and reserve the most it can cost.

        The future raises BudgetExceeded if that does not fit, LedgerUnavailable if it is not
        durable, or if the request id was used before, NameInUse if the name it claims is not free;
        nothing is written then.
        """
        return self.write(hold)

    def settle(self, entry: UsageEntry | NamedEntry) -> Future[None]:
        """Turn a hold into its entry, at the prices of its hold. Settling one request id again
        changes nothing. The future raises LedgerUnavailable if it is not durable."""
        return self.write(entry)

    def note_progress(self, reached: Mapping[str, Progress]) -> None:
        """Keep how far requests have come, by request id, for a death before they are settled.
        Nobody is told: what could not be written is written by a later note, or not at all."""
        self.write(ProgressNote(reached))

    def open_holds(self) -> int:
        """Requests admitted and not settled."""
        return int(self._store.query("select count(*) from holds")[0][0])

    def close(self) -> None:
        """Write what has been handed in, then stop. Safe to call twice."""
        with self._door:
            was_closed, self._is_closed = self._is_closed, True
            if not was_closed:
                self._inbox.put(None)
        self._thread.join()
        if not was_closed:
            self._writer.close()

    # -- the thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._is_over:
                self._write(self._next_batch())
                self._writer.look_after()
        finally:
            self._refuse_rest()

    def _next_batch(self) -> Batch:
        """Wait for one item and take what else is there. Waiting for more would only add latency:
        while a commit waits for the disk, the next batch gathers by itself."""
        batch: Batch = []
        item = self._inbox.get()
        while item is not None:
            batch.append(item)
            if len(batch) == BATCH_MAX or self._inbox.empty():
                return batch
            item = self._inbox.get()
        self._is_over = True
        return batch

    def _write(self, batch: Batch) -> None:
        """Everybody is told once, whatever happens."""
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
        """The thread has ended: whoever still waits is told, and nobody waits from now on."""
        with self._door:
            self._is_closed = True
            while not self._inbox.empty():
                item = self._inbox.get()
                if item is not None:
                    _fail([item], "closed")


def _fail(batch: Batch, code: str) -> None:
    message = "The ledger could not be written (the writer has stopped)."
    for _, future in batch:
        future.set_exception(LedgerUnavailable(code, message))
