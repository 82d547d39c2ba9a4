"""Administrators that a proxy names in a header: believed from its address only, and recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from gateway.config import AdminConfig, ConfigError, load_config
from gateway.errors import Refusal
from gateway.http.authentication import TrustedHeader
from tests.tables import each_row
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

NAMED = {"X-Forwarded-User": "alice@example.com"}
ACT = {"X-Trunkline-Request": "1"}


def user_of(
    headers: dict[str, str], remote: str = "10.0.0.7", method: str = "GET", name: str = ""
) -> str | None:
    """Ask what a header names, on a connection from an address."""
    trusted = TrustedHeader(name or "X-Forwarded-User", ("10.0.0.7/32", "fd00::7/128"), ("read",))
    transport = Mock()
    transport.get_extra_info = lambda key, default=None: (remote, 1) if key == "peername" else None
    return trusted.user_of(make_mocked_request(method, "/", headers=headers, transport=transport))


@pytest.mark.parametrize("remote", ["10.0.0.7", "::ffff:10.0.0.7", "fd00::7"])
def test_names_the_user_of_a_trusted_proxy(remote: str) -> None:
    """However the address is written."""
    assert user_of(NAMED, remote) == "alice@example.com"


@each_row("remote", ["10.0.0.8", "127.0.0.1", "::1", ""])
def test_believes_no_other_address(remote: str) -> None:
    """A client that reaches the listener beside the proxy may write what it wants."""
    assert user_of(NAMED, remote) is None


def test_a_key_comes_before_the_header() -> None:
    """A script behind the proxy acts with its key's scopes, not with the user's."""
    assert user_of({**NAMED, "Authorization": "Bearer tl-x"}) is None
    assert user_of({**NAMED, "X-Api-Key": "tl-x"}) is None
    assert user_of({**NAMED, "Authorization": "Basic YTpi"}) == "alice@example.com"
    assert user_of({}) is None


@each_row("user", ["", "  ", "a\tb", "x" * 201])
def test_refuses_a_name_that_is_none(user: str) -> None:
    """An empty header is what a wrongly configured proxy sends for strangers."""
    with pytest.raises(Refusal, match="printable"):
        user_of({"X-Forwarded-User": user})


@each_row("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_change_needs_a_header_that_foreign_pages_cannot_send(method: str) -> None:
    """The browser sends the proxy's cookie with a form of any site."""
    with pytest.raises(Refusal, match="X-Trunkline-Request"):
        user_of(NAMED, method=method)
    assert user_of({**NAMED, **ACT}, method=method) == "alice@example.com"


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ('trusted_header = "X-User"', "trusted from no address"),
        ('trusted_header = "Authorization"\ntrusted_proxies = ["10.0.0.7"]', "proxy alone sets"),
        ('trusted_header = "X User"\ntrusted_proxies = ["10.0.0.7"]', "invalid header"),
        ('trusted_header = "X-User"\ntrusted_proxies = ["0.0.0.0/0"]', "the proxy's own"),
        ('trusted_header = "X-User"\ntrusted_proxies = ["proxy"]', "invalid network 'proxy'"),
        ('trusted_scopes = ["root"]', "trusted_scopes"),
    ],
)
def test_settings_that_would_trust_anyone_are_refused(
    tmp_path: Path, settings: str, wanted: str
) -> None:
    (tmp_path / "t.toml").write_text(f"[admin]\n{settings}\n")

    with pytest.raises(ConfigError, match=wanted):
        load_config(tmp_path / "t.toml", {}, {})


async def ask(gateway: GatewayFixture, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Ask as the proxy on this host does for a page of the dashboard."""
    url, headers = gateway.admin_url + path, {**NAMED, **ACT}
    async with gateway.session.request(method, url, json=body, headers=headers) as response:
        return response.status, await response.json()


async def test_users_act_within_the_scopes_and_are_recorded(
    unopened_gateway: GatewayFixture,
) -> None:
    """The audit log has the user's name; what the scopes lack is refused."""
    admin = AdminConfig(
        trusted_header="X-Forwarded-User",
        trusted_proxies=("127.0.0.1/32",),
        trusted_scopes=("read", "tenants", "erase"),
    )
    gateway = unopened_gateway
    gateway.config = msgspec.structs.replace(gateway.config, admin=admin)
    await gateway.open()
    try:
        _, me = await ask(gateway, "GET", "/admin/v1/me")
        made = await ask(gateway, "POST", "/admin/v1/tenants", {"name": "cid"})
        erased = await ask(gateway, "POST", "/admin/v1/erase", {"tenant": "ada"})
        card = await ask(gateway, "POST", "/admin/v1/rate-cards", {"name": "std", "input": 3})
        key = await ask(gateway, "POST", "/admin/v1/keys", {"scopes": ["money"]})
        _, log = await ask(gateway, "GET", "/admin/v1/audit?actor=trusted_header")
    finally:
        await gateway.close()

    assert (me["actor"], me["actor_id"]) == ("trusted_header", "alice@example.com")
    assert me["scopes"] == ["erase", "read", "tenants"]
    assert (made[0], erased[0]) == (201, 200)
    assert [(one[0], one[1]["error"]["code"]) for one in (card, key)] == [
        (403, "scope_missing")
    ] * 2
    assert {one["action"] for one in log["changes"]} >= {"tenant.create", "cache.erase"}
    assert {one["actor_id"] for one in log["changes"]} == {"alice@example.com"}
    assert {"by_user": "alice@example.com"}.items() <= next(
        line for line in gateway.lines if line["event"] == "tenant_created"
    ).items()


async def test_without_the_setting_the_header_says_nothing(gateway: GatewayFixture) -> None:
    """By default administrators have keys; the public listener never believes it."""
    AdminClient(gateway)

    status, body = await ask(gateway, "GET", "/admin/v1/me")
    public, _, _ = await gateway.ask("/v1/usage", who=None, method="GET", headers=NAMED)

    assert (status, body["error"]["code"], public) == (401, "invalid_api_key", 401)
