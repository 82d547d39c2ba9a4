"""`/admin/v1/requests`: ended requests, refused ones too, one by one.

A request is shown from its ledger entry and from its record, which has its way, its times and the
cause of its miss; either may be missing. No text is kept, so none is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web
from msgspec import Struct
from msgspec.structs import asdict

from gateway.background.history_sampling import HistorySampling
from gateway.errors import Kind, Refusal
from gateway.findings.finding_store import FindingStore
from gateway.http import json_api
from gateway.http.request_context import STATE
from gateway.http.route_table import Route
from gateway.ledger.query_pool import QueryPool
from tenancy.accounts.keys import key_labels
from tenancy.accounts.tenants import find_tenant_record, list_tenants
from tenancy.errors import StoreError
from tenancy.history.request_records import (
    EndedRequest,
    RequestFilter,
    find_request,
    list_requests,
    received_ms,
)
from tenancy.history.request_users import read_users
from tenancy.pricing.charges import FREE_CARD, format_dollars, itemize
from tenancy.pricing.rate_cards import RateCards, load_cards
from tenancy.reuse.miss_causes import MissCause, finding_id, read_causes, waste_cost
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS, UsageEntry, WallClock

PAGE_MAX = 1_000
MICROS_PER_DOLLAR = 10**6
_INSTANTS = ("received_ms", "ended_ms")
Names = Mapping[int, str]
"""Names of tenants by id."""


class RequestRow(Struct, frozen=True):
    """An ended request, as the list shows it. Null: not known any more, or not reached.

    `cause`, `place`: why the prompt was computed again, as the finding `finding_id` says it;
    `wasted_usd`: what its `wasted_tokens` cost. `user`: whom the request names, where usage is
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


def routes(
    reports: QueryPool, sampling: HistorySampling, findings: FindingStore, wall: WallClock
) -> tuple[Route, ...]:
    """Return the routes of ended requests."""

    async def flush() -> None:
        await sampling.flush_requests()
        with suppress(StoreError):  # shown without the latest causes
            await findings.flush()

    async def listed(request: web.BaseRequest) -> object:
        given = request.query
        is_csv = json_api.wants_csv(given)
        limit = json_api.positive_int(given, "limit", 100, PAGE_MAX)
        await flush()
        rows = await reports.ask(partial(_list, given=given, now_ms=wall(), limit=limit))
        before = rows[-1]["request_id"] if len(rows) == limit else None
        if is_csv:
            next_page = json_api.page_url(request, before=before) if before else ""
            return json_api.csv_answer(list(map(_csv_row, rows)), "requests", next_page)
        return {"requests": rows, "next_before": before}

    async def one(request: web.BaseRequest) -> object:
        request_id = request[STATE].parameters["request_id"]
        await flush()
        return await reports.ask(partial(_show, request_id=request_id))

    route, path = json_api.route, "/admin/v1/requests"
    what, text = f"GET {path}/{{request_id}}", "Show an ended request."
    return (
        route(
            *(f"GET {path}", "admin:read", "List ended requests.", listed),
            answer=RequestPage,
            query="tenant code since until limit before format",
        ),
        route(what, "admin:read", text, one, answer=RequestAnswer),
    )


def _list(store: Store, given: Mapping[str, str], now_ms: int, limit: int) -> list[dict[str, Any]]:
    """Return rows of a page, newest first. Raises Refusal, BadName and StoreError."""
    window = json_api.window(given, now_ms)
    since_ms = window.since_ms if "since" in given else max(0, window.until_ms - DAY_MS)
    name, before = given.get("tenant"), given.get("before")
    if before is not None and received_ms(before) is None:
        message = f"Invalid before: {before[:40]!r}; expected the id of a request."
        raise Refusal(Kind.BAD, "invalid_value", message, param="before")
    wanted = RequestFilter(
        since_ms=since_ms,
        until_ms=window.until_ms,
        tenant_id=None if name is None else find_tenant_record(store, name).tenant.tenant_id,
        code=given.get("code"),
        before_id=before,
    )
    return _rows(store, list_requests(store, wanted, limit))


def _show(store: Store, request_id: str) -> dict[str, Any]:
    """Return everything known of one request. Raises Refusal and StoreError."""
    found = find_request(store, request_id)
    if found is None:
        message = "Request not found; ended requests without a ledger entry are kept for a week."
        raise Refusal(Kind.NOT_FOUND, "request_unknown", message, param="request_id")
    entry, record = found.entry, found.record
    (row,) = _rows(store, [found])
    return {
        **row,
        "times": _times(found, row["received_ms"], row["ended_ms"]),
        "cached_tokens": _either(found, "physical_cached_tokens", "cached_tokens"),
        "loaded_tokens": _loaded(found),
        "load_ms": None if record is None or record.load_s is None else _ms(record.load_s),
        "fidelity": None if record is None else record.fidelity,
        "read_fidelity": None if record is None else record.read_fidelity,
        "attention": None if record is None else record.attention or None,
        "segments": _segments(found),
        "part_tokens": {} if record is None else record.part_tokens,
        "missed_tokens": None if record is None else record.missed_tokens,
        "recomputed_promised_tokens": None if entry is None else entry.recomputed_promised_tokens,
        "read_by_class": {} if entry is None else entry.read,
        "written_by_class": {} if entry is None else entry.write,
        "workspace": None if entry is None else entry.workspace,
        "price": None if entry is None else _price(store, entry),
        "entry": None if entry is None else {"entry_id": found.entry_id, **asdict(entry)},
    }


def _rows(store: Store, found: Sequence[EndedRequest]) -> list[dict[str, Any]]:
    """Return requests as the list shows them, with what the database knows beside them."""
    names = {tenant.tenant_id: tenant.name for tenant in list_tenants(store)}
    ids = [one.request_id for one in found]
    causes, users, cards = read_causes(store, ids), read_users(store, ids), load_cards(store)
    labels = key_labels(store, sorted({_either(one, "key_id") for one in found} - {None, 0}))
    rows = []
    for one in found:
        row = _row(one, names)
        row["key_label"], row["user"] = labels.get(row["key_id"]), users.get(one.request_id)
        rows.append(row | _why(one, causes.get(one.request_id), RateCards(cards)))
    return rows


def _why(found: EndedRequest, cause: MissCause | None, cards: RateCards) -> dict[str, Any]:
    """Return why the prompt was computed again, as findings say it, and the finding's id."""
    if cause is None:
        return dict.fromkeys(("cause", "place", "wasted_tokens", "wasted_usd", "finding_id"))
    card = cards.card(found.entry.rate_card_id) if found.entry is not None else FREE_CARD
    wasted = waste_cost(cause.cause, cause.wasted_tokens, cause.facts, card)
    return {
        "cause": cause.cause,
        "place": cause.place or None,
        "wasted_tokens": cause.wasted_tokens,
        "wasted_usd": format_dollars(wasted),
        "finding_id": finding_id(cause.tenant_id, cause.model, cause.cause, cause.place),
    }


def _either(found: EndedRequest, of_entry: str, of_record: str | None = None) -> Any:
    """Return a field of the entry, or else of the record; None if neither has it."""
    if found.entry is not None:
        return getattr(found.entry, of_entry)
    return None if found.record is None else getattr(found.record, of_record or of_entry)


def _row(found: EndedRequest, names: Names) -> dict[str, Any]:
    """Return a request as the list shows it."""
    entry, record = found.entry, found.record
    tenant_id, began_ms = _either(found, "tenant_id"), received_ms(found.request_id)
    if began_ms is None and entry is not None:
        began_ms = entry.started_ms
    ended_ms = None if entry is None else entry.ended_ms
    total_ms: float | None = None if ended_ms is None or began_ms is None else ended_ms - began_ms
    if record is not None and began_ms is not None:
        total_ms = _ms(record.total_s)
        ended_ms = began_ms + round(1_000 * record.total_s)
    first_ms = None if entry is None else entry.ttft_ms
    ending = _either(found, "ending")
    code = "" if ending in ("done", "cancelled") else ending
    return {
        "request_id": found.request_id,
        "received_ms": began_ms,
        "ended_ms": ended_ms,
        "tenant": names.get(tenant_id),
        "key_id": _either(found, "key_id") or None,
        "dialect": _either(found, "dialect"),
        "endpoint": None if record is None else record.endpoint,
        "model": _either(found, "model"),
        "stream": None if record is None else record.is_stream,
        "status": None if record is None else record.status,
        "ending": ending,
        "code": code if record is None else record.code,
        "prompt_tokens": _either(found, "prompt_tokens"),
        "read_tokens": 0 if entry is None else entry.cache_read_tokens,
        "written_tokens": 0 if entry is None else entry.cache_write_tokens,
        "computed_tokens": 0 if entry is None else entry.fresh_tokens,
        "output_tokens": _either(found, "output_tokens"),
        "first_token_ms": first_ms if record is None else _ms(record.first_token_s),
        "total_ms": total_ms,
        "missed": None if record is None else record.missed,
        "cost_usd": None if entry is None else format_dollars(entry.charge_pico),
    }


def _loaded(found: EndedRequest) -> dict[str, int]:
    """Return the cached tokens that were loaded, by level."""
    entry, record = found.entry, found.record
    if record is not None and record.loaded_tokens:
        return record.loaded_tokens
    if entry is None:
        return {}
    counts = {
        "host": entry.host_cached_tokens,
        "disk": entry.disk_cached_tokens,
        "remote": entry.remote_cached_tokens,
    }
    return {name: tokens for name, tokens in counts.items() if tokens}


def _csv_row(row: Mapping[str, Any]) -> dict[str, object]:
    """Return a row with times as people read them."""
    return {
        name.removesuffix("_ms") if name in _INSTANTS else name: json_api.instant(value)
        if name in _INSTANTS and value is not None
        else value
        for name, value in row.items()
    }


def _segments(found: EndedRequest) -> list[dict[str, Any]] | None:
    """Return the parts of the prompt with their ends, and how many of their tokens were cached;
    None if they are not known. Of many parts some in the middle are left out."""
    if found.record is None or not found.record.segments:
        return None
    rows, start, cached = [], 0, found.record.cached_tokens
    for path, end in found.record.segments:
        tokens = end - start
        found_tokens = max(0, min(cached - start, tokens))
        rows.append({"path": path, "end": end, "tokens": tokens, "cached_tokens": found_tokens})
        start = end
    return rows


def _times(
    found: EndedRequest, began_ms: int | None, ended_ms: int | None
) -> dict[str, int | None]:
    """Return the instants that the request reached, in milliseconds since the epoch."""
    record = found.record

    def at(after_s: float | None) -> int | None:
        return None if after_s is None or began_ms is None else began_ms + round(1_000 * after_s)

    return {
        "received_ms": began_ms,
        "submitted_ms": None if record is None else at(record.submitted_s),
        "started_ms": None if record is None else at(record.started_s),
        "first_token_ms": None if record is None else at(record.first_token_s),
        "settled_ms": None if record is None else at(record.settled_s),
        "ended_ms": ended_ms,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1_000 * seconds, 1)


def _price(store: Store, entry: UsageEntry) -> dict[str, Any]:
    """Return the charge of an entry by line, and its price without caching."""
    card = RateCards(load_cards(store)).card(entry.rate_card_id)
    charge = itemize(card, entry)
    return {
        "rate_card_id": entry.rate_card_id,
        "lines": [
            {
                "line": item.component,
                "tokens": item.tokens,
                "usd_per_mtok": f"{item.price / MICROS_PER_DOLLAR:.6f}",
                "usd": format_dollars(item.pico),
            }
            for item in charge.items
        ],
        "cost_usd": format_dollars(entry.charge_pico),
        "uncached_cost_usd": format_dollars(entry.charge_pico + entry.saved_pico),
        "saved_usd": format_dollars(entry.saved_pico),
    }
