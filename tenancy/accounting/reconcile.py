"""Reconciliation of three counts of the same tokens: ledger, engine and gateway metrics.

Different code keeps each count, so a mistake in one shows as a difference. Each engine process (an
epoch) is compared separately, as its counters start at zero. The module changes nothing. The
command line and `gateway.background.reconciliation` call it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from tenancy.ledger.aggregates import EPOCH_TOTALS
from tenancy.storage.interface import Row, Store, Transaction

State = Literal["final", "running", "pending", "died"]
"""The state of an engine epoch's counts.

`final`: the engine reported its last counts. `running`: it runs, it is idle, and its counters were
read since the last request. `pending`: requests run, or the counters were not read since, or the
epoch may run behind another gateway. `died`: it ended without last counts, so those of its last
moments are unknown.
"""

EPOCHS_MAX = 100
"""The most epochs that one reconciliation returns."""
FRESH_WITHIN_MS = 150_000
"""A running engine's counts are stored every minute; an older record is not fresh."""


class Counts(Struct, frozen=True):
    """Prompt tokens, cached ones among them, and output tokens."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    def minus(self, other: Counts) -> Counts:
        """Return the differences."""
        return Counts(
            self.prompt_tokens - other.prompt_tokens,
            self.cached_tokens - other.cached_tokens,
            self.output_tokens - other.output_tokens,
        )


class Epoch(Struct, frozen=True):
    """An engine epoch with its three counts."""

    epoch: str
    state: State
    first_seen_ms: int
    last_seen_ms: int
    entries: int
    ledger: Counts
    engine: Counts
    metrics: Counts

    @property
    def has_mismatch(self) -> bool:
        """Whether the counts differ without an explanation."""
        known = self.state in ("final", "running")
        return known and not (self.ledger == self.engine == self.metrics)


def reconcile(store: Store, now_ms: int | None = None) -> list[Epoch]:
    """Return the latest epochs, newest first. O(epochs), not entries. Raises StoreError.

    Without `now_ms`, only the newest epoch may be running.
    """
    with store.snapshot() as db:
        return reconcile_in(db, now_ms)


def reconcile_living(store: Store, epoch: str) -> Epoch | None:
    """Return an epoch that is known to run, or None before its counts were stored. Raises
    StoreError."""
    rows = store.query(f"{_EPOCHS} where e.epoch = ?", (epoch,))
    return _epoch(rows[0], is_alive=True, is_known=True) if rows else None


def reconcile_in(db: Transaction, now_ms: int | None = None) -> list[Epoch]:
    """Reconcile within the caller's transaction; see `reconcile`."""
    rows = db.rows(
        f"{_EPOCHS} order by first_seen_ms desc, last_seen_ms desc limit ?", (EPOCHS_MAX,)
    )
    found = []
    for position, row in enumerate(rows):
        is_fresh = now_ms is not None and row[2] > now_ms - FRESH_WITHIN_MS
        found.append(_epoch(row, is_alive=position == 0 or is_fresh, is_known=position == 0))
    return found


def _epoch(row: Row, *, is_alive: bool, is_known: bool) -> Epoch:
    epoch, first_ms, last_ms, is_ended, *counts = row
    entries, last_entry_ms, holds = counts[6], counts[10], counts[11]
    is_settled = is_known and not holds and last_entry_ms <= last_ms
    state: State = "running" if is_settled else "pending"
    if is_ended or not is_alive:
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
