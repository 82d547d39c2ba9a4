"""`/admin/v1/webhooks`: the configured webhooks, their deliveries, and a test event for one."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

from aiohttp import web
from msgspec import structs

from gateway.api.admin.audit import actor_of
from gateway.background.webhooks import WebhookEndpoint, WebhookSender
from gateway.config import WebhookEventType
from gateway.context import Context
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.http.middleware import Route
from gateway.http.request_context import STATE
from tenancy.accounting.webhook_outbox import (
    DELIVERIES_MAX,
    Delivery,
    count_deliveries,
    list_deliveries,
)
from tenancy.types import format_utc

STATES = ("pending", "delivered", "dead")


def routes(gateway: Context, sender: WebhookSender) -> tuple[Route, ...]:
    """Return the routes of webhooks."""

    async def show(request: web.BaseRequest) -> web.StreamResponse:
        given = json_api.query(request, "state", "limit")
        state = json_api.choice(given, "state", STATES)
        limit = json_api.positive_int(given, "limit", 100, DELIVERIES_MAX)
        counts = await gateway.reports.ask(count_deliveries)
        found = await gateway.reports.ask(partial(list_deliveries, count=limit, state=state))
        webhooks = [_endpoint_body(one, counts) for one in sender.endpoints]
        return json_api.answer(
            {"webhooks": webhooks, "deliveries": [_delivery_body(one) for one in found]}
        )

    async def test(request: web.BaseRequest) -> web.StreamResponse:
        json_api.query(request)
        name = request[STATE].parameters["name"]
        endpoint = next((one for one in sender.endpoints if one.name == name), None)
        if endpoint is None:
            known = ", ".join(one.name for one in sender.endpoints) or "none"
            message = f"Webhook not found: {name[:80]!r}; configured: {known}."
            raise Refusal(Kind.NOT_FOUND, "webhook_unknown", message)
        by = actor_of(gateway, request)
        event = await sender.test(endpoint, request[STATE].request_id, by)
        return json_api.answer({"webhook": name, "event_id": event.event_id}, 201)

    return (
        Route("GET", "/admin/v1/webhooks", show, "admin:read", json_api.SHAPE),
        Route("POST", "/admin/v1/webhooks/{name}/test", test, "admin:tenants", json_api.SHAPE),
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
