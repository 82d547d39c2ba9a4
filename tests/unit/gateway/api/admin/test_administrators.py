"""Administrators: which names the listener answers to, where keys may stand, what scopes open."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from gateway.config import AdminConfig, ServerConfig
from gateway.errors import Refusal
from gateway.http.authentication import allowed_hosts, check_host
from tenancy.accounts.keys import ADMIN_SCOPES, create_admin_key
from tenancy.types import wall_ms
from tests.tables import each_row
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

OPEN = ("/metrics", "/dashboard", "/dashboard/app.js", "/healthz")
ASKED: dict[str, tuple[tuple[str, str, Any], ...]] = {
    "read": (
        ("GET", "/admin/v1/tenants", None),
        ("GET", "/admin/v1/tenants/ada/keys", None),
        ("GET", "/admin/v1/usage", None),
        ("GET", "/admin/v1/rate-cards", None),
        ("GET", "/admin/v1/shared-scopes", None),
        ("GET", "/admin/v1/analytics", None),
    ),
    "tenants": (
        ("POST", "/admin/v1/tenants", {"name": "cid"}),
        ("PATCH", "/admin/v1/tenants/ada", {"weight": 2.0}),
        ("POST", "/admin/v1/tenants/ada/keys", {}),
        ("PUT", "/admin/v1/shared-scopes/s", {"owner": "ada"}),
        ("POST", "/admin/v1/reload", None),
    ),
    "money": (
        ("POST", "/admin/v1/rate-cards", {"name": "std", "input": 3}),
        ("PUT", "/admin/v1/tenants/ada/budgets", {"window": "day", "hard_micros": 5}),
    ),
    "erase": (("POST", "/admin/v1/erase", {"tenant": "ada"}),),
}
"""Requests by the scope that they need."""


async def get(gateway: GatewayFixture, path: str, **headers: str) -> tuple[int, str]:
    url = gateway.admin_url + path
    async with gateway.session.get(url, headers=headers) as response:
        return response.status, await response.text()


@each_row("path", [*OPEN, "/admin/v1/tenants", "/nowhere"])
async def test_foreign_host_is_refused(gateway: GatewayFixture, path: str) -> None:
    """A page that makes its own name lead to this address reads neither metrics nor anything."""
    status, text = await get(gateway, path, Host="evil.example")

    assert (status, "host_not_allowed" in text) == (400, True)
    assert "admin.hosts" in text
    assert "trunkline_" not in text


@pytest.mark.parametrize("path", OPEN)
async def test_own_names_are_answered(gateway: GatewayFixture, path: str) -> None:
    """The address, and the names of this machine for itself."""
    for host in ("127.0.0.1:8081", "localhost", "[::1]:9"):
        assert (await get(gateway, path, Host=host))[0] == 200


@each_row("listener", [AdminConfig, ServerConfig])
@each_row(
    ("listen", "host", "is_allowed"),
    [
        ("127.0.0.1:8081", "127.0.0.1", True),
        ("10.0.0.7:8081", "10.0.0.7", True),
        ("10.0.0.7:8081", "10.0.0.8", False),
        ("ops.internal:8081", "ops.internal", True),
        ("0.0.0.0:8081", "10.0.0.8", True),
        ("0.0.0.0:8081", "[fd00::7]", True),
        ("[::]:8081", "10.0.0.8", True),
        ("0.0.0.0:8081", "evil.example", False),
        ("0.0.0.0:8081", "10.0.0.8.evil.example", False),
    ],
)
async def test_listen_address_is_allowed(
    listener: type[AdminConfig | ServerConfig], listen: str, host: str, is_allowed: bool
) -> None:
    """On all addresses any address: a page can make a name lead here, and no address."""
    allowed = allowed_hosts(listener(listen=listen))
    request = make_mocked_request("GET", "/metrics", headers={"Host": host})
    if is_allowed:
        check_host(request, allowed, "admin.hosts")
    else:
        with pytest.raises(Refusal):
            check_host(request, allowed, "admin.hosts")


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1", 200), ("llm.example.org", 200), ("localhost", 400), ("evil.example", 400)],
)
async def test_clients_may_use_the_address_that_is_listened_on(
    unopened_gateway: GatewayFixture, host: str, status: int
) -> None:
    """Beside the configured names, and no other."""
    gateway = unopened_gateway
    gateway.set_server(hosts=("llm.example.org",))
    await gateway.open()
    headers = {**gateway.headers(), "Host": host}
    async with gateway.session.get(f"{gateway.url}/v1/models", headers=headers) as response:
        assert response.status == status
    await gateway.close()
    gateway.discard()


async def test_administrators_key_in_the_query_is_not_taken(gateway: GatewayFixture) -> None:
    """Proxies write addresses down. The error says what to do with the key."""
    admin = AdminClient(gateway)
    alone = await admin.ask("GET", f"/admin/v1/tenants?key={admin.key}", key=None)
    beside = await admin.ask("GET", f"/admin/v1/tenants?key={admin.key}")

    for status, answer in (alone, beside):
        assert (status, answer["error"]["code"]) == (400, "key_in_query")
        assert admin.key not in answer["error"]["message"]


@pytest.mark.parametrize("scope", ADMIN_SCOPES)
async def test_scope_opens_its_paths_and_no_others(gateway: GatewayFixture, scope: str) -> None:
    """One key for the exporter, another one for the billing job."""
    admin = AdminClient(gateway)
    status, made = await admin.ask("POST", "/admin/v1/keys", {"scopes": [scope]})
    got = {
        (needed, asked[0], asked[1]): await admin.ask(*asked, key=made["key"])
        for needed, requests in ASKED.items()
        for asked in requests
    }

    assert (status, made["scopes"]) == (201, [scope])
    for (needed, _, path), (status, answer) in got.items():
        if needed == scope:
            assert status in (200, 201), (path, answer)
        else:
            assert (status, answer["error"]["code"]) == (403, "scope_missing"), path


async def test_existing_administrators_have_every_scope(gateway: GatewayFixture) -> None:
    """A key of an earlier version goes on."""
    admin = AdminClient(gateway)
    for requests in ASKED.values():
        for asked in requests:
            status, answer = await admin.ask(*asked)
            assert status in (200, 201), answer
    shown = await admin.ask("GET", "/admin/v1/keys")

    assert shown[1]["keys"][-1]["scopes"] != []
    assert {tuple(one["scopes"]) for one in shown[1]["keys"] if one["tenant"] is None} == {
        ("admin",)
    }


@each_row(
    ("method", "path", "body"),
    [
        ("POST", "/admin/v1/keys", {}),
        ("POST", "/admin/v1/keys", {"scopes": ["tenants", "money"]}),
        ("PATCH", "/admin/v1/keys/{full}", {"label": "x"}),
        ("PATCH", "/admin/v1/keys/{own}", {"scopes": ["tenants", "erase"]}),
        ("PATCH", "/admin/v1/keys/{own}", {"scopes": ["admin"]}),
        ("POST", "/admin/v1/keys/{full}/rotate", {}),
        ("POST", "/admin/v1/keys/{full}/revoke", None),
    ],
)
async def test_administrator_hands_out_no_scope_that_it_lacks(
    gateway: GatewayFixture, method: str, path: str, body: Any
) -> None:
    """Neither by a new key nor by the rotation of another one."""
    admin = AdminClient(gateway)
    limited = create_admin_key(gateway.store, wall_ms, scopes=["tenants", "read"])
    ids = [one[0] for one in gateway.store.query("select key_id from keys order by key_id")][-2:]
    gateway.gateway.context.authenticator.refresh_now()
    asked = path.format(full=ids[0], own=ids[1])
    status, answer = await admin.ask(method, asked, body, key=limited)

    assert (status, answer["error"]["code"]) == (403, "scope_missing")


async def test_rotation_keeps_an_administrators_scopes(gateway: GatewayFixture) -> None:
    """And an administrator may rotate a key with its own scopes."""
    admin = AdminClient(gateway)
    limited = create_admin_key(gateway.store, wall_ms, scopes=["tenants"])
    own = gateway.store.query("select max(key_id) from keys")[0][0]
    gateway.gateway.context.authenticator.refresh_now()
    status, made = await admin.ask("POST", f"/admin/v1/keys/{own}/rotate", {}, key=limited)
    changed = await admin.ask("PATCH", f"/admin/v1/keys/{made['key_id']}", {"scopes": ["read"]})

    assert (status, made["scopes"]) == (201, ["tenants"])
    assert changed[1]["scopes"] == ["read"]
    assert (await admin.ask("GET", "/admin/v1/tenants", key=made["key"]))[0] == 200
    assert (await admin.ask("POST", "/admin/v1/reload", key=made["key"]))[0] == 403
