"""Tokens and money of the ledger by buckets of time, for charts.

Buckets of an hour or more come from the ledger's hourly and daily sums, shorter ones from its
entries. An entry counts when it is booked. The module writes nothing and knows no samples; the
admin API calls it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tenancy.pricing.charges import PICO_PER_MICRO
from tenancy.storage.interface import Store, Value
from tenancy.types import DAY_MS, HOUR_MS, TOKEN_COLUMNS, TokenSums

_MONEY = ("charge_micros", "charge_rest", "saved_micros", "saved_rest")
_OF_SUMS = ", ".join(f"sum({name})" for name in ("requests", *TOKEN_COLUMNS, *_MONEY))
_OF_ENTRIES = ", ".join(
    (
        "count(*)",
        *(f"sum({name})" for name in TOKEN_COLUMNS),
        *(
            f"sum({name}_pico {part} {PICO_PER_MICRO})"
            for name in ("charge", "saved")
            for part in "/%"
        ),
    )
)
_WHERE = (
    "tenant_id in (select tenant_id from tenants where cast(?1 as bigint) is null"
    " or tenant_id = ?1) and (cast(?2 as text) is null or model = ?2)"
)


class LedgerBucket(TokenSums, frozen=True, kw_only=True):
    """What was booked in one bucket. Money is pico-dollars, before adjustments."""

    requests: int = 0
    charge_pico: int = 0
    saved_pico: int = 0

    @property
    def device_cached_tokens(self) -> int:
        """Return the cached tokens that were on the device."""
        loaded = self.host_cached_tokens + self.disk_cached_tokens + self.remote_cached_tokens
        return self.physical_cached_tokens - loaded


def ledger_history(
    store: Store,
    since_ms: int,
    until_ms: int,
    step_ms: int,
    *,
    tenant_id: int | None = None,
    model: str | None = None,
) -> dict[int, LedgerBucket]:
    """Return sums of what was booked in [since_ms, until_ms), by the start of each bucket.

    Buckets are multiples of `step_ms`, and so is `since_ms`; `step_ms` of an hour or more is a
    multiple of an hour. Buckets without entries are absent. O(rows of sums), or O(entries) where
    `step_ms` is less than an hour. Raises StoreError.
    """
    assert since_ms % step_ms == 0
    assert step_ms < HOUR_MS or step_ms % HOUR_MS == 0
    values = (tenant_id, model, since_ms, until_ms, step_ms)
    if step_ms < HOUR_MS:
        parts = [_part(_OF_ENTRIES, "ledger", "booked_ms")]
    else:
        whole = ("usage_days", "day_ms") if step_ms % DAY_MS == 0 else ("usage_hours", "hour_ms")
        parts = [_part(_OF_SUMS, *whole), _part(_OF_SUMS, "recent_sums", "hour_ms")]
    return _buckets(store, " union all ".join(parts), values)


def _part(columns: str, table: str, time: str) -> str:
    return (
        f"select {time} / ?5 * ?5, {columns} from {table} where {_WHERE} and {time} >= ?3"
        f" and {time} < ?4 group by 1"
    )


def _buckets(store: Store, sql: str, values: Sequence[Value]) -> dict[int, LedgerBucket]:
    sums: defaultdict[int, list[int]] = defaultdict(
        lambda: [0] * (1 + len(TOKEN_COLUMNS) + len(_MONEY))
    )
    for at_ms, *row in store.query(sql, values):
        found = sums[at_ms]
        for place, value in enumerate(row):
            found[place] += int(value)
    buckets: dict[int, LedgerBucket] = {}
    for at_ms, (*counts, micros, rest, saved_micros, saved_rest) in sums.items():
        charge_pico = micros * PICO_PER_MICRO + rest
        saved_pico = saved_micros * PICO_PER_MICRO + saved_rest
        facts = dict(zip(("requests", *TOKEN_COLUMNS), counts, strict=True))
        buckets[at_ms] = LedgerBucket(**facts, charge_pico=charge_pico, saved_pico=saved_pico)
    return buckets
