"""`/admin/v1/audit`: the log of changes that administrators, commands and the file made."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway.context import Context
from gateway.http import json_api
from gateway.http.middleware import Route
from gateway.http.request_context import STATE
from tenancy.accounts.tenants import find_tenant_record, list_tenants
from tenancy.storage.audit_log import PAGE_MAX, Actor, AuditFilter, change_row, list_changes
from tenancy.storage.interface import Store


def actor_of(gateway: Context, request: web.BaseRequest) -> Actor:
    """Return the administrator of a request, for the record of its change."""
    state, address = request[STATE], request.remote or ""
    if state.admin_user:
        return Actor("trusted_header", state.admin_user, gateway.wall(), address)
    assert state.admin_key_id is not None, "this route requires an administrator"
    return Actor("admin_key", str(state.admin_key_id), gateway.wall(), address)


def note_change(gateway: Context, request: web.BaseRequest, event: str, **facts: object) -> None:
    """Log a change with its administrator, and apply it to the next request."""
    state = request[STATE]
    by = {"by_user": state.admin_user} if state.admin_user else {"by_key_id": state.admin_key_id}
    gateway.authenticator.refresh_now()
    gateway.log(event, {**by, **facts})


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the route of the audit log."""

    async def audit(request: web.BaseRequest) -> web.StreamResponse:
        names = ("since", "until", "tenant", "actor", "actor_id", "action", "before", "limit")
        given = json_api.query(request, *names, "format")
        is_csv = json_api.wants_csv(given)
        limit = json_api.positive_int(given, "limit", 100, PAGE_MAX)
        before = json_api.positive_int(given, "before", 2**53, 2**53)
        name, window = given.get("tenant"), json_api.window(given, gateway.wall())
        is_bounded = "since" in given or "until" in given

        def ask(store: Store) -> tuple[list[dict[str, object]], int | None]:
            tenant = None if name is None else find_tenant_record(store, name).tenant
            wanted = AuditFilter(
                since_ms=window.since_ms if is_bounded else None,
                until_ms=window.until_ms if is_bounded else None,
                tenant_id=None if tenant is None else tenant.tenant_id,
                actor=given.get("actor"),
                actor_id=given.get("actor_id"),
                action=given.get("action"),
            )
            found = list_changes(store, wanted, before_id=before, limit=limit)
            tenants = {one.tenant_id: one.name for one in list_tenants(store)}
            rows = [change_row(one, tenants) for one in found]
            return rows, found[-1].audit_id if len(found) == limit else None

        rows, next_before = await asyncio.to_thread(ask, gateway.store)
        if is_csv:
            next_page = json_api.page_url(request, before=next_before) if next_before else ""
            return json_api.csv_answer(rows, "audit", next_page)
        return json_api.answer({"changes": rows, "next_before": next_before})

    return (Route("GET", "/admin/v1/audit", audit, "admin:read", json_api.SHAPE),)
