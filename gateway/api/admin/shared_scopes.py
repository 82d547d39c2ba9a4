"""`/admin/v1/shared-scopes`: caches that several tenants share, for administrators."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from msgspec import Struct, structs

from gateway.api.admin.audit import actor_of, note_change
from gateway.context import Context
from gateway.http import json_api
from gateway.http.middleware import Route
from gateway.http.request_context import STATE
from tenancy.accounts.shared_scopes import (
    ScopeRecord,
    ScopeTerms,
    find_scope,
    list_scopes,
    remove_scope,
    set_scope,
)


class ScopeBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The tenant that owns a scope, and all its members."""

    owner: str
    members: tuple[str, ...] = ()


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the routes of shared scopes."""

    def note(request: web.BaseRequest, event: str, scope: ScopeRecord) -> None:
        facts = {"shared_scope": scope.name, "scope_id": scope.scope_id}
        note_change(gateway, request, event, **facts)

    async def listed(request: web.BaseRequest) -> web.StreamResponse:
        json_api.query(request)
        found = await gateway.reports.ask(list_scopes)
        return json_api.answer({"shared_scopes": [scope_body(scope) for scope in found]})

    async def show(request: web.BaseRequest) -> web.StreamResponse:
        return json_api.answer(scope_body(await find(request)))

    async def put(request: web.BaseRequest) -> web.StreamResponse:
        body = await json_api.read(request, gateway.config.server, ScopeBody)
        terms = ScopeTerms(name=request[STATE].parameters["name"], **structs.asdict(body))
        by = actor_of(gateway, request)
        scope = await asyncio.to_thread(set_scope, gateway.store, gateway.wall, terms, by)
        note(request, "scope_set", scope)
        return json_api.answer(scope_body(scope))

    async def remove(request: web.BaseRequest) -> web.StreamResponse:
        scope = await find(request)
        by = actor_of(gateway, request)
        await asyncio.to_thread(remove_scope, gateway.store, scope.name, by)
        note(request, "scope_removed", scope)
        return json_api.answer({"name": scope.name, "removed": True})

    async def find(request: web.BaseRequest) -> ScopeRecord:
        json_api.query(request)
        return await asyncio.to_thread(find_scope, gateway.store, request[STATE].parameters["name"])

    one = "/admin/v1/shared-scopes/{name}"
    return (
        Route("GET", "/admin/v1/shared-scopes", listed, "admin:read", json_api.SHAPE),
        Route("GET", one, show, "admin:read", json_api.SHAPE),
        Route("PUT", one, put, "admin:tenants", json_api.SHAPE),
        Route("DELETE", one, remove, "admin:tenants", json_api.SHAPE),
    )


def scope_body(scope: ScopeRecord) -> dict[str, Any]:
    """Return a shared scope as responses show it."""
    return {
        "name": scope.name,
        "scope_id": scope.scope_id,
        "owner": scope.owner,
        "members": scope.members,
        "declared": scope.is_declared,
        "created": json_api.instant(scope.created_ms),
    }
