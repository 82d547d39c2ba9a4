"""`/admin/v1/analytics` and `/admin/v1/tree`: the data behind the dashboard, as JSON."""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from functools import partial
from typing import Any

from aiohttp import web
from msgspec.structs import asdict

from gateway.analytics.aggregates import ModelTerms
from gateway.background.erasure import CacheErasure, list_holdings
from gateway.background.history_sampling import HistorySampling
from gateway.caching.namespaces import namespaces_of, owner_of, parts_of
from gateway.context import Context
from gateway.engines.served_models import ServedModel
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.http.request_context import STATE
from gateway.http.route_table import Route
from tenancy.accounts import tenants
from tenancy.history.samples import ALL_TENANTS
from tenancy.pricing.rate_cards import RateCards, load_cards
from tenancy.reuse.miss_causes import waste_cost
from tenancy.storage.interface import Store
from tenancy.types import Tenant

BRANCHES_MAX = 400
"""Most branches of one prefix tree in a response."""
TREES_MAX = 50
"""Most prefix trees in a response; the largest ones."""
EVICTION_PAIRS_MAX = 50
"""Most (owner, evictor) pairs in a response; those with most blocks."""
ROWS_MAX = 1_000
"""Most rows of a table by tenant: the largest, or the last active ones."""


class AnalyticsHandlers:
    """One handler per route of analytics."""

    def __init__(self, gateway: Context, sampling: HistorySampling, erasure: CacheErasure) -> None:
        self._gateway, self._sampling, self._erasure = gateway, sampling, erasure

    def routes(self) -> tuple[Route, ...]:
        """Return the read-only routes."""
        route, path = json_api.route, "/admin/v1/analytics"
        text = "Show the shape of a tenant's prefix trees."
        return (
            route(f"GET {path}", "admin:read", "Show analytics since the start.", self.overview),
            route(
                *(f"GET {path}/{{name}}", "admin:read", "Show a tenant's analytics.", self.tenant)
            ),
            route("GET /admin/v1/tree/{name}", "admin:read", text, self.tree),
        )

    async def overview(self, request: web.BaseRequest) -> object:
        """Return all analytics, and the state of the engine."""
        gateway = self._gateway
        gateway.usage.update_churn()
        await self._sampling.count_ended()
        gateway.usage.update_tenants()
        models = {
            "models": [
                {
                    "name": one.name,
                    "restarts": one.replicas.restarts,
                    "promised_blocks": gateway.usage.tenants.total("promised_blocks", one.name),
                    "promised_below": gateway.usage.tenants.total("promised_below", one.name),
                    **self._engine(one),
                    "ready": one.replicas.ready(),
                    "state": one.state(),
                    "tenants": None if one.tenants is None else sorted(one.tenants),
                }
                for one in gateway.models
            ]
        }
        seen = await gateway.analytics.overview()
        return {
            **seen,
            "tenants": [
                {"tenant": self._name(one.pop("tenant_id")), **one} for one in seen["tenants"]
            ],
            "engine": {**self._engine(gateway.models.default), "ready": gateway.is_ready()},
            **(models if gateway.models.are_several else {}),
            "failed_models": gateway.models.failures(),
            "holdings": [
                {
                    "tenant": self._name(tenant_id),
                    **held,
                    **self._quota(tenant_id),
                    **self._held_by_model(tenant_id),
                }
                for tenant_id, held in gateway.usage.tenants.largest(ROWS_MAX)
            ],
            "refused_last_hour": self._refused_last_hour(),
            "taken": await self._evictions(),
            "leases": self._leases(),
            "churn": {
                **gateway.usage.churn.all.details(),
                "tenants": [
                    {"tenant": self._name(tenant_id), **history.totals()}
                    for tenant_id, history in gateway.usage.churn.latest(ROWS_MAX)
                ],
            },
            "drafts": gateway.metrics.drafts.rows(),
            "restarts": gateway.models.restarts(),
            "at_ms": gateway.wall(),
        }

    def _engine(self, model: ServedModel) -> dict[str, Any]:
        """Return the state of a model's engine."""
        info, stats = model.replicas.info, model.replicas.stats
        engine: dict[str, Any] = {
            name: getattr(stats, name) for name in stats.__struct_fields__ if name != "changed"
        }
        if replicas := [one.describe() for one in model.replicas if one.name]:
            engine |= {"replicas": replicas, "moved_requests": model.replicas.moved}
        if info is not None:
            engine |= {
                "model": info.model,
                "device": info.device,
                "kv_format": info.kv_format,
                "block_size": info.block_size,
                "context_tokens": info.context_tokens,
                "kv_bytes_per_block": info.kv_bytes_per_block,
                "floor_blocks_asked": int(
                    self._gateway.authenticator.floor_blocks() * model.quota_scale
                ),
                "floor_blocks_max": info.floor_blocks_max,
                **({"draft_model": info.draft_model} if info.draft_model else {}),
            }
        return engine

    def _held_by_model(self, tenant_id: int) -> dict[str, Any]:
        """Return the blocks that a tenant holds of each model, if several are served."""
        if not self._gateway.models.are_several:
            return {}
        held = self._gateway.usage.tenants.by_model(tenant_id)
        return {"blocks_by_model": {name: row["blocks"] for name, row in held.items()}}

    async def tenant(self, request: web.BaseRequest) -> object:
        """Return one tenant's analytics. Raises BadName for a name that no tenant has."""
        gateway, name = self._gateway, request[STATE].parameters["name"]
        tenant, cards = await gateway.reports.ask(partial(_find_tenant_and_cards, name=name))
        tenant_id, wall_ms = tenant.tenant_id, gateway.wall()
        pools = {model.name: model.replicas.info for model in gateway.models}
        terms = {
            model: ModelTerms(
                cards.in_force(model, tenant.tier, wall_ms), 0 if info is None else info.blocks
            )
            for model, info in pools.items()
        }
        seen = await gateway.analytics.tenant(tenant_id, terms)
        if seen is None:
            message = "No requests of this tenant since the start."
            raise Refusal(Kind.NOT_FOUND, "not_seen", message)
        gateway.usage.update_churn()
        leases = self._leases(tenant_id)
        churn = gateway.usage.churn.tenant(tenant_id).details()
        for advice in seen["advice"]:
            if (info := pools[advice["model"]]) is not None:
                for one in advice["size_advice"]:
                    one["tokens"] = one["blocks"] * info.block_size
                    one["bytes"] = one["blocks"] * info.kv_bytes_per_block
        return {"tenant": name, **seen, "leases": leases, "churn": churn}

    async def tree(self, request: web.BaseRequest) -> object:
        """Return the shape of a tenant's prefix trees, one per namespace, largest first.

        The response has counts, never tokens or text.
        """
        gateway, name = self._gateway, request[STATE].parameters["name"]
        found = await asyncio.to_thread(tenants.find_tenant, gateway.store, name)
        scopes = await self._erasure.scope_names()
        spaces = namespaces_of(gateway.models.namespaces(), found.tenant_id)
        largest = heapq.nlargest(TREES_MAX + 1, spaces, key=lambda one: one.blocks)
        shown = []
        for one in list_holdings(largest[:TREES_MAX]):
            model = gateway.models.of_namespace(one.stats.namespace) or gateway.models.default
            surveyed = await model.replicas.survey(one.stats.namespace, BRANCHES_MAX)
            shown.append(
                {
                    **one.shown(scopes),
                    **({"model": model.name} if gateway.models.are_several else {}),
                    "partition": parts_of(one.stats.namespace)[4:5] not in ((), ("",)),
                    "blocks": one.stats.blocks,
                    "branches": [asdict(branch) for branch in surveyed.branches],
                }
            )
        return {"tenant": name, "namespaces": shown, "has_more": len(largest) > TREES_MAX}

    def _refused_last_hour(self) -> dict[str, Any]:
        """Return the refused requests of the last hour: all, by tenant (the largest) and by
        code."""
        by_tenant = self._gateway.ended_requests.refusals_last_hour()
        by_code = by_tenant.pop(ALL_TENANTS, {})
        sums = {
            self._name(tenant_id): sum(found.values()) for tenant_id, found in by_tenant.items()
        }
        return {
            "total": sum(by_code.values()),
            "tenants": dict(heapq.nlargest(ROWS_MAX, sums.items(), key=lambda one: one[1])),
            "codes": by_code,
        }

    def _name(self, tenant_id: int | None) -> str:
        """Return the tenant's name, or its id if it was deleted."""
        if tenant_id is None:
            return "unknown"
        found = self._gateway.authenticator.tenant(tenant_id)
        return str(tenant_id) if found is None else found.tenant.name

    def _quota(self, tenant_id: int) -> dict[str, int | None]:
        """Return the limits of a tenant's blocks; None for each, if the tenant was deleted."""
        found = self._gateway.authenticator.tenant(tenant_id)
        names = ("floor_blocks", "ceiling_blocks", "promised_blocks_max")
        return {name: None if found is None else getattr(found.policy, name) for name in names}

    def _model_of(self, tenant_id: int | None) -> ServedModel:
        """Return the model that gives prices and pool for a tenant's estimates: of those that are
        open to it, the one that holds most of its blocks, else the first."""
        gateway = self._gateway
        held = {} if tenant_id is None else gateway.usage.tenants.by_model(tenant_id)
        name = self._name(tenant_id)

        def rank(model: ServedModel) -> tuple[bool, int]:
            row = held.get(model.name, {"blocks": 0})
            return model.is_open_to(name), row["blocks"]

        return max(gateway.models, key=rank)

    def _leases(self, tenant_id: int | None = None) -> list[dict[str, Any]]:
        """Return the outcomes of promises by tenant and class.

        Without a tenant: the rows with most promises given, at most `ROWS_MAX`.
        """
        contracts = self._gateway.contracts
        counts = contracts.promises.counts(self._gateway.clock())
        if tenant_id is not None:
            counts = {key: row for key, row in counts.items() if key[0] == tenant_id}
        largest = heapq.nlargest(ROWS_MAX, counts.items(), key=lambda one: one[1]["given"])
        return [
            {"tenant": self._name(tenant), "class": name, **row}
            for (tenant, name), row in sorted(largest, key=lambda one: one[0])
        ]

    async def _evictions(self) -> list[dict[str, Any]]:
        """Return evicted blocks by owner and evictor, most first, and the cost of recomputing them.

        An owner's tokens recomputed after evictions are divided among evictors by their evicted
        blocks.
        """
        gateway = self._gateway
        sums: dict[tuple[int | None, int | None], int] = defaultdict(int)
        lost: dict[int | None, int] = defaultdict(int)
        for (space, evictor_space), blocks in gateway.models.evictions_by_taker().items():
            owner = owner_of(space)
            sums[owner, owner_of(evictor_space)] += blocks
            lost[owner] += blocks
        cards = RateCards(await gateway.reports.ask(load_cards))
        rows = []
        for owner, evictor in heapq.nlargest(EVICTION_PAIRS_MAX, sums, key=lambda pair: sums[pair]):
            blocks, missed = sums[owner, evictor], 0
            if owner is not None:
                missed = await gateway.analytics.missed_tokens(owner, "evicted_pressure")
            tokens = missed * blocks // lost[owner]
            found = None if owner is None else gateway.authenticator.tenant(owner)
            tier = "" if found is None else found.tenant.tier
            card = cards.in_force(self._model_of(owner).name, tier, gateway.wall())
            rows.append(
                {
                    "owner": self._name(owner),
                    "taker": self._name(evictor),
                    "blocks": blocks,
                    "recomputed_tokens": tokens,
                    "cost_pico": waste_cost("evicted", tokens, {}, card),
                }
            )
        return rows


def _find_tenant_and_cards(store: Store, name: str) -> tuple[Tenant, RateCards]:
    """Return a tenant and all rate cards. Raises BadName."""
    return tenants.find_tenant(store, name), RateCards(load_cards(store))
