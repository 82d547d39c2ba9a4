"""Shapes of charts, ended requests and tenants' states, for the OpenAPI documents.

As in `answers`: handlers build these bodies as dictionaries, and tests hold what they answer
against the documents.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from gateway.api.openapi.answers import KeyAnswer


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


class RequestRow(Struct, frozen=True):
    """An ended request, as the list shows it. Null: not known any more, or not reached.

    `cause`, `place`: why the prompt was computed again, as the finding `finding_id` says it;
    `wasted_usd`: what its `wasted_tokens` cost. `user`: whom the request names, if usage is
    attributed.
    """

    request_id: str
    received_ms: int | None
    ended_ms: int | None
    tenant: str | None
    key_id: int | None
    dialect: str
    endpoint: str | None
    model: str
    stream: bool | None
    status: int | None
    ending: str
    code: str
    prompt_tokens: int
    read_tokens: int
    written_tokens: int
    computed_tokens: int
    output_tokens: int
    first_token_ms: float | None
    total_ms: float | None
    missed: str | None
    cost_usd: str | None
    key_label: str | None
    user: str | None
    cause: str | None
    place: str | None
    wasted_tokens: int | None
    wasted_usd: str | None
    finding_id: str | None


class RequestPage(Struct, frozen=True):
    """Ended requests, newest first, and `before` of the next page."""

    requests: list[RequestRow]
    next_before: str | None


class RequestTimes(Struct, frozen=True):
    """Instants of a request, in milliseconds since the epoch."""

    received_ms: int | None
    submitted_ms: int | None
    started_ms: int | None
    first_token_ms: int | None
    settled_ms: int | None
    ended_ms: int | None


class RequestSegment(Struct, frozen=True):
    """A part of a prompt by its path in the request, with its last token and its cached ones."""

    path: str
    end: int
    tokens: int
    cached_tokens: int


class PriceLine(Struct, frozen=True):
    """A component of a charge."""

    line: str
    tokens: int
    usd_per_mtok: str
    usd: str


class RequestPrice(Struct, frozen=True):
    """A request's charge by line, and the same request's without caching."""

    rate_card_id: str
    lines: list[PriceLine]
    cost_usd: str
    uncached_cost_usd: str
    saved_usd: str


class RequestAnswer(RequestRow, frozen=True):
    """Everything known of an ended request. `loaded_tokens`: of the cached ones, by the level below
    the device that had them; `load_ms`: how long it waited for them before its first step, null
    without a load. `fidelity`: how far from exact copies might be; `read_fidelity`: how far the
    cached tokens may have been. `attention`: the attention window that it ran under, as
    "window=W;sinks=S"; null for all tokens. `entry`: its ledger entry."""

    times: RequestTimes
    cached_tokens: int
    loaded_tokens: dict[str, int]
    fidelity: str | None
    read_fidelity: str | None
    load_ms: float | None
    attention: str | None
    part_tokens: dict[str, int]
    segments: list[RequestSegment] | None
    missed_tokens: int | None
    recomputed_promised_tokens: int | None
    read_by_class: dict[str, int]
    written_by_class: dict[str, int]
    workspace: str | None
    price: RequestPrice | None
    entry: dict[str, Any] | None


class StateBudget(Struct, frozen=True):
    """A budget in its present window."""

    window: Literal["day", "month"]
    key_id: int | None
    hard_usd: str | None
    soft_usd: str | None
    spent_usd: str
    reserved_usd: str
    ends_at_ms: int
    share: float | None


class StateLimit(Struct, frozen=True):
    """A limit of a tenant, and how much of the last minute's is used."""

    limit: int
    used_last_minute: int


class TenantStateAnswer(Struct, frozen=True):
    """What a tenant may do now, and why not."""

    tenant: str
    status: Literal["ok", "limited", "over_budget", "suspended"]
    since_ms: int | None
    reasons: list[str]
    budgets: list[StateBudget]
    limits: dict[str, StateLimit]
    keys: list[KeyAnswer]
    refusals_last_hour: dict[str, int]
    refusals_today: dict[str, int]
    last_request_ms: int | None
