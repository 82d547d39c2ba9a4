"""Sums of entries by hour and day of booking, and by engine epoch.

A transaction adds its entries to one table, `recent_sums`, with a row per tenant, hour, key, model
and epoch. From time to time these rows are folded into the permanent tables `usage_hours`,
`usage_days` and `epoch_sums`; queries add up both. The module knows no prices and no chain.
`entries` adds here, `writer` folds, and `accounting.usage` and other queries read.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from tenancy.pricing.charges import PICO_PER_MICRO
from tenancy.storage.hourly_usage import HOUR_SUMS
from tenancy.storage.interface import Transaction, Value, placeholders
from tenancy.types import DAY_MS, HOUR_MS, TOKEN_COLUMNS, UsageEntry

FOLD_ROWS_MAX = 200
"""Rows folded in one transaction, so that other transactions wait only briefly."""


_NO_TIMES = (0, 0, 0, 0)
"""TTFT columns of an entry without a time to first token."""
_tokens_of = attrgetter(*TOKEN_COLUMNS)


class HourlySums:
    """The sums that the entries of one transaction add, written in few statements."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int, int, str, str], list[UsageEntry]] = {}

    def add(self, entry: UsageEntry, booked_ms: int) -> None:
        """Add an entry."""
        hour_ms = booked_ms - booked_ms % HOUR_MS
        which = (entry.tenant_id, hour_ms, entry.key_id, entry.model, entry.epoch)
        entries = self._of.get(which)
        if entries is None:
            self._of[which] = [entry]
        else:
            entries.append(entry)

    def write(self, db: Transaction) -> None:
        """Write one row for each tenant, hour, key, model and epoch."""
        rows: list[tuple[Value, ...]] = []
        for which, entries in self._of.items():
            if len(entries) == 1:
                (entry,) = entries
                rows.append((*which, *sums_of(entry), entry.ended_ms))
            else:
                sums = map(sum, zip(*map(sums_of, entries), strict=True))
                rows.append((*which, *sums, max([entry.ended_ms for entry in entries])))
        db.execute_many(_ADD, rows)


def sums_of(entry: UsageEntry) -> list[int]:
    """Return what an entry adds to its hour, in the order of `HOUR_SUMS`."""
    charge, saved, ttft_ms = entry.charge_pico, entry.saved_pico, entry.ttft_ms
    is_hit = entry.cache_read_tokens > 0
    if ttft_ms is None:
        times = _NO_TIMES
    elif is_hit:
        times = (1, ttft_ms, 0, 0)
    else:
        times = (0, 0, 1, ttft_ms)
    return [
        *(1, *_tokens_of(entry), int(is_hit), *times),
        *(charge // PICO_PER_MICRO, charge % PICO_PER_MICRO),
        *(saved // PICO_PER_MICRO, saved % PICO_PER_MICRO),
    ]


def fold_recent_sums(db: Transaction) -> bool:
    """Fold up to `FOLD_ROWS_MAX` recent rows. Returns whether there may be more.

    Query results do not change.
    """
    some = db.rows(f"select {_GROUP} from recent_sums order by {_GROUP} limit {FOLD_ROWS_MAX}")
    if some:
        for sql in _FOLD:
            db.execute(sql, some[-1])
    return len(some) == FOLD_ROWS_MAX


def max_of(table: str, name: str) -> str:
    """Return the SQL for the greater of the row's value and the inserted one."""
    mine, new = f"{table}.{name}", f"excluded.{name}"
    return f"case when {mine} >= {new} then {mine} else {new} end"


def _add_columns(table: str, names: Sequence[str]) -> str:
    return ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in names)


_GROUP = "tenant_id, hour_ms, key_id, model, epoch"
_SUMS = ", ".join(HOUR_SUMS)
_ADD = (
    f"insert into recent_sums ({_GROUP}, {_SUMS}, last_ended_ms)"
    f" values {placeholders(6 + len(HOUR_SUMS))} on conflict ({_GROUP})"
    f" do update set {_add_columns('recent_sums', HOUR_SUMS)},"
    f" last_ended_ms = {max_of('recent_sums', 'last_ended_ms')}"
)
_UP_TO = f"({_GROUP}) <= {placeholders(5)}"
_EPOCH_SUMS = ("prompt_tokens", "physical_cached_tokens", "output_tokens")
_FOLD = (
    *(
        f"insert into {table} (tenant_id, {since}, key_id, model, {_SUMS})"
        f" select tenant_id, hour_ms / {length_ms} * {length_ms}, key_id, model,"
        f" {', '.join(f'sum({name})' for name in HOUR_SUMS)} from recent_sums where {_UP_TO}"
        f" group by 1, 2, 3, 4 on conflict (tenant_id, {since}, key_id, model)"
        f" do update set {_add_columns(table, HOUR_SUMS)}"
        for table, since, length_ms in (
            ("usage_hours", "hour_ms", HOUR_MS),
            ("usage_days", "day_ms", DAY_MS),
        )
    ),
    f"insert into epoch_sums (epoch, entries, {', '.join(_EPOCH_SUMS)}, last_ended_ms)"
    f" select epoch, sum(requests), {', '.join(f'sum({name})' for name in _EPOCH_SUMS)},"
    f" max(last_ended_ms) from recent_sums where {_UP_TO} and epoch <> '' group by epoch"
    f" on conflict (epoch) do update set {_add_columns('epoch_sums', ('entries', *_EPOCH_SUMS))},"
    f" last_ended_ms = {max_of('epoch_sums', 'last_ended_ms')}",
    f"delete from recent_sums where {_UP_TO}",
)


ENTRY_SUMS = (
    "count(*)",
    *(f"sum({name})" for name in TOKEN_COLUMNS),
    "count(*) filter (where cache_read_tokens > 0)",
    "count(*) filter (where cache_read_tokens > 0 and ttft_ms is not null)",
    "coalesce(sum(ttft_ms) filter (where cache_read_tokens > 0), 0)",
    "count(*) filter (where cache_read_tokens = 0 and ttft_ms is not null)",
    "coalesce(sum(ttft_ms) filter (where cache_read_tokens = 0), 0)",
    *(f"sum({name}_pico {part} {PICO_PER_MICRO})" for name in ("charge", "saved") for part in "/%"),
)
"""SQL sums over entries in the order of `HOUR_SUMS`.

`saved` is divided towards zero here and rounded down in Python; the two parts add up to the same
amount.
"""

EPOCH_TOTALS = (
    "(select epoch, sum(entries) as entries,"
    f" {', '.join(f'sum({name}) as {name}' for name in _EPOCH_SUMS)},"
    " max(last_ended_ms) as last_ended_ms from (select * from epoch_sums union all"
    f" select epoch, requests, {', '.join(_EPOCH_SUMS)}, last_ended_ms from recent_sums"
    " where epoch <> '') as parts group by epoch) as epoch_sums"
)
"""A subquery with one row per engine epoch."""
