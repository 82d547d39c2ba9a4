"""`GET /admin/v1/findings` and `GET /v1/findings`: why prompts were computed, or paid for, again.

An administrator sees all tenants; a tenant's key shows its own findings, in which no other tenant
is named.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web
from msgspec import Struct

from gateway.errors import Kind, Refusal
from gateway.findings.finding_store import FindingStore
from gateway.findings.report import WINDOW_MS_DEFAULT, FindingsWindow, find
from gateway.http import json_api
from gateway.http.request_context import identity_of
from gateway.http.route_table import Role, Route
from gateway.ledger.query_pool import QueryPool
from tenancy.types import WallClock

QUERY = "tenant since until"


class FindingList(Struct, frozen=True):
    """Findings, the most expensive first, and the window that they are of.

    `has_more`: there are more findings than an answer has. `pace`: of what savings in a month are
    computed, in words; `window.observed_ms` is the length of time behind it.
    """

    findings: list[dict[str, Any]]
    has_more: bool
    window: dict[str, int]
    pace: str


def routes(reports: QueryPool, store: FindingStore, wall: WallClock) -> tuple[Route, ...]:
    """Return the administrators' route."""

    async def findings(request: web.BaseRequest) -> object:
        await store.flush()
        given = request.query
        query = partial(find, window=_window(given, wall()), tenant=given.get("tenant"))
        return await reports.ask(query)

    text = "Say which prompts are paid for twice."
    return (_route("/admin/v1/findings", "admin:read", text, findings),)


def own_routes(reports: QueryPool, store: FindingStore, wall: WallClock) -> tuple[Route, ...]:
    """Return the route of a tenant's own findings."""

    async def findings(request: web.BaseRequest) -> object:
        tenant = identity_of(request).tenant
        given = request.query
        if given.get("tenant", tenant.name) != tenant.name:
            message = "Tenant not found."
            raise Refusal(Kind.NOT_FOUND, "tenant_unknown", message, param="tenant")
        await store.flush()
        query = partial(find, window=_window(given, wall()), tenant=tenant.name, is_own=True)
        return await reports.ask(query, tenant.tenant_id)

    text = "Say which prompts the tenant pays for twice."
    return (_route("/v1/findings", "usage", text, findings),)


def _route(path: str, role: Role, text: str, handler: Callable[..., Awaitable[object]]) -> Route:
    answer = FindingList
    return json_api.route(f"GET {path}", role, text, handler, answer=answer, query=QUERY)


def _window(given: Mapping[str, str], now_ms: int) -> FindingsWindow:
    """Return the window of `since` and `until`: by default the last 7 days. Raises Refusal."""
    window = json_api.window(given, now_ms)
    since_ms = window.since_ms if "since" in given else window.until_ms - WINDOW_MS_DEFAULT
    return FindingsWindow.of(since_ms, window.until_ms)
