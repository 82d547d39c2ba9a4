"""`GET /admin/v1/findings` and `GET /v1/findings`: why prompts were computed, or paid for, again.

An administrator sees all tenants; a tenant's key shows its own findings, in which no other tenant
is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from aiohttp import web

from gateway.context import Context
from gateway.errors import Kind, Refusal
from gateway.findings.finding_store import FindingStore
from gateway.findings.report import WINDOW_MS_DEFAULT, FindingsWindow, find
from gateway.http import json_api
from gateway.http.middleware import Route
from gateway.http.request_context import identity_of

PARAMETERS = ("tenant", "since", "until")


def routes(gateway: Context, store: FindingStore) -> tuple[Route, ...]:
    """Return the administrators' route."""

    async def findings(request: web.BaseRequest) -> web.StreamResponse:
        given = json_api.query(request, *PARAMETERS)
        await store.flush()
        query = partial(find, window=_window(gateway, given), tenant=given.get("tenant"))
        return json_api.answer(await gateway.reports.ask(query))

    return (Route("GET", "/admin/v1/findings", findings, "admin:read", json_api.SHAPE),)


def own_routes(gateway: Context, store: FindingStore) -> tuple[Route, ...]:
    """Return the route of a tenant's own findings."""

    async def findings(request: web.BaseRequest) -> web.StreamResponse:
        tenant = identity_of(request).tenant
        given = json_api.query(request, *PARAMETERS)
        name = tenant.name
        if given.get("tenant", name) != name:
            message = "Tenant not found."
            raise Refusal(Kind.NOT_FOUND, "tenant_unknown", message, param="tenant")
        await store.flush()
        query = partial(find, window=_window(gateway, given), tenant=name, is_own=True)
        return json_api.answer(await gateway.reports.ask(query, tenant.tenant_id))

    return (Route("GET", "/v1/findings", findings, "usage", json_api.SHAPE),)


def _window(gateway: Context, given: Mapping[str, str]) -> FindingsWindow:
    """Return the window of `since` and `until`: by default the last 7 days. Raises Refusal."""
    window = json_api.window(given, gateway.wall())
    since_ms = window.since_ms if "since" in given else window.until_ms - WINDOW_MS_DEFAULT
    return FindingsWindow.of(since_ms, window.until_ms)
