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
from msgspec import Struct

from engine.api import Clock
from gateway.api import usage_report
from gateway.api.tenant_state import TenantStateAnswer, TenantStates
from gateway.api.usage_report import UsageAnswer, UsageReports
from gateway.background import erasure
from gateway.background.erasure import CacheErasure, ReceiptAnswer
from gateway.caching.prefix_index import IndexedPrefix
from gateway.engines.served_models import ServedModels
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.http.request_context import identity_of
from gateway.http.route_table import Route
from gateway.ledger.query_pool import QueryPool
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.erasure_receipts import list_receipts
from tenancy.pricing.budgets import budget_states
from tenancy.types import WallClock

LEASES_MAX = 1_000
"""Most leases in one response; the latest ones."""
POLICY_SHOWN = (
    *("floor_blocks", "ceiling_blocks", "classes", "default_class", "fidelity", "at_rest"),
    *("attention", "promised_blocks_max"),
)
"""What a tenant sees of its policy."""
RECEIPTS_SHOWN = 10
"""Most erasure receipts in one response."""


class CacheAnswer(Struct, frozen=True):
    """A workspace's blocks, tokens, bytes and leases, and the tenant's usage and bytes by level.

    `levels`: `used_bytes` and `promised_bytes` of all the tenant's workspaces, by level below the
    device; empty where there is none.
    """

    tenant: str
    workspace: str
    shared_scope: str | None
    blocks: int
    pinned_blocks: int
    promised_blocks: int
    tokens: int
    bytes: int
    levels: dict[str, dict[str, int]]
    policy: dict[str, Any]
    leases: list[dict[str, Any]]
    has_more_leases: bool
    usage: dict[str, Any]
    erasures: list[ReceiptAnswer]


class SelfServiceHandlers:
    """One handler per route of a tenant's own."""

    def __init__(
        self,
        reports: QueryPool,
        contents: QueryPool,
        models: ServedModels,
        authenticator: KeyAuthenticator,
        clock: Clock,
        wall: WallClock,
        usage: UsageReports,
        states: TenantStates,
        erasure: CacheErasure,
    ) -> None:
        self._reports, self._contents, self._models = reports, contents, models
        self._authenticator, self._clock, self._wall = authenticator, clock, wall
        self._usage, self._states, self._erasure = usage, states, erasure
        self._erasures = WeakValueDictionary[int, asyncio.Lock]()
        """By tenant: an erasure is several durable writes, so a tenant's run one at a time."""

    def routes(self) -> tuple[Route, ...]:
        """Return the routes."""
        route, report = json_api.route, f"tenant {usage_report.PARAMETERS}"
        state, cached = TenantStateAnswer, CacheAnswer
        return (
            route(
                *("GET /v1/usage", "usage", "Report the tenant's usage.", self.usage),
                answer=UsageAnswer,
                query=report,
            ),
            route("GET /v1/state", "usage", "Show the tenant's state.", self.state, answer=state),
            route(
                "GET /v1/cache", "cache", "Show the workspace's cache.", self.show, answer=cached
            ),
            route(
                *("DELETE /v1/cache", "cache", "Erase the workspace's cache.", self.erase),
                answer=ReceiptAnswer,
                query="lease_id",
            ),
        )

    async def usage(self, request: web.BaseRequest) -> object:
        """Report the tenant's usage and budgets."""
        own, given = identity_of(request).tenant, request.query
        name, own_id = own.name, own.tenant_id
        if given.get("tenant", name) != name:
            message = "Tenant not found."
            raise Refusal(Kind.NOT_FOUND, "tenant_unknown", message, param="tenant")
        found = await self._usage.report(given, name, own_id=own_id)
        query = partial(budget_states, clock=self._wall, tenant_ids=(own_id,))
        budgets = map(usage_report.budget_body, await self._reports.ask(query, own_id))
        return {"tenant": name, **found, "budgets": list(budgets)}

    async def state(self, request: web.BaseRequest) -> object:
        """Show the tenant's state and the asking key."""
        identity = identity_of(request)
        found = self._authenticator.tenant(identity.tenant.tenant_id)
        assert found is not None, "a key that was just checked has a tenant"
        return await self._states.state(found, key_id=identity.key_id)

    async def erase(self, request: web.BaseRequest) -> object:
        """Erase the workspace's cache, or a lease of it."""
        identity = identity_of(request)
        if identity.scope is not None:
            message = (
                f"This workspace uses the shared scope {identity.scope.name!r}: only the operator"
                " may erase it."
            )
            raise Refusal(Kind.PERMISSION, "shared_scope", message)
        json_api.refuse_body(request)
        lease_id = request.query.get("lease_id")
        if lease_id is not None and len(lease_id) > erasure.LEASE_ID_CHARS_MAX:
            raise Refusal(Kind.NOT_FOUND, "lease_unknown", "Lease not found.", param="lease_id")
        target = erasure.ErasureTarget(
            identity.tenant.tenant_id, identity.key_id, identity.workspace, lease_id
        )
        async with self._erasures.setdefault(target.tenant_id, asyncio.Lock()):
            return erasure.receipt_body(await self._erasure.erase(target))

    async def show(self, request: web.BaseRequest) -> object:
        """Return the workspace's cached blocks and leases, and the tenant's usage of the last
        hours."""
        identity = identity_of(request)
        tenant, policy = identity.tenant, identity.policy
        await self._models.refresh()
        namespaces = [
            holding.stats
            for holding in erasure.list_holdings(self._models.namespaces(), tenant.tenant_id)
            if holding.workspace == identity.workspace
        ]
        infos = [(one.blocks, self._models.info_of(one.namespace)) for one in namespaces]
        entries = self._erasure.live_entries(tenant.tenant_id, identity.workspace, LEASES_MAX + 1)
        window = usage_report.whole_hours(json_api.window({}, self._wall()))
        totals = await self._usage.own_totals(window, tenant)
        receipts = await self._contents.ask(
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
            "levels": self._levels(tenant.tenant_id),
            "policy": {name: getattr(policy, name) for name in POLICY_SHOWN},
            "leases": [self._lease(entry) for entry in entries[-LEASES_MAX:]],
            "has_more_leases": len(entries) > LEASES_MAX,
            "usage": {"window": window.as_json(), **totals},
            "erasures": [erasure.receipt_body(one) for one in receipts],
        }

    def _levels(self, tenant_id: int) -> dict[str, dict[str, int]]:
        """Return the bytes of all workspaces of the tenant on each level below the device."""
        payer = str(tenant_id).encode()
        return {
            level.name: {"used_bytes": one.used, "promised_bytes": one.promised}
            for level in self._models.stats().levels
            for one in level.payers
            if one.payer == payer
        }

    def _lease(self, entry: IndexedPrefix) -> dict[str, Any]:
        """Return a retained prefix; `DELETE /v1/cache?lease_id=` takes its id."""
        now_s = self._clock()
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
