"""The audit log through the admin API: each change is there, with its key and address."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from gateway.background.storage_metering import StorageMetering
from gateway.background.webhooks import WebhookEndpoint
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

CHANGES: Mapping[str, tuple[tuple[str, str, Any], str]] = {
    "POST /admin/v1/tenants": (
        ("POST", "/admin/v1/tenants", {"name": "cid"}),
        "tenant.create",
    ),
    "PATCH /admin/v1/tenants/{name}": (
        ("PATCH", "/admin/v1/tenants/ada", {"weight": 3.0}),
        "tenant.change",
    ),
    "POST /admin/v1/tenants/{name}/keys": (
        ("POST", "/admin/v1/tenants/bob/keys", {}),
        "key.create",
    ),
    "POST /admin/v1/keys": (("POST", "/admin/v1/keys", {}), "key.create"),
    "PATCH /admin/v1/keys/{key_id}": (("PATCH", "/admin/v1/keys/2", {"label": "x"}), "key.change"),
    "POST /admin/v1/keys/{key_id}/rotate": (("POST", "/admin/v1/keys/2/rotate", {}), "key.create"),
    "POST /admin/v1/keys/{key_id}/revoke": (
        ("POST", "/admin/v1/keys/2/revoke", None),
        "key.revoke",
    ),
    "PUT /admin/v1/shared-scopes/{name}": (
        ("PUT", "/admin/v1/shared-scopes/s", {"owner": "ada", "members": ["bob"]}),
        "shared_scope.set",
    ),
    "DELETE /admin/v1/shared-scopes/{name}": (
        ("DELETE", "/admin/v1/shared-scopes/s", None),
        "shared_scope.remove",
    ),
    "POST /admin/v1/rate-cards": (
        ("POST", "/admin/v1/rate-cards", {"name": "std", "input": 3}),
        "rate_card.add",
    ),
    "PUT /admin/v1/tenants/{name}/budgets": (
        ("PUT", "/admin/v1/tenants/ada/budgets", {"window": "day", "hard_micros": 5}),
        "budget.set",
    ),
    "DELETE /admin/v1/fleet/engines/{name}": (
        ("DELETE", "/admin/v1/fleet/engines/e7", None),
        "fleet.forget",
    ),
    "POST /admin/v1/erase": (("POST", "/admin/v1/erase", {"tenant": "ada"}), "cache.erase"),
    "POST /admin/v1/webhooks/{name}/test": (
        ("POST", "/admin/v1/webhooks/ops/test", None),
        "webhook.test",
    ),
    "DELETE /admin/v1/tenants/{name}": (("DELETE", "/admin/v1/tenants/bob", None), "tenant.delete"),
}
"""A change by each route, and the action of its last record."""
WITHOUT_RECORD = {"POST /admin/v1/reload"}
"""Records what it changed, each on its own; the file of a test declares nothing."""


async def test_every_change_is_recorded(unopened_gateway: GatewayFixture) -> None:
    """A new route that changes something needs an entry here."""
    gateway = unopened_gateway
    gateway.endpoints = [WebhookEndpoint("ops", "http://127.0.0.1:9", frozenset(), "slack")]
    await gateway.open()
    admin = AdminClient(gateway)
    declared = {
        f"{route.method} {route.path}"
        for route in gateway.gateway.admin().routes
        if route.role.startswith("admin:") and route.method != "GET"
    }
    key_id = gateway.store.query("select max(key_id) from keys")[0][0]
    seen = {}
    for name, (asked, _) in CHANGES.items():
        status, answer = await admin.ask(*asked)
        assert status in (200, 201), answer
        _, log = await admin.ask("GET", "/admin/v1/audit?limit=1")
        seen[name] = log["changes"][0]

    assert declared == CHANGES.keys() | WITHOUT_RECORD
    assert {name: one["action"] for name, one in seen.items()} == {
        name: action for name, (_, action) in CHANGES.items()
    }
    for one in seen.values():
        assert (one["actor"], one["actor_id"]) == ("admin_key", str(key_id))
        assert one["address"] == "127.0.0.1"
    changed = seen["PATCH /admin/v1/tenants/{name}"]
    assert (changed["tenant"], changed["before"], changed["after"]) == (
        "ada",
        {"weight": 1.0},
        {"weight": 3.0},
    )


async def test_log_is_filtered_and_paged(gateway: GatewayFixture) -> None:
    """Newest first; `next_before` leads to the next page until it is null."""
    admin = AdminClient(gateway)
    for weight in (2.0, 3.0, 4.0):
        await admin.ask("PATCH", "/admin/v1/tenants/ada", {"weight": weight})
    await admin.ask("PATCH", "/admin/v1/tenants/bob", {"weight": 5.0})
    path = "/admin/v1/audit?tenant=ada&action=tenant.change&limit=2"
    _, first = await admin.ask("GET", path)
    _, second = await admin.ask("GET", f"{path}&before={first['next_before']}")
    weights = [one["after"]["weight"] for one in first["changes"] + second["changes"]]
    _, none = await admin.ask("GET", "/admin/v1/audit?until=2020-01-01")
    _, by_command = await admin.ask("GET", "/admin/v1/audit?actor=command")

    assert weights == [4.0, 3.0, 2.0]
    assert second["next_before"] is None
    assert (none["changes"], by_command["changes"]) == ([], [])
    for wrong in ("action=no.such", "tenant=nobody", "since=yesterday", "limit=0", "x=1"):
        assert (await admin.ask("GET", f"/admin/v1/audit?{wrong}"))[0] in (400, 404)


async def test_old_records_are_deleted(unopened_gateway: GatewayFixture) -> None:
    """After `admin.audit_days`."""
    gateway = unopened_gateway
    await gateway.open()
    admin = AdminClient(gateway)
    await admin.ask("PATCH", "/admin/v1/tenants/ada", {"weight": 2.0})
    context = gateway.gateway.context
    now_ms = context.wall()
    for days, left in ((399, 1), (401, 0)):
        gateway.wall = partial(int, now_ms + days * 86_400_000)
        await StorageMetering(context, gateway.gateway.erasure).clear_expired()
        assert gateway.store.query("select count(*) from audit_log") == [(left,)]
    await gateway.close()
