"""Reconciliation of three counts of the same tokens: ledger, engine and gateway metrics.

Different code keeps each count, so a mistake in one shows as a difference. Each engine process (an
epoch) is compared separately, as its counters start at zero; the counts of the gateways that had it
are added up. The module changes nothing. The command line and `gateway.background.reconciliation`
call it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from tenancy.ledger.aggregates import EPOCH_TOTALS
from tenancy.ledger.engine_counts import INTERRUPTED
from tenancy.storage.interface import Row, Store, Transaction

State = Literal["final", "running", "pending", "died"]
"""The state of an engine epoch's counts.

`final`: each of its gateways has told its last counts. `running`: it runs, it is idle, and all its
gateways have read its counters since the last request. `pending`: requests run, or a gateway has
not read the counters since, or died and is not settled yet. `died`: it ended without last counts,
so those of its last moments are unknown.
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


NO_COUNTS = Counts(0, 0, 0)


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
    gateways: int = 1
    """How many starts of gateways had it."""
    unbilled: Counts = NO_COUNTS
    """What it finished for gateways that died and no whole entry has; `engine` is without it."""

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
    return _epoch(rows[0], is_alive=True) if rows else None


def reconcile_in(db: Transaction, now_ms: int | None = None) -> list[Epoch]:
    """Reconcile within the caller's transaction; see `reconcile`."""
    rows = db.rows(f"{_EPOCHS} order by first_ms desc, last_ms desc limit ?", (EPOCHS_MAX,))
    found = []
    for position, row in enumerate(rows):
        is_fresh = now_ms is not None and row[3] > now_ms - FRESH_WITHIN_MS
        found.append(_epoch(row, is_alive=position == 0 or is_fresh))
    return found


def _epoch(row: Row, *, is_alive: bool) -> Epoch:
    epoch, first_ms, last_ms, told_ms, gateways, is_ended, is_unchanged, *counts = row
    entries, last_entry_ms, holds = counts[9], counts[13], counts[14]
    is_settled = is_unchanged and not holds and last_entry_ms <= told_ms
    state: State = "running" if is_settled else "pending"
    if is_ended or not is_alive:
        state = "final" if is_ended else "died"
    return Epoch(
        epoch=epoch,
        state=state,
        first_seen_ms=first_ms,
        last_seen_ms=last_ms,
        entries=entries,
        ledger=Counts(*counts[10:13]),
        engine=Counts(*counts[0:3]),
        metrics=Counts(*counts[3:6]),
        gateways=gateways,
        unbilled=Counts(*counts[6:9]),
    )


_COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens")
_TOLD = "select epoch, min(first_seen_ms) as first_ms, max(last_seen_ms) as last_ms,"
_BY_EPOCH = (
    f"({_TOLD} min(case when is_ended = 0 then last_seen_ms end) as told_ms,"
    " count(*) as gateways, min(is_ended) as is_ended,"
    # Equal counts at all gateways: nothing was computed between their readings.
    " coalesce(max(case when is_ended = 0 then output_tokens + prompt_tokens end)"
    " = min(case when is_ended = 0 then output_tokens + prompt_tokens end), true) as is_unchanged, "
    + ", ".join(
        f"max({name}) - max(uncharged_{name}) - sum(unbilled_{name}) as {name},"
        f" sum(metric_{name}) as metric_{name}, sum(unbilled_{name}) as unbilled_{name}"
        for name in _COUNTS
    )
    + " from engine_epochs group by epoch) as e"
)
_MORE = (
    "(select epoch, "
    # No gateway lived to count the entries of requests that were interrupted.
    + ", ".join(
        f"sum({name}) as more_{name},"
        f" sum(case when gateway = '{INTERRUPTED}' then {name} else 0 end) as lost_{name}"
        for name in _COUNTS
    )
    + " from epoch_corrections group by epoch) as more"
)
_EPOCHS = (
    "select e.epoch, first_ms, last_ms, coalesce(told_ms, last_ms), gateways, is_ended,"
    " is_unchanged,"
    + "".join(f" e.{name} + coalesce(more_{name}, 0)," for name in _COUNTS)
    + "".join(f" metric_{name} + coalesce(lost_{name}, 0)," for name in _COUNTS)
    + "".join(f" unbilled_{name}," for name in _COUNTS)
    + " coalesce(entries, 0), coalesce(epoch_sums.prompt_tokens, 0),"
    " coalesce(physical_cached_tokens, 0), coalesce(epoch_sums.output_tokens, 0),"
    " coalesce(last_ended_ms, 0),"
    " (select count(*) from holds where holds.epoch = e.epoch)"
    f" from {_BY_EPOCH} left join {EPOCH_TOTALS} using (epoch)"
    f" left join {_MORE} using (epoch)"
)
