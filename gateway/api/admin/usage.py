"""`/admin/v1/usage`, `/admin/v1/cache`, `/admin/v1/erase`: who used and holds what, and forgetting
it, for administrators."""

from __future__ import annotations

import asyncio
import heapq
from typing import Any

from aiohttp import web
from msgspec import Struct

from gateway.api import usage_report
from gateway.background import erasure
from gateway.caching.namespaces import namespaces_of
from gateway.context import Context
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.http.middleware import Route
from gateway.http.request_context import STATE
from tenancy.accounts.erasure_receipts import RECEIPTS_MAX, digest_namespaces, list_receipts
from tenancy.accounts.keys import check_name
from tenancy.accounts.shared_scopes import find_scope
from tenancy.accounts.tenants import TenantRecord, find_tenant_record

NAMESPACES_MAX = 1_000
"""The largest are told."""


class EraseBody(Struct, frozen=True, forbid_unknown_fields=True):
    """What of a tenant's cache, or of a shared scope: all, a workspace's, or one lease."""

    tenant: str | None = None
    workspace: str | None = None
    lease_id: str | None = None
    shared_scope: str | None = None


def routes(gateway: Context) -> tuple[Route, ...]:
    """What administrators ask about use and contents."""

    async def usage(request: web.BaseRequest) -> web.StreamResponse:
        given = json_api.query(request, "tenant", *usage_report.PARAMETERS)
        name = given.get("tenant")
        if name is not None:
            await _tenant(gateway, name)
        return json_api.answer(await usage_report.report(gateway, given, name))

    async def cache(request: web.BaseRequest) -> web.StreamResponse:
        name = json_api.query(request, "tenant").get("tenant")
        wanted = None if name is None else (await _tenant(gateway, name)).tenant.tenant_id
        return json_api.answer(await _contents(gateway, wanted))

    async def erase(request: web.BaseRequest) -> web.StreamResponse:
        body = await json_api.read(request, gateway.config.server, EraseBody)
        if len(body.lease_id or "") > erasure.LEASE_ID_SIGNS_MAX:
            raise Refusal(
                Kind.NOT_FOUND, "lease_unknown", "There is no such lease.", param="lease_id"
            )
        by = request[STATE].admin_key_id
        assert by is not None, "this route asks for an administrator's key"
        whose, target = await _target(gateway, body, by)
        return json_api.answer(
            {**whose, **erasure.receipt_body(await erasure.erase(gateway, target))}
        )

    async def erasures(request: web.BaseRequest) -> web.StreamResponse:
        given = json_api.query(request, "tenant", "limit")
        if "tenant" not in given:
            raise Refusal(Kind.BAD, "missing_required_parameter", "tenant: whose?", param="tenant")
        found = await _tenant(gateway, given["tenant"])
        limit = json_api.whole(given, "limit", 100, RECEIPTS_MAX)
        receipts = await asyncio.to_thread(
            list_receipts, gateway.store, found.tenant.tenant_id, limit
        )
        return json_api.answer({"erasures": [erasure.receipt_body(one) for one in receipts]})

    return (
        Route("GET", "/admin/v1/usage", usage, "admin", json_api.SHAPE),
        Route("GET", "/admin/v1/cache", cache, "admin", json_api.SHAPE),
        Route("POST", "/admin/v1/erase", erase, "admin", json_api.SHAPE),
        Route("GET", "/admin/v1/erasures", erasures, "admin", json_api.SHAPE),
    )


async def _target(
    gateway: Context, body: EraseBody, by: int
) -> tuple[dict[str, str], erasure.ErasureTarget]:
    """What is meant, and whose it is in words. Raises Refusal, BadName."""
    if body.workspace is not None:
        check_name(body.workspace, "workspace")
    if body.tenant is not None and body.shared_scope is None:
        tenant_id = (await _tenant(gateway, body.tenant)).tenant.tenant_id
        target = erasure.ErasureTarget(tenant_id, by, body.workspace, body.lease_id)
        return {"tenant": body.tenant}, target
    if body.shared_scope is None:
        message = "tenant: whose? Or name a shared_scope."
        raise Refusal(Kind.BAD, "missing_required_parameter", message, param="tenant")
    if body.tenant is not None or body.workspace is not None:
        message = "shared_scope: it stands for itself, without a tenant and a workspace."
        raise Refusal(Kind.BAD, "invalid_value", message, param="shared_scope")
    scope = await asyncio.to_thread(find_scope, gateway.store, body.shared_scope)
    whose = {"tenant": scope.owner, "shared_scope": scope.name}
    return whose, erasure.of_scope(scope, by, body.lease_id)


async def _tenant(gateway: Context, name: str) -> TenantRecord:
    return await asyncio.to_thread(find_tenant_record, gateway.store, name)


def _name(gateway: Context, tenant_id: int) -> str | None:
    found = gateway.registry.tenant(tenant_id)
    return None if found is None else found.tenant.name


async def _contents(gateway: Context, wanted: int | None) -> dict[str, Any]:
    """The pool, and what is held in each namespace; their sum is what is allocated."""
    stats = await gateway.engine.get_stats()
    scopes = await erasure.scope_names(gateway)
    spaces = namespaces_of(gateway.engine.namespaces, wanted)
    most = heapq.nlargest(NAMESPACES_MAX + 1, spaces, key=lambda one: one.blocks)
    held = erasure.holdings(most)
    rows = [
        {
            "tenant": _name(gateway, one.tenant_id),
            **one.shown(scopes),
            "namespace_digest": digest_namespaces([one.stats.namespace]),
            "blocks": one.stats.blocks,
            "pinned_blocks": one.stats.pinned_blocks,
            "promised_blocks": one.stats.promised_blocks,
            "running": one.stats.running,
            "waiting": one.stats.waiting,
        }
        for one in held[:NAMESPACES_MAX]
    ]
    return {
        "pool": {
            "blocks": stats.blocks,
            "free_blocks": stats.free_blocks,
            "cached_blocks": stats.cached_blocks,
            "pinned_blocks": stats.pinned_blocks,
        },
        "namespaces": rows,
        "has_more": len(held) > NAMESPACES_MAX,
    }
