"""`/admin/v1/usage`, `/cache`, `/erase` and `/erasures`: usage, cache contents, erasure.

For administrators; `gateway.api.self_service` has the same for a tenant itself.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import Any

from aiohttp import web
from msgspec import Struct

from gateway.api import usage_report
from gateway.api.admin.audit import actor_of
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
"""Most namespaces in one response; the largest ones."""


class EraseBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The cache to erase: a tenant's or one workspace's or lease of it, or a shared scope's."""

    tenant: str | None = None
    workspace: str | None = None
    lease_id: str | None = None
    shared_scope: str | None = None


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the routes of usage, cache contents and erasures."""

    async def usage(request: web.BaseRequest) -> web.StreamResponse:
        given = json_api.query(request, "tenant", "format", *usage_report.PARAMETERS)
        name, is_csv = given.get("tenant"), json_api.wants_csv(given)
        if name is not None:
            await _tenant(gateway, name)
        body = await usage_report.report(gateway, given, name)
        if is_csv:
            return json_api.csv_answer(body["rows"] or [body["totals"]], "usage")
        return json_api.answer(body)

    async def cache(request: web.BaseRequest) -> web.StreamResponse:
        name = json_api.query(request, "tenant").get("tenant")
        wanted = None if name is None else (await _tenant(gateway, name)).tenant.tenant_id
        return json_api.answer(await _contents(gateway, wanted))

    async def erase(request: web.BaseRequest) -> web.StreamResponse:
        body = await json_api.read(request, gateway.config.server, EraseBody)
        if len(body.lease_id or "") > erasure.LEASE_ID_CHARS_MAX:
            raise Refusal(Kind.NOT_FOUND, "lease_unknown", "Lease not found.", param="lease_id")
        owner, target = await _target(gateway, body, request[STATE].admin_key_id or 0)
        actor = actor_of(gateway, request)
        return json_api.answer(
            {**owner, **erasure.receipt_body(await erasure.erase(gateway, target, actor))}
        )

    async def erasures(request: web.BaseRequest) -> web.StreamResponse:
        given = json_api.query(request, "tenant", "limit")
        if "tenant" not in given:
            raise Refusal(
                Kind.BAD, "missing_required_parameter", "tenant is required.", param="tenant"
            )
        found = await _tenant(gateway, given["tenant"])
        limit = json_api.positive_int(given, "limit", 100, RECEIPTS_MAX)
        receipts = await asyncio.to_thread(
            list_receipts, gateway.store, found.tenant.tenant_id, limit
        )
        return json_api.answer({"erasures": [erasure.receipt_body(one) for one in receipts]})

    return (
        Route("GET", "/admin/v1/usage", usage, "admin:read", json_api.SHAPE),
        Route("GET", "/admin/v1/cache", cache, "admin:read", json_api.SHAPE),
        Route("POST", "/admin/v1/erase", erase, "admin:erase", json_api.SHAPE),
        Route("GET", "/admin/v1/erasures", erasures, "admin:read", json_api.SHAPE),
    )


async def _target(
    gateway: Context, body: EraseBody, by: int
) -> tuple[dict[str, str], erasure.ErasureTarget]:
    """Return the owner for the response, and the target. Raises Refusal and BadName."""
    if body.workspace is not None:
        check_name(body.workspace, "workspace")
    if body.tenant is not None and body.shared_scope is None:
        tenant_id = (await _tenant(gateway, body.tenant)).tenant.tenant_id
        target = erasure.ErasureTarget(tenant_id, by, body.workspace, body.lease_id)
        return {"tenant": body.tenant}, target
    if body.shared_scope is None:
        message = "tenant or shared_scope is required."
        raise Refusal(Kind.BAD, "missing_required_parameter", message, param="tenant")
    if body.tenant is not None or body.workspace is not None:
        message = "shared_scope is not allowed with tenant or workspace; omit them."
        raise Refusal(Kind.BAD, "invalid_value", message, param="shared_scope")
    scope = await asyncio.to_thread(find_scope, gateway.store, body.shared_scope)
    owner = {"tenant": scope.owner, "shared_scope": scope.name}
    return owner, erasure.scope_target(scope, by, body.lease_id)


async def _tenant(gateway: Context, name: str) -> TenantRecord:
    return await asyncio.to_thread(find_tenant_record, gateway.store, name)


def _name(gateway: Context, tenant_id: int) -> str | None:
    found = gateway.authenticator.tenant(tenant_id)
    return None if found is None else found.tenant.name


def _model(gateway: Context, one: erasure.Holding) -> dict[str, str]:
    """Return the model of a holding, if several are served."""
    model = gateway.models.of_namespace(one.stats.namespace)
    return {"model": model.name} if model is not None and gateway.models.are_several else {}


async def _contents(gateway: Context, wanted: int | None) -> dict[str, Any]:
    """Return the pool and the blocks by namespace; their sum is the number of allocated blocks."""
    stats = await gateway.models.refresh()
    scopes = await erasure.scope_names(gateway)
    spaces = namespaces_of(gateway.models.namespaces(), wanted)
    largest = heapq.nlargest(NAMESPACES_MAX + 1, spaces, key=lambda one: one.blocks)
    held = erasure.list_holdings(largest)
    rows = [
        {
            "tenant": _name(gateway, one.tenant_id),
            **one.shown(scopes),
            **_model(gateway, one),
            "namespace_digest": digest_namespaces([one.stats.namespace]),
            "blocks": one.stats.blocks,
            "pinned_blocks": one.stats.pinned_blocks,
            "promised_blocks": one.stats.promised_blocks,
            "promised_below": one.stats.promised_below,
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
