"""The ledger: one entry per request id, for ever, durable before anybody is told.

A hold is written when a request is admitted and settled into an entry when it ends, however it
ends. One thread writes; what arrives while it waits for the disk shares the next transaction and
one fsync (group commit). On start, holds that a dead process left open become entries
`interrupted` of what was noted of them last. Totals are sums of entries, never counters.

When the disk fails, nobody is told that anything was written; the file is closed, opened and
checked before the next entry. It knows no event loop: whoever brought an item is told on the
writer's thread.
`gateway.metering` calls it; the command line reads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Protocol

from tenancy.bookkeeping import (
    Books,
    EngineTotals,
    Hold,
    Item,
    NamedEntry,
    StorageReading,
    entry_in,
)
from tenancy.breaches import credit_breaches
from tenancy.errors import (
    ConstraintBroken,
    LedgerUnavailable,
    StoreBusy,
    StoreError,
    TenancyError,
    TryAgain,
)
from tenancy.ledger_epochs import keep_point, look_back
from tenancy.progress import OPEN_HOLDS, Progress, ProgressNote, interrupted
from tenancy.store import Store
from tenancy.types import UsageEntry, WallClock
from tenancy.usage import UsageTotal, usage

__all__ = [
    "BATCH_MAX",
    "EngineTotals",
    "Hold",
    "Ledger",
    "NamedEntry",
    "StorageReading",
    "UsageTotal",
]

BATCH_MAX = 128
ATTEMPTS = 3
KEEP_POINT_MS = 60_000
"""How often it is noted beside the database how far this ledger has come, while it goes on."""


class Told(Protocol):
    """Is told once, on the writer's thread, what became of an item: a future, or less."""

    def done(self) -> bool:
        """Has it been told?"""

    def set_result(self, result: None) -> None:
        """It is durable."""

    def set_exception(self, exception: BaseException) -> None:
        """It is not, and this is why."""


class _Nobody:
    """A `Told` for what nobody waits for."""

    def done(self) -> bool:
        return True

    def set_result(self, result: None) -> None:
        pass

    def set_exception(self, exception: BaseException) -> None:
        pass


_NOBODY = _Nobody()
Batch = list[tuple[Item, Told]]


class Ledger:
    """The one writer over a store. Thread-safe."""

    def __init__(self, store: Store, clock: WallClock) -> None:
        """Close what a dead process left open, then take entries. `found_epoch`: begun because
        another database is in this one's place; `interrupted`: how many were open.

        Raises StoreError if another process is writing, whose open holds are not ours to close,
        and if the file cannot be written.
        """
        self._store = store
        self._clock = clock
        self._books = Books(store.claim())
        self._doubtful: set[str] = set()  # holds that were refused and may be there
        self._inbox: queue.SimpleQueue[tuple[Item, Told] | None] = queue.SimpleQueue()
        self._door = threading.Lock()
        self._is_closed = False  # nothing more is taken
        self._is_over = False  # the writer has seen the end of its inbox
        self._is_damaged = False  # the disk has failed us; check before going on
        try:
            self.found_epoch = look_back(store, clock)
            is_over = cache(store.is_over)
            self.interrupted = self._close_holds(lambda _, writer_id: is_over(writer_id))
            self._keep_point()
        except BaseException:
            store.disclaim()
            raise
        self._thread = threading.Thread(target=self._main, name="ledger", daemon=True)
        self._thread.start()

    def hold(self, hold: Hold) -> Future[None]:
        """Write a hold and reserve the most it can cost.

        The future raises BudgetExceeded if that does not fit, LedgerUnavailable if it is not
        durable, or if the request id was used before, NameInUse if the name it claims is not free;
        nothing is written then.
        """
        return self._put(hold)

    def settle(self, entry: UsageEntry | NamedEntry) -> Future[None]:
        """Turn a hold into its entry, at the prices of its hold. Settling one request id again
        changes nothing. The future raises LedgerUnavailable if it is not durable."""
        return self._put(entry)

    def add_storage(self, reading: StorageReading) -> Future[None]:
        """Add what a tenant has held since the reading before. The future raises
        LedgerUnavailable if it is not durable; the meter then keeps it for the next one."""
        return self._put(reading)

    def note_engine(self, totals: EngineTotals) -> Future[None]:
        """Keep what the engine and the gateway have counted in this life of the engine."""
        return self._put(totals)

    def note_progress(self, reached: Mapping[str, Progress]) -> None:
        """Keep how far requests have come, by request id, for a death before they are settled.
        Nobody is told: what could not be written is written by a later note, or not at all."""
        self.put(ProgressNote(reached), _NOBODY)

    def put(self, item: Item, told: Told) -> None:
        """What `hold` and `settle` do, for those who bring whom to tell: futures cost more than
        all else that a loop does here. About 1 us."""
        with self._door:
            if not self._is_closed:
                self._inbox.put((item, told))
                return
        told.set_exception(LedgerUnavailable("closed", "The ledger is closed."))

    @staticmethod
    def totals(
        store: Store, tenant: str | None = None, since_ms: int = 0, until_ms: int | None = None
    ) -> list[UsageTotal]:
        """Sums of entries booked in [since_ms, until_ms), by tenant. Reads only."""
        return usage(store, tenant=tenant, since_ms=since_ms, until_ms=until_ms)

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
            self._keep_point()
            self._store.disclaim()

    # -- the writer ---------------------------------------------------------------------------

    def _put(self, item: Item) -> Future[None]:
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # from here on nobody can cancel it
        self.put(item, future)
        return future

    def _main(self) -> None:
        try:
            while not self._is_over:
                self._write(self._next_batch())
                if abs(self._clock() - self._kept_ms) >= KEEP_POINT_MS:
                    self._keep_point()
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
        """One transaction for all; when it fails nobody is told that anything was written."""
        try:
            answers = self._commit([item for item, _ in batch])
        except (ConstraintBroken, LedgerUnavailable) as error:
            if len(batch) > 1:  # one impossible entry must not take the others with it
                for one in batch:
                    self._write([one])
            else:
                _refuse(batch, "impossible_entry", error)
        except StoreBusy as error:
            _refuse(batch, "not_durable", error)
        except StoreError as error:
            self._is_damaged = True
            self._doubtful.update(item.request_id for item, _ in batch if isinstance(item, Hold))
            _refuse(batch, "not_durable", error)
        else:
            for (_, future), refusal in zip(batch, answers, strict=True):
                if refusal is None:
                    future.set_result(None)
                else:
                    future.set_exception(refusal)
        finally:
            _refuse(batch, "failed", None)

    def _commit(self, items: list[Item]) -> list[TenancyError | None]:
        """Make all durable. Returns the refusals of holds, for which nothing was written."""
        if self._is_damaged:
            self._store.reopen()
            self._close_holds(lambda request_id, _: request_id in self._doubtful)
            self._doubtful.clear()
            self._is_damaged = False
        for _ in range(ATTEMPTS - 1):
            with suppress(TryAgain):
                return self._apply(items)
        return self._apply(items)

    def _apply(self, items: Sequence[Item]) -> list[TenancyError | None]:
        with self._store.change() as db:
            answers = self._books.apply(db, items)
            entries = filter(None, map(entry_in, items))
            credit_breaches(db, self._clock(), entries)
            return answers

    def _keep_point(self) -> None:
        """What another database in this one's place would not have."""
        self._kept_ms = self._clock()
        with suppress(StoreError):
            keep_point(self._store, self._clock)

    def _refuse_rest(self) -> None:
        """The writer has ended: whoever still waits is told, and nobody waits from now on."""
        with self._door:
            self._is_closed = True
            while not self._inbox.empty():
                item = self._inbox.get()
                if item is not None:
                    _refuse([item], "closed", None)

    def _close_holds(self, is_dead: Callable[[str, int], bool]) -> int:
        """Those of which it is true, by request id and writer, are settled to what was noted of
        them."""
        now_ms = self._clock()
        rows = self._store.query(OPEN_HOLDS)
        # Named or not: what was not answered leaves its name to be used again.
        dead = [NamedEntry(interrupted(row, now_ms)) for row in rows if is_dead(row[0], row[1])]
        if dead:
            self._apply(dead)
        return len(dead)


def _refuse(batch: Batch, code: str, error: Exception | None) -> None:
    """Tell those who have not been told. The message names the kind of error, never a value."""
    kind = "the writer has stopped" if error is None else type(error).__name__
    for _, future in batch:
        if not future.done():
            message = f"The ledger could not be written ({kind})."
            future.set_exception(LedgerUnavailable(code, message))
