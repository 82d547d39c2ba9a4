"""What engines and gateways have counted, by the life of an engine, beside the ledger's sums.

A gateway tells its own counts and those of its engines; each entry tells what it has more than the
engine counted. A gateway that is killed tells no last counts: another one learns from the engine
what that has finished for it, and settles its row, once. Transactions apply these items;
`accounting.reconcile` compares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from msgspec import Struct, structs

from tenancy.ledger.aggregates import max_of
from tenancy.storage.interface import Store, Transaction, pad_to_power_of_two, placeholders

Counts = tuple[int, int, int]
"""Prompt tokens, cached ones among them, and output tokens."""
NO_COUNTS: Counts = (0, 0, 0)
INTERRUPTED = "interrupted"
"""The ending of entries whose gateway died, and the place of their corrections."""
IDS_AT_ONCE = 128


class EngineTotals(Struct, frozen=True, tag="engine"):
    """The engine's counters since its start (`epoch`), and those of one gateway since its own."""

    epoch: str
    at_ms: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    metric_prompt_tokens: int
    metric_cached_tokens: int
    metric_output_tokens: int
    is_ended: bool = False
    """The gateway has ended, so these are its final counts."""
    gateway: str = ""
    """Names this start of the gateway."""
    uncharged_prompt_tokens: int = 0
    """Of the engine's counts: those that no entry has, whichever gateway asked; likewise the next
    two."""
    uncharged_cached_tokens: int = 0
    uncharged_output_tokens: int = 0


class CountedRequest(Struct, frozen=True, array_like=True):
    """What an engine has counted for a request that has ended."""

    request_id: str
    counts: Counts


class GatewayDeath(Struct, frozen=True, tag="gateway_death"):
    """What an engine knows of a start of a gateway that died; written by another one.

    It changes nothing if the gateway's last counts are known, or while a hold of one of `ended` is
    open: then its ledger may still write.
    """

    epoch: str
    gateway: str
    at_ms: int
    counts: Counts
    """Of all its requests that the engine has finished."""
    ended: tuple[CountedRequest, ...] = ()
    """The latest of them. What the engine counted is unbilled for those without an entry, or with
    an `interrupted` one. An older one without an entry is a loss, and shows as a difference."""


class EpochCorrections:
    """What the entries of one transaction have more than engines counted."""

    def __init__(self) -> None:
        self._of: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])

    def add(self, epoch: str, gateway: str, more: Counts) -> None:
        """Add an entry's part."""
        if epoch and any(more):
            of = self._of[epoch, gateway]
            for at, count in enumerate(more):
                of[at] += count

    def write(self, db: Transaction) -> None:
        """Write the sums."""
        if self._of:
            db.execute_many(_CORRECT, [(*which, *sums) for which, sums in self._of.items()])


def write_totals(db: Transaction, totals: EngineTotals) -> None:
    """Write what a gateway tells; an earlier record of it changes nothing."""
    db.execute_many(_WRITE_EPOCH, [structs.astuple(totals)])


def settle_death(db: Transaction, death: GatewayDeath) -> None:
    """Settle the row of a gateway that died, once. O(`death.ended`)."""
    which = death.epoch, death.gateway
    if db.rows(_ENDED, which):
        return
    unbilled = [0, 0, 0]
    for some in _parts(death.ended):
        asked = pad_to_power_of_two([_entry_id(one) for one in some])
        found: dict[str, str] = {}
        found.update(db.rows(_ENDINGS.format(placeholders(len(asked))), (*asked, *asked)))
        for one in some:
            ending = found.get(_entry_id(one))
            if ending == "":
                return  # its hold is open
            if ending is None or ending == INTERRUPTED:
                unbilled = [a + b for a, b in zip(unbilled, one.counts, strict=True)]
    more = (db.rows(_CORRECTIONS, which) or [NO_COUNTS])[0]
    metric = [a + b - c for a, b, c in zip(death.counts, more, unbilled, strict=True)]
    totals = EngineTotals(death.epoch, death.at_ms, 0, 0, 0, 0, 0, 0, gateway=death.gateway)
    write_totals(db, totals)
    db.execute(_SETTLE, (*unbilled, *metric, death.at_ms, *which))


def is_settled(store: Store, epoch: str, gateway: str) -> bool:
    """Return whether the last counts of a start of a gateway are known. Raises StoreError."""
    return bool(store.query(_ENDED, (epoch, gateway)))


def _entry_id(request: CountedRequest) -> str:
    """Return the id of the entry: a call with several prompts has one."""
    return request.request_id.partition("-")[0]


def _parts(ended: Sequence[CountedRequest]) -> Iterator[Sequence[CountedRequest]]:
    for first in range(0, len(ended), IDS_AT_ONCE):
        yield ended[first : first + IDS_AT_ONCE]


_TOTALS = ("prompt_tokens", "cached_tokens", "output_tokens")
_EPOCH_SUMS = tuple(f"{whose}{name}" for whose in ("", "uncharged_", "metric_") for name in _TOTALS)
_UNBILLED = tuple(f"unbilled_{name}" for name in _TOTALS)
_EPOCH_COLUMNS = tuple(
    "last_seen_ms" if name == "at_ms" else name for name in EngineTotals.__struct_fields__
)
_WRITE_EPOCH = (
    f"insert into engine_epochs (first_seen_ms, {', '.join((*_EPOCH_COLUMNS, *_UNBILLED))})"
    f" values (?2, {', '.join(f'?{n}' for n in range(1, len(_EPOCH_COLUMNS) + 1))}, 0, 0, 0)"
    " on conflict (epoch, gateway) do update set "
    + ", ".join(
        f"{name} = {max_of('engine_epochs', name)}"
        for name in ("last_seen_ms", "is_ended", *_EPOCH_SUMS)
    )
)
_CORRECT = (
    f"insert into epoch_corrections (epoch, gateway, {', '.join(_TOTALS)})"
    " values (?, ?, ?, ?, ?) on conflict (epoch, gateway) do update set "
    + ", ".join(f"{name} = epoch_corrections.{name} + excluded.{name}" for name in _TOTALS)
)
_ENDED = "select 1 from engine_epochs where epoch = ? and gateway = ? and is_ended = 1"
_ENDINGS = (
    "select request_id, ending from ledger where request_id in {0}"
    " union all select request_id, '' from holds where request_id in {0}"
)
_CORRECTIONS = f"select {', '.join(_TOTALS)} from epoch_corrections where epoch = ? and gateway = ?"
_SETTLE = (
    "update engine_epochs set is_ended = 1, "
    + ", ".join(f"{name} = ?" for name in _UNBILLED)
    + ", "
    + ", ".join(f"metric_{name} = ?" for name in _TOTALS)
    + ", last_seen_ms = ? where epoch = ? and gateway = ?"
)
