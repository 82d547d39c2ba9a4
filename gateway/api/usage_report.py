"""Usage reports over HTTP: ledger sums by day, hour, model, key or tenant.

Windows are widened to whole hours, for which the ledger keeps sums: a report never reads single
entries. This module knows no route; the admin API and self-service call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, get_args

from msgspec import Struct

from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.http.json_api import Window
from gateway.ledger.query_pool import QueryPool
from tenancy.accounting.focus_export import storage
from tenancy.accounting.usage import UsageGroup, UsageTotal, sum_tenants, usage
from tenancy.ledger.epochs import ledger_epoch
from tenancy.pricing.budgets import BudgetState
from tenancy.pricing.charges import PICO_PER_MICRO, format_dollars
from tenancy.types import DAY_MS, HOUR_MS, TOKEN_COLUMNS, Tenant, WallClock

ROWS_MAX = 10_000
BY_USER_DAYS_MAX = 32
"""The longest window of usage by user, which is summed from single entries."""
PARAMETERS = "since until group_by key_id model"
"""Query parameters of a report."""

_COUNTS = (
    "requests",
    *(name for name in TOKEN_COLUMNS if name != "recomputed_promised_tokens"),
)
_MONEY = ("charge", "saved", "adjusted")


class WindowAnswer(Struct, frozen=True):
    """The time window [since, until), RFC 3339."""

    since: str
    until: str


class UsageCounts(Struct, frozen=True):
    """Sums of ledger entries. Money: exact decimal dollars, as strings. `host_cached_tokens`,
    `disk_cached_tokens`, `remote_cached_tokens`: the parts of `physical_cached_tokens` that were
    loaded from there."""

    requests: int
    prompt_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    fresh_tokens: int
    output_tokens: int
    physical_cached_tokens: int
    host_cached_tokens: int
    disk_cached_tokens: int
    remote_cached_tokens: int
    hit_ratio: float | None
    charge_usd: str
    saved_usd: str
    adjusted_usd: str


class UsageAnswer(Struct, frozen=True, omit_defaults=True):
    """A usage report. `rows`: one per group; they have the group's values and the counts.

    `storage`: of one tenant, by retention class. `tenant`, `budgets`: of the tenant that asks.
    """

    ledger_epoch: int
    window: WindowAnswer
    group_by: tuple[str, ...]
    totals: UsageCounts
    rows: list[dict[str, Any]]
    storage: list[dict[str, Any]] | None = None
    tenant: str | None = None
    budgets: list[dict[str, Any]] | None = None


class UsageReports:
    """Reports the sums of the ledger."""

    def __init__(self, reports: QueryPool, wall: WallClock) -> None:
        self._reports, self._wall = reports, wall

    async def report(
        self, given: Mapping[str, str], tenant: str | None, *, own_id: int | None = None
    ) -> dict[str, Any]:
        """Return the usage of one tenant, or of all. Raises Refusal.

        `own_id`: the tenant's id, if the tenant itself asks; its rows then omit its name.
        """
        window = whole_hours(json_api.window(given, self._wall()))
        groups = parse_groups(given.get("group_by", ""), own=own_id is not None)
        if "user" in groups and window.until_ms - window.since_ms > BY_USER_DAYS_MAX * DAY_MS:
            message = (
                "group_by=user reads every entry: the window is limited to"
                f" {BY_USER_DAYS_MAX} days."
            )
            raise Refusal(Kind.BAD, "invalid_value", message, param="since")
        key_id = json_api.positive_int(given, "key_id", 0, 2**53) or None
        query = partial(
            usage,
            tenant=tenant,
            key_id=key_id,
            model=given.get("model"),
            since_ms=window.since_ms,
            until_ms=window.until_ms,
            by=groups,
        )
        found = await self._reports.ask(query, own_id)
        if tenant is None and groups and "tenant" not in groups:
            found = sum_tenants(found)
        if len(found) > ROWS_MAX:
            message = f"Result has {len(found)} rows; limit {ROWS_MAX}. Narrow the query."
            raise Refusal(Kind.BAD, "too_many_rows", message, param="group_by")
        epoch = await self._reports.ask(ledger_epoch, own_id)
        body = {
            "ledger_epoch": epoch.number,
            "window": window.as_json(),
            "group_by": groups,
            "totals": totals_body(found),
            "rows": [_row(one, groups) for one in found] if groups else [],
        }
        if tenant is not None:
            body["storage"] = await self._storage_rows(tenant, window, own_id)
        return body

    async def _storage_rows(
        self, tenant: str, window: Window, own_id: int | None
    ) -> list[dict[str, Any]]:
        query = partial(storage, tenant=tenant, since_ms=window.since_ms, until_ms=window.until_ms)
        return [
            {
                "class": one.retention,
                "token_seconds": one.token_seconds,
                "charge_usd": format_dollars(one.pico),
            }
            for one in await self._reports.ask(query, own_id)
        ]

    async def own_totals(self, window: Window, own: Tenant) -> dict[str, Any]:
        """Return the totals of a tenant for itself. Raises StoreError."""
        query = partial(usage, tenant=own.name, since_ms=window.since_ms, until_ms=window.until_ms)
        return totals_body(await self._reports.ask(query, own.tenant_id))


def whole_hours(window: Window) -> Window:
    """Return the window widened to whole hours."""
    return Window(window.since_ms // HOUR_MS * HOUR_MS, -(-window.until_ms // HOUR_MS) * HOUR_MS)


def parse_groups(text: str, *, own: bool = False) -> tuple[UsageGroup, ...]:
    """Return the groups of `group_by=day,model`, each at most once. Raises Refusal."""
    known = tuple(name for name in get_args(UsageGroup) if not (own and name == "tenant"))
    names = tuple(filter(None, text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) < len(names) or {"hour", "day"} <= set(names):
        message = (
            f"group_by: {text[:80]!r}; expected some of {', '.join(known)}, each once; hour or day,"
            " not both."
        )
        raise Refusal(Kind.BAD, "invalid_value", message, param="group_by")
    return tuple(name for name in known if name in names)


def totals_body(found: list[UsageTotal]) -> dict[str, Any]:
    """Return the totals of all rows: counts, the hit ratio by tokens, money."""
    totals: dict[str, Any] = {name: sum(getattr(one, name) for one in found) for name in _COUNTS}
    totals["hit_ratio"] = _ratio(totals["cache_read_tokens"], totals["prompt_tokens"])
    for name in _MONEY:
        totals[f"{name}_usd"] = format_dollars(sum(getattr(one, f"{name}_pico") for one in found))
    return totals


def budget_body(state: BudgetState) -> dict[str, Any]:
    """Return a budget, and the spent and reserved amounts of its window."""
    budget = state.budget
    amounts = (("hard", budget.hard_micros), ("soft", budget.soft_micros))
    return {
        "key_id": budget.key_id or None,
        "window": budget.window,
        **{
            f"{name}_usd": None if micros is None else format_dollars(micros * PICO_PER_MICRO)
            for name, micros in amounts
        },
        "spent_usd": format_dollars(state.spent_pico),
        "reserved_usd": format_dollars(state.reserved_pico),
        "is_over_soft": state.is_over_soft,
        "starts": json_api.instant(state.starts_ms),
        "resets": json_api.instant(state.resets_ms),
    }


def budget_share(state: BudgetState) -> float | None:
    """Return the spent and reserved part of the hard budget, or else of the soft one; None for a
    budget of nothing."""
    hard, soft = state.budget.hard_micros, state.budget.soft_micros
    limit = soft if hard is None else hard
    taken = state.spent_pico + state.reserved_pico
    return round(taken / (limit * PICO_PER_MICRO), 6) if limit else None


def _row(one: UsageTotal, groups: tuple[UsageGroup, ...]) -> dict[str, Any]:
    start = "from", json_api.instant(one.from_ms or 0)
    parts: dict[UsageGroup, tuple[str, object]] = {
        "tenant": ("tenant", one.tenant),
        "key": ("key_id", one.key_id),
        "model": ("model", one.model),
        "user": ("user", one.user or None),
        "hour": start,
        "day": start,
    }
    return {**dict(parts[group] for group in groups), **totals_body([one])}


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None
