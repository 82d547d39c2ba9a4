"""`/admin/v1/analytics` and `/admin/v1/tree`: what the dashboard shows, as data."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from aiohttp import web
from msgspec.structs import asdict

from gateway import plain
from gateway.context import Context
from gateway.erasure import holdings, parts_of
from gateway.errors import Kind, Refusal
from gateway.middleware import Handler, Route
from tenancy import registry
from tenancy.pricing import RateCard
from tenancy.rate_cards import CardBook, load_cards
from tenancy.store import Store

BRANCHES_MAX = 400


def routes(gateway: Context) -> tuple[Route, ...]:
    """Everything that is only looked at."""
    desk = _Desk(gateway)
    return (
        _route("/admin/v1/analytics", desk.overview),
        _route("/admin/v1/analytics/{name}", desk.tenant),
        _route("/admin/v1/tree/{name}", desk.tree),
    )


def _route(path: str, handler: Handler) -> Route:
    return Route("GET", path, handler, "admin", plain.SHAPE)


class _Desk:
    def __init__(self, gateway: Context) -> None:
        self._gateway = gateway

    async def overview(self, request: web.Request) -> web.StreamResponse:
        """Everything together, the engine beside it."""
        gateway = self._gateway
        info, stats = gateway.engine.info, gateway.engine.stats
        names = await self._names()
        engine: dict[str, Any] = {
            name: getattr(stats, name) for name in stats.__struct_fields__ if name != "namespaces"
        }
        if info is not None:
            engine |= {
                "model": info.model,
                "device": info.device,
                "kv_format": info.kv_format,
                "block_size": info.block_size,
                "context_tokens": info.context_tokens,
                "kv_bytes_per_block": info.kv_bytes_per_block,
            }
        return plain.answer(
            {
                **gateway.analytics.overview(),
                "engine": {**engine, "ready": gateway.is_ready()},
                "holdings": self._holdings(names),
                "taken": self._taken(names),
                "restarts": gateway.engine_restarts(),
                "at_ms": gateway.wall(),
            }
        )

    async def tenant(self, request: web.Request) -> web.StreamResponse:
        """One tenant in full."""
        gateway, name = self._gateway, request.match_info["name"]
        info = gateway.engine.info
        blocks = 0 if info is None else info.blocks
        seen = gateway.analytics.tenant(
            name,
            await self._card(name),
            {
                label: terms.limit_s if terms.limit_s is not None else terms.promise_s
                for label, terms in gateway.config.caching.all_classes().items()
            },
            16 if info is None else info.block_size,
            [max(1, blocks * part // 16) for part in (1, 2, 4, 8, 16, 32)],
        )
        if seen is None:
            message = "Nothing has been seen of this tenant since the start."
            raise Refusal(Kind.NOT_FOUND, "not_seen", message)
        return plain.answer(seen)

    async def tree(self, request: web.Request) -> web.StreamResponse:
        """The shape of a tenant's trees, a namespace each; counts, never words."""
        gateway, name = self._gateway, request.match_info["name"]
        names = await self._names()
        found = []
        for one in holdings(gateway.engine.stats):
            if names.get(one.tenant_id) == name:
                surveyed = await gateway.engine.survey(one.stats.namespace, BRANCHES_MAX)
                found.append(
                    {
                        "workspace": one.workspace,
                        "partition": bool(parts_of(one.stats.namespace)[4:] not in ((), ("",))),
                        "blocks": one.stats.blocks,
                        "branches": [asdict(branch) for branch in surveyed.branches],
                    }
                )
        return plain.answer({"tenant": name, "namespaces": found})

    async def _names(self) -> dict[int, str]:
        found = await asyncio.to_thread(registry.list_tenants, self._gateway.store)
        return {tenant.tenant_id: tenant.name for tenant, _ in found}

    async def _card(self, name: str) -> RateCard:
        """The prices the tenant pays now."""
        gateway = self._gateway

        def find(store: Store) -> RateCard:
            tiers = {tenant.name: tenant.tier for tenant, _ in registry.list_tenants(store)}
            book = CardBook(load_cards(store))
            return book.in_force(gateway.model, tiers.get(name, ""), gateway.wall())

        return await gateway.reports.ask(find)

    def _holdings(self, names: dict[int, str]) -> list[dict[str, Any]]:
        sums: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for one in holdings(self._gateway.engine.stats):
            row = sums[one.tenant_id]
            for field in ("blocks", "pinned_blocks", "promised_blocks", "running", "waiting"):
                row[field] += getattr(one.stats, field)
        return [{"tenant": names.get(tenant, str(tenant)), **row} for tenant, row in sums.items()]

    def _taken(self, names: dict[int, str]) -> list[dict[str, Any]]:
        """Who took whose blocks, most first."""
        sums: dict[tuple[str, str], int] = defaultdict(int)
        for (owner, taker), blocks in self._gateway.engine.losses.taken().items():
            sums[_tenant(owner, names), _tenant(taker, names)] += blocks
        order = sorted(sums.items(), key=lambda item: -item[1])[:50]
        return [{"owner": pair[0], "taker": pair[1], "blocks": n} for pair, n in order]


def _tenant(namespace: bytes, names: dict[int, str]) -> str:
    parts = parts_of(namespace)
    known = parts and parts[0].isdigit()
    return names.get(int(parts[0]), parts[0]) if known else "unknown"
