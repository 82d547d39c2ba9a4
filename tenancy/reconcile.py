"""Three counts of the same tokens: the ledger's, the engine's own, and the gateway's metrics.

They are kept by different code, so that a mistake in one is seen as a difference. Each life of the
engine (an epoch) is compared by itself, because the engine counts from zero in each. It changes
nothing; the command line and the gateway's minute watch call it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from tenancy.store import Store, Transaction

State = Literal["final", "running", "pending", "died"]
"""`final`: the engine has told its last count. `running`: it lives, nothing runs and it was asked
since. `pending`: something runs, or it has not been asked since. `died`: it ended without a last
word, so what it counted in its last moments is not known."""


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


NONE = Counts(0, 0, 0)


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


def reconcile(store: Store, epochs_max: int = 100) -> list[Epoch]:
    """The latest epochs, the newest first. O(epochs), not entries."""
    with store.snapshot() as db:
        return epochs_in(db, epochs_max)


def epochs_in(db: Transaction, epochs_max: int = 100) -> list[Epoch]:
    """`reconcile` within a transaction."""
    rows = db.rows(
        "select e.epoch, first_seen_ms, last_seen_ms, is_ended,"
        " e.prompt_tokens, e.cached_tokens, e.output_tokens,"
        " metric_prompt_tokens, metric_cached_tokens, metric_output_tokens,"
        " coalesce(entries, 0), coalesce(s.prompt_tokens, 0),"
        " coalesce(physical_cached_tokens, 0), coalesce(s.output_tokens, 0),"
        " coalesce(last_ended_ms, 0),"
        " (select count(*) from holds where holds.epoch = e.epoch)"
        " from engine_epochs as e left join epoch_sums as s using (epoch)"
        " order by first_seen_ms desc, last_seen_ms desc limit ?",
        (epochs_max,),
    )
    found = []
    for place, row in enumerate(rows):
        epoch, first_ms, last_ms, is_ended, *counts = row
        entries, last_entry_ms, holds = counts[6], counts[10], counts[11]
        found.append(
            Epoch(
                epoch=epoch,
                state=_state(bool(is_ended), place == 0, holds or last_entry_ms > last_ms),
                first_seen_ms=first_ms,
                last_seen_ms=last_ms,
                entries=entries,
                ledger=Counts(*counts[7:10]),
                engine=Counts(*counts[0:3]),
                metrics=Counts(*counts[3:6]),
            )
        )
    return found


def _state(is_ended: bool, is_newest: bool, is_open: object) -> State:
    if is_ended:
        return "final"
    if not is_newest:
        return "died"
    return "pending" if is_open else "running"
