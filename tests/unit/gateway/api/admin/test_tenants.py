"""The admin API of tenants and keys, and its authentication."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from gateway.http.route_table import canonical
from gateway.ledger import deferred_holds
from tenancy.accounts.declared_tenants import DeclaredTenant, reconcile
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.erasure_receipts import list_receipts
from tenancy.accounts.keys import list_keys
from tenancy.accounts.tenants import find_tenant_record, list_tenants
from tenancy.ledger.transactions import Item
from tenancy.types import UsageEntry, wall_ms
from tests.tables import each_row
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

TENANTS = "/admin/v1/tenants"


async def chat_status(gateway: GatewayFixture, key: str) -> int:
    """Return the status of a chat with this key."""
    headers = {"Authorization": f"Bearer {key}"}
    status, _, _ = await gateway.ask(body=gateway.chat(), who=None, headers=headers)
    return status


# --- who may -------------------------------------------------------------------------------------


async def test_every_admin_route_is_open_by_name_or_needs_an_administrators_key(
    admin: AdminClient,
) -> None:
    """C8: without a key, with a wrong one and with a tenant's nothing is told or changed. Open
    routes are listed here."""
    store = admin.gateway.store
    before = list_keys(store), list_tenants(store)
    open_paths = ("/metrics", "/openapi.json", "/health", "/healthz", "/readyz", "/dashboard")
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for route in admin.gateway.gateway.admin().routes:
        path = canonical(route.path)
        if path != "/" and not path.startswith(open_paths):
            plain = re.sub(r"\{\w+\}", "1", path.replace("{name}", "ada"))
            answers = [
                await admin.ask(route.method, plain, {}, key=key)
                for key in (None, "tl-wrong", admin.gateway.keys["ada"])
            ]
            found[route.method, path] = [(got, body["error"]["code"]) for got, body in answers]

    refused = [(401, "invalid_api_key"), (401, "invalid_api_key"), (403, "scope_missing")]
    assert len(found) >= 18
    assert {path for path, answers in found.items() if answers != refused} == set()
    assert (list_keys(store), list_tenants(store)) == before


async def test_grants_no_cross_origin_preflight(admin: AdminClient) -> None:
    """C13: a browser asks before it sends a key for another site; without the header it does not.

    Allow names the methods, which are in the documentation.
    """
    async with admin.gateway.session.options(
        admin.gateway.admin_url + TENANTS,
        headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"},
    ) as response:
        status, headers = response.status, response.headers

    assert status == 204
    assert not any(name.lower().startswith("access-control") for name in headers)


async def test_refuses_admin_key_on_billed_paths(admin: AdminClient) -> None:
    """It has no tenant to bill."""
    assert await chat_status(admin.gateway, admin.key) == 403


# --- tenants -------------------------------------------------------------------------------------


async def test_creates_shows_changes_and_deletes_a_tenant(admin: AdminClient) -> None:
    """Each response has all its settings."""
    made = await admin.ask("POST", TENANTS, {"name": "eve", "tier": "gold", "classes": ["5m"]})
    changed = await admin.ask(
        "PATCH", f"{TENANTS}/eve", {"weight": 2.5, "classes": None, "requests_per_minute": 9}
    )
    shown = await admin.ask("GET", f"{TENANTS}/eve")
    gone = await admin.ask("DELETE", f"{TENANTS}/eve")

    assert (made[0], made[1]["tier"], made[1]["classes"]) == (201, "gold", ["5m"])
    assert (changed[0], changed[1]["tier"], changed[1]["classes"]) == (200, "gold", None)
    assert (shown[1]["weight"], shown[1]["requests_per_minute"]) == (2.5, 9)
    assert gone == (200, {"name": "eve", "deleted": True, "pseudonym": None})
    assert (await admin.ask("GET", f"{TENANTS}/eve"))[0] == 404


async def test_refuses_duplicate_fields(admin: AdminClient) -> None:
    """B8: the gateway does not choose between two values, at any depth of the body."""
    name, answer = await admin.ask("POST", TENANTS, b'{"name": "eve", "name": "mia"}')
    inner, _ = await admin.ask(
        "POST",
        f"{TENANTS}/ada/keys",
        b'{"limits": {"requests_at_once": 1, "requests_at_once": 2}}',
    )

    assert (name, inner) == (400, 400)
    assert answer["error"]["message"] == "Duplicate field: 'name'."
    assert [tenant.name for tenant in list_tenants(admin.gateway.store)] == ["ada", "bob"]


async def test_lists_tenants_in_pages(admin: AdminClient) -> None:
    for number in range(3):
        await admin.ask("POST", TENANTS, {"name": f"t{number}"})
    _, first = await admin.ask("GET", f"{TENANTS}?limit=3")
    _, second = await admin.ask("GET", f"{TENANTS}?limit=3&after={first['tenants'][-1]['name']}")

    assert [one["name"] for one in first["tenants"]] == ["ada", "bob", "t0"]
    assert [one["name"] for one in second["tenants"]] == ["t1", "t2"]
    assert (first["has_more"], second["has_more"]) == (True, False)


async def test_lists_keys_in_pages_and_administrators_alone(admin: AdminClient) -> None:
    """However many keys tenants have, an administrator's is found in one page."""
    _, made = await admin.ask("POST", "/admin/v1/keys", {"label": "on call"})
    _, everything = await admin.ask("GET", "/admin/v1/keys")
    _, first = await admin.ask("GET", "/admin/v1/keys?admin=true&limit=1")
    last = first["keys"][-1]["key_id"]
    _, second = await admin.ask("GET", f"/admin/v1/keys?admin=true&after={last}")
    _, own = await admin.ask("GET", f"{TENANTS}/ada/keys?after={made['key_id']}")

    mine = [one for one in everything["keys"] if one["tenant"] is None]
    assert len(mine) < len(everything["keys"])
    assert [*first["keys"], *second["keys"]] == mine
    assert (first["has_more"], second["has_more"]) == (True, False)
    assert own["keys"] == []


@pytest.mark.parametrize("query", ["admin=false", "admin=", "admin=true&admin=true", "tenant=ada"])
async def test_refuses_wrong_filters_of_keys(admin: AdminClient, query: str) -> None:
    status, answer = await admin.ask("GET", f"/admin/v1/keys?{query}")

    assert (status, answer["error"]["param"]) == (400, query.partition("=")[0])


async def test_suspension_refuses_new_requests_and_finishes_running_ones(
    admin: AdminClient,
) -> None:
    """C7: an admitted request is finished and billed; later ones are refused."""
    gateway = admin.gateway
    gateway.runner.hold_after(3)
    running = asyncio.create_task(gateway.ask(body=gateway.chat()))
    await gateway.until(lambda: bool(gateway.gateway.context.running))
    status, body = await admin.ask("PATCH", f"{TENANTS}/ada", {"status": "suspended"})
    refused = await chat_status(gateway, gateway.keys["ada"])
    gateway.runner.release()
    answer = await running

    assert (status, body["status"]) == (200, "suspended")
    assert (refused, answer[0]) == (403, 200)
    assert [row[0] for row in gateway.entries()] == ["done"]
    await admin.ask("PATCH", f"{TENANTS}/ada", {"status": "active"})
    assert await chat_status(gateway, gateway.keys["ada"]) == 200


async def test_deleted_tenants_entries_stay_under_a_pseudonym(admin: AdminClient) -> None:
    """Its keys fail, its name is free, and its cached blocks are erased with a receipt."""
    gateway = admin.gateway
    await gateway.ask(body=gateway.chat("long enough to fill a block or two of the cache"))
    await gateway.quiet()
    gone = await admin.ask("DELETE", f"{TENANTS}/ada")
    refused = await chat_status(gateway, gateway.keys["ada"])
    made, _ = await admin.ask("POST", TENANTS, {"name": "ada"})
    left = f"{TENANTS}/deleted-1"
    nothing_new = [
        await admin.ask("PATCH", left, {"status": "active"}),
        await admin.ask("POST", f"{left}/keys", {}),
        await admin.ask("PUT", f"{left}/budgets", {"window": "day", "hard_micros": 1}),
    ]

    assert gone == (200, {"name": "ada", "deleted": True, "pseudonym": "deleted-1"})
    assert (refused, made) == (401, 201)
    assert [(status, body["error"]["code"]) for status, body in nothing_new] == [
        (409, "tenant_deleted")
    ] * 3
    assert (await gateway.quiet()).cached_blocks == 0
    assert [row[0] for row in gateway.entries()] == ["done"]
    assert [receipt.what for receipt in list_receipts(gateway.store, 1)] == ["all"]


async def test_erases_the_cache_of_a_tenant_deleted_by_command(admin: AdminClient) -> None:
    """The command line has no engine: the server checks every minute, and writes one receipt."""
    gateway = admin.gateway
    for who in ("ada", "bob"):
        await gateway.ask(body=gateway.chat("long enough to fill a block or two"), who=who)
    held = (await gateway.quiet()).cached_blocks
    await asyncio.to_thread(delete_tenant, gateway.store, wall_ms, "ada")
    for _ in range(2):
        await gateway.gateway.erasure.erase_removed()

    assert (await gateway.quiet()).cached_blocks == held // 2
    assert len(list_receipts(gateway.store, 1)) == 1


async def test_refuses_changes_to_a_declared_tenant(admin: AdminClient) -> None:
    """The next reload would undo them; suspending is allowed."""
    reconcile(admin.gateway.store, wall_ms, [DeclaredTenant(name="ada")])
    changed = await admin.ask("PATCH", f"{TENANTS}/ada", {"weight": 2})
    suspended = await admin.ask("PATCH", f"{TENANTS}/ada", {"status": "suspended"})

    assert (changed[0], changed[1]["error"]["code"]) == (409, "tenant_declared")
    assert suspended[0] == 200


async def test_concurrent_changes_of_different_settings_all_apply(admin: AdminClient) -> None:
    bodies = [{"weight": 3}, {"priority": 4}, {"tier": "gold"}, {"requests_at_once": 5}]
    answers = await asyncio.gather(*(admin.ask("PATCH", f"{TENANTS}/ada", body) for body in bodies))
    found = find_tenant_record(admin.gateway.store, "ada").settings

    assert [status for status, _ in answers] == [200] * 4
    assert (found.weight, found.priority, found.tier, found.requests_at_once) == (3, 4, "gold", 5)


@each_row(
    ("body", "status", "code", "param"),
    [
        (b"", 400, "invalid_json", None),
        (b"[]", 400, "invalid_value", None),
        (b'{"name": "x"}}', 400, "invalid_json", None),
        (b"\xff", 400, "invalid_json", None),
        ({}, 400, "missing_required_parameter", "name"),
        ({"name": "x", "flor": 1}, 400, "invalid_value", "flor"),
        ({"name": 1}, 400, "invalid_value", "name"),
        ({"name": "../etc/passwd"}, 400, "bad_name", None),
        ({"name": "'; drop table tenants; --"}, 400, "bad_name", None),
        ({"name": "ada"}, 409, "name_taken", None),
        ({"name": "x", "weight": 0}, 400, "bad_policy", None),
        ({"name": "x", "weight": "1"}, 400, "invalid_value", "weight"),
        ({"name": "x", "floor_blocks": -1}, 400, "bad_policy", None),
        ({"name": "x", "floor_blocks": 10**30}, 400, "bad_policy", None),
        ({"name": "x", "ceiling_blocks": 1.5}, 400, "invalid_value", "ceiling_blocks"),
        ({"name": "x", "requests_per_minute": 0}, 400, "bad_limits", None),
        ({"name": "x", "tokens_per_minute": 10**18}, 400, "bad_limits", None),
        ({"name": "x", "classes": ["a/b"]}, 400, "retention_unknown", None),
        ({"name": "x", "classes": ["1h", "5min"]}, 400, "retention_unknown", None),
        ({"name": "x", "is_declared": True}, 400, "invalid_value", "is_declared"),
    ],
)
async def test_refuses_an_invalid_tenant_by_field(
    admin: AdminClient, body: object, status: int, code: str, param: str | None
) -> None:
    """Nothing is half done."""
    got, answer = await admin.ask("POST", TENANTS, body)

    assert (got, answer["error"]["code"], answer["error"]["param"]) == (status, code, param)
    assert set(answer["error"]) == {"code", "message", "param"}
    assert [tenant.name for tenant in list_tenants(admin.gateway.store)] == ["ada", "bob"]


@each_row(
    ("path", "body", "status", "code"),
    [
        (f"{TENANTS}/nobody", {"weight": 1}, 404, "tenant_unknown"),
        (f"{TENANTS}/..%2f..%2fetc", {"weight": 1}, 404, "tenant_unknown"),
        (f"{TENANTS}/ada", {"status": "gone"}, 400, "invalid_value"),
        (f"{TENANTS}/ada", {"name": "eve"}, 400, "invalid_value"),
        (f"{TENANTS}/ada", {"weight": 2, "floor_blocks": "1"}, 400, "invalid_value"),
        (f"{TENANTS}/ada", {"weight": 2, "tier": "A"}, 400, "bad_name"),
        ("/admin/v1/keys/1", {"label": "two\nlines"}, 400, "bad_label"),
        ("/admin/v1/keys/1", {"scopes": ["admin"]}, 400, "bad_scopes"),
        ("/admin/v1/keys/1", {"limits": {"requests_per_minute": -1}}, 400, "bad_limits"),
        ("/admin/v1/keys/1", {"limits": {"per_minute": 1}}, 400, "invalid_value"),
        ("/admin/v1/keys/99", {"label": "x"}, 404, "key_unknown"),
        ("/admin/v1/keys/tl-", {"label": "x"}, 404, "key_unknown"),
    ],
)
async def test_invalid_change_changes_nothing(
    admin: AdminClient, path: str, body: object, status: int, code: str
) -> None:
    """Not even its valid part."""
    got, answer = await admin.ask("PATCH", path, body)

    assert (got, answer["error"]["code"]) == (status, code)
    assert find_tenant_record(admin.gateway.store, "ada").settings.weight == 1.0
    assert list_keys(admin.gateway.store)[0].label == ""


async def test_settings_and_status_change_atomically(admin: AdminClient) -> None:
    path, body = f"{TENANTS}/ada", {"weight": 2, "status": "suspended"}
    with admin.gateway.store.change() as db:
        db.execute(
            "create trigger no_more before update of status on tenants"
            " begin select raise(abort, 'no more'); end"
        )
    failed, _ = await admin.ask("PATCH", path, body)
    half = find_tenant_record(admin.gateway.store, "ada").settings.weight
    with admin.gateway.store.change() as db:
        db.execute("drop trigger no_more")
    _, changed = await admin.ask("PATCH", path, body)

    assert (failed, half) == (503, 1.0)
    assert (changed["weight"], changed["status"]) == (2.0, "suspended")


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "limit=1&limit=2", "page=2"])
async def test_refuses_invalid_pages(admin: AdminClient, query: str) -> None:
    """F10: numbers are bounded, and an unknown parameter is an error."""
    status, body = await admin.ask("GET", f"{TENANTS}?{query}")

    assert status == 400
    assert body["error"]["param"] == query.partition("=")[0]


# --- keys ----------------------------------------------------------------------------------------


async def test_creates_limits_and_revokes_a_key(admin: AdminClient) -> None:
    """It works from the response on, and stops with the response that revokes it."""
    gateway = admin.gateway
    status, made = await admin.ask(
        "POST",
        f"{TENANTS}/ada/keys",
        {"workspace": "lab", "label": "ci", "expires_in_s": 3600, "scopes": ["inference"]},
    )
    worked = await chat_status(gateway, made["key"])
    path = f"/admin/v1/keys/{made['key_id']}"
    await admin.ask("PATCH", path, {"tolerance": "lenient", "cache_key": "namespace"})
    _, shown = await admin.ask("GET", path)
    _, revoked = await admin.ask("POST", f"{path}/revoke")

    assert (status, worked) == (201, 200)
    assert (shown["tenant"], shown["workspace"], shown["label"]) == ("ada", "lab", "ci")
    assert shown["scopes"] == ["inference"]
    assert (made["tolerance"], shown["tolerance"]) == (None, "lenient")
    assert (made["cache_key"], shown["cache_key"]) == (None, "namespace")
    assert revoked["revoked"] is not None
    assert await chat_status(gateway, made["key"]) == 401


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (f"{TENANTS}/ada/keys", "expires_in_s"),
        ("/admin/v1/keys", "expires_in_s"),
        ("/admin/v1/keys/1/rotate", "grace_s"),
    ],
)
async def test_refuses_a_time_that_no_clock_has(admin: AdminClient, path: str, field: str) -> None:
    """JSON's integers have no bound."""
    status, body = await admin.ask("POST", path, {field: 10**400})

    assert (status, body["error"]["param"]) == (400, field)


async def test_refuses_a_key_without_the_scope(admin: AdminClient) -> None:
    """C8: a dashboard's key cannot generate."""
    _, made = await admin.ask("POST", f"{TENANTS}/ada/keys", {"scopes": ["usage"]})

    assert await chat_status(admin.gateway, made["key"]) == 403


async def test_rotated_key_works_during_its_grace_period(admin: AdminClient) -> None:
    """Without a grace period the old key fails at once."""
    gateway = admin.gateway
    _, first = await admin.ask("POST", "/admin/v1/keys/1/rotate", {"grace_s": 600})
    both = [await chat_status(gateway, key) for key in (gateway.keys["ada"], first["key"])]
    path = f"/admin/v1/keys/{first['key_id']}/rotate"
    status, second = await admin.ask("POST", path, {"grace_s": 0})
    after = [await chat_status(gateway, key) for key in (first["key"], second["key"])]

    assert first["replaces"]["replaced_by"] == first["key_id"]
    assert (both, status, after) == ([200, 200], 201, [401, 200])
    again, body = await admin.ask("POST", "/admin/v1/keys/1/rotate", {})
    assert (again, body["error"]["code"]) == (409, "key_not_live")


async def test_only_the_creating_response_shows_a_key(admin: AdminClient) -> None:
    """K7: lists, changes and the log have its prefix."""
    _, made = await admin.ask("POST", "/admin/v1/keys", {"label": "ops"})
    key = made["key"]
    seen = [
        await admin.ask("GET", "/admin/v1/keys"),
        await admin.ask("GET", f"{TENANTS}/ada/keys"),
        await admin.ask("PATCH", f"/admin/v1/keys/{made['key_id']}", {"label": "b"}),
        await admin.ask("POST", f"/admin/v1/keys/{made['key_id']}/revoke"),
    ]

    text = json.dumps([seen, admin.gateway.lines])
    assert key[:11] in text
    assert key[:12] not in text


async def test_logs_administrators_changes_by_id(admin: AdminClient) -> None:
    """No names are logged."""
    await admin.ask("PATCH", f"{TENANTS}/bob", {"weight": 2})
    line = next(line for line in admin.gateway.lines if line["event"] == "tenant_changed")
    request = next(
        line for line in admin.gateway.lines if line.get("route") == f"{TENANTS}/{{name}}"
    )

    assert line == {"event": "tenant_changed", "by_key_id": 3, "tenant_id": 2}
    assert (request["key_id"], request["tenant_id"], request["status"]) == (3, None, 200)


async def test_a_tenant_deleted_under_its_first_request_leaves_no_cache(
    admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hold is not written yet, so the deletion does not see it."""
    gateway = admin.gateway
    context = gateway.gateway.context
    monkeypatch.setattr(deferred_holds, "DEFER_S", 3_600.0)
    write = context.ledger.write

    def delete_first(item: Item) -> asyncio.Future[None]:
        if isinstance(item, UsageEntry):
            delete_tenant(gateway.store, wall_ms, "ada")
        return write(item)

    with monkeypatch.context() as late:
        late.setattr(context.ledger, "write", delete_first)
        status, body, _ = await gateway.ask(
            body=gateway.chat("long enough to fill a block or two of the cache")
        )
    held = (await gateway.quiet()).cached_blocks
    for _ in range(2):
        await gateway.gateway.erasure.erase_removed()

    assert (status, body["error"]["code"]) == (503, "ledger_unavailable")
    assert (gateway.entries(), gateway.store.query("select * from holds")) == ([], [])
    assert held > (await gateway.quiet()).cached_blocks == 0
