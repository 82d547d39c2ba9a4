"""`/admin/v1/rate-cards` and `/admin/v1/.../budgets`: prices and budgets, for administrators.

Requests have whole micro-dollars, responses exact decimals.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from aiohttp import web
from msgspec import Struct, structs

from gateway.api.admin.audit import ChangeLog
from gateway.api.usage_report import budget_body
from gateway.config import Config
from gateway.http import json_api
from gateway.http.request_context import STATE
from gateway.http.route_table import Route
from gateway.ledger.query_pool import QueryPool
from tenancy.accounts.tenants import find_tenant_record, list_tenant_records
from tenancy.pricing.budgets import Budget, Window, budget_states, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card, load_cards
from tenancy.storage.interface import Store
from tenancy.types import WallClock


class RateCardAnswer(Struct, frozen=True):
    """A version of a rate card. Prices: micro-dollars per million tokens."""

    rate_card_id: str
    name: str
    model: str
    tier: str
    input: int
    output: int
    cache_read: int
    cache_write: dict[str, int]
    storage: dict[str, int]
    minimum_charge: int
    currency: str
    valid_from_ms: int
    valid_until_ms: int | None
    version: int
    breach_credit: str


class RateCardList(Struct, frozen=True):
    """All versions of all rate cards."""

    rate_cards: list[RateCardAnswer]


class BudgetList(Struct, frozen=True):
    """Budgets, with the spent and reserved amounts of their current windows."""

    budgets: list[dict[str, Any]]


class BudgetBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A budget of a tenant, or of one of its keys. Without amounts, the budget is removed."""

    window: Window
    hard_micros: int | None = None
    soft_micros: int | None = None
    key_id: int = 0


def routes(
    store: Store, reports: QueryPool, config: Config, changes: ChangeLog, wall: WallClock
) -> tuple[Route, ...]:
    """Return the routes of rate cards and budgets."""

    async def cards(request: web.BaseRequest) -> object:
        found = await asyncio.to_thread(load_cards, store)
        return {"rate_cards": [_card_body(card) for card in found]}

    async def add(request: web.BaseRequest, body: RateCard) -> object:
        config.check_card(body)
        card = await asyncio.to_thread(add_card, store, wall, body, changes.actor(request))
        changes.note(request, "rate_card_added", rate_card=card.rate_card_id)
        return _card_body(card)

    async def budgets(request: web.BaseRequest) -> object:
        name = request.query.get("tenant")
        return await listed(None if name is None else await tenant_id_of(name))

    async def put(request: web.BaseRequest, body: BudgetBody) -> object:
        tenant_id = await tenant_id_of(request[STATE].parameters["name"])
        budget = Budget(tenant_id=tenant_id, **structs.asdict(body))
        await asyncio.to_thread(set_budget, store, budget, changes.actor(request))
        changes.note(request, "budget_set", tenant_id=tenant_id, window=body.window)
        return await listed(tenant_id)

    async def tenant_id_of(name: str) -> int:
        return (await asyncio.to_thread(find_tenant_record, store, name)).tenant.tenant_id

    async def listed(tenant_id: int | None) -> object:
        records = await reports.ask(list_tenant_records)
        names = {one.tenant.tenant_id: one.tenant.name for one in records}
        wanted = None if tenant_id is None else (tenant_id,)
        states = await reports.ask(partial(budget_states, clock=wall, tenant_ids=wanted))
        rows = [{"tenant": names.get(one.budget.tenant_id), **budget_body(one)} for one in states]
        return {"budgets": rows}

    route, of_cards = json_api.route, "/admin/v1/rate-cards"
    return (
        route(
            *(f"GET {of_cards}", "admin:read", "List rate cards.", cards),
            answer=RateCardList,
        ),
        route(
            *(f"POST {of_cards}", "admin:money", "Add a rate card.", add),
            answer=RateCardAnswer,
            status=201,
        ),
        route(
            *("GET /admin/v1/budgets", "admin:read", "List budgets.", budgets),
            answer=BudgetList,
            query="tenant",
        ),
        route(
            "PUT /admin/v1/tenants/{name}/budgets",
            *("admin:money", "Set or remove a budget.", put),
            answer=BudgetList,
        ),
    )


def _card_body(card: RateCard) -> dict[str, Any]:
    return {"rate_card_id": card.rate_card_id, **structs.asdict(card)}
