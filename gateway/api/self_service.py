"""`GET /v1/usage`, `GET` and `DELETE /v1/cache`: what a tenant may know and do about itself.

With its own key, for its own counts alone: what another has does not exist here. Usage is the
tenant's; the cache is that of the key's workspace. Of a cache that others share only its name is
told: what it holds is others' too.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from aiohttp import web

from gateway.api import usage_report
from gateway.background import erasure
from gateway.caching.prefix_index import IndexedPrefix
from gateway.context import Context
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.http.middleware import Route
from gateway.http.request_context import STATE
from tenancy.accounts.erasure_receipts import list_receipts
from tenancy.pricing.budgets import budget_states
from tenancy.types import Identity

LEASES_MAX = 1_000
RECEIPTS_SHOWN = 10


def routes(gateway: Context) -> tuple[Route, ...]:
    """What a tenant asks about itself."""

    async def usage(request: web.BaseRequest) -> web.StreamResponse:
        identity = _identity(request)
        given = json_api.query(request, "tenant", *usage_report.PARAMETERS)
        name, own_id = identity.tenant.name, identity.tenant.tenant_id
        if given.get("tenant", name) != name:
            message = "There is no such tenant, or it is not you."
            raise Refusal(Kind.NOT_FOUND, "tenant_unknown", message, param="tenant")
        found = await usage_report.report(gateway, given, name, own_id=own_id)
        question = partial(budget_states, clock=gateway.wall, tenant_id=own_id)
        budgets = map(usage_report.budget_body, await gateway.reports.ask(question, own_id))
        return json_api.answer({"tenant": name, **found, "budgets": list(budgets)})

    async def show(request: web.BaseRequest) -> web.StreamResponse:
        json_api.query(request)
        return json_api.answer(await _cache(gateway, _identity(request)))

    async def erase(request: web.BaseRequest) -> web.StreamResponse:
        identity = _identity(request)
        if identity.scope is not None:
            message = (
                f"This workspace shares the cache of {identity.scope.name} with others: only the"
                " operator may erase it."
            )
            raise Refusal(Kind.PERMISSION, "shared_scope", message)
        json_api.no_body(request)
        lease_id = json_api.query(request, "lease_id").get("lease_id")
        if lease_id is not None and len(lease_id) > erasure.LEASE_ID_SIGNS_MAX:
            raise Refusal(
                Kind.NOT_FOUND, "lease_unknown", "There is no such lease.", param="lease_id"
            )
        target = erasure.ErasureTarget(
            identity.tenant.tenant_id, identity.key_id, identity.workspace, lease_id
        )
        return json_api.answer(erasure.receipt_body(await erasure.erase(gateway, target)))

    return (
        Route("GET", "/v1/usage", usage, "usage", json_api.SHAPE),
        Route("GET", "/v1/cache", show, "cache", json_api.SHAPE),
        Route("DELETE", "/v1/cache", erase, "cache", json_api.SHAPE),
    )


async def _cache(gateway: Context, identity: Identity) -> dict[str, Any]:
    """What the workspace holds now, what is promised to it, and what that saved its tenant."""
    tenant, policy = identity.tenant, identity.policy
    await gateway.engine.get_stats()
    held = [
        one.stats
        for one in erasure.holdings(gateway.engine.namespaces, tenant.tenant_id)
        if one.workspace == identity.workspace
    ]
    info = gateway.engine.info
    entries = erasure.entries_of(gateway, tenant.tenant_id, identity.workspace, LEASES_MAX + 1)
    window = usage_report.hours(json_api.window({}, gateway.wall()))
    used = await usage_report.own_sums(gateway, window, tenant)
    receipts = await asyncio.to_thread(
        list_receipts, gateway.store, tenant.tenant_id, RECEIPTS_SHOWN
    )
    blocks = sum(one.blocks for one in held)
    return {
        "tenant": tenant.name,
        "workspace": identity.workspace,
        "shared_scope": None if identity.scope is None else identity.scope.name,
        "blocks": blocks,
        "pinned_blocks": sum(one.pinned_blocks for one in held),
        "promised_blocks": sum(one.promised_blocks for one in held),
        "tokens": blocks * (0 if info is None else info.block_size),
        "bytes": blocks * (0 if info is None else info.kv_bytes_per_block),
        "policy": {
            "floor_blocks": policy.floor_blocks,
            "ceiling_blocks": policy.ceiling_blocks,
            "classes": policy.classes,
            "promised_blocks_max": policy.promised_blocks_max,
        },
        "leases": [_lease(gateway, entry) for entry in entries[-LEASES_MAX:]],
        "has_more_leases": len(entries) > LEASES_MAX,
        "usage": {"window": window.shown(), **used},
        "erasures": [erasure.receipt_body(one) for one in receipts],
    }


def _lease(gateway: Context, entry: IndexedPrefix) -> dict[str, Any]:
    """A prefix that is kept: its id is what erasing it asks for."""
    now_s = gateway.clock()
    return {
        "lease_id": entry.key[1].hex(),
        "tokens": entry.tokens,
        "classes": [
            {
                "class": name,
                "expires_in_s": _left(lease.expires_at_s, now_s),
                "promised_for_s": _left(lease.promised_until_s, now_s) or 0.0,
            }
            for name, lease in sorted(entry.leases.items())
            if lease.expires_at_s > now_s
        ],
    }


def _left(until_s: float, now_s: float) -> float | None:
    """Seconds from now; None: without end."""
    return None if until_s == float("inf") else round(max(0.0, until_s - now_s), 3)


def _identity(request: web.BaseRequest) -> Identity:
    identity = request[STATE].identity
    assert identity is not None, "this route asks for a key"
    return identity
