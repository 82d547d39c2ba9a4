"""Usage by hour, as a relation that queries read from.

The sums of an hour are in two tables: `recent_sums`, where the ledger adds to them, and
`usage_hours`, where it moves them later. `HOURLY_USAGE` reads both. This module knows no entries
and no prices.
"""

from __future__ import annotations

from tenancy.types import TOKEN_COLUMNS

HOUR_SUMS = (
    *("requests", *TOKEN_COLUMNS, "hits"),
    *("ttft_hits", "ttft_hit_ms", "ttft_misses", "ttft_miss_ms"),
    *("charge_micros", "charge_rest", "saved_micros", "saved_rest"),
)
"""Columns that an entry adds to, in every table of sums by time."""

_COLUMNS = f"tenant_id, hour_ms, key_id, model, {', '.join(HOUR_SUMS)}"

HOURLY_USAGE = (
    f"(select {_COLUMNS} from usage_hours union all select {_COLUMNS} from recent_sums) as hours"
)
"""A relation of all booked usage; one hour may have several rows."""
