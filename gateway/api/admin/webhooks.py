"""`/admin/v1/webhooks`: the configured webhooks, their deliveries, and a test event for one."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

from aiohttp import web
from msgspec import Struct, structs

from gateway.api.admin.audit import ChangeLog
from gateway.background.webhooks import WebhookEndpoint, WebhookSender
from gateway.config import WebhookEventType
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.http.request_context import STATE
from gateway.http.route_table import Route
from gateway.ledger.query_pool import QueryPool
from tenancy.accounting.webhook_outbox import (
    DELIVERIES_MAX,
    Delivery,
    count_deliveries,
    list_deliveries,
)
from tenancy.types import format_utc

STATES = ("pending", "delivered", "dead")


class WebhookList(Struct, frozen=True):
    """The configured webhooks and their latest deliveries."""

    webhooks: list[dict[str, Any]]
    deliveries: list[dict[str, Any]]


class WebhookTested(Struct, frozen=True):
    """A test event that is on its way."""

    webhook: str
    event_id: str


def routes(reports: QueryPool, sender: WebhookSender, changes: ChangeLog) -> tuple[Route, ...]:
    """Return the routes of webhooks."""

    async def show(request: web.BaseRequest) -> WebhookList:
        state = json_api.choice(request.query, "state", STATES)
        limit = json_api.positive_int(request.query, "limit", 100, DELIVERIES_MAX)
        counts = await reports.ask(count_deliveries)
        found = await reports.ask(partial(list_deliveries, count=limit, state=state))
        webhooks = [_endpoint_body(one, counts) for one in sender.endpoints]
        return WebhookList(webhooks, [_delivery_body(one) for one in found])

    async def test(request: web.BaseRequest) -> WebhookTested:
        name = request[STATE].parameters["name"]
        endpoint = next((one for one in sender.endpoints if one.name == name), None)
        if endpoint is None:
            known = ", ".join(one.name for one in sender.endpoints) or "none"
            message = f"Webhook not found: {name[:80]!r}; configured: {known}."
            raise Refusal(Kind.NOT_FOUND, "webhook_unknown", message)
        by = changes.actor(request)
        event = await sender.test(endpoint, request[STATE].request_id, by)
        return WebhookTested(name, event.event_id)

    route, path = json_api.route, "/admin/v1/webhooks"
    what, text = f"POST {path}/{{name}}/test", "Send a test event."
    return (
        route(
            *(f"GET {path}", "admin:read", "List webhooks and deliveries.", show),
            query="state limit",
        ),
        route(what, "admin:tenants", text, test, status=201),
    )


def _endpoint_body(one: WebhookEndpoint, counts: dict[tuple[str, str], int]) -> dict[str, Any]:
    """Return a webhook without its address, which may be a secret."""
    return {
        "name": one.name,
        "format": one.form,
        "events": sorted(one.events) or list(get_args(WebhookEventType)),
        **{state: counts.get((one.name, state), 0) for state in STATES},
    }


def _delivery_body(one: Delivery) -> dict[str, Any]:
    fields = structs.asdict(one)
    for name in ("body", "created_ms", "next_ms", "ended_ms", "kind", "endpoint"):
        del fields[name]
    return {
        **fields,
        "type": one.kind,
        "webhook": one.endpoint,
        "created": format_utc(one.created_ms),
        "next_attempt": format_utc(one.next_ms) if one.state == "pending" else None,
        "ended": None if one.ended_ms is None else format_utc(one.ended_ms),
    }
