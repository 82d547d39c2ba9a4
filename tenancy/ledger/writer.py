"""The ledger's writer: items in, durable or refused when `write` returns. One over a database file.

On a start, holds that a dead process left open become entries `interrupted` of what was noted of
them last. When the disk fails, nobody is told that anything was written; the file is closed, opened
and checked before the next entry. It knows no thread, no queue and no socket: `ledger` keeps one in
a thread, `ledger_child` in a process of its own.
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
from tenancy.ledger.progress import OPEN_HOLDS, interrupted
from tenancy.ledger.transactions import Hold, Item, LedgerTransactions, NamedEntry
from tenancy.storage.interface import Store
from tenancy.types import WallClock

BATCH_MAX = 128
"""Items in one transaction."""

ATTEMPTS = 3
NOT_DURABLE = "not_durable"
"""Of a LedgerUnavailable: the database failed, and it may or may not be there."""

KEEP_POINT_MS = 60_000
"""How often it is noted beside the database how far this ledger has come, while it goes on."""

Answers = list[TenancyError | None]
"""For each item why it was refused, with nothing of it written; None for what is durable."""


class LedgerWriter:
    """Belongs to one thread. `found_epoch`: begun because another database is in this one's place;
    `interrupted`: how many holds were open; `writer_id`: whose they are from now on."""

    def __init__(
        self,
        store: Store,
        clock: WallClock,
        *,
        living: Container[str] = (),
        successor_of: int = 0,
        patience_s: float = 0.0,
    ) -> None:
        """Close what the dead left open, then take items. `living`: requests that go on, though the
        writer `successor_of` is dead that wrote their holds: they are this one's now.
        `patience_s`: how long another may still be at its end.

        Raises StoreError if another process is writing, whose open holds are not ours to close,
        and if the database cannot be written.
        """
        self._store = store
        self._clock = clock
        self.writer_id = store.claim(successor_of, patience_s)
        self._books = LedgerTransactions(self.writer_id)
        self._doubtful: set[str] = set()  # holds that were refused and may be there
        self._is_damaged = False  # the disk has failed us; check before going on
        self._has_recent = False  # there may be sums to be moved
        is_over = cache(store.is_over)

        def is_dead(request_id: str, writer_id: int) -> bool:
            if request_id in living:
                return False
            return writer_id == self.writer_id or is_over(writer_id)

        try:
            self.found_epoch = detect_replacement(store, clock)
            self.interrupted = self._close_holds(is_dead)
            self._move_all_sums()
            self._keep_point()
        except BaseException:
            store.disclaim()
            raise

    def write(self, items: Sequence[Item]) -> Answers:
        """One transaction for all, in order; when it fails nobody is told that anything was
        written. At most `BATCH_MAX` at once, or others wait long for the database.

        `BudgetExceeded`, `IdempotencyConflict`, `BadPrice` and `LedgerUnavailable` are returned as
        answers; an exception is a mistake of ours.
        """
        try:
            return self._commit(items)
        except (ConstraintBroken, LedgerUnavailable) as error:
            if len(items) > 1:  # one impossible entry must not take the others with it
                return [answer for item in items for answer in self.write([item])]
            return [_not_written("impossible_entry", error)]
        except StoreBusy as error:
            return [_not_written(NOT_DURABLE, error) for _ in items]
        except StoreError as error:
            self._is_damaged = True
            holds = [item for item in items if isinstance(item, Hold)]
            # What runs already will have its entry, whether its hold is there or not.
            self._doubtful.update(hold.request_id for hold in holds if not hold.is_running)
            return [_not_written(NOT_DURABLE, error) for _ in items]

    def look_after(self) -> None:
        """What is done now and then, when everybody has been told: a point is kept, and recent sums
        are moved."""
        if abs(self._clock() - self._kept_ms) >= KEEP_POINT_MS:
            self._has_recent = True
            self._keep_point()
        if self._has_recent:
            self._has_recent = self._move_sums()

    def abandon(self) -> None:
        """Nobody will settle what is open here: it is closed now, and not at the next start. Raises
        StoreError."""
        self._close_holds(lambda _, writer_id: writer_id == self.writer_id)

    def close(self) -> None:
        """Another may write from now on. Once."""
        self._move_all_sums()
        self._keep_point()
        self._store.disclaim()

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
            answers = self._books.apply(db, items)
            if self._books.breached:
                credit_breaches(db, self._clock(), self._books.breached)
        self._books.keep(db)
        return answers

    def _keep_point(self) -> None:
        """What another database in this one's place would not have."""
        self._kept_ms = self._clock()
        with suppress(StoreError):
            save_known_point(self._store, self._clock)

    def _move_all_sums(self) -> None:
        while self._move_sums():
            pass

    def _move_sums(self) -> bool:
        """A minute's sums go where they stay, some at a time. Are there more?"""
        with suppress(StoreError), self._store.change() as db:
            return fold_recent_sums(db)
        return False

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


def is_written(answer: TenancyError | None) -> bool:
    """Could the database take it, wanted or refused?"""
    return not (isinstance(answer, LedgerUnavailable) and answer.code == NOT_DURABLE)


def _not_written(code: str, error: Exception) -> LedgerUnavailable:
    """The message names the kind of error, never a value."""
    return LedgerUnavailable(code, f"The ledger could not be written ({type(error).__name__}).")
