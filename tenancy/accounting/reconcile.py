"""Three counts of the same tokens: the ledger's, the engine's own, and the gateway's metrics.

They are kept by different code, so that a mistake in one is seen as a difference. Each life of the
engine (an epoch) is compared by itself, because the engine counts from zero in each. It changes
nothing; the command line and the gateway's minute watch call it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from tenancy.ledger.aggregates import EPOCH_TOTALS
from tenancy.storage.interface import Row, Store, Transaction

State = Literal["final", "running", "pending", "died"]
"""`final`: the engine has told its last count. `running`: it lives, nothing runs and it was asked
since. `pending`: something runs, or it has not been asked since, or it is no more known than that
it may live, behind another gateway. `died`: it ended without a last word, so what it counted in its
last moments is not known."""

EPOCHS_MAX = 100
FRESH_WITHIN_MS = 150_000
"""Whatever lives is noted every minute."""


class Counts(Struct, frozen=True):
    """Prompt tokens, those of them found in the cache, and output tokens."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    def minus(self, other: Counts) -> Counts:
        """The difference, each by itself."""
        return Counts(
            self.prompt_tokens - other.prompt_tokens,
            self.cached_tokens - other.cached_tokens,
            self.output_tokens - other.output_tokens,
        )


NO_COUNTS = Counts(0, 0, 0)


class Epoch(Struct, frozen=True):
    """One life of the engine in three counts."""

    epoch: str
    state: State
    first_seen_ms: int
    last_seen_ms: int
    entries: int
    ledger: Counts
    engine: Counts
    metrics: Counts

    @property
    def is_apart(self) -> bool:
        """Do the counts differ although nothing explains it?"""
        known = self.state in ("final", "running")
        return known and not (self.ledger == self.engine == self.metrics)


def reconcile(store: Store, now_ms: int | None = None) -> list[Epoch]:
    """The latest epochs, the newest first. `now_ms`: without it none but the newest may live.
    O(epochs), not entries. Raises StoreError."""
    with store.snapshot() as db:
        return reconcile_in(db, now_ms)


def reconcile_living(store: Store, epoch: str) -> Epoch | None:
    """One that is known to live; None before it was noted. Raises StoreError."""
    rows = store.query(f"{_EPOCHS} where e.epoch = ?", (epoch,))
    return _epoch(rows[0], lives=True, is_known=True) if rows else None


def reconcile_in(db: Transaction, now_ms: int | None = None) -> list[Epoch]:
    """`reconcile` within a transaction."""
    rows = db.rows(
        f"{_EPOCHS} order by first_seen_ms desc, last_seen_ms desc limit ?", (EPOCHS_MAX,)
    )
    found = []
    for place, row in enumerate(rows):
        is_fresh = now_ms is not None and row[2] > now_ms - FRESH_WITHIN_MS
        found.append(_epoch(row, lives=place == 0 or is_fresh, is_known=place == 0))
    return found


def _epoch(row: Row, *, lives: bool, is_known: bool) -> Epoch:
    epoch, first_ms, last_ms, is_ended, *counts = row
    entries, last_entry_ms, holds = counts[6], counts[10], counts[11]
    is_settled = is_known and not holds and last_entry_ms <= last_ms
    state: State = "running" if is_settled else "pending"
    if is_ended or not lives:
        state = "final" if is_ended else "died"
    return Epoch(
        epoch=epoch,
        state=state,
        first_seen_ms=first_ms,
        last_seen_ms=last_ms,
        entries=entries,
        ledger=Counts(*counts[7:10]),
        engine=Counts(*counts[0:3]),
        metrics=Counts(*counts[3:6]),
    )


_EPOCHS = (
    "select e.epoch, first_seen_ms, last_seen_ms, is_ended,"
    " e.prompt_tokens, e.cached_tokens, e.output_tokens,"
    " metric_prompt_tokens, metric_cached_tokens, metric_output_tokens,"
    " coalesce(entries, 0), coalesce(epoch_sums.prompt_tokens, 0),"
    " coalesce(physical_cached_tokens, 0), coalesce(epoch_sums.output_tokens, 0),"
    " coalesce(last_ended_ms, 0),"
    " (select count(*) from holds where holds.epoch = e.epoch)"
    f" from engine_epochs as e left join {EPOCH_TOTALS} using (epoch)"
)
