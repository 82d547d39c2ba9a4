"""`GET /admin/v1/history`: charts over time, of all tenants or of one.

Tokens and money come from the ledger, refusals, times to first token and blocks from samples of
each minute. A bucket in which the gateway was down is null in every series.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from aiohttp import web
from msgspec import Struct

from gateway.api.usage_report import budget_body, budget_share
from gateway.background.history_sampling import HistorySampling
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.http.route_table import Route
from gateway.ledger.query_pool import QueryPool
from tenancy.accounting.usage import usage
from tenancy.accounts.tenants import find_tenant_record
from tenancy.history.ledger_history import LedgerBucket, ledger_history
from tenancy.history.samples import (
    ALL_TENANTS,
    Sample,
    add_details,
    read_samples,
    sampled_times,
)
from tenancy.pricing.budgets import BudgetState, budget_states, window_of
from tenancy.pricing.charges import format_dollars
from tenancy.reuse.miss_ratio_curve import LogHistogram
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS, HOUR_MS, MINUTE_MS, Tenant, WallClock

POINTS_MAX = 400
RANGES_MS = {"1h": HOUR_MS, "24h": DAY_MS, "7d": 7 * DAY_MS, "30d": 30 * DAY_MS}
STEPS_MS = (
    *(minutes * MINUTE_MS for minutes in (1, 2, 5, 10, 15, 30)),
    *(hours * HOUR_MS for hours in (1, 2, 3, 6, 12)),
    *(days * DAY_MS for days in (1, 2, 5, 10)),
)
"""Lengths of a bucket, when the request names none."""
FINE_MS = 2 * DAY_MS
"""Samples of minutes exist for so long; longer or older periods have buckets of hours."""
_QUANTILES = (("p50", 0.5), ("p95", 0.95))
_RANGE_QUANTILES = (*_QUANTILES, ("p99", 0.99))
T = TypeVar("T")


class QuantileSeries(Struct, frozen=True):
    """Two quantiles, with one value per bucket."""

    p50: list[float | None]
    p95: list[float | None]


class FirstTokenQuantiles(Struct, frozen=True):
    """Times to first token over a whole period, in milliseconds, accurate to a fifth."""

    count: int
    p50: float | None
    p95: float | None
    p99: float | None


class FirstTokenTimes(Struct, frozen=True):
    """`hit`: half of the prompt or more was cached; `miss`: less."""

    hit: FirstTokenQuantiles
    miss: FirstTokenQuantiles


class HistorySeries(Struct, frozen=True):
    """Charts: one value per bucket, null in a gap. Money is exact decimal dollars.

    `device_cached_tokens`, `host_cached_tokens`, `disk_cached_tokens`, `remote_cached_tokens`:
    prompt tokens that were not computed, by the level on which they were found.
    """

    requests: list[int | None]
    refused: list[int | None]
    prompt_tokens: list[int | None]
    read_tokens: list[int | None]
    written_tokens: list[int | None]
    computed_tokens: list[int | None]
    output_tokens: list[int | None]
    device_cached_tokens: list[int | None]
    host_cached_tokens: list[int | None]
    disk_cached_tokens: list[int | None]
    remote_cached_tokens: list[int | None]
    cost_usd: list[str | None]
    uncached_cost_usd: list[str | None]
    first_token_ms_hit: QuantileSeries
    first_token_ms_miss: QuantileSeries
    blocks_promised: list[int | None]
    blocks_cached: list[int | None]
    blocks_free: list[int | None]
    refusals_by_code: dict[str, list[int | None]]
    budget_spent_usd: list[str | None]


class HistoryBudget(Struct, frozen=True):
    """The tenant's own budget. `share`: the used part of the hard amount, or else of the soft."""

    window: Literal["day", "month"]
    hard_usd: str | None
    soft_usd: str | None
    share: float | None


class HistoryAnswer(Struct, frozen=True):
    """Charts over time. `at_ms`: the start of each bucket. `previous`: the period before."""

    since_ms: int
    until_ms: int
    step_ms: int
    tenant: str | None
    model: str | None
    at_ms: list[int]
    series: HistorySeries
    first_token_ms: FirstTokenTimes | None
    budget: HistoryBudget | None
    previous: HistorySeries | None
    previous_first_token_ms: FirstTokenTimes | None


class HistoryPeriod(Struct, frozen=True):
    """The buckets of a chart: [since_ms, until_ms) in steps; all are multiples of `step_ms`."""

    since_ms: int
    until_ms: int
    step_ms: int

    @property
    def at_ms(self) -> range:
        """The start of each bucket."""
        return range(self.since_ms, self.until_ms, self.step_ms)

    @property
    def before(self) -> HistoryPeriod:
        """The equally long period that ends where this one begins."""
        return HistoryPeriod(2 * self.since_ms - self.until_ms, self.since_ms, self.step_ms)


class HistoryFilter(Struct, frozen=True):
    """What a chart shows: one tenant or all, one model or all."""

    tenant: Tenant | None
    model: str | None
    now_ms: int
    live: list[Sample]
    """The samples that the database lacks."""

    @property
    def tenant_id(self) -> int | None:
        return None if self.tenant is None else self.tenant.tenant_id


def routes(
    store: Store, reports: QueryPool, sampling: HistorySampling, wall: WallClock
) -> tuple[Route, ...]:
    """Return the route of charts."""

    async def history(request: web.BaseRequest) -> object:
        given = request.query
        period, is_csv = read_period(given, wall()), json_api.wants_csv(given)
        name = given.get("tenant")
        tenant = None
        if name is not None:
            found = await asyncio.to_thread(find_tenant_record, store, name)
            tenant = found.tenant

        async def read() -> dict[str, Any]:
            await sampling.count_ended()
            wanted = HistoryFilter(
                tenant=tenant,
                model=given.get("model"),
                now_ms=wall(),
                live=sampling.live_samples(ALL_TENANTS if tenant is None else tenant.tenant_id),
            )
            return await reports.ask(partial(_report, wanted=wanted, period=period))

        body = await sampling.read_at_once(read)
        return json_api.csv_answer(csv_rows(body), "history") if is_csv else body

    what, text = "GET /admin/v1/history", "Draw charts over time."
    names = "range since until step_ms tenant model format"
    return (json_api.route(what, "admin:read", text, history, answer=HistoryAnswer, query=names),)


def read_period(given: Mapping[str, str], now_ms: int) -> HistoryPeriod:
    """Return the period of `range`, or of `since` and `until`, and `step_ms`. Raises Refusal."""
    name = json_api.choice(given, "range", RANGES_MS)
    if name is not None and ("since" in given or "until" in given):
        message = "range is not allowed with since or until; omit one of them."
        raise Refusal(Kind.BAD, "invalid_value", message, param="range")
    if name is None and ("since" in given or "until" in given):
        window = json_api.window(given, now_ms)
        return _aligned(window.since_ms, window.until_ms, given, now_ms)
    length_ms = RANGES_MS[name or "24h"]
    period = _aligned(now_ms + 1 - length_ms, now_ms + 1, given, now_ms)
    # The first bucket has passed in part; without it, the period is as long as its name says.
    return HistoryPeriod(period.until_ms - length_ms, period.until_ms, period.step_ms)


def _aligned(since_ms: int, until_ms: int, given: Mapping[str, str], now_ms: int) -> HistoryPeriod:
    is_fine = until_ms - since_ms <= FINE_MS and since_ms > now_ms - FINE_MS
    step_min_ms = MINUTE_MS if is_fine else HOUR_MS
    step_ms = json_api.positive_int(given, "step_ms", 0, STEPS_MS[-1])
    if not step_ms:
        step_ms = next(
            step
            for step in STEPS_MS
            if step >= step_min_ms and -(-until_ms // step) - since_ms // step <= POINTS_MAX
        )
    period = HistoryPeriod(
        since_ms // step_ms * step_ms, -(-until_ms // step_ms) * step_ms, step_ms
    )
    unit_ms = MINUTE_MS if step_ms < HOUR_MS else HOUR_MS
    if step_ms < step_min_ms or step_ms % unit_ms or len(period.at_ms) > POINTS_MAX:
        message = (
            f"Invalid step_ms: {step_ms}; expected a multiple of {MINUTE_MS}, from an hour on of"
            f" {HOUR_MS}, at least {step_min_ms} for this period and at most {POINTS_MAX} buckets."
        )
        raise Refusal(Kind.BAD, "invalid_value", message, param="step_ms")
    return period


def csv_rows(body: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return a row per bucket, with a column for each series."""
    columns: dict[str, Sequence[object]] = {}
    for name, values in body["series"].items():
        if isinstance(values, Mapping):
            columns.update({f"{name}_{part}": inner for part, inner in values.items()})
        else:
            columns[name] = values
    return [
        {
            "at": json_api.instant(at_ms),
            **{name: values[place] for name, values in columns.items()},
        }
        for place, at_ms in enumerate(body["at_ms"])
    ]


# --- reading and summing -------------------------------------------------------------------------


def _report(store: Store, wanted: HistoryFilter, period: HistoryPeriod) -> dict[str, Any]:
    budget = _budget(store, wanted)
    now = _Chart(store, wanted, period, budget)
    before = _Chart(store, wanted, period.before, budget)
    return {
        "since_ms": period.since_ms,
        "until_ms": period.until_ms,
        "step_ms": period.step_ms,
        "tenant": None if wanted.tenant is None else wanted.tenant.name,
        "model": wanted.model,
        "at_ms": list(period.at_ms),
        "series": now.series(),
        "first_token_ms": now.first_token_ms(),
        "budget": None if budget is None else _budget_body(budget),
        "previous": before.series() if before.is_known else None,
        "previous_first_token_ms": before.first_token_ms() if before.is_known else None,
    }


class _Chart:
    """All series of one period. The constructor reads them."""

    def __init__(
        self,
        store: Store,
        wanted: HistoryFilter,
        period: HistoryPeriod,
        budget: BudgetState | None,
    ) -> None:
        since_ms, until_ms, step_ms = period.since_ms, period.until_ms, period.step_ms
        self._period, self._wanted = period, wanted
        self._ledger = ledger_history(
            store, since_ms, until_ms, step_ms, tenant_id=wanted.tenant_id, model=wanted.model
        )
        times = sampled_times(store, since_ms, until_ms)
        times += [one.at_ms for one in wanted.live]
        self._sampled = {at_ms // step_ms * step_ms for at_ms in times}
        self._samples: defaultdict[int, list[Sample]] = defaultdict(list)
        if wanted.model is None:
            kept = read_samples(store, wanted.tenant_id or ALL_TENANTS, since_ms, until_ms)
            for sample in (*kept, *wanted.live):
                self._samples[sample.at_ms // step_ms * step_ms].append(sample)
        self._budget = None if wanted.model is not None else budget
        self._spent_before = 0
        if self._budget is not None and wanted.tenant is not None:
            starts_ms, _ = window_of(self._budget.budget.window, since_ms)
            spent = usage(store, tenant=wanted.tenant.name, since_ms=starts_ms, until_ms=since_ms)
            self._spent_before = sum(one.charge_pico for one in spent)

    @property
    def is_known(self) -> bool:
        """Whether anything is known of the period."""
        return bool(self._ledger or self._sampled.intersection(self._period.at_ms))

    def series(self) -> dict[str, Any]:
        """Return all series by name."""
        return {
            "requests": self._booked(lambda one: one.requests),
            "refused": self._counted(lambda samples: sum(one.refused for one in samples)),
            "prompt_tokens": self._booked(lambda one: one.prompt_tokens),
            "read_tokens": self._booked(lambda one: one.cache_read_tokens),
            "written_tokens": self._booked(lambda one: one.cache_write_tokens),
            "computed_tokens": self._booked(lambda one: one.fresh_tokens),
            "output_tokens": self._booked(lambda one: one.output_tokens),
            "device_cached_tokens": self._booked(lambda one: one.device_cached_tokens),
            "host_cached_tokens": self._booked(lambda one: one.host_cached_tokens),
            "disk_cached_tokens": self._booked(lambda one: one.disk_cached_tokens),
            "remote_cached_tokens": self._booked(lambda one: one.remote_cached_tokens),
            "cost_usd": self._booked(lambda one: format_dollars(one.charge_pico)),
            "uncached_cost_usd": self._booked(
                lambda one: format_dollars(one.charge_pico + one.saved_pico)
            ),
            "first_token_ms_hit": self._quantiles("hits"),
            "first_token_ms_miss": self._quantiles("misses"),
            "blocks_promised": self._blocks("blocks_promised"),
            "blocks_cached": self._blocks("blocks_cached"),
            "blocks_free": self._blocks("blocks_free"),
            "refusals_by_code": self._refusals(),
            "budget_spent_usd": self._spent(),
        }

    def first_token_ms(self) -> dict[str, dict[str, float | None]] | None:
        """Return quantiles over the whole period, of its summed buckets; None with a model.

        Quantiles of each bucket cannot be averaged: a quiet minute would count as a busy one.
        """
        if self._wanted.model is not None:
            return None
        samples = [one for at_ms in self._period.at_ms for one in self._samples.get(at_ms, ())]
        found: dict[str, dict[str, float | None]] = {}
        for name, field in (("hit", "hits"), ("miss", "misses")):
            times = _histogram(getattr(one.details, field) for one in samples)
            found[name] = {
                "count": round(times.total()),
                **{label: _rounded(times.quantile(part)) for label, part in _RANGE_QUANTILES},
            }
        return found

    def _booked(self, value: Callable[[LedgerBucket], T]) -> list[T | None]:
        """Return a series of the ledger: zeros if the gateway ran and nothing was booked."""
        nothing = LedgerBucket()
        return [
            value(self._ledger.get(at_ms, nothing)) if self._has_run(at_ms) else None
            for at_ms in self._period.at_ms
        ]

    def _has_run(self, at_ms: int) -> bool:
        """Whether a gateway ran in a bucket, or something was booked in it."""
        return at_ms in self._ledger or at_ms in self._sampled

    def _counted(self, value: Callable[[list[Sample]], T]) -> list[T | None]:
        """Return a series of samples; null if there are none, and with a model."""
        has_samples = self._wanted.model is None
        return [
            value(self._samples.get(at_ms, [])) if has_samples and at_ms in self._sampled else None
            for at_ms in self._period.at_ms
        ]

    def _blocks(self, name: str) -> list[int | None]:
        is_pools = name == "blocks_free" and self._wanted.tenant is not None
        # A tenant without blocks has no sample.
        without = None if self._wanted.tenant is None or is_pools else 0
        return self._counted(lambda samples: _mean_blocks(samples, name) if samples else without)

    def _quantiles(self, name: str) -> dict[str, list[float | None]]:
        histograms = self._counted(
            lambda samples: _histogram(getattr(one.details, name) for one in samples)
        )
        return {
            label: [None if one is None else _rounded(one.quantile(part)) for one in histograms]
            for label, part in _QUANTILES
        }

    def _refusals(self) -> dict[str, list[int | None]]:
        found = self._counted(lambda samples: add_details(one.details for one in samples).refusals)
        codes = sorted({code for one in found if one for code in one})
        return {
            code: [None if one is None else one.get(code, 0) for one in found] for code in codes
        }

    def _spent(self) -> list[str | None]:
        """Return what was spent in the budget's window at the end of each bucket; None in a gap."""
        if self._budget is None:
            return [None] * len(self._period.at_ms)
        spent, series = self._spent_before, list[str | None]()
        starts_ms, _ = window_of(self._budget.budget.window, self._period.since_ms)
        for at_ms in self._period.at_ms:
            window_ms, _ = window_of(self._budget.budget.window, at_ms)
            if window_ms != starts_ms:
                starts_ms, spent = window_ms, 0
            if (bucket := self._ledger.get(at_ms)) is not None:
                spent += bucket.charge_pico
            is_shown = at_ms <= self._wanted.now_ms and self._has_run(at_ms)
            series.append(format_dollars(spent) if is_shown else None)
        return series


def _histogram(counts: Iterable[Mapping[int, int]]) -> LogHistogram:
    histogram = LogHistogram()
    for one in counts:
        for bucket, count in one.items():
            histogram.counts[bucket] += count
    return histogram


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _mean_blocks(samples: Sequence[Sample], name: str) -> int | None:
    """Return the sum over gateways of the mean of each; None if no sample has the blocks."""
    by_gateway: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for one in samples:
        if (blocks := getattr(one, name)) is not None:
            by_gateway[one.gateway].append((blocks, one.minutes))
    if not by_gateway:
        return None
    return sum(
        round(sum(blocks * minutes for blocks, minutes in rows) / sum(m for _, m in rows))
        for rows in by_gateway.values()
    )


# --- the budget ----------------------------------------------------------------------------------


def _budget(store: Store, wanted: HistoryFilter) -> BudgetState | None:
    """Return the tenant's own budget of a month, or else of a day."""
    if wanted.tenant is None:
        return None
    states = budget_states(store, lambda: wanted.now_ms, (wanted.tenant.tenant_id,))
    own = {one.budget.window: one for one in states if not one.budget.key_id}
    return own.get("month") or own.get("day")


def _budget_body(state: BudgetState) -> dict[str, Any]:
    body = budget_body(state)
    shown = {name: body[name] for name in ("window", "hard_usd", "soft_usd")}
    return {**shown, "share": budget_share(state)}
