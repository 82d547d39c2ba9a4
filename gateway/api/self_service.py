"""`GET /v1/usage`, `GET /v1/state`, `GET` and `DELETE /v1/cache`: a tenant's view of itself.

A key shows only its own tenant's counts; other tenants do not exist here. Usage is that of the
tenant, the cache that of the key's workspace. Of a shared scope only the name is shown: its
contents belong to other tenants too.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from aiohttp import web

from gateway.api import usage_report
from gateway.api.tenant_state import tenant_state
from gateway.background import erasure
from gateway.caching.prefix_index import IndexedPrefix
from gateway.context import Context
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.http.middleware import Route
from gateway.http.request_context import identity_of
from tenancy.accounts.erasure_receipts import list_receipts
from tenancy.pricing.budgets import budget_states
from tenancy.types import Identity

LEASES_MAX = 1_000
"""Most leases in one response; the latest ones."""
RECEIPTS_SHOWN = 10
"""Most erasure receipts in one response."""


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the self-service routes."""
    erasures = WeakValueDictionary[int, asyncio.Lock]()
    """By tenant: an erasure is several durable writes, so a tenant's run one at a time."""

    async def usage(request: web.BaseRequest) -> web.StreamResponse:
        identity = identity_of(request)
        given = json_api.query(request, "tenant", *usage_report.PARAMETERS)
        name, own_id = identity.tenant.name, identity.tenant.tenant_id
        if given.get("tenant", name) != name:
            message = "Tenant not found."
            raise Refusal(Kind.NOT_FOUND, "tenant_unknown", message, param="tenant")
        found = await usage_report.report(gateway, given, name, own_id=own_id)
        query = partial(budget_states, clock=gateway.wall, tenant_ids=(own_id,))
        budgets = map(usage_report.budget_body, await gateway.reports.ask(query, own_id))
        return json_api.answer({"tenant": name, **found, "budgets": list(budgets)})

    async def state(request: web.BaseRequest) -> web.StreamResponse:
        identity = identity_of(request)
        json_api.query(request)
        found = gateway.authenticator.tenant(identity.tenant.tenant_id)
        assert found is not None, "a key that was just checked has a tenant"
        return json_api.answer(await tenant_state(gateway, found, key_id=identity.key_id))

    async def show(request: web.BaseRequest) -> web.StreamResponse:
        json_api.query(request)
        return json_api.answer(await _cache(gateway, identity_of(request)))

    async def erase(request: web.BaseRequest) -> web.StreamResponse:
        identity = identity_of(request)
        if identity.scope is not None:
            message = (
                f"This workspace uses the shared scope {identity.scope.name!r}: only the operator"
                " may erase it."
            )
            raise Refusal(Kind.PERMISSION, "shared_scope", message)
        json_api.refuse_body(request)
        lease_id = json_api.query(request, "lease_id").get("lease_id")
        if lease_id is not None and len(lease_id) > erasure.LEASE_ID_CHARS_MAX:
            raise Refusal(Kind.NOT_FOUND, "lease_unknown", "Lease not found.", param="lease_id")
        target = erasure.ErasureTarget(
            identity.tenant.tenant_id, identity.key_id, identity.workspace, lease_id
        )
        turn = erasures.setdefault(target.tenant_id, asyncio.Lock())
        async with turn:
            return json_api.answer(erasure.receipt_body(await erasure.erase(gateway, target)))

    return (
        Route("GET", "/v1/usage", usage, "usage", json_api.SHAPE),
        Route("GET", "/v1/state", state, "usage", json_api.SHAPE),
        Route("GET", "/v1/cache", show, "cache", json_api.SHAPE),
        Route("DELETE", "/v1/cache", erase, "cache", json_api.SHAPE),
    )


async def _cache(gateway: Context, identity: Identity) -> dict[str, Any]:
    """Return the workspace's cached blocks and leases, and the tenant's usage of the last hours."""
    tenant, policy = identity.tenant, identity.policy
    await gateway.models.refresh()
    namespaces = [
        holding.stats
        for holding in erasure.list_holdings(gateway.models.namespaces(), tenant.tenant_id)
        if holding.workspace == identity.workspace
    ]
    infos = [(one.blocks, gateway.models.info_of(one.namespace)) for one in namespaces]
    entries = erasure.live_entries(gateway, tenant.tenant_id, identity.workspace, LEASES_MAX + 1)
    window = usage_report.whole_hours(json_api.window({}, gateway.wall()))
    totals = await usage_report.own_totals(gateway, window, tenant)
    receipts = await gateway.contents.ask(
        lambda store: list_receipts(store, tenant.tenant_id, RECEIPTS_SHOWN), tenant.tenant_id
    )
    blocks = sum(one.blocks for one in namespaces)
    return {
        "tenant": tenant.name,
        "workspace": identity.workspace,
        "shared_scope": None if identity.scope is None else identity.scope.name,
        "blocks": blocks,
        "pinned_blocks": sum(one.pinned_blocks for one in namespaces),
        "promised_blocks": sum(one.promised_blocks for one in namespaces),
        "tokens": sum(n * info.block_size for n, info in infos if info is not None),
        "bytes": sum(n * info.kv_bytes_per_block for n, info in infos if info is not None),
        "levels": _levels(gateway, tenant.tenant_id),
        "policy": {
            "floor_blocks": policy.floor_blocks,
            "ceiling_blocks": policy.ceiling_blocks,
            "classes": policy.classes,
            "default_class": policy.default_class,
            "fidelity": policy.fidelity,
            "at_rest": policy.at_rest,
            "attention": policy.attention,
            "promised_blocks_max": policy.promised_blocks_max,
        },
        "leases": [_lease(gateway, entry) for entry in entries[-LEASES_MAX:]],
        "has_more_leases": len(entries) > LEASES_MAX,
        "usage": {"window": window.as_json(), **totals},
        "erasures": [erasure.receipt_body(one) for one in receipts],
    }


def _levels(gateway: Context, tenant_id: int) -> dict[str, dict[str, int]]:
    """Return the bytes of all workspaces of the tenant on each level below the device."""
    payer = str(tenant_id).encode()
    return {
        level.name: {"used_bytes": one.used, "promised_bytes": one.promised}
        for level in gateway.models.stats().levels
        for one in level.payers
        if one.payer == payer
    }


def _lease(gateway: Context, entry: IndexedPrefix) -> dict[str, Any]:
    """Return a retained prefix; `DELETE /v1/cache?lease_id=` takes its id."""
    now_s = gateway.clock()
    return {
        "lease_id": entry.key[1].hex(),
        "tokens": entry.tokens,
        "classes": [
            {
                "class": name,
                "expires_in_s": _seconds_left(lease.expires_at_s, now_s),
                "promised_for_s": _seconds_left(lease.promised_until_s, now_s) or 0.0,
            }
            for name, lease in sorted(entry.leases.items())
            if lease.expires_at_s > now_s
        ],
    }


def _seconds_left(until_s: float, now_s: float) -> float | None:
    """Return the seconds from now to `until_s`; None, if it never comes."""
    return None if until_s == float("inf") else round(max(0.0, until_s - now_s), 3)
