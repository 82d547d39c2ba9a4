"""The ledger's writer: each item is durable or refused when `write` returns.

At a start, holds that a dead process left open become `interrupted` entries with the progress noted
last. After a disk error no item is confirmed; the file is closed, reopened and checked before the
next entry. A database file has one writer. The module knows no thread, no queue and no socket:
`ledger` runs it in a thread, `process` in a process.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import cache

from tenancy.errors import (
    ConstraintBroken,
    LedgerUnavailable,
    StoreBusy,
    StoreError,
    TenancyError,
    TryAgain,
)
from tenancy.ledger.adjustments import credit_breaches
from tenancy.ledger.aggregates import fold_recent_sums
from tenancy.ledger.epochs import detect_replacement, save_known_point
from tenancy.ledger.holds import OPEN_HOLDS, interrupted
from tenancy.ledger.transactions import Hold, Item, LedgerTransactions, NamedEntry
from tenancy.storage.interface import Row, Store
from tenancy.types import WallClock

BATCH_MAX = 128
"""Items in one transaction."""

ATTEMPTS = 3
"""Attempts of a transaction that conflicts or loses its connection."""
NOT_DURABLE = "not_durable"
"""Code of a LedgerUnavailable after a database failure: the item may or may not be stored."""

KEEP_POINT_MS = 60_000
"""Interval at which the last known entry is saved beside the database."""

LOOK_MS = 10_000
"""Interval of looks for writers that are gone."""
GONE_MS = 60_000
"""How long a writer is gone before its holds are closed."""

Answers = list[TenancyError | None]
"""For each item its refusal, with nothing written; None if the item is durable."""


class LedgerWriter:
    """The writer of one store. Belongs to one thread.

    `found_epoch`: the epoch that began because the database was replaced, or None. `interrupted`:
    how many open holds were closed at the start. `writer_id`: the id under which this writer keeps
    holds.
    """

    def __init__(
        self,
        store: Store,
        clock: WallClock,
        *,
        living: Container[str] = (),
        successor_of: int = 0,
        patience_s: float = 0.0,
        gateway: str = "",
    ) -> None:
        """Close the holds of dead writers, then accept items.

        `living`: requests that continue although their writer `successor_of` died; this writer
        takes over their holds. `patience_s`: how long to wait for another writer to finish.
        `gateway`: names this start of the gateway that writes. Raises
        StoreError if another process writes the database or it cannot be written.
        """
        self._store = store
        self._clock = clock
        self.writer_id = store.claim(successor_of, patience_s)
        self._transactions = LedgerTransactions(self.writer_id, gateway)
        self._doubtful: set[str] = set()  # refused holds that may be stored
        self._is_damaged = False  # after a disk error: check before writing
        self._has_recent = False  # there may be sums to fold
        self._looked_ms = clock()
        self._gone_ms: dict[int, int] = {}  # since when other writers have been seen gone
        is_gone = cache(store.is_writer_gone)

        def is_dead(request_id: str, writer_id: int) -> bool:
            if request_id in living:
                return False
            return writer_id == self.writer_id or is_gone(writer_id)

        try:
            self.found_epoch = detect_replacement(store, clock)
            self.interrupted = self._close_holds(is_dead)
            self._save_point()
        except BaseException:
            store.release_claim()
            raise

    def write(self, items: Sequence[Item]) -> Answers:
        """Write items in one transaction, in order; if it fails, no item is confirmed.

        The caller passes at most `BATCH_MAX` items, so that other writers wait only briefly.
        Refusals (`BudgetExceeded`, `IdempotencyConflict`, `BadPrice`, `LedgerUnavailable`) are
        returned; an exception is a mistake of ours.
        """
        try:
            return self._commit(items)
        except (ConstraintBroken, LedgerUnavailable) as error:
            if len(items) > 1:  # one impossible entry must not fail the others
                return [answer for item in items for answer in self.write([item])]
            return [_impossible(error)]
        except StoreBusy as error:
            return [_not_durable(error) for _ in items]
        except StoreError as error:
            self._is_damaged = True
            holds = [item for item in items if isinstance(item, Hold)]
            # A running request gets its entry, with or without a stored hold.
            self._doubtful.update(hold.request_id for hold in holds if not hold.is_running)
            return [_not_durable(error) for _ in items]

    def run_maintenance(self) -> None:
        """Run periodic maintenance after a batch is answered: save the known point, fold sums."""
        if abs(self._clock() - self._point_saved_ms) >= KEEP_POINT_MS:
            self._has_recent = True
            self._save_point()
        if self._has_recent:
            self._has_recent = self._fold_sums()
        if not self._store.is_local and self._clock() - self._looked_ms >= LOOK_MS:
            self._looked_ms = self._clock()
            with suppress(StoreError):
                self._take_over_holds()

    def _take_over_holds(self) -> None:
        """Close the holds of writers that have been gone for `GONE_MS`. Several gateways may do so
        at once: a hold is settled once. A writer that only lost its connection is back by then."""
        now_ms = self._clock()
        rows = self._store.query(
            "select distinct writer_id from holds where writer_id <> ?", (self.writer_id,)
        )
        gone = [writer for (writer,) in rows if self._store.is_writer_gone(writer)]
        self._gone_ms = {writer: self._gone_ms.get(writer, now_ms) for writer in gone}
        dead = {one for one, since_ms in self._gone_ms.items() if now_ms - since_ms >= GONE_MS}
        if dead:
            self._close_holds(lambda _, writer_id: writer_id in dead)

    def close_own_holds(self) -> None:
        """Close the open holds of this writer now, as no caller will settle them. Raises
        StoreError."""
        self._close_holds(lambda _, writer_id: writer_id == self.writer_id)

    def close(self) -> None:
        """Release the database for the next writer. Call once."""
        self._fold_all_sums()
        self._save_point()
        self._store.release_claim()

    def _commit(self, items: Sequence[Item]) -> Answers:
        if self._is_damaged:
            self._store.reopen()
            self._close_holds(lambda request_id, _: request_id in self._doubtful)
            self._doubtful.clear()
            self._is_damaged = False
        for _ in range(ATTEMPTS - 1):
            try:
                return self._apply(items)
            except TryAgain:
                continue
        return self._apply(items)

    def _apply(self, items: Sequence[Item]) -> Answers:
        with self._store.change() as db:
            answers = self._transactions.apply(db, items)
            if self._transactions.breached:
                credit_breaches(db, self._clock(), self._transactions.breached)
        self._transactions.mark_committed(db)
        return answers

    def _save_point(self) -> None:
        """Save the point by which a replaced database is detected."""
        self._point_saved_ms = self._clock()
        with suppress(StoreError):
            save_known_point(self._store, self._clock)

    def _fold_all_sums(self) -> None:
        while self._fold_sums():
            pass

    def _fold_sums(self) -> bool:
        """Fold some recent sums. Returns whether there may be more."""
        with suppress(StoreError), self._store.change() as db:
            return fold_recent_sums(db)
        return False

    def _close_holds(self, is_dead: Callable[[str, int], bool]) -> int:
        """Settle the holds for which `is_dead(request_id, writer_id)` is true to their progress."""
        now_ms = self._clock()
        rows = self._store.query(OPEN_HOLDS)
        # Named or not: a request without a response frees its name.
        dead = [closed(row, now_ms) for row in rows if is_dead(row[0], row[1])]
        if dead:
            self._apply(dead)
        return len(dead)


def is_written(answer: TenancyError | None) -> bool:
    """Return whether the database took the item, as an entry or as a refusal."""
    return not (isinstance(answer, LedgerUnavailable) and answer.code == NOT_DURABLE)


def closed(hold: Row, now_ms: int) -> NamedEntry:
    """Return the last item of a hold whose server died. The engine has abandoned the request, so it
    has counted nothing of the entry."""
    entry = interrupted(hold, now_ms)
    counts = entry.prompt_tokens, entry.physical_cached_tokens, entry.output_tokens
    return NamedEntry(entry, uncounted={entry.epoch: counts})


def _impossible(error: Exception) -> LedgerUnavailable:
    """Return the refusal; its message names the kind of error and contains no value."""
    message = f"The ledger could not be written ({type(error).__name__})."
    return LedgerUnavailable("impossible_entry", message)


def _not_durable(error: StoreError) -> LedgerUnavailable:
    """Return the refusal; its message is the database's, for the operator's log."""
    return LedgerUnavailable(NOT_DURABLE, error.message)
