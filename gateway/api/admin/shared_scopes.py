"""`/admin/v1/shared-scopes`: caches that several tenants share, for administrators."""

from __future__ import annotations

import asyncio
from typing import Literal

from aiohttp import web
from msgspec import Struct, structs

from gateway.api.admin.audit import ChangeLog
from gateway.http import json_api
from gateway.http.request_context import STATE
from gateway.http.route_table import Route
from gateway.ledger.query_pool import QueryPool
from tenancy.accounts.shared_scopes import (
    ScopeRecord,
    ScopeTerms,
    find_scope,
    list_scopes,
    remove_scope,
    set_scope,
)
from tenancy.storage.interface import Store
from tenancy.types import WallClock


class ScopeBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The tenant that owns a scope, and all its members."""

    owner: str
    members: tuple[str, ...] = ()


class ScopeAnswer(Struct, frozen=True):
    """A cache that tenants share. `created`: RFC 3339."""

    name: str
    scope_id: int
    owner: str
    members: tuple[str, ...]
    declared: bool
    created: str


class ScopeList(Struct, frozen=True):
    """All shared scopes."""

    shared_scopes: list[ScopeAnswer]


class ScopeRemoved(Struct, frozen=True):
    """A removed shared scope."""

    name: str
    removed: Literal[True]


def routes(
    store: Store, reports: QueryPool, changes: ChangeLog, wall: WallClock
) -> tuple[Route, ...]:
    """Return the routes of shared scopes."""

    def note(request: web.BaseRequest, event: str, scope: ScopeRecord) -> None:
        changes.note(request, event, shared_scope=scope.name, scope_id=scope.scope_id)

    async def listed(request: web.BaseRequest) -> ScopeList:
        return ScopeList([scope_body(scope) for scope in await reports.ask(list_scopes)])

    async def show(request: web.BaseRequest) -> ScopeAnswer:
        return scope_body(await find(request))

    async def put(request: web.BaseRequest, body: ScopeBody) -> ScopeAnswer:
        terms = ScopeTerms(name=request[STATE].parameters["name"], **structs.asdict(body))
        scope = await asyncio.to_thread(set_scope, store, wall, terms, changes.actor(request))
        note(request, "scope_set", scope)
        return scope_body(scope)

    async def remove(request: web.BaseRequest) -> ScopeRemoved:
        scope = await find(request)
        await asyncio.to_thread(remove_scope, store, scope.name, changes.actor(request))
        note(request, "scope_removed", scope)
        return ScopeRemoved(scope.name, removed=True)

    async def find(request: web.BaseRequest) -> ScopeRecord:
        return await asyncio.to_thread(find_scope, store, request[STATE].parameters["name"])

    route, many = json_api.route, "/admin/v1/shared-scopes"
    one, text = f"{many}/{{name}}", "Create or change a shared scope."
    return (
        route(f"GET {many}", "admin:read", "List shared scopes.", listed),
        route(f"GET {one}", "admin:read", "Show a shared scope.", show),
        route(f"PUT {one}", "admin:tenants", text, put),
        route(f"DELETE {one}", "admin:tenants", "Remove a shared scope.", remove),
    )


def scope_body(scope: ScopeRecord) -> ScopeAnswer:
    """Return a shared scope as responses show it."""
    return ScopeAnswer(
        scope.name,
        scope.scope_id,
        scope.owner,
        scope.members,
        scope.is_declared,
        json_api.instant(scope.created_ms),
    )
