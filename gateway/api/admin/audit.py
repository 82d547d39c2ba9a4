"""`/admin/v1/audit`: the log of changes that administrators, commands and the file made."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from msgspec import Struct

from gateway.context import Log
from gateway.http import json_api
from gateway.http.request_context import STATE
from gateway.http.route_table import Route
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.tenants import find_tenant_record, list_tenants
from tenancy.storage.audit_log import PAGE_MAX, Actor, AuditFilter, change_row, list_changes
from tenancy.storage.interface import Store
from tenancy.types import WallClock


class AuditRow(Struct, frozen=True):
    """A change. `before`, `after`: the values that differ. `at`: RFC 3339."""

    audit_id: int
    at: str
    actor: str
    actor_id: str
    address: str | None
    action: str
    tenant: str | None
    tenant_id: int | None
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class AuditPage(Struct, frozen=True):
    """Changes, newest first. `next_before`: the `before` of the next page; null at the end."""

    changes: list[AuditRow]
    next_before: int | None


class ChangeLog:
    """Notes who changes what: for the audit log, and for the server's own."""

    def __init__(self, authenticator: KeyAuthenticator, wall: WallClock, log: Log) -> None:
        self._authenticator, self._wall, self._log = authenticator, wall, log

    def actor(self, request: web.BaseRequest) -> Actor:
        """Return the administrator of a request, for the record of its change."""
        state, address = request[STATE], request.remote or ""
        if state.admin_user:
            return Actor("trusted_header", state.admin_user, self._wall(), address)
        assert state.admin_key_id is not None, "this route requires an administrator"
        return Actor("admin_key", str(state.admin_key_id), self._wall(), address)

    def note(self, request: web.BaseRequest, event: str, **facts: object) -> None:
        """Log a change with its administrator, and apply it to the next request."""
        user, key_id = request[STATE].admin_user, request[STATE].admin_key_id
        self._authenticator.refresh_now()
        self._log(event, {**({"by_user": user} if user else {"by_key_id": key_id}), **facts})


def routes(store: Store, wall: WallClock) -> tuple[Route, ...]:
    """Return the route of the audit log."""

    async def audit(request: web.BaseRequest) -> object:
        given = request.query
        is_csv = json_api.wants_csv(given)
        limit = json_api.positive_int(given, "limit", 100, PAGE_MAX)
        before = json_api.positive_int(given, "before", 2**53, 2**53)
        name, window = given.get("tenant"), json_api.window(given, wall())
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

        rows, next_before = await asyncio.to_thread(ask, store)
        if is_csv:
            next_page = json_api.page_url(request, before=next_before) if next_before else ""
            return json_api.csv_answer(rows, "audit", next_page)
        return {"changes": rows, "next_before": next_before}

    names = "since until tenant actor actor_id action before limit format"
    what, text = "GET /admin/v1/audit", "List changes."
    return (json_api.route(what, "admin:read", text, audit, answer=AuditPage, query=names),)
