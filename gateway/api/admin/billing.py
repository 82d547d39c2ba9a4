"""`/admin/v1/rate-cards` and `/admin/v1/.../budgets`: prices and budgets, for administrators.

Requests have whole micro-dollars, responses exact decimals.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from aiohttp import web
from msgspec import Struct, structs

from gateway.api.admin.audit import actor_of, note_change
from gateway.api.usage_report import budget_body
from gateway.context import Context
from gateway.http import json_api
from gateway.http.middleware import Route
from gateway.http.request_context import STATE
from tenancy.accounts.tenants import TenantRecord, find_tenant_record, list_tenant_records
from tenancy.pricing.budgets import Budget, Window, budget_states, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card, load_cards


class BudgetBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A budget of a tenant, or of one of its keys. Without amounts, the budget is removed."""

    window: Window
    hard_micros: int | None = None
    soft_micros: int | None = None
    key_id: int = 0


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the routes of rate cards and budgets."""

    async def cards(request: web.BaseRequest) -> web.StreamResponse:
        json_api.query(request)
        found = await asyncio.to_thread(load_cards, gateway.store)
        return json_api.answer({"rate_cards": [_card_body(card) for card in found]})

    async def add(request: web.BaseRequest) -> web.StreamResponse:
        card = await json_api.read(request, gateway.config.server, RateCard)
        gateway.config.check_card(card)
        actor = actor_of(gateway, request)
        card = await asyncio.to_thread(add_card, gateway.store, gateway.wall, card, actor)
        note_change(gateway, request, "rate_card_added", rate_card=card.rate_card_id)
        return json_api.answer(_card_body(card), 201)

    async def budgets(request: web.BaseRequest) -> web.StreamResponse:
        name = json_api.query(request, "tenant").get("tenant")
        wanted = None if name is None else (await _tenant(gateway, name)).tenant.tenant_id
        return json_api.answer({"budgets": await _budgets(gateway, wanted)})

    async def put(request: web.BaseRequest) -> web.StreamResponse:
        tenant = (await _tenant(gateway, request[STATE].parameters["name"])).tenant
        body = await json_api.read(request, gateway.config.server, BudgetBody)
        budget = Budget(tenant_id=tenant.tenant_id, **structs.asdict(body))
        await asyncio.to_thread(set_budget, gateway.store, budget, actor_of(gateway, request))
        facts = {"tenant_id": tenant.tenant_id, "window": body.window}
        note_change(gateway, request, "budget_set", **facts)
        return json_api.answer({"budgets": await _budgets(gateway, tenant.tenant_id)})

    return (
        Route("GET", "/admin/v1/rate-cards", cards, "admin:read", json_api.SHAPE),
        Route("POST", "/admin/v1/rate-cards", add, "admin:money", json_api.SHAPE),
        Route("GET", "/admin/v1/budgets", budgets, "admin:read", json_api.SHAPE),
        Route("PUT", "/admin/v1/tenants/{name}/budgets", put, "admin:money", json_api.SHAPE),
    )


async def _tenant(gateway: Context, name: str) -> TenantRecord:
    return await asyncio.to_thread(find_tenant_record, gateway.store, name)


async def _budgets(gateway: Context, tenant_id: int | None) -> list[dict[str, Any]]:
    names = {
        one.tenant.tenant_id: one.tenant.name
        for one in await gateway.reports.ask(list_tenant_records)
    }
    wanted = None if tenant_id is None else (tenant_id,)
    query = partial(budget_states, clock=gateway.wall, tenant_ids=wanted)
    states = await gateway.reports.ask(query)
    return [{"tenant": names.get(one.budget.tenant_id), **budget_body(one)} for one in states]


def _card_body(card: RateCard) -> dict[str, Any]:
    return {"rate_card_id": card.rate_card_id, **structs.asdict(card)}
