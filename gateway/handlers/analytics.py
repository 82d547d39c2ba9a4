"""`/admin/v1/analytics` and `/admin/v1/tree`: what the dashboard shows, as data."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from aiohttp import web
from msgspec.structs import asdict

from gateway import plain
from gateway.churn import History
from gateway.context import Context
from gateway.erasure import holdings, owner_of, parts_of, scope_names
from gateway.errors import Kind, Refusal
from gateway.middleware import Handler, Route
from gateway.storage_meter import look_at_churn
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
        look_at_churn(gateway)
        engine: dict[str, Any] = {
            name: getattr(stats, name) for name in stats.__struct_fields__ if name != "changed"
        }
        if info is not None:
            engine |= {
                "model": info.model,
                "device": info.device,
                "kv_format": info.kv_format,
                "block_size": info.block_size,
                "context_tokens": info.context_tokens,
                "kv_bytes_per_block": info.kv_bytes_per_block,
                "floor_blocks_asked": gateway.registry.floor_blocks(),
                "floor_blocks_max": info.floor_blocks_max,
            }
        return plain.answer(
            {
                **gateway.analytics.overview(),
                "engine": {**engine, "ready": gateway.is_ready()},
                "holdings": self._holdings(names),
                "taken": await self._taken(names),
                "leases": self._leases(names),
                "churn": {
                    **gateway.churn.all.shown(),
                    "tenants": [
                        {"tenant": names.get(tenant, str(tenant)), **_sums(history)}
                        for tenant, history in gateway.churn.tenants().items()
                    ],
                },
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
            (await self._cards())(name),
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
        names = await self._names()
        tenant_id = next((number for number, one in names.items() if one == name), 0)
        look_at_churn(gateway)
        leases = [row for row in self._leases(names) if row["tenant"] == name]
        churn = gateway.churn.tenant(tenant_id).shown()
        return plain.answer({**seen, "leases": leases, "churn": churn})

    async def tree(self, request: web.Request) -> web.StreamResponse:
        """The shape of a tenant's trees, a namespace each; counts, never words."""
        gateway, name = self._gateway, request.match_info["name"]
        await asyncio.to_thread(registry.find_tenant, gateway.store, name)  # or there is none
        names = await self._names()
        scopes = await scope_names(gateway)
        found = []
        for one in holdings(gateway.engine.namespaces):
            if names.get(one.tenant_id) == name:
                surveyed = await gateway.engine.survey(one.stats.namespace, BRANCHES_MAX)
                found.append(
                    {
                        **one.shown(scopes),
                        "partition": bool(parts_of(one.stats.namespace)[4:] not in ((), ("",))),
                        "blocks": one.stats.blocks,
                        "branches": [asdict(branch) for branch in surveyed.branches],
                    }
                )
        return plain.answer({"tenant": name, "namespaces": found})

    async def _names(self) -> dict[int, str]:
        found = await asyncio.to_thread(registry.list_tenants, self._gateway.store)
        return {tenant.tenant_id: tenant.name for tenant, _ in found}

    async def _cards(self) -> Callable[[str], RateCard]:
        """The prices that each tenant pays now, by its name."""
        gateway = self._gateway

        def find(store: Store) -> tuple[dict[str, str], CardBook]:
            tiers = {tenant.name: tenant.tier for tenant, _ in registry.list_tenants(store)}
            return tiers, CardBook(load_cards(store))

        tiers, book = await gateway.reports.ask(find)
        now_ms = gateway.wall()
        return lambda name: book.in_force(gateway.model, tiers.get(name, ""), now_ms)

    def _holdings(self, names: dict[int, str]) -> list[dict[str, Any]]:
        sums: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for one in holdings(self._gateway.engine.namespaces):
            row = sums[one.tenant_id]
            for field in ("blocks", "pinned_blocks", "promised_blocks", "running", "waiting"):
                row[field] += getattr(one.stats, field)
        return [{"tenant": names.get(tenant, str(tenant)), **row} for tenant, row in sums.items()]

    def _leases(self, names: dict[int, str]) -> list[dict[str, Any]]:
        """What became of promises, by tenant and class."""
        contracts = self._gateway.contracts
        counts = contracts.promises.counts(self._gateway.clock())
        return [
            {"tenant": names.get(tenant, str(tenant)), "class": name, **row}
            for (tenant, name), row in sorted(counts.items())
        ]

    async def _taken(self, names: dict[int, str]) -> list[dict[str, Any]]:
        """Who took whose blocks, most first, and what computing them again has cost: what the owner
        had to compute again because of others, by the part of it that each of them took."""
        sums: dict[tuple[str, str], int] = defaultdict(int)
        for pair, blocks in self._gateway.engine.losses.taken().items():
            sums[_tenant(pair[0], names), _tenant(pair[1], names)] += blocks
        order = sorted(sums.items(), key=lambda item: -item[1])[:50]
        lost: dict[str, int] = defaultdict(int)
        for (owner, _), blocks in sums.items():
            lost[owner] += blocks
        cards = await self._cards()
        rows = []
        for (owner, taker), blocks in order:
            again = self._gateway.analytics.missed_tokens(owner, "evicted_pressure")
            tokens = again * blocks // lost[owner]
            card = cards(owner)
            cost = tokens * max(0, card.input - card.cache_read)
            rows.append(
                {
                    "owner": owner,
                    "taker": taker,
                    "blocks": blocks,
                    "recomputed_tokens": tokens,
                    "cost_pico": cost,
                }
            )
        return rows


def _tenant(namespace: bytes, names: dict[int, str]) -> str:
    owner = owner_of(namespace)
    return "unknown" if owner is None else names.get(owner, str(owner))


def _sums(history: History) -> dict[str, Any]:
    shown = history.shown()
    del shown["minutes"]
    return shown
